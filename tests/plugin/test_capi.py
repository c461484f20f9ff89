"""The table of functions, called as jaxlib calls it: through its addresses."""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
import time
import weakref
from typing import Any

import jax
import numpy as np
import pytest

from stretto.plugin import _capi, abi, table
from stretto.plugin.client import Client
from stretto.plugin.structs import STRUCTS, read_bytes

_HEAD = 2 * ctypes.sizeof(ctypes.c_void_p) + ctypes.sizeof(STRUCTS["PJRT_Api_Version"])


@pytest.fixture(scope="module", autouse=True)
def _installed(devices: list[jax.Device]) -> None:
    assert devices  # the client exists, and with it the handlers


def _address(name: str) -> int:
    offset = _HEAD + abi.FUNCTIONS.index(name) * ctypes.sizeof(ctypes.c_void_p)
    return ctypes.c_void_p.from_address(_capi.table_address() + offset).value or 0


def call(name: str, **fields: Any) -> Any:
    """Call a function; its arguments as it left them. Raises ``RuntimeError`` with code and message."""
    args = STRUCTS[f"{name}_Args"]()
    args.struct_size = ctypes.sizeof(args)
    for field, value in fields.items():
        setattr(args, field, value)
    function = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(_address(name))
    error = function(ctypes.addressof(args))
    if error:
        code, message = call("PJRT_Error_GetCode", error=error).code, _message(error)
        call("PJRT_Error_Destroy", error=error)
        raise RuntimeError(f"{code} {message}")
    return args


def _called_apart(name: str, **fields: Any) -> Any:
    """Call a function on a thread that Python does not know, with the GIL held here until it has returned."""
    args = STRUCTS[f"{name}_Args"]()
    args.struct_size = ctypes.sizeof(args)
    for field, value in fields.items():
        setattr(args, field, value)
    library = ctypes.PyDLL(None)  # whose functions keep the GIL
    thread = ctypes.c_ulong()
    address, argument = ctypes.c_void_p(_address(name)), ctypes.c_void_p(ctypes.addressof(args))
    assert library.pthread_create(ctypes.byref(thread), None, address, argument) == 0
    limit = (ctypes.c_long * 2)(int(time.time()) + 30, 0)
    error = ctypes.c_void_p()
    assert library.pthread_timedjoin_np(thread, ctypes.byref(error), limit) == 0, "it waits for us"
    assert error.value is None
    return args


def _message(error: int) -> str:
    args = call("PJRT_Error_Message", error=error)
    return read_bytes(args.message, args.message_size).decode()


def test_every_slot_is_filled() -> None:
    assert all(_address(name) for name in abi.FUNCTIONS)
    size = ctypes.c_size_t.from_address(_capi.table_address()).value
    assert size == _HEAD + len(abi.FUNCTIONS) * ctypes.sizeof(ctypes.c_void_p)


def _extensions() -> dict[int, int]:
    """Type and address of each in the chain."""
    pointer = ctypes.sizeof(ctypes.c_void_p)
    found = {}
    address = ctypes.c_void_p.from_address(_capi.table_address() + pointer).value
    while address:
        extension = STRUCTS["PJRT_Extension_Base"].from_address(address)
        found[extension.type] = address
        address = extension.next
    return found


def test_the_chain_of_extensions() -> None:
    found = _extensions()
    base, pointer = ctypes.sizeof(STRUCTS["PJRT_Extension_Base"]), ctypes.sizeof(ctypes.c_void_p)
    assert found.keys() == {type for type, _ in abi.EXTENSIONS.values()} | {1}
    addresses = []
    for type, functions in abi.EXTENSIONS.values():
        size = STRUCTS["PJRT_Extension_Base"].from_address(found[type]).struct_size
        assert size == base + len(functions) * pointer
        addresses += (ctypes.c_void_p * len(functions)).from_address(found[type] + base)
    assert all(addresses)
    assert len(set(addresses)) == len(addresses)


def _profiler_call(name: str, struct: str, **fields: Any) -> Any:
    extension = STRUCTS["PJRT_Profiler_Extension"].from_address(_extensions()[1])
    api = STRUCTS["PLUGIN_Profiler_Api"].from_address(extension.profiler_api)
    assert api.struct_size == 80  # as in version 1 of the header
    args = STRUCTS[f"PLUGIN_Profiler_{struct}_Args"]()
    args.struct_size = ctypes.sizeof(args)
    for field, value in fields.items():
        setattr(args, field, value)
    function = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(getattr(api, name))
    error = function(ctypes.addressof(args))
    if error:
        message = _message(error)
        call("PJRT_Error_Destroy", error=error)
        raise RuntimeError(message)
    return args


def test_a_session_of_the_profiler() -> None:
    session = _profiler_call("create", "Create").profiler
    _profiler_call("start", "Start", profiler=session)
    _profiler_call("stop", "Stop", profiler=session)
    first = _profiler_call("collect_data", "CollectData", profiler=session)
    data = read_bytes(first.buffer, first.buffer_size_in_bytes)
    assert data
    own = ctypes.create_string_buffer(len(data))
    second = _profiler_call(
        "collect_data", "CollectData", profiler=session, buffer=ctypes.addressof(own)
    )
    assert (own.raw, second.buffer_size_in_bytes) == (data, len(data))
    _profiler_call("destroy", "Destroy", profiler=session)
    with pytest.raises(RuntimeError, match="null handle"):
        _profiler_call("start", "Start")


def test_what_is_not_implemented_says_its_name() -> None:
    missing = [
        name
        for name, handler in zip(abi.ALL_FUNCTIONS, table.handlers(), strict=True)
        if handler is None and name.startswith("PJRT_CopyToDeviceStream")
    ]
    assert len(missing) == 5
    for name in missing:
        code = abi.ERROR_CODES["UNIMPLEMENTED"]
        with pytest.raises(RuntimeError, match=f"{code} stretto does not implement {name}$"):
            call(name)


def test_null_handles_are_errors_or_nothing() -> None:
    for name in ("PJRT_Buffer_Destroy", "PJRT_Event_Destroy", "PJRT_Executable_Destroy"):
        call(name)
    with pytest.raises(RuntimeError, match="null handle"):
        call("PJRT_Client_PlatformName")


def test_handles_live_until_they_are_destroyed() -> None:
    handle = _capi.Bytes(b"text")
    gone = weakref.ref(handle)
    pointer = _capi.give(handle)
    del handle
    gc.collect()
    assert _capi.take(pointer).data == b"text"
    call("PJRT_Executable_Destroy", executable=pointer)
    assert gone() is None


class TestEvents:
    def test_the_ready_event(self) -> None:
        ready = _capi.ready_event()
        assert call("PJRT_Event_IsReady", event=ready).is_ready
        call("PJRT_Event_Await", event=ready)
        call("PJRT_Event_Error", event=ready)
        call("PJRT_Event_Destroy", event=ready)
        assert call("PJRT_Event_IsReady", event=ready).is_ready

    def test_created_and_set(self) -> None:
        event = call("PJRT_Event_Create").event
        assert not call("PJRT_Event_IsReady", event=event).is_ready
        calls: list[Any] = []
        callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)(
            lambda error, argument: calls.append((error, argument))
        )
        pointer = ctypes.cast(callback, ctypes.c_void_p).value
        call("PJRT_Event_OnReady", event=event, callback=pointer, user_arg=17)
        assert calls == []
        call("PJRT_Event_Set", event=event, error_code=0)
        assert calls == [(None, 17)]
        call("PJRT_Event_OnReady", event=event, callback=pointer, user_arg=18)
        assert calls == [(None, 17), (None, 18)]
        with pytest.raises(RuntimeError, match="set already"):
            call("PJRT_Event_Set", event=event, error_code=0)
        call("PJRT_Event_Destroy", event=event)

    def test_a_failed_one_gives_its_error_each_time(self) -> None:
        event = call("PJRT_Event_Create").event
        text = ctypes.create_string_buffer(b"out of luck")
        call(
            "PJRT_Event_Set",
            event=event,
            error_code=abi.ERROR_CODES["DATA_LOSS"],
            error_message=ctypes.addressof(text),
            error_message_size=11,
        )
        for name in ("PJRT_Event_Await", "PJRT_Event_Error", "PJRT_Event_Await"):
            with pytest.raises(RuntimeError, match="15 out of luck"):
                call(name, event=event)
        call("PJRT_Event_Destroy", event=event)


class TestTransferManager:
    """jaxlib's asynchronous transfers, which JAX itself does not use on this platform."""

    @pytest.fixture
    def client(self, devices: list[jax.Device]) -> int:
        """The pointer of the only client."""
        (client,) = (o for o in gc.get_objects() if isinstance(o, Client))
        return _capi.lend(client)

    @staticmethod
    def _manager(client: int, extents: tuple[int, ...], dtype: str) -> int:
        dims = (ctypes.c_int64 * len(extents))(*extents)
        spec = STRUCTS["PJRT_ShapeSpec"](
            dims=ctypes.addressof(dims),
            num_dims=len(extents),
            element_type=abi.BUFFER_TYPES[dtype],
        )
        memory = call("PJRT_Client_AddressableMemories", client=client).addressable_memories
        return call(
            "PJRT_Client_CreateBuffersForAsyncHostToDevice",
            client=client,
            shape_specs=ctypes.addressof(spec),
            num_shape_specs=1,
            memory=ctypes.c_void_p.from_address(memory).value,
        ).transfer_manager

    def test_content_comes_in_pieces(self, client: int) -> None:
        manager = self._manager(client, (2, 3), "s32")
        query = "PJRT_AsyncHostToDeviceTransferManager_"
        assert call(query + "BufferCount", transfer_manager=manager).buffer_count == 1
        assert (
            call(query + "BufferSize", transfer_manager=manager, buffer_index=0).buffer_size == 24
        )
        buffer = call(query + "RetrieveBuffer", transfer_manager=manager, buffer_index=0).buffer_out
        ready = call("PJRT_Buffer_ReadyEvent", buffer=buffer).event
        assert not call("PJRT_Event_IsReady", event=ready).is_ready
        host = np.arange(6, dtype=np.int32)
        for offset, last in ((12, False), (0, True)):
            call(
                query + "TransferData",
                transfer_manager=manager,
                buffer_index=0,
                data=host.ctypes.data + offset,
                offset=offset,
                transfer_size=12,
                is_last_transfer=last,
            )
        call("PJRT_Event_Await", event=ready)
        assert call("PJRT_Event_IsReady", event=ready).is_ready
        out = np.zeros((2, 3), np.int32)
        event = call(
            "PJRT_Buffer_ToHostBuffer", src=buffer, dst=out.ctypes.data, dst_size=out.nbytes
        ).event
        call("PJRT_Event_Await", event=event)
        np.testing.assert_array_equal(out, [[0, 1, 2], [3, 4, 5]])
        with pytest.raises(RuntimeError, match=r"bytes 12 to 36 of an array of 24 bytes"):
            call(
                query + "TransferData",
                transfer_manager=manager,
                data=host.ctypes.data,
                offset=12,
                transfer_size=24,
            )
        for name, field, pointer in (
            ("PJRT_Event_Destroy", "event", ready),
            ("PJRT_Event_Destroy", "event", event),
            ("PJRT_Buffer_Destroy", "buffer", buffer),
            (query + "Destroy", "transfer_manager", manager),
        ):
            call(name, **{field: pointer})

    def _transfer(self, manager: int, host: np.ndarray) -> None:
        call(
            "PJRT_AsyncHostToDeviceTransferManager_TransferData",
            transfer_manager=manager,
            data=host.ctypes.data,
            transfer_size=host.nbytes,
            is_last_transfer=True,
        )

    def test_a_buffer_is_asked_about_without_the_gil(self, client: int) -> None:
        """jaxlib holds a lock meanwhile, for which a thread that has the GIL may wait."""
        manager = self._manager(client, (2,), "s32")
        query = "PJRT_AsyncHostToDeviceTransferManager_"
        buffer = call(query + "RetrieveBuffer", transfer_manager=manager, buffer_index=0).buffer_out
        ready = _called_apart("PJRT_Buffer_ReadyEvent", buffer=buffer).event
        assert not _called_apart("PJRT_Event_IsReady", event=ready).is_ready
        called = threading.Event()
        callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)(
            lambda error, argument: called.set()
        )
        pointer = ctypes.cast(callback, ctypes.c_void_p).value
        _called_apart("PJRT_Event_OnReady", event=ready, callback=pointer)
        self._transfer(manager, np.arange(2, dtype=np.int32))
        call("PJRT_Event_Await", event=ready)
        assert _called_apart("PJRT_Event_IsReady", event=ready).is_ready
        assert called.wait(60)
        for name, field, pointer in (
            ("PJRT_Event_Destroy", "event", ready),
            ("PJRT_Buffer_Destroy", "buffer", buffer),
            (query + "Destroy", "transfer_manager", manager),
        ):
            call(name, **{field: pointer})

    def test_an_event_may_outlive_its_buffer(self, client: int) -> None:
        manager = self._manager(client, (2,), "s32")
        query = "PJRT_AsyncHostToDeviceTransferManager_"
        buffer = call(query + "RetrieveBuffer", transfer_manager=manager, buffer_index=0).buffer_out
        gone = threading.Event()
        weakref.finalize(_capi.take(buffer), gone.set)
        ready = call("PJRT_Buffer_ReadyEvent", buffer=buffer).event
        unused = call("PJRT_Buffer_ReadyEvent", buffer=buffer).event
        call("PJRT_Event_Destroy", event=unused)
        call("PJRT_Buffer_Destroy", buffer=buffer)
        self._transfer(manager, np.arange(2, dtype=np.int32))
        call("PJRT_Event_Await", event=ready)
        call("PJRT_Event_Error", event=ready)
        call("PJRT_Event_Destroy", event=ready)
        call(query + "Destroy", transfer_manager=manager)
        assert gone.wait(60)

    def test_content_that_never_comes(self, client: int) -> None:
        manager = self._manager(client, (2,), "f32")
        query = "PJRT_AsyncHostToDeviceTransferManager_"
        buffer = call(query + "RetrieveBuffer", transfer_manager=manager, buffer_index=0).buffer_out
        text = ctypes.create_string_buffer(b"lost")
        call(
            query + "SetBufferError",
            transfer_manager=manager,
            buffer_index=0,
            error_code=abi.ERROR_CODES["DATA_LOSS"],
            error_message=ctypes.addressof(text),
            error_message_size=4,
        )
        ready = call("PJRT_Buffer_ReadyEvent", buffer=buffer).event
        with pytest.raises(RuntimeError, match="15 lost"):
            call("PJRT_Event_Await", event=ready)
        call("PJRT_Event_Destroy", event=ready)
        call("PJRT_Buffer_Destroy", buffer=buffer)
        call(query + "Destroy", transfer_manager=manager)


def test_the_table_is_exported() -> None:
    library = ctypes.CDLL(_capi.__file__)
    library.GetPjrtApi.restype = ctypes.c_void_p
    assert library.GetPjrtApi() == _capi.table_address()


def test_the_interpreter_knows_the_module_once() -> None:
    assert sys.modules["stretto.plugin._capi"] is _capi
