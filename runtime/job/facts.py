"""What the ranks of a job tell each other when they join, and what of it must be equal on all."""

from __future__ import annotations

import os
import platform
import secrets
import socket
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from stretto.collectives import gpus

from .. import cores
from ..errors import WorldError
from ..options import Options

# Options that must be equal on all ranks, and how they are called in the message.
_OPTIONS = {
    "local_devices": "number of local devices (STRETTO_LOCAL_DEVICES)",
    "pseudo_tokens": "handling of pseudo-tokens (STRETTO_PSEUDO_TOKENS)",
    "trust_valid_iterations": "trust in valid iterations (STRETTO_TRUST_VALID_ITERATIONS)",
    "interleave": "interleaving of pipelines (STRETTO_INTERLEAVE)",
    "schedule": "schedule of pipelines (STRETTO_SCHEDULE)",
    "finite_padding": "trust in finite padding (STRETTO_FINITE_PADDING)",
    "derive_valid_iterations": "finding of valid iterations (STRETTO_DERIVE_VALID_ITERATIONS)",
    "rewrite": "rewriting of collectives (STRETTO_REWRITE)",
    "split": "splitting of collectives (STRETTO_SPLIT)",
    "poison_skipped": "handling of skipped buffers (STRETTO_POISON_SKIPPED)",
    "overlap": "scheduling for overlap (STRETTO_OVERLAP)",
    "nccl": "use of NCCL (STRETTO_NCCL)",
    "cuda_mpi": "use of MPI on GPUs' memory (STRETTO_CUDA_MPI)",
    "profile": "measuring of programs (STRETTO_PROFILE)",
    "skip_compute": "skipping of compute (STRETTO_SKIP_COMPUTE)",
    "pipeline_loops": "pipelining of loops (STRETTO_PIPELINE_LOOPS)",
}
_PACKAGES = ("stretto", "jax", "jaxlib")
# All that must be equal, by its key in `of_rank`.
_EQUAL = {
    **_OPTIONS,
    "trace": "whether there is a trace (STRETTO_TRACE)",
    **{package: f"version of {package}" for package in _PACKAGES},
    "python": "version of Python",
}


def of_rank(chosen: Options, problem: str) -> dict[str, Any]:
    """Those of this rank. ``problem``: why it cannot join, if so."""
    return {
        "problem": problem,
        "pid": os.getpid(),
        "token": secrets.token_hex(16),
        "host": socket.gethostname(),
        "cores": sorted(cores.usable()),
        "engine": chosen.engine,
        "gpus": gpus.offer(chosen.local_devices) if _calls_nccl(chosen) else None,
        "trace": bool(chosen.trace),
        "python": ".".join(platform.python_version_tuple()[:2]),
        **{option: getattr(chosen, option) for option in _OPTIONS},
        **{package: _version(package) for package in _PACKAGES},
    }


def _calls_nccl(chosen: Options) -> bool:
    """Whether this process wants code on GPUs to call collectives. Engines for them have CUDA in their
    names."""
    return chosen.native and chosen.nccl and "cuda" in chosen.engine


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def check(gathered: Sequence[dict[str, Any]]) -> None:
    """Raise what is wrong; every rank has the same facts and so raises the same."""
    problems = {rank: f["problem"] for rank, f in enumerate(gathered) if f["problem"]}
    if problems:
        rank, text = next(iter(problems.items()))
        raise WorldError(f"rank {rank} cannot join: {text}")
    for key, name in _EQUAL.items():
        ranks_of: dict[Any, list[int]] = {}
        for rank, facts in enumerate(gathered):
            ranks_of.setdefault(facts[key], []).append(rank)
        if len(ranks_of) > 1:
            listed = "; ".join(f"{value} on {_ranks(r)}" for value, r in ranks_of.items())
            raise WorldError(
                f"the ranks differ in the {name}: {listed}. It must be the same on all"
            )


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", …" if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
