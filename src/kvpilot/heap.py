"""How long-lived processes have their objects collected."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def settled() -> Iterator[None]:
    """What is there now stays: the collector need not look at it again, nor at the rest after every 700 objects."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
