"""Rewrites collectives so that they send fewer bytes for the same results.

- `ends`: a loop that devices leave together though they need not is compute.
- `alone`: collectives over groups of one are copies.
- `merge`: collectives that do the same to the same operands are one.
- `contributed`: an all-reduce to which every device gives only its own part is an all-gather.
- `gathers`: an all-gather of which every device reads only its own part is left out.
- `fourier`: an all-gather for a Fourier transform of the dimension that is cut is two all-to-alls.
- `mapped`: an all-gather for a loop over rows of which every device keeps its own is left out.
- `regions`: all-gathers for ops that work batch by batch are left out, or become all-to-alls.
- `scatter`: an all-reduce of which every device reads only its own part is a reduce-scatter.
- `narrow`: converted data are sent in the narrower type, if that is exact.

Invariants. A rewritten collective keeps its instruction, and so its name and source line, and its place in
every order (of tokens, control dependencies and barriers). The rewrites follow from the program's text alone.
Results are the same bit for bit, except for the order of additions that `scatter` describes and for what
`fourier` says of transforms and `regions` of libraries. If the programs of the ranks differ in their
rewrites, all ranks run them as they are written (`runtime.execution.negotiation`).
"""

from .apply import Rewrite, RewriteReport, rewrite

__all__ = ["Rewrite", "RewriteReport", "rewrite"]
