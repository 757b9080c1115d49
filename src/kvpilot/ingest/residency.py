"""What is really where, built from observations only: never from what kvpilot asked for.

Sources, from slow and complete to quick and partial: the cache layer's directory listing
(``begin_refresh`` … ``commit``), an answer of ``Backend.locate`` (``observe``), the engine's KV events
(``pool`` for device blocks, ``host_event`` for the cache layer's own host tier). Pure: no I/O; time is an
argument.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from kvpilot.backends.base import Placement
from kvpilot.context.chunks import short_hash
from kvpilot.domain import Space, Tier, TierUsage, TokenArray
from kvpilot.ingest.device import DevicePool

_BITS = {Tier.HOST: 1, Tier.DISK: 2, Tier.POOL: 4}
_SETS = tuple(frozenset(tier for tier, bit in _BITS.items() if mask & bit) for mask in range(8))

_COVERAGE_SLACK = 0.01
"""How far directory and layer may differ in a tier's bytes while the directory is taken to know all."""

_COVERAGE_SAMPLES = 3
"""Of so many comparisons the best counts: the directory lags, so a single one may catch it behind."""

_DIRECTORY_LAG_S = 3.0
"""After so long what happened is in the directory, if it ever will be."""

_GAP_MATTERS_S = 600.0
"""For so long what was seen while the directory was away outweighs what it lists (caches turn over)."""

_STALE_LISTINGS = 12
"""A huge directory is listed a tenth of the time only; its view may get so many listings old."""

_MAX_GAPS = 16
_FORGET_SHORT_HASHES = 100_000
_MAX_UNMATCHED = 20_000


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
class _Seen:
    """Something fresher than the listing told of one chunk in one tier."""

    present: bool
    at: float
    from_directory: bool = False
    by_event: bool = False


class Residency:
    """Chunks per tier of the cache layer, and tokens in the engines' device pools."""

    def __init__(self, *, stale_after_s: float = 10.0) -> None:
        self._stale_after_s = stale_after_s
        self._spaces: dict[Space, dict[bytes, int]] = {}
        self._seen: dict[tuple[Space, bytes], dict[Tier, _Seen]] = {}
        """What corrects the listing, until one shows the same or is known to know better."""
        self._by_short_hash: dict[int, list[tuple[Space, bytes]]] = {}
        self._unmatched: OrderedDict[int, _Seen] = OrderedDict()
        """Host events of chunks not known yet: the engine tells of a store before its request is mapped."""
        self._pools: dict[str, tuple[str, DevicePool]] = {}
        self._followers: list[set[tuple[Space, bytes]]] = []
        self.usage: tuple[TierUsage, ...] = ()
        self._gaps: deque[tuple[float, float]] = deque(maxlen=_MAX_GAPS)
        self._ratios: dict[Tier, deque[float]] = {}
        self.coverage: Mapping[Tier, float] = {}
        """Bytes the directory lists ÷ bytes the layer says it holds, where both are known: below 1 the
        directory has not seen everything (its process was restarted), above 1 it lists what is gone."""
        self.directory_at: float | None = None
        """When the newest complete listing was begun."""
        self.listing_takes_s = 0.0
        """Seconds the newest listing took; told by whoever takes them."""
        self.usage_at: float | None = None
        self.events_at: float | None = None

    # ---------------------------------------------------------------- questions

    def tiers(self, space: Space, chunk: bytes) -> frozenset[Tier]:
        """Tiers of the cache layer that hold the chunk (device blocks: :meth:`device_prefix`)."""
        return _SETS[self._lookup(space, chunk)]

    def spaces_of(self, chunk: bytes) -> list[Space]:
        """Where the cache layer holds a chunk of this name. O(corrections under way)."""
        known = {*self._spaces, *(space for space, seen in self._seen if seen == chunk)}
        return [space for space in known if self._lookup(space, chunk)]

    def count(self, space: Space, chunks: Iterable[bytes]) -> dict[Tier, int]:
        """Chunks per tier; tiers that hold none are missing."""
        counts: dict[Tier, int] = {}
        for chunk in chunks:
            for tier in _SETS[self._lookup(space, chunk)]:
                counts[tier] = counts.get(tier, 0) + 1
        return counts

    def prefix(self, space: Space, chunks: Iterable[bytes], tier: Tier | None = None) -> int:
        """Leading chunks resident in ``tier`` (None: in any). A hole ends it: what lies behind cannot be used."""
        bit = -1 if tier is None else _BITS.get(tier, 0)
        found = 0
        for chunk in chunks:
            if not self._lookup(space, chunk) & bit:
                break
            found += 1
        return found

    def resident(self, tier: Tier) -> Iterator[tuple[Space, list[bytes]]]:
        """Every chunk the view shows in ``tier``, per space. O(chunks known)."""
        bit = _BITS.get(tier, 0)
        corrected: dict[Space, list[bytes]] = {}
        for space, chunk in self._seen:
            corrected.setdefault(space, []).append(chunk)
        for space in {**self._spaces, **corrected}:
            known = {**self._spaces.get(space, {}), **dict.fromkeys(corrected.get(space, ()), 0)}
            yield space, [chunk for chunk in known if self._lookup(space, chunk) & bit]

    def device_prefix(self, space: Space, tokens: TokenArray) -> int:
        """Leading tokens resident in the device pool of the engine that holds most of them."""
        pools = self.pools_of(space)
        return max((pool.prefix(space.salt, space.adapter, tokens) for pool in pools), default=0)

    def pools_of(self, space: Space) -> list[DevicePool]:
        """Device pools that may hold something of the space."""
        return [pool for model, pool in self._pools.values() if not model or model == space.model]

    def stale(self, now: float) -> bool:
        """Whether the directory view is too old to plan with."""
        limit = max(self._stale_after_s, _STALE_LISTINGS * self.listing_takes_s)
        return self.directory_at is None or now - self.directory_at > limit

    def absence_is_certain(self, tier: Tier) -> bool:
        """Whether a chunk the view does not show in ``tier`` is really not there.

        False before the first listing, for some time after the directory was away, and while the layer holds
        more bytes than the directory lists: LMCache's coordinator does not relearn what it missed.
        """
        if self.directory_at is None or any(self._matters(gap) for gap in self._gaps):
            return False
        return self.coverage.get(tier, 1.0) >= 1 - _COVERAGE_SLACK

    def follow(self) -> set[tuple[Space, bytes]]:
        """Chunks that may lie elsewhere than before are put there from now on, for somebody to take."""
        changes: set[tuple[Space, bytes]] = set()
        self._followers.append(changes)
        return changes

    def unfollow(self, changes: set[tuple[Space, bytes]]) -> None:
        self._followers = [each for each in self._followers if each is not changes]

    # ---------------------------------------------------------------- observations

    def begin_refresh(self, now: float) -> Refresh:
        """Start collecting a listing; ``now`` is taken before the layer is asked."""
        return Refresh(now)

    def commit(self, refresh: Refresh) -> bool:
        """Make a complete listing the view. Returns whether anything changed.

        Observations made after the listing was begun stay on top of it (those of one tier for a little longer:
        the directory lags). So do others that it contradicts, when they were made while the directory was
        away or while directory and layer disagree on how much there is.
        """
        changed = refresh.spaces != self._spaces
        known, self._spaces = self._spaces, refresh.spaces
        self.directory_at = refresh.started_at
        if changed:
            for space in {**known, **refresh.spaces}:
                before, after = known.get(space, {}), refresh.spaces.get(space, {})
                self.learn(space, (chunk for chunk in after if chunk not in before))
                self._tell(space, (chunk for chunk, mask in after.items() if before.get(chunk) != mask))
                self._tell(space, (chunk for chunk in before if chunk not in after))
            self._forget_short_hashes()
        self._keep_seen(lambda key, tier, seen: self._still_holds(key, tier, seen, refresh.started_at))
        return changed

    def confirm(self, now: float) -> None:
        """The layer's directory was asked at ``now`` and has not changed since the last listing."""
        if self.directory_at is not None:
            self.directory_at = max(now, self.directory_at)

    def directory_missed(self, since: float, until: float) -> None:
        """The directory was away in this time and may never learn what happened then."""
        self._gaps.append((since, until))

    def observe(
        self, space: Space, chunks: Sequence[bytes], found: Sequence[Collection[Tier]], now: float
    ) -> None:
        """Take over an answer of ``Backend.locate`` asked at ``now``."""
        for chunk, tiers in zip(chunks, found, strict=True):
            seen = self._seen.setdefault((space, chunk), {})
            for tier in _BITS:
                earlier = seen.get(tier)
                if earlier is None or earlier.from_directory or earlier.at < now - _DIRECTORY_LAG_S:
                    seen[tier] = _Seen(tier in tiers, now, from_directory=True)
        self._tell(space, chunks)
        self.learn(space, chunks)

    def observe_tier(
        self, space: Space, chunks: Sequence[bytes], tier: Tier, present: bool, now: float
    ) -> None:
        """What the layer itself reported of one tier: all found by a prefetch, or deleted without a skip."""
        for chunk in chunks:
            self._seen.setdefault((space, chunk), {})[tier] = _Seen(present, now)
        self._tell(space, chunks)
        self.learn(space, chunks)

    def learn(self, space: Space, chunks: Iterable[bytes]) -> None:
        """Chunks that exist somewhere, so that host events (64 bits of the hash) can be matched to them."""
        for chunk in chunks:
            self._learn(space, chunk)

    def learn_context(self, space: Space, chunks: Sequence[bytes]) -> None:
        """The same for a whole context, head first, of which mostly only the tail is new."""
        for chunk in reversed(chunks):
            if not self._learn(space, chunk):
                return

    def host_event(self, short: int, present: bool, now: float) -> bool:
        """An event of the host tier, which names a chunk by 64 bits and says nothing of its salt.

        Applied only when exactly one known chunk can be meant (or is learned of later); returns whether it was.
        """
        self.events_at = now
        seen = _Seen(present, now, by_event=True)
        owners = self._by_short_hash.get(short, ())
        if len(owners) == 1:
            tiers = self._seen.setdefault(owners[0], {})
            tiers[Tier.HOST] = seen
            if present and Tier.DISK in tiers and not tiers[Tier.DISK].present:
                del tiers[Tier.DISK]  # stored anew, so it is being copied to disk, too
            self._tell(owners[0][0], owners[0][1:])
            return True
        if not owners:
            self._unmatched[short] = seen
            self._unmatched.move_to_end(short)
            if len(self._unmatched) > _MAX_UNMATCHED:
                self._unmatched.popitem(last=False)
        return False

    def forget_host_events(self) -> None:
        """The event stream was interrupted: what it said may be outdated."""
        self._unmatched.clear()
        self._keep_seen(lambda _key, _tier, seen: not seen.by_event)

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

    def _learn(self, space: Space, chunk: bytes) -> bool:
        """False when it was known."""
        short = short_hash(chunk)
        owners = self._by_short_hash.setdefault(short, [])
        if (space, chunk) in owners:
            return False
        owners.append((space, chunk))
        seen = self._unmatched.pop(short, None)
        if seen is not None and len(owners) == 1:
            self._seen.setdefault((space, chunk), {}).setdefault(Tier.HOST, seen)
            self._tell(space, (chunk,))
        return True

    def _tell(self, space: Space, chunks: Iterable[bytes]) -> None:
        if self._followers:
            changed = [(space, chunk) for chunk in chunks]
            for followed in self._followers:
                followed.update(changed)

    def _keep_seen(self, holds: Callable[[tuple[Space, bytes], Tier, _Seen], bool]) -> None:
        kept = {}
        for key, tiers in self._seen.items():
            left = {tier: seen for tier, seen in tiers.items() if holds(key, tier, seen)}
            if left:
                kept[key] = left
            if len(left) < len(tiers):
                self._tell(key[0], key[1:])
        self._seen = kept

    def _still_holds(self, key: tuple[Space, bytes], tier: Tier, seen: _Seen, listed_at: float) -> bool:
        if seen.from_directory:
            return seen.at >= listed_at
        if seen.by_event and len(self._by_short_hash.get(short_hash(key[1]), ())) != 1:
            return False
        if seen.at >= listed_at - _DIRECTORY_LAG_S:
            return True
        if bool(self._listed(*key) & _BITS[tier]) == seen.present:
            return False
        if abs(1 - self.coverage.get(tier, 1.0)) > _COVERAGE_SLACK:
            return True
        return any(
            since - _DIRECTORY_LAG_S <= seen.at <= until and self._matters((since, until))
            for since, until in self._gaps
        )

    def _matters(self, gap: tuple[float, float]) -> bool:
        return self.directory_at is not None and self.directory_at - gap[1] < _GAP_MATTERS_S

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
        for tier, seen in self._seen.get((space, chunk), {}).items():
            mask = mask | _BITS[tier] if seen.present else mask & ~_BITS[tier]
        return mask


def _mask(tiers: Collection[Tier]) -> int:
    return sum(_BITS.get(tier, 0) for tier in set(tiers))
