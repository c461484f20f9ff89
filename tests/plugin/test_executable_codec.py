"""Serialized executables: what comes back, and what is refused, with which words."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from stretto.hlo_frontend.compile import CompileSpec, compile_stablehlo
from stretto.hlo_frontend.overlap.apply import OverlapPolicy
from stretto.hlo_frontend.overlap.costs import ORDINARY_NETWORK
from stretto.hlo_frontend.overlap.measured import Measured
from stretto.hlo_frontend.passes.split import Decision
from stretto.hlo_frontend.passes.valid import ValidPolicy
from stretto.plugin.executable_codec import (
    OtherTargetError,
    StoredExecutable,
    from_bytes,
    to_bytes,
)
from stretto.plugin.target import difference, measured, target
from stretto.runtime.engines import null, xla_cpu
from stretto.runtime.errors import InvalidProgramError
from stretto.runtime.options import Options
from stretto.runtime.program import Start, instructions

HERE = {"stretto": "1", "jaxlib": "2", "devices": "one"}


@pytest.fixture(scope="module")
def stored() -> StoredExecutable:
    """A loop of two sums over four devices."""
    mesh = Mesh(np.array(jax.devices("stretto")), ("x",))
    text = (
        jax.jit(
            jax.shard_map(
                lambda a: jax.lax.fori_loop(
                    0, 3, lambda i, b: jax.lax.psum(b, "x") - jax.lax.pmax(b, "x"), a
                ),
                mesh=mesh,
                in_specs=PartitionSpec("x"),
                out_specs=PartitionSpec("x"),
                check_vma=False,
            )
        )
        .lower(
            jax.ShapeDtypeStruct(
                (4, 3), np.float32, sharding=NamedSharding(mesh, PartitionSpec("x"))
            )
        )
        .as_text()
    )
    compiled = compile_stablehlo(text, CompileSpec(1, 4), valid=ValidPolicy(derive=False))
    code = tuple(bytes([i]) * i for i in range(len(compiled.program.segments)))
    return StoredExecutable(HERE, b"options", compiled, code, "print")


def test_all_of_it_comes_back(stored: StoredExecutable) -> None:
    back = from_bytes(to_bytes(stored), HERE)
    assert back.compiled.program == stored.compiled.program
    assert sum(isinstance(i, Start) for i in instructions(back.compiled.program.body)) == 2
    assert back.compiled.schedule == stored.compiled.schedule
    assert back.compiled.schedule.entries
    assert back.compiled.source == stored.compiled.source
    assert not back.compiled.source.valid.derive  # type: ignore[union-attr]
    assert (back.target, back.options, back.code) == (HERE, b"options", stored.code)
    assert back.fingerprint == "print"
    assert back.compiled.hlo_with_config() == stored.compiled.hlo_with_config()
    assert to_bytes(back) == to_bytes(stored)


def test_what_was_split_comes_back(stored: StoredExecutable) -> None:
    splits = (Decision(0, 1, 4), Decision(2, 0, 2, pieces=True))
    source = dataclasses.replace(stored.compiled.source, splits=splits)  # type: ignore[type-var]
    compiled = dataclasses.replace(stored.compiled, source=source)
    back = from_bytes(to_bytes(dataclasses.replace(stored, compiled=compiled)), HERE)
    assert back.compiled.source is not None
    assert back.compiled.source.splits == splits


def test_layouts_come_back(stored: StoredExecutable) -> None:
    compiled = dataclasses.replace(stored.compiled, output_layouts=((0, 1),))
    with_layouts = dataclasses.replace(stored, compiled=compiled)
    back = from_bytes(to_bytes(with_layouts), HERE).compiled
    assert (back.input_layouts, back.output_layouts) == ((), ((0, 1),))
    assert back.hlo_with_config() == compiled.hlo_with_config() != stored.compiled.hlo_with_config()
    broken = dataclasses.replace(compiled, output_layouts=((0, 2),))
    with pytest.raises(InvalidProgramError, match="layouts and program disagree"):
        from_bytes(to_bytes(dataclasses.replace(stored, compiled=broken)), HERE)


def test_it_can_be_given_another_order(stored: StoredExecutable) -> None:
    """The two collectives of the loop's body depend on nothing of each other."""
    back = from_bytes(to_bytes(stored), HERE).compiled
    other = {(0, 1): (1, 0)}
    assert back.with_order(other) == stored.compiled.with_order(other) != back.program


def test_every_damage_is_noticed(stored: StoredExecutable) -> None:
    data = to_bytes(stored)
    for end in range(0, len(data), 41):
        with pytest.raises(InvalidProgramError):
            from_bytes(data[:end], HERE)
    for at in range(0, len(data), 37):
        broken = bytearray(data)
        broken[at] ^= 0x20
        with pytest.raises(InvalidProgramError):
            from_bytes(bytes(broken), HERE)
    with pytest.raises(InvalidProgramError, match="format 9, this stretto reads"):
        from_bytes(data[:4] + b"\x09\x00" + data[6:], HERE)


def test_sections_that_disagree(stored: StoredExecutable) -> None:
    data = to_bytes(dataclasses.replace(stored, code=stored.code[:-1]))
    with pytest.raises(InvalidProgramError, match="cannot be read: code of"):
        from_bytes(data, HERE)


@pytest.mark.parametrize("what", HERE)
def test_another_target_is_refused_by_name(stored: StoredExecutable, what: str) -> None:
    with pytest.raises(OtherTargetError, match=f"compiled for {what}: '.*', here 'other'"):
        from_bytes(to_bytes(stored), {**HERE, what: "other"})


def test_what_a_program_depends_on() -> None:
    engine, options = xla_cpu.create(2), Options(local_devices=2)
    here = target(engine, options, 3)
    assert here["devices"] == "3 processes with 2 devices each"
    assert not difference(here, target(xla_cpu.create(2), Options(timeout=7, grace=1), 3))
    for other in (
        target(xla_cpu.create(3), options, 3),
        target(engine, options, 2),
        target(null.create(2), options, 3),
        target(engine, Options(pseudo_tokens=False), 3),
        target(engine, options, 3, OverlapPolicy(ORDINARY_NETWORK)),
    ):
        assert difference(here, other)


def test_what_was_measured_of_some_programs_keeps_no_executable_from_being_loaded() -> None:
    engine, options = xla_cpu.create(2), Options(local_devices=2)
    plain = OverlapPolicy(ORDINARY_NETWORK)
    known = dataclasses.replace(plain, measured={"module": Measured({"main/dot": 1.0}, 1.0)})
    profiled = dataclasses.replace(options, profile=True)
    made, here = target(engine, options, 3, plain), target(engine, profiled, 3, known)
    assert not difference(made, here)
    # JAX's compilation cache, of which this is the key, has them apart.
    assert measured(plain) == measured(None) == "" != measured(known)
