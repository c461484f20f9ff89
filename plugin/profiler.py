"""`jax.profiler`: what stretto's devices and streams do while a session records.

jaxlib makes a session here for each of its own, starts and stops it, and takes what it has recorded as an
XSpace, which becomes a part of JAX's trace. While none records, runs are told to nobody, as ever.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import Any

from stretto.runtime.recording.recorder import Recorder
from stretto.runtime.recording.trace import header_of
from stretto.runtime.recording.trace_events import Measured, measure

from . import _capi, xspace
from .client import Client, clients
from .table import entry


class Session(_capi.Handle):  # type: ignore[misc]
    """A recording of all clients of this process."""

    def __init__(self) -> None:
        self._running: list[tuple[Client, Recorder, Callable[[], None]]] = []
        self._recorded: list[Measured] = []
        self._epoch = 0
        self._data: _capi.Bytes | None = None

    def start(self) -> None:
        self.stop()
        self._recorded, self._data = [], None
        self._epoch = time.time_ns() - time.perf_counter_ns()
        for client in list(clients):
            recorder = Recorder(client.engine, client.world.local_devices, _capi.Rows)
            self._running.append((client, recorder, client.observe(recorder)))

    def stop(self) -> None:
        running, self._running = self._running, []
        for client, recorder, end in running:
            end()
            recorder.end()
            self._recorded.append(measure(recorder.trace(header_of(client.world))))

    @property
    def data(self) -> _capi.Bytes:
        """What was recorded up to the last stop, serialized."""
        if self._data is None:
            self._data = _capi.Bytes(xspace.xspace(self._recorded, self._epoch))
        return self._data


@entry("PLUGIN_Profiler_Create")
def create(args: Any) -> None:
    args.profiler = _capi.give(Session())


@entry("PLUGIN_Profiler_Start")
def start(args: Any) -> None:
    _capi.take(args.profiler).start()


@entry("PLUGIN_Profiler_Stop")
def stop(args: Any) -> None:
    _capi.take(args.profiler).stop()


@entry("PLUGIN_Profiler_CollectData")
def collect_data(args: Any) -> None:
    """Called once, or a second time with a buffer of the caller's that the data goes to."""
    data: _capi.Bytes = _capi.take(args.profiler).data
    if not args.buffer:
        args.buffer = data.address
    elif args.buffer != data.address:
        ctypes.memmove(args.buffer, data.address, len(data.data))
    args.buffer_size_in_bytes = len(data.data)
