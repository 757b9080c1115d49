"""Generated requests: valid ones (rows of the conformance table), bent in their structure and in their bytes.

A case is a function of the run's seed and its own number alone: any of them can be made again by itself.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from random import Random
from types import MappingProxyType
from typing import Any

from kvpilot.gateway.other_apis import MESSAGES, RESPONSES
from kvpilot.hints import BUILT_IN

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SHARES = {CHAT: 60, COMPLETIONS: 10, MESSAGES: 20, RESPONSES: 10}
"""Which APIs are asked how often, in percent."""

CONVERSATIONS = 400
TURNS = 8
LARGE = 0.01
"""Share of the changes that make a request large (tens of KB), as those cost the most time."""

_RAW_MARK, _TALK_MARK = "raw-", "talk-"
_RAW = (
    *("1e999", "-1e999", "1E+400", "1e-9999", "-0", "-0.0", "0.1e-400", "NaN", "Infinity", "-Infinity"),
    *("01", "+1", "0x10", "1.", ".5", "1_000", "1e", "--1", "tru", "nul", "undefined", "'s'", "{,}", "[1,]"),
    *("9" * 30, "9" * 400, "9" * 5000, "18446744073709551615", "18446744073709551616", "-9223372036854775809"),
    *('"\\ud800"', '"\\udc00\\ud800"', '"\\u0000"', '"\\x41"', '"\\u00"', '"\t"', '"\n"', '"\\ud83d\\ude00"'),
    *("[" * depth + "]" * depth for depth in (20, 500, 3000)),
    *('{"a":' * depth + "1" + "}" * depth for depth in (20, 500, 3000)),
)  # fmt: skip
"""JSON texts, and what only looks like it, that a structure cannot say."""
_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 7, 59, 60, 3600, 86_400, 86_401, 2**31, 2**53, 2**53 + 1, 2**63, 2**64),
    *(10**30, -(10**30), 0.0, -0.0, 0.5, 1e308, 5e-324, 1.5, -2.5),
    *(
        "",
        " ",
        "x",
        "a" * 256,
        "a" * 257,
        "0",
        "1",
        "true",
        "null",
        "s1",
        "s0",
        "30m",
        "1h",
        "5m",
        "٣m",
        "²m",
    ),
    *("٣", "²", "Ⅷ", "\u0000", "\u200b", "\u202e", "\ufeff", "é" * 200, "😀", "\ud800", "\udfff", "a\nb"),
    *("%00", "a:b", "../x", '"', "\\", "{}", "[]", '{"session_id": "j"}', "0x41", "ff" * 32, "f" * 81),
    *([], {}, [[]], [{}], {"": ""}, [None], {"a": None}, [1, "2", None, {}], {"type": {}}, {"type": []}),
)
_LARGE: tuple[Any, ...] = ("x" * 70_000, [0] * 20_000, [{}] * 5000, {str(n): n for n in range(3000)})
_HEADER_VALUES = (
    *(b"", b" ", b"true", b"1", b"\xb2", b"\xff\xfe", b"\xc3\xa9", b"a" * 256, b"a" * 257, b"x" * 8000),
    *(b"{}", b"[]", b"null", b"{", b'{"request_kind": "compaction"}', b'{"request_kind": 1e999}'),
    *(b"[" * 3000, b"%00", b"\t", b"\x01", b"\x7f", b"a,b", b"a:b", b"\xa0", b"9" * 5000),
)
_BYTES = (
    *(b"", b"\x00", b"\xff", b"\xc3", b"\xc3\x28", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xef\xbb\xbf"),
    *(b'"', b"\\", b"\\u", b"\\ud800", b"{", b"}", b"[", b"]", b",", b":", b" ", b"\t", b"\r\n", b"\x0b"),
    *(b"\xc2\xa0", b"\xe2\x80\xa8", b"null", b"e999", b"0", b"-", b"//", b"/*"),
)
_HEADERS = sorted({name for dialect in BUILT_IN for name in dialect.headers})
_TALK = re.compile(rf'"{_TALK_MARK}(/[\w/]+)-(\d+)-(\d+)"')
_KEY = re.compile(r'"(\w{2,40})": ?')


@dataclass(frozen=True, slots=True)
class Seed:
    """A valid request: fields of its body beside the messages, and headers that speak of its session."""

    body: dict[str, Any]
    headers: dict[str, str]


@dataclass(frozen=True, slots=True)
class Case:
    number: int
    path: str
    headers: list[tuple[bytes, bytes]]
    body: bytes


def load_seeds(path: Path | None = None) -> list[Seed]:
    """The packaged seeds, or those of a file: a JSON object ``{"body": {…}, "headers": {…}}`` a line.

    Raises ValueError for a file that is not that.
    """
    text = (path or files(__package__).joinpath("seeds.jsonl")).read_text(encoding="utf-8")
    seeds = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            entry = json.loads(line)
            seeds.append(Seed(dict(entry["body"]), dict(entry["headers"])))
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{path}: line {number} is not an object with body and headers") from None
    if not seeds:
        raise ValueError(f"{path}: holds no seeds")
    return seeds


class Cases:
    """All cases of one run."""

    def __init__(self, seeds: Sequence[Seed], seed: int) -> None:
        self._seeds = seeds
        self._seed = seed
        self._words = sorted({word for entry in seeds for word in _keys(entry.body)})

    def make(self, number: int) -> Case:
        random = Random((self._seed << 40) + number)
        entry = random.choice(self._seeds)
        (path,) = random.choices(list(SHARES), list(SHARES.values()))
        body, headers = self._whole(random, entry.body, path), dict(entry.headers)
        if random.random() < 0.2:
            other = random.choice(self._seeds)
            body.update(_copied(other.body))
            headers.update(other.headers)
        for _ in range(random.choice((0, 1, 1, 2, 3, 5))):
            self._bend(random, body)
        raw = _bytes(random, _text(random, body))
        return Case(number, path, _headers(random, headers), raw)

    def _whole(self, random: Random, fields: dict[str, Any], path: str) -> dict[str, Any]:
        """A request of one of many conversations, each of which grows in steps."""
        conversation, turn = random.randrange(CONVERSATIONS), random.randrange(TURNS)
        talk = "input" if path == RESPONSES else "messages"
        body: dict[str, Any] = {"model": "m", talk: f"{_TALK_MARK}{path}-{conversation}-{turn}"}
        if random.random() < 0.3:
            body[talk] = _messages(path, conversation, turn)
        if path == MESSAGES and random.random() < 0.6:
            body["context_management"] = {
                "edits": [_edit(random) for _ in range(random.choice((1, 1, 2, 3)))]
            }
        if random.random() < 0.3:
            body["stream"] = True
        if random.random() < 0.05:
            body["tools"] = [{"type": "function", "function": {"name": "ls", "parameters": {}}}]
        own = {"s1": f"s{conversation}", "s0": f"p{conversation % 20}"} if random.random() < 0.5 else {}
        body.update(_copied(fields, own))
        return body

    def _bend(self, random: Random, body: dict[str, Any]) -> None:
        """One change somewhere in the structure."""
        holder, key = _anywhere(random, body)
        kind = random.randrange(8)
        if holder is None:
            body[random.choice(self._words)] = self._value(random)
        elif kind <= 2:
            holder[key] = self._value(random)
        elif kind == 3:
            del holder[key]
        elif kind == 4:
            holder[key] = random.choice((lambda v: [v], lambda v: {"type": v}, str, lambda v: [v] * 20))(
                holder[key]
            )
        elif isinstance(holder, dict):
            word = random.choice(self._words)
            holder[word] = holder.pop(key) if kind == 5 else self._value(random)
        else:
            holder.insert(random.randrange(len(holder) + 1), self._value(random))

    def _value(self, random: Random) -> Any:
        chance = random.random()
        if chance < LARGE:
            return copy.copy(random.choice(_LARGE))
        if chance < 0.25:
            return f"{_RAW_MARK}{random.randrange(len(_RAW))}"
        if chance < 0.5:
            holder, key = _anywhere(random, dict(random.choice(self._seeds).body))
            return None if holder is None else _copied(holder[key])
        return _copied(random.choice(_VALUES))


def _messages(path: str, conversation: int, turn: int) -> list[dict[str, Any]]:
    """A conversation up to what is said in a turn, as the API at ``path`` has it; those of ten have the system
    prompt in common."""
    rules = f"You are agent {conversation % 10}. " + "Follow the rules. " * 12
    messages: list[dict[str, Any]] = [{"role": "system", "content": rules}, _task(conversation, 0)]
    steps = {MESSAGES: _tool_step, RESPONSES: _item_step}
    for number in range(1, turn + 1):
        messages += steps.get(path, _chat_step)(conversation, number)
    return messages


def _task(conversation: int, turn: int) -> dict[str, Any]:
    return {"role": "user", "content": f"Task {conversation}.{turn}: " + "look at the file; " * 8}


def _said(conversation: int, turn: int) -> str:
    return f"Answer {conversation}.{turn}: " + "it says so. " * 14


def _chat_step(conversation: int, turn: int) -> list[dict[str, Any]]:
    return [{"role": "assistant", "content": _said(conversation, turn - 1)}, _task(conversation, turn)]


def _tool_step(conversation: int, turn: int) -> list[dict[str, Any]]:
    """A thought, a tool use and its result. Some clients give every turn's use the same id."""
    use = f"call_{turn if conversation % 4 else 0}"
    name = ("ls", "read")[turn % 2]
    thought = {"type": "thinking", "thinking": "hm", "signature": "s"}
    call = {"type": "tool_use", "id": use, "name": name, "input": {"n": turn}}
    result = {"type": "tool_result", "tool_use_id": use, "content": _said(conversation, turn)}
    rest = [{"type": "text", "text": "go on"}] if turn % 3 == 0 else []
    return [{"role": "assistant", "content": [thought, call]}, {"role": "user", "content": [result, *rest]}]


def _item_step(conversation: int, turn: int) -> list[dict[str, Any]]:
    call = {"type": "function_call", "call_id": f"call_{turn}", "name": "ls", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": f"call_{turn}", "output": _said(conversation, turn)}
    return [{"type": "reasoning", "summary": [], "content": []}, call, output]


def _edit(random: Random) -> dict[str, Any]:
    """One of Anthropic's context edits."""
    if random.random() < 0.3:
        turns = {"type": "thinking_turns", "value": random.randrange(3)}
        return {"type": "clear_thinking_20251015", "keep": random.choice((turns, "all"))}
    edit: dict[str, Any] = {"type": "clear_tool_uses_20250919"}
    amounts = (
        ("trigger", {"type": "tool_uses", "value": random.randrange(3)}, 0.9),
        ("trigger", {"type": "input_tokens", "value": random.randrange(500)}, 0.2),
        ("keep", {"type": "tool_uses", "value": random.randrange(3)}, 0.8),
        ("keep", "all", 0.05),
        ("clear_at_least", {"type": "input_tokens", "value": random.randrange(60)}, 0.2),
        ("exclude_tools", ["ls"], 0.2),
        ("clear_tool_inputs", random.choice((True, ["read"])), 0.3),
    )
    return edit | {name: value for name, value, share in amounts if random.random() < share}


@lru_cache(maxsize=1024)
def _talk(path: str, conversation: int, turn: int) -> str:
    """The first turns of a conversation as JSON, made once: most cases bend other things than these."""
    return json.dumps(_messages(path, conversation, turn))


def _copied(value: Any, renamed: Mapping[str, str] = MappingProxyType({})) -> Any:
    """A copy in which some texts are other ones."""
    if isinstance(value, dict):
        return {key: _copied(item, renamed) for key, item in value.items()}
    if isinstance(value, list):
        return [_copied(item, renamed) for item in value]
    return renamed.get(value, value) if isinstance(value, str) else value


def _anywhere(random: Random, value: Any) -> tuple[Any, Any]:
    """A container in the structure and a key of it: what a client says of itself sooner than what it talks about."""
    holder, key = None, None
    while isinstance(value, dict | list) and value:
        if isinstance(value, dict):
            keys = [name for name in value if name not in ("model", "messages")] or list(value)
            key = random.choice(keys if random.random() < 0.9 else list(value))
        else:
            key = random.randrange(len(value))
        value[key] = copy.copy(value[key])  # all requests of a conversation share their messages
        holder, value = value, value[key]
        if random.random() < 0.25:
            break
    return holder, key


def _keys(value: Any) -> set[str]:
    if isinstance(value, dict):
        return {*value, *(word for item in value.values() for word in _keys(item))}
    return {word for item in value for word in _keys(item)} if isinstance(value, list) else set()


def _text(random: Random, body: dict[str, Any]) -> str:
    """The structure as JSON in any of its layouts, some keys of it twice."""
    text = random.choice(_LAYOUTS)(body)
    if _TALK_MARK in text:
        text = _TALK.sub(lambda found: _talk(found[1], int(found[2]), int(found[3])), text)
    if _RAW_MARK in text:
        text = re.sub(rf'"{_RAW_MARK}(\d+)"', lambda found: _RAW[int(found[1]) % len(_RAW)], text)
    if random.random() < 0.1 and (places := list(_KEY.finditer(text, 0, 20_000))):
        place = random.choice(places)
        double = f"{place[0]}{json.dumps(random.choice(_VALUES))}, "
        text = text[: place.start()] + double + text[place.start() :]
    return text


def _bytes(random: Random, text: str) -> bytes:
    """The text in bytes, a part of the cases with damage that no structure has."""
    raw = text.encode("utf-8", "surrogatepass")
    if random.random() < 0.75:
        return raw
    for _ in range(random.choice((1, 1, 2, 4))):
        raw = random.choice(_DAMAGE)(random, raw)
    return raw


def _cut(random: Random, raw: bytes) -> bytes:
    return raw[: random.randrange(len(raw) + 1)]


def _put(random: Random, raw: bytes) -> bytes:
    at = random.choice((0, len(raw), random.randrange(len(raw) + 1)))
    return raw[:at] + random.choice(_BYTES) + raw[at:]


def _flip(random: Random, raw: bytes) -> bytes:
    at = random.randrange(len(raw) + 1)
    return raw[:at] + bytes((random.randrange(256),)) + raw[at + 1 :]


def _leave_out(random: Random, raw: bytes) -> bytes:
    at = random.randrange(len(raw) + 1)
    return raw[:at] + raw[at + random.randrange(1, 40) :]


def _repeat(random: Random, raw: bytes) -> bytes:
    at = random.randrange(len(raw) + 1)
    return raw[: at + random.randrange(1, 40)] + raw[at:]


def _escape(random: Random, raw: bytes) -> bytes:
    """One character written as its escape: the same text where it stands inside a string."""
    at = random.randrange(len(raw) + 1)
    return raw[:at] + b"".join(b"\\u%04x" % code for code in raw[at : at + 1]) + raw[at + 1 :]


_COMPACT = (",", ":")
_LAYOUTS: tuple[Callable[[Any], str], ...] = (
    *(json.JSONEncoder().encode, json.JSONEncoder(separators=_COMPACT).encode) * 5,
    *(json.JSONEncoder(separators=_COMPACT, ensure_ascii=False).encode,) * 3,
    json.JSONEncoder(separators=(" ,\n  ", "\t: ")).encode,
)
_DAMAGE: tuple[Callable[[Random, bytes], bytes], ...] = (
    _cut,
    _put,
    _put,
    _flip,
    _leave_out,
    _repeat,
    _escape,
)


def _headers(random: Random, said: dict[str, str]) -> list[tuple[bytes, bytes]]:
    """As a server hands them on: no line breaks and no NUL in them, the rest as the client sent it."""
    headers = [(b"host", b"h"), (b"content-type", b"application/json"), (b"x-request-id", b"r")]
    headers += [(name.encode(), value.encode("latin-1", "replace")) for name, value in said.items()]
    while random.random() < 0.25:
        name = random.choice((*_HEADERS, "content-length", "authorization", "x-unknown")).encode()
        if random.random() < 0.2:
            name = name.title()
        headers.append((name, random.choice(_HEADER_VALUES)))
    if random.random() < 0.1:
        headers.append(random.choice(headers))
    return headers
