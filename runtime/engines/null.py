"""An engine without compute, under a virtual clock: schedules and orders can be tested exactly.

Arrays carry a type and the time at which they are computed. A run of a segment on a device begins when
its inputs are there and the device is free, and takes the virtual seconds that the engine's rule gives; the
only thing that moves the clock is waiting for something. Contents are zeros, or what a rule says.

    engine = NullEngine(2, cost=lambda segment: 0.5)
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from stretto.collectives.types import TensorType

from ..errors import StrettoError
from ..program import Segment

Compute = Callable[[Segment, list[np.ndarray]], list[np.ndarray]]


class VirtualClock:
    """Seconds that pass only when somebody waits for them. Shared by threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._now = 0.0

    @property
    def now(self) -> float:
        return self._now

    def advance_to(self, time: float) -> None:
        """Wait until ``time``: at once, and not backwards."""
        with self._lock:
            self._now = max(self._now, time)


class NullArray:
    """An array of this type on one device, computed at virtual time ``ready_at``."""

    __slots__ = ("deleted", "engine", "error", "host", "ordinal", "ready_at", "type")

    def __init__(
        self,
        engine: NullEngine,
        type: TensorType,
        ordinal: int,
        ready_at: float,
        host: np.ndarray | None = None,
        error: StrettoError | None = None,
    ) -> None:
        self.engine = engine
        self.type = type
        self.ordinal = ordinal
        self.ready_at = ready_at
        self.host = host
        self.error = error
        self.deleted = False
        engine.count(ordinal, type.nbytes)

    def delete(self) -> None:
        if not self.deleted:
            self.deleted = True
            self.host = None
            self.engine.count(self.ordinal, -self.type.nbytes)

    def __del__(self) -> None:
        self.delete()


class NullSegment:
    """A segment that takes time and computes nothing, unless the engine has a rule for it."""

    def __init__(self, engine: NullEngine, segment: Segment, name: str) -> None:
        self.engine = engine
        self.segment = segment
        self.name = name

    def run(self, ordinal: int, inputs: list[NullArray]) -> list[NullArray]:
        engine, segment = self.engine, self.segment
        if len(inputs) != len(segment.inputs):
            raise StrettoError(f"{self.name} takes {len(segment.inputs)} inputs, not {len(inputs)}")
        for array, type_ in zip(inputs, segment.inputs, strict=True):
            if array.deleted:
                raise StrettoError(f"{self.name} is given a deleted array")
            if array.ordinal != ordinal or array.type != type_:
                raise StrettoError(
                    f"{self.name} on device {ordinal} is given {array.type} on {array.ordinal}"
                )
        begins = max([engine.clock.now, engine.free_at[ordinal], *(a.ready_at for a in inputs)])
        ready_at = engine.free_at[ordinal] = begins + engine.cost(segment)
        error = next((array.error for array in inputs if array.error), None)
        hosts: Sequence[np.ndarray | None] = [None] * len(segment.outputs)
        if engine.compute is not None and error is None:
            try:
                hosts = engine.compute(segment, [engine.content(array) for array in inputs])
            except Exception as raised:
                error = StrettoError(f"{self.name}: {raised}")
        for index in segment.donated:
            engine.delete(inputs[index])
        return [
            NullArray(engine, type_, ordinal, ready_at, host, error)
            for type_, host in zip(segment.outputs, hosts, strict=True)
        ]


class NullEngine:
    """See `stretto.runtime.engines.engine.Engine`.

    ``cost(segment)`` is the virtual time of one run; ``compute(segment, inputs)`` its outputs as host
    arrays, None for zeros. Every device does one thing at a time.
    """

    name = "null"
    host_memory = True
    reproducible = True  # it computes zeros

    def __init__(
        self,
        num_devices: int,
        *,
        clock: VirtualClock | None = None,
        cost: Callable[[Segment], float] = lambda segment: 0.0,
        compute: Compute | None = None,
    ) -> None:
        self.num_devices = num_devices
        self.clock = clock or VirtualClock()
        self.cost = cost
        self.compute = compute
        self.free_at = [0.0] * num_devices
        self._lock = threading.RLock()  # an array may die while another is counted
        self._in_use = [0] * num_devices
        self._peak = [0] * num_devices

    def compile(
        self, segment: Segment, *, name: str = "", host_callbacks: Sequence[Any] = ()
    ) -> NullSegment:
        return NullSegment(self, segment, name or segment.name or "segment")

    def put(self, host: np.ndarray, type: TensorType, ordinal: int) -> NullArray:
        host = np.ascontiguousarray(host).reshape(type.shape)
        return NullArray(self, type, ordinal, self.clock.now, host)

    def host_view(self, array: NullArray) -> np.ndarray:
        self.block(array)
        view = self.content(array).view()
        view.flags.writeable = False
        return view

    def copy(self, array: NullArray, ordinal: int) -> NullArray:
        self._check(array)
        host = None if array.host is None else array.host.copy()
        return NullArray(self, array.type, ordinal, array.ready_at, host, array.error)

    def is_ready(self, array: NullArray) -> bool:
        return array.ready_at <= self.clock.now

    def block(self, array: NullArray) -> None:
        self._check(array)
        self.clock.advance_to(array.ready_at)
        if array.error is not None:
            raise array.error

    def pointer(self, array: NullArray) -> int:
        self.block(array)
        return self.content(array).ctypes.data

    def delete(self, array: NullArray) -> None:
        array.delete()

    def memory_stats(self, ordinal: int) -> dict[str, int]:
        """Bytes of the arrays that are alive, and the most there ever were."""
        return {
            "bytes_in_use": self._in_use[ordinal],
            "peak_bytes_in_use": self._peak[ordinal],
        }

    def content(self, array: NullArray) -> np.ndarray:
        """The host array behind it; zeros are made when first looked at."""
        self._check(array)
        if array.host is None:
            array.host = np.zeros(array.type.shape, array.type.numpy)
        return array.host

    def count(self, ordinal: int, nbytes: int) -> None:
        """Count an array that comes, or goes with negative ``nbytes``."""
        with self._lock:
            used = self._in_use[ordinal] = self._in_use[ordinal] + nbytes
            self._peak[ordinal] = max(self._peak[ordinal], used)

    def _check(self, array: NullArray) -> None:
        if array.deleted:
            raise StrettoError(f"array {array.type} on device {array.ordinal} was deleted")


def create(num_devices: int, **options: Any) -> NullEngine:
    """Factory of the entry-point group ``stretto.engines``."""
    return NullEngine(num_devices, **options)
