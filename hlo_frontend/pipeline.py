"""The passes of a module's graph, in their order (`PASSES`), and the driver that runs them.

A pass is a function that changes a `Compilation` in place: its graph, or what was found about it. Its
docstring says what it needs of the passes before it, and what it leaves to those behind it. Between two
passes the graph holds together (`graph_check`) and prints (`graph_text`).

`run` writes the graph after each pass where it is given a `Dump` (``STRETTO_DUMP``), and checks it where
`CHECKED` is set in the environment, as the tests of this repository do: checks take about as long as the
passes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from stretto.collectives.order import Schedule

from .carve import BlockPlan
from .collective_order import schedule_of
from .collectives import CollectiveReader
from .flatten import flatten
from .graph import Module
from .graph_check import GraphError
from .overlap.apply import OverlapPolicy, Planned, carve_planned, planned_loops
from .overlap.apply import plan as plan_overlap
from .overlap.measured import key_of
from .passes import bytes as fewer_bytes
from .passes import pseudo_tokens, rotate, unread, valid
from .passes.order import order
from .values import BlockGraph, Node

# The variable that has every pass's graph checked. Not an option: nothing but a mistake of stretto's is
# found.
CHECKED = "_STRETTO_CHECK_GRAPHS"


class Dump(Protocol):
    """Takes what a program was at a stage of its compilation (see `runtime.dump`)."""

    def __call__(self, program: str, stage: str, text: str) -> None:
        """``program``: its name. ``stage``: what it has come through."""
        ...


@dataclass(frozen=True)
class Source:
    """A serialized ``HloModuleProto`` for one device, and how it is to be lowered.

    All that follows from it follows from its bytes alone: equal ones give equal programs in all processes.
    """

    hlo: bytes = field(repr=False)
    num_replicas: int
    num_partitions: int
    pseudo_tokens: bool = True
    valid: valid.ValidPolicy = valid.ValidPolicy()  # noqa: RUF009 (frozen)
    rewrites: bool = False

    def ordered(self, block: BlockGraph) -> unread.Ordered:
        """The order of a block without a plan."""
        return order(block, self.valid.least_flops)


@dataclass
class Compilation:
    """A module on its way to a program, and what passes have found about it.

    ``source``: the module, and how it is to be compiled. ``donated``: positions of inputs that the caller
    gives up. ``overlap``: how collectives are scheduled, None where they are not. ``carved`` is ``entry``
    in an order, cut into segments. ``rotated``: whether collectives cross into the next iteration of a
    loop.
    """

    source: Source
    module: Module
    entry: BlockGraph
    donated: tuple[int, ...] = ()
    overlap: OverlapPolicy | None = None
    valid: valid.ValidReport = field(default_factory=valid.ValidReport)
    rewritten: fewer_bytes.RewriteReport = field(default_factory=fewer_bytes.RewriteReport)
    carved: BlockPlan | None = None
    schedule: Schedule = field(default_factory=Schedule)
    planned: Planned | None = None
    rotated: bool = False
    _orders: dict[BlockGraph, tuple[list[Node], unread.Ordered]] = field(
        default_factory=dict, repr=False
    )

    @classmethod
    def of(
        cls,
        source: Source,
        module: Module,
        donated: tuple[int, ...] = (),
        overlap: OverlapPolicy | None = None,
    ) -> Compilation:
        """The beginning: the module's graph as it is written."""
        reader = CollectiveReader(source.num_replicas, source.num_partitions)
        return cls(source, module, flatten(module.entry, reader), donated, overlap)

    def ordered(self, block: BlockGraph) -> unread.Ordered:
        """The order of a block without a plan, which is looked for anew when its nodes are others."""
        nodes, found = self._orders.get(block, (None, None))
        if found is None or nodes != block.nodes:
            found = self.source.ordered(block)
            self._orders[block] = list(block.nodes), found
        return found


Pass = Callable[[Compilation], None]


def _pseudo_tokens(c: Compilation) -> None:
    """Needs the graph as it is written. Leaves order in the place of scalars that only order collectives."""
    if c.source.pseudo_tokens:
        pseudo_tokens.remove_pseudo_tokens(c.entry)


def _valid(c: Compilation) -> None:
    """Needs all order that there is. Leaves the valid iterations of transfers in their collectives, and the
    proof of what nobody reads in the report."""
    source = c.source
    c.valid = valid.apply(c.entry, source.num_replicas, source.num_partitions, source.valid)


def _unread(c: Compilation) -> None:
    """Needs the proof of `_valid`, and drops it. Leaves `BlockGraph.unread` of compute that nobody
    reads somewhere."""
    if c.valid.liveness is not None:
        unread.mark(c.valid.liveness)
    c.valid = replace(c.valid, liveness=None)


def _bytes(c: Compilation) -> None:
    """Needs the valid iterations, which keep transfers as they are. Leaves collectives that send less,
    and new nodes beside them."""
    if c.source.rewrites:
        c.rewritten = fewer_bytes.rewrite(c.entry, c.source.num_replicas, c.source.num_partitions)


def _schedule(c: Compilation) -> None:
    """Needs the collectives that the program is to have. Leaves the graph as it is, its default order,
    and the schedule that ranks compare: passes behind this one change when collectives start and are
    awaited, and ranks that differ come back to the program without them."""
    c.carved = carve_planned(c.entry, None, c.ordered)
    c.schedule = schedule_of(c.entry, c.carved)


def _overlap(c: Compilation) -> None:
    """Needs `_schedule`. Leaves plans of blocks, the combined collectives of those taken apart, and
    staged loops in the place of others."""
    if c.overlap is None:
        return
    policy = policy_for(c.source, c.module, c.overlap)
    c.planned = plan_overlap(c.entry, policy, c.donated, c.ordered)


def policy_for(source: Source, module: Module, overlap: OverlapPolicy) -> OverlapPolicy:
    """The policy, with the measured times of this module where there are any."""
    if not overlap.measured:
        return overlap
    return overlap.of(key_of(module, source.num_replicas, source.num_partitions))


def _rotate(c: Compilation) -> None:
    """Needs to know which loops have a plan, and leaves those alone. Leaves `BlockGraph.phases`
    of the bodies of others, and `BlockGraph.crossing`: permutes that only the next iteration reads."""
    if c.source.valid.pipeline:
        c.rotated = rotate.rotate(c.entry, planned_loops(c.planned))
        if c.rotated:
            c._orders.clear()  # which follow phases


def _carve(c: Compilation) -> None:
    """Needs the plans and the phases. Leaves the graph as it is, and the order and the segments of all
    blocks."""
    if c.planned is not None and c.planned.changed:
        c.carved = carve_planned(c.entry, c.planned, c.ordered)
    elif c.rotated or c.carved is None:
        c.carved = carve_planned(c.entry, None, c.ordered)


# What settles which collectives a program has.
SETTLING: tuple[Pass, ...] = (_pseudo_tokens, _valid, _unread, _bytes)
# What every program goes through, however its collectives are scheduled: what ranks compare.
COMMON: tuple[Pass, ...] = (*SETTLING, _schedule)
PASSES: tuple[Pass, ...] = (*COMMON, _overlap, _rotate, _carve)


def run(c: Compilation, passes: Sequence[Pass] = PASSES, dump: Dump | None = None) -> None:
    """Take a module through the passes, in place.

    Raises `GraphError` where graphs are checked and a pass leaves one that does not hold together.
    """
    checked = os.environ.get(CHECKED) == "1"
    _look(c, "flatten", checked, dump)
    for one in passes:
        one(c)
        _look(c, one.__name__.strip("_"), checked, dump)


def _look(c: Compilation, stage: str, checked: bool, dump: Dump | None) -> None:
    """Write and check what a pass has left."""
    if dump is not None:
        dump(c.module.name, stage, str(c.entry))
    if checked:
        try:
            c.entry.check()
        except GraphError as error:
            raise GraphError(f"{c.module.name}, after pass {stage}: {error}") from None
