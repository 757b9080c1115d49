"""Running a stack in this process until it is told to stop."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import TextIO

from kvpilot.config import Config
from kvpilot.stack.doctor import cache_layer
from kvpilot.stack.prepare import Prepared, prepare
from kvpilot.stack.report import Reporter
from kvpilot.stack.state import Lock, clean_leftovers, remove_runtime
from kvpilot.stack.supervisor import Supervisor

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

Lifeline = Callable[[], None]
"""Blocks until whoever asked for the stack is gone."""


def run_stack(
    config: Config, *, embedded: bool, stream: TextIO | None = None, lifeline: Lifeline | None = None
) -> None:
    """Start the stack and keep it up until a signal (or the end of ``lifeline``). Raises StackError.

    Whatever happens, nothing is left running and no shared memory of the stack remains.
    """
    lock = Lock(config.state_dir)
    started = False
    for number in STOP_SIGNALS:
        signal.signal(number, _interrupt)
    try:
        with Reporter(config.state_dir / "logs" / "supervisor.log", stream) as reporter:
            ended, removed = clean_leftovers(config.state_dir)
            if ended or removed:
                reporter.say(
                    f"cleaned up after an earlier run: {len(ended)} processes, {len(removed)} segments"
                )
            for log in (config.state_dir / "logs").glob("*.log"):
                if log.name != "supervisor.log":
                    log.unlink()
            prepared = prepare(config, embedded=embedded, say=reporter.say)
            started = True
            if not embedded and (
                missing := [f.detail for f in cache_layer(prepared.config) if f.verdict != "ok"]
            ):
                reporter.say(f"KV is not looked after until LMCache answers: {'; '.join(missing)}")
            try:
                asyncio.run(_run(prepared, reporter, lifeline))
            finally:
                prepared.listener.close()
    finally:
        remove_runtime(config)
        lock.release(unused=not started)


async def _run(prepared: Prepared, reporter: Reporter, lifeline: Lifeline | None) -> None:
    supervisor = Supervisor(prepared, reporter)
    loop = asyncio.get_running_loop()
    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, supervisor.stop)
    if lifeline is not None:
        _watch(lifeline, loop, supervisor)
    await supervisor.run()


def _interrupt(number: int, _frame: FrameType | None) -> None:
    """Until the event loop handles signals: leave, through every ``finally``."""
    raise SystemExit(128 + number)


def _watch(lifeline: Lifeline, loop: asyncio.AbstractEventLoop, supervisor: Supervisor) -> None:
    def wait() -> None:
        lifeline()
        loop.call_soon_threadsafe(supervisor.stop)

    threading.Thread(target=wait, daemon=True, name="lifeline").start()
