"""A prompt cut into segments, and what can be asked of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvpilot.domain import Segment, SegmentKind, TokenArray

Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class SegmentedPrompt:
    """A prompt cut into segments that tile ``[0, length)``; all numbers are tokens.

    ``method``: ``template`` (exact), ``engine`` (asked from the engine), ``search`` (by the messages' texts),
    ``completion`` (no messages to tell apart) or ``none``. Message ``k`` ends at ``message_ends[k]``, the first
    begins at ``first_message``. ``tool_spans`` has each tool, or nothing when they cannot be told apart.
    ``inexact`` has the messages whose end is not certain (-1: it is not where the first begins), ``reason`` says
    it in words, or why there is nothing.
    """

    segments: tuple[Segment, ...]
    method: str
    length: int
    first_message: int = 0
    message_ends: list[int] = field(default_factory=list)
    tools_span: Span | None = None
    tool_spans: list[Span] = field(default_factory=list)
    inexact: frozenset[int] = frozenset()
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class PreviousMap:
    """The map of an earlier prompt with the same tools, whose first ``messages`` messages the new one has too."""

    prompt: SegmentedPrompt
    tokens: TokenArray
    messages: int


def spans_of_messages(prompt: SegmentedPrompt, start: int, end: int) -> Span | None:
    """Tokens of the messages ``[start, end)``; None when the prompt has none of them or cannot tell exactly."""
    end = min(end, len(prompt.message_ends))
    if not 0 <= start < end or not prompt.inexact.isdisjoint((start - 1, end - 1)):
        return None
    return prompt.message_ends[start - 1] if start else prompt.first_message, prompt.message_ends[end - 1]


def spans_of_tools(prompt: SegmentedPrompt, start: int, end: int) -> Span | None:
    """Tokens of the tools ``[start, end)``: of just these where they can be told apart. Else of all tools for those
    from the first on, whose followers are of no use without them; None for others, who would take the first along."""
    if not prompt.tool_spans:
        return None if start else prompt.tools_span
    spans = prompt.tool_spans[start:end]
    return (spans[0][0], spans[-1][1]) if spans else None


class Label(NamedTuple):
    """What a text is from the label before it up to ``end``."""

    end: int
    kind: SegmentKind
    message: int = -1
    name: str | None = None


def tile(labels: Iterable[Label], start: int) -> list[Segment]:
    """Labels as segments from ``start`` on, without empty ones; parts of one text are joined."""
    segments: list[Segment] = []
    for label in labels:
        if label.end <= start:
            continue
        segment = Segment(label.kind, start, label.end, label.message, label.name)
        last = segments[-1] if segments else None
        if last is not None and label.kind is not SegmentKind.TOOL_CALL and _same(last, segment):
            segments[-1] = _cut(last, last.start, segment.end)
        else:
            segments.append(segment)
        start = label.end
    return segments


def tool_segments(region: Span, tools: Sequence[Span], names: Sequence[str | None]) -> list[Segment]:
    """The tools' region of a prompt: introduction, each tool, and what stands behind them."""
    labels = []
    if tools:
        labels.append(Label(tools[0][0], SegmentKind.TOOLS))
        labels += [
            Label(end, SegmentKind.TOOLS, name=name) for (_, end), name in zip(tools, names, strict=True)
        ]
    labels.append(Label(region[1], SegmentKind.TOOLS))
    return tile(labels, region[0])


def overlay(base: Sequence[Segment], over: Sequence[Segment]) -> list[Segment]:
    """``over`` laid on ``base``, which gives way; both in order."""
    kept = []
    for segment in base:
        start = segment.start
        for top in over:
            if top.end <= start or top.start >= segment.end:
                continue
            if top.start > start:
                kept.append(_cut(segment, start, top.start))
            start = top.end
        if start < segment.end:
            kept.append(_cut(segment, start, segment.end))
    return sorted([*kept, *over], key=lambda segment: segment.start)


def single(kind: SegmentKind, length: int, method: str, reason: str | None) -> SegmentedPrompt:
    """A prompt in one piece."""
    return SegmentedPrompt(tuple(tile([Label(length, kind)], 0)), method, length, reason=reason)


def _same(a: Segment, b: Segment) -> bool:
    return (a.kind, a.message, a.name) == (b.kind, b.message, b.name)


def _cut(segment: Segment, start: int, end: int) -> Segment:
    return Segment(segment.kind, start, end, segment.message, segment.name)
