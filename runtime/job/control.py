"""The control plane of a job, seen from one rank: who is alive, who failed, what everybody waits for.

Every rank keeps one connection to the hub on rank 0 (`hub`) and a daemon thread that listens to it,
so that a rank blocked inside MPI still hears what happened. Once a second the thread looks at the progress
of this rank's streams, and several times at how far its runs have come (`run_log`), which it posts to the
hub. Nothing else is sent while all is well.

When the job has failed, every rank keeps the error for `Control.error`, calls those who asked to be told
(they fail what is pending), and, if the process has not ended by itself after ``grace`` seconds, ends it with
exit code 1. That takes Python's lock; where a thread keeps it for ever, `faulthandler` shows all threads and
ends the process.

Each rank says one line to stderr, and one of them all there is to say: the rank that failed, by the
traceback that Python prints where nobody catches the error, or else by its text (`say_rest`); rank 0 where
the failure is nobody's alone.

Hydra kills the others where a rank ends without MPI's leave, and returns what follows from how all of them
ended, most often 9. So where a launcher of MPI started them, ranks that have come to their ends wait for the
hub's word (`await_end`), all end with the exit code of the rank that failed, and Hydra is told.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import secrets
import select
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from time import monotonic, sleep
from typing import TYPE_CHECKING

from ..errors import CollectiveMismatch, CollectiveTimeout, RankFailed, StrettoError, WorldError
from . import watchdog
from ._ends import hush
from .hub import ENDING_WITHIN, Hub, read_streams
from .progress import Progress, Snapshot
from .run_log import RunLogs
from .watchdog import Peer
from .wire import Link, Message

if TYPE_CHECKING:
    from mpi4py import MPI

TICK = 1.0
POST_EVERY = 0.05
POST_EVERY_FOR_RANK = 0.001
IDLE = 4
CONNECT_WITHIN = 30.0
# So much longer than the grace a process may keep Python's lock.
LOCKED = 3.0
# Seconds in which Python prints the error that a program got, if nobody catches it.
SHOWN_WITHIN = 1.0

_TRACEBACK = "Traceback (most recent call last):"
_News = tuple[list[Callable[[StrettoError], None]], StrettoError]


class Control:
    """This rank's end of the control plane."""

    def __init__(
        self,
        rank: int,
        peers: Sequence[Peer],
        link: Link,
        hub: Hub | None,
        timeout: float,
        grace: float,
        progress: Sequence[Progress],
        runs: RunLogs,
        take_leave: Callable[[], None] = lambda: None,
    ) -> None:
        self.error: StrettoError | None = None
        self._rank = rank
        self._peers = peers
        self._link = link
        self._hub = hub
        self._timeout = timeout
        self._grace = grace
        self._progress = progress
        self._runs = runs
        self._take_leave = take_leave
        # How often the runs are looked at. Posts of many ranks must not drown the hub.
        self._interval = max(POST_EVERY, POST_EVERY_FOR_RANK * len(peers))
        self._next_watch = 0.0
        self._listeners: list[Callable[[StrettoError], None]] = []
        self._lock = threading.Lock()
        self._posting = threading.Lock()
        self._left: dict[int, tuple[float, tuple[Snapshot, ...]]] = {}
        self._reported: tuple[int, int] | None = None
        self._deadline = float("inf")
        self._closed = False
        # Set when this rank need not wait any longer: all ranks have left, or the job has failed.
        self._released = threading.Event()
        self._all_told = threading.Event()
        self._hub_is_gone = threading.Event()
        # The rank whose failure it is; -1 while all is well, and where it is nobody's alone.
        self.culprit = -1
        # Whether the user has seen this rank's error, and what is to be said of it if not.
        self._is_shown = False
        self._unsaid = ""
        self._thread = threading.Thread(target=self._listen, name="stretto-control", daemon=True)
        # Calls listeners. It is there from the start: from 3.12 on Python begins no thread once it ends,
        # which is when a job often fails.
        self._news: SimpleQueue[_News | None] = SimpleQueue()
        self._teller = threading.Thread(target=self._tell, name="stretto-news", daemon=True)

    def start(self) -> None:
        self._teller.start()
        self._thread.start()

    # What the process has to say.

    def fail(self, text: str, is_shown: bool = False) -> None:
        """Tell all ranks that this one has failed. The first failure of the job counts.

        ``is_shown``: Python has printed the error.
        """
        if is_shown:
            self._is_shown, self._unsaid = True, ""
        if self.error is None:
            self._link.send({"type": "fail", "kind": "failed", "rank": self._rank, "text": text})

    def on_failure(self, listener: Callable[[StrettoError], None]) -> None:
        """Call ``listener`` with the error once the job has failed, from a thread of its own."""
        with self._lock:
            self._listeners.append(listener)
            error = self.error
        if error is not None:
            self._news.put(([listener], error))

    def goodbye(self) -> None:
        """Leave the job in peace: returns when every rank has said so, or when the job has failed."""
        self._post()
        self._link.send({"type": "goodbye", "streams": self._streams()})
        self._released.wait()

    def wait_told(self, seconds: float) -> None:
        """Wait until every rank has heard of the failure: what ends earlier may be cut short by mpiexec."""
        if self._released.wait(seconds) and self.error is not None:
            self._all_told.wait(seconds)

    def say_rest(self) -> None:
        """Say why this rank has failed, if nobody has."""
        text, self._unsaid = self._unsaid, ""
        if text:
            say(text)

    def await_end(self, code: int) -> None:
        """In a failed job, at the end of this process, which would be with ``code``: the hub ends it.

        Returns if it does not, when this process would be ended. Where the hub has gone with rank 0, the
        others get the time that it would have given them.
        """
        self._link.send({"type": "ending", "code": code})
        if self._hub_is_gone.wait(self._rest()):
            sleep(min(self._rest(), ENDING_WITHIN, self._grace / 2))

    def _rest(self) -> float:
        return max(0.0, self._deadline - monotonic())

    def close(self) -> None:
        self._closed = True
        if self.error is not None:
            faulthandler.cancel_dump_traceback_later()
        self._link.close()
        self._news.put(None)

    def close_inherited(self) -> None:
        """In a forked child: drop the connections, so that the parent's death is still noticed."""
        self.close()
        if self._hub:
            self._hub.close_inherited()

    # The thread.

    def _listen(self) -> None:
        interval = self._interval
        while not self._closed:
            try:
                ready, _, _ = select.select([self._link], [], [], interval)
                messages = self._link.receive() if ready else []
            except (OSError, ValueError):  # closed by `close`
                return
            if messages is None:
                if self._released.is_set() and self.error is None:
                    return
                self._break(
                    "died", 0, "its connection ended: it was killed, crashed, or lost its host"
                )
                self._all_told.set()
                self._end_later()
                return
            for message in messages:
                self._handle(message)
            now = monotonic()
            if now >= self._next_watch:
                self._next_watch = now + TICK
                self._watch()
            # Without news it is enough to look now and then.
            interval = self._interval * (1 if self._post() else IDLE)

    def _handle(self, message: Message) -> None:
        match message.get("type"):
            case "left":
                self._left[message["rank"]] = (monotonic(), read_streams(message["streams"]))
            case "all left":
                self._released.set()
            case "inquire":
                line = watchdog.main_thread_line()
                self._link.send({"type": "state", "streams": self._streams(), "line": line})
            case "account":
                self._link.send({"type": "accounts", "sets": self._runs.accounts()})
            case "broken":
                self._break(message["kind"], message["rank"], message["text"])
                self._link.send({"type": "told"})
            case "all told":
                self._all_told.set()
            case "end":
                self.say_rest()
                if message["in_peace"]:
                    self._take_leave()
                end_process(message["code"])

    def _watch(self) -> None:
        """Once a second: look for collectives that are overdue, and for ranks that left while others wait."""
        if self.error is not None:
            rest = self._rest()
            if rest <= self._grace - SHOWN_WITHIN or not rest:
                self.say_rest()
            if not rest:
                end_process()
            return
        streams = self._streams()
        late = watchdog.overdue(streams, self._timeout)
        if late and self._reported != (late[0], late[1].sequence):
            self._reported = late[0], late[1].sequence
            self._link.send({"type": "overdue", "stream": late[0], "entry": late[1]})
        if self._left:
            now = monotonic()
            left = {rank: (now - since, states) for rank, (since, states) in self._left.items()}
            found = watchdog.abandoned(streams, left)
            if found:
                gone, entry = found
                text = (
                    f"it ended while rank {self._rank} waits for it in {watchdog.describe(entry)}"
                )
                self._link.send({"type": "fail", "kind": "left", "rank": gone, "text": text})

    def _break(self, kind: str, rank: int, text: str) -> None:
        with self._lock:
            if self.error is not None:
                return
            error: StrettoError
            if kind == "timeout":
                error = CollectiveTimeout(text)
            elif kind == "mismatch":
                error = CollectiveMismatch(text)
            else:
                verb = {"died": "died", "left": "left the job too early"}.get(kind, "failed")
                error = RankFailed(f"{self._peers[rank]} {verb}: {text}")
            self.error = error
            self.culprit = rank
            listeners = list(self._listeners)
        self._deadline = monotonic() + self._grace
        faulthandler.dump_traceback_later(self._grace + LOCKED, exit=True, file=2)
        says_all = self._rank == (0 if rank < 0 else rank)
        text = f"stretto: rank {self._rank} ends: {error if says_all else in_a_line(error)}\n"
        if kind == "failed" and says_all:
            self._unsaid = "" if self._is_shown else text  # Python may be about to print it
        else:
            say(text)
        hush()  # Open MPI ends the others by SIGTERM
        # Not on this thread: a listener that blocks must not keep it from ending the process.
        self._news.put((listeners, error))
        self._released.set()

    def _tell(self) -> None:
        while (news := self._news.get()) is not None:
            listeners, error = news
            for listener in listeners:
                try:
                    threading.Thread(target=listener, args=(error,), daemon=True).start()
                except RuntimeError:  # Python ends
                    listener(error)

    def _end_later(self) -> None:
        """The connection is gone: only the deadline is left to wait for."""
        self._hub_is_gone.set()
        never = threading.Event()
        while not self._closed and (rest := self._deadline - monotonic()) > 0:
            never.wait(min(rest, TICK))
            self.say_rest()
        if not self._closed:
            end_process()

    def _post(self) -> bool:
        """Say how far the runs have come, if that is news."""
        with self._posting:  # what is said last is sent before the goodbye
            posts = self._runs.posts()
            if posts and self.error is None:
                self._link.send({"type": "runs", "sets": posts})
        return bool(posts)

    def _streams(self) -> tuple[Snapshot, ...]:
        now = monotonic()
        return tuple(p.snapshot(now) for p in self._progress)


def end_process(code: int = 1) -> None:
    """End the process at once with this exit code: a thread may be blocked inside MPI for ever."""
    for file in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            file.flush()
    os._exit(code)


def first_line(error: BaseException) -> str:
    return str(error).split("\n", 1)[0]


def in_a_line(error: BaseException) -> str:
    """What failed: the first line, and the last one of a traceback that begins there."""
    text = str(error).rstrip()
    return first_line(error).replace(_TRACEBACK, text[text.rfind("\n") + 1 :].strip())


def say(text: str) -> None:
    """To stderr in one write, so that the lines of several ranks do not mix."""
    try:
        sys.stderr.flush()
        os.write(2, text.encode(errors="replace"))
    except (OSError, ValueError, AttributeError):
        pass


def connect(
    comm: MPI.Comm,
    peers: Sequence[Peer],
    timeout: float,
    grace: float,
    host: str,
    progress: Sequence[Progress],
    runs: RunLogs,
    take_leave: Callable[[], None],
) -> Control:
    """Join the ranks of ``comm``; collective. Raises the same `WorldError` on every rank.

    ``take_leave``: tells the launcher that this process ends, and MPI without it.
    """
    rank = comm.Get_rank()
    listener = None
    offer: tuple[int, str, list[str]] | str | None = None
    if rank == 0:
        try:
            listener = socket.create_server((host, 0), backlog=len(peers))
            addresses = [host] if host else addresses_of_host()
            offer = listener.getsockname()[1], secrets.token_hex(32), addresses
        except OSError as error:
            offer = f"rank 0 cannot listen at {host or 'any address'}: {error}"
    offer = comm.bcast(offer)
    if isinstance(offer, str):
        raise WorldError(f"{offer}. Set STRETTO_CONTROL_HOST to an address of the host of rank 0")
    assert offer is not None
    port, token, addresses = offer
    hub, link, problem = None, None, ""
    if listener is not None:
        own, far = socket.socketpair()
        link = Link(own)
        hub = Hub(listener, token, peers, timeout, far, grace)
        hub.start()
    else:
        same_host = peers[0].host == peers[rank].host
        candidates = ["127.0.0.1", *addresses] if same_host and not host else addresses
        link, problem = _dial(candidates, port, token, rank)
    problems = [p for p in comm.allgather(problem) if p]
    if problems:
        for opened in (link, listener):
            if opened is not None:
                opened.close()
        raise WorldError(
            f"ranks cannot reach rank 0: {problems[0]}. Set STRETTO_CONTROL_HOST to the address of "
            f"{peers[0].host} that the other hosts can reach"
        )
    assert link is not None
    control = Control(rank, peers, link, hub, timeout, grace, progress, runs, take_leave)
    control.start()
    return control


def _dial(candidates: Sequence[str], port: int, token: str, rank: int) -> tuple[Link | None, str]:
    """Connect to the first address that answers as rank 0 does."""
    tried = []
    deadline = monotonic() + CONNECT_WITHIN
    for address in dict.fromkeys(candidates):
        rest = deadline - monotonic()
        if rest <= 0:
            break
        try:
            link = Link(socket.create_connection((address, port), timeout=min(10.0, rest)))
        except OSError as error:
            tried.append(f"{address}:{port} {error}")
            continue
        if link.send({"type": "hello", "token": token, "rank": rank}):
            messages = link.receive()
            if messages and messages[0].get("type") == "welcome":
                return link, ""
        link.close()
        tried.append(f"{address}:{port} does not answer as rank 0")
    return None, f"rank {rank} on {socket.gethostname()} tried {'; '.join(tried) or 'no address'}"


def addresses_of_host() -> list[str]:
    """IPv4 addresses of this host by which another may reach it, the likeliest first."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # documentation address; nothing is sent
            found.append(probe.getsockname()[0])
        except OSError:
            pass
    found += _interface_addresses()
    with contextlib.suppress(OSError):
        found += socket.gethostbyname_ex(socket.gethostname())[2]
    loopback = [a for a in found if a.startswith("127.")]
    return list(dict.fromkeys([a for a in found if a not in loopback] + loopback))


def _interface_addresses() -> list[str]:
    """The address of each network interface, where the system (Linux) can be asked."""
    try:
        import fcntl
    except ImportError:
        return []
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = name.encode()[:15].ljust(256, b"\0")
            try:
                answer = fcntl.ioctl(probe, 0x8915, request)  # SIOCGIFADDR
            except OSError:
                continue
            found.append(socket.inet_ntoa(answer[20:24]))
    return found
