"""For ranks that die: a process between the launcher and the rank."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

# Seconds for which the place of a rank that was killed is held: longer than the others take to end, and
# shorter than tests wait.
HELD = 30.0


def behind_a_shield(script: str, *arguments: str, own_session: bool = False) -> None:
    """Run this rank's script in a child process, so that the launcher does not see it die; the child returns.

    A launcher that does would end the other ranks, maybe before they have noticed by themselves. Called
    before JAX is imported: this process only waits. In a session of its own the child is not reached by what
    the launcher sends to this process's group either.
    """
    if "SHIELDED" in os.environ:
        return
    os.environ["SHIELDED"] = "1"
    process = subprocess.Popen(
        [sys.executable, script, *arguments], close_fds=False, start_new_session=own_session
    )
    code = process.wait()
    if code == -signal.SIGKILL:
        os.write(2, f"shield: process {process.pid} was killed\n".encode())
        # Until the launcher ends this, because another rank has ended. On busy cores Hydra was seen to leave
        # it for ever, though the other one had gone, with exit code 1.
        time.sleep(HELD)
    os._exit(abs(code))
