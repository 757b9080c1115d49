"""Configuration: one TOML file, overridden by environment variables, resolved once into one object.

``KVPILOT_<SECTION>__<KEY>`` overrides ``[section] key`` (for example ``KVPILOT_GATEWAY__PORT=9000``).
Unknown keys and wrong types are errors that name the key.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec


class ConfigError(ValueError):
    """The configuration is wrong; the message says which key and what to do."""


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of configuration sections: unknown keys are errors, not surprises."""


class GatewayConfig(Section, frozen=True):
    host: str = "127.0.0.1"
    port: int = 8000
    workers: int = 2
    max_body_mb: int = 64
    max_in_flight: int = 1024
    """Requests forwarded at once per worker; more get 503 with Retry-After."""
    connect_timeout_s: float = 5.0
    read_timeout_s: float = 600.0
    """Longest silence of the engine that is tolerated before a request is given up."""
    command_timeout_s: float = 0.5
    """How long a management request waits for the coordinator before it is answered without it."""
    event_queue: int = 2000
    """Events buffered per worker for the coordinator; beyond that they are shed and counted."""


class EngineConfig(Section, frozen=True):
    url: str = "http://127.0.0.1:8100"
    model: str = "m16k"
    """Embedded: smollm2, m4x256, m16k, or any path or name vLLM takes."""
    served_model_name: str = ""
    """Name clients use; empty = the model's last path component."""
    cache_model_name: str = ""
    """Model name in the cache layer's keys; empty = asked from the engine (/v1/models ``root``)."""
    tokenizer: str = ""
    """Path of tokenizer files for span alignment; empty = the model path, else the engine's /tokenize."""
    kv_events: str = ""
    """ZMQ endpoint of vLLM's KV events (tcp://host:port); empty = none."""
    kv_events_replay: str = ""
    """ZMQ endpoint where vLLM replays missed KV events (``replay_endpoint``); empty = a gap clears the view."""
    world_size: int = 1
    api_key: str = ""
    max_model_len: int = 17408
    device_blocks: int = 0
    """Device pool in blocks (--num-gpu-blocks-override); 0 = just enough for one longest context."""
    block_size: int = 64
    python: str = ""
    """Interpreter of the engine environment; empty = .venv-engine beside kvpilot's, else this one."""
    extra_args: tuple[str, ...] = ()
    """Further arguments for the embedded vLLM server."""
    dev: bool = False
    """Embedded: vLLM's development endpoints (cache resets), which benchmarks and tests need."""


class LMCacheConfig(Section, frozen=True):
    nodes: tuple[str, ...] = ("http://127.0.0.1:8080",)
    coordinator: str = "http://127.0.0.1:9300"
    mq_port: int = 5555
    metrics_port: int = 9090
    chunk_size: int = 256
    hash_algorithm: str = "blake3"
    timeout_s: float = 5.0
    host_gb: float = 0.5
    disk_gb: float = 2.0


class CoordinatorConfig(Section, frozen=True):
    host: str = "127.0.0.1"
    port: int = 8010
    token: str = ""
    """Bearer token of the control API; required when host is not loopback."""
    mode: str = "kvpilot"
    """kvpilot = act; passive = observe only."""
    tick_s: float = 0.25
    directory_poll_s: float = 0.5
    session_idle_s: float = 86400.0
    """A session unheard of for so long is forgotten (its KV is left to the cache layer's own eviction)."""
    recheck_s: tuple[float, ...] = (1.0, 3.0, 10.0, 30.0)
    """After an evict: when to look again for chunks a late asynchronous store brought back."""


class StateConfig(Section, frozen=True):
    dir: str = ".kvpilot"
    """Logs, sockets, embedded store, disk tier."""


class Config(Section, frozen=True):
    gateway: GatewayConfig = GatewayConfig()
    engine: EngineConfig = EngineConfig()
    lmcache: LMCacheConfig = LMCacheConfig()
    coordinator: CoordinatorConfig = CoordinatorConfig()
    state: StateConfig = StateConfig()
    tenants: dict[str, str] = {}
    """API key → tenant. Empty = every request belongs to the tenant ``default``."""

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
            raw = tomllib.loads(Path(file).read_text())
        except OSError as error:
            raise ConfigError(f"cannot read configuration {file}: {error.strerror or error}") from None
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{file} is not valid TOML: {error}") from None
    for name, text in env.items():
        if not name.startswith("KVPILOT_") or "__" not in name:
            continue
        section, _, key = name.removeprefix("KVPILOT_").lower().partition("__")
        values = raw.setdefault(section, {})
        if not isinstance(values, dict):
            raise ConfigError(f"{name}: [{section}] is not a section")
        values[key] = _parse_env(text)
    return _convert(raw)


def _parse_env(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _convert(raw: Mapping[str, Any]) -> Config:
    try:
        return msgspec.convert(raw, Config, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"configuration: {error}") from None


def dump_config(config: Config) -> bytes:
    """JSON of the resolved configuration, the form in which the supervisor hands it to its children."""
    return msgspec.json.encode(config)


def parse_config(raw: bytes) -> Config:
    """Inverse of :func:`dump_config`."""
    return msgspec.json.decode(raw, type=Config)


def is_loopback(host: str) -> bool:
    return host in ("localhost", "::1", "[::1]") or host.startswith("127.")
