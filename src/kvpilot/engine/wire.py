"""JSON out of the engine. Pure."""

from __future__ import annotations

from typing import Any

import msgspec

dump = msgspec.json.Encoder().encode


def load(raw: bytes) -> Any:
    """Inverse of :data:`dump`, in plain types."""
    return msgspec.json.decode(raw)
