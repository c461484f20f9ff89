"""HLO given directly: every spelling of a collective, and errors that name the instruction."""

from __future__ import annotations

import numpy as np
import pytest
from interpreter import Interpreter

from stretto.collectives.ops import Kind
from stretto.hlo_frontend.compile import compile_hlo
from stretto.runtime.errors import InvalidProgramError, UnsupportedError
from stretto.runtime.program import Start, Wait

ADD = """
add {
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT s = f32[] add(a, b)
}
"""


def program(body: str, partitions: int = 4, head: str = "", replicas: int = 1):
    text = f"HloModule m\n{ADD}\n{head}\nENTRY main {{\n{body}\n}}\n"
    return compile_hlo(text, replicas, partitions).program


def run(body: str, *arguments, head: str = "", partitions: int = 4):
    interpreter = Interpreter(program(body, partitions, head))
    return interpreter.run(*[list(np.asarray(a)) for a in arguments])


X = np.arange(32, dtype=np.float32).reshape(4, 8)


def test_all_reduce_start_and_done():
    (got,) = run(
        """
        p = f32[8] parameter(0)
        s = f32[8] all-reduce-start(p), channel_id=1, use_global_device_ids=true,
          replica_groups={{0,1},{2,3}}, to_apply=add
        d = f32[8] all-reduce-done(s)
        ROOT r = f32[8] negate(d)
        """,
        X,
    )
    np.testing.assert_array_equal(got, -np.repeat(X.reshape(2, 2, 8).sum(1), 2, axis=0))


def test_all_gather_start_and_done_in_group_order():
    (got,) = run(
        """
        p = f32[8] parameter(0)
        s = (f32[8], f32[32]) all-gather-start(p), channel_id=1, use_global_device_ids=true,
          replica_groups={{3,1,0,2}}, dimensions={0}
        ROOT d = f32[32] all-gather-done(s)
        """,
        X,
    )
    np.testing.assert_array_equal(got[0], X[[3, 1, 0, 2]].reshape(-1))


def test_permute_start_and_done():
    (got,) = run(
        """
        p = f32[8] parameter(0)
        s = (f32[8], f32[8], u32[], u32[]) collective-permute-start(p), channel_id=1,
          source_target_pairs={{0,1},{1,2}}
        ROOT d = f32[8] collective-permute-done(s)
        """,
        X,
    )
    np.testing.assert_array_equal(got, np.stack([0 * X[0], X[0], X[1], 0 * X[0]]))


def test_async_start_around_reduce_scatter():
    (got,) = run(
        """
        p = f32[8] parameter(0)
        s = ((f32[8]), f32[2], s32[]) async-start(p), calls=wrapped
        u = ((f32[8]), f32[2], s32[]) async-update(s)
        ROOT d = f32[2] async-done(u)
        """,
        X,
        head="""
        wrapped {
          w = f32[8] parameter(0)
          ROOT r = f32[2] reduce-scatter(w), channel_id=1, use_global_device_ids=true,
            replica_groups={{0,1,2,3}}, dimensions={0}, to_apply=add
        }
        """,
    )
    np.testing.assert_array_equal(got, X.sum(0).reshape(4, 2))


NESTED = """
  negated {
    n = f32[8] parameter(0)
    ROOT m = f32[8] negate(n)
  }
  inner {
    x = f32[8] parameter(0)
    %s
    ROOT z = f32[8] add(x, y)
  }
  body {
    c = (s32[], f32[8]) parameter(0)
    i = s32[] get-tuple-element(c), index=0
    v = f32[8] get-tuple-element(c), index=1
    one = s32[] constant(1)
    j = s32[] add(i, one)
    w = f32[8] call(v), to_apply=inner
    ROOT next = (s32[], f32[8]) tuple(j, w)
  }
  more {
    d = (s32[], f32[8]) parameter(0)
    k = s32[] get-tuple-element(d), index=0
    two = s32[] constant(2)
    ROOT less = pred[] compare(k, two), direction=LT
  }
"""


@pytest.mark.parametrize(
    ("lines", "factor", "count"),
    [
        ("s = (f32[8], f32[8], u32[]) copy-start(x)\n y = f32[8] copy-done(s)", 4, 1),
        (
            "s = ((f32[8]), f32[8], u32[]) async-start(x), calls=negated\n"
            "u = ((f32[8]), f32[8], u32[]) async-update(s)\n y = f32[8] async-done(u)",
            0,
            2,
        ),
    ],
    ids=["copy", "async"],
)
def test_asynchronous_compute_inside_of_a_segment(lines, factor, count):
    """Computations that do not communicate stay whole: what is asynchronous in them is so no more."""
    body = """
        p = f32[8] parameter(0)
        zero = s32[] constant(0)
        init = (s32[], f32[8]) tuple(zero, p)
        loop = (s32[], f32[8]) while(init), condition=more, body=body,
          backend_config={"known_trip_count":{"n":"2"}}
        q = f32[8] get-tuple-element(loop), index=1
        ROOT r = f32[8] collective-permute(q), channel_id=1, source_target_pairs={{0,1},{1,2}}
    """
    (got,) = run(body, X, head=NESTED % lines)
    np.testing.assert_array_equal(got, factor * np.stack([0 * X[0], X[0], X[1], 0 * X[0]]))
    (segment,) = program(body, head=NESTED % lines).segments
    # The counter and what is added in each iteration, and the comparison of the loop.
    assert segment.arithmetic == 2 * (count + 2)
    assert segment.iterations == 2


def test_tuple_all_to_all_and_variadic_forms():
    got = run(
        """
        p = f32[8] parameter(0)
        q = f32[8] parameter(1)
        a = (f32[8], f32[8]) all-to-all(p, q), channel_id=1, replica_groups={{0,1},{2,3}}
        x = f32[8] get-tuple-element(a), index=0
        y = f32[8] get-tuple-element(a), index=1
        v = (f32[8], f32[8]) all-reduce(x, y), channel_id=1, use_global_device_ids=true,
          replica_groups=[1,4]<=[4], to_apply=add
        ROOT t = (f32[8], (f32[8], f32[8])) tuple(y, v)
        """,
        X,
        -X,
    )
    # Operand i of a member goes to member i; result i comes from member i.
    np.testing.assert_array_equal(got[0], [X[1], -X[1], X[3], -X[3]])
    np.testing.assert_array_equal(got[1][0], 0 * X[0])
    np.testing.assert_array_equal(got[2][3], 0 * X[0])


def test_sends_are_awaited_after_receives_that_follow_them():
    made = program(
        """
        p = f32[8] parameter(0)
        t = token[] after-all()
        s = (f32[8], u32[], token[]) send(p, t), channel_id=1,
          frontend_attributes={_xla_send_recv_source_target_pairs={{0,1},{1,0}}}
        sd = token[] send-done(s), channel_id=1
        r = (f32[8], u32[], token[]) recv(sd), channel_id=1,
          frontend_attributes={_xla_send_recv_source_target_pairs={{0,1},{1,0}}}
        rd = (f32[8], token[]) recv-done(r), channel_id=1
        ROOT g = f32[8] get-tuple-element(rd), index=0
        """
    )
    steps = made.body.instructions
    starts = {made.collectives[i.collective].kind: i.event for i in steps if isinstance(i, Start)}
    assert list(starts) == [Kind.SEND, Kind.RECV]
    assert [i.event for i in steps if isinstance(i, Wait)] == [starts["recv"], starts["send"]]
    assert made.collectives[0].pairs == ((0, 1), (1, 0))


def test_control_dependencies_order_collectives():
    body = """
        p = f32[8] parameter(0)
        a = f32[8] all-reduce(p), channel_id=1, use_global_device_ids=true,
          replica_groups={{0,1,2,3}}, to_apply=add%s
        b = f32[8] collective-permute(p), channel_id=1, source_target_pairs={{0,1}}%s
        ROOT r = f32[8] add(a, b)
        """
    made = program(body % ("", ", control-predecessors={a}"))
    assert [c.kind for c in made.collectives] == [Kind.ALL_REDUCE, Kind.PERMUTE]


@pytest.mark.parametrize(
    ("error", "message", "body"),
    [
        (
            InvalidProgramError,
            r"r \(all-reduce.*id 7 in its replica groups is out of range",
            "p = f32[8] parameter(0)\n ROOT r = f32[8] all-reduce(p), channel_id=1, "
            "use_global_device_ids=true, replica_groups={{0,7}}, to_apply=add",
        ),
        (
            InvalidProgramError,
            r"r \(collective-permute.*source 0 occurs in more than one pair",
            "p = f32[8] parameter(0)\n ROOT r = f32[8] collective-permute(p), channel_id=1, "
            "source_target_pairs={{0,1},{0,2}}",
        ),
        (
            InvalidProgramError,
            r"do not fit groups of 4 along dimension 0",
            "p = f32[8] parameter(0)\n ROOT r = f32[8] all-gather(p), channel_id=1, "
            "use_global_device_ids=true, replica_groups={{0,1,2,3}}, dimensions={0}",
        ),
        (
            UnsupportedError,
            r"x \(infeed.*feed arrays as arguments",
            "t = token[] after-all()\n x = (f32[8], token[]) infeed(t)\n "
            "ROOT r = f32[8] get-tuple-element(x), index=0",
        ),
        (
            UnsupportedError,
            r"out \(send.*transfers to the host",
            "p = f32[8] parameter(0)\n t = token[] after-all()\n out = (f32[8], u32[], token[]) "
            "send(p, t), channel_id=2, is_host_transfer=true\n ROOT d = token[] send-done(out), "
            "channel_id=2, is_host_transfer=true",
        ),
        (
            InvalidProgramError,
            r"r \(call.*hands 1 operands to add, which has 2 parameters",
            "p = f32[] parameter(0)\n ROOT r = f32[] call(p), to_apply=add",
        ),
        (
            UnsupportedError,
            r"cannot be written as StableHLO|not supported",
            "ROOT r = u64[2] rng-get-and-update-state(), delta=1",
        ),
    ],
)
def test_bad_programs_are_refused_by_name(error, message, body):
    with pytest.raises(error, match=message):
        program(body)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("f = (f32[8], token[]) infeed(t)", r"f \(infeed\): not supported; feed arrays"),
        ("f = token[] outfeed(x, t)", r"f \(outfeed\): not supported; return arrays"),
        (
            'f = f32[2] custom-call(x), custom_call_target="SPMDFullToShardShape"',
            r"f \(custom-call\): SPMDFullToShardShape",
        ),
    ],
)
def test_what_is_refused_is_refused_inside_of_computations_too(line, message):
    head = NESTED % f"t = token[] after-all()\n {line}\n y = f32[8] negate(x)"
    with pytest.raises(UnsupportedError, match=message):
        program(
            """
            p = f32[8] parameter(0)
            zero = s32[] constant(0)
            init = (s32[], f32[8]) tuple(zero, p)
            loop = (s32[], f32[8]) while(init), condition=more, body=body
            ROOT r = f32[8] get-tuple-element(loop), index=1
            """,
            head=head,
        )


@pytest.mark.parametrize("bad", ["", "HloModule", "not hlo at all", "HloModule m\nENTRY e { }"])
def test_text_that_is_not_hlo(bad):
    with pytest.raises(InvalidProgramError):
        compile_hlo(bad, 1, 2)


@pytest.mark.parametrize("bad", [b"", b"\x00", b"\xff" * 40, b"garbage"])
def test_bytes_that_are_not_hlo(bad):
    with pytest.raises(InvalidProgramError):
        compile_hlo(bad, 1, 2)


def test_replicas_reduce_within_their_partition():
    made = program(
        """
        p = f32[8] parameter(0)
        ROOT r = f32[8] all-reduce(p), replica_groups={{0,1}}, to_apply=add
        """,
        partitions=2,
        replicas=2,
    )
    assert made.collectives[0].groups == ((0, 2), (1, 3))


def test_source_line_of_both_forms_of_metadata():
    made = program(
        """
        p = f32[8] parameter(0)
        ROOT r = f32[8] collective-permute(p), channel_id=1, source_target_pairs={{0,1}},
          metadata={source_file="train.py" source_line=12}
        """
    )
    assert made.collectives[0].source == "train.py:12"


@pytest.mark.parametrize(
    "target", ["SPMDFullToShardShape", "SPMDShardToFullShape", "xla.sdy.GlobalToLocalShape"]
)
def test_modules_that_are_not_partitioned_are_refused(target):
    with pytest.raises(
        UnsupportedError, match=rf"shard \(custom-call\): {target}.*not partitioned"
    ):
        program(
            f"""
            p = f32[8] parameter(0)
            shard = f32[2] custom-call(p), custom_call_target="{target}"
            ROOT r = f32[2] all-reduce(shard), channel_id=1, use_global_device_ids=true,
              replica_groups={{{{0,1,2,3}}}}, to_apply=add
            """
        )


@pytest.mark.parametrize("root", ["and(p, i)", "copy(i)"])
def test_what_makes_data_is_named_too(root):
    with pytest.raises(UnsupportedError, match=r"^i \(iota\): cannot be written as StableHLO"):
        program(
            f"p = pred[8] parameter(0)\n i = pred[8] iota(), iota_dimension=0\n ROOT r = pred[8] {root}"
        )


DIVIDED = "sharding={devices=[4]<=[4]}"


@pytest.mark.parametrize(
    "root",
    [
        f"ROOT r = f32[8] negate(p), {DIVIDED}",
        "n = f32[8] negate(p)\n ROOT r = (f32[8], f32[8]) tuple(n, p), sharding={{replicated}, "
        "{devices=[4]<=[4]}}",
    ],
)
def test_modules_whose_results_are_yet_to_be_divided_are_refused(root):
    body = f"p = f32[8] parameter(0), {DIVIDED}\n {root}"
    with pytest.raises(UnsupportedError, match=r"r \(\w+\): its sharding .*not partitioned yet"):
        program(body)
    assert len(program(body, partitions=1, replicas=4).segments) == 1


@pytest.mark.parametrize("root", ["negate(p)", f"copy(p), {DIVIDED}"])
def test_shardings_that_the_partitioner_leaves(root):
    made = program(f"p = f32[8] parameter(0), {DIVIDED}\n ROOT r = f32[8] {root}")
    assert made.num_partitions == 4


def test_a_transfer_that_ends_in_the_next_iteration_is_refused():
    state = "(s32[], (f32[8], u32[], token[]))"
    head = f"""
    body {{
      c = {state} parameter(0)
      i = s32[] get-tuple-element(c), index=0
      begun = (f32[8], u32[], token[]) get-tuple-element(c), index=1
      ended = (f32[8], token[]) recv-done(begun), channel_id=1
      t = token[] after-all()
      again = (f32[8], u32[], token[]) recv(t), channel_id=1
      ROOT n = {state} tuple(i, again)
    }}
    more {{
      d = {state} parameter(0)
      ROOT m = pred[] constant(false)
    }}
    """
    with pytest.raises(UnsupportedError, match=r"ended \(recv-done\): ends begun.*in one"):
        program(
            f"""
            t0 = token[] after-all()
            k = s32[] constant(0)
            first = (f32[8], u32[], token[]) recv(t0), channel_id=1
            init = {state} tuple(k, first)
            w = {state} while(init), condition=more, body=body
            ROOT r = s32[] get-tuple-element(w), index=0
            """,
            head=head,
        )


def test_pairs_out_of_range_say_what_they_count():
    with pytest.raises(InvalidProgramError, match=r"source 1 .* replicas \(it has no channel_id\)"):
        program(
            """
            p = f32[8] parameter(0)
            ROOT r = f32[8] collective-permute(p), source_target_pairs={{0,1},{1,0}}
            """
        )
    with pytest.raises(InvalidProgramError, match=r"target 4 .* partitions, of which there are 4"):
        program(
            """
            p = f32[8] parameter(0)
            ROOT r = f32[8] collective-permute(p), channel_id=1, source_target_pairs={{0,4}}
            """
        )
