"""Buffers: transfers from and to the host, copies between devices and memories, memory lent to others.

Content is dense and row-major. Other layouts are what executables promise and JAX keeps in mind; jaxlib and
those it lends memory to, knowing their strides, see row-major arrays. Only a bare address is that of a copy
in the layout. Towards the host, sub-byte types take one byte an element.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np

from stretto.collectives.memory import ALIGNMENT
from stretto.collectives.types import TensorType
from stretto.runtime.execution.value import Value

from . import _capi, abi
from .client import Client, memory_of, shape_of, tensor_type
from .errors import StatusError
from .structs import STRUCTS, read_bytes, read_int64s
from .table import entry


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An uninitialized array in memory that an engine can use in place."""
    nbytes = prod(shape) * dtype.itemsize
    raw = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + nbytes].view(dtype).reshape(shape)


def host_array(
    address: int,
    type: TensorType,
    strides: tuple[int, ...] | None = None,
    done: _capi.Event | None = None,
) -> np.ndarray:
    """A read-only array over the caller's memory.

    ``strides`` are in bytes, may be negative or zero, and default to dense row-major. ``done`` completes
    when the array and all views of it are gone.
    """
    itemsize = type.numpy.itemsize
    if strides is None or 0 in type.shape:
        memory = _capi.HostMemory(address, type.size * itemsize, done)
        return np.ndarray(type.shape, type.numpy, memory)
    reach = [(extent - 1) * stride for extent, stride in zip(type.shape, strides, strict=True)]
    low, high = sum(r for r in reach if r < 0), sum(r for r in reach if r > 0)
    memory = _capi.HostMemory(address + low, high - low + itemsize, done)
    return np.ndarray(type.shape, type.numpy, memory, offset=-low, strides=strides)


@entry("PJRT_Client_BufferFromHostBuffer")
def from_host_buffer(args: Any) -> None:
    """`_capi` takes what is dense and row-major; here come strides, layouts, many dimensions, and arrays of
    no elements or of less than a byte each."""
    client: Client = _capi.take(args.client)
    memory = memory_of(args.device, args.memory)
    type = tensor_type(args.type, read_int64s(args.dims, args.num_dims))
    strides = (
        read_int64s(args.byte_strides, args.num_byte_strides) if args.num_byte_strides else None
    )
    order = order_of(args.device_layout, type)
    if (
        args.host_buffer_semantics == abi.ZERO_COPY
        and (args.data % ALIGNMENT == 0 or client.unaligned)
        and type.element.bits >= 8
        and type.size
    ):
        done = _capi.Event()
        host = host_array(args.data, type, strides, done)
        if host.flags.c_contiguous:
            # Used in place: the caller learns that it is over when the engine drops the array.
            args.buffer = _capi.give(client.put(host, type, memory, order))
            args.done_with_host_buffer = _capi.give(done)
            return
        del host
    host = host_array(args.data, type, strides) if type.size else np.empty(type.shape, type.numpy)
    args.buffer = _capi.give(_put_strided(client, host, type, memory, order))
    args.done_with_host_buffer = _capi.ready_event()


def _put_strided(
    client: Client,
    host: np.ndarray,
    type: TensorType,
    memory: _capi.Memory,
    order: tuple[int, ...],
) -> _capi.Buffer:
    """As `Client.put`, of a host array with any strides, which is the caller's again when this returns."""
    if client.put_copy is not None and type.size and type.element.bits >= 8:
        array = client.put_copy(host, type, memory.device.ordinal)
        value = Value.of(client.engine, array, type, memory.device.ordinal)
        return _capi.make_buffer(value, client.array_type(type, order), memory)
    # NumPy's copy of a small array is the faster one, and so is the engine's.
    small = 0 < type.nbytes <= _capi.SMALL_BYTES
    return client.put(host.copy() if small else row_major(host, type), type, memory, order)


@entry("PJRT_Client_CreateErrorBuffer")
def create_error_buffer(args: Any) -> None:
    client: Client = _capi.take(args.client)
    memory, type = memory_of(None, args.memory), shape_of(args)
    message = read_bytes(args.error_message, args.error_message_size).decode(errors="replace")
    error = StatusError(args.error_code, message)
    value = Value.failed(client.engine, error, type, memory.device.ordinal)
    args.buffer = _capi.give(_capi.make_buffer(value, client.array_type(type), memory))


@entry("PJRT_Client_CreateViewOfDeviceBuffer")
def view_of_device_buffer(args: Any) -> None:
    client: Client = _capi.take(args.client)
    memory = memory_of(args.device, args.memory)
    type = tensor_type(args.element_type, read_int64s(args.dims, args.num_dims))
    order = order_of(args.layout, type)
    if type.element.bits < 8:
        raise NotImplementedError(f"stretto does not share arrays of {type.dtype} with others")
    if args.stream:
        raise NotImplementedError("stretto's devices have no streams for others to wait on")
    done = _capi.Event()
    strides = dense_strides(type, order) if order else None
    host = host_array(args.device_buffer_ptr, type, strides, done)
    if args.on_delete_callback:
        delete = _DELETER(args.on_delete_callback)
        pointer, argument = args.device_buffer_ptr, args.on_delete_callback_arg
        done.when_done(lambda: delete(pointer, argument))
    if order:
        host = row_major(host, type)
    args.buffer = _capi.give(client.put(host, type, memory, order))


_DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)


def row_major(host: np.ndarray, type: TensorType) -> np.ndarray:
    """A copy of a host array in row-major order, in memory that an engine can use in place."""
    copied = aligned_empty(type.shape, type.numpy)
    copied[...] = host
    return copied


def order_of(layout: int | None, type: TensorType) -> tuple[int, ...]:
    """Dimensions from minor to major of a PJRT_Buffer_MemoryLayout (by address, null for the default).

    Empty for a row-major one. Raises ``NotImplementedError`` for layouts that are not dense.
    """
    if not layout:
        return ()
    struct = STRUCTS["PJRT_Buffer_MemoryLayout"].from_address(layout)
    rank = len(type.shape)
    if struct.type == abi.TILED:
        tiled = struct.layout.tiled
        order = read_int64s(tiled.minor_to_major, tiled.minor_to_major_size)
        if tiled.num_tiles or sorted(order) != list(range(rank)):
            raise NotImplementedError("stretto's arrays are dense: they have no layouts with tiles")
    else:
        listed = struct.layout.strides
        strides = read_int64s(listed.byte_strides, listed.num_byte_strides)
        if strides == dense_strides(type):
            return ()
        order = tuple(sorted(range(rank), key=lambda i: (strides[i], type.shape[i], -i)))
        if strides != dense_strides(type, order):
            raise NotImplementedError(
                f"stretto's arrays are dense; {type} with strides of {strides} bytes is not"
            )
    return () if order == tuple(range(rank - 1, -1, -1)) else order


def dense_strides(
    type: TensorType, minor_to_major: tuple[int, ...] | None = None
) -> tuple[int, ...]:
    """Strides in bytes of a dense array whose dimensions lie in this order, the fastest first."""
    rank = len(type.shape)
    order = range(rank - 1, -1, -1) if minor_to_major is None else minor_to_major
    strides, step = [0] * rank, type.numpy.itemsize
    for dimension in order:
        strides[dimension] = step
        step *= type.shape[dimension]
    return tuple(strides)


def _host_strides(layout: int | None, type: TensorType) -> tuple[int, ...] | None:
    """Strides of the host's side of a transfer; None for dense row-major."""
    if not layout:
        return None
    struct = STRUCTS["PJRT_Buffer_MemoryLayout"].from_address(layout)
    if struct.type == abi.STRIDES:
        strides = struct.layout.strides
        return read_int64s(strides.byte_strides, strides.num_byte_strides)
    order = order_of(layout, type)
    return dense_strides(type, order) if order else None


def writable_array(address: int, type: TensorType, strides: tuple[int, ...] | None) -> np.ndarray:
    """The caller's memory, to be written to."""
    nbytes = type.size * type.numpy.itemsize
    memory = (ctypes.c_char * nbytes).from_address(address)
    return np.ndarray(type.shape, type.numpy, memoryview(memory), strides=strides)


def when_ready(value: Value, action: Callable[[], None]) -> int:
    """Pointer to an event for ``action``, done here if the value is ready, else once it is."""
    if value.is_ready():
        try:
            value.block()
        except Exception as error:
            return _capi.give(_failed(error))
        action()
        return _capi.ready_event()
    event = _capi.Event()

    def act(error: BaseException | None) -> None:
        try:
            if error is None:
                action()
        except Exception as raised:
            error = raised
        event.complete(error)

    value.on_ready(act)
    return _capi.give(event)


def _failed(error: BaseException) -> _capi.Event:
    event = _capi.Event()
    event.complete(error)
    return event


@entry("PJRT_Buffer_ToHostBuffer")
def to_host_buffer(args: Any) -> None:
    value: Value = _capi.take(args.src).live_value()
    type = value.type
    needed = type.size * type.numpy.itemsize
    if not args.dst:
        args.dst_size = needed
        args.event = None
        return
    if args.dst_size < needed:
        raise ValueError(f"{needed} bytes of {type} do not fit into {args.dst_size}")
    strides = _host_strides(args.host_layout, type)
    destination = writable_array(args.dst, type, strides)

    args.event = when_ready(value, lambda: value.copy_to(destination))


@entry("PJRT_Buffer_CopyRawToHost")
def copy_raw_to_host(args: Any) -> None:
    value: Value = _capi.take(args.buffer).live_value()
    offset, size, destination = args.offset, args.transfer_size, args.dst
    total = value.type.size * value.type.numpy.itemsize
    if offset < 0 or size < 0 or offset + size > total:
        raise ValueError(f"bytes {offset} to {offset + size} of an array of {total} bytes")

    def copy() -> None:
        ctypes.memmove(destination, value.host_view().ctypes.data + offset, size)

    args.event = when_ready(value, copy)


@entry("PJRT_Buffer_Delete")
def delete(args: Any) -> None:
    _capi.take(args.buffer).delete()


@entry("PJRT_Buffer_CopyToDevice")
def copy_to_device(args: Any) -> None:
    args.dst_buffer = _capi.give(_copy(_capi.take(args.buffer), memory_of(args.dst_device, None)))


@entry("PJRT_Buffer_CopyToMemory")
def copy_to_memory(args: Any) -> None:
    args.dst_buffer = _capi.give(_copy(_capi.take(args.buffer), memory_of(None, args.dst_memory)))


def _copy(buffer: _capi.Buffer, memory: _capi.Memory) -> _capi.Buffer:
    value: Value = buffer.live_value()
    ordinal = memory.device.ordinal
    array = value.engine.copy(value.array(), ordinal)
    copied = Value.of(value.engine, array, value.type, ordinal)
    return _capi.make_buffer(copied, buffer.array_type, memory)


@entry("PJRT_Buffer_IncreaseExternalReferenceCount")
def increase_external_references(args: Any) -> None:
    _capi.take(args.buffer).add_external_reference()


@entry("PJRT_Buffer_DecreaseExternalReferenceCount")
def decrease_external_references(args: Any) -> None:
    _capi.take(args.buffer).drop_external_reference()


@entry("PJRT_Buffer_OpaqueDeviceMemoryDataPointer")
def opaque_pointer(args: Any) -> None:
    value: Value = _capi.take(args.buffer).live_value()
    args.device_memory_ptr = value.engine.pointer(value.array())


_asked = threading.local()


def value_of(array: Any) -> Value:
    """What stands behind a `jax.Array` on one device of stretto's, which jaxlib alone knows."""
    found: list[Value] = []
    _asked.values = found
    try:
        array.addressable_data(0).unsafe_buffer_pointer()
    finally:
        del _asked.values
    return found[0]


@entry("PJRT_Buffer_UnsafePointer")
def unsafe_pointer(args: Any) -> None:
    buffer: _capi.Buffer = _capi.take(args.buffer)
    value: Value = buffer.live_value()
    if hasattr(_asked, "values"):
        _asked.values.append(value)
        args.buffer_pointer = 0
        return
    ordered = bool(buffer.array_type.order)
    args.buffer_pointer = (
        _reordered(buffer).ctypes.data if ordered else value.engine.pointer(value.array())
    )


def _reordered(buffer: _capi.Buffer) -> np.ndarray:
    """The content as it lies in memory in the buffer's layout; waits until it is computed."""
    if buffer.reordered is None:
        host = buffer.live_value().host_view().transpose(buffer.array_type.order[::-1])
        copied = aligned_empty(host.shape, host.dtype)
        copied[...] = host
        buffer.reordered = copied
    return buffer.reordered
