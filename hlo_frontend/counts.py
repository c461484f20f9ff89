"""Infers for how many devices a module is, if it does not say so.

The numbers follow from the ids in groups and pairs. If a collective lists no groups, all replicas (or, with a
channel, all partitions) are one group, and shapes give its size: an all-gather multiplies by it, a
reduce-scatter divides by it, and an all-to-all of a tuple has an operand for each member.
"""

from __future__ import annotations

from math import ceil
from typing import Any

from .collectives import PAIRS_ATTRIBUTE
from .graph import COLLECTIVES, Instruction, Module
from .groups import MOST_DEVICES, GroupMode, group_mode, parse_pairs, spelled_groups
from .schema import TUPLE


def implied_counts(module: Module, num_devices: int) -> tuple[int, int]:
    """The smallest counts of replicas and partitions that its collectives need.

    If no number follows: ``num_devices`` replicas if collectives are over replicas alone, else as many
    partitions. 0 stands for a number that is not known.
    """
    modes, replicas, partitions, flattened = _needed(module)
    if _asks_for_replicas_alone(module):
        replicas = max(replicas, ceil(flattened / max(partitions, 1)))
    partitions = max(partitions, ceil(flattened / max(replicas, 1)))
    if not replicas and not partitions:
        return (num_devices, 0) if modes == {GroupMode.CROSS_REPLICA} else (0, num_devices)
    return replicas, partitions


def implied_replicas(module: Module) -> int:
    """How many replicas of one partition its collectives need; 0 if none."""
    _, replicas, _, flattened = _needed(module)
    return max(replicas, flattened)


def _needed(module: Module) -> tuple[set[GroupMode], int, int, int]:
    """The modes of the module's collectives, and the smallest numbers of replicas, of partitions, and of
    devices (from flattened ids) that they need."""
    replicas = partitions = flattened = 0
    modes: set[GroupMode] = set()
    joint: list[tuple[int, int]] = []  # replicas listed, or 0, and the devices that they are in all
    for instruction in _collectives(module):
        mode = group_mode(instruction)
        modes.add(mode)
        pairs = [(p.source, p.target) for p in instruction.proto.source_target_pairs]
        attribute = instruction.attributes.get(PAIRS_ATTRIBUTE)
        if attribute is not None:
            pairs += parse_pairs(instruction, attribute)
        groups = spelled_groups(instruction)
        sets = [*pairs, *groups]
        largest = max((member + 1 for members in sets for member in members), default=0)
        size = _group_size(instruction)
        if mode is GroupMode.FLATTENED:
            flattened = max(flattened, largest)
        elif mode is GroupMode.CROSS_REPLICA_AND_PARTITION:
            replicas = max(replicas, largest)
            joint.append((len(groups[0]) if groups else 0, size))
        elif mode is GroupMode.CROSS_PARTITION:
            partitions = max(partitions, largest if sets else size)
        else:
            replicas = max(replicas, largest if sets else size)
    for listed, size in joint:
        partitions = max(partitions, size // (listed or max(replicas, 1)))
    return modes, replicas, partitions, flattened


def _asks_for_replicas_alone(module: Module) -> bool:
    """Whether it reads the replica id and never the partition id: then its devices are replicas."""
    opcodes = {i.opcode for computation in module.computations for i in computation.instructions}
    return "replica-id" in opcodes and "partition-id" not in opcodes


def _collectives(module: Module) -> list[Instruction]:
    return [
        instruction
        for computation in module.computations
        for instruction in computation.instructions
        if instruction.opcode in COLLECTIVES
    ]


def _group_size(instruction: Instruction) -> int:
    """The size of a collective's groups by its shapes; 0 if they do not give one."""
    opcode, dimensions = instruction.opcode.removesuffix("-start"), instruction.proto.dimensions
    if opcode == "all-to-all" and not dimensions:
        return len(instruction.operands)
    if opcode not in ("all-gather", "reduce-scatter") or len(dimensions) != 1:
        return 0
    result = instruction.shape
    if instruction.opcode == "all-gather-start" and len(result.tuple_shapes) == 2:
        result = result.tuple_shapes[1]
    if not instruction.operands:
        return 0
    sizes = [_size(shape, dimensions[0]) for shape in (instruction.operands[0].shape, result)]
    small, large = sizes if opcode == "all-gather" else reversed(sizes)
    fits = small > 0 and large % small == 0 and large // small <= MOST_DEVICES
    return large // small if fits else 0


def _size(shape: Any, dimension: int) -> int:
    """Along one dimension of an array, the first where there are several; 0 if it has no such dimension."""
    while shape.element_type == TUPLE and shape.tuple_shapes:
        shape = shape.tuple_shapes[0]
    return shape.dimensions[dimension] if 0 <= dimension < len(shape.dimensions) else 0
