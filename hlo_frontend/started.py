"""Puts compute between the starts and the dones of collectives that a program starts itself.

JAX's ``psum_start``, ``all_gather_start`` and others (`jax._src.lax.parallel`, from jax 0.11 on) become pairs
of a start and a done. What a program computes between the two reaches the HLO only as data: instructions are
sorted anew. So a start comes right behind what it reads, in the order of the starts, and its done right ahead
of what reads it: all other compute of its level lies between, and what the program runs between (loops and
other collectives) starts behind it.

Where collectives are planned (`overlap`), the plan decides. Invariant: the order follows from the block
alone, as the default order does.
"""

from __future__ import annotations

from collections.abc import Iterable

from .carve import Await
from .passes.unread import Ordered
from .values import Node


def with_starts(ordered: Ordered) -> list[Node | Await] | Ordered:
    """The default order of a block, with its starts ahead and its dones behind. It stays as it is where there
    are none, or where devices skip parts of it (`passes.unread`)."""
    started = [node for node in ordered if node.is_started]
    if not started or ordered.parts:
        return ordered
    nodes = list(ordered)
    first = 0
    for node in started:
        first = _raise(nodes, node, first)
    for node in started:
        _sink(nodes, node)
    return _with_awaits(nodes, started)


def _raise(nodes: list[Node], start: Node, first: int) -> int:
    """Move a start behind what it needs, and that ahead of other compute; not ahead of position ``first``,
    the end of the start before. Gives its own end."""
    at = nodes.index(start)
    needed = {start, *_before(start)}
    for node in reversed(nodes[:at]):
        if node in needed:
            needed |= _before(node)
    ends = [i + 1 for i in range(first, at) if nodes[i] in needed and nodes[i].is_runtime]
    begin = max([first, *ends])
    window = nodes[begin : at + 1]
    ahead = [n for n in window if n in needed]
    nodes[begin : at + 1] = ahead + [n for n in window if n not in needed]
    return begin + len(ahead)


def _sink(nodes: list[Node], start: Node) -> None:
    """Move compute that does not need a start's result ahead of the first that does."""
    needing = _needing(nodes, start)
    at = next((i for i, n in enumerate(nodes) if n in needing), len(nodes))
    end = next((i for i in range(at, len(nodes)) if nodes[i].is_runtime), len(nodes))
    window = nodes[at:end]
    nodes[at:end] = [n for n in window if n not in needing] + [n for n in window if n in needing]


def _needing(nodes: Iterable[Node], start: Node) -> set[Node]:
    """The nodes that come after a start, through data or order."""
    reached = {start}
    for node in nodes:
        if not reached.isdisjoint(_before(node)):
            reached.add(node)
    return reached - {start}


def _before(node: Node) -> set[Node]:
    return {before for before, _ in node.before()}


def _with_awaits(nodes: list[Node], started: list[Node]) -> list[Node | Await]:
    """The order, in which a segment ends where a start is awaited."""
    ends: dict[int, list[Node]] = {}
    for start in started:
        needing = _needing(nodes, start)
        at = next((i for i, n in enumerate(nodes) if n in needing), len(nodes))
        ends.setdefault(at, []).append(start)
    placed: list[Node | Await] = []
    for i, node in enumerate(nodes):
        placed += [Await(start) for start in ends.get(i, ())]
        placed.append(node)
    return placed + [Await(start) for start in ends.get(len(nodes), ())]
