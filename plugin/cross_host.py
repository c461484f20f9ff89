"""Transfers between devices of different processes: the extension of the PJRT C API that jaxlib asks for.

jaxlib calls the one function on the process of the source and the other on that of the target. It numbers all
transfers that a process is asked for, those of others included, so that the numbers (transfer keys) differ
between processes that were not asked for the same. They are not looked at: what counts is the order of the
transfers between two devices, which is the same on both sides.
"""

from __future__ import annotations

import ctypes
from typing import Any

from stretto.collectives.types import TensorType
from stretto.runtime.execution.transfers import Transfers, transfers_of
from stretto.runtime.execution.value import Value

from . import _capi
from .buffer import order_of
from .client import Client, element_name
from .structs import STRUCTS, read_int64s
from .table import entry

_SEND = "PJRT_Transfers_PJRT_Client_CrossHostSendBuffers"
_RECEIVE = "PJRT_Transfers_PJRT_Client_CrossHostReceiveBuffers"


def _check(args: Any, name: str) -> None:
    """Older forms of these functions have other arguments, and say so by their size."""
    if args.struct_size < ctypes.sizeof(STRUCTS[f"{name}_Args"]):
        raise NotImplementedError(
            f"this jaxlib calls {name} in a form from before version 5 of the extension"
        )


def _transfers(client: Client, ids: list[int]) -> Transfers:
    for id in ids:
        device = client.device(id)
        if device.process_index == client.world.rank:
            raise ValueError(f"{device.name} belongs to this process: there is nothing to transfer")
    return transfers_of(client.world)


def _pointers(address: int | None, count: int) -> list[Any]:
    return list((ctypes.c_void_p * count).from_address(address)) if address and count else []


def _ids(address: int | None, count: int) -> list[int]:
    return list((ctypes.c_int32 * count).from_address(address)) if address and count else []


@entry(_SEND)
def send(args: Any) -> None:
    _check(args, _SEND)
    client: Client = _capi.take(args.client)
    buffers: list[_capi.Buffer] = list(map(_capi.take, _pointers(args.buffers, args.num_buffers)))
    targets = _ids(args.dst_global_device_ids, args.num_buffers)
    transfers = _transfers(client, targets)
    values = [buffer.live_value() for buffer in buffers]
    events: Any = (ctypes.c_void_p * len(buffers)).from_address(args.send_events) if buffers else []
    for i, (buffer, value, target) in enumerate(zip(buffers, values, targets, strict=True)):
        event = _capi.Event()
        buffer.add_external_reference()  # a program that it is donated to leaves its memory alone

        def done(
            error: BaseException | None,
            buffer: _capi.Buffer = buffer,
            event: _capi.Event = event,
        ) -> None:
            buffer.drop_external_reference()
            event.complete(error)

        transfers.send(value, buffer.memory.device.id, target, done)
        events[i] = _capi.give(event)


@entry(_RECEIVE)
def receive(args: Any) -> None:
    _check(args, _RECEIVE)
    client: Client = _capi.take(args.client)
    device: _capi.Device = _capi.take(args.device)
    if not device.memories:
        raise ValueError(f"{device.name} belongs to process {device.process_index}")
    count = args.num_shapes
    sources = _ids(args.src_global_device_ids, count)
    transfers = _transfers(client, sources)
    codes = (ctypes.c_int * count).from_address(args.element_types) if count else []
    ranks = (ctypes.c_size_t * count).from_address(args.shape_num_dims) if count else []
    types = [
        TensorType(element_name(code), read_int64s(dimensions, rank))
        for code, dimensions, rank in zip(
            codes, _pointers(args.num_dims, count), ranks, strict=True
        )
    ]
    layouts = _pointers(args.layouts, count)
    orders = [order_of(layout, type) for layout, type in zip(layouts, types, strict=True)]
    buffers = (ctypes.c_void_p * count).from_address(args.buffers) if count else []
    for i, (type, order, source) in enumerate(zip(types, orders, sources, strict=True)):
        promise = transfers.receive(type, source, device.id)
        value = Value(type, device.ordinal, client.engine, None, promise)
        made = _capi.make_buffer(value, client.array_type(type, order), device.memories[0])
        buffers[i] = _capi.give(made)
