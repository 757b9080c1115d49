"""What a configuration may say, and what its reader is told otherwise."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvpilot.config import Config, ConfigError, dump_config, load_config, parse_config


def from_environment(name: str, value: str) -> Config:
    return load_config(environ={f"KVPILOT_{name}": value})


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("GATEWAY__WORKERS", "0", "1 to 256"),
        ("GATEWAY__PORT", "70000", "0 to 65535"),
        ("GATEWAY__PORT", "-5", "0 to 65535"),
        ("GATEWAY__PORT", "http", "0 to 65535"),
        ("GATEWAY__HOST", "a..b", "a host"),
        ("GATEWAY__READ_TIMEOUT_S", "0", "more than 0"),
        ("GATEWAY__READ_TIMEOUT_S", "nan", "more than 0"),
        ("GATEWAY__READ_TIMEOUT_S", "inf", "a number of seconds"),
        ("GATEWAY__MAX_IN_FLIGHT", "0", "1 or more"),
        ("COORDINATOR__MODE", "foo", "kvpilot or passive"),
        ("COORDINATOR__RECHECK_S", "[1, 0]", "more than 0"),
        ("ENGINE__MAX_MODEL_LEN", "-5", "1 or more"),
        ("ENGINE__DEV", "perhaps", "true or false"),
        ("ENGINE__URL", "notaurl", "a URL like http://"),
        ("ENGINE__URL", "http://", "a URL like http://"),
        ("ENGINE__URL", "http://[::1", "a URL like http://"),
        ("ENGINE__URL", "http://127.0.0.1:65536", "65535"),
        ("ENGINE__URL", "ftp://127.0.0.1", "a URL like http://"),
        ("ENGINE__KV_EVENTS", "http://127.0.0.1:1", "a ZMQ endpoint"),
        ("LMCACHE__NODES", "notaurl", "a list of URLs"),
        ("LMCACHE__NODES", '["notaurl"]', "a list of URLs"),
        ("LMCACHE__NODES", "[]", "a list of URLs"),
        ("LMCACHE__HOST_GB", "0", "more than 0"),
        ("LMCACHE__HASH_ALGORITHM", "md5", "blake3"),
        ("STATE__DIR", "", "the path of a folder"),
    ],
)
def test_what_a_key_cannot_be_is_told_in_a_line_with_what_it_can_be(
    name: str, value: str, allowed: str
) -> None:
    section, key = name.lower().split("__")
    with pytest.raises(ConfigError) as refusal:
        from_environment(name, value)
    line = str(refusal.value)
    assert line.startswith(f"{section}.{key} is ")
    assert value in line.replace("'", '"')
    assert allowed in line
    assert "\n" not in line


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("GATEWAY__PORT", "0"),
        ("GATEWAY__HOST", "::"),
        ("ENGINE__URL", "https://engines.example/v7/"),
        ("ENGINE__URL", "http://[::1]:8100"),
        ("ENGINE__KV_EVENTS", "tcp://*:5557"),
        ("ENGINE__KV_EVENTS", "ipc:///run/events"),
        ("ENGINE__SERVED_MODEL_NAME", "[1]"),
        ("ENGINE__API_KEY", "007"),
        ("COORDINATOR__TOKEN", "12345"),
        ("COORDINATOR__TOKEN", "null"),
    ],
)
def test_a_value_is_read_by_the_type_of_its_key(name: str, value: str) -> None:
    section, key = name.lower().split("__")
    assert str(getattr(getattr(from_environment(name, value), section), key)) == value


def test_lists_and_switches_come_from_the_environment_too() -> None:
    nodes = '["http://10.0.0.1:8080", "http://10.0.0.2:8080"]'
    assert len(from_environment("LMCACHE__NODES", nodes).lmcache.nodes) == 2
    assert from_environment("ENGINE__EXTRA_ARGS", '["--seed", "1"]').engine.extra_args == ("--seed", "1")
    assert from_environment("ENGINE__DEV", "true").engine.dev


def test_api_keys_keep_their_case() -> None:
    assert from_environment("TENANTS__KeyA", "alice").tenants == {"KeyA": "alice"}
    assert from_environment("TENANTS__KeyA", "007").tenants == {"KeyA": "007"}


def test_tenants_have_budgets() -> None:
    environ = {"KVPILOT_TENANTS__k": "Team", "KVPILOT_BUDGETS__Team": "0.25"}
    assert load_config(environ=environ).budgets == {"Team": 0.25}
    with pytest.raises(ConfigError, match=r"^budgets.Tem is no tenant: there are Team, default$"):
        load_config(environ={**environ, "KVPILOT_BUDGETS__Tem": "0.5"})
    with pytest.raises(ConfigError, match="share of host memory"):
        load_config(environ={**environ, "KVPILOT_BUDGETS__Team": "1.5"})


def test_unknown_keys_are_told_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"^gateway\.prot is not known: gateway has host, port"):
        from_environment("GATEWAY__PROT", "1")
    with pytest.raises(ConfigError, match=r"^gatway is not known: the configuration has gateway, engine"):
        from_environment("GATWAY__PORT", "1")


@pytest.mark.parametrize("name", ["COORDINATOR__TOKEN", "ENGINE__API_KEY"])
def test_secrets_are_not_repeated(name: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        from_environment(name, "pass word")
    assert "pass" not in str(refusal.value)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"[gateway]\nhost = '\xff'\n", "not UTF-8"),
        (b"[gateway\n", "not valid TOML"),
        (b"gateway = 3\n", "gateway is 3: it must be a section"),
        (b"[gateway]\nworkers = 0\n", "gateway.workers is 0"),
        (b"[tenants]\nkey = 3\n", "a tenant each"),
        (b"[coordinator]\ntoken = 12345\n", "coordinator.token"),
    ],
)
def test_a_file_that_is_wrong_is_told_in_a_line(content: bytes, told: str, tmp_path: Path) -> None:
    file = tmp_path / "kvpilot.toml"
    file.write_bytes(content)
    with pytest.raises(ConfigError) as refusal:
        load_config(file, environ={})
    assert told in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_configuration_handed_over_is_the_same_there() -> None:
    config = Config().with_overrides(tenants={"KeyA": "alice"}, gateway={"port": 0})
    assert parse_config(dump_config(config)) == config
    with pytest.raises(ConfigError, match=r"gateway\.port"):
        parse_config(b'{"gateway": {"port": 70000}}')
