"""NCCL by its C functions: integers in and out.

Pointers, streams and communicators are addresses, types and reductions are NCCL's codes. ``libnccl.so.2``
is called through `ctypes`, which lets go of the GIL. It is that of NVIDIA's wheel, which jax's CUDA plugin
brings along, or the system's. What is used of it has had the same binary interface since NCCL 2.18.

Communicators do not block: whoever calls NCCL asks for a communicator's state until what was asked for is
there, or on its stream, and may give up (`Nccl.abort`) from another thread. What puts collectives onto
streams is called through `_launches`, which also asks for the states.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
from ctypes import byref, c_char, c_char_p, c_int, c_size_t, c_uint, c_void_p, cast
from functools import cache
from pathlib import Path

from ._launches import Launches
from .cuda import CudaError, cuda
from .ops import Collective, Kind, Reduction

# ncclDataType_t. A type that is not here is moved as bytes, and not reduced.
DTYPES = {
    "s8": 0,
    "u8": 1,
    "s32": 2,
    "u32": 3,
    "s64": 4,
    "u64": 5,
    "f16": 6,
    "f32": 7,
    "f64": 8,
    "bf16": 9,
}
BYTE = DTYPES["u8"]
# ncclRedOp_t
_OPS = {Reduction.SUM: 0, Reduction.PRODUCT: 1, Reduction.MAX: 2, Reduction.MIN: 3}
# A pred is a byte, 0 or 1.
_PRED = {
    Reduction.SUM: 2,
    Reduction.PRODUCT: 3,
    Reduction.MAX: 2,
    Reduction.MIN: 3,
    Reduction.AND: 3,
    Reduction.OR: 2,
}
# ncclResult_t
IN_PROGRESS = 7
_UNIQUE_ID = 128


def reduction_codes(dtype: str, reduction: Reduction) -> tuple[int, int] | None:
    """NCCL's type, operation where it reduces as HLO does; None elsewhere.

    Its minimum and maximum of floats ignore NaN, and HLO's do not.
    """
    if dtype == "pred":
        return (BYTE, _PRED[reduction]) if reduction in _PRED else None
    if dtype not in DTYPES or reduction not in _OPS:
        return None
    if dtype[0] in "fb" and reduction in (Reduction.MIN, Reduction.MAX):
        return None
    return DTYPES[dtype], _OPS[reduction]


def is_supported(collective: Collective) -> bool:
    """Whether NCCL moves and reduces these types as HLO does, whatever the groups."""
    kind, types = collective.kind, (*collective.operands, *collective.results)
    if kind in (Kind.SEND, Kind.RECV, Kind.RAGGED_ALL_TO_ALL) or collective.dynamic_root:
        return False
    if any(t.element.bits < 8 or not t.size for t in types):
        return False
    if kind in (Kind.ALL_REDUCE, Kind.REDUCE_SCATTER):
        reduction = collective.reduction
        return reduction is not None and all(
            reduction_codes(t.dtype, reduction) for t in collective.operands
        )
    return True


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", c_char * _UNIQUE_ID),)


class _Config(ctypes.Structure):
    """``ncclConfig_t`` as of NCCL 2.18: later versions take it for what its size and version say."""

    _fields_ = (
        ("size", c_size_t),
        ("magic", c_uint),
        ("version", c_uint),
        ("blocking", c_int),
        ("cga_cluster_size", c_int),
        ("min_ctas", c_int),
        ("max_ctas", c_int),
        ("net_name", c_char_p),
        ("split_share", c_int),
    )


_MAGIC, _CONFIG_VERSION, _UNDEFINED = 0xCAFEBEEF, 21800, -(1 << 31)


def _find() -> ctypes.CDLL:
    """NCCL that the process has already, of ``LD_LIBRARY_PATH``, of NVIDIA's wheel, else the system's.

    Of these jax's CUDA plugin loads the wheel's, whatever the system has: they may be of different versions.
    Raises ``OSError``.
    """
    name = "libnccl.so.2"
    try:
        return ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        pass
    named = [folder for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":") if folder]
    if not any(Path(folder, name).exists() for folder in named):
        found = importlib.util.find_spec("nvidia")
        for folder in (found.submodule_search_locations or []) if found else []:
            for library in Path(folder).glob(f"*/lib/{name}"):
                return ctypes.CDLL(str(library))
    return ctypes.CDLL(name)


class Nccl:
    """NCCL's functions but for those of `Launches`. One thread at a time calls them, `abort` excepted."""

    def __init__(self) -> None:
        """Raises ``OSError`` where there is no NCCL, ``AttributeError`` where it is too old."""
        self._library = library = _find()
        library.ncclGetErrorString.restype = c_char_p
        library.ncclGetLastError.restype = c_char_p
        self._init = library.ncclCommInitRankConfig
        self._init.argtypes = [c_void_p, c_int, _UniqueId, c_int, c_void_p]

    def _check(self, name: str, error: int, communicator: int = 0) -> None:
        if error not in (0, IN_PROGRESS):
            raise CudaError(f"{name} failed: {self.describe(error, communicator)}")

    def describe(self, error: int, communicator: int = 0) -> str:
        """What NCCL says of an error, and the last of its own messages."""
        text = (self._library.ncclGetErrorString(error) or b"").decode()
        last = (self._library.ncclGetLastError(c_void_p(communicator)) or b"").decode().strip()
        return f"{text} (NCCL error {error}{f': {last}' if last else ''})"

    def version(self) -> int:
        """22809 is 2.28.9."""
        version = c_int()
        self._check("ncclGetVersion", self._library.ncclGetVersion(byref(version)))
        return version.value

    def unique_id(self) -> bytes:
        """What the ranks of a communicator that is to be made have in common."""
        made = _UniqueId()
        self._check("ncclGetUniqueId", self._library.ncclGetUniqueId(byref(made)))
        return ctypes.string_at(byref(made), _UNIQUE_ID)

    def init_rank(self, size: int, unique_id: bytes, rank: int) -> int:
        """A communicator on this thread's device, in progress until all of its ranks have come."""
        config = _Config(
            ctypes.sizeof(_Config),
            _MAGIC,
            _CONFIG_VERSION,
            0,
            *([_UNDEFINED] * 3),
            None,
            _UNDEFINED,
        )
        made = c_void_p()
        given = _UniqueId.from_buffer_copy(unique_id)
        self._check(
            "ncclCommInitRankConfig", self._init(byref(made), size, given, rank, byref(config))
        )
        return made.value or 0

    def abort(self, communicator: int) -> None:
        """End what is under way and give the communicator up; to be called on all ranks. May block."""
        self._library.ncclCommAbort(c_void_p(communicator))

    def destroy(self, communicator: int) -> None:
        """Give up a communicator nothing of which is under way."""
        self._check("ncclCommDestroy", self._library.ncclCommDestroy(c_void_p(communicator)))

    def group_start(self) -> None:
        self._check("ncclGroupStart", self._library.ncclGroupStart())

    def group_end(self) -> None:
        """Make the communicators asked for since `group_start`. They are there when their states are 0."""
        self._check("ncclGroupEnd", self._library.ncclGroupEnd())

    def launches(self) -> Launches:
        """What makes the calls that put collectives onto streams."""
        found = [cast(getattr(self._library, name), c_void_p).value for name in Launches.NAMES]
        return Launches(cuda().set_current, *found)


@cache
def nccl() -> Nccl:
    """The process's NCCL. Raises as `Nccl` does."""
    return Nccl()
