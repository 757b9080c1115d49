"""Small stand-ins for real models: chat templates as they are in the wild, and tokenizers trained on the spot."""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from kvpilot.context.engine_render import EngineRenderer
from kvpilot.context.render import ChatTemplate, prepare_messages, prepare_tools, template_arguments
from kvpilot.context.segments import SegmentedPrompt, Segmenter
from kvpilot.context.vocabulary import Vocabulary
from kvpilot.domain import Segment, TokenArray

SMOLLM = """\
{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system
You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>
' }}{% endif %}{{'<|im_start|>' + message['role'] + '
' + message['content'] + '<|im_end|>' + '
'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant
' }}{% endif %}"""

# After templates that vLLM users give with --chat-template: tools inside the first message, behind its text.
HERMES = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
    {%- if loop.first and tools %}
        {{- '\\n<tools>' }}{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}{{- '\\n</tools>' }}
    {%- endif %}
    {%- for call in message.tool_calls or () %}
        {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
        {{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

# After Qwen3: tools in the system block, thoughts kept only behind the last question, results of one turn grouped
# in one user block, an empty thought for a last reply without one.
QWEN = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "# Tools\\n\\nYou may call functions.\\n<tools>" }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\\n</tools>\\n\\nReturn calls within <tool_call></tool_call>.<|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(query=messages|length - 1, open=true) %}
{%- for message in messages[::-1] %}
    {%- if ns.open and message.role == "user" %}
        {%- set ns.open = false %}{%- set ns.query = (messages|length - 1) - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set content = message.content %}
        {%- set reasoning = message.reasoning_content or '' %}
        {%- if '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.query and (loop.last or reasoning) %}
            {{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content }}
        {%- for call in message.tool_calls or [] %}
            {%- if content or not loop.first %}{{- '\\n' }}{%- endif %}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or messages[loop.index0 - 1].role != "tool" %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != "tool" %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

# After Llama 3.1: begin-of-text, trimmed contents, tools inside the first user message, JSON tool results.
LLAMA = """\
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content']|trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system = "" %}{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools %}{{- "Environment: ipython\\n" }}{%- endif %}
{{- "Cutting Knowledge Date: December 2023\\n\\n" + system + "<|eot_id|>" }}
{%- if tools %}
    {%- if messages | length == 0 %}{{- raise_exception("Cannot put tools in the first user message") }}{%- endif %}
    {%- set first = messages[0]['content']|trim %}{%- set messages = messages[1:] %}
    {{- '<|start_header_id|>user<|end_header_id|>\\n\\n' }}
    {{- "Given the following functions, please respond with a JSON for a function call.\\n\\n" }}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\\n\\n" }}{%- endfor %}
    {{- first + "<|eot_id|>" }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" + message.content | tojson + "<|eot_id|>" }}
    {%- elif message.tool_calls %}
        {%- if message.tool_calls | length != 1 %}{{- raise_exception("one tool call at a time") }}{%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson + "}<|eot_id|>" }}
    {%- else %}
        {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim }}
        {{- '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""

SPECIAL = [
    *(
        "<|im_start|>",
        "<|im_end|>",
        "<|begin_of_text|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eot_id|>",
    ),
    *("<think>", "</think>", "<tool_call>", "</tool_call>"),
]


@dataclass(frozen=True)
class Model:
    """A template with a tokenizer: plays the engine (``prompt``) and gives the segmenter under test."""

    template: ChatTemplate
    tokenizer: Tokenizer
    vocabulary: Vocabulary

    def text(self, body: Mapping[str, Any], *, generation: bool = True) -> str:
        return self.template.render(
            prepare_messages(body["messages"], parts=False),
            prepare_tools(body.get("tools")),
            add_generation_prompt=generation,
            kwargs=template_arguments(body),
        )

    def encode(self, text: str) -> TokenArray:
        return np.array(self.tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.uint32)

    def prompt(self, body: Mapping[str, Any]) -> TokenArray:
        return self.encode(self.text(body))

    def segmenter(self, *, template: bool = True, engine: EngineRenderer | None = None) -> Segmenter:
        return Segmenter(self.template if template else None, self.vocabulary, engine)

    def read(self, tokens: TokenArray, start: int, end: int) -> str:
        return self.vocabulary.text(tokens[start:end]).data.decode()


def texts(
    model: Model, tokens: TokenArray, segments: list[Segment]
) -> list[tuple[str, int, str | None, str]]:
    """Segments with what they say: (kind, message, name, text)."""
    return [(s.kind.value, s.message, s.name, model.read(tokens, s.start, s.end)) for s in segments]


def assert_tiles(prompt: SegmentedPrompt, length: int) -> None:
    """Spans tile the prompt, in order; message ends rise."""
    at = 0
    for segment in prompt.segments:
        assert segment.start == at < segment.end
        at = segment.end
    assert at == length == prompt.length
    assert prompt.message_ends == sorted(prompt.message_ends)
    assert all(0 <= end <= length for end in prompt.message_ends)


@functools.cache
def model(template: str, kind: str = "byte-level") -> Model:
    """A model with one of the templates above and a ``byte-level`` or ``sentencepiece`` tokenizer."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=kind == "sentencepiece"))
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        show_progress=False,
        special_tokens=SPECIAL + [f"<0x{n:02X}>" for n in range(256) if kind == "sentencepiece"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet() if kind == "byte-level" else [],
    )
    if kind == "byte-level":
        tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
    else:
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        )
    tokenizer.train_from_iterator([SMOLLM, QWEN, LLAMA, __doc__], trainer)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokenizer.json"
        raw = json.loads(tokenizer.to_str())
        if kind == "sentencepiece":  # byte tokens are ordinary vocabulary there, not added tokens
            raw["added_tokens"] = [t for t in raw["added_tokens"] if not t["content"].startswith("<0x")]
        path.write_text(json.dumps(raw))
        return Model(
            ChatTemplate(template, {"bos_token": "<|begin_of_text|>"}),
            Tokenizer.from_file(str(path)),
            Vocabulary.load(path),
        )
