"""Modules that contradict themselves are refused, by name of the instruction; those that do not are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from stretto.hlo_frontend.compile import compile_hlo
from stretto.hlo_frontend.graph import Module
from stretto.hlo_frontend.schema import HloModuleProto, OpSharding
from stretto.hlo_frontend.source import read_hlo
from stretto.hlo_frontend.text import parse_hlo_text
from stretto.hlo_frontend.verify import verify
from stretto.runtime.errors import InvalidProgramError, UnsupportedError

HEAD = """HloModule m, num_partitions=2
sum {
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT c = f32[] add(a, b)
}
three {
  a3 = f32[] parameter(0)
  b3 = f32[] parameter(1)
  c3 = f32[] parameter(2)
  ROOT d3 = f32[] add(a3, b3)
}
one {
  x1 = f32[4] parameter(0)
  ROOT y1 = f32[4] negate(x1)
}
other {
  x2 = f32[8] parameter(0)
  ROOT y2 = f32[8] negate(x2)
}
always {
  x3 = f32[4] parameter(0)
  ROOT y3 = pred[] constant(true)
}
ENTRY e {
  p = f32[4] parameter(0)
  q = f32[2,4] parameter(1)
  k = s32[] parameter(2)
  t = token[] after-all()
  v = s32[2] parameter(3)
"""
PERMUTE = "channel_id=1, source_target_pairs={{0,1}}"
GROUP = "channel_id=1, replica_groups={{0,1}}, use_global_device_ids=true"

# Lines behind those above, the last of them the root; what the error says.
CASES = {
    "add of two shapes": ("ROOT r = f32[4] add(p, q)", r"r \(add\): operand 1 is f32\[2,4\]"),
    "add of two types": ("ROOT r = f32[] add(k, k)", "operand 0 is s32"),
    "select by an integer": ("ROOT r = f32[4] select(p, p, p)", "selects by f32"),
    "compare that gives floats": ("ROOT r = f32[4] compare(p, p), direction=EQ", "gives no pred"),
    "broadcast": ("ROOT r = f32[3,5] broadcast(p), dimensions={1}", "cannot make"),
    "broadcast to one dimension twice": (
        "w = f32[4,4] broadcast(p), dimensions={1}\n ROOT r = f32[4,4] broadcast(w), dimensions={0,0}",
        "cannot make",
    ),
    "broadcast out of range": ("ROOT r = f32[4] broadcast(p), dimensions={7}", "cannot make"),
    "transpose": ("ROOT r = f32[2,4] transpose(q), dimensions={1,0}", "cannot make"),
    "slice": ("ROOT r = f32[9] slice(p), slice={[0:9]}", "cannot cut"),
    "concatenate": ("ROOT r = f32[9] concatenate(p, p), dimensions={0}", "8 rows"),
    "pad": ("z = f32[] constant(0)\n ROOT r = f32[4] pad(p, z), padding=1_1", "cannot make"),
    "iota": ("ROOT r = s32[4] iota(), iota_dimension=3", "no dimension"),
    "tuple": ("ROOT r = (f32[4], f32[3]) tuple(p, p)", "element 1 of its shape"),
    "element": (
        "w = (f32[4]) tuple(p)\n ROOT r = f32[5] get-tuple-element(w), index=0",
        "its shape",
    ),
    "copy": ("ROOT r = f32[5] copy(p)", "its shape"),
    "call": ("ROOT r = f32[4] call(q), to_apply=one", "operand q"),
    "while": ("ROOT r = f32[4] while(p), condition=always, body=other", "the parameter of other"),
    "while without pred": ("ROOT r = f32[4] while(p), condition=one, body=one", "result of one"),
    "conditional": (
        "ROOT r = f32[4] conditional(k, p, p), branch_computations={one, other}",
        "operand p",
    ),
    "reducer of three": (f"ROOT r = f32[4] all-reduce(p), to_apply=three, {GROUP}", "not two"),
    "reducer of arrays": (f"ROOT r = f32[4] all-reduce(p), to_apply=one, {GROUP}", "not two"),
    "all-reduce": (f"ROOT r = f32[5] all-reduce(p), to_apply=sum, {GROUP}", "differ in type"),
    "all-gather": (f"ROOT r = f32[9] all-gather(p), dimensions={{0}}, {GROUP}", "do not fit"),
    "all-gather of two": (
        f"ROOT r = f32[8] all-gather(p, p), dimensions={{0}}, {GROUP}",
        "differ in number",
    ),
    "all-to-all": (
        "ROOT r = f32[8] all-to-all(p), dimensions={0}, channel_id=1, replica_groups={{0,1}}",
        "differ in type",
    ),
    "all-to-all of parts": (
        "ROOT r = (f32[4], f32[2,4]) all-to-all(p, q), channel_id=1, replica_groups={{0,1}}",
        r"differ in type: f32\[4\], f32\[2,4\]",
    ),
    "broadcast between devices": (
        "ROOT r = f32[8] collective-broadcast(p), channel_id=1, replica_groups={{0,1}}",
        "differ in type",
    ),
    "broadcast of a token": (
        "ROOT r = token[] collective-broadcast(t), channel_id=1, replica_groups={{0,1}}",
        "differ in type",
    ),
    "permute": (f"ROOT r = f32[5] collective-permute(p), {PERMUTE}", "differ in type"),
    "permute of a tuple": (
        f"w = (f32[4]) tuple(p)\n ROOT r = (f32[4]) collective-permute(w), {PERMUTE}",
        "is a tuple",
    ),
    "done of nothing": ("ROOT r = f32[4] all-gather-done(p)", "ends p"),
    "done of another": (
        f"w = f32[4] all-reduce-start(p), to_apply=sum, {GROUP}\n"
        "ROOT r = f32[4] collective-permute-done(w)",
        "ends w",
    ),
    "what is in flight": (
        f"w = f32[4] all-reduce-start(p), to_apply=sum, {GROUP}\n ROOT r = f32[4] negate(w)",
        "reads w, which is still in flight",
    ),
    "a receive for an op": (
        "w = (f32[4], u32[], token[]) recv(t), channel_id=1\n"
        "ROOT r = (f32[4], u32[], token[]) opt-barrier(w)",
        "reads w, which is still in flight",
    ),
    "a copy of another size": (
        "w = (f32[5], f32[4], u32[]) copy-start(p)\n ROOT r = f32[5] copy-done(w)",
        r"w \(copy-start\): what it copies is f32\[5\]",
    ),
    "a copy that ends as another size": (
        "w = (f32[4], f32[4], u32[]) copy-start(p)\n ROOT r = f32[5] copy-done(w)",
        r"r \(copy-done\): its shape is f32\[5\]",
    ),
    "an element of a copy in flight": (
        "w = (f32[4], f32[4], u32[]) copy-start(p)\n ROOT r = u32[] get-tuple-element(w), index=2",
        "reads w, which is still in flight",
    ),
    "a copy that ends nothing": ("ROOT r = f32[4] copy-done(p)", "ends p"),
    "a result in flight": (
        f"ROOT w = f32[4] all-reduce-start(p), to_apply=sum, {GROUP}",
        "it is a result",
    ),
    "dot of sizes": (
        "ROOT r = f32[2,2] dot(q, q), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
        "cannot make",
    ),
    "dot out of range": (
        "ROOT r = f32[] dot(p, p), lhs_contracting_dims={5}, rhs_contracting_dims={0}",
        "lacks some",
    ),
    "reduce": (
        "z = f32[] constant(0)\n ROOT r = f32[4] reduce(p, z), dimensions={0}, to_apply=sum",
        "cannot make",
    ),
    "dynamic-slice": (
        "ROOT r = f32[9] dynamic-slice(p, k), dynamic_slice_sizes={9}",
        "cannot cut",
    ),
    "update": ("ROOT r = f32[4] dynamic-update-slice(p, q, k)", "cannot put"),
    "too many devices": (
        "ROOT r = f32[4] all-reduce(p), to_apply=sum, channel_id=1, "
        "replica_groups=[4294967296,1]<=[4294967296], use_global_device_ids=true",
        "at most",
    ),
}


def module(lines: str) -> bytes:
    return parse_hlo_text(f"{HEAD}{lines}\n}}\n")


@pytest.mark.parametrize(("lines", "reason"), CASES.values(), ids=CASES)
def test_what_does_not_fit_is_named(lines: str, reason: str) -> None:
    with pytest.raises(InvalidProgramError, match=reason):
        compile_hlo(module(lines), 1, 2)


@pytest.mark.parametrize(
    "lines",
    [
        "ROOT r = f32[4] clamp(z, p, z)",
        "ROOT r = f32[2,4] broadcast(p), dimensions={1}",
        "ROOT r = f32[4,3,2] broadcast(q), dimensions={2,0}",
        "ROOT r = f32[2,2] dynamic-slice(q, v), dynamic_slice_sizes={2,2}",
        "ROOT r = f32[2,2] dynamic-slice(q, k, k), dynamic_slice_sizes={2,2}",
        "ROOT r = f32[4] while(p), condition=always, body=one",
        "ROOT r = f32[4] conditional(k, p, p, p), branch_computations={one, one, one}",
        "ROOT r = f32[9] pad(p, z), padding=1_1_1",
        "ROOT r = f32[2] reduce(q, z), dimensions={1}, to_apply=sum",
        "ROOT r = f32[2] slice(p), slice={[0:4:2]}",
        "ROOT r = f32[8] bitcast(q)",
        "ROOT r = u8[4,4] bitcast-convert(p)",
        "ROOT r = f32[2,2] dot(q, q), lhs_contracting_dims={1}, rhs_contracting_dims={1}",
        f"ROOT r = f32[4] all-reduce(p), to_apply=sum, {GROUP}",
    ],
)
def test_what_fits_is_taken(lines: str) -> None:
    verify(Module.parse(module(f"z = f32[] constant(0)\n{lines}")))


PERMUTED = f"ROOT r = f32[4] collective-permute(p), {PERMUTE}"


def edited(lines: str, edit: Callable[[Any], None]) -> bytes:
    """A module whose root was changed behind the parser's back, who ends the process at some mistakes."""
    proto = HloModuleProto.FromString(module(lines))
    edit(proto.computations[-1].instructions[-1])
    return bytes(proto.SerializeToString())


def _longer(root: Any) -> None:
    root.shape.dimensions[0] = 5


def _second(root: Any) -> None:
    root.tuple_index = 1


def _wider(root: Any) -> None:
    root.shape.tuple_shapes.add().CopyFrom(root.shape.tuple_shapes[0])


def _by_floats(root: Any) -> None:
    root.operand_ids[0] = root.operand_ids[1]


def _branches(root: Any) -> None:
    del root.operand_ids[-1]


def _layout(root: Any) -> None:
    root.shape.layout.minor_to_major[:] = [3]


def _negative(root: Any) -> None:
    root.shape.dimensions[0] = -4


@pytest.mark.parametrize(
    ("lines", "edit", "reason"),
    [
        ("ROOT r = f32[4] reshape(p)", _longer, r"cannot make f32\[5\] of f32\[4\]"),
        ("ROOT r = f32[4] bitcast(p)", _longer, r"cannot make f32\[5\] of f32\[4\]"),
        ("ROOT r = f32[4] copy(p)", _negative, r"impossible shape f32\[-4\]"),
        (
            "w = (f32[4]) tuple(p)\nROOT r = f32[4] get-tuple-element(w), index=0",
            _second,
            "element 1",
        ),
        ("ROOT r = (f32[4]) tuple(p)", _wider, "for 1 operands"),
        (
            "ROOT r = f32[4] conditional(k, p, p), branch_computations={one, one}",
            _by_floats,
            "its selector is f32",
        ),
        (
            "ROOT r = f32[4] conditional(k, p, p), branch_computations={one, one}",
            _branches,
            "1 operands behind the selector, for 2 branches",
        ),
        (PERMUTED, _layout, r"impossible layout \[3\]"),
    ],
)
def test_what_only_a_proto_can_say(lines: str, edit: Callable[[Any], None], reason: str) -> None:
    with pytest.raises(InvalidProgramError, match=reason):
        compile_hlo(edited(lines, edit), 1, 2)


def _unknown_operand(root: Any) -> None:
    root.operand_ids[0] = 12345


def _unknown_opcode(root: Any) -> None:
    root.opcode = "no-such-opcode"


@pytest.mark.parametrize("edit", [_unknown_operand, _unknown_opcode])
def test_protos_that_xla_cannot_load(edit: Callable[[Any], None]) -> None:
    with pytest.raises(InvalidProgramError, match="XLA cannot load the module: "):
        read_hlo(edited(PERMUTED, edit))


def _order_of_a_sharding(root: Any) -> None:
    tiles = OpSharding(type=3, tile_assignment_dimensions=[2, 2], iota_reshape_dims=[2, 2])
    tiles.iota_transpose_perm.extend([1, 16])
    root.sharding = OpSharding(type=2, tuple_shardings=[tiles]).SerializeToString()


def _order_of_groups(root: Any) -> None:
    groups = root.iota_collective_device_list
    groups.num_replica_groups, groups.num_devices_per_group = 1, 4
    groups.iota_reshape_dims.extend([2, 2])
    groups.iota_transpose_perm.extend([1, 16])


@pytest.mark.parametrize("edit", [_order_of_a_sharding, _order_of_groups])
def test_orders_of_devices_that_xla_would_read_without_end(edit: Callable[[Any], None]) -> None:
    with pytest.raises(InvalidProgramError, match=r"in the order \[1, 16\] of 2 dimensions"):
        read_hlo(edited(PERMUTED, edit))


def test_negative_numbers_of_stack_frames_are_of_none() -> None:
    def edit(root: Any) -> None:
        root.metadata.stack_frame_id = -3

    assert compile_hlo(edited(PERMUTED, edit), 1, 2).program.collectives[0].source == ""


def test_more_devices_than_any_job_has() -> None:
    with pytest.raises(InvalidProgramError, match="there are at most 1048576 devices"):
        compile_hlo(module("ROOT r = f32[4] copy(p)"), 1, 1 << 40)


def test_sends_and_receives_in_one_async_start() -> None:
    pairs = 'channel_id=1, frontend_attributes={_xla_send_recv_source_target_pairs="{{0,1}}"}'
    flying = "(f32[4], u32[], token[])"
    text = f"""HloModule m, num_partitions=2
    both {{
      a = f32[4] parameter(0)
      b = token[] parameter(1)
      s = {flying} send(a, b), {pairs}
      r = {flying} recv(b), {pairs}
      ROOT o = ({flying}, {flying}) tuple(s, r)
    }}
    ENTRY e {{
      p = f32[4] parameter(0)
      t = token[] after-all()
      w = ((f32[4], token[]), ({flying}, {flying}), s32[]) async-start(p, t), calls=both
      ROOT d = ({flying}, {flying}) async-done(w)
    }}
    """
    with pytest.raises(UnsupportedError, match=r"^w \(async-start\): it groups send s, recv r, as"):
        verify(Module.parse(parse_hlo_text(text)))


def test_a_computation_that_calls_itself_by_way_of_another_one() -> None:
    text = """HloModule m

f {
  x = f32[] parameter(0)
  ROOT fx = f32[] negate(x)
}

g {
  y = f32[] parameter(0)
  ROOT gy = f32[] call(y), to_apply=f
}

ENTRY e {
  z = f32[] parameter(0)
  ROOT r = f32[] call(z), to_apply=g
}
"""
    proto = HloModuleProto.FromString(parse_hlo_text(text))
    assert Module.parse(proto.SerializeToString()).entry.name == "e"
    f, g, _ = proto.computations
    assert (f.name, g.name) == ("f", "g")
    f.instructions[-1].opcode = "call"
    f.instructions[-1].called_computation_ids.append(g.id)
    with pytest.raises(InvalidProgramError, match=r"computation (f|g) calls itself"):
        Module.parse(proto.SerializeToString())
