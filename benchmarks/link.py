"""Two hosts with a slow link between them, on one machine: network namespaces joined by a pair of veth.

Each end lets out ``rate`` at most (``tc`` with a token bucket; both directions at once), and each host has
half of the cores. Making them takes the rights of an administrator, `ip` and `tc`; where that is not
permitted, `Unavailable` says what failed.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

# What a host's own name stands for: gloo looks its address up by name.
_ETC = Path("/etc/netns")


class Unavailable(Exception):
    """Namespaces cannot be made here."""


@dataclass(frozen=True)
class Host:
    """One end of the link."""

    namespace: str
    device: str
    address: str
    cores: tuple[int, ...]

    @property
    def prefix(self) -> tuple[str, ...]:
        """The command that starts what follows it on this host, MPI over TCP on the link's device alone.

        ``BENCH_CORES``: to which it is to restrict itself.
        """
        settings = (
            "MPIR_CVAR_NOLOCAL=1",
            "UCX_TLS=tcp,self",
            f"UCX_NET_DEVICES={self.device}",
            f"BENCH_CORES={','.join(map(str, self.cores))}",
        )
        return ("ip", "netns", "exec", self.namespace, "env", *settings)


def _cores(half: int) -> tuple[int, ...]:
    """Half of the cores that this process may use, or the only one."""
    cores = sorted(os.sched_getaffinity(0))
    return tuple(cores[half::2]) or tuple(cores)


@contextmanager
def two_hosts(rate: str = "1gbit") -> Iterator[tuple[Host, Host]]:
    """The hosts, as long as the context lasts. Raises `Unavailable`."""
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise Unavailable(f"`{tool}` is not installed (package iproute2)")
    pid = os.getpid()
    a, b = hosts = (
        Host(f"stretto{pid}a", f"v{pid}a", "10.77.0.1", _cores(0)),
        Host(f"stretto{pid}b", f"v{pid}b", "10.77.0.2", _cores(1)),
    )
    try:
        for host in hosts:
            _run("ip", "netns", "add", host.namespace)
            place = _ETC / host.namespace
            names = f"127.0.0.1 localhost\n{host.address} {socket.gethostname()}\n"
            try:
                place.mkdir(parents=True, exist_ok=True)
                (place / "hosts").write_text(names)
            except OSError as error:
                raise Unavailable(f"{place} cannot be written: {error}") from error
        ends = [f"{host.device} netns {host.namespace}" for host in hosts]
        _run(*f"ip link add {ends[0]} type veth peer name {ends[1]}".split())
        for host in hosts:
            inside = ("ip", "netns", "exec", host.namespace)
            _run(*inside, *f"ip addr add {host.address}/24 dev {host.device}".split())
            _run(*inside, *f"ip link set {host.device} up".split())
            _run(*inside, *["ip", "link", "set", "lo", "up"])
            shape = f"tc qdisc add dev {host.device} root tbf rate {rate} burst 1mbit latency 50ms"
            _run(*inside, *shape.split())
        for host in hosts:
            _wait_until_up(host)
        yield a, b
    finally:
        for host in hosts:
            subprocess.run(["ip", "netns", "del", host.namespace], capture_output=True, check=False)
            shutil.rmtree(_ETC / host.namespace, ignore_errors=True)


def _wait_until_up(host: Host) -> None:
    """The kernel tells of a carrier up to a second late; MPI passes over a device that is not up."""
    state = f"/sys/class/net/{host.device}/operstate"
    until = time.monotonic() + 10
    while _run("ip", "netns", "exec", host.namespace, "cat", state).strip() != "up":
        if time.monotonic() > until:
            raise Unavailable(f"{host.device} does not come up")
        time.sleep(0.05)


def _run(*command: str) -> str:
    """What the command prints. Raises `Unavailable`."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise Unavailable(f"`{' '.join(command)}`: {error}") from error
    if done.returncode:
        raise Unavailable(f"`{' '.join(command)}`: {done.stderr.strip() or done.returncode}")
    return done.stdout
