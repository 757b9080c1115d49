"""Token ids out of what engines write."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpilot.context.tokens import PromptParser, parse_tokens

json_ids = st.lists(st.integers(min_value=0, max_value=2**32 - 1), max_size=20)


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        (b"[]", []),
        (b"[1]", [1]),
        (b"[1, 22,\n333]", [1, 22, 333]),
        (b"[4294967295]", [4294967295]),
        (b"[4294967296]", None),
        (b"[99999999999999999999999]", None),
        (b"[-1]", None),
        (b"[1,,2]", None),
        (b"[1,]", None),
        (b'["a"]', None),
        (b"null", None),
        (b"", None),
    ],
)
def test_token_lists(text: bytes, tokens: list[int] | None) -> None:
    parsed = parse_tokens(text)
    assert (None if parsed is None else parsed.tolist()) == tokens


@given(
    st.lists(st.tuples(json_ids, st.sampled_from("ab"), st.booleans()), max_size=8),
    st.sampled_from([50, 10_000]),
)
def test_what_is_remembered_of_a_thread_changes_nothing(
    turns: list[tuple[list[int], str, bool]], max_bytes: int
) -> None:
    parser = PromptParser(max_bytes)
    contexts: dict[str, list[int]] = {"a": [], "b": []}
    for ids, thread, grows in turns:
        contexts[thread] = contexts[thread] + ids if grows else ids
        tokens = parser.parse(json.dumps(contexts[thread], separators=(",", ":")).encode(), thread)
        assert tokens is not None
        assert tokens.tolist() == contexts[thread]


def test_a_prompt_that_only_looks_like_a_longer_one_is_read_anew() -> None:
    parser = PromptParser()
    for text in (b"[1,2]", b"[1,23]", b"[1,23", b"null", b"[1,23,4]", b"[]", b"[1]"):
        found, expected = parser.parse(text, "t"), parse_tokens(text)
        assert (found is None) == (expected is None)
        if found is not None and expected is not None:
            assert found.tolist() == expected.tolist()
