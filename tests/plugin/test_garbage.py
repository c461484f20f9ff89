"""Compiling is not interrupted by collections of cyclic garbage."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from stretto.plugin import executable, garbage


@pytest.fixture(autouse=True)
def _enabled() -> Iterator[None]:
    gc.enable()
    yield
    gc.enable()


def test_stretches_may_be_nested() -> None:
    with garbage.kept():
        with garbage.kept():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_an_error_ends_a_stretch() -> None:
    with pytest.raises(KeyError), garbage.kept():
        raise KeyError
    assert gc.isenabled()


def test_a_program_without_collections_keeps_none() -> None:
    gc.disable()
    with garbage.kept():
        pass
    assert not gc.isenabled()


@pytest.mark.usefixtures("on_stretto")
def test_nothing_is_collected_while_a_program_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    real = executable.compile_module

    def compile_module(*arguments: Any) -> Any:
        seen.append(gc.isenabled())
        return real(*arguments)

    monkeypatch.setattr(executable, "compile_module", compile_module)
    assert jax.jit(lambda x: x * 5 + 3)(jnp.ones(3))[0] == 8
    assert seen and not any(seen)
    assert gc.isenabled()
