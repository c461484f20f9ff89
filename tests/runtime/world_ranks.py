"""A rank for test_world: joins the world and behaves as its first argument says."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

from stretto.runtime.errors import StrettoError
from stretto.runtime.job import world

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from support.mpi import find_mpiexec
from support.shield import behind_a_shield


def collective(joined: world.World, progress, sequence: int) -> None:
    """A barrier over all ranks, recorded as a stream records its collectives."""
    progress.begin("all-reduce.3", "train.py:12", sequence, tuple(range(joined.size)))
    joined.comm.Barrier()
    progress.end()


def say(line: str) -> None:
    """In one write, so that the launcher does not mix the lines of several ranks."""
    os.write(1, f"{line}\n".encode())


def of_child(ranks: int = 0, **more: bool) -> str:
    """The worlds of a process started from here, or of a job of so many ranks."""
    code = (
        "import os; from stretto.runtime.job import world as w; j = w.bootstrap(); "
        "os.write(1, f'{j.rank} {j.size}\\n'.encode())"
    )
    command = [find_mpiexec() or "", "-n", str(ranks)] if ranks else []
    command += [sys.executable, "-c", code]
    out = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60, **more)
    return ", ".join(
        f"{rank} of {size}" for rank, size in sorted(re.findall(r"(\d) (\d)", out.stdout))
    )


def main(behaviour: str) -> None:
    joined = world.bootstrap()
    progress = joined.progress()
    odd = joined.rank == 1
    told = threading.Event()
    joined.on_failure(lambda error: told.set())
    collective(joined, progress, 1)
    match behaviour:
        case "describe":
            # Also what must not be an end of the job: a daemon thread that raises, a forked child.
            thread = threading.Thread(target=lambda: 1 / 0, daemon=True)
            thread.start()
            thread.join()
            if odd and os.fork() == 0:
                sys.exit(0)
            say(f"rank {joined.rank} of {joined.size}, {joined.num_devices} devices")
            if odd:
                sys.exit(0)
            collective_free = sum(range(3_000_000))
            assert collective_free
        case "start others":
            # A child that was given the launcher's descriptors, one that was not, and a job of its own.
            for given in (True, False):
                say(f"rank {joined.rank} started {of_child(close_fds=not given)}")
            if odd:
                say(f"rank 1 started {of_child(ranks=2)}")
            collective(joined, progress, 2)
        case "raise":
            if odd:
                raise ValueError("no such file: digits.npz")
            collective(joined, progress, 2)
        case "sys.exit" | "SystemExit" | "exit" | "caught" as how:
            if odd and how == "sys.exit":
                sys.exit(3)
            if odd and how == "SystemExit":
                raise SystemExit(3)
            if odd and how == "exit":
                exit(3)  # noqa: PLR1722
            try:
                if odd:
                    joined.fail(RuntimeError("the engine is out of memory"))
                    told.wait()
                    joined.check()
                collective(joined, progress, 2)
            except StrettoError:
                sys.exit(3)
        case "all exit":
            sys.exit(3)
        case "terminate":
            pids = joined.comm.allgather(os.getpid())
            if odd:
                # Stopped meanwhile, so that none learns of another's end before its own signal is there.
                ends_all = "; ".join(
                    f"kill -{name} {' '.join(map(str, pids))}" for name in ("STOP", "TERM", "CONT")
                )
                subprocess.Popen(["sh", "-c", ends_all])
            ctypes.CDLL(None).sleep(1000)  # where no handler in Python runs
        case "raise in thread":
            if odd:
                thread = threading.Thread(target=lambda: int("x"))
                thread.start()
                thread.join()
                threading.Event().wait()
            collective(joined, progress, 2)
        case "fail":
            for path in set(
                re.findall(r"/dev/shm/mpich_shm_\w+", Path("/proc/self/maps").read_text())
            ):
                say(f"mapped {path}")
            if odd:
                joined.fail(RuntimeError("the engine is out of memory"))
            told.wait()
            try:
                joined.check()
            except StrettoError as error:
                say(f"rank {joined.rank} caught {type(error).__name__}: {error}")
        case "kill":
            if odd:
                os.kill(os.getpid(), signal.SIGKILL)
            collective(joined, progress, 2)
        case "lock":
            joined.on_failure(lambda error: ctypes.PyDLL(None).sleep(1000))
            if odd:
                os.kill(os.getpid(), signal.SIGKILL)
            collective(joined, progress, 2)
        case "leave":
            if not odd:
                collective(joined, progress, 2)
        case "idle":
            if odd:
                threading.Event().wait()
            collective(joined, progress, 2)


if __name__ == "__main__":
    if sys.argv[1] in ("kill", "lock", "terminate"):
        behind_a_shield(__file__, sys.argv[1], own_session=sys.argv[1] == "terminate")
    main(sys.argv[1])
