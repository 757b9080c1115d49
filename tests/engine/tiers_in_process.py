"""Runs in the engine's environment, started by ``test_tiers``: vLLM's own tiers below its pool, given out by sessions.

Prints one JSON object: what was seen, by the name of the scene.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from in_process import CONTEXT, Engine, prompt

CHUNK = 64 * 4096
"""Bytes of a block of m4x256."""
PATIENCE_S = 60.0
STOCK = {
    "eviction_policy": "lru",
    "cache_policy_module_path": None,
}


class Tiered(Engine):
    """One vLLM with room for so many chunks in DRAM, and for any number on disk where there is a folder."""

    def __init__(self, model: str, chunks: int, disk: str = "", disk_chunks: int = 0, **extra: Any) -> None:
        below = {
            "type": "SessionDisk",
            "module_path": "kvpilot.engine.tier_disk",
            "root_dir": disk,
            "gb": disk_chunks * CHUNK / 2**30,
        }
        super().__init__(
            model,
            kv_transfer_config={
                "kv_connector": "OffloadingConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {
                    "spec_name": "KvpilotTieringSpec",
                    "spec_module_path": "kvpilot.engine.tiers",
                    "cpu_bytes_to_use": chunks * CHUNK,
                    "secondary_tiers": [below] if disk else [],
                    **extra,
                },
            },
        )
        self.tiers = self.scheduler.connector.connector_scheduler.manager

    def settle(self) -> None:
        """Until all copies have been made."""
        ends = time.monotonic() + PATIENCE_S
        while time.monotonic() < ends:
            if not self.scheduler.has_requests() and not self.scheduler.connector.has_pending_push_work():
                return
            self.llm.llm_engine.engine_core.engine_core.step()
        raise RuntimeError("the tiers do not come to rest")

    def ask(self, *args: Any, **kwargs: Any) -> int:
        cached = super().ask(*args, **kwargs)
        self.settle()
        return cached

    def later(self, **command: Any) -> dict[str, Any]:
        """A command that takes its time."""
        answers: list[bytes] = []
        self.scheduler.kvpilot.execute(json.dumps(command).encode(), answers.append)
        ends = time.monotonic() + PATIENCE_S
        while time.monotonic() < ends:
            if answers:
                return json.loads(answers[0])
            self.llm.llm_engine.engine_core.engine_core.step()
        raise RuntimeError("no answer")

    def empty_pool(self, *, dram: bool = False) -> None:
        self.settle()
        if not self.llm.llm_engine.engine_core.engine_core.reset_prefix_cache(reset_connector=dram):
            raise RuntimeError("a block is in use")

    def close(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()


def read_back(engine: Tiered) -> dict[str, Any]:
    ids = prompt("read-back")
    first = engine.run(ids, "read-back", max_tokens=8)
    engine.command(kind="demote", session="read-back")
    for i in range(5):
        engine.ask(f"other-{i}", f"other-{i}")
    context = engine.scheduler.kvpilot.book.get(("", "read-back")).contexts[-1]
    in_pool, _ = engine.scheduler.kvpilot.present(960, context)
    again = engine.run(ids, "read-back", max_tokens=8)
    return {
        "cached": again.num_cached_tokens,
        "in_pool": in_pool,
        "same": first.outputs[0].token_ids == again.outputs[0].token_ids,
        "tokens": len(first.outputs[0].token_ids),
    }


def prefetched(engine: Tiered) -> dict[str, Any]:
    engine.ask("prefetched", "prefetched")
    engine.empty_pool()
    outcome = engine.later(kind="prefetch", session="prefetched")
    return {"outcome": outcome, "cached": engine.ask("prefetched", "prefetched")}


def evicted(engine: Tiered) -> dict[str, Any]:
    engine.ask("evicted", "evicted")
    outcome = engine.command(kind="evict", session="evicted")
    return {"outcome": outcome, "cached": engine.ask("evicted")}


def what_a_session_ends_with_is_not_stored(engine: Tiered) -> dict[str, Any]:
    before = engine.command(kind="status")["tiers"]
    engine.ask("ends", "ends", last=True)
    after = engine.command(kind="status")["tiers"]
    engine.empty_pool()
    return {
        "not_stored": after["not_stored"] - before["not_stored"],
        "free": after["free"] - before["free"],
        "cached": engine.ask("ends"),
    }


def turned_off(engine: Tiered) -> dict[str, Any]:
    engine.ask("off", "off")
    engine.scheduler.kvpilot.turn_off("made to")
    engine.empty_pool()
    return {"cached": engine.ask("off", "off")}


def pressure(model: str, **extra: Any) -> dict[str, Any]:
    """Room for 40 chunks: 15 of a live session, used least recently, 15 of one that has ended since, and 25 of a third
    one."""
    engine = Tiered(model, 40, **extra)
    engine.ask("live", "live")
    engine.ask("ended", "ended")
    engine.ask("ended", "ended", tokens=CONTEXT - 30, last=True)
    engine.ask("newcomer", "newcomer", tokens=1620)
    engine.empty_pool()
    seen = {
        "order": engine.command(kind="status")["tiers"]["order"],
        "live": engine.ask("live", "live"),
    }
    engine.empty_pool()
    seen["ended"] = engine.ask("ended")
    engine.close()
    return seen


def errors_inside(model: str) -> dict[str, Any]:
    """Neither the order nor the admission works any more."""
    engine = Tiered(model, 20)

    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("made to fail")

    cached = []
    engine.ask("first", "first")
    engine.tiers._policy.order._kept.pop = broken
    engine.ask("second", "second")
    order = engine.command(kind="status")["tiers"]["order"]
    engine.empty_pool()
    cached.append(engine.ask("second", "second"))
    engine.scheduler.kvpilot.book.needed = broken
    engine.ask("third", "third")
    engine.empty_pool()
    cached.append(engine.ask("third", "third"))
    engine.close()
    return {"cached": cached, "order": order}


def disk(model: str, folder: str) -> dict[str, Any]:
    """DRAM has less room than the context."""
    engine = Tiered(model, 12, folder, disk_chunks=100)
    first = engine.run(prompt("disk"), "disk", max_tokens=4)
    engine.settle()
    engine.empty_pool(dram=True)
    again = engine.run(prompt("disk"), "disk", max_tokens=4)
    seen: dict[str, Any] = {
        "larger_than_dram": again.num_cached_tokens,
        "same": first.outputs[0].token_ids == again.outputs[0].token_ids,
    }
    engine.ask("small", "small", tokens=600)
    engine.empty_pool(dram=True)
    seen["prefetch"] = engine.later(kind="prefetch", session="small")
    seen["small"] = engine.ask("small", "small", tokens=600)
    engine.tiers._disks[0]._remover.submit(
        time.sleep, 0.5
    )  # Its files are deleted later than it is asked for.
    seen["evict"] = engine.command(kind="evict", session="small")
    seen["evicted"] = engine.ask("small", tokens=600)
    engine.close()
    return seen


def budget(model: str, folder: str) -> dict[str, Any]:
    """Room for 32 files, and two runs that write 15 and 25."""
    engine = Tiered(model, 64, folder, disk_chunks=32)
    engine.ask("first-run", "first-run")
    engine.close()
    engine = Tiered(model, 64, folder, disk_chunks=32)
    [first] = engine.command(kind="status")["tiers"]["disk"]
    engine.ask("second-run", "second-run", tokens=1620)
    [filled] = engine.command(kind="status")["tiers"]["disk"]
    engine.close()
    return {"first": first, "filled": filled["chunks"], "files": len(list(Path(folder).glob("**/*.bin")))}


def environment(model: str, folder: str) -> dict[str, Any]:
    os.environ.update(KVPILOT_TIERS_GB="1", KVPILOT_TIERS_DISK=f"{folder},2")
    engine = Engine(model)
    tiers: dict[str, Any] = engine.command(kind="status")["tiers"]
    engine.llm.llm_engine.engine_core.shutdown()
    return tiers


def malformed_environment(model: str) -> dict[str, Any]:
    os.environ.update(KVPILOT_TIERS_GB="much")
    engine = Engine(model)
    engine.ask("malformed")
    return {"connector": engine.command(kind="status")["connector"], "cached": engine.ask("malformed")}


def main(model: str) -> None:
    engine = Tiered(model, 200)
    seen: dict[str, Any] = {
        scene.__name__: scene(engine)
        for scene in (read_back, prefetched, evicted, what_a_session_ends_with_is_not_stored, turned_off)
    }
    region = engine.tiers.primary_tier._mmap_region
    seen["region"] = {"bytes": region.total_size_bytes, "named": Path(region.mmap_path).exists()}
    engine.close()
    seen["pressure"] = pressure(model)
    seen["pressure_stock"] = pressure(model, **STOCK)
    seen["errors_inside"] = errors_inside(model)
    with tempfile.TemporaryDirectory() as folder:
        seen["disk"] = disk(model, folder)
    with tempfile.TemporaryDirectory() as folder:
        seen["budget"] = budget(model, folder)
    with tempfile.TemporaryDirectory() as folder:
        seen["environment"] = environment(model, folder)
    seen["malformed_environment"] = malformed_environment(model)
    print(json.dumps(seen))


if __name__ == "__main__":
    main(sys.argv[1])
