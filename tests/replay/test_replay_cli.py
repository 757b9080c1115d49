"""What `kvpilot replay` refuses, before it starts anything."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvpilot.cli import app
from kvpilot.replay.run import write_json
from kvpilot.stack import StackError


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--hints", "foo"], ("--hints foo", "none", "lifecycle")),
        (["--mode", "foo"], ("--mode foo", "kvpilot", "passive")),
    ],
)
def test_a_choice_that_there_is_not_names_its_option_and_the_choices(
    arguments: list[str], words: tuple[str, ...]
) -> None:
    done = CliRunner().invoke(app, ["replay", "trace", *arguments])
    assert done.exit_code == 2
    assert all(word in done.stderr for word in words)


def test_results_that_cannot_be_written_name_the_file_and_the_option(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StackError, match=r"file/results\.json .*--json"):
        write_json(tmp_path / "file" / "results.json", {})
