"""Which runs of a pipeline's layers reach a result, and the proof that only the pipeline reads microbatches.

`find_live` finds the runs that reach a result. `check_alone` proves point 3 of `recognize`: if every run
needs only the first input of its microbatch and its weights, then no transfer is read, and the only results
of runs that are read are those of the last stage. The proof leaves out the slices that another pipeline's
layers read, and the slices that are summed up.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from ..passes.valid import needs as rules
from ..passes.valid.liveness import Liveness, Mask, Needs
from ..passes.valid.trace import Forward, Trace
from ..values import BlockGraph, Node, all_nodes
from .chains import Execution
from .connected import groups_of
from .constants import Constant
from .gradients import sum_node
from .parts import Part
from .refusal import Refusal, about


def _rows(masks: Sequence[Mask], positions: Iterable[int], count: int) -> np.ndarray:
    """The devices on which any of these results is live."""
    found = np.zeros(count, bool)
    for i in positions:
        mask = masks[i]
        if mask is not None:
            found |= rules.whole(mask, 0).reshape(-1)
    return found


def _whole(node: Node, positions: Iterable[int], rows: np.ndarray) -> rules.Needs:
    """All of these operands, on these devices."""
    for i in positions:
        type = node.operands[i].type
        if type is not None:
            yield i, rows.reshape((-1,) + (1,) * len(type.shape))


def find_live(entry: BlockGraph, parts: Sequence[Part], forward: Forward, trace: Trace) -> None:
    """Fill in ``live`` and ``given`` of each part."""

    def recorder(part: Part) -> Needs:
        layers, stage = part.layers, part.stage
        others = [i for i in range(len(stage.results))
                  if i not in layers.passed and i not in layers.stacked]  # fmt: skip

        groups = [list(group) for _, group in groups_of(stage)]

        def record(at: Trace, masks: Sequence[Mask]) -> rules.Needs:
            assert at.iteration is not None
            part.given |= {i for i in layers.stacked if masks[i] is not None}
            rows = _rows(masks, [*layers.passed, *layers.stacked], forward.num_devices)
            for group in groups:  # if one member takes part, all do
                rows[group] |= rows[group].any()
            part.live.extend(Execution(at.iteration, int(d)) for d in np.flatnonzero(rows))
            if _rows(masks, others, forward.num_devices).any():
                with about(part.name):
                    raise Refusal(
                        f"weights or the counter of {stage.instruction.describe()} are read after it"
                    )
            if rows.any():
                yield from _whole(stage, range(len(stage.operands)), rows)

        return record

    Liveness(forward, needs={p.stage: recorder(p) for p in parts}).program(trace)
    for part in parts:
        part.live.sort()


def check_alone(
    entry: BlockGraph, parts: Sequence[Part], num_replicas: int, num_partitions: int
) -> None:
    """Prove point 3 of the docstring of `recognize`. Raises `Refusal`."""
    forward = Forward(num_replicas, num_partitions, follow_zeros=True)
    needs: dict[Node, Needs] = {}
    for part in parts:
        needs[part.stage] = _restricted(part, forward.num_devices)
        if part.again is not None:
            needs[part.again.node] = _restricted_again(part, part.again.node, forward.num_devices)
        for carry in part.sums.values():
            node = sum_node(part, carry)
            needs[node] = _only_the_sum(part, node, carry)
    Liveness(forward, needs=needs).program(forward.program(entry))
    for part in parts:
        with about(part.name):
            _check_transfers(part, forward)


def _restricted(part: Part, count: int) -> Needs:
    """A rule by which a run needs what its microbatch begins with and constants, and what each run has for
    itself is there. What others read of runs on their own device is noted in ``elsewhere``."""
    layers, stage = part.layers, part.stage
    sent = [i for i in layers.passed if i not in part.begun]
    begins = {chain[0] for chain in part.chains}
    ends = {chain[-1] for chain in part.chains}
    runs = {run for chain in part.chains for run in chain}
    others = [
        *(i for i in layers.weights if isinstance(part.weights[i], Constant)),
        *(i for i in layers.shared if isinstance(part.shared[i], Constant)),
        layers.counter,
    ]

    def restricted(at: Trace, masks: Sequence[Mask]) -> rules.Needs:
        assert at.iteration is not None
        for i in (*layers.passed, *layers.stacked):
            for d in np.flatnonzero(_rows(masks, [i], count)):
                at_run = Execution(at.iteration, int(d))
                if i in layers.passed and at_run in ends:
                    continue
                why = _elsewhere(part, i, at_run)
                if at_run not in runs:
                    with about(part.name):
                        raise Refusal(why)
                part.elsewhere.setdefault(i, why)
        begin = np.array([Execution(at.iteration, d) in begins for d in range(count)])
        run = np.array([Execution(at.iteration, d) in runs for d in range(count)])
        yield from _whole(stage, sent, begin)
        yield from _whole(stage, others, run)

    return restricted


def _elsewhere(part: Part, i: int, run: Execution) -> str:
    if i in part.layers.passed:
        return (
            f"what device {run.device} computes in iteration {run.iteration} is read by others than "
            "the next stage: only what the last stage gives may be"
        )
    return (
        f"what each layer gives to {part.layers.updates[i].describe()} is read otherwise than "
        "by a pipeline that is interleaved with it and runs the same layers, or as a "
        "gradient, summed up over microbatches with nothing added in between"
    )


def _restricted_again(part: Part, node: Node, count: int) -> Needs:
    """A rule by which only the layers of the stage read recomputed values."""
    assert part.again is not None
    layers = part.again.layers
    runs = {run for chain in part.chains for run in chain}
    again = {**part.again.weights, **part.again.shared}
    others = [*(i for i, own in again.items() if isinstance(own, Constant)), layers.counter]

    def restricted(at: Trace, masks: Sequence[Mask]) -> rules.Needs:
        with about(part.name):
            if _rows(masks, range(len(masks)), count).any():
                raise Refusal(
                    f"what {node.instruction.describe()} computes again is read by others than the layers "
                    "of its stage. If that is a head in the loop, put jax.checkpoint around the stage, not "
                    "around the iteration"
                )
        run = np.array([Execution(at.iteration or 0, d) in runs for d in range(count)])
        yield from _whole(node, others, run)

    return restricted


def _only_the_sum(part: Part, node: Node, carry: int) -> Needs:
    parameter = part.loop.blocks[1].parameters[carry]

    def needed(at: Trace, masks: Sequence[Mask]) -> rules.Needs:
        (mask,) = masks
        if mask is not None:
            yield [o.root for o in node.operands].index(parameter), mask

    return needed


def _check_transfers(part: Part, forward: Forward) -> None:
    for inner in all_nodes(part.loop.blocks[1]):
        transfer = forward.transfers.get(inner)
        if transfer is not None and (any(transfer.always) or any(transfer.live)):
            pairs = inner.collective.pairs if inner.collective is not None else ()
            read = [(min(its), pair) for its, pair in
                    zip(transfer.live, pairs, strict=True) if its]  # fmt: skip
            where = ""
            if read:
                iteration, (source, target) = min(read)
                where = f" (from device {source} to {target} in iteration {iteration})"
            moved = [t for o in inner.operands if (t := o.type) is not None]
            why = "a pipeline that is circular already reads it so"
            if part.layers.reverse:
                why = (
                    "if it is the gradient of something that goes from stage to stage along with a "
                    "microbatch, as what an encoder gave for it, let each stage take that by the number of "
                    "its microbatch from an array that all stages have, as memory[i - stage]"
                )
            if all(t.dtype[0] in "psu" for t in moved):
                why = (
                    "a head or a loss may read labels or a mask that go from stage to stage with a "
                    "microbatch only if stages hand them on as they are, and all stages have what they are "
                    "taken from. Or let the last stage take them by the number of the microbatch, as "
                    "labels[i - (stages - 1)], from an argument that all stages have"
                )
            raise Refusal(
                f"what {inner.instruction.describe()} moves{where} is read by more than the next "
                f"stage's layers; {why}"
            )
