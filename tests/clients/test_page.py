"""docs/clients.md shows what really runs."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from kvpilot.stack.launch import Endpoints
from tests.clients.conftest import client_environment

PAGE = Path(__file__).parents[2] / "docs" / "clients.md"
BLOCKS = re.findall(r"## (.+?)\n\n```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


@pytest.mark.engine
@pytest.mark.parametrize("text", [pytest.param(text, id=name) for name, text in BLOCKS])
def test_a_block_runs_as_it_stands(clients_python: Path, stack: Endpoints, text: str, tmp_path: Path) -> None:
    assert "http://127.0.0.1:8000" in text
    text = text.replace("http://127.0.0.1:8000", stack.gateway_url)
    ran = subprocess.run(
        [clients_python, "-c", text],
        env=client_environment(),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert ran.stdout.strip()


def test_every_client_of_the_lock_has_a_block() -> None:
    wanted = (PAGE.parents[1] / "tests" / "clients" / "requirements-clients.in").read_text()
    packages = re.findall(r"^([a-z-]+)==", wanted, re.MULTILINE)
    named = ", ".join(name.lower() for name, _ in BLOCKS)
    assert [package for package in packages if package not in named] == []
