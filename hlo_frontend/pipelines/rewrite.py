"""Rewrites the loops of pipelines into those of their interleaved schedules.

Every device keeps the carry of the written loop, and advances it by one iteration at a time, in those
iterations of the new loop that the timetable says. For this, the written body is cut at its loop over layers
(`pieces`):

- The part before it runs when a microbatch enters, on the first stage; it gives the microbatch's input.
- The part behind it, with all other code, runs when the device advances the carry. It gets the result of the
  stage if that is the last stage's result for the microbatch that leaves then. In all other cases nobody
  reads it, as `recognize` proves, and it gets zeros.
- Each iteration of the new loop runs one chunk of the loop over layers (`chunk`).

Both parts run under conditionals. In every iteration each stage sends to the next one in a ring; values that
must wait for their next round wait at stage 0. Slices for another pipeline's layers are stored by microbatch
and slice. Gradients are added to the sums of the chunk's slices.

The new loop's carry has: the needed carries of the written loop, a counter, received values, waiting values,
stored slices, sums, and the operands of the layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..builder import array_shape, resized
from ..graph import Instruction, Module
from ..passes.valid.known import keeps_order
from .chunk import Chunk, again
from .constants import Constant, Constants, constants
from .emit import Builder, Editor
from .parts import Kept, Pipeline
from .pieces import Pieces
from .refusal import Refusal, about
from .sameness import Class, Sameness
from .timetable import ENTERS, WAITED, Timetable
from .weights import Weights, permute

Cut = Callable[[Editor, Pipeline, set[int]], Pieces]


@dataclass(frozen=True)
class Rewritten:
    """The new loop of a pipeline, by the names of what is in it.

    ``takes_in``, ``runs`` and ``forward`` are conditionals in its body. ``kept``: by stack that another
    pipeline reads, the update that puts a chunk's slices away, and its position in the new loop's carry;
    ``read``: by position among the chunk's arguments, what another pipeline kept;
    ``sums``: by stack of gradients, the update of their sums. ``moved``: bytes of weights that all devices
    together send at each run of the program, ``back``: of gradients; ``taken``: arrays of weights that are
    not sent.
    """

    loop: str
    takes_in: str
    runs: str
    forward: str
    kept: dict[int, tuple[str, int]]
    read: dict[int, Kept]
    sums: dict[int, str]
    moved: int
    back: int
    taken: int


@dataclass(eq=False)
class _New:
    """A loop that has been rewritten, and the slices that it keeps for others, in the entry computation."""

    pipeline: Pipeline
    banks: dict[int, Any] = field(default_factory=dict)


def rewritten(
    module: Module,
    pipelines: Sequence[Pipeline],
    tables: Sequence[Timetable],
    chunks: int,
    num_devices: int,
) -> tuple[bytes, list[Rewritten]]:
    """The module with new loops in place of those of the pipelines, which are in the program's order.

    Raises `Refusal`, which names the loop.
    """
    editor = Editor(module)
    entry: Builder | None = None
    done: dict[str, _New] = {}
    found: list[Rewritten] = []
    wanted = wanted_by_others(editor, module, pipelines)
    placed: dict[tuple[str, tuple[int, ...]], Any] = {}
    for pipeline, table in zip(pipelines, tables, strict=True):
        with about(pipeline.loop.name):
            entry = editor.replace(pipeline.loop) if entry is None else entry
            entry.go_on_to(pipeline.loop)
            leaves = {w.leaf for p in pipelines for w in p.kept if w.loop == pipeline.loop.name}
            one = _Loop(
                entry, module, pipeline, chunks, table, num_devices, done, placed,
                wanted[pipeline.loop.name], sorted(leaves),
            )  # fmt: skip
            found.append(one.rewritten())
    return editor.finish(), found


def wanted_by_others(
    editor: Editor, module: Module, pipelines: Sequence[Pipeline], pieces: Cut = Pieces
) -> dict[str, set[int]]:
    """For each loop: positions of its carry that are read behind it, also by rewritten loops, which are cut
    by ``pieces``."""
    by_loop = {p.loop: p for p in pipelines}
    wanted: dict[str, set[int]] = {}
    for pipeline in reversed(pipelines):
        own: set[int] = set()
        for user in module.entry.instructions:
            if pipeline.loop not in user.operands:
                continue
            if user.opcode != "get-tuple-element":
                own |= set(range(len(pipeline.loop.shape.tuple_shapes)))
            elif _is_read(module, user, by_loop, wanted, editor, pieces):
                own.add(user.proto.tuple_index)
        if module.entry.root is pipeline.loop:
            own |= set(range(len(pipeline.loop.shape.tuple_shapes)))
        wanted[pipeline.loop.name] = own
    return wanted


def _is_read(
    module: Module,
    value: Instruction,
    by_loop: Mapping[Instruction, Pipeline],
    wanted: Mapping[str, set[int]],
    editor: Editor,
    cut: Cut,
) -> bool:
    """Whether a result of a loop is read, other than as the initial value of a carry that is not needed."""
    if module.entry.root is value:
        return True
    for user in module.entry.instructions:
        if value not in user.operands:
            continue
        loops = [p for loop, p in by_loop.items() if loop.operands[0] is user]
        others = [i for i in module.entry.instructions if user in i.operands]
        if len(loops) != 1 or len(others) != 1 or module.entry.root is user:
            return True
        (pipeline,) = loops
        pieces = cut(editor, pipeline, wanted[pipeline.loop.name])
        if any(o is value and n in pieces.needed for n, o in enumerate(user.operands)):
            return True
    return False


class _Loop:
    """Rewrites one loop. ``done``: the loops before it; ``placed``: weights that are in their places, by name
    of what they are in the entry and dimensions; ``wanted``: positions of its carry that are read after it;
    ``kept``: positions of the layers' carry of which other pipelines read what layers give, or what a stage
    begins with."""

    def __init__(
        self,
        entry: Builder,
        module: Module,
        pipeline: Pipeline,
        chunks: int,
        table: Timetable,
        num_devices: int,
        done: dict[str, _New],
        placed: dict[tuple[str, tuple[int, ...]], Any],
        wanted: set[int],
        kept: list[int],
    ) -> None:
        self.entry, self.editor = entry, entry.editor
        self.pipeline, self.chunks, self.table = pipeline, chunks, table
        self.num_devices = num_devices
        self.done, self.placed, self.kept = done, placed, kept
        self.loop, self.layers = pipeline.loop, pipeline.layers
        self.size = self.layers.count // chunks
        self.sameness = Sameness(module, pipeline.groups)
        self.pieces = Pieces(self.editor, pipeline, wanted)
        entry.metadata = self.loop.proto.metadata
        self.mover = Weights(entry, pipeline, chunks, self.sameness, num_devices)

    def rewritten(self) -> Rewritten:
        """Put the new loop into the entry computation."""
        entry, layers = self.entry, self.layers
        held = self._held()
        stacked = [i for i in self.kept if i in layers.stacked]
        given = [*stacked, *(i for i in self.pipeline.sums if i not in stacked)]
        shapes = {i: v.shape for i, v in held.items()}
        chunk = Chunk(self.editor, self.pipeline, self.size, shapes, given)
        init = self.loop.operands[0].operands
        whole = layers.loop.shape.tuple_shapes
        rows = self.pipeline.microbatches + 1  # of which nobody reads the last
        banks = {
            i: resized(
                whole[i], [rows, *([self.chunks] * (i in layers.passed)), *whole[i].dimensions]
            )
            for i in self.kept
        }
        sums = {i: whole[i] for i in self.pipeline.sums}
        old = {n: init[n].proto for n in self.pieces.needed}
        passed = list(chunk.passed.values())
        rooms = [resized(s, [self.table.rooms + 1, *s.dimensions]) for s in passed]
        parts = _Parts(
            list(old), len(passed), len(rooms) if self.table.rooms else 0, list(banks),
            list(sums), list(held),
        )  # fmt: skip
        start = parts.flat(
            old, entry.constant(0), [entry.zeros(s) for s in passed],
            [entry.zeros(s) for s in rooms] if self.table.rooms else [],
            {i: entry.zeros(s) for i, s in banks.items()},
            {i: entry.zeros(s) for i, s in sums.items()}, held,
        )  # fmt: skip
        carried = entry.tuple(start)
        body, names = self._body(chunk, parts, carried.shape)
        done = entry.loop(carried, body, self.table.iterations, "interleaved", parts.counter)
        new = _New(self.pipeline)
        after = parts.named(entry.elements(done))
        new.banks = after.banks
        self.done[self.loop.name] = new
        results = [after.old.get(n, i.proto) for n, i in enumerate(init)]
        for leaf, carry in self.pipeline.sums.items():
            results[carry] = self._put_back(after.sums[leaf], carry)
        entry.stand_in(results)
        first = 3 + len(passed)
        read = {n + first: w for n, i in enumerate(held) if (w := self._kept_at(i)) is not None}
        at = {i: parts.first_bank + n for n, i in enumerate(banks)}
        return Rewritten(
            done.name, names.takes_in, names.runs, names.forward,
            {i: (names.kept[i], at[i]) for i in banks}, read, names.sums,
            self.mover.moved, self.mover.back, self.mover.taken,
        )  # fmt: skip

    # What the layers take.

    def _held(self) -> dict[int, Any]:
        """The operands of the layers in the new loop's carry, with the keys of `Chunk`."""
        pipeline, before = self.pipeline, self.pipeline.again
        given = self.pieces.given
        held: dict[int, Any] = {}
        for i, found in pipeline.weights.items():
            if isinstance(found, Constant):
                held[i] = self._weights(found, given[i].shape)
            elif isinstance(found, Kept):
                held[i] = self.done[found.loop].banks[found.leaf]
        held |= {i: self._shared(c, given[i].shape) for i, c in constants(pipeline.shared)}
        if before is not None:
            given = before.layers.loop.operands[0].operands
            for i, c in constants(before.weights):
                held[again(i)] = self._weights(c, given[i].shape)
            for i, c in constants(before.shared):
                held[again(i)] = self._shared(c, given[i].shape)
            for i, kept in before.slices.items():
                held[again(i)] = self.done[kept.loop].banks[kept.leaf]
        return held

    def _kept_at(self, key: int) -> Kept | None:
        """The slices of another pipeline that the new loop has under this key."""
        before = self.pipeline.again
        if key < 0 and before is not None:
            return before.slices.get(again(key))
        found = self.pipeline.weights.get(key)
        return found if isinstance(found, Kept) else None

    def _weights(self, found: Constant, shape: Any) -> Any:
        inner, inits = computed_by(found)
        key = (source_of(found, inits).name, tuple(shape.dimensions))
        if key not in self.placed:
            self.placed[key] = self.mover.placed(found.value, inner, inits, shape)
        return self.placed[key]

    def _shared(self, found: Constant, shape: Any) -> Any:
        """A value that all layers of a stage share, in the entry computation. Raises `Refusal`."""
        inner, inits = computed_by(found)
        check_same(self.sameness, found, inner, inits)
        env = {read: init.proto for read, init in inits.items()}
        return shaped(self.entry, self.entry.clone([found.value], env)[found.value], shape)

    def _put_back(self, total: Any, carry: int) -> Any:
        """A sum of the new loop, which is by slices, in the form in which the written loop gives it."""
        moved = self.mover.put_back(total)
        return shaped(self.entry, moved, self.loop.shape.tuple_shapes[carry])

    # The new loop.

    def _body(self, chunk: Chunk, parts: _Parts, carried: Any) -> tuple[Builder, _Names]:
        table, layers = self.table, self.layers
        # Computations are made before the body that calls them: callers come last in a module.
        takes_in, goes_forward = self.pieces.takes_in(), self.pieces.goes_forward()
        b = self.editor.computation("interleaved.body")
        b.metadata = self.loop.proto.metadata
        now = parts.named(b.elements(b.parameter(carried)))
        device = b.add("partition-id", array_shape("u32"))
        stage_of = np.zeros(self.num_devices, np.int32)
        for group in self.pipeline.groups:
            stage_of[list(group)] = range(len(group))
        stage = b.lookup(stage_of, [device])

        def at(values: np.ndarray) -> Any:
            return b.lookup(np.ascontiguousarray(values, np.int32), [stage, now.counter])

        received, waiting = now.received, now.waiting
        if waiting:
            waited = b.is_one(at((table.source == WAITED).astype(np.int32)))
            place, store = at(table.place), at(table.store)
            fetched = [
                _fetched(b, w, place, r.shape) for w, r in zip(waiting, received, strict=True)
            ]
            waiting = [_stored(b, w, r, store) for w, r in zip(waiting, received, strict=True)]
            received = [b.select(waited, k, r) for k, r in zip(fetched, received, strict=True)]
        if self.pipeline.plus:
            seam = b.is_one(at(table.seams(self.chunks)))
            received = [
                b.select(seam, without_sign_of_zero(b, r), r) if i in self.pipeline.plus else r
                for i, r in zip(layers.passed, received, strict=True)
            ]
        names = _Names()
        enters = b.is_one(at((table.source == ENTERS).astype(np.int32)))
        names.takes_in, xs = takes_in(b, enters, now.old, device, received)
        starts = table.chunk * self.size
        firsts = np.vectorize(lambda start: layers.first_slice(start, self.size))(starts)
        first, working = at(firsts), b.is_one(at(table.working))
        names.runs, ys, stacks = chunk.emit(
            b, working, at(starts), first, at(self._reads()), xs, now.held
        )
        given = dict(zip(chunk.given, stacks, strict=True))
        if now.banks:
            row = at(table.microbatch(self.pipeline.microbatches))
            slot = at(firsts // self.size)
            # Values that are received without a microbatch must not be read.
            begun = {i: b.select(working, x, b.zeros(x.shape))
                     for i, x in zip(layers.passed, xs, strict=True) if i in now.banks}  # fmt: skip
            for i, bank in now.banks.items():
                if i in begun:
                    now.banks[i] = put(b, bank, begun[i], [row, slot])
                else:
                    now.banks[i] = put(b, bank, given[i], [row, first])
                names.kept[i] = now.banks[i].name
        for i, total in now.sums.items():
            zeros = [b.constant(0)] * (len(total.shape.dimensions) - 1)
            own = b.dynamic_slice(total, [first, *zeros], list(given[i].shape.dimensions))
            more = b.add("add", own.shape, [own, given[i]])
            now.sums[i] = b.update(total, more, [first, *zeros])
            names.sums[i] = now.sums[i].name
        is_read = b.is_one(at(table.reads))
        handed = [b.select(is_read, y, b.zeros(y.shape)) for y in ys]
        names.forward, old = goes_forward(b, b.is_one(at(table.commit)), now.old, device, handed)
        pairs = [
            (group[s], group[(s + 1) % len(group)])
            for group in self.pipeline.groups
            for s in range(len(group))
        ]
        sent = [permute(b, y, sorted(pairs)) for y in ys]
        following = b.add("add", array_shape("s32"), [now.counter, b.constant(1)])
        b.finish(b.tuple(parts.flat(
            old, following, sent, waiting, now.banks, now.sums, now.held
        )))  # fmt: skip
        return b, names

    def _reads(self) -> np.ndarray:
        """By stage and iteration: the row of what other pipelines kept for the microbatch."""
        orders = {w.order for w in self.pipeline.kept}
        if len(orders) > 1:
            raise Refusal("its layers read what others kept in more than one order")
        rows = self.table.microbatch(0)
        return np.array(next(iter(orders)))[rows] if orders else rows


@dataclass
class _Names:
    """Names of instructions of a new body by which it is verified."""

    takes_in: str = ""
    runs: str = ""
    forward: str = ""
    kept: dict[int, str] = field(default_factory=dict)
    sums: dict[int, str] = field(default_factory=dict)


@dataclass
class _Values:
    """The carry of a new loop, part by part."""

    old: dict[int, Any]
    counter: Any
    received: list[Any]
    waiting: list[Any]
    banks: dict[int, Any]
    sums: dict[int, Any]
    held: dict[int, Any]


@dataclass(frozen=True)
class _Parts:
    """The positions of the parts of a new loop's carry, by position in the written loop's carry, or by the
    keys of `Chunk`."""

    old: list[int]
    received: int
    waiting: int
    banks: list[int]
    sums: list[int]
    held: list[int]

    @property
    def counter(self) -> int:
        return len(self.old)

    @property
    def first_bank(self) -> int:
        return self.counter + 1 + self.received + self.waiting

    def flat(
        self, old: dict[int, Any], counter: Any, received: Sequence[Any], waiting: Sequence[Any],
        banks: dict[int, Any], sums: dict[int, Any], held: dict[int, Any],
    ) -> list[Any]:  # fmt: skip
        return [
            *(old[n] for n in self.old), counter, *received, *waiting,
            *(banks[i] for i in self.banks), *(sums[i] for i in self.sums),
            *(held[i] for i in self.held),
        ]  # fmt: skip

    def named(self, values: Sequence[Any]) -> _Values:
        left = iter(values)

        def some(count: int) -> list[Any]:
            return [next(left) for _ in range(count)]

        def by(positions: Sequence[int]) -> dict[int, Any]:
            return {i: next(left) for i in positions}

        return _Values(
            by(self.old), next(left), some(self.received), some(self.waiting), by(self.banks),
            by(self.sums), by(self.held),
        )  # fmt: skip


def computed_by(found: Constant) -> tuple[Sequence[Instruction], dict[Instruction, Instruction]]:
    """The instructions that compute a constant in its loop's body, and the initial values that they read."""
    if found.loop is None:
        return [], {found.value: found.value}
    constants = Constants(found.loop)
    return constants.computed_by(found.value), constants.inits


def check_same(
    sameness: Sameness, found: Constant, inner: Sequence[Instruction],
    inits: Mapping[Instruction, Instruction],
) -> None:  # fmt: skip
    """Raise `Refusal` if what all layers of a stage share is not known to be the same on all stages."""
    classes = {read: sameness.of(init) for read, init in inits.items()}
    for instruction in inner:
        classes[instruction] = sameness.step(instruction, classes)
    if classes[found.value] is not Class.SAME:
        raise Refusal(
            f"all layers of a device share {found.value.describe()}, which is not known to be the same on "
            "all devices. Give each layer its own, stacked as its weights are, or make it an argument that "
            "is replicated over the stages"
        )


def source_of(found: Constant, inits: Mapping[Instruction, Instruction]) -> Instruction:
    """The instruction whose value a constant is, except for its dimensions; in the entry if it is there."""
    value = found.value
    while value not in inits and _only_reshapes(value):
        value = value.operands[0]
    return inits.get(value, found.value)


def _only_reshapes(instruction: Instruction) -> bool:
    if instruction.opcode == "bitcast":
        return keeps_order(instruction)
    return instruction.opcode in ("reshape", "copy")


def shaped(b: Builder, value: Any, shape: Any) -> Any:
    if list(value.shape.dimensions) == list(shape.dimensions):
        return value
    return b.reshape(value, list(shape.dimensions))


def laid_out(b: Builder, value: Any, shape: Any) -> Any:
    """A value with these dimensions, and in memory as an array of this shape lies there: a bitcast may read
    it."""
    value = shaped(b, value, shape)
    if list(value.shape.layout.minor_to_major) == list(shape.layout.minor_to_major):
        return value
    return b.add("copy", shape, [value])


def without_sign_of_zero(b: Builder, value: Any) -> Any:
    """The value plus positive zeros, in a form that no simplification removes."""
    zeros = b.zeros(value.shape)
    shape = resized(array_shape("pred"), value.shape.dimensions)
    is_zero = b.add("compare", shape, [value, zeros], comparison_direction="EQ")
    return b.add("select", value.shape, [is_zero, zeros, value])


def put(b: Builder, array: Any, part: Any, starts: Sequence[Any]) -> Any:
    """Write ``part`` into an array that has more dimensions."""
    rank = len(array.shape.dimensions)
    ones = [1] * (rank - len(part.shape.dimensions))
    zeros = [b.constant(0)] * (rank - len(starts))
    return b.update(array, b.reshape(part, [*ones, *part.shape.dimensions]), [*starts, *zeros])


def _stored(b: Builder, room: Any, value: Any, place: Any) -> Any:
    return put(b, room, value, [place])


def _fetched(b: Builder, room: Any, place: Any, shape: Any) -> Any:
    zero = b.constant(0)
    starts = [place] + [zero] * len(shape.dimensions)
    return b.reshape(b.dynamic_slice(room, starts, [1, *shape.dimensions]), list(shape.dimensions))
