"""MPI for processes that no MPI launcher started, but that share a key-value store.

A launcher of MPI answers the library's questions (which rank am I, what is the address of rank 3) over a
socket that each process inherits, in the text protocol PMI-1 of MPICH, whose messages are lines such as
``cmd=get kvsname=x key=y``. Here each process answers its own library, from the store. What comes of it
is an ordinary MPI world.

The answering thread needs the GIL while the library waits, so MPI must be initialized and finalized by
calls that give it up. The store is used while MPI is being initialized and never after it, for it may be
gone by then; when MPI ends, the processes have waited for each other already (`World.leave`).

Libraries that do not speak PMI-1 (Open MPI) see one process only.

Source of the protocol: MPICH's ``src/pmi``, version 1, "simple" wire format; of the process mapping:
MPICH's ``src/util/mpir_nodemap.h``.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from .control import end_process, say
from .rendezvous import SPACE, Rendezvous, Roll

_VARIABLES = ("PMI_FD", "PMI_RANK", "PMI_SIZE")
_GOODBYE = "cmd=finalize_ack rc=0"
_MAPPING = "PMI_process_mapping"
_LONGEST_KEY, _LONGEST_VALUE = 256, 4096
_log = logging.getLogger("stretto")


@contextmanager
def answering(
    rendezvous: Rendezvous,
    roll: Roll,
    timeout: float,
    give_up: Callable[[str], None] | None = None,
) -> Iterator[None]:
    """While inside, MPI can be initialized in this process; the thread that answers stays until its end.

    ``timeout``: seconds to wait for the other processes. ``give_up`` is called with the reason, from the
    answering thread, when that was too short or the store is gone: MPI waits without end then. By default
    it says so and ends the process.
    """
    ours, theirs = socket.socketpair()
    descriptor = theirs.detach()  # MPI closes it
    answers = _Answers(rendezvous, roll, timeout, give_up or _end_of(rendezvous.rank))
    threading.Thread(target=answers.serve, args=(ours,), name="stretto-wireup", daemon=True).start()
    values = (descriptor, rendezvous.rank, rendezvous.size)
    before = {name: os.environ.get(name) for name in _VARIABLES}
    os.environ.update(zip(_VARIABLES, map(str, values), strict=True))
    try:
        yield
    finally:
        answers.close()
        # Not for programs that are started from here.
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _end_of(rank: int) -> Callable[[str], None]:
    def end(reason: str) -> None:
        say(f"stretto: rank {rank} ends: {reason}\n")
        end_process()

    return end


class _Answers:
    """The answers to one process's library."""

    def __init__(
        self,
        rendezvous: Rendezvous,
        roll: Roll,
        timeout: float,
        give_up: Callable[[str], None],
    ) -> None:
        self._job, self._roll, self._store = rendezvous, roll, rendezvous.store
        self._timeout, self._give_up = timeout, give_up
        self._space = f"{SPACE}/{roll.job}"
        self._mapping = process_mapping([process.memory for process in roll.present])
        self._barriers = 0
        self._open = True

    def close(self) -> None:
        """Use the store no more."""
        self._open = False

    def serve(self, ours: socket.socket) -> None:
        """Answer until MPI ends."""
        for line in ours.makefile("r", newline="\n"):
            asked = dict(word.split("=", 1) for word in line.split() if "=" in word)
            ending = not self._open and asked.get("cmd") == "barrier_in"
            try:
                answer = self._answer(asked)
            except Exception as error:
                self._give_up(f"MPI could not be brought up over {self._job.name}: {error}")
                return
            ours.sendall(f"{answer}\n".encode())
            if ending:
                # MPI says goodbye while the process exits, after Python has: the answer must be there,
                # and this end open.
                ours.sendall(f"{_GOODBYE}\n".encode())
                ours.detach()
                return

    def _answer(self, asked: dict[str, str]) -> str:
        match asked.get("cmd"):
            case "init":
                return "cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0"
            case "get_maxes":
                sizes = f"keylen_max={_LONGEST_KEY} vallen_max={_LONGEST_VALUE}"
                return f"cmd=maxes rc=0 kvsname_max=256 {sizes}"
            case "get_appnum":
                return "cmd=appnum rc=0 appnum=0"
            case "get_my_kvsname":
                return f"cmd=my_kvsname rc=0 kvsname={self._roll.job}"
            case "get_universe_size":
                return f"cmd=universe_size rc=0 size={self._job.size}"
            case "put" if self._open:
                self._store.put(f"{self._space}/{asked['key']}", asked["value"])
                return "cmd=put_result rc=0 msg=success"
            case "get" if self._open:
                value = self._value(asked["key"])
                if value is None:
                    return "cmd=get_result rc=-1 msg=key_not_found"
                return f"cmd=get_result rc=0 msg=success value={value}"
            case "barrier_in":
                if self._open:
                    self._barrier()
                return "cmd=barrier_out rc=0"
            case "finalize":
                return _GOODBYE
            case command:
                _log.debug("MPI asked %s, which is not answered", command)
                return f"cmd={command} rc=-1 msg=not_supported"

    def _value(self, key: str) -> str | None:
        if key == _MAPPING:
            # Without an answer MPI compares the names of hosts.
            return self._mapping if len(self._mapping) < _LONGEST_VALUE else None
        return self._store.try_get(f"{self._space}/{key}")

    def _barrier(self) -> None:
        """Wait until all processes have come here as often as this one."""
        place = f"{self._space}/barrier/{self._barriers}"
        self._barriers += 1
        self._store.put(f"{place}/{self._job.rank}", "here")
        try:
            if self._job.rank == 0:
                for rank in range(self._job.size):
                    self._store.get(f"{place}/{rank}", self._timeout)
                self._store.put(f"{place}/all", "here")
            self._store.get(f"{place}/all", self._timeout)
        except TimeoutError:
            ranks = range(self._job.size)
            missing = [r for r in ranks if self._store.try_get(f"{place}/{r}") is None]
            raise TimeoutError(
                f"no answer from {_ranks(missing or [0])} within {self._timeout:g} s (STRETTO_TIMEOUT)"
            ) from None


def process_mapping(nodes: Sequence[str]) -> str:
    """Which processes share a node, given a name of each one's node, as MPICH's launchers tell it.

    ``(vector,(first,nodes,size),…)``: each block is ``size`` consecutive ranks on each of ``nodes``
    consecutive nodes, the first of which is ``first``.
    """
    numbers = {name: number for number, name in enumerate(dict.fromkeys(nodes))}
    blocks: list[list[int]] = []
    for number in (numbers[name] for name in nodes):
        if blocks and blocks[-1][0] == number:
            blocks[-1][1] += 1
        else:
            blocks.append([number, 1])
    return f"(vector,{','.join(f'({number},1,{size})' for number, size in blocks)})"


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:16])) + (", …" if len(ranks) > 16 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
