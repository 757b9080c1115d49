"""What docs/hints.md shows is understood as it says."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvpilot.domain import SignalKind
from kvpilot.hints import HintRequest, read_hints

TEXT = (Path(__file__).parents[2] / "docs" / "hints.md").read_text()
BODIES = re.findall(r"```json\n(.*?)```", TEXT, re.DOTALL)


@pytest.mark.parametrize("body", BODIES)
def test_every_body_is_taken_whole(body: str) -> None:
    raw = body.encode()
    fields: dict[str, Any] = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    hints = read_hints(HintRequest(fields=fields, headers={}, body=raw))
    assert not hints.dropped
    assert hints.session.id == "s1"
    # All but the first, which only says whose request it is, are about KV alone.
    assert hints.manage == bool(hints.commands) == (body is not BODIES[0])


def test_every_signal_is_named() -> None:
    assert len(BODIES) == 5
    assert all(f"`{kind}`" in TEXT for kind in SignalKind)
    (body,) = re.findall(r"-d '(\{.*?\})'", TEXT)
    assert json.loads(body)["kind"] in tuple(SignalKind)
