"""Topologies by name: programs are compiled for devices that need not exist, and loaded where they do."""

from __future__ import annotations

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import serialize_executable, topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import stretto
from stretto.plugin.topology import named_topology, read_topology

pytestmark = pytest.mark.usefixtures("on_stretto")


def compile_for(devices: list[jax.Device]) -> jax.stages.Compiled:
    """Sums over all devices, of a matrix split over them."""
    sharding = NamedSharding(Mesh(np.array(devices), ("x",)), PartitionSpec("x"))
    argument = jax.ShapeDtypeStruct((8, 16), np.float32, sharding=sharding)
    return jax.jit(lambda a: jnp.tanh(a).sum(0)).lower(argument).compile()


def test_names() -> None:
    devices = topologies.get_topology_desc("2x3", platform="stretto").devices
    assert [(d.id, d.process_index) for d in devices] == [(i, i // 3) for i in range(6)]
    assert {d.platform for d in devices} == {"stretto"}
    assert len(topologies.get_topology_desc(platform="stretto").devices) == 4
    for name in ("2y3", "0x4", "2x", "70000x1", "-1x2"):
        with pytest.raises(jax.errors.JaxRuntimeError, match="expected PROCESSESxDEVICES"):
            topologies.get_topology_desc(name, platform="stretto")
    with pytest.raises(jax.errors.JaxRuntimeError, match="no option 'speed'"):
        topologies.get_topology_desc("1x1", platform="stretto", speed=3)


def test_a_gpu_that_is_described_is_for_its_engine() -> None:
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"for engine xla:cuda, and .* xla:cpu"):
        topologies.get_topology_desc("1x1", platform="stretto", target_config="sm_90")


def test_compiled_elsewhere_and_loaded_here(devices: list[jax.Device]) -> None:
    compiled = compile_for(topologies.get_topology_desc("1x4", platform="stretto").devices)
    assert compiled.cost_analysis()["flops"] > 0
    memory = compiled.memory_analysis()
    assert (memory.argument_size_in_bytes, memory.output_size_in_bytes) == (2 * 64, 64)
    assert "num_partitions=4" in compiled.as_text()
    assert compiled.runtime_executable().hlo_modules()[0].name == "jit__lambda"
    before = stretto.compilations()
    loaded = serialize_executable.deserialize_and_load(
        *serialize_executable.serialize(compiled), backend="stretto", execution_devices=devices
    )
    after = stretto.compilations()
    assert (after.programs, after.segments) == (before.programs, before.segments)
    assert after.restored > before.restored
    host = np.random.default_rng(0).random((8, 16), np.float32)
    sharding = NamedSharding(Mesh(np.array(devices), ("x",)), PartitionSpec("x"))
    result = loaded(jax.device_put(host, sharding))
    np.testing.assert_allclose(np.asarray(result), np.tanh(host).sum(0), rtol=1e-6)


def test_a_program_for_another_world_is_refused(devices: list[jax.Device]) -> None:
    compiled = compile_for(topologies.get_topology_desc("2x2", platform="stretto").devices)
    with pytest.raises(jax.errors.JaxRuntimeError, match="2 processes with 2 devices each"):
        serialize_executable.deserialize_and_load(
            *serialize_executable.serialize(compiled), backend="stretto", execution_devices=devices
        )


def test_a_topology_comes_back_from_its_bytes() -> None:
    data = named_topology("2x3").serialized
    assert read_topology(data).serialized == data != named_topology("3x2").serialized
    assert [(d.id, d.process_index) for d in read_topology(data).devices][-1] == (5, 1)
    for other in (
        b"",
        b"[]",
        b'{"ids": [[0, 0], [2, 1]]}',
        b'{"ids": []}',
        data.replace(b"[5, 1]", b"5"),
    ):
        with pytest.raises(ValueError, match="no topology of stretto"):
            read_topology(other)
    with pytest.raises(ValueError, match="of another stretto, of jaxlib"):
        read_topology(data.replace(b'"jaxlib": "', b'"jaxlib": "9'))


def test_an_exported_program(devices: list[jax.Device]) -> None:
    pytest.importorskip("flatbuffers")
    sharding = NamedSharding(Mesh(np.array(devices), ("x",)), PartitionSpec("x"))
    argument = jax.device_put(np.arange(8.0, dtype=np.float32), sharding)
    exported = jax.export.export(jax.jit(lambda a: a / a.sum()), platforms=("stretto",))(argument)
    assert exported.platforms == ("stretto",)
    assert exported.nr_devices == 4
    back = jax.export.deserialize(exported.serialize())
    expected = np.arange(8, dtype=np.float32) / np.float32(28)
    np.testing.assert_allclose(np.asarray(back.call(argument)), expected, rtol=1e-6)
    both = jax.export.export(jax.jit(jnp.sin), platforms=("cpu", "stretto"))(1.0)
    result = jax.jit(jax.export.deserialize(both.serialize()).call)(2.0)
    np.testing.assert_allclose(np.asarray(result), np.sin(2.0), rtol=1e-6)
