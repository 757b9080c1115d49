"""What a user is told before anything starts."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from kvpilot.config import Config
from kvpilot.stack import StackError, models, plan
from kvpilot.stack.engine_env import find_engine_python
from kvpilot.stack.launch import with_free_ports
from kvpilot.stack.preflight import check_memory, resolve_ports


def kvpilot(*args: str, state: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvpilot.cli", *args, "--state", str(state)],
        capture_output=True,
        text=True,
        env={**os.environ, **env},
        timeout=60,
        check=False,
    )


def refused(done: subprocess.CompletedProcess[str]) -> str:
    """The one line of a refusal."""
    assert done.returncode == 2, done.stderr
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("kvpilot: ")
    return lines[0]


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("gateway", "port", "{port}"),
        ("coordinator", "port", "{port}"),
        ("lmcache", "mq_port", "{port}"),
        ("engine", "url", "http://127.0.0.1:{port}"),
    ],
)
def test_a_taken_port_is_named_with_its_setting_and_holder(section: str, key: str, value: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        setting = {key: value.format(port=port)}
        config = with_free_ports(Config()).with_overrides(**{section: setting})
        with pytest.raises(StackError) as refusal:
            resolve_ports(config, embedded=True)
    assert f"port {port} " in str(refusal.value)
    assert f"{section}.{key}" in str(refusal.value)
    assert f"pid {os.getpid()}" in str(refusal.value)


def test_port_0_becomes_a_port_of_its_own_for_every_service() -> None:
    config = resolve_ports(with_free_ports(Config()), embedded=True)
    ports = [
        config.gateway.port,
        config.coordinator.port,
        config.lmcache.mq_port,
        config.lmcache.metrics_port,
        *(int(url.rpartition(":")[2]) for url in (config.engine.url, *config.lmcache.nodes)),
        int(config.lmcache.coordinator.rpartition(":")[2]),
    ]
    assert len(set(ports)) == len(ports)
    assert all(ports)


def test_one_port_for_two_services_is_refused() -> None:
    free = resolve_ports(with_free_ports(Config()), embedded=True)
    twice = free.with_overrides(coordinator={"port": free.gateway.port})
    with pytest.raises(StackError, match="configured twice"):
        resolve_ports(twice, embedded=True)


def test_a_disk_tier_beyond_the_disk_is_refused(tmp_path: Path) -> None:
    state = tmp_path / "state"
    line = refused(kvpilot("up", "--any-ports", "--disk-gb", "1000000", state=state))
    assert "too little disk" in line
    assert "--disk-gb" in line
    assert not state.exists()


def test_the_memory_protocols_own_port_is_checked_too() -> None:
    free = resolve_ports(with_free_ports(Config()), embedded=True)
    assert free.coordinator.seed_port == 0
    with pytest.raises(StackError, match=r"configured twice.*"):
        resolve_ports(free.with_overrides(coordinator={"seed_port": free.gateway.port}), embedded=False)


@pytest.mark.parametrize("others", [[], ["--any-ports"]])
def test_up_with_a_taken_port_says_so_and_leaves_nothing(others: list[str], tmp_path: Path) -> None:
    state = tmp_path / "state"
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        line = refused(kvpilot("up", *others, "--port", str(port), state=state))
    assert f"port {port} (gateway) is taken" in line
    assert "--port" in line
    assert not state.exists()


@pytest.mark.parametrize("model", ["./no/such/folder", "mispelt", "/nowhere"])
def test_a_missing_model_is_refused_with_what_there_is(model: str, tmp_path: Path) -> None:
    line = refused(kvpilot("up", "--any-ports", "--model", model, state=tmp_path / "state"))
    assert model in line
    assert "smollm2" in line
    assert not (tmp_path / "state").exists()


def test_a_folder_that_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StackError, match=r"config\.json"):
        models.check_model(str(tmp_path))
    models.check_model("some-org/some-model")


@pytest.mark.engine
def test_tiers_beyond_the_memory_there_is_are_refused(engine_config: Config, tmp_path: Path) -> None:
    line = refused(kvpilot("up", "--any-ports", "--host-gb", "10000", state=tmp_path / "state"))
    assert "too little memory" in line
    assert "host tier 10000.0 GiB" in line
    assert "--host-gb" in line
    assert not (tmp_path / "state").exists()


def test_a_device_pool_beyond_memory_is_refused() -> None:
    config = Config().with_overrides(engine={"device_blocks": 10**9})
    with pytest.raises(StackError, match="device pool"):
        check_memory(config, models.ModelSize(16384, 60_000_000, 65536))


def test_an_open_control_api_needs_a_token(tmp_path: Path) -> None:
    state = tmp_path / "state"
    line = refused(kvpilot("up", "--any-ports", state=state, KVPILOT_COORDINATOR__HOST="0.0.0.0"))
    assert "coordinator.token" in line
    guarded = Config().with_overrides(coordinator={"host": "0.0.0.0", "token": "secret"})
    assert plan.check_control_access(guarded) is None


def test_a_missing_engine_environment_says_how_to_get_one(tmp_path: Path) -> None:
    config = Config().with_overrides(engine={"python": str(tmp_path / "python")})
    with pytest.raises(StackError, match="make setup"):
        find_engine_python(config)


def test_serve_names_an_engine_that_does_not_answer(tmp_path: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        args = ("serve", "--engine", url, "--port", "0", "--control-port", "0")
        line = refused(kvpilot(*args, state=tmp_path / "state"))
    assert url in line
    assert "--engine" in line


def test_an_unwritable_state_folder_is_refused() -> None:
    assert "--state" in refused(kvpilot("up", "--any-ports", state=Path("/proc/none")))


def test_down_where_nothing_runs_is_no_error(tmp_path: Path) -> None:
    done = kvpilot("down", state=tmp_path / "state")
    assert done.returncode == 0
    assert "nothing is running" in done.stdout
