"""Ways for a command into the engine's process: the API server's utility call, and a port of its own.

The port is for whoever steers the engine without going through its HTTP server: one ZMQ REP socket per engine
process, on loopback unless told otherwise (``KVPILOT_PORT=tcp://127.0.0.1:7000``; data-parallel engines count up from
there; unset: none). A request is a command's JSON, the reply an outcome's.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from concurrent.futures import Future
from typing import Any

import zmq

from kvpilot.domain import OutcomeStatus
from kvpilot.engine.commands import CommandError, EngineOutcome, RankReport, parse_command
from kvpilot.engine.ranks import Pulse, Rank, Ranks, bound, complaint
from kvpilot.engine.wire import dump

log = logging.getLogger("vllm.kvpilot")

VARIABLE = "KVPILOT_PORT"
WAIT_S = 60.0
"""Longest time a reply is waited for; the command goes on."""
LOOK_S = 0.1
STUCK_S = 2.0
"""With several ranks: how often it is looked whether one has died, and after how long a step of the engine they are
asked how they are."""


def utility(engine: Any, raw: bytes) -> Any:
    """A method for ``EngineCore``: the outcome's JSON, or a future of it."""
    inside = getattr(engine.scheduler, "kvpilot", None)
    if inside is None:
        return dump({"detail": "kvpilot is not active in this engine: see its log"})
    future: Future[bytes] = Future()
    inside.execute(bytes(raw), future.set_result)
    return future.result() if future.done() else future


def endpoint(variable: str, parallel: Any, rank: int | None = None) -> str:
    """Where an engine's scheduler listens, or one of its ranks. Raises ValueError.

    Ports count up: data-parallel engines one after the other, and where a model has several ranks, each behind its
    scheduler. ``parallel``: vLLM's parallel configuration.
    """
    host, _, port = variable.rpartition(":")
    if not host.startswith("tcp://") or not port.isdecimal():
        raise ValueError(f"{VARIABLE} is {variable!r}: it must be like tcp://127.0.0.1:7000")
    each = 1 + (parallel.world_size if parallel.world_size > 1 else 0)
    place = parallel.data_parallel_index * each + (0 if rank is None else 1 + rank)
    return f"{host}:{int(port) + place}"


def open_port(engine: Any) -> None:
    """Listen, where the environment says so. Never raises."""
    variable = os.environ.get(VARIABLE, "")
    if not variable or getattr(engine.scheduler, "kvpilot", None) is None:
        return
    try:
        parallel = engine.vllm_config.parallel_config
        socket = bound(endpoint(variable, parallel))
        port = Port(engine, ranks_of(engine, variable))
    except (ValueError, zmq.ZMQError) as error:
        log.warning("kvpilot has no port of its own: %s", error)
        return
    threading.Thread(target=port.serve, args=(socket,), name="kvpilot-port", daemon=True).start()


def open_rank_port(worker: Any) -> Pulse | None:
    """The same in a worker's process, where the model has several ranks. Never raises."""
    variable = os.environ.get(VARIABLE, "")
    parallel = worker.worker.worker.vllm_config.parallel_config
    if not variable or parallel.world_size == 1:
        return None
    pulse = Pulse(worker.rank)
    try:
        pulse.listen(endpoint(variable, parallel, worker.rank))
    except ValueError:
        return None  # The scheduler says it.
    return pulse


def ranks_of(engine: Any, variable: str) -> Ranks | None:
    """The ranks behind a scheduler; None: there is one, or nobody knows where they are."""
    parallel = engine.vllm_config.parallel_config
    workers = getattr(engine.model_executor, "workers", None)
    if parallel.world_size == 1 or not isinstance(workers, list) or len(workers) != parallel.world_size:
        return None
    return Ranks(
        [Rank(endpoint(variable, parallel, worker.rank), worker.proc.is_alive) for worker in workers]
    )


class Port:
    """Hands commands to the engine's own thread and waits for what becomes of them."""

    def __init__(self, engine: Any, ranks: Ranks | None) -> None:
        self._engine = engine
        self._inside = engine.scheduler.kvpilot
        self._ranks = ranks

    def serve(self, socket: zmq.Socket[bytes]) -> None:
        while True:
            try:
                socket.send(self.ask(socket.recv()))
            except zmq.ZMQError:
                return

    def ask(self, raw: bytes) -> bytes:
        """A command's outcome."""
        from vllm.v1.engine import EngineCoreRequestType

        future: Future[bytes] = Future()
        self._inside.post(raw, future.set_result)
        if (queue := getattr(self._engine, "input_queue", None)) is not None:
            queue.put_nowait((EngineCoreRequestType.WAKEUP, None))
        began = time.monotonic()
        asked = began
        while time.monotonic() - began < WAIT_S:
            try:
                return future.result(LOOK_S if self._ranks is not None else WAIT_S)
            except TimeoutError:
                pass
            now = time.monotonic()
            stuck = now - max(began, self._inside.stepped_at) > STUCK_S and now - asked > STUCK_S
            if self._ranks is not None and (stuck or self._ranks.died()):
                asked, reports = now, self._ranks.ask()
                if reason := complaint(reports):
                    return _stuck(raw, reason, reports)
        return dump({"detail": f"the engine did not answer within {WAIT_S:.0f} s; the command goes on"})


def _stuck(raw: bytes, reason: str, reports: tuple[RankReport, ...]) -> bytes:
    """The outcome of a command that the engine cannot end, as one of its ranks does not go on."""
    try:
        command = parse_command(raw)
    except CommandError as error:
        return dump({"detail": str(error)})
    return dump(
        EngineOutcome(
            kind=command.kind,
            status=OutcomeStatus.FAILED,
            id=command.id,
            reason=f"{reason}; the command goes on if it comes back",
            ranks=reports,
        )
    )
