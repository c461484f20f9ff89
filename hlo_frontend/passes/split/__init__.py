"""Splits collectives and the products around them: one part travels while another is computed.

An all-gather before a product holds all of it up, and a reduce-scatter behind a product waits for all of it:
no order of the two hides one behind the other. Here both are cut along a dimension that nothing couples.

- `rules`: which nodes compute part after part, by the table of `passes.bytes.batches`.
- `apart`: combined collectives become one for each array.
- `shares`: which all-reduces can become reduce-scatters and all-gathers, and what between these each device
  computes of its own rows alone, by what is the same on all of them (`passes.bytes.copies`) and a least cut
  (`least_cut`); `own`: makes it.
- `regions`: what lies around collectives and can be split.
- `emit`, `instructions`: makes the parts.
- `choose`: decides by the planner and the table of costs; `alone`: a region by itself;
  `overhead`: what parts take beyond the table.
- `apply`: splits what was decided.

Invariants. Decisions follow from the program's text and the table of costs alone, so they are the same on all
ranks. Parts of collectives have the names of the collectives that they come from, with the part's number
behind. No sum over a contracted dimension is split. If the programs of ranks differ in their splits, all run
them as they are written (`runtime.execution.negotiation`).
"""

from .apply import Decision, Shared, apply, digest
from .choose import Choice, Chosen, choose

__all__ = ["Choice", "Chosen", "Decision", "Shared", "apply", "choose", "digest"]
