"""What compute in parts takes beyond what the table of costs has for its kernels.

The table takes a kernel for as fast as its operations or its bytes, whichever take longer, and charges a
launch for a run of kernels and for a collective that is handed to a stream. Parts take longer than that:

- Each small kernel has a start of its own, and a product reads, and packs, the operand that is not cut before
  it multiplies. On one processor, XLA:CPU of jaxlib 0.10.2, a product of 64 of 256 rows times 256 x 512
  takes 0.29 of the whole instead of 0.25, and a kernel of 64 x 512 elements 20 us, where four times as many
  take 61 us.
- A loop's kernels start anew in each iteration: 0.1 to 7 us for an iteration on 4 rows there, a quarter of a
  launch for each product or sum. Which operand of a product in a loop is not cut is not looked at: the larger
  is charged.
- Each transfer costs the core about two more runs of segments, with their arrays, and two changes of threads:
  190 us there (4.6 ms beyond kernels for 24 further all-reduces), where the launch that is calibrated is
  6 us; 20 launches keep small programs whole. The whole collective, awaited at once, is run in place.
- Where the same cores move the data (`Link.busy`), each exchange of a further transfer, of which an
  all-reduce is two, also waits its turn beside compute a few times: in the tensor-parallel step of
  `benchmarks/two_hosts.py` in two parts, cores were idle for 9 and 18 ms more than its replay says, 0.2 and
  0.4 ms for each of 48 further exchanges.
- Of a ragged all-to-all the devices first tell each other where rows lie: one transfer more. Each is two
  exchanges, of numbers of rows and of these. Each part of one that sends parts copies what it writes its rows
  into, 4 MiB in the program ``ragged`` of `benchmarks/chunked.py`, into new memory: charged like writing it
  four times. That program took 95 and 167 ms in 4 parts on a busy machine, 80 and 165 whole.
- An array that is put together is first filled with zeros, and then written a second time: 1.0 ms for 6 MB,
  2.0 for 12, 4.1 for 23, on one core that adds arrays of 16 MiB at 13 GB/s.
"""

from __future__ import annotations

from collections.abc import Iterator

from stretto.collectives.ops import Kind

from ...edit import Editor
from ...graph import Instruction, leaf_types
from ...overlap.costs import CostTable
from ...trips import expected_trips
from ...values import BlockGraph, Node, NodeKind
from .regions import Region, is_ragged
from .rules import is_heavy, is_product

# Launches that a transfer costs.
_TRANSFER = 20.0
# Launches for which an exchange beside compute waits for the core.
_TURNS = 60.0
# Launches that a kernel of a loop costs, in each iteration.
_IN_LOOP = 0.25


def overhead(
    region: Region, block: BlockGraph, tiles: int, pieces: bool, costs: CostTable
) -> float:
    """Seconds that a region of a block takes longer for being split (see `emit.split`)."""
    rotated = bool(region.groups) and not pieces
    parts = region.size * tiles if rotated else tiles
    transfers = (region.size - 1) * tiles if rotated else tiles
    launch_s = costs.compute.launch_s
    rate = costs.compute.bytes_per_s
    read = sum(
        value.type.nbytes / rate
        for node, cut in region.cuts.items()
        if is_product(node.instruction)
        for value, own in zip(node.operands, cut.operands, strict=True)
        if own is None and value.type is not None
    )
    loops = [node.instruction for node in region.cuts if node.instruction.opcode == "while"]
    read += sum(_read_in_loop(loop) for loop in loops) / rate
    whole = region.read_whole(Editor(block))
    written = sum(2 * value.type.nbytes / rate for value in whole if value.type is not None)
    ragged = [node for node in region.collectives if is_ragged(node)]
    results = [node.results[0] for node in ragged]
    sent = sum(v.type.nbytes for v in results if v not in region.dimensions and v.type is not None)
    written += (parts - 1) * 4 * sent / rate
    started = _kernels(region) + _IN_LOOP * sum(map(_kernels_of_loop, loops))
    kernels = (parts - 1) * (started * launch_s + read)
    turns = sum(_turns(node, costs) for node in region.collectives)
    number = transfers * len(region.collectives) + len(ragged)
    moved = (number * _TRANSFER + (transfers - 1) * turns) * launch_s
    return kernels + moved + written


def overhead_of_shares(region: Region, block: BlockGraph, costs: CostTable) -> float:
    """Seconds that a region of a block takes longer for being computed by shares (see `own`): an all-reduce
    was one transfer, now each gather is another one."""
    gathers = len(region.read_whole(Editor(block)))
    return gathers * _TRANSFER * costs.compute.launch_s


def _turns(node: Node, costs: CostTable) -> float:
    """The launches for which a transfer of a collective waits for the core."""
    assert node.collective is not None
    link = costs.collective(node.collective).link
    if link is None or not link.busy:
        return 0.0
    twice = node.collective.kind in (Kind.ALL_REDUCE, Kind.RAGGED_ALL_TO_ALL)
    return _TURNS * (2 if twice else 1)


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


def _kernels_of_loop(loop: Instruction) -> int:
    """The same of a loop without collectives, in all iterations: at least one in each."""
    kernels = (n for n, i in _inside(loop) if is_product(i) or i.opcode == "reduce")
    return max(expected_trips(loop), sum(kernels))


def _read_in_loop(loop: Instruction) -> int:
    """The bytes of the larger operand of each product of a loop, in all iterations."""
    products = ((n, i) for n, i in _inside(loop) if is_product(i))
    return sum(
        n * max(t.nbytes for o in i.operands for t in leaf_types(o.shape, o) if t is not None)
        for n, i in products
    )


def _inside(call: Instruction, times: int = 1) -> Iterator[tuple[int, Instruction]]:
    """What an instruction calls, with how often each runs."""
    times *= expected_trips(call)
    for instruction in (i for called in call.called for i in called.instructions):
        yield times, instruction
        yield from _inside(instruction, times)
