"""The structs of the PJRT C API as ctypes classes, made from the table in `abi`.

``structs.PJRT_Client_Compile_Args.from_address(address)`` reads and writes the caller's struct in place.
Pointers are plain integers (``c_void_p``), None where null.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from . import abi

_CTYPES: dict[str, Any] = {
    "ptr": ctypes.c_void_p,
    "str": ctypes.c_void_p,  # not c_char_p: the strings are counted, not terminated
    "fn": ctypes.c_void_p,
    "size": ctypes.c_size_t,
    "iptr": ctypes.c_ssize_t,
    "uptr": ctypes.c_size_t,
    "int": ctypes.c_int,
    "enum": ctypes.c_int,
    "i32": ctypes.c_int32,
    "i64": ctypes.c_int64,
    "u64": ctypes.c_uint64,
    "f32": ctypes.c_float,
    "bool": ctypes.c_bool,
}

STRUCTS: dict[str, Any] = {}
for _name, _fields in abi.layouts().items():
    _base = ctypes.Union if _name in abi.UNIONS else ctypes.Structure
    _listed = [(field, _CTYPES.get(kind) or STRUCTS[kind]) for kind, field in _fields]
    STRUCTS[_name] = type(_name, (_base,), {"_fields_": _listed})


def read_bytes(address: int | None, size: int) -> bytes:
    """A copy of ``size`` bytes at ``address``; empty for a null pointer."""
    return ctypes.string_at(address, size) if address else b""


def read_int64s(address: int | None, count: int) -> tuple[int, ...]:
    """``count`` int64 values at ``address``."""
    return tuple((ctypes.c_int64 * count).from_address(address)) if address and count else ()


def named_value(
    name: str, value: str | int | float | bool | Sequence[int]
) -> tuple[Any, list[Any]]:
    """A PJRT_NamedValue, and what must live as long as it does."""
    struct = STRUCTS["PJRT_NamedValue"]()
    struct.struct_size = ctypes.sizeof(struct)
    text = ctypes.create_string_buffer(name.encode())
    keep: list[Any] = [text]
    struct.name, struct.name_size, struct.value_size = ctypes.addressof(text), len(text) - 1, 1
    if isinstance(value, bool):
        struct.type, struct.value.bool_value = abi.BOOL, value
    elif isinstance(value, int):
        struct.type, struct.value.int64_value = abi.INT64, value
    elif isinstance(value, float):
        struct.type, struct.value.float_value = abi.FLOAT, value
    elif isinstance(value, str):
        data = ctypes.create_string_buffer(value.encode())
        keep.append(data)
        struct.type, struct.value.string_value = abi.STRING, ctypes.addressof(data)
        struct.value_size = len(data) - 1
    else:
        numbers = (ctypes.c_int64 * len(value))(*value)
        keep.append(numbers)
        struct.type, struct.value.int64_array_value = abi.INT64_LIST, ctypes.addressof(numbers)
        struct.value_size = len(value)
    return struct, keep


class NamedValues:
    """An array of PJRT_NamedValue that owns what it points to."""

    def __init__(self, values: dict[str, Any]) -> None:
        made = [named_value(name, value) for name, value in values.items()]
        self._keep = [keep for _, keep in made]
        self._array = (STRUCTS["PJRT_NamedValue"] * len(made))(*(struct for struct, _ in made))
        self.address = ctypes.addressof(self._array) if made else 0
        self.count = len(made)


def read_named_values(address: int | None, count: int) -> dict[str, Any]:
    """The values of an array of PJRT_NamedValue."""
    if not address or not count:
        return {}
    values: dict[str, Any] = {}
    for item in (STRUCTS["PJRT_NamedValue"] * count).from_address(address):
        name = read_bytes(item.name, item.name_size).decode()
        if item.type == abi.STRING:
            values[name] = read_bytes(item.value.string_value, item.value_size).decode()
        elif item.type == abi.INT64:
            values[name] = item.value.int64_value
        elif item.type == abi.INT64_LIST:
            values[name] = list(read_int64s(item.value.int64_array_value, item.value_size))
        elif item.type == abi.FLOAT:
            values[name] = item.value.float_value
        elif item.type == abi.BOOL:
            values[name] = item.value.bool_value
    return values
