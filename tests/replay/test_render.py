"""Text of exact lengths, chat messages, and what an infinite cache would hit."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from kvpilot.replay.plan import PlannedCall, ReplayOptions, plan_session
from kvpilot.replay.render import Conversation, PrefixMemory
from kvpilot.replay.text import MESSAGE_OVERHEAD, TextError, TextMaker
from kvpilot.traces import ToolUse, TraceAgent, TraceCall, TraceMessage, TraceSession


def tokenizer(words: int) -> Tokenizer:
    """A byte-level tokenizer in which only the first ``words`` made-up words are one token each."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: number for number, letter in enumerate(alphabet)}
    merges: list[tuple[str, str]] = []
    for number in range(words):
        piece = "Ġ"
        for letter in "w" + "".join("abcdefghij"[int(digit)] for digit in f"{number:04d}"):
            if piece + letter not in vocab:
                vocab[piece + letter] = len(vocab)
                merges.append((piece, letter))
            piece += letter
    made = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return made


TEXTS = TextMaker(tokenizer(300))


@given(st.text(max_size=20), st.integers(1, 400), st.integers(1, 400))
def test_texts_have_their_length_and_prolong_one_another(text_id: str, short: int, longer: int) -> None:
    first, second = TEXTS.text(text_id, short), TEXTS.text(text_id, short + longer)
    assert TEXTS.count(first) == short
    assert TEXTS.count(second) == short + longer
    assert second.startswith(first)


def test_different_ids_give_different_texts() -> None:
    assert TEXTS.text("a", 50) != TEXTS.text("b", 50)
    assert TEXTS.text("a", 50) == TextMaker(tokenizer(300)).text("a", 50)


def test_a_tokenizer_without_words_is_refused() -> None:
    with pytest.raises(TextError, match="too few words"):
        TextMaker(tokenizer(5))


def test_clipping_keeps_the_beginning() -> None:
    text = TEXTS.text("a", 100)
    assert TEXTS.clip(text, 40) == TEXTS.text("a", 40)
    assert TEXTS.clip(text, 1000) == text


def plan(*calls: TraceCall) -> tuple[PlannedCall, ...]:
    agent = TraceAgent(id="main", hidden_tok=20, hidden_id="hidden:made")
    made = TraceSession(source="made", id="s", agents=(agent,), calls=calls)
    return plan_session(made, "x", 1.0, ReplayOptions(max_reply=10)).calls


def two_turns() -> tuple[PlannedCall, ...]:
    use = ToolUse(id="t1", name="Bash", program="pytest", timeout_ms=9.0)
    reply = TraceMessage(id="r1", role="assistant", tok=10, calls=(use,))
    ask = TraceMessage(id="a", role="user", tok=30)
    result = TraceMessage(id="b", role="user", tok=5, results=("t1",))
    end = TraceMessage(id="r2", role="assistant", tok=3)
    return plan(
        TraceCall(agent="main", t_request=0, t_end=1, keep=0, add=(ask,), reply=reply),
        TraceCall(agent="main", t_request=2, t_end=3, keep=2, add=(result,), reply=end),
    )


def test_tool_calls_and_results_are_real_messages() -> None:
    first, second = two_turns()
    conversation = Conversation(TEXTS)
    messages: list[dict[str, Any]] = conversation.messages(second)
    assert [m["role"] for m in messages] == ["system", "user", "assistant", "tool"]
    [use] = messages[2]["tool_calls"]
    assert use["function"] == {"name": "Bash", "arguments": '{"command": "pytest", "timeout": 9.0}'}
    assert messages[3]["tool_call_id"] == "t1"
    assert [TEXTS.count(m["content"]) for m in messages] == [20, 30, 10, 5]
    assert conversation.messages(first) == messages[:2]


def test_the_engines_own_reply_goes_on_unless_it_grew() -> None:
    first, second = two_turns()
    conversation = Conversation(TEXTS)
    said = TEXTS.text("what the engine said", 10)
    conversation.replied("main", first, said)
    assert conversation.messages(second)[2]["content"] == said
    other = Conversation(TEXTS)
    other.replied("main", first, TEXTS.text("too long", 11))
    assert other.messages(second)[2]["content"] == TEXTS.text("r1", 10)


def test_reusable_is_the_longest_prefix_any_prompt_or_reply_had() -> None:
    first, second = two_turns()
    conversation, memory = Conversation(TEXTS), PrefixMemory()
    edge = MESSAGE_OVERHEAD - 1
    assert memory.reusable(conversation.units(first)) == 0
    memory.add(conversation.units(first))
    assert memory.reusable(conversation.units(second)) == 20 + 30 + 2 * edge
    memory.add([*conversation.units(first), conversation.reply_unit(first)])
    assert memory.reusable(conversation.units(second)) == 20 + 30 + 10 + 3 * edge
    # Another tenant's KV is another's.
    assert memory.reusable(conversation.units(second), "somebody else") == 0


def test_blocks_are_one_message_and_share_by_block() -> None:
    def block(name: str) -> TraceMessage:
        return TraceMessage(id=name, role="block", tok=16)

    reply = TraceMessage(id="r", role="assistant", tok=3)
    one, two = plan(
        TraceCall(agent="main", t_request=0, t_end=1, keep=0, add=(block("x"), block("y")), reply=reply),
        TraceCall(agent="main", t_request=2, t_end=3, keep=1, add=(block("z"),), reply=reply),
    )
    conversation, memory = Conversation(TEXTS), PrefixMemory()
    memory.add(conversation.units(one))
    [_, body] = conversation.messages(two)
    assert TEXTS.count(body["content"]) == 32
    assert memory.reusable(conversation.units(two)) == 20 + MESSAGE_OVERHEAD - 1 + 16
