"""The published client packages, each in a process of the client environment, against the session's stack."""

from __future__ import annotations

import json
import os
import subprocess
import threading
import uuid
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest

from kvpilot.stack.launch import Endpoints
from tests.clients.steps import ANSWER

HERE = Path(__file__).resolve().parent
ENVIRONMENT = HERE.parent.parent / ".venv-clients"
STEP_TIMEOUT_S = 240.0


class Client:
    """A script in the client environment, asked step by step. It runs in ``folder``: packages write logs there."""

    def __init__(self, folder: Path, python: Path, script: str, *arguments: str) -> None:
        self._script = script
        self._process = subprocess.Popen(
            [python, HERE / script, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=folder,
            env=client_environment(),
        )
        self._said: deque[str] = deque(maxlen=40)
        threading.Thread(target=self._listen, args=(self._process.stderr,), daemon=True).start()

    def _listen(self, stream: IO[str]) -> None:
        self._said.extend(stream)

    def ask(self, step: str, **arguments: Any) -> Any:
        """The step's facts; fails with what the script said when there are none."""
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        timer = threading.Timer(STEP_TIMEOUT_S, process.kill)
        timer.start()
        try:
            process.stdin.write(json.dumps({"step": step, **arguments}) + "\n")
            process.stdin.flush()
            # Packages print on their own.
            while (line := process.stdout.readline()) and not line.startswith(ANSWER):
                self._said.append(line)
        except BrokenPipeError:
            line = ""
        finally:
            timer.cancel()
        answer = json.loads(line.removeprefix(ANSWER)) if line else {"error": "the script ended"}
        assert "error" not in answer, f"{self._script}, {step}: {answer['error']}\n{''.join(self._said)}"
        return answer["facts"]

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def client_environment() -> dict[str, str]:
    """Without what would lead the client environment to kvpilot's packages, and without telemetry."""
    unwanted = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    kept = {name: value for name, value in os.environ.items() if name not in unwanted}
    return {
        **kept,
        "OPENAI_AGENTS_DISABLE_TRACING": "1",
        "LANGSMITH_TRACING": "false",
        "NO_PROXY": "127.0.0.1",
    }


@pytest.fixture(scope="session")
def clients_python() -> Path:
    """Interpreter of the client environment; skips without it (``make test`` sets it up and demands it)."""
    named = os.environ.get("KVPILOT_CLIENTS_PYTHON")
    python = Path(named) if named else ENVIRONMENT / "bin" / "python"
    if not python.exists():
        why = f"no client environment at {python}: run `make test`, or set KVPILOT_CLIENTS_PYTHON"
        if os.environ.get("KVPILOT_REQUIRE_CLIENTS"):
            pytest.fail(why)
        pytest.skip(why)
    return python


@pytest.fixture(scope="module")
def client(
    request: pytest.FixtureRequest,
    clients_python: Path,
    stack: Endpoints,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Client]:
    """The script that the test module names in ``SCRIPT``, pointed at the gateway."""
    folder = tmp_path_factory.mktemp("client")
    script = Client(folder, clients_python.absolute(), request.module.SCRIPT, stack.gateway_url, "m16k")
    yield script
    script.close()


@pytest.fixture
def tag() -> str:
    return uuid.uuid4().hex[:8]
