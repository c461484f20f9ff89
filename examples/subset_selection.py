"""Choose k of many points: useful ones, that are not like each other. No process ever has all of them.

What is maximized over sets S of k points is a pairwise submodular objective over a nearest-neighbour graph,

    f(S) = (sum over v in S of a * utility(v)) - (sum over edges v, w inside S of b * similarity(v, w)),

as in "On Distributed Larger-Than-Memory Subset Selection With Pairwise Submodular Functions" (arXiv
2402.16442). Each device owns a part of the points, with their edges, read from memory-mapped files
(`nearest_neighbours`). How others of them fare comes by in a ring of blocks.

**Bounds** decide most points for certain, in a loop on the devices that ends when nothing changes. Let T be
the points that are taken, V the undecided ones, r = k - |T| the number still to take, and for v in V

    upper(v) = a * utility(v) - sum of b * similarity(v, w) over neighbours w in T
    lower(v) = upper(v)       - sum of b * similarity(v, w) over neighbours w in V

What v adds to a set R that has all of T and otherwise only points of V, but not v, is between both: v loses
b * similarity for its neighbours in R, which are all those in T, and at most those in V besides. Let S be a
best set, which has all of T and otherwise only points of V.

- *Discard* v if upper(v) < the r-th largest lower. r points t have lower(t) > upper(v) >= lower(v); v is none
  of them. If v were in S, S would have at most r - 1 of them, so lack one, t. Exchange them: then
  f(S - v) >= f(S) - upper(v), and f(S - v + t) >= f(S - v) + lower(t) > f(S): S would not be a best set.
- *Take* v if lower(v) > the (r + 1)-th largest upper (minus infinity if V has no more than r points). At most
  r points have an upper above that, v being one of them. If v were not in S, of the r points of S in V at
  most r - 1 would be among these, so there would be a t with upper(t) < lower(v), and f(S - t + v) > f(S).

So every best set has what is taken and lacks what is discarded. (The paper compares with the r-th largest
upper; the (r + 1)-th takes more, and the proof is the same.) `stretto.kth_largest` gives both thresholds.

**Greedy rounds** choose among what stays undecided. In each round points are dealt to partitions at random,
as many as it takes for a partition to have ``--capacity`` points or so. Those of a partition and the edges
among them are sent to one device, which repeatedly picks the point that adds most. What all partitions
picked goes into the next round; in the last one that is r points.

All weights are rounded to multiples of 2**-16, so that sums of f32 are exact and no order of summing matters:
any number of processes and devices chooses the same set, bit for bit. Ties go to the lower number.

    python examples/subset_selection.py --make 100000 GRAPH
    JAX_PLATFORMS=stretto mpiexec -n 4 python examples/subset_selection.py GRAPH
    JAX_PLATFORMS=stretto STRETTO_LOCAL_DEVICES=4 python examples/subset_selection.py GRAPH
    JAX_PLATFORMS=cpu python examples/subset_selection.py GRAPH

``GRAPH/taken`` has a byte for each point, written by whoever owns it. Printed: what the bounds decided, the
value of f, seconds, and memory. The last line is a JSON object with all of it.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from nearest_neighbours import Graph, make

import stretto

UNDECIDED, TAKEN, DISCARDED = range(3)
AXIS = "points"
CHUNK = 1 << 14  # edges that are looked at together
UNIT = 2.0**-16
ROW = 256  # points of a partition whose largest gain is kept


class Part(NamedTuple):
    """What a device owns: points, and their edges, sorted by who owns the other end."""

    gain: jax.Array  # f32[points]: a * utility
    row: jax.Array  # s32[edges]: own point, from 0
    other: jax.Array  # s32[edges]: the other end, as its owner counts
    loss: jax.Array  # f32[edges]: b * similarity
    begins: jax.Array  # s32[devices + 1]: where the edges to each owner begin


def rounded(values: np.ndarray, factor: float) -> np.ndarray:
    return (np.rint(values.astype(np.float64) * factor / UNIT) * UNIT).astype(np.float32)


def read(graph: Graph, owner: int, own: int, devices: int, edges: int, alpha: float) -> Part:
    """The part of a device, which owns the points from ``own * owner`` on; ``own`` and ``edges`` in all."""
    first, last = min(owner * own, graph.points), min((owner + 1) * own, graph.points)
    gain = np.zeros(own, np.float32)
    gain[: last - first] = rounded(graph.part("utilities", first, last), alpha)
    row, other = np.zeros(edges, np.int32), np.zeros(edges, np.int32)
    loss = np.zeros(edges, np.float32)
    counts = np.zeros(devices, np.int64)
    for _, near, _ in graph.windows(first, last):
        counts += np.bincount(near // own, minlength=devices)
    begins = np.concatenate([[0], np.cumsum(counts)])
    at = begins[:-1].copy()
    heaviest = 0.0
    for rows, near, similarity in graph.windows(first, last):
        lost = rounded(similarity, 1 - alpha)
        heaviest = max(heaviest, np.bincount(rows - rows[0], lost).max(initial=0))
        for to in np.unique(near // own):
            chosen = near // own == to
            span = slice(at[to], at[to] + np.count_nonzero(chosen))
            row[span], other[span] = rows[chosen] - first, near[chosen] - to * own
            loss[span] = lost[chosen]
            at[to] = span.stop
    if heaviest + gain.max(initial=0) > UNIT * 2**24:
        raise SystemExit("sums of a point's similarities are too large to be exact in f32")
    return Part(gain, row, other, loss, begins.astype(np.int32))


def placed(graph: Graph, mesh: Mesh, alpha: float) -> Part:
    """All parts, each on its device. A process reads those of its own devices."""
    devices = list(mesh.devices.flat)
    own = -(-graph.points // len(devices))
    edges = CHUNK + max(
        graph.edges_between(min(d * own, graph.points), min((d + 1) * own, graph.points))
        for d in range(len(devices))
    )
    sharding = NamedSharding(mesh, P(AXIS))
    pieces: list[list[jax.Array]] = []
    for owner, device in enumerate(devices):
        if device.process_index == jax.process_index():
            part = read(graph, owner, own, len(devices), edges, alpha)
            pieces.append([jax.device_put(a, device) for a in part])
    return Part(
        *(
            jax.make_array_from_single_device_arrays(
                (len(devices) * column[0].shape[0],), sharding, list(column)
            )
            for column in zip(*pieces, strict=True)
        )
    )


def each_edge(part: Part, block: jax.Array, visit: Callable[..., Any], carry: Any) -> Any:
    """``visit(carry, there, row, other, loss, valid, what)`` for all edges, a chunk at a time.

    ``block`` has an entry for each own point; ``what`` are the entries of the other ends, ``there`` who owns
    them. The blocks of all devices come by in a ring, one after the other.
    """
    devices, me = lax.axis_size(AXIS), lax.axis_index(AXIS)
    ring = [(d, (d + 1) % devices) for d in range(devices)]

    def step(turn: jax.Array, state: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
        block, carry = state
        there = (me - turn) % devices
        begin, end = part.begins[there], part.begins[there + 1]

        def chunk(i: jax.Array, carry: Any) -> Any:
            at = begin + i * CHUNK
            row, other, loss = (lax.dynamic_slice_in_dim(a, at, CHUNK) for a in part[1:4])
            valid = at + jnp.arange(CHUNK) < end
            return visit(carry, there, row, other, loss, valid, block[other])

        carry = lax.fori_loop(0, -((begin - end) // CHUNK), chunk, carry)
        return lax.ppermute(block, AXIS, ring), carry

    return lax.fori_loop(0, devices, step, (block, carry))[1]


def lost(part: Part, status: jax.Array) -> tuple[jax.Array, jax.Array]:
    """For each own point what it loses for its neighbours that are taken, and that are undecided."""

    def visit(carry, there, row, other, loss, valid, status):
        taken, undecided = carry
        taken = taken.at[row].add(jnp.where(valid & (status == TAKEN), loss, 0))
        undecided = undecided.at[row].add(jnp.where(valid & (status == UNDECIDED), loss, 0))
        return taken, undecided

    nothing = jnp.zeros_like(part.gain)
    return each_edge(part, status, visit, (nothing, nothing))


def bounded(points: int, k: int) -> Callable[[Part], tuple[jax.Array, ...]]:
    """``f(part)``: the status of each point, how many are still to be taken, are undecided; and passes."""

    def bound(part: Part) -> tuple[jax.Array, ...]:
        number = lax.axis_index(AXIS) * part.gain.shape[0] + jnp.arange(part.gain.shape[0])
        status = jnp.where(number < points, UNDECIDED, DISCARDED).astype(jnp.uint8)

        def one_pass(carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            status, left, _, passes = carry
            taken, near = lost(part, status)
            upper = part.gain - taken
            lower = upper - near
            undecided = status == UNDECIDED
            least = stretto.kth_largest(lower, left, AXIS, where=undecided)
            discard = undecided & (upper < least)
            undecided &= ~discard
            most = stretto.kth_largest(upper, left + 1, AXIS, where=undecided)
            take = undecided & (lower > most)
            status = jnp.where(take, TAKEN, jnp.where(discard, DISCARDED, status))
            took, threw = lax.psum((jnp.sum(take), jnp.sum(discard)), AXIS)
            return status.astype(jnp.uint8), left - took, took + threw > 0, passes + 1

        start = status, jnp.int32(k), jnp.array(True), jnp.int32(0)
        status, left, _, passes = lax.while_loop(lambda c: c[2] & (c[1] > 0), one_pass, start)
        status = jnp.where((left == 0) & (status == UNDECIDED), DISCARDED, status).astype(jnp.uint8)
        return status, left, lax.psum(jnp.sum(status == UNDECIDED), AXIS), passes

    return bound


class Round(NamedTuple):
    """Its number, and to how many partitions points are dealt in it."""

    number: jax.Array
    dealt: jax.Array


def partition_of(number: jax.Array, turn: Round) -> jax.Array:
    """Where a point is dealt to in a round: a hash of both (the finalizer of MurmurHash3)."""
    h = number.astype(jnp.uint32) ^ (turn.number.astype(jnp.uint32) * jnp.uint32(0x9E3779B9))
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        h = (h ^ (h >> shift)) * jnp.uint32(factor)
    return ((h ^ (h >> 16)) % turn.dealt.astype(jnp.uint32)).astype(jnp.int32)


def counted(partitions: int) -> Callable[..., tuple[jax.Array, ...]]:
    """``f(part, status, turn)``: points of each partition; the most points and edges from a device to one."""

    def count(part: Part, status: jax.Array, turn: Round) -> tuple[jax.Array, ...]:
        own = part.gain.shape[0]
        first = lax.axis_index(AXIS) * own
        to = partition_of(first + jnp.arange(own), turn)
        nothing = jnp.zeros(partitions, jnp.int32)
        points = nothing.at[to].add((status == UNDECIDED).astype(jnp.int32))

        def visit(edges, there, row, other, loss, valid, what):
            inside = valid & (status[row] == UNDECIDED) & (what == UNDECIDED)
            inside &= to[row] == partition_of(there * own + other, turn)
            return edges.at[to[row]].add(inside.astype(jnp.int32))

        edges = each_edge(part, status, visit, nothing)
        most = lax.pmax((jnp.max(points), jnp.max(edges)), AXIS)
        return lax.psum(points, AXIS), *most

    return count


def to_partitions(values: jax.Array) -> jax.Array:
    """[partitions, room] of what is sent to each -> [own partitions, devices * room] of what came.

    A device has as many partitions as another: the last ones may be empty.
    """
    devices, room = lax.axis_size(AXIS), values.shape[1]
    values = jnp.pad(values, ((0, -values.shape[0] % devices), (0, 0)))
    sent = lax.all_to_all(values.reshape(devices, -1, room), AXIS, 0, 0)
    return sent.transpose(1, 0, 2).reshape(-1, devices * room)


def to_devices(shares: jax.Array) -> jax.Array:
    """[partitions] -> [devices, partitions of a device]."""
    devices = lax.axis_size(AXIS)
    return jnp.pad(shares, (0, -shares.shape[0] % devices)).reshape(devices, -1)


def to_owners(values: jax.Array) -> jax.Array:
    """The way back of `to_partitions`."""
    devices = lax.axis_size(AXIS)
    own, room = values.shape[0], values.shape[1] // devices
    return lax.all_to_all(
        values.reshape(own, devices, room).transpose(1, 0, 2), AXIS, 0, 0
    ).reshape(-1, room)


def picked(gain: jax.Array, src: jax.Array, dst: jax.Array, loss: jax.Array, share: jax.Array,
           degree: int) -> jax.Array:  # fmt: skip
    """The points that a partition picks, ``share`` of them, one after the other: bool[points].

    ``gain`` is what each adds by itself, -inf where there is none; ``src``, ``dst`` and ``loss`` are its
    edges, sorted by ``src``, at most ``degree`` of a point. A row of points has its largest gain beside it,
    so that a pick looks at few of them.
    """
    count = gain.shape[0]
    begins = jnp.searchsorted(src, jnp.arange(count + 1), method="sort")
    rows = -(-count // ROW)
    gains = jnp.full(rows * ROW, -jnp.inf).at[:count].set(gain).reshape(rows, ROW)
    dst, loss = (jnp.concatenate([a, jnp.zeros(degree, a.dtype)]) for a in (dst, loss))

    def pick(i: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        gains, largest, chosen = state
        row = jnp.argmax(largest)
        at = row * ROW + jnp.argmax(gains[row])
        gains = gains.at[row, at % ROW].set(-jnp.inf)
        chosen = chosen.at[at].set(True)
        near, less = (lax.dynamic_slice_in_dim(a, begins[at], degree) for a in (dst, loss))
        less = jnp.where(begins[at] + jnp.arange(degree) < begins[at + 1], less, 0)
        gains = gains.at[near // ROW, near % ROW].add(-less)
        changed = jnp.append(near // ROW, row)
        return gains, largest.at[changed].set(jnp.max(gains[changed], axis=1)), chosen

    start = gains, jnp.max(gains, axis=1), jnp.zeros(count, bool)
    return lax.fori_loop(0, share, pick, start)[2]


def one_round(partitions: int, room: int, edge_room: int, degree: int) -> Callable[..., jax.Array]:
    """``f(part, status, turn, shares)``: the status after a round; ``shares`` s32[partitions] are picked.

    What is not picked is discarded; what is stays undecided.
    """

    def play(part: Part, status: jax.Array, turn: Round, shares: jax.Array) -> jax.Array:
        own, me = part.gain.shape[0], lax.axis_index(AXIS)
        taken, _ = lost(part, status)
        mine = status == UNDECIDED
        to = partition_of(me * own + jnp.arange(own), turn)
        to = jnp.where(mine, to, partitions)
        order = jnp.argsort(to, stable=True)
        begins = jnp.searchsorted(to[order], jnp.arange(partitions + 1))
        place = jnp.zeros(own, jnp.int32).at[order].set(jnp.arange(own) - begins[to[order]])
        position = jnp.where(mine, me * room + place, -1)  # in its partition
        gain = jnp.full(partitions * room, -jnp.inf)
        gain = gain.at[to * room + place].set(part.gain - taken, mode="drop")

        def visit(carry, there, row, other, loss, valid, position_there):
            filled, src, dst, less = carry
            inside = valid & mine[row] & (position_there >= 0)
            inside &= to[row] == partition_of(there * own + other, turn)
            one = (to[row][:, None] == jnp.arange(partitions)) & inside[:, None]
            before = jnp.cumsum(one, axis=0) - one
            slot = jnp.sum(jnp.where(one, before + filled, 0), axis=1)
            at = jnp.where(inside, to[row] * edge_room + slot, partitions * edge_room)
            src = src.at[at].set(position[row], mode="drop")
            dst = dst.at[at].set(position_there, mode="drop")
            less = less.at[at].set(loss, mode="drop")
            return filled + jnp.sum(one, axis=0), src, dst, less

        size = partitions * edge_room
        nowhere = jnp.full(size, lax.axis_size(AXIS) * room, jnp.int32)
        start = (jnp.zeros(partitions, jnp.int32), nowhere, jnp.zeros(size, jnp.int32))
        _, *edges = each_edge(part, position, visit, (*start, jnp.zeros(size)))
        src, dst, less = (to_partitions(a.reshape(partitions, edge_room)) for a in edges)
        src, dst, less = lax.sort((src, dst, less), dimension=1, num_keys=1)
        gains = to_partitions(gain.reshape(partitions, room))
        own_shares = lax.dynamic_index_in_dim(to_devices(shares), me, keepdims=False)
        chosen = lax.map(lambda a: picked(*a, degree), (gains, src, dst, less, own_shares))
        back = to_owners(chosen).reshape(-1)
        stays = back[jnp.where(mine, to * room + place, 0)] & mine
        return jnp.where(mine & ~stays, DISCARDED, status).astype(jnp.uint8)

    return play


def shares_of(counts: np.ndarray, total: int) -> np.ndarray:
    """``total`` divided over partitions in proportion to their points, none gets more than it has."""
    ends = [0, *(int(c) for c in np.cumsum(counts))]
    rounded_down = [total * end // ends[-1] for end in ends]
    return np.diff(rounded_down).astype(np.int32)


def value_of(part: Part, status: jax.Array) -> jax.Array:
    """What each own point adds to f: edges count half at both ends."""
    taken, _ = lost(part, status)
    return jnp.where(status == TAKEN, part.gain - taken / 2, 0)


def over(
    mesh: Mesh, function: Callable[..., Any], inputs: int, out_specs: Any
) -> Callable[..., Any]:
    """Jitted over the mesh: a part, ``inputs`` arrays that are divided like it, and others that all have."""

    def call(part: Part, *rest: jax.Array) -> Any:
        specs = (P(AXIS),) * (1 + inputs) + (P(),) * (len(rest) - inputs)
        mapped = jax.shard_map(
            function, mesh=mesh, in_specs=specs, out_specs=out_specs, check_vma=False
        )
        return mapped(part, *rest)

    return jax.jit(call)


def played(
    graph: Graph,
    mesh: Mesh,
    part: Part,
    status: jax.Array,
    left: int,
    undecided: int,
    options: argparse.Namespace,
) -> jax.Array:
    """The status after all rounds, with the ``left`` points that are still to be taken undecided."""
    degree = most_edges(graph, mesh)
    capacity = options.capacity or -(-graph.points // 16)
    partitions = -(-undecided // capacity)  # in the first round, which has the most points
    count = over(mesh, counted(partitions), 1, (P(), P(), P()))
    rooms = (0, 0)
    total = undecided
    for number in range(options.rounds):
        turn = Round(jnp.int32(number), jnp.int32(-(-total // capacity)))
        total = left + (undecided - left) * (options.rounds - 1 - number) // options.rounds
        counts, *most = map(np.asarray, count(part, status, turn))
        if any(int(m) > room for m, room in zip(most, rooms, strict=True)):
            # With some room to spare, so that the next rounds are the same program.
            rooms = tuple(max(int(m) * 9 // 8 + 16, r) for m, r in zip(most, rooms, strict=True))
            play = over(mesh, one_round(partitions, *rooms, degree), 1, P(AXIS))
        status = play(part, status, turn, shares_of(counts, total))
    return status


def select(graph: Graph, mesh: Mesh, options: argparse.Namespace) -> dict[str, Any]:
    """Chooses, writes the points to ``taken`` in the graph's folder, and gives what is printed."""
    part = placed(graph, mesh, options.alpha)
    k = options.k or graph.points // 10
    if not 1 <= k <= graph.points:
        raise SystemExit(f"there are no {k} of {graph.points} points to take")
    since = time.perf_counter()
    bound = over(mesh, bounded(graph.points, k), 0, (P(AXIS), P(), P(), P()))
    status, left, undecided, passes = bound(part)
    left, undecided = int(left), int(undecided)
    report = {"points": graph.points, "k": k, "passes": int(passes), "bounds_took": k - left,
              "bounds_discarded": graph.points - (k - left) - undecided}  # fmt: skip
    report["bounds_seconds"] = round(time.perf_counter() - since, 2)
    if left:
        status = played(graph, mesh, part, status, left, undecided, options)
    status = jax.jit(lambda s: jnp.where(s == UNDECIDED, TAKEN, s).astype(jnp.uint8))(status)
    values = over(mesh, value_of, 1, P(AXIS))(part, status)
    report["value"] = sum(everywhere(sum(own.sum(dtype=np.float64) for _, own in shards(values))))
    report["taken"] = int(sum(everywhere(sum((own == TAKEN).sum() for _, own in shards(status)))))
    report["seconds"] = round(time.perf_counter() - since, 2)
    file = os.open(graph.folder / "taken", os.O_CREAT | os.O_RDWR)
    os.ftruncate(file, graph.points)
    for first, own in shards(status):
        os.pwrite(file, (own == TAKEN)[: max(graph.points - first, 0)].tobytes(), first)
    os.close(file)
    return report


def shards(array: jax.Array) -> list[tuple[int, np.ndarray]]:
    """The parts that this process has, with where they begin."""
    return [(s.index[0].start or 0, np.asarray(s.data)) for s in array.addressable_shards]


def everywhere(number: float) -> list[float]:
    """A number of each process, on all of them, with all its bits."""
    if jax.process_count() == 1:
        return [float(number)]
    from jax.experimental import multihost_utils

    words = np.array([number], np.float64).view(np.uint32)
    return [float(w.view(np.float64)[0]) for w in multihost_utils.process_allgather(words)]


def most_edges(graph: Graph, mesh: Mesh) -> int:
    """The most edges of any point, to which each process looks at the points of its devices."""
    own = -(-graph.points // mesh.size)
    most = 1
    for owner, device in enumerate(mesh.devices.flat):
        if device.process_index == jax.process_index():
            first, last = min(owner * own, graph.points), min((owner + 1) * own, graph.points)
            most = max(most, np.diff(graph.part("offsets", first, last + 1)).max(initial=1))
    return int(max(everywhere(most)))


def memory(field: str) -> float:
    """A figure of /proc/self/status, in MiB."""
    text = Path("/proc/self/status").read_text()
    return int(text.split(f"{field}:")[1].split()[0]) / 1024


def main(arguments: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="of the graph")
    parser.add_argument("--make", type=int, metavar="POINTS", help="write a random graph, and end")
    parser.add_argument("--neighbours", type=int, default=10, help="of each point, with --make")
    parser.add_argument("--k", type=int, default=0, help="points to take; 0: a tenth")
    parser.add_argument("--alpha", type=float, default=0.9, help="a; b is 1 - a")
    parser.add_argument("--capacity", type=int, default=0, help="of a partition; 0: a sixteenth")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--limit-mib", type=int, help="memory that points may take in a process")
    options = parser.parse_args(arguments)
    if options.make:
        make(options.folder, options.make, options.neighbours)
        return {}
    mesh = Mesh(np.array(jax.devices()), (AXIS,))
    # What has nothing to do with the number of points is there before they are read.
    jax.block_until_ready(jax.jit(lambda x: x + 1)(jnp.zeros(mesh.size)))
    Path("/proc/self/clear_refs").write_text("5")
    before, had = memory("VmRSS"), memory("VmData")
    if options.limit_mib:
        limit = int((had + options.limit_mib) * 2**20)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    report = select(Graph(options.folder), mesh, options)
    report["own_mib"] = round(max(everywhere(memory("VmHWM") - before)), 1)
    report["resident_mib"] = round(max(everywhere(memory("VmHWM"))), 1)
    report["data_mib"] = round(max(everywhere(memory("VmData") - had)), 1)
    if jax.process_index() == 0:
        print(
            f"{report['taken']} of {report['points']} points taken; bounds took {report['bounds_took']}, "
            f"threw away {report['bounds_discarded']} in {report['passes']} passes; "
            f"f = {report['value']:.3f}, {report['seconds']} s, {report['own_mib']} MiB a process for them"
        )
        print(json.dumps(report), flush=True)
    return report


if __name__ == "__main__":
    main(sys.argv[1:])
