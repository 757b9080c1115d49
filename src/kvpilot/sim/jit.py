"""Machine code for inner loops where numba is installed (the extra ``sim``); the same Python code where it is not."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])

try:
    _numba: Any = importlib.import_module("numba")
except ImportError:
    _numba = None

COMPILED: bool = _numba is not None


def jit(function: F) -> F:
    """The function, compiled on first use."""
    return cast(F, _numba.njit(cache=True)(function)) if COMPILED else function
