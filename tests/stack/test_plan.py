"""What is started, with which bounds."""

from __future__ import annotations

import json
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from kvpilot.config import Config
from kvpilot.stack import plan
from kvpilot.stack.models import ModelSize
from kvpilot.stack.supervisor import restart_pause

M16K = ModelSize(16384, 60_000_000, 65536)


def flag(argv: tuple[str, ...], name: str) -> str:
    return argv[argv.index(name) + 1]


@given(st.integers(1, 200_000), st.sampled_from([32, 64, 128]))
def test_the_device_pool_holds_one_longest_context_and_no_more(longest: int, block: int) -> None:
    config = Config().with_overrides(engine={"max_model_len": longest, "block_size": block})
    usable = (plan.device_blocks(config) - 1) * block
    assert longest <= usable < longest + block


def test_every_tier_is_bounded() -> None:
    config = Config().with_overrides(lmcache={"host_gb": 1.5, "disk_gb": 3.0}, engine={"device_blocks": 300})
    specs = {spec.name: spec for spec in plan.engine_specs(config, Path("python"), M16K)}
    assert flag(specs["vllm"].argv, "--num-gpu-blocks-override") == "300"
    assert flag(specs["lmcache"].argv, "--l1-size-gb") == "1.5"
    disk = json.loads(flag(specs["lmcache"].argv, "--l2-adapter"))
    assert disk["max_capacity_gb"] == 3.0
    assert disk["eviction"], "without this section the disk tier grows without end"


def test_kv_that_cannot_be_loaded_is_recomputed_and_decoded_kv_is_kept() -> None:
    specs = {spec.name: spec for spec in plan.engine_specs(Config(), Path("python"), M16K)}
    transfer = json.loads(flag(specs["vllm"].argv, "--kv-transfer-config"))
    assert transfer["kv_load_failure_policy"] == "recompute"
    assert transfer["kv_connector_extra_config"]["lmcache.mp.save_decode_cache"] is True


def test_development_endpoints_are_closed_unless_asked_for() -> None:
    def mode(config: Config) -> str:
        return plan.engine_specs(config, Path("python"), M16K)[2].env["VLLM_SERVER_DEV_MODE"]

    assert mode(Config()) == "0"
    assert mode(Config().with_overrides(engine={"dev": True})) == "1"


@given(st.integers(1, 60))
def test_own_processes_come_back_at_once_and_nothing_is_restarted_in_a_tight_loop(failures: int) -> None:
    own, engine = restart_pause(failures, at_once=True), restart_pause(failures, at_once=False)
    assert (own == 0) == (failures == 1)
    assert 1 <= engine <= 30
    assert own <= 30
