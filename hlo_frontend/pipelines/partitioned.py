"""Brings pipelines that XLA partitioned from one array of all stages into the form of a device's program.

A pipeline may be written for all stages at once, without `shard_map`: the stages' inputs are one array,
sharded over the stages, a stage is a function under `vmap`, and a shift (`jnp.roll`) hands on. XLA partitions
that: the shift becomes a permute, as in a program that is written for a device. But outputs, which all stages
have, then communicate in the loop: what the last stage gives goes to all stages by an all-reduce in every
iteration, and going back, what a microbatch begins with goes from the first stage, which has it as all have,
to the last one. `localized` rewrites both, since `recognize` wants loops in which devices have nothing from
each other but what a stage takes:

- An all-reduce to which one member of each group gives something, and the others zeros, and whose result is
  only put away in an array that begins with zeros, or added to it, is made behind the loop, of the whole
  array. The member puts its own value away, the others zeros: each element is then, for it, the sum of the
  same numbers in the same order. XLA combines all-reduces: each array of one may be summed up by itself.
  Where it is used for more, as by a loss in the loop, that is left to this member (`by_owner`), be it with
  what communicates in it taken apart first (`heads`).
- A permute of values that are the same on all devices that it connects is not needed: its target takes its
  own.

A value of the body is the same on all devices if it is computed from values that are, which is known of
arguments by their shardings, and of the results of an all-reduce by its groups (`Sameness`).

Results are equal bit for bit, as far as what is computed is computed as before. A collective for which this
does not hold stays; then `recognize` refuses the loop, with the reason that is found here.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from stretto.collectives.ops import Kind, Reduction

from ..collectives import CollectiveReader
from ..flatten import flatten
from ..graph import Module
from ..passes.valid.trace import Forward, LoopTrace, is_transfer
from ..values import Node, NodeKind
from .by_owner import left_to_owner
from .heads import apart
from .refusal import Refusal
from .stacked_body import Body, UsedOtherwise

Whys = dict[str, str]  # by the name of a collective: why it stays in its loop


@dataclass
class Localized:
    """A module with collectives taken out of its loops. ``whys``: why others stay; ``used``: those of them
    whose results are used for more than to be put away. ``left``: whether something is left to one device
    that all computed, which an engine may round otherwise."""

    module: bytes
    whys: Whys = field(default_factory=dict)
    used: Whys = field(default_factory=dict)
    left: bool = False


def localized(
    serialized: bytes, num_replicas: int, num_partitions: int, *, leaves: bool = True
) -> Localized:
    """The module with such collectives taken out of its loops. ``leaves``: whether one device may be left
    what all compute (`by_owner`).

    Raises `GaveUpError` if the program is too large to be followed.
    """
    made = Localized(serialized)
    if num_replicas > 1:
        return made
    while _once(made, num_partitions, leaves=leaves):
        pass
    if not leaves or not made.used:
        return made
    other = Localized(apart(made.module, num_partitions))
    while _once(other, num_partitions, leaves=True, sums=True):
        pass
    if other.left:
        return other
    made.whys |= {name: why for name, why in other.whys.items() if name in made.used}
    return made


def _once(given: Localized, count: int, *, leaves: bool, sums: bool = False) -> bool:
    """Take one more collective out of the module; whether there was one. ``sums``: as of `Sameness`."""
    serialized, whys = given.module, given.whys
    module = Module.parse(serialized)
    reader = CollectiveReader(1, count)
    entry = flatten(module.entry, reader)
    loops = [
        n
        for n in entry.nodes
        if n.kind is NodeKind.LOOP and any(map(is_transfer, n.blocks[1].nodes))
    ]
    if not any(map(_reduces, entry.nodes)) and not any(
        _reduces(n) for loop in loops for n in loop.blocks[1].nodes
    ):
        return False
    forward = Forward(1, count, follow_zeros=True)
    trace = forward.program(entry)
    bodies = {
        loop.instruction: Body(module, loop, forward, inner, sums=sums)
        for loop in loops
        if isinstance(inner := trace.inner.get(loop), LoopTrace) and inner.iterations
    }
    for body in bodies.values():
        for node in body.block.nodes:
            name = node.instruction.name
            if name in whys or node.collective is None:
                continue
            try:
                if _reduces(node) and len(node.results) > 1:
                    if alone := body.from_one(node):
                        given.module = body.apart(node, alone)
                        return True
                elif _reduces(node):
                    given.module = body.behind_the_loop(node)
                    return True
                if node.collective.kind is Kind.PERMUTE and body.is_local(node):
                    given.module = body.taken_locally(node)
                    return True
            except Refusal as refusal:
                whys[name] = str(refusal)
                if isinstance(refusal, UsedOtherwise):
                    given.used[name] = str(refusal)
    for body in bodies.values() if leaves else ():
        for node in body.block.nodes:
            name = node.instruction.name
            if name not in given.used:
                continue
            try:
                given.module = left_to_owner(bodies, body, node, *body.given(node))
            except Refusal as refusal:
                whys[name] = f"{given.used[name]}. It is not left to one stage: {refusal}"
                continue
            given.left = True
            return True
    return False


def _reduces(node: Node) -> bool:
    return (
        node.collective is not None
        and node.instruction.opcode == "all-reduce"
        and node.collective.reduction is Reduction.SUM
    )
