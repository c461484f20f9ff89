"""Makes one permute of what collectives, pads, concatenations and slices move together.

Of stages that are one array, XLA's partitioner hands on what they give by a permute where the shift is a
`jnp.roll`. Of other shifts it makes more:

- of `jnp.pad` and a slice, going back: a permute from each stage to each one before it, a concatenation, a
  pad, a slice of two stages by the device's number, a permute of these, and a slice again; or an all-gather
  in the place of the former;
- of `jnp.concatenate([x[None], state[:-1]])`: three all-to-alls, by which each device has some rows of what
  all stages hold, and back; or, of few numbers, a gather, or a sum in which each device has zeros for those
  of others.

Here it is followed where each element of what comes of that is from (`places`): of which value, computed on
which device, and where in it; or a positive zero. Where each device has all elements of a value as they lie
on one device, the value is sent there by one permute, or taken as it is; where it differs from device to
device which value that is, it is selected by the device's number. Nothing but moves is replaced, so all bits
are the same. What is computed with while it lies in another order stays, as where a stage's rows are divided
among the devices and multiplied before they are brought back.
"""

from __future__ import annotations

from stretto.collectives.ops import Kind

from ..collectives import CollectiveReader
from ..flatten import flatten
from ..graph import Instruction, Module
from ..passes.bytes.device_values import DeviceValues
from ..values import Node, NodeKind
from .cones import Made, Moving, Share, written
from .given_out import given_out
from .places import SHAPES, Places, moves_between


def moved(serialized: bytes, num_replicas: int, num_partitions: int) -> bytes | None:
    """The module with such moves in the bodies of loops of its entry computation as permutes, and without
    those beside the loops that `given_out` leaves out; None if there are none."""
    if num_replicas > 1:
        return None
    found: bytes | None = None
    while (after := _once(serialized if found is None else found, num_partitions)) is not None:
        found = after
    return found


def _once(serialized: bytes, num_partitions: int) -> bytes | None:
    """The module with one more value made by permutes."""
    module = Module.parse(serialized)
    entry = flatten(module.entry, CollectiveReader(1, num_partitions))
    places = Places(DeviceValues(entry, 1, num_partitions), num_partitions)
    for loop in entry.nodes:
        if loop.kind is not NodeKind.LOOP or not any(map(moves_between, loop.blocks[1].nodes)):
            continue
        body = loop.instruction.called[0]
        made = _find(Moving(loop.blocks[1], body, places))
        if made is not None:
            return written(module, body, made, num_partitions)
    return given_out(module, entry, places)


def _find(body: Moving) -> Made | None:
    """The last value of a loop's body that is moved so, with all that are the same in other shapes."""

    def changes_what_was_received(node: Node) -> bool:
        """Whether it is more than a permute, a choice, or another shape of what was received."""
        if node.collective is not None and node.collective.kind is not Kind.PERMUTE:
            return True
        if node.instruction.opcode in ("select", *SHAPES):
            return False
        return not body.received.isdisjoint(body.through(node))

    found: list[Instruction] = []
    parts: list[Share] = []
    through: list[Instruction] = []
    for node in body.last_first():
        cone = body.cone(node)
        if cone is None or not any(map(changes_what_was_received, cone.nodes)):
            continue
        own = body.parts(node, cone)
        if own and (not found or own == parts):
            found, parts = [*found, node.instruction], own
            through += cone.collectives
    return Made(found, parts, through[0]) if found else None
