"""What `kvpilot doctor` and `kvpilot serve` say where engines are somebody else's."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvpilot.bench.processes import free_port, mock_engine
from kvpilot.config import Config
from kvpilot.stack.doctor import diagnose
from kvpilot.stack.launch import launch


def settings(tmp_path: Path, engine: str) -> Config:
    nowhere = f"http://127.0.0.1:{free_port()}"
    return Config().with_overrides(
        gateway={"port": 0},
        coordinator={"port": 0},
        engine={"url": engine, "python": str(tmp_path / "no-python"), "kv_events": "tcp://127.0.0.1:1"},
        lmcache={"nodes": [nowhere], "coordinator": nowhere},
        state={"dir": str(tmp_path / "state")},
    )


def test_an_engine_that_is_up_needs_no_engine_environment_here(tmp_path: Path) -> None:
    with mock_engine() as url:
        findings = {finding.check: finding for finding in diagnose(settings(tmp_path, url))}
    assert "serves mock" in findings["engine"].detail
    assert findings["engine environment"].verdict == "warn"
    assert "kvpilot up" in findings["engine environment"].detail
    assert "model" not in findings and "memory" not in findings
    assert all(finding.verdict != "fail" for finding in findings.values())


def test_without_an_engine_its_environment_is_needed(tmp_path: Path) -> None:
    config = settings(tmp_path, f"http://127.0.0.1:{free_port()}")
    findings = {finding.check: finding for finding in diagnose(config)}
    assert findings["engine environment"].verdict == "fail"
    assert "model" in findings


def test_serve_says_that_no_cache_layer_answers_and_serves(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with mock_engine() as url:
        config = settings(tmp_path, url)
        with launch(config, embedded=False, echo=True, wait_s=60) as stack:
            assert stack.pids
    said = [line for line in capfd.readouterr().err.splitlines() if "until LMCache answers" in line]
    assert len(said) == 1 and config.lmcache.nodes[0] in said[0]
