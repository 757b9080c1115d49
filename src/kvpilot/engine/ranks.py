"""With several ranks: what each of them has loaded, and whether it answers.

vLLM merges what its workers say before its scheduler hears of it, and waits for all of them. So that a command is
answered also when one of them hangs or has died, and says which: every worker has a thread and a port of its own
(behind the scheduler's, see :mod:`kvpilot.engine.port`) that tells what it is busy with, and what the workers say of
loads is noted rank by rank before it is merged.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq

from kvpilot.engine.commands import RankReport, RankState
from kvpilot.engine.wire import dump

log = logging.getLogger("vllm.kvpilot")

LATE_S = 2.0
"""A rank that is busy for so long when others are done is late."""
PROBE_S = 0.5
"""In so long a rank's thread answers, however busy its model is."""


# ------------------------------------------------------------ in a worker's process


class Pulse:
    """What a worker is busy with."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._since = 0.0

    def during(self, work: Callable[[], Any]) -> Any:
        """Do a piece of work, as busy."""
        self._since = time.monotonic()
        try:
            return work()
        finally:
            self._since = 0.0

    def told(self) -> RankReport:
        since = self._since
        busy_s = round(time.monotonic() - since, 3) if since else 0.0
        return RankReport(self.rank, busy_s=busy_s, pid=os.getpid())

    def listen(self, address: str) -> None:
        """Answer anybody who asks. Never raises."""
        try:
            socket = bound(address)
        except zmq.ZMQError as error:
            log.warning("rank %d has no port: %s", self.rank, error)
            return
        threading.Thread(target=self._serve, args=(socket,), name="kvpilot-rank", daemon=True).start()

    def _serve(self, socket: zmq.Socket[bytes]) -> None:
        while True:
            try:
                socket.recv()
                socket.send(dump(self.told()))
            except zmq.ZMQError:
                return


def bound(address: str) -> zmq.Socket[bytes]:
    """A socket that answers there. Raises ZMQError."""
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.REP)
    socket.linger = 0
    socket.bind(address)
    return socket


# ------------------------------------------------------------ in the scheduler's process


@dataclass(slots=True)
class Rank:
    """``alive``: whether its process is there; None: it is on another machine."""

    address: str
    alive: Callable[[], bool] | None


class Ranks:
    """All ranks of a model."""

    def __init__(self, ranks: Sequence[Rank]) -> None:
        self._ranks = ranks

    def died(self) -> bool:
        return any(rank.alive is not None and not rank.alive() for rank in self._ranks)

    def ask(self, patience_s: float = PROBE_S) -> tuple[RankReport, ...]:
        """What each says of itself, those that do not answer in time included."""
        poller = zmq.Poller()
        sockets: dict[zmq.Socket[bytes], int] = {}
        found: dict[int, RankReport] = {}
        for number, rank in enumerate(self._ranks):
            if rank.alive is not None and not rank.alive():
                found[number] = RankReport(number, RankState.DEAD)
                continue
            socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.REQ)
            socket.linger = 0
            socket.connect(rank.address)
            socket.send(b"{}")
            poller.register(socket, zmq.POLLIN)
            sockets[socket] = number
        until = time.monotonic() + patience_s
        while len(found) < len(self._ranks) and (left := until - time.monotonic()) > 0:
            for socket, _ in poller.poll(int(1000 * left)):
                poller.unregister(socket)
                found[sockets[socket]] = msgspec.json.decode(socket.recv(), type=RankReport)
        for socket in sockets:
            socket.close()
        return judged(
            [found.get(number, RankReport(number, RankState.SILENT)) for number in range(len(self._ranks))]
        )


def judged(reports: Sequence[RankReport]) -> tuple[RankReport, ...]:
    """Those that are busy while others are done are late."""
    done = any(report.state is RankState.OK and not report.busy_s for report in reports)
    return tuple(
        msgspec.structs.replace(report, state=RankState.LATE)
        if done and report.state is RankState.OK and report.busy_s > LATE_S
        else report
        for report in reports
    )


def complaint(reports: Iterable[RankReport]) -> str:
    """Which ranks are not as they should be, in words; empty: all are."""
    words = {
        RankState.DEAD: "has died",
        RankState.SILENT: "does not answer",
        RankState.LATE: "is not done yet",
    }
    return ", ".join(
        f"rank {report.rank} {words[report.state]}" for report in reports if report.state in words
    )


class Arrivals:
    """Which rank has said what of which load, as far as it is not asked for yet."""

    def __init__(self) -> None:
        self.ranks = 1
        self._arrived: dict[str, set[int]] = {}
        self._failed: dict[int, set[int]] = {}

    def heard(self, outputs: Sequence[Any], wanted: str) -> None:
        """What the workers say of one step, by rank. ``wanted``: what names of loads begin with."""
        self.ranks = len(outputs)
        if self.ranks == 1:
            return
        for rank, output in enumerate(outputs):
            told = output.kv_connector_output if output is not None else None
            if not told:
                continue
            for name in told.finished_recving or ():
                if name.startswith(wanted):
                    self._arrived.setdefault(name, set()).add(rank)
            if told.invalid_block_ids:
                self._failed[rank] = set(told.invalid_block_ids)

    def of(self, name: str) -> set[int]:
        """Ranks where a load has arrived."""
        return self._arrived.get(name, set())

    def take(self, name: str, block_ids: set[int]) -> set[int]:
        """Ranks that have loaded all these blocks; it is not asked for again."""
        arrived = self._arrived.pop(name, set())
        failed = {rank for rank, ids in self._failed.items() if ids & block_ids}
        self._failed.clear()
        return arrived - failed


arrivals = Arrivals()
"""Of this process: there is one scheduler in it."""
