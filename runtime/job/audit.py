"""Compares the ranks' accounts of their runs: do all run the same programs in the same order?

`Audit` belongs to the hub: it hears how far each rank has come, and notices that two of them contradict each
other. `difference` and `unmet` say what the contradiction is, from the ranks' accounts. All are pure: no
messages, no clock of their own.

Two ranks contradict each other if their run of the same number, in the same set of processes, is not the same
program; or if one of them must agree on it with the other, while the other takes it as agreed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from .run_log import Account, Local, LoggedRun, Post, read

# A rank that has waited this long for others to agree on a program is asked about.
PATIENCE = 0.3
_KEPT = 8192
_LISTED = 16


@dataclass
class _Set:
    """The known runs of one set of processes, each from the rank that reported it first."""

    history: dict[int, int] = field(default_factory=dict)
    first: dict[int, bool] = field(default_factory=dict)
    # Ranks that wait for the others to agree: number of the run, since when, whether asked about.
    waiting: dict[int, tuple[int, float, bool]] = field(default_factory=dict)

    def contradicts(self, post: Post) -> bool:
        for number, history in post.hashes:
            if self._note(self.history, number, history):
                return True
        if post.history is not None and self._note(self.history, post.number, post.history):
            return True
        return self._note(self.first, post.number, post.first)

    @staticmethod
    def _note(known: dict, number: int, value: int) -> bool:
        if known.setdefault(number, value) != value:
            return True
        if len(known) > _KEPT:
            for old in sorted(known)[: _KEPT // 2]:
                del known[old]
        return False


class Audit:
    """Takes in posts and says when the ranks should be asked for their accounts."""

    def __init__(self) -> None:
        self._sets: dict[str, _Set] = {}

    def hear(self, rank: int, posts: Mapping[str, Post], now: float) -> bool:
        """Take in what a rank says at time ``now`` (seconds); whether that contradicts another rank."""
        found = False
        for name, post in posts.items():
            known = self._sets.setdefault(name, _Set())
            known.waiting.pop(rank, None)
            if post.history is None:
                known.waiting[rank] = post.number, now, False
            found |= known.contradicts(post)
        return found

    def next_look(self) -> float | None:
        """When `look` should be called next, or None."""
        times = [
            since
            for s in self._sets.values()
            for _, since, asked in s.waiting.values()
            if not asked
        ]
        return min(times) + PATIENCE if times else None

    def look(self, now: float) -> bool:
        """Whether a rank has waited so long for others that all should be asked, once for each wait."""
        found = False
        for known in self._sets.values():
            for rank, (number, since, asked) in known.waiting.items():
                if not asked and now >= since + PATIENCE:
                    known.waiting[rank] = number, since, True
                    found = True
        return found


def explain(accounts: Mapping[int, Mapping[str, Account]]) -> str | None:
    """The contradiction between the ranks' accounts, by rank and set, as text; None if there is none."""
    for name in sorted({name for sets in accounts.values() for name in sets}):
        here = {rank: sets[name] for rank, sets in accounts.items() if name in sets}
        found = unmet(here, name) or difference({rank: a.runs for rank, a in here.items()}, name)
        if found:
            return found
    return None


def difference(runs: Mapping[int, Iterable[LoggedRun]], name: str) -> str | None:
    """The first run that is not the same on all ranks. ``name`` is that of the set of processes."""
    by_number: dict[int, dict[int, LoggedRun]] = {}
    for rank, listed in runs.items():
        for ran in listed:
            by_number.setdefault(ran.number, {})[rank] = ran
    head = "the ranks run different programs, or in different orders: "
    tail = (
        "All processes of an array's devices must run the same programs on it, in the same order. Threads "
        "that call such programs must take turns, the same on all processes"
    )
    for number in sorted(by_number):
        ranks = by_number[number]
        firsts = {ran.first for ran in ranks.values()}
        identities = {ran.identity for ran in ranks.values() if ran.identity is not None}
        if len(firsts) > 1 or len(identities) > 1:
            lines = [
                f"  rank {rank}: {ranks[rank].what}{_note(ranks[rank], len(firsts) > 1)}"
                for rank in sorted(ranks)[:_LISTED]
            ]
            return "\n".join([f"{head}run {number} of processes {name} is", *lines, tail])
        histories = {ran.history for ran in ranks.values() if ran.history is not None}
        if len(histories) > 1:
            lines = [f"  rank {rank}: {ranks[rank].what}" for rank in sorted(ranks)[:_LISTED]]
            text = f"{head}they differ before run {number} of processes {name}, which is"
            return "\n".join([text, *lines, tail])
    return None


def _note(ran: LoggedRun, firsts_differ: bool) -> str:
    if not firsts_differ:
        return ""
    return ", for the first time" if ran.first else ", which has run before"


def unmet(accounts: Mapping[int, Account], name: str) -> str | None:
    """A rank that waits for others to agree on a program that does not communicate with them.

    Said of another rank only if it has loaded a program of that name without collectives that the waiting
    one has not, and has none with collectives that it has yet to run.
    """
    for rank, account in sorted(accounts.items()):
        if not account.runs or account.runs[-1].history is not None:
            continue
        waiting = account.runs[-1]
        own = _without(account, waiting.program)
        for other in read(name):
            theirs = accounts.get(other, Account())
            local = _without(theirs, waiting.program)
            same = {ran.program for ran in theirs.runs if ran.number == waiting.number}
            if len(local) > len(own) and waiting.program not in {*same, *theirs.pending}:
                return (
                    "the ranks do not communicate the same things:\n"
                    f"  rank {rank}: {waiting.what} has collectives with processes {name}\n"
                    f"  rank {other}: {local[-1].what} has none"
                )
    return None


def _without(account: Account, program: str) -> list[Local]:
    """The programs of this name without collectives."""
    return [local for local in account.local if local.program == program]
