"""How a program's arguments and results are divided: the extension of the PJRT C API that answers it.

JAX asks for it whenever it has compiled something. Without this jaxlib would have the optimized program
written, read it, and build all of its HLO, for each of the two questions.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from stretto.hlo_frontend.schema import HloModuleProto

from . import _capi
from .table import entry

_TUPLE = 2  # xla.OpSharding.Type


class Shardings:
    """Serialized ``OpSharding`` messages of a partitioned module, ``parameters`` and ``outputs``.

    Both are None where the module says nothing, as that of a program for one device, for which ``hlo`` is
    empty.
    """

    def __init__(self, hlo: bytes) -> None:
        module = HloModuleProto.FromString(hlo)
        self.parameters = _Listed(module.spmd_parameters_shardings or None)
        outputs = None
        if module.HasField("spmd_output_sharding"):
            found = module.spmd_output_sharding
            parts = found.tuple_shardings if found.type == _TUPLE else [found]
            outputs = [part.SerializeToString() for part in parts]
        self.outputs = _Listed(outputs)


class _Listed:
    """Byte strings as two arrays in memory, of addresses and of sizes; no arrays where there is no list."""

    def __init__(self, texts: Sequence[bytes] | None) -> None:
        self.texts = None if texts is None else list(texts)
        kept = self.texts or []
        self._kept = [ctypes.create_string_buffer(text, len(text)) for text in kept]
        self._addresses = (ctypes.c_void_p * len(kept))(*map(ctypes.addressof, self._kept))
        self._sizes = (ctypes.c_size_t * len(kept))(*map(len, kept))

    def fill(self, args: Any) -> int:
        """Point the arguments at the arrays. Gives how many there are."""
        if self.texts is None:
            args.shardings = args.sharding_sizes = None
            return 0
        args.shardings = ctypes.addressof(self._addresses)
        args.sharding_sizes = ctypes.addressof(self._sizes)
        return len(self.texts)


@entry("PJRT_Shardings_PJRT_Executable_ParameterShardings")
def parameter_shardings(args: Any) -> None:
    args.num_parameters = _capi.take(args.executable).shardings.parameters.fill(args)


@entry("PJRT_Shardings_PJRT_Executable_OutputShardings")
def output_shardings(args: Any) -> None:
    args.num_outputs = _capi.take(args.executable).shardings.outputs.fill(args)
