"""A rewritten loop, looked at as if others had written it: does each microbatch see all layers in turn?

`check` follows the new loop's own instructions, on every device and in every iteration, and takes nothing
from the timetable: what the last stage's result for a microbatch was made by, back through all chunks of
layers to where the first stage took it in.
"""

from __future__ import annotations

from ...collectives import CollectiveReader
from ...flatten import flatten
from ...graph import Module
from ...values import Node
from ..valid.trace import Forward, LoopTrace
from .chains import Execution, Origins
from .pipeline import Pipeline
from .refusal import Refusal
from .rewrite import Rewritten


def check(done: Rewritten, pipeline: Pipeline, chunks: int, num_devices: int) -> None:
    """Raises `Refusal` where the rewritten loop is not seen to do what the written one does."""
    entry = flatten(Module.parse(done.module).entry, CollectiveReader(1, num_devices))
    nodes = {n.instruction.name: n for n in entry.nodes}
    loop = nodes[done.loop]
    forward = Forward(1, num_devices, follow_zeros=False)
    trace = forward.program(entry).inner[loop]
    assert isinstance(trace, LoopTrace)
    if trace.summary is not None:
        raise Refusal(f"the interleaved loop is too long: {forward.not_followed.get(loop, '')}")
    body = {n.instruction.name: n for n in loop.blocks[1].nodes}
    checker = _Checker(
        Origins(forward, loop, trace), pipeline, chunks, body[done.takes_in], body[done.runs],
        body[done.forward],
    )  # fmt: skip
    for group in pipeline.groups:
        checker.group(group, len(trace.iterations))


class _Checker:
    def __init__(
        self,
        origins: Origins,
        pipeline: Pipeline,
        chunks: int,
        takes_in: Node,
        runs: Node,
        forward: Node,
    ) -> None:
        self.origins, self.pipeline, self.chunks = origins, pipeline, chunks
        self.takes_in, self.runs, self.forward = takes_in, runs, forward
        self.values = len(pipeline.layers.passed)
        self.size = pipeline.layers.count // chunks

    def group(self, group: tuple[int, ...], iterations: int) -> None:
        times = {d: self._times(d, iterations) for d in group}
        if any(len(t) != self.pipeline.trips for t in times.values()):
            raise self._wrong("a device does not go forward as often as it should")
        first, last = group[0], group[-1]
        for begin, end in zip(self.pipeline.enters, self.pipeline.leaves, strict=True):
            begun = Execution(times[first][begin], first)
            at = Execution(times[last][end], last)
            for leaf in range(self.values):
                self._way(group, leaf, begun, at)

    def _times(self, device: int, iterations: int) -> list[int]:
        """When a device goes forward."""
        taken = [self._taken(self.forward, Execution(t, device)) for t in range(iterations)]
        return [t for t, go in enumerate(taken) if go]

    def _way(self, group: tuple[int, ...], leaf: int, begun: Execution, ended: Execution) -> None:
        """From what ``forward`` is given where a microbatch ends to where it begins."""
        value, at = self.forward.operands[1 + leaf], ended
        for stage in reversed(range(len(group) * self.chunks)):
            made = self.origins.of(value, at)
            chunk, position = divmod(stage, len(group))
            start = self.origins.number(self.runs.operands[1], made.at)
            if (made.node, made.leaf, made.at.device) != (self.runs, leaf, group[position]):
                raise self._wrong(f"virtual stage {stage} is not where it should be")
            if start != chunk * self.size or not self._taken(self.runs, made.at):
                raise self._wrong(f"virtual stage {stage} runs other layers")
            value, at = self.runs.operands[2 + leaf], made.at
        source = value.root
        if at != begun or source.node is not self.takes_in or source.index != leaf:
            raise self._wrong("a microbatch does not begin where it is taken in")
        if not self._taken(self.takes_in, at):
            raise self._wrong("a microbatch is not taken in")

    def _taken(self, node: Node, at: Execution) -> bool:
        """Whether a conditional takes its first branch."""
        taken = self.origins.row(node.operands[0], at)
        if taken is None:
            raise self._wrong("what it does depends on data")
        return taken

    def _wrong(self, what: str) -> Refusal:
        return Refusal(f"the interleaved loop could not be verified: {what}")
