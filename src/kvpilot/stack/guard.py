"""The supervisor's last will: ends its children and removes their shared memory if it is killed hard.

    python -m kvpilot.stack.guard STATE_DIR SUPERVISOR_PID

Its standard input is a pipe from the supervisor. Closing it after writing ``done`` ends the guard; closing
it without that means the supervisor died. A child of its own session, so that Ctrl-C spares it.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from kvpilot.stack.state import clean_leftovers


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if "done" not in sys.stdin.read():
        clean_leftovers(Path(sys.argv[1]), of_supervisor=int(sys.argv[2]))


if __name__ == "__main__":
    main()
