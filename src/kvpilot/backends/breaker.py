"""Circuit breaker: a peer that fails is left alone for a while, then asked by one caller only. Pure."""

from __future__ import annotations


class Breaker:
    """Closed (calls pass) → open after ``threshold`` failures in a row → half-open: one probe at a time.

    A failed probe doubles the pause, up to ``max_pause_s``; a success closes the breaker.
    """

    def __init__(self, *, threshold: int = 3, pause_s: float = 1.0, max_pause_s: float = 4.0) -> None:
        self._threshold = threshold
        self._first_pause_s = pause_s
        self._max_pause_s = max_pause_s
        self._pause_s = pause_s
        self._failures = 0
        self._open_until: float | None = None
        self._probing = False

    @property
    def is_open(self) -> bool:
        return self._open_until is not None

    def admit(self, now: float) -> bool:
        """Whether a call may go out. Each admitted call must end with exactly one of
        :meth:`succeeded`, :meth:`failed` and :meth:`abandoned`."""
        if self._open_until is None:
            return True
        if now < self._open_until or self._probing:
            return False
        self._probing = True
        return True

    def succeeded(self) -> None:
        self._failures = 0
        self._open_until = None
        self._pause_s = self._first_pause_s
        self._probing = False

    def failed(self, now: float) -> None:
        self._failures += 1
        if self._open_until is not None:
            if not self._probing:
                return  # a call from before it opened
            self._probing = False
            self._pause_s = min(self._pause_s * 2, self._max_pause_s)
            self._open_until = now + self._pause_s
        elif self._failures >= self._threshold:
            self._open_until = now + self._pause_s

    def abandoned(self) -> None:
        """The call was cancelled: it says nothing about the peer."""
        self._probing = False
