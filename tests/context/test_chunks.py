"""Chunk hashes and spans, checked against LMCache itself where its environment exists."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpilot.context.chunks import ChunkHasher, parse_hash, short_hash
from kvpilot.domain import TokenArray

HASHER = ChunkHasher()


def random_tokens(count: int, seed: int = 0) -> TokenArray:
    return np.random.default_rng(seed).integers(0, 150_000, count, dtype=np.uint32)


def test_only_complete_chunks_have_a_hash() -> None:
    assert [len(HASHER.hashes(random_tokens(n))) for n in (0, 255, 256, 511, 512)] == [0, 0, 1, 1, 2]


def test_a_hash_names_the_whole_prefix() -> None:
    tokens = random_tokens(1024)
    changed = tokens.copy()
    changed[300] += 1
    same = [a == b for a, b in zip(HASHER.hashes(tokens), HASHER.hashes(changed), strict=True)]
    assert same == [True, False, False, False]


@given(st.integers(0, 2000), st.integers(0, 9))
def test_hashing_goes_on_from_known_hashes(length: int, known: int) -> None:
    tokens = random_tokens(2000)
    whole = HASHER.hashes(tokens)
    assert HASHER.hashes(tokens[:length], known=whole[:known]) == whole[: length // 256]


@given(st.integers(0, 60), st.integers(0, 60), st.integers(1, 9))
def test_spans_project_to_the_chunks_they_touch_and_hold(start: int, end: int, size: int) -> None:
    hasher = ChunkHasher(size)
    chunks = {c: set(range(c * size, c * size + size)) for c in range(61)}
    span = set(range(start, end))
    assert list(hasher.touched(start, end)) == [c for c, tokens in chunks.items() if tokens & span]
    assert list(hasher.inside(start, end)) == [c for c, tokens in chunks.items() if tokens <= span]


def test_chunk_hashes_of_clients() -> None:
    chunk = HASHER.hashes(random_tokens(256))[0]
    assert parse_hash(chunk.hex()) == chunk
    signed = int.from_bytes(chunk, "big", signed=True)
    assert parse_hash(f"{signed:064x}" if signed >= 0 else f"{signed:x}") == chunk
    assert parse_hash("-1") == 2**64 - 1
    assert parse_hash("0x3f5c") == 0x3F5C
    short = int.from_bytes(chunk[-8:], "big", signed=True)
    assert parse_hash(f"{short:x}") == short_hash(chunk)


@pytest.mark.parametrize(
    "text", ["0" * 65, "٣" * 8, "", "-", "xyz", "1" * 65, "--1", "0x", "1_0", " 1", "-" + "f" * 64, "é"]
)
def test_what_is_not_a_hash_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a chunk hash"):
        parse_hash(text)


def engine_python() -> str:
    """Interpreter of the engine environment, or skip."""
    named = os.environ.get("KVPILOT_ENGINE_PYTHON")
    python = Path(named) if named else Path(__file__).parents[2] / ".venv-engine/bin/python"
    if not python.exists():
        pytest.skip(f"no engine environment at {python} (run make setup or set KVPILOT_ENGINE_PYTHON)")
    return str(python)


LMCACHE_HASHES = """
import json, sys
from lmcache.v1.multiprocess.token_hasher import TokenHasher
for size, tokens in json.load(sys.stdin):
    print("H", json.dumps([h.hex() for h in TokenHasher(size).compute_chunk_hashes(tokens)]))
"""


@pytest.mark.engine
def test_hashes_are_those_of_lmcache() -> None:
    cases = [(256, random_tokens(2000)), (256, random_tokens(100)), (16, random_tokens(333, 1))]
    cases.append((256, np.full(512, 2**32 - 1, dtype=np.uint32)))
    done = subprocess.run(
        [engine_python(), "-c", LMCACHE_HASHES],
        input=json.dumps([(size, tokens.tolist()) for size, tokens in cases]),
        capture_output=True,
        text=True,
        timeout=110,
        check=True,
        env={**os.environ, "DO_NOT_TRACK": "1", "LMCACHE_TRACK_USAGE": "false"},
    )
    theirs = [json.loads(line[2:]) for line in done.stdout.splitlines() if line.startswith("H ")]
    assert theirs == [[h.hex() for h in ChunkHasher(size).hashes(tokens)] for size, tokens in cases]
