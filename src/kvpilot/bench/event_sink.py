"""Takes a gateway's events and drops them: ``python -m kvpilot.bench.event_sink CONFIG``. For benchmarks only.

Runs at the coordinator's priority, whose place it takes.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import uvloop

from kvpilot import link
from kvpilot.config import parse_config
from kvpilot.coordinator.__main__ import NICENESS
from kvpilot.event_wire import EventReceiver


def main() -> None:
    config = parse_config(Path(sys.argv[1]).read_bytes())
    os.nice(NICENESS)
    link.make_runtime_dir(config)
    uvloop.run(_take(link.event_socket(config)))


async def _take(path: Path) -> None:
    await EventReceiver(path, lambda frame: None).start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    main()
