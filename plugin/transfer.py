"""Transfer managers: buffers whose content the caller delivers piece by piece.

A buffer can be retrieved before its content has come; it becomes ready with the last piece.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from stretto.collectives.types import TensorType
from stretto.runtime.execution.stream import Event
from stretto.runtime.execution.value import Landed, Promise, Value

from . import _capi
from .buffer import aligned_empty, host_array
from .client import Client, element_name, memory_of, shape_of
from .errors import StatusError
from .structs import STRUCTS, read_bytes, read_int64s
from .table import entry


class Incoming:
    """One buffer on its way."""

    def __init__(self, client: Client, type: TensorType, memory: _capi.Memory) -> None:
        self.type = type
        self.host = aligned_empty(type.shape, type.numpy)
        self.promise = Promise(Event())
        value = Value(type, memory.device.ordinal, client.engine, None, self.promise)
        self.buffer = _capi.make_buffer(value, client.array_type(type), memory)

    def write(self, source: int, offset: int, size: int) -> None:
        """Copy bytes into place. Raises ``ValueError`` for bytes outside of the array."""
        if offset < 0 or size < 0 or offset + size > self.host.nbytes:
            raise ValueError(
                f"bytes {offset} to {offset + size} of an array of {self.host.nbytes} bytes"
            )
        if self.promise.event.done:
            raise ValueError("the buffer is complete already")
        ctypes.memmove(self.host.ctypes.data + offset, source, size)

    def finish(self, error: BaseException | None = None) -> None:
        """The content is complete, or will never come."""
        if self.promise.event.done:
            return
        self.promise.error = error
        self.promise.content = None if error is not None else [Landed(self.host)]
        self.promise.event.set()


class TransferManager(_capi.Handle):  # type: ignore[misc]
    """The buffers of one call of CreateBuffersForAsyncHostToDevice, in one memory."""

    def __init__(self, client: Client, types: list[TensorType], memory: _capi.Memory) -> None:
        self.memory = memory
        self.incoming = [Incoming(client, type, memory) for type in types]

    def at(self, index: int) -> Incoming:
        if not 0 <= index < len(self.incoming):
            raise ValueError(f"no buffer {index}: there are {len(self.incoming)}")
        return self.incoming[index]


@entry("PJRT_Client_CreateBuffersForAsyncHostToDevice")
def create_buffers(args: Any) -> None:
    client: Client = _capi.take(args.client)
    memory = memory_of(None, args.memory)
    specs = (
        (STRUCTS["PJRT_ShapeSpec"] * args.num_shape_specs).from_address(args.shape_specs)
        if args.num_shape_specs
        else ()
    )
    types = [
        TensorType(element_name(s.element_type), read_int64s(s.dims, s.num_dims)) for s in specs
    ]
    args.transfer_manager = _capi.give(TransferManager(client, types, memory))


@entry("PJRT_AsyncHostToDeviceTransferManager_TransferData")
def transfer_data(args: Any) -> None:
    incoming = _capi.take(args.transfer_manager).at(args.buffer_index)
    incoming.write(args.data, args.offset, args.transfer_size)
    if args.is_last_transfer:
        incoming.finish()
    args.done_with_h2d_transfer = _capi.ready_event()


@entry("PJRT_AsyncHostToDeviceTransferManager_TransferLiteral")
def transfer_literal(args: Any) -> None:
    incoming = _capi.take(args.transfer_manager).at(args.buffer_index)
    type = shape_of(args)
    if type != incoming.type:
        raise ValueError(f"a literal {type} for a buffer {incoming.type}")
    if type.size:
        np.copyto(incoming.host, host_array(args.data, type))
    incoming.finish()
    args.done_with_h2d_transfer = _capi.ready_event()


@entry("PJRT_AsyncHostToDeviceTransferManager_RetrieveBuffer")
def retrieve_buffer(args: Any) -> None:
    args.buffer_out = _capi.give(_capi.take(args.transfer_manager).at(args.buffer_index).buffer)


@entry("PJRT_AsyncHostToDeviceTransferManager_Device")
def device(args: Any) -> None:
    args.device_out = _capi.lend(_capi.take(args.transfer_manager).memory.device)


@entry("PJRT_AsyncHostToDeviceTransferManager_BufferCount")
def buffer_count(args: Any) -> None:
    args.buffer_count = len(_capi.take(args.transfer_manager).incoming)


@entry("PJRT_AsyncHostToDeviceTransferManager_BufferSize")
def buffer_size(args: Any) -> None:
    args.buffer_size = _capi.take(args.transfer_manager).at(args.buffer_index).host.nbytes


@entry("PJRT_AsyncHostToDeviceTransferManager_SetBufferError")
def set_buffer_error(args: Any) -> None:
    message = read_bytes(args.error_message, args.error_message_size).decode(errors="replace")
    incoming = _capi.take(args.transfer_manager).at(args.buffer_index)
    incoming.finish(StatusError(args.error_code, message))


@entry("PJRT_AsyncHostToDeviceTransferManager_AddMetadata")
def add_metadata(args: Any) -> None:
    pass  # for profilers of the platform; there is none
