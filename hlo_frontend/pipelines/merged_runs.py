"""The computations of one run in the loop of a step, which `merged` makes: forwards, backwards, of weights,
and the turn of a microbatch on the last stage.

Each is a computation of numbers (the first layer and slice, rows, the microbatch), then what a run reads,
then what it adds to and hands on. A run that a device does not make is a branch beside it (`chosen`), which
hands that on as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..builder import array_shape, resized, tuple_shape
from ..graph import COLLECTIVES, Instruction, leaf_types
from .chunk import DEVICE, OTHERS, LayerRun, entry_of, is_operand, stacks_of, start_of
from .emit import Builder, Editor, slice_of
from .parts import Kept, Own, Pipeline, Recomputed, again
from .pieces import instructions_of
from .refusal import Refusal
from .rewrite import put, shaped, without_sign_of_zero
from .rows import Held
from .slots import Slots
from .split import split
from .training import Training

SCALAR = "s32"


class Runs:
    """The computations of a step's runs, and the shapes of what they keep.

    ``passed`` and ``passed_back``: by position in the carry of the layers, the shapes of what goes from stage
    to stage. ``held`` and ``held_back``: those of the layers' operands that do not change, and of what runs
    need for what they have for themselves, with the keys of `chunk`; ``others``: those of what turns read
    from before the loops; ``device``: that of the device's id.
    ``before``: what runs of a pipeline are given besides, that is there before the loops.
    ``given`` and ``turned``: what turns leave for the loop behind, and the shapes of what they add up.
    ``end_shapes`` and ``end_shapes_back``: of what is kept of runs for others, by microbatch, and by slot of
    a device's chunks before that for positions in ``by_slot``.
    ``bank_shapes``, ``given_shapes``, ``sum_shapes``, ``left_shapes``: of the banks, of ``given`` for a
    microbatch, of the sums of gradients, and of what backward runs leave for those of weights.
    ``meetings``: of how many collectives ``heads`` consists.
    """

    def __init__(
        self, editor: Editor, step: Training, slots: Slots, passed: Mapping[int, Any],
        passed_back: Mapping[int, Any], held: Mapping[int, Any], held_back: Mapping[int, Any],
        others: Mapping[Held, Any], device: Any, before: Mapping[Pipeline, Sequence[Instruction]],
        given: Sequence[Any],
        turned: Mapping[int, Any],
    ) -> None:  # fmt: skip
        self.editor, self.step, self.slots = editor, step, slots
        self.there, self.back = step.forward, step.backward
        self.passed, self.passed_back = dict(passed), dict(passed_back)
        self.held, self.held_back = dict(held), dict(held_back)
        self.others, self.device, self.before = others, device, before
        self.given, self.turned = given, turned
        self.chunks, self.size = slots.chunks, self.there.layers.count // slots.chunks
        kept = sorted({w.leaf for w in self.back.kept})
        self.stacks = [i for i in kept if i in self.there.layers.stacked]
        self.begun = [i for i in kept if i in self.there.layers.passed]
        self.cut = {i: w.leaf for i, w in self.back.weights.items() if isinstance(w, Recomputed)}
        self.left: dict[int, Instruction] = {}
        if slots.splits:
            self.left = split(self.back.layers, list(self.back.sums), list(self.cut)).left
        whole, whole_back = (p.layers.loop.shape.tuple_shapes for p in (self.there, self.back))
        self.by_slot = {i for i in self.there.elsewhere if self.chunks > 1}
        self.end_shapes = {i: self.by_microbatch(whole[i]) for i in self.there.results}
        for i in self.by_slot:
            own = list(whole[i].dimensions)
            own = [self.size, *own[1:]] if i in self.there.layers.stacked else own
            self.end_shapes[i] = resized(whole[i], [self.chunks, self.there.microbatches, *own])
        self._places()
        self.meetings = 0
        self.end_shapes_back = {i: self.by_microbatch(whole_back[i]) for i in self.back.results}
        count = slots.rows
        self.bank_shapes = {
            i: resized(whole[i], [count, self.size, *whole[i].dimensions[1:]]) for i in self.stacks
        } | {i: resized(whole[i], [count, 1, *whole[i].dimensions]) for i in self.begun}
        self.given_shapes = [instructions_of(v)[0].shape for v in given]
        self.sum_shapes = {i: whole_back[i] for i in self.back.sums}
        rows_left = [slots.left, self.back.layers.count]
        self.left_shapes = {
            key: resized(v.shape, [*rows_left, *v.shape.dimensions]) for key, v in self.left.items()
        }

    @property
    def bytes_left(self) -> int:
        types = [t for s in self.left_shapes.values() for t in leaf_types(s, self.back.loop)]
        return sum(t.nbytes for t in types if t is not None)

    def by_microbatch(self, shape: Any) -> Any:
        return resized(shape, [self.there.microbatches, *shape.dimensions])

    def forward(self) -> Builder:
        """A run forwards: gives the layers' values, the banks and what the last stages give."""
        layers, scalar = self.there.layers, array_shape(SCALAR)
        held, own = self.held, self._own_shapes(self.there)
        others = [i for i in self.end_shapes if i in layers.stacked and i not in self.stacks]
        stacks = {i: self.bank_shapes[i] for i in self.stacks} | stacks_of(
            layers, others, self.size
        )
        own |= self.passed | {i: s for i, s in held.items() if is_operand(i)}
        cut = self._cut(self.there.weights)
        run = LayerRun(self.editor, layers, self.size, own, stacks, (), cut, self.stacks)
        ends = list(self.end_shapes.values())
        b = self.editor.computation("schedule.forward")
        shapes = [scalar] * 5 + [*self.passed.values(), *held.values()]
        values = b.elements(b.parameter(tuple_shape([*shapes, *self.bank_shapes.values(), *ends])))
        start, first, row, _, k, *rest = values
        keys = [*self.passed, *held]
        parts: dict[int, Any] = dict(zip(keys, rest, strict=False))
        banks = dict(zip(self.bank_shapes, rest[len(keys) :], strict=False))
        ends = rest[len(keys) + len(banks) :]
        parts |= self._own(b, self.there, k, parts, start)
        zero = b.constant(0)
        for i in self.begun:
            banks[i] = put(b, banks[i], parts[i], [row, zero])
        operands = {i: p for i, p in parts.items() if is_operand(i)}
        done = run.emit(b, operands | {i: banks[i] for i in self.stacks}, start, first, row)
        banks |= {i: done[i] for i in self.stacks}
        ys = [done[i] for i in self.passed]
        own_rows = {i: entry_of(b, banks[i], [row]) for i in self.end_shapes if i in self.stacks}
        slot = b.add("divide", scalar, [start, b.constant(self.size)])
        ends = [
            put(b, e, own_rows.get(i, done[i]), [slot, k] if i in self.by_slot else [k])
            for i, e in zip(self.end_shapes, ends, strict=True)
        ]
        b.finish(b.tuple([*ys, *banks.values(), *ends]))
        return b

    def _own_shapes(self, pipeline: Pipeline) -> dict[int, Any]:
        """The shapes of the layers' operands that runs have for themselves."""
        found = {i: self.step.owned[own].shape for i, own in pipeline.owned.items() if i >= 0}
        return found | stacks_of(pipeline.layers, self._cut(pipeline.weights), self.size)

    def _cut(self, weights: Mapping[int, Any]) -> list[int]:
        """Positions of weights that a run has for itself, of which it has those of a chunk alone."""
        return [i for i, own in weights.items() if self.chunks > 1 and isinstance(own, Own)]

    def _places(self) -> None:
        """By device and slot of its chunks: the device that has these layers in the written loop, and which
        of its chunks they are there."""
        groups = self.there.groups
        shape = max(d for g in groups for d in g) + 1, self.chunks
        self.owner, self.chunk = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        for group in groups:
            for stage, device in enumerate(group):
                for slot in range(self.chunks):
                    owner, chunk = divmod(slot * len(group) + stage, self.chunks)
                    self.owner[device, slot], self.chunk[device, slot] = group[owner], chunk

    def _own(
        self, b: Builder, pipeline: Pipeline, k: Any, parts: Mapping[int, Any], start: Any
    ) -> dict[int, Any]:
        """What a run of microbatch ``k`` has for itself, from iteration ``start`` of the loop over layers on,
        with the keys of `chunk`. ``parts``: what it is given."""
        owned = pipeline.owned
        if not owned:
            return {}
        reads = self.before[pipeline]
        held = {v: parts[OTHERS + n] for n, v in enumerate(reads)}
        device = parts[DEVICE]
        if self.chunks == 1:
            return {i: self.step.owned[own].emit(b, k, device, held) for i, own in owned.items()}
        slot = b.add("divide", start.shape, [start, b.constant(self.size)])
        chunks = np.arange(self.chunks)
        if pipeline is self.back:
            slot = b.add("subtract", slot.shape, [b.constant(self.chunks - 1), slot])
            chunks = chunks[::-1]
        at = [b.convert(device, array_shape(SCALAR)), slot]
        owner = b.convert(b.lookup(self.owner, at), device.shape)
        chunk = b.lookup(self.chunk, at)
        first = [pipeline.layers.first_slice(int(c) * self.size, self.size) for c in chunks]
        begins = b.is_one(b.lookup((chunks == 0).astype(np.int32), [chunk]))
        weights = set(self._cut(pipeline.weights))
        if pipeline.again is not None:
            weights |= {again(i) for i in self._cut(pipeline.again.weights)}
        wanted = self.step.read_by_runs(pipeline)
        held |= {i: owner for i in slice_of(wanted, held) if i.opcode == "partition-id"}
        b.clone(wanted, held)
        found = {}
        for key, own in owned.items():
            value = self.step.owned[own].emit(b, k, owner, held)
            if key in pipeline.begun:
                value = b.select(begins, value, parts[key])
            elif key in weights:
                dimensions = list(value.shape.dimensions)
                starts = [b.lookup(np.array(first, np.int32), [chunk])]
                starts += [b.constant(0)] * (len(dimensions) - 1)
                value = b.dynamic_slice(value, starts, [self.size, *dimensions[1:]])
            found[key] = value
        return found

    def backward(self) -> Builder:
        """A run backwards: gives the layers' values, what the last stages give, and the sums, or what is left
        for runs of weights."""
        layers, before, scalar = self.back.layers, self.back.again, array_shape(SCALAR)
        size, kept, cut = self.size, self._kept_by_position(), self.cut
        held = self.held_back
        own = {i: s for i, s in held.items() if is_operand(i)} | self._own_shapes(self.back)
        own |= {i: self.bank_shapes[leaf] for i, leaf in kept.items()}
        first_run = None
        if before is not None:
            whole = before.layers.loop.shape.tuple_shapes
            given = {i: whole[i] for i in [*before.weights, *before.shared]}
            given |= {i: whole[i] for i in [*before.inputs, *before.begun]}
            given |= stacks_of(before.layers, self._cut(before.weights), size)
            given |= {i: self.bank_shapes[w.leaf] for i, w in before.kept.items()}
            leaves = sorted(set(cut.values()))
            first_run = LayerRun(
                self.editor,
                before.layers,
                size,
                given,
                stacks_of(before.layers, leaves, size),
                list(before.kept),
                self._cut(before.weights),
            )
            own |= {i: first_run.stacks[leaf] for i, leaf in cut.items()}
        gives = self.left_shapes if self.slots.splits else self.sum_shapes
        stacks = gives if self.slots.splits else stacks_of(layers, list(self.back.sums), size)
        run = LayerRun(
            self.editor, layers, size, self.passed_back | own, stacks, list(kept),
            [*cut, *self._cut(self.back.weights)], (), self.left,
        )  # fmt: skip
        b = self.editor.computation("schedule.backward")
        ends = list(self.end_shapes_back.values())
        shapes = [scalar] * 5 + [*self.passed_back.values(), *held.values()]
        shapes += [*self.bank_shapes.values(), *ends, *gives.values()]
        start, first, row, to, k, *rest = b.elements(b.parameter(tuple_shape(shapes)))
        left = iter(rest)
        parts = {i: next(left) for i in [*self.passed_back, *held]}
        banks = {i: next(left) for i in self.bank_shapes}
        ends = [next(left) for _ in ends]
        sums = {i: next(left) for i in gives}
        parts |= self._own(b, self.back, k, parts, start)
        parts |= {i: banks[leaf] for i, leaf in kept.items()}
        if self.slots.splits:
            parts |= sums
        if before is not None and first_run is not None:
            begin = {i: entry_of(b, banks[w.leaf], [row, b.constant(0)])
                     for i, w in before.inputs.items()}  # fmt: skip
            begin |= {i: banks[w.leaf] for i, w in before.kept.items()}
            keys = [*before.weights, *before.shared, *before.begun]
            begin |= {i: parts[again(i)] for i in keys if i not in begin}
            made = first_run.emit(b, begin, start_of(b, before.layers, first, size), first, row)
            parts |= {i: made[leaf] for i, leaf in cut.items()}
        operands = {i: p for i, p in parts.items() if is_operand(i)}
        done = run.emit(b, operands, start, first, row, to)
        dxs = [done[i] for i in self.passed_back]
        ends = [put(b, e, done[i], [k]) for i, e in zip(self.end_shapes_back, ends, strict=True)]
        if self.slots.splits:
            sums = {i: done[i] for i in gives}
        else:
            sums = {i: self._more(b, s, done[i], first) for i, s in sums.items()}
        b.finish(b.tuple([*dxs, *ends, *sums.values()]))
        return b

    def _more(self, b: Builder, total: Any, given: Any, first: Any) -> Any:
        """A sum of gradients with those that a chunk gives, the first of which is slice ``first``."""
        if self.chunks == 1:
            return b.add("add", total.shape, [total, given])
        starts = [first, *[b.constant(0)] * (len(total.shape.dimensions) - 1)]
        own = b.dynamic_slice(total, starts, list(given.shape.dimensions))
        return b.update(total, b.add("add", own.shape, [own, given]), starts)

    def _kept_by_position(self) -> dict[int, int]:
        """For each operand of the layers backwards that layers forwards keep, its stack there."""
        return {i: w.leaf for i, w in self.back.weights.items() if isinstance(w, Kept)}

    def weights(self) -> Builder:
        """A run of weights: gives the sums."""
        layers, scalar = self.back.layers, array_shape(SCALAR)
        kept = self._kept_by_position()
        held = self.held_back
        own = {i: s for i, s in held.items() if is_operand(i)} | self._own_shapes(self.back)
        own = {i: s for i, s in own.items() if i not in layers.passed}
        own |= {i: self.bank_shapes[leaf] for i, leaf in kept.items()} | self.left_shapes
        stacks = stacks_of(layers, list(self.back.sums), layers.count)
        run = LayerRun(
            self.editor, layers, layers.count, own, stacks, list(kept), (), given=self.left
        )
        b = self.editor.computation("schedule.weights")
        shapes = [scalar] * 5 + [*held.values(), *self.bank_shapes.values()]
        shapes += [*self.left_shapes.values(), *self.sum_shapes.values()]
        start, first, row, to, k, *rest = b.elements(b.parameter(tuple_shape(shapes)))
        left = iter(rest)
        parts = {i: next(left) for i in held}
        banks = {i: next(left) for i in self.bank_shapes}
        parts |= {i: next(left) for i in self.left_shapes}
        sums = {i: next(left) for i in self.sum_shapes}
        parts |= self._own(b, self.back, k, parts, start)
        parts |= {i: banks[leaf] for i, leaf in kept.items()}
        done = run.emit(b, {i: parts[i] for i in own}, start, first, row, to)
        b.finish(b.tuple([b.add("add", s.shape, [s, done[i]]) for i, s in sums.items()]))
        return b

    @property
    def together(self) -> list[int]:
        """Positions of what the backward pass begins with that all stages compute together."""
        begins = self.step.begins.items()
        return [i for i, begin in begins if begin.rows is not None and begin.rows.together]

    def heads(self) -> Any:
        """A function that emits what ``together`` has, for one microbatch, which is computed on all devices
        in the same iterations, of what the last stages gave."""
        shapes = [self.passed_back[i] for i in self.together]
        scalar, b = array_shape(SCALAR), self.editor.computation("schedule.together")
        ends, others = list(self.end_shapes.values()), list(self.others.values())
        k, device, *rest = b.elements(
            b.parameter(tuple_shape([scalar, self.device, *ends, *others]))
        )
        ys = self._ends_of(b, k, rest)
        held = dict(zip(self.others, rest[len(ends) :], strict=True))
        b.finish(b.tuple([self._begun(b, i, k, device, ys, held) for i in self.together]))
        self.meetings = sum(i.opcode in COLLECTIVES for i in b.proto.instructions)
        other = self.editor.computation("schedule.no_head")
        other.parameter(tuple_shape([]))
        other.finish(other.tuple([other.zeros(s) for s in shapes]))

        def emit(
            caller: Builder, begins: Any, arguments: Sequence[Any], share: float
        ) -> tuple[str, list[Any]]:
            given = [caller.tuple(arguments), caller.tuple([])]
            made = caller.conditional(begins, [b, other], given, tuple_shape(shapes), share)
            return made.name, caller.elements(made)

        return emit

    def _ends_of(self, b: Builder, k: Any, ends: Sequence[Any]) -> dict[int, Any]:
        """What the last stage gave for microbatch ``k``."""
        return {
            i: entry_of(b, end, [k]) for i, end in zip(self.end_shapes, ends, strict=False)
            if i in self.there.layers.passed
        }  # fmt: skip

    def turns(self) -> Any:
        """A function that emits the input of a stage backwards: on the last one, what the backward pass
        begins with, for the microbatch whose forward run has ended; the received values on others. What turns
        leave for the loop behind, and their sums, go with it. It is given what ``heads`` gave."""
        sent = self.back.sent
        passed = [self.passed_back[i] for i in sent]
        scalar, b = array_shape(SCALAR), self.editor.computation("schedule.turns")
        ends = list(self.end_shapes.values())
        others = list(self.others.values())
        kept = [*map(self.by_microbatch, self.given_shapes), *self.turned.values()]
        together = [self.passed_back[i] for i in self.together]
        shapes = [scalar, self.device, *together, *ends, *others, *kept]
        k, device, *rest = b.elements(b.parameter(tuple_shape(shapes)))
        found = dict(zip(self.together, rest, strict=False))
        rest = rest[len(found) :]
        ys = self._ends_of(b, k, rest)
        held = dict(zip(self.others, rest[len(ends) :], strict=False))
        found |= {
            i: self._begun(b, i, k, device, ys, held) for i in self.step.begins if i not in found
        }
        old = rest[len(ends) + len(others) :]
        stacks, sums = old[: len(self.given)], old[len(self.given) :]
        if self.step.turn is not None:
            own = {v: held[v, 0] for v in self.step.turn.held}
            begun, added, given = self.step.turn.emit(b, k, device, ys, own, self.given)
            found |= {i: shaped(b, v, self.passed_back[i]) for i, v in begun.items()}
            stacks = [put(b, s, v, [k]) for s, v in zip(stacks, given, strict=True)]
            sums = [b.add("add", s.shape, [s, added[c]])
                    for c, s in zip(self.turned, sums, strict=True)]  # fmt: skip
        b.finish(b.tuple([*(found[i] for i in sent), *stacks, *sums]))
        other = self.editor.computation("schedule.goes_on")
        other.finish(other.tuple(other.elements(other.parameter(tuple_shape([*passed, *kept])))))

        def emit(
            caller: Builder, begins: Any, arguments: Sequence[Any], kept: Sequence[Any],
            received: Sequence[Any], share: float,
        ) -> tuple[str, list[Any]]:  # fmt: skip
            given = [caller.tuple([*arguments, *kept]), caller.tuple([*received, *kept])]
            shape = tuple_shape([*passed, *(v.shape for v in kept)])
            chosen = caller.conditional(begins, [b, other], given, shape, share)
            return chosen.name, caller.elements(chosen)

        return emit

    def _begun(
        self, b: Builder, i: int, k: Any, device: Any, ys: Mapping[int, Any],
        held: Mapping[Held, Any],
    ) -> Any:  # fmt: skip
        """What microbatch ``k`` begins with in the backward pass, at position ``i`` of its layers' carry,
        where that is computed between the loops."""
        begin, shape = self.step.begins[i], self.passed_back[i]
        if begin.rows is None:
            return b.zeros(shape)
        leaves = {}
        for (leaf, _), (value, plus) in begin.given.items():
            if leaf in leaves:
                raise Refusal("the head reads more than one row of what the last stage gave")
            row = self.there.loop.shape.tuple_shapes[leaf]
            y = shaped(b, ys[value], resized(row, [1, *row.dimensions[1:]]))
            leaves[leaf] = without_sign_of_zero(b, y) if plus else y
        slot = b.lookup(np.array(begin.slots, np.int32), [k])
        block = shaped(b, begin.rows.emit(b, slot, device, held, leaves), shape)
        return without_sign_of_zero(b, block) if begin.plus else block


def chosen(
    b: Builder, working: Any, runs: Builder, arguments: Sequence[Any], kept: Sequence[Any],
    gives: Sequence[Any], share: float,
) -> tuple[str, list[Any]]:  # fmt: skip
    """Run a computation of ``arguments`` and ``kept``, which gives values of the shapes ``gives``, and
    ``kept`` anew; if not ``working``, zeros, and ``kept`` as it is. ``share``: how often it is."""
    rests = b.editor.computation("schedule.rests")
    same = rests.elements(rests.parameter(tuple_shape([v.shape for v in kept])))
    rests.finish(rests.tuple([*(rests.zeros(s) for s in gives), *same]))
    shape = tuple_shape([*gives, *(v.shape for v in kept)])
    given = [b.tuple([*arguments, *kept]), b.tuple(kept)]
    made = b.conditional(working, [runs, rests], given, shape, share)
    return made.name, b.elements(made)
