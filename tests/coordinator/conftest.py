from __future__ import annotations

import pytest

from kvpilot.coordinator import executor


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "CONFIRM_STEP_S", 0.005)
    monkeypatch.setattr(executor, "CONFIRM_S", 0.1)
    monkeypatch.setattr(executor, "STORE_WAIT_S", 0.1)
    monkeypatch.setattr(executor, "RETRY_S", 0.02)
