"""The token-prefix tree of one space: every context in it shares the runs it has in common with others.

A node is a run of tokens between two points where contexts part or end, with the hashes of the chunks whose
*last* token lies in it: a chunk that straddles a branch point belongs to the branch, as its hash does.
Contexts end at nodes only, so one number per node (``refs``, the contexts that run through it or end at it)
counts the holders of every chunk of the run. Runs that no context needs are cut off at once and runs that no
longer part are joined again: the tree is as large as the contexts in it, no matter how long it has lived.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from kvpilot.context.chunks import HASH_BYTES, ChunkHasher
from kvpilot.context.hash_index import ABSENT, HashIndex, keys_of
from kvpilot.context.tokens import common_tokens
from kvpilot.domain import TokenArray


class IntegrityError(AssertionError):
    """The table contradicts itself: a bug. The message says where."""


class Node:
    """A run of tokens. Its identity is its end: splitting and joining change its start. ``refs`` 0: it is gone."""

    __slots__ = ("children", "ends", "hashes", "parent", "refs", "slot", "start", "tokens")

    def __init__(self, parent: Node | None, start: int, tokens: TokenArray, hashes: bytes, slot: int) -> None:
        self.parent = parent
        self.start = start
        self.tokens = tokens
        self.hashes = hashes
        self.slot = slot
        self.children: dict[int, Node] = {}
        self.refs = 0
        self.ends = 0

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    def chunks(self) -> list[bytes]:
        """Those that end in the run, head first."""
        return _unpack(self.hashes)

    def path(self) -> Iterator[Node]:
        """This node and those above it up to the root, tail first."""
        node: Node | None = self
        while node is not None:
            yield node
            node = node.parent


class PrefixTree:
    """Contexts of one space and the chunks they hold, in one chunk scheme. ``changed`` is told of every run that comes,
    goes, or has other tokens or another predecessor now."""

    def __init__(self, hasher: ChunkHasher, changed: Callable[[Node], None] = lambda node: None) -> None:
        self._hasher = hasher
        self._changed = changed
        self._index = HashIndex()
        self._root = Node(None, 0, np.empty(0, dtype=np.uint32), b"", 0)
        self._nodes: list[Node | None] = [self._root]
        self._vacant: list[int] = []

    @property
    def contexts(self) -> int:
        return self._root.refs

    @property
    def chunks(self) -> int:
        return len(self._index)

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays (an estimate: without the few objects per node)."""
        return self._index.nbytes + sum(node.tokens.nbytes + len(node.hashes) for node in self.nodes())

    def nodes(self) -> Iterator[Node]:
        return (node for node in self._nodes if node is not None)

    # ------------------------------------------------------------ contexts come and go

    def acquire(self, tokens: TokenArray, hashes: Sequence[bytes] | None = None) -> Node:
        """Add a context; the node returned stands for it until it is released.

        ``hashes`` are those of all its complete chunks when the caller has them (else they are computed, the
        part the tree knows excepted). Raises ValueError when they cannot be those of ``tokens``.
        """
        size = self._hasher.chunk_size
        if hashes is not None and len(hashes) != len(tokens) // size:
            raise ValueError(f"{len(tokens)} tokens have {len(tokens) // size} chunks, not {len(hashes)}")
        node, length = self._descend(tokens)
        known = length // size
        if hashes is not None and known and self._last_hash(node, known) != hashes[known - 1]:
            raise ValueError(f"chunk {known - 1} has another hash here than the one given")
        if length < node.end:
            node = self._split(node, length)
        if length < len(tokens):
            if hashes is None:
                hashes = self._hasher.hashes(tokens, known=self.hashes(node))
            node = self._append(node, tokens[length:], b"".join(hashes[known:]))
        node.ends += 1
        for above in node.path():
            above.refs += 1
        return node

    def release(self, node: Node) -> tuple[list[bytes], int]:
        """Take a context away: the chunks nobody holds any more (tail first) and the tokens that went."""
        node.ends -= 1
        gone: list[bytes] = []
        tokens = 0
        for above in node.path():
            above.refs -= 1
        while node.refs == 0 and node.parent is not None:
            gone.extend(reversed(_unpack(node.hashes)))
            tokens += len(node.tokens)
            parent = node.parent
            del parent.children[int(node.tokens[0])]
            self._index.remove(keys_of(node.hashes, HASH_BYTES))
            self._vacate(node.slot)
            self._changed(node)
            node = parent
        self._join(node)
        return gone, tokens

    # ------------------------------------------------------------ questions

    def holders(self, chunks: Sequence[bytes]) -> list[int]:
        """In how many contexts each chunk is, 0 for unknown ones."""
        return [0 if node is None else node.refs for node in self._lookup(chunks)]

    def node(self, chunk: bytes) -> Node | None:
        """The run with this chunk; None for unknown ones."""
        return self._lookup([chunk])[0]

    def nodes_with(self, chunks: Sequence[bytes]) -> set[Node]:
        """The runs with any of these chunks."""
        return {node for node in self._lookup(chunks) if node is not None}

    def resolve(self, short: int) -> bytes | None:
        """The chunk with this 64-bit name (``chunks.short_hash``), or None."""
        wanted = short.to_bytes(8, "big")
        (node,) = self._lookup([wanted])
        if node is None:
            return None
        return next(chunk for chunk in _unpack(node.hashes) if chunk.endswith(wanted))

    def shared(self, tokens: TokenArray) -> int:
        """Length of the longest prefix of ``tokens`` that some context has."""
        return self._descend(tokens)[1]

    def hashes(self, node: Node) -> list[bytes]:
        """Chunks of the context, head first."""
        return _unpack(b"".join([part.hashes for part in node.path()][::-1]))

    def tokens(self, node: Node) -> TokenArray:
        return np.concatenate([part.tokens for part in node.path()][::-1])

    # ------------------------------------------------------------ structure

    def _descend(self, tokens: TokenArray) -> tuple[Node, int]:
        """The node where ``tokens`` leaves the tree, and the tokens it has in common with it."""
        node, length = self._root, 0
        while length < len(tokens):
            child = node.children.get(int(tokens[length]))
            if child is None:
                break
            rest = tokens[length : length + len(child.tokens)]
            same = common_tokens(child.tokens, rest)
            node, length = child, length + same
            if length < child.end:
                break
        return node, length

    def _append(self, parent: Node, tokens: TokenArray, hashes: bytes) -> Node:
        slot = self._vacant.pop() if self._vacant else len(self._nodes)
        node = Node(parent, parent.end, np.array(tokens, dtype=np.uint32), hashes, slot)
        if slot == len(self._nodes):
            self._nodes.append(node)
        else:
            self._nodes[slot] = node
        parent.children[int(tokens[0])] = node
        self._index.put(keys_of(hashes, HASH_BYTES), slot)
        self._changed(node)
        return node

    def _split(self, node: Node, at: int) -> Node:
        """Cut ``node`` before token ``at``; the new node above it is returned."""
        parent = node.parent
        assert parent is not None
        kept = HASH_BYTES * (at // self._hasher.chunk_size - node.start // self._hasher.chunk_size)
        head, head_hashes = node.tokens[: at - node.start], node.hashes[:kept]
        node.tokens, node.hashes, node.start = node.tokens[at - node.start :].copy(), node.hashes[kept:], at
        upper = self._append(parent, head, head_hashes)
        upper.refs = node.refs
        upper.children[int(node.tokens[0])] = node
        node.parent = upper
        self._changed(node)
        return upper

    def _join(self, upper: Node) -> None:
        """Undo a split that nothing needs any more: no context ends here and only one goes on."""
        if upper.parent is None or upper.ends or len(upper.children) != 1:
            return
        (node,) = upper.children.values()
        # The longer part keeps its entries in the index.
        keep, drop = (upper, node) if len(upper.hashes) > len(node.hashes) else (node, upper)
        self._index.put(keys_of(drop.hashes, HASH_BYTES), keep.slot)
        self._vacate(drop.slot)
        node.slot = keep.slot
        self._nodes[node.slot] = node
        node.tokens = np.concatenate((upper.tokens, node.tokens))
        node.hashes = upper.hashes + node.hashes
        node.start = upper.start
        node.parent = upper.parent
        upper.parent.children[int(upper.tokens[0])] = node
        upper.refs = 0
        self._changed(upper)
        self._changed(node)

    def _vacate(self, slot: int) -> None:
        self._nodes[slot] = None
        self._vacant.append(slot)

    def _last_hash(self, node: Node, count: int) -> bytes:
        """Hash of chunk ``count - 1`` on the path through ``node``, which covers it."""
        for part in node.path():
            first = part.start // self._hasher.chunk_size
            if first < count:
                offset = HASH_BYTES * (count - 1 - first)
                return part.hashes[offset : offset + HASH_BYTES]
        raise IntegrityError(f"no chunk {count - 1} on the path to token {node.end}")

    def _lookup(self, chunks: Sequence[bytes]) -> list[Node | None]:
        if not chunks:
            return []
        keys = keys_of(b"".join([chunk[-8:] for chunk in chunks]), 8)
        return [None if slot == ABSENT else self._nodes[slot] for slot in self._index.get(keys)]

    # ------------------------------------------------------------ audit

    def check(self, *, rehash: bool = False) -> None:
        """Raise IntegrityError unless counts, runs and index agree; ``rehash``: and recomputed hashes."""
        total = 0
        for node in self.nodes():
            where = f"node [{node.start}, {node.end})"
            _require(node.refs == node.ends + sum(c.refs for c in node.children.values()), f"{where}: refs")
            for token, child in node.children.items():
                _require(child.parent is node and child.start == node.end, f"{where}: child out of place")
                _require(int(child.tokens[0]) == token, f"{where}: child under a wrong token")
            if node.parent is None:
                continue
            chunks = _unpack(node.hashes)
            total += len(chunks)
            size = self._hasher.chunk_size
            _require(node.refs > 0, f"{where}: kept without a reference")
            _require(bool(node.ends) or len(node.children) > 1, f"{where}: not joined with its only child")
            _require(len(chunks) == node.end // size - node.start // size, f"{where}: number of hashes")
            _require(all(found is node for found in self._lookup(chunks)), f"{where}: index")
            if rehash and not node.children:
                _require(self._hasher.hashes(self.tokens(node)) == self.hashes(node), f"{where}: hashes")
        _require(total == len(self._index), f"index has {len(self._index)} chunks, the runs {total}")


def _unpack(hashes: bytes) -> list[bytes]:
    return [hashes[at : at + HASH_BYTES] for at in range(0, len(hashes), HASH_BYTES)]


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise IntegrityError(what)
