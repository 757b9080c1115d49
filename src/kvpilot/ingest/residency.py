"""What is really where, built from observations only: never from what kvpilot asked for.

Sources, from slow and complete to quick and partial: the cache layer's directory listing
(``begin_refresh`` … ``commit``), an answer of ``Backend.locate`` (``observe``), the engine's KV events
(``pool`` for device blocks, ``host_event`` for the cache layer's own host tier). Pure: no I/O; time is an
argument.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kvpilot.backends.base import Placement
from kvpilot.domain import Space, Tier, TierUsage, TokenArray
from kvpilot.ingest.device import DevicePool

_BITS = {Tier.HOST: 1, Tier.DISK: 2, Tier.POOL: 4}
_ALL = 7
_HOST = _BITS[Tier.HOST]
_SETS = tuple(frozenset(tier for tier, bit in _BITS.items() if mask & bit) for mask in range(_ALL + 1))

_COVERAGE_SLACK = 0.01
"""How far directory and layer may differ in a tier's bytes while the directory is taken to know all."""

_COVERAGE_SAMPLES = 3
"""Of so many comparisons the best counts: the directory lags, so a single one may catch it behind."""

_DIRECTORY_LAG_S = 3.0
"""After so long what happened is in the directory, if it ever will be."""

_FORGET_SHORT_HASHES = 100_000


@dataclass(slots=True)
class Refresh:
    """A directory listing being collected, page by page; becomes the view with :meth:`Residency.commit`."""

    started_at: float
    spaces: dict[Space, dict[bytes, int]] = field(default_factory=dict)

    def add(self, page: Iterable[Placement]) -> None:
        for placement in page:
            mask = _mask(placement.tiers)
            if mask:
                self.spaces.setdefault(placement.space, {})[placement.chunk] = mask


@dataclass(frozen=True, slots=True)
class _Correction:
    """Bits (``known``) of one chunk that something fresher than the listing told."""

    known: int
    value: int
    at: float


class Residency:
    """Chunks per tier of the cache layer, and tokens in the engines' device pools."""

    def __init__(self, *, stale_after_s: float = 10.0) -> None:
        self._stale_after_s = stale_after_s
        self._spaces: dict[Space, dict[bytes, int]] = {}
        self._corrections: dict[tuple[Space, bytes], _Correction] = {}
        self._by_short_hash: dict[int, list[tuple[Space, bytes]]] = {}
        self._pools: dict[str, tuple[str, DevicePool]] = {}
        self.usage: tuple[TierUsage, ...] = ()
        self._ratios: dict[Tier, deque[float]] = {}
        self.coverage: Mapping[Tier, float] = {}
        """Bytes the directory lists ÷ bytes the layer says it holds, where both are known: below 1 the
        directory has not seen everything (its process was restarted), above 1 it lists what is gone."""
        self.directory_at: float | None = None
        """When the newest complete listing was begun."""
        self.usage_at: float | None = None
        self.events_at: float | None = None

    # ---------------------------------------------------------------- questions

    def tiers(self, space: Space, chunk: bytes) -> frozenset[Tier]:
        """Tiers of the cache layer that hold the chunk (device blocks: :meth:`device_prefix`)."""
        return _SETS[self._lookup(space, chunk)]

    def count(self, space: Space, chunks: Iterable[bytes]) -> dict[Tier, int]:
        """Chunks per tier; tiers that hold none are missing."""
        counts: dict[Tier, int] = {}
        for chunk in chunks:
            for tier in _SETS[self._lookup(space, chunk)]:
                counts[tier] = counts.get(tier, 0) + 1
        return counts

    def prefix(self, space: Space, chunks: Iterable[bytes], tier: Tier) -> int:
        """Leading chunks resident in ``tier``. A hole ends it: what lies behind cannot be used."""
        bit = _BITS.get(tier, 0)
        found = 0
        for chunk in chunks:
            if not self._lookup(space, chunk) & bit:
                break
            found += 1
        return found

    def device_prefix(self, space: Space, tokens: TokenArray) -> int:
        """Leading tokens resident in the device pool of the engine that holds most of them."""
        return max(
            (
                pool.prefix(space.salt, space.adapter, tokens)
                for model, pool in self._pools.values()
                if not model or model == space.model
            ),
            default=0,
        )

    def stale(self, now: float) -> bool:
        """Whether the directory view is too old to plan with."""
        return self.directory_at is None or now - self.directory_at > self._stale_after_s

    def absence_is_certain(self, tier: Tier) -> bool:
        """Whether a chunk the view does not show in ``tier`` is really not there.

        False before the first listing and while the layer holds more bytes than its directory lists, as
        after a restart of LMCache's coordinator, which does not relearn what is already stored.
        """
        return self.directory_at is not None and self.coverage.get(tier, 1.0) >= 1 - _COVERAGE_SLACK

    # ---------------------------------------------------------------- observations

    def begin_refresh(self, now: float) -> Refresh:
        """Start collecting a listing; ``now`` is taken before the layer is asked."""
        return Refresh(now)

    def commit(self, refresh: Refresh) -> bool:
        """Make a complete listing the view. Returns whether anything changed.

        Observations made after the listing was begun stay on top of it. So do host events that it
        contradicts, as long as directory and layer disagree on how much there is: what happened while
        LMCache's coordinator was away reached the event stream only.
        """
        changed = refresh.spaces != self._spaces
        self._spaces = refresh.spaces
        self.directory_at = refresh.started_at
        if changed:
            for space, chunks in refresh.spaces.items():
                self.learn(space, chunks)
            self._forget_short_hashes()
        self._corrections = {
            key: fix
            for key, fix in self._corrections.items()
            if self._still_holds(key, fix, refresh.started_at)
        }
        return changed

    def confirm(self, now: float) -> None:
        """The layer's directory was asked at ``now`` and has not changed since the last listing."""
        if self.directory_at is not None:
            self.directory_at = max(now, self.directory_at)

    def observe(
        self, space: Space, chunks: Sequence[bytes], found: Sequence[Collection[Tier]], now: float
    ) -> None:
        """Take over an answer of ``Backend.locate`` asked at ``now``."""
        for chunk, tiers in zip(chunks, found, strict=True):
            self._corrections[(space, chunk)] = _Correction(_ALL, _mask(tiers), now)
        self.learn(space, chunks)

    def learn(self, space: Space, chunks: Iterable[bytes]) -> None:
        """Chunks that exist somewhere, so that host events (64 bits of the hash) can be matched to them."""
        for chunk in chunks:
            owners = self._by_short_hash.setdefault(short_hash(chunk), [])
            if (space, chunk) not in owners:
                owners.append((space, chunk))

    def host_event(self, short: int, present: bool, now: float) -> bool:
        """An event of the host tier, which names a chunk by 64 bits and says nothing of its salt.

        Applied only when exactly one known chunk can be meant; returns whether it was.
        """
        self.events_at = now
        owners = self._by_short_hash.get(short, ())
        if len(owners) != 1:
            return False
        (key,) = owners
        earlier = self._corrections.get(key)
        value = _HOST if present else 0
        if earlier is not None and earlier.known == _ALL:
            self._corrections[key] = _Correction(_ALL, (earlier.value & ~_HOST) | value, now)
        else:
            self._corrections[key] = _Correction(_HOST, value, now)
        return True

    def forget_host_events(self) -> None:
        """The event stream was interrupted: what it said may be outdated."""
        self._corrections = {key: fix for key, fix in self._corrections.items() if fix.known != _HOST}

    def set_usage(self, usage: tuple[TierUsage, ...], listed_bytes: Mapping[Tier, int], now: float) -> None:
        """Bytes per tier from the layer itself, and what its directory lists (tiers not known left out)."""
        self.usage = usage
        self.usage_at = now
        for entry in usage:
            if entry.tier in listed_bytes:
                ratio = listed_bytes[entry.tier] / entry.used_bytes if entry.used_bytes else 1.0
                self._ratios.setdefault(entry.tier, deque(maxlen=_COVERAGE_SAMPLES)).append(ratio)
        self.coverage = {
            tier: min(ratios, key=lambda ratio: abs(1 - ratio)) for tier, ratios in self._ratios.items()
        }

    def pool(self, engine: str, model: str = "") -> DevicePool:
        """The device pool of ``engine`` (made on first use); ``model`` as in :class:`Space`, "" = any."""
        known = self._pools.get(engine)
        if known is None or known[0] != model:
            known = (model, DevicePool())
            self._pools[engine] = known
        return known[1]

    # ---------------------------------------------------------------- internals

    def _still_holds(self, key: tuple[Space, bytes], fix: _Correction, listed_at: float) -> bool:
        if fix.known == _ALL:
            return fix.at >= listed_at
        if len(self._by_short_hash.get(short_hash(key[1]), ())) != 1:
            return False
        if fix.at >= listed_at - _DIRECTORY_LAG_S:
            return True
        disagrees = (self._listed(*key) & _HOST) != fix.value
        return disagrees and abs(1 - self.coverage.get(Tier.HOST, 1.0)) > _COVERAGE_SLACK

    def _forget_short_hashes(self) -> None:
        live = sum(len(chunks) for chunks in self._spaces.values())
        if len(self._by_short_hash) > _FORGET_SHORT_HASHES + 2 * live:
            self._by_short_hash = {}
            for space, chunks in self._spaces.items():
                self.learn(space, chunks)

    def _listed(self, space: Space, chunk: bytes) -> int:
        chunks = self._spaces.get(space)
        return chunks.get(chunk, 0) if chunks else 0

    def _lookup(self, space: Space, chunk: bytes) -> int:
        mask = self._listed(space, chunk)
        fix = self._corrections.get((space, chunk))
        return mask if fix is None else (mask & ~fix.known) | fix.value


def short_hash(chunk: bytes) -> int:
    """The 64 bits by which KV events name a chunk (last 8 bytes, big-endian)."""
    return int.from_bytes(chunk[-8:], "big")


def _mask(tiers: Collection[Tier]) -> int:
    return sum(_BITS.get(tier, 0) for tier in set(tiers))
