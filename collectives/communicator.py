"""The communicator protocol: who takes part, and how data moves between them.

A communicator joins all devices of the world. One process speaks for its local devices: it calls `run`
once for a collective with the operands of all of its devices that take part, which the hierarchy needs
(reduce in memory first, then one message between processes). Arrays are numpy arrays (C-contiguous; for
a GPU communicator, CuPy arrays): operands are only read, results are new arrays that nobody writes to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from .native import Peers
from .ops import Collective

Array = Any
# Combines the operands of two members (each a list of n arrays) into a list of n arrays.
Reducer = Callable[[list[Array], list[Array]], list[Array]]


class Request(Protocol):
    """A point-to-point transfer in flight."""

    def test(self) -> bool:
        """Whether `wait` would return at once."""
        ...

    def wait(self) -> dict[int, list[Array]]:
        """Wait; a receive gives the arrays of every logical id it was started for (zeros where
        nothing is sent to one), a send nothing.
        """
        ...


class Pending(Protocol):
    """A collective under way. To be used by one thread at a time."""

    def test(self) -> bool:
        """Whether it is done: then `results` are there, and no method may be called again."""
        ...

    def wait(self, meanwhile: Callable[[], None] | None = None) -> None:
        """Wait until it is done. ``meanwhile`` is called now and then, if the wait is not short."""
        ...

    @property
    def results(self) -> dict[int, list[Array]]:
        """As `BoundCollective.run` gives them. To be read once it is done."""
        ...


class BoundCollective(Protocol):
    """A collective bound to the world: communicators made, groups mapped to devices, buffers planned."""

    collective: Collective
    # What the devices of this process send to other devices when all of them take part.
    messages: int
    bytes: int

    def run(
        self, operands: Mapping[int, Sequence[Array]], skip: frozenset[int] | None = None
    ) -> dict[int, list[Array]]:
        """Run it for the local logical ids in ``operands``; blocks; gives each one's results.

        Local ids that are absent do not take part (they did not enter the branch or loop): a group none
        of whose members is present is left out, one with only some of its local members raises
        ``RuntimeError``. Devices that are in no group get zeros. Every process calls the collectives of
        a stream in the same order.

        ``skip``: positions in ``collective.pairs`` that move nothing this time, the same everywhere;
        their targets get zeros.
        """
        ...

    def start(
        self, operands: Mapping[int, Sequence[Array]], skip: frozenset[int] | None = None
    ) -> Request:
        """For send and recv only: post it, do not block. Recv takes operands that give no arrays."""
        ...


class PromptCollective(BoundCollective, Protocol):
    """What `Communicator.bind` may give: a collective that can be posted.

    ``prompt``: it is small, so that whoever posts it may wait for it for a moment; the same on all processes.
    ``ahead``: it may be posted while others of its stream, posted before, are under way. A bound collective
    that lacks both, or where both are false, can only be run.
    """

    prompt: bool
    ahead: bool

    def post(
        self, operands: Mapping[int, Sequence[Array]], skip: frozenset[int] | None = None
    ) -> Pending:
        """The beginning of a `run` with all local devices. Others may `run` it at the same time."""
        ...


class Communicator(Protocol):
    """All devices of the world, seen from one process, for the collectives of one stream."""

    process: int
    num_processes: int

    def bind(
        self,
        collective: Collective,
        owner: Mapping[int, int],
        reducer: Reducer | None = None,
    ) -> BoundCollective:
        """Prepare a collective. ``owner`` maps every logical id of the program to its process.

        Called by all processes of the program for the same collectives in the same order (it may make
        communicators). Raises ``UnsupportedError``-like ``NotImplementedError`` naming op and dtype.
        """
        ...

    def abort(self, reason: str) -> None:
        """Make pending and later calls fail with ``reason`` where the transport can."""
        ...

    def close(self) -> None:
        """Release communicators."""
        ...


class CallableCommunicator(Communicator, Protocol):
    """What a communicator has beside if compiled code may call collectives between processes."""

    def peers(self, owner: Mapping[int, int]) -> Peers:
        """How compiled code reaches the processes of ``owner``. Called by all of them, at the same point of
        what they bind."""
        ...
