"""One gateway worker: ``python -m kvpilot.gateway --config FILE [--fd N]``.

``FILE`` is JSON as :func:`kvpilot.config.dump_config` writes it. With ``--fd`` the worker serves a listening
socket it inherited, so that connections wait in its backlog while a killed worker is replaced; several workers
may share one. SIGTERM: no new connections, requests in flight get 5 s, exit code 0.
"""

from __future__ import annotations

import argparse
import logging
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import uvicorn

from kvpilot import heap
from kvpilot.config import Config, parse_config
from kvpilot.gateway.app import Gateway
from kvpilot.gateway.http_client import READ_BYTES
from kvpilot.gateway.protocol import ServerConnection

GRACE_S = 5


class Server(uvicorn.Server):
    """uvicorn that ends with exit code 0 on SIGTERM and SIGINT instead of raising the signal again."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self.handle_exit)
        yield


def serve(config: Config, listener: socket.socket | None = None) -> None:
    """Serve until told to stop. Raises OSError when the address cannot be bound."""
    listener = listener or bind(config.gateway.host, config.gateway.port)
    settings = uvicorn.Config(
        Gateway(config),
        http=partial(ServerConnection, memoryview(bytearray(READ_BYTES))),  # type: ignore[arg-type]
        loop="uvloop",
        ws="none",
        lifespan="on",
        interface="asgi3",
        access_log=False,
        log_config=None,
        server_header=False,
        date_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=GRACE_S,
        timeout_keep_alive=65,
    )
    with heap.settled():
        Server(settings).run(sockets=[listener])


def bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host.strip("[]"), port))
    return listener


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m kvpilot.gateway")
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--fd", type=int, help="inherited listening socket")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    config = parse_config(options.config.read_bytes())
    try:
        serve(config, socket.socket(fileno=options.fd) if options.fd is not None else None)
    except OSError as error:
        address = f"{config.gateway.host}:{config.gateway.port}"
        print(f"gateway: cannot listen on {address}: {error.strerror}; set gateway.port", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
