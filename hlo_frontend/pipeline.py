"""The passes of a module's graph, in their order (`PASSES`), and the driver that runs them.

A pass is a function that changes a `Compilation` in place: its graph, or its other fields. The docstring says
what the pass needs of earlier passes, and what it leaves for later ones. Between two passes the graph is
consistent (`graph_check`) and can be printed (`graph_text`).

`run` writes the graph after each pass if it gets a `Dump` (``STRETTO_DUMP``), and checks it if `CHECKED` is
set in the environment, as the tests of this repository do; the program that comes of it is checked then too.
Checks take about as long as the passes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from stretto.collectives.order import Schedule

from .carve import Await, BlockPlan
from .collective_order import schedule_of
from .collectives import CollectiveReader
from .flatten import flatten
from .graph import Module
from .graph_check import GraphError
from .overlap.apply import OverlapPolicy, Planned, carve_planned, planned_loops, with_crossings
from .overlap.apply import plan as plan_overlap
from .overlap.measured import key_of
from .passes import bytes as fewer_bytes
from .passes import conditions, pseudo_tokens, rotate, unread, valid
from .passes import split as chunks
from .passes.order import order
from .shardings import shardings_of
from .started import with_starts
from .values import BlockGraph, Node

# The environment variable that turns on checks. It is no option for users: checks find only mistakes of
# stretto.
CHECKED = "_STRETTO_CHECK_GRAPHS"


class Dump(Protocol):
    """Takes texts of a program at stages of its compilation (see `runtime.dump`)."""

    def __call__(self, program: str, stage: str, text: str) -> None:
        """``program``: its name. ``stage``: the pass that it has gone through."""
        ...


@dataclass(frozen=True)
class Source:
    """A serialized ``HloModuleProto`` for one device, and how it is to be lowered.

    ``starts``: whether starts and dones of collectives are where the program has them. Equal modules give
    equal programs in all processes. ``splits``: what is split into parts or computed by shares
    (`passes.split`), None if the table of costs is to decide.
    """

    hlo: bytes = field(repr=False)
    num_replicas: int
    num_partitions: int
    pseudo_tokens: bool = True
    valid: valid.ValidPolicy = valid.ValidPolicy()  # noqa: RUF009 (frozen)
    rewrites: bool = False
    starts: bool = False
    splits: tuple[chunks.Decision | chunks.Shared, ...] | None = ()

    def ordered(self, block: BlockGraph) -> unread.Ordered:
        """The default order of a block."""
        return order(block, self.valid.least_flops)


@dataclass
class Compilation:
    """A module that is being compiled, and the results of the passes so far.

    ``source``: the module, and how it is compiled. ``donated``: positions of inputs that the caller gives up.
    ``overlap``: how collectives are scheduled, None if they are not. ``carved``: ``entry`` in an order, cut
    into segments. ``rotated``: whether `_rotate` has pipelined a loop.
    ``splits``: what `_split` has decided.
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
    splits: chunks.Choice = field(default_factory=chunks.Choice)
    _orders: dict[BlockGraph, tuple[list[Node], dict[Node, int], unread.Ordered]] = field(
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

    def placed(self, block: BlockGraph) -> Sequence[Node | Await]:
        """The default order of a block, with the starts and dones that the program has itself."""
        found = self.ordered(block)
        return with_starts(found) if self.source.starts else found

    def unsplit(self) -> BlockGraph:
        """The module's graph anew, as it is before `_split`."""
        own = Compilation.of(replace(self.source, splits=()), self.module, self.donated)
        run(own, SETTLING)
        return own.entry

    def ordered(self, block: BlockGraph) -> unread.Ordered:
        """The default order of a block, computed again only if its nodes or their phases have changed."""
        nodes, phases, found = self._orders.get(block, (None, None, None))
        if found is None or nodes != block.nodes or phases != block.phases:
            found = self.source.ordered(block)
            self._orders[block] = list(block.nodes), dict(block.phases), found
        return found


Pass = Callable[[Compilation], None]


def _pseudo_tokens(c: Compilation) -> None:
    """Needs the graph as it is written. Replaces scalars that only order collectives by order."""
    if c.source.pseudo_tokens:
        pseudo_tokens.remove_pseudo_tokens(c.entry)


def _valid(c: Compilation) -> None:
    """Needs the order that `_pseudo_tokens` leaves. Leaves the valid iterations of transfers in their
    collectives, and in ``valid`` the proof of which values nobody reads."""
    source = c.source
    c.valid = valid.apply(c.entry, source.num_replicas, source.num_partitions, source.valid)


def _unread(c: Compilation) -> None:
    """Needs the proof of `_valid`, and drops it. Leaves `BlockGraph.unread`: compute that nobody reads on
    some devices or in some iterations."""
    if c.valid.liveness is not None:
        unread.mark(c.valid.liveness)
    c.valid = replace(c.valid, liveness=None)


def _bytes(c: Compilation) -> None:
    """Needs the valid iterations: transfers with them stay as they are. Leaves collectives that send fewer
    bytes, and new nodes beside them."""
    if c.source.rewrites:
        counts = c.source.num_replicas, c.source.num_partitions
        c.rewritten = fewer_bytes.rewrite(c.entry, *counts, shardings_of(c.module, counts[0]))


def _conditions(c: Compilation) -> None:
    """Needs the loops that `_bytes` leaves, which knows conditions where they are. Leaves loops of unknown
    length that carry the answers of their conditions, computed in their bodies."""
    conditions.move_into_bodies(c.entry)


def _split(c: Compilation) -> None:
    """Needs the collectives that `_bytes` leaves. Leaves transfers of parts in the place of some collectives,
    and copies of the compute around them for each part; what was decided is in ``splits``."""
    counts = c.source.num_replicas, c.source.num_partitions
    shardings = shardings_of(c.module, c.source.num_replicas)
    given = c.source.splits
    if given is not None:
        c.splits = chunks.Choice(given)
    elif c.overlap is not None:
        policy = policy_for(c.source, c.module, c.overlap)
        c.splits = chunks.choose(policy, c.donated, c.source.ordered, counts, c.unsplit, shardings)
    chunks.apply(c.entry, c.splits.decisions, *counts, shardings)


def _schedule(c: Compilation) -> None:
    """Needs the final collectives of the program. Leaves its default order, and the schedule that ranks
    compare; the graph stays as it is. Later passes change only when collectives start and are awaited. Ranks
    whose plans differ run the program of this stage."""
    c.carved = carve_planned(c.entry, None, c.placed)
    c.schedule = schedule_of(c.entry, c.carved)


def _overlap(c: Compilation) -> None:
    """Needs `_schedule`. Leaves plans of blocks. In blocks with a plan, combined collectives are split, and
    loops may be replaced by staged ones."""
    if c.overlap is None:
        return
    policy = policy_for(c.source, c.module, c.overlap)
    c.planned = plan_overlap(c.entry, policy, c.donated, c.ordered)


def policy_for(source: Source, module: Module, overlap: OverlapPolicy) -> OverlapPolicy:
    """The policy, with the measured times of this module if there are any."""
    if not overlap.measured:
        return overlap
    return overlap.of(key_of(module, source.num_replicas, source.num_partitions))


def _rotate(c: Compilation) -> None:
    """Needs the plans: loops with a plan stay as they are. Leaves `BlockGraph.phases` of other loops'
    bodies, and `BlockGraph.crossing`: permutes that only the next iteration reads. Predictions count it."""
    if c.source.valid.pipeline:
        c.rotated = rotate.rotate(c.entry, planned_loops(c.planned))
        if c.rotated and c.planned is not None and c.overlap is not None:
            policy = policy_for(c.source, c.module, c.overlap)
            c.planned = with_crossings(c.entry, c.planned, policy, c.donated, c.ordered)


def _carve(c: Compilation) -> None:
    """Needs the plans and the phases. Leaves the order and the segments of all blocks; the graph stays as it
    is."""
    if c.planned is not None and c.planned.changed:
        c.carved = carve_planned(c.entry, c.planned, c.placed)
    elif c.rotated or c.carved is None:
        c.carved = carve_planned(c.entry, None, c.placed)


# The passes that decide which collectives a program has.
SETTLING: tuple[Pass, ...] = (_pseudo_tokens, _valid, _unread, _bytes, _conditions, _split)
# The passes of every program, however its collectives are scheduled: ranks compare the result.
COMMON: tuple[Pass, ...] = (*SETTLING, _schedule)
PASSES: tuple[Pass, ...] = (*COMMON, _overlap, _rotate, _carve)


def run(c: Compilation, passes: Sequence[Pass] = PASSES, dump: Dump | None = None) -> None:
    """Run the passes on a module, in place.

    Raises `GraphError` if graphs are checked and a pass leaves one that is not consistent.
    """
    checked = is_checked()
    _look(c, "flatten", checked, dump)
    for one in passes:
        one(c)
        _look(c, one.__name__.strip("_"), checked, dump)


def is_checked() -> bool:
    """Whether graphs and programs are checked."""
    return os.environ.get(CHECKED) == "1"


def _look(c: Compilation, stage: str, checked: bool, dump: Dump | None) -> None:
    """Write and check the graph behind a pass."""
    if dump is not None:
        dump(c.module.name, stage, str(c.entry))
    if checked:
        try:
            c.entry.check()
        except GraphError as error:
            raise GraphError(f"{c.module.name}, after pass {stage}: {error}") from None
