"""All-reduces that become reduce-scatters and all-gathers, and combined ones that are taken apart.

Modules are run as in `test_split`, on whole numbers, and compared with NumPy's results.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from frontend_support import P, compiled, judge_program, manual, mesh
from jax import lax
from split_support import kinds, numbers, partitioned, ran, regions, table

from stretto.collectives.ops import Kind
from stretto.hlo_frontend.compile import PartitionedModule
from stretto.hlo_frontend.graph import Module
from stretto.hlo_frontend.overlap.apply import OverlapPolicy
from stretto.hlo_frontend.passes.split import Decision, Shared
from stretto.hlo_frontend.passes.split.apply import apply, found_shares
from stretto.hlo_frontend.passes.split.least_cut import Network
from stretto.hlo_frontend.passes.split.regions import Region
from stretto.hlo_frontend.pipeline import SETTLING, Compilation, run
from stretto.hlo_frontend.schema import HloModuleProto, OpSharding
from stretto.hlo_frontend.shardings import shardings_of
from stretto.plugin.executable_codec import _decided


def shares(
    module: PartitionedModule, parts: tuple[Decision, ...] = ()
) -> list[tuple[Shared, Region]]:
    """What can be computed by shares, with these regions split."""
    parsed = Module.parse(module.hlo)
    c = Compilation.of(module, parsed)
    run(c, SETTLING)
    counts, shardings = (module.num_replicas, module.num_partitions), shardings_of(parsed, 1)
    apply(c.entry, parts, *counts)
    blocks = found_shares(c.entry, counts, shardings)
    return [(Shared(number, i), r) for number, _, rs in blocks for i, r in enumerate(rs)]


def shared(module: PartitionedModule, tiles: int = 0) -> PartitionedModule:
    """With all of that, after all regions are split."""
    parts = tuple([Decision(n, i, tiles) for n, i, _ in regions(module)] if tiles else ())
    given = tuple(decision for decision, _ in shares(module, parts))
    assert given
    return replace(module, splits=(*parts, *given))


REPLICATED, HALVES = b"", OpSharding(type=3, tile_assignment_dimensions=[2, 1]).SerializeToString()


def placed(module: PartitionedModule, first: bytes) -> PartitionedModule:
    """With the sharding of its first parameter; those of others are halves."""
    proto = HloModuleProto.FromString(module.hlo)
    count = len(Module.parse(module.hlo).entry.parameters)
    proto.spmd_parameters_shardings.extend([first] + [HALVES] * (count - 1))
    return replace(module, hlo=proto.SerializeToString())


def own(region: Region) -> set[str]:
    """The nodes of which each device computes its own rows."""
    return {node.instruction.name for node in region.cuts}


# The residual is the same on all devices: it is a sum, too.
LAYER = """
  x = f32[512,64] parameter(0)
  w = f32[64,96] parameter(1)
  v = f32[96,32] parameter(2)
  p = f32[512,96] dot(x, w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  res = f32[512,96] all-reduce(p), ALL, to_apply=sum
  q = f32[512,96] multiply(p, p)
  att = f32[512,96] all-reduce(q), ALL, to_apply=sum
  h = f32[512,96] add(att, res)
  m = f32[512,96] multiply(h, h)
  zero = f32[] constant(0)
  sq = f32[512] reduce(m, zero), dimensions={1}, to_apply=sum
  wide = f32[512,96] broadcast(sq), dimensions={0}
  normed = f32[512,96] subtract(h, wide)
  ROOT e = f32[512,32] dot(normed, v), lhs_contracting_dims={1}, rhs_contracting_dims={0}
"""


@pytest.mark.parametrize(("n", "tiles"), [(2, 0), (4, 0), (2, 2), (4, 4)])
def test_each_device_computes_its_own_rows_between(n: int, tiles: int) -> None:
    """Two sums are scattered, and only what the product reads is gathered."""
    module = partitioned(LAYER, n)
    ((_, region),) = shares(module)
    assert {node.instruction.name for node in region.sources} == {"res", "att"}
    assert own(region) == {"h", "m", "sq", "wide", "normed"}
    made = shared(module, tiles)
    arguments = numbers(made.lowered().program)
    for x in arguments[0]:  # so that sums are exact
        x[:, 2:] = 0
    arguments = [[a % 2 for a in given] for given in arguments]
    program, got = ran(made, arguments)
    parts = max(tiles, 1)
    assert kinds(program) == {Kind.REDUCE_SCATTER: 2 * parts, Kind.ALL_GATHER: parts}
    products = [arguments[0][d] @ arguments[1][d] for d in range(n)]
    h = sum(products) + sum(p * p for p in products)
    normed = h - (h * h).sum(1, keepdims=True)
    for device in range(n):
        np.testing.assert_array_equal(got.results[0][device], normed @ arguments[2][device])


def test_names_and_shapes() -> None:
    program = shared(partitioned(LAYER, 4)).lowered().program
    assert {c.name: c.results[0].shape for c in program.collectives} == {
        "res.scattered": (128, 96),
        "att.scattered": (128, 96),
        "res.gathered": (512, 96),
    }
    program = shared(partitioned(LAYER, 4), 2).lowered().program
    assert {c.name for c in program.collectives} == {
        f"{name}.part{k}of2.{what}"
        for name, what in (("res", "scattered"), ("att", "scattered"), ("res", "gathered"))
        for k in (1, 2)
    }


# Gradients of q, k and v, as XLA makes them: three sums that are combined, and added.
COMBINED = """
  x = f32[96,64] parameter(0)
  w = f32[64,96] parameter(1)
  v = f32[96,32] parameter(2)
  t = f32[7] parameter(3)
  p = f32[96,96] dot(x, w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  k = f32[96,96] multiply(p, p)
  all = (f32[96,96], f32[96,96], f32[7], f32[7]) all-reduce(p, k, t, t), ALL, to_apply=sum
  a = f32[96,96] get-tuple-element(all), index=0
  b = f32[96,96] get-tuple-element(all), index=1
  c = f32[7] get-tuple-element(all), index=2
  d = f32[7] get-tuple-element(all), index=3
  h = f32[96,96] add(a, b)
  e = f32[96,32] dot(h, v), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  f = f32[7] add(c, d)
  ROOT o = (f32[96,32], f32[7]) tuple(e, f)
"""


@pytest.mark.parametrize("by", ["parts", "shares"])
def test_combined_sums_are_taken_apart(by: str) -> None:
    """Large arrays have collectives of their own, small ones stay together; what is added is gathered."""
    module = partitioned(COMBINED, 2)
    if by == "parts":
        ((number, i, region),) = regions(module)
        assert {n.instruction.name for n in region.collectives} == {"all.1of3", "all.2of3"}
        made = replace(module, splits=(Decision(number, i, 3),))
        want = {Kind.ALL_REDUCE: 7}
    else:
        made, want = (
            shared(module),
            {Kind.REDUCE_SCATTER: 2, Kind.ALL_GATHER: 1, Kind.ALL_REDUCE: 1},
        )
    arguments = numbers(made.lowered().program)
    program, got = ran(made, arguments)
    assert kinds(program) == want
    assert len(module.lowered().program.collectives) == 1
    x, w, v, t = arguments
    products = [x[d] @ w[d] for d in range(2)]
    total = sum(p + p * p for p in products)
    for device in range(2):
        np.testing.assert_array_equal(got.results[0][device], total @ v[device])
        np.testing.assert_array_equal(got.results[1][device], 2 * (t[0] + t[1]))


SEQUENCES = """
  x = f32[3,64,64] parameter(0)
  v = f32[64,32] parameter(1)
  a = f32[3,64,64] all-reduce(x), ALL, to_apply=sum
  f = f32[192,64] reshape(a)
  m = f32[192,64] multiply(f, f)
  e = f32[192,32] dot(m, v), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT r = f32[3,64,32] reshape(e)
"""


def test_rows_of_several_sequences() -> None:
    """Three sequences do not divide by two devices: each device has half of the rows of each."""
    module = partitioned(SEQUENCES, 2)
    ((_, region),) = shares(module)
    assert own(region) == {"f", "m"}
    made = shared(module)
    arguments = numbers(made.lowered().program)
    program, got = ran(made, arguments)
    by_kind = {c.kind: c for c in program.collectives}
    assert by_kind[Kind.REDUCE_SCATTER].results[0].shape == (3, 32, 64)
    assert by_kind[Kind.ALL_GATHER].results[0].shape == (3, 64, 64)
    total = sum(arguments[0]) ** 2
    for device in range(2):
        np.testing.assert_array_equal(got.results[0][device], total @ arguments[1][device])


RESIDUAL = """
  x = f32[128,64] parameter(0)
  y = f32[128,64] parameter(1)
  w = f32[64,32] parameter(2)
  a = f32[128,64] all-reduce(y), ALL, to_apply=sum
  h = f32[128,64] add(a, x)
  ROOT e = f32[128,32] dot(h, w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
"""


def test_what_differs_between_devices_stays_whole() -> None:
    """Rows that another device has computed are the same only if all devices have the same residual."""
    assert not shares(partitioned(RESIDUAL, 2))
    ((_, region),) = shares(placed(partitioned(RESIDUAL, 2), REPLICATED))
    assert own(region) == {"h"}
    assert not shares(placed(partitioned(RESIDUAL, 2), HALVES))


LOOP = """
  x = f32[128,64] parameter(0)
  w = f32[64,64] parameter(1)
  zero = s32[] constant(0)
  t = (s32[], f32[128,64], f32[64,64]) tuple(zero, x, w)
  l = (s32[], f32[128,64], f32[64,64]) while(t), condition=cond, body=body
  ROOT r = f32[128,64] get-tuple-element(l), index=1
"""
BODY = """
body {
  p = (s32[], f32[128,64], f32[64,64]) parameter(0)
  i = s32[] get-tuple-element(p), index=0
  x = f32[128,64] get-tuple-element(p), index=1
  w = f32[64,64] get-tuple-element(p), index=2
  d = f32[128,64] dot(x, w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  a = f32[128,64] all-reduce(d), channel_id=1, use_global_device_ids=true, GROUPS
  h = f32[128,64] add(a, x)
  one = s32[] constant(1)
  j = s32[] add(i, one)
  ROOT o = (s32[], f32[128,64], f32[64,64]) tuple(j, NEXT, w)
}
cond {
  p = (s32[], f32[128,64], f32[64,64]) parameter(0)
  i = s32[] get-tuple-element(p), index=0
  last = s32[] constant(2)
  ROOT c = pred[] compare(i, last), direction=LT
}
""".replace("GROUPS", "replica_groups={{0,1}}, to_apply=sum")


def test_what_a_loop_carries() -> None:
    """The residual of a loop is the same on all devices where every iteration leaves it so."""
    module = placed(partitioned(LOOP, 2, BODY.replace("NEXT", "h")), REPLICATED)
    ((_, region),) = shares(module)
    assert own(region) == {"h"}
    made = shared(module)
    arguments = numbers(made.lowered().program)
    arguments[0][1] = arguments[0][0]
    _, got = ran(made, arguments)
    x, w = arguments[0][0], arguments[1]
    for _ in range(2):
        x = x + sum(x @ w[d] for d in range(2))
    for device in range(2):
        np.testing.assert_array_equal(got.results[0][device], x)
    assert not shares(placed(partitioned(LOOP, 2, BODY.replace("NEXT", "d")), REPLICATED))


def test_a_loop_that_works_row_by_row() -> None:
    """Each device runs it on its own rows; what it carries beside them is read by all."""
    more = """
body {
  p = (s32[], f32[128,64]) parameter(0)
  i = s32[] get-tuple-element(p), index=0
  x = f32[128,64] get-tuple-element(p), index=1
  one = s32[] constant(1)
  j = s32[] add(i, one)
  f = f32[] convert(j)
  b = f32[128,64] broadcast(f), dimensions={}
  m = f32[128,64] subtract(b, x)
  ROOT o = (s32[], f32[128,64]) tuple(j, m)
}
cond {
  p = (s32[], f32[128,64]) parameter(0)
  i = s32[] get-tuple-element(p), index=0
  last = s32[] constant(5)
  ROOT c = pred[] compare(i, last), direction=LT
}
"""
    module = partitioned(
        """
  x = f32[128,64] parameter(0)
  s = f32[128,64] all-reduce(x), ALL, to_apply=sum
  zero = s32[] constant(0)
  t = (s32[], f32[128,64]) tuple(zero, s)
  l = (s32[], f32[128,64]) while(t), condition=cond, body=body
  i = s32[] get-tuple-element(l), index=0
  y = f32[128,64] get-tuple-element(l), index=1
  ROOT r = (f32[128,64], s32[]) tuple(y, i)
""",
        2,
        more,
    )
    ((_, region),) = shares(module)
    assert own(region) == {"l"}
    made = shared(module)
    arguments = numbers(made.lowered().program)
    program, got = ran(made, arguments)
    assert kinds(program) == {Kind.REDUCE_SCATTER: 1, Kind.ALL_GATHER: 1}
    rows = sum(arguments[0])
    for i in range(1, 6):
        rows = i - rows
    for device in range(2):
        np.testing.assert_array_equal(got.results[0][device], rows)
        assert got.results[1][device] == 5


def test_a_sum_that_is_read_whole_stays() -> None:
    """A reduce-scatter with its all-gather right behind it would be the all-reduce again."""
    text = LAYER[: LAYER.index("  q =")] + "  ROOT e = f32[96,96] dot(res, res), "
    text += "lhs_contracting_dims={0}, rhs_contracting_dims={0}\n"
    assert not shares(partitioned(text, 2))


def test_rows_that_devices_do_not_divide_stay_whole() -> None:
    text = RESIDUAL.replace("128", "129").replace("129,64", "129,65").replace("f32[64,", "f32[65,")
    assert not shares(placed(partitioned(text, 2), REPLICATED))


def test_shares_are_taken_where_they_pay() -> None:
    """On its own rows alone a device computes half; the program that was decided on is made again."""
    module = replace(partitioned(COMBINED, 2), splits=None)
    made = module.compiled(OverlapPolicy(table(bytes_per_s=1e7, latency_s=1e-6)))
    assert made.source is not None and any(isinstance(d, Shared) for d in made.source.splits or ())
    said = {told.name: told.describe() for told in made.splits}
    assert "becomes a reduce-scatter and an all-gather" in said["all.1of3"]
    again = made.source.compiled(OverlapPolicy(table(1e12)))
    assert kinds(again.program) == kinds(made.program)
    assert kinds(again.program)[Kind.REDUCE_SCATTER] >= 2
    # Where each collective takes long to start, two for one do not pay.
    slow = module.compiled(OverlapPolicy(table(launch_s=1e-2)))
    assert slow.source is not None and slow.source.splits == ()
    assert slow.splits and not any(told.shared for told in slow.splits)


def test_a_step_of_jax_forward_and_backward() -> None:
    """Two layers with residuals and norms, tensor parallel by hand, against JAX's CPU backend."""

    def step(x: jax.Array, ups: jax.Array, downs: jax.Array) -> Any:
        def loss(x: jax.Array, ups: jax.Array, downs: jax.Array) -> jax.Array:
            for up, down in zip(ups, downs, strict=True):
                h = x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-3)
                x = x + lax.psum(jnp.tanh(h @ up) @ down, "x")
            return (x * x).mean()

        return jax.value_and_grad(loss, (1, 2))(x, ups, downs)

    over, specs = mesh(2), (P(), P(None, None, "x"), P(None, "x"))
    function = manual(step, over, specs, (P(), specs[1:]))
    normal = np.random.default_rng(0).standard_normal
    shapes = (256, 64), (2, 64, 32), (2, 32, 64)
    arguments = [normal(shape).astype("f4") / 4 for shape in shapes]
    module = compiled(function, *arguments, num_devices=2)
    assert isinstance(module.source, PartitionedModule)
    judge_program(shared(module.source).compiled(), function, over, specs, *arguments, exact=False)


def test_decisions_are_read_as_they_were_written() -> None:
    assert _decided(3, 1) == Shared(3, 1)
    assert _decided(3, 1, 4, 0) == Decision(3, 1, 4, False)


def test_the_least_cut_is_least() -> None:
    """Against all cuts of small random graphs."""
    rng = np.random.default_rng(0)
    for _ in range(40):
        edges = [(int(a), int(b), int(c)) for a, b, c in rng.integers(0, 7, (16, 3)) if a != b]
        network = Network()
        for _ in range(5):
            network.vertex()
        for edge in edges:
            network.edge(*edge)

        def cost(side: set[int], edges: list[tuple[int, int, int]] = edges) -> int:
            return sum(c for a, b, c in edges if a in side and b not in side)

        all_sides = [
            {0} | {v for v, taken in zip(range(2, 7), chosen, strict=True) if taken}
            for chosen in product((False, True), repeat=5)
        ]
        least = min(map(cost, all_sides))
        found = network.sources_side()
        assert 0 in found and 1 not in found
        assert cost(found) == least
        assert len(found) == max(len(side) for side in all_sides if cost(side) == least)
