"""Which parts of a program are code that calls its collectives where it runs on GPUs, over NCCL."""

from __future__ import annotations

from stretto.hlo_frontend.compile import compile_hlo
from stretto.hlo_frontend.native import Native, NativePolicy, native
from stretto.runtime.program import Start, instructions

_MODULE = """
HloModule m, replica_count=1, num_partitions=2, entry_computation_layout={(f32[4]{0})->f32[4]{0}}

%sum (a: DTYPE[], b: DTYPE[]) -> DTYPE[] {
  %a = DTYPE[] parameter(0)
  %b = DTYPE[] parameter(1)
  ROOT %r = DTYPE[] REDUCER(%a, %b)
}

%body (p: (f32[4])) -> (f32[4]) {
  %p = (f32[4]{0}) parameter(0)
  %x = f32[4]{0} get-tuple-element(%p), index=0
  %zero = f32[] constant(0)
  %own = DTYPE[SIZE]{0} FROM
  %all = DTYPE[SIZE]{0} all-reduce(%own), channel_id=2, replica_groups={{0,1}}, \
use_global_device_ids=true, to_apply=%sum
  %part = DTYPE[4]{0} slice(%all), slice={[0:4]}
  %back = f32[4]{0} convert(%part)
  ROOT %t = (f32[4]{0}) tuple(%back)
}

%condition (p: (f32[4])) -> pred[] {
  %p = (f32[4]{0}) parameter(0)
  %x = f32[4]{0} get-tuple-element(%p), index=0
  %first = f32[1]{0} slice(%x), slice={[0:1]}
  %one = f32[] reshape(%first)
  %limit = f32[] constant(100)
  ROOT %less = pred[] compare(%one, %limit), direction=LT
}

%plain (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %r = f32[] add(%a, %b)
}

ENTRY %main (x: f32[4]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  %twice = f32[4]{0} add(%x, %x)
  %before = f32[4]{0} all-reduce(%twice), channel_id=1, replica_groups={{0,1}}, \
use_global_device_ids=true, to_apply=%plain
  %t = (f32[4]{0}) tuple(%before)
  %loop = (f32[4]{0}) while(%t), condition=%condition, body=%body
  ROOT %y = f32[4]{0} get-tuple-element(%loop), index=0
}
"""


def _made(
    reducer: str, dtype: str = "f32", size: int = 4, policy: NativePolicy | None = None
) -> Native:
    """The collective of the loop reduces so many elements of a type."""
    own = "convert(%x)" if size == 4 else f"pad(%x, %zero), padding=0_{size - 4}"
    text = _MODULE.replace("FROM", own).replace("DTYPE", dtype).replace("SIZE", str(size))
    text = text.replace("REDUCER", reducer)
    return native(compile_hlo(text, 1, 2).program, policy or NativePolicy.over_nccl())


def test_a_loop_is_code_with_what_is_beside_it() -> None:
    made = _made("add")
    assert made.regions == (made.program.name,)
    run = made.program.single_run
    assert run is not None
    sites = made.program.segments[run.segment].sites
    assert [made.program.collectives[site].name for site in sites] == ["before", "all"]


def test_without_a_loop_a_program_is_walked() -> None:
    """However many collectives it has: the walk is ahead of the GPU."""
    entry = _MODULE[_MODULE.index("ENTRY") :]
    many = "".join(
        f"  %reduced{k} = f32[4]{{0}} all-reduce(%{before}), channel_id={k + 2}, replica_groups={{{{0,1}}}}, "
        f"use_global_device_ids=true, to_apply=%plain\n  %h{k} = f32[4]{{0}} negate(%reduced{k})\n"
        for k, before in enumerate(["before", *(f"h{k}" for k in range(19))])
    )
    last = "  ROOT %y = f32[4]{0} add(%h19, %h19)\n}\n"
    straight = entry[: entry.index("  %t =")] + many + last
    head = _MODULE[: _MODULE.index("%sum")] + _MODULE[_MODULE.index("%plain") :]
    program = compile_hlo(head[: head.index("ENTRY")] + straight, 1, 2).program
    assert not native(program, NativePolicy.over_nccl()).regions
    assert native(program, NativePolicy.of(1, 2, 1)).regions


def test_on_cpus_all_of_it_is_code() -> None:
    made = _made("add", policy=NativePolicy.of(1, 2, 1))
    assert not any(isinstance(i, Start) for i in instructions(made.program.body))


def test_a_loop_with_what_nccl_lacks_is_walked_and_says_why() -> None:
    """NCCL's maximum of floats ignores NaN, and HLO's does not; that of integers is HLO's."""
    made = _made("maximum")
    assert not made.regions
    assert "all-reduce %all: NCCL has no way for it" in dict(made.refused).values()
    assert _made("maximum", "s32").regions


def test_a_loop_of_large_collectives_is_walked() -> None:
    made = _made("add", size=1 << 19)
    assert not made.regions
    assert any("it moves 2097152 bytes" in why for why in dict(made.refused).values())
