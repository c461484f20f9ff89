"""The pipelines of a partitioned module in another schedule, where that is asked for.

Nothing else imports the package `pipelines`, which is optional.
"""

from __future__ import annotations

from functools import partial

from jaxlib import _hlo

from stretto.runtime.errors import InvalidProgramError, UnsupportedError

from .graph import Instruction, Module
from .interleaved import NO_LOOP, Interleaved, Scheduled
from .pipeline import Dump


def reschedule(
    hlo: bytes,
    num_replicas: int,
    num_partitions: int,
    chunks: int,
    schedule: str,
    dump: Dump | None,
    *,
    finite_padding: bool,
    named: bool = True,
) -> tuple[bytes, tuple[Interleaved | Scheduled, ...]]:
    """The module with its pipelines interleaved, or in another schedule; ``dump`` is given both.
    ``finite_padding``: as of `scheduled`. ``named``: whether that is asked of this program, and not of all
    programs of a job, of which most are no pipelines, and are not reported on.

    Raises `UnsupportedError` where that is asked for and the package for it is missing, and
    `InvalidProgramError` where both are.
    """
    if dump is not None:
        _dump_hlo(hlo, "hlo", dump)
    if chunks <= 1 and schedule == "gpipe":
        return hlo, ()
    if chunks > 1 and schedule not in ("gpipe", "interleaved_1f1b"):
        raise InvalidProgramError(
            f"the schedule {schedule} (stretto_schedule, STRETTO_SCHEDULE) has one chunk of layers a device; "
            f"{chunks} are asked for (stretto_interleave, STRETTO_INTERLEAVE). With more, it is "
            "interleaved_1f1b"
        )
    if chunks <= 1 and schedule == "interleaved_1f1b":
        raise InvalidProgramError(
            "the schedule interleaved_1f1b (stretto_schedule, STRETTO_SCHEDULE) needs a number of chunks of "
            "layers for each device, at least 2: set stretto_interleave or STRETTO_INTERLEAVE"
        )
    try:
        from .pipelines import interleave, scheduled
    except ModuleNotFoundError as error:
        raise UnsupportedError(
            f"{_asked(chunks, schedule)}, and the package that interleaves pipelines is not installed: "
            f"{error}"
        ) from error
    found: tuple[Interleaved | Scheduled, ...]
    if schedule == "gpipe":
        made, found = interleave(hlo, num_replicas, num_partitions, chunks)
    else:
        made, found = scheduled(
            hlo, num_replicas, num_partitions, schedule, chunks, finite_padding=finite_padding
        )
    if not found and _sends(hlo, again=not named):
        report = Interleaved if schedule == "gpipe" else partial(Scheduled, schedule=schedule)
        found = (report("", "", why=NO_LOOP),)
    if dump is not None and made != hlo:
        _dump_hlo(made, "interleaved" if schedule == "gpipe" else "scheduled", dump)
    return made, found


def _sends(hlo: bytes, *, again: bool) -> bool:
    """Whether a module has transfers from device to device. ``again``: such as send on what the same pairs
    have sent before, as the stages of a pipeline do whose iterations are unrolled."""
    for computation in Module.parse(hlo).computations:
        behind: dict[Instruction, frozenset[tuple[tuple[int, int], ...]]] = {}
        for instruction in computation.instructions:
            before = frozenset().union(*(behind[o] for o in instruction.operands))
            if instruction.opcode in ("collective-permute", "collective-permute-start"):
                pairs = tuple((p.source, p.target) for p in instruction.proto.source_target_pairs)
                if not again or pairs in before:
                    return True
                before |= {pairs}
            behind[instruction] = before
    return False


def _asked(chunks: int, schedule: str) -> str:
    if schedule == "gpipe":
        return f"{chunks} chunks of layers a device are asked for (stretto_interleave, STRETTO_INTERLEAVE)"
    return f"the schedule {schedule} is asked for (stretto_schedule, STRETTO_SCHEDULE)"


def _dump_hlo(hlo: bytes, stage: str, dump: Dump) -> None:
    module = _hlo.HloModule.from_serialized_hlo_module_proto(hlo)
    dump(module.name, stage, module.to_string())
