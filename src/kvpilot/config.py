"""Configuration: one TOML file, overridden by environment variables, resolved once into one object.

``KVPILOT_<SECTION>__<KEY>`` overrides ``[section] key`` (for example ``KVPILOT_GATEWAY__PORT=9000``); it is read
by the type of its key, a list as JSON. The types say what a key may be, in words too: unknown keys and values
that are not allowed are errors that name the key and what it takes.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from kvpilot.tenants import DEFAULT_TENANT


class ConfigError(ValueError):
    """The configuration is wrong; the message says which key and what to do."""


_NAME = r"[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*"
_PORT = r"(6553[0-5]|655[0-2]\d|65[0-4]\d\d|6[0-4]\d{3}|[1-5]\d{4}|\d{1,4})"
_MOST = 1e9  # Keeps out infinity, which JSON cannot carry.

Text = Annotated[str, Meta(description="a text")]
Named = Annotated[str, Meta(min_length=1, description="a text that is not empty")]
Folder = Annotated[str, Meta(pattern=r"\A[^\0]+\Z", description="the path of a folder")]
Secret = Annotated[
    str,
    Meta(
        pattern=r"\A[!-~]*\Z", description="a text of visible ASCII characters", extra={"confidential": True}
    ),
]
Host = Annotated[
    str, Meta(pattern=rf"\A({_NAME}|\[?[0-9A-Fa-f.]*:[0-9A-Fa-f:.]*\]?)\Z", description="a host or address")
]
Url = Annotated[
    str,
    Meta(
        pattern=rf"\Ahttps?://({_NAME}|\[[0-9A-Fa-f.]*:[0-9A-Fa-f:.]*\])(:{_PORT})?(/[^\s?#]*)?\Z",
        description="a URL like http://127.0.0.1:8100 (ports end at 65535)",
    ),
]
Zmq = Annotated[
    str,
    Meta(
        pattern=rf"\A(|tcp://[^\s/]+:{_PORT}|ipc://.+)\Z",
        description="a ZMQ endpoint like tcp://127.0.0.1:5557, or empty",
    ),
]
Port = Annotated[int, Meta(ge=0, le=65535, description="a port, 0 to 65535 (0 = any free one)")]
OptionalPort = Annotated[int, Meta(ge=0, le=65535, description="a port, 0 to 65535 (0 = none)")]
Count = Annotated[int, Meta(ge=1, le=int(_MOST), description="a whole number, 1 or more")]
Workers = Annotated[int, Meta(ge=1, le=256, description="a whole number, 1 to 256")]
Blocks = Annotated[int, Meta(ge=0, le=int(_MOST), description="a whole number, 0 or more")]
Seconds = Annotated[float, Meta(gt=0, le=_MOST, description="a number of seconds, more than 0")]
Gigabytes = Annotated[float, Meta(gt=0, le=_MOST, description="a number of GB, more than 0")]
Share = Annotated[float, Meta(gt=0, le=1, description="a share, more than 0, at most 1")]
Switch = Annotated[bool, Meta(description="true or false")]
Mode = Annotated[Literal["kvpilot", "passive"], Meta(description="kvpilot or passive")]
HashAlgorithm = Annotated[Literal["blake3"], Meta(description="blake3, with which kvpilot names chunks")]


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of configuration sections: unknown keys are errors, not surprises."""


class GatewayConfig(Section, frozen=True):
    host: Host = "127.0.0.1"
    port: Port = 8000
    workers: Workers = 2
    max_body_mb: Count = 64
    max_in_flight: Count = 1024
    """Requests forwarded at once per worker; more get 503 with Retry-After."""
    connect_timeout_s: Seconds = 5.0
    read_timeout_s: Seconds = 600.0
    """Longest silence of the engine that is tolerated before a request is given up."""
    command_timeout_s: Seconds = 0.5
    """How long a management request waits for the coordinator before it is answered without it."""
    event_queue: Count = 2000
    """Events buffered per worker for the coordinator; beyond that they are shed and counted."""


class EngineConfig(Section, frozen=True):
    url: Url = "http://127.0.0.1:8100"
    model: Named = "m16k"
    """Embedded: smollm2, m4x256, m16k, or any path or name vLLM takes."""
    served_model_name: Text = ""
    """Name clients use; empty = the model's last path component."""
    cache_model_name: Text = ""
    """Model name in the cache layer's keys; empty = asked from the engine (/v1/models ``root``)."""
    tokenizer: Text = ""
    """Path of tokenizer files for span alignment; empty = the model path, else the engine's /tokenize."""
    kv_events: Zmq = ""
    """ZMQ endpoint of vLLM's KV events (tcp://host:port); empty = none."""
    kv_events_replay: Zmq = ""
    """ZMQ endpoint where vLLM replays missed KV events (``replay_endpoint``); empty = a gap clears the view."""
    world_size: Count = 1
    api_key: Secret = ""
    max_model_len: Count = 17408
    device_blocks: Blocks = 0
    """Device pool in blocks (--num-gpu-blocks-override); 0 = just enough for one longest context."""
    block_size: Count = 64
    python: Text = ""
    """Interpreter of the engine environment; empty = .venv-engine beside kvpilot's, else this one."""
    extra_args: Annotated[tuple[str, ...], Meta(description="a list of texts")] = ()
    """Further arguments for the embedded vLLM server."""
    plugin: Switch = False
    """Embedded: vLLM runs kvpilot's plug-in, which steers its device pool."""
    dev: Switch = False
    """Embedded: vLLM's development endpoints (cache resets), which benchmarks and tests need."""


class LMCacheConfig(Section, frozen=True):
    nodes: Annotated[
        tuple[Url, ...], Meta(min_length=1, description='a list of URLs like ["http://127.0.0.1:8080"]')
    ] = ("http://127.0.0.1:8080",)
    coordinator: Url = "http://127.0.0.1:9300"
    mq_port: Port = 5555
    metrics_port: Port = 9090
    chunk_size: Count = 256
    hash_algorithm: HashAlgorithm = "blake3"
    timeout_s: Seconds = 5.0
    host_gb: Gigabytes = 0.5
    disk_gb: Gigabytes = 2.0


class CoordinatorConfig(Section, frozen=True):
    host: Host = "127.0.0.1"
    port: Port = 8010
    token: Secret = ""
    """Bearer token of the control API; required when host is not loopback."""
    seed_port: OptionalPort = 0
    """Port of its own for LMCache-Ascend's memory protocol (its usual one is 6999); 0 = only on ``port``."""
    mode: Mode = "kvpilot"
    """kvpilot = act; passive = observe only."""
    tick_s: Seconds = 0.25
    directory_poll_s: Seconds = 0.5
    session_idle_s: Seconds = 86400.0
    """A session unheard of for so long is forgotten (its KV is left to the cache layer's own eviction)."""
    record: Annotated[str, Meta(pattern=r"\A[^\0]*\Z", description="the path of a folder, or empty")] = ""
    """Folder for recordings of the traffic, without any text, that `kvpilot sim compare` reads; empty = none."""
    record_mb: Count = 64
    """Size of one file of a recording."""
    record_files: Count = 20
    """So many files are kept, the latest."""
    recheck_s: Annotated[tuple[Seconds, ...], Meta(description="a list of seconds, each more than 0")] = (
        1.0,
        3.0,
        10.0,
        30.0,
    )
    """After an evict: when to look again for chunks a late asynchronous store brought back."""


class StateConfig(Section, frozen=True):
    dir: Folder = ".kvpilot"
    """Logs, sockets, embedded store, disk tier."""


class Config(Section, frozen=True):
    gateway: GatewayConfig = GatewayConfig()
    engine: EngineConfig = EngineConfig()
    lmcache: LMCacheConfig = LMCacheConfig()
    coordinator: CoordinatorConfig = CoordinatorConfig()
    state: StateConfig = StateConfig()
    tenants: Annotated[
        dict[str, Named], Meta(description="API keys with a tenant each", extra={"confidential": True})
    ] = {}
    """API key → tenant. Empty = every request belongs to the tenant ``default``."""
    budgets: Annotated[dict[str, Share], Meta(description="tenants with a share of host memory each")] = {}
    """Tenant → the most of host memory that its contexts may fill. Who is not named may fill all of it."""

    @property
    def state_dir(self) -> Path:
        return Path(self.state.dir).resolve()

    def with_overrides(self, **sections: Mapping[str, Any]) -> Config:
        """A copy with keys of whole sections replaced: ``with_overrides(gateway={"port": 1})``."""
        raw: dict[str, Any] = msgspec.to_builtins(self)
        for section, values in sections.items():
            raw[section] = {**raw[section], **values}
        return _convert(raw)


def load_config(path: str | Path | None = None, environ: Mapping[str, str] | None = None) -> Config:
    """Read ``path`` (or ``$KVPILOT_CONFIG``; neither = defaults) and apply environment overrides.

    Raises ConfigError with the offending key.
    """
    env = os.environ if environ is None else environ
    file = path or env.get("KVPILOT_CONFIG")
    raw: dict[str, Any] = {}
    if file:
        try:
            raw = tomllib.loads(Path(file).read_text("utf-8"))
        except OSError as error:
            raise ConfigError(f"cannot read configuration {file}: {error.strerror or error}") from None
        except UnicodeDecodeError as error:
            raise ConfigError(f"{file} is not UTF-8 (byte {error.start}): save it as UTF-8") from None
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{file} is not valid TOML: {error}") from None
    for name, text in env.items():
        if not name.startswith("KVPILOT_") or "__" not in name:
            continue
        section, _, key = name.removeprefix("KVPILOT_").partition("__")
        section = section.lower()
        # API keys and names of tenants are case-sensitive.
        key = key if section in ("tenants", "budgets") else key.lower()
        values = raw.setdefault(section, {})
        if not isinstance(values, dict):
            raise ConfigError(f"{name}: [{section}] is not a section")
        values[key] = _from_environment(section, key, text)
    return _convert(raw)


def check_url(url: str, name: str) -> str:
    """``url`` if it can be one. Raises ConfigError that calls it ``name``."""
    try:
        return msgspec.convert(url, Url)
    except msgspec.ValidationError:
        raise ConfigError(_refusal(name, url, Url)) from None


def _from_environment(section: str, key: str, text: str) -> Any:
    """Lists are JSON; the rest is text, which the conversion reads by the key's type."""
    kind = get_type_hints(Config).get(section, Section)
    if get_origin(kind) is dict or get_origin(get_type_hints(kind).get(key)) is not tuple:
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text


def _convert(raw: Mapping[str, Any]) -> Config:
    try:
        config = msgspec.convert(raw, Config, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(_explain(str(error), raw)) from None
    tenants = {DEFAULT_TENANT, *config.tenants.values()}
    if strangers := sorted(config.budgets.keys() - tenants):
        raise ConfigError(f"budgets.{strangers[0]} is no tenant: there are {', '.join(sorted(tenants))}")
    return config


def _explain(complaint: str, raw: Mapping[str, Any]) -> str:
    """What msgspec found wrong with ``raw``, in the words of the key's type."""
    place = re.search(r" - at `\$\.(\w+)(?:\.(\w+))?", complaint)
    section, key = place.groups() if place else (None, None)
    kind = get_type_hints(Config, include_extras=True)[section] if section else Config
    unknown = re.match(r"Object contains unknown field `(.*?)`(?: - at |\Z)", complaint, re.DOTALL)
    if unknown:
        name = f"{section}.{unknown[1]}" if section else unknown[1]
        return (
            f"{name} is not known: {section or 'the configuration'} has {', '.join(kind.__struct_fields__)}"
        )
    if key is not None:
        assert section is not None
        return _refusal(f"{section}.{key}", raw[section][key], get_type_hints(kind, include_extras=True)[key])
    if section is not None and get_origin(kind) is None:
        return f"{section} is {raw[section]!r}: it must be a section, [{section}]"
    return _refusal(section or "configuration", raw.get(section or ""), kind)


def _refusal(name: str, value: Any, kind: Any) -> str:
    allowed = next(entry for entry in get_args(kind) if isinstance(entry, Meta))
    told = "not allowed" if (allowed.extra or {}).get("confidential") else repr(value)
    return f"{name} is {told}: it must be {allowed.description}"


def dump_config(config: Config) -> bytes:
    """JSON of the resolved configuration, the form in which the supervisor hands it to its children."""
    return msgspec.json.encode(config)


def parse_config(raw: bytes) -> Config:
    """Inverse of :func:`dump_config`. Raises ConfigError."""
    try:
        return _convert(msgspec.json.decode(raw, type=dict))
    except msgspec.DecodeError as error:
        raise ConfigError(f"the configuration handed over is not JSON: {error}") from None


def is_loopback(host: str) -> bool:
    return host in ("localhost", "::1", "[::1]") or host.startswith("127.")
