"""The participants of a collective: the only reader of HLO's replica groups and source-target pairs.

HLO spells groups in three ways (lists, iota, mesh axes) and means one of four things by them, decided
by ``channel_id``, ``use_global_device_ids`` and the opcode. Here all become explicit groups of
flattened logical ids, ``replica * num_partitions + partition``. Sources: ``CollectiveOpGroupMode`` in
``xla/xla_data.proto``; ``xla/service/collective_ops_utils.cc``; ``xla/hlo/ir/replica_group.cc``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum
from math import prod
from typing import Any

import numpy as np

from .graph import Instruction

Group = tuple[int, ...]

# More devices than any job has: a larger count is a mistake in a file, and no list of that length is made.
MOST_DEVICES = 1 << 20


class GroupMode(Enum):
    """What the ids in replica groups count."""

    CROSS_REPLICA = "replicas of the same partition"
    CROSS_PARTITION = "partitions of the same replica"
    CROSS_REPLICA_AND_PARTITION = "replicas, each with all of its partitions"
    FLATTENED = "flattened ids of devices"


# (does the op carry use_global_device_ids, has it a channel, is the flag set) -> mode.
# A flag without a channel is an error.
_MODES: dict[tuple[bool, bool, bool], GroupMode] = {
    (True, False, False): GroupMode.CROSS_REPLICA,
    (True, True, False): GroupMode.CROSS_REPLICA_AND_PARTITION,
    (True, True, True): GroupMode.FLATTENED,
    (False, False, False): GroupMode.CROSS_REPLICA,
    (False, True, False): GroupMode.CROSS_PARTITION,
}
_WITH_GLOBAL_IDS = ("all-reduce", "all-gather", "reduce-scatter")


def group_mode(instruction: Instruction) -> GroupMode:
    """The mode of a collective. Raises `InvalidProgramError` for a flag without a channel."""
    proto = instruction.proto
    carries_flag = instruction.opcode.removesuffix("-start") in _WITH_GLOBAL_IDS
    flag = bool(proto.use_global_device_ids) and carries_flag
    mode = _MODES.get((carries_flag, proto.channel_id > 0, flag))
    if mode is None:
        raise instruction.invalid("use_global_device_ids needs a channel_id")
    return mode


def replica_groups(instruction: Instruction, num_replicas: int, num_partitions: int) -> list[Group]:
    """Explicit groups of flattened logical ids of a collective, in the op's order.

    Raises `InvalidProgramError` where an id is out of range or occurs twice.
    """
    mode = group_mode(instruction)
    groups = spelled_groups(instruction)
    count = {
        GroupMode.CROSS_REPLICA: num_replicas,
        GroupMode.CROSS_PARTITION: num_partitions,
        GroupMode.CROSS_REPLICA_AND_PARTITION: num_replicas,
        GroupMode.FLATTENED: num_replicas * num_partitions,
    }[mode]
    if not groups:
        if mode is GroupMode.FLATTENED:
            raise instruction.invalid(
                "replica groups must be given when use_global_device_ids is set"
            )
        groups = [tuple(range(count))]
    seen: set[int] = set()
    for group in groups:
        for member in group:
            if not 0 <= member < count:
                raise instruction.invalid(
                    f"id {member} in its replica groups is out of range: they hold {mode.value}, "
                    f"of which there are {count}"
                )
            if member in seen:
                raise instruction.invalid(f"id {member} occurs twice in its replica groups")
            seen.add(member)
    return _flatten(groups, mode, num_replicas, num_partitions)


def source_target_pairs(
    instruction: Instruction,
    pairs: Sequence[tuple[int, int]],
    num_replicas: int,
    num_partitions: int,
) -> list[tuple[int, int]]:
    """Pairs of flattened logical ids: of partitions with a channel, of replicas without.

    Raises `InvalidProgramError` where an id is out of range, or is twice a source or a target.
    """
    across_partitions = instruction.proto.channel_id > 0
    count = num_partitions if across_partitions else num_replicas
    for column, role in enumerate(("source", "target")):
        ids = [pair[column] for pair in pairs]
        for member in ids:
            if not 0 <= member < count:
                what = "partitions" if across_partitions else "replicas (it has no channel_id)"
                raise instruction.invalid(
                    f"{role} {member} must be at least 0 and below {count}: its pairs are of {what}, of "
                    f"which there are {count}"
                )
        if len(set(ids)) != len(ids):
            repeated = next(i for i in ids if ids.count(i) > 1)
            raise instruction.invalid(f"{role} {repeated} occurs in more than one pair")
    if across_partitions:
        return [
            (replica * num_partitions + source, replica * num_partitions + target)
            for replica in range(num_replicas)
            for source, target in pairs
        ]
    return [
        (source * num_partitions + partition, target * num_partitions + partition)
        for partition in range(num_partitions)
        for source, target in pairs
    ]


def _flatten(
    groups: Sequence[Group], mode: GroupMode, num_replicas: int, num_partitions: int
) -> list[Group]:
    if mode is GroupMode.FLATTENED:
        return list(groups)
    if mode is GroupMode.CROSS_REPLICA:
        return [
            tuple([replica * num_partitions + partition for replica in group])
            for group in groups
            for partition in range(num_partitions)
        ]
    if mode is GroupMode.CROSS_PARTITION:
        return [
            tuple([replica * num_partitions + partition for partition in group])
            for replica in range(num_replicas)
            for group in groups
        ]
    # Replica-outer, as XLA runs it (the StableHLO specification has partitions outside).
    return [
        tuple([r * num_partitions + p for r in group for p in range(num_partitions)])
        for group in groups
    ]


def spelled_groups(instruction: Instruction) -> list[Group]:
    """Groups of ids as the instruction spells them, whatever they count; none if it lists none."""
    proto = instruction.proto
    kind = proto.WhichOneof("one_of")
    if kind == "iota_collective_device_list":
        return _iota_groups(instruction, proto.iota_collective_device_list)
    if kind == "mesh_axes_replica_group_list":
        return _mesh_groups(instruction, proto.mesh_axes_replica_group_list)
    listed = proto.collective_device_list.replica_groups or proto.replica_groups
    return [tuple(group.replica_ids) for group in listed if group.replica_ids]


def _transposed_iota(
    instruction: Instruction, shape: Sequence[int], permutation: Sequence[int]
) -> np.ndarray:
    if sorted(permutation or range(len(shape))) != list(range(len(shape))):
        raise instruction.invalid(f"{list(permutation)} is not a permutation of {len(shape)} axes")
    if any(size < 0 for size in shape) or not 0 <= prod(shape) <= MOST_DEVICES:
        raise instruction.invalid(
            f"its groups are made of {prod(shape)} ids; there are at most {MOST_DEVICES} devices"
        )
    ids = np.arange(prod(shape)).reshape(shape)
    return ids.transpose(permutation) if permutation else ids


def _iota_groups(instruction: Instruction, iota: Any) -> list[Group]:
    """``[G,S]<=[d0,d1,…]T(p…)``: an iota of shape d, transposed by p, reshaped to G groups of S."""
    shape = (iota.num_replica_groups, iota.num_devices_per_group)
    if min(shape) < 0:
        raise instruction.invalid(f"its groups are {shape[0]} of {shape[1]} devices")
    ids = _transposed_iota(instruction, iota.iota_reshape_dims, iota.iota_transpose_perm)
    if ids.size != prod(shape):
        raise instruction.invalid(f"{ids.size} ids do not make {shape[0]} groups of {shape[1]}")
    return [tuple(group) for group in ids.reshape(shape).tolist()]


def _mesh_groups(instruction: Instruction, spelled: Any) -> list[Group]:
    """Mesh axes: members differ in the listed axes only, the last listed axis fastest.

    An axis of size n with ``sub_axis_info`` (pre, size) is seen as axes of sizes pre, size and
    n / (pre * size), of which the middle one is meant.
    """
    mesh = spelled.mesh
    sizes = [axis.size for axis in mesh.axes]
    if any(size < 1 for size in sizes) or prod(sizes) > MOST_DEVICES:
        raise instruction.invalid(f"its mesh has the impossible shape {sizes}")
    if mesh.device_ids:
        devices = np.array(mesh.device_ids, dtype=np.int64)
    elif mesh.iota_transform.reshape_dims:
        transform = mesh.iota_transform
        devices = _transposed_iota(instruction, transform.reshape_dims, transform.transpose_perm)
        devices = devices.reshape(-1)
    else:
        devices = np.arange(prod(sizes))
    if devices.size != prod(sizes):
        raise instruction.invalid(f"its mesh of shape {sizes} lists {devices.size} devices")

    wanted: dict[int, list[tuple[int, int, int]]] = {}  # axis -> (pre size, size, position)
    for position, axis in enumerate(spelled.axes):
        if not 0 <= axis.mesh_axis_index < len(sizes):
            raise instruction.invalid(f"its mesh has no axis {axis.mesh_axis_index}")
        size = sizes[axis.mesh_axis_index]
        pre, part = 1, size
        if axis.HasField("sub_axis_info"):
            pre, part = axis.sub_axis_info.pre_size, axis.sub_axis_info.size
        if pre < 1 or part < 1 or size % (pre * part):
            raise instruction.invalid(f"({pre}){part} is no part of a mesh axis of size {size}")
        wanted.setdefault(axis.mesh_axis_index, []).append((pre, part, position))

    split: list[int] = []  # sizes of all axes, split where sub-axes are wanted
    picked: dict[int, int] = {}  # position in the op's list of axes -> index in `split`
    for index, size in enumerate(sizes):
        done = 1
        for pre, part, position in sorted(wanted.get(index, [])):
            if pre % done:
                raise instruction.invalid("sub-axes of its replica groups overlap")
            split += [pre // done, part]
            picked[position] = len(split) - 1
            done = pre * part
        split.append(size // done)
    grouped = [picked[position] for position in range(len(spelled.axes))]
    kept = [axis for axis in range(len(split)) if axis not in grouped]
    ids = devices.reshape(split).transpose(kept + grouped)
    size = prod([split[axis] for axis in grouped])
    return [tuple(group) for group in ids.reshape(-1, size).tolist()]


def parse_pairs(instruction: Instruction, text: str) -> list[tuple[int, int]]:
    """Pairs spelled ``{{0,1},{1,2}}``, as in frontend attributes."""
    stripped = "".join(text.split())
    if stripped in ("", "{}"):
        return []
    if not (stripped.startswith("{{") and stripped.endswith("}}")):
        raise instruction.invalid(f"{text!r} is not a list of pairs")
    pairs: list[tuple[int, int]] = []
    for part in stripped[2:-2].split("},{"):
        try:
            first, second = part.split(",")
            pairs.append((int(first), int(second)))
        except ValueError:
            raise instruction.invalid(f"{text!r} is not a list of pairs") from None
    return pairs


def connected_components(pairs: Iterable[tuple[int, int]]) -> list[Group]:
    """Those that pairs connect with each other, group by group, each in rising order."""
    parent: dict[int, int] = {}

    def find(member: int) -> int:
        parent.setdefault(member, member)
        while parent[member] != member:
            parent[member] = parent[parent[member]]
            member = parent[member]
        return member

    for source, target in pairs:
        parent[find(source)] = find(target)
    groups: dict[int, list[int]] = {}
    for member in sorted(parent):
        groups.setdefault(find(member), []).append(member)
    return [tuple(group) for group in groups.values()]
