"""`stretto.explain`: what a compiled JAX function is on stretto: its program, its plan, its ledger."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from stretto.commands.explain import explain_program, to_text
from stretto.commands.explain_costs import ledger_text
from stretto.hlo_frontend.overlap.export import to_json
from stretto.plugin.client import Client
from stretto.plugin.executable import executables
from stretto.runtime.program import Program


@dataclass(frozen=True)
class Explanation:
    """What a compiled function is. As text: what ``stretto explain`` prints of a file.

    ``program``: what every rank executes; it prints. ``data``: what ``stretto explain --json`` gives, and as
    ``ways``, once it has run, how each collective moves GPUs' arrays (`docs/gpu.md`).
    ``plan``: what ``stretto explain --costs --json`` gives, by the table of costs of this job; None where
    nothing is scheduled, since there is no table or nothing communicates.
    """

    program: Program
    data: dict[str, Any] = field(repr=False)
    plan: dict[str, Any] | None = field(repr=False, default=None)

    def __str__(self) -> str:
        text = to_text(self.data)
        return text if self.plan is None else f"{text}\n\n{ledger_text(self.plan)}"


def explain(compiled: Any) -> Explanation:
    """Explain what ``jax.jit(f).lower(...).compile()`` gives (`jax.stages.Compiled`).

    The plan is that of the program as it was compiled; ``STRETTO_PROFILE`` may have replaced it since.
    Raises `TypeError` for what was not compiled for the platform ``stretto`` in this process.
    """
    executable = compiled.runtime_executable() if hasattr(compiled, "runtime_executable") else None
    fingerprint = getattr(executable, "fingerprint", None)
    found = next((e for e in list(executables) if e.fingerprint.encode() == fingerprint), None)
    if found is None:
        raise TypeError(
            "stretto.explain takes what jax.jit(f).lower(...).compile() gives on the platform stretto, "
            f"not {compiled!r}"
        )
    made, policy = found.compiled, found.maker.overlap
    plan = None
    if policy is not None and made.source is not None and made.program.collectives:
        told = made.source.explained(policy)
        told.splits = made.splits
        plan = to_json(told)
    data = explain_program(made, made.tokens())
    if isinstance(found.maker, Client):
        data["ways"] = found.maker.ways(found)
    return Explanation(made.program, data, plan)
