"""NetKet: a step of variational Monte Carlo with stochastic reconfiguration, on all devices."""

from __future__ import annotations

from typing import Any

import jax
import netket as nk
import optax


def programs() -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """By name: a function that takes a step, jitted in parts by NetKet, and no arguments."""
    lattice = nk.graph.Chain(16)
    space = nk.hilbert.Spin(0.5, lattice.n_nodes)
    energy = nk.operator.IsingJax(space, lattice, h=1.0)
    sampler = nk.sampler.MetropolisLocal(space, n_chains=64)
    state = nk.vqs.MCState(
        sampler, nk.models.RBM(alpha=1, param_dtype=float), n_samples=512, seed=0, sampler_seed=0
    )
    driver = nk.driver.VMC_SR(energy, optax.sgd(0.05), diag_shift=0.01, variational_state=state)

    def step() -> Any:
        driver.run(1, out=(), show_progress=False)
        return jax.block_until_ready(state.variables)

    step.result = lambda: state.expect(energy).mean.real  # type: ignore[attr-defined]
    return {"netket step": (step, ())}
