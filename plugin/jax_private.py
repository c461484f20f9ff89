"""Every private name of JAX that the plugin uses, each in one function.

JAX treats a platform whose name it does not know as one without CPU lowerings, donation or callbacks.
stretto's engines run what XLA's CPU client runs, so it is given the treatment of ``cpu``. The
signatures used here are pinned by ``tests/plugin/test_jax_private.py``, which says what to look at when
one of them moves.
"""

from __future__ import annotations

from typing import Any

PLATFORM = "stretto"


def requested_platforms() -> list[str]:
    """The platforms that the user asked for, by ``JAX_PLATFORMS`` or ``jax_platforms``; may be empty."""
    from jax._src import config

    value = config.jax_platforms.value
    return [name.strip() for name in value.split(",") if name.strip()] if value else []


def add_platform(name: str) -> None:
    """Make a platform available after those that the user asked for."""
    from jax._src import config

    config.config.update("jax_platforms", ",".join([*requested_platforms(), name]))


def register(capsule: Any) -> None:
    """Register the plugin with JAX, unless that has been done."""
    from jax._src import xla_bridge

    if PLATFORM in xla_bridge._backend_factories:
        return
    # An empty `options` keeps those of jax_pjrt_client_create_options in a distributed job; the name
    # on this list spares users a warning that the platform is experimental.
    xla_bridge._nonexperimental_plugins.add(PLATFORM)
    xla_bridge.register_plugin(PLATFORM, c_api=capsule, options={})


def share_cpu_lowerings() -> None:
    """Lower primitives for stretto with the rules of cpu, including those registered later."""
    from jax._src.interpreters import mlir

    mlir._platform_specific_lowerings[PLATFORM] = mlir._platform_specific_lowerings["cpu"]


def allow_donation() -> None:
    """Have donated arguments marked in the module."""
    from jax._src.interpreters import mlir

    if PLATFORM not in mlir._platforms_with_donation:
        mlir._platforms_with_donation.append(PLATFORM)
