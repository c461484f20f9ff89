"""What compute in parts takes beyond what the table of costs has for its kernels.

The table takes a kernel for as fast as its operations or its bytes, whichever take longer, and charges a
launch for a run of kernels. Small kernels take longer than that: each has a start of its own, and a product
reads, and packs, the operand that is not cut before it multiplies. On one processor, XLA:CPU of jaxlib
0.10.2, a product of 64 of 256 rows times 256 x 512 takes 0.29 of the whole instead of 0.25, and a kernel of
64 x 512 elements 20 us where four times as many take 61 us.
"""

from __future__ import annotations

from ...overlap.costs import Compute
from ...values import Node, NodeKind
from .regions import Region
from .rules import is_heavy

# By how much faster than from memory an operand is read that was read before: 2.3 to 4 there.
_AGAIN = 3.0


def overhead(region: Region, parts: int, costs: Compute) -> float:
    """Seconds that a region takes longer for having its compute in so many parts."""
    read = sum(
        value.type.nbytes
        for node, cut in region.cuts.items()
        if is_heavy(node)
        for value, own in zip(node.operands, cut.operands, strict=True)
        if own is None and value.type is not None
    )
    each = _kernels(region) * costs.launch_s + read / (_AGAIN * costs.bytes_per_s)
    return (parts - 1) * each


def _kernels(region: Region) -> int:
    """About as many kernels as its compute has: products, sums, and what these and collectives read."""
    ends = {node for node in region.cuts if _is_kernel(node)}
    read = {
        value.root.node
        for node in (*ends, *region.sinks)
        for value in node.operands
        if value.root.node in region.cuts
    }
    made = {n for n in ends | read if n is not None and n.kind is NodeKind.COMPUTE}
    return len(made)


def _is_kernel(node: Node) -> bool:
    return is_heavy(node) or node.collective is not None or node.instruction.opcode == "reduce"
