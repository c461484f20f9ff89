"""Computations to block graphs: resolves tuples, tokens, copies and calls, and makes blocks of control flow.

A computation that needs the runtime (see `Computation.needs_runtime`) becomes a block: calls to such
computations are inlined, loops and conditionals over them become loop and branch nodes with blocks of
their own. All other instructions become compute nodes. Each rule is a row of `_RULES`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from stretto.collectives.types import TensorType

from .collectives import VALIDATION_ATTRIBUTE, CollectiveReader, validation_text
from .graph import (
    ASYNC_WRAPPERS,
    COLLECTIVES,
    DONE_COLLECTIVES,
    LOGICAL_IDS,
    START_COLLECTIVES,
    Computation,
    Instruction,
    all_instructions,
    leaf_count,
    leaf_types,
)
from .schema import TUPLE
from .values import Barrier, BlockGraph, Node, NodeKind, Value

# Constants up to this many bytes are cloned into each segment that uses them.
CHEAP_CONSTANT_BYTES = 1 << 20

# The last part of the name that JAX gives to the barriers of `jax.checkpoint`: that of its primitive. One
# that a program asks for is named after `jax.lax.optimization_barrier`.
RECOMPUTATION = "remat2"

_REFUSED = {
    "infeed": "feed arrays as arguments instead",
    "outfeed": "return arrays as results, or use a callback instead",
    "domain": "run it after XLA's sharding domains are removed",
    "collective-reduce": "use all-reduce",
    "get-dimension-size": "dynamic dimensions are not supported",
    "set-dimension-size": "dynamic dimensions are not supported",
    "rng-get-and-update-state": "use rng-bit-generator with an explicit state",
}

# Ops that an engine may get inside a whole computation that is run on one device.
_LOCAL = frozenset({"get-dimension-size", "set-dimension-size", "rng-get-and-update-state"})
_REFUSED_INSIDE = {opcode: why for opcode, why in _REFUSED.items() if opcode not in _LOCAL}

# Custom calls that mark manually partitioned parts of a program which XLA has yet to partition: those of
# XLA's partitioner, and the prefix of those of Shardy.
_UNPARTITIONED = ("SPMDFullToShardShape", "SPMDShardToFullShape", "xla.sdy.")

Env = dict[Instruction, list[Value]]


def flatten(
    computation: Computation, reader: CollectiveReader, *, in_loop: bool = False
) -> BlockGraph:
    """The block graph of a whole computation. Raises `UnsupportedError` naming the instruction.

    ``in_loop``: whether the computation runs inside of a loop's condition or body.
    """
    builder = _Builder(reader, in_loop)
    arguments: list[list[Value]] = []
    parameters: list[Value] = []
    for parameter in computation.parameters:
        leaves = [Value(t) for t in leaf_types(parameter.shape, parameter)]
        arguments.append(leaves)
        parameters += [leaf for leaf in leaves if leaf.type is not None]
    results = builder.inline(computation, arguments)
    return BlockGraph(parameters, builder.nodes, [r for r in results if r.type is not None])


class _Builder:
    def __init__(self, reader: CollectiveReader, in_loop: bool) -> None:
        self.reader = reader
        self.in_loop = in_loop
        self.wrappers: list[Instruction] = []  # asynchronous ops around what is being inlined
        self.nodes: list[Node] = []
        self.ids: dict[str, Value] = {}
        self.supported: set[Computation] = set()

    def inline(self, computation: Computation, arguments: Sequence[list[Value]]) -> list[Value]:
        """Append the computation's nodes; gives the leaves of its root."""
        env: Env = {}
        for instruction in computation.instructions:
            opcode = instruction.opcode
            if opcode == "parameter":
                env[instruction] = arguments[instruction.proto.parameter_number]
                continue
            rule = _RULES.get(opcode, _compute)
            env[instruction] = rule(self, instruction, env)
        return env[computation.root]

    def check_supported(self, computation: Computation) -> None:
        """Raise `UnsupportedError` for ops that are refused in a computation or in one that it calls."""
        for instruction in all_instructions(computation, self.supported):
            _refuse(instruction, _REFUSED_INSIDE)

    def order(self, instruction: Instruction, env: Env) -> tuple[Node, ...]:
        """The nodes that control dependencies put before an instruction."""
        if not instruction.control_predecessors:
            return ()
        before = [
            node
            for predecessor in instruction.control_predecessors
            for value in env[predecessor]
            for node in value.producers
        ]
        return tuple(dict.fromkeys(before))

    def node(
        self, kind: NodeKind, instruction: Instruction, operands: list[Value], env: Env
    ) -> Node:
        order = self.order(instruction, env)
        made = Node(kind, instruction, len(self.nodes), operands, order)
        self.nodes.append(made)
        return made

    def runtime_node(
        self, kind: NodeKind, instruction: Instruction, operands: list[Value], env: Env
    ) -> Node:
        """A node whose token operands are turned into order."""
        arrays = [v for v in operands if v.type is not None]
        tokens = tuple(n for v in operands if v.type is None for n in v.producers)
        node = self.node(kind, instruction, arrays, env)
        node.order = tuple(dict.fromkeys(node.order + tokens))
        return node


def _refuse(instruction: Instruction, refused: Mapping[str, str]) -> None:
    if instruction.opcode in refused:
        raise instruction.unsupported(f"not supported; {refused[instruction.opcode]}")
    if instruction.opcode == "custom-call":
        target = instruction.proto.custom_call_target
        if target.startswith(_UNPARTITIONED):
            raise instruction.unsupported(
                f"{target} is of a module that is not partitioned yet; give it as XLA's SPMD partitioner "
                "leaves it, or run the JAX program"
            )


def _leaves(instruction: Instruction, env: Env) -> list[Value]:
    if len(instruction.operands) == 1:
        return env[instruction.operands[0]]
    return [leaf for operand in instruction.operands for leaf in env[operand]]


def _results(node: Node, types: Sequence[TensorType | None]) -> list[Value]:
    node.results = [Value(t, node, i) for i, t in enumerate(types)]
    return node.results


def _compute(builder: _Builder, instruction: Instruction, env: Env) -> list[Value]:
    _refuse(instruction, _REFUSED)
    for called in instruction.called:
        builder.check_supported(called)
    if any(called.needs_runtime for called in instruction.called):
        raise instruction.unsupported(
            "collectives and device ids are not supported in a computation called by this op"
        )
    node = builder.node(NodeKind.COMPUTE, instruction, _leaves(instruction, env), env)
    return _results(node, leaf_types(instruction.shape, instruction))


def _cheap(builder: _Builder, instruction: Instruction, env: Env) -> list[Value]:
    types = leaf_types(instruction.shape, instruction)
    if instruction.opcode == "constant" and (
        len(types) != 1 or types[0] is None or types[0].nbytes > CHEAP_CONSTANT_BYTES
    ):
        return _compute(builder, instruction, env)
    node = Node(NodeKind.CHEAP, instruction, -1, _leaves(instruction, env))
    return _results(node, types)


def _broadcast(builder: _Builder, instruction: Instruction, env: Env) -> list[Value]:
    (operand,) = env[instruction.operands[0]]
    cheap = operand.node is not None and operand.node.kind is NodeKind.CHEAP
    if cheap and operand.type is not None and operand.type.size <= 1:
        return _cheap(builder, instruction, env)
    return _compute(builder, instruction, env)


def _tuple(builder: _Builder, instruction: Instruction, env: Env) -> list[Value]:
    return list(_leaves(instruction, env))


def _get_tuple_element(builder: _Builder, instruction: Instruction, env: Env) -> list[Value]:
    (operand,) = instruction.operands
    if operand.opcode.endswith("-start") and operand.opcode != "copy-start":
        raise instruction.unsupported(f"reads {operand.name} directly; read its -done instead")
    leaves = env[operand]
    if operand.opcode in _POINT_TO_POINT_DONE:
        return leaves[:-1] if instruction.proto.tuple_index == 0 else leaves[-1:]
    index = instruction.proto.tuple_index
    parts = operand.shape.tuple_shapes
    if not 0 <= index < len(parts):
        raise instruction.invalid(f"index {index} is out of range")
    first = sum(leaf_count(part) for part in parts[:index])
    return leaves[first : first + leaf_count(parts[index])]


_POINT_TO_POINT_DONE = ("recv", "recv-done")


def _alias(builder: _Builder, instruction: Instruction, env: Env) -> list[Value]:
    leaves = env[instruction.operands[0]]
    order = builder.order(instruction, env)
    return [v.view(order) for v in leaves] if order else leaves


def _after_all(builder: _Builder, instruction: Instruction, env: Env) -> list[Value]:
    before = [n for v in _leaves(instruction, env) for n in v.producers]
    before += builder.order(instruction, env)
    return [Value(None, order=tuple(dict.fromkeys(before)))]


def _add_dependency(builder: _Builder, instruction: Instruction, env: Env) -> list[Value]:
    first, token = instruction.operands
    before = tuple(n for v in env[token] for n in v.producers)
    return [v.view(before) for v in env[first]]


def _barrier(builder: _Builder, instruction: Instruction, env: Env) -> list[Value]:
    """Views of the barrier's operands, which come after all of them. Segments contain the barrier again.

    The barrier before a recomputation is no fence: its only purpose is that XLA does not reuse the results of
    the first computation. Plans let gathers of weights pass it (`overlap.kernels`).
    """
    leaves = _leaves(instruction, env)
    order = builder.order(instruction, env)
    is_fence = instruction.proto.metadata.op_name.rsplit("/", 1)[-1] != RECOMPUTATION
    if is_fence:
        order = tuple(dict.fromkeys([*(n for v in leaves for n in v.producers), *order]))
    barrier = Barrier(tuple(leaves), is_fence)
    return [v.view(order, barrier) for v in leaves]


def _logical_id(builder: _Builder, instruction: Instruction, env: Env) -> list[Value]:
    opcode = instruction.opcode
    if opcode not in builder.ids:
        node = builder.node(NodeKind.LOGICAL_ID, instruction, [], env)
        (builder.ids[opcode],) = _results(node, [TensorType("u32", ())])
    return [builder.ids[opcode]]


def _call(builder: _Builder, instruction: Instruction, env: Env) -> list[Value]:
    """Inlines calls that communicate, and all fusions, since engines decide themselves what to fuse."""
    (called,) = instruction.called
    if not called.needs_runtime and instruction.opcode != "fusion":
        return _compute(builder, instruction, env)
    order = builder.order(instruction, env)
    arguments = [
        [v.view(order) for v in env[operand]] if order else env[operand]
        for operand in instruction.operands
    ]
    return builder.inline(called, arguments)


def _async_start(builder: _Builder, instruction: Instruction, env: Env) -> list[Value]:
    """The results of the wrapped computation."""
    (called,) = instruction.called
    builder.wrappers.append(instruction)
    results = builder.inline(called, [env[operand] for operand in instruction.operands])
    builder.wrappers.pop()
    return results


def _while(builder: _Builder, instruction: Instruction, env: Env) -> list[Value]:
    if not any(called.needs_runtime for called in instruction.called):
        return _compute(builder, instruction, env)
    body, condition = instruction.called
    leaves = _leaves(instruction, env)
    node = builder.runtime_node(NodeKind.LOOP, instruction, leaves, env)
    node.blocks = (
        flatten(condition, builder.reader, in_loop=True),
        flatten(body, builder.reader, in_loop=True),
    )
    results = _results_with_tokens(node, leaf_types(instruction.shape, instruction))
    # A carry that the body does not change is the same value behind the loop as before it.
    body_graph = node.blocks[1]
    arrays = iter(range(len(body_graph.parameters)))
    seen: list[Value] = []
    for leaf, result in zip(leaves, results, strict=True):
        if result.type is not None:
            i = next(arrays)
            if body_graph.results[i].root is body_graph.parameters[i]:
                seen.append(leaf.view((*node.order,)))
                continue
        seen.append(result)
    return seen


def _results_with_tokens(node: Node, types: Sequence[TensorType | None]) -> list[Value]:
    """Sets the results of a node, one for each leaf; `node.results` has only the arrays."""
    leaves: list[Value] = []
    for t in types:
        value = Value(t, node, len(node.results))
        if t is not None:
            node.results.append(value)
        leaves.append(value)
    return leaves


def _conditional(builder: _Builder, instruction: Instruction, env: Env) -> list[Value]:
    if not any(called.needs_runtime for called in instruction.called):
        return _compute(builder, instruction, env)
    selector, *arguments = instruction.operands
    node = builder.runtime_node(NodeKind.BRANCH, instruction, _leaves(instruction, env), env)
    (node.selector,) = env[selector]
    node.blocks = tuple(
        flatten(called, builder.reader, in_loop=builder.in_loop) for called in instruction.called
    )
    if len(arguments) != len(node.blocks):
        raise instruction.invalid("has not one operand for each branch")
    return _results_with_tokens(node, leaf_types(instruction.shape, instruction))


def _collective(builder: _Builder, instruction: Instruction, env: Env) -> list[Value]:
    node = builder.runtime_node(NodeKind.COLLECTIVE, instruction, _leaves(instruction, env), env)
    result_shape = instruction.shape
    if instruction.opcode in ("all-gather-start", "collective-permute-start"):
        if result_shape.element_type != TUPLE or len(result_shape.tuple_shapes) < 2:
            raise instruction.invalid("its shape is not a tuple of operands and results")
        result_shape = result_shape.tuple_shapes[1]
    types = leaf_types(result_shape, instruction)
    if instruction.opcode == "send":
        types = (None,)
    elif instruction.opcode == "recv":
        payload = instruction.shape.tuple_shapes[0]
        types = (*leaf_types(payload, instruction), None)
    node.is_started = instruction.opcode in START_COLLECTIVES or bool(builder.wrappers)
    operands = [v.type for v in node.operands if v.type is not None]
    results = [t for t in types if t is not None]
    validation = validation_text(instruction, builder.wrappers)
    if validation is not None and not builder.in_loop:
        raise instruction.invalid(
            f"has {VALIDATION_ATTRIBUTE}, but is in no loop whose iterations it could count"
        )
    node.collective, node.reducer = builder.reader.read(
        instruction, operands, results, validation=validation
    )
    if builder.wrappers and builder.wrappers[-1].source:  # what it wraps may have lost its line
        node.collective = replace(node.collective, source=builder.wrappers[-1].source)
    return _results_with_tokens(node, types)


Rule = Callable[[_Builder, Instruction, Env], list[Value]]

_RULES: dict[str, Rule] = {
    "constant": _cheap,
    "iota": _cheap,
    "broadcast": _broadcast,
    "tuple": _tuple,
    "get-tuple-element": _get_tuple_element,
    "copy": _alias,  # layouts do not exist in a program, and values never change
    "copy-start": _alias,
    "copy-done": _alias,
    "after-all": _after_all,
    "add-dependency": _add_dependency,
    "opt-barrier": _barrier,
    "call": _call,
    "fusion": _call,
    "while": _while,
    "conditional": _conditional,
    "async-start": _async_start,
    "send-done": _alias,
    "recv-done": _alias,
    **dict.fromkeys(ASYNC_WRAPPERS - {"async-start"}, _alias),
    **dict.fromkeys(DONE_COLLECTIVES, _alias),
    **dict.fromkeys(COLLECTIVES, _collective),
    **dict.fromkeys(LOGICAL_IDS, _logical_id),
}
