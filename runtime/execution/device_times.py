"""When a GPU's streams came to a place, by the host's clock: events with times, read once they have passed.

CUDA tells the time between two events of a device. One of them is recorded on a stream that has nothing else
to do, and the host notes when; that is done anew every `_SECONDS`, since the two clocks drift.
"""

from __future__ import annotations

import threading
from time import perf_counter

from stretto.collectives.cuda import cuda

_SECONDS = 1.0


class _Clock:
    """One device's."""

    def __init__(self, device: int) -> None:
        self._device = device
        cuda().use(device)
        self._stream = cuda().stream()
        self._event = cuda().event(timed=True)
        self._at = -1e9

    def at(self, event: int) -> float:
        """When an event of the device passed, which it has."""
        driver = cuda()
        driver.use(self._device)
        if perf_counter() > self._at + _SECONDS:
            driver.record(self._event, self._stream)
            while not driver.passed(self._event):
                pass
            self._at = perf_counter()
        return self._at + driver.elapsed(self._event, event)


_clocks: dict[int, _Clock] = {}
_lock = threading.Lock()


class Timed:
    """A place on a stream of a device, and when it was reached."""

    __slots__ = ("_device", "_event")

    def __init__(self, device: int, stream: int) -> None:
        self._device = device
        cuda().use(device)  # whose event it is
        self._event = cuda().event(timed=True)
        cuda().record(self._event, stream)

    def read(self) -> float:
        """As ``perf_counter`` tells it; the place must have been reached."""
        with _lock:
            if self._device not in _clocks:
                _clocks[self._device] = _Clock(self._device)
            return _clocks[self._device].at(self._event)

    def __del__(self) -> None:
        cuda().destroy_event(self._event)
