"""Ways for a command into the engine's process: the API server's utility call, and a port of its own.

The port is for whoever steers the engine without going through its HTTP server: one ZMQ REP socket per engine
process, on loopback unless told otherwise (``KVPILOT_PORT=tcp://127.0.0.1:7000``; data-parallel engines count up from
there; unset: none). A request is a command's JSON, the reply an outcome's.
"""

from __future__ import annotations

import logging
import os
import threading
from concurrent.futures import Future
from typing import Any

import zmq

from kvpilot.engine.wire import dump

log = logging.getLogger("vllm.kvpilot")

VARIABLE = "KVPILOT_PORT"
WAIT_S = 60.0
"""Longest time a reply is waited for; the command goes on."""


def utility(engine: Any, raw: bytes) -> Any:
    """A method for ``EngineCore``: the outcome's JSON, or a future of it."""
    inside = getattr(engine.scheduler, "kvpilot", None)
    if inside is None:
        return dump({"detail": "kvpilot is not active in this engine: see its log"})
    future: Future[bytes] = Future()
    inside.execute(bytes(raw), future.set_result)
    return future.result() if future.done() else future


def endpoint(variable: str, rank: int) -> str:
    """Where the engine of a rank listens: the port counted up by its rank. Raises ValueError."""
    host, _, port = variable.rpartition(":")
    if not host.startswith("tcp://") or not port.isdecimal():
        raise ValueError(f"{VARIABLE} is {variable!r}: it must be like tcp://127.0.0.1:7000")
    return f"{host}:{int(port) + rank}"


def open_port(engine: Any) -> None:
    """Listen, where the environment says so. Never raises."""
    variable = os.environ.get(VARIABLE, "")
    inside = getattr(engine.scheduler, "kvpilot", None)
    if not variable or inside is None:
        return
    try:
        rank = engine.vllm_config.parallel_config.data_parallel_index
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.REP)
        socket.linger = 0
        socket.bind(endpoint(variable, rank))
    except (ValueError, zmq.ZMQError) as error:
        log.warning("kvpilot has no port of its own: %s", error)
        return
    threading.Thread(target=_serve, args=(socket, engine), name="kvpilot-port", daemon=True).start()


def _serve(socket: zmq.Socket[bytes], engine: Any) -> None:
    while True:
        try:
            raw = socket.recv()
            socket.send(_ask(engine, raw))
        except zmq.ZMQError:
            return


def _ask(engine: Any, raw: bytes) -> bytes:
    """Hand a command to the engine's own thread, waking it up, and wait."""
    from vllm.v1.engine import EngineCoreRequestType

    future: Future[bytes] = Future()
    engine.scheduler.kvpilot.post(raw, future.set_result)
    if (queue := getattr(engine, "input_queue", None)) is not None:
        queue.put_nowait((EngineCoreRequestType.WAKEUP, None))
    try:
        return future.result(WAIT_S)
    except TimeoutError:
        return dump({"detail": f"the engine did not answer within {WAIT_S:.0f} s"})
