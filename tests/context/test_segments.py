"""Segments say exactly what their messages contributed to the prompt."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvpilot.context.segments import PreviousMap, Segmenter, spans_of_messages, spans_of_tools
from kvpilot.domain import SegmentKind

from .models import HERMES, LLAMA, QWEN, SMOLLM, assert_tiles, model, texts


def call(identity: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Runs {name}.",
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
        },
    }
    for name in ("ls", "read_file")
]
AGENT: dict[str, Any] = {
    "tools": TOOLS,
    "messages": [
        {"role": "system", "content": "You are a coding agent. Ünïcödé → ok."},
        {"role": "user", "content": "user"},
        {
            "role": "assistant",
            "content": "Let me look.",
            "reasoning_content": "I should list the files first.",
            "tool_calls": [call("c1", "ls", '{"path": "."}'), call("c2", "read_file", '{"path": "a b.py"}')],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "a b.py\nREADME"},
        {"role": "tool", "tool_call_id": "c2", "content": "print('<hi>')\n"},
    ],
}


async def test_qwen_like_agent_turn() -> None:
    qwen = model(QWEN)
    tokens = qwen.prompt(AGENT)
    prompt = await qwen.segmenter().segment(AGENT, tokens)
    assert_tiles(prompt, len(tokens))
    assert (prompt.method, prompt.reason) == ("template", None)
    found = texts(qwen, tokens, list(prompt.segments))
    ls, read = (qwen.read(tokens, *span) for span in prompt.tool_spans)
    assert ls.startswith('{"type": "function", "function": {"name": "ls"')
    assert read.endswith("}") and '"read_file"' in read
    assert found == [
        ("system", 0, None, "<|im_start|>system\nYou are a coding agent. Ünïcödé → ok."),
        ("tools", -1, None, "\n\n# Tools\n\nYou may call functions.\n<tools>\n"),
        ("tools", -1, "ls", ls),
        ("tools", -1, "read_file", f"\n{read}"),
        ("tools", -1, None, "\n</tools>\n\nReturn calls within <tool_call></tool_call>."),
        ("system", 0, None, "<|im_end|>\n"),
        ("user", 1, None, "<|im_start|>user\nuser<|im_end|>\n"),
        ("thinking", 2, None, "<|im_start|>assistant\n<think>\nI should list the files first."),
        ("assistant", 2, None, "\n</think>\n\nLet me look."),
        ("tool_call", 2, "ls", '\n<tool_call>\n{"name": "ls", "arguments": {"path": "."}}\n</tool_call>'),
        (
            "tool_call",
            2,
            "read_file",
            '\n<tool_call>\n{"name": "read_file", "arguments": {"path": "a b.py"}}\n</tool_call><|im_end|>\n',
        ),
        ("tool_result", 3, "ls", "<|im_start|>user\n<tool_response>\na b.py\nREADME\n</tool_response>"),
        (
            "tool_result",
            4,
            "read_file",
            "\n<tool_response>\nprint('<hi>')\n\n</tool_response><|im_end|>\n",
        ),
        ("template", -1, None, "<|im_start|>assistant\n"),
    ]


async def test_a_new_question_strips_old_thoughts_and_the_map_follows() -> None:
    qwen = model(QWEN)
    messages = [
        *AGENT["messages"],
        {"role": "assistant", "content": "<think>\nDone.\n</think>\n\nTwo files."},
        {"role": "user", "content": "Thanks. And now?"},
    ]
    body = {**AGENT, "messages": messages}
    tokens = qwen.prompt(body)
    prompt = await qwen.segmenter().segment(body, tokens)
    assert_tiles(prompt, len(tokens))
    assert (prompt.method, prompt.reason) == ("template", None)
    assert all(segment.kind is not SegmentKind.THINKING for segment in prompt.segments)
    said = [qwen.read(tokens, *spans_of_messages(prompt, n, n + 1)) for n in (2, 4, 5, 6)]  # type: ignore[misc]
    assert said[0].startswith("<|im_start|>assistant\nLet me look.\n<tool_call>")
    assert said[0].endswith("</tool_call><|im_end|>\n")
    assert said[1].endswith("</tool_response><|im_end|>\n")
    assert said[2:] == [
        "<|im_start|>assistant\nTwo files.<|im_end|>\n",
        "<|im_start|>user\nThanks. And now?<|im_end|>\n",
    ]


async def test_an_answer_without_thought_in_the_running_turn() -> None:
    """The template would put an empty thought into the reply, were it the last message."""
    qwen = model(QWEN)
    messages = [*AGENT["messages"][:2]]
    for number in range(3):
        messages.append({"role": "assistant", "content": "", "tool_calls": [call(f"d{number}", "ls", "{}")]})
        messages.append({"role": "tool", "tool_call_id": f"d{number}", "content": f"file{number}"})
    body = {**AGENT, "messages": messages}
    tokens = qwen.prompt(body)
    prompt = await qwen.segmenter().segment(body, tokens)
    assert (prompt.method, prompt.reason) == ("template", None)
    for number in (2, 4, 6):
        said = qwen.read(tokens, *spans_of_messages(prompt, number, number + 1))  # type: ignore[misc]
        assert said == (
            '<|im_start|>assistant\n<tool_call>\n{"name": "ls", "arguments": {}}\n</tool_call><|im_end|>\n'
        )


async def test_smollm_default_system_text_belongs_to_no_message() -> None:
    smollm = model(SMOLLM)
    body = {"messages": [{"role": "user", "content": "s"}, {"role": "assistant", "content": "user"}]}
    tokens = smollm.prompt(body)
    prompt = await smollm.segmenter().segment(body, tokens)
    assert texts(smollm, tokens, list(prompt.segments)) == [
        (
            "template",
            -1,
            None,
            "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n",
        ),
        ("user", 0, None, "<|im_start|>user\ns<|im_end|>\n"),
        ("assistant", 1, None, "<|im_start|>assistant\nuser<|im_end|>\n"),
        ("template", -1, None, "<|im_start|>assistant\n"),
    ]
    assert spans_of_messages(prompt, 0, 1) == (prompt.segments[1].start, prompt.segments[1].end)


async def test_llama_like_tools_in_the_first_user_message() -> None:
    llama = model(LLAMA)
    messages = [
        {"role": "system", "content": "  Be brief.\n"},
        {"role": "user", "content": " What is here? "},
        {"role": "assistant", "content": None, "tool_calls": [call("c1", "ls", '{"path":"."}')]},
        {"role": "tool", "tool_call_id": "c1", "content": 'a "b"\nc'},
        {"role": "assistant", "content": "Two files."},
        {"role": "user", "content": "Which?"},
    ]
    body = {"tools": TOOLS, "messages": messages}
    tokens = llama.prompt(body)
    prompt = await llama.segmenter().segment(body, tokens)
    assert_tiles(prompt, len(tokens))
    assert (prompt.method, prompt.reason) == ("template", None)
    said = [llama.read(tokens, *spans_of_messages(prompt, n, n + 1)) for n in range(6)]  # type: ignore[misc]
    header = "<|start_header_id|>{}<|end_header_id|>\n\n"
    assert said[0].endswith("Be brief.<|eot_id|>")
    assert said[1].startswith(header.format("user") + "Given the following functions")
    assert said[1].endswith("What is here?<|eot_id|>")
    assert said[2] == header.format("assistant") + '{"name": "ls", "parameters": {"path": "."}}<|eot_id|>'
    assert said[3] == header.format("ipython") + r'"a \"b\"\nc"' + "<|eot_id|>"
    assert said[4] == header.format("assistant") + "Two files.<|eot_id|>"
    one = llama.read(tokens, *spans_of_tools(prompt, 1, 2))  # type: ignore[misc]
    assert one.startswith("{\n") and '"name": "read_file"' in one and '"ls"' not in one


async def test_content_parts_and_marks_of_skills_and_summaries() -> None:
    qwen = model(QWEN)
    messages = [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "<skill name='pdf'>How to read PDFs</skill>"},
                {"type": "text", "text": "Please read a.pdf. It mentions SKILL.md and a <summary>."},
            ],
        },
        {"role": "assistant", "content": "", "tool_calls": [call("s", "Skill", '{"name": "pdf"}')]},
        {"role": "tool", "tool_call_id": "s", "content": "Base directory for this skill: /x"},
        {
            "role": "user",
            "content": "This session is being continued from a previous conversation that ran out of context.",
        },
    ]
    body = {"messages": messages}
    tokens = qwen.prompt(body)
    prompt = await qwen.segmenter().segment(body, tokens)
    assert_tiles(prompt, len(tokens))
    kinds = [(segment.kind.value, segment.message, segment.name) for segment in prompt.segments]
    assert kinds == [
        ("skill", 0, None),
        ("user", 0, None),
        ("tool_call", 1, "Skill"),
        ("skill", 2, "Skill"),
        ("summary", 3, None),
        ("template", -1, None),
    ]


async def test_the_reply_is_cut_like_any_message() -> None:
    qwen = model(QWEN)
    tokens = qwen.prompt(AGENT)
    segmenter = qwen.segmenter()
    prompt = await segmenter.segment(AGENT, tokens)
    written = "<think>\nHm.\n</think>\n\nReading."
    written += '\n<tool_call>\n{"name": "ls", "arguments": {"path": "/"}}\n</tool_call>'
    output = qwen.encode(written + "<|im_end|>")
    message = {
        "content": "Reading.",
        "reasoning_content": "\nHm.\n",
        "tool_calls": [call("x", "ls", '{"path": "/"}')],
    }
    segments = segmenter.reply(prompt, message, output)
    found = texts(qwen, np.concatenate((tokens, output)), segments)
    assert [entry[:3] for entry in found] == [
        ("thinking", 5, None),
        ("assistant", 5, None),
        ("tool_call", 5, "ls"),
    ]
    assert "".join(entry[3] for entry in found) == written + "<|im_end|>"
    assert segments[0].start == len(tokens) and segments[-1].end == len(tokens) + len(output)


@pytest.mark.parametrize("template", [QWEN, SMOLLM])
async def test_the_next_turn_aligns_only_its_tail_to_the_same_result(
    template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = model(template)
    body = (
        AGENT if template == QWEN else {"messages": [{"role": "user", "content": f"m{n}"} for n in range(9)]}
    )
    longer = {**body, "messages": [*body["messages"], {"role": "assistant", "content": "ok"}]}
    longer["messages"] += [{"role": "user" if template == SMOLLM else "tool", "content": "go on"}]
    segmenter = chat.segmenter()
    tokens, more = chat.prompt(body), chat.prompt(longer)
    first = await segmenter.segment(body, tokens)
    whole = await segmenter.segment(longer, more)
    rendered: list[int] = []
    render = chat.template.render

    def counting(messages: Any, *args: Any, **kwargs: Any) -> str:
        rendered.append(len(messages))
        return render(messages, *args, **kwargs)

    monkeypatch.setattr(chat.template, "render", counting)
    previous = PreviousMap(first, tokens, len(body["messages"]))
    assert await segmenter.segment(longer, more, previous=previous) == whole
    kept = len(body["messages"])
    learned = [count for count in rendered if count < kept]
    assert all(count <= 4 for count in learned)


async def test_a_previous_map_of_other_tokens_is_not_trusted() -> None:
    smollm = model(SMOLLM)
    body = {"messages": [{"role": "user", "content": f"m{n}"} for n in range(4)]}
    other = {"messages": [{"role": "user", "content": "changed"}, *body["messages"][1:]]}
    segmenter = smollm.segmenter()
    tokens, edited = smollm.prompt(body), smollm.prompt(other)
    previous = PreviousMap(await segmenter.segment(body, tokens), tokens, 4)
    assert await segmenter.segment(other, edited, previous=previous) == await segmenter.segment(other, edited)


async def test_without_the_template_the_texts_are_found() -> None:
    for chat in (model(QWEN), model(QWEN, "sentencepiece")):
        tokens = chat.prompt(AGENT)
        prompt = await chat.segmenter(template=False).segment(AGENT, tokens)
        assert_tiles(prompt, len(tokens))
        assert prompt.method == "search"
        said = [chat.read(tokens, *spans_of_messages(prompt, n, n + 1)) for n in (3, 4)]  # type: ignore[misc]
        assert said[0] == "a b.py\nREADME\n</tool_response>\n<tool_response>\n"
        assert spans_of_messages(prompt, 1, 2) is None, "the text of message 1 is in the template, too"
        assert said[1] == "print('<hi>')\n"
        assert chat.read(tokens, *spans_of_tools(prompt, 0, 1)).startswith('{"type"')  # type: ignore[misc]


@pytest.mark.parametrize("template", [HERMES, QWEN, LLAMA])
@pytest.mark.parametrize("first", ["system", "user"])
async def test_searched_messages_do_not_take_the_tools_with_them(template: str, first: str) -> None:
    chat = model(template)
    body = {
        "tools": TOOLS,
        "messages": [
            {"role": first, "content": "You are a coding agent."},
            {"role": "user", "content": "Runs read_file."},  # as the tool's own description says
            {"role": "assistant", "content": "Let me look at that."},
        ],
    }
    tokens = chat.prompt(body)
    prompt = await chat.segmenter(template=False).segment(body, tokens)
    assert (prompt.method, prompt.reason) == ("search", None)
    said = [chat.read(tokens, *spans_of_messages(prompt, n, n + 1)) for n in (1, 2)]  # type: ignore[misc]
    assert said[0].startswith("Runs read_file.") and said[1].startswith("Let me look at that.")
    assert not any('"ls"' in text for text in said)


@pytest.mark.parametrize("shown", ["{0} {0}", "something else"])
async def test_a_searched_range_that_is_not_certain_is_not_told(shown: str) -> None:
    """The template shows message 3 twice, or not as it is."""
    chat = model(SMOLLM)
    messages = [{"role": "user", "content": f"It is question number {n}."} for n in range(6)]
    seen = [*messages[:3], {"role": "user", "content": shown.format(messages[3]["content"])}, *messages[4:]]
    prompt = await chat.segmenter().segment({"messages": messages}, chat.prompt({"messages": seen}))
    assert prompt.method == "search" and prompt.reason
    assert spans_of_messages(prompt, 0, 1) and spans_of_messages(prompt, 5, 6)
    for start, end in ((1, 4), (2, 3), (3, 4), (4, 5)):
        assert spans_of_messages(prompt, start, end) is None


async def test_sentencepiece_like_vocabularies_are_exact_too() -> None:
    chat = model(SMOLLM, "sentencepiece")
    body = {
        "messages": [{"role": "system", "content": "Grüße 你好"}, {"role": "user", "content": "a  b\n\n c"}]
    }
    tokens = chat.prompt(body)
    prompt = await chat.segmenter().segment(body, tokens)
    assert prompt.method == "template"
    assert texts(chat, tokens, list(prompt.segments))[1][3] == "<|im_start|>user\na  b\n\n c<|im_end|>\n"


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": "not what the engine saw"}]},
        {"messages": ["nonsense"]},
        {"messages": [{"role": "assistant", "tool_calls": "nonsense", "content": 7}]},
    ],
)
async def test_what_does_not_match_is_one_template_segment_with_a_reason(body: dict[str, Any]) -> None:
    smollm = model(SMOLLM)
    tokens = smollm.encode("Something else entirely.")
    prompt = await smollm.segmenter().segment(body, tokens)
    assert_tiles(prompt, len(tokens))
    assert (prompt.method, [segment.kind for segment in prompt.segments]) == ("none", [SegmentKind.TEMPLATE])
    assert prompt.reason


async def test_completions_and_unknown_tokens() -> None:
    smollm = model(SMOLLM)
    tokens = smollm.encode("Once upon a time")
    prompt = await smollm.segmenter().segment({"prompt": "Once upon a time"}, tokens)
    assert (prompt.method, [segment.kind for segment in prompt.segments]) == (
        "completion",
        [SegmentKind.USER],
    )
    strange = np.array([1, 2**31], dtype=np.uint32)
    prompt = await smollm.segmenter().segment({"messages": [{"role": "user", "content": "x"}]}, strange)
    assert (prompt.method, prompt.length) == ("none", 2)
    empty = await Segmenter(None, None).segment({"messages": []}, tokens[:0])
    assert (empty.segments, empty.length) == ((), 0)


async def test_a_reply_cut_off_is_continued() -> None:
    smollm = model(SMOLLM)
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": "Count."}, {"role": "assistant", "content": "One, two"}],
        "add_generation_prompt": False,
        "continue_final_message": True,
    }
    tokens = smollm.encode(smollm.text(body, generation=False).removesuffix("<|im_end|>\n"))
    prompt = await smollm.segmenter().segment(body, tokens)
    assert prompt.method == "template"
    assert smollm.read(tokens, *spans_of_messages(prompt, 1, 2)) == "<|im_start|>assistant\nOne, two"  # type: ignore[misc]
