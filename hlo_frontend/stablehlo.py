"""StableHLO modules as MLIR: reading signatures and donation, writing donation.

Uses the MLIR bindings that come with jaxlib. Modules come as text, MLIR bytecode or portable
artifacts; functions here raise `InvalidProgramError` for anything else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from typing import Any

from jaxlib import _jax
from jaxlib.mlir import ir
from jaxlib.mlir._mlir_libs import _jax_mlir_ext
from jaxlib.mlir.dialects import chlo, func, sdy, stablehlo

from stretto.collectives.types import TensorType
from stretto.runtime.errors import InvalidProgramError, UnsupportedError

# The producer string at the start of a portable artifact.
PORTABLE = b"StableHLO_v"

_TOKEN = "!stablehlo.token"

MLIR_TYPES = {
    "i1": "pred",
    **{f"i{bits}": f"s{bits}" for bits in (2, 4, 8, 16, 32, 64)},
    **{f"ui{bits}": f"u{bits}" for bits in (2, 4, 8, 16, 32, 64)},
    "f16": "f16",
    "bf16": "bf16",
    "f32": "f32",
    "f64": "f64",
    "complex<f32>": "c64",
    "complex<f64>": "c128",
    "f4E2M1FN": "f4e2m1fn",
    "f8E3M4": "f8e3m4",
    "f8E4M3": "f8e4m3",
    "f8E4M3FN": "f8e4m3fn",
    "f8E4M3B11FNUZ": "f8e4m3b11fnuz",
    "f8E4M3FNUZ": "f8e4m3fnuz",
    "f8E5M2": "f8e5m2",
    "f8E5M2FNUZ": "f8e5m2fnuz",
    "f8E8M0FNU": "f8e8m0fnu",
}


class _Context(ir.Context):
    """A context without the dialects that are linked into jaxlib but not asked for."""

    def __init__(self) -> None:
        super(ir.Context, self).__init__()  # past ir.Context's own, which loads them all


def make_context() -> ir.Context:
    """A new MLIR context with the dialects that JAX emits, single-threaded."""
    made = _Context()
    registry = ir.DialectRegistry()
    _jax_mlir_ext.register_dialects(registry)
    made.append_dialect_registry(registry)
    made.load_all_available_dialects()
    made.enable_multithreading(False)
    made.allow_unregistered_dialects = True
    sdy.register_dialect(made)
    chlo.register_dialect(made)
    stablehlo.register_dialect(made)
    return made


# A context keeps every constant and name it ever saw, so it is given up after this many bytes of modules.
_BYTES_PER_CONTEXT = 1 << 20

# Contexts that nobody uses, each with how many bytes it may still see. Not one for each thread: jaxlib
# may compile on threads that Python forgets at once, and a context does not survive that.
_idle: list[tuple[ir.Context, int]] = []


@contextmanager
def parsed(module: bytes | str) -> Iterator[ir.Module]:
    """`parse`, in a context that other modules use before and after: making one takes longer than
    parsing a small program. The module must not be used outside of the block."""
    nbytes = len(module)
    try:
        context, left = _idle.pop()
    except IndexError:
        context, left = make_context(), _BYTES_PER_CONTEXT
    try:
        yield parse(module, context)
    finally:
        if left > nbytes:
            _idle.append((context, left - nbytes))


def parse(module: bytes | str, context: ir.Context | None = None) -> ir.Module:
    """Parse text, bytecode or a portable artifact."""
    if isinstance(module, str):
        module = module.encode()
    context = context or make_context()
    reasons = []
    try:
        # A portable artifact is bytecode too, of the versioned dialect.
        if PORTABLE not in module[:64]:
            return ir.Module.parse(module, context)
    except Exception as error:
        reasons.append(str(error))
    try:
        with context:
            thawed = _jax.mlir.deserialize_portable_artifact(module, context)
        return thawed if isinstance(thawed, ir.Module) else ir.Module.parse(thawed, context)
    except Exception as error:
        reasons.append(str(error))
    raise InvalidProgramError("not a StableHLO module: " + "; ".join(reasons))


def current_version() -> list[int]:
    """StableHLO's version in this jaxlib: major, minor and patch."""
    return list(map(int, stablehlo.get_current_version().split(".")))


def bytecode(module: ir.Module) -> bytes:
    buffer = BytesIO()
    module.operation.write_bytecode(buffer)
    return buffer.getvalue()


@dataclass(frozen=True)
class Signature:
    """What the attributes and types of ``main`` say. Donated inputs are listed by position."""

    name: str
    inputs: tuple[TensorType, ...]
    outputs: tuple[TensorType, ...]
    donated: tuple[int, ...]
    input_memory_kinds: tuple[str, ...]
    output_memory_kinds: tuple[str, ...]


def main(module: ir.Module) -> Any:
    """The function ``main``."""
    for operation in module.body.operations:
        if operation.operation.name != "func.func":
            continue
        if ir.StringAttr(operation.attributes["sym_name"]).value == "main":
            return operation
    raise InvalidProgramError("the StableHLO module has no function main")


def tensor_type(type: ir.Type) -> TensorType:
    try:
        ranked = ir.RankedTensorType(type)
    except ValueError:
        raise UnsupportedError(
            f"a parameter or result of main is of type {type}; only dense tensors are supported"
        ) from None
    element = MLIR_TYPES.get(str(ranked.element_type))
    if element is None:
        raise UnsupportedError(f"element type {ranked.element_type} is not supported")
    if not ranked.has_static_shape:
        raise UnsupportedError(f"{type} has dynamic dimensions; only static shapes are supported")
    return TensorType(element, tuple(ranked.shape))


def signature(module: ir.Module, *, types: bool = True) -> Signature:
    """Read ``main``. With ``types=False`` only names, donation and memory kinds."""
    function = main(module)
    function_type = ir.FunctionType(ir.TypeAttr(function.attributes["function_type"]).value)
    arguments = list(_attribute_dicts(function, "arg_attrs", len(function_type.inputs)))
    results = list(_attribute_dicts(function, "res_attrs", len(function_type.results)))
    donated = tuple(
        i
        for i, attributes in enumerate(arguments)
        if "tf.aliasing_output" in attributes
        or ("jax.buffer_donor" in attributes and ir.BoolAttr(attributes["jax.buffer_donor"]).value)
    )
    name = (
        ir.StringAttr(module.operation.attributes["sym_name"]).value
        if ("sym_name" in module.operation.attributes)
        else "main"
    )
    return Signature(
        name,
        tuple(tensor_type(t) for t in function_type.inputs) if types else (),
        tuple(tensor_type(t) for t in function_type.results) if types else (),
        donated,
        tuple(_memory_kind(a) for a in arguments),
        tuple(_memory_kind(a) for a in results),
    )


def _attribute_dicts(function: Any, key: str, count: int) -> Iterator[Mapping[str, Any]]:
    if key not in function.attributes:
        return iter([{}] * count)
    return iter([ir.DictAttr(a) for a in ir.ArrayAttr(function.attributes[key])])


def _memory_kind(attributes: Mapping[str, Any]) -> str:
    if "mhlo.memory_kind" in attributes:
        return ir.StringAttr(attributes["mhlo.memory_kind"]).value
    return ""


def operations(module: ir.Module) -> list[Any]:
    """Every operation of a module, each behind those that are nested in it."""
    found: list[Any] = []

    def take(operation: Any) -> ir.WalkResult:
        found.append(operation)
        return ir.WalkResult.ADVANCE

    module.operation.walk(take)
    return found[:-1]  # the last is the module


# Operations that mean something only among several devices, or tell the partitioner what to do.
_DISTRIBUTED = frozenset(
    {
        f"stablehlo.{name}"
        for name in (
            "all_reduce",
            "all_gather",
            "reduce_scatter",
            "all_to_all",
            "collective_permute",
            "collective_broadcast",
            "cross-replica-sum",
            "partition_id",
            "replica_id",
            "send",
            "recv",
            "infeed",
            "outfeed",
            "async_start",
            "async_done",
        )
    }
)
_DISTRIBUTED_CALLS = (
    "ragged_all_to_all",
    "Sharding",
    "SPMDFullToShardShape",
    "SPMDShardToFullShape",
    "LocalToGlobalShape",
    "GlobalToLocalShape",
    "annotate_device_placement",
)


# Operations of Shardy that say nothing about a program for one device.
_IDLE_ON_ONE_DEVICE = ("sdy.mesh", "sdy.sharding_constraint")


def replace_boundary_tokens(module: ir.Module) -> None:
    """Make tokens that enter or leave ``main`` empty ``pred[0]`` arrays, as JAX passes them.

    Runs stay in order: the array that leaves a run is ready when the run is over, and the next run
    takes it.
    """
    function = main(module)
    function_type = ir.FunctionType(ir.TypeAttr(function.attributes["function_type"]).value)
    types = [*function_type.inputs, *function_type.results]
    if not any(str(t) == _TOKEN for t in types):
        return
    block = function.regions[0].blocks[0]
    with module.context, ir.Location.unknown():
        empty = ir.RankedTensorType.get([0], ir.IntegerType.get_signless(1))
        with ir.InsertionPoint.at_block_begin(block):
            for argument in block.arguments:
                if str(argument.type) == _TOKEN:
                    made = stablehlo.AfterAllOp([]).results[0]
                    argument.replace_all_uses_with(made)
                    argument.set_type(empty)
        end = list(block.operations)[-1].operation
        with ir.InsertionPoint(end):
            for i, operand in enumerate(list(end.operands)):
                if str(operand.type) == _TOKEN:
                    value = ir.DenseElementsAttr.get_splat(empty, ir.BoolAttr.get(False))
                    end.operands[i] = stablehlo.ConstantOp(value).results[0]
        inputs, results = (
            [empty if str(t) == _TOKEN else t for t in side]
            for side in (function_type.inputs, function_type.results)
        )
        function.attributes["function_type"] = ir.TypeAttr.get(ir.FunctionType.get(inputs, results))
        _drop_attribute(function, "jax.token")


def _drop_attribute(function: Any, name: str) -> None:
    """Remove an attribute from all arguments and results."""
    for key in ("arg_attrs", "res_attrs"):
        if key in function.attributes:
            kept = [
                ir.DictAttr.get({n.name: n.attr for n in _named(d) if n.name != name})
                for d in ir.ArrayAttr(function.attributes[key])
            ]
            function.attributes[key] = ir.ArrayAttr.get(kept)


def uses_shardy(module: ir.Module) -> bool:
    """Whether the module names a Shardy mesh."""
    return any(operation.operation.name == "sdy.mesh" for operation in module.body.operations)


def can_be_simplified(module: ir.Module) -> bool:
    """Whether XLA's simplifier changes nothing that counts.

    It drops what enters a barrier and is not used where it leaves, and so a chain of tokens (a ``bool[]`` of
    `stretto.lax`) from its end. It divides by 4 as it multiplies by 1/4, which floats of four bits lack.
    """
    return not any(map(_loses_by_simplifying, operations(module)))


def _loses_by_simplifying(operation: Any) -> bool:
    name = operation.name
    if name == "stablehlo.optimization_barrier":
        return any(str(operand.type) == "tensor<i1>" for operand in operation.operands)
    if name == "stablehlo.divide":
        return str(operation.operands[0].type.element_type).startswith("f4")
    return False


def calls_in_order(module: ir.Module) -> bool:
    """Whether the module has calls, such as ordered callbacks into Python, that tokens order."""
    return any(
        operation.name == "stablehlo.custom_call"
        and any(str(value.type) == _TOKEN for value in operation.operands)
        for operation in operations(module)
    )


def starts_collectives(module: ir.Module) -> bool:
    """Whether a module has collectives that JAX's ``psum_start`` and the like have started."""
    return any(map(_is_start, operations(module)))


def _is_start(operation: Any) -> bool:
    if operation.name != "stablehlo.custom_call":
        return bool(operation.name == "stablehlo.async_start")
    target = ir.StringAttr(operation.attributes["call_target_name"]).value
    return target.endswith("-start")


def take_starts_out_of_barriers(module: ir.Module) -> bool:
    """Let each done have what its start gave, where that goes through optimization barriers on its way; says
    whether any did.

    XLA, on its CPU backend too, ends the process where it does not find the start of a done. In the barrier
    is what the start was given instead: it stays ahead of all that comes behind the barrier, and so does the
    start, which comes right behind what it reads.
    """
    found = False
    for operation in operations(module):
        if operation.name != "stablehlo.optimization_barrier":
            continue
        operands = list(operation.operands)
        starts = {
            i: operand.owner.operation for i, operand in enumerate(operands)
            if not isinstance(operand.owner, ir.Block) and _is_start(operand.owner.operation)
        }  # fmt: skip
        if not starts:
            continue
        found = True
        given = [starts[i].operands[0] if i in starts else o for i, o in enumerate(operands)]
        with module.context, operation.location, ir.InsertionPoint(operation):
            made = stablehlo.OptimizationBarrierOp(given)
        for i, old in enumerate(operation.results):
            old.replace_all_uses_with(operands[i] if i in starts else made.results[i])
        operation.erase()
    return found


def is_local(module: ir.Module) -> bool:
    """Whether a module for one device can be given to an engine without XLA looking at it first.

    XLA is needed to partition it, and to inline calls early when the user said it should.
    """
    for operation in operations(module):
        name = operation.name
        if name == "func.call" and _inlined(operation) == "xla_early":
            return False
        if name in _DISTRIBUTED or (name.startswith("sdy.") and name not in _IDLE_ON_ONE_DEVICE):
            return False
        if name == "stablehlo.custom_call":
            target = ir.StringAttr(operation.attributes["call_target_name"]).value
            if target in _DISTRIBUTED_CALLS or target.endswith(("-start", "-done")):
                return False
    return True


def call_decompositions(module: ir.Module) -> None:
    """Replace composites that HLO has an instruction for, and StableHLO has none, by what they stand for.

    XLA goes through StableHLO again to partition, and so do segments.
    """
    found = [o for o in operations(module) if o.name == "stablehlo.composite"]
    for operation in found:
        attributes = operation.attributes
        if ir.StringAttr(attributes["name"]).value not in _ONLY_IN_HLO:
            continue
        decomposition = ir.FlatSymbolRefAttr(attributes["decomposition"])
        types = [result.type for result in operation.results]
        with module.context, operation.location, ir.InsertionPoint(operation):
            call = func.CallOp(types, decomposition, list(operation.operands))
        for old, new in zip(operation.results, call.results, strict=True):
            old.replace_all_uses_with(new)
        operation.erase()


_ONLY_IN_HLO = ("chlo.mulhi",)


def inline_late_calls(module: ir.Module) -> None:
    """Let XLA inline the calls that the user wants to be inlined late.

    XLA would compile what they call as modules of their own, and put them together behind the place where
    the HLO is taken.
    """
    for operation in operations(module):
        if operation.name == "func.call" and _inlined(operation) == "xla_late":
            with module.context:
                kept = _named(_frontend_attributes(operation))
                marks = {a.name: a.attr for a in kept if a.name != _INLINEABLE}
                operation.attributes[_FRONTEND_ATTRIBUTES] = ir.DictAttr.get(marks)


_FRONTEND_ATTRIBUTES = "mhlo.frontend_attributes"
_INLINEABLE = "inlineable"


def _inlined(operation: Any) -> str:
    """When a call is to be inlined, as `jax.Inline` names it; empty if it does not say."""
    attributes = _frontend_attributes(operation)
    return ir.StringAttr(attributes[_INLINEABLE]).value if _INLINEABLE in attributes else ""


def _frontend_attributes(operation: Any) -> ir.DictAttr | dict[str, Any]:
    attributes = operation.attributes
    if _FRONTEND_ATTRIBUTES not in attributes:
        return {}
    return ir.DictAttr(attributes[_FRONTEND_ATTRIBUTES])


Layouts = tuple[tuple[int, ...], ...]


def settle_layouts(module: ir.Module) -> tuple[Layouts, Layouts]:
    """Take the layouts of arguments and results out of the module; gives them, each from minor to major.

    Empty ones are row-major, as are most that are left to the compiler. What layouts mean is up to the
    caller: arrays are row-major throughout the program. Raises `UnsupportedError` for layouts with tiles.
    """
    function = main(module)
    (block,) = function.regions[0].blocks
    results = list(block.operations)[-1].operands
    found: list[Layouts] = []
    asked = False
    for key, what in (("arg_attrs", "argument"), ("res_attrs", "result")):
        if key not in function.attributes:
            found.append(())
            continue
        layouts = []
        for index, attributes in enumerate(ir.ArrayAttr(function.attributes[key])):
            named = ir.DictAttr(attributes)
            mode = "default"
            if _LAYOUT_MODE in named:
                asked, mode = True, ir.StringAttr(named[_LAYOUT_MODE]).value
            if mode == "auto":
                layouts.append(_preferred(results[index]) if what == "result" else ())
            else:
                layouts.append(_layout(mode, f"{what} {index}"))
        found.append(tuple(layouts))
    if asked:
        with module.context:
            _drop_attribute(function, _LAYOUT_MODE)
    return found[0], found[1]


_LAYOUT_MODE = "mhlo.layout_mode"


def _layout(mode: str, what: str) -> tuple[int, ...]:
    """``mode``: ``default``, or dimensions from minor to major such as ``{1,0}``."""
    if mode == "default":
        return ()
    try:
        order = tuple(int(n) for n in mode.strip("{}").split(",") if n.strip())
    except ValueError:
        raise UnsupportedError(
            f"{what} of the program is to have the layout {mode}; stretto's arrays are dense, "
            "without tiles. Name the order of dimensions alone"
        ) from None
    if sorted(order) != list(range(len(order))):
        raise InvalidProgramError(f"{what} of the program has no such layout: {mode}")
    return _unless_row_major(order)


def _preferred(result: ir.Value) -> tuple[int, ...]:
    """The layout of a result that is left to the compiler: a constraint's in the program, or that in which
    its last transposition moves nothing."""
    while True:
        operation = getattr(result.owner, "operation", None)  # None for an argument
        if operation is None:
            return ()
        attributes = operation.attributes
        if operation.name == "stablehlo.transpose":
            # Dimension i of the result is dimension order[i] of the operand, which is row-major.
            order = list(ir.DenseI64ArrayAttr(attributes["permutation"]))
            return tuple(sorted(range(len(order)), key=lambda i: order[i], reverse=True))
        if operation.name == "stablehlo.custom_call":
            target = ir.StringAttr(attributes["call_target_name"]).value
            if target == "LayoutConstraint":
                (layout,) = ir.ArrayAttr(attributes["result_layouts"])
                return _unless_row_major(tuple(ir.DenseIntElementsAttr(layout)))
            if target not in ("annotate_device_placement", "Sharding"):
                return ()
        elif operation.name != "sdy.sharding_constraint":
            return ()
        result = operation.operands[0]


def _unless_row_major(order: tuple[int, ...]) -> tuple[int, ...]:
    """The order, empty if it is row-major."""
    return order if order != tuple(range(len(order) - 1, -1, -1)) else ()


def for_engine(module: ir.Module) -> bytes:
    """Bytecode of a module for one device as an engine compiles it.

    Shardy's meshes, constraints and attributes are removed, and the kinds of memory that its arrays lie in
    for JAX: an engine has one. jaxlib's CPU client, told of another, ends the process where an output is in
    the memory of a donated input.
    """
    found = operations(module)
    idle = [o for o in found if o.name in _IDLE_ON_ONE_DEVICE]
    function = main(module)
    if not idle and not any(map(_memory_kind, _boundary(function))):
        return bytecode(module)
    with module.context:
        for operation in idle:
            if operation.name == "sdy.sharding_constraint":
                operation.results[0].replace_all_uses_with(operation.operands[0])
            found.remove(operation)
            operation.erase()
        for operation in found:
            for name in list(operation.attributes):
                if name.startswith("sdy."):
                    del operation.attributes[name]
                elif name in ("arg_attrs", "res_attrs"):
                    kept = [
                        {n.name: n.attr for n in _named(d) if not _is_of_no_engine(n.name)}
                        for d in ir.ArrayAttr(operation.attributes[name])
                    ]
                    operation.attributes[name] = ir.ArrayAttr.get(
                        [ir.DictAttr.get(d) for d in kept]
                    )
    return bytecode(module)


def _boundary(function: Any) -> Iterator[Mapping[str, Any]]:
    """The attributes of each argument and result that has some."""
    for key in ("arg_attrs", "res_attrs"):
        yield from _attribute_dicts(function, key, 0)


def _is_of_no_engine(attribute: str) -> bool:
    return attribute.startswith("sdy.") or attribute == "mhlo.memory_kind"


def _named(attributes: Any) -> list[Any]:
    dictionary = ir.DictAttr(attributes)
    return [dictionary[i] for i in range(len(dictionary))]
