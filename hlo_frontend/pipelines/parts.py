"""The description of a pipeline, and of the loop that `recognize` is proving to be one."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from ..graph import Instruction
from ..values import Node
from .chains import Execution
from .constants import Constant, Constants
from .layers import LayerLoop


def again(position: int) -> int:
    """The key of the operand at this position of the carry of a loop that recomputes a stage."""
    return ~position


@dataclass(frozen=True)
class Kept:
    """Slices that layers of another pipeline gave: result ``leaf`` of the loop over layers in its ``loop``,
    each from the run of the same layers. ``order``: for each microbatch, its number in that pipeline."""

    loop: str
    leaf: int
    order: tuple[int, ...]


@dataclass(frozen=True)
class Recomputed:
    """Slices that other layers gave in the same run, as result ``leaf`` of their loop ``node`` (`Again`)."""

    leaf: int
    node: Node


@dataclass(frozen=True, eq=False)
class Own:
    """What each run of a stage has for itself, as a key that is folded from the numbers of the stage and the
    microbatch: operand ``position`` of ``node``, a loop over layers. It is yet to be proved that a run needs
    nothing else for it (see `owned`); ``why`` says why interleaving refuses it."""

    node: Node
    position: int
    why: str


Weights = dict[int, "Constant | Kept | Recomputed | Own"]


@dataclass(frozen=True, eq=False)
class Again:
    """A loop over layers that recomputes a stage of another pipeline (see `recomputed`).

    All by position in its carry: ``weights``, among them slices that the other pipeline's layers kept,
    ``shared``, and ``inputs``, its initial values, which are those of the other pipeline's loop at position
    ``leaf``; ``begun``: those that a run has for itself.
    """

    node: Node
    layers: LayerLoop
    weights: dict[int, Constant | Kept | Own]
    shared: dict[int, Constant | Own]
    inputs: dict[int, Kept]
    begun: dict[int, Own]

    @property
    def kept(self) -> dict[int, Kept]:
        """The slices that it reads of what the other pipeline's layers kept."""
        return {i: own for i, own in self.weights.items() if isinstance(own, Kept)}

    @property
    def slices(self) -> dict[int, Kept]:
        """All that it reads of the other pipeline: initial values, and what layers kept."""
        return self.inputs | self.kept


@dataclass(frozen=True, eq=False)
class Pipeline:
    """A pipeline in ``loop`` of the entry computation.

    ``groups[g][stage]``: the devices of each of the pipelines that run side by side. ``enters`` and
    ``leaves``: for each microbatch, the iteration of the loop in which it enters and leaves. ``trips``: the
    number of iterations.

    By position in the carry of the loop over layers: ``weights`` and ``shared``; ``sums``: the carry of the
    loop that sums up a stack, slice by slice, over microbatches; ``plus``: values to which zeros are added
    between a stage and the next, which makes negative zeros positive; ``begun``: values that layers hand on,
    and that each stage begins anew; ``elsewhere``: what others than the next stage and gradients read of
    runs, on their own device, and why interleaving refuses that. ``places``: for each run, the numbers of its
    microbatch and its stage. ``again``: the recomputation before the
    layers run.
    """

    loop: Instruction
    layers: LayerLoop
    groups: tuple[tuple[int, ...], ...]
    enters: tuple[int, ...]
    leaves: tuple[int, ...]
    trips: int
    weights: Weights
    shared: dict[int, Constant | Own]
    sums: dict[int, int]
    plus: frozenset[int]
    begun: dict[int, Own]
    elsewhere: dict[int, str]
    places: dict[Execution, tuple[int, int]]
    again: Again | None = None

    @property
    def sent(self) -> tuple[int, ...]:
        """Positions of the values that go from stage to stage."""
        return tuple(i for i in self.layers.passed if i not in self.begun)

    def travels(self, chunks: int) -> tuple[int, ...]:
        """The same; where a device has chunks of layers, what it begins anew goes from chunk to chunk."""
        return self.sent if chunks == 1 else self.layers.passed

    @property
    def results(self) -> tuple[int, ...]:
        """Positions of what is read of runs but residuals and sums of gradients."""
        return *self.layers.passed, *(i for i in self.elsewhere if i in self.layers.stacked)

    @property
    def owned(self) -> dict[int, Own]:
        """What runs have for themselves, with the keys of `chunk`."""
        found = {**self.weights, **self.shared, **self.begun}
        before = self.again
        if before is not None:
            more = {**before.weights, **before.shared, **before.begun}
            found |= {again(i): own for i, own in more.items()}
        return {key: own for key, own in found.items() if isinstance(own, Own)}

    @property
    def stages(self) -> int:
        return len(self.groups[0])

    @property
    def microbatches(self) -> int:
        return len(self.enters)

    @property
    def kept(self) -> list[Kept]:
        """All slices of other pipelines that it reads."""
        more = {} if self.again is None else self.again.slices
        return [*(w for w in self.weights.values() if isinstance(w, Kept)), *more.values()]

    @property
    def upwards(self) -> tuple[tuple[int, ...], ...]:
        """``groups``, with the stage first that has the layers with the first slices."""
        return tuple(g[::-1] for g in self.groups) if self.layers.reverse else self.groups


@dataclass(eq=False)
class Part:
    """The analysis of a loop before it is a `Pipeline`. ``stage``: its loop over layers.

    ``live``: the runs of the stage that reach a result of the program. ``given``: positions in the stage's
    carry of the stacks that do.
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
    shared: dict[int, Constant | Own] = field(default_factory=dict)
    sums: dict[int, int] = field(default_factory=dict)
    begun: dict[int, Own] = field(default_factory=dict)
    elsewhere: dict[int, str] = field(default_factory=dict)
    again: Again | None = None

    @property
    def name(self) -> str:
        return self.loop.instruction.name

    @cached_property
    def places(self) -> dict[Execution, tuple[int, int]]:
        """For each run, the numbers of its microbatch and its stage."""
        found: dict[Execution, tuple[int, int]] = {}
        for way in self.groups:
            own = [c for c in self.chains if tuple(run.device for run in c) == way]
            for m, chain in enumerate(sorted(own)):
                found |= {run: (m, stage) for stage, run in enumerate(chain)}
        return found

    def pipeline(self) -> Pipeline:
        return Pipeline(
            self.loop.instruction, self.layers, self.groups, self.enters, self.leaves, self.trips,
            self.weights, self.shared, self.sums, self.plus, self.begun, self.elsewhere,
            self.places, self.again,
        )  # fmt: skip
