"""Replies: what they tell about tokens, and taking out again what only kvpilot asked for."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from kvpilot.gateway.request import HASHES, Fields

_NULL = msgspec.Raw(b"null")
_ABSENT = msgspec.Raw(b"")
_PROMPT_IDS = b'"prompt_token_ids":['
_OUTPUT_IDS = b'"token_ids":['


class PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = 0
    prompt_tokens_details: PromptDetails | None = None


class Choice(msgspec.Struct):
    index: int = 0
    message: msgspec.Raw = _ABSENT
    delta: msgspec.Raw = _ABSENT
    text: msgspec.Raw = _ABSENT
    logprobs: msgspec.Raw = _NULL
    finish_reason: str | None = None
    token_ids: msgspec.Raw = _ABSENT
    prompt_token_ids: msgspec.Raw = _ABSENT


class Reply(msgspec.Struct):
    """The parts of a chat completion, a completion or a chunk of either that matter here."""

    choices: list[Choice] = []
    usage: Usage | None = None
    prompt_token_ids: msgspec.Raw = _ABSENT
    system_fingerprint: msgspec.Raw = _NULL

    def prompt_ids(self) -> list[msgspec.Raw]:
        """Where the prompt's ids are: chat has them at the top, completions in each choice."""
        return [self.prompt_token_ids, *(choice.prompt_token_ids for choice in self.choices)]

    def output_ids(self) -> list[msgspec.Raw]:
        return [choice.token_ids for choice in self.choices]


@dataclass(frozen=True, slots=True)
class ReadReply:
    """A reply taken apart. Ids are JSON lists, empty when the reply has none."""

    reply: Reply
    without_ids: bytes
    """The reply's text with all ids null, as engines write it for who did not ask; else byte for byte."""
    prompt_ids: bytes
    output_ids: bytes
    """Of the choice with index 0."""


@dataclass(slots=True)
class Facts:
    """What a reply, whole or streamed, told about one request."""

    prompt_ids: bytes = b""
    output_ids: list[bytes] = field(default_factory=list)
    """JSON lists of the first choice, in order."""
    finish_reason: str | None = None
    message: bytes = b""
    usage: Usage | None = None

    def take(self, read: ReadReply) -> None:
        self.prompt_ids = self.prompt_ids or read.prompt_ids
        self.usage = read.reply.usage or self.usage
        if read.output_ids:
            self.output_ids.append(read.output_ids)
        for choice in read.reply.choices:
            if choice.index == 0:
                self.finish_reason = choice.finish_reason or self.finish_reason
                self.message = bytes(choice.message) or text_message(bytes(choice.text)) or self.message


_REPLY = msgspec.json.Decoder(Reply)
_FIELDS = msgspec.json.Decoder(Fields)
_CHOICES = msgspec.json.Decoder(list[Fields])


def read_reply(text: bytes) -> ReadReply | None:
    """Take ``text`` apart; None when it is not a completion (then it is passed on untouched)."""
    # Ids are most of a reply: they are cut out by their place before anything is decoded.
    return read_cut_reply(*cut_prompt_ids(text)) or _read_slowly(text)


def cut_prompt_ids(text: bytes) -> tuple[bytes, list[bytes]]:
    """``text`` with null for each list of prompt ids, and those lists."""
    return _cut(text, _PROMPT_IDS)


def read_cut_reply(text: bytes, prompts: list[bytes]) -> ReadReply | None:
    """The same for a text of which :func:`cut_prompt_ids` was taken; None also when other lists were cut out."""
    short, outputs = _cut(text, _OUTPUT_IDS)
    reply = _decode(short)
    if reply is None:
        return None
    if not _fits(reply.prompt_ids(), prompts) or not _fits(reply.output_ids(), outputs):
        return None
    output = b""
    if outputs:
        indices = [choice.index for choice in reply.choices]
        output = outputs[indices.index(0)] if 0 in indices else b""
    return ReadReply(reply, short, prompts[0] if prompts else b"", output)


def _cut(text: bytes, key: bytes) -> tuple[bytes, list[bytes]]:
    """``text`` with every list of numbers behind ``key`` null, and those lists.

    Inside a JSON text a quote is escaped, so ``key`` (with its quotes and colon) is a key, if perhaps one of a
    nested object.
    """
    parts: list[bytes] = []
    found: list[bytes] = []
    done = 0
    while (at := text.find(key, done)) >= 0:
        start = at + len(key) - 1
        end = text.find(b"]", start) + 1
        if not end:
            break
        parts += (text[done:start], b"null")
        found.append(text[start:end])
        done = end
    return (b"".join((*parts, text[done:])), found) if found else (text, found)


def _fits(values: list[msgspec.Raw], cut: list[bytes]) -> bool:
    """Whether exactly the lists at the places for ids were cut: as many as are null now, and none is left."""
    nulls = 0
    for value in values:
        if value is not _ABSENT:
            if bytes(value) != b"null":
                return False
            nulls += 1
    return not cut or len(cut) == nulls


def _decode(text: bytes) -> Reply | None:
    try:
        return _REPLY.decode(text)
    except (ValueError, RecursionError):
        return None


def _read_slowly(text: bytes) -> ReadReply | None:
    """The same for any layout (blanks, ids of only some choices, such keys elsewhere)."""
    reply = _decode(text)
    if reply is None:
        return None
    fields = _FIELDS.decode(text)
    changed = _null_ids(fields)
    choices = _CHOICES.decode(fields["choices"]) if reply.choices else []
    found = [_null_ids(choice) for choice in choices]
    if any(found):
        changed = True
        fields["choices"] = msgspec.Raw(msgspec.json.encode(choices))
    first = next((choice for choice in reply.choices if choice.index == 0), Choice())
    return ReadReply(
        reply=reply,
        without_ids=msgspec.json.encode(fields) if changed else text,
        prompt_ids=next((bytes(value) for value in reply.prompt_ids() if _is_list(value)), b""),
        output_ids=bytes(first.token_ids) if _is_list(first.token_ids) else b"",
    )


def _null_ids(fields: Fields) -> bool:
    """Whether there were any."""
    present = [key for key in ("prompt_token_ids", "token_ids") if bytes(fields.get(key, _NULL)) != b"null"]
    fields.update(dict.fromkeys(present, _NULL))
    return bool(present)


def _is_list(value: msgspec.Raw) -> bool:
    return bytes(value)[:1] == b"["


def text_message(text_json: bytes) -> bytes:
    """The message a plain completion amounts to; ``text_json`` is a JSON string (empty: no message)."""
    return b'{"role":"assistant","content":' + text_json + b"}" if text_json else b""


def with_chunk_hashes(text: bytes, hashes: list[str]) -> bytes:
    """``text`` with ``kv_transfer_params.chunk_hashes`` added beside whatever the engine put there."""
    fields = _FIELDS.decode(text)
    params: Fields = {}
    if "kv_transfer_params" in fields and bytes(fields["kv_transfer_params"])[:1] == b"{":
        params = _FIELDS.decode(fields["kv_transfer_params"])
    params[HASHES] = msgspec.Raw(msgspec.json.encode(hashes))
    fields["kv_transfer_params"] = msgspec.Raw(msgspec.json.encode(params))
    return msgspec.json.encode(fields)
