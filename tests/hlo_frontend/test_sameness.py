"""What devices of a pipeline have in common, as shardings, tables and collectives tell."""

from __future__ import annotations

import numpy as np
import pytest
from frontend_support import P, manual, mesh
from jax import lax
from jaxlib import _hlo
from random_steps import compiled

from stretto.hlo_frontend.collectives import CollectiveReader
from stretto.hlo_frontend.graph import Module
from stretto.hlo_frontend.pipelines.sameness import Class, Sameness
from stretto.hlo_frontend.shardings import parts


@pytest.mark.parametrize(
    ("spec", "along_x", "along_d"),
    [
        (P(), True, True),
        (P("x"), False, True),
        (P(None, "d"), True, False),
        (P("x", "d"), False, False),
        (P(("d", "x")), False, False),
    ],
)
def test_which_devices_hold_the_same_is_known_from_shardings(spec, along_x, along_d):
    """On a mesh of 3 by 2, as the installed XLA writes the shardings of parameters."""
    over = mesh(3, 2, names="xd")
    both = {"x": [(0, 2, 4), (1, 3, 5)], "d": [(0, 1), (2, 3), (4, 5)]}
    function = manual(
        lambda w, xs: lax.ppermute(xs, "x", [(0, 1)]) + w.sum(), over, (spec, P()), P()
    )
    arguments = np.zeros((6, 6), np.float32), np.zeros((3,), np.float32)
    module = Module.parse(compiled(function, arguments, 6, "gpipe").source.hlo)
    first = module.entry.parameters[0]
    for axis, expected in (("x", along_x), ("d", along_d)):
        found = Sameness(module, both[axis]).of(first)
        assert (found is Class.SAME) == expected


@pytest.mark.parametrize(
    ("table", "number", "replicas", "same"),
    [
        ("{0, 4, 0, 4}", "id", 1, True),  # the place on an axis within the groups
        ("{0, 0, 4, 4}", "id", 1, False),
        ("{4, 7, 4}", "id", 1, False),  # device 3 reads the last one
        ("{4, 4, 4}", "id", 1, True),
        ("{0, 4, 0, 4}", "s32[] convert(id)", 1, True),
        ("{0, 4, 0, 4}", "u32[] add(id, id)", 1, False),  # is not known to be alike
        ("{0, 4, 0, 4}", "id", 2, False),  # devices of two replicas have the same id
    ],
)
def test_what_a_device_looks_up_may_be_the_same_on_all_stages(table, number, replicas, same):
    """Stages are devices 0 and 2, 1 and 3, as on a mesh of 2 by 2."""
    length = table.count(",") + 1
    at = "id" if number == "id" else "at"
    line = "" if number == "id" else f"at = {number}"
    text = f"""HloModule m
        ENTRY e {{
          id = u32[] partition-id()
          {line}
          table = s32[{length}] constant({table})
          ROOT row = s32[1] dynamic-slice(table, {at}), dynamic_slice_sizes={{1}}
        }}"""
    module = Module.parse(_hlo.hlo_module_from_text(text).as_serialized_hlo_module_proto())
    found = Sameness(module, [(0, 2), (1, 3)], CollectiveReader(replicas, 4 // replicas))
    assert (found.of(module.entry.root) is Class.SAME) == same


@pytest.mark.parametrize(
    ("opcode", "replicas", "same"),
    [("remainder", 1, True), ("divide", 1, False), ("remainder", 2, False)],
)
def test_masks_that_are_made_of_a_known_number(opcode, replicas, same):
    """Of the device's place on an axis, for stages that are devices 0 and 2, 1 and 3."""
    text = f"""HloModule m
        ENTRY e {{
          id = u32[] partition-id()
          two = u32[] constant(2)
          place = u32[] {opcode}(id, two)
          every = u32[3] broadcast(place), dimensions={{}}
          rows = u32[3] iota(), iota_dimension=0
          ROOT mask = pred[3] compare(every, rows), direction=GE
        }}"""
    module = Module.parse(_hlo.hlo_module_from_text(text).as_serialized_hlo_module_proto())
    found = Sameness(module, [(0, 2), (1, 3)], CollectiveReader(replicas, 4 // replicas))
    assert (found.of(module.entry.root) is Class.SAME) == same


def test_what_is_called_twice_has_no_number():
    """Both branches call the same computation, with other numbers."""
    text = """HloModule m
        named {
          given = u32[] parameter(0)
          all = u32[2] broadcast(given), dimensions={}
          id = u32[] partition-id()
          every = u32[2] broadcast(id), dimensions={}
          ROOT sum = u32[2] add(all, every)
        }
        ENTRY e {
          id = u32[] partition-id()
          two = u32[] constant(2)
          own = u32[] divide(id, two)
          none = u32[] constant(0)
          which = s32[] parameter(0)
          ROOT made = u32[2] conditional(which, own, none), branch_computations={named, named}
        }"""
    module = Module.parse(_hlo.hlo_module_from_text(text).as_serialized_hlo_module_proto())
    found = Sameness(module, [(0, 2), (1, 3)], CollectiveReader(1, 4))
    (broadcast,) = [
        i for c in module.entry.root.called[:1] for i in c.instructions if i.name == "all"
    ]
    assert not found._is_known_alike(broadcast)


@pytest.mark.parametrize(
    ("collective", "groups", "others", "with_sums"),
    [
        ("all-gather", "{0,1,2},{3,4,5}", True, True),
        ("all-gather", "{0,1,2},{4,3,5}", False, False),  # other places
        ("all-gather", "{0,1},{2},{3,4},{5}", True, True),
        ("all-gather", "{0,1},{2},{4},{3,5}", False, False),
        ("all-gather", "{0,3},{1,4},{2,5}", True, True),  # the stages themselves
        ("all-reduce", "{0,1},{2},{3,4},{5}", True, True),
        ("all-reduce", "{0,1,2},{3,4,5}", False, True),  # in an order that processes decide
        ("all-reduce", "{0,1,2},{3,5,4}", False, False),
    ],
)
def test_collectives_side_by_side_give_all_stages_the_same(collective, groups, others, with_sums):
    """Stages are devices 0 and 3, 1 and 4, 2 and 5."""
    how = ", to_apply=add" if collective == "all-reduce" else ", dimensions={0}"
    text = f"""HloModule m
        add {{
          a = f32[] parameter(0)
          b = f32[] parameter(1)
          ROOT sum = f32[] add(a, b)
        }}
        ENTRY e {{
          given = f32[6] constant({{1, 2, 3, 4, 5, 6}})
          ROOT r = f32[6] {collective}(given), channel_id=1, use_global_device_ids=true,
            replica_groups={{{groups}}}{how}
        }}"""
    module = Module.parse(_hlo.hlo_module_from_text(text).as_serialized_hlo_module_proto())
    for sums, expected in ((False, others), (True, with_sums)):
        sameness = Sameness(module, [(0, 3), (1, 4), (2, 5)], CollectiveReader(1, 6), sums=sums)
        assert (sameness.of(module.entry.root) is Class.SAME) == expected
        assert sameness.summed == (with_sums and not others and sums)


def test_a_sharding_with_something_new_in_it_is_not_trusted():
    assert parts(b"") is not None  # replicated
    assert parts(b"\xf2\x07\x02\x08\x01") is None  # field 126
    assert parts(b"\x08\x01") is None  # all on one device
