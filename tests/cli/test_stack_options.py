"""Options that cannot be are refused before anything is started."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

Refused = Callable[..., str]


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (("up", "--workers", "0"), "gateway.workers is 0: it must be a whole number, 1 to 256"),
        (("up", "--mode", "foo"), "coordinator.mode is 'foo': it must be kvpilot or passive"),
        (("up", "--port", "70000"), "gateway.port is 70000: it must be a port, 0 to 65535"),
        (("up", "--port", "-5"), "gateway.port is -5: it must be a port"),
        (("serve", "--control-port", "70000"), "coordinator.port is 70000: it must be a port"),
        (("up", "--max-model-len", "0"), "engine.max_model_len is 0: it must be a whole number, 1 or more"),
        (("up", "--max-model-len", "-5"), "engine.max_model_len is -5"),
        (("up", "--max-model-len", "5"), "raise --max-model-len"),
        (("up", "--host-gb", "nan"), "lmcache.host_gb is nan: it must be a number of GB, more than 0"),
        (("up", "--disk-gb", "0"), "lmcache.disk_gb is 0.0"),
        (("serve", "--engine", "notaurl"), "engine.url is 'notaurl': it must be a URL like http://"),
        (("serve", "--lmcache", "notaurl"), "lmcache.nodes is ['notaurl']: it must be a list of URLs"),
        (("serve", "--lmcache-coordinator", "http://"), "lmcache.coordinator is 'http://'"),
        (("serve", "--kv-events", "notanendpoint"), "it must be a ZMQ endpoint like tcp://"),
        (("up", "--record", ""), "--record is empty: name a folder"),
        (("serve", "--record", __file__), "is no folder: name one"),
    ],
)
def test_impossible_values_are_refused(
    args: tuple[str, ...], told: str, refused: Refused, tmp_path: Path
) -> None:
    state = tmp_path / "state"
    assert told in refused(*args, "--state", str(state))
    assert not state.exists()


@pytest.mark.parametrize("command", ["up", "serve", "down", "doctor", "sessions", "actions", "demo"])
def test_an_empty_state_folder_is_not_the_current_one(command: str, refused: Refused) -> None:
    assert refused(command, "--state", "") == "--state is empty: name a folder"
