"""What is forwarded instead of what arrived: the client's request plus what kvpilot needs to know. No I/O."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import msgspec

from kvpilot.domain import SignalKind
from kvpilot.engine.hints import NAME as PLUGIN
from kvpilot.gateway.errors import bad_salt, not_an_object
from kvpilot.hints import HintRequest, Hints, read_body, read_hints
from kvpilot.tenants import DEFAULT_TENANT, tenant_salt

TOKEN_IDS = "return_token_ids"
USAGE = "stream_options"
HASHES = "chunk_hashes"
PARAMS = "kv_transfer_params"

Fields = dict[str, msgspec.Raw]

_OWN = ("model", "stream", "cache_salt", PARAMS, TOKEN_IDS, USAGE, "echo", "prompt", "n")
"""What the gateway looks at, and may change."""
_FIELDS = msgspec.json.Decoder(Fields)
_ITEMS = msgspec.json.Decoder(list[msgspec.Raw])
_TRUE = msgspec.Raw(b"true")


@dataclass(frozen=True, slots=True)
class Prepared:
    """A parsed request and the body to forward for it, in pieces: most of it is what came."""

    pieces: tuple[bytes | memoryview, ...]
    hints: Hints
    salt: str = ""
    model: str = ""
    stream: bool = False
    added: frozenset[str] = frozenset()
    """Which of TOKEN_IDS and USAGE the gateway asks for though the client did not."""
    chunk_hashes: bool = False
    parsed: bool = True

    @property
    def body(self) -> bytes:
        return b"".join(self.pieces)


def prepare(
    raw: bytes,
    headers: Mapping[str, str],
    tenant: str,
    *,
    ask: Collection[str] = (TOKEN_IDS, USAGE),
    plugin: bool = False,
) -> Prepared:
    """Parse ``raw`` and decide what to forward. Values the gateway does not care about are copied verbatim.

    A body that is not a JSON object goes to the engine as it is: the engine has its own words for that.
    Only a named tenant's is refused (GatewayError 400), as it could not be salted and would share KV. With
    ``plugin`` the engine is told what of the hints concerns its own pool.
    """
    try:
        fields = read_body(raw)
    except (ValueError, RecursionError):
        if tenant != DEFAULT_TENANT:
            raise not_an_object() from None
        return Prepared((raw,), read_hints(HintRequest({}, headers, tenant)), parsed=False)
    own = {name: value for name in _OWN if (value := fields.get(name)) is not None}
    changed = dict(own)
    salt = _apply_salt(changed, tenant)
    chunk_hashes = _take_hash_request(changed)
    stream = _is(own.get("stream"), b"true")
    added = _apply_questions(changed, ask, stream)
    hints = read_hints(HintRequest(fields, headers, tenant, salt, raw))
    if plugin:
        _tell_plugin(changed, hints)
    return Prepared(
        pieces=_with_changes(raw, fields, own, changed),
        hints=hints,
        salt=salt,
        model=_text(own.get("model")),
        stream=stream,
        added=added,
        chunk_hashes=chunk_hashes,
    )


def salted(raw: bytes, tenant: str) -> bytes:
    """Any JSON request with a named tenant's salt in it. Raises GatewayError 400 when it is not an object."""
    try:
        fields = _FIELDS.decode(raw)
    except (ValueError, RecursionError):
        raise not_an_object() from None
    _apply_salt(fields, tenant)
    return msgspec.json.encode(fields)


def _with_changes(
    raw: bytes, fields: Mapping[str, msgspec.Raw], own: Fields, changed: Fields
) -> tuple[bytes | memoryview, ...]:
    """``raw`` as it is, with what is new spliced in at its end, or written anew when more than that changed: what it
    has of ``_OWN`` has become ``changed``."""
    new = {name: value for name, value in changed.items() if own.get(name) is not value}
    if not new and len(changed) == len(own):
        return (raw,)
    if not fields or len(changed) != len(own) + len(new):
        everything = {**fields, **new}
        for name in own.keys() - changed.keys():
            del everything[name]
        return (msgspec.json.encode(everything),)
    return memoryview(raw)[: raw.rindex(b"}")], b"," + msgspec.json.encode(new)[1:]


def _apply_salt(fields: Fields, tenant: str) -> str:
    value = fields.get("cache_salt")
    asked = _text(value)
    if tenant == DEFAULT_TENANT:
        return asked
    if not asked and not _is_null(value):
        raise bad_salt()
    salt = tenant_salt(tenant, asked)
    fields["cache_salt"] = msgspec.Raw(msgspec.json.encode(salt))
    return salt


def _tell_plugin(fields: Fields, hints: Hints) -> None:
    """What kvpilot's plug-in in the engine reads beside the session's id, which goes in a header."""
    kinds = {signal.kind for signal in hints.signals}
    told = {
        "parent": hints.session.parent or "",
        "retain_s": hints.retention.ttl_s if hints.retention is not None else 0.0,
        "supersedes": SignalKind.COMPACTED in kinds,
        "last": SignalKind.END in kinds,
    }
    told = {name: value for name, value in told.items() if value}
    params = {} if _is_null(fields.get(PARAMS)) else _object(fields[PARAMS])
    if hints.session.id is None or not told or params is None:
        return
    params[PLUGIN] = msgspec.Raw(msgspec.json.encode(told))
    fields[PARAMS] = msgspec.Raw(msgspec.json.encode(params))


def _take_hash_request(fields: Fields) -> bool:
    """Whether the client wants chunk hashes; the question is ours and does not reach the engine."""
    params = _object(fields.get(PARAMS))
    if params is None or not _is(params.pop(HASHES, None), b"true"):
        return False
    if params:
        fields[PARAMS] = msgspec.Raw(msgspec.json.encode(params))
    else:
        del fields[PARAMS]
    return True


def _apply_questions(fields: Fields, ask: Collection[str], stream: bool) -> frozenset[str]:
    added = set()
    # With ``echo`` vLLM leaves the prompt out of the text when it returns ids: then the reply would change.
    single_prompt = "prompt" not in fields or _is_single_prompt(fields["prompt"])
    if TOKEN_IDS in ask and _is_off(fields.get(TOKEN_IDS)) and _is_off(fields.get("echo")) and single_prompt:
        fields[TOKEN_IDS] = _TRUE
        added.add(TOKEN_IDS)
    # Usage moves the fingerprint from the last chunk of each choice to a chunk of its own; that is put
    # back for one choice (see stream.py), so only then is it asked for.
    if USAGE in ask and stream and single_prompt and _is_one(fields.get("n")):
        options = {} if _is_null(fields.get(USAGE)) else _object(fields[USAGE])
        if options is not None and _is_off(options.get("include_usage")):
            options.pop("continuous_usage_stats", None)
            options["include_usage"] = _TRUE
            fields[USAGE] = msgspec.Raw(msgspec.json.encode(options))
            added.add(USAGE)
    return frozenset(added)


def _is(value: msgspec.Raw | None, text: bytes) -> bool:
    return value is not None and bytes(value) == text


def _is_null(value: msgspec.Raw | None) -> bool:
    return value is None or bytes(value) == b"null"


def _is_off(value: msgspec.Raw | None) -> bool:
    return value is None or bytes(value) in (b"false", b"null")


def _is_one(value: msgspec.Raw | None) -> bool:
    return value is None or bytes(value) in (b"1", b"null")


def _is_single_prompt(value: msgspec.Raw) -> bool:
    """A text or one list of ids; a list of several prompts is several contexts."""
    if memoryview(value)[0] != ord("["):
        return True
    try:
        items = _ITEMS.decode(value)
    except (ValueError, RecursionError):
        return False
    return len(items) <= 1 or memoryview(items[0])[0] not in b'["'


def _object(value: msgspec.Raw | None) -> Fields | None:
    try:
        return None if value is None else _FIELDS.decode(value)
    except (ValueError, RecursionError):
        return None


def _text(value: msgspec.Raw | None) -> str:
    try:
        return "" if value is None else msgspec.json.decode(value, type=str)
    except ValueError:
        return ""
