"""``python -m kvpilot.coordinator --config FILE``: the coordinator process."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import uvicorn
from fastapi import FastAPI

from kvpilot import heap
from kvpilot.config import Config, ConfigError, is_loopback, parse_config
from kvpilot.coordinator.runtime import Runtime

log = logging.getLogger("kvpilot.coordinator")

NICENESS = 5
"""Mapping and planning happen beside the requests: under load the gateways go first."""


class HttpServer(uvicorn.Server):
    """Leaves signals to :func:`serve`, which also stops everything else."""

    def capture_signals(self) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]
        return contextlib.nullcontext()


async def serve(config: Config) -> int:
    """Runs until SIGTERM or SIGINT. A task that ends by itself ends the process (the supervisor restarts it)."""
    runtime = await Runtime.create(config)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for sig in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(sig, stop.set)
    servers = [_server(runtime.app, config.coordinator.host, config.coordinator.port)]
    if config.coordinator.seed_port:
        servers.append(_server(runtime.seed.app(), config.coordinator.host, config.coordinator.seed_port))
    jobs: list[Callable[[], Awaitable[None]]] = [*(partial(_http, s) for s in servers), *runtime.jobs()]
    tasks = [asyncio.ensure_future(job()) for job in jobs]
    stopping = asyncio.ensure_future(stop.wait())
    with heap.settled():
        done, _ = await asyncio.wait([*tasks, stopping], return_when=asyncio.FIRST_COMPLETED)
    code = 0
    for task in done - {stopping}:
        code = 1
        log.error(
            "a part of the coordinator ended: %s", task.exception() if not task.cancelled() else "cancelled"
        )
    for server in servers:
        server.should_exit = True
    for task in tasks[len(servers) :]:
        task.cancel()
    stopping.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.gather(*tasks, return_exceptions=True)
    await runtime.close()
    return code


def _server(app: FastAPI, host: str, port: int) -> HttpServer:
    return HttpServer(
        uvicorn.Config(
            app,
            host=host,
            port=port,
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=2,
        )
    )


async def _http(server: HttpServer) -> None:
    with contextlib.suppress(asyncio.CancelledError):
        await server.serve()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m kvpilot.coordinator")
    parser.add_argument("--config", required=True, type=Path, help="JSON of the resolved configuration")
    config = parse_config(parser.parse_args().config.read_bytes())
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    if not is_loopback(config.coordinator.host) and not config.coordinator.token:
        raise ConfigError("coordinator.host is not loopback: set coordinator.token")
    with contextlib.suppress(OSError):
        os.nice(NICENESS)
    return asyncio.run(serve(config))


if __name__ == "__main__":
    sys.exit(main())
