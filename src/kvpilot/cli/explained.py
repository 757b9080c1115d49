"""What ``kvpilot explain`` prints of the coordinator's answers."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

Say = Callable[[str], None]

FEATURES = 6
"""So many of the strongest are shown; all are in the JSON."""
_UNITS = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"))


def print_session(answer: dict[str, Any], say: Say) -> None:
    """The answer of ``/explain/sessions/ID``."""
    tools = f" for {', '.join(answer['waiting_for'])}" if answer["waiting_for"] else ""
    since = _span(time.time() - answer["since"])
    say(f"{answer['session']} (tenant {answer['tenant']}): {answer['state']}{tools} since {since}")
    if answer["expected_at"] is not None:
        say(f"announced: next request {_when(answer['expected_at'])}")
    if answer["mode"] != "kvpilot":
        say("passive mode: nothing is decided")
    if not answer["conversations"]:
        say("known by name only: none of its requests was seen")
    for conversation in answer["conversations"]:
        _print_conversation(conversation, say)


def print_chunk(answer: dict[str, Any], say: Say) -> None:
    """The answer of ``/explain/chunks/HASH``."""
    for found in answer["spaces"]:
        salt = f", salt {found['salt']}" if found["salt"] else ""
        say(f"chunk {found['chunk']} (model {found['model']}{salt})")
        say(f"  lies in: {', '.join(found['tiers']) or 'no tier'}")
        if not found["holders"]:
            say("  no live context holds it: it is the first to go when room is made")
            continue
        say(
            f"  chunk {found['position']} of {found['holders']} live contexts; together worth {_rate(found['worth'])}"
        )
        for conversation in found["held_by"]:
            _print_conversation(conversation, say)
        more = found["holders"] - len(found["held_by"])
        if more > 0:
            say(f"  and {more} more")


def _print_conversation(c: dict[str, Any], say: Say) -> None:
    resident = ", ".join(f"{count} in {tier}" for tier, count in c["resident"].items()) or "none in any tier"
    say(f"conversation {c['conversation']}: {c['chunks']} chunks ({resident}; {c['shared_chunks']} shared)")
    if (pool := c.get("in_device_pool")) is not None:
        say(
            f"  in the device pool: {pool['tokens']} tokens; lost to others since its last request: "
            f"{pool['lost_to_others']}"
        )
    if c["kept"] or c["priority"]:
        say(f"  a client wishes it kept: {'yes' if c['kept'] else 'no'}, priority {c['priority']}")
    forecast = c["forecast"]
    if forecast is not None:
        _print_forecast(forecast, say)
    elif c["requests_in_flight"]:
        say("  a request is running")
    else:
        say("  nothing is foreseen of it: it has ended, is suspended, or was not heard of since a restart")
    place = f", {c['place']['rank']}. to go of {c['place']['of']} in host memory" if c["place"] else ""
    say(f"  worth of its room: {_rate(c['worth'])}{place}")
    for step in c["next"]:
        say(f"  next: {step['action']} {step['chunks']} chunks {_when(step['at'])} ({step['reason']})")
    if c["last"] is not None:
        _print_last(c["last"], say)


def _print_forecast(f: dict[str, Any], say: Say) -> None:
    p = f["returns_in_s"]
    low, high = f["interval_80_s"]
    say(f"  waits for: {f['waits_for']}, since {_span(time.time() - f['since'])}")
    say(
        f"  next request: half of such waits end within {_span(p['p50'])}, 80 % in {_span(low)} to {_span(high)}"
    )
    say("  chance of it within " + ", ".join(f"{name}: {chance:.0%}" for name, chance in f["within"].items()))
    for entry in f["features"][:FEATURES]:
        way = "sooner" if entry["effect"] > 0 else "later"
        say(f"    {way:6} {entry['effect']:+.2f} {entry['feature']}")


def _print_last(last: dict[str, Any], say: Say) -> None:
    place = f", {last['place']['rank']}. of {last['place']['of']}" if last["place"] else ""
    say(
        f"  last: {last['action']} {last['chunks']} chunks {_when(last['at'])} ({last['reason']});"
        f" its room was worth {_rate(last['worth'])}{place}"
    )
    if last["instead_of"] is not None:
        say(f"    lost to {last['instead_of']}, worth {_rate(last['instead_of_worth'])}")


def _rate(worth: float) -> str:
    """Returns per second, as one in so much time: that is how long a chunk is held for a hit."""
    return f"a return every {_span(1.0 / worth)}" if worth > 0 else "nothing"


def _when(at: float) -> str:
    ahead = at - time.time()
    return f"in {_span(ahead)}" if ahead > 0 else f"{_span(-ahead)} ago"


def _span(seconds: float) -> str:
    for size, unit in _UNITS:
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.1f} s"
