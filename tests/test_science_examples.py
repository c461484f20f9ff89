"""`examples/shallow_water.py` and `examples/conjugate_gradient.py`: on devices of one process and on ranks.

Expected: one device's worth of NumPy, what the equations conserve, and a direct solution.
"""

from __future__ import annotations

import importlib
import json
import struct
import sys
import zlib
from pathlib import Path
from types import ModuleType

import jax
import numpy as np
import pytest
from support.mpi import run_ranks

import stretto

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture(scope="module")
def modules() -> dict[str, ModuleType]:
    sys.path.insert(0, str(EXAMPLES))
    try:
        names = ("shallow_water", "conjugate_gradient", "picture")
        return {name: importlib.import_module(name) for name in names}
    finally:
        sys.path.remove(str(EXAMPLES))


@pytest.fixture(scope="module")
def devices() -> list[jax.Device]:
    return jax.devices("stretto")


def reports(ranks: int, script: str, *arguments: str) -> dict[str, float]:
    done = run_ranks(
        ranks,
        [str(EXAMPLES / script), *arguments],
        env={"JAX_PLATFORMS": "stretto", "STRETTO_LOCAL_DEVICES": "1"},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


class TestShallowWater:
    ROWS, COLUMNS, STEPS = 16, 32, 25

    def reference(self, module: ModuleType) -> np.ndarray:
        """The same steps in float64, with the plane in one piece."""
        delta = module.COURANT * module.SPACING / (module.GRAVITY * module.DEPTH) ** 0.5

        def tendency(state: np.ndarray) -> np.ndarray:
            h, u, v = state
            s, g, f, k = module.SPACING, module.GRAVITY, module.CORIOLIS, module.VISCOSITY

            def east(a: np.ndarray) -> np.ndarray:
                return np.roll(a, -1, 1)

            def west(a: np.ndarray) -> np.ndarray:
                return np.roll(a, 1, 1)

            def north(a: np.ndarray) -> np.ndarray:
                return np.roll(a, -1, 0)

            def south(a: np.ndarray) -> np.ndarray:
                return np.roll(a, 1, 0)

            flux_x, flux_y = u * (h + east(h)) / 2, v * (h + north(h)) / 2
            corner = (east(v) - v - north(u) + u) / s + f
            head = g * h + (u**2 + west(u) ** 2 + v**2 + south(v) ** 2) / 4
            to_u, to_v = corner * (v + east(v)) / 2, corner * (u + north(u)) / 2
            smooth = [k * (east(a) + west(a) + north(a) + south(a) - 4 * a) / s**2 for a in (u, v)]
            return np.stack(
                [
                    -(flux_x - west(flux_x) + flux_y - south(flux_y)) / s,
                    (to_u + south(to_u)) / 2 - (east(head) - head) / s + smooth[0],
                    -(to_v + west(to_v)) / 2 - (north(head) - head) / s + smooth[1],
                ]
            )

        state = module.initial_state(self.ROWS, self.COLUMNS).astype(np.float64)
        before = earlier = tendency(state)
        for _ in range(self.STEPS):
            now = tendency(state)
            state = state + delta * (23 * now - 16 * before + 5 * earlier) / 12
            before, earlier = now, before
        return state

    @pytest.mark.quick("4x1")
    @pytest.mark.parametrize("shape", ["2x2", "1x4", "4x1"])
    def test_as_in_one_piece(
        self, modules: dict[str, ModuleType], devices: list[jax.Device], shape: str
    ) -> None:
        module = modules["shallow_water"]
        mesh = module.mesh_of(devices, shape)
        state = module.placed(module.initial_state(self.ROWS, self.COLUMNS), mesh)
        compiled = module.simulation(mesh, self.STEPS).lower(state).compile()
        end = np.asarray(compiled(state))
        expected = self.reference(module)
        for found, wanted, tolerance in zip(end, expected, (1e-3, 1e-3, 1e-3), strict=True):
            np.testing.assert_allclose(found, wanted, atol=tolerance, rtol=1e-5)
        assert "sites (" in str(stretto.explain(compiled).program)

    def test_water_at_rest_stays_at_rest(
        self, modules: dict[str, ModuleType], devices: list[jax.Device]
    ) -> None:
        module = modules["shallow_water"]
        mesh = module.mesh_of(devices)
        begin = np.zeros((3, 8, 8), np.float32)
        begin[0] = module.DEPTH
        end = module.simulation(mesh, 10)(module.placed(begin, mesh))
        np.testing.assert_array_equal(np.asarray(end), begin)

    @pytest.mark.quick("2")
    @pytest.mark.mpi
    @pytest.mark.parametrize("ranks", [2, 4])
    def test_on_ranks(self, modules: dict[str, ModuleType], tmp_path: Path, ranks: int) -> None:
        picture = tmp_path / "eddies.png"
        arguments = ["--rows", "16", "--columns", "32", "--steps", "25", "--picture", str(picture)]
        found = reports(ranks, "shallow_water.py", *arguments)
        expected = self.reference(modules["shallow_water"])
        assert abs(found["mass_change"]) < 1e-6
        assert found["speed"] == pytest.approx(np.abs(expected[1:]).max(), rel=1e-4)
        assert picture.read_bytes().startswith(b"\x89PNG")


class TestConjugateGradient:
    SIZE = 24

    @pytest.mark.parametrize("shape", ["2x2", "1x4"])
    def test_the_direct_solution(
        self, modules: dict[str, ModuleType], devices: list[jax.Device], shape: str
    ) -> None:
        module, n = modules["conjugate_gradient"], self.SIZE
        mesh = module.mesh_of(devices, shape)
        density = module.charges(n)
        given = module.placed(density, mesh)
        compiled = module.solver(mesh, 1e-5, 1000).lower(given).compile()
        potential, count = compiled(given)
        line = 2 * np.eye(n) - np.eye(n, k=1) - np.eye(n, k=-1)
        matrix = np.kron(line, np.eye(n)) + np.kron(np.eye(n), line)
        expected = np.linalg.solve(matrix, density.reshape(-1)).reshape(n, n)
        np.testing.assert_allclose(np.asarray(potential), expected, atol=1e-4)
        assert abs(int(count) - self.iterations(matrix, density.reshape(-1), 1e-5)) <= 2
        assert module.residual_of(expected, density) < 1e-12
        assert "sites (" in str(stretto.explain(compiled).program)

    @staticmethod
    def iterations(matrix: np.ndarray, given: np.ndarray, tolerance: float) -> int:
        """Of the method as textbooks have it, in float64."""
        solution, residual = np.zeros(len(given)), given.astype(np.float64)
        direction, count = residual, 0
        while np.linalg.norm(residual) > tolerance * np.linalg.norm(given):
            image = matrix @ direction
            squared = residual @ residual
            length = squared / (direction @ image)
            solution = solution + length * direction
            residual = residual - length * image
            direction = residual + residual @ residual / squared * direction
            count += 1
        return count

    def test_it_stops_after_the_most_iterations(
        self, modules: dict[str, ModuleType], devices: list[jax.Device]
    ) -> None:
        module = modules["conjugate_gradient"]
        mesh = module.mesh_of(devices)
        _, count = module.solver(mesh, 1e-30, 7)(module.placed(module.charges(self.SIZE), mesh))
        assert int(count) == 7

    @pytest.mark.quick("2")
    @pytest.mark.mpi
    @pytest.mark.parametrize("ranks", [2, 4])
    def test_on_ranks(self, ranks: int) -> None:
        found = reports(ranks, "conjugate_gradient.py", "--size", "64")
        assert found["residual"] < 1.2e-4
        assert 50 < found["iterations"] < 500


def test_a_picture_has_the_colours_of_its_values(
    modules: dict[str, ModuleType], tmp_path: Path
) -> None:
    path = tmp_path / "a.png"
    modules["picture"].write_picture(path, np.array([[-2.0, 0.0], [1.0, 2.0]]))
    data, chunks, offset = path.read_bytes(), {}, 8
    while offset < len(data):
        (length,) = struct.unpack_from(">I", data, offset)
        kind, body = data[offset + 4 : offset + 8], data[offset + 8 : offset + 8 + length]
        (check,) = struct.unpack_from(">I", data, offset + 8 + length)
        assert zlib.crc32(kind + body) == check
        chunks[kind] = body
        offset += 12 + length
    assert struct.unpack(">II", chunks[b"IHDR"][:8]) == (2, 2)
    rows = zlib.decompress(chunks[b"IDAT"])
    assert rows == bytes([0, 255, 128, 128, 255, 0, 0]) + bytes([0, 0, 0, 255, 255, 255, 255])
