"""Every rule of the table holds, and the report shows the table."""

from __future__ import annotations

import pytest

from tests.hints.conformance.report import PATH, report
from tests.hints.conformance.rows import ROWS
from tests.hints.conformance.table import Row, in_words


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.source}: {row.rule}")
def test_rule(row: Row) -> None:
    hints = row.result()
    assert in_words(hints) == row.expected(), hints.dropped
    assert len(hints.dropped) == len(row.dropped), hints.dropped
    for text in row.dropped:
        assert any(text in reason for reason in hints.dropped), hints.dropped


def test_the_table_is_large_and_without_repetitions() -> None:
    assert len(ROWS) >= 150
    assert len({(row.source, row.rule) for row in ROWS}) == len(ROWS)


def test_the_report_is_up_to_date() -> None:
    assert PATH.read_text() == report(), "run: python -m tests.hints.conformance.report"
