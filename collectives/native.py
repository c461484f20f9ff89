"""Collectives that compiled code calls itself: which can be, and their table.

`refusal` says why one cannot. `table_of` describes them to the compiled handler (`_native`), whose address
`handler` gives for an engine to register under `TARGET`. Groups of several processes have a wire (`wires`),
whose messages go through memory where all of them are on one host (`nearby`), else by MPI's functions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf, prod
from typing import NamedTuple

from ._native import (
    SHARED_TAGS,
    Shared,
    Table,
    can_reduce,
    handler,
    start_helpers,
    step_aside,
    step_back,
)
from .in_place import in_place
from .nccl import is_supported
from .ops import PROMPT, Collective, Kind
from .types import TensorType
from .wires import Leaf, Message, Wire, plan

__all__ = [
    "ALONE",
    "ALWAYS",
    "NEVER",
    "TARGET",
    "Peers",
    "Table",
    "as_called",
    "as_site",
    "handler",
    "is_prompt",
    "refusal",
    "skipped",
    "start_helpers",
    "step_aside",
    "step_back",
    "table_of",
]

# The name under which compiled code calls the handler, with the number of the site as attribute ``site``.
TARGET = "stretto_collective"

NEVER, ALWAYS = (1, 0), (0, (1 << 63) - 1)  # bounds of valid iterations
# Bytes that compiled code moves sooner between processes of one host than a walk, with threads that hand
# over: a `psum` of 1 MiB takes a third to a half, of 4 MiB as long, of 16 longer.
PROMPT_ON_HOST = 1 << 21
# Calls of collectives that a caller's thread may make in loops before it is back: some 2 to 10 us each.
_FEW_CALLS = 512
# Iterations of loops that it may make, perhaps twice: each takes a microsecond or two where it is cheap,
# and XLA runs others on threads of its own.
_FEW_ITERATIONS = 512
_HALVES = ("bf16", "f16")
_SPLIT = (Kind.REDUCE_SCATTER, Kind.ALL_TO_ALL)


def is_prompt(
    collectives: Sequence[Collective], calls: Sequence[int], iterations: int, largest: int
) -> bool:
    """Whether the caller's thread may run a program that calls each of these so often, and whose loops make
    so many iterations (-1: not known). Of those called once each is small, or all of them are together, and
    so is the program's largest array, of ``largest`` bytes; in loops there are few calls, and all that they
    move is little."""
    if not 0 <= iterations <= _FEW_ITERATIONS:
        return False
    sizes = [collective.nbytes for collective in collectives]
    if all(times == 1 for times in calls):
        return max(sizes) <= PROMPT or max(largest, sum(sizes)) <= PROMPT_ON_HOST
    moved = sum(times * size for times, size in zip(calls, sizes, strict=True))
    return min(calls) >= 0 and sum(calls) <= _FEW_CALLS and moved <= PROMPT_ON_HOST


def as_called(collective: Collective) -> Collective:
    """The collective as compiled code calls it: reductions of floats of 16 bits take and give f32, since that
    is what they are accumulated in (`reduce`). The code converts before and after."""
    if collective.reduction is None:
        return collective

    def widened(types: Sequence[TensorType]) -> tuple[TensorType, ...]:
        return tuple(TensorType("f32", t.shape) if t.dtype in _HALVES else t for t in types)

    operands, results = widened(collective.operands), widened(collective.results)
    return replace(collective, operands=operands, results=results)


def as_site(collective: Collective) -> Collective:
    """What is moved and reduced when compiled code calls this collective: without pairs that never move
    anything, with types as they are called."""
    left_out = skipped(collective)
    pairs = tuple(p for i, p in enumerate(collective.pairs) if i not in left_out)
    return replace(as_called(collective), pairs=pairs, valid_iterations=())


def refusal(collective: Collective, on_gpus: bool = False) -> str:
    """Why compiled code cannot call this collective; empty if it can. ``on_gpus``: code for a GPU, over
    NCCL."""
    kind = collective.kind
    if kind in (Kind.SEND, Kind.RECV, Kind.RAGGED_ALL_TO_ALL):
        return f"{kind} is the executor's"
    if collective.reducer is not None:
        return "its reducer is a program of its own"
    if collective.dynamic_root:
        return "its root is known at run time only"
    if any(bounds not in (NEVER, ALWAYS) for bounds in collective.valid_iterations):
        return "it is skipped in some iterations"
    for type_ in (*collective.operands, *collective.results):
        if type_.element.bits < 8 and type_.dtype != "pred":
            return f"{type_.dtype} is packed in compiled code"
    if on_gpus:
        return "" if is_supported(as_site(collective)) else "NCCL has no way for it"
    if collective.reduction is not None:
        for type_ in as_called(collective).operands:
            if not can_reduce(str(collective.reduction), type_.dtype):
                return f"{collective.reduction} of {type_.dtype} has no compiled form"
    return ""


class Peers(NamedTuple):
    """The processes that run a program, as compiled code of this one, ``process``, reaches them.

    ``owner`` maps the logical ids of devices to processes, empty if there is one. ``ranks`` maps processes to
    ranks of the MPI communicator with the handle ``comm``, where tags from ``first_tag`` to ``last_tag`` are
    free.
    ``patience``: seconds for which a wait keeps the core busy. ``shared``: memory of processes of this host,
    if they share any, and ``near`` maps those to their numbers there.
    """

    process: int = 0
    owner: Mapping[int, int] = {}
    ranks: Mapping[int, int] = {}
    comm: int = 0
    first_tag: int = 0
    last_tag: int = 0
    patience: float = inf
    shared: Shared | None = None
    near: Mapping[int, int] = {}


ALONE = Peers()


def table_of(
    collectives: Sequence[Collective],
    position: Mapping[int, int],
    peers: Peers = ALONE,
    *,
    resumed: bool = False,
    apart: bool = False,
) -> Table:
    """The table of these sites for devices whose positions are by logical id ``position``.

    Members of groups that are none of them are other processes' devices, by ``peers``. ``resumed``: whether
    runs may be given up and resumed. ``apart``: see `Table`. Raises ``ValueError`` for a collective that is
    refused or whose parts do not fit.
    """
    table = Table(len(position), peers.comm, peers.patience, resumed, apart, peers.shared)
    tag = peers.first_tag
    for collective in collectives:
        why = refusal(collective)
        if why:
            raise ValueError(f"{collective.kind}: {why}")
        point_to_point = collective.kind is Kind.PERMUTE
        sent = as_site(collective)
        pairs = sent.pairs
        groups = connected(pairs) if point_to_point else collective.groups
        where = f" at {collective.source}" if collective.source else ""
        kind = "all-to-all of tuples" if collective.tuple_form else str(collective.kind)
        leaves = [_leaf(sent, k) for k in range(len(sent.operands))]
        parts = [Leaf(*leaf[:4]) for leaf in leaves]
        local: list[list[int]] = []
        wires: list[tuple[int, Wire, bool] | None] = []
        for number, group in enumerate(groups):
            here = [position[i] for i in group if i in position]
            if not here:
                continue
            local.append(here)
            if len(here) == len(group):
                wires.append(None)
                continue
            wire = plan(sent, group, parts, peers.owner, peers.process)
            near = tag + number < SHARED_TAGS and all(peers.owner[i] in peers.near for i in group)
            if near and not (resumed and _have_several(group, peers.owner)):
                wire = in_place(wire)
            named = _named(wire, peers.near if near else peers.ranks)
            wires.append((tag + number, named, near))
        tag += len(groups)
        if tag > peers.last_tag + 1 and any(wires):
            raise ValueError(f"its groups need more message tags than MPI has, {peers.last_tag}")
        table.add(
            kind,
            leaves,
            len(collective.results),
            local,
            f"{collective.kind} %{collective.name}{where}",
            [(position[s], position[t]) for s, t in pairs if s in position and t in position]
            if point_to_point
            else None,
            wires,
        )
    return table


def _have_several(group: Sequence[int], owner: Mapping[int, int]) -> bool:
    """Whether processes of a group have several devices, so that their sites take turns with the memory that
    they send from. They wait then until what was sent before has been read, and a process whose runs may be
    resumed, which would read it until its run has ended, has to copy it."""
    processes = {owner[i] for i in group}
    return sum(process in processes for process in owner.values()) > len(processes)


def _named(wire: Wire, names: Mapping[int, int]) -> Wire:
    """The wire with these numbers in the place of its processes'."""

    def renamed(messages: Sequence[Message]) -> tuple[Message, ...]:
        return tuple(m._replace(process=names[m.process]) for m in messages)

    rounds = (r._replace(sends=renamed(r.sends), receives=renamed(r.receives)) for r in wire.rounds)
    return wire._replace(rounds=tuple(rounds))


def skipped(collective: Collective) -> frozenset[int]:
    """Positions of the pairs that never move anything."""
    return frozenset(i for i, b in enumerate(collective.valid_iterations) if b == NEVER)


def connected(pairs: Sequence[tuple[int, int]]) -> list[tuple[int, ...]]:
    """Devices that pairs join, directly or through others, in ascending order."""
    groups: dict[int, set[int]] = {}
    for source, target in pairs:
        joined = groups.get(source, {source}) | groups.get(target, {target})
        for member in joined:
            groups[member] = joined
    unique = {id(group): group for group in groups.values()}
    return sorted(tuple(sorted(group)) for group in unique.values())


def _leaf(
    collective: Collective, index: int
) -> tuple[int, int, int, int, int, tuple[str, str] | None]:
    """What `Table.add` needs to know of an operand."""
    operand = collective.operands[index]
    result = collective.results[index]
    size = len(collective.groups[0]) if collective.groups else 1
    outer, inner = 1, _bytes(operand)
    if collective.kind is Kind.ALL_GATHER:
        outer, inner = _rows(operand, collective.dimension, 1)
    elif collective.kind in _SPLIT and not collective.tuple_form:
        outer, inner = _rows(operand, collective.dimension, size)
    reduction = None
    if collective.reduction is not None:
        reduction = (str(collective.reduction), operand.dtype)
    return outer, inner, _bytes(operand), _bytes(result), operand.numpy.itemsize, reduction


def _bytes(type_: TensorType) -> int:
    return type_.size * type_.numpy.itemsize


def _rows(type_: TensorType, dimension: int, parts: int) -> tuple[int, int]:
    """Blocks before the dimension, and bytes of one of ``parts`` in each."""
    length = type_.shape[dimension]
    if length % parts:
        raise ValueError(f"dimension {dimension} of {type_} does not divide into {parts} parts")
    inner = prod(type_.shape[dimension + 1 :]) * type_.numpy.itemsize
    return prod(type_.shape[:dimension]), length // parts * inner
