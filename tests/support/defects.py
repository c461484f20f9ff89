"""Engines that compute with XLA's CPU client, each with one defect: what `stretto conform` is tested with.

With the folder of the tests on PYTHONPATH, STRETTO_ENGINE can be ``support.defects:NAME``.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from stretto.collectives.types import TensorType
from stretto.runtime.engines.engine import LoadedSegment
from stretto.runtime.engines.xla_cpu import XlaCpuEngine
from stretto.runtime.program import Segment


class Plain:
    """What engines here have in common: no more than the protocol."""

    name = "defect"
    host_memory = False

    def __init__(self, num_devices: int) -> None:
        self.num_devices = num_devices
        self.inner = XlaCpuEngine(num_devices)

    def __getattr__(self, name: str) -> Any:
        if name in (
            "put",
            "host_view",
            "copy",
            "is_ready",
            "block",
            "pointer",
            "delete",
            "memory_stats",
        ):
            return getattr(self.inner, name)
        raise AttributeError(name)

    def compile(
        self, segment: Segment, *, name: str = "", host_callbacks: Sequence[Any] = ()
    ) -> LoadedSegment:
        return Running(
            self, segment, self.inner.compile(segment, name=name, host_callbacks=host_callbacks)
        )

    def run(
        self, segment: Segment, loaded: LoadedSegment, ordinal: int, inputs: list[Any]
    ) -> list[Any]:
        return loaded.run(ordinal, inputs)


class Running:
    def __init__(self, engine: Plain, segment: Segment, loaded: LoadedSegment) -> None:
        self.engine, self.segment, self.loaded = engine, segment, loaded

    def run(self, ordinal: int, inputs: list[Any]) -> list[Any]:
        return self.engine.run(self.segment, self.loaded, ordinal, inputs)


class Overwriting(Plain):
    """Uses the host's memory as it is where that is aligned, and lets runs write to it."""

    def put(self, host: np.ndarray, type: TensorType, ordinal: int) -> Any:
        array = self.inner.put(host, type, ordinal)
        self.given = host
        return array

    def run(
        self, segment: Segment, loaded: LoadedSegment, ordinal: int, inputs: list[Any]
    ) -> list[Any]:
        if segment.donated and self.given.base is not None:  # a view, at an aligned address
            self.given[:] = -1
        return loaded.run(ordinal, inputs)


class Borrowing(Plain):
    """Goes on using what the host lends it to be copied."""

    def put_copy(self, host: np.ndarray, type: TensorType, ordinal: int) -> Any:
        return self.inner.put(host, type, ordinal)


class Forgetting(Plain):
    """Does not fill the memory that it is to copy into."""

    def read_into(self, array: Any, host: np.ndarray) -> None:
        host.flat[:1] = self.inner.host_view(array).flat[:1]


class Swallowing(Plain):
    """A run that fails gives zeros."""

    def run(
        self, segment: Segment, loaded: LoadedSegment, ordinal: int, inputs: list[Any]
    ) -> list[Any]:
        try:
            return loaded.run(ordinal, inputs)
        except Exception:
            return [self.put(np.zeros(t.shape, t.numpy), t, ordinal) for t in segment.outputs]


class Early(Plain):
    """Says that arrays are there before they have been written."""

    def is_ready(self, array: Any) -> bool:
        return True

    def host_view(self, array: Any) -> np.ndarray:
        if array.is_deleted() or self.inner.is_ready(array):
            return self.inner.host_view(array)
        return np.zeros(array.shape, array.dtype)


class Rounding(Plain):
    """Has no bf16 of its own."""

    def put(self, host: np.ndarray, type: TensorType, ordinal: int) -> Any:
        if type.dtype == "bf16":
            with np.errstate(over="ignore"):
                host = host.astype(np.float16).astype(type.numpy)
        return self.inner.put(host, type, ordinal)


class Keeping(Plain):
    """Keeps all results."""

    def run(
        self, segment: Segment, loaded: LoadedSegment, ordinal: int, inputs: list[Any]
    ) -> list[Any]:
        results = loaded.run(ordinal, inputs)
        self.__dict__.setdefault("kept", []).extend(results)
        return results


class Elsewhere(Plain):
    """Runs everything on the first device."""

    def run(
        self, segment: Segment, loaded: LoadedSegment, ordinal: int, inputs: list[Any]
    ) -> list[Any]:
        return loaded.run(0, [self.inner.copy(array, 0) for array in inputs])


class Aliasing(Plain):
    """Gives an input back as the output that equals it."""

    def run(
        self, segment: Segment, loaded: LoadedSegment, ordinal: int, inputs: list[Any]
    ) -> list[Any]:
        return inputs if segment.name == "same" else loaded.run(ordinal, inputs)


class Hanging(Plain):
    """Cannot be used by any but the main thread."""

    def run(
        self, segment: Segment, loaded: LoadedSegment, ordinal: int, inputs: list[Any]
    ) -> list[Any]:
        if threading.current_thread() is not threading.main_thread():
            threading.Event().wait()
        return loaded.run(ordinal, inputs)


class Crashing(Plain):
    """Takes the process down with it."""

    def compile(
        self, segment: Segment, *, name: str = "", host_callbacks: Sequence[Any] = ()
    ) -> LoadedSegment:
        if b"no StableHLO" in segment.module:
            os.abort()
        return super().compile(segment, name=name, host_callbacks=host_callbacks)


PAUSE = 0.003  # seconds


class Slow(Plain):
    """No defect: it takes its time."""

    def run(
        self, segment: Segment, loaded: LoadedSegment, ordinal: int, inputs: list[Any]
    ) -> list[Any]:
        time.sleep(PAUSE)
        return loaded.run(ordinal, inputs)


def one_device(num_devices: int) -> Plain:
    """A factory of a runtime that has one device."""
    if num_devices > 1:
        raise LookupError(f"{num_devices} devices: there is one")
    return Plain(num_devices)
