"""kvpilot's plug-in as the engine's interpreter finds it: a folder for its PYTHONPATH.

The engine lives in an environment of its own, in which nothing of kvpilot is installed. The folder holds a link to
this very package and the entry point that vLLM looks for, and nothing else of kvpilot's environment, so versions of
libraries cannot mix. What the plug-in needs beside it (msgspec, numpy, pyzmq, fastapi) vLLM has.
"""

from __future__ import annotations

from pathlib import Path

import kvpilot

ENTRY_POINT = "kvpilot = kvpilot.engine.plugin:register"


def make_plugin_folder(folder: Path) -> Path:
    """Make ``folder``, or bring it up to date; returns it. Raises OSError."""
    package = Path(kvpilot.__file__).resolve().parent
    link = folder / "kvpilot"
    info = folder / "kvpilot.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    if not (link.is_symlink() and link.resolve() == package):
        link.unlink(missing_ok=True)
        link.symlink_to(package, target_is_directory=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: kvpilot\nVersion: {kvpilot.__version__}\n")
    (info / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{ENTRY_POINT}\n")
    return folder
