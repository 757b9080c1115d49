"""vLLM's queue of free blocks, with the blocks that sessions need kept apart and reused last.

Blocks without content and content nobody claims stay in vLLM's own linked list, in its own order; ``Kept`` orders
the rest. Hashes, block ids and results are untouched: only the order of reuse is different.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue, KVCacheBlock

from kvpilot.engine.book import Book, Hash
from kvpilot.engine.kept import Kept

log = logging.getLogger("vllm.kvpilot")

_GROUP_BYTES = 4
"""vLLM's key of a cached block is its hash and, in so many bytes, its KV group."""
_AHEAD = 128
_AHEAD_SHARE = 1 / 64
"""So many blocks, but no more of the pool, are taken out of what is kept before anybody asks: most requests want one
at a time, and while the model runs there is time to choose."""
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
        self._piles = self.kept.piles
        self.clock = clock
        book.on_lost = self._lost

    def plain(self, most: int) -> int:
        """How many free blocks nobody claims, counted up to ``most``."""
        found, block = 0, self.fake_free_list_head.next_free_block
        while found < most and block is not self.fake_free_list_tail:
            assert block is not None
            found, block = found + 1, block.next_free_block
        return found

    def append_n_plain(self, blocks: list[KVCacheBlock]) -> None:
        super().append_n(blocks)

    # ------------------------------------------------------------ vLLM's interface

    def popleft(self) -> KVCacheBlock:
        [block] = self.popleft_n(1)
        return block

    def popleft_n(self, n: int) -> list[KVCacheBlock]:
        block: Any = self.fake_free_list_head.next_free_block
        end = self.fake_free_list_tail
        if not self._piles or (n == 1 and block is not end):
            return _popleft_n(self, n)
        taken: list[KVCacheBlock] = []
        while len(taken) < n:
            if block is end:
                self._begin_with(end, len(taken))
                missing = n - len(taken)
                self._refill(missing + self._ahead, missing)
                return taken + _popleft_n(self, missing)
            taken.append(block)
            after = block.next_free_block
            block.prev_free_block = block.next_free_block = None
            block = after
        self._begin_with(block, n)
        return taken

    def append(self, block: KVCacheBlock) -> None:
        self.append_n([block])

    def append_n(self, blocks: list[KVCacheBlock]) -> None:
        if not self._book.claims:
            super().append_n(blocks)
            return
        plain = self.kept.add(blocks)
        self.num_free_blocks += len(blocks) - len(plain)
        if plain:
            super().append_n(plain)

    def get_all_free_blocks(self) -> list[KVCacheBlock]:
        return [*super().get_all_free_blocks(), *self.kept.in_order(self.clock())]

    def iter_blocks_after(self, cursor: KVCacheBlock | None) -> Iterator[KVCacheBlock]:
        """In the order of reuse, behind ``cursor`` (from the front when it is not free any more)."""
        blocks = self.get_all_free_blocks()
        ids = [block.block_id for block in blocks]
        start = ids.index(cursor.block_id) + 1 if cursor is not None and cursor.block_id in ids else 0
        return iter(blocks[start:])

    # ------------------------------------------------------------ ours

    def take_ahead(self) -> None:
        """Choose the blocks to be reused next, where vLLM has few that nobody needs."""
        if self._piles and (missing := self._ahead - self.plain(self._ahead)) > 0:
            self._refill(missing, 0)

    def first(self, blocks: list[KVCacheBlock]) -> None:
        """Free blocks, of whatever kind, to be reused next."""
        for block in blocks:
            self.remove(block)
        self.prepend_n(blocks)

    def give_back(self) -> None:
        """Keep nothing any more: all blocks are vLLM's again, in the order in which they would be reused."""
        blocks = self.kept.in_order(self.clock())
        self.kept.clear()
        self._hand_over(blocks)

    def _begin_with(self, block: KVCacheBlock, taken: int) -> None:
        """The plain list begins with this block now, after so many were taken from it."""
        self.fake_free_list_head.next_free_block = block
        block.prev_free_block = self.fake_free_list_head
        self.num_free_blocks -= taken

    def _refill(self, blocks: int, least: int) -> None:
        """Of the kept blocks those to be reused first, as many as there are and at least ``least``, become vLLM's."""
        victims: list[KVCacheBlock] = []
        try:
            self.kept.pop(blocks, self.clock(), victims)
            if len(victims) < least:
                raise RuntimeError(f"{least} blocks are wanted, {len(victims)} were kept")
        except Exception:
            # Requests wait for blocks: they get them, in whatever order.
            log.exception("kvpilot's order of reuse failed: what it kept is vLLM's again")
            victims += self.kept.clear()
        self._hand_over(victims)

    def _hand_over(self, blocks: list[KVCacheBlock]) -> None:
        """Blocks that were kept, and are free as before, become vLLM's."""
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
