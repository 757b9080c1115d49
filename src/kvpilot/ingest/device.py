"""What one engine's device pool holds, rebuilt from its KV events. Pure: no I/O, no clock.

vLLM names a block by a hash of its whole prefix, so a block table keyed by (parent's hash, digest of the
block's tokens) can be walked with plain tokens, without knowing vLLM's hash function or its seed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b

import numpy as np

from kvpilot.domain import TokenArray

BlockHash = int | bytes
"""As published: 64-bit ints by default, 32 bytes with VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0."""

_Slot = tuple[BlockHash | tuple[str, str], bytes]
"""(parent block, or (salt, adapter) at the head of a context; digest of the block's tokens)."""


class DevicePool:
    """Blocks in one engine's device pool.

    vLLM reports a block again whenever a request reuses it, and may hold two copies of one block, so events
    cannot be counted: one removal ends a block here. A surviving copy is seen again at its next use; until
    then the pool is understated, never overstated.
    """

    def __init__(self) -> None:
        self.block_size = 0
        """Tokens per block, learned from events; 0 = nothing seen yet."""
        self._children: dict[_Slot, BlockHash] = {}
        self._slots: dict[BlockHash, _Slot] = {}

    def __len__(self) -> int:
        return len(self._slots)

    def stored(
        self,
        hashes: Sequence[BlockHash],
        parent: BlockHash | None,
        tokens: Sequence[int],
        block_size: int,
        *,
        adapter: str = "",
        extra_keys: Sequence[Sequence[object] | None] | None = None,
    ) -> bool:
        """Note consecutive blocks under ``parent`` (None = head of a context).

        ``extra_keys`` has one entry per block, as published: adapter name, multi-modal pairs, the salt (first
        block only). Returns False, changing nothing, when the event does not describe its blocks fully
        (sparse attention publishes such): those cannot be found by tokens.
        """
        if block_size <= 0 or len(tokens) != len(hashes) * block_size:
            return False
        raw = np.asarray(tokens, dtype="<u4").tobytes()
        width = block_size * 4
        above: BlockHash | tuple[str, str] | None = parent
        for index, block in enumerate(hashes):
            keys = list(extra_keys[index] or ()) if extra_keys and index < len(extra_keys) else []
            if adapter and keys and keys[0] == adapter:
                del keys[0]
            if above is None:
                salt = next((key for key in keys if isinstance(key, str)), "")
                if salt:
                    keys.remove(salt)
                above = (salt, adapter)
            self._put(block, (above, _digest(raw[index * width : (index + 1) * width], keys)))
            above = block
        # Events of partial blocks carry a smaller size; the pool's is the largest.
        self.block_size = max(self.block_size, block_size)
        return True

    def removed(self, hashes: Iterable[BlockHash]) -> None:
        for block in hashes:
            slot = self._slots.pop(block, None)
            if slot is not None and self._children.get(slot) == block:
                del self._children[slot]

    def clear(self) -> None:
        self._children.clear()
        self._slots.clear()

    def prefix(self, salt: str, adapter: str, tokens: TokenArray) -> int:
        """How many leading tokens lie in the pool: whole blocks, from position 0, without a hole."""
        return self.held(salt, adapter, self.digests(tokens))

    def digests(self, tokens: TokenArray) -> list[bytes]:
        """What :meth:`held` asks for, of a context's whole blocks: to keep where the same is asked again and again."""
        width = self.block_size * 4
        if not width:
            return []
        raw = np.ascontiguousarray(tokens, dtype="<u4").tobytes()
        return [_digest(raw[at : at + width], ()) for at in range(0, len(raw) - width + 1, width)]

    def held(self, salt: str, adapter: str, digests: Sequence[bytes]) -> int:
        """:meth:`prefix` of a context by the digests of its blocks."""
        above: BlockHash | tuple[str, str] = (salt, adapter)
        for found, digest in enumerate(digests):
            block = self._children.get((above, digest))
            if block is None:
                return found * self.block_size
            above = block
        return len(digests) * self.block_size

    def _put(self, block: BlockHash, slot: _Slot) -> None:
        old = self._slots.get(block)
        if old is not None and old != slot and self._children.get(old) == block:
            del self._children[old]
        self._slots[block] = slot
        self._children[slot] = block


def _digest(raw: bytes, extra: Sequence[object]) -> bytes:
    """Digest of a block's content; whatever besides tokens made its hash makes a different digest."""
    state = blake2b(raw, digest_size=16)
    if extra:
        state.update(repr(extra).encode())
    return state.digest()
