"""vLLM's entry point: ``KVPILOT=1`` in the environment of any start wires kvpilot in; without it nothing happens.

Loaded in every process of vLLM. What is patched is named here and nowhere else, each time for the versions named
in :data:`VERSIONS` alone: with any other vLLM there is one warning, and vLLM serves as if kvpilot were not there.
"""

from __future__ import annotations

import logging
import os
from typing import Any

VERSIONS = ("0.32.0",)
"""Versions of vLLM whose internals this was written and tested against."""

log = logging.getLogger("vllm.kvpilot")

_registered = False


def register() -> None:
    """``vllm.general_plugins``. Never raises."""
    global _registered
    if _registered or os.environ.get("KVPILOT", "") not in ("1", "true", "on"):
        return
    _registered = True
    try:
        _wire()
    except Exception as error:
        log.warning("kvpilot is off, vLLM goes on without it: %r", error)


def refusal(version: str) -> str:
    """Why kvpilot does not work with a version of vLLM; empty = it does."""
    if version.split("+")[0] in VERSIONS:
        return ""
    return f"it knows vLLM {', '.join(VERSIONS)}, this is {version}"


def _wire() -> None:
    import vllm

    if reason := refusal(vllm.__version__):
        if _first_process():
            log.warning("kvpilot is off, vLLM goes on without it: %s", reason)
        return
    _wire_scheduler()
    _wire_tiers()
    _wire_engine()
    _wire_ranks()
    _wire_route()


def _first_process() -> bool:
    """Whether this is the process that was started, not one that vLLM made: so that the log says things once."""
    marker = "KVPILOT_WARNED"
    first = marker not in os.environ
    os.environ[marker] = "1"
    return first


def _wire_scheduler() -> None:
    """Whatever scheduler vLLM would take by itself becomes session-aware; one named by a flag is left as it is."""
    from vllm.config.scheduler import SchedulerConfig

    stock = SchedulerConfig.get_scheduler_cls

    def get_scheduler_cls(self: Any) -> Any:
        chosen = stock(self)
        if self.scheduler_cls is not None:
            return chosen
        from kvpilot.engine.scheduler import session_aware

        return session_aware(chosen)

    SchedulerConfig.get_scheduler_cls = get_scheduler_cls


def _wire_tiers() -> None:
    """Tiers that the environment asks for, unless a flag names a connector or vLLM's own offloading."""
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs

    stock = EngineArgs.create_engine_config

    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.kv_transfer_config is None and self.kv_offloading_size is None:
            from kvpilot.engine.tier_env import transfer_config

            try:
                if (chosen := transfer_config(os.environ)) is not None:
                    self.kv_transfer_config = KVTransferConfig(**chosen)
            except ValueError as error:
                log.warning("kvpilot adds no tiers: %s", error)
        return stock(self, *args, **kwargs)

    EngineArgs.create_engine_config = create_engine_config


def _wire_engine() -> None:
    """The engine's process answers commands from the API server's, and from its own port."""
    from vllm.v1.engine.core import DPEngineCoreProc, EngineCore, EngineCoreProc

    from kvpilot.engine.port import open_port, utility

    EngineCore.kvpilot_command = utility

    def opening(stock: Any) -> Any:
        def run_busy_loop(self: Any) -> None:
            open_port(self)
            stock(self)

        return run_busy_loop

    # Plug-ins are loaded inside the engine's constructor: the loop is the first that can still be changed.
    for kind in (EngineCoreProc, DPEngineCoreProc):
        kind.run_busy_loop = opening(kind.run_busy_loop)


def _wire_ranks() -> None:
    """What the ranks say of loads is noted before it is merged, and each rank tells how it is."""
    from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
    from vllm.v1.executor.multiproc_executor import WorkerProc

    from kvpilot.engine.loads import NAME
    from kvpilot.engine.port import open_rank_port
    from kvpilot.engine.ranks import arrivals

    merge, loop, work = (
        KVOutputAggregator.aggregate,
        WorkerProc.worker_busy_loop,
        WorkerProc._execute_worker_rpc,
    )

    def aggregate(self: Any, outputs: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            arrivals.heard(outputs, NAME)
        except Exception:
            log.exception("kvpilot cannot tell the ranks apart")
        return merge(self, outputs, *args, **kwargs)

    def worker_busy_loop(self: Any) -> None:
        self.kvpilot_pulse = None
        try:
            self.kvpilot_pulse = open_rank_port(self)
        except Exception:
            log.exception("kvpilot has no port for this rank")
        loop(self)

    def execute(self: Any, request: Any) -> None:
        if self.kvpilot_pulse is None:
            work(self, request)
        else:
            self.kvpilot_pulse.during(lambda: work(self, request))

    KVOutputAggregator.aggregate = aggregate
    WorkerProc.worker_busy_loop = worker_busy_loop
    WorkerProc._execute_worker_rpc = execute


def _wire_route() -> None:
    """The control route, beside the plug-ins that VLLM_PLUGINS names."""
    import vllm.plugins as plugins

    stock = plugins.load_endpoint_plugins

    def load_endpoint_plugins(supported_tasks: Any = None) -> Any:
        from kvpilot.engine.route import ControlRoute

        return [*stock(supported_tasks), ControlRoute()]

    plugins.load_endpoint_plugins = load_endpoint_plugins
