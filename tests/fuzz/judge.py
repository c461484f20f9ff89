"""What becomes of one input: a result, a clear error, or a defect.

Reading and compiling may end the process: users do it behind `stretto.hlo_frontend.source.in_fork`. What
runs afterwards may not.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from zlib import crc32

from stretto.commands.explain import explain, to_text
from stretto.commands.hlo_input import CompiledFile, compile_file
from stretto.commands.run import Arguments, execute
from stretto.runtime.errors import StrettoError
from stretto.runtime.job.world import World
from stretto.runtime.options import Options
from stretto.runtime.program import Loop, Program, instructions
from stretto.runtime.program.check import check
from stretto.runtime.program.codec import from_bytes, to_bytes

DEVICES = 4
RESULT, ERROR, DEFECT, CRASH, HANG = "result", "error", "defect", "crash", "hang"
# A program above these is not run: it would take what it says, for nothing.
_MOST_BYTES, _MOST_DEVICES, _MOST_TRIPS = 1 << 24, 64, 1000
_ROOT = Path(__file__).resolve().parents[2]


def judge(data: bytes, compiled: Callable[[], None] = lambda: None) -> tuple[str, str]:
    """`RESULT`, `ERROR` with its message, or `DEFECT` with type and place of what was raised.

    ``compiled`` is called when reading and compiling are over.
    """
    try:
        # Half of the inputs with collectives as they are written, half with those that send less.
        rewrites = bool(crc32(data) & 1)
        file = compile_file(data, DEVICES, guarded=False, rewrites=rewrites)
        compiled()
        to_text(explain(file))
        _run(file)
    except StrettoError as error:
        return ERROR, str(error)
    except Exception as error:
        return DEFECT, f"{type(error).__name__} at {_place(error)}: {error}"[:500]
    return RESULT, ""


def _run(file: CompiledFile) -> None:
    program = file.program
    check(program)
    if from_bytes(to_bytes(program)) != program:
        raise AssertionError("the program is not what it was after a round trip")
    if program.num_devices > _MOST_DEVICES or not _is_small(program):
        return
    world = World(Options(engine="null", local_devices=program.num_devices, launcher="none"))
    execute(file, world, Arguments(seed=0))


def _is_small(program: Program) -> bool:
    if sum(type.nbytes for type in program.slot_types) * program.num_devices > _MOST_BYTES:
        return False
    loops = [i for i in instructions(program.body) if isinstance(i, Loop)]
    return all((loop.trip_count or 0) <= _MOST_TRIPS for loop in loops)


def _place(error: BaseException) -> str:
    """The innermost line of ours that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f for f in frames if Path(f.filename).is_relative_to(_ROOT)] or frames
    frame = ours[-1]
    return f"{Path(frame.filename).name}:{frame.lineno} ({frame.name})"
