"""Everything between a configuration and the first process: checks, model, ports, resolved values."""

from __future__ import annotations

import http.client
import socket
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from kvpilot.config import Config, dump_config
from kvpilot.link import make_runtime_dir, runtime_dir
from kvpilot.stack import StackError, models, plan, preflight
from kvpilot.stack.engine_env import find_engine_python
from kvpilot.stack.plugin_folder import make_plugin_folder

Say = Callable[[str], None]


class ServedModel(msgspec.Struct):
    """An entry of /v1/models; engines other than vLLM tell only ``id``."""

    id: str
    root: str | None = None
    max_model_len: int | None = None


class _ModelList(msgspec.Struct):
    data: Annotated[list[ServedModel], msgspec.Meta(min_length=1)]


@dataclass(slots=True)
class Prepared:
    """A stack ready to be started. ``listener`` is the gateway's listening socket; close it when done."""

    config: Config
    specs: list[plan.ProcessSpec]
    listener: socket.socket


def prepare(config: Config, *, embedded: bool, say: Say) -> Prepared:
    """Check and resolve ``config``; make the model if need be. Raises StackError, having started nothing."""
    wrong = plan.check_control_access(config)
    if wrong:
        raise StackError(wrong)
    if embedded:
        models.check_model(config.engine.model)
        preflight.check_sizes(config)
        preflight.check_disk(config)
    config = preflight.resolve_ports(config, embedded=embedded)
    engines: list[plan.ProcessSpec] = []
    if embedded:
        python = find_engine_python(config)
        preflight.check_memory(config, models.model_size(models.model_path(config.engine.model)))
        if (
            not Path(models.model_path(config.engine.model)).is_dir()
            and config.engine.model in models.BUILT_IN
        ):
            say(f"making model {config.engine.model} (once, under a minute)")
        path = models.ensure_model(config.engine.model, python)
        size = models.model_size(path)
        config = _resolve_engine(config, path, size, say)
        preflight.check_memory(config, size)
        for folder in (config.state_dir / "disk", make_runtime_dir(config) / "tmp"):
            folder.mkdir(parents=True, exist_ok=True)
        if config.engine.plugin:
            make_plugin_folder(plan.plugin_folder(config))
        engines = plan.engine_specs(config, python, size)
    else:
        config = _resolve_served(config)
    listener = _listen(config)
    config_file = config.state_dir / "config.json"
    config_file.touch(mode=0o600)  # It may hold tokens.
    config_file.write_bytes(dump_config(config))
    own = plan.own_specs(config, config_file, listener.fileno(), tuple(spec.name for spec in engines))
    return Prepared(config, [*engines, *own], listener)


def _resolve_engine(config: Config, path: str, size: models.ModelSize, say: Say) -> Config:
    engine = config.engine
    longest = engine.max_model_len
    if size.max_positions and longest > size.max_positions:
        longest = size.max_positions
        say(f"longest context cut to {longest} tokens, the most {engine.model} can take")
    if engine.device_blocks and engine.device_blocks * engine.block_size < longest + engine.block_size:
        raise StackError(
            f"device pool of {engine.device_blocks * engine.block_size} tokens cannot hold one context "
            f"of {longest}: raise --device-tokens or lower --max-model-len"
        )
    return config.with_overrides(
        engine={
            "model": path,
            "served_model_name": engine.served_model_name or models.served_name(engine.model),
            "cache_model_name": path,
            "tokenizer": engine.tokenizer or (path if Path(path).is_dir() else ""),
            # An ipc socket in a private folder: over TCP vLLM would publish prompts on every interface.
            "kv_events": engine.kv_events or f"ipc://{runtime_dir(config)}/kv-events",
            "kv_events_replay": engine.kv_events_replay or f"ipc://{runtime_dir(config)}/kv-replay",
            "max_model_len": longest,
        }
    )


def _resolve_served(config: Config) -> Config:
    """Take over what the running engine says of its model. Raises StackError when it does not answer."""
    model = ask_engine(config)
    root = model.root or model.id
    return config.with_overrides(
        engine={
            "model": root,
            "served_model_name": model.id,
            "cache_model_name": config.engine.cache_model_name or root,
            "max_model_len": model.max_model_len or config.engine.max_model_len,
        }
    )


def ask_engine(config: Config) -> ServedModel:
    """The first model the running engine serves. Raises StackError when it does not tell."""
    engine = config.engine
    request = urllib.request.Request(f"{engine.url.rstrip('/')}/v1/models")
    if engine.api_key:
        request.add_header("Authorization", f"Bearer {engine.api_key}")
    try:
        with urllib.request.urlopen(request, timeout=10) as reply:
            return msgspec.json.decode(reply.read(), type=_ModelList).data[0]
    except urllib.error.HTTPError as error:
        advice = "engine.api_key" if error.code in (401, 403) else "--engine (engine.url)"
        raise StackError(f"engine {engine.url} answers {error.code} to /v1/models: check {advice}") from None
    except msgspec.MsgspecError:
        raise StackError(
            f"engine {engine.url} answers /v1/models with something else than a list of models: "
            "check --engine (engine.url)"
        ) from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        raise StackError(
            f"engine {engine.url} does not answer /v1/models ({reason}): check --engine (engine.url)"
        ) from None


def _listen(config: Config) -> socket.socket:
    host, port = config.gateway.host, config.gateway.port
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise StackError(
            f"gateway cannot listen on {host}:{port} ({error.strerror}): change --port"
        ) from None
    # Connections wait here while a killed worker is restarted.
    listener.listen(2048)
    return listener
