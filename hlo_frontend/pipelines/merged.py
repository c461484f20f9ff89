"""Rewrites a step of training into one loop, in which each device takes turns forwards and backwards.

The body of the new loop has two conditionals, one for a run of the stage's layers forwards and one backwards.
In each iteration a device takes at most one of them (`slots`), and sends what it gives to the next stage or
to the one before. What the layers keep for the backward run is put into a row of a *bank*, which has as many
rows as microbatches are alive at a time; it is written and read in place.

- A microbatch enters on the first stage as in the written loop: the written body's computation of it, for the
  numbers that the written loop's carry has in that iteration (`training`).
- On the last stage, the written computation of what the backward pass begins with is done for one row
(`rows`).
- Gradients are added to their sums in the backward run, in the order of the microbatches as it is written.
  Where stages have several chunks of layers, a run is of one chunk, with its slices of the sums. The ring of
  stages is closed then, weights change places before the loop, as when a loop is interleaved (`weights`), and
  what a run gives is sent in the next iteration (`Slots.delay`).
  Where a schedule has runs of weights, that is done there, in a third conditional, and the backward run
  leaves what it needs (`split`).
- What the last stages of both passes give is put away by microbatch. Behind the loop, the rest of both
  written bodies is done iteration by iteration with it (*replayed*): so outputs, losses and whatever else
  they collect are made in the written order.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from ..builder import array_shape, resized
from ..collectives import CollectiveReader
from ..graph import Instruction, Module
from .chunk import DEVICE, OTHERS, entry_of
from .constants import Constant, constants
from .emit import Builder, Editor, needed_by, slice_of
from .merged_runs import SCALAR, Runs, chosen
from .parts import Pipeline, again
from .pieces import Pieces
from .refusal import Refusal, about, depends_on_all
from .rewrite import (
    check_same,
    computed_by,
    put,
    shaped,
    source_of,
    wanted_by_others,
    without_sign_of_zero,
)
from .rows import Held, Rows
from .sameness import Class, Sameness
from .slots import NONE, Rooms, Slots
from .training import Training, dependents, summed_alone, unchanging
from .weights import Weights, permute


@dataclass(frozen=True)
class Replay:
    """A loop behind the new one, by names: itself, where it reads a row of what the last stage gave, and
    where it takes that or zeros."""

    loop: str
    rows: tuple[str, ...]
    taken: tuple[str, ...]


@dataclass(frozen=True)
class Names:
    """The new loop, by the names of what is in it, for `merged_verify`.

    ``takes_in``, ``forward``, ``turns``, ``backward`` and, if not empty, ``weights`` are conditionals in
    its body, in this order, and so is ``head`` before ``turns``, if all stages compute something of it.
    ``taken``: the positions in the written loop's carry of what ``takes_in`` is given. ``held``,
    ``held_back``: how many operands of the layers ``forward`` and ``backward`` are given, which do not
    change; ``banks``: how many banks; ``turned``: how many sums and results ``turns`` keeps; ``left``: bytes
    of what backward runs leave for runs of weights.
    ``replays``: the loops behind it, if there are any; ``apart``: whether an engine may round what they
    compute otherwise than the written ones. ``chunks``: of layers that a stage has. ``moved`` and
    ``back``: bytes of weights that all devices together send at each run of the program, and of gradients;
    ``parts``: arrays of weights of which devices take other parts, and that are not sent. ``meetings``:
    collectives of ``head``.
    """

    loop: str
    takes_in: str
    forward: str
    head: str
    turns: str
    backward: str
    weights: str
    taken: tuple[int, ...]
    held: int
    held_back: int
    banks: int
    turned: int
    left: int
    replays: tuple[Replay | None, Replay | None]
    apart: bool
    chunks: int
    moved: int
    back: int
    parts: int
    meetings: int


class _Carry:
    """The carry of a loop: lists of values by name, in one tuple."""

    def __init__(self, parts: Mapping[str, Sequence[Any]]) -> None:
        self.names = {name: len(values) for name, values in parts.items()}

    def named(self, values: Sequence[Any]) -> dict[str, list[Any]]:
        left = iter(values)
        return {name: [next(left) for _ in range(n)] for name, n in self.names.items()}

    def first(self, name: str) -> int:
        """The position of the first value with this name."""
        names = list(self.names)
        return sum(self.names[n] for n in names[: names.index(name)])


def merged(module: Module, step: Training, slots: Slots, num_devices: int) -> tuple[bytes, Names]:
    """The module with one loop in place of the step's two. Raises `Refusal`, which names one of them."""
    editor = Editor(module)

    def cut(editor: Editor, pipeline: Pipeline, wanted: Collection[int]) -> Pieces:
        sums = step.turn.sums if step.turn is not None and pipeline is step.backward else ()
        return Pieces(editor, pipeline, wanted, enters=False, sums=sums)

    wanted = wanted_by_others(editor, module, [step.forward, step.backward], cut)
    with about(step.backward.loop.name):
        names = _Merged(editor, module, step, slots, num_devices, wanted).rewritten()
    return editor.finish(), names


class _Merged:
    """Rewrites one step. ``wanted``: by loop, the positions of its carry that are read behind it."""

    def __init__(
        self, editor: Editor, module: Module, step: Training, slots: Slots, num_devices: int,
        wanted: Mapping[str, set[int]],
    ) -> None:  # fmt: skip
        self.editor, self.step, self.slots, self.num_devices = editor, step, slots, num_devices
        self.there, self.back = step.forward, step.backward
        there, back, turn = wanted[self.there.loop.name], wanted[self.back.loop.name], step.turn
        self.pieces = Pieces(editor, self.there, there, enters=False)
        # What turns leave for the loop behind, and add up.
        self.given = [] if turn is None else turn.gives(self.pieces.needed)
        self.turned = (
            {} if turn is None else {c: self.back.loop.shape.tuple_shapes[c] for c in turn.sums}
        )
        self.pieces = Pieces(editor, self.there, there, enters=False, given=self.given)
        self.pieces_back = Pieces(editor, self.back, back, enters=False, sums=self.turned)
        self.entry = editor.replace(self.there.loop)
        self.entry.metadata = self.there.loop.proto.metadata
        self.count = self.there.microbatches
        self.chunks = slots.chunks
        self.size = self.there.layers.count // slots.chunks
        if self.chunks > 1 and self.there.upwards != self.back.upwards:
            raise Refusal("the backward pass does not go through the layers the other way")
        self.sameness = Sameness(module, self.there.groups)
        # Sums over stages are known to this one, too.
        self.same = Sameness(module, self.there.groups, CollectiveReader(1, num_devices))
        self.mover = Weights(self.entry, self.there, self.chunks, self.sameness, num_devices)
        self.device = self.mover.device
        self.placed: dict[tuple[str, tuple[int, ...]], Any] = {}
        self.dependents = dependents(self.there.loop)
        self._env = self._before()
        self.stage_of = np.zeros(num_devices, np.int32)
        for group in self.there.groups:
            self.stage_of[list(group)] = range(len(group))

    # Values of the entry computation.

    def _before(self) -> dict[Instruction, Any]:
        """What is there before the forward loop: instructions of the entry that do not come from it, and its
        results that it does not change."""
        loop = self.there.loop
        after = {loop}
        for instruction in loop.computation.instructions:
            if any(o in after for o in instruction.operands):
                after.add(instruction)
        env = {i: i.proto for i in loop.computation.instructions if i not in after}
        for instruction, init in unchanging(loop).items():
            if init in env:
                env[instruction] = env[init]
        return env

    def _at_entry(self, instruction: Instruction) -> Any:
        if instruction in self.dependents:
            raise depends_on_all(instruction)
        for inner in slice_of([instruction], self._env):
            scalar = summed_alone(inner)
            if scalar is not None:
                own = self.entry.copy(inner.operands[0], [self._at_entry(scalar)])
                own.shape.CopyFrom(inner.shape)
                self._env[inner] = own
        return self.entry.clone([instruction], self._env)[instruction]

    def _at_entry_as(self, held: Held, rows: Sequence[Rows]) -> Any:
        """A value as the device itself or another stage has it."""
        value, who = held
        if not who:
            return self._at_entry(value)
        same, numbers = next(r.theirs[held] for r in rows if held in r.theirs)
        env = {i: self._at_entry(i) for i in same}
        for instruction, table in numbers.items():
            number = self.entry.lookup(
                table, [self.entry.convert(self.device, array_shape(SCALAR))]
            )
            env[instruction] = self.entry.convert(number, instruction.shape)
        return self.entry.clone([value], env)[value]

    def _constant(self, found: Constant, shape: Any) -> Any:
        """What the layers take, in the entry computation."""
        inner, inits = self._computed_by(found)
        if found.loop is None:
            return shaped(self.entry, self._at_entry(found.value), shape)
        env = {read: self._at_entry(init) for read, init in inits.items()}
        env |= {i: self.device for i in inner if i.opcode == "partition-id"}
        return shaped(self.entry, self.entry.clone([found.value], env)[found.value], shape)

    @staticmethod
    def _computed_by(
        found: Constant,
    ) -> tuple[Sequence[Instruction], dict[Instruction, Instruction]]:
        """As `computed_by`, with the initial values alone that are read."""
        inner, inits = computed_by(found)
        read = {o for i in inner for o in i.operands} | {found.value}
        return inner, {r: init for r, init in inits.items() if r in read}

    def _weights_of(self, found: Constant, shape: Any) -> Any:
        """The weights of a stage's layers, in the places that its chunks have."""
        if self.chunks == 1:
            return self._constant(found, shape)
        inner, inits = self._computed_by(found)
        same = unchanging(self.there.loop)
        inits = {read: same.get(init, init) for read, init in inits.items()}
        key = (source_of(found, inits).name, tuple(shape.dimensions))
        if key not in self.placed:
            self.placed[key] = self.mover.placed(found.value, inner, inits, shape, self._at_entry)
        return self.placed[key]

    def _shared(self, found: Constant, shape: Any) -> Any:
        """What all layers of a stage share."""
        if self.chunks > 1:
            check_same(self.same, found, *self._computed_by(found))
        return self._constant(found, shape)

    def _held(self, pipeline: Pipeline) -> dict[int, Any]:
        """Operands of a pipeline's layers that do not change, and what runs need for what they have for
        themselves, with the keys of `chunk`."""
        given = pipeline.layers.loop.operands[0].operands
        held = {i: self._weights_of(w, given[i].shape) for i, w in constants(pipeline.weights)} | {
            i: self._shared(c, given[i].shape) for i, c in constants(pipeline.shared)
        }
        if pipeline.again is not None:
            given = pipeline.again.layers.loop.operands[0].operands
            for i, c in constants(pipeline.again.weights):
                held[again(i)] = self._weights_of(c, given[i].shape)
            for i, c in constants(pipeline.again.shared):
                held[again(i)] = self._shared(c, given[i].shape)
        if pipeline.owned:
            held[DEVICE] = self.device
            for n, value in enumerate(self.before[pipeline]):
                held[OTHERS + n] = self._at_entry(value)
        return held

    # The new loop.

    def rewritten(self) -> Names:
        entry, there, back = self.entry, self.there, self.back
        if there.kept or there.again is not None:
            raise Refusal("the forward pass reads what layers of another pipeline keep")
        self._check_chunks()
        self.before = {p: self._read_by_runs(p) for p in (there, back)}
        self.held, self.held_back = self._held(there), self._held(back)
        init = there.loop.operands[0].operands
        # The others are not read when a microbatch begins, or do not change: they are the initial values.
        self.taken = [n for n in self.pieces.taken_in if n not in self.step.known]
        rows = [b.rows for b in self.step.begins.values() if b.rows is not None]
        turned = [] if self.step.turn is None else self.step.turn.held
        given = [*(v for r in rows for v in r.reads), *((v, 0) for v in turned)]
        others = {v: self._at_entry_as(v, rows) for v in dict.fromkeys(given)}
        whole, whole_back = (p.layers.loop.shape.tuple_shapes for p in (there, back))
        self.passed = {i: whole[i] for i in there.travels(self.chunks)}
        self.passed_back = {i: whole_back[i] for i in back.travels(self.chunks)}
        self.runs = Runs(
            self.editor, self.step, self.slots, self.passed, self.passed_back,
            {i: v.shape for i, v in self.held.items()},
            {i: v.shape for i, v in self.held_back.items()},
            {v: o.shape for v, o in others.items()}, self.device.shape, self.before, self.given,
            self.turned,
        )  # fmt: skip
        runs = self.runs
        waits = {
            "waits": (self.slots.waits, self.passed),
            "waits back": (self.slots.waits_back, self.passed_back),
        }
        start = {
            "counter": [entry.constant(0)],
            "received": [entry.zeros(s) for s in self.passed.values()],
            "received back": [entry.zeros(s) for s in self.passed_back.values()],
            **{
                name: [entry.zeros(s) for s in shapes.values()] if self.slots.delay > 1 else []
                for name, shapes in (("leaves", self.passed), ("leaves back", self.passed_back))
            },
            "banks": [entry.zeros(s) for s in runs.bank_shapes.values()],
            "ends": [entry.zeros(s) for s in runs.end_shapes.values()],
            "ends back": [entry.zeros(s) for s in runs.end_shapes_back.values()],
            "given": [entry.zeros(runs.by_microbatch(s)) for s in runs.given_shapes],
            "turned": [entry.zeros(s) for s in self.turned.values()],
            "sums": [entry.zeros(s) for s in runs.sum_shapes.values()],
            "left": [entry.zeros(s) for s in runs.left_shapes.values()],
            **{
                name: [
                    entry.zeros(resized(s, [rooms.count + 1, *s.dimensions]))
                    for s in shapes.values()
                ]
                if rooms
                else []
                for name, (rooms, shapes) in waits.items()
            },
            "held": list(self.held.values()),
            "held back": list(self.held_back.values()),
            "taken": [init[n].proto for n in self.taken],
            "others": list(others.values()),
        }
        self.carry = _Carry(start)
        carried = entry.tuple([v for values in start.values() for v in values])
        body, names = self._body(carried.shape)
        done = entry.loop(carried, body, self.slots.iterations, "schedule")
        after = self.carry.named(entry.elements(done))
        numbers = [self.step.order.index(m) for m in range(self.count)]
        kept = zip(runs.end_shapes, after["ends"], strict=True)
        ends = [*(self._back_in_place(i, end) for i, end in kept), *after["given"]]
        results, replay = self._replayed(self.pieces, there, ends, numbers)
        entry.stand_in(results)
        entry.go_on_to(back.loop)
        results, replay_back = self._replayed(
            self.pieces_back, back, after["ends back"], list(range(self.count))
        )
        for total, carry in zip(after["sums"], back.sums.values(), strict=True):
            placed = self.mover.put_back(total) if self.chunks > 1 else total
            results[carry] = shaped(entry, placed, back.loop.shape.tuple_shapes[carry])
        for total, carry in zip(after["turned"], self.turned, strict=True):
            results[carry] = total
        entry.stand_in(results)
        return Names(
            done.name, *names, tuple(self.pieces.taken_in), len(self.held), len(self.held_back),
            len(runs.bank_shapes), len(self.turned) + len(self.given), runs.bytes_left,
            (replay, replay_back), self.pieces.rounds or self.pieces_back.rounds,
            self.chunks, self.mover.moved, self.mover.back, self.mover.taken, runs.meetings,
        )  # fmt: skip

    def _read_by_runs(self, pipeline: Pipeline) -> list[Instruction]:
        """What is there before the loops and runs are given, for what they have for themselves. Where devices
        have chunks of layers of others, it must be the same on all stages: of that and of the number of the
        device whose layers these are they compute what it has."""
        if self.chunks == 1:
            return self.step.read_by_runs(pipeline)
        found: dict[Instruction, None] = {}
        seen: set[Instruction] = set()
        for own in pipeline.owned.values():
            stack = self.step.owned[own].reads
            while stack:
                value = stack.pop()
                if self.same.of(value) is Class.SAME:
                    found[value] = None
                elif value.opcode != "partition-id" and value not in seen:
                    seen.add(value)
                    if not self.same.is_function_of_id(value):
                        with about(pipeline.loop.name):
                            raise Refusal(f"{own.why}: {value.describe()} is of the stage's own")
                    stack += needed_by(value)
        return list(found)

    def _check_chunks(self) -> None:
        """Refuse what a device of the written loop has for itself where a device has chunks of layers of
        others, and cannot compute it for them."""
        for pipeline in (self.there, self.back) if self.chunks > 1 else ():
            with about(pipeline.loop.name):
                if pipeline.again is not None and pipeline.again.begun:
                    raise Refusal(next(iter(pipeline.again.begun.values())).why)
                for i, why in pipeline.elsewhere.items():
                    stacked = i in pipeline.layers.stacked
                    if pipeline is self.back or not (stacked or i in pipeline.begun):
                        raise Refusal(why)
                    if stacked and pipeline.layers.reverse:
                        raise Refusal(why)

    def _back_in_place(self, i: int, end: Any) -> Any:
        """What is kept of runs for others, by microbatch, on the devices that the written loop has it on."""
        if i not in self.runs.by_slot:
            return end
        entry, dimensions = self.entry, list(end.shape.dimensions)
        placed = self.mover.put_back(end, 1)
        if i in self.there.begun:
            return entry_of(entry, placed, [entry.constant(self.chunks - 1)])
        order = [1, 0, *range(2, len(dimensions))]
        shape = resized(end.shape, [dimensions[n] for n in order])
        turned = entry.add("transpose", shape, [placed], dimensions=order)
        return entry.reshape(turned, [self.count, self.there.layers.count, *dimensions[3:]])

    def _body(self, carried: Any) -> tuple[Builder, tuple[str, str, str, str, str, str]]:
        slots = self.slots
        takes_in, runs = self.pieces.takes_in(), self.runs
        forward, backward, turns = runs.forward(), runs.backward(), runs.turns()
        heads = runs.heads() if runs.together else None
        b = self.editor.computation("schedule.body")
        b.metadata = self.there.loop.proto.metadata
        now = self.carry.named(b.elements(b.parameter(carried)))
        (counter,) = now["counter"]
        device = b.add("partition-id", array_shape("u32"))
        stage = b.lookup(self.stage_of, [device])

        def at(table: np.ndarray) -> Any:
            return b.lookup(np.ascontiguousarray(table, np.int32), [stage, counter])

        virtual = slots.chunk * slots.stages + np.arange(slots.stages)[:, None]
        last = slots.stages * slots.chunks - 1
        starts = [slots.chunk * self.size, (slots.chunks - 1 - slots.chunk) * self.size]
        first, first_back = (
            at(np.vectorize(lambda n, p=p: p.layers.first_slice(n, self.size))(own))
            for p, own in zip((self.there, self.back), starts, strict=True)
        )
        there, back = slots.forward != NONE, slots.backward != NONE
        share, share_turns = slots.shares
        k, k_back = at(np.maximum(slots.forward, 0)), at(np.maximum(slots.backward, 0))

        def come(name: str, received: Sequence[Any], rooms: Rooms | None) -> list[Any]:
            """What is received, or what was and has waited."""
            if rooms is None:
                return list(received)
            store, fetch = at(rooms.stores), at(rooms.fetches)
            now[name] = [put(b, w, r, [store]) for w, r in zip(now[name], received, strict=True)]
            return [entry_of(b, w, [fetch]) for w in now[name]]

        def added(pipeline: Pipeline, come: Sequence[Any], way: np.ndarray) -> list[Any]:
            """What has come, with the zeros that the written loop adds to it. ``way``: by stage and
            iteration, how many chunks a microbatch has gone through."""
            if not pipeline.plus:
                return list(come)
            seam = way % slots.chunks == 0
            chosen = None if seam.all() else b.is_one(at(seam))
            found = []
            for i, value in zip(pipeline.travels(slots.chunks), come, strict=True):
                other = without_sign_of_zero(b, value) if i in pipeline.plus else value
                found.append(other if chosen is None else b.select(chosen, other, value))
            return found

        received = added(self.there, come("waits", now["received"], slots.waits), virtual)
        taken: dict[int, Any] = dict(zip(self.taken, now["taken"], strict=True))
        for n, known in self.step.known.items():
            number = b.lookup(known, [b.convert(device, array_shape(SCALAR)), k])
            taken[n] = b.convert(number, self.there.loop.shape.tuple_shapes[n])
        enters = b.is_one(at(there & (virtual == 0)))
        come_in = dict(zip(self.passed, received, strict=True))
        name_in, xs = takes_in(b, enters, taken, device, [come_in[i] for i in self.there.sent])
        come_in |= zip(self.there.sent, xs, strict=True)
        zero = b.constant(0)
        name, made = chosen(
            b, b.is_one(at(there)), forward,
            [at(starts[0]), first, at(slots.puts), zero, k, *come_in.values(), *now["held"]],
            [*now["banks"], *now["ends"]],
            list(self.passed.values()), share,
        )  # fmt: skip
        ys = made[: len(come_in)]
        banks = made[len(come_in) : len(come_in) + len(now["banks"])]
        ends = made[len(come_in) + len(now["banks"]) :]
        received = added(
            self.back, come("waits back", now["received back"], slots.waits_back), last - virtual
        )
        begins = b.is_one(at(back & (virtual == last)))
        come_back = dict(zip(self.passed_back, received, strict=True))
        name_head, together = "", []
        if heads is not None:
            turning = (back & (virtual == last)).any(0)
            of_turn = np.where(turning, slots.backward[-1], 0)
            meets, k_head = (b.lookup(t.astype(np.int32), [counter]) for t in (turning, of_turn))
            name_head, together = heads(
                b, b.is_one(meets), [k_head, device, *ends, *now["others"]], float(turning.mean())
            )
        name_turn, made = turns(
            b, begins, [k_back, device, *together, *ends, *now["others"]],
            [*now["given"], *now["turned"]], [come_back[i] for i in self.back.sent], share_turns,
        )  # fmt: skip
        begun = len(self.back.sent)
        come_back |= zip(self.back.sent, made, strict=False)
        dys = list(come_back.values())
        given = made[begun : begun + len(now["given"])]
        turned = made[begun + len(given) :]
        kept = now["left"] if slots.splits else now["sums"]
        name_back, made = chosen(
            b, b.is_one(at(back)), backward,
            [at(starts[1]), first_back, at(slots.takes), at(slots.leaves), k_back, *dys,
             *now["held back"], *banks],
            [*now["ends back"], *kept], list(self.passed_back.values()), share,
        )  # fmt: skip
        dxs = made[: len(dys)]
        ends_back = made[len(dys) : len(dys) + len(now["ends back"])]
        left, sums, name_weights = now["left"], made[len(dys) + len(now["ends back"]) :], ""
        if slots.splits:
            left, runs_weights = sums, slots.weights != NONE
            k_weights = at(np.maximum(slots.weights, 0))
            name_weights, sums = chosen(
                b, b.is_one(at(runs_weights)), runs.weights(),
                [zero, zero, at(slots.finishes), at(slots.resumes), k_weights, *now["held back"],
                 *banks, *left], now["sums"], [], share,
            )  # fmt: skip
        pairs = [pair for g in self.there.groups for pair in pairwise(g)]
        if slots.chunks > 1:
            pairs += [(g[-1], g[0]) for g in self.there.groups]
        pairs.sort()
        leaves, leaves_back = ys, dxs
        if slots.delay > 1:
            leaves, leaves_back = now["leaves"], now["leaves back"]
            now |= {"leaves": ys, "leaves back": dxs}
        sent = [permute(b, y, pairs) for y in leaves]
        sent_back = [permute(b, dx, sorted((t, s) for s, t in pairs)) for dx in leaves_back]
        following = {
            **now, "counter": [b.add("add", array_shape(SCALAR), [counter, b.constant(1)])],
            "received": sent, "received back": sent_back, "banks": banks, "ends": ends,
            "given": given, "turned": turned, "ends back": ends_back, "sums": sums, "left": left,
        }  # fmt: skip
        b.finish(b.tuple([v for name in self.carry.names for v in following[name]]))
        return b, (name_in, name, name_head, name_turn, name_back, name_weights)

    # Behind the loop.

    def _replayed(
        self, pieces: Pieces, pipeline: Pipeline, ends: Sequence[Any], numbers: Sequence[int]
    ) -> tuple[list[Any], Replay | None]:
        """All results of a written loop but its sums; what nobody reads is its initial value.

        ``ends``: what the last stage gave, by microbatch of the new loop; ``numbers``: for each microbatch of
        the written loop, that number.
        """
        entry = self.entry
        init = [i.proto for i in pipeline.loop.operands[0].operands]
        changing = [n for n in pieces.needed if n not in pieces.unchanged]
        if not changing:
            return init, None
        forward = pieces.always_forward()
        last = [g[-1] for g in pipeline.groups]
        place = np.zeros((self.num_devices, pipeline.trips), np.int32)
        reads = np.zeros((self.num_devices, pipeline.trips), np.int32)
        for run, (m, _) in pipeline.places.items():
            if pipeline.elsewhere or run.device in last:
                place[run.device, run.iteration] = numbers[m]
                reads[run.device, run.iteration] = 1
        start = {
            "counter": [entry.constant(0)],
            "device": [self.device],
            "ends": list(ends),
            "old": [init[n] for n in pieces.needed],
        }
        carry = _Carry(start)
        carried = entry.tuple([v for values in start.values() for v in values])
        b = self.editor.computation("schedule.replay")
        b.metadata = pipeline.loop.proto.metadata
        now = carry.named(b.elements(b.parameter(carried.shape)))
        (counter,), (device,) = now["counter"], now["device"]
        where = [b.convert(device, array_shape(SCALAR)), counter]
        row, is_read = b.lookup(place, where), b.is_one(b.lookup(reads, where))
        given = [entry_of(b, end, [row]) for end in now["ends"]]
        ys = [b.select(is_read, y, b.zeros(y.shape)) for y in given]
        old = dict(zip(pieces.needed, now["old"], strict=True))
        old = forward(b, old, device, ys)
        following = b.add("add", array_shape(SCALAR), [counter, b.constant(1)])
        b.finish(b.tuple([following, device, *now["ends"], *(old[n] for n in pieces.needed)]))
        done = entry.loop(carried, b, pipeline.trips, "schedule")
        found = dict(zip(pieces.needed, carry.named(entry.elements(done))["old"], strict=True))
        names = Replay(done.name, tuple(y.name for y in given), tuple(y.name for y in ys))
        return [found.get(n, i) for n, i in enumerate(init)], names
