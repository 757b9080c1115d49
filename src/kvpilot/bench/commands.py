"""How long a control command takes on an engine that has nothing else to do, by the port and by vLLM's own server."""

from __future__ import annotations

import http.client
import itertools
import os
import statistics
import time
import urllib.parse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import zmq

from kvpilot.bench.lab import BenchError
from kvpilot.bench.processes import free_port
from kvpilot.bench.stats import quantile
from kvpilot.config import Config
from kvpilot.engine.commands import PATH, EngineCommand, Kind
from kvpilot.engine.port import VARIABLE
from kvpilot.engine.wire import dump, load
from kvpilot.replay.text import TextMaker
from kvpilot.stack.launch import Endpoints, launch, with_free_ports

SESSION = "bench-commands"
TOKENS = 1024
PAUSE_S = 0.02
"""Between two commands: the engine has gone to sleep again."""
PATIENCE_S = 30
_KINDS = (Kind.STATUS, Kind.RETAIN, Kind.RELEASE, Kind.DEMOTE)


def bench_commands(config: Config, commands: int) -> dict[str, Any]:
    """So many commands each way, about a session that is in the pool; starts a stack. Raises BenchError, StackError."""
    port = free_port()
    with _environment(VARIABLE, f"tcp://127.0.0.1:{port}"):
        settings = with_free_ports(config).with_overrides(engine={"plugin": True, "kv_events": ""})
        with launch(settings) as stack:
            _ask_for_something(stack)
            with _by_port(port) as by_port:
                ways = {"port": by_port, "server": _by_server(stack)}
                took: dict[str, list[float]] = {name: [] for name in ways}
                for _, kind in zip(range(commands), itertools.cycle(_KINDS), strict=False):
                    command = dump(EngineCommand(kind, session=SESSION))
                    for name, send in ways.items():
                        time.sleep(PAUSE_S)
                        began = time.perf_counter()
                        answer = send(command)
                        took[name].append(1000 * (time.perf_counter() - began))
                        _check(kind, answer)
    return {
        "commands": commands,
        "model": config.engine.model,
        "ms": {
            name: {
                "p50": round(statistics.median(values), 2),
                "p90": round(quantile(values, 0.9), 2),
                "max": round(max(values), 2),
            }
            for name, values in took.items()
        },
    }


def _check(kind: Kind, answer: bytes) -> None:
    told = load(answer)
    done = (
        told.get("active") if kind is Kind.STATUS else told.get("status") == "done" and told.get("confirmed")
    )
    if not done:
        raise BenchError(f"{kind} was answered {str(told)[:200]}")


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """For what is started meanwhile."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


@contextmanager
def _by_port(port: int) -> Iterator[Callable[[bytes], bytes]]:
    with zmq.Context() as context, context.socket(zmq.REQ) as socket:
        socket.linger = 0
        socket.connect(f"tcp://127.0.0.1:{port}")

        def send(command: bytes) -> bytes:
            socket.send(command)
            if not socket.poll(1000 * PATIENCE_S):
                raise BenchError(f"the port did not answer in {PATIENCE_S} s")
            return socket.recv()

        yield send


def _by_server(stack: Endpoints) -> Callable[[bytes], bytes]:
    where = urllib.parse.urlsplit(stack.engine_url)
    server = http.client.HTTPConnection(where.hostname or "", where.port, timeout=PATIENCE_S)

    def send(command: bytes) -> bytes:
        server.request("POST", PATH, command, {"content-type": "application/json"})
        return server.getresponse().read()

    return send


def _ask_for_something(stack: Endpoints) -> None:
    """A session with a context in the pool."""
    where = urllib.parse.urlsplit(stack.gateway_url)
    text = TextMaker.load(stack.config.engine.model).text(SESSION, TOKENS)
    body = {"model": stack.config.engine.served_model_name, "prompt": text, "max_tokens": 1}
    gateway = http.client.HTTPConnection(where.hostname or "", where.port, timeout=600)
    headers = {"content-type": "application/json", "X-Session-ID": SESSION}
    gateway.request("POST", "/v1/completions", dump(body), headers)
    reply = gateway.getresponse()
    if reply.status != 200:
        raise BenchError(f"a request was answered {reply.status}: {reply.read()[:200]!r}")
    reply.read()
