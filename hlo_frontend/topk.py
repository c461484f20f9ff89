"""Replaces the instruction ``topk`` by a sort, since XLA cannot convert it to StableHLO.

Like XLA's ``TopkDecomposer``: values and their indices are sorted together along the last dimension, stably
and by the total order of floats, and the first k are cut out. Programs of JAX have no ``topk`` here: XLA has
made it a sort or a custom call before `tap` takes the module.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

from .schema import PRIMITIVE_TYPES, HloModuleProto

_FLOATS = frozenset(code for code, name in PRIMITIVE_TYPES.items() if name[0] in "fb")
_S32, _PRED, _TUPLE = 4, 1, 13
_OPCODE = b"topk"


def spell_out_topk(serialized: bytes) -> bytes:
    """A serialized ``HloModuleProto`` without ``topk``. One that has none comes back as it is."""
    if _OPCODE not in serialized:
        return serialized
    module = HloModuleProto.FromString(serialized)
    ids = count(1 + max((i.id for c in module.computations for i in c.instructions), default=0))
    numbers = count(1 + max((c.id for c in module.computations), default=0))
    comparators: dict[tuple[int, bool], Any] = {}
    for computation in module.computations:
        found = [i for i in computation.instructions if i.opcode == "topk"]
        if not found:
            continue
        by_id = {i.id: i for i in computation.instructions}
        for instruction in found:
            key = by_id[instruction.operand_ids[0]].shape.element_type, instruction.largest
            if key not in comparators:
                comparators[key] = _comparator(next(numbers), *key, ids)
        moved = [type(i).FromString(i.SerializeToString()) for i in computation.instructions]
        del computation.instructions[:]
        for instruction in moved:
            if instruction.opcode == "topk":
                operand = by_id[instruction.operand_ids[0]].shape
                comparator = comparators[operand.element_type, instruction.largest]
                _sorted(computation, instruction, operand, comparator.id, ids)
            computation.instructions.add().CopyFrom(instruction)
    if not comparators:
        return serialized
    others = list(module.computations)
    spelled = HloModuleProto()
    spelled.CopyFrom(module)
    del spelled.computations[:]
    spelled.computations.extend([*comparators.values(), *others])
    return bytes(spelled.SerializeToString())


def _sorted(computation: Any, topk: Any, operand: Any, comparator: int, ids: Iterator[int]) -> None:
    """Add what computes ``topk`` to the computation, and make it the tuple of that."""

    def add(opcode: str, shape: Any, *operands: int) -> Any:
        made = computation.instructions.add(opcode=opcode, id=next(ids))
        made.name = f"{topk.name}.{opcode}.{made.id}"
        made.shape.CopyFrom(shape)
        made.operand_ids.extend(operands)
        return made

    last = len(operand.dimensions) - 1
    (values,) = topk.operand_ids
    indices = type(operand).FromString(operand.SerializeToString())
    indices.element_type = _S32
    iota = add("iota", indices)
    iota.dimensions.append(last)
    both = type(operand)(element_type=_TUPLE, tuple_shapes=[operand, indices])
    order = add("sort", both, values, iota.id)
    order.dimensions.append(last)
    order.is_stable = True
    order.called_computation_ids.append(comparator)
    cut = []
    for index, whole in enumerate((operand, indices)):
        part = add("get-tuple-element", whole, order.id)
        part.tuple_index = index
        first = add("slice", topk.shape.tuple_shapes[index], part.id)
        for size in topk.shape.tuple_shapes[index].dimensions:
            first.slice_dimensions.add(start=0, limit=size, stride=1)
        cut.append(first.id)
    topk.opcode = "tuple"
    del topk.operand_ids[:]
    topk.operand_ids.extend(cut)
    for field in ("k", "largest"):
        topk.ClearField(field)


def _comparator(number: int, code: int, largest: bool, ids: Iterator[int]) -> Any:
    """Of two values and their two indices: whether the first value comes before the second."""
    made = HloModuleProto().computations.add(name=f"topk.comparator.{number}", id=number)
    for index, element_type in enumerate((code, code, _S32, _S32)):
        parameter = made.instructions.add(name=f"{made.name}.{index}", opcode="parameter")
        parameter.id = next(ids)
        parameter.parameter_number = index
        parameter.shape.element_type = element_type
        made.program_shape.parameters.add().CopyFrom(parameter.shape)
        made.program_shape.parameter_names.append(parameter.name)
    compare = made.instructions.add(name=f"{made.name}.compare", opcode="compare")
    compare.id = next(ids)
    compare.shape.element_type = _PRED
    compare.operand_ids.extend(p.id for p in made.instructions[:2])
    compare.comparison_direction = "GT" if largest else "LT"
    if code in _FLOATS:
        compare.comparison_type = "TOTALORDER"
    made.root_id = compare.id
    made.program_shape.result.CopyFrom(compare.shape)
    return made
