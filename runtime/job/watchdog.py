"""The watchdog's conclusions from the states of the ranks. Pure functions of plain data.

The control plane calls them: `overdue` and `abandoned` on every rank once a second, `report` on rank 0
with what every rank answered.
"""

from __future__ import annotations

import sys
import sysconfig
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from .progress import Entry, Snapshot

# A rank that has left took part in what came before. What still runs elsewhere gets this long to end.
ABANDONED_AFTER = 3.0
LISTED_RANKS = 16


class State(NamedTuple):
    """What one rank does. ``line`` is where its main thread is in the user's program."""

    streams: tuple[Snapshot, ...]
    line: str


class Peer(NamedTuple):
    """A rank of the job and where it runs."""

    rank: int
    pid: int
    host: str

    def __str__(self) -> str:
        return f"rank {self.rank} (pid {self.pid} on {self.host})"


def overdue(streams: Iterable[Snapshot], timeout: float) -> tuple[int, Entry] | None:
    """The stream and the collective that has waited longest, if longer than ``timeout``."""
    waiting = [(s.stream, s.current) for s in streams if s.current and s.current.age > timeout]
    return max(waiting, key=lambda w: w[1].age, default=None)


def abandoned(
    streams: Iterable[Snapshot], left: Mapping[int, tuple[float, Sequence[Snapshot]]]
) -> tuple[int, Entry] | None:
    """A rank that has left and a collective here that still waits for it.

    ``left`` gives, for each rank that has left, seconds since then and the states of its streams at
    that time. A rank whose stream had come as far as the collective took part in it.
    """
    for stream in streams:
        entry = stream.current
        if entry is None:
            continue
        for rank in entry.ranks:
            age, states = left.get(rank, (0.0, ()))
            if min(age, entry.age) < ABANDONED_AFTER:
                continue
            lasts = (s.last for s in states if s.stream == stream.stream)
            if not any(last and last.sequence >= entry.sequence for last in lasts):
                return rank, entry
    return None


def report(
    stream: int,
    entry: Entry,
    states: Mapping[int, State | None],
    peers: Sequence[Peer],
    timeout: float,
) -> str:
    """The message for a collective that timed out, with what every rank was doing.

    ``states`` has None for a rank that has left, and lacks the ranks that did not answer.
    """
    missing = [r for r in entry.ranks if not _waits_in(states.get(r), stream, entry)]
    if missing:
        who = f"rank{'s' if len(missing) > 1 else ''} {_numbers(missing)} did not reach it"
    else:
        who = "every rank has reached it, so that the transfer itself is slow or stuck"
    lines = [f"{describe(entry)} timed out after {timeout:g} s (STRETTO_TIMEOUT): {who}"]
    # Those who are missing first: they hold the answer.
    order = [*missing, *(r for r in range(len(peers)) if r not in missing)]
    lines += [f"  {peers[r]}: {_doing(r, states)}" for r in order[:LISTED_RANKS]]
    if len(order) > LISTED_RANKS:
        lines.append(f"  and {len(order) - LISTED_RANKS} more ranks")
    return "\n".join(lines)


def describe(entry: Entry) -> str:
    """``all-reduce.3 (train.py:12) of jit_step (called at train.py:30 in main)``."""
    what = f"{entry.name} ({entry.source})" if entry.source else entry.name
    return f"{what} of {entry.program}" if entry.program else what


def _waits_in(state: State | None, stream: int, entry: Entry) -> bool:
    return state is not None and any(
        s.stream == stream
        and s.current is not None
        and (s.current.name, s.current.ranks) == (entry.name, entry.ranks)
        for s in state.streams
    )


def _doing(rank: int, states: Mapping[int, State | None]) -> str:
    if rank not in states:
        return "did not answer (its Python is blocked, or its host is overloaded)"
    state = states[rank]
    if state is None:
        return "has left the job"
    said = []
    for stream in state.streams:
        # Streams with negative numbers are the ways of transfers, whose names say which.
        named = len(state.streams) > 1 and stream.stream >= 0
        where = f" on stream {stream.stream}" if named else ""
        if stream.current:
            said.append(f"in {describe(stream.current)}{where} for {stream.current.age:.1f} s")
        elif stream.last is None:
            said.append(f"in no collective yet{where}")
        else:
            said.append(f"in no collective{where}")
        if stream.last:
            last = stream.last
            said.append(f"last completed {describe(last)} {last.age:.1f} s ago")
    if not state.streams:
        said.append("in no collective yet")
    if state.line:
        said.append(f"main thread at {state.line}")
    return ", ".join(said)


def _numbers(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:LISTED_RANKS]))
    more = len(ranks) - LISTED_RANKS
    return f"{shown} and {more} more" if more > 0 else shown


def main_thread_line() -> str:
    """``file:line in function`` of the user's code that the main thread is in, or an empty string."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return user_line(frame)


def calling_line() -> str:
    """The line of the user's code that this thread is in; the main thread's if it is in none."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and not _is_user(frame):
        frame = frame.f_back
    return user_line(frame) if frame is not None else main_thread_line()


def _is_user(frame: FrameType) -> bool:
    path = frame.f_code.co_filename
    # Also those of an environment that this one builds upon.
    installed = "/site-packages/" in path or "/dist-packages/" in path
    return not installed and not path.startswith((*_LIBRARIES, "<"))


def user_line(frame: FrameType | None) -> str:
    """The innermost frame that is neither of a library nor of this package; else the innermost."""
    innermost = frame
    while frame is not None and not _is_user(frame):
        frame = frame.f_back
    chosen = frame or innermost
    if chosen is None:
        return ""
    return f"{chosen.f_code.co_filename}:{chosen.f_lineno} in {chosen.f_code.co_name}"


_LIBRARIES = tuple(
    {
        *(sysconfig.get_paths()[k] for k in ("purelib", "platlib", "stdlib", "platstdlib")),
        *(str(Path(__file__).parents[1] / layer) for layer in ("runtime", "plugin", "collectives")),
    }
)
