"""The hub of the control plane: on rank 0, one thread that every rank is connected to.

It passes on what one rank has to tell the others. It holds the one view of the job that decides: the
first failure that arrives is the job's failure, and all ranks are told that one.

Messages from a rank: ``hello`` (token, rank), ``goodbye`` (streams), ``fail`` (kind, rank, text),
``overdue`` (stream, entry), ``state`` (streams, line), ``runs`` and ``accounts`` (sets), ``told``,
``ending`` (code). To the ranks: ``welcome``, ``left`` (rank, streams), ``all left``, ``broken`` (kind, rank,
text), ``inquire``, ``account``, ``all told``, ``end`` (code, in_peace).
"""

from __future__ import annotations

import hmac
import math
import selectors
import socket
import threading
from collections.abc import Sequence
from time import monotonic

from . import audit, watchdog
from .audit import Audit
from .progress import Entry, Snapshot
from .run_log import Account, read_account, read_post
from .watchdog import Peer, State
from .wire import Link, Message

# Seconds: for an answer; in which the other ranks of a failed job come to their ends, once one has, and once
# the one that failed has, but half of the options' grace if that is shorter; and in which they then end.
ANSWER_WITHIN = 3.0
ENDING_WITHIN = 2.0
ENDING_WITH_CULPRIT_WITHIN = 0.5
ENDED_WITHIN = 1.0


class Hub:
    """Joins the links of all ranks. Runs in a daemon thread until every rank has gone."""

    def __init__(
        self,
        listener: socket.socket,
        token: str,
        peers: Sequence[Peer],
        timeout: float,
        own_end: socket.socket,
        grace: float,
    ) -> None:
        self._listener = listener
        self._token = token
        self._peers = peers
        self._timeout = timeout
        self._grace = grace
        self._selector = selectors.DefaultSelector()
        self._links: dict[int, Link] = {}
        self._strangers: set[Link] = set()
        self._left: set[int] = set()
        self._broken = False
        self._culprit = -1
        self._died = False
        self._untold: set[int] = set()
        # The end of a failed job: the exit codes of ranks that have come to theirs, the one of all, and when
        # the others, and after them rank 0, are ended.
        self._ending: dict[int, int] = {}
        self._end_at = math.inf
        self._code: int | None = None
        # An inquiry under way: the collective that is overdue, the answers, when to stop waiting.
        self._overdue: tuple[int, Entry] | None = None
        self._answers: dict[int, State | None] = {}
        self._deadline = 0.0
        # Whether the ranks run the same programs: what they post, and accounts that were asked for.
        self._audit = Audit()
        self._accounts: dict[int, dict[str, Account]] | None = None
        self._contradiction = False
        self._accounts_deadline = 0.0
        listener.settimeout(10.0)
        self._selector.register(listener, selectors.EVENT_READ)
        self._adopt(0, Link(own_end))
        self._thread = threading.Thread(target=self._serve, name="stretto-hub", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close_inherited(self) -> None:
        """In a forked child: drop the connections, which are the parent's."""
        self._listener.close()
        for link in (*self._links.values(), *self._strangers):
            link.close()

    def _serve(self) -> None:
        while self._links:
            for key, _ in self._selector.select(self._wait()):
                if key.fileobj is self._listener:
                    self._accept()
                elif isinstance(key.fileobj, Link):
                    self._read(key.fileobj, key.data)
            if self._overdue and monotonic() >= self._deadline:
                self._conclude()
            if self._broken:
                self._end(monotonic())
            else:
                self._look(monotonic())
        self._selector.close()
        self._listener.close()

    def _wait(self) -> float | None:
        """Seconds until there is something to do without being told; None for never."""
        times = [self._deadline] if self._overdue else []
        times += [self._end_at] if self._end_at < math.inf else []
        if not self._broken:
            look = self._audit.next_look() if self._accounts is None else self._accounts_deadline
            times += [] if look is None else [look]
        return max(0.0, min(times) - monotonic()) if times else None

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        link = Link(connection)
        self._strangers.add(link)
        self._selector.register(link, selectors.EVENT_READ, None)

    def _adopt(self, rank: int, link: Link) -> None:
        self._links[rank] = link
        if link in self._strangers:
            self._strangers.discard(link)
            self._selector.modify(link, selectors.EVENT_READ, rank)
        else:
            self._selector.register(link, selectors.EVENT_READ, rank)
        link.send({"type": "welcome"})

    def _read(self, link: Link, rank: int | None) -> None:
        messages = link.receive()
        if messages is None:
            self._drop(link, rank)
            return
        for message in messages:
            if rank is None:
                rank = self._greet(link, message)
                if rank is None:
                    return
            else:
                self._handle(rank, message)

    def _greet(self, link: Link, message: Message) -> int | None:
        """Admit a rank that knows the token; hang up on anyone else."""
        rank = message.get("rank")
        token = str(message.get("token", ""))
        known = isinstance(rank, int) and 0 < rank < len(self._peers) and rank not in self._links
        if not known or not hmac.compare_digest(token.encode(), self._token.encode()):
            self._drop(link, None)
            return None
        assert isinstance(rank, int)
        self._adopt(rank, link)
        return rank

    def _drop(self, link: Link, rank: int | None) -> None:
        self._selector.unregister(link)
        self._strangers.discard(link)
        link.close()
        if rank is None:
            return
        del self._links[rank]
        self._heard(rank)
        if rank not in self._left:
            text = (
                "its connection ended without a goodbye: it was killed, crashed, or lost its host"
            )
            self._break("died", rank, text)

    def _handle(self, rank: int, message: Message) -> None:
        match message.get("type"):
            case "goodbye":
                self._left.add(rank)
                self._tell({"type": "left", "rank": rank, "streams": message["streams"]})
                self._answer(rank, None)
                self._release()
            case "fail":
                self._break(message["kind"], message["rank"], message["text"])
            case "overdue" if not self._broken and self._overdue is None:
                self._overdue = message["stream"], read_entry(message["entry"])
                self._answers = {r: None for r in self._left}
                self._deadline = monotonic() + ANSWER_WITHIN
                self._tell({"type": "inquire"})
            case "state":
                self._answer(rank, State(read_streams(message["streams"]), message["line"]))
            case "runs":
                posts = {name: read_post(post) for name, post in message["sets"].items()}
                if self._audit.hear(rank, posts, monotonic()) and not self._broken:
                    self._contradiction = True
                    self._ask()
            case "accounts" if self._accounts is not None:
                sets = {name: read_account(plain) for name, plain in message["sets"].items()}
                self._accounts[rank] = sets
                if self._accounts.keys() >= self._links.keys():
                    self._compare()
            case "told":
                self._heard(rank)
            case "ending" if self._code is None:
                self._ending[rank] = message["code"]
                own = rank == self._culprit
                within = ENDING_WITH_CULPRIT_WITHIN if own else ENDING_WITHIN
                self._end_at = min(self._end_at, monotonic() + min(within, self._grace / 2))

    def _look(self, now: float) -> None:
        """Ask for accounts where a rank has waited too long for others, or go on without some of them."""
        if self._accounts is None:
            if self._audit.look(now):
                self._ask()
        elif now >= self._accounts_deadline:
            self._compare()

    def _ask(self) -> None:
        if self._accounts is None:
            self._accounts = {}
            self._accounts_deadline = monotonic() + ANSWER_WITHIN
            self._tell({"type": "account"})

    def _compare(self) -> None:
        """The accounts are here: report the contradiction between them, or none."""
        text = audit.explain(self._accounts or {})
        self._accounts = None
        if text is None and self._contradiction:
            text = (
                "the ranks run different programs, or in different orders; the first that differs is "
                "too long ago to be named"
            )
        if text is not None:
            self._break("mismatch", -1, text)
        self._release()

    def _release(self) -> None:
        """Let the ranks go once all have left, unless their last runs may contradict each other."""
        if len(self._left) == len(self._peers) and self._accounts is None and not self._broken:
            self._tell({"type": "all left"})

    def _answer(self, rank: int, state: State | None) -> None:
        if self._overdue:
            self._answers[rank] = state
            if len(self._answers) == len(self._peers):
                self._conclude()

    def _conclude(self) -> None:
        """The inquiry is over: say what it found."""
        if self._overdue is None:
            return
        stream, entry = self._overdue
        self._overdue = None
        text = watchdog.report(stream, entry, self._answers, self._peers, self._timeout)
        self._break("timeout", -1, text)

    def _break(self, kind: str, rank: int, text: str) -> None:
        if self._broken:
            return
        self._broken = True
        self._culprit = rank
        self._died = kind == "died"
        self._untold = set(self._links)
        self._tell({"type": "broken", "kind": kind, "rank": rank, "text": text})

    def _heard(self, rank: int) -> None:
        """A rank has heard of the failure, or is gone. When all have, nobody need wait any longer."""
        self._untold.discard(rank)
        if self._broken and not self._untold:
            self._tell({"type": "all told"})

    def _end(self, now: float) -> None:
        """End the ranks of a failed job once all have come to their ends, or one has waited long enough.

        The one here is the last. It does not take the launcher's leave, which then kills what is left, where
        a rank has not ended, or has died, and maybe not all that the launcher started in its place.
        """
        all_end = bool(self._ending) and self._ending.keys() >= self._links.keys()
        if self._code is None and (all_end or now >= self._end_at):
            first = next(iter(self._ending.values()))
            self._code = self._ending.get(self._culprit, first)
            self._end_at = now + ENDED_WITHIN
            for rank in self._links.keys() - {0}:
                self._links[rank].send({"type": "end", "code": self._code, "in_peace": True})
        alone = self._links.keys() == {0}
        if self._code is not None and (alone or now >= self._end_at):
            in_peace = alone and not self._died
            self._links[0].send({"type": "end", "code": self._code, "in_peace": in_peace})
            self._end_at = math.inf

    def _tell(self, message: Message) -> None:
        # This process last: once it knows that all have left it ends MPI, which keeps the GIL until
        # the others have done so too, and this thread would never come to tell them.
        for rank in sorted(self._links, reverse=True):
            self._links[rank].send(message)


def read_entry(plain: Sequence) -> Entry:
    """An `Entry` from its JSON form."""
    name, source, sequence, ranks, age, program = plain
    return Entry(name, source, sequence, tuple(ranks), age, program)


def read_streams(plain: Sequence[Sequence]) -> tuple[Snapshot, ...]:
    """Snapshots from their JSON form."""
    return tuple(
        Snapshot(stream, current and read_entry(current), last and read_entry(last))
        for stream, current, last in plain
    )
