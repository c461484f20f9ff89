"""Fewer bytes for the same results: collectives rewritten before a program is ordered and carved.

- `alone`: collectives over groups of one are copies.
- `merge`: collectives that do the same to the same operands are one.
- `gathers`: what a device gathers only to cut out what it gave is not gathered.
- `scatter`: an all-reduce of which every device reads only its own part is a reduce-scatter.
- `narrow`: converted data travel in the narrower type, where that is exact.

Invariants. A rewritten collective keeps its instruction, and so its name and source line, and its place in
every order: tokens, control and barriers. What is rewritten follows from the program's text alone, for all
devices, whatever they are given. Results are the same bit for bit, but for the order of additions that
`scatter` names. Ranks whose programs differ in what can be rewritten all run them as they are written
(`runtime.execution.negotiation`).
"""

from .apply import Rewrite, RewriteReport, rewrite

__all__ = ["Rewrite", "RewriteReport", "rewrite"]
