"""``python -m tests.hints.conformance.report`` writes docs/conformance.md and the fuzzer's seeds from the table."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.hints.conformance import seeds
from tests.hints.conformance.rows import ROWS
from tests.hints.conformance.table import Row

PATH = Path(__file__).parents[3] / "docs" / "conformance.md"
HEAD = """# Conformance: what is said, what is understood

Generated from `tests/hints/conformance` by `python -m tests.hints.conformance.report`; every row is a test.
Each group names the published format and how it is known: [code] read in a shipped package, [repo docs] the
project's own documentation, [ex] an issue or pull request. Unless shown, a request has four messages; what a row
does not mention is not there in the result.
"""
LONGEST = 300


def report() -> str:
    parts = [HEAD, f"{len(ROWS)} rules.\n"]
    for source, group in itertools.groupby(ROWS, key=lambda row: row.source):
        parts.append(
            f"## {source}\n\n| rule | request | understood |\n|---|---|---|\n" + "".join(map(_line, group))
        )
    return "\n".join(parts)


def _line(row: Row) -> str:
    request = [_code(row.body)] if row.body is not None else []
    request += [f"`{name}: {_short(value)}`" for name, value in (row.headers or {}).items()]
    return f"| {row.rule} | {'<br>'.join(request)} | {_understood(row) or 'nothing'} |\n"


def _understood(row: Row) -> str:
    words = []
    if row.session is not None:
        words.append(f"session `{_short(row.session)}`")
    if row.parent is not None:
        words.append(f"parent `{_short(row.parent)}`")
    words += [f"**{command}**" for command in row.commands[:3]]
    if len(row.commands) > 3:
        words.append(f"… {len(row.commands)} commands")
    words += [f"signal {signal}" for signal in row.signals]
    if row.retention is not None:
        words.append(f"keep {row.retention}")
    words += [f"edit {edit}" for edit in row.edits]
    if row.warm:
        words.append("only warms")
    if row.manage:
        words.append("answered here")
    if row.dropped:
        words.append("dropped: " + ", ".join(f"*{reason}*" for reason in row.dropped))
    return "; ".join(words)


def _code(body: Mapping[str, Any]) -> str:
    text = json.dumps(body, ensure_ascii=False).replace("|", "\\|").replace("`", "'")
    return f"`{_short(text)}`"


def _short(text: str) -> str:
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"


if __name__ == "__main__":
    PATH.write_text(report())
    print(f"{PATH}: {len(ROWS)} rules")
    seeds.PATH.write_text(seeds.seeds())
    print(f"{seeds.PATH}: {len(seeds.seeds().splitlines())} seeds")
