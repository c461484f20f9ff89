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

from collections.abc import Callable, Collection, Mapping, Sequence
from math import prod

from ..collectives import CollectiveReader
from ..flatten import flatten
from ..graph import COLLECTIVES, LOGICAL_IDS, Computation, Instruction, Module
from ..schema import TUPLE
from ..values import Node
from .chains import Followed, Origins
from .constants import behind
from .emit import Editor, carried_position, needed_by, slice_of
from .inline import GROUPED, handed_on, inline, masked_behind, opened, past_barriers, put_apart
from .one_layer import MOVES, Stage, after, is_flat, moved_from, moves, pairs_of
from .recognize import follow
from .refusal import Refusal, about
from .sameness import INTEGERS
from .taken import as_taken

_IDLE = MOVES | {"broadcast", "constant", "get-tuple-element", "iota", "parameter", "tuple"}


def outlined(
    module: Module, names: Sequence[str], num_replicas: int, num_partitions: int, *, splits: bool
) -> Module | None:
    """The module with stages of these loops in loops of their own, those that are one already too;
    None if all are, or if it is seen in none of them what a stage is. ``splits``: whether
    they are to be split (see `split`), so that an engine may round their parts otherwise. Raises
    `GaveUpError` and `Refusal`."""
    apart = set()
    for name in names:
        whole = _unwrapped(module, name)
        apart |= {name} if whole is not module and not splits else set()
        module = masked_behind(past_barriers(opened(whole, name), name), name)
    followed, nodes = _followed(module, names, num_replicas, num_partitions)
    other = as_taken(module, list(nodes.values()), followed)
    if other is not None:
        module = other
        followed, nodes = _followed(module, names, num_replicas, num_partitions)
    bodies: dict[Instruction, _Body] = {}
    for name in names:
        node = nodes[name]
        if node in followed.origins and is_flat(node.instruction):
            bodies[node.instruction] = _Body(followed, node, bodies, name in apart)
    stages = [s for body in reversed(bodies.values()) if (s := body.stage()) is not None]
    if all(stage.is_loop for stage in stages):
        return None
    editor = Editor(module)
    try:
        for stage in stages:
            stage.emit(editor)
        return Module.parse(editor.finish())
    except Refusal:  # what stages take depends on what they give
        for name in names:
            with about(name):
                _check_within(nodes[name].instruction)
        raise


def _followed(
    module: Module, names: Sequence[str], num_replicas: int, num_partitions: int
) -> tuple[Followed, dict[str, Node]]:
    entry = flatten(module.entry, CollectiveReader(num_replicas, num_partitions))
    nodes = {n.instruction.name: n for n in entry.nodes if n.instruction.name in names}
    return follow(entry, num_replicas, num_partitions), nodes


def _check_within(loop: Instruction) -> None:
    """Raises `Refusal` if a permute of the body sends on what another one has brought in the same iteration,
    and both have the same pairs: there are several iterations in one; or if a third one sends on what this
    one brings: it moves something within a stage."""
    permutes = _permutes(loop.called[0])
    behind_each = {p: after(loop.called[0], [p]) for p in permutes}
    for permute in permutes:
        for other in behind_each[permute].intersection(permutes):
            if pairs_of(permute) == pairs_of(other):
                raise Refusal(
                    f"an iteration sends on by {other.describe()} what {permute.describe()} has brought in "
                    "the same iteration, as where lax.scan is unrolled: leave unroll at 1"
                )
        before = any(permute in found for found in behind_each.values())
        if before and not behind_each[permute].isdisjoint(permutes):
            raise Refusal(
                f"its layers communicate by {permute.describe()}, which moves something within a stage, as "
                "where an array is split or joined along a dimension that a mesh axis divides (the q, k and "
                "v of one product): split it along one that is whole"
            )


# Conditionals around a stage.


def _unwrapped(module: Module, name: str) -> Module:
    """The module, with conditionals in the body of this loop inlined on the way from what is received to what
    is sent that choose by numbers, and of which a branch computes nothing: it stands for iterations in which
    a stage rests. Of more than two branches the others stay a conditional. So are others that choose by the
    same number, as those of what is computed again."""
    rests: set[str] = set()
    while True:
        loop = next(i for i in module.entry.instructions if i.name == name)
        way = _way(loop)
        found = next(
            (
                i
                for i in loop.called[0].instructions
                if _rests(i) and (i in way or i.operands[0].name in rests)
            ),
            None,
        )
        if found is None:
            return module
        rests.add(found.operands[0].name)
        editor = Editor(module)
        rest = _rest(found)
        if len(found.called) > 2 and rest is not None:
            put_apart(editor.replace(found), found, rest)
        else:
            inline(editor.replace(found), found)
        module = Module.parse(editor.finish())


def _rests(caller: Instruction) -> bool:
    parts = caller.shape.tuple_shapes or [caller.shape]
    return (
        caller.opcode == "conditional"
        and all(p.element_type != TUPLE for p in parts)
        and _rest(caller) is not None
        and all(
            i.shape.element_type in INTEGERS or i.opcode == "parameter"
            for i in slice_of([caller.operands[0]], set())
        )
    )


def _rest(caller: Instruction) -> int | None:
    """The first branch of a conditional that computes nothing; None if there is none."""
    return next(
        (n for n, c in enumerate(caller.called) if all(i.opcode in _IDLE for i in c.instructions)),
        None,
    )


def _way(loop: Instruction) -> list[Instruction]:
    """What a body computes between what it receives and what it sends."""
    body = loop.called[0]
    if not is_flat(loop):
        return []
    permutes = _permutes(body)
    received = [r for p in permutes for r in _received(body, p, _may_hand_on)]
    sent = {_sent(body, p) for p in permutes}
    behind_received = after(body, received)
    before_sent = set(slice_of(sent, set(received)))
    return [i for i in body.instructions if i in behind_received and i in before_sent]


def _permutes(body: Computation) -> list[Instruction]:
    return [
        i for i in body.instructions
        if i.opcode == "collective-permute" and not i.shape.tuple_shapes
    ]  # fmt: skip


def _received(
    body: Computation,
    permute: Instruction,
    hands_on: Callable[[Instruction, Instruction], bool],
) -> list[Instruction]:
    """What a permute gives, in the same iteration or in the next one. ``hands_on(value, operand)``: whether
    a value is this one of its operands where it is no other one."""
    handed, used = {permute}, False
    for instruction in body.instructions:
        if instruction is not body.root:
            for operand in handed.intersection(needed_by(instruction)):
                if operand in _data(instruction) and hands_on(instruction, operand):
                    handed.add(instruction)
                else:
                    used = True
    own = {n for n, r in enumerate(body.root.operands) if r in handed}
    # What is handed on to the permute alone is sent on in the next iteration.
    others = {o for i in body.instructions if i is not permute for o in needed_by(i)}
    reads = [i for i in body.instructions if carried_position(i) in own and i in others]
    return [permute, *reads] if used else reads


def _may_hand_on(value: Instruction, _: Instruction) -> bool:
    return moves(value) or value.opcode in ("add", "select")


def _sent(body: Computation, permute: Instruction) -> Instruction:
    """What a permute sends, be it of the iteration before, and be it masked there."""
    value = carried = moved_from(permute.operands[0])
    while carried.opcode == "select":
        others = [o for o in map(moved_from, carried.operands[1:]) if not _is_fixed(body, o)]
        if len(others) != 1:
            break
        (carried,) = others
    position = carried_position(carried)
    return value if position is None else moved_from(body.root.operands[position])


def _is_fixed(body: Computation, value: Instruction) -> bool:
    """Whether a value is the same in all iterations, as zeros are."""
    position = carried_position(value)
    if position is not None:
        return behind(body.root.operands[position]) is value
    return value.opcode == "constant" or (
        value.opcode == "broadcast" and _is_fixed(body, value.operands[0])
    )


# Stages.


def _communicates(instruction: Instruction) -> bool:
    return instruction.opcode in COLLECTIVES or any(c.needs_runtime for c in instruction.called)


class _Body:
    """The body of a loop that was followed. ``earlier``: those of loops before it."""

    def __init__(
        self, followed: Followed, node: Node, earlier: Mapping[Instruction, _Body], apart: bool
    ) -> None:
        self.loop, self.body = node.instruction, node.instruction.called[0]
        self.origins: Origins = followed.origins[node]
        self.earlier, self.apart = dict(earlier), apart
        self.nodes = {n.instruction: n for n in node.blocks[1].nodes}
        self.every = self.origins.executions()
        self.order = {i: n for n, i in enumerate(self.body.instructions)}
        self.users: dict[Instruction, list[Instruction]] = {i: [] for i in self.body.instructions}
        for instruction in self.body.instructions:
            if instruction is not self.body.root:
                for operand in dict.fromkeys(needed_by(instruction)):
                    self.users[operand].append(instruction)
        self.kept: dict[Instruction, Instruction] = {}  # as of `Stage`
        self._find_ends()

    def _find_ends(self) -> None:
        """Find what stages take and give: ``takes``, ``gives``; and what they take and hand on: ``hands``."""
        permutes = _permutes(self.body)
        received = {p: _received(self.body, p, self._hands_on) for p in permutes}
        every = [r for own in received.values() for r in own]
        moved = after(self.body, every) | set(every)
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
        self.behind = after(self.body, self.takes)  # what stages compute, or what is made of it
        begins = {*self.takes, *self.hands}
        # What devices that run the same stage give each other of what is theirs, such as parts of weights.
        shared = {
            i for i in slice_of(self.gives, begins) if i.opcode in GROUPED and i not in self.behind
        }
        self.beside = after(self.body, [*begins, *shared]) | shared
        self.after = after(self.body, self.gives)

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
        if moves(value) or value.opcode == "get-tuple-element":
            (source,) = needed_by(value)
            return source if source in moved and not source.shape.tuple_shapes else None
        operands = value.operands[1:] if value.opcode == "select" else value.operands
        found = [o for o in operands if o in moved]
        if value.opcode == "add" and len(found) > 1:
            found = [o for o in found if not self._is_nothing(o)]
        if len(found) != 1 or not self._hands_on(value, found[0]):
            return None
        return found[0]

    def _is_nothing(self, value: Instruction) -> bool:
        """Whether a value is zero wherever it is computed."""
        node = self.nodes.get(value)
        return node is not None and all(
            self.origins.is_zero(node.results[0], at) for at in self.every
        )

    def _hands_on(self, value: Instruction, source: Instruction) -> bool:
        """Whether an instruction hands an operand on wherever it does not hand on another one."""
        node = self.nodes.get(value)
        if node is None:
            return moves(value)
        if value.opcode == "select":
            return all(self.origins.row(node.operands[0], at) is not None for at in self.every)
        if value.opcode != "add":
            return moves(value)
        return all(
            self.origins.is_zero(node.results[0], at)
            or any(self.origins.is_zero(o, at) for o in node.operands)
            for at in self.every
        )

    def _taken(self, value: Instruction) -> Instruction:
        """What a stage takes of what is received, be that handed on in several ways to it."""
        handed, found = {value}, value
        while True:
            users = [u for h in handed for u in self.users[h] if u not in handed]
            sources = [(u, h) for u in users for h in handed.intersection(needed_by(u))]
            if not users or not all(h in _data(u) and self._hands_on(u, h) for u, h in sources):
                return found
            added = min(users, key=self.order.__getitem__)
            handed.add(added)
            last = [h for h in handed if any(u not in handed for u in self.users[h])] or [added]
            if len(last) == 1:
                (found,) = last

    def stage(self) -> Stage | None:
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
                if not any(u in own for u in users) and self._source(
                    instruction, own | set(self.takes)
                ):
                    own.discard(instruction)
        reads = self._pulled(own)
        if not own.issuperset(self.gives):
            return None
        own |= {
            u for i in own if i.shape.tuple_shapes for u in self.users[i]
            if u.opcode == "get-tuple-element"
        }  # fmt: skip
        # Others may read these too, made of what a stage gives.
        handed = {i for i in own if i.opcode == "tuple" or self._is_handed_on(i)}
        again = self._again(own, {*taken, *reads}) | handed
        apart = self.apart and not any(map(_communicates, own))
        found = Stage(
            self.body, own - handed, again, self.takes, self.gives, reads, self.kept, apart
        )
        return None if any(i.shape.tuple_shapes for i in found.read_outside()) else found

    def _is_handed_on(self, value: Instruction) -> bool:
        """Whether a value is what a stage gives, behind it."""
        return (
            value not in self.gives and self._peeled(value, self.behind, self.gives) in self.gives
        )

    def _again(
        self, own: Collection[Instruction], given: Collection[Instruction]
    ) -> set[Instruction]:
        """What a stage needs that is computed in the body of what is there before, and of numbers."""
        found: set[Instruction] = set()
        stack = [o for i in own for o in needed_by(i)]
        while stack:
            top = stack.pop()
            if top not in found and top not in own and top not in given and not self._is_input(top):
                found.add(top)
                stack += needed_by(top)
        return found

    def _is_input(self, value: Instruction) -> bool:
        """Whether a stage takes a value as it is, and does not compute it again: a carry or a slice of one,
        what is communicated, or a number that is known."""
        if (
            value.opcode == "dynamic-slice"
            and carried_position(behind(value.operands[0])) is not None
        ):
            return True
        if value.opcode in COLLECTIVES | LOGICAL_IDS.keys() or any(
            c.needs_runtime for c in value.called
        ):
            return True
        node = self.nodes.get(value)
        if node is None or value.opcode == "constant" or len(node.results) != 1:
            return carried_position(value) is not None
        is_number = not value.shape.dimensions and value.shape.element_type in INTEGERS
        return is_number and all(
            self.origins.number(node.results[0], at) is not None for at in self.every
        )

    def _computes(self, instruction: Instruction, own: Collection[Instruction]) -> bool:
        """Whether what stages compute goes on in an instruction that is of no other iteration."""
        if instruction.opcode in ("collective-permute", "dynamic-update-slice", "tuple"):
            return False
        return all(
            o in own or o in self.takes or (o not in self.behind and not self._is_carried(o))
            for o in needed_by(instruction)
        )

    def _is_carried(self, value: Instruction) -> bool:
        position = carried_position(value)
        return position is not None and behind(self.body.root.operands[position]) is not value

    def _sums(self) -> list[Instruction]:
        """What of a stage is added up over iterations."""
        found = []
        for position, result in enumerate(self.body.root.operands):
            total = behind(result)
            if total.opcode != "add":
                continue
            added = [o for o in total.operands if carried_position(behind(o)) != position]
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
            if self._is_of_a_head(top):
                continue
            fresh = [o for o in needed_by(top) if o in self.behind and o not in seen]
            seen |= set(fresh)
            stack += fresh
        return False

    def _is_of_a_head(self, value: Instruction) -> bool:
        """Whether a conditional gives a value, which on some device is zero in every iteration."""
        index = 0
        if value.opcode == "get-tuple-element":
            index, value = int(value.proto.tuple_index), value.operands[0]
        node = self.nodes.get(value)
        if value.opcode != "conditional" or node is None:
            return False
        result = node.results[index]
        adds = {at.device for at in self.every if not self.origins.is_zero(result, at)}
        return adds != {at.device for at in self.every}

    def _pulled(self, own: set[Instruction]) -> dict[Instruction, Instruction]:
        """Add to ``own`` what it needs that is made of residuals, or of what a stage hands on; gives the
        residuals, as `Stage` has them."""
        reads = {i: kept for i in self.body.instructions if (kept := self._residual(i)) is not None}
        taken = {*reads, *self.takes, *self.hands}
        made_of = after(self.body, {*reads, *self.hands})
        own |= {i for i in slice_of(own, taken) if i in made_of}
        used = {o for i in own for o in needed_by(i)}
        found = {}
        for read, (body, update, value) in reads.items():
            if read in used:
                found[read] = body.kept[update] = value
        return found

    def _residual(self, read: Instruction) -> tuple[_Body, Instruction, Instruction] | None:
        """What a slice of a stack is that a stage of an earlier loop put there: the body, what puts it there,
        and what it is of the stage; None for anything else."""
        if read.opcode != "dynamic-slice" or list(read.shape.dimensions[:1]) != [1]:
            return None
        position = carried_position(behind(read.operands[0]))
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
