"""Builds the one extension module, the C face of the plugin; all else is in pyproject.toml."""

from pathlib import Path

from setuptools import Extension, setup

source = Path("plugin/_capi.pyx")
setup(ext_modules=[Extension("stretto.plugin._capi", [str(source)])] if source.exists() else [])
