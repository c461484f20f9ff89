"""A PJRT plugin of somebody else's, built by the suite: ``plugin.c`` says what it is.

Its header comes from the table that stretto's own plugin is compiled with, which tests/plugin/test_abi.py
compares with the official one.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlencode

from stretto.plugin import abi
from stretto.plugin.abi_codegen import c_header

HERE = Path(__file__).parent


def build(folder: Path) -> Path:
    """Compile the plugin; gives the library."""
    header, library = folder / "pjrt_abi.h", folder / "libfar.so"
    header.write_text(c_header(abi.layouts(), abi.UNIONS, abi.FUNCTIONS, {}))
    compiler = [os.environ.get("CC", "cc"), "-shared", "-fPIC", "-O1", "-pthread", f"-I{folder}"]
    subprocess.run([*compiler, str(HERE / "plugin.c"), "-o", str(library)], check=True)
    return library


def options(devices: int = 1, **more: object) -> dict[str, object]:
    """Of the plugin's client."""
    return {"python": sys.executable, "device": str(HERE / "device.py"), "devices": devices, **more}


def engine(library: Path | str, devices: int = 1, **more: object) -> str:
    """What STRETTO_ENGINE is set to."""
    return f"pjrt:{library}?{urlencode(options(devices, **more))}"
