"""The chat template of a model, rendered as vLLM renders it, from the files beside the model.

Rendering only *predicts* how messages turn into text; whoever uses it checks the prediction against the
engine's own tokens. Environment as in transformers' ``chat_template_utils``; preparation of messages and
tools as in vLLM's ``renderers/chat_utils.py`` (0.32).
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

Message = Mapping[str, Any]


class RenderError(ValueError):
    """The template is missing or refuses these messages."""


class ChatTemplate:
    """A model's chat template. ``parts``: message content stays a list of parts instead of one string."""

    def __init__(self, source: str | Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        sources = {"default": source} if isinstance(source, str) else dict(source)
        environment = _environment()
        try:
            self._templates = {name: environment.from_string(text) for name, text in sources.items()}
        except jinja2.TemplateError as error:
            raise RenderError(f"chat template: {error}") from None
        self._special_tokens = dict(special_tokens)

    @classmethod
    def load(cls, folder: Path) -> ChatTemplate:
        """Read ``chat_template.jinja`` or the template in ``tokenizer_config.json``. Raises RenderError."""
        try:
            config = _json(folder / "tokenizer_config.json")
            special = _json(folder / "special_tokens_map.json") | config
            file = folder / "chat_template.jinja"
            source = file.read_text() if file.exists() else config.get("chat_template")
            source = source or _json(folder / "chat_template.json").get("chat_template")
        except (OSError, ValueError) as error:
            raise RenderError(f"cannot read the chat template in {folder}: {error}") from None
        if isinstance(source, list):
            source = {entry["name"]: entry["template"] for entry in source}
        if not source:
            raise RenderError(f"no chat template in {folder}")
        return cls(source, _special_tokens(special))

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Message] | None,
        *,
        add_generation_prompt: bool,
        kwargs: Mapping[str, Any],
    ) -> str:
        """The prompt's text. Raises RenderError when the template refuses (or fails on) the messages."""
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        template = self._templates.get(name) or next(iter(self._templates.values()))
        try:
            return template.render(
                **{"documents": None, **self._special_tokens, **kwargs},
                messages=messages,
                tools=tools or None,
                add_generation_prompt=add_generation_prompt,
            )
        except (
            jinja2.TemplateError,
            TypeError,
            ValueError,
            LookupError,
            AttributeError,
            ArithmeticError,
        ) as e:
            raise RenderError(f"chat template: {e}") from None


def template_arguments(body: Mapping[str, Any]) -> dict[str, Any]:
    """Variables that a chat request hands to the template beyond messages and tools."""
    given = dict(body.get("chat_template_kwargs") or {})
    effort = body.get("reasoning_effort")
    if effort is not None:
        given.setdefault("enable_thinking", effort != "none")
        given.setdefault("reasoning_effort", effort)
    if body.get("documents") is not None:
        given.setdefault("documents", body["documents"])
    return given


def prepare_messages(messages: Sequence[Message], *, parts: bool) -> list[dict[str, Any]]:
    """Messages as vLLM hands them to a template that takes strings, or (``parts``) lists of parts."""
    prepared = []
    for message in messages:
        role = message.get("role")
        content = _content(message.get("content"), parts=parts and role != "tool")
        result: dict[str, Any] = {"role": role, "content": content}
        if role == "assistant":
            calls = [_prepare_call(call) for call in message.get("tool_calls") or ()]
            if calls:
                result["tool_calls"] = calls
            reasoning = message.get("reasoning", message.get("reasoning_content"))
            if reasoning is not None:
                result["reasoning"] = result["reasoning_content"] = reasoning
        if role == "tool" and "tool_call_id" in message:
            result["tool_call_id"] = message["tool_call_id"]
        if isinstance(message.get("name"), str):
            result["name"] = message["name"]
        prepared.append(result)
    return prepared


def prepare_tools(tools: Sequence[Message] | None) -> list[dict[str, Any]] | None:
    """Tools with the fields vLLM keeps, in its order."""
    if not tools:
        return None
    prepared = []
    for tool in tools:
        given = tool.get("function") or {}
        function = {key: given.get(key) for key in ("name", "description", "parameters")}
        function |= {key: given[key] for key in ("strict", "defer_loading") if given.get(key) is not None}
        prepared.append({"type": "function", "function": function})
    return prepared


def model_folder(model: str, environ: Mapping[str, str] | None = None) -> Path | None:
    """The folder with a model's files: a local path, or the newest snapshot in the Hugging Face cache."""
    local = Path(model)
    if local.is_dir():
        return local
    env = os.environ if environ is None else environ
    home = Path(
        env.get("HF_HOME") or Path(env.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "huggingface"
    )
    cache = Path(env.get("HF_HUB_CACHE") or home / "hub") / f"models--{model.replace('/', '--')}"
    try:
        named = cache / "snapshots" / (cache / "refs" / "main").read_text().strip()
        return named if named.is_dir() else None
    except OSError:
        return None


def _content(content: Any, *, parts: bool) -> Any:
    if parts:
        items = [content] if isinstance(content, str) else content or []
        return [{"type": "text", "text": item} if isinstance(item, str) else item for item in items]
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part_text(part) for part in content)


def part_text(part: Any) -> str:
    """The text of one content part; parts without text (images) have none."""
    text = part if isinstance(part, str) else part.get("text") if isinstance(part, Mapping) else None
    return text if isinstance(text, str) else ""


def _prepare_call(call: Message) -> dict[str, Any]:
    prepared: dict[str, Any] = copy.copy(dict(call))
    function = dict(prepared.get("function") or {})
    function["arguments"] = call_arguments(function.get("arguments"))
    prepared["function"] = function
    return prepared


def call_arguments(raw: Any) -> dict[str, Any]:
    """Arguments of a tool call as an object; what is not one counts as empty, as in vLLM."""
    if isinstance(raw, str):
        try:
            raw = json.loads(raw)
        except ValueError:
            return {}
    return dict(raw) if isinstance(raw, Mapping) else {}


def _json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    raw: dict[str, Any] = json.loads(path.read_text())
    return raw


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    tokens = {}
    for key, value in config.items():
        if key.endswith("_token"):
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                tokens[key] = text
    return tokens


class _Generation(Extension):
    """``{% generation %}`` marks what the model wrote, for training; here only its body counts."""

    tags = {"generation"}  # noqa: RUF012  (declared so by jinja2)

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Any) -> str:
        return str(caller())


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
