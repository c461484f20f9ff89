"""Engines over any single-device PJRT plugin: jaxlib's own client of the C API, as JAX itself would use it.

``pjrt:NAME`` is a plugin that is installed for JAX and registers itself under that name, with the options
that it registers. ``pjrt:/path/to/plugin.so`` is a library. Options of its client follow a question mark, as
in an address: ``pjrt:/path/to/plugin.so?memory=4096&kind=fast``; whole numbers, decimal ones, ``true`` and
``false`` are passed on as such, all else as text. Two are the engine's own:

- ``lower=PLATFORM``: JAX lowers programs with the rules of this platform. Otherwise with those of the
  platform that the plugin says it is, which for one that JAX does not know are those of all platforms.
- ``first=N``: the first of its devices that this process uses. Otherwise ranks of one host take turns where
  there are enough for all of them, and each uses the first ones where there are not.

Arrays are where the plugin keeps them. What the executor does itself it does in the host's memory:
`host_view` waits for an array and copies it, `put` copies back.
"""

from __future__ import annotations

import ctypes
import hashlib
import re
from collections.abc import Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from jax._src import xla_bridge
from jax._src.lib import xla_client
from jax.errors import JaxRuntimeError

from ..errors import CompileError, StrettoError, UnsupportedError
from ..program import Segment
from .xla import XlaEngine

# Functions that jaxlib calls without looking whether they are there, by their places in ``PJRT_Api``. Without
# one of them the process would crash.
REQUIRED: dict[str, int] = {
    "PJRT_Error_Destroy": 0,
    "PJRT_Error_Message": 1,
    "PJRT_Error_GetCode": 2,
    "PJRT_Plugin_Initialize": 3,
    "PJRT_Plugin_Attributes": 4,
    "PJRT_Event_Destroy": 5,
    "PJRT_Event_IsReady": 6,
    "PJRT_Event_Error": 7,
    "PJRT_Event_Await": 8,
    "PJRT_Event_OnReady": 9,
    "PJRT_Client_Create": 10,
    "PJRT_Client_Destroy": 11,
    "PJRT_Client_PlatformName": 12,
    "PJRT_Client_PlatformVersion": 14,
    "PJRT_Client_Devices": 15,
    "PJRT_Client_AddressableDevices": 16,
    "PJRT_Client_LookupDevice": 17,
    "PJRT_Client_AddressableMemories": 19,
    "PJRT_Client_Compile": 20,
    "PJRT_Client_BufferFromHostBuffer": 22,
    "PJRT_DeviceDescription_Id": 23,
    "PJRT_DeviceDescription_ProcessIndex": 24,
    "PJRT_DeviceDescription_Attributes": 25,
    "PJRT_DeviceDescription_Kind": 26,
    "PJRT_DeviceDescription_DebugString": 27,
    "PJRT_DeviceDescription_ToString": 28,
    "PJRT_Device_GetDescription": 29,
    "PJRT_Device_IsAddressable": 30,
    "PJRT_Device_LocalHardwareId": 31,
    "PJRT_Device_AddressableMemories": 32,
    "PJRT_Device_DefaultMemory": 33,
    "PJRT_Device_MemoryStats": 34,
    "PJRT_Memory_Kind": 36,
    "PJRT_Memory_AddressableByDevices": 39,
    "PJRT_Executable_Destroy": 40,
    "PJRT_Executable_Name": 41,
    "PJRT_Executable_NumOutputs": 44,
    "PJRT_Executable_GetCostAnalysis": 46,
    "PJRT_Executable_OutputMemoryKinds": 47,
    "PJRT_Executable_OptimizedProgram": 48,
    "PJRT_Executable_Serialize": 49,
    "PJRT_LoadedExecutable_Destroy": 50,
    "PJRT_LoadedExecutable_GetExecutable": 51,
    "PJRT_LoadedExecutable_AddressableDevices": 52,
    "PJRT_LoadedExecutable_Execute": 55,
    "PJRT_Buffer_Destroy": 58,
    "PJRT_Buffer_ElementType": 59,
    "PJRT_Buffer_Dimensions": 60,
    "PJRT_Buffer_DynamicDimensionIndices": 62,
    "PJRT_Buffer_Device": 65,
    "PJRT_Buffer_Memory": 66,
    "PJRT_Buffer_Delete": 67,
    "PJRT_Buffer_IsDeleted": 68,
    "PJRT_Buffer_ToHostBuffer": 70,
    "PJRT_Buffer_IsOnCpu": 71,
    "PJRT_Buffer_ReadyEvent": 72,
    "PJRT_Buffer_UnsafePointer": 73,
    "PJRT_TopologyDescription_PlatformName": 84,
    "PJRT_TopologyDescription_PlatformVersion": 85,
    "PJRT_TopologyDescription_Attributes": 88,
    "PJRT_Buffer_CopyToMemory": 92,
    "PJRT_Executable_Fingerprint": 94,
    "PJRT_Client_TopologyDescription": 95,
    "PJRT_Executable_GetCompiledMemoryStats": 96,
    "PJRT_Memory_Kind_Id": 97,
}
_HEAD = 2 * 8 + 24  # bytes of PJRT_Api before its functions: size, extensions, version
_OPTION = re.compile(r"(?P<whole>-?\d+)|(?P<decimal>-?\d+\.\d+)|(?P<truth>true|false)", re.ASCII)
_OWN = ("lower", "first")
# What XLA says of a custom call that its client does not know.
_LACKS_HANDLER = re.compile(
    r"No (?:FFI handler registered for|registered implementation for untyped custom call to) (?P<target>\S+)"
)


def create(num_devices: int, plugin: str = "", place: tuple[int, int] = (0, 1)) -> PjrtEngine:
    """Factory of the entry-point group ``stretto.engines``. ``plugin`` is what follows ``pjrt:``."""
    return PjrtEngine(num_devices, plugin, place)


class PjrtEngine(XlaEngine):
    """``num_devices`` devices of a plugin. ``place``: which rank of its host this is, of how many."""

    host_memory = False
    unaligned = True

    def __init__(self, num_devices: int, plugin: str, place: tuple[int, int] = (0, 1)) -> None:
        """Raises `StrettoError` if there is no such plugin, it cannot be used, or it has too few devices."""
        named, _, query = plugin.partition("?")
        self.name = f"pjrt:{named}"
        if not plugin:
            raise StrettoError(
                "engine pjrt: say which plugin, as pjrt:NAME or pjrt:/path/to/plugin.so"
            )
        options = _options(query)
        self._own = {name: options.pop(name) for name in _OWN if name in options}
        try:
            client = self._connect(named, options)
        except (JaxRuntimeError, RuntimeError, ValueError) as error:
            raise StrettoError(f"engine {self.name}: {error}") from error
        found = client.local_device_count()
        first = self._first(found, num_devices, place)
        if found < first + num_devices:
            raise StrettoError(
                f"engine {self.name}: {num_devices} devices are asked for (STRETTO_LOCAL_DEVICES), from "
                f"number {first} on, and the plugin has {found}"
            )
        super().__init__(client, num_devices, first)
        self.lowered_as = str(self._own.get("lower", client.platform.lower()))

    def _connect(self, named: str, options: dict[str, Any]) -> Any:
        if "/" not in named:
            return self._installed(named, options)
        path = Path(named).expanduser().absolute()
        if not path.is_file():
            raise StrettoError(f"engine {self.name}: there is no file {path}")
        # jaxlib knows plugins by names, and JAX may have one of the same file's name.
        name = f"stretto_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
        _check(self.name, _load(name, str(path)))
        if not xla_client.pjrt_plugin_initialized(name):
            xla_client.initialize_pjrt_plugin(name)
        return xla_client.make_c_api_client(name, options, None)

    def _installed(self, named: str, options: dict[str, Any]) -> Any:
        xla_bridge._discover_and_register_pjrt_plugins()
        plugins = {
            name: registered
            for name, registered in xla_bridge._backend_factories.items()
            if registered.c_api is not None and name != "stretto"
        }
        if named not in plugins:
            raise StrettoError(
                f"engine {self.name}: no PJRT plugin registers itself with JAX under that name. Those that "
                f"do: {', '.join(sorted(plugins)) or 'none'}. A library is named by its path, with a slash"
            )
        _check(self.name, plugins[named].c_api)
        if not options:
            return plugins[named].factory()
        if not xla_client.pjrt_plugin_initialized(named):
            xla_client.initialize_pjrt_plugin(named)
        return xla_client.make_c_api_client(named, options, None)

    def _first(self, found: int, num_devices: int, place: tuple[int, int]) -> int:
        """The first device of this process."""
        if "first" in self._own:
            return int(self._own["first"])
        index, ranks = place
        return index * num_devices if found >= ranks * num_devices else 0

    def compile_on(
        self,
        segment: Segment,
        name: str,
        devices: Any,
        options: Any,
        host_callbacks: Sequence[Any] = (),
    ) -> Any:
        called = name or "(unnamed)"
        if host_callbacks:  # the C API has no way for them
            raise UnsupportedError(
                f"segment {called} calls back into Python, which engine {self.name} cannot do"
            )
        try:
            return super().compile_on(segment, name, devices, options)
        except CompileError as error:
            lacking = _LACKS_HANDLER.search(str(error))
            if lacking is None:
                raise
            raise UnsupportedError(
                f"segment {called} calls {lacking['target']}, for which engine {self.name} has no handler. "
                f"JAX lowers programs for it by the rules of platform {self.lowered_as}, whose linear "
                "algebra is made of such calls; ?lower=PLATFORM chooses others"
            ) from error

    def memory_stats(self, ordinal: int) -> dict[str, int]:
        """As the plugin counts; empty where it does not."""
        (device,) = self._device_lists[ordinal]
        try:
            return dict(device.memory_stats() or {})
        except JaxRuntimeError:
            return {}


@cache
def _load(name: str, library: str) -> Any:
    """The plugin's table, in a capsule. jaxlib loads a library once for a name."""
    return xla_client.load_pjrt_plugin_dynamically(name, library)


def _options(query: str) -> dict[str, Any]:
    """Of the client, by their names."""
    options: dict[str, Any] = {}
    for name, text in parse_qsl(query, keep_blank_values=True):
        kind = _OPTION.fullmatch(text)
        if kind is None:
            options[name] = text
        elif kind["whole"]:
            options[name] = int(text)
        else:
            options[name] = float(text) if kind["decimal"] else text == "true"
    return options


def _check(engine: str, capsule: Any) -> None:
    """Raise `StrettoError` unless the plugin's table has all that jaxlib needs."""
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    name = ctypes.pythonapi.PyCapsule_GetName
    name.restype, name.argtypes = ctypes.c_char_p, [ctypes.py_object]
    table = pointer(capsule, name(capsule))
    size = ctypes.c_size_t.from_address(table).value
    absent = [
        function
        for function, place in REQUIRED.items()
        if (at := _HEAD + 8 * place) + 8 > size
        or not ctypes.c_void_p.from_address(table + at).value
    ]
    if absent:
        raise StrettoError(
            f"engine {engine}: the plugin lacks functions that jaxlib {version('jaxlib')} calls: "
            f"{', '.join(absent)}"
        )
