"""`stretto doctor`: what is installed, what is in force, whether it works, and what to do if not.

Under mpiexec every rank takes part in the check and rank 0 prints. Exit code 0 if stretto is usable
here, which an absent optional part (MPI in one process) does not change.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import shutil
import socket
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from stretto.collectives.cuda import CudaError, cuda
from stretto.collectives.nccl import nccl
from stretto.runtime import options
from stretto.runtime.errors import StrettoError
from stretto.runtime.job import cost_tables, launcher, world
from stretto.runtime.options import VARIABLES, Options


@dataclass(frozen=True)
class Finding:
    """One thing looked at. ``good`` is None for what is absent and optional; ``advice`` what to do."""

    subject: str
    value: str
    good: bool | None = True
    advice: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--no-check", action="store_true", help="look only: do not start devices, run no all-reduce"
    )


def run(arguments: argparse.Namespace) -> int:
    found_launcher = launcher.detect()
    chosen, option_problem = _options()
    if found_launcher is not None and found_launcher.rank > 0:
        return 0 if arguments.no_check or all_reduce().good else 1
    findings = [*versions(), *engines(chosen), *gpus(chosen), *mpi(found_launcher)]
    if option_problem:
        findings.append(Finding("options", option_problem, False, "correct the variable"))
    findings += unknown_variables()
    if not arguments.no_check:
        findings.append(all_reduce())
    findings += profiling(chosen)
    usable = all(f.good is not False for f in findings)
    show(Console(), findings, chosen, usable)
    return 0 if usable else 1


def show(console: Console, findings: list[Finding], chosen: Options, usable: bool) -> None:
    """Print the findings, the options and what to do."""
    marks = {True: "[green]ok[/]", None: "[yellow]-[/]", False: "[red]missing[/]"}
    table = Table(title="stretto doctor", title_justify="left", show_header=False)
    for finding in findings:
        table.add_row(marks[finding.good], escape(finding.subject), escape(finding.value))
    console.print(table)
    table = Table("option", "value", "variable", "from", title="options", title_justify="left")
    for name, (variable, _) in VARIABLES.items():
        value = str(getattr(chosen, name)) or "(empty)"
        table.add_row(name, escape(value), variable, chosen.origin(name))
    console.print(table)
    for finding in findings:
        if finding.advice:
            console.print(
                f"[bold]{escape(finding.subject)}[/]: {escape(finding.advice)}",
                highlight=False,
                soft_wrap=True,
            )
    verdict = "[green]stretto is usable here[/]" if usable else "[red]stretto is not usable here[/]"
    console.print(verdict)


def _options() -> tuple[Options, str]:
    try:
        return options.in_force(), ""
    except options.OptionsError as error:
        return Options(), str(error)


def versions() -> list[Finding]:
    """Python, stretto, jax, jaxlib, and whether the plugin is registered with JAX."""
    findings = [Finding("Python", f"{platform.python_version()} ({sys.executable})")]
    for name in ("stretto", "jax", "jaxlib"):
        try:
            findings.append(Finding(name, metadata.version(name)))
        except metadata.PackageNotFoundError:
            findings.append(Finding(name, "not installed", False, f"pip install {name}"))
    plugins = [e.value for e in metadata.entry_points(group="jax_plugins") if e.name == "stretto"]
    extension = importlib.util.find_spec("stretto.plugin._capi")
    if not plugins:
        advice = "install stretto again: its metadata is not where this Python looks"
        findings.append(Finding("JAX plugin", "not registered", False, advice))
    elif extension is None:
        advice = "install stretto again, with a C compiler at hand (Debian: build-essential)"
        findings.append(Finding("JAX plugin", "its extension module is not built", False, advice))
    else:
        findings.append(Finding("JAX plugin", str(extension.origin)))
    asked = os.environ.get("JAX_PLATFORMS", "")
    active = "stretto" in asked.split(",")
    advice = "" if active else "set JAX_PLATFORMS=stretto to run JAX programs on stretto"
    findings.append(
        Finding("JAX_PLATFORMS", asked or "(not set)", True if active else None, advice)
    )
    return findings


def engines(chosen: Options) -> list[Finding]:
    """Engines that are installed, and whether the one asked for is among them."""
    names = sorted({e.name for e in metadata.entry_points(group="stretto.engines")})
    if chosen.engine in names or chosen.engine.partition(":")[0] in names:
        return [Finding("engines", f"{', '.join(names)}; in use: {chosen.engine}")]
    advice = "set STRETTO_ENGINE to one that is installed, or install the package that provides it"
    value = f"{', '.join(names) or 'none'}; asked for: {chosen.engine}"
    return [Finding("engines", value, False, advice)]


def gpus(chosen: Options) -> list[Finding]:
    """What the engine ``xla:cuda`` needs: driver, GPUs, jax's CUDA plugin, NCCL.

    Nothing where it is not in use, and neither driver nor plugin is there.
    """
    needed = chosen.engine == "xla:cuda"
    plugins = [(release, _installed(f"jax-{release}-plugin")) for release in ("cuda13", "cuda12")]
    plugin = next(((release, found) for release, found in plugins if found), None)
    try:
        driver, count, problem = cuda(), 0, ""
        count = driver.device_count()
    except (OSError, CudaError) as error:
        driver, count, problem = None, 0, str(error)
    if not needed and plugin is None and driver is None:
        return []
    absent = False if needed else None
    findings = []
    if driver is None:
        advice = "install NVIDIA's driver (version 525 or later), or set STRETTO_ENGINE=xla:cpu"
        findings.append(Finding("GPU driver", f"not usable: {problem}", absent, advice))
    else:
        number = driver.version()
        supported = f"supports CUDA {number // 1000}.{number % 1000 // 10}"
        findings.append(Finding("GPU driver", supported))
        names = ", ".join(driver.device_name(n) for n in range(count))
        advice = "" if count else "CUDA shows no GPU: look at CUDA_VISIBLE_DEVICES and nvidia-smi"
        findings.append(
            Finding("GPUs", f"{count}: {names}" if count else "none", count > 0, advice)
        )
        if count and needed and count < chosen.local_devices:
            advice = "set STRETTO_LOCAL_DEVICES to at most that many"
            wanted = f"{chosen.local_devices} devices are asked for, CUDA shows {count} GPUs"
            findings.append(Finding("STRETTO_LOCAL_DEVICES", wanted, False, advice))
    jaxlib = _installed("jaxlib")
    if plugin is None:
        # The release of the driver's CUDA; the newer one where there is none.
        release = "cuda12" if driver is not None and driver.version() < 13000 else "cuda13"
        advice = f"pip install 'stretto[{release}]'"
        findings.append(Finding("CUDA plugin of jax", "not installed", absent, advice))
    elif plugin[1] != jaxlib:
        advice = f"pip install 'jax[{plugin[0]}]=={jaxlib}'"
        value = f"{plugin[1]} for {plugin[0]}, and jaxlib is {jaxlib}"
        findings.append(Finding("CUDA plugin of jax", value, absent, advice))
    else:
        findings.append(Finding("CUDA plugin of jax", f"{plugin[1]} for {plugin[0]}"))
    try:
        number = nccl().version()
        version = f"{number // 10000}.{number % 10000 // 100}.{number % 100}"
        findings.append(Finding("NCCL", version))
    except (OSError, AttributeError, CudaError) as error:
        release = "cu12" if plugin is not None and plugin[0] == "cuda12" else "cu13"
        advice = f"pip install nvidia-nccl-{release}; without it "
        advice += "collectives go through the host's memory"
        findings.append(Finding("NCCL", f"not usable: {error}", None, advice))
    findings += cuda_mpi(chosen)
    cupy = next((v for n in ("cupy-cuda13x", "cupy-cuda12x", "cupy") if (v := _installed(n))), "")
    findings.append(Finding("CuPy", f"{cupy or 'not installed'} (not needed)", bool(cupy) or None))
    return findings


def cuda_mpi(chosen: Options) -> list[Finding]:
    """Whether MPI takes pointers to GPUs' memory, where there is MPI."""
    subject = "MPI on GPUs' memory"
    if not _installed("mpi4py"):
        return []
    if chosen.cuda_mpi != "auto":
        return [
            Finding(subject, f"{'yes' if chosen.cuda_mpi == '1' else 'no'}, by STRETTO_CUDA_MPI")
        ]
    said, problem = _asked(
        "from mpi4py import MPI; from stretto.collectives.gpu_mpi import library_takes; "
        "from stretto.collectives.mpi import loaded_library; "
        "takes, how = library_takes(loaded_library()); print('yes' if takes else 'no', how, sep=', ')"
    )
    if said.startswith("yes"):
        return [Finding(subject, said)]
    advice = (
        "without NCCL, collectives go through the host's memory; an MPI built with CUDA moves what is not "
        "reduced by itself (Open MPI: --with-cuda, MPICH: --with-cuda and MPIR_CVAR_ENABLE_GPU=1), and where "
        "one does not say that it can, STRETTO_CUDA_MPI=1 does"
    )
    return [Finding(subject, said or f"not known: {problem}", None, advice)]


def _installed(name: str) -> str:
    """The version of a package, or an empty string."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def mpi(found: launcher.Launcher | None) -> list[Finding]:
    """The launcher, mpi4py and the MPI library behind it, and the mpiexec on the path."""
    needed = found is not None and found.size != 1
    absent = False if needed else None
    started = f"{found.name}, rank {found.rank} of {found.size or '?'}" if found else "none"
    findings = [Finding("launcher", started if found else "none: one process")]
    advice = (
        "pip install 'stretto[mpi]' for a complete MPI, or pip install mpi4py for the cluster's own"
    )
    try:
        findings.append(Finding("mpi4py", metadata.version("mpi4py")))
    except metadata.PackageNotFoundError:
        return [*findings, Finding("mpi4py", "not installed", absent, advice)]
    name, problem = mpi_library()
    if problem:
        advice = f"mpi4py finds no MPI library: {advice}"
        findings.append(Finding("MPI library", problem, absent, advice))
    else:
        findings.append(Finding("MPI library", name))
    starter = shutil.which("mpiexec") or shutil.which("mpirun")
    beside = os.path.join(os.path.dirname(sys.executable), "mpiexec")
    if starter:
        advice = ""
        if os.path.exists(beside) and not os.path.samefile(beside, starter):
            advice = f"{beside} belongs to this Python's MPI and is not the first one on PATH"
        findings.append(Finding("mpiexec", starter, True, advice))
    elif os.path.exists(beside):
        advice = f"put {os.path.dirname(beside)} on PATH"
        findings.append(Finding("mpiexec", f"{beside}, not on PATH", None, advice))
    else:
        advice = "put the mpiexec of the MPI library on PATH, or use srun"
        findings.append(Finding("mpiexec", "not found", None, advice))
    return findings


def mpi_library() -> tuple[str, str]:
    """Name of the MPI library, or what keeps it from being loaded. Asked of another process.

    Loading MPI may end the process, and this one must not join MPI before the check does.
    """
    return _asked(
        "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; "
        "from stretto.runtime.job.mpi_library import library; print(library(MPI))"
    )


def _asked(code: str) -> tuple[str, str]:
    """What code prints in another process that is in no job, or the last line of its error."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PMI", "OMPI_", "PRTE_"))}
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            timeout=60,
            env=clean,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", str(error)
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        return "", lines[-1] if lines else f"exit code {done.returncode}"
    return done.stdout.strip(), ""


def profiling(chosen: Options) -> list[Finding]:
    """Whether what ``STRETTO_PROFILE`` measures serves for anything: it replaces rates of a table."""
    if not chosen.profile:
        return []
    subject, advice = "STRETTO_PROFILE", ""
    joined = world.current()
    peers = joined.peers if joined is not None else ()
    hosts = [peer.host for peer in peers] or [socket.gethostname()]
    try:
        costs = cost_tables.find(chosen.costs, hosts, chosen.local_devices, chosen.engine)
    except StrettoError as error:
        return [Finding(subject, str(error), False, "correct STRETTO_COSTS")]
    if not chosen.overlap:
        advice = "nothing is measured, since nothing is scheduled: unset STRETTO_OVERLAP"
    elif not costs.text and len(set(hosts)) == 1 and not chosen.engine.endswith(":cuda"):
        advice = (
            "nothing is measured, since there is no table of costs: run stretto bench --calibrate, with the "
            "launcher and the devices of the job, or set STRETTO_COSTS"
        )
    if advice:
        return [Finding(subject, "has nothing to feed", None, advice)]
    kept = cost_tables.times_path(hosts, chosen.local_devices, chosen.engine)
    return [Finding(subject, f"times are kept in {kept}")]


def unknown_variables() -> list[Finding]:
    """Variables that look like options and are none."""
    advice = "not an option of stretto; the options are in the table above"
    return [
        Finding(v, os.environ[v], None, f"{advice}. Did you mean {near}?" if near else advice)
        for v, near in options.unknown().items()
    ]


def all_reduce() -> Finding:
    """Sum the device numbers over all devices of the job, by a JAX program on the platform."""
    platforms = [p for p in os.environ.get("JAX_PLATFORMS", "").split(",") if p]
    if "stretto" not in platforms:
        os.environ["JAX_PLATFORMS"] = "stretto,cpu"
    subject = "all-reduce"
    try:
        import jax
        import jax.numpy as jnp
        import numpy as np
        from jax.sharding import Mesh, NamedSharding, PartitionSpec

        joined = world.bootstrap()
        devices = jax.devices("stretto")
        sharding = NamedSharding(Mesh(np.array(devices), ("i",)), PartitionSpec("i"))
        numbers = np.arange(len(devices), dtype=np.float32)
        array = jax.make_array_from_callback(numbers.shape, sharding, lambda i: numbers[i])
        whole = NamedSharding(sharding.mesh, PartitionSpec())
        total = float(jax.jit(jnp.sum, out_shardings=whole)(array))
    except (StrettoError, RuntimeError, ImportError, ValueError) as error:
        return Finding(subject, f"failed: {error}", False, "the message above says what to do")
    expected = float(numbers.sum())
    over = f"{len(devices)} devices of {joined.size} processes"
    if total != expected:
        return Finding(subject, f"{total} instead of {expected} over {over}", False, "report this")
    return Finding(subject, f"right, over {over}")
