"""A key-value store for the threads of one process, as `jax.distributed` has one for processes."""

from __future__ import annotations

import threading
import time


class MemoryStore:
    """What `stretto.runtime.job.rendezvous.Store` asks for. ``values`` is what was written."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self._changed = threading.Condition()

    def put(self, key: str, value: str) -> bool:
        with self._changed:
            kept = self.values.setdefault(key, value)
            self._changed.notify_all()
            return kept is value

    def get(self, key: str, timeout: float) -> str:
        deadline = time.monotonic() + timeout
        with self._changed:
            while key not in self.values:
                if not self._changed.wait(deadline - time.monotonic()):
                    raise TimeoutError(key)
            return self.values[key]

    def try_get(self, key: str) -> str | None:
        return self.values.get(key)
