"""The layers: which subpackage may import which. The table is the architecture, see docs/design.md."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# What a layer may import of stretto, besides itself. A name with dots allows that module alone.
ALLOWED: dict[str, tuple[str, ...]] = {
    "collectives": (),
    "runtime": ("collectives",),
    "hlo_frontend": ("collectives.ops", "collectives.types", "runtime.program", "runtime.errors"),
    "plugin": ("collectives", "runtime", "hlo_frontend"),
}
# Checks and passes of programs: data in, data out, like the program itself.
ALLOWED["hlo_frontend"] += ("collectives.order", "collectives.native")

# What the packages of runtime/ may import of it, besides the modules beside them (errors, options, …).
PACKAGES: dict[str, tuple[str, ...]] = {
    "program": (),
    "engines": ("program",),
    "job": (),
    "recording": ("program", "engines", "job"),
    "execution": ("program", "engines", "job", "recording"),
}

# Imports that close a cycle and are still there: (importer, imported). Whoever mends one takes it out.
CLOSING: set[tuple[str, str]] = {
    ("hlo_frontend.values", "hlo_frontend.graph_text"),
    ("hlo_frontend.values", "hlo_frontend.graph_check"),
}

# Layers that import nothing of JAX.
JAX_FREE = ("collectives",)


def imports(path: Path, package: tuple[str, ...]) -> Iterator[tuple[int, str]]:
    """Line and full name of every module that a file imports, wherever in it; relative ones resolved."""
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*base, *([node.module] if node.module else [])))
            for alias in node.names:
                yield node.lineno, f"{module}.{alias.name}"


def violations(path: Path, layer: str, package: tuple[str, ...]) -> list[str]:
    """What a file of a layer imports against the table."""
    found = []
    for line, name in imports(path, package):
        root, _, rest = name.partition(".")
        if root == "stretto":
            own = rest == layer or rest.startswith(f"{layer}.")
            allowed = any(rest == a or rest.startswith(f"{a}.") for a in ALLOWED[layer])
            # `from stretto.x import name` may import a module or a name of an allowed module.
            if not own and not allowed:
                found.append(f"{path.relative_to(ROOT)}:{line} imports {name}")
        elif root in ("jax", "jaxlib") and layer in JAX_FREE:
            found.append(f"{path.relative_to(ROOT)}:{line} imports {name}")
        elif root in ALLOWED:
            found.append(f"{path.relative_to(ROOT)}:{line} imports {name}, not of stretto")
    return found


@pytest.mark.parametrize("layer", sorted(ALLOWED))
def test_a_layer_imports_only_what_the_table_allows(layer: str) -> None:
    files = sorted((ROOT / layer).rglob("*.py"))
    assert files
    found = []
    for path in files:
        package = ("stretto", *path.relative_to(ROOT).parent.parts)
        found += violations(path, layer, package)
    assert not found, "\n".join(found)


def test_the_packages_of_the_runtime_import_each_other_one_way() -> None:
    present = {init.parent.name for init in (ROOT / "runtime").glob("*/__init__.py")}
    assert present == set(PACKAGES)
    found = []
    for module, imported in imported_modules("runtime").items():
        package = f"{module}.".split(".")[1]  # or a module beside the packages
        for name in imported:
            other = name.split(".")[1]
            if other in PACKAGES and other not in (package, *PACKAGES.get(package, ())):
                found.append(f"{module} imports {name}")
    assert not found, "\n".join(found)


def imported_modules(layer: str) -> dict[str, set[str]]:
    """Every module of a layer, by its full name in `stretto`, with those of the layer that it imports."""
    files = {}
    for path in sorted((ROOT / layer).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    found: dict[str, set[str]] = {}
    for module, path in files.items():
        package = path.relative_to(ROOT).parent.parts
        found[module] = set()
        for _, full in imports(path, package if layer == "stretto" else ("stretto", *package)):
            name = full.removeprefix("stretto.")
            if layer == "stretto":
                name = "" if name.split(".")[0] in ALLOWED else full
            while name and name not in files:
                name = name.rpartition(".")[0]
            if name and name != module:
                found[module].add(name)
    return found


def cycles(graph: dict[str, set[str]]) -> list[tuple[str, ...]]:
    """Sets of modules that import each other, by way of one another: the strongly connected components."""
    reached: dict[str, set[str]] = {}
    for module in graph:
        seen: set[str] = set()
        left = [module]
        while left:
            for name in graph[left.pop()] - seen:
                seen.add(name)
                left.append(name)
        reached[module] = seen
    return sorted(
        {
            tuple(sorted(m for m in reached[module] if module in reached[m]))
            for module in graph
            if module in reached[module]
        }
    )


@pytest.mark.parametrize("layer", [*sorted(ALLOWED), "stretto"])
def test_no_modules_import_each_other(layer: str) -> None:
    graph = imported_modules(layer)
    known = {(module, name) for module, name in CLOSING if module.split(".")[0] == layer}
    mended = {
        (module, name)
        for module, name in known
        if not any(module in c and name in c for c in cycles(graph)) or name not in graph[module]
    }
    assert not mended
    without = {
        module: {name for name in imported if (module, name) not in known}
        for module, imported in graph.items()
    }
    assert not cycles(without)


def test_a_cycle_is_found_wherever_the_import_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    folder = tmp_path / "layer" / "inner"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("from .b import x")
    (folder / "a.py").write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from . import b"
    )
    (folder / "b.py").write_text("def f():\n    from stretto.layer.inner.a import y")
    assert cycles(imported_modules("layer")) == [("layer.inner.a", "layer.inner.b")]


def test_one_module_imports_the_optional_package_of_pipelines() -> None:
    optional = "stretto.hlo_frontend.pipelines"
    own = ROOT / "hlo_frontend" / "pipelines"
    files = [path for layer in (*ALLOWED, "stretto") for path in (ROOT / layer).rglob("*.py")]
    found = {
        (path.relative_to(ROOT).as_posix(), name)
        for path in files
        if not path.is_relative_to(own)
        for _, name in imports(path, ("stretto", *path.relative_to(ROOT).parent.parts))
        if name == optional or name.startswith(f"{optional}.")
    }
    names = ("interleave", "scheduled")
    assert found == {("hlo_frontend/reschedule.py", f"{optional}.{name}") for name in names}


WITHOUT_PIPELINES = """
import sys

sys.modules["stretto.hlo_frontend.pipelines"] = None  # importing it fails, as if it was not there
import stretto.cli
import stretto.commands.explain
import stretto.plugin.executable
from stretto.hlo_frontend.compile import compile_hlo
from stretto.runtime.errors import UnsupportedError

module = '''HloModule sum
add {
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT c = f32[] add(a, b)
}
ENTRY e {
  x = f32[4] parameter(0)
  ROOT y = f32[4] all-reduce(x), replica_groups={}, to_apply=add
}
'''
print(len(compile_hlo(module, 2, 1).program.collectives))
try:
    compile_hlo(module, 2, 1, interleave=3)
except UnsupportedError as error:
    print(error)
"""


def test_without_the_package_of_pipelines_only_interleaving_is_missing() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_PIPELINES], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    collectives, reason = done.stdout.splitlines()
    assert collectives == "1"
    assert reason.startswith("3 chunks of layers a device are asked for (stretto_interleave")
    assert "is not installed" in reason and "stretto.hlo_frontend.pipelines" in reason


def test_every_package_is_installed() -> None:
    import tomllib

    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    listed = set(config["tool"]["setuptools"]["packages"])
    present = {"stretto"}
    for layer in (*ALLOWED, "stretto"):
        for init in (ROOT / layer).rglob("__init__.py"):
            parts = init.parent.relative_to(ROOT).parts
            present.add(".".join(parts if parts[0] == "stretto" else ("stretto", *parts)))
    assert listed == present


def test_the_check_sees_what_is_forbidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    path = tmp_path / "collectives" / "x.py"
    path.parent.mkdir()
    path.write_text(
        "def f():\n    from stretto.runtime import world\nfrom ..plugin import client\nimport jax\n"
    )
    found = violations(path, "collectives", ("stretto", "collectives"))
    assert len(found) == 3
    path.write_text("from . import ops\nfrom .ops import Kind\nimport numpy\n")
    assert not violations(path, "collectives", ("stretto", "collectives"))
