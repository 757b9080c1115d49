"""What is known of a wait at its beginning, as names that effects are learned for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvpilot.domain import ToolFacts

TOOL, PERSON, ANNOUNCED, BROKEN = "tool", "person", "announced", "broken"
"""What is waited for: each is a feature of its waits."""


@dataclass(frozen=True, slots=True)
class Pause:
    """Between a reply and the conversation's next request."""

    session: str
    """A name for the session, so that what is particular to it is learned apart."""
    tools: Sequence[ToolFacts] = ()
    child: bool = False
    """Whether the conversation is a sub-agent's."""
    reply_tokens: int = 0
    last_s: float | None = None
    """How long the pause before took."""
    last_tool: str | None = None
    """The last tool called before this reply, with its program: how far the work has come."""
    turns: int = 0
    """Requests of the conversation so far."""
    run: int = 0
    """Requests since a person was last waited for: how long the work went on by itself."""
    people: int = 0
    """How often a person was waited for before."""
    broken: bool = False
    """Whether the reply broke off (an error, a client that went): nobody is known to read it."""


def pause_features(pause: Pause) -> list[str]:
    """From general to special."""
    names = ["any", "child" if pause.child else "main"]
    if pause.broken:
        return [*names, BROKEN, f"session:{pause.session}:{BROKEN}"]
    if not pause.tools:
        return [*names, *_answered(pause)]
    tool = slowest(pause.tools)
    names += [TOOL, f"tool:{tool.name}", f"session:{pause.session}", f"session:{pause.session}:{tool.name}"]
    if tool.program:
        names += [f"program:{tool.program.split(' ')[0]}", f"line:{tool.program}"]
        names.append(f"session:{pause.session}:line:{tool.program}")
    if len(pause.tools) > 1:
        names += [f"tools:{min(4, len(pause.tools))}", f"tools:{tool.name}"]
    if tool.timeout_s:
        names.append(f"timeout:{_octave(tool.timeout_s)}")
    if tool.background:
        names.append("background")
    names.append(f"reply:{tool.name}:{_octave(pause.reply_tokens)}")
    if pause.last_s is not None:
        names.append(f"tool:last:{_decade(pause.last_s)}")
    return names


def _answered(pause: Pause) -> list[str]:
    """A reply without tool calls: a person reads it, or the work is done."""
    who = "child" if pause.child else "main"
    names = [PERSON, f"person:{who}", f"session:{pause.session}:person"]
    if pause.last_s is not None:
        names.append(f"person:last:{_decade(pause.last_s)}")
    if pause.last_tool is not None:
        names.append(f"person:after:{pause.last_tool}")
    names += [f"person:reply:{_octave(pause.reply_tokens)}", f"person:turns:{_octave(pause.turns)}"]
    names += [f"person:run:{_octave(pause.run)}", f"person:people:{_octave(pause.people)}"]
    return names


def announced_features(session: str, how: str) -> list[str]:
    """Of a return that a hint announced: how punctual such words are. ``how``: the kind of hint."""
    return [ANNOUNCED, f"{ANNOUNCED}:{how}", f"session:{session}:{ANNOUNCED}"]


def kind_of(features: Sequence[str]) -> str:
    """What a wait with these features is for: ``tool``, ``person``, ``announced`` or ``broken``."""
    return next((kind for kind in (ANNOUNCED, TOOL, PERSON) if kind in features), BROKEN)


@dataclass(frozen=True, slots=True)
class Cycle:
    """Between two requests of a conversation: the reply and the pause after it."""

    session: str
    conversation: str
    child: bool = False
    turns: int = 0
    after: ToolFacts | None = None
    """The tool whose result the request brings; None: a person's words."""
    added_tokens: int = 0
    """About how much is new in the prompt."""
    last_s: float | None = None
    """How long the cycle before took."""
    last_reply_tokens: int = 0


def cycle_features(cycle: Cycle) -> list[str]:
    """From general to special."""
    name = cycle.after.name if cycle.after else "person"
    line = (cycle.after.program if cycle.after else None) or name
    names = [
        "any",
        "child" if cycle.child else "main",
        f"turns:{_octave(cycle.turns)}",
        f"after:{name}",
        f"after:line:{line}",
        f"added:{_octave(cycle.added_tokens)}",
        f"reply:{_octave(cycle.last_reply_tokens)}",
        f"session:{cycle.session}",
        f"conversation:{cycle.session}:{cycle.conversation}",
    ]
    if cycle.last_s is not None:
        names.append(f"last:{_octave(cycle.last_s**2)}")
    return names


def slowest(tools: Sequence[ToolFacts]) -> ToolFacts:
    """The one that a reply with several calls most likely waits for: a sub-agent, else a program, else the last."""
    return max(reversed(tools), key=lambda tool: (tool.agent, tool.program is not None))


def _octave(value: float) -> int:
    return int(math.log2(1.0 + max(0.0, value)))


def _decade(seconds: float) -> int:
    return min(5, int(math.log10(max(0.001, seconds)) + 3))
