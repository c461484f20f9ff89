"""Tests of the plugin run in this process: stretto as a second platform beside JAX's CPU backend."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import pytest

from stretto.runtime import options


@pytest.fixture(scope="session")
def devices() -> list[jax.Device]:
    """stretto's devices."""
    found = jax.devices("stretto")
    assert len(found) == options.in_force().local_devices
    return found


@pytest.fixture(scope="session")
def cpu() -> jax.Device:
    """JAX's own CPU device, which says what is right."""
    return jax.devices("cpu")[0]


@pytest.fixture
def on_stretto(devices: list[jax.Device]) -> Iterator[jax.Device]:
    """Makes stretto's first device the default one."""
    with jax.default_device(devices[0]):
        yield devices[0]
