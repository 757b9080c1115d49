"""Takes a gateway's events and drops them: ``python -m kvpilot.bench.event_sink CONFIG``. For benchmarks only.

Runs at the coordinator's priority, whose place it takes.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import zmq

from kvpilot import link
from kvpilot.config import parse_config
from kvpilot.coordinator.__main__ import NICENESS


def main() -> None:
    config = parse_config(Path(sys.argv[1]).read_bytes())
    os.nice(NICENESS)
    with zmq.Context() as context, context.socket(zmq.PULL) as socket:
        link.make_runtime_dir(config)
        socket.bind(link.event_endpoint(config))
        while True:
            socket.recv(copy=False)


if __name__ == "__main__":
    main()
