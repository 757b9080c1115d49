"""Streams cut anywhere come out the same."""

from __future__ import annotations

import json
import time
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from kvpilot.gateway.reply import read_reply
from kvpilot.gateway.request import TOKEN_IDS, USAGE
from kvpilot.gateway.stream import EventSplitter, StreamReader, join_deltas
from tests.gateway.conftest import stream_events

ASKED = stream_events({"return_token_ids": True, "stream_options": {"include_usage": True}})
PLAIN = stream_events({})


def pass_through(data: bytes, cuts: list[int], added: frozenset[str]) -> bytes:
    reader = StreamReader(added)
    edges = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    pieces = [data[start:end] for start, end in pairwise(edges)]
    return b"".join([*(reader.feed(piece) for piece in pieces), reader.close()])


cuts = st.lists(st.integers(min_value=0, max_value=10**6), max_size=30)


@given(cuts, st.sampled_from([b"\n", b"\r\n"]), st.booleans())
def test_only_what_was_asked_for_remains(cuts: list[int], newline: bytes, comments: bool) -> None:
    def wire(events: list[bytes]) -> bytes:
        between = b": keep-alive\n\n" if comments else b""
        return between.join(events).replace(b"\n", newline)

    added = frozenset((TOKEN_IDS, USAGE))
    assert json_events(pass_through(wire(ASKED), cuts, added)) == json_events(wire(PLAIN))


@given(cuts, st.booleans())
def test_the_last_chunk_carries_the_chunk_hashes_of_all_tokens(cuts: list[int], usage_too: bool) -> None:
    data = b"".join(stream_events({"return_token_ids": True, "stream_options": {"include_usage": True}}))
    added = frozenset((TOKEN_IDS,) if usage_too else (TOKEN_IDS, USAGE))
    seen: list[bytes] = []

    def hashes() -> list[str]:
        seen.append(b"".join(reader.facts.output_ids))
        return ["ab", "cd"]

    reader = StreamReader(added, hashes)
    edges = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    out = b"".join([*(reader.feed(data[a:b]) for a, b in pairwise(edges)), reader.close()])
    reader.finish()
    assert seen == [b"".join(reader.facts.output_ids)], "once, and when all ids are known"
    carried = [json.loads(event[6:]) for event in json_events(out) if b"chunk_hashes" in event]
    assert [chunk.pop("kv_transfer_params") for chunk in carried] == [{"chunk_hashes": ["ab", "cd"]}]
    assert carried[0]["choices"][0]["finish_reason"]
    if not usage_too:
        plain = [
            json.loads(event[6:]) for event in json_events(b"".join(PLAIN)) if b'finish_reason":"' in event
        ]
        assert carried == plain, "nothing else is changed"


def json_events(data: bytes) -> list[bytes]:
    return [line for line in data.splitlines() if line.startswith(b"data:")]


@given(st.binary(max_size=300) | st.text(alphabet='data: {}[]"\r\n,:1', max_size=200).map(str.encode), cuts)
def test_what_is_no_chunk_passes_byte_for_byte(data: bytes, cuts: list[int]) -> None:
    assert pass_through(data, cuts, frozenset((TOKEN_IDS,))) == data


@given(cuts)
def test_a_stream_nothing_was_added_to_passes_byte_for_byte(cuts: list[int]) -> None:
    assert pass_through(b"".join(ASKED), cuts, frozenset()) == b"".join(ASKED)


@given(
    st.lists(st.sampled_from([b"data: x", b"\n", b"\n\n\n", b"\r\n", b"\r", *ASKED[1:3]]), max_size=12), cuts
)
def test_odd_line_ends_pass_byte_for_byte(pieces: list[bytes], cuts: list[int]) -> None:
    data = b"".join(pieces)
    for where in (cuts, []):
        assert pass_through(data, where, frozenset()) == data
    assert pass_through(b'data: {"id":1}\n\n\n', [], frozenset()) == b'data: {"id":1}\n\n\n'


def test_events_are_cut_at_their_blank_lines_wherever_they_arrive_cut() -> None:
    for newline in (b"\n", b"\r\n", b"\r"):
        events = [event.replace(b"\n", newline) for event in (b"data: a\ndata: b\n\n", b": c\n\n", b"d\n\n")]
        data = b"".join(events) + b"z"
        for size in range(1, len(data) + 1):
            splitter = EventSplitter()
            parts = [data[at : at + size] for at in range(0, len(data), size)]
            assert [event for part in parts for event in splitter.feed(part)] == events
            assert splitter.rest() == b"z"


def test_an_event_of_many_lines_costs_what_its_bytes_cost() -> None:
    splitter, began = EventSplitter(), time.process_time()
    for _ in range(80_000):
        assert splitter.feed(b"data: line of a long event\n") == []
    (event,) = splitter.feed(b"\n")
    assert len(event) == 80_000 * 27 + 1
    assert time.process_time() - began < 3, "each line has all that came before it read again"


def test_what_no_message_can_be_made_of_is_no_message() -> None:
    reader = StreamReader(frozenset())
    sent = b'data: {"id":"c","choices":[{"index":0,"text":"\xff"}]}\n\n'
    assert reader.feed(sent) + reader.close() == sent
    reader.finish()
    assert reader.facts.message == b""


def test_lone_carriage_returns_end_events_too() -> None:
    data = b"".join(ASKED).replace(b"\n", b"\r")
    expected = b"".join(PLAIN).replace(b"\n", b"\r")
    assert pass_through(data, list(range(0, len(data), 7)), frozenset((TOKEN_IDS, USAGE))) == expected


def test_a_message_is_put_together_from_its_deltas() -> None:
    def call(index: int, **more: object) -> dict[str, object]:
        return {"tool_calls": [{"index": index, **more}]}

    deltas: list[dict[str, object]] = [
        {"role": "assistant", "content": ""},
        {"reasoning": "let me "},
        {"reasoning": "see"},
        {"content": "I'll "},
        {"content": "look"},
        call(0, id="c0", type="function", function={"name": "ls", "arguments": ""}),
        call(0, function={"arguments": '{"pa'}),
        call(1, id="c1", type="function", function={"name": "cat", "arguments": "{}"}),
        call(0, function={"arguments": 'th":1}'}),
        {},
    ]
    assert join_deltas([json.dumps(delta).encode() for delta in deltas]) == {
        "role": "assistant",
        "content": "I'll look",
        "reasoning": "let me see",
        "tool_calls": [
            {"id": "c0", "type": "function", "function": {"name": "ls", "arguments": '{"path":1}'}},
            {"id": "c1", "type": "function", "function": {"name": "cat", "arguments": "{}"}},
        ],
    }


@given(
    st.lists(st.text(), min_size=1),
    st.sampled_from([{}, {"content": ""}, {"content": None}, {"refusal": "no"}]),
)
def test_a_text_of_many_pieces_is_put_together_exactly(
    pieces: list[str], last: dict[str, str | None]
) -> None:
    deltas = [{"role": "assistant", "content": ""}, *({"content": piece} for piece in pieces), last]
    reader = StreamReader(frozenset({TOKEN_IDS}))
    for delta in deltas:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None, "token_ids": [1]}
        chunk = json.dumps({"id": "c", "choices": [choice]}, separators=(",", ":"))
        reader.feed(f"data: {chunk}\n\n".encode())
    refusal = {"refusal": "no"} if "refusal" in last else {}
    assert json.loads(reader.message()) == {"role": "assistant", "content": "".join(pieces), **refusal}


def test_completions_stream_their_text() -> None:
    reader = StreamReader(frozenset())
    for text in ("one", " \\n", "two"):
        reader.feed(b'data: {"choices":[{"index":0,"text":"%b","token_ids":[1]}]}\n\n' % text.encode())
    assert json.loads(reader.message()) == {"role": "assistant", "content": "one \ntwo"}
    assert reader.facts.output_ids == [b"[1]"] * 3


json_ids = st.lists(st.integers(0, 2**32 - 1), max_size=20)


@given(json_ids, json_ids, st.booleans(), st.text(max_size=20))
def test_ids_come_out_of_any_layout(prompt: list[int], output: list[int], compact: bool, text: str) -> None:
    content = text + ' "prompt_token_ids":[1,2] "token_ids":[3]'
    reply = {
        "choices": [{"index": 0, "message": {"content": content}, "token_ids": output}],
        "extra": {"token_ids": [4]} if len(text) % 2 else None,
        "prompt_token_ids": prompt,
    }
    separators = (",", ":") if compact else None
    read = read_reply(json.dumps(reply, separators=separators).encode())
    assert read
    assert (json.loads(read.prompt_ids), json.loads(read.output_ids)) == (prompt, output)
    expected = {**reply, "prompt_token_ids": None}
    expected["choices"] = [{**reply["choices"][0], "token_ids": None}]  # type: ignore[index, dict-item]
    assert json.loads(read.without_ids) == expected


deltas = st.sampled_from(
    [
        {"content": "a"},
        {"content": ' "token_ids":[1,2] "delta":{} \n\n'},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"token_ids":[3]}'}}]},
        {},
    ]
)
chunk_choices = st.fixed_dictionaries(
    {
        "index": st.sampled_from([0, 0, 0, 1]),
        "delta": deltas,
        "logprobs": st.sampled_from([None, None, {"content": []}]),
        "finish_reason": st.sampled_from([None, None, None, "stop"]),
        "token_ids": st.sampled_from([None, [], [1], [1, 22, 333]]),
    }
)
chunks = st.fixed_dictionaries(
    {"id": st.sampled_from(["c", "c", "d"]), "choices": st.lists(chunk_choices, min_size=1, max_size=2)},
    optional={"prompt_token_ids": st.sampled_from([[], [1, 2, 3]])},
)


@given(st.lists(chunks, max_size=6), st.sampled_from([frozenset(), frozenset((TOKEN_IDS,))]), cuts)
def test_chunks_that_arrive_together_are_read_like_chunks_that_arrive_alone(
    sent: list[dict[str, object]], added: frozenset[str], cuts: list[int]
) -> None:
    events = [b"data: %b\n\n" % json.dumps(chunk, separators=(",", ":")).encode() for chunk in sent]
    alone, together = StreamReader(added), StreamReader(added)
    one_by_one = b"".join([*(alone.feed(event) for event in events), alone.close()])
    at_once = together.feed(b"".join(events)) + together.close()
    assert at_once == one_by_one == pass_through(b"".join(events), cuts, added)
    assert together.message() == alone.message()
    assert together.facts == alone.facts
    # Nothing but ids is missing, and all that have a place of their own are.
    expected = [without_ids(chunk) if added else chunk for chunk in sent if not added or not only_ids(chunk)]
    assert [json.loads(line[6:]) for line in json_events(at_once)] == expected


def without_ids(chunk: dict[str, object]) -> dict[str, object]:
    bare = {**chunk, "choices": [{**choice, "token_ids": None} for choice in chunk["choices"]]}  # type: ignore[attr-defined]
    return {**bare, "prompt_token_ids": None} if "prompt_token_ids" in chunk else bare


def only_ids(chunk: dict[str, object]) -> bool:
    return all(
        choice["delta"] == {} and choice["finish_reason"] is None and choice["logprobs"] is None
        for choice in chunk["choices"]  # type: ignore[attr-defined]
    )
