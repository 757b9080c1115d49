"""What is checked before anything is started: ports, memory, exposure. Every refusal is a StackError."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from kvpilot.config import Config
from kvpilot.stack import StackError, plan
from kvpilot.stack.models import ModelSize

OVERHEAD_BYTES = int(2.5 * 2**30)
"""Resident memory of the stack's processes beyond the tiers and the weights, measured: interpreters and
libraries of vLLM's three processes, LMCache's two and kvpilot's."""

_SHM_EXTRA_BYTES = 32 * 2**20
"""Shared memory vLLM touches beside the device pool (message rings between its processes)."""


@dataclass(frozen=True, slots=True)
class PortUse:
    """A port the stack listens on and where the user chooses it."""

    what: str
    host: str
    port: int
    setting: str


def port_uses(config: Config, *, embedded: bool) -> list[PortUse]:
    """The ports of a stack, as configured (0 = to be chosen)."""
    gateway, control, cache = config.gateway, config.coordinator, config.lmcache
    uses = [
        PortUse("gateway", gateway.host, gateway.port, "--port or gateway.port"),
        PortUse("control API", control.host, control.port, "--control-port or coordinator.port"),
    ]
    if control.seed_port:
        uses.append(PortUse("memory protocol", control.host, control.seed_port, "coordinator.seed_port"))
    if not embedded:
        return uses
    local = "127.0.0.1"
    return [
        *uses,
        PortUse("vLLM", local, _port_of(config.engine.url, "engine.url"), "engine.url"),
        PortUse("LMCache", local, _port_of(cache.nodes[0], "lmcache.nodes"), "lmcache.nodes"),
        PortUse("LMCache messages", local, cache.mq_port, "lmcache.mq_port"),
        PortUse("LMCache metrics", local, cache.metrics_port, "lmcache.metrics_port"),
        PortUse(
            "LMCache coordinator",
            local,
            _port_of(cache.coordinator, "lmcache.coordinator"),
            "lmcache.coordinator",
        ),
    ]


def resolve_ports(config: Config, *, embedded: bool) -> Config:
    """Replace every port 0 by a free one and check that the others are free.

    Raises StackError naming the first taken port, its setting and, where visible, who holds it.
    """
    chosen: dict[str, int] = {}
    held: list[socket.socket] = []
    try:
        # Fixed ones first, so that a chosen one cannot take their place.
        for use in sorted(port_uses(config, embedded=embedded), key=lambda use: use.port == 0):
            if use.port and use.port in chosen.values():
                raise StackError(f"port {use.port} is configured twice: change {use.setting}")
            probe = socket.socket(socket.AF_INET6 if ":" in use.host else socket.AF_INET)
            held.append(probe)
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((use.host, use.port))
                # Binding alone succeeds beside a listener on another address of the same port.
                probe.listen(1)
            except OSError as error:
                raise StackError(_why_not(use, error)) from None
            chosen[use.setting] = probe.getsockname()[1]
    finally:
        for probe in held:
            probe.close()
    ports = {setting.rpartition(" ")[2]: port for setting, port in chosen.items()}
    resolved = config.with_overrides(
        gateway={"port": ports["gateway.port"]}, coordinator={"port": ports["coordinator.port"]}
    )
    if not embedded:
        return resolved
    return resolved.with_overrides(
        engine={"url": f"http://127.0.0.1:{ports['engine.url']}"},
        lmcache={
            "nodes": [f"http://127.0.0.1:{ports['lmcache.nodes']}"],
            "coordinator": f"http://127.0.0.1:{ports['lmcache.coordinator']}",
            "mq_port": ports["lmcache.mq_port"],
            "metrics_port": ports["lmcache.metrics_port"],
        },
    )


def check_sizes(config: Config) -> None:
    """Raises StackError when contexts, chunks and blocks of the embedded engine do not go together."""
    longest, chunk, block = config.engine.max_model_len, config.lmcache.chunk_size, config.engine.block_size
    if chunk % block:
        raise StackError(f"lmcache.chunk_size {chunk} must be a multiple of engine.block_size {block}")
    if longest < chunk:
        raise StackError(
            f"contexts of {longest} tokens are shorter than a chunk ({chunk}), so nothing would be cached: "
            "raise --max-model-len (engine.max_model_len)"
        )


def check_memory(config: Config, size: ModelSize) -> None:
    """Raises StackError when tiers, model and processes do not fit what this machine has left."""
    pool = plan.device_bytes(config, size)
    host = int(config.lmcache.host_gb * 2**30)
    needed = pool + host + (size.weight_bytes or 0) + OVERHEAD_BYTES
    available = available_memory()
    if needed > available:
        raise StackError(
            f"too little memory: {_gib(needed)} needed (device pool {_gib(pool)}, host tier {_gib(host)}, "
            f"model and processes {_gib(needed - pool - host)}), {_gib(available)} available: "
            "lower --host-gb (lmcache.host_gb), --device-tokens or --max-model-len"
        )
    shared = Path("/dev/shm")
    if shared.is_dir():
        room = psutil.disk_usage(str(shared)).free
        if pool + _SHM_EXTRA_BYTES > room:
            raise StackError(
                f"too little shared memory: {_gib(pool + _SHM_EXTRA_BYTES)} needed for the device pool, "
                f"{_gib(room)} free in /dev/shm: lower --device-tokens, or enlarge it (docker run --shm-size)"
            )


def check_disk(config: Config) -> None:
    """Raises StackError when the disk tier does not fit what is free where it lies."""
    folder = next(path for path in (config.state_dir, *config.state_dir.parents) if path.is_dir())
    wanted, free = int(config.lmcache.disk_gb * 2**30), psutil.disk_usage(str(folder)).free
    if wanted > free:
        raise StackError(
            f"too little disk: {_gib(wanted)} needed for the disk tier, {_gib(free)} free in {folder}: "
            "lower --disk-gb (lmcache.disk_gb), or put the state elsewhere (--state)"
        )


def available_memory() -> int:
    """Bytes that can still be had: the machine's, or the container's where that is less."""
    available = int(psutil.virtual_memory().available)
    return min([available, *_cgroup_rooms()])


def _cgroup_rooms() -> Iterator[int]:
    group = Path("/sys/fs/cgroup")
    for limit_name, usage_name in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            limit = (group / limit_name).read_text().strip()
            usage = (group / usage_name).read_text().strip()
        except OSError:
            continue
        if limit.isdigit() and usage.isdigit() and int(limit) > int(usage):
            yield int(limit) - int(usage)


def _port_of(url: str, setting: str) -> int:
    port = url.rstrip("/").rpartition(":")[2]
    if not port.isdigit():
        raise StackError(f"{setting} {url!r} has no port: the embedded stack needs http://127.0.0.1:PORT")
    return int(port)


def _why_not(use: PortUse, error: OSError) -> str:
    if error.errno not in (98, 13):  # EADDRINUSE, EACCES
        return f"{use.what} cannot listen on {use.host}:{use.port} ({error.strerror}): change {use.setting}"
    if error.errno == 13:
        return f"port {use.port} ({use.what}) needs privileges: change {use.setting} (0 = any free port)"
    return (
        f"port {use.port} ({use.what}) is taken{_holder(use.port)}: change {use.setting} (0 = any free port)"
    )


def _holder(port: int) -> str:
    try:
        for connection in psutil.net_connections("inet"):
            address = connection.laddr
            if (
                connection.status == psutil.CONN_LISTEN
                and address
                and address.port == port
                and connection.pid
            ):
                return f" by pid {connection.pid} ({psutil.Process(connection.pid).name()})"
    except psutil.Error:
        pass
    return ""


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
