"""Progress on stderr: a live table on a terminal, plain lines elsewhere; and the supervisor's own log."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table

from kvpilot.stack.state import Status

_WORDS = {
    "lmcache-coordinator": "LMCache coordinator",
    "lmcache": "LMCache node",
    "vllm": "vLLM",
    "coordinator": "kvpilot coordinator",
}


class Reporter:
    """Shows a stack coming up and what happens to it later."""

    def __init__(self, log: Path, stream: TextIO | None = None) -> None:
        self._console = Console(file=stream or sys.stderr, emoji=False, highlight=False, soft_wrap=True)
        self._log = log
        self._live: Live | None = None
        self._begun = time.monotonic()
        self._shown: dict[str, str] = {}

    def __enter__(self) -> Reporter:
        self._log.parent.mkdir(parents=True, exist_ok=True)
        self._log.write_text("")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end_live()

    def say(self, text: str) -> None:
        """One line for the user and the log."""
        self.log(text)
        self._console.print(text, markup=False)

    def log(self, text: str) -> None:
        stamp = time.strftime("%Y-%m-%d %H:%M:%S")
        with self._log.open("a") as handle:
            handle.write(f"{stamp} {text}\n")

    def show(self, status: Status) -> None:
        """The processes as they are now."""
        changed = {n: p.state for n, p in status.processes.items() if self._shown.get(n) != p.state}
        self._shown.update(changed)
        for name, state in changed.items():
            took = f" after {status.processes[name].ready_s:.1f} s" if state == "ready" else ""
            self.log(f"{name} {state}{took} (pid {status.processes[name].pid})")
        if status.state != "starting":
            self._end_live()
        elif self._console.is_terminal:
            if self._live is None:
                self._live = Live(console=self._console, transient=True, refresh_per_second=8)
                self._live.start()
            self._live.update(self._table(status))
        else:
            for name, state in changed.items():
                if state in ("starting", "ready"):
                    elapsed = time.monotonic() - self._begun
                    self._console.print(f"{elapsed:6.1f} s  {_words(name)} {state}", markup=False)

    def _table(self, status: Status) -> Table:
        table = Table.grid(padding=(0, 2))
        for name, process in status.processes.items():
            mark = (
                Spinner("dots")
                if process.state == "starting"
                else {"ready": "[green]✓[/]"}.get(process.state, "·")
            )
            note = f"ready in {process.ready_s:.0f} s" if process.state == "ready" else process.state
            if process.state == "starting":
                note = f"starting … {time.time() - process.started:.0f} s"
            table.add_row(mark, _words(name), f"[dim]{note}[/]")
        return table

    def _end_live(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


def _words(name: str) -> str:
    return _WORDS.get(name, name.replace("gateway-", "gateway worker "))


def last_words(log: Path, tail_bytes: int = 65536) -> str:
    """The last line of a log that says why a process ended: an error if there is one, else the last line."""
    try:
        with log.open("rb") as handle:
            handle.seek(max(0, log.stat().st_size - tail_bytes))
            lines = [line.strip() for line in handle.read().decode(errors="replace").splitlines()]
    except OSError:
        return "no log"
    said = [line for line in lines if line and not set(line) <= set("^~-= ")]
    causes = [line for line in said if _names_a_cause(line)]
    return (causes or said or ["it said nothing"])[-1][-300:]


def _names_a_cause(line: str) -> bool:
    # vLLM's parent processes end with a general remark on what their children died of.
    if "See root cause above" in line or "Failed core proc" in line:
        return False
    return any(
        sign in line for sign in ("Error:", "error:", "Exception:", "Errno", "Killed", "No module named")
    )
