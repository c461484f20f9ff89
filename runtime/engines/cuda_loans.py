"""Arrays of XLA's CUDA client in the hands of others, who use them on streams of their own.

A stream is one of CUDA's, an address; nothing here makes the host wait. Three things are done in turn:

- `Loans.lend` makes a stream wait for an array, and gives its address. `Rooms` are arrays without content,
  whose memory the stream may write to once it has waited for them as well.
- A `Mark` says how far the stream has come (`Loans.mark`).
- `Loans.arrive` makes XLA's own stream wait for the mark, and makes arrays of the rooms that XLA takes to be
  computed then: the rooms are donated to a run that does nothing. Where only runs and loans will read them,
  `Loans.defer` does without that run: XLA's stream comes to them behind the mark, and `lend` waits for it.

What a stream is to do with them can be put into a queue, for `Cuda.enqueue`, rather than onto the stream at
once.

From then on the memory of what was lent, of rooms and of scratch is in the order of XLA's stream again, as
is that of all its arrays: XLA may free it, give it to the next result, and have it written by a run to which
it is donated. Until then whoever borrows keeps the arrays, and nobody may be donated them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jax._src.interpreters import mlir
from jaxlib import _jax

from stretto.collectives.cuda import RECORD, WAIT, Cuda, Queued
from stretto.collectives.types import TensorType

from ..program import Segment

Array = Any
_ZEROS = {"p": "false", "s": "0", "u": "0", "f": "0.0", "b": "0.0", "c": "(0.0,0.0)"}
# Rooms up to this size are made several at once, so many that they have as many bytes: a run takes longer.
_SMALL, _AT_ONCE = 1 << 16, 8
# Deferred arrays of which marks are kept until they are looked through: more than a step has.
_DEFERRED = 1 << 10
# Names of segments that compute nothing.
ROOM, ARRIVAL = "stretto_room", "stretto_arrival"


class Mark:
    """A place on a stream: an event, which is used again when nobody refers to the mark."""

    __slots__ = ("_driver", "_free", "event")

    def __init__(self, driver: Cuda, device: int, free: list[int]) -> None:
        self._driver = driver
        self._free = free
        try:
            self.event = free.pop()
        except IndexError:
            driver.use(device)  # whose event it is
            self.event = driver.event()

    def passed(self) -> bool:
        """Whether the stream has come as far."""
        return self._driver.passed(self.event)

    def __del__(self) -> None:
        self._free.append(self.event)


class Loans:
    """What is lent of an engine's arrays.

    ``devices[ordinal]``: CUDA's number; ``streams[ordinal]``: XLA's stream there; ``compile``: the engine's
    ``compile``.
    """

    def __init__(
        self,
        driver: Cuda,
        devices: Sequence[int],
        streams: Sequence[int],
        compile: Callable[[Segment], Any],
    ) -> None:
        self._driver = driver
        self._devices = devices
        self._streams = streams
        self._compile = compile
        self._events: list[list[int]] = [[] for _ in devices]  # free ones
        self._compiled: dict[tuple[str, tuple[TensorType, ...]], Any] = {}
        self._lendable: dict[str, bool] = {}
        # Marks behind which deferred arrays are there, by address. That of an array that is gone makes a
        # stream wait for what has been done before.
        self._deferred: dict[int, Mark] = {}
        self._spares: list[dict[TensorType, _Spare]] = [{} for _ in devices]

    def device(self, ordinal: int) -> int:
        """CUDA's number of a device."""
        return self._devices[ordinal]

    def stream(self, ordinal: int) -> int:
        """XLA's stream on a device."""
        return self._streams[ordinal]

    def lendable(self, type: TensorType) -> bool:
        """Whether arrays of this type can be lent: DLPack, by which streams wait, lacks some."""
        known = self._lendable.get(type.dtype)
        if known is None:
            try:
                (array,) = self.segment(ROOM, (TensorType(type.dtype, (1,)),)).run(0, [])
                _jax.buffer_to_dlpack_managed_tensor(array)
                known = True
            except (
                Exception
            ):  # whatever is raised of a type that jaxlib, MLIR or DLPack has no way for
                known = False
            self._lendable[type.dtype] = known
        return known and type.size > 0

    def lend(self, array: Array, stream: int, queue: list[Queued]) -> int:
        """Have the stream wait for an array; gives its address. What is left of the wait comes into the
        queue, which is to come onto streams of the device next. This thread may use another one then."""
        # It would count as a reference to the array, which then cannot be donated: so it is dropped at once.
        _jax.buffer_to_dlpack_managed_tensor(array, stream=stream)
        address = array.unsafe_buffer_pointer()
        mark = self._deferred.get(address)
        if mark is not None:
            queue.append((WAIT, stream, mark.event))
        return address

    def mark(self, ordinal: int, stream: int) -> Mark:
        """How far the stream has come, with what is on it now."""
        queue: list[Queued] = []
        mark = self.mark_in(queue, ordinal, stream)
        self._driver.enqueue(self._devices[ordinal], queue)
        return mark

    def mark_in(self, queue: list[Queued], ordinal: int, stream: int) -> Mark:
        """The same with what is in the queue so far."""
        mark = Mark(self._driver, self._devices[ordinal], self._events[ordinal])
        queue.append((RECORD, mark.event, stream))
        return mark

    def follow(self, ordinal: int, stream: int, mark: Mark) -> None:
        """Have what comes onto a stream of this device from now on wait for a mark."""
        self._driver.enqueue(self._devices[ordinal], [(WAIT, stream, mark.event)])

    def hold(self, ordinal: int, mark: Mark) -> None:
        """Have what XLA computes from now on wait for a mark."""
        self.follow(ordinal, self._streams[ordinal], mark)

    def arrive(
        self, ordinal: int, mark: Mark, rooms: list[Array], types: Sequence[TensorType]
    ) -> list[Array]:
        """The arrays of rooms that have been written to by the time of a mark; the rooms are consumed."""
        self.hold(ordinal, mark)
        return self.segment(ARRIVAL, tuple(types)).run(ordinal, rooms)

    def defer(
        self, ordinal: int, mark: Mark, rooms: list[Array], addresses: Sequence[int]
    ) -> list[Array]:
        """The same for arrays that are only given to runs, and to `lend`: the rooms themselves."""
        self.hold(ordinal, mark)
        if len(self._deferred) > _DEFERRED:
            # Those that have passed are there for every stream.
            self._deferred = {at: m for at, m in self._deferred.items() if not m.passed()}
        for address in addresses:
            self._deferred[address] = mark
        return rooms

    def rooms(self, types: Sequence[TensorType], ordinals: Sequence[int]) -> Rooms:
        """Of these types, on these devices."""
        return Rooms(self, types, ordinals)

    def spare(self, type: TensorType, ordinal: int) -> _Spare:
        """Rooms of a small type, for all who ask."""
        spares = self._spares[ordinal]
        return spares.setdefault(type, _Spare(self, type, ordinal))

    def segment(self, name: str, types: tuple[TensorType, ...]) -> Any:
        """`ROOM` or `ARRIVAL` for these types, loaded."""
        key = name, types
        if key not in self._compiled:
            given = types if name == ARRIVAL else ()
            module = (_arrival if name == ARRIVAL else _room)([_printed(type) for type in types])
            donated = tuple(range(len(given)))
            segment = Segment(given, types, module.encode(), donated, name=name)
            self._compiled[key] = self._compile(segment)
        return self._compiled[key]


class _Spare:
    """Rooms of a small type on one device that nobody has asked for yet."""

    def __init__(self, loans: Loans, type: TensorType, ordinal: int) -> None:
        self._loans = loans
        self._types = (type,) * min(_AT_ONCE, _SMALL // type.nbytes)
        self._ordinal = ordinal
        self._segment: Any = None
        self._rooms: list[Array] = []

    def take(self) -> Array:
        """One of them; makes more where there are none."""
        while True:
            try:
                return self._rooms.pop()
            except IndexError:  # other threads may take some, too
                if self._segment is None:
                    self._segment = self._loans.segment(ROOM, self._types)
                self._rooms += self._segment.run(self._ordinal, [])


class Rooms:
    """Arrays without content, of the same types each time."""

    def __init__(self, loans: Loans, types: Sequence[TensorType], ordinals: Sequence[int]) -> None:
        """``ordinals``: the devices that will be asked for."""
        self._loans = loans
        self._types = tuple(types)
        self._spares: dict[int, list[_Spare]] = {}  # by device, where all are small
        if all(0 < type.nbytes <= _SMALL // 2 for type in types):
            self._spares = {n: [loans.spare(type, n) for type in types] for n in ordinals}

    def take(self, ordinal: int) -> list[Array]:
        """One of each type."""
        spares = self._spares.get(ordinal)
        if spares is None:
            return self._loans.segment(ROOM, self._types).run(ordinal, [])
        return [spare.take() for spare in spares]


def _printed(type: TensorType) -> tuple[str, str, str]:
    """A type and its element type in MLIR, and zero."""
    with mlir.make_ir_context():
        element = str(mlir.dtype_to_ir_type(type.numpy))
    whole = "x".join([*map(str, type.shape), element])
    return f"tensor<{whole}>", f"tensor<{element}>", _ZEROS[type.dtype[0]]


def _room(types: Sequence[tuple[str, str, str]]) -> str:
    lines = [
        f"%z{n} = stablehlo.constant dense<{zero}> : {element}\n"
        f"%r{n} = stablehlo.broadcast_in_dim %z{n}, dims = [] : ({element}) -> {whole}"
        for n, (whole, element, zero) in enumerate(types)
    ]
    wholes = ", ".join(whole for whole, *_ in types)
    names = ", ".join(f"%r{n}" for n in range(len(types)))
    body = "\n".join([*lines, f"return {names} : {wholes}"])
    return f"module @{ROOM} {{ func.func public @main() -> ({wholes}) {{\n{body}\n}} }}"


def _arrival(types: Sequence[tuple[str, str, str]]) -> str:
    wholes = ", ".join(whole for whole, *_ in types)
    parameters = ", ".join(
        f"%r{n}: {whole} {{tf.aliasing_output = {n} : i32}}" for n, (whole, *_) in enumerate(types)
    )
    names = ", ".join(f"%r{n}" for n in range(len(types)))
    body = f"return {names} : {wholes}"
    return (
        f"module @{ARRIVAL} {{ func.func public @main({parameters}) -> ({wholes}) {{\n{body}\n}} }}"
    )
