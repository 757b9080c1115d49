"""A compact map from 64-bit chunk names to small numbers, worked on in batches.

Open addressing with linear probing in two numpy arrays: 12 bytes a slot instead of the two objects a
dictionary would keep for each chunk. The keys are cut out of cryptographic hashes, so their low bits spread
evenly as they are.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Keys = npt.NDArray[np.uint64]
Values = npt.NDArray[np.int32]

ABSENT = -1
_EMPTY = np.uint64(0)
_SMALLEST = 64


def keys_of(packed: bytes | bytearray, width: int) -> Keys:
    """Keys of hashes of ``width`` bytes (a multiple of 8) that lie packed one behind the other.

    A key is the last 8 bytes of a hash, big-endian, as in LMCache's KV events. 0 marks an empty slot, so it
    becomes 1.
    """
    words = np.frombuffer(packed, dtype=">u8")[width // 8 - 1 :: width // 8]
    return np.maximum(words.astype(np.uint64), np.uint64(1))


class HashIndex:
    """Keys → int32 ≥ 0. The keys of one call must differ from each other."""

    def __init__(self) -> None:
        self._allocate(_SMALLEST)

    def __len__(self) -> int:
        return self._live

    @property
    def nbytes(self) -> int:
        return self._keys.nbytes + self._values.nbytes

    def put(self, keys: Keys, value: int) -> None:
        """Map every key to ``value``, new or not."""
        if 3 * (self._used + len(keys)) > 2 * len(self._keys):
            self._rebuild(self._live + len(keys))
        self._put(keys, np.full(len(keys), value, dtype=np.int32))

    def remove(self, keys: Keys) -> None:
        """Forget the keys; unknown ones are ignored."""
        slots = self._find(keys)
        known = slots[self._values[slots] != ABSENT]
        self._values[known] = ABSENT
        self._live -= len(known)
        if 8 * self._live < len(self._keys) > _SMALLEST:
            self._rebuild(self._live)

    def get(self, keys: Keys) -> Sequence[int]:
        """The value of each key, ABSENT where there is none."""
        values: list[int] = self._values[self._find(keys)].tolist()
        return values

    def _allocate(self, size: int) -> None:
        self._keys: Keys = np.zeros(size, dtype=np.uint64)
        self._values: Values = np.full(size, ABSENT, dtype=np.int32)
        self._used = 0
        self._live = 0

    def _rebuild(self, expected: int) -> None:
        live = self._values != ABSENT
        keys, values = self._keys[live], self._values[live]
        self._allocate(max(_SMALLEST, 1 << (2 * expected + 1).bit_length()))
        self._put(keys, values)

    def _put(self, keys: Keys, values: Values) -> None:
        mask = np.uint64(len(self._keys) - 1)
        slots = keys & mask
        while len(keys):
            free = self._keys[slots] == _EMPTY
            self._keys[slots[free]] = keys[free]
            # Two new keys may have met in one empty slot: who reads itself back has won it.
            mine = self._keys[slots] == keys
            own = slots[mine]
            self._used += int(np.count_nonzero(free & mine))
            self._live += int(np.count_nonzero(self._values[own] == ABSENT))
            self._values[own] = values[mine]
            rest = ~mine
            keys, values, slots = keys[rest], values[rest], (slots[rest] + np.uint64(1)) & mask

    def _find(self, keys: Keys) -> npt.NDArray[np.uint64]:
        """The slot of each key, or the empty slot where the search for it ends."""
        mask = np.uint64(len(self._keys) - 1)
        slots = keys & mask
        while True:
            found = self._keys[slots]
            astray = (found != keys) & (found != _EMPTY)
            if not astray.any():
                return slots
            slots[astray] = (slots[astray] + np.uint64(1)) & mask
