"""What of the coordinator's picture lies in the engine's own device pool."""

from __future__ import annotations

from kvpilot.coordinator.picture import Picture
from kvpilot.coordinator.service import CoordinatorService
from kvpilot.domain import Tier
from kvpilot.plan.layout import Layout


class PoolPicture:
    """``layout``: the picture's runs in the device pool and, below it, in host memory. Of the pool it is told by block,
    not by conversation: a look walks through the blocks of every context, O(contexts + blocks of theirs in the pool).
    """

    def __init__(self, service: CoordinatorService, picture: Picture) -> None:
        self._service, self._picture = service, picture
        self.layout = Layout(picture.holdings, (Tier.DEVICE, Tier.HOST))
        self._there: dict[int, int] = {}
        self._busy: set[int] = set()

    def look(self) -> int:
        """Take in what has happened; returns tokens in the pool that fill no chunk."""
        service, picture, holdings = self._service, self._picture, self._picture.holdings
        picture.copy_host(self.layout)
        there: dict[int, int] = {}
        busy: set[int] = set()
        ends = 0
        for thread in picture.threads():
            rows = list(holdings.path(picture.tip(thread.owner)))[::-1]
            left, end = divmod(service.device.resident(thread), service.backend.chunk_size)
            ends += end
            if (
                thread.owner in picture.running
                or service.tasks.busy(thread.owner)
                or service.device.resting(thread)
            ):
                busy.update(rows)
            for row in rows:
                if left <= 0:
                    break
                size = int(holdings.chunks[row])
                there[row] = max(there.get(row, 0), min(left, size))
                left -= size
        for row in {**self._there, **there}:
            self.layout.lies(row, Tier.DEVICE, there.get(row, 0))
        for row in self._busy | busy:
            self.layout.mark(row, row in busy)
        self._there, self._busy = there, busy
        return ends
