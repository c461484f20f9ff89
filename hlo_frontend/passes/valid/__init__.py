"""Valid iterations: the iterations in which a loop's transfers are made, and the proof that others can be
skipped.

The loop of a pipeline makes the same transfers in every iteration, although in the first and the last ones
some transfers move data that nobody will read. The attribute `_xla_send_recv_validation` names the iterations
in which a pair of a permute, send or receive is valid. `apply` proves that nobody reads the data that the
attribute leaves out, or refuses the program. For loops without the attribute it finds the valid iterations.

How: `trace` follows the exact values of integers and predicates, and zeros, through the program, for every
device and iteration. `liveness` goes backwards from the program's results, element by element if indices are
known. A transfer is skipped if its data are not live, or are all zeros. Data of ops that the analysis does
not know are live.
"""

from .decide import LoopReport, ValidPolicy, ValidReport, apply

__all__ = ["LoopReport", "ValidPolicy", "ValidReport", "apply"]
