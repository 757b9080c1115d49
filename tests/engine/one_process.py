"""Scripts that run a real vLLM in one process, with the plug-in, in the engine's environment."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from kvpilot.config import Config
from kvpilot.stack.engine_env import engine_environment, find_engine_python
from kvpilot.stack.models import ensure_model
from kvpilot.stack.plugin_folder import make_plugin_folder


def run_in_process(script: str, config: Config, tmp_path: Path, **environ: str) -> dict[str, Any]:
    """What a script in this folder has seen with the model m4x256."""
    python = find_engine_python(config)
    model = ensure_model("m4x256", python)
    folder = make_plugin_folder(tmp_path / "engine-plugin")
    done = subprocess.run(
        [str(python), str(Path(__file__).with_name(script)), model],
        env={**engine_environment(), "PYTHONPATH": str(folder), "KVPILOT": "1", **environ},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
        cwd=os.fspath(folder),
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found
