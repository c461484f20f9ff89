"""For ranks that die: a process between the launcher and the rank."""

from __future__ import annotations

import os
import signal
import subprocess
import sys


def behind_a_shield(script: str, *arguments: str) -> None:
    """Run this rank's script in a child process, so that the launcher does not see it die; the child returns.

    A launcher that does would end the other ranks, maybe before they have noticed by themselves. Called
    before JAX is imported: this process only waits.
    """
    if "SHIELDED" in os.environ:
        return
    os.environ["SHIELDED"] = "1"
    process = subprocess.Popen([sys.executable, script, *arguments], close_fds=False)
    code = process.wait()
    if code == -signal.SIGKILL:
        os.write(2, f"shield: process {process.pid} was killed\n".encode())
        signal.pause()  # until the launcher ends this, because another rank has ended
    os._exit(abs(code))
