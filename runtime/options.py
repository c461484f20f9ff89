"""Options of the runtime, and where each came from.

Every field of `Options` has one environment variable, named in `VARIABLES`; a variable that is unset or
empty leaves the default. A value that cannot be read raises `OptionsError`, which names the variable,
the value and what is accepted: an option is never guessed.
"""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any

from .errors import StrettoError

DEFAULT = "default"

_log = logging.getLogger("stretto")


class OptionsError(StrettoError, ValueError):
    """An option has a value that cannot be used. Not worth catching: correct the setting."""

    code = "INVALID_ARGUMENT"


@dataclass(frozen=True)
class Options:
    """What a user can set.

    ``local_devices``: devices of this process (1 to 65536; the same on every rank).
    ``engine``: name of the engine that computes (entry-point group ``stretto.engines``).
    ``timeout``: seconds after which a collective that not every rank has reached is an error.
    ``grace``: seconds a process gets to end by itself once the job has failed, before it is ended.
    ``launcher``: ``auto`` looks for an MPI launcher in the environment, and else for
    ``jax.distributed``; ``mpi`` insists on MPI, ``jax`` on ``jax.distributed``, whatever started the
    processes; ``none`` makes every process a world of its own.
    ``control_host``: address at which rank 0 listens for the other ranks; empty: found by itself.
    ``pseudo_tokens``: whether scalars that only order collectives become order (`docs/order.md`).
    ``trust_valid_iterations``: honour ``_xla_send_recv_validation`` without proof.
    ``derive_valid_iterations``: leave out transfers of loops that nobody reads (`docs/pipelines.md`).
    ``poison_skipped``: fill what is received where a transfer is left out with NaN, to see that nobody
    reads it. For debugging.
    ``overlap``: whether collectives are scheduled to run beside compute where that saves time.
    ``costs``: file of the table of costs to schedule by, read on rank 0; empty: what was measured for these
    machines, if anything (`docs/overlap.md`).
    ``native``: whether loops and programs of small collectives become compiled code that calls them itself.
    ``nccl``: whether collectives between GPUs stay on them, over NCCL (`docs/gpu.md`).
    ``cuda_mpi``: whether MPI is given GPUs' memory where collectives do not go over NCCL, one of `CUDA_MPI`;
    ``auto``: if its library says that it takes it (`docs/gpu.md`).
    ``shared_memory``: whether compiled code sends to other processes of its host through memory, instead of
    over MPI.
    ``share_compiled``: whether ranks of one host take over what another of them has compiled.
    ``profile``: whether the first runs of each program are measured, for the next job to plan by.
    ``skip_compute``: do not run segments on devices where nobody reads what they give.
    ``pipeline_loops``: await a permute that only the next iteration of its loop reads there.
    ``rewrite``: whether collectives of JAX programs become others that send less (`docs/design.md`).
    ``split``: whether collectives and the products around them are split into parts that hide one another,
    where the table of costs has it pay (`docs/overlap.md`).
    ``trace``: folder in which every rank writes what its streams do; empty: none (`docs/overlap.md`).
    ``dump``: folder in which every process writes what each program was at every stage of its compilation;
    empty: none (`docs/troubleshooting.md`).
    ``interleave``: chunks of layers that each device of a pipeline has; 1 leaves pipelines as they are
    written (`docs/pipelines.md`).
    ``schedule``: in which order stages run microbatches forwards and backwards, one of `SCHEDULES`; ``gpipe``
    is as written (`docs/pipelines.md`).
    ``finite_padding``: whether what pipelines compute on padding is taken to be neither NaN nor infinite
    (`docs/pipelines.md`).
    ``origins``: for each field that was not left at its default, where its value came from.
    """

    local_devices: int = 1
    engine: str = "xla:cpu"
    timeout: float = 300.0
    grace: float = 5.0
    launcher: str = "auto"
    control_host: str = ""
    pseudo_tokens: bool = True
    trust_valid_iterations: bool = False
    derive_valid_iterations: bool = True
    poison_skipped: bool = False
    overlap: bool = True
    costs: str = ""
    skip_compute: bool = True
    pipeline_loops: bool = True
    rewrite: bool = True
    split: bool = False
    trace: str = ""
    interleave: int = 1
    schedule: str = "gpipe"
    finite_padding: bool = False
    native: bool = True
    nccl: bool = True
    cuda_mpi: str = "auto"
    shared_memory: bool = True
    share_compiled: bool = True
    profile: bool = False
    dump: str = ""
    origins: Mapping[str, str] = field(
        default_factory=lambda: MappingProxyType({}), compare=False, repr=False
    )

    def __post_init__(self) -> None:
        for name, (variable, _) in VARIABLES.items():
            problem = _problem(name, getattr(self, name))
            if problem:
                origin = self.origins.get(name, "")
                where = variable if origin == variable else f"option {name} ({variable})"
                raise OptionsError(f"{where} is {getattr(self, name)!r}: {problem}")

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Options:
        """Defaults overridden by the ``STRETTO_…`` variables. Raises `OptionsError`."""
        environment = os.environ if environment is None else environment
        values: dict[str, Any] = {}
        origins: dict[str, str] = {}
        for name, (variable, read) in VARIABLES.items():
            text = environment.get(variable, "").strip()
            if not text:
                continue
            try:
                values[name] = read(text)
            except ValueError:
                raise OptionsError(f"{variable} is {text!r}: {_EXPECTED[name]}") from None
            origins[name] = variable
        return cls(**values, origins=MappingProxyType(origins))

    def origin(self, name: str) -> str:
        """Where the value of this field came from: a variable's name, ``program`` or ``default``."""
        known = self.origins.get(name)
        if known:
            return known
        defaults = {f.name: f.default for f in fields(self)}
        return DEFAULT if getattr(self, name) == defaults[name] else "program"


def _switch(text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError(text)
    return text == "1"


# field -> (environment variable, reader of its text)
VARIABLES: dict[str, tuple[str, Callable[[str], Any]]] = {
    "local_devices": ("STRETTO_LOCAL_DEVICES", int),
    "engine": ("STRETTO_ENGINE", str),
    "timeout": ("STRETTO_TIMEOUT", float),
    "grace": ("STRETTO_GRACE", float),
    "launcher": ("STRETTO_LAUNCHER", str),
    "control_host": ("STRETTO_CONTROL_HOST", str),
    "pseudo_tokens": ("STRETTO_PSEUDO_TOKENS", _switch),
    "trust_valid_iterations": ("STRETTO_TRUST_VALID_ITERATIONS", _switch),
    "derive_valid_iterations": ("STRETTO_DERIVE_VALID_ITERATIONS", _switch),
    "poison_skipped": ("STRETTO_POISON_SKIPPED", _switch),
    "overlap": ("STRETTO_OVERLAP", _switch),
    "costs": ("STRETTO_COSTS", str),
    "native": ("STRETTO_NATIVE", _switch),
    "nccl": ("STRETTO_NCCL", _switch),
    "cuda_mpi": ("STRETTO_CUDA_MPI", str),
    "shared_memory": ("STRETTO_SHARED_MEMORY", _switch),
    "share_compiled": ("STRETTO_SHARE_COMPILED", _switch),
    "profile": ("STRETTO_PROFILE", _switch),
    "skip_compute": ("STRETTO_SKIP_COMPUTE", _switch),
    "trace": ("STRETTO_TRACE", str),
    "dump": ("STRETTO_DUMP", str),
    "pipeline_loops": ("STRETTO_PIPELINE_LOOPS", _switch),
    "rewrite": ("STRETTO_REWRITE", _switch),
    "split": ("STRETTO_SPLIT", _switch),
    "interleave": ("STRETTO_INTERLEAVE", int),
    "schedule": ("STRETTO_SCHEDULE", str),
    "finite_padding": ("STRETTO_FINITE_PADDING", _switch),
}

# More than any engine makes within minutes.
MOST_LOCAL_DEVICES = 1 << 16
LAUNCHERS = ("auto", "mpi", "jax", "none")
CUDA_MPI = ("auto", "0", "1")
SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "zb_h1")

_EXPECTED = {
    "local_devices": f"expected a whole number of devices, from 1 to {MOST_LOCAL_DEVICES}",
    "engine": "expected the name of an engine",
    "timeout": "expected a number of seconds above 0",
    "grace": "expected a number of seconds, 0 or more",
    "launcher": f"expected one of {', '.join(LAUNCHERS)}",
    "control_host": "expected a host name or an address",
    "pseudo_tokens": "expected 0 or 1",
    "trust_valid_iterations": "expected 0 or 1",
    "derive_valid_iterations": "expected 0 or 1",
    "poison_skipped": "expected 0 or 1",
    "overlap": "expected 0 or 1",
    "costs": "expected the name of a file",
    "native": "expected 0 or 1",
    "nccl": "expected 0 or 1",
    "cuda_mpi": f"expected one of {', '.join(CUDA_MPI)}",
    "shared_memory": "expected 0 or 1",
    "share_compiled": "expected 0 or 1",
    "profile": "expected 0 or 1",
    "trace": "expected the name of a folder",
    "dump": "expected the name of a folder",
    "skip_compute": "expected 0 or 1",
    "pipeline_loops": "expected 0 or 1",
    "rewrite": "expected 0 or 1",
    "split": "expected 0 or 1",
    "interleave": "expected a whole number of chunks a device, at least 1",
    "schedule": f"expected one of {', '.join(SCHEDULES)}",
    "finite_padding": "expected 0 or 1",
}


def _problem(name: str, value: Any) -> str:
    """What is wrong with a value, or an empty string."""
    accepted = {
        "local_devices": lambda v: (
            isinstance(v, int) and not isinstance(v, bool) and 1 <= v <= MOST_LOCAL_DEVICES
        ),
        "engine": lambda v: isinstance(v, str) and bool(v),
        "timeout": lambda v: isinstance(v, int | float) and v > 0,
        "grace": lambda v: isinstance(v, int | float) and v >= 0,
        "launcher": lambda v: v in LAUNCHERS,
        "control_host": lambda v: isinstance(v, str),
        "pseudo_tokens": lambda v: isinstance(v, bool),
        "trust_valid_iterations": lambda v: isinstance(v, bool),
        "derive_valid_iterations": lambda v: isinstance(v, bool),
        "poison_skipped": lambda v: isinstance(v, bool),
        "overlap": lambda v: isinstance(v, bool),
        "costs": lambda v: isinstance(v, str),
        "native": lambda v: isinstance(v, bool),
        "nccl": lambda v: isinstance(v, bool),
        "cuda_mpi": lambda v: v in CUDA_MPI,
        "shared_memory": lambda v: isinstance(v, bool),
        "share_compiled": lambda v: isinstance(v, bool),
        "profile": lambda v: isinstance(v, bool),
        "trace": lambda v: isinstance(v, str),
        "dump": lambda v: isinstance(v, str),
        "skip_compute": lambda v: isinstance(v, bool),
        "pipeline_loops": lambda v: isinstance(v, bool),
        "rewrite": lambda v: isinstance(v, bool),
        "split": lambda v: isinstance(v, bool),
        "interleave": lambda v: isinstance(v, int) and not isinstance(v, bool) and v >= 1,
        "schedule": lambda v: v in SCHEDULES,
        "finite_padding": lambda v: isinstance(v, bool),
    }[name](value)
    return "" if accepted else _EXPECTED[name]


# Of this repository's tests.
_OF_TESTS = {"STRETTO_TEST_FULL", "STRETTO_PJRT_HEADER"} | {
    f"STRETTO_TEST_{name}" for name in ("GPU", "FORM", "NCCL", "CUDA_MPI", "ROUNDS")
}


def unknown(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Variables that look like options and are none, each with the option it resembles, or with ``""``."""
    environment = os.environ if environment is None else environment
    known = [variable for variable, _ in VARIABLES.values()]
    found = sorted(v for v in environment if v.upper().startswith("STRETTO_"))
    strange = [v for v in found if v not in known and v not in _OF_TESTS]
    near = {v: difflib.get_close_matches(v.upper(), known, n=1, cutoff=0.8) for v in strange}
    return {v: near[v][0] if near[v] else "" for v in strange}


def warn_of_unknown() -> None:
    """Say which variables are ignored."""
    for variable, near in unknown().items():
        hint = f". Did you mean {near}?" if near else ""
        _log.warning("%s is not an option of stretto, and is ignored%s", variable, hint)


_chosen: Options | None = None


def configure(options: Options) -> None:
    """Use these options instead of the environment's. To be called before JAX makes its devices."""
    global _chosen
    _chosen = options


def in_force() -> Options:
    """The options given to `configure`, or else the environment's. Raises `OptionsError`."""
    return _chosen if _chosen is not None else Options.from_environment()
