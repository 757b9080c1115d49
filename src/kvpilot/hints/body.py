"""The top level of a request's JSON body; where its lists may carry cache breakpoints, with their items set apart.

A body of hundreds of kilobytes is gone through once, and nothing in it is decoded that nobody asks for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from contextlib import suppress
from functools import cached_property
from typing import Any, TypedDict, cast

import msgspec
from msgspec import Raw

MAX_SCAN = 8 * 1024 * 1024
"""Bytes of a body beyond which it is not searched for marks."""
MARKS = {key: f'"{key}"'.encode() for key in ("cache_control", "prompt_cache_breakpoint")}
"""The keys of breakpoints, as JSON has them; a text that quotes one has a backslash before the quote, or is looked into
in vain."""
_List = list[Raw] | dict[str, Raw] | str | int | float | bool | None


class _Lists(TypedDict, total=False):
    """Fields whose items may be marked."""

    tools: _List
    system: _List
    messages: _List
    input: _List


class _Fields(TypedDict, total=False):
    """Fields that the gateway or a dialect of ours looks at besides."""

    model: Raw
    stream: Raw
    stream_options: Raw
    max_tokens: Raw
    n: Raw
    echo: Raw
    prompt: Raw
    prompt_embeds: Raw
    metadata: Raw
    cache_salt: Raw
    return_token_ids: Raw
    kv_transfer_params: Raw
    kv_hints: Raw
    kv_hint: Raw
    agent_hint: Raw
    agent_hints: Raw
    vllm_xargs: Raw
    job_id: Raw
    is_last_step: Raw
    program_id: Raw
    session_id: Raw
    nvext: Raw
    cache_control: Raw
    context_management: Raw
    prompt_cache_options: Raw
    prompt_cache_retention: Raw


class _Both(_Fields, _Lists, total=False):
    pass


LISTS = tuple(_Lists.__annotations__)
FIELDS = frozenset(_Fields.__annotations__)
"""Fields that are found at once; for others a marked body is gone through again."""

_decode = msgspec.json.Decoder(dict[str, Raw]).decode
_decode_marked = msgspec.json.Decoder(_Both).decode
_decode_list = msgspec.json.Decoder(list[Raw]).decode


def read_body(raw: bytes) -> Mapping[str, Raw]:
    """The top level of a JSON object, values undecoded. Raises ValueError or RecursionError where there is none."""
    if len(raw) > MAX_SCAN:
        return _decode(raw)
    # From behind, where marks mostly are.
    keys = [key for key, text in MARKS.items() if raw.rfind(text) >= 0]
    if not keys:
        return Unmarked(_decode(raw))
    # Names that one pass leaves out are not looked at in it: of other bytes they could be no text at all.
    if raw.isascii():
        # A number out of range, say, where a list should be, is nobody's business unless it is asked for.
        with suppress(ValueError, RecursionError):
            return Marked(raw, keys)
    return _decode(raw)


def items_of(value: Raw | None) -> list[Raw]:
    """The items of a list; none where it is no list."""
    try:
        return [] if value is None else _decode_list(value)
    except (ValueError, RecursionError):
        return []


class Unmarked(dict[str, Raw]):
    """The top level of a body that has no key of a mark anywhere."""


class Marked(Mapping[str, Raw]):
    """The top level of a body that has ``keys`` of marks somewhere, gone through once."""

    def __init__(self, raw: bytes, keys: list[str]) -> None:
        """Raises ValueError or RecursionError."""
        self.keys_there = keys
        self._raw = raw
        self._known = cast("dict[str, Any]", _decode_marked(raw))
        self.lists: dict[str, list[Raw]] = {}
        """By name the items of those that are lists."""
        for name in LISTS:
            if isinstance(items := self._known.pop(name, None), list):
                self.lists[name] = items

    def names_in(self, names: Set[str]) -> Set[str]:
        """Which of ``names`` the body has."""
        found = names & self._known.keys()
        return found if names <= FIELDS else found | (names & self._whole.keys())

    def get(self, name: str, default: Any = None) -> Any:
        value = self._known.get(name)
        return value if value is not None or name in FIELDS else self._whole.get(name, default)

    def __getitem__(self, name: str) -> Raw:
        return self._known[name] if name in FIELDS else self._whole[name]

    def __contains__(self, name: object) -> bool:
        return name in self._known or name in self.lists or (name not in FIELDS and name in self._whole)

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> Iterator[str]:
        return iter(self._whole)

    def __len__(self) -> int:
        return len(self._whole)

    @cached_property
    def _whole(self) -> dict[str, Raw]:
        """Everything, in a second pass."""
        return _decode(self._raw)
