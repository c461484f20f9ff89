"""More local devices than the hardware has: ``shared:N:ENGINE``, N devices of ENGINE, taken in turn.

For programs that want more devices than there are, as tests do (`stretto conform --devices`). Device n of
the program is device ``n % N`` of the engine. Only the plain protocol is passed on: what compiles for
several devices at once, or has them wait for each other in compiled code, needs each to be one of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from stretto.collectives.types import TensorType

from ..errors import StrettoError
from ..program import Segment
from .engine import (
    Array,
    CopyingEngine,
    Engine,
    LoadedSegment,
    ReadingEngine,
    create_engine,
)


def create(num_devices: int, plugin: str = "", place: tuple[int, int] = (0, 1)) -> SharedEngine:
    """Factory of the entry-point group ``stretto.engines``. ``plugin``: ``N:ENGINE``. Raises
    `StrettoError`, and what making the engine raises."""
    count, _, name = plugin.partition(":")
    if not count.isdecimal() or not int(count) or not name:
        raise StrettoError(
            f"engine shared:{plugin} (STRETTO_ENGINE) is not shared:N:ENGINE, N devices of another engine"
        )
    return SharedEngine(create_engine(name, int(count), place=place), num_devices)


class SharedEngine:
    """See `stretto.runtime.engines.engine.Engine`."""

    def __init__(self, engine: Engine, num_devices: int) -> None:
        self._engine, self.num_devices = engine, num_devices
        self.name = f"shared:{engine.num_devices}:{engine.name}"
        self.host_memory = getattr(engine, "host_memory", False)
        self.unaligned = getattr(engine, "unaligned", False)
        self.lowered_as = getattr(engine, "lowered_as", "cpu")
        self.reproducible = getattr(engine, "reproducible", False)
        self.host_view, self.pointer = engine.host_view, engine.pointer
        self.is_ready, self.block, self.delete = engine.is_ready, engine.block, engine.delete
        if isinstance(engine, CopyingEngine):
            self.put_copy = self._put_copy
        if isinstance(engine, ReadingEngine):
            self.read_into = engine.read_into

    def compile(
        self, segment: Segment, *, name: str = "", host_callbacks: Sequence[Any] = ()
    ) -> LoadedSegment:
        loaded = self._engine.compile(segment, name=name, host_callbacks=host_callbacks)
        return SharedSegment(loaded, self._engine.num_devices)

    def put(self, host: np.ndarray, type: TensorType, ordinal: int) -> Array:
        return self._engine.put(host, type, ordinal % self._engine.num_devices)

    def _put_copy(self, host: np.ndarray, type: TensorType, ordinal: int) -> Array:
        return self._engine.put_copy(host, type, ordinal % self._engine.num_devices)  # type: ignore[attr-defined]

    def copy(self, array: Array, ordinal: int) -> Array:
        return self._engine.copy(array, ordinal % self._engine.num_devices)

    def memory_stats(self, ordinal: int) -> dict[str, int]:
        return self._engine.memory_stats(ordinal % self._engine.num_devices)


class SharedSegment:
    """A segment that runs on the devices that there are."""

    def __init__(self, loaded: LoadedSegment, devices: int) -> None:
        self._loaded, self._devices = loaded, devices
        self.scratch_bytes = getattr(loaded, "scratch_bytes", 0)
        if hasattr(loaded, "run_with_end"):
            self.run_with_end = self._run_with_end

    def run(self, ordinal: int, inputs: list[Array]) -> list[Array]:
        return self._loaded.run(ordinal % self._devices, inputs)

    def _run_with_end(self, ordinal: int, inputs: list[Array]) -> Any:
        return self._loaded.run_with_end(ordinal % self._devices, inputs)  # type: ignore[attr-defined]
