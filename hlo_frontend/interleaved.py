"""The report on the interleaving of a loop: what `explain`, warnings and dumps print of it.

The package `pipelines`, which interleaves, is optional; this record is not.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Interleaved:
    """What became of a loop that moves data in each of its iterations.

    ``chunks`` of layers a device has, and ``stages``, ``microbatches``, ``layers`` of a device. ``before``
    and ``after``: its iterations; one of the latter does 1/chunks of the work. ``moved``: bytes of weights
    that all devices together send before the loop, in every run; ``back``: bytes of their gradients that
    they send after it; ``taken``: arrays of weights that need not be moved. ``why``: why the loop is left
    as it is written, or an empty string.
    """

    name: str
    source: str
    chunks: int = 0
    stages: int = 0
    microbatches: int = 0
    layers: int = 0
    before: int = 0
    after: int = 0
    moved: int = 0
    back: int = 0
    taken: int = 0
    why: str = ""

    def describe(self) -> str:
        """A sentence for people."""
        where = f"loop %{self.name}{' at ' + self.source if self.source else ''}"
        if self.why:
            return f"{where} is not interleaved: {self.why}"
        bubble = (self.stages - 1) / self.before
        left = 1 - self.microbatches * self.chunks / self.after
        gradients = f", {self.back} bytes of their gradients after it" if self.back else ""
        return (
            f"{where} is interleaved: {self.stages} stages x {self.chunks} chunks of "
            f"{self.layers // self.chunks} layers, {self.microbatches} microbatches, {self.before} "
            f"iterations became {self.after} of 1/{self.chunks} of the work each, bubble {bubble:.0%} "
            f"became {left:.0%}; {self.moved} bytes of weights are moved before it{gradients}, in each run"
        )
