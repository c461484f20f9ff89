"""StableHLO's collectives on grids of replicas and partitions, which no JAX function writes.

Modules are given to the backend as they are. Their values, and what is right, are those with which
StableHLO's own interpreter is tested (``stablehlo/tests/interpret`` in github.com/openxla/stablehlo): there
a process is a replica and a partition, and groups are of replicas, of partitions, of both or of flattened
ids, which depends on the channel and on ``use_global_device_ids``. Not among them: infeed and outfeed, which
JAX has no more; broadcasts whose root is an operand and ``collective_reduce``, which jaxlib 0.10 cannot
read; an all-to-all of operands of different shapes, which XLA refuses; sends and receives, which are
different programs there (`beyond_cpu` has those of one program).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from jax._src.lib import xla_client
from jax.extend.backend import get_backend
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .registry import Program, add

_MANUAL = 'mhlo.sharding = "{manual}"'
_SUM = """({
    ^bb0(%x: tensor<i64>, %y: tensor<i64>):
      %sum = stablehlo.add %x, %y : tensor<i64>
      stablehlo.return %sum : tensor<i64>
    }) """
_MLIR = {np.dtype(np.int64): "i64", np.dtype(np.int32): "i32", np.dtype(np.uint32): "ui32"}
Values = Sequence[Any]  # of each process, in order: replicas, then partitions


@dataclass(frozen=True)
class Case:
    """One collective. ``operands`` and ``results``: an array each, with a leading dimension of processes."""

    kind: str
    grid: tuple[int, int]
    attributes: str
    operands: tuple[np.ndarray, ...]
    results: tuple[np.ndarray, ...]

    def module(self) -> str:
        """Its text; with partitions all of it is of a device's own part."""
        mark = f" {{{_MANUAL}}}" if self.grid[1] > 1 else ""
        attributes = self.attributes + (f", {_MANUAL}" if mark else "")
        given, gives = list(map(_type, self.operands)), list(map(_type, self.results))
        arguments = [f"%a{n}" for n in range(len(given))]
        signature = ", ".join(f"{a}: {t}{mark}" for a, t in zip(arguments, given, strict=True))
        results = ", ".join(f"%r#{n}" for n in range(len(gives)))
        region = _SUM if self.kind in ("all_reduce", "reduce_scatter") else ""
        return f"""func.func @main({signature}) -> ({", ".join(t + mark for t in gives)}) {{
    %r:{len(gives)} = "stablehlo.{self.kind}"({", ".join(arguments)}) {region}{{{attributes}}}
      : ({", ".join(given)}) -> ({", ".join(gives)})
    return {results} : {", ".join(gives)}
    }}"""


def _type(array: np.ndarray) -> str:
    return f"tensor<{'x'.join([*map(str, array.shape[1:]), _MLIR[array.dtype]])}>"


def run(module: str, case: Case) -> dict[str, Any]:
    """Compiled as it is, by the backend's own interface; results joined along their first dimension."""
    count = case.grid[0] * case.grid[1]
    devices = jax.devices()[:count]
    mine = [n for n, d in enumerate(devices) if d.process_index == jax.process_index()]
    if not mine:
        return {}
    options = xla_client.CompileOptions()
    build = options.executable_build_options
    options.num_replicas, options.num_partitions = case.grid
    build.num_replicas, build.num_partitions = case.grid
    build.use_spmd_partitioning, build.use_shardy_partitioner = case.grid[1] > 1, False
    ids = np.array([device.id for device in devices], np.int32).reshape(case.grid)
    build.device_assignment = xla_client.DeviceAssignment.create(ids)
    options.device_assignment = build.device_assignment
    chosen = xla_client.DeviceList(tuple(devices))
    loaded = get_backend().compile_and_load(module.encode(), chosen, options)
    placed = NamedSharding(Mesh(np.array(devices), ("x",)), PartitionSpec("x"))

    def joined(array: np.ndarray, parts: Sequence[jax.Array]) -> jax.Array:
        return jax.make_array_from_single_device_arrays(_joined(array).shape, placed, list(parts))

    operands = [
        joined(array, [jax.device_put(array[n], devices[n]) for n in mine])
        for array in case.operands
    ]
    results = loaded.execute_sharded(operands).disassemble_into_single_device_arrays()
    pairs = zip(case.results, results, strict=True)
    return {str(n): joined(array, parts) for n, (array, parts) in enumerate(pairs)}


def _joined(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1, *array.shape[2:])


def _expected(case: Case) -> dict[str, np.ndarray]:
    return {str(n): _joined(array) for n, array in enumerate(case.results)}


def _add(name: str, case: Case, module: str = "") -> None:
    add(
        Program(
            f"replicas/{case.kind}/{name}",
            partial(run, module or case.module(), case),
            expected=partial(_expected, case),
            exact=True,
            x64=True,
        )
    )


def _collective(
    kind: str,
    name: str,
    grid: tuple[int, int],
    attributes: str,
    operands: Values,
    results: Values,
    *more: tuple[Values, Values],
) -> None:
    """``more``: further operands and results, of 32 bits in a collective that does not add."""
    wide = np.int64 if kind == "all_reduce" else np.int32
    given = [np.array(operands), *(np.array(o, wide) for o, _ in more)]
    gives = [np.array(results), *(np.array(r, wide) for _, r in more)]
    _add(name, Case(kind, grid, attributes, tuple(given), tuple(gives)))


def _groups(*groups: Sequence[int], channel: int = 0, flattened: bool = False) -> str:
    text = (
        f"replica_groups = dense<{[list(g) for g in groups]}> : tensor<{len(groups)}x{len(groups[0])}xi64>, "
        f"channel_handle = #stablehlo.channel_handle<handle = {channel}, type = 0>"
    )
    return text + ", use_global_device_ids" * flattened


PAIR = (0, 1)
SPELLINGS = {
    "cross_replica": _groups(PAIR),
    "cross_replica_and_partition": _groups(PAIR, channel=1),
    "flattened_ids": _groups(PAIR, channel=1, flattened=True),
}
FIRST, SECOND = [[1, 2], [3, 4]], [[5, 6], [7, 8]]
GATHERED = [[1, 2, 5, 6], [3, 4, 7, 8]]
WIDE, MORE = [[1, 2, 3, 4], [5, 6, 7, 8]], [[9, 10, 11, 12], [13, 14, 15, 16]]
for spelling, groups in SPELLINGS.items():
    _collective(
        *("all_gather", spelling, (2, 1), f"all_gather_dim = 1 : i64, {groups}"),
        *([FIRST, SECOND], [GATHERED] * 2),
    )
    _collective("all_reduce", spelling, (2, 1), groups, WIDE, [[6, 8, 10, 12]] * 2)
    _collective(
        *("reduce_scatter", spelling, (2, 1), f"scatter_dimension = 1 : i64, {groups}"),
        *([WIDE, MORE], [[[10, 12], [18, 20]], [[14, 16], [22, 24]]]),
    )
_collective(
    *("all_gather", "of_replicas_and_partitions", (2, 2)),
    f"all_gather_dim = 1 : i64, {_groups(PAIR, channel=1)}",
    [SECOND, SECOND, FIRST, SECOND],
    # As XLA has it, a replica's partitions side by side; StableHLO's interpreter, a partition's replicas.
    [[[5, 6, 5, 6, 1, 2, 5, 6], [7, 8, 7, 8, 3, 4, 7, 8]]] * 4,
)
_collective(
    *("all_gather", "of_two_types", (2, 1), f"all_gather_dim = 1 : i64, {_groups(PAIR)}"),
    *([FIRST, [[11, 12], [13, 14]]], [[[1, 2, 11, 12], [3, 4, 13, 14]]] * 2),
    ([SECOND, [[15, 16], [17, 18]]], [[[5, 6, 15, 16], [7, 8, 17, 18]]] * 2),
)
_collective(
    *("all_reduce", "uneven_groups", (3, 1), _groups((0, 1), (2, -1))),
    *([*WIDE, [6, 8, 10, 12]], [[6, 8, 10, 12]] * 3),
)
_collective(
    *("all_reduce", "of_two", (2, 1), _groups(PAIR)),
    *([[1, 2, 3, 4], [11, 12, 13, 14]], [[12, 14, 16, 18]] * 2),
    ([[5, 6, 7, 8, 9], [15, 16, 17, 18, 19]], [[20, 22, 24, 26, 28]] * 2),
)


def _all_to_all(split: int, concat: int, groups: str) -> str:
    return (
        f"split_dimension = {split} : i64, concat_dimension = {concat} : i64, split_count = 2 : i64, "
        f"{groups}"
    )


LEFT, RIGHT = [[1, 2], [5, 6], [9, 10], [13, 14]], [[3, 4], [7, 8], [11, 12], [15, 16]]
for spelling, grid, channel in (("cross_replica", (2, 1), 0), ("cross_partition", (1, 2), 1)):
    _collective(
        *("all_to_all", spelling, grid, _all_to_all(1, 0, _groups(PAIR, channel=channel))),
        *([WIDE, MORE], [LEFT, RIGHT]),
    )
    _collective(
        *("collective_permute", spelling, (5, 1) if grid == (2, 1) else (1, 5)),
        "source_target_pairs = dense<[[0, 1], [1, 2], [3, 3], [4, 4]]> : tensor<4x2xi64>, "
        f"channel_handle = #stablehlo.channel_handle<handle = {channel}, type = 0>",
        [np.arange(4 * n + 1, 4 * n + 5).reshape(2, 2) for n in range(5)],
        [np.zeros((2, 2), int), FIRST, SECOND, [[13, 14], [15, 16]], [[17, 18], [19, 20]]],
    )
_collective(
    *("all_to_all", "groups_out_of_order", (2, 1), _all_to_all(1, 0, _groups((1, 0)))),
    *([WIDE, MORE], [[[11, 12], [15, 16], [3, 4], [7, 8]], [[9, 10], [13, 14], [1, 2], [5, 6]]]),
)
_collective(
    *("all_to_all", "same_dimension", (2, 1), _all_to_all(0, 0, _groups(PAIR))),
    *([WIDE, MORE], [[WIDE[0], MORE[0]], [WIDE[1], MORE[1]]]),
)

ONE, TWO, THREE, FOUR = [[1, 2]], [[3, 4]], [[5, 6]], [[7, 8]]
NOTHING = [[0, 0]]
for channel, spelling in enumerate(("replica", "partition")):
    along, across = ((4, 1), (1, 4))[:: -1 if channel else 1]
    square = [THREE, FOUR] * 2 if channel == 0 else [TWO, TWO, FOUR, FOUR]
    for name, grid, members, results in (
        (f"cross_{spelling}", along, (2, 1), [NOTHING, THREE, THREE, NOTHING]),
        (f"cross_{spelling}_to_two", along, (2, 1, 0), [THREE, THREE, THREE, NOTHING]),
        (f"cross_{spelling}_of_one", across, (0,), [ONE, TWO, THREE, FOUR]),
        (f"cross_{spelling}_of_four", (2, 2), (1, 0), square),
    ):
        groups = _groups(members, channel=channel)
        _collective("collective_broadcast", name, grid, groups, [ONE, TWO, THREE, FOUR], results)

for kind, grid in (("replica_id", (2, 1)), ("partition_id", (1, 2))):
    case = Case(kind, grid, "", (), (np.array([[0], [1]], np.uint32),))
    mark = f" {{{_MANUAL}}}" if grid[1] > 1 else ""
    _add(
        "alone",
        case,
        f"""func.func @main() -> (tensor<1xui32>{mark}) {{
    %id = stablehlo.{kind}{mark} : tensor<ui32>
    %r = stablehlo.reshape %id{mark} : (tensor<ui32>) -> tensor<1xui32>
    return %r : tensor<1xui32>
    }}""",
    )
