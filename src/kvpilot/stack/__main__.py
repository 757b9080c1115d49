"""A stack on behalf of another process: ``python -m kvpilot.stack [--serve]``.

Reads the configuration (one line of JSON) from standard input and runs until that closes, so that the stack
never outlives who asked for it. Used by :func:`kvpilot.stack.launch.launch`.
"""

from __future__ import annotations

import sys

from kvpilot.config import ConfigError, parse_config
from kvpilot.stack import StackError
from kvpilot.stack.run import run_stack


def main() -> int:
    try:
        config = parse_config(sys.stdin.readline().encode())
        run_stack(config, embedded="--serve" not in sys.argv, lifeline=lambda: _until_closed())
    except (ConfigError, StackError) as error:
        print(f"kvpilot: {error}", file=sys.stderr)
        return 2
    return 0


def _until_closed() -> None:
    while sys.stdin.read(1):
        pass


if __name__ == "__main__":
    sys.exit(main())
