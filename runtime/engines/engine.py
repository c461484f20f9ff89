"""The engine protocol: what a single-device runtime must offer to get collectives from stretto.

An engine owns *arrays*: opaque objects that live on one of its devices, immutable, possibly not computed
yet. It compiles segments once and runs them on any of its devices. It knows nothing of other processes,
of collectives or of JAX.

Engines are found by name: the entry-point group ``stretto.engines`` maps a name to a factory
``create(num_devices: int) -> Engine``, and ``module:factory`` names one that is not registered. See
``docs/writing_an_engine.md``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from inspect import signature
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from stretto.collectives.types import TensorType

from ..cores import announced
from ..errors import StrettoError
from ..program import Segment
from . import heap

if TYPE_CHECKING:
    from .cuda_loans import Loans

Array = Any


@runtime_checkable
class LoadedSegment(Protocol):
    """A compiled segment, ready to run on any device of its engine."""

    def run(self, ordinal: int, inputs: list[Array]) -> list[Array]:
        """Enqueue one run on local device ``ordinal``; returns at once with arrays that may be pending.

        Inputs may be pending too. Donated inputs are consumed. A failure of the computation reaches
        ``Engine.block`` of the outputs; a failure to enqueue raises.

        A segment compiled with host callbacks may also have ``run_with_end(ordinal, inputs)``, which gives
        the outputs and an object whose ``block_until_ready()`` waits until the callables have been called
        and raises their error. Without it, nobody waits for callables that give no results.

        A segment may have ``scratch_bytes``: what a run needs beside its operands and results. It may have
        ``make_ready(ordinals)``, which does what the first run on each of these devices would else do, and
        ``optimized_hlo``, a serialized ``HloModuleProto`` of what it was compiled to.
        """
        ...


class Engine(Protocol):
    """A single-process runtime with ``num_devices`` devices, numbered by ordinal from 0.

    ``host_memory``: the host can read an array at its `pointer`, dense row-major, so that NumPy and others
    may look at arrays without a copy. An engine that lacks the attribute is taken to have memory of its own.

    ``lowered_as``: the platform by whose rules JAX lowers programs for it, ``cpu`` if it lacks the attribute.

    An engine may have ``jax_arrays = True``: its arrays are jaxlib's, and their methods ``is_ready`` and
    ``block_until_ready`` may be called instead of its own. A run of it fails only where the
    segment calls something or its memory cannot be had, and wherever an argument has an error.

    An engine may have ``unaligned = True``: its `put` takes host arrays at any address, as it copies them to
    memory of its own. Without it those that are not 64-byte aligned are copied before.

    An engine may have ``ends_as_one = True``: what a run gives is computed at one time, so that who waits for
    all of it waits for one array. So it is with ``jax_arrays``.

    An engine may have ``callers``: from how many threads at once runs of one segment on several devices are
    called with profit, since it computes some in the thread that calls; one, if it lacks the attribute.

    An engine may have ``reproducible = True``: it compiles segments that are to be ``reproducible`` as
    `Segment` says. Without it, an interleaved pipeline's results are equal up to rounding.
    """

    name: str
    num_devices: int
    host_memory: bool

    def compile(
        self, segment: Segment, *, name: str = "", host_callbacks: Sequence[Any] = ()
    ) -> LoadedSegment:
        """Compile a segment. Raises ``CompileError`` naming the segment and the engine's reason,
        ``UnsupportedError`` where that is something it does not have."""
        ...

    def put(self, host: np.ndarray, type: TensorType, ordinal: int) -> Array:
        """An array with this content, dense row-major. ``host`` must not be written to afterwards.

        Copies nothing where the host array's memory serves (on CPU: 64-byte aligned, C-contiguous);
        it is then kept alive by the array.
        """
        ...

    def host_view(self, array: Array) -> np.ndarray:
        """Content as a C-contiguous host array; waits until it is computed, raises its error.

        A view where the memory is the host's: then read-only, and valid as long as ``array`` lives.
        """
        ...

    def copy(self, array: Array, ordinal: int) -> Array:
        """A copy on device ``ordinal`` that shares no memory with ``array``; may be asynchronous."""
        ...

    def is_ready(self, array: Array) -> bool:
        """Whether `block` would return (or raise) at once."""
        ...

    def block(self, array: Array) -> None:
        """Wait until the array is computed. Raises the error of the computation, if it failed."""
        ...

    def pointer(self, array: Array) -> int:
        """Address of the array's memory, the device's or the host's (blocks until it is known). Raises
        `StrettoError` where arrays have none, which only memory other than the host's may lack."""
        ...

    def delete(self, array: Array) -> None:
        """Free the array's memory as soon as its pending uses are over.

        Programs do not call it: they drop their references, and an array that nobody refers to is freed.
        """
        ...

    def memory_stats(self, ordinal: int) -> dict[str, int]:
        """At least ``bytes_in_use`` and ``peak_bytes_in_use`` where known; may be empty."""
        ...


@runtime_checkable
class RestoringEngine(Protocol):
    """What an engine has beside `Engine` if its compiled segments outlive the process.

    With it JAX's compilation cache and serialized executables save the compilation of segments; without,
    segments are compiled again when a program is loaded.
    """

    @property
    def target(self) -> str:
        """What compiled segments depend on, in one line: versions, kind of device. Code is restored only
        where this is equal."""
        ...

    def serialize(self, segment: LoadedSegment) -> bytes:
        """A segment that `compile` or `restore` gave, and that calls no host callbacks. Raises
        ``CompileError`` where that cannot be done."""
        ...

    def restore(self, code: bytes, segment: Segment, *, name: str = "") -> LoadedSegment:
        """Inverse of `serialize`; ``segment`` is what the code was compiled from. Raises
        ``CompileError``."""
        ...


class Joined:
    """The arrays that one result of a run on several devices is, in the order of the devices, as one.

    What `LoadedTogether.run_together` gives may have these in the place of lists, where making an array for
    each device costs something, and it is given them back: they are split up only if somebody asks for one.
    """

    __slots__ = ()

    def __len__(self) -> int:
        raise NotImplementedError

    def __getitem__(self, position: int) -> Array:
        raise NotImplementedError

    def __iter__(self) -> Iterator[Array]:
        raise NotImplementedError

    def is_ready(self) -> bool:
        """Whether all of them are computed, or have failed."""
        raise NotImplementedError

    def block(self) -> None:
        """Wait until all of them are computed. Raises the error of the run."""
        raise NotImplementedError


# One array for each device.
Column = Sequence[Array] | Joined


@runtime_checkable
class LoadedTogether(Protocol):
    """A segment compiled for several devices that run it at once.

    One that calls back may have ``hands_over``: whether `run_together` surely leaves all devices to threads
    of the engine's, and so does not wait for what is called. Without it, that is not known.
    """

    def run_together(self, columns: Sequence[Column]) -> Sequence[Column]:
        """Enqueue one run on all devices. ``columns[k][i]`` is parameter k of device i; gives results in the
        same form, as lists or `Joined`. In a segment with sites a `stretto.runtime.program.CONTEXT`
        comes first. Otherwise as `LoadedSegment.run`.
        """
        ...

    def run_together_with_end(self, columns: Sequence[Column]) -> tuple[Sequence[Column], Any]:
        """`run_together`, and what has a ``block_until_ready()`` that waits until all of it is over."""
        ...


@runtime_checkable
class Joins(Protocol):
    """What a `LoadedTogether` may have beside, where `Joined` arrays spare it something."""

    def join(self, type: TensorType, arrays: list[Array]) -> Joined:
        """A parameter's arrays of this type, one for each device, as `run_together` would join them in each
        run that is given them."""
        ...


@runtime_checkable
class LoadedAlone(Protocol):
    """What a `LoadedTogether` may have beside, for a segment that is compiled for one device."""

    def run_alone(self, ordinal: int, arrays: list[Array]) -> list[Array]:
        """`run_together` for that device, whose ``ordinal`` is known: ``arrays[k]`` is parameter k."""
        ...


@runtime_checkable
class CopyingEngine(Protocol):
    """What an engine has beside `Engine` if it copies what the host lends it faster than others could for it,
    into memory of its own, which a donated array's results then use. Without it `Engine.put` is given copies.
    """

    def put_copy(self, host: np.ndarray, type: TensorType, ordinal: int) -> Array:
        """An array with this content, which may have any strides, no elements of less than a byte, and is
        the caller's again when this returns."""
        ...


@runtime_checkable
class ReadingEngine(Protocol):
    """What an engine has beside `Engine` if it copies large arrays into memory of the caller's faster than by
    way of memory of its own. Without it they are copied from `Engine.host_view`.
    """

    def read_into(self, array: Array, host: np.ndarray) -> None:
        """Copy the content into a C-contiguous host array of the same shape and type; waits until it is
        computed, raises its error."""
        ...


@runtime_checkable
class CallingEngine(Protocol):
    """What an engine has beside `Engine` if its compiled code can call collectives itself, as custom
    calls of XLA's FFI on memory of the host, or of GPUs where it is a `StreamedEngine`: there only one
    device of a process runs such code, and the function is called on the host, with the stream that the
    code runs on. Without it the executor makes all of them.
    """

    def register_handler(self, target: str, handler: object) -> None:
        """Have custom calls of ``target`` (version 4 of their API) call the function in this capsule.

        It may be called from any thread, and may leave a device's run unfinished by XLA's futures; that must
        not keep the runs of other devices from going on.
        """
        ...

    def compile_together(
        self,
        segment: Segment,
        ordinals: Sequence[int],
        *,
        name: str = "",
        code: bytes = b"",
        host_callbacks: Sequence[Any] = (),
    ) -> LoadedTogether:
        """Compile a segment with sites for these devices, or restore what `RestoringEngine.serialize` gave of
        it. ``host_callbacks`` are for segments that call back, in their loops. Raises ``CompileError``."""
        ...


@runtime_checkable
class StreamedEngine(Protocol):
    """What an engine has beside `Engine` if its arrays are in the memory of CUDA's GPUs and can be used there
    on other streams than its own. Without it collectives go through the host's memory.
    """

    @property
    def loans(self) -> Loans:
        """By which others use its arrays."""
        ...

    def export(self, array: Array, stream: int | None) -> Any:
        """The array as a capsule of DLPack, of the GPU's memory. ``stream``, one of CUDA's, waits for it, as
        the protocol says."""
        ...

    def fail(self, error: BaseException) -> None:
        """What others had under way will be given up: from now on `Engine.block` and `Engine.host_view` raise
        this error, once they have waited."""
        ...


@runtime_checkable
class SideBySideEngine(Protocol):
    """What an engine has beside `Engine` if it compiles some segments for several devices at once. Others are
    compiled once, and loaded for each device when they first run there.
    """

    def goes_side_by_side(self, segment: Segment) -> bool:
        """Whether several devices should have it compiled at once: where it calls back, or what it compiles
        to cannot be loaded for another device."""
        ...

    def rather_side_by_side(self, segment: Segment) -> bool:
        """Whether one that all devices run in each run of the program had better be, too: loading its code
        for each device would take longer than beginning all runs at once does."""
        ...

    def compile_side_by_side(
        self,
        segment: Segment,
        ordinals: Sequence[int],
        host_callbacks: Sequence[Any],
        *,
        name: str = "",
        code: bytes = b"",
    ) -> LoadedSegment:
        """Compile a segment for these devices, or restore it from ``code``. It is a `LoadedTogether` too:
        functions that several devices call back may wait for each other. Raises ``CompileError``."""
        ...


def counted(given: object, results: int) -> list[Array]:
    """What `LoadedSegment.run` gave. Raises `StrettoError` unless it is a list, an array for each result."""
    if type(given) is list and len(given) == results:
        return given
    found = f"{len(given)} arrays" if isinstance(given, list) else f"a {type(given).__name__}"
    raise StrettoError(f"the engine's run gave {found}; a list of {results} is due")


def create_engine(
    name: str,
    num_devices: int,
    *,
    cores: int | None = None,
    place: tuple[int, int] = (0, 1),
    **options: Any,
) -> Engine:
    """The engine registered under ``name``, or under what stands before the first colon: the rest is the
    factory's ``plugin`` then. Without either, ``module:factory`` is taken for what it says. Raises
    ``LookupError`` listing the names there are, `StrettoError` where its package cannot be imported.

    ``cores``: on how many it should compute. It is told by ``NPROC`` while it is made, and the process's
    heap is set up for it (`heap`). None leaves all as it is. ``place``: which rank of its host this is, of
    how many; factories that take it are told.
    """
    found = {e.name: e for e in entry_points(group="stretto.engines")}
    if name not in found and name.partition(":")[0] in found:
        name, _, options["plugin"] = name.partition(":")
    entry = found.get(name) or _factory(name)
    if entry is None:
        raise LookupError(
            f"no engine {name!r}; installed engines: {', '.join(sorted(found)) or 'none'}. Set "
            "STRETTO_ENGINE to one of them or to module:factory, or install the package that provides it."
        )
    try:
        make = entry.load()
    except Exception as error:
        raise StrettoError(
            f"engine {name!r} (STRETTO_ENGINE) cannot be loaded from {entry.value}: "
            f"{type(error).__name__}: {error}"
        ) from error
    if "place" in signature(make).parameters:
        options["place"] = place
    if cores is None:
        return make(num_devices=num_devices, **options)
    heap.keep_freed(cores)
    with announced(cores):
        return make(num_devices=num_devices, **options)


def _factory(name: str) -> EntryPoint | None:
    """A factory that is not registered, ``module:factory``."""
    module, _, attribute = name.partition(":")
    try:
        known = attribute.isidentifier() and find_spec(module) is not None
    except (ImportError, ValueError):
        return None
    return EntryPoint(name, name, "stretto.engines") if known else None
