"""Runs mypy on the package as it is imported: the layers as subpackages of `stretto`.

In the source tree the layers lie beside `stretto/`; mypy is shown a folder of links in which they lie in it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

LAYERS = ("collectives", "runtime", "hlo_frontend", "plugin")


def main() -> int:
    root = Path(__file__).resolve().parents[1]
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "stretto"
        package.mkdir()
        for path in (root / "stretto").iterdir():
            if path.name != "__pycache__":
                (package / path.name).symlink_to(path)
        for layer in LAYERS:
            (package / layer).symlink_to(root / layer)
        command = [sys.executable, "-m", "mypy", "--config-file", str(root / "pyproject.toml")]
        command += ["--cache-dir", str(root / ".mypy_cache"), "-p", "stretto"]
        environment = {**os.environ, "MYPYPATH": folder}
        return subprocess.run(command, cwd=folder, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
