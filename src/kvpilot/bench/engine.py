"""``kvpilot bench engine``: the plug-in in vLLM's real scheduler, without a model: does it hold, what does it cost?

The work is done by ``kvpilot.engine.trial`` in the engine's environment.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console

from kvpilot.bench.lab import BenchError
from kvpilot.config import Config
from kvpilot.stack.engine_env import engine_environment, find_engine_python
from kvpilot.stack.models import ensure_model
from kvpilot.stack.plugin_folder import make_plugin_folder

MODEL = "m4x256"
"""Only its configuration is read."""
TIMEOUT_S = 3600.0


def soak(config: Config, requests: int, seed: int) -> dict[str, Any]:
    """Random requests and commands; see :func:`kvpilot.engine.trial.soak`. Raises BenchError, StackError."""
    return _trial(config, "soak", "--requests", str(requests), "--seed", str(seed))


def cost(config: Config, running: int, steps: int) -> list[dict[str, Any]]:
    """CPU time of steps beside the stock scheduler's, without and with hints. Raises BenchError, StackError."""
    found: list[dict[str, Any]] = _trial(config, "cost", "--running", str(running), "--steps", str(steps))[
        "cost"
    ]
    return found


def print_report(document: dict[str, Any], console: Console) -> None:
    """The document for a person."""
    soaked = document["soak"]
    if soaked is not None:
        console.print(
            f"soak: {soaked['requests']:,} requests in {soaked['steps']:,} steps, {soaked['preempted']:,} "
            f"preemptions, {soaked['aborted']:,} cancelled, {soaked['hits_checked']:,} blocks of hits checked, "
            f"{soaked['slices_loaded']:,} slices prefetched; nothing leaked"
        )
    if (asked := document["commands"]) is not None:
        for way, ms in asked["ms"].items():
            console.print(
                f"a command by the {way}: p50 {ms['p50']:.1f} ms, p90 {ms['p90']:.1f} ms, at most {ms['max']:.1f} ms"
            )
    if (told := document["same_answers"]) is not None:
        console.print(
            f"same answers: {told['requests']} requests of {told['model']}, other tokens in {len(told['differing'])}, "
            f"logprobs differ by at most {told['largest_logprob_difference']:.1e}; done to them: {told['done']}"
        )
    for row in document["cost"]:
        low, high = row["ratio_95"]
        console.print(
            f"a step of {row['running']} requests {'with' if row['hints'] else 'without'} hints: stock "
            f"{row['stock_us']:,.0f} µs, kvpilot {row['kvpilot_us']:,.0f} µs, ratio {row['ratio']:.3f} "
            f"(95 %: {low:.3f}–{high:.3f}), and {row['meanwhile_us']:,.0f} µs while the model runs"
        )


def _trial(config: Config, *arguments: str) -> dict[str, Any]:
    python = find_engine_python(config)
    model = ensure_model(MODEL, python)
    what, *options = arguments
    with tempfile.TemporaryDirectory(prefix="kvpilot-trial-") as folder:
        plugin = make_plugin_folder(Path(folder) / "engine-plugin")
        done = subprocess.run(
            [str(python), "-m", "kvpilot.engine.trial", what, model, *options],
            env={**engine_environment(), "PYTHONPATH": str(plugin)},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    if done.returncode != 0:
        why = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "no reason given")
        raise BenchError(f"the trial of the plug-in failed: {why}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found
