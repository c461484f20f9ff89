"""Makes stages that are no loop over layers loops over one layer, so that they are analyzed as all others.

A stage is what the body of a loop computes between what it receives and what it sends. Where that is a single
layer, layers one after the other, several loops, or a loop with more around it, `outlined` puts it into a
loop of one iteration, in the form in which `lax.scan` writes loops over layers:

- What goes from stage to stage is what the layer takes and hands on. It begins behind selects by numbers that
  are known, as between a new microbatch and what is received, and ends before such selects.
- What the stage of a later loop reads of it (*residuals*), what is added up over iterations, and all else
  that others read, are stacks, of one slice. So are residuals that a stage of the backward pass takes.
- All else that it takes is shared by its layers.

Nothing is proved here: the module computes what it did, whatever is put into the loop. That the loop is a
pipeline is proved as for any other one, and the step is refused if it is not.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from ..builder import array_shape, resized, tuple_shape
from ..collectives import CollectiveReader
from ..flatten import flatten
from ..graph import COLLECTIVES, LOGICAL_IDS, Computation, Instruction, Module
from ..schema import TUPLE
from ..values import Node
from .chains import Execution, Followed, Origins
from .constants import behind
from .emit import Builder, Editor, fenced, needed_by, slice_of
from .inline import handed_on, inline, opened
from .recognize import follow
from .rewrite import shaped
from .sameness import INTEGERS

_MOVES = frozenset({"bitcast", "copy", "reshape"})
_IDLE = _MOVES | {"broadcast", "constant", "get-tuple-element", "iota", "parameter", "tuple"}


def outlined(
    module: Module, names: Sequence[str], num_replicas: int, num_partitions: int
) -> Module | None:
    """The module with the stages of loops of these names in loops of their own, those in which a stage is one
    already too; None if all are, or if it is not seen in one of them what a stage is. Raises `GaveUpError`
    and `Refusal`."""
    apart = set()
    for name in names:
        whole = _unwrapped(module, name)
        apart |= {name} if whole is not module else set()
        module = opened(whole, name)
    entry = flatten(module.entry, CollectiveReader(num_replicas, num_partitions))
    followed = follow(entry, num_replicas, num_partitions)
    nodes = {n.instruction.name: n for n in entry.nodes if n.instruction.name in names}
    bodies: dict[Instruction, _Body] = {}
    for name in names:
        node = nodes[name]
        if node not in followed.origins or not _is_flat(node.instruction):
            return None
        bodies[node.instruction] = _Body(followed, node, bodies, name in apart)
    stages = [body.stage() for body in reversed(bodies.values())]
    if any(s is None for s in stages) or all(s is not None and s.is_loop for s in stages):
        return None
    editor = Editor(module)
    for stage in stages:
        assert stage is not None
        stage.emit(editor)
    return Module.parse(editor.finish())


def _is_flat(loop: Instruction) -> bool:
    parts = loop.shape.tuple_shapes
    return (
        loop.called[0].root.opcode == "tuple"
        and loop.operands[0].opcode == "tuple"
        and all(p.element_type != TUPLE for p in parts)
        and len(parts) > 0
    )


# Conditionals around a stage.


def _unwrapped(module: Module, name: str) -> Module:
    """The module, with conditionals in the body of this loop inlined on the way from what is received to what
    is sent of which a branch computes nothing: it stands for iterations in which a stage rests."""
    while True:
        loop = next(i for i in module.entry.instructions if i.name == name)
        found = next((i for i in _way(loop) if _rests(i)), None)
        if found is None:
            return module
        editor = Editor(module)
        inline(editor.replace(found), found)
        module = Module.parse(editor.finish())


def _rests(caller: Instruction) -> bool:
    parts = caller.shape.tuple_shapes or [caller.shape]
    return (
        caller.opcode == "conditional"
        and all(p.element_type != TUPLE for p in parts)
        and any(all(i.opcode in _IDLE for i in c.instructions) for c in caller.called)
    )


def _way(loop: Instruction) -> list[Instruction]:
    """What a body computes between what it receives and what it sends."""
    body = loop.called[0]
    if not _is_flat(loop):
        return []
    permutes = _permutes(body)
    received = [r for p in permutes for r in _received(body, p)]
    sent = {_sent(body, p) for p in permutes}
    behind_received = _after(body, received)
    before_sent = set(slice_of(sent, set(received)))
    return [i for i in body.instructions if i in behind_received and i in before_sent]


def _permutes(body: Computation) -> list[Instruction]:
    return [
        i for i in body.instructions
        if i.opcode == "collective-permute" and not i.shape.tuple_shapes
    ]  # fmt: skip


def _position(read: Instruction) -> int | None:
    """The position in the carry of a body that an instruction reads."""
    if read.opcode != "get-tuple-element" or read.operands[0].opcode != "parameter":
        return None
    return int(read.proto.tuple_index)


def _received(body: Computation, permute: Instruction) -> list[Instruction]:
    """What a permute gives, in the same iteration or in the next one."""
    own = {n for n, r in enumerate(body.root.operands) if _moved(r) is permute}
    reads = [i for i in body.instructions if _position(i) in own]
    used = any(permute in i.operands for i in body.instructions if i is not body.root)
    return [permute, *reads] if used else reads


def _sent(body: Computation, permute: Instruction) -> Instruction:
    """What a permute sends, be it of the iteration before."""
    value = _moved(permute.operands[0])
    position = _position(value)
    return value if position is None else _moved(body.root.operands[position])


def _moved(value: Instruction) -> Instruction:
    while value.opcode in _MOVES:
        value = value.operands[0]
    return value


def _after(body: Computation, seeds: Iterable[Instruction]) -> set[Instruction]:
    """What depends on these values in the same iteration, without them."""
    seen = set(seeds)
    first = set(seen)
    for instruction in body.instructions:
        if any(o in seen for o in needed_by(instruction)) and instruction is not body.root:
            seen.add(instruction)
    return seen - first


# Stages.


@dataclass(eq=False)
class _Stage:
    """A stage in ``body``: the instructions ``own`` of it are put into a loop.

    ``again``: what others may need too, and is computed there again. ``takes`` and ``gives``: what goes from stage to stage, as a stage takes it and gives it. ``residuals``: by
    slice of a stack that it takes, what a stage of an earlier loop has put there. ``kept``: by update of a stack
    that a later loop takes so, what it puts there. ``apart``: whether an engine compiles it apart from what stands
    beside it as it is written, under a conditional.
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
        other = _MOVES | {"get-tuple-element", "tuple"}
        return [i.opcode for i in self.own if i.opcode not in other] == ["while"]

    def emit(self, editor: Editor) -> None:
        outer = editor.within(self.body)
        outer.metadata = self.gives[0].proto.metadata
        given = set(self.takes) | set(self.residuals)
        shared = [i for i in self._reads() if i not in given]
        outside = self._read_outside()
        keeps = list(dict.fromkeys(self.kept.values()))
        begin = {
            "counter": [outer.constant(0)],
            "passed": [i.proto for i in self.takes],
            "residuals": [
                shaped(outer, read.proto, _slice(made.shape)) for read, made in self.residuals.items()
            ],
            "shared": [i.proto for i in shared],
            "device": [_device(outer)] if self.apart else [],
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
        more = editor.computation("stage.more_layers")
        count = more.element(more.parameter(carried.shape), 0)
        fields = {"comparison_direction": "LT"}
        more.finish(more.add("compare", array_shape("pred"), [count, more.constant(1)], **fields))
        done = outer.add(
            "while", carried.shape, [carried], called_computation_ids=[b.id, more.id],
            backend_config=json.dumps({"known_trip_count": {"n": "1"}}).encode(),
        )  # fmt: skip
        results = iter(outer.elements(done))
        made = {name: [next(results) for _ in own] for name, own in begin.items()}
        values = [*made["passed"], *made["stacks"][: len(outside)]]
        wanted = [*self.gives, *outside]
        stands = {i: shaped(outer, v, i.shape) for i, v in zip(wanted, values, strict=True)}
        rows = dict(zip(keeps, made["stacks"][len(outside) :], strict=True))
        for update, value in self.kept.items():
            between = _after(self.body, [value])
            own = {i: i.proto for i in self.body.instructions if i not in between}
            own[value] = shaped(outer, rows[value], value.shape)
            put = outer.clone([update.operands[1]], own)[update.operands[1]]
            editor.redirect(self.body, {update.operands[1]: put}, [update])
        others = [i for i in self.body.instructions if i not in self.own]
        editor.redirect(self.body, stands, others)
        editor.sweep(self.body)

    def _compute(
        self, b: Builder, device: Sequence[Any], env: dict[Instruction, Any], wanted: Sequence[Instruction]
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

    def _read_outside(self) -> list[Instruction]:
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


def _device(b: Builder) -> Any:
    """The number of the device, of which a compiler does not know that it is not negative."""
    return b.convert(b.add("partition-id", array_shape("u32")), array_shape("s32"))


def _slice(shape: Any) -> Any:
    return resized(shape, [1, *shape.dimensions])


def _is_input(value: Instruction) -> bool:
    """Whether a stage takes a value as it is, and does not compute it again: a carry or a slice of one, what is
    communicated, or a number."""
    if value.opcode == "constant":
        return False
    if value.opcode == "dynamic-slice" and _position(behind(value.operands[0])) is not None:
        return True
    number = not value.shape.dimensions and value.shape.element_type in INTEGERS
    return (
        number
        or _position(value) is not None
        or value.opcode in COLLECTIVES | LOGICAL_IDS.keys()
        or any(c.needs_runtime for c in value.called)
    )


class _Body:
    """The body of a loop that was followed. ``earlier``: those of loops before it."""

    def __init__(
        self, followed: Followed, node: Node, earlier: Mapping[Instruction, _Body], apart: bool
    ) -> None:
        self.loop, self.body = node.instruction, node.instruction.called[0]
        self.origins: Origins = followed.origins[node]
        self.earlier, self.apart = dict(earlier), apart
        self.nodes = {n.instruction: n for n in node.blocks[1].nodes}
        devices = range(followed.forward.num_devices)
        self.every = [Execution(t, d) for t in range(len(self.origins.iterations)) for d in devices]
        self.users: dict[Instruction, list[Instruction]] = {i: [] for i in self.body.instructions}
        for instruction in self.body.instructions:
            if instruction is not self.body.root:
                for operand in dict.fromkeys(needed_by(instruction)):
                    self.users[operand].append(instruction)
        self.kept: dict[Instruction, Instruction] = {}  # as of `_Stage`
        self._find_ends()

    def _find_ends(self) -> None:
        """Find what stages take and give: ``takes``, ``gives``; and what they take and hand on: ``hands``."""
        permutes = _permutes(self.body)
        received = {p: _received(self.body, p) for p in permutes}
        every = [r for own in received.values() for r in own]
        moved = _after(self.body, every) | set(every)
        self.takes: list[Instruction] = []
        self.gives: list[Instruction] = []
        for permute, reads in received.items():
            sent = self._peeled(_sent(self.body, permute), moved, set(every))
            if sent in moved and sent not in every and len(reads) == 1:
                taken = self._taken(reads[0])
                if sent in self.gives or taken in self.takes or not _alike(sent, taken):
                    continue
                self.gives.append(sent)
                self.takes.append(taken)
        self.hands = [
            self._taken(reads[0]) for permute, reads in received.items()
            if len(reads) == 1 and self._peeled(_sent(self.body, permute), moved, set(every)) in every
        ]  # fmt: skip
        self.behind = _after(self.body, self.takes)  # what stages compute, or what is made of it
        self.beside = _after(self.body, [*self.takes, *self.hands])
        self.after = _after(self.body, self.gives)

    def _peeled(
        self, value: Instruction, moved: Collection[Instruction], stops: Collection[Instruction]
    ) -> Instruction:
        """What a value is handed on from, of those that are ``moved``."""
        while value not in stops:
            source = self._source(value, moved)
            if source is None:
                return value
            value = source
        return value

    def _source(self, value: Instruction, moved: Collection[Instruction]) -> Instruction | None:
        """The operand that an instruction hands on where it is what a stage gave; None if it may be another
        one, or is computed."""
        if value.opcode in _MOVES or value.opcode == "get-tuple-element":
            (source,) = needed_by(value) if len(needed_by(value)) == 1 else (None,)
            return source if source in moved and not source.shape.tuple_shapes else None
        operands = value.operands[1:] if value.opcode == "select" else value.operands
        found = [o for o in operands if o in moved]
        if len(found) != 1 or not self._hands_on(value, found[0]):
            return None
        return found[0]

    def _hands_on(self, value: Instruction, source: Instruction) -> bool:
        """Whether an instruction hands an operand on wherever it does not hand on another one."""
        node = self.nodes.get(value)
        if node is None:
            return value.opcode in _MOVES
        if value.opcode == "select":
            return all(self.origins.row(node.operands[0], at) is not None for at in self.every)
        if value.opcode != "add":
            return value.opcode in _MOVES
        return all(
            self.origins.is_zero(node.results[0], at)
            or any(self.origins.is_zero(o, at) for o in node.operands)
            for at in self.every
        )

    def _taken(self, value: Instruction) -> Instruction:
        """What a stage takes of what is received."""
        while True:
            users = self.users[value]
            if len(users) != 1 or value not in _data(users[0]) or not self._hands_on(users[0], value):
                return value
            (value,) = users

    def stage(self) -> _Stage | None:
        """The stage; None if it is not seen what it is."""
        if not self.gives:
            return None
        taken = {*self.takes, *self.hands}
        ends = {*self.gives, *self._sums(), *self.kept.values()}
        own = set(slice_of(ends, taken)) & self.beside
        for instruction in self.body.instructions:
            if instruction in self.behind - self.after - own and self._computes(instruction, own):
                own.add(instruction)
        for instruction in reversed(self.body.instructions):
            if instruction in own and instruction not in ends:
                users = self.users[instruction]
                if not any(u in own for u in users) and self._source(instruction, own | set(self.takes)):
                    own.discard(instruction)
        reads = self._pulled(own)
        own |= {
            u for i in own if i.shape.tuple_shapes for u in self.users[i]
            if u.opcode == "get-tuple-element"
        }  # fmt: skip
        again = self._again(own, {*taken, *reads})
        return _Stage(self.body, own, again, self.takes, self.gives, reads, self.kept, self.apart)

    def _again(self, own: Collection[Instruction], given: Collection[Instruction]) -> set[Instruction]:
        """What a stage needs that is computed in the body of what is there before, and of numbers."""
        found: set[Instruction] = set()
        stack = [o for i in own for o in needed_by(i)]
        while stack:
            top = stack.pop()
            if top not in found and top not in own and top not in given and not _is_input(top):
                found.add(top)
                stack += needed_by(top)
        return found

    def _computes(self, instruction: Instruction, own: Collection[Instruction]) -> bool:
        """Whether what stages compute goes on in an instruction that is of no other iteration."""
        if instruction.opcode in ("collective-permute", "dynamic-update-slice"):
            return False
        return all(
            o in own or o in self.takes or o not in self.behind and not self._is_carried(o)
            for o in needed_by(instruction)
        )

    def _is_carried(self, value: Instruction) -> bool:
        position = _position(value)
        return position is not None and behind(self.body.root.operands[position]) is not value

    def _sums(self) -> list[Instruction]:
        """What of a stage is added up over iterations."""
        found = []
        for position, result in enumerate(self.body.root.operands):
            total = behind(result)
            if total.opcode != "add":
                continue
            added = [o for o in total.operands if _position(behind(o)) != position]
            if len(added) != 1 or added[0] not in self.behind:
                continue
            value = self._peeled(added[0], self.behind, self.gives)
            if self._is_of_stage(value):
                found.append(value)
        return found

    def _is_of_stage(self, value: Instruction) -> bool:
        """Whether a value is made of what a stage computes where that is not handed on to others."""
        stack, seen = [value], {value}
        while stack:
            top = stack.pop()
            if top in self.gives or top not in self.after:
                return True
            if top.opcode == "select" and self._source(top, self.behind) is not None:
                continue
            fresh = [o for o in needed_by(top) if o in self.behind and o not in seen]
            seen |= set(fresh)
            stack += fresh
        return False

    def _pulled(self, own: set[Instruction]) -> dict[Instruction, Instruction]:
        """Add to ``own`` what it needs that is made of residuals, or of what a stage hands on; gives the
        residuals, as `_Stage` has them."""
        reads = {i: kept for i in self.body.instructions if (kept := self._residual(i)) is not None}
        taken = {*reads, *self.takes, *self.hands}
        made_of = _after(self.body, {*reads, *self.hands})
        own |= {i for i in slice_of(own, taken) if i in made_of}
        used = {o for i in own for o in needed_by(i)}
        found = {}
        for read, (body, update, value) in reads.items():
            if read in used:
                found[read] = body.kept[update] = value
        return found

    def _residual(self, read: Instruction) -> tuple[_Body, Instruction, Instruction] | None:
        """What a slice of a stack is that a stage of an earlier loop put there: the body, what puts it there, and
        what it is of the stage; None for anything else."""
        if read.opcode != "dynamic-slice" or list(read.shape.dimensions[:1]) != [1]:
            return None
        position = _position(behind(read.operands[0]))
        if position is None:
            return None
        made = handed_on(self.loop.operands[0].operands[position])
        body = self.earlier.get(made.operands[0]) if made.opcode == "get-tuple-element" else None
        if body is None:
            return None
        update = behind(body.body.root.operands[made.proto.tuple_index])
        if update.opcode != "dynamic-update-slice":
            return None
        ends = {*body.takes, *body.gives, *body.hands}
        moved = body.beside | ends
        put = update.operands[1]
        value = body._peeled(put, moved, ends) if put in moved else None
        return None if value is None or value in body.hands else (body, update, value)


def _data(value: Instruction) -> tuple[Instruction, ...]:
    return value.operands[1:] if value.opcode == "select" else needed_by(value)


def _alike(one: Instruction, other: Instruction) -> bool:
    """Whether two values have the same elements, be it in other dimensions."""
    sizes = [prod(i.shape.dimensions) for i in (one, other)]
    return one.shape.element_type == other.shape.element_type and sizes[0] == sizes[1]
