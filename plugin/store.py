"""The key-value store that `jax.distributed` gives to the PJRT clients of the processes that it joins."""

from __future__ import annotations

import ctypes
from typing import Any

from stretto.runtime.job.rendezvous import Rendezvous

from .abi import ERROR_CODES
from .structs import STRUCTS, read_bytes, read_named_values

_LONGEST_MS = (1 << 31) - 1  # of the C int that holds a timeout: 24 days
_CALLBACK = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
_DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_MAKE_ERROR = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t)


class StoreError(RuntimeError):
    """The store answered with an error; ``code`` is PJRT's."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class PjrtStore:
    """The store behind the callbacks of PJRT_Client_Create. Calls wait without the GIL."""

    def __init__(self, args: Any) -> None:
        self._put = _CALLBACK(args.kv_put_callback), args.kv_put_user_arg
        self._get = _CALLBACK(args.kv_get_callback), args.kv_get_user_arg
        self._try_get = _CALLBACK(args.kv_try_get_callback), args.kv_try_get_user_arg

    def put(self, key: str, value: str) -> bool:
        struct = STRUCTS["PJRT_KeyValuePutCallback_Args"]()
        text = ctypes.create_string_buffer(value.encode())
        struct.value, struct.value_size = ctypes.addressof(text), len(text) - 1
        try:
            _call(self._put, struct, key)
        except StoreError as error:
            if error.code == ERROR_CODES["ALREADY_EXISTS"]:
                return False
            raise
        return True

    def get(self, key: str, timeout: float) -> str:
        struct = STRUCTS["PJRT_KeyValueGetCallback_Args"]()
        struct.timeout_in_ms = int(min(timeout * 1000, _LONGEST_MS))
        try:
            _call(self._get, struct, key)
        except StoreError as error:
            if error.code == ERROR_CODES["DEADLINE_EXCEEDED"]:
                raise TimeoutError(f"no process wrote {key} within {timeout:g} s") from error
            raise
        return _taken(struct)

    def try_get(self, key: str) -> str | None:
        struct = STRUCTS["PJRT_KeyValueTryGetCallback_Args"]()
        try:
            _call(self._try_get, struct, key)
        except StoreError as error:
            if error.code == ERROR_CODES["NOT_FOUND"]:
                return None
            raise
        return _taken(struct)


def _call(function: tuple[Any, int | None], struct: Any, key: str) -> None:
    """Call a callback; its error, which it has this side make, is raised here."""
    errors: list[StoreError] = []

    def make_error(code: int, message: int | None, size: int) -> int:
        errors.append(StoreError(code, read_bytes(message, size).decode(errors="replace")))
        return 1  # any pointer but null: the callback hands it back as it is

    callback_error = _MAKE_ERROR(make_error)
    pointer = ctypes.cast(ctypes.pointer(callback_error), ctypes.c_void_p)
    text = ctypes.create_string_buffer(key.encode())
    struct.struct_size = ctypes.sizeof(struct)
    struct.key, struct.key_size = ctypes.addressof(text), len(text) - 1
    struct.callback_error = pointer.value
    callback, struct.user_arg = function
    failed = callback(ctypes.addressof(struct))
    if errors:
        raise errors[0]
    if failed:
        raise StoreError(ERROR_CODES["UNKNOWN"], f"the key-value store failed at {key}")


def _taken(struct: Any) -> str:
    """A copy of the value that a callback gave, which is given back."""
    value = read_bytes(struct.value, struct.value_size).decode()
    if struct.value_deleter_callback:
        _DELETER(struct.value_deleter_callback)(struct.value)
    return value


def rendezvous(args: Any) -> Rendezvous | None:
    """Which process of how many this is, from the arguments of PJRT_Client_Create.

    None without `jax.distributed`.
    """
    options = read_named_values(args.create_options, args.num_options)
    if not (args.kv_put_callback and args.kv_get_callback and args.kv_try_get_callback):
        return None
    rank, size = options.get("node_id"), options.get("num_nodes")
    if rank is None or size is None:
        return None
    return Rendezvous("jax.distributed", int(rank), int(size), PjrtStore(args))
