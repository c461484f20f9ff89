"""A stage in a loop of one iteration, in the form in which `lax.scan` writes loops over layers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ..builder import resized, tuple_shape
from ..graph import Computation, Instruction
from ..passes.valid.known import keeps_order
from ..schema import TUPLE
from .emit import Builder, Editor, fenced, needed_by
from .rewrite import laid_out, shaped

# What hands on the elements of an array; see `moves`.
MOVES = frozenset({"bitcast", "copy", "reshape"})


def moves(value: Instruction) -> bool:
    """Whether a value is its operand's elements, in their order."""
    return value.opcode in MOVES and (value.opcode != "bitcast" or keeps_order(value))


def moved_from(value: Instruction) -> Instruction:
    """The value whose elements this one is, in their order, or itself."""
    while moves(value):
        value = value.operands[0]
    return value


def pairs_of(permute: Instruction) -> list[tuple[int, int]]:
    """The sources and targets of a permute, in order."""
    return sorted((p.source, p.target) for p in permute.proto.source_target_pairs)


def is_flat(loop: Instruction) -> bool:
    """Whether it is a loop that carries a tuple of arrays, made where it begins and where its body ends."""
    parts = loop.shape.tuple_shapes
    return (
        loop.opcode == "while"
        and loop.called[0].root.opcode == "tuple"
        and loop.operands[0].opcode == "tuple"
        and all(p.element_type != TUPLE for p in parts)
        and len(parts) > 0
    )


def after(body: Computation, seeds: Iterable[Instruction]) -> set[Instruction]:
    """What depends on these values in the same iteration, without them."""
    seen = set(seeds)
    first = set(seen)
    for instruction in body.instructions:
        if any(o in seen for o in needed_by(instruction)) and instruction is not body.root:
            seen.add(instruction)
    return seen - first


@dataclass(eq=False)
class Stage:
    """A stage in ``body``: the instructions ``own`` of it are put into a loop.

    ``again``: what others may need too, and is computed there again. ``takes`` and ``gives``: what goes from
    stage to stage, as a stage takes it and gives it. ``residuals``: by slice of a stack that it takes, what a
    stage of an earlier loop has put there. ``kept``: by update of a stack that a later loop takes so, what it
    puts there. ``apart``: whether an engine compiles it apart from what stands beside it, as it is written
    under a conditional.
    """

    body: Computation
    own: set[Instruction]
    again: set[Instruction]
    takes: list[Instruction]
    gives: list[Instruction]
    residuals: dict[Instruction, Instruction]
    kept: dict[Instruction, Instruction]
    apart: bool

    @property
    def is_loop(self) -> bool:
        """Whether it is a loop already, and nothing else."""
        other = MOVES | {"get-tuple-element", "tuple"}
        return [i.opcode for i in self.own if i.opcode not in other] == ["while"]

    def emit(self, editor: Editor) -> None:
        """Put it into a loop, in its body."""
        outer = editor.within(self.body)
        outer.metadata = self.gives[0].proto.metadata
        given = set(self.takes) | set(self.residuals)
        shared = [i for i in self._reads() if i not in given]
        outside = self.read_outside()
        keeps = list(dict.fromkeys(self.kept.values()))
        begin = {
            "counter": [outer.constant(0)],
            "passed": [i.proto for i in self.takes],
            "residuals": [
                shaped(outer, read.proto, _slice(made.shape))
                for read, made in self.residuals.items()
            ],
            "shared": [i.proto for i in shared],
            "device": [outer.device()] if self.apart else [],
            "stacks": [outer.zeros(_slice(i.shape)) for i in [*outside, *keeps]],
        }
        carried = outer.tuple([v for own in begin.values() for v in own])
        b = editor.computation("stage.layer")
        parts = iter(b.elements(b.parameter(carried.shape)))
        now = {name: [next(parts) for _ in own] for name, own in begin.items()}
        (counter,) = now["counter"]

        def at(array: Any) -> list[Any]:
            return [counter, *[b.constant(0)] * (len(array.shape.dimensions) - 1)]

        env: dict[Instruction, Any] = dict(zip(self.takes, now["passed"], strict=True))
        env |= zip(shared, now["shared"], strict=True)
        for read, stack in zip(self.residuals, now["residuals"], strict=True):
            sizes = list(stack.shape.dimensions)
            env[read] = shaped(b, b.dynamic_slice(stack, at(stack), sizes), read.shape)
        self._compute(b, now["device"], env, [*self.gives, *outside, *keeps])
        passed = [
            shaped(b, env[i], taken.shape) for i, taken in zip(self.gives, self.takes, strict=True)
        ]
        stacks = [
            b.update(stack, b.reshape(env[i], list(stack.shape.dimensions)), at(stack))
            for stack, i in zip(now["stacks"], [*outside, *keeps], strict=True)
        ]
        following = b.add("add", counter.shape, [counter, b.constant(1)])
        same = [*now["residuals"], *now["shared"], *now["device"]]
        b.finish(b.tuple([following, *passed, *same, *stacks]))
        done = outer.loop(carried, b, 1, "stage")
        results = iter(outer.elements(done))
        made = {name: [next(results) for _ in own] for name, own in begin.items()}
        values = [*made["passed"], *made["stacks"][: len(outside)]]
        wanted = [*self.gives, *outside]
        stands = {i: laid_out(outer, v, i.shape) for i, v in zip(wanted, values, strict=True)}
        rows = dict(zip(keeps, made["stacks"][len(outside) :], strict=True))
        for update, value in self.kept.items():
            between = after(self.body, [value])
            own = {i: i.proto for i in self.body.instructions if i not in between}
            own[value] = shaped(outer, rows[value], value.shape)
            put = outer.clone([update.operands[1]], own)[update.operands[1]]
            editor.redirect(self.body, {update.operands[1]: put}, [update])
        others = [i for i in self.body.instructions if i not in self.own]
        editor.redirect(self.body, stands, others)
        editor.sweep(self.body)

    def _compute(
        self,
        b: Builder,
        device: Sequence[Any],
        env: dict[Instruction, Any],
        wanted: Sequence[Instruction],
    ) -> None:
        """Add ``wanted`` to what is there, ``env``."""
        if not device:
            b.clone(wanted, env)
            return
        wanted = [i for i in dict.fromkeys(wanted) if i not in env]
        inner = b.editor.computation("stage.apart")
        given = inner.elements(inner.parameter(tuple_shape([v.shape for v in env.values()])))
        own = dict(zip(env, given, strict=True))
        inner.clone(wanted, own)
        inner.finish(inner.tuple([own[i] for i in wanted]))
        made = fenced(b, inner, device[0], list(env.values()), [own[i].shape for i in wanted])
        env |= zip(wanted, made, strict=True)

    def _reads(self) -> list[Instruction]:
        """What it takes."""
        inner = self.own | self.again
        used = {o for i in inner for o in needed_by(i)} - inner
        return [i for i in self.body.instructions if i in used]

    def read_outside(self) -> list[Instruction]:
        """What is read of it outside of it besides ``gives``, and as residuals."""
        found: set[Instruction] = set()
        seen, stack = {self.body.root}, [self.body.root]
        while stack:
            top = stack.pop()
            operands = [o for n, o in enumerate(top.operands) if n != 1 or top not in self.kept]
            found |= {o for o in operands if o in self.own}
            fresh = [o for o in operands if o not in self.own and o not in seen]
            seen |= set(fresh)
            stack += fresh
        return [i for i in self.body.instructions if i in found and i not in self.gives]


def _slice(shape: Any) -> Any:
    return resized(shape, [1, *shape.dimensions])
