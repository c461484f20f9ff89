"""Parts of a collective that are one exchange between processes, from operands to results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .plan import Array, Operands, Results
from .posted import Postable, Posted, PostedParts

Post = Callable[[Operands, Results], "Posted | PostedParts"]


class Direct:
    """One exchange. ``prepare`` gives what this process contributes and where the result goes, which is among
    the results already; ``exchange`` is None where nothing moves.
    """

    def __init__(
        self,
        prepare: Callable[[Operands, Results], tuple[Any, Array]],
        exchange: Callable[[Any, Array], None] | None,
    ) -> None:
        self.prepare = prepare
        self.exchange = exchange

    def __call__(self, operands: Operands, results: Results) -> None:
        given, out = self.prepare(operands, results)
        if self.exchange is not None:
            self.exchange(given, out)

    def post(self, operands: Operands, results: Results) -> Posted:
        """Begin it; the results may be read once it is done."""
        given, out = self.prepare(operands, results)
        assert isinstance(self.exchange, Postable)
        return self.exchange.post(given, out)


def posting(parts: Sequence[Direct]) -> Post | None:
    """A function that posts all parts at once; None if there is no part, or one that cannot be posted."""
    if not parts or not all(isinstance(part.exchange, Postable) for part in parts):
        return None
    if len(parts) == 1:
        return parts[0].post
    return lambda operands, results: PostedParts([part.post(operands, results) for part in parts])
