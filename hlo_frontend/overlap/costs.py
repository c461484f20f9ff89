"""The cost table and what it charges: collectives by link, compute by roofline.

A collective costs ``latency + wire bytes / bandwidth`` of the link its groups span. Wire bytes are
those a ring moves through one device, for a group of n:

    all-gather            (n-1)/n of the result
    reduce-scatter        (n-1)/n of the operand
    all-reduce            2(n-1)/n of the operand
    all-to-all            (n-1)/n of the operand
    ragged all-to-all     (n-1)/n of the operand or the result, whichever has fewer rows
    permute, send, recv,
    broadcast             all of the operand

Compute costs ``max(flops / flops_per_s, bytes / bytes_per_s)``, plus ``launch_s`` for each segment.
A post-SPMD module is not fused yet: what counts as one kernel is decided in `kernels`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import log2
from pathlib import Path
from typing import Any

from stretto.collectives.ops import Collective, Kind
from stretto.runtime.errors import InvalidProgramError

from ..graph import Instruction
from ..groups import connected_components
from . import cost_file
from .measured import Measured


@dataclass(frozen=True)
class Compute:
    """Rates of one device: floating point operations, memory traffic, seconds to start a segment."""

    flops_per_s: float
    bytes_per_s: float
    launch_s: float = 0.0

    def seconds(self, flops: float, nbytes: float) -> float:
        return max(flops / self.flops_per_s, nbytes / self.bytes_per_s)


@dataclass(frozen=True)
class Link:
    """What a collective costs over groups whose members are ``axis_stride`` apart.

    ``busy``: the share of its time for which it delays compute that runs beside it, because the same cores
    move the data or wait for it. 0 if separate hardware moves the data, 1 if nothing can be hidden.
    """

    axis_stride: int
    group_size: int
    latency_s: float
    bytes_per_s: float
    busy: float = 0.0

    def connects(self, pairs: Sequence[tuple[int, int]]) -> bool:
        """Whether both devices of each pair are in the same group of a mesh axis of this stride and size."""
        stride, size = self.axis_stride, self.group_size
        first = lambda device: device - device // stride % size * stride  # noqa: E731
        return all(first(source) == first(target) for source, target in pairs)


@dataclass(frozen=True)
class Charge:
    """A priced collective: seconds on its stream, bytes on the wire, the link charged."""

    seconds: float
    wire_bytes: float
    link: Link | None


@dataclass(frozen=True)
class CostTable:
    """Costs of one set of machines. All ranks must schedule with equal tables.

    ``estimates``: whether groups without an entry are charged by the nearest entry, instead of being an
    error. ``measured``: measured times of the module that is compiled, if there are any.
    """

    compute: Compute
    links: tuple[Link, ...]
    estimates: bool = False
    measured: Measured | None = None
    _by_span: dict[tuple[int, int], Link] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        by_span = {(link.axis_stride, link.group_size): link for link in self.links}
        object.__setattr__(self, "_by_span", by_span)

    @classmethod
    def from_json(cls, data: Any) -> CostTable:
        """From ``{"compute": {…}, "links": [{…}, …]}``. Raises `InvalidProgramError` naming a bad field."""
        compute, links = cost_file.numbers(data)
        return cls(Compute(**compute), tuple(Link(**link) for link in links))

    @classmethod
    def parse(cls, text: str) -> CostTable:
        """From JSON text. Raises `InvalidProgramError` where it is not a cost table."""
        return cls.from_json(cost_file.parse(text))

    @classmethod
    def read(cls, path: str | Path) -> CostTable:
        """From a JSON file. Raises `InvalidProgramError` where it is none, or cannot be read."""
        try:
            text = Path(path).read_text()
        except (OSError, ValueError) as error:
            raise InvalidProgramError(
                f"the table of costs {path} cannot be read: {getattr(error, 'strerror', error)}"
            ) from error
        try:
            return cls.parse(text)
        except InvalidProgramError as error:
            raise InvalidProgramError(f"{path}: {error}") from None

    def taken(self, instruction: Instruction, modelled: float) -> float:
        """Seconds of a compute instruction: measured, or ``modelled``, which follows from the rates."""
        return modelled if self.measured is None else self.measured.of(instruction, modelled)

    def link(self, collective: Collective, stride: int, size: int) -> Link:
        """The entry for groups of this stride and size. For a permute without one: the smallest entry whose
        groups contain each of its pairs.

        Raises `InvalidProgramError` naming stride and size where there is none.
        """
        link = self._by_span.get((stride, size))
        if link is None and self.estimates and self.links:
            return min(self.links, key=lambda link: _distance(link, stride, size))
        if link is None and collective.pairs:
            wide = [link for link in self.links if link.connects(collective.pairs)]
            link = min(
                wide, key=lambda at: (at.axis_stride * at.group_size, at.group_size), default=None
            )
        if link is None:
            where = f"{collective.name}{f' ({collective.source})' if collective.source else ''}"
            raise InvalidProgramError(
                f"{where}: the cost table has no link for groups of axis_stride {stride} and group_size "
                f"{size}; add one"
            )
        return link

    def collective(self, collective: Collective) -> Charge:
        """The price of a collective. Over groups of one it is a copy."""
        stride, size = span(collective)
        wire = wire_bytes(collective, size)
        if size <= 1:
            moved = 2.0 * sum(t.nbytes for t in collective.operands)
            return Charge(self.compute.seconds(0.0, moved), 0.0, None)
        link = self.link(collective, stride, size)
        return Charge(link.latency_s + wire / link.bytes_per_s, wire, link)


# Hosts with CPUs, 10 Gb/s between them: assumed if nothing was measured.
ORDINARY_NETWORK = CostTable(
    Compute(flops_per_s=5e10, bytes_per_s=1e10, launch_s=3e-5),
    (Link(1, 2, latency_s=5e-5, bytes_per_s=1e9),),
    estimates=True,
)


# GPUs, connected with each other on one host (NVLink), and by a fast network between hosts: the order of what
# data sheets say. Assumed if nothing was measured.
GPUS_OF_A_HOST, GPUS_OF_HOSTS = (
    CostTable(
        Compute(flops_per_s=1e14, bytes_per_s=2e12, launch_s=1e-5),
        (Link(1, 2, latency_s=2e-5, bytes_per_s=bytes_per_s),),
        estimates=True,
    )
    for bytes_per_s in (1e11, 2.5e10)
)


def _distance(link: Link, stride: int, size: int) -> tuple[float, float, float]:
    """How far a link is from a span: by the ratio of the distances bridged, then of the sizes."""
    reach = abs(log2(link.axis_stride * link.group_size / (stride * size)))
    return reach, abs(log2(link.group_size / size)), -link.latency_s


def span(collective: Collective) -> tuple[int, int]:
    """(axis stride, group size) of a collective's largest group.

    The stride is the smallest distance between two members' ids. The groups of a permute are the
    devices that its pairs connect, unless it is a part of a collective of larger ones (`passes.split`).
    """
    groups = collective.groups or connected_components(collective.pairs)
    if not groups:
        return 1, 1
    size = max(len(group) for group in groups)
    widest = min((sorted(group) for group in groups if len(group) == size), default=[0])
    stride = min((b - a for a, b in pairwise(widest)), default=1)
    return stride, size


def wire_bytes(collective: Collective, size: int) -> float:
    """Bytes that a ring of ``size`` moves through one device."""
    if size <= 1:
        return 0.0
    operand = float(sum(t.nbytes for t in collective.operands))
    result = float(sum(t.nbytes for t in collective.results))
    share = (size - 1) / size
    match collective.kind:
        case Kind.ALL_GATHER:
            return share * result
        case Kind.REDUCE_SCATTER | Kind.ALL_TO_ALL:
            return share * operand
        case Kind.RAGGED_ALL_TO_ALL:
            return share * min(collective.operands[0].nbytes, collective.results[0].nbytes)
        case Kind.ALL_REDUCE:
            return 2.0 * share * operand
        case Kind.RECV:
            return result
    return operand
