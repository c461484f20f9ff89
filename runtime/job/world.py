"""The world: the processes that make up a job, and how they find each other.

Without a launcher a process is a world of its own, and nothing of MPI is imported. Under one, mpi4py
brings up MPI, the ranks compare what must be equal, and a control plane beside MPI watches over them.

Invariant: whatever is wrong with one rank is raised on every rank, as the same `WorldError`.
"""

from __future__ import annotations

import math
import os
import secrets
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stretto.collectives import gpus
from stretto.collectives.memory import pool

from .. import cores, options
from ..errors import RankFailed, StrettoError, WorldError
from ..options import Options
from . import clock, cost_tables, exits, facts, joining, mpi_library, relay, shared_memory, wireup
from . import launcher as launchers
from ._ends import note_status, speak_at_sigterm
from .assembly import MpiAssembly
from .control import Control, connect, first_line
from .cost_tables import CostText
from .host_folder import HostFolder
from .launcher import Launcher, detect
from .progress import Progress
from .rendezvous import Rendezvous, call_roll
from .run_log import RunLogs
from .watchdog import Peer

if TYPE_CHECKING:
    from mpi4py import MPI


class World:
    """The job, as one of its processes sees it.

    ``rank`` and ``size`` number the processes; each has ``local_devices`` devices. ``comm`` is a
    duplicate of MPI's world communicator that nobody else uses, or None in a world of one process.
    ``peers`` tells where each rank runs; ``launcher`` what started this one, if anything did. ``runs`` is
    this rank's account of what it runs together with others. ``costs`` is the table of costs, ``measured``
    what segments were measured to take by earlier jobs (with ``STRETTO_PROFILE``), both rank 0's.
    ``cores``: on how many cores this rank should compute. ``nodes``: sets of ranks that share memory.
    ``patience``: seconds for which a wait for another rank may keep a core busy, the same on all, and
    ``patience_of_code`` and ``patience_of_callers`` those of compiled code and of callers (`cores`).
    ``engines``: the engine of all ranks, or where they differ all of them, joined by ``+``. ``samples``: the
    first rank with each of them; what is measured there, the slowest counts, is taken for all ranks.
    ``clock_offset``: seconds to add to ``perf_counter()`` for rank 0's, measured only for traces; these call
    the job ``traced_as``. ``service``: where rank 0 may start a service for all, once; None where it cannot.
    ``by_mpiexec``: whether a launcher of MPI started the ranks. ``calls_nccl``: whether code on the GPUs of
    all ranks can call collectives over NCCL.
    """

    def __init__(
        self,
        options: Options,
        comm: MPI.Intracomm | None = None,
        peers: Sequence[Peer] | None = None,
        launcher: Launcher | None = None,
        costs: CostText | None = None,
        places: Sequence[cores.Place] = (),
        nodes: int = 1,
        measured: CostText | None = None,
        engines: str = "",
    ) -> None:
        self.options = options
        self.engines = engines or options.engine
        self.samples: tuple[int, ...] = (0,)
        places = places or [cores.Place("", cores.usable())]
        self.rank: int = comm.Get_rank() if comm else 0
        pool.share([place.host for place in places].count(places[self.rank].host))
        self.cores = cores.of_rank(places, self.rank)
        self.patience = cores.patience(places, nodes) if comm else math.inf
        self.patience_of_code = cores.patience_of_code(self.patience, nodes)
        self.patience_of_callers = cores.patience_of_callers(places)
        self.comm = comm
        self.size: int = comm.Get_size() if comm else 1
        self.has_left = False  # a job of several processes
        self.nodes = nodes
        self.local_devices = options.local_devices
        self.host = socket.gethostname()
        self.peers = tuple(peers or [Peer(0, os.getpid(), self.host)])
        self.launcher = launcher
        self.runs = RunLogs()
        self.costs = costs or _find_costs(options, [self.host])
        self.measured = measured or _find_times(options, [self.host])
        self.clock_offset = 0.0
        self.traced_as = ""
        self.service: relay.Service | None = None
        self.folder: HostFolder | None = None
        self.by_mpiexec = False
        self.calls_nccl = False
        self._progress: list[Progress] = []
        self._control: Control | None = None
        self._forked: StrettoError | None = None
        self._before_leaving: list[Callable[[], None]] = []
        if comm is not None:
            self._control = connect(
                comm,
                self.peers,
                options.timeout,
                options.grace,
                options.control_host,
                self._progress,
                self.runs,
                joining.take_leave,
            )

    @property
    def num_devices(self) -> int:
        """Devices of all ranks."""
        return self.size * self.local_devices

    @property
    def measured_path(self) -> Path:
        """Where it is kept what segments were measured to take."""
        hosts = [peer.host for peer in self.peers]
        return cost_tables.times_path(hosts, self.local_devices, self.engines)

    @property
    def place(self) -> tuple[int, int]:
        """Which rank of its host this is, of how many."""
        here = [rank for rank, peer in enumerate(self.peers) if peer.host == self.host]
        return here.index(self.rank), len(here)

    @property
    def error(self) -> StrettoError | None:
        """Why the job cannot go on, or None while all is well."""
        return self._control.error if self._control else self._forked

    def check(self) -> None:
        """Raise the error of a job that has failed (`RankFailed`, `CollectiveTimeout`), or of a process that
        was forked from a rank (`WorldError`)."""
        error = self.error
        if error is not None:
            raise type(error)(str(error))

    def fail(self, error: BaseException, is_shown: bool = False) -> None:
        """Tell all ranks that this one cannot go on, and why. The job ends on every rank.

        ``is_shown``: Python has printed the error. Nothing happens in a world of one process, or if the job
        has failed already.
        """
        if self._control and not isinstance(error, RankFailed):
            self._control.fail(exits.describe(error), is_shown)

    def _told(self) -> str:
        """What this rank has said of a failure that is not its own."""
        if self._control is None or self.error is None or self._control.culprit == self.rank:
            return ""
        return first_line(self.error)

    def service_address(self, port: str | None = None) -> str:
        """Host and port, as all ranks reach them, where rank 0 may start a service. Raises `WorldError`."""
        if self.service is None:
            raise WorldError("rank 0 has no port for a service: its host gave it none to listen at")
        one_host = len({peer.host for peer in self.peers}) == 1
        local = one_host and self.service.host == "0.0.0.0"
        host = "127.0.0.1" if local else self.service.addresses[0]
        return f"{host}:{port or self.service.port}"

    def on_failure(self, listener: Callable[[StrettoError], None]) -> None:
        """Have ``listener`` called once, from another thread, when the job has failed.

        It should fail what is pending, so that the program gets the error where it waits.
        """
        if self._control:
            self._control.on_failure(listener)

    def progress(self, stream: int = 0) -> Progress:
        """A new `Progress` for a stream to write and the watchdog to read."""
        progress = Progress(stream)
        self._progress.append(progress)
        return progress

    def assembly(self, processes: tuple[int, ...]) -> MpiAssembly:
        """These ranks, to agree on what they run. All of them call this, and wait for each other."""
        return MpiAssembly(self.comm, processes)

    def before_leaving(self, action: Callable[[], None]) -> None:
        """Have ``action`` called when this process leaves the job, while the other ranks still answer."""
        self._before_leaving.append(action)

    def leave(self) -> None:
        """Leave the job, when the process ends: waits for the other ranks, then ends MPI.

        If the job has failed, does not return: the process ends with the exit code that it was going to end
        with, or 1, and under mpiexec with that of the rank that failed, which mpiexec returns.
        """
        if self._control is not None:
            for action in self._before_leaving:
                action()
            if self.error is None:
                self._control.goodbye()
            if self.folder is not None:
                self.folder.leave()
            if self.error is not None:
                self._control.wait_told(3.0)
                self._control.say_rest()
                code = exits.status() or 1
                if self.by_mpiexec:
                    self._control.await_end(code)
                exits.end_process(code)
            self._control.close()
        self.has_left = self.size > 1
        mpi_library.finalize()

    def forget(self) -> None:
        """In a forked child: the job is the parent's."""
        if self._control is not None:
            self._control.close_inherited()
            self._control = None
            self._before_leaving = []
            self._forked = WorldError(
                f"this process was forked from rank {self.rank}, and is not in the job: it cannot run "
                "programs of the devices. Start it anew (multiprocessing's spawn), or have it use NumPy"
            )


_world: World | None = None


def bootstrap(chosen: Options | None = None, rendezvous: Rendezvous | None = None) -> World:
    """The world of this process; made by the first call, the same one ever after.

    ``chosen`` defaults to the options in force. ``rendezvous`` is how processes find each other that no
    launcher of MPI started; a world of one process that was made before it was known makes room for
    theirs. Raises `WorldError`, on every rank alike, when the ranks cannot work together; `OptionsError`
    for options that cannot be used.
    """
    global _world
    joins = rendezvous and rendezvous.size > 1
    if _world is None or (joins and _world.size == 1 and _world.options.launcher != "none"):
        first = _world is None
        _world = _make(chosen, rendezvous)
        if first and _world.rank == 0:
            options.warn_of_unknown()
    elif rendezvous and _world.size > 1 and _place(_world) != _place(rendezvous):
        raise WorldError(_elsewhere(_world.launcher, _place(_world), rendezvous))
    elif chosen is not None and chosen != _world.options:
        if _world.size > 1:
            raise WorldError(
                f"the ranks have joined with {_world.options} and cannot take {chosen} any more: "
                "set options before JAX makes its devices"
            )
        _world = World(chosen)
    if _world.has_left:
        raise WorldError(
            "the process is ending, and has left its job: functions that Python calls at its end can compute "
            "where they are registered after JAX made its devices"
        )
    return _world


def _place(job: World | Launcher | Rendezvous) -> tuple[int, int]:
    return job.rank, job.size


def _elsewhere(launcher: Launcher | None, place: tuple[int, int], rendezvous: Rendezvous) -> str:
    who = launcher.name if launcher else "MPI"
    return (
        f"{who} calls this process rank {place[0]} of {place[1]}, {rendezvous.name} calls it "
        f"{rendezvous.rank} of {rendezvous.size}. Give jax.distributed.initialize the rank and the size "
        "of MPI, or leave it out: stretto does not need it where MPI starts the ranks"
    )


def current() -> World | None:
    """The world, if it has been made."""
    return _world


def _make(chosen: Options | None, rendezvous: Rendezvous | None) -> World:
    problem: StrettoError | None = None
    try:
        chosen = chosen or options.in_force()
    except options.OptionsError as error:
        # The other ranks are on their way into MPI: go there too, and tell them.
        chosen, problem = Options(), error
    launcher, roll = detect(), None
    if rendezvous and _without_mpiexec(launcher, chosen):
        launcher = Launcher(rendezvous.name, rendezvous.rank, rendezvous.size)
        if rendezvous.size > 1:
            problem = problem or mpi_library.no_wireup(launcher)
            roll = call_roll(rendezvous, str(problem or ""), chosen.timeout)
    elif chosen.launcher == "jax":
        raise WorldError(
            "STRETTO_LAUNCHER=jax says that the processes find each other through jax.distributed: call "
            "jax.distributed.initialize before JAX makes its devices"
        )
    wanted = chosen.launcher == "mpi" or (launcher is not None and launcher.size != 1)
    if chosen.launcher == "none" or not wanted:
        if problem:
            raise problem
        return World(chosen, launcher=launcher)
    if not (rendezvous and roll):
        mpi_library.check_reach(launcher)
    with joining.watched(launcher.rank if launcher else 0, chosen.timeout):
        if rendezvous and roll:
            with wireup.answering(rendezvous, roll, chosen.timeout):
                mpi = mpi_library.begin(launcher, answered_here=True)
        else:
            mpi = mpi_library.begin(launcher)
            launchers.mark()
        exits.at_exit(_leave)
        mpi_library.check_launcher(mpi, launcher)
        if mpi.COMM_WORLD.Get_size() == 1:
            if problem:
                raise problem
            return World(chosen, launcher=launcher)
        comm = mpi.COMM_WORLD.Dup()
        place = (comm.Get_rank(), comm.Get_size())
        if rendezvous and place != _place(rendezvous):
            problem = problem or WorldError(_elsewhere(launcher, place, rendezvous))
        own = facts.of_rank(chosen, str(problem) if problem else "")
        if place[0] == 0:
            own["service"] = _reserve(chosen.control_host)
        gathered: list[dict[str, Any]] = comm.allgather(own)
        facts.check(gathered)
        peers = [Peer(rank, f["pid"], f["host"]) for rank, f in enumerate(gathered)]
        places = [cores.Place(f["host"], frozenset(f["cores"])) for f in gathered]
        engines = "+".join(sorted({f["engine"] for f in gathered}))
        if engines != chosen.engine:
            # Decisions that go by what the engine can do are the same on all ranks.
            chosen = replace(chosen, native=False, nccl=False, cuda_mpi="0")
        costs, measured = _common_costs(replace(chosen, engine=engines), comm, peers)
        nodes = _nodes(comm)
        made = World(chosen, comm, peers, launcher, costs, places, nodes, measured, engines)
        named = [f["engine"] for f in gathered]
        made.calls_nccl = all(f["gpus"] for f in gathered) and gpus.serve_all(
            [f["gpus"] for f in gathered]
        )
        made.samples = tuple(sorted(named.index(engine) for engine in set(named)))
        made.service = gathered[0]["service"]
        if made.place[1] > 1:
            made.folder = HostFolder.open(gathered[0]["token"], made.place[1])
        if chosen.trace:
            made.clock_offset = clock.offset_to_first(comm)
            made.traced_as = comm.bcast(secrets.token_hex(8))
    exits.on_uncaught(partial(made.fail, is_shown=True), made._told)
    if not roll:
        made.by_mpiexec = True
        note_status()
        ends = f"stretto: rank {made.rank} ends: SIGTERM: mpiexec, a batch system or somebody else ends it\n"
        speak_at_sigterm(ends.encode())
    made.on_failure(lambda error: shared_memory.remove_names())
    made.on_failure(lambda error: made.folder.leave() if made.folder else None)
    os.register_at_fork(after_in_child=made.forget)
    return made


_reserved: list[socket.socket] = []


def _reserve(host: str) -> relay.Service | None:
    """Rank 0: a port for a service, kept for it until the process ends."""
    try:
        service, held = relay.reserve(host)
    except OSError:
        return None
    _reserved.append(held)
    return service


def _nodes(comm: MPI.Intracomm) -> int:
    """How many sets of ranks there are that share memory, as MPI sees it. All ranks call it."""
    from mpi4py import MPI

    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    first = int(node.Get_rank() == 0)
    node.Free()
    return comm.allreduce(first)


def _find_costs(chosen: Options, hosts: Sequence[str]) -> CostText:
    if not chosen.overlap:
        return CostText()
    return cost_tables.find(chosen.costs, hosts, chosen.local_devices, chosen.engine)


def _find_times(chosen: Options, hosts: Sequence[str]) -> CostText:
    if not (chosen.overlap and chosen.profile):
        return CostText()
    return cost_tables.find_times(hosts, chosen.local_devices, chosen.engine)


def _common_costs(
    chosen: Options, comm: MPI.Intracomm, peers: Sequence[Peer]
) -> tuple[CostText, CostText]:
    """Rank 0's table and measured times. Raises `WorldError` on all ranks where a table cannot be read."""
    found: tuple[CostText, CostText, str] | None = None
    if comm.Get_rank() == 0:
        hosts = [peer.host for peer in peers]
        try:
            found = _find_costs(chosen, hosts), _find_times(chosen, hosts), ""
        except WorldError as error:
            found = CostText(), CostText(), str(error)
    costs, measured, problem = comm.bcast(found)
    if problem:
        raise WorldError(problem)
    return costs, measured


def _without_mpiexec(launcher: Launcher | None, chosen: Options) -> bool:
    """Whether the ranks are to find each other by a rendezvous, if there is one."""
    match chosen.launcher:
        case "jax":
            return True
        case "none":
            return False
    return launcher is None or launcher.size == 1


def _leave() -> None:
    if _world is not None:
        _world.leave()
    else:
        mpi_library.finalize()
