"""Streaming JSON lines out of (gzipped) files, with errors that name file and line."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from kvpilot.traces.errors import TraceError

T = TypeVar("T")


@contextmanager
def open_binary(path: Path) -> Iterator[io.BufferedIOBase]:
    """The file's bytes, unpacked when its name ends in .gz. Raises TraceError when it cannot be opened."""
    try:
        opened = gzip.open if path.suffix == ".gz" else open
        file: Any = opened(path, "rb")
    except OSError as error:
        raise TraceError(f"cannot read trace {path}: {error.strerror or error}") from None
    with file:
        yield file


def read_lines(path: Path, kind: type[T]) -> Iterator[tuple[int, T]]:
    """(line number, decoded object) of each non-empty line. Raises TraceError."""
    decoder = msgspec.json.Decoder(kind)
    number = 0
    with open_binary(path) as file:
        try:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, decoder.decode(line)
        except msgspec.DecodeError as error:
            raise TraceError(f"{path}, line {number}: {error}") from None
        except (OSError, EOFError, zlib.error) as error:
            raise TraceError(f"{path}, after line {number}: damaged file ({error})") from None
