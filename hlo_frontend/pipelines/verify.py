"""Verifies rewritten loops independently: each microbatch must go through all layers in their order.

`check` follows the instructions of the new loops on every device and in every iteration, without the
timetables. It traces the last stage's result for each microbatch back through all chunks of layers to its
input. These paths must contain all runs of layers. Residuals that other pipelines' layers read must come from
the run of the same layers for the same microbatch. A chunk's gradients must be added to the sums of its own
slices, in the order of the microbatches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..collectives import CollectiveReader
from ..flatten import flatten
from ..graph import Module
from ..passes.valid.trace import Forward, LoopTrace
from ..values import Node, Value
from .chains import Execution, Followed
from .connected import groups_of
from .parts import Pipeline
from .refusal import Refusal, about
from .rewrite import Rewritten

Run = tuple[int, int]  # microbatch, virtual stage


def check(
    module: bytes,
    rewritten: Sequence[Rewritten],
    pipelines: Sequence[Pipeline],
    chunks: int,
    num_devices: int,
) -> None:
    """Raise `Refusal` if it is not proved that the rewritten loops do what the written ones do."""
    entry = flatten(Module.parse(module).entry, CollectiveReader(1, num_devices))
    nodes = {n.instruction.name: n for n in entry.nodes}
    forward = Forward(1, num_devices, follow_zeros=True)
    trace = forward.program(entry)
    loops: dict[Node, LoopTrace] = {}
    for done, pipeline in zip(rewritten, pipelines, strict=True):
        loop = nodes[done.loop]
        inner = trace.inner[loop]
        assert isinstance(inner, LoopTrace)
        if inner.summary is not None:
            with about(pipeline.loop.name):
                why = forward.not_followed.get(loop, "")
                raise Refusal(f"the interleaved loop is too long: {why}")
        loops[loop] = inner
    followed = Followed(forward, trace, loops)
    checkers: dict[str, _Checker] = {}
    for done, pipeline in zip(rewritten, pipelines, strict=True):
        with about(pipeline.loop.name):
            checker = _Checker(followed, nodes[done.loop], pipeline, chunks, done)
            checkers[pipeline.loop.name] = checker
            for number, group in enumerate(pipeline.groups):
                checker.group(number, group)
            checker.together()
            checker.sums()
            checker.reads(checkers)


@dataclass(frozen=True)
class _Done:
    """A run of a chunk of layers: its microbatch, its virtual stage, and its first slice."""

    run: Run
    first: int


@dataclass(eq=False)
class _Checker:
    followed: Followed
    loop: Node
    pipeline: Pipeline
    chunks: int
    done: Rewritten
    runs_by: dict[Execution, _Done] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.origins = self.followed.origins[self.loop]
        body = {n.instruction.name: n for n in self.loop.blocks[1].nodes}
        self.body = body
        self.takes_in = body[self.done.takes_in]
        self.runs = body[self.done.runs]
        self.forward = body[self.done.forward]
        self.values = len(self.pipeline.layers.passed)
        self.size = self.pipeline.layers.count // self.chunks
        self.iterations = len(self.origins.iterations)

    def group(self, number: int, group: tuple[int, ...]) -> None:
        """Trace the microbatches of one of the pipelines that run side by side."""
        times = {d: self._times(self.forward, d) for d in group}
        if any(len(t) != self.pipeline.trips for t in times.values()):
            raise self._wrong("a device does not go forward as often as it should")
        first, last = group[0], group[-1]
        ways = zip(self.pipeline.enters, self.pipeline.leaves, strict=True)
        for microbatch, (begin, end) in enumerate(ways):
            begun = Execution(times[first][begin], first)
            at = Execution(times[last][end], last)
            for leaf in range(self.values):
                self._way(group, microbatch, leaf, begun, at)
        for device in group:
            met = [run.iteration for run in sorted(self.runs_by) if run.device == device]
            if met != self._times(self.runs, device):
                raise self._wrong("layers are run for no microbatch")

    def _times(self, node: Node, device: int) -> list[int]:
        """The iterations in which a device takes the first branch of a conditional."""
        taken = [self._taken(node, Execution(t, device)) for t in range(self.iterations)]
        return [t for t, go in enumerate(taken) if go]

    def _way(
        self, group: tuple[int, ...], microbatch: int, leaf: int, begun: Execution, ended: Execution
    ) -> None:
        """Trace a microbatch from the value that ``forward`` gets when it leaves back to its input."""
        layers = self.pipeline.layers
        plus = layers.passed[leaf] in self.pipeline.plus
        value, at = self.forward.operands[1 + leaf], ended
        for stage in reversed(range(len(group) * self.chunks)):
            made = self.origins.of(value, at)
            chunk, position = divmod(stage, len(group))
            start, first = (self._number(self.runs, n, made.at) for n in (1, 2))
            if (made.node, made.leaf, made.at.device) != (self.runs, leaf, group[position]):
                raise self._wrong(f"virtual stage {stage} is not where it should be")
            seam = (stage + 1) % self.chunks == 0 and stage + 1 < len(group) * self.chunks
            if made.plus != (plus and seam) or made.slot is not None:
                raise self._wrong(f"what virtual stage {stage} gives is changed on its way")
            if start != chunk * self.size or not self._taken(self.runs, made.at):
                raise self._wrong(f"virtual stage {stage} runs other layers")
            if first != layers.first_slice(start, self.size):
                raise self._wrong(f"virtual stage {stage} takes other slices for its own")
            done = _Done((microbatch, stage), first)
            if self.runs_by.setdefault(made.at, done) != done:
                raise self._wrong(f"virtual stage {stage} is run for two microbatches at once")
            value, at = self.runs.operands[4 + leaf], made.at
        source = value.root
        if at != begun or source.node is not self.takes_in or source.index != leaf:
            raise self._wrong("a microbatch does not begin where it is taken in")
        if not self._taken(self.takes_in, at):
            raise self._wrong("a microbatch is not taken in")

    def together(self) -> None:
        """Check that devices whose layers communicate run the same chunk of a microbatch at the same time."""
        for _, group in groups_of(self.runs):
            for t in range(self.iterations):
                if len({self.runs_by.get(Execution(t, d)) for d in group}) > 1:
                    raise self._wrong("devices that communicate run different layers at a time")

    def kept(self, leaf: int, device: int) -> dict[tuple[int, int], Run]:
        """For each row and first slice, the run whose values a device has there after the loop.

        They are a stack of the layers, or, by slot, their initial values.
        """
        name, carry = self.done.kept[leaf]
        put = self.body[name]
        block = self.loop.blocks[1]
        if put.results[0].root is not block.results[carry].root or (
            put.operands[0].root is not block.parameters[carry]
        ):
            raise self._wrong("what its layers keep is not handed from iteration to iteration")
        passed = self.pipeline.layers.passed
        begin = self.runs.operands[4 + passed.index(leaf)].root if leaf in passed else None
        unit = 1 if begin is None else self.size
        found: dict[tuple[int, int], Run] = {}
        for t in range(self.iterations):
            at = Execution(t, device)
            row, first = self._number(put, 2, at), self._number(put, 3, at) * unit
            if any(self._number(put, 2 + n, at) for n in range(2, len(put.operands) - 2)):
                raise self._wrong("what its layers keep is put beside its place")
            if at in self.runs_by:
                value = put.operands[1].root
                if begin is None:
                    right = self._gives(value, at)
                else:
                    right = self.origins.of(value, at) == self.origins.of(begin, at)
                if first != self.runs_by[at].first or not right:
                    raise self._wrong("what its layers keep is put to other slices")
                found[row, first] = self.runs_by[at].run
            else:
                found.pop((row, first), None)
        return found

    def _gives(self, value: Value, at: Execution) -> bool:
        """Whether a stored value is a result of the chunk."""
        made = self.origins.of(value, at)
        return made.node is self.runs and made.at == at and made.leaf >= self.values

    def reads(self, others: dict[str, _Checker]) -> None:
        """Check the residuals of other pipelines that it reads."""
        stages = self.pipeline.stages * self.chunks
        for argument, source in self.done.read.items():
            other = others[source.loop]
            opposite = self.pipeline.layers.reverse != other.pipeline.layers.reverse
            value = self.runs.operands[1 + argument]
            carry = self._unchanged(value.root)
            begin = self.loop.operands[carry].root
            _, bank = other.done.kept[source.leaf]
            if begin.node is not other.loop or begin.index != bank:
                raise self._wrong("its layers do not take what those of another pipeline keep")
            by_device = {d: other.kept(source.leaf, d) for g in self.pipeline.groups for d in g}
            for at, done in self.runs_by.items():
                microbatch, stage = done.run
                wanted = source.order[microbatch], stages - 1 - stage if opposite else stage
                row = self._number(self.runs, 3, at)
                if by_device[at.device].get((row, done.first)) != wanted:
                    raise self._wrong(
                        "a chunk reads what other layers kept, or for another microbatch"
                    )

    def _unchanged(self, value: Value) -> int:
        block = self.loop.blocks[1]
        for i, parameter in enumerate(block.parameters):
            if parameter is value and block.results[i].root is parameter:
                return i
        raise self._wrong("what its layers take is not the same in all iterations")

    def sums(self) -> None:
        """Check that sums of gradients get the results of each microbatch's layers, in their order."""
        for name in self.done.sums.values():
            put = self.body[name]
            block = self.loop.blocks[1]
            carry = block.parameters.index(put.operands[0].root)
            if block.results[carry].root is not put.results[0].root:
                raise self._wrong("a sum of gradients is not handed from iteration to iteration")
            added = put.operands[1].root.node
            assert added is not None
            own, given = (o.root for o in added.operands)
            taken = own.node
            if taken is None or taken.operands[0].root is not put.operands[0].root:
                raise self._wrong("a sum of gradients begins as another one")
            seen: dict[tuple[int, int], list[int]] = {}
            for t in range(self.iterations):
                for d in (d for g in self.pipeline.groups for d in g):
                    at = Execution(t, d)
                    first = self._number(put, 2, at)
                    if self._number(taken, 1, at) != first:
                        raise self._wrong("a sum of gradients is put to other slices")
                    if at not in self.runs_by:
                        continue  # the chunk rests, and gives zeros
                    if first != self.runs_by[at].first or not self._gives(given, at):
                        raise self._wrong("gradients are added to those of other slices")
                    seen.setdefault((d, first), []).append(self.runs_by[at].run[0])
            if any(m != list(range(self.pipeline.microbatches)) for m in seen.values()):
                raise self._wrong("gradients of microbatches are added in another order")

    def _number(self, node: Node, operand: int, at: Execution) -> int:
        found = self.origins.number(node.operands[operand], at)
        if found is None:
            raise self._wrong("where its layers read and write depends on data")
        return found

    def _taken(self, node: Node, at: Execution) -> bool:
        """Whether a conditional takes its first branch."""
        taken = self.origins.row(node.operands[0], at)
        if taken is None:
            raise self._wrong("what it does depends on data")
        return taken

    def _wrong(self, what: str) -> Refusal:
        return Refusal(f"the interleaved loop could not be verified: {what}")
