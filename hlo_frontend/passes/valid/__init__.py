"""Valid iterations: which transfers of a loop are made, and the proof that the others may be left out.

A pipeline's loop runs the same transfers in every iteration, though at its beginning and its end some move
what nobody will read. `_xla_send_recv_validation` names the iterations in which a pair of a permute, send
or receive is valid; `apply` proves that what the attribute leaves out is never read, or refuses it, and finds
the valid iterations of loops that have no such attribute.

How: `trace` follows integers, predicates and zeros through the program for every device and iteration,
exactly; `liveness` goes from the program's results backwards, element by element where indices are known.
What is neither live nor anything but zeros is not sent. Everything that is not understood is live.
"""

from .decide import LoopReport, ValidPolicy, ValidReport, apply

__all__ = ["LoopReport", "ValidPolicy", "ValidReport", "apply"]
