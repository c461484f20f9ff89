"""stretto from nothing: an executor for partitioned JAX programs, in parts that fit on a screen.

Read this file from top to bottom. It takes a program over two devices, reads its HLO, cuts the
compute between collectives into segments, decides one order, and runs it with threads that move
the data in memory. Each part ends with the files where stretto does the same, and with what they
do in addition.

    python docs/from_nothing.py     # runs the programs of part 7 and compares each with JAX's CPU backend

From stretto it takes the tap (part 1), the schema of XLA's messages (part 2) and the engine (part 4).
The rest is in this file.
"""

from __future__ import annotations

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"

import math
import queue
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.mlir import hlo_to_stablehlo
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from stretto.collectives.types import ELEMENT_TYPES, TensorType
from stretto.hlo_frontend.schema import PRIMITIVE_TYPES, HloModuleProto
from stretto.hlo_frontend.tap import optimized_hlo
from stretto.runtime.engines import xla_cpu
from stretto.runtime.program import Segment

DEVICES = 2
TIMEOUT = 60.0  # seconds until a collective that some device has not reached is an error


# Part 1. The module
#
# XLA's partitioner turns a program over a mesh into a program for one device, with collectives in
# it. Every device runs the same one. JAX shows it as `compiled.as_text()` or `hlo_modules()`, but
# only after XLA's CPU backend has fused it, chosen layouts and assigned buffers, for kernels that
# are its own. The tap stops XLA before that: partitioned, optimized, and still any engine's to
# compile. So we take the tap.
#
# The real thing: `hlo_frontend/tap.py` lists the passes that it leaves out, each with the reason.


def module_of(lowered: Any) -> Any:
    """The HloModuleProto of a lowered JAX program, for one of `DEVICES` devices."""
    serialized = optimized_hlo(
        lowered.compiler_ir("stablehlo"), num_replicas=1, num_partitions=DEVICES
    )
    return HloModuleProto.FromString(serialized)


# Part 2. The graph
#
# A module is a list of computations, a computation is a list of instructions in topological order.
# Instructions name their operands by id. An instruction gives one array, or a tuple of arrays. We
# name each array by (id of the instruction, position): tuples then vanish, and a node is an
# instruction with the arrays it reads and the arrays it makes.

Value = tuple[int, int]
MOVES = ("all-reduce", "all-gather", "collective-permute")  # the collectives that part 5 runs
COMMUNICATES = (*MOVES, "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-broadcast")
COMMUNICATES += ("send", "recv", "async", "partition-id", "replica-id", "infeed", "outfeed")


class Unsupported(Exception):
    """The program has an instruction that this file does not handle; the message names it."""


@dataclass(eq=False)
class Node:
    """An instruction with the arrays it reads and those it makes."""

    proto: Any
    operands: list[list[Value]]  # by operand; a tuple operand is several arrays
    tuples: list[bool]  # by operand: is it a tuple?
    results: list[Value]

    @property
    def reads(self) -> list[Value]:
        return [value for operand in self.operands for value in operand]

    @property
    def moves(self) -> bool:
        return self.proto.opcode in MOVES


@dataclass
class Graph:
    module: Any
    parameters: list[Value]
    device_ids: list[Value]  # results of partition-id: each device knows its own
    nodes: list[Node]
    results: list[Value]
    shapes: dict[Value, Any]


def parse(module: Any) -> Graph:
    computations = {c.id: c for c in module.computations}
    entry = computations[module.entry_computation_id]
    arrays: dict[int, list[Value]] = {}  # instruction -> the arrays it stands for
    is_tuple = {i.id for i in entry.instructions if i.shape.element_type == 13}
    graph = Graph(module, [], [], [], [], {})
    parameters: dict[int, Value] = {}
    for proto in entry.instructions:
        shapes = list(proto.shape.tuple_shapes) or [proto.shape]
        operands = [arrays[i] for i in proto.operand_ids]
        if proto.opcode == "tuple":
            arrays[proto.id] = [value for operand in operands for value in operand]
            continue
        if proto.opcode == "get-tuple-element":
            arrays[proto.id] = [operands[0][proto.tuple_index]]
            continue
        for shape in shapes:
            if shape.element_type not in PRIMITIVE_TYPES:
                raise Unsupported(f"{proto.opcode} {proto.name}: its result is no array")
        check_supported(proto, computations)
        values = [(proto.id, i) for i in range(len(shapes))]
        arrays[proto.id] = values
        graph.shapes.update(zip(values, shapes, strict=True))
        if proto.opcode == "parameter":
            parameters[proto.parameter_number] = values[0]
        elif proto.opcode == "partition-id":
            graph.device_ids.append(values[0])
        else:
            tuples = [i in is_tuple for i in proto.operand_ids]
            graph.nodes.append(Node(proto, operands, tuples, values))
    graph.parameters = [parameters[i] for i in range(len(parameters))]
    graph.results = arrays[entry.root_id]
    return graph


def check_supported(proto: Any, computations: dict[int, Any]) -> None:
    """Raise `Unsupported` for an instruction that communicates in a way not handled here.

    A loop or a branch is compute like any other, unless it communicates inside.
    """
    base = proto.opcode.removesuffix("-start").removesuffix("-done").removesuffix("-update")
    if base in COMMUNICATES and proto.opcode not in (*MOVES, "partition-id"):
        raise Unsupported(f"{proto.opcode} {proto.name} is not handled here")
    if proto.custom_call_has_side_effect or proto.control_predecessor_ids:
        raise Unsupported(f"{proto.opcode} {proto.name} has side effects or control predecessors")
    for called in proto.called_computation_ids if not proto.opcode.startswith("all-reduce") else ():
        for inner in computations[called].instructions:
            if inner.opcode.removesuffix("-start").removesuffix("-done") in COMMUNICATES:
                raise Unsupported(
                    f"{proto.opcode} {proto.name} has {inner.opcode} {inner.name} in it"
                )
            check_supported(inner, computations)


# The real thing: `hlo_frontend/graph.py` reads modules, `values.py` has the graph, `flatten.py`
# inlines computations that communicate. Loops and branches with collectives become blocks of their
# own. Tokens and barriers become order. `graph_check.py` checks the graph between passes.


# Part 3. One order
#
# A collective ends only when every member of its replica group has reached it. If device 0 starts A
# and then B, and device 1 starts B and then A, on one stream each, both wait forever. So all
# devices must have the same order. Timing differs from device to device; the text of the module
# does not. Hence the order is a function of the text.
#
# A collective is split into a start and a wait (HLO's start and done). The plain rule, applied
# until nothing is left:
#   1. A collective whose operands are there is started. The first in the text goes first.
#   2. Else compute whose operands are there is run, first that which the next collective needs.
#   3. Else nothing can go on: the collective that was started first is awaited. Starts are early,
# since compute for them is preferred. Waits are late, since all other compute precedes them.


@dataclass(frozen=True)
class Step:
    kind: str  # "start", "wait" or "compute"
    node: Node


def order(graph: Graph) -> list[Step]:
    maker = {value: node for node in graph.nodes for value in node.results}
    place = {node: i for i, node in enumerate(graph.nodes)}
    never = len(graph.nodes)
    next_collective = {node: place[node] if node.moves else never for node in graph.nodes}
    for node in reversed(graph.nodes):
        for value in node.reads:
            if value in maker:
                before = maker[value]
                next_collective[before] = min(next_collective[before], next_collective[node])
    there = {*graph.parameters, *graph.device_ids}
    left, flying, steps = list(graph.nodes), [], []
    while left or flying:
        ready = [node for node in left if there.issuperset(node.reads)]
        # False sorts before True: collectives first.
        ready.sort(key=lambda n: (not n.moves, next_collective[n], place[n]))
        if not ready:
            node = flying.pop(0)
            steps.append(Step("wait", node))
            there.update(node.results)
            continue
        node = ready[0]
        left.remove(node)
        if node.moves:
            flying.append(node)
            steps.append(Step("start", node))
        else:
            there.update(node.results)
            steps.append(Step("compute", node))
    return steps


# The real thing: `hlo_frontend/collective_order.py` makes the order, also from tokens and control
# dependencies. `hlo_frontend/overlap/` plans with costs: what hides what, and how much memory is in
# flight. `collectives/order.py` and `runtime/execution/negotiation.py` compare the order of all ranks at the
# first run, since ranks may have been given different programs.


# Part 4. Segments
#
# Compute between two starts or waits is a segment: one program for the engine. It takes arrays made
# outside that it reads, and gives those that somebody outside reads. The engine compiles StableHLO,
# so a segment is written as an HLO module first, and jaxlib converts it. Instructions are copied as
# they are, with new ids.


@dataclass(eq=False)
class Compute:
    nodes: list[Node]
    inputs: list[Value]
    outputs: list[Value]
    executable: Any = None


def carve(graph: Graph, steps: Sequence[Step]) -> list[Step | Compute]:
    plan: list[Step | Compute] = []
    for step in steps:
        if step.kind != "compute":
            plan.append(step)
        elif plan and isinstance(plan[-1], Compute):
            plan[-1].nodes.append(step.node)
        else:
            plan.append(Compute([step.node], [], []))
    needed = set(graph.results)
    for part in reversed(plan):  # what is read later is known when we come to who makes it
        if isinstance(part, Compute):
            made = [value for node in part.nodes for value in node.results]
            read = dict.fromkeys(value for node in part.nodes for value in node.reads)
            part.outputs = [value for value in made if value in needed]
            part.inputs = [value for value in read if value not in set(made)]
            needed.update(part.inputs)
        elif part.kind == "start":
            needed.update(part.node.reads)
    return [part for part in plan if not isinstance(part, Compute) or part.outputs]


def segment(graph: Graph, part: Compute) -> Segment:
    """The segment as StableHLO, with its types."""
    module = HloModuleProto(name="segment", entry_computation_name="main")
    computations = {c.id: c for c in graph.module.computations}
    called: dict[int, None] = {}

    def call(proto: Any) -> None:
        for i in proto.called_computation_ids:
            for inner in computations[i].instructions:
                call(inner)
            called[i] = None

    for node in part.nodes:
        call(node.proto)
    for i in called:  # before those that call them
        module.computations.add().CopyFrom(computations[i])
        shapes = {inner.id: inner.shape for inner in computations[i].instructions}
        for inner in module.computations[-1].instructions:
            inner.opcode = written_opcode(inner, shapes[(*inner.operand_ids, inner.id)[0]])
            inner.ClearField("metadata")  # source lines are in tables that are not copied
    main = module.computations.add(name="main", id=max(computations) + 1)
    module.entry_computation_id = main.id
    ids: dict[Value, int] = {}

    def add(opcode: str, shape: Any = None, operands: Sequence[int] = (), copy: Any = None) -> Any:
        proto = main.instructions.add()
        if copy is not None:
            proto.CopyFrom(copy)
            for name in ("operand_ids", "control_predecessor_ids", "metadata", "sharding"):
                proto.ClearField(name)
        else:
            proto.shape.CopyFrom(shape)
        proto.id = len(main.instructions)
        proto.name, proto.opcode = f"i{proto.id}", opcode
        proto.operand_ids.extend(operands)
        row_major(proto.shape)
        return proto

    def packed(values: Sequence[Value]) -> int:
        shape = type(graph.module.computations[0].instructions[0].shape)(element_type=13)
        shape.tuple_shapes.extend(graph.shapes[value] for value in values)
        return add("tuple", shape, [ids[value] for value in values]).id

    for number, value in enumerate(part.inputs):
        proto = add("parameter", graph.shapes[value])
        proto.parameter_number, ids[value] = number, proto.id
        main.program_shape.parameters.add().CopyFrom(proto.shape)
        main.program_shape.parameter_names.append(proto.name)
    for node in part.nodes:
        operands = [
            packed(values) if is_tuple else ids[values[0]]
            for values, is_tuple in zip(node.operands, node.tuples, strict=True)
        ]
        taken = graph.shapes[node.reads[0]] if node.reads else None
        opcode = written_opcode(node.proto, taken)
        proto = add(opcode, copy=node.proto, operands=operands)
        for i, value in enumerate(node.results):
            ids[value] = proto.id
            if node.proto.shape.tuple_shapes:
                element = add("get-tuple-element", graph.shapes[value], [proto.id])
                element.tuple_index, ids[value] = i, element.id
    main.root_id = packed(part.outputs)
    main.program_shape.result.CopyFrom(main.instructions[-1].shape)
    module.host_program_shape.CopyFrom(main.program_shape)
    code = hlo_to_stablehlo(module.SerializeToString())
    inputs, outputs = (
        tuple(tensor(graph.shapes[v]) for v in vs) for vs in (part.inputs, part.outputs)
    )
    return Segment(inputs, outputs, code)


def row_major(shape: Any) -> None:
    for part in shape.tuple_shapes if shape.element_type == 13 else [shape]:
        part.layout.minor_to_major[:] = reversed(range(len(part.dimensions)))


def written_opcode(proto: Any, operand: Any) -> str:
    """A bitcast of row-major arrays is a reshape, or the same bits as another element type."""
    if proto.opcode != "bitcast":
        return proto.opcode
    orders = [list(shape.layout.minor_to_major) for shape in (proto.shape, operand)]
    if all(o == sorted(o, reverse=True) for o in orders):
        if proto.shape.element_type == operand.element_type:
            return "reshape"
        if list(proto.shape.dimensions) == list(operand.dimensions):
            return "bitcast-convert"
    raise Unsupported(f"bitcast {proto.name} is neither a reshape nor a bitcast-convert")


def tensor(shape: Any) -> TensorType:
    return TensorType(PRIMITIVE_TYPES[shape.element_type], tuple(shape.dimensions))


# The real thing: `hlo_frontend/carve.py` cuts, `segments.py` writes modules, `lower.py` makes the
# `Program` of `runtime/program.py`, which is printed, checked and stored. Equal segments are
# compiled once. Constants are copied into each segment that reads them. Inputs that nobody reads
# again are donated, so that they are updated in place.


# Part 5. Moving data
#
# Each device has a stream: a thread that runs its collectives one by one, in the order of the
# starts. Members of a replica group meet at a rendezvous, where each puts its arrays and reads
# those of all. The key is the number of the collective in the order and its group. A channel id
# will not do: JAX gives all collectives of a module the same.


class Rendezvous:
    def __init__(self, timeout: float = TIMEOUT) -> None:
        self._timeout, self._changed = timeout, threading.Condition()
        self._given: dict[Any, dict[int, list[np.ndarray]]] = {}

    def meet(
        self, number: int, name: str, group: tuple[int, ...], me: int, arrays: list[np.ndarray]
    ) -> Any:
        """The arrays of all members, by device. Raises `TimeoutError` naming the collective."""
        with self._changed:
            given = self._given.setdefault((number, group), {})
            given[me] = arrays
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: len(given) == len(group), self._timeout):
                missing = sorted(set(group) - set(given))
                raise TimeoutError(f"{name}: devices {missing} did not come in {self._timeout} s")
            return given


def groups_of(proto: Any) -> list[tuple[int, ...]]:
    """Replica groups, of which HLO has three spellings: mesh axes, iota, lists."""
    if proto.channel_id <= 0 or not proto.use_global_device_ids:
        raise Unsupported(
            f"{proto.opcode} {proto.name}: its replica groups do not hold ids of devices"
        )
    if proto.HasField("mesh_axes_replica_group_list"):
        spelled = proto.mesh_axes_replica_group_list
        sizes = [axis.size for axis in spelled.mesh.axes]
        chosen = [axis.mesh_axis_index for axis in spelled.axes]
        if spelled.mesh.device_ids or any(axis.HasField("sub_axis_info") for axis in spelled.axes):
            raise Unsupported(f"{proto.opcode} {proto.name}: a mesh with ids or parts of axes")
        others = [i for i in range(len(sizes)) if i not in chosen]
        ids = np.arange(math.prod(sizes)).reshape(sizes).transpose(others + chosen)
        rows = ids.reshape(-1, math.prod(sizes[i] for i in chosen))
    elif proto.HasField("iota_collective_device_list"):
        iota = proto.iota_collective_device_list
        ids = np.arange(math.prod(iota.iota_reshape_dims)).reshape(list(iota.iota_reshape_dims))
        ids = ids.transpose(list(iota.iota_transpose_perm) or None)
        rows = ids.reshape(iota.num_replica_groups, iota.num_devices_per_group)
    else:
        lists = proto.collective_device_list.replica_groups or proto.replica_groups
        rows = [group.replica_ids for group in lists] or [range(DEVICES)]
    return [tuple(int(i) for i in row) for row in rows]


REDUCTIONS: dict[str, Callable[..., Any]] = {
    "add": np.add, "multiply": np.multiply, "maximum": np.maximum, "minimum": np.minimum,
    "and": np.bitwise_and, "or": np.bitwise_or,
}  # fmt: skip


def mover(graph: Graph, node: Node, number: int) -> Callable[..., list[np.ndarray]]:
    """What a device's stream runs for a collective: (rendezvous, device, arrays) -> arrays."""
    proto = node.proto
    if proto.opcode == "collective-permute":
        source_of = {pair.target: pair.source for pair in proto.source_target_pairs}
        groups = [tuple(sorted({*source_of, *source_of.values()}))]
    else:
        groups = groups_of(proto)
    computations = {c.id: c for c in graph.module.computations}
    if proto.opcode == "all-reduce":
        reducer = computations[proto.called_computation_ids[0]]
        root = next(i for i in reducer.instructions if i.id == reducer.root_id)
        if root.opcode not in REDUCTIONS or len(reducer.instructions) != 3:
            raise Unsupported(f"{proto.opcode} {proto.name} reduces by {root.opcode}")

    def move(rendezvous: Rendezvous, me: int, arrays: list[np.ndarray]) -> list[np.ndarray]:
        group = next((g for g in groups if me in g), None)
        given = {} if group is None else rendezvous.meet(number, proto.name, group, me, arrays)
        if proto.opcode == "collective-permute":  # who is nobody's target gets zeros
            return given[source_of[me]] if me in source_of else [np.zeros_like(a) for a in arrays]
        members = zip(
            *(given[i] for i in group or ()), strict=True
        )  # of each operand, in the group's order
        if proto.opcode == "all-gather":
            return [np.concatenate(shards, axis=proto.dimensions[0]) for shards in members]
        return [reduce(REDUCTIONS[root.opcode], shards) for shards in members]

    return move


# The real thing: `hlo_frontend/groups.py` reads replica groups, `collectives/memory.py` moves data
# among devices of a process, `mpi.py` between processes, `hierarchy.py` joins both.
# `runtime/execution/stream.py` has the streams. There a device that fails ends the job on all ranks at once
# (`collectives/poison.py`, `runtime/job/watchdog.py`); here others wait for the timeout.


# Part 6. The executor
#
# A device has a dictionary of arrays and walks the plan. A segment goes to the engine, a start to
# the stream, a wait blocks on the future that the start left. All devices walk the same plan, each
# in a thread.


class Executor:
    def __init__(self, module: Any) -> None:
        self.graph = parse(module)
        self.plan = carve(self.graph, order(self.graph))
        self.engine = xla_cpu.create(DEVICES)
        starts = [s.node for s in self.plan if isinstance(s, Step) and s.kind == "start"]
        self.movers = {node: mover(self.graph, node, i) for i, node in enumerate(starts)}
        for part in self.plan:
            if isinstance(part, Compute):
                part.executable = self.engine.compile(segment(self.graph, part))

    def run(self, arguments: Sequence[Sequence[np.ndarray]]) -> list[list[np.ndarray]]:
        """``arguments[d]`` are the shards of device d; its results are at [d] of what comes back."""
        rendezvous = Rendezvous()
        futures = [in_thread(self._walk, rendezvous, d, arguments[d]) for d in range(DEVICES)]
        return [future.result() for future in futures]

    def _walk(
        self, rendezvous: Rendezvous, me: int, arguments: Sequence[np.ndarray]
    ) -> list[np.ndarray]:
        graph, engine = self.graph, self.engine

        def put(value: Value, host: np.ndarray) -> Any:
            type_ = tensor(graph.shapes[value])
            return engine.put(
                np.ascontiguousarray(host, ELEMENT_TYPES[type_.dtype].numpy), type_, me
            )

        arrays = {v: put(v, a) for v, a in zip(graph.parameters, arguments, strict=True)}
        arrays |= {value: put(value, np.array(me)) for value in graph.device_ids}
        jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        stream = in_thread(lambda: [job() for job in iter(jobs.get, None)])
        flying: dict[Node, Future[Any]] = {}
        try:
            for part in self.plan:
                if isinstance(part, Compute):
                    made = part.executable.run(me, [arrays[v] for v in part.inputs])
                    arrays.update(zip(part.outputs, made, strict=True))
                elif part.kind == "start":
                    taken = [arrays[v] for v in part.node.reads]
                    flying[part.node] = done = Future()
                    jobs.put(lambda n=part.node, t=taken, f=done: fulfil(
                        f, lambda: self.movers[n](rendezvous, me, [engine.host_view(a) for a in t])
                    ))  # fmt: skip
                else:
                    moved = flying.pop(part.node).result()
                    arrays |= {v: put(v, a) for v, a in zip(part.node.results, moved, strict=True)}
        finally:
            jobs.put(None)
        stream.result()
        return [engine.host_view(arrays[value]) for value in graph.results]


def fulfil(future: Future[Any], function: Callable[[], Any]) -> None:
    try:
        future.set_result(function())
    except BaseException as error:
        future.set_exception(error)


def in_thread(function: Callable[..., Any], *arguments: Any) -> Future[Any]:
    future: Future[Any] = Future()
    work = (future, lambda: function(*arguments))
    threading.Thread(target=fulfil, args=work, daemon=True).start()
    return future


# The real thing: `runtime/execution/executor.py` and `walk.py` walk a program once for all devices of a
# process. `plugin/` wraps it as a PJRT client, so that JAX calls it by itself. Arrays are freed
# after their last read.


# Part 7. Programs, and JAX's CPU backend as the judge
#
# Moving data and adding integers give equal bits. So does a sum of two floats, whose order does not
# matter. Compute in floats does not: XLA fuses across what we cut, and rounds otherwise. Hence
# integers are compared bit for bit, floats to a few units in the last place of what they are sums
# of.

MESH = Mesh(np.array(jax.devices()[:DEVICES]), ("x",), axis_types=(AxisType.Auto,))


def sharded(*specs: Any, out: Any) -> Callable[..., Any]:
    return lambda f: jax.shard_map(f, mesh=MESH, in_specs=specs, out_specs=out)


@sharded(P(None, "x"), P("x", None), P(), out=(P(), P()))
def mlp(w: Any, v: Any, x: Any) -> Any:
    """Two matmuls with a psum behind them, which the third hides."""
    return lax.psum(jnp.tanh(x @ w) @ v, "x"), jnp.sin(x @ x.T)


@sharded(P("x", None), P(), out=P("x"))
def gathered(w: Any, x: Any) -> Any:
    """Weights are gathered before use; the device's number enters the result."""
    return (lax.all_gather(w, "x", tiled=True) @ x)[None] + lax.axis_index("x")


@sharded(P("x"), out=P("x"))
def ring(x: Any) -> Any:
    """A ring of integers, unrolled; a loop without collectives is compute."""
    total = x
    for step in range(3):
        x = lax.ppermute(x, "x", [(0, 1), (1, 0)]) * (step + 2)
        total = total + x
    shifted = lax.ppermute(total, "x", [(0, 1)])
    return lax.fori_loop(0, 3, lambda i, c: c * 3 + i, shifted + total)


def mlp_gradient(w: Any, v: Any, x: Any) -> Any:
    """By jit, its arguments' shardings given: the partitioner chooses the collectives."""
    w = lax.with_sharding_constraint(w, jax.NamedSharding(MESH, P(None, "x")))
    v = lax.with_sharding_constraint(v, jax.NamedSharding(MESH, P("x", None)))
    return jax.value_and_grad(lambda p: jnp.sum((jnp.tanh(x @ p[0]) @ p[1]) ** 2))((w, v))


def floats(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape, np.float32)


PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[np.ndarray, ...]]] = {
    "mlp": (mlp, (floats(8, 16), floats(16, 8), floats(4, 8))),
    "gathered": (gathered, (floats(8, 4), floats(4, 6))),
    "ring": (ring, (np.arange(12, dtype=np.int32).reshape(4, 3),)),
    "mlp_gradient": (mlp_gradient, (floats(8, 16), floats(16, 8), floats(4, 8))),
}


def compare(function: Callable[..., Any], arguments: Sequence[np.ndarray]) -> Executor:
    """Run a program here and on JAX's CPU backend. Raises `AssertionError` where they differ."""
    lowered = jax.jit(function, keep_unused=True).lower(*arguments)
    compiled = lowered.compile()
    everywhere = jax.NamedSharding(MESH, P())
    executor = Executor(module_of(lowered))
    devices, shardings = list(MESH.devices.flat), compiled.input_shardings[0]
    shards = [
        [a[s.devices_indices_map(a.shape)[d]] for a, s in zip(arguments, shardings, strict=True)]
        for d in devices
    ]
    results = executor.run(shards)
    placed = [jax.device_put(a, s or everywhere) for a, s in zip(arguments, shardings, strict=True)]
    for i, want in enumerate(jax.tree.leaves(compiled(*placed))):
        for shard in want.addressable_shards:
            got, expected = results[devices.index(shard.device)][i], np.asarray(shard.data)
            assert got.dtype == expected.dtype
            if np.issubdtype(got.dtype, np.floating):
                np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)
            else:
                np.testing.assert_array_equal(got, expected)
    return executor


def described(executor: Executor) -> str:
    """The plan, one line a step."""
    return "\n".join(
        f"  run    {', '.join(node.proto.name for node in part.nodes)}"
        if isinstance(part, Compute)
        else f"  {part.kind:6} {part.node.proto.name}"
        for part in executor.plan
    )


if __name__ == "__main__":
    for chosen in sys.argv[1:] or PROGRAMS:
        print(f"{chosen}\n{described(compare(*PROGRAMS[chosen]))}\n  equal to JAX's CPU backend")
