"""JAX programs that every backend must answer alike; see ``registry`` for what a program is.

Importing this package imports JAX but starts no backend: programs look at devices when they run.
"""

from __future__ import annotations

from . import (
    beyond_cpu,
    control_flow,
    dtypes,
    groups,
    host,
    models,
    partitioned,
    replicas,
    shapes,
    transforms,
)
from .registry import ALL_FORMS, PROGRAMS, Program

__all__ = [
    "ALL_FORMS",
    "PROGRAMS",
    "Program",
    "beyond_cpu",
    "control_flow",
    "dtypes",
    "groups",
    "host",
    "models",
    "partitioned",
    "replicas",
    "shapes",
    "transforms",
]
