"""vLLM's queue of free blocks, with the blocks that sessions need kept apart and reused last.

Blocks without content and content nobody claims stay in vLLM's own linked list, in its own order; ``Kept`` orders
the rest. Hashes, block ids and results are untouched: only the order of reuse is different.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue, KVCacheBlock

from kvpilot.engine.book import Book, Hash
from kvpilot.engine.kept import Kept

log = logging.getLogger("vllm.kvpilot")

_GROUP_BYTES = 4
"""vLLM's key of a cached block is its hash and, in so many bytes, its KV group."""
_AHEAD = 32
_AHEAD_SHARE = 1 / 64
"""So many blocks, but no more of the pool, are taken out of what is kept at once: most requests want one at a time."""
_popleft_n: Callable[[FreeKVCacheBlockQueue, int], list[KVCacheBlock]] = FreeKVCacheBlockQueue.popleft_n


def _name(block: KVCacheBlock) -> Hash:
    return (block._block_hash or b"")[:-_GROUP_BYTES]


def _length(block: KVCacheBlock) -> int:
    return block._block_hash_num_tokens or 0


class SessionFreeQueue(FreeKVCacheBlockQueue):
    """Takes the place of ``BlockPool.free_block_queue``. ``num_free_blocks`` counts kept blocks, too."""

    def __init__(self, book: Book, free: list[KVCacheBlock], clock: Callable[[], float]) -> None:
        for block in free:
            block.prev_free_block = block.next_free_block = None
        super().__init__([])
        self.append_n_plain(free)
        self._book = book
        self._ahead = min(_AHEAD, int(_AHEAD_SHARE * book.pool_blocks))
        self.kept: Kept[KVCacheBlock] = Kept(book, _name, _length)
        self._homes = self.kept.homes
        self.clock = clock
        book.on_lost = self._lost

    @property
    def plain(self) -> int:
        """Free blocks that nobody claims."""
        return int(self.num_free_blocks) - len(self.kept)

    def append_n_plain(self, blocks: list[KVCacheBlock]) -> None:
        super().append_n(blocks)

    # ------------------------------------------------------------ vLLM's interface

    def popleft(self) -> KVCacheBlock:
        [block] = self.popleft_n(1)
        return block

    def popleft_n(self, n: int) -> list[KVCacheBlock]:
        if not self._homes:
            return _popleft_n(self, n)
        from_kept = n - self.num_free_blocks + len(self._homes)
        if from_kept <= 0:
            return _popleft_n(self, n)
        victims: list[KVCacheBlock] = []
        try:
            self.kept.pop(min(from_kept + self._ahead, len(self._homes)), self.clock(), victims)
            if len(victims) < from_kept:
                raise RuntimeError(f"{from_kept} blocks are kept, {len(victims)} were found")
        except Exception:
            # A request waits for these blocks: it gets them, in whatever order.
            log.exception("kvpilot's order of reuse failed: what it kept is vLLM's again")
            rest = self.kept.clear()
            self.num_free_blocks -= len(victims) + len(rest)
            super().append_n(victims + rest)
            return _popleft_n(self, n)
        self.num_free_blocks -= len(victims)
        taken = [*_popleft_n(self, n - from_kept), *victims[:from_kept]]
        super().append_n(victims[from_kept:])
        return taken

    def remove(self, block: KVCacheBlock) -> None:
        if self.kept.discard(block.block_id):
            self.num_free_blocks -= 1
        else:
            super().remove(block)

    def append(self, block: KVCacheBlock) -> None:
        self.append_n([block])

    def append_n(self, blocks: list[KVCacheBlock]) -> None:
        if not self._book.claims:
            super().append_n(blocks)
            return
        bare: list[KVCacheBlock] = []
        if None in [block._block_hash for block in blocks]:
            bare = [block for block in blocks if block._block_hash is None]
            blocks = [block for block in blocks if block._block_hash is not None]
        plain = self.kept.add([block.block_id for block in blocks], blocks)
        self.num_free_blocks += len(blocks) - len(plain)
        if bare or plain:
            super().append_n(bare + plain)

    def get_all_free_blocks(self) -> list[KVCacheBlock]:
        return [*super().get_all_free_blocks(), *self.kept.in_order(self.clock())]

    def iter_blocks_after(self, cursor: KVCacheBlock | None) -> Iterator[KVCacheBlock]:
        """In the order of reuse, behind ``cursor`` (from the front when it is not free any more)."""
        blocks = self.get_all_free_blocks()
        ids = [block.block_id for block in blocks]
        start = ids.index(cursor.block_id) + 1 if cursor is not None and cursor.block_id in ids else 0
        return iter(blocks[start:])

    # ------------------------------------------------------------ ours

    def first(self, blocks: list[KVCacheBlock]) -> None:
        """Free blocks, of whatever kind, to be reused next."""
        for block in blocks:
            self.remove(block)
        self.prepend_n(blocks)

    def give_back(self) -> None:
        """Keep nothing any more: all blocks are vLLM's again, in the order in which they would be reused."""
        blocks = self.kept.in_order(self.clock())
        self.kept.clear()
        self.num_free_blocks -= len(blocks)
        super().append_n(blocks)

    def _lost(self, number: int, length: int) -> None:
        nobodys = self.kept.lost(number, length)
        self.num_free_blocks -= len(nobodys)
        self.prepend_n(nobodys)


def install(pool: BlockPool, book: Book, clock: Callable[[], float] = time.monotonic) -> SessionFreeQueue:
    """Put a session-aware queue in the place of a pool's own. Free blocks stay free, in their order."""
    queue = SessionFreeQueue(book, pool.free_block_queue.get_all_free_blocks(), clock)
    pool.free_block_queue = queue
    return queue


def uninstall(pool: BlockPool) -> None:
    """The pool's order is vLLM's own again."""
    queue = pool.free_block_queue
    if not isinstance(queue, SessionFreeQueue):
        return
    queue.give_back()
    blocks = FreeKVCacheBlockQueue.get_all_free_blocks(queue)
    for block in blocks:
        block.prev_free_block = block.next_free_block = None
    pool.free_block_queue = FreeKVCacheBlockQueue(blocks)
