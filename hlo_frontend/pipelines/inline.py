"""Inlines conditionals and calls around a loop over layers, so that the stage is in the loop's own body.

Conditionals become selects: code under `lax.cond` then runs in all cases, and a select takes the result of
the branch. The results are the same, with more work. So the inlined module serves for analysis, and for a
rewrite that puts the stage under a conditional of its own. Layers that communicate would then do so in all
cases too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..builder import array_shape
from ..graph import COLLECTIVES, LOGICAL_IDS, Computation, Instruction, Module, all_instructions
from ..passes.valid.known import keeps_order
from ..schema import PRIMITIVE_CODES, TOKEN, TUPLE
from ..trips import annotated_trips
from .emit import Builder, Editor
from .sameness import INTEGERS, MOVES, NEVER_SAME


def inlined(module: Module, loop: str) -> Module:
    """The module, with conditionals and calls that hold loops inlined in the body of this loop."""
    while True:
        found = next(iter(_around_loops(module.entry, loop)), None)
        if found is None:
            return module
        editor = Editor(module)
        inline(editor.replace(found), found)
        module = Module.parse(editor.finish())


def all_take_part(module: Module, loop: str) -> Module:
    """The module, with conditionals in the body of this loop inlined that communicate among groups of
    devices, as a head does whose rows an axis of the mesh divides. Then all members of a group take part,
    whatever each of them chooses by."""
    while True:
        body = next(i for i in module.entry.instructions if i.name == loop).called[0]
        found = next((i for i in body.instructions if _is_of_groups(i)), None)
        if found is None:
            return module
        editor = Editor(module)
        inline(editor.replace(found), found)
        module = Module.parse(editor.finish())


def opened(module: Module, loop: str) -> Module:
    """The module, with conditionals in the body of this loop inlined whose branches only move data, as where
    outputs are put away under one, or only compute numbers, so that what is moved can be followed, and past
    what loops over layers are given and hand on unchanged."""
    while True:
        body = next(i for i in module.entry.instructions if i.name == loop).called[0]
        found = next((i for i in body.instructions if _only_moves(i)), None)
        if found is None:
            return _past_loops(module, loop)
        editor = Editor(module)
        inline(editor.replace(found), found)
        module = Module.parse(editor.finish())


def _past_loops(module: Module, loop: str) -> Module:
    """The module, with what loops in the body of this loop are given and never change read there, and not
    behind them: a gradient that all layers share, which a stage hands on."""
    return _read_sooner(module, loop, _unchanged)


def past_barriers(module: Module, loop: str) -> Module:
    """The module, with numbers in the body of this loop read before barriers, not behind them: as the masks
    of stages that are computed again, which are known whatever stands beside them."""
    return _read_sooner(module, loop, _number_before)


def before_barrier(read: Instruction) -> Instruction | None:
    """What a barrier hands on here; None for others."""
    if read.opcode != "get-tuple-element" or read.operands[0].opcode != "opt-barrier":
        return None
    (given,) = read.operands[0].operands
    return given.operands[read.proto.tuple_index] if given.opcode == "tuple" else None


def _number_before(read: Instruction) -> Instruction | None:
    """The same, if that is whole numbers."""
    return before_barrier(read) if read.shape.element_type in INTEGERS else None


def masked_behind(module: Module, loop: str) -> Module:
    """The module, with masks in the body of this loop put behind a bitcast that transposes what they mask: as
    of the gradient of a weight, which a stage masks within what is computed again."""
    body = next(i for i in module.entry.instructions if i.name == loop).called[0]
    found = [i for i in body.instructions if _transposes_masked(i)]
    if not found:
        return module
    editor = Editor(module)
    b = editor.replace(found[0])
    for bitcast in found:
        b.go_on_to(bitcast)
        select = bitcast.operands[0]
        mask, *values = select.operands
        made = [
            b.broadcast(value.operands[0].proto, bitcast.shape)
            if value.opcode == "broadcast"
            else b.reinterpret(value.proto, select.shape, bitcast.shape)
            for value in values
        ]
        b.stand_in(b.select(mask.operands[0].proto, *made))
    return Module.parse(editor.finish())


def _transposes_masked(value: Instruction) -> bool:
    """Whether this is a bitcast of a select by one predicate, of which one side is one number."""
    if value.opcode != "bitcast" or value.operands[0].opcode != "select" or keeps_order(value):
        return False
    select = value.operands[0]
    if select.shape.element_type != value.shape.element_type:
        return False
    numbers = [
        o.opcode == "broadcast" and not o.operands[0].shape.dimensions for o in select.operands
    ]
    return numbers[0] and any(numbers[1:]) and not all(numbers[1:])


def _read_sooner(
    module: Module, loop: str, sooner: Callable[[Instruction], Instruction | None]
) -> Module:
    """The module, with what ``sooner`` gives for them in the place of instructions of the body of a loop."""
    body = next(i for i in module.entry.instructions if i.name == loop).called[0]
    found = {i: given for i in body.instructions if (given := sooner(i)) is not None}
    if not found:
        return module
    editor = Editor(module)
    builder = editor.replace(next(iter(found)))
    for read, given in found.items():
        builder.go_on_to(read)
        builder.stand_in(given.proto)
    return Module.parse(editor.finish())


def _unchanged(read: Instruction) -> Instruction | None:
    """What a result of a loop is that no iteration changes, as the loop is given it; None for others."""
    if read.opcode != "get-tuple-element" or read.operands[0].opcode != "while":
        return None
    loop, position = read.operands[0], read.proto.tuple_index
    body, init = loop.called[0], loop.operands[0]
    if body.root.opcode != "tuple" or init.opcode != "tuple":
        return None
    own = handed_on(body.root.operands[position])
    same = own.opcode == "get-tuple-element" and own.proto.tuple_index == position
    return init.operands[position] if same and own.operands[0] is body.parameters[0] else None


def handed_on(value: Instruction) -> Instruction:
    """The instruction whose result this one hands on, in tuples and through barriers, or itself."""
    while True:
        source = value.operands[0] if value.opcode in ("copy", "get-tuple-element") else None
        if source is not None and source.opcode == "opt-barrier":
            source = source.operands[0]
        if value.opcode == "copy" and source is not None:
            value = source
        elif source is not None and source.opcode == "tuple":
            value = source.operands[value.proto.tuple_index]
        else:
            return value


def _only_moves(caller: Instruction) -> bool:
    inner = [i for c in caller.called for i in all_instructions(c)]
    return (
        caller.opcode == "conditional"
        and all(p.element_type not in (TUPLE, TOKEN) for p in _parts(caller.shape))
        and all(i.opcode in _MOVES or i.shape.element_type in INTEGERS for i in inner)
        and not any(i.has_side_effect or i.opcode in _NEVER_OPENED for i in inner)
        and (
            any(i.opcode in ("dynamic-slice", "dynamic-update-slice") for i in inner)
            or all(p.element_type in INTEGERS for p in _parts(caller.shape))
        )
    )


def _around_loops(entry: Computation, name: str) -> list[Instruction]:
    return [
        i
        for loop in entry.instructions
        if loop.opcode == "while" and loop.name == name
        for i in loop.called[0].instructions
        if i.opcode in ("conditional", "call") and _can_be(i)
    ]


def _can_be(caller: Instruction) -> bool:
    return (
        any(map(_has_loop, caller.called))
        and not any(_stands_alone(c) or c.has_side_effect for c in caller.called)
        and all(p.element_type not in (TUPLE, TOKEN) for p in _parts(caller.shape))
    )


def _is_of_groups(caller: Instruction) -> bool:
    """Whether a conditional has collectives of groups, and all that it may choose ends."""
    inner = [i for c in caller.called for i in all_instructions(c)]
    return (
        caller.opcode == "conditional"
        and {i.opcode for i in inner} & COLLECTIVES <= GROUPED
        and any(map(communicates, caller.called))
        and not any(c.has_side_effect for c in caller.called)
        and all(annotated_trips(i) is not None for i in inner if i.opcode == "while")
        and all(p.element_type not in (TUPLE, TOKEN) for p in _parts(caller.shape))
    )


_NEVER_OPENED = NEVER_SAME | LOGICAL_IDS.keys() | {"while", "conditional", "call"}
_MOVES = MOVES | {"constant", "convert", "dynamic-update-slice", "iota", "parameter"}

# Collectives that layers may have: all members of a group run the same layers at the same time.
GROUPED = frozenset({"all-reduce", "all-gather", "reduce-scatter", "all-to-all"})


def _stands_alone(computation: Computation) -> bool:
    """Whether it communicates outside of loops, or otherwise than layers may (`other_communication`)."""
    return any(
        i.opcode in COLLECTIVES
        or any(
            other_communication(c) if i.opcode == "while" else _stands_alone(c) for c in i.called
        )
        for i in computation.instructions
    )


def other_communication(computation: Computation) -> Instruction | None:
    """An instruction in a loop, or in what it calls, that reads the device's id or is a collective other than
    a permute and `GROUPED`."""
    refused = (COLLECTIVES | LOGICAL_IDS.keys()) - GROUPED - {"collective-permute"}
    return next((i for i in all_instructions(computation) if i.opcode in refused), None)


def communicates(computation: Computation) -> bool:
    """Whether there is a collective in it, or in a computation that it calls."""
    return any(i.opcode in COLLECTIVES for i in all_instructions(computation))


def _has_loop(computation: Computation) -> bool:
    return any(
        i.opcode == "while"
        or (i.opcode in ("conditional", "call") and any(map(_has_loop, i.called)))
        for i in computation.instructions
    )


def _parts(shape: Any) -> list[Any]:
    return list(shape.tuple_shapes) if shape.element_type == TUPLE else [shape]


def inline(builder: Builder, caller: Instruction) -> None:
    """Put what a conditional or call calls in its place. ``builder``: one that replaces it."""
    builder.metadata = caller.proto.metadata
    is_tuple = caller.shape.element_type == TUPLE
    if caller.opcode == "call":
        results = [_results(builder, caller.called[0], caller.operands, is_tuple)]
    else:
        arguments = zip(caller.called, caller.operands[1:], strict=True)
        results = [_results(builder, called, [given], is_tuple) for called, given in arguments]
    chosen = results[-1]
    for index in range(len(results) - 2, -1, -1):
        predicate = selector = caller.operands[0].proto
        if selector.shape.element_type != PRIMITIVE_CODES["pred"]:
            predicate = builder.add(
                "compare", array_shape("pred"), [selector, builder.constant(index)],
                comparison_direction="EQ",
            )  # fmt: skip
        chosen = [builder.select(predicate, a, b)
                  for a, b in zip(results[index], chosen, strict=True)]  # fmt: skip
    builder.stand_in(chosen if is_tuple else chosen[0])


def put_apart(builder: Builder, caller: Instruction, branch: int) -> None:
    """Put a select between what a branch gives and a conditional of the others, of which there are two at
    least, in the place of a conditional. ``builder``: one that replaces it."""
    builder.metadata = caller.proto.metadata
    selector, last = caller.operands[0].proto, len(caller.called) - 1
    pred, is_tuple = array_shape("pred"), caller.shape.element_type == TUPLE

    def compared(direction: str, number: int) -> Any:
        operands = [selector, builder.constant(number)]
        return builder.add("compare", pred, operands, comparison_direction=direction)

    index = selector
    if branch < last:
        chosen = compared("EQ", branch)
        behind = builder.convert(compared("GT", branch), selector.shape)
        index = builder.add("subtract", selector.shape, [selector, behind])
    else:  # as is every number that is none of a branch
        chosen = builder.add("or", pred, [compared("LT", 0), compared("GE", last)])
    others = [n for n in range(last + 1) if n != branch]
    operands = [index, *(caller.operands[1 + n].proto for n in others)]
    called = [caller.called[n].proto.id for n in others]
    made = builder.add("conditional", caller.shape, operands, called_computation_ids=called)
    rest = _results(builder, caller.called[branch], [caller.operands[1 + branch]], is_tuple)
    parts = builder.elements(made) if is_tuple else [made]
    values = [builder.select(chosen, a, b) for a, b in zip(rest, parts, strict=True)]
    builder.stand_in(values if is_tuple else values[0])


def _results(
    builder: Builder, called: Computation, arguments: Sequence[Instruction], is_tuple: bool
) -> list[Any]:
    """The called computation, here: its results."""
    env: dict[Instruction, Any] = {
        p: a.proto for p, a in zip(called.parameters, arguments, strict=True)
    }
    given = dict(zip(called.parameters, arguments, strict=True))
    for read in called.instructions:
        # An element of a tuple that is made here is the operand itself, so the rest is not needed.
        if read.opcode == "get-tuple-element" and read.operands[0] in given:
            argument = given[read.operands[0]]
            if argument.opcode == "tuple":
                env[read] = argument.operands[read.proto.tuple_index].proto
    root = called.root
    if is_tuple and root.opcode == "tuple":
        builder.clone(root.operands, env)
        return [env[o] for o in root.operands]
    builder.clone([root], env)
    return builder.elements(env[root]) if is_tuple else [env[root]]
