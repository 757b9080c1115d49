"""The pages in docs/dialects show what is really understood, for every dialect there is."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from kvpilot.hints import BUILT_IN
from tests.hints.conformance.table import MESSAGES, read

FOLDER = Path(__file__).parents[2] / "docs" / "dialects"
PAGES = sorted(FOLDER.glob("*.md"))
EXAMPLES = [
    pytest.param(text, id=f"{page.stem}-{number}")
    for page in PAGES
    for number, text in enumerate(re.findall(r"```json\n(.*?)```", page.read_text(), re.DOTALL))
]


@pytest.mark.parametrize("text", EXAMPLES)
def test_an_example_is_understood_whole(text: str) -> None:
    hints = read({"messages": MESSAGES * 3, **json.loads(text)}, {"x-session-id": "h"})
    assert hints.dropped == ()
    assert hints.session.id is not None


def test_every_dialect_has_a_page() -> None:
    pages = {"agent_hint": "openjiuwen", "kv-envelope": "kv-hints", "engine": "engines", "headers": "engines"}
    for dialect in BUILT_IN:
        assert FOLDER / f"{pages.get(dialect.name, dialect.name.removesuffix('-headers'))}.md" in PAGES


def test_the_table_lists_every_page() -> None:
    linked = re.findall(r"\]\(([a-z0-9-]+\.md)\)", (FOLDER / "README.md").read_text())
    assert sorted(linked) == [page.name for page in PAGES if page.name != "README.md"]
