"""What commands print: names come from clients and traces, so nothing in them may mean anything to a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


def console(**options: Any) -> Console:
    """A console that prints texts as they are: ``[bold]`` and ``:smile:`` are text."""
    from rich.console import Console

    return Console(markup=False, emoji=False, **options)


def literal(text: object) -> str:
    """``text`` on one line, control characters (escape sequences, say) spelt out."""
    return "".join(
        sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in str(text)
    )
