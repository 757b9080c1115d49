"""Which chunks do live contexts need?

A reference is an owner (a session) and its current context. Moving it to a newer context gives up what only
the old one held: the rule "evict what no live session holds, and nothing else" is this table's answer to
``set`` and ``drop``. Evicting is somebody else's work; here is only who holds what.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from kvpilot.context.chunks import ChunkHasher
from kvpilot.context.prefix_tree import IntegrityError, Node, PrefixTree
from kvpilot.domain import Space, TokenArray

__all__ = ["Changes", "IntegrityError", "Node", "ReferenceTable", "Released", "TableSize"]


@dataclass(frozen=True, slots=True)
class Released:
    """What lost its last live reference: chunk hashes, tail first, and how many tokens; they are the last ones of
    ``context`` (None where nothing was lost)."""

    space: Space
    chunks: tuple[bytes, ...] = ()
    tokens: int = 0
    context: TokenArray | None = field(default=None, compare=False, repr=False)


@dataclass(slots=True, eq=False)
class Changes:
    """What has changed since somebody looked last, for him to take: runs that came, went (``refs`` 0) or are others
    now, and owners that have another context, or none. In the order of events."""

    nodes: dict[Node, Space] = field(default_factory=dict)
    owners: dict[str, None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TableSize:
    owners: int
    nodes: int
    tokens: int
    chunks: int
    nbytes: int


class ReferenceTable:
    """Owner → context, over one token-prefix tree per space. Not thread-safe."""

    def __init__(self, hasher: ChunkHasher) -> None:
        self._hasher = hasher
        self._trees: dict[Space, PrefixTree] = {}
        self._owners: dict[str, tuple[Space, Node]] = {}
        self._followers: list[Changes] = []

    def __contains__(self, owner: str) -> bool:
        return owner in self._owners

    def set(
        self, owner: str, space: Space, tokens: TokenArray, *, hashes: Sequence[bytes] | None = None
    ) -> Released:
        """Make ``tokens`` the owner's context, in place of the one it had.

        Returns the chunks of the old context that no live context holds now (in the old context's space).
        ``hashes``: those of all complete chunks of ``tokens``, where the caller has them already; ValueError
        when they cannot be.
        """
        tree = self._trees.get(space) or PrefixTree(self._hasher, partial(self._changed, space))
        node = tree.acquire(tokens, hashes)
        self._trees[space] = tree
        old = self._owners.get(owner)
        self._owners[owner] = (space, node)
        self._moved(owner)
        return self._release(*old) if old else Released(space)

    def drop(self, owner: str) -> Released:
        """Take the owner's reference away. Raises KeyError for an unknown owner."""
        released = self._release(*self._owners.pop(owner))
        self._moved(owner)
        return released

    def owners(self) -> list[str]:
        return list(self._owners)

    def space(self, owner: str) -> Space:
        return self._owners[owner][0]

    def tokens(self, owner: str) -> TokenArray:
        """The owner's context."""
        space, node = self._owners[owner]
        return self._trees[space].tokens(node)

    def chunks(self, owner: str) -> list[bytes]:
        """Complete chunks of the owner's context, head first."""
        space, node = self._owners[owner]
        return self._trees[space].hashes(node)

    def length(self, owner: str) -> int:
        """Tokens in the owner's context."""
        return self._owners[owner][1].end

    def holders(self, space: Space, chunks: Sequence[bytes]) -> list[int]:
        """How many live contexts hold each chunk whole; 0 for chunks nobody knows."""
        tree = self._trees.get(space)
        return tree.holders(chunks) if tree else [0] * len(chunks)

    def spaces_of(self, chunk: bytes) -> list[Space]:
        """Where live contexts hold this chunk."""
        return [space for space, tree in self._trees.items() if tree.node(chunk) is not None]

    def owners_of(self, space: Space, chunk: bytes) -> list[str]:
        """Who holds the chunk. O(all owners): for people who ask, not for decisions."""
        tree = self._trees.get(space)
        node = tree.node(chunk) if tree else None
        if node is None:
            return []
        return [owner for owner, (_, tip) in self._owners.items() if any(part is node for part in tip.path())]

    # ------------------------------------------------------------ for who keeps a picture of it

    def follow(self) -> Changes:
        """A picture of all there is begins with what is returned, and is kept up by what is found in it later."""
        nodes = {node: space for space, tree in self._trees.items() for node in tree.nodes() if node.parent}
        changes = Changes(nodes, dict.fromkeys(self._owners))
        self._followers.append(changes)
        return changes

    def unfollow(self, changes: Changes) -> None:
        self._followers.remove(changes)

    def tip(self, owner: str) -> Node:
        """The run at whose end the owner's context ends; one without a parent for an empty context."""
        return self._owners[owner][1]

    def nodes_with(self, space: Space, chunks: Sequence[bytes]) -> Collection[Node]:
        """The runs of live contexts with any of these chunks."""
        tree = self._trees.get(space)
        return tree.nodes_with(chunks) if tree else ()

    def is_live(self, space: Space, chunk: bytes) -> bool:
        return self.holders(space, (chunk,)) != [0]

    def unreferenced(self, space: Space, chunks: Iterable[bytes]) -> Iterator[bytes]:
        """Those of ``chunks`` (say, of a cache's directory) that no live context holds."""
        asked = list(chunks)
        counts = self.holders(space, asked)
        return (chunk for chunk, count in zip(asked, counts, strict=True) if not count)

    def resolve(self, space: Space, short: int) -> bytes | None:
        """The live chunk with this 64-bit name (``chunks.short_hash``), or None."""
        tree = self._trees.get(space)
        return tree.resolve(short) if tree else None

    def longest_shared(self, space: Space, tokens: TokenArray) -> int:
        """Length of the longest prefix of ``tokens`` that a live context of this space has."""
        tree = self._trees.get(space)
        return tree.shared(tokens) if tree else 0

    def size(self) -> TableSize:
        nodes = [node for tree in self._trees.values() for node in tree.nodes()]
        return TableSize(
            owners=len(self._owners),
            nodes=len(nodes),
            tokens=sum(len(node.tokens) for node in nodes),
            chunks=sum(tree.chunks for tree in self._trees.values()),
            nbytes=sum(tree.nbytes for tree in self._trees.values()),
        )

    def check_integrity(self, *, rehash: bool = False) -> None:
        """Raise IntegrityError if the table contradicts itself; ``rehash`` recomputes all hashes (slow)."""
        ends: dict[int, int] = {}
        for owner, (space, node) in self._owners.items():
            if space not in self._trees:
                raise IntegrityError(f"{owner} refers to a space without contexts: {space}")
            ends[id(node)] = ends.get(id(node), 0) + 1
        for space, tree in self._trees.items():
            if not tree.contexts:
                raise IntegrityError(f"{space} is kept without a reference")
            tree.check(rehash=rehash)
            for node in tree.nodes():
                if node.ends != ends.pop(id(node), 0):
                    raise IntegrityError(f"{space}: owners at token {node.end} miscounted")
        if ends:
            raise IntegrityError(f"{len(ends)} references point to runs that are gone")

    def _changed(self, space: Space, node: Node) -> None:
        for changes in self._followers:
            changes.nodes[node] = space

    def _moved(self, owner: str) -> None:
        for changes in self._followers:
            changes.owners[owner] = None

    def _release(self, space: Space, node: Node) -> Released:
        tree = self._trees[space]
        context = tree.tokens(node) if node.refs == 1 else None  # else another context runs through all of it
        chunks, tokens = tree.release(node)
        if not tree.contexts:
            del self._trees[space]
        return Released(space, tuple(chunks), tokens, context)
