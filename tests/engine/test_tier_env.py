"""The variables that add vLLM's own tiers to a start without flags."""

from __future__ import annotations

import pytest

from kvpilot.engine.tier_env import DISK, DRAM, transfer_config


def test_nothing_is_added_unasked() -> None:
    assert transfer_config({}) is None
    assert transfer_config({DRAM: ""}) is None


def test_dram_alone_and_with_a_disk() -> None:
    alone = transfer_config({DRAM: "1.5"})
    assert alone is not None
    assert alone["kv_connector"] == "OffloadingConnector"
    assert alone["kv_connector_extra_config"]["cpu_bytes_to_use"] == 3 * 2**29
    assert "secondary_tiers" not in alone["kv_connector_extra_config"]
    both = transfer_config({DRAM: "1", DISK: "/var/k,v,100"})
    assert both is not None
    [disk] = both["kv_connector_extra_config"]["secondary_tiers"]
    assert (disk["root_dir"], disk["gb"]) == ("/var/k,v", 100.0)


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({DRAM: "much"}, DRAM),
        ({DRAM: "-1"}, "above 0"),
        ({DRAM: "nan"}, "above 0"),
        ({DISK: "/var/kv,1"}, f"needs {DRAM}"),
        ({DRAM: "1", DISK: "/var/kv"}, "/var/kv,100"),
        ({DRAM: "1", DISK: "kv,1"}, "/var/kv,100"),
        ({DRAM: "1", DISK: "/var/kv,lots"}, "lots"),
    ],
)
def test_what_makes_no_sense_is_said_in_one_line(environ: dict[str, str], said: str) -> None:
    with pytest.raises(ValueError, match=said) as refused:
        transfer_config(environ)
    assert "\n" not in str(refused.value)
