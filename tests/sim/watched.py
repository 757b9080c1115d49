"""An engine under watch: what holds of requests in the device, whoever decides what else lies there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from kvpilot.domain import Tier
from kvpilot.sim.serving import Engine
from kvpilot.sim.tiers import Node


@contextmanager
def watched() -> Iterator[list[int]]:
    """All engines that run meanwhile are checked whenever requests begin or end. The calls in order of beginning."""
    began: list[int] = []
    running: set[int] = set()
    begin, end, run = Engine._begin, Engine._end, Engine.run

    def loads(engine: Engine) -> None:
        load = engine.load

        def noted(call: int, now: float) -> tuple[int, float]:
            began.append(call)
            running.add(call)
            return load(call, now)

        engine.load = noted  # type: ignore[method-assign]
        run(engine)
        assert not running and sorted(began) == list(range(engine._workload.calls))

    def ends(engine: Engine, call: int, now: float) -> None:
        _check(engine, running)
        running.discard(call)
        end(engine, call, now)

    def begins(engine: Engine, now: float) -> None:
        begin(engine, now)
        _check(engine, running)

    with patch.multiple(Engine, run=loads, _end=ends, _begin=begins):
        yield began


def _check(engine: Engine, running: set[int]) -> None:
    workload = engine._workload
    tips = workload.context_tip
    nodes = {node for call in running for node in workload.path(int(tips[call]))}
    held = sum(int(workload.size[node]) for node in nodes)
    some = [call for call in running if workload.depth(int(tips[call]))]
    assert held <= engine._device_chunks or len(some) == 1, "more runs than the device holds"
    if isinstance(engine, Node):
        for cache in engine._caches.values():
            cache.check()
        device = engine._caches[Tier.DEVICE]
        if held <= device.capacity:
            for call in running:
                assert device.held(int(tips[call])) == workload.depth(int(tips[call])), "a request lost KV"
