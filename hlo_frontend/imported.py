"""What becomes of a segment's module that XLA's importer made StableHLO of, before an engine gets it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxlib.mlir import ir

from . import stablehlo

_CALL, _ELEMENT = "stablehlo.custom_call", "stablehlo.get_tuple_element"
_CUSTOM_CALL = b"custom_call"  # how bytecode names it
# What the importer says beside the layouts. The first is no part of the StableHLO that plugins read; XLA's
# importer says by it that nothing is tiled.
_OF_IMPORTER = ("result_tilings", "result_layout", "xla_shape")


def with_aliases(module: bytes, aliases: Mapping[int, int]) -> bytes:
    """The module with input ``i`` of main marked to alias output ``aliases[i]``.

    Attributes that the HLO importer left are removed: layouts are row-major. Custom calls with several
    results, to which HLO gives a tuple, have as many results: portable StableHLO has no tuples for them, and
    an engine behind PJRT's C API takes no other StableHLO.
    """
    with stablehlo.parsed(module) as tree:
        function = stablehlo.main(tree)
        if _CUSTOM_CALL in module:  # else there is no need to look at every operation
            _untuple_custom_calls(tree)
        with tree.context:
            for name in list(tree.operation.attributes):
                if name.startswith("mhlo."):
                    del tree.operation.attributes[name]
            for name in ("arg_attrs", "res_attrs"):  # they leave the layout to the compiler
                if name in function.attributes:
                    del function.attributes[name]
            tree.operation.attributes["sym_name"] = ir.StringAttr.get("segment")
            if aliases:
                function_type = ir.FunctionType(
                    ir.TypeAttr(function.attributes["function_type"]).value
                )
                i32 = ir.IntegerType.get_signless(32)
                marks = []
                for i in range(len(function_type.inputs)):
                    mark = {}
                    if i in aliases:
                        mark["tf.aliasing_output"] = ir.IntegerAttr.get(i32, aliases[i])
                    marks.append(ir.DictAttr.get(mark))
                function.attributes["arg_attrs"] = ir.ArrayAttr.get(marks)
        return stablehlo.bytecode(tree)


def _untuple_custom_calls(module: ir.Module) -> None:
    """Give each custom call that has a tuple its elements as results, where nothing else is done with it."""
    calls = [o for o in stablehlo.operations(module) if o.name == _CALL]
    with module.context:
        for call in calls:
            for name in _OF_IMPORTER:
                if name in call.attributes:
                    del call.attributes[name]
            if len(call.results) == 1 and _is_tuple(call.results[0].type):
                _untuple(call, call.results[0])


def _untuple(call: Any, result: ir.Value) -> None:
    elements = [use.owner for use in result.uses]
    type = ir.TupleType(result.type)
    types = [type.get_type(i) for i in range(type.num_types)]
    if any(o.name != _ELEMENT for o in elements) or any(map(_is_tuple, types)):
        return
    several = ir.Operation.create(
        _CALL,
        results=types,
        operands=list(call.operands),
        attributes={name: call.attributes[name] for name in call.attributes},
        loc=call.location,
        ip=ir.InsertionPoint(call),
    )
    for element in elements:
        index = ir.IntegerAttr(element.attributes["index"]).value
        element.results[0].replace_all_uses_with(several.results[index])
        element.erase()
    call.erase()


def _is_tuple(type: ir.Type) -> bool:
    return str(type).startswith("tuple<")  # the same with all releases of jaxlib
