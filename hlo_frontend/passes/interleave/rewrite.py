"""A pipeline's loop, rewritten: the loop of its interleaved schedule.

Every device keeps the carry of the written loop, and takes it forward one iteration at a time, though not in
every iteration of the new loop, as the timetable says. For that the written body is cut at its loop over
layers:

- what comes before it is run where a microbatch is taken in, on the first stage: its input;
- what comes after it, and all else, is run where the device goes forward. What the stage gives is handed to
  it where that is what the last stage gave for the microbatch then; everywhere else nobody reads it (proved
  in `pipeline`), and it gets zeros;
- of the loop over layers each iteration of the new loop runs one chunk.

Both run under a conditional. What is sent goes once round the ring of stages in every iteration; what must
wait for its next round waits at stage 0. The new loop's carry is: the carry of the written loop, a counter,
what was received, what waits, the weights.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...graph import Instruction, Module
from .emit import Builder, Editor, array_shape, slice_of, tuple_shape
from .pipeline import Pipeline
from .refusal import Refusal
from .sameness import Class, Sameness
from .timetable import ENTERS, WAITED, Timetable
from .weights import Weights, permute


@dataclass(frozen=True)
class Rewritten:
    """A module with a new loop.

    ``loop`` is the name of it, ``takes_in``, ``runs`` and ``forward`` those of the conditionals in its body.
    ``moved``: bytes of weights that all devices together send at each run of the program; ``taken``: arrays
    of weights that are not sent.
    """

    module: bytes
    loop: str
    takes_in: str
    runs: str
    forward: str
    moved: int
    taken: int


class Rewriter:
    """Rewrites one loop of a module."""

    def __init__(
        self, module: Module, pipeline: Pipeline, chunks: int, table: Timetable, num_devices: int
    ) -> None:
        self.module = module
        self.pipeline = pipeline
        self.chunks = chunks
        self.table = table
        self.num_devices = num_devices
        self.loop = pipeline.loop
        self.body = self.loop.called[0]
        self.layers = pipeline.layers
        self.stage = self.layers.loop
        self.given = self.stage.operands[0].operands  # what the loop over layers begins with
        parameter = self.body.parameters[0]
        # By read of the carry: its position.
        self.reads: dict[Instruction, int] = {
            i: i.proto.tuple_index for i in self.body.instructions if parameter in i.operands
        }
        results = [_behind(o) for o in self.body.root.operands]
        self.kept = {
            n for n, r in enumerate(results)
            if self.reads.get(r) == n or r.opcode == "collective-permute"
        }  # fmt: skip
        self.permutes = [i for i in self.body.instructions if i.opcode == "collective-permute"]
        self.ids = [i for i in self.body.instructions if i.opcode == "partition-id"]
        self.editor = Editor(module)
        self.made: dict[str, str] = {}  # names of conditionals

    def rewritten(self) -> Rewritten:
        """The module with the new loop. Raises `Refusal`."""
        init = self.loop.operands[0].operands
        unchanged = {
            read for read, n in self.reads.items()
            if self.reads.get(_behind(self.body.root.operands[n])) == n
        }  # fmt: skip
        inits = {read: init[n] for read, n in self.reads.items() if read in unchanged}
        sameness = Sameness(self.module, self.pipeline.groups)
        for position in self.layers.shared:
            self._check_shared(self.given[position], inits, sameness)
        entry = self.editor.replace(self.loop)
        entry.metadata = self.loop.proto.metadata
        weights = Weights(entry, self.pipeline, self.chunks, sameness, self.num_devices)
        placed = [
            weights.placed(self.given[i], self._constant(self.given[i], inits), inits)
            for i in self.layers.weights
        ]
        new = self._body(len(init), [w.shape for w in placed])
        passed = [self.given[i].shape for i in self.layers.passed]
        start = [
            *(i.proto for i in init),
            entry.constant(0),
            *(entry.zeros(s) for s in passed),
            *(entry.zeros(s) for s in self._room_shapes()),
            *placed,
        ]
        carried = entry.tuple(start)
        condition = self._condition(carried.shape, len(init))
        config = {"known_trip_count": {"n": str(self.table.iterations)}}
        done = entry.add(
            "while", carried.shape, [carried],
            called_computation_ids=[new.id, condition.id],
            backend_config=json.dumps(config).encode(),
        )  # fmt: skip
        entry.stand_in([entry.element(done, i) for i in range(len(init))])
        return Rewritten(
            self.editor.finish(), done.name, **self.made, moved=weights.moved, taken=weights.taken
        )

    # What may be read in other places than where it stands.

    def _constant(
        self, wanted: Instruction, inits: dict[Instruction, Instruction]
    ) -> Sequence[Instruction]:
        """What a value of the body is computed by, which must be the same in every iteration."""
        inner = slice_of([wanted], set(inits))
        for instruction in inner:
            if (
                instruction in self.reads
                or instruction in self.permutes
                or instruction is self.stage
            ):
                raise Refusal(
                    f"{wanted.describe()}, which its layers take, changes from iteration to iteration"
                )
        return inner

    def _check_shared(
        self, wanted: Instruction, inits: dict[Instruction, Instruction], sameness: Sameness
    ) -> None:
        classes = {read: sameness.of(init) for read, init in inits.items()}
        for instruction in self._constant(wanted, inits):
            classes[instruction] = sameness.step(instruction, classes)
        if classes[wanted] is not Class.SAME:
            raise Refusal(
                f"all layers of a device share {wanted.describe()}, which is not known to be the same on "
                "all devices. Give each layer its own, stacked as its weights are, or make it an argument "
                "that is replicated over the stages"
            )

    # The new loop.

    def _room_shapes(self) -> list[Any]:
        if not self.table.rooms:
            return []
        shapes = [self.given[i].shape for i in self.layers.passed]
        return [_stacked(s, self.table.rooms + 1) for s in shapes]

    def _condition(self, carry: Any, counter: int) -> Builder:
        b = self.editor.computation("interleaved.condition")
        i = b.element(b.parameter(carry), counter)
        trips = b.constant(self.table.iterations)
        b.finish(b.add("compare", array_shape("pred"), [i, trips], comparison_direction="LT"))
        return b

    def _body(self, carries: int, weights: Sequence[Any]) -> Builder:
        passed = [self.given[i].shape for i in self.layers.passed]
        old = list(self.loop.shape.tuple_shapes)
        shapes = [*old, array_shape("s32"), *passed, *self._room_shapes(), *weights]
        # Computations are made before the body that calls them: callers come last in a module.
        takes_in = self._before(passed)
        layers = self._layers(passed, weights)
        forward = self._after(passed)
        b = self.editor.computation("interleaved.body")
        b.metadata = self.loop.proto.metadata
        parts = b.elements(b.parameter(tuple_shape(shapes)))
        carry, counter, rest = parts[:carries], parts[carries], parts[carries + 1 :]
        received, rest = rest[: len(passed)], rest[len(passed) :]
        waiting, held = rest[: len(rest) - len(weights)], rest[len(rest) - len(weights) :]
        device = b.add("partition-id", array_shape("u32"))
        stage_of = np.zeros(self.num_devices, np.int32)
        for group in self.pipeline.groups:
            stage_of[list(group)] = range(len(group))
        stage = b.lookup(stage_of, [device])

        def now(table: np.ndarray) -> Any:
            return b.lookup(np.ascontiguousarray(table, np.int32), [stage, counter])

        if waiting:
            waited = b.is_one(now((self.table.source == WAITED).astype(np.int32)))
            place, store = now(self.table.place), now(self.table.store)
            kept = [
                self._fetched(b, w, place, r.shape) for w, r in zip(waiting, received, strict=True)
            ]
            waiting = [self._stored(b, w, r, store) for w, r in zip(waiting, received, strict=True)]
            received = [b.select(waited, k, r) for k, r in zip(kept, received, strict=True)]
        enters = b.is_one(now((self.table.source == ENTERS).astype(np.int32)))
        xs = takes_in(b, enters, carry, device, received)
        ys = layers(b, b.is_one(now(self.table.working)), now(self.table.chunk), xs, held, carry)
        is_read = b.is_one(now(self.table.reads))
        handed = [b.select(is_read, y, b.zeros(y.shape)) for y in ys]
        carry = forward(b, b.is_one(now(self.table.commit)), carry, device, handed)
        pairs = [
            (group[s], group[(s + 1) % len(group)])
            for group in self.pipeline.groups
            for s in range(len(group))
        ]
        sent = [permute(b, y, sorted(pairs)) for y in ys]
        following = b.add("add", array_shape("s32"), [counter, b.constant(1)])
        b.finish(b.tuple([*carry, following, *sent, *waiting, *held]))
        return b

    def _stored(self, b: Builder, room: Any, value: Any, place: Any) -> Any:
        zero = b.constant(0)
        row = b.reshape(value, [1, *value.shape.dimensions])
        return b.update(room, row, [place] + [zero] * len(value.shape.dimensions))

    def _fetched(self, b: Builder, room: Any, place: Any, shape: Any) -> Any:
        zero = b.constant(0)
        starts = [place] + [zero] * len(shape.dimensions)
        return b.reshape(b.slice(room, starts, [1, *shape.dimensions]), list(shape.dimensions))

    # The parts of the written body.

    def _cut(self, b: Builder, env: dict[Instruction, Any], ys: Sequence[Any] = ()) -> None:
        """Stand-ins for what is not run as it is written: permutes, the loop over layers."""
        for instruction in self.permutes:
            env[instruction] = b.zeros(instruction.shape)
        results = dict(zip(self.layers.passed, ys, strict=False))
        for user in self.body.instructions:
            if self.stage in user.operands:
                n = user.proto.tuple_index
                env[user] = results[n] if n in results else b.zeros(user.shape)

    def _needed(self, wanted: Sequence[Instruction]) -> tuple[list[Instruction], bool]:
        """Reads of the carry that values depend on other than through the cuts; whether on the id."""
        cuts = {*self.permutes, *(i for i in self.body.instructions if self.stage in i.operands)}
        stop = {*cuts, *self.reads, *self.ids}
        inner = slice_of(wanted, stop)
        used = {o for i in inner for o in i.operands} | set(wanted)
        reads = [r for r in self.reads if r in used]
        return reads, any(i in used for i in self.ids)

    def _part(
        self, name: str, wanted: Sequence[Instruction], first: Sequence[Any], *, ends: bool
    ) -> tuple[Builder, list[int]]:
        """A computation of the body's ``wanted``; its parameter: ``first``, the carries it reads, the id.

        ``ends``: ``first`` are the results of the loop over layers. Gives the positions of the carries.
        """
        reads, has_id = self._needed(wanted)
        positions = sorted({self.reads[r] for r in reads})
        shapes = self.loop.shape.tuple_shapes
        b = self.editor.computation(name)
        whole = [*first, *(shapes[n] for n in positions)]
        if has_id:
            whole.append(array_shape("u32"))
        parts = b.elements(b.parameter(tuple_shape(whole)))
        at = dict(zip(positions, parts[len(first) :], strict=False))
        env: dict[Instruction, Any] = {r: at[self.reads[r]] for r in reads}
        if has_id:
            env |= dict.fromkeys(self.ids, parts[-1])
        self._cut(b, env, parts[: len(first)] if ends else ())
        b.clone(wanted, env)
        b.finish(b.tuple([env[w] for w in wanted]))
        return b, [*positions, *([-1] if has_id else [])]

    def _before(self, passed: Sequence[Any]) -> Any:
        wanted = [self.given[i] for i in self.layers.passed]
        takes_in, reads = self._part("interleaved.takes_in", wanted, (), ends=False)
        other = self._identity("interleaved.goes_on", passed)

        def emit(
            b: Builder, enters: Any, carry: Sequence[Any], device: Any, received: Sequence[Any]
        ) -> list[Any]:
            own = b.tuple([device if n < 0 else carry[n] for n in reads])
            branches = [takes_in, other]
            chosen = b.conditional(enters, branches, [own, b.tuple(received)], tuple_shape(passed))
            self.made["takes_in"] = chosen.name
            return b.elements(chosen)

        return emit

    def _after(self, passed: Sequence[Any]) -> Any:
        changing = [n for n in range(len(self.body.root.operands)) if n not in self.kept]
        wanted = [self.body.root.operands[n] for n in changing]
        goes, reads = self._part("interleaved.goes_forward", wanted, passed, ends=True)
        shapes = [self.loop.shape.tuple_shapes[n] for n in changing]
        stays = self._identity("interleaved.stays", shapes)

        def emit(
            b: Builder, commit: Any, carry: Sequence[Any], device: Any, ys: Sequence[Any]
        ) -> list[Any]:
            own = b.tuple([*ys, *(device if n < 0 else carry[n] for n in reads)])
            same = b.tuple([carry[n] for n in changing])
            chosen = b.conditional(commit, [goes, stays], [own, same], tuple_shape(shapes))
            self.made["forward"] = chosen.name
            result = list(carry)
            for i, n in enumerate(changing):
                result[n] = b.element(chosen, i)
            return result

        return emit

    def _identity(self, name: str, shapes: Sequence[Any]) -> Builder:
        b = self.editor.computation(name)
        b.finish(b.tuple(b.elements(b.parameter(tuple_shape(shapes)))))
        return b

    def _layers(self, passed: Sequence[Any], weights: Sequence[Any]) -> Any:
        """One chunk of the layers, under a conditional: from layer ``chunk * size`` on."""
        whole = list(self.stage.shape.tuple_shapes)
        carried = tuple_shape([*whole, array_shape("s32")])
        condition = self.editor.computation("interleaved.more_layers")
        c = condition.parameter(carried)
        counter, limit = (condition.element(c, n) for n in (self.layers.counter, len(whole)))
        condition.finish(
            condition.add(
                "compare", array_shape("pred"), [counter, limit], comparison_direction="LT"
            )
        )
        layer = self._layer(carried)
        shared = [self.given[i] for i in self.layers.shared]
        runs = self.editor.computation("interleaved.chunk")
        arguments = [array_shape("s32"), *passed, *weights, *(s.shape for s in shared)]
        start, *rest = runs.elements(runs.parameter(tuple_shape(arguments)))
        parts = dict(
            zip([*self.layers.passed, *self.layers.weights, *self.layers.shared], rest, strict=True)
        )
        parts[self.layers.counter] = start
        size = runs.constant(self.layers.count // self.chunks)
        limit = runs.add("add", array_shape("s32"), [start, size])
        init = runs.tuple([*(parts[i] for i in range(len(whole))), limit])
        done = runs.add("while", carried, [init], called_computation_ids=[layer.id, condition.id])
        done.metadata.CopyFrom(self.stage.proto.metadata)
        runs.finish(runs.tuple([runs.element(done, i) for i in self.layers.passed]))
        rests = self.editor.computation("interleaved.rests")
        rests.parameter(tuple_shape([]))
        rests.finish(rests.tuple([rests.zeros(s) for s in passed]))

        def emit(
            b: Builder, working: Any, chunk: Any, xs: Sequence[Any], held: Sequence[Any],
            carry: Sequence[Any],
        ) -> list[Any]:  # fmt: skip
            size = b.constant(self.layers.count // self.chunks)
            start = b.add("multiply", array_shape("s32"), [chunk, size])
            env: dict[Instruction, Any] = {r: carry[n] for r, n in self.reads.items()}
            b.clone(shared, env)
            own = b.tuple([start, *xs, *held, *(env[s] for s in shared)])
            chosen = b.conditional(working, [runs, rests], [own, b.tuple([])], tuple_shape(passed))
            self.made["runs"] = chosen.name
            return b.elements(chosen)

        return emit

    def _layer(self, carried: Any) -> Builder:
        """The body of the loop over layers, for a carry with one part more, which stays."""
        body = self.stage.called[0]
        b = self.editor.computation("interleaved.layer")
        c = b.parameter(carried)
        env: dict[Instruction, Any] = {
            i: b.element(c, i.proto.tuple_index)
            for i in body.instructions
            if body.parameters[0] in i.operands
        }
        b.clone(body.root.operands, env)
        limit = b.element(c, len(carried.tuple_shapes) - 1)
        b.finish(b.tuple([*(env[o] for o in body.root.operands), limit]))
        return b


def _behind(instruction: Instruction) -> Instruction:
    while instruction.opcode == "copy":
        instruction = instruction.operands[0]
    return instruction


def _stacked(shape: Any, count: int) -> Any:
    stacked = array_shape("s32", [count, *shape.dimensions])
    stacked.element_type = shape.element_type
    return stacked
