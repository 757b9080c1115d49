"""The seeds of ``kvpilot bench fuzz``: the table's requests, written by ``tests.hints.conformance.report``."""

from __future__ import annotations

import json
from pathlib import Path

from tests.hints.conformance.rows import ROWS

PATH = Path(__file__).parents[3] / "src" / "kvpilot" / "bench" / "fuzz" / "seeds.jsonl"
LONGEST = 2000
"""Characters; the fuzzer makes requests large by itself."""


def seeds() -> str:
    lines = (json.dumps({"body": row.body or {}, "headers": row.headers or {}}) for row in ROWS)
    return "".join(f"{line}\n" for line in lines if len(line) <= LONGEST)
