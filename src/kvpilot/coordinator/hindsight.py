"""Were the right contexts sent down? Told by who came back first: who was sent down, or who was kept in its place.

Each context that is demoted for room is compared with the *runner-up*: of those that stayed in host memory the one
worth least, which would have gone in its place. Chunks are counted by verdict:

* ``regretted``: the demoted one came back first;
* ``right``: the runner-up came back first;
* ``idle``: neither came within ``HORIZON_S``: the room was worth nothing to either.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

HORIZON_S = 600.0
MAX_OPEN = 10_000
"""Comparisons open at once; of more the oldest are given up, uncounted."""

RIGHT, REGRETTED, IDLE = "right", "regretted", "idle"


@dataclass(frozen=True, slots=True)
class _Choice:
    demoted: str
    kept: str
    chunks: int
    at: float


class Hindsight:
    """``chunks``: how many, by verdict. All operations are O(1), but for those that become due."""

    def __init__(self) -> None:
        self.chunks: Counter[str] = Counter()
        self._open: dict[int, _Choice] = {}
        """By number, oldest first."""
        self._of: dict[str, set[int]] = {}
        self._next = 0

    def demoted(self, owner: str, chunks: int, kept: str, now: float) -> None:
        """``chunks`` of ``owner`` went down, and those of ``kept``, worth least of the rest, stayed."""
        self._settle_old(now)
        self._next += 1
        self._open[self._next] = _Choice(owner, kept, chunks, now)
        for one in (owner, kept):
            self._of.setdefault(one, set()).add(self._next)
        if len(self._open) > MAX_OPEN:
            self._close(next(iter(self._open)))

    def came(self, owner: str, now: float) -> None:
        """A request of ``owner`` begins."""
        self._settle_old(now)
        for number in list(self._of.get(owner, ())):
            choice = self._close(number)
            self.chunks[REGRETTED if choice.demoted == owner else RIGHT] += choice.chunks

    def forget(self, owner: str) -> None:
        """``owner`` will not come any more: nothing can be said of choices it was part of."""
        for number in list(self._of.get(owner, ())):
            self._close(number)

    def _settle_old(self, now: float) -> None:
        while self._open:
            number = next(iter(self._open))
            if self._open[number].at > now - HORIZON_S:
                break
            self.chunks[IDLE] += self._close(number).chunks

    def _close(self, number: int) -> _Choice:
        choice = self._open.pop(number)
        for one in (choice.demoted, choice.kept):
            held = self._of.get(one)
            if held is not None:
                held.discard(number)
                if not held:
                    del self._of[one]
        return choice
