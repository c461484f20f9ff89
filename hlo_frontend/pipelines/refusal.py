"""The reason why a loop is not interleaved."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..graph import Instruction


class Refusal(Exception):
    """A loop does not have the shape that can be interleaved. Caught by `interleave`, which reports it.

    ``loop`` is its name, empty as long as it is not known; ``at`` that of a collective because of which it
    is refused, for which another pass may know more.
    """

    loop = ""

    def __init__(self, why: str, at: str = "") -> None:
        super().__init__(why)
        self.at = at


class NoLoop(Refusal):
    """A stage is refused as it is written; in a loop over one layer (`outlined`) it may be accepted."""


@contextmanager
def about(loop: str) -> Iterator[None]:
    """A context in which a `Refusal` gets the name of this loop, unless it has one."""
    try:
        yield
    except Refusal as refusal:
        refusal.loop = refusal.loop or loop
        raise


def depends_on_all(instruction: Instruction) -> Refusal:
    """The reason where the backward pass begins with a value that is known after the forward pass alone."""
    return Refusal(
        f"the backward pass reads {instruction.describe()}, which depends on the forward pass of all "
        "microbatches. What a loss is divided by or scaled with may come from labels and from what is there "
        "before the loop, or from a number that the loop counts of them, and not from what stages give"
    )
