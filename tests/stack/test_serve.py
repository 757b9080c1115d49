"""``kvpilot serve`` in front of engines that are up: what they say of their model, or of something else."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvpilot.bench.processes import mock_engine
from kvpilot.config import Config
from kvpilot.stack import StackError
from kvpilot.stack.launch import launch, with_free_ports
from kvpilot.stack.prepare import ask_engine
from tests.answering import answering


@contextmanager
def engine_saying(body: bytes, status: int = 200) -> Iterator[Config]:
    """A configuration whose engine answers everything with ``body``."""
    with answering(lambda path: body, status) as url:
        yield Config().with_overrides(engine={"url": url})


@pytest.mark.parametrize(
    "body", [b"", b"<html>", b"[]", b"{}", b'{"data": []}', b'{"data": 5}', b'{"data": [{"name": "x"}]}']
)
def test_an_answer_that_is_no_list_of_models_is_told_as_that(body: bytes) -> None:
    with engine_saying(body) as config, pytest.raises(StackError) as refusal:
        ask_engine(config)
    assert "something else than a list of models: check --engine" in str(refusal.value)


@pytest.mark.parametrize(("status", "advice"), [(401, "engine.api_key"), (404, "--engine")])
def test_a_refusing_engine_is_told_with_what_to_check(status: int, advice: str) -> None:
    with engine_saying(b"{}", status) as config, pytest.raises(StackError) as refusal:
        ask_engine(config)
    assert f"answers {status} to /v1/models: check {advice}" in str(refusal.value)


def test_an_engine_that_tells_only_its_models_name_will_do() -> None:
    with engine_saying(b'{"data": [{"id": "org/model", "root": null}]}') as config:
        assert ask_engine(config).id == "org/model"


def test_serve_works_with_the_mock_engine(tmp_path: Path) -> None:
    with mock_engine() as url:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as health:
            assert health.status == 200
        config = with_free_ports(Config()).with_overrides(
            engine={"url": url}, gateway={"workers": 1}, state={"dir": str(tmp_path / "state")}
        )
        with launch(config, embedded=False, wait_s=60) as served:
            body = {"model": "mock", "messages": [{"role": "user", "content": "hi"}]}
            request = urllib.request.Request(
                f"{served.gateway_url}/v1/chat/completions",
                json.dumps(body).encode(),
                {"content-type": "application/json"},
            )
            with urllib.request.urlopen(request, timeout=10) as reply:
                assert json.load(reply)["choices"][0]["message"]["content"]
            assert served.config.engine.served_model_name == "mock"
