"""How arguments and results are divided, as JAX is told without reading the optimized program."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from stretto.plugin.executable import Executable

CASES: dict[str, Callable[..., Any]] = {
    "one result": lambda x, y: x + y.sum(),
    "several": lambda x, y: (x * 2, {"a": y.T, "b": x.sum()}),
    "none": lambda x, y: (),
    "an argument unused": lambda x, y: jnp.cumsum(y, 0),
    "divided": lambda x, y: jax.lax.with_sharding_constraint(x + y, P("b", "a")),
}


def of_module(hlo: Any) -> list[Any]:
    """What jaxlib reads of the optimized program."""
    given, result = hlo.spmd_parameters_shardings, hlo.spmd_output_sharding
    parts = result and (result.tuple_shardings if result.type == result.Type.TUPLE else [result])
    return [given or None, parts]


@pytest.mark.usefixtures("devices")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("spec", [P("a", "b"), P(None, ("b", "a")), P()])
def test_are_those_of_the_optimized_program(
    name: str, spec: P, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Executable] = []
    whole = Executable.__dict__["optimized_program"].func
    monkeypatch.setattr(
        Executable, "optimized_program", property(lambda self: (asked.append(self), whole(self))[1])
    )
    mesh = Mesh(np.array(jax.devices("stretto")[:4]).reshape(2, 2), ("a", "b"))
    sharding = NamedSharding(mesh, spec)
    arguments = [jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=sharding)] * 2
    with jax.set_mesh(mesh):
        compiled = jax.jit(CASES[name]).lower(*arguments).compile()
    for used in filter(None, compiled.input_shardings[0]):
        assert used.is_equivalent_to(sharding, 2)
    found = compiled.runtime_executable()
    asked.clear()
    told = [found.get_parameter_shardings(), found.get_output_shardings()]
    assert asked == []  # jaxlib has not read the program for it
    expected = of_module(found.hlo_modules()[0])
    assert asked
    for ours, theirs in zip(told, expected, strict=True):
        assert (ours and list(map(str, ours))) == (theirs and list(map(str, theirs)))


def test_the_program_of_one_device_is_what_the_engine_made_of_it(devices: list[jax.Device]) -> None:
    """As with JAX's CPU backend, whose instructions it must have, fused ones too."""

    def entry(platform: str) -> str:
        x = jax.device_put(np.ones(300, np.float32), jax.devices(platform)[0])
        text = jax.jit(lambda x: (jnp.sin(x) * 2 + 1).sum()).lower(x).compile().as_text()
        lines = text[text.index("\nENTRY") :].splitlines()
        return "\n".join(re.sub(r", (metadata|sharding)={.*", "", line) for line in lines)

    assert " fusion(" in entry("stretto")
    assert entry("stretto") == entry("cpu")


def test_a_program_for_one_device_has_none(devices: list[jax.Device]) -> None:
    compiled = jax.jit(lambda x: x + 1).lower(np.ones(3, np.float32)).compile()
    found = compiled.runtime_executable()
    assert found.get_parameter_shardings() is None
    assert found.get_output_shardings() is None
