"""Where traces are, and which reader a file needs."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from kvpilot.traces.blocks import read_kv_cache_tester, read_mooncake
from kvpilot.traces.errors import TraceError
from kvpilot.traces.lines import open_binary
from kvpilot.traces.model import TraceSession
from kvpilot.traces.recorded import read_recorded
from kvpilot.traces.sessions import read_sessions
from kvpilot.traces.text import CountTokens, estimate_tokens, read_miniswe, read_tau_bench

DEFAULT_FOLDER = "../shared/traces"
_ENDINGS = (".jsonl.gz", ".jsonl", ".json.gz", ".json")


def traces_folder(environ: Mapping[str, str] | None = None) -> Path:
    """``$KVPILOT_TRACES``, else ``../shared/traces`` (it need not exist)."""
    env = os.environ if environ is None else environ
    return Path(env.get("KVPILOT_TRACES") or DEFAULT_FOLDER)


def find_trace(name: str, environ: Mapping[str, str] | None = None) -> Path:
    """The file of a trace: a path, or a name below the traces folder (``entire-cli`` will do).

    Raises TraceError when there is none.
    """
    folder = traces_folder(environ)
    for base in (
        Path(name),
        folder / name,
        *(folder / kind / name for kind in ("sessions", "blocks", "text")),
    ):
        for candidate in (base, *(base.with_name(base.name + ending) for ending in _ENDINGS)):
            if candidate.is_file():
                return candidate
    raise TraceError(
        f"no trace {name!r}: give a file, or a name below {folder} (set KVPILOT_TRACES to move it)"
    )


def find_traces(name: str, environ: Mapping[str, str] | None = None) -> list[Path]:
    """The trace of that name, or all of a folder of that name, in order. Raises TraceError when there is none."""
    for folder in (Path(name), traces_folder(environ) / name):
        if folder.is_dir():
            found = sorted(path for path in folder.iterdir() if path.name.endswith(_ENDINGS))
            if not found:
                raise TraceError(f"no traces in {folder}: files named {', '.join(_ENDINGS)} are looked for")
            return found
    return [find_trace(name, environ)]


def trace_name(path: Path) -> str:
    """A file's name without its endings."""
    for ending in _ENDINGS:
        if path.name.endswith(ending):
            return path.name.removesuffix(ending)
    return path.name


def named_traces(names: Iterable[str]) -> dict[str, Path]:
    """The traces of all these names by their own short names, or their paths where two have one. Raises TraceError."""
    paths = list(dict.fromkeys(path for name in names for path in find_traces(name)))
    uses = Counter(trace_name(path) for path in paths)
    return {trace_name(path) if uses[trace_name(path)] == 1 else str(path): path for path in paths}


def read_trace(path: Path, count: CountTokens = estimate_tokens) -> Iterator[TraceSession]:
    """Sessions of any of the known kinds, told apart by their first bytes. Raises TraceError."""
    with open_binary(path) as file:
        try:
            head = file.read(1 << 16)
        except (OSError, EOFError) as error:
            raise TraceError(f"{path}: damaged file ({error})") from None
    first = head.split(b"\n", 1)[0]
    if head.lstrip().startswith(b"["):
        return read_tau_bench(path, count)
    if b'"session_id"' in head and b'"input"' in first:
        return read_miniswe(path, count)
    if b'"input_length"' in first:
        return read_mooncake(path)
    if b'"block_size"' in first:
        return read_kv_cache_tester(path)
    if b'"kvpilot_recording"' in first:
        return read_recorded(path)
    if b'"agents"' in head or b'"calls"' in head:
        return read_sessions(path)
    raise TraceError(
        f"{path}: not a trace kvpilot knows"
        " (its own recordings, sessions, kv-cache-tester, mooncake, miniswe, tau-bench)"
    )
