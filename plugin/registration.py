"""How JAX finds stretto: the entry point of the group ``jax_plugins``.

JAX imports this module and calls `initialize` in every program that makes devices, whether it wants
stretto or not. So nothing happens here unless ``JAX_PLATFORMS`` (or the option ``jax_platforms``) names
stretto: no device, no default and no lowering of anybody else changes, and nothing heavy is imported.
"""

from __future__ import annotations

PLATFORM = "stretto"


def initialize() -> None:
    """Register the platform if the user asked for it. Called by JAX before it makes devices."""
    from . import jax_private

    if PLATFORM not in jax_private.requested_platforms():
        return
    from . import _capi, entries
    from .buffer import value_of

    entries.install()
    jax_private.register(_capi.capsule())
    jax_private.keep_clients()
    jax_private.tell_failures_once()
    jax_private.join_distributed()
    jax_private.register_profiler(_capi.capsule())
    jax_private.hide_from_source_lines()
    jax_private.lower_as("cpu")
    jax_private.lower_tokens_in_barriers()
    jax_private.call_what_was_exported()
    jax_private.share_ffi_targets()
    jax_private.hand_over_callbacks()
    jax_private.transform_as_cpu()
    jax_private.use_compilation_cache()
    jax_private.compile_for_topologies_without_client()
    jax_private.lend_by_dlpack(value_of)
    jax_private.analyse_cost_before_compiling()
    jax_private.offer_cpu()
