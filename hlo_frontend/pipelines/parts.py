"""The description of a pipeline, and of the loop that `recognize` is proving to be one."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from ..graph import Instruction
from ..values import Node
from .chains import Execution
from .constants import Constant, Constants
from .layers import LayerLoop


@dataclass(frozen=True)
class Kept:
    """Slices that layers of another pipeline gave: result ``leaf`` of the loop over layers in its ``loop``,
    each from the run of the same layers. ``order``: by microbatch the number of it there."""

    loop: str
    leaf: int
    order: tuple[int, ...]


@dataclass(frozen=True)
class Recomputed:
    """Slices that other layers gave in the same run, as result ``leaf`` of their loop ``node`` (`Again`)."""

    leaf: int
    node: Node


Weights = dict[int, "Constant | Kept | Recomputed"]


@dataclass(frozen=True, eq=False)
class Again:
    """A loop over layers that computes again what a stage of another pipeline did (see `recomputed`).

    By position in its carry: ``weights`` and ``shared``; ``inputs``: what it begins with, as what its
    ``leaf`` began with in the other pipeline.
    """

    node: Node
    layers: LayerLoop
    weights: dict[int, Constant]
    shared: dict[int, Constant]
    inputs: dict[int, Kept]


@dataclass(frozen=True, eq=False)
class Pipeline:
    """A pipeline in ``loop`` of the entry computation.

    ``groups[g][stage]``: devices of each of the pipelines that run side by side. ``enters`` and ``leaves``:
    by microbatch the iterations of the loop in which it is taken in and given out. ``trips``: of the loop.

    By position in the carry of the loop over layers: ``weights`` and ``shared`` tell what these are; ``sums``
    in which carry of the loop a stack is summed up, slice by slice, over microbatches. ``plus``: values to
    which zeros are added between a stage and the next, which makes negative zeros positive. ``again``: what
    is computed again before the layers are run.
    """

    loop: Instruction
    layers: LayerLoop
    groups: tuple[tuple[int, ...], ...]
    enters: tuple[int, ...]
    leaves: tuple[int, ...]
    trips: int
    weights: Weights
    shared: dict[int, Constant]
    sums: dict[int, int]
    plus: frozenset[int]
    again: Again | None = None

    @property
    def stages(self) -> int:
        return len(self.groups[0])

    @property
    def microbatches(self) -> int:
        return len(self.enters)

    @property
    def kept(self) -> list[Kept]:
        """All that it takes of what other pipelines kept."""
        inputs = [] if self.again is None else list(self.again.inputs.values())
        return [w for w in self.weights.values() if isinstance(w, Kept)] + inputs

    @property
    def upwards(self) -> tuple[tuple[int, ...], ...]:
        """``groups``, with the stage first that has the layers with the first slices."""
        return tuple(g[::-1] for g in self.groups) if self.layers.reverse else self.groups


@dataclass(eq=False)
class Part:
    """What is known of one of the loops on the way to its `Pipeline`. ``stage``: its loop over layers.

    ``live``: runs of the stage of which something reaches a result of the program; ``given``: positions
    in the stage's carry of stacks of which something does.
    """

    loop: Node
    trips: int
    stage: Node
    layers: LayerLoop
    constants: Constants
    live: list[Execution] = field(default_factory=list)
    given: set[int] = field(default_factory=set)
    before: dict[Execution, Execution] = field(default_factory=dict)
    plus: frozenset[int] = frozenset()
    chains: list[tuple[Execution, ...]] = field(default_factory=list)
    groups: tuple[tuple[int, ...], ...] = ()
    enters: tuple[int, ...] = ()
    leaves: tuple[int, ...] = ()
    weights: Weights = field(default_factory=dict)
    shared: dict[int, Constant] = field(default_factory=dict)
    sums: dict[int, int] = field(default_factory=dict)
    again: Again | None = None

    @property
    def name(self) -> str:
        return self.loop.instruction.name

    @cached_property
    def places(self) -> dict[Execution, tuple[int, int]]:
        """By run: number of its microbatch, and of its stage."""
        found: dict[Execution, tuple[int, int]] = {}
        for way in self.groups:
            own = [c for c in self.chains if tuple(run.device for run in c) == way]
            for m, chain in enumerate(sorted(own)):
                found |= {run: (m, stage) for stage, run in enumerate(chain)}
        return found

    def pipeline(self) -> Pipeline:
        return Pipeline(
            self.loop.instruction, self.layers, self.groups, self.enters, self.leaves, self.trips,
            self.weights, self.shared, self.sums, self.plus, self.again,
        )  # fmt: skip
