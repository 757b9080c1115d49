"""Fixtures every room's tests share: one real stack per session, and the folder of recorded traces."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from kvpilot.config import Config, load_config
from kvpilot.stack import StackError
from kvpilot.stack.engine_env import find_engine_python
from kvpilot.stack.launch import Endpoints, launch, with_free_ports
from kvpilot.stack.models import ensure_model

PROJECT = Path(__file__).resolve().parent.parent
TEMPLATE = Path(__file__).with_name("chat_template.jinja")
ENGINE_TEST_TIMEOUT_S = 420
"""A test that is the first to ask for the stack waits for vLLM to start, minutes on a busy machine."""

# How long an example takes tells how busy the machine is.
settings.register_profile("kvpilot", deadline=None)
settings.load_profile("kvpilot")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("engine") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(ENGINE_TEST_TIMEOUT_S))


@pytest.fixture(scope="session")
def engine_config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """Free ports, and bounded tiers with room for what all tests store: of a host tier that fills up the planner makes
    room with whatever test is not in a hurry. Skips without vLLM (``make test`` sets it up and demands it)."""
    folder = tmp_path_factory.mktemp("stack")
    config = with_free_ports(load_config(environ={})).with_overrides(
        coordinator={"record": str(folder / "traffic")},
        engine={"max_model_len": 8192, "dev": True},
        lmcache={"host_gb": 3.0, "disk_gb": 5.0},
        state={"dir": str(folder)},
    )
    try:
        python = find_engine_python(config)
    except StackError as error:
        if os.environ.get("KVPILOT_REQUIRE_ENGINE"):
            raise
        pytest.skip(str(error))
    model = with_tools(Path(ensure_model("m16k", python)), tmp_path_factory.mktemp("model"))
    return config.with_overrides(engine={"model": str(model)})


def with_tools(model: Path, folder: Path) -> Path:
    """The model under a template that writes tools and calls into the context, as agents' models have it."""
    made = folder / model.name
    made.mkdir()
    for file in model.iterdir():
        (made / file.name).symlink_to(file)
    (made / TEMPLATE.name).unlink(missing_ok=True)
    shutil.copy(TEMPLATE, made)
    return made


@pytest.fixture(scope="session")
def stack(engine_config: Config) -> Iterator[Endpoints]:
    """A real stack: vLLM on CPU, LMCache, kvpilot's coordinator and gateway; model m16k, contexts to 8K.

    Shared by the whole session: use texts of your own, never clear caches wholesale, and leave it as
    healthy as you found it. Tests that use it carry ``@pytest.mark.engine``.
    """
    with launch(engine_config, wait_s=400) as endpoints:
        yield endpoints


@pytest.fixture(scope="session")
def traces_dir() -> Path:
    """The recorded traces, or a skip that says where they were looked for."""
    folder = Path(os.environ.get("KVPILOT_TRACES") or PROJECT.parent / "shared" / "traces")
    if not folder.is_dir():
        pytest.skip(f"no recorded traces at {folder} (set KVPILOT_TRACES)")
    return folder
