"""Other people's gateways for the comparison, each from PyPI into a virtual environment of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Rival:
    name: str
    requirement: str
    """Pinned, so that published numbers mean something."""


VLLM_ROUTER = Rival("vllm-router", "vllm-router==0.1.17")
LITELLM = Rival("litellm", "litellm[proxy]==1.108.7")
RIVALS = (VLLM_ROUTER, LITELLM)

INSTALL_TIMEOUT_S = 1800


def default_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvpilot" / "bench"


def install(rival: Rival, cache: Path) -> Path:
    """The ``bin`` folder of the rival's environment, made on first use (minutes). Raises RuntimeError."""
    folder = cache / rival.requirement.replace("[", "-").replace("]", "")
    ready = folder / "ready"
    if not ready.exists():
        folder.mkdir(parents=True, exist_ok=True)
        for command in (
            [sys.executable, "-m", "venv", "--clear", str(folder / "venv")],
            [str(folder / "venv" / "bin" / "pip"), "install", "--quiet", rival.requirement],
        ):
            done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S)
            if done.returncode:
                reason = done.stderr.strip().splitlines()[-1:]
                raise RuntimeError(f"{rival.requirement} cannot be installed: {''.join(reason)}")
        ready.touch()
    return folder / "venv" / "bin"


def command(
    rival: Rival, binaries: Path, engine_url: str, port: int, spare_port: int, folder: Path
) -> list[str]:
    """How to start the rival in front of the engine, quiet, with one worker behind it and nothing else on."""
    if rival is VLLM_ROUTER:
        return [
            str(binaries / "vllm-router"),
            *("--host", "127.0.0.1", "--port", str(port), "--worker-urls", engine_url),
            *("--policy", "round_robin", "--log-level", "error", "--prometheus-port", str(spare_port)),
        ]
    model = {
        "model_name": "mock",
        "litellm_params": {"model": "openai/mock", "api_base": f"{engine_url}/v1", "api_key": "none"},
    }
    file = folder / "litellm.yaml"
    settings = {
        "model_list": [model],
        "litellm_settings": {"telemetry": False},
        # Without a key it would not start; with one it would check it in a database for every request.
        "general_settings": {"dangerously_permit_weak_or_unset_master_key": True},
    }
    file.write_text(json.dumps(settings))
    return [str(binaries / "litellm"), "--config", str(file), "--host", "127.0.0.1", "--port", str(port)]
