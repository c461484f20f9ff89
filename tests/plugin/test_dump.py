"""STRETTO_DUMP in JAX programs: every program that is compiled, and no key of a cache depends on it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from support import scripts

from stretto.plugin.target import target
from stretto.runtime.engines.null import NullEngine
from stretto.runtime.options import Options

SCRIPT = """
import jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
mesh = jax.make_mesh((4,), ("x",))
rows = NamedSharding(mesh, P("x"))
def total(a):
    return a.sum()
jax.jit(total, in_shardings=rows)(np.ones(8, np.float32)).block_until_ready()
def plain(a):
    return a + 1
jax.jit(plain)(np.ones(8, np.float32)).block_until_ready()
"""


def test_every_program_is_dumped(tmp_path: Path) -> None:
    done = scripts.run(SCRIPT, STRETTO_DUMP=str(tmp_path))
    assert done.returncode == 0, done.stderr
    named = {path.name.split(".", 2)[2]: path.read_text() for path in tmp_path.iterdir()}
    assert "stablehlo.reduce" in named["jit_total.00.stablehlo.txt"]
    assert "all-reduce(" in named["jit_total.01.hlo.txt"]
    assert " = all-reduce f32[] (" in named["jit_total.02.flatten.txt"]
    programs = [
        named[name]
        for name in sorted(named)
        if name.startswith("jit_total.") and ".program" in name
    ]
    assert all(p.startswith('program "jit_total" replicas 1 partitions 4 ') for p in programs)
    # As it is walked, and as compiled code calls its collective.
    assert ["start" in p for p in programs] == [True, False]
    # A program of one segment is its module as it came.
    assert sorted(name for name in named if name.startswith("jit_plain.")) == [
        "jit_plain.00.stablehlo.txt",
        "jit_plain.01.program.txt",
        "jit_plain.02.segments.txt",
    ]


def test_a_folder_that_cannot_be_made_is_an_error_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = scripts.run("import jax; jax.devices()", STRETTO_DUMP=str(tmp_path / "file"))
    assert done.returncode != 0
    assert "the dump cannot be written (STRETTO_DUMP): " in done.stderr


def test_what_is_dumped_is_no_other_program() -> None:
    engine, options = NullEngine(1), Options()
    assert target(engine, replace(options, dump="here"), 1) == target(engine, options, 1)
    assert target(engine, replace(options, rewrite=False), 1) != target(engine, options, 1)
