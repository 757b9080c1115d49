"""vLLM's own tiers by two variables of the environment, for a start without flags. Pure.

``KVPILOT_TIERS_GB=8`` is DRAM; ``KVPILOT_TIERS_DISK=/path,100`` is a folder below it and its budget. GiB both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

DRAM = "KVPILOT_TIERS_GB"
DISK = "KVPILOT_TIERS_DISK"


def transfer_config(environ: Mapping[str, str]) -> dict[str, Any] | None:
    """vLLM's ``kv_transfer_config`` for what the environment asks for; None: it asks for no tiers. Raises ValueError
    with one line that says what is wrong."""
    dram, disk = environ.get(DRAM, ""), environ.get(DISK, "")
    if not dram and not disk:
        return None
    if not dram:
        raise ValueError(
            f"{DISK} needs {DRAM}, too: all that goes to disk or comes from there passes through DRAM"
        )
    extra: dict[str, Any] = {
        "spec_name": "KvpilotTieringSpec",
        "spec_module_path": "kvpilot.engine.tiers",
        "cpu_bytes_to_use": int(_gigabytes(DRAM, dram) * 2**30),
    }
    if disk:
        folder, _, budget = disk.rpartition(",")
        if not folder.startswith("/"):
            raise ValueError(f"{DISK} is {disk!r}: it must be a folder and its budget, like /var/kv,100")
        extra["secondary_tiers"] = [
            {
                "type": "SessionDisk",
                "module_path": "kvpilot.engine.tier_disk",
                "root_dir": folder,
                "gb": _gigabytes(DISK, budget),
            }
        ]
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }


def _gigabytes(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise ValueError(f"{name}: {text!r} is no number of GiB above 0")
    return value
