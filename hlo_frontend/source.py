"""HLO files: reads text or serialized protos, gzipped or not, and for how many devices they are.

`in_fork` reads and compiles in a forked process: XLA's parser and importer may crash on inconsistent input,
and that must not end a process that reads files of unknown origin.
"""

from __future__ import annotations

import gzip
import os
import pickle
import re
import signal
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, TypeVar

from google.protobuf.message import DecodeError
from jaxlib import _hlo

from stretto.runtime.errors import InvalidProgramError, StrettoError

from . import culprit
from .counts import implied_counts, implied_replicas
from .forked import forked
from .graph import Module
from .schema import HloModuleProto, HloModuleProtoWithConfig, OpSharding
from .text import parse_hlo_text

Result = TypeVar("Result")

_GZIP_MAGIC = b"\x1f\x8b"
_TEXT = re.compile(rb"[^\x00-\x08\x0e-\x1f\x7f]*\Z")
_HEADER = re.compile(r"^[ \t]*HloModule\b", re.MULTILINE)
_COMPUTATION = re.compile(r"^[ \t]*(?:ENTRY\b|%?[\w.-]+[ \t]*[({])", re.MULTILINE)
_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)
_COUNTS = re.compile(r"\b(replica_count|num_partitions)=(\d+)")


@dataclass(frozen=True)
class HloSource:
    """A serialized ``HloModuleProto`` and the counts for which it was written; 0 if the file has none."""

    module: bytes
    num_replicas: int = 0
    num_partitions: int = 0

    def counts(self, num_devices: int, parsed: Module | None = None) -> tuple[int, int]:
        """Replicas and partitions: as written, else as its groups need, else one for each device.

        XLA does not write a count of 1, so a file may have one count and not the other.
        ``parsed`` is the module, if the caller has it.
        """
        replicas, partitions = self.num_replicas, self.num_partitions
        if not replicas and not partitions:
            replicas, partitions = implied_counts(parsed or Module.parse(self.module), num_devices)
        elif not replicas and partitions == 1:
            replicas = implied_replicas(parsed or Module.parse(self.module))
        return max(replicas, 1), max(partitions, 1)


def read_hlo(data: bytes) -> HloSource:
    """Read HLO text, a serialized ``HloModuleProto``, or one that an HloProto or a config wraps.

    Raises `InvalidProgramError` with the line, or the reason.
    """
    data = _unpacked(data)
    if not data.strip():
        raise InvalidProgramError(
            "the file is empty; it should hold HLO text or a serialized module"
        )
    text = _as_text(data)
    return _read_proto(data) if text is None else _read_text(text)


def _unpacked(data: bytes) -> bytes:
    if not data.startswith(_GZIP_MAGIC):
        return data
    try:
        return gzip.decompress(data)
    except (OSError, EOFError, zlib.error) as error:
        raise InvalidProgramError(f"cannot unpack the gzipped file: {error}") from error


def _as_text(data: bytes) -> str | None:
    """The file as text, None if it is a proto."""
    try:
        return data.decode() if _TEXT.match(data) else None
    except UnicodeDecodeError:
        return None


def _read_text(text: str) -> HloSource:
    module = parse_hlo_text(text)
    counts = {name: int(count) for name, count in _COUNTS.findall(_header(text))}
    return HloSource(module, counts.get("replica_count", 0), counts.get("num_partitions", 0))


def _header(text: str) -> str:
    """What stands before the first computation, on one line or several, without comments."""
    begin = _HEADER.search(text)
    if begin is None:
        return ""
    end = _COMPUTATION.search(text, begin.end())
    return _COMMENT.sub(" ", text[begin.start() : end.start() if end else len(text)])


def _read_proto(data: bytes) -> HloSource:
    try:
        if HloModuleProto.FromString(data).computations:
            return HloSource(_loadable(data))
    except DecodeError:
        pass  # perhaps wrapped
    try:
        wrapped = HloModuleProtoWithConfig.FromString(data)
    except Exception as error:
        raise InvalidProgramError(
            f"neither HLO text nor a serialized HloModuleProto: {error}"
        ) from None
    if not wrapped.hlo_module.computations:
        raise InvalidProgramError("the module has no computations")
    return HloSource(
        _loadable(wrapped.hlo_module.SerializeToString()),
        wrapped.config.replica_count,
        wrapped.config.num_partitions,
    )


def _loadable(module: bytes) -> bytes:
    """The module, if XLA's loader takes it: it knows all opcodes, and how many operands each has."""
    try:
        for where, dims, order in _orders_of_devices(HloModuleProto.FromString(module)):
            # On such a one XLA's loader may never end.
            if dims and sorted(order) != list(range(len(dims))):
                raise InvalidProgramError(
                    f"{where}: devices are listed in the order {list(order)} of {len(dims)} dimensions"
                )
        _hlo.HloModule.from_serialized_hlo_module_proto(module)
    except InvalidProgramError:
        raise
    except Exception as error:
        raise InvalidProgramError(f"XLA cannot load the module: {error}") from error
    return module


def _orders_of_devices(module: Any) -> Iterator[tuple[str, Sequence[int], Sequence[int]]]:
    """Where a module lists devices as a transposed range: what has the list, dimensions and their order."""
    shardings = [("the module", module.spmd_output_sharding)]
    for text in module.spmd_parameters_shardings:
        shardings.append(("the module", OpSharding.FromString(text)))
    for computation in module.computations:
        for instruction in computation.instructions:
            if instruction.sharding:
                shardings.append((instruction.name, OpSharding.FromString(instruction.sharding)))
            listed = instruction.iota_collective_device_list
            yield instruction.name, listed.iota_reshape_dims, listed.iota_transpose_perm
            transform = instruction.mesh_axes_replica_group_list.mesh.iota_transform
            yield instruction.name, transform.reshape_dims, transform.transpose_perm
    while shardings:
        where, sharding = shardings.pop()
        yield where, sharding.iota_reshape_dims, sharding.iota_transpose_perm
        transform = sharding.named_sharding.mesh.iota_transform
        yield where, transform.reshape_dims, transform.transpose_perm
        shardings += [(where, part) for part in sharding.tuple_shardings]


def in_fork(work: Callable[[], Result], data: bytes = b"") -> Result:
    """Run ``work`` in a forked process. Its result and its errors must be picklable.

    Raises the `StrettoError` that it raises. If the process crashes, raises `InvalidProgramError`, which
    names the instruction of the file ``data`` on which it does. Call this before this process has other
    threads.
    """

    def answer(pipe: BinaryIO) -> None:
        try:
            outcome = pickle.dumps((True, work()))
        except StrettoError as error:
            outcome = pickle.dumps((False, error))
        except RecursionError:
            too_deep = InvalidProgramError("its loops, branches or calls are nested too deeply")
            outcome = pickle.dumps((False, too_deep))
        except Exception as error:
            reason = InvalidProgramError(f"{type(error).__name__}: {error}")
            outcome = pickle.dumps((False, reason))
        pipe.write(outcome)

    answered, status = forked(answer)
    if os.WIFSIGNALED(status):
        name = signal.Signals(os.WTERMSIG(status)).name
        named = _culprit(data)
        if named is not None:
            raise InvalidProgramError(
                f"{named}: XLA ended with {name} on reading it. Check its shape, operands and attributes"
            )
        raise InvalidProgramError(
            f"the module contradicts itself: XLA ended with {name} on reading it. Check the shapes of "
            "its instructions, and the shapes and operands of its collectives"
        )
    if not answered:
        raise InvalidProgramError("XLA ended the process on reading the module")
    succeeded, found = pickle.loads(answered)
    if not succeeded:
        raise found
    result: Result = found
    return result


def _culprit(data: bytes) -> str | None:
    """The instruction of a file on which XLA crashes, if it does so on a single one."""
    if not data:
        return None
    text = _as_text(_unpacked(data))
    if text is not None:
        found = culprit.in_text(text)
        if found is not None:
            return found
    try:
        module = in_fork(lambda: read_hlo(data).module)
    except InvalidProgramError:  # XLA crashes in loading the module, so no part can be tried
        return None
    return culprit.in_module(module)
