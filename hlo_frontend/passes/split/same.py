"""Which values of a program are the same on all devices of each group.

Parameters are where their shardings say so, results of all-reduces and all-gathers over whole groups, and
what follows from such values alone. In loops the same must hold of what every iteration leaves.
"""

from __future__ import annotations

from collections.abc import Sequence

from stretto.collectives.ops import Kind

from ...graph import Module
from ...shardings import parts
from ...values import BlockGraph, Node, NodeKind, Value

Groups = tuple[tuple[int, ...], ...]

# Collectives whose results are the same on all members of a group.
_EQUAL = frozenset({Kind.ALL_GATHER, Kind.ALL_REDUCE})


def shardings_of(module: Module, num_replicas: int) -> list[bytes | None]:
    """The serialized sharding of each parameter of a module; None where it has none, or there are replicas,
    of which shardings say nothing."""
    parameters = module.entry.parameters
    found = list(module.proto.spmd_parameters_shardings)
    if len(found) != len(parameters):  # HLO text has shardings only on parameters
        found = [p.proto.sharding or None for p in parameters]
    return found if num_replicas == 1 else [None] * len(found)


class Sameness:
    """Of a program. ``shardings``: of its parameters, as `shardings_of` gives them; where they are not as
    many as parameters, none is taken to be the same."""

    def __init__(self, entry: BlockGraph, shardings: Sequence[bytes | None] = ()) -> None:
        self._entry = entry
        self._known = shardings if len(shardings) == len(entry.parameters) else ()
        self._found: dict[Groups, set[Value]] = {}

    def varying(self, groups: Groups) -> set[Value]:
        """The values, in all blocks, that may differ between members of a group."""
        if groups not in self._found:
            found = set(self._entry.parameters)
            for value, sharding in zip(self._entry.parameters, self._known, strict=False):
                part = None if sharding is None else parts(sharding)
                if part and all(len({part(d) for d in group}) == 1 for group in groups):
                    found.discard(value)
            _mark(self._entry, groups, found)
            self._found[groups] = found
        return self._found[groups]


def _mark(block: BlockGraph, groups: Groups, found: set[Value]) -> None:
    """Add what may differ of a block whose parameters are marked. Marks are only ever added."""
    for node in block.nodes:
        operands = [value.root for value in node.operands if value.type is not None]
        varies = not found.isdisjoint(operands)
        if node.kind is NodeKind.LOOP:
            _mark_loop(node, operands, groups, found)
        elif node.kind is NodeKind.BRANCH:
            _mark_branch(node, operands, groups, found)
        elif node.collective is not None:
            c = node.collective
            if c.kind not in _EQUAL or not _covers(c.groups, groups):
                found.update(node.results)
        elif varies or node.kind is not NodeKind.COMPUTE or node.has_side_effect:
            found.update(node.results)


def _mark_loop(node: Node, operands: Sequence[Value], groups: Groups, found: set[Value]) -> None:
    condition, body = node.blocks
    carries = list(zip(operands, condition.parameters, body.parameters, strict=True))
    for operand, tested, carried in carries:
        if operand in found:
            found.update((tested, carried))
    while True:
        before = len(found)
        _mark(condition, groups, found)
        if any(result.root in found for result in condition.results):
            found.update(body.parameters)
        _mark(body, groups, found)
        for result, (_, tested, carried) in zip(body.results, carries, strict=True):
            if result.root in found:
                found.update((tested, carried))
        if len(found) == before:
            break
    for result, parameter in zip(_arrays(node), body.parameters, strict=True):
        if parameter in found:
            found.add(result)


def _mark_branch(node: Node, operands: Sequence[Value], groups: Groups, found: set[Value]) -> None:
    chosen_by, *given = operands
    selects = {chosen_by} if node.selector is None else {chosen_by, node.selector.root}
    same = found.isdisjoint(selects)
    rest = iter(given)
    for inner in node.blocks:
        for parameter in inner.parameters:
            if next(rest) in found or not same:
                found.add(parameter)
        _mark(inner, groups, found)
    for i, result in enumerate(_arrays(node)):
        if not same or any(inner.results[i].root in found for inner in node.blocks):
            found.add(result)


def _arrays(node: Node) -> list[Value]:
    return [value for value in node.results if value.type is not None]


def _covers(larger: Groups, groups: Groups) -> bool:
    """Whether each group lies in one of the larger ones."""
    around = {d: i for i, group in enumerate(larger) for d in group}
    return all(len({around.get(d, -1 - d) for d in group}) == 1 for group in groups)
