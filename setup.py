"""Builds the extension modules: the C face of the plugin, collectives inside of compiled code, calls of
CUDA's driver and of NCCL, ends of ranks, runs of segments.

All else is in pyproject.toml, but for a line that Python runs when it starts (`plugin/start.py`).

The C declarations of the PJRT API are written here, from the table in ``plugin/abi.py``.
"""

import runpy
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_py import build_py

PLUGIN = Path(__file__).resolve().parent / "plugin"


def write_declarations() -> None:
    """Write the generated declarations, leaving the files alone where nothing changed."""
    abi = runpy.run_path(str(PLUGIN / "abi.py"))
    codegen = runpy.run_path(str(PLUGIN / "abi_codegen.py"))
    tables = (abi["layouts"](), abi["UNIONS"], abi["FUNCTIONS"], abi["EXTENSIONS"])
    for name, text in (
        ("_pjrt_abi.h", codegen["c_header"](*tables)),
        ("_pjrt_abi.pxi", codegen["cython_declarations"](*tables, abi["PROFILER_FUNCTIONS"])),
    ):
        path = PLUGIN / name
        if not path.exists() or path.read_text() != text:
            path.write_text(text)


class WithStart(build_py):
    """Puts `stretto-start.pth` beside the package, where Python looks for such files."""

    def run(self) -> None:
        super().run()
        self.copy_file("stretto-start.pth", f"{self.build_lib}/stretto-start.pth")


write_declarations()
setup(
    cmdclass={"build_py": WithStart},
    ext_modules=[
        Extension(
            "stretto.plugin._capi",
            ["plugin/_capi.pyx"],
            include_dirs=["plugin"],
            depends=[str(p.relative_to(PLUGIN.parent)) for p in PLUGIN.glob("*.pxi")]
            + ["plugin/_pjrt_abi.h", "plugin/abi.py"],
        ),
        Extension(
            "stretto.collectives._native",
            ["collectives/_native.pyx"],
            depends=[
                str(p.relative_to(PLUGIN.parent)) for p in PLUGIN.parent.glob("collectives/*.pxi")
            ],
            # A product and a sum are rounded one by one, as NumPy does.
            extra_compile_args=["-O3", "-ffp-contract=off"],
        ),
        Extension("stretto.collectives._driver", ["collectives/_driver.pyx"]),
        Extension(
            "stretto.collectives._launches",
            ["collectives/_launches.pyx"],
            depends=[f"collectives/{name}.pxi" for name in ("_called", "_ffi", "_giving_way")],
            extra_compile_args=["-pthread"],
            extra_link_args=["-pthread"],
        ),
        Extension("stretto.runtime.job._ends", ["runtime/job/_ends.pyx"]),
        Extension("stretto.runtime.engines._runs", ["runtime/engines/_runs.pyx"]),
    ],
)
