"""Steps in schedules with heads that all stages compute or that a conditional has, and counted numbers."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import training_steps
from interpreter import Interpreter
from jax import lax
from random_steps import Step
from schedule_judges import compare_in, judge, refused
from training_steps import Draw

from stretto.hlo_frontend.compile import compile_hlo
from stretto.hlo_frontend.graph import Module
from stretto.hlo_frontend.pipelines import indexed, members
from stretto.hlo_frontend.pipelines.emit import Editor
from stretto.hlo_frontend.pipelines.rows import rounds
from stretto.hlo_frontend.text import parse_hlo_text

# A head that all stages compute, of what the last one gave to all.

EVERY = ("1f1b", "zb_h1", "interleaved_1f1b")
SHARED = {
    "psum": (Draw(shared="psum", loss="squares", microbatches=3), EVERY),
    "psum-alike": (
        Draw(shared="psum", alike=True, loss="squares", stages=4, microbatches=5), EVERY[:1]
    ),
    "psum-data": (
        Draw(shared="psum", axes="dx", loss="squares", inside=True, collect="scan"), EVERY[:1]
    ),
    "psum-tensors": (Draw(shared="psum", axes="yx", loss="squares", alike=True), EVERY[:1]),
    "psum-cross": (Draw(shared="psum", stages=3, mask="where"), EVERY[:1]),
    "gather": (Draw(shared="gather", loss="squares", stages=3, inside=True), EVERY[:1]),
    "gather-cross": (Draw(shared="gather", alike=True, collect="scan"), EVERY[:1]),
}  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize(("d", "schedules"), SHARED.values(), ids=SHARED)
def test_a_head_that_all_stages_compute(d, schedules):
    """What the backward pass begins with is summed up over stages; the last one computes it for all."""
    (report,) = judge(d, *schedules)["1f1b"].module.interleaved
    assert report.alive[0] == min(d.stages, d.microbatches) == report.rows


@pytest.mark.thorough
@pytest.mark.parametrize("stages", [2, 3])
def test_what_other_stages_give_is_not_zeros(monkeypatch, stages):
    """The loss is masked on other stages: their gradient is 0 * x, NaN where x is infinite, and is added."""

    def large(d, head, h, wanted):
        scale = np.ones(h.shape, np.float32)
        scale[1, 0, 0] = 1e30
        return jnp.sum((h * scale * scale) ** 2)

    monkeypatch.setattr(training_steps, "loss_of", large)
    d = Draw(shared="psum", loss="squares", stages=stages, microbatches=3)
    step = Step(d)
    last = step.written[step.paths.index("[1]['layers']['down']")][stages - 1]
    assert np.isnan(last[-1, :, 0]).all() and not np.isinf(last).any()  # infinite without the zeros
    judge(d)


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_a_sum_of_the_same_number_is_the_same_in_any_order(stages):
    """`members.EXACT`: for all numbers of a binade, which are like those of any other."""
    x = np.arange(1 << 23, 1 << 24, dtype=np.int64).astype(np.float32)

    def sums(count: int) -> list[np.ndarray]:
        if count == 1:
            return [x]
        return [a + b for n in range(1, count) for a in sums(n) for b in sums(count - n)]

    first, *others = sums(stages)
    assert stages <= members.EXACT and all(np.array_equal(first, other) for other in others)


def test_sums_of_more_stages_may_round():
    d = Draw(shared="psum", alike=True, loss="squares", stages=5)
    (report,) = Step(d).in_schedule("1f1b").interleaved
    assert (report.why, report.rounds) == ("", "a head is computed row by row")


UNDER = {
    "squares": Draw(under=True, loss="squares", stages=3),
    "cross": Draw(under=True, axes="dx", inside=True, collect="scan"),
    "psum": Draw(under=True, shared="psum", stages=4, microbatches=5, mask="where"),
    "gather": Draw(under=True, shared="gather", inside=True, again="layer"),
}


@pytest.mark.thorough
@pytest.mark.parametrize("d", UNDER.values(), ids=UNDER)
def test_a_head_under_a_conditional(d):
    """Behind the loop, on the last stage alone, as its gradient is."""
    found = compare_in(d, "1f1b")["1f1b"]
    (report,) = found.module.interleaved
    one_row = d.loss == "squares"
    assert report.rounds == (
        "a head under lax.cond is computed apart" if one_row else "a head is computed row by row"
    )


@pytest.mark.thorough
def test_what_other_stages_do_not_give_is_zeros(monkeypatch):
    """Under a conditional the gradient of other stages is no 0 * x."""

    def large(d, head, h, wanted):
        scale = np.ones(h.shape, np.float32)
        scale[1, 0, 0] = 1e30
        return jnp.sum((h * scale * scale) ** 2)

    monkeypatch.setattr(training_steps, "loss_of", large)
    d = Draw(shared="psum", under=True, loss="squares", stages=3, microbatches=3, layers=1)
    step = Step(replace(d, layers=2))
    assert not any(np.isnan(g).any() for g in step.written[step.paths.index("[1]['head']")])
    step.judged("1f1b")


COUNTED = {
    "cond": (Draw(counted=True, head="cond", microbatches=5), EVERY),
    "cond-data": (
        Draw(counted=True, head="cond", axes="xd", inside=True, collect="scan"), EVERY[:1]
    ),
    "cond-metric": (
        Draw(counted=True, head="cond", stages=3, metric=True, again="stage"), EVERY[:1]
    ),
    "where": (Draw(counted=True, head="where", loss="squares"), EVERY[:1]),
}  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize(("d", "schedules"), COUNTED.values(), ids=COUNTED)
def test_a_number_that_the_loop_counts(d, schedules):
    """The loss is divided by it behind the loop, so that the backward pass begins with it."""
    judge(d, *schedules)


# Heads with reduces of several arrays, which have a result for each.

ACCURACY = {
    "cross": (Draw(accuracy=True, stages=3), "1f1b"),
    "of-zeros": (Draw(accuracy=True, shared="psum", loss="smooth", collect="scan"), "zb_h1"),
    "chunks": (Draw(accuracy=True, dtype="bfloat16", axes="dx"), "interleaved_1f1b"),
    "in-the-loop": (Draw(accuracy=True, head="where", microbatches=3), "1f1b"),
}


@pytest.mark.thorough
@pytest.mark.parametrize(("d", "schedule"), ACCURACY.values(), ids=ACCURACY)
def test_an_accuracy_beside_the_loss(d, schedule):
    """XLA makes one reduce of an argmax and of the maximum that a softmax subtracts."""
    judge(d, schedule)


def weighted(monkeypatch, dimensions):
    """The step's loss is squares of outputs, weighted by results of a reduce of three arrays along
    ``dimensions`` of [rows, microbatches, width]."""

    def largest(one, other):
        """The largest value, its double and its place."""
        more = one[0] >= other[0]
        return tuple(jnp.where(more, a, b) for a, b in zip(one, other, strict=True))

    def loss_of(d, head, h, wanted):
        x = jnp.moveaxis(lax.stop_gradient(h), 0, 1)
        place = lax.broadcasted_iota(jnp.int32, x.shape, 2)
        begins = np.float32(-1), np.float32(-2), np.int32(0)
        value, double, place = lax.reduce((x, x * 2, place), begins, largest, dimensions)
        return jnp.sum((double + jnp.sin(value) * place) * (h**2).sum((1, 2)))

    monkeypatch.setattr(training_steps, "loss_of", loss_of)


@pytest.mark.thorough
def test_a_reduce_of_several_arrays(monkeypatch):
    weighted(monkeypatch, (0, 2))
    for found in compare_in(Draw(microbatches=3), "1f1b", "interleaved_1f1b").values():
        assert found.module.interleaved[0].rounds == "a head is computed row by row"


@pytest.mark.thorough
def test_a_reduce_of_several_arrays_over_microbatches(monkeypatch):
    weighted(monkeypatch, (0, 1))
    assert "the rows of microbatches are not separate" in refused(Draw(width=4))


# Heads that take elements by their numbers, whose gradients are scatters.


def chosen(h, head, wanted):
    """The logarithm of the probability of each row's class."""
    return jnp.take_along_axis(jax.nn.log_softmax(h @ head), wanted[..., None], -1)[..., 0]


def clipped_policy(h, head, wanted):
    """Of proximal policy optimization; the reference is another policy of the same actions."""
    found = chosen(h, head, wanted)
    old, gain = -2.5 - 0.1 * (wanted % 3), jnp.sin(wanted * 1.0)
    ratio = jnp.exp(found - old)
    return -jnp.minimum(ratio * gain, jnp.clip(ratio, 0.8, 1.2) * gain) + 0.1 * (
        ratio - found + old
    )


def focal(h, head, wanted):
    share = jnp.exp(chosen(h, head, wanted))
    return -((1 - share) ** 2) * jnp.log(share)


def by_number(h, head, wanted):
    count, rows = wanted.shape
    scores = jnp.tanh(h @ head)
    return scores[jnp.arange(count)[:, None], jnp.arange(rows), wanted] ** 2


def by_map(h, head, wanted):
    return jax.vmap(jax.vmap(jnp.take))(jnp.tanh(h @ head), wanted) ** 2


TAKEN = {
    "policy": (clipped_policy, Draw(microbatches=3), EVERY),
    "focal": (focal, Draw(shared="psum", stages=3, inside=True, collect="scan"), EVERY[:1]),
    "number": (by_number, Draw(axes="dx", microbatches=3, dtype="bfloat16"), EVERY[:1]),
    "map": (by_map, Draw(under=True, microbatches=3), EVERY[:1]),
}


@pytest.mark.thorough
@pytest.mark.parametrize(("loss", "d", "schedules"), TAKEN.values(), ids=TAKEN)
def test_a_head_that_takes_elements_by_their_numbers(monkeypatch, loss, d, schedules):
    monkeypatch.setattr(
        training_steps, "loss_of",
        lambda d, head, h, wanted: jnp.mean(loss(h, head, wanted)).astype(np.float32),
    )  # fmt: skip
    for found in compare_in(d, *schedules).values():
        assert found.module.interleaved[0].rounds == "a head is computed row by row"


def test_a_head_that_takes_elements_of_other_microbatches(monkeypatch):
    """Their numbers are known, or are those of classes."""

    def other(d, head, h, wanted):
        at = (jnp.arange(h.shape[0]) * 3) % 4
        return jnp.sum(h[at[:, None], jnp.arange(h.shape[1]), wanted % 8] ** 2)

    monkeypatch.setattr(training_steps, "loss_of", other)
    assert "(indices along others, as of jnp.take_along_axis)" in refused(Draw())
    monkeypatch.setattr(
        training_steps, "loss_of", lambda d, head, h, wanted: jnp.sum(h[wanted % 4] ** 2)
    )
    assert "(indices along others, as of jnp.take_along_axis)" in refused(Draw())


def indexed_of(rows: str):
    """What is known of a gather of eight elements, and of the scatter that is its transpose, of four rows of
    16. ``rows``: HLO of s32[8], the number of the row of each index vector."""
    module = Module.parse(
        parse_hlo_text(
            f"""HloModule m
            sum {{
              a = f32[] parameter(0)
              b = f32[] parameter(1)
              ROOT c = f32[] add(a, b)
            }}
            ENTRY e {{
              x = f32[4,16]{{1,0}} parameter(0)
              class = s32[8,1]{{1,0}} parameter(1)
              {rows}
              row = s32[8,1]{{1,0}} reshape(rows)
              at = s32[8,2]{{1,0}} concatenate(row, class), dimensions={{1}}
              g = f32[8]{{0}} gather(x, at), offset_dims={{}}, collapsed_slice_dims={{0,1}},
                start_index_map={{0,1}}, index_vector_dim=1, slice_sizes={{1,1}}
              ROOT s = f32[4,16]{{1,0}} scatter(x, at, g), update_window_dims={{}},
                inserted_window_dims={{0,1}}, scatter_dims_to_operand_dims={{0,1}},
                index_vector_dim=1, to_apply=sum
            }}"""
        )
    )
    root = module.entry.root
    _, gathered = indexed.gathered(root.operands[2], 0, 2)
    return gathered, indexed.scattered(root, 0, 1)


def test_rows_that_are_batching_dimensions():
    module = Module.parse(
        parse_hlo_text(
            """HloModule m
            sum {
              a = f32[] parameter(0)
              b = f32[] parameter(1)
              ROOT c = f32[] add(a, b)
            }
            ENTRY e {
              x = f32[4,16]{1,0} parameter(0)
              at = s32[4,2,1]{2,1,0} parameter(1)
              g = f32[4,2]{1,0} gather(x, at), offset_dims={}, collapsed_slice_dims={1},
                operand_batching_dims={0}, start_indices_batching_dims={0}, start_index_map={1},
                index_vector_dim=2, slice_sizes={1,1}
              ROOT s = f32[4,16]{1,0} scatter(x, at, g), update_window_dims={},
                inserted_window_dims={1}, input_batching_dims={0}, scatter_indices_batching_dims={0},
                scatter_dims_to_operand_dims={1}, index_vector_dim=2, to_apply=sum
            }"""
        )
    )
    root, own = module.entry.root, indexed.Indexed(axis=0, unit=1, at=0, count=1)
    gather = root.operands[2]
    assert indexed.gathered(gather, 0, 1) == (0, own) and indexed.scattered(root, 0, 1) == own
    assert indexed.gathered(gather, 1, 1) == (1, None) and indexed.scattered(root, 1, 1) is None


REPEATED = "i = s32[4]{0} iota(), iota_dimension=0\n b = s32[4,2]{1,0} broadcast(i), dimensions={0}"
TURNED = "i = s32[4]{0} iota(), iota_dimension=0\n b = s32[2,4]{1,0} broadcast(i), dimensions={1}"


def test_index_vectors_of_each_row():
    own = indexed.Indexed(axis=0, unit=1, at=0, count=2, shift=0, component=0)
    assert indexed_of(f"{REPEATED}\n rows = s32[8]{{0}} reshape(b)") == (own, own)


@pytest.mark.parametrize(
    "rows",
    [
        f"{TURNED}\n rows = s32[8]{{0}} reshape(b)",
        "rows = s32[8]{0} iota(), iota_dimension=0",  # beyond the operand, where gathers clamp
        "rows = s32[8]{0} parameter(2)",
    ],
    ids=["turned", "beyond", "unknown"],
)
def test_index_vectors_of_other_rows(rows):
    assert indexed_of(rows) == (None, None)


@pytest.mark.parametrize(
    ("of", "shape", "size"), [("f32", "3,2", 6), ("s32", "3,2", 6), ("s16", "3,4", 12)]
)
def test_bitcasts_on_what_lies_otherwise(of, shape, size):
    """What a bitcast gives depends on how its operand lies in memory. Copied, it may get another one."""
    module = Module.parse(
        parse_hlo_text(
            f"""HloModule m
            ENTRY e {{
              given = f32[2,3]{{1,0}} parameter(0)
              other = f32[2,3]{{0,1}} copy(given)
              turned = {of}[{shape}]{{1,0}} bitcast(other)
              ROOT flat = {of}[{size}]{{0}} bitcast(turned)
            }}"""
        )
    )
    root, given = module.entry.root, module.entry.parameters[0]
    (other,) = (i for i in module.entry.instructions if i.opcode == "copy")
    editor = Editor(module)
    builder = editor.replace(root)
    builder.stand_in(builder.clone([root], {other: given.proto})[root])
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    ((found,),) = Interpreter(compile_hlo(editor.finish(), 1, 1).program).run([x])
    np.testing.assert_array_equal(found, x.T.reshape(-1).view(found.dtype))


@pytest.mark.parametrize(("of", "may_round"), [("f32", True), ("s32", False)])
def test_sums_of_a_reduce_of_several_arrays_may_round(of, may_round):
    """Without any product beside them, by which the rest of a head tells."""
    module = Module.parse(
        parse_hlo_text(
            f"""HloModule m
            sums {{
              a = {of}[] parameter(0)
              b = {of}[] parameter(1)
              c = {of}[] parameter(2)
              d = {of}[] parameter(3)
              one = {of}[] add(a, c)
              other = {of}[] add(b, d)
              ROOT both = ({of}[], {of}[]) tuple(one, other)
            }}
            ENTRY e {{
              x = {of}[4,3]{{1,0}} parameter(0)
              zero = {of}[] constant(0)
              ROOT r = ({of}[4]{{0}}, {of}[4]{{0}}) reduce(x, x, zero, zero), dimensions={{1}}, to_apply=sums
            }}"""
        )
    )
    assert rounds(module.entry.instructions) == may_round


@pytest.mark.thorough
@pytest.mark.parametrize("axis", [0, 2])
def test_what_the_backward_pass_begins_with_is_one_result_of_a_reduce(monkeypatch, axis):
    @jax.custom_vjp
    def total(h):
        return jnp.sum(h)

    def summed(one, other):
        return tuple(a + b for a, b in zip(one, other, strict=True))

    def back(h, g):
        x = jnp.stack([h * g, h * 0.5, jnp.tanh(h)], axis)
        return (lax.reduce((x, x * x), (np.float32(0),) * 2, summed, (axis,))[1],)

    total.defvjp(lambda h: (jnp.sum(h), h), back)
    monkeypatch.setattr(training_steps, "loss_of", lambda d, head, h, wanted: total(h))
    found = compare_in(Draw(microbatches=3), "1f1b")["1f1b"]
    assert found.module.interleaved[0].rounds == "a head is computed row by row"
