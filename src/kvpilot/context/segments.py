"""From a chat request and the engine's own prompt tokens to segments with exact token spans."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from kvpilot.context.align import (
    Finder,
    Layout,
    TemplateAlignment,
    common_length,
    inserted_span,
    search_layout,
)
from kvpilot.context.engine_render import EngineRenderer, EngineRenderError, TokenLayout
from kvpilot.context.pieces import Piece, pieces_of, role_kind, tool_names
from kvpilot.context.render import (
    ChatTemplate,
    RenderError,
    model_folder,
    prepare_messages,
    prepare_tools,
    template_arguments,
)
from kvpilot.context.segmented import (
    Label,
    PreviousMap,
    SegmentedPrompt,
    Span,
    overlay,
    single,
    spans_of_messages,
    spans_of_tools,
    tile,
    tool_segments,
)
from kvpilot.context.vocabulary import TokenText, Vocabulary, VocabularyError
from kvpilot.domain import Segment, SegmentKind, TokenArray

__all__ = ["PreviousMap", "SegmentedPrompt", "Segmenter", "spans_of_messages", "spans_of_tools"]

log = logging.getLogger(__name__)

JsonObject = Mapping[str, Any]


class Segmenter:
    """Cuts prompts of one model into segments, with what there is of template, vocabulary and engine.

    Nothing here raises for a strange request: the result then is one segment and a reason.
    """

    def __init__(
        self,
        template: ChatTemplate | None,
        vocabulary: Vocabulary | None,
        engine: EngineRenderer | None = None,
    ) -> None:
        self._template = template
        self._vocabulary = vocabulary
        self._engine = engine

    @classmethod
    def for_model(cls, model: str, engine: EngineRenderer | None = None) -> Segmenter:
        """With the files of ``model``, a folder or a name in the Hugging Face cache, as far as there are any."""
        template: ChatTemplate | None = None
        vocabulary: Vocabulary | None = None
        folder = model_folder(model)
        try:
            if folder is None:
                raise VocabularyError(f"no tokenizer files of {model} on this machine")
            vocabulary = Vocabulary.load(folder / "tokenizer.json")
            template = ChatTemplate.load(folder)
        except (VocabularyError, RenderError) as error:
            log.warning("token spans of messages will be less exact: %s", error)
        return cls(template, vocabulary, engine)

    async def segment(
        self, body: JsonObject, prompt_tokens: TokenArray, *, previous: PreviousMap | None = None
    ) -> SegmentedPrompt:
        """Segments of ``prompt_tokens``, the engine's tokens of the request ``body`` (chat or completion).

        With ``previous`` only what lies behind the messages in common is aligned anew.
        """
        length = len(prompt_tokens)
        if not body.get("messages"):
            return single(SegmentKind.USER, length, "completion", None)
        reason = "the messages are not in the prompt's text"
        try:
            texts = await asyncio.to_thread(self._texts, body, prompt_tokens)
            done: SegmentedPrompt | None = None
            if texts is not None:
                done = await asyncio.to_thread(self._rendered, body, prompt_tokens, texts, previous)
            if done is None and self._engine is not None:
                try:
                    done = await _by_engine(self._engine, body, prompt_tokens, texts, previous)
                except EngineRenderError as error:
                    reason = str(error)
            if done is None and texts is not None:
                done = await asyncio.to_thread(_by_search, body, texts)
        except Exception as error:  # a client's odd JSON must not end more than its own map
            log.exception("a prompt could not be segmented")
            return single(SegmentKind.TEMPLATE, length, "none", f"{type(error).__name__}: {error}")
        return done or single(SegmentKind.TEMPLATE, length, "none", reason)

    def reply(self, prompt: SegmentedPrompt, message: JsonObject, output_tokens: TokenArray) -> list[Segment]:
        """Segments of a reply, with spans that follow the prompt's. ``message``: the reply as a message."""
        index = len(prompt.message_ends)
        message = {**message, "role": "assistant"}
        pieces = pieces_of(message, {})
        try:
            if self._vocabulary is None:
                raise VocabularyError("no vocabulary")
            text = self._vocabulary.text(output_tokens)
            finder = Finder(text, self._vocabulary.normalize)
            labels = _in_tokens(text, _message_labels(finder, message, pieces, index, (0, len(text.data))))
        except VocabularyError:
            labels = [Label(len(output_tokens), _only_kind(message, pieces), index)]
        return tile([label._replace(end=prompt.length + label.end) for label in labels], prompt.length)

    def _texts(self, body: JsonObject, tokens: TokenArray) -> _Texts | None:
        """None when the tokens' text is not known."""
        if self._vocabulary is None:
            return None
        try:
            text = self._vocabulary.text(tokens)
        except VocabularyError:
            return None
        names = tool_names(body["messages"])
        pieces = [pieces_of(message, names) for message in body["messages"]]
        return _Texts(text, Finder(text, self._vocabulary.normalize), pieces)

    def _rendered(
        self, body: JsonObject, tokens: TokenArray, texts: _Texts, previous: PreviousMap | None
    ) -> SegmentedPrompt | None:
        kept = _kept(previous, "template", tokens)
        layout = self._by_template(body, texts.finder, texts.pieces, [texts.offset(end) for end in kept])
        if layout is None or len(layout.inexact) == len(body["messages"]):
            return None
        return _assemble("template", body, texts, layout, previous if kept else None, kept)

    def _by_template(
        self,
        body: JsonObject,
        finder: Finder,
        pieces: Sequence[Sequence[Piece]],
        known: Sequence[int],
    ) -> Layout | None:
        """Layout by rendering; None when the template does not give the engine's text."""
        template, vocabulary = self._template, self._vocabulary
        if template is None or vocabulary is None or body.get("chat_template"):
            return None
        arguments = template_arguments(body)
        continues = bool(body.get("continue_final_message"))
        generation = bool(body.get("add_generation_prompt", True)) and not continues
        tools = prepare_tools(_tools(body))
        for parts in (False, True):
            messages = prepare_messages(body["messages"], parts=parts)

            def render(some: Sequence[JsonObject], with_tools: bool, last: bool = False) -> bytes:
                return vocabulary.normalize(
                    template.render(
                        some, tools if with_tools else None, add_generation_prompt=last, kwargs=arguments
                    )
                )

            try:
                whole = render(messages, True, generation)
            except RenderError:
                continue
            if not (whole.startswith(finder.data) if continues else whole == finder.data):
                continue
            alignment = TemplateAlignment(finder, render, messages, pieces)
            layout = Layout()
            layout.ends, layout.inexact = alignment.ends(known)
            if not known:
                layout.first = alignment.first(layout.ends[0])
                if tools:
                    _locate_tools(
                        layout,
                        finder,
                        (_tools(body), tools),
                        lambda: render(messages, False, generation),  # noqa: B023
                    )
            return layout
        return None


@dataclass(frozen=True, slots=True)
class _Texts:
    """A prompt's text, and what its messages may show up as in it."""

    text: TokenText
    finder: Finder
    pieces: Sequence[Sequence[Piece]]

    def offset(self, tokens: int) -> int:
        """Bytes of the first ``tokens`` tokens."""
        return int(self.text.ends[tokens - 1]) if tokens else 0


def _by_search(body: JsonObject, texts: _Texts) -> SegmentedPrompt | None:
    """By the messages' texts alone; None when the prompt has none of them."""
    layout = search_layout(texts.finder, texts.pieces, _tools(body))
    return _assemble("search", body, texts, layout, None, []) if layout else None


async def _by_engine(
    engine: EngineRenderer,
    body: JsonObject,
    tokens: TokenArray,
    texts: _Texts | None,
    previous: PreviousMap | None,
) -> SegmentedPrompt:
    """By asking the engine: message ends are exact. Without ``texts`` what a message consists of is not told
    apart. Raises EngineRenderError."""
    kept = _kept(previous, "engine", tokens)
    found = await engine.layout(body, tokens, kept)
    if kept and previous:
        found.inexact.update(number for number in previous.prompt.inexact if number < len(kept))
        found = replace(found, tools=previous.prompt.tools_span, first=previous.prompt.first_message)
    return await asyncio.to_thread(_asked, body, tokens, texts, found)


def _asked(body: JsonObject, tokens: TokenArray, texts: _Texts | None, found: TokenLayout) -> SegmentedPrompt:
    messages: Sequence[JsonObject] = body["messages"]
    ends, inexact = list(found.ends), set(found.inexact)
    searched = search_layout(texts.finder, texts.pieces, _tools(body)) if texts and inexact else None
    if texts and searched:
        _fill_in(ends, inexact, searched, texts.text)
    labels = [Label(found.first, SegmentKind.TEMPLATE)]
    names = tool_names(messages)
    for index, (start, end) in enumerate(pairwise([found.first, *ends])):
        if texts is None:
            pieces = pieces_of(messages[index], names)
            called = {piece.name for piece in pieces}
            name = called.pop() if len(called) == 1 else None
            labels.append(Label(end, _only_kind(messages[index], pieces), index, name))
            continue
        span = texts.offset(start), texts.offset(end)
        told = _message_labels(texts.finder, messages[index], texts.pieces[index], index, span)
        labels += [*_in_tokens(texts.text, told[:-1]), told[-1]._replace(end=end)]
    segments = tile([*labels, Label(len(tokens), SegmentKind.TEMPLATE)], 0)
    tools, tool_spans = found.tools, _each_tool(body, texts)
    if tool_spans:
        inside = (tool_spans[0][0], tool_spans[-1][1])
        tools = tools or inside
        tool_spans = tool_spans if tools[0] <= inside[0] and inside[1] <= tools[1] else []
    if tools:
        segments = overlay(
            segments, tool_segments(tools, tool_spans, _tool_names(body) if tool_spans else [])
        )
    return SegmentedPrompt(
        tuple(segments),
        "engine",
        len(tokens),
        first_message=found.first,
        message_ends=ends,
        tools_span=tools,
        tool_spans=tool_spans,
        inexact=frozenset(inexact),
        reason=_inexact(inexact),
    )


def _each_tool(body: JsonObject, texts: _Texts | None) -> list[Span]:
    if texts is None:
        return []
    found = texts.finder.tools(_tools(body), 0, len(texts.text.data))
    return [_span_in_tokens(texts.text, span) for span in found]


def _fill_in(ends: list[int], inexact: set[int], searched: Layout, text: TokenText) -> None:
    """Ends that the engine left open, from a search where that is certain and agrees with the ends around."""
    for number in sorted(inexact - searched.inexact):
        end = text.tokens_before(searched.ends[number])
        after = next((ends[n] for n in range(number + 1, len(ends)) if n not in inexact), len(text.ends))
        if (ends[number - 1] if number else 0) <= end <= after:
            ends[number] = end
            inexact.discard(number)
    for number in range(1, len(ends)):
        ends[number] = max(ends[number], ends[number - 1])


def _kept(previous: PreviousMap | None, method: str, tokens: TokenArray) -> list[int]:
    """Message ends of the previous map that still hold: made in the same way, before the first other token."""
    if previous is None or previous.prompt.method != method:
        return []
    shared = min(len(tokens), len(previous.tokens))
    differs = np.flatnonzero(previous.tokens[:shared] != tokens[:shared])
    shared = int(differs[0]) if len(differs) else shared
    ends = [end for end in previous.prompt.message_ends[: previous.messages] if end <= shared]
    while len(ends) - 1 in previous.prompt.inexact and ends:  # an end that was not told in time, say
        ends.pop()
    tools = previous.prompt.tools_span
    return [] if tools and ends and tools[1] > ends[-1] else ends


def _locate_tools(
    layout: Layout,
    finder: Finder,
    shapes: Sequence[Sequence[JsonObject]],
    without_tools: Callable[[], bytes],
) -> None:
    """The tools' part of a rendering: what goes when they are left out, else from the first to the last."""
    for tools in shapes:
        layout.per_tool = layout.per_tool or finder.tools(tools, 0, len(finder.data))
    try:
        layout.tools = inserted_span(finder.data, without_tools(), finder.special)
    except RenderError:
        layout.tools = None
    if not layout.per_tool:
        return
    first, last = layout.per_tool[0][0], layout.per_tool[-1][1]
    if layout.tools is None:
        layout.tools = (first, last)
    elif first < layout.tools[0] or layout.tools[1] < last:
        layout.per_tool = []


def _assemble(
    method: str,
    body: JsonObject,
    texts: _Texts,
    layout: Layout,
    previous: PreviousMap | None,
    kept: Sequence[int],
) -> SegmentedPrompt:
    """A layout in bytes as segments in tokens, behind what is ``kept`` of the previous map."""
    messages: Sequence[JsonObject] = body["messages"]
    text, inexact = texts.text, set(layout.inexact)
    labels = [] if kept else [Label(layout.first, SegmentKind.TEMPLATE)]
    for index in range(len(kept), len(messages)):
        labels += _message_labels(
            texts.finder, messages[index], texts.pieces[index], index, layout.span(index)
        )
    labels.append(Label(len(text.data), SegmentKind.TEMPLATE))
    segments = tile(_in_tokens(text, labels), kept[-1] if kept else 0)
    if previous is not None:
        old = previous.prompt
        segments = [segment for segment in old.segments if segment.end <= kept[-1]] + segments
        first, tools, tool_spans = old.first_message, old.tools_span, old.tool_spans
        inexact.update(number for number in old.inexact if number < len(kept))
    else:
        first = text.tokens_before(layout.first)
        tools = _span_in_tokens(text, layout.tools) if layout.tools else None
        tool_spans = [_span_in_tokens(text, span) for span in layout.per_tool]
        if tools:
            names = _tool_names(body) if tool_spans else []
            segments = overlay(segments, tool_segments(tools, tool_spans, names))
    return SegmentedPrompt(
        tuple(segments),
        method,
        len(text.ends),
        first_message=first,
        message_ends=[*kept, *(text.tokens_before(end) for end in layout.ends[len(kept) :])],
        tools_span=tools,
        tool_spans=tool_spans,
        inexact=frozenset(inexact),
        reason=_inexact(inexact),
    )


def _message_labels(
    finder: Finder, message: JsonObject, pieces: Sequence[Piece], index: int, span: Span
) -> list[Label]:
    """Labels of a message in ``span``. Template text goes to the piece behind it, at the end to the last one."""
    found = finder.pieces(pieces, *span)
    if not found:
        return [Label(span[1], role_kind(message), index)]
    labels = [Label(place[1], piece.kind, index, piece.name) for piece, place in found]
    labels[-1] = labels[-1]._replace(end=span[1])
    calls = [number for number, label in enumerate(labels) if label.kind is SegmentKind.TOOL_CALL]
    for before, number in pairwise(calls):
        # Between two calls lies the close of one and the opening of the next, which is that of the first call.
        first, start = calls[0], found[number][1][0]
        opening = finder.data[labels[first - 1].end if first else span[0] : found[first][1][0]]
        glue = finder.data[found[before][1][1] : start]
        labels[before] = labels[before]._replace(end=start - common_length(glue[::-1], opening[::-1]))
    return labels


def _only_kind(message: JsonObject, pieces: Sequence[Piece]) -> SegmentKind:
    """The kind of a message that cannot be cut into its pieces."""
    kinds = {piece.kind for piece in pieces}
    return kinds.pop() if len(kinds) == 1 else role_kind(message)


def _in_tokens(text: TokenText, labels: Sequence[Label]) -> list[Label]:
    return [label._replace(end=text.tokens_before(label.end)) for label in labels]


def _span_in_tokens(text: TokenText, span: Span) -> Span:
    return text.tokens_before(span[0]), text.tokens_before(span[1])


def _tool_names(body: JsonObject) -> list[str]:
    return [str((tool.get("function") or tool).get("name")) for tool in _tools(body)]


def _tools(body: JsonObject) -> Sequence[JsonObject]:
    return body.get("tools") or ()


def _inexact(messages: Collection[int]) -> str | None:
    count = sum(number >= 0 for number in messages)
    return f"{count} messages do not end exactly where the map says" if count else None
