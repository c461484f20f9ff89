"""Options of stretto among those of XLA in the compile options of one program."""

from __future__ import annotations

import pytest

from stretto.hlo_frontend.interleaved import SCHEDULES
from stretto.hlo_frontend.own_options import OwnOptions, split
from stretto.hlo_frontend.pipelines import slots
from stretto.hlo_frontend.schema import CompileOptionsProto
from stretto.runtime import options as runtime_options
from stretto.runtime.errors import InvalidProgramError


def options(**values) -> bytes:
    proto = CompileOptionsProto()
    proto.executable_build_options.num_partitions = 4
    for key, value in values.items():
        entry = proto.env_option_overrides.add(key=key)
        kind = {bool: "bool_field", int: "int_field", str: "string_field"}[type(value)]
        setattr(entry.value, kind, value)
    return proto.SerializeToString()


def test_without_any_the_options_are_as_they_came():
    assert split(b"") == (OwnOptions(), b"", False)
    xla = options(xla_dump_to="there")
    assert split(xla) == (OwnOptions(), xla, True)


@pytest.mark.parametrize("value", [3, "3"])
def test_own_options_are_taken_out(value):
    own, left, names_xla = split(options(stretto_interleave=value, xla_dump_to="there"))
    assert (own, names_xla) == (OwnOptions(interleave=3), True)
    assert left == options(xla_dump_to="there")
    assert split(options(stretto_interleave=value))[1:] == (options(), False)


def test_schedules_have_one_list():
    assert SCHEDULES == runtime_options.SCHEDULES == ("gpipe", *slots.SCHEDULES)


def test_a_schedule_is_taken_out():
    own, left, _ = split(options(stretto_schedule="1f1b", stretto_interleave=1))
    assert (own, left) == (OwnOptions(interleave=1, schedule="1f1b"), options())
    with pytest.raises(
        InvalidProgramError,
        match="stretto_schedule is 'pipedream': expected one of gpipe, 1f1b, interleaved_1f1b, zb_h1",
    ):
        split(options(stretto_schedule="pipedream"))


@pytest.mark.parametrize("value", [0, -2, "two", True, ""])
def test_values_that_cannot_be_used(value):
    with pytest.raises(InvalidProgramError, match=r"stretto_interleave is .*expected a whole"):
        split(options(stretto_interleave=value))


@pytest.mark.parametrize(("value", "read"), [(0, 0), (1, 1), ("0", 0)])
def test_switches(value, read):
    own, left, _ = split(options(stretto_split=value))
    assert (own, left) == (OwnOptions(split=read), options())
    own, left, _ = split(options(stretto_finite_padding=value))
    assert (own, left) == (OwnOptions(finite_padding=read), options())
    with pytest.raises(InvalidProgramError, match="stretto_split is '2': expected 0 or 1"):
        split(options(stretto_split=2))


def test_options_that_do_not_exist():
    with pytest.raises(InvalidProgramError, match="there is no compiler option stretto_interlace"):
        split(options(stretto_interlace=2))


def test_bytes_that_are_no_options():
    with pytest.raises(InvalidProgramError, match="cannot read the compile options"):
        split(b"\xff\xff\xff")
