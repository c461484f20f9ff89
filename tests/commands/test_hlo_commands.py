"""`stretto run` and `stretto explain`: results and counts by hand, files of every form, bad input."""

from __future__ import annotations

import gzip
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.mpi import run_ranks

from stretto.commands import hlo_input
from stretto.commands.hlo_input import compile_file
from stretto.hlo_frontend.compile import compile_hlo
from stretto.hlo_frontend.passes.valid import ValidPolicy
from stretto.hlo_frontend.schema import HloModuleProtoWithConfig
from stretto.hlo_frontend.text import parse_hlo_text
from stretto.runtime import options

FLAT = "channel_id=1, replica_groups={{0,1,2,3}}, use_global_device_ids=true"
MODULE = f"""HloModule m, num_partitions=4

sum {{
  left = f32[] parameter(0)
  right = f32[] parameter(1)
  ROOT both = f32[] add(left, right)
}}

body {{
  c = (s32[], f32[8]) parameter(0)
  i = s32[] get-tuple-element(c), index=0
  x = f32[8] get-tuple-element(c), index=1
  one = s32[] constant(1)
  j = s32[] add(i, one)
  moved = f32[8] collective-permute(x), channel_id=1, source_target_pairs={{{{0,1}},{{1,2}},{{2,3}}}},
    frontend_attributes={{_xla_send_recv_validation="{{{{0,1}},{{1,2}},{{1,0}}}}"}}
  next = f32[8] add(x, moved)
  ROOT n = (s32[], f32[8]) tuple(j, next)
}}

condition {{
  cc = (s32[], f32[8]) parameter(0)
  ci = s32[] get-tuple-element(cc), index=0
  three = s32[] constant(3)
  ROOT less = pred[] compare(ci, three), direction=LT
}}

ENTRY e {{
  p = f32[8] parameter(0)
  q = f32[4,2] parameter(1)
  total = f32[8] all-reduce(p), to_apply=sum, {FLAT}, metadata={{source_file="step.py" source_line=12}}
  gathered = f32[16,2] all-gather(q), dimensions={{0}}, {FLAT}, control-predecessors={{total}}
  zero = s32[] constant(0)
  init = (s32[], f32[8]) tuple(zero, p)
  loop = (s32[], f32[8]) while(init), condition=condition, body=body
  shifted = f32[8] get-tuple-element(loop), index=1
  ROOT out = (f32[8], f32[16,2], f32[8]) tuple(total, gathered, shifted)
}}
"""


# The loop above reads the zeros of transfers that it leaves out.
TRUSTED = {"STRETTO_TRUST_VALID_ITERATIONS": "1"}


def stretto(*arguments: str, data: bytes = b"", **env: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "stretto.cli", *arguments],
        input=data,
        env={**os.environ, **TRUSTED, **env},
        capture_output=True,
        timeout=120,
        check=False,
    )


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "module.hlo"
    path.write_text(MODULE)
    return str(path)


def drawn(parameter: int, shape: tuple[int, ...], seed: int = 5) -> np.ndarray:
    """Arguments of the four devices, as documented."""
    rngs = [np.random.default_rng([seed, parameter, d]) for d in range(4)]
    return np.stack([rng.standard_normal(shape).astype(np.float32) for rng in rngs])


def shifted(x: np.ndarray) -> np.ndarray:
    """The loop by hand: pair k moves data in the iterations of its bounds, else zeros arrive."""
    bounds = {(0, 1): (0, 1), (1, 2): (1, 2), (2, 3): (1, 0)}
    for iteration in range(3):
        moved = np.zeros_like(x)
        for (source, target), (low, high) in bounds.items():
            if low <= iteration <= high:
                moved[target] = x[source]
        x = x + moved
    return x


COUNTS = {
    "collectives": {"all-gather": 1, "all-reduce": 1, "collective-permute": 3},
    "messages": 4,
    "bytes": 4 * 32 + 4 * 32 + 4 * 32,
    "skipped": 5,
    # On each device the counter and the sum, three times: how often is known, so nothing is compared.
    "arithmetic": 4 * 2 * 3,
    "skipped_arithmetic": 0,
    "skipped_runs": 0,
    "order": ["total", "gathered", "moved"],
}


def check_results(path: Path) -> None:
    p, q = drawn(0, (8,)), drawn(1, (4, 2))
    with np.load(path) as results:
        assert sorted(results.files) == ["0", "1", "2"]
        for d in range(4):
            np.testing.assert_allclose(results["0"][d], p.sum(0), rtol=1e-5, atol=1e-6)
            np.testing.assert_array_equal(results["1"][d], q.reshape(16, 2))
        np.testing.assert_allclose(results["2"], shifted(p), rtol=1e-6)


def test_run_in_one_process(file: str, tmp_path: Path) -> None:
    out = tmp_path / "out.npz"
    done = stretto("run", file, "--arguments", "random:5", "--results", str(out), "--json")
    assert (done.returncode, done.stderr) == (0, b"")
    assert json.loads(done.stdout) == COUNTS
    check_results(out)


@pytest.mark.quick("2-2")
@pytest.mark.mpi
@pytest.mark.parametrize(("ranks", "local"), [(2, 2), (4, 1)])
def test_run_on_ranks(file: str, tmp_path: Path, ranks: int, local: int) -> None:
    out = tmp_path / "out.npz"
    arguments = ["-m", "stretto.cli", "run", file, "--arguments", "random:5", "--json"]
    done = run_ranks(
        ranks,
        [*arguments, "--results", str(out)],
        env={"STRETTO_LOCAL_DEVICES": str(local), "STRETTO_TRACE": str(tmp_path / "t"), **TRUSTED},
    )
    assert done.returncode == 0, done.stderr
    # Each rank counts the collectives that it runs for its devices; all else is counted by device.
    kinds = {kind: ranks * count for kind, count in COUNTS["collectives"].items()}
    counted = COUNTS | {"collectives": kinds}
    assert json.loads(done.stdout) == counted
    traced = json.loads(stretto("trace", str(tmp_path / "t"), "--json").stdout)
    assert {key: traced[key] for key in counted} == counted
    check_results(out)


def test_arguments_from_arrays(file: str, tmp_path: Path) -> None:
    given, out = tmp_path / "given.npz", tmp_path / "out.npz"
    p = np.arange(8, dtype=np.float32)
    q = np.arange(32, dtype=np.float32).reshape(4, 4, 2)
    np.savez(given, **{"0": p, "1": q})
    done = stretto("run", file, "--arguments", f"npz:{given}", "--results", str(out))
    assert done.returncode == 0, done.stderr
    with np.load(out) as results:
        np.testing.assert_array_equal(results["0"], np.stack([4 * p] * 4))
        np.testing.assert_array_equal(results["1"], np.stack([q.reshape(16, 2)] * 4))


PROTO = parse_hlo_text(MODULE)


def wrapped() -> bytes:
    proto = HloModuleProtoWithConfig()
    proto.hlo_module.ParseFromString(PROTO)
    proto.config.num_partitions = 4
    return proto.SerializeToString()


@pytest.mark.parametrize(
    "data",
    [MODULE.encode(), PROTO, wrapped(), gzip.compress(MODULE.encode()), gzip.compress(PROTO)],
)
def test_every_form_of_file_is_read_from_standard_input(data: bytes) -> None:
    done = stretto("explain", "-", "--json", data=data)
    assert done.returncode == 0, done.stderr
    explained = json.loads(done.stdout)
    assert explained["partitions"] == 4
    assert explained["order"] == COUNTS["order"]


def test_explain(file: str) -> None:
    explained = json.loads(stretto("explain", file, "--json").stdout)
    by_name = {c["name"]: c for c in explained["collectives"]}
    total, gathered = by_name["total"], by_name["gathered"]
    assert (total["kind"], total["groups"], total["bytes"]) == ("all-reduce", [[0, 1, 2, 3]], 32)
    assert (total["source"], total["tokens"]) == ("step.py:12", [])
    assert (gathered["after"], gathered["tokens"]) == (["total"], ["total"])
    assert by_name["moved"]["within"] == ["loop"]
    assert by_name["moved"]["valid_iterations"] == [[0, 1], [1, 2], [1, 0]]
    text = stretto("explain", file).stdout.decode()
    assert "all-reduce %total (f32[8]) -> (f32[8]) reducer add groups [{0,1,2,3}] 32 bytes" in text
    assert "tokens from %total" in text
    assert "at step.py:12" in text


def test_explain_of_many_collectives_begins_with_totals_and_the_worst(tmp_path: Path) -> None:
    sizes = [5, 300, 7, 9, 11, 100, 13, 15, 17, 19, 21, 23]
    text = "HloModule many, num_partitions=2\n\nadd {\n  a = f32[] parameter(0) b = f32[] parameter(1) "
    text += "ROOT sum = f32[] add(a, b) }\n\nENTRY main {\n"
    for i, n in enumerate(sizes):
        text += f"  p{i} = f32[{n}] parameter({i})\n"
        text += (
            f"  total{i} = f32[{n}] all-reduce(p{i}), to_apply=add, channel_id={i + 1}, "
            f"use_global_device_ids=true, replica_groups={{{{0,1}}}}, "
            f'metadata={{source_file="m.py" source_line={i}}}\n'
        )
    shapes = ", ".join(f"f32[{n}]" for n in sizes)
    text += (
        f"  ROOT all = ({shapes}) tuple({', '.join(f'total{i}' for i in range(len(sizes)))})\n}}\n"
    )
    path = tmp_path / "many.hlo"
    path.write_text(text)
    short = stretto("explain", str(path)).stdout.decode().split("\n")
    whole = stretto("explain", str(path), "--all").stdout.decode().split("\n")
    total = 4 * sum(sizes)
    assert (
        f"  all-reduce: 12 in the program, 12 times in a run, {total} bytes from each device"
        in short
    )
    shown = [line for line in short if " all-reduce %" in line]
    found = [re.findall(r" (\d+) bytes at m.py:(\d+)", line) for line in shown]
    largest = sorted(sizes, reverse=True)[:10]
    assert found == [[(str(4 * n), str(sizes.index(n)))] for n in largest]
    assert len([line for line in whole if " all-reduce %" in line]) == 12
    assert set(shown) < set(whole)


BAD = {
    "malformed": (MODULE.replace("parameter(1)", "parameter(1"), "parameter(1"),
    "unknown opcode": (MODULE.replace("f32[8] add(x, moved)", "f32[8] frob(x, moved)"), "frob"),
    "unknown operand": (MODULE.replace("add(x, moved)", "add(x, nobody)"), "nobody"),
    "id twice in groups": (MODULE.replace("{{0,1,2,3}}", "{{0,1,2,2}}"), "total (all-reduce"),
    "id out of range": (MODULE.replace("{{0,1,2,3}}", "{{0,1,2,4}}"), "total (all-reduce"),
    "groups against shapes": (
        MODULE.replace("{{0,1,2,3}}", "{{0,1},{2,3}}"),
        "gathered (all-gather",
    ),
    "target twice": (
        MODULE.replace("{1,2},{2,3}}", "{1,2},{2,2}}", 1),
        "moved (collective-permute",
    ),
    "shapes of an addition": (MODULE.replace("next = f32[8]", "next = f32[9]"), "next"),
    "empty": ("", "empty"),
    "no HLO at all": ("to be or not to be", "cannot parse"),
}


@pytest.mark.quick(
    "malformed-run", "id twice in groups-run", "groups against shapes-explain", "empty-run"
)
@pytest.mark.parametrize("command", ["run", "explain"])
@pytest.mark.parametrize("kind", BAD)
def test_bad_input_names_the_instruction(command: str, kind: str) -> None:
    text, expected = BAD[kind]
    done = stretto(command, "-", data=text.encode())
    assert done.returncode == 2, (done.stdout, done.stderr)
    message = done.stderr.decode()
    assert expected in message
    assert message.startswith(f"stretto {command}: standard input: ")
    assert "Traceback" not in message


@pytest.mark.quick("data0")
@pytest.mark.parametrize("data", [b"\x00\x01\x02\xff" * 50, b"\x1f\x8b broken", PROTO[:200]])
def test_bytes_that_are_no_module(data: bytes) -> None:
    done = stretto("run", "-", data=data)
    assert done.returncode == 2, (done.stdout, done.stderr)
    assert b"Traceback" not in done.stderr


def test_what_ends_the_compiling_process_is_an_error() -> None:
    code = """
import os, signal
from stretto.hlo_frontend.source import in_fork
from stretto.runtime.errors import InvalidProgramError, UnsupportedError
assert in_fork(lambda: {"answer": 42}) == {"answer": 42}
def unsupported():
    raise UnsupportedError("that op")
def endless():
    return [endless()]
class Unpicklable:
    def __reduce__(self):
        raise ValueError("no way to pickle it")
for work, kind, message in [
    (lambda: os.kill(os.getpid(), signal.SIGSEGV), InvalidProgramError, "SIGSEGV"),
    (lambda: os.abort(), InvalidProgramError, "SIGABRT"),
    (lambda: os._exit(3), InvalidProgramError, "ended the process"),
    (unsupported, UnsupportedError, "that op"),
    (endless, InvalidProgramError, "nested too deeply"),
    (Unpicklable, InvalidProgramError, "no way to pickle it"),
]:
    try:
        in_fork(work)
    except kind as error:
        assert message in str(error), error
    else:
        raise SystemExit(f"{message}: nothing raised")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr.decode()


@pytest.mark.thorough
def test_arguments_that_do_not_fit(file: str, tmp_path: Path) -> None:
    given = tmp_path / "given.npz"
    np.savez(given, **{"0": np.zeros(7, np.float32)})
    for arguments, message in [
        (f"npz:{given}", b"array 0 of the arguments is float32[7]; parameter 0 takes f32[8]"),
        ("npz:/nowhere.npz", b"cannot read arguments"),
        ("random:x", b"expected random:SEED or npz:FILE"),
    ]:
        done = stretto("run", file, "--arguments", arguments)
        assert (done.returncode, message in done.stderr) == (2, True), done.stderr
    assert stretto("run", "/nowhere.hlo").returncode == 2


@pytest.mark.thorough
def test_results_that_cannot_be_written(file: str, tmp_path: Path) -> None:
    out = str(tmp_path / "missing" / "out.npz")
    done = stretto("run", file, "--results", out)
    assert done.returncode == 1
    assert done.stderr.decode() == (
        f"stretto run: {out}: cannot be written: No such file or directory\n"
    )


def test_devices_follow_from_groups_where_the_header_is_silent() -> None:
    text = MODULE.replace(", num_partitions=4", "")
    explained = json.loads(stretto("explain", "-", "--json", data=text.encode()).stdout)
    assert (explained["replicas"], explained["partitions"]) == (1, 4)
    by_replica = text.replace(f", {FLAT}", ", replica_groups={{0,1,2}}").replace(
        "channel_id=1, ", ""
    )
    by_replica = by_replica.replace("f32[16,2]", "f32[12,2]").replace("{2,3}", "{2,0}")
    explained = json.loads(stretto("explain", "-", "--json", data=by_replica.encode()).stdout)
    assert (explained["replicas"], explained["partitions"]) == (3, 1)


def different(first: str, second: str, compute: str) -> str:
    """A gather and a scatter, independent of each other, in this order in the file."""
    lines = {
        "gathered": "gathered = f32[16] all-gather(p), dimensions={0}, channel_id=1, "
        "replica_groups={{0,1}}, use_global_device_ids=true",
        "scattered": "scattered = f32[4] reduce-scatter(q), dimensions={0}, to_apply=sum, "
        "channel_id=1, replica_groups={{0,1}}, use_global_device_ids=true",
    }
    types = {"gathered": "f32[16]", "scattered": "f32[4]"}
    return f"""HloModule m, num_partitions=2

sum {{
  left = f32[] parameter(0)
  right = f32[] parameter(1)
  ROOT both = f32[] add(left, right)
}}

ENTRY e {{
  p = f32[8] parameter(0)
  q = f32[8] parameter(1)
  {lines[first]}
  {lines[second]}
  a = {types[first]} {compute}({first}, {first})
  b = {types[second]} {compute}({second}, {second})
  ROOT out = ({types[first]}, {types[second]}) tuple(a, b)
}}
"""


@pytest.mark.mpi
def test_ranks_with_files_of_their_own(tmp_path: Path) -> None:
    """Two programs that share nothing but their collectives, listed in opposite order."""
    texts = (
        different("gathered", "scattered", "add"),
        different("scattered", "gathered", "multiply"),
    )
    out = tmp_path / "out.npz"
    for rank, text in enumerate(texts):
        (tmp_path / f"{rank}.hlo").write_text(text)
    code = """
import os, sys
from stretto.cli import main
from stretto.runtime.job.launcher import detect
folder, out = sys.argv[1:]
file = f"{folder}/{detect().rank}.hlo"
sys.exit(main(["run", file, "--arguments", "random:5", "--results", out, "--json"]))
"""
    done = run_ranks(2, ["-c", code, str(tmp_path), str(out)], env={"STRETTO_LOCAL_DEVICES": "1"})
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert sorted(report["order"]) == ["gathered", "scattered"]
    assert report["arithmetic"] == 4
    p, q = drawn(0, (8,)), drawn(1, (8,))
    gathered, summed = p[:2].reshape(-1), q[0] + q[1]
    with np.load(out) as results:
        np.testing.assert_array_equal(results["0.0"], 2 * gathered)
        np.testing.assert_array_equal(results["1.0"], 2 * summed[:4])
        np.testing.assert_array_equal(results["0.1"], summed[4:] ** 2)
        np.testing.assert_array_equal(results["1.1"], gathered**2)


def test_explain_prints_the_program(file: str) -> None:
    text = stretto("explain", file, "--program").stdout.decode()
    made = compile_hlo(MODULE, 1, 4, valid=ValidPolicy(trust=True)).program
    assert text == str(made)
    assert 'collective all-reduce "total" (f32[8]) -> (f32[8]) groups {{0,1,2,3}}' in text
    as_json = json.loads(stretto("explain", file, "--program", "--json").stdout)
    assert as_json == {"program": text}


def test_explain_prints_the_program_as_it_is_rewritten(tmp_path: Path) -> None:
    path = tmp_path / "alone.hlo"
    path.write_text(MODULE.replace("{{0,1,2,3}}", "{{0},{1},{2},{3}}").replace("[16,2]", "[4,2]"))
    written = stretto("explain", str(path), "--program").stdout.decode()
    rewritten = stretto("explain", str(path), "--program", "--rewrite").stdout.decode()
    assert 'all-reduce "total"' in written and 'all-reduce "total"' not in rewritten


@pytest.mark.thorough
def test_a_dump_of_what_is_explained_and_run(file: str, tmp_path: Path) -> None:
    folder = tmp_path / "dump"
    assert stretto("explain", file, STRETTO_DUMP=str(folder)).returncode == 0
    names = sorted(path.name.split(".", 1)[1] for path in folder.iterdir())
    assert names[:3] == [
        "0000.m.00.hlo.txt",
        "0000.m.01.flatten.txt",
        "0000.m.02.pseudo_tokens.txt",
    ]
    (program,) = folder.glob("*.program.txt")
    assert program.read_text() == stretto("explain", file, "--program").stdout.decode()
    done = stretto("run", file, "--check-skips", STRETTO_DUMP=str(folder))
    assert done.returncode == 1, done.stderr  # what is left out is read
    ran = sorted(path.name for path in folder.glob("*.hlo.txt"))
    assert len({name.split(".")[0] for name in ran}) == 2  # two processes
    assert ran[-1].split(".")[1] != "0000"  # what is compared with is compiled by the same process


def test_a_dump_of_a_plan(file: str, tmp_path: Path) -> None:
    links = [{"axis_stride": 1, "group_size": 4, "latency_s": 1.0, "bytes_per_s": 1.0}]
    compute = {"flops_per_s": 1.0, "bytes_per_s": 1.0, "launch_s": 0.1}
    costs = tmp_path / "costs.json"
    costs.write_text(json.dumps({"compute": compute, "links": links}))
    done = stretto(
        "explain", file, "--program", "--costs", str(costs), STRETTO_DUMP=str(tmp_path / "dump")
    )
    assert done.returncode == 0, done.stderr
    (plan,) = (tmp_path / "dump").glob("*.plan.txt")
    (program,) = (tmp_path / "dump").glob("*.program.txt")
    assert plan.read_text().startswith("entry: ")
    assert program.read_text() == done.stdout.decode()


@pytest.mark.thorough
@pytest.mark.parametrize("by", ["argument", "variable"])
def test_a_run_by_a_table_of_costs(file: str, tmp_path: Path, by: str) -> None:
    """What is explained by a table is what runs by it; results are those without it."""
    links = [{"axis_stride": 1, "group_size": 4, "latency_s": 1.0, "bytes_per_s": 1.0}]
    compute = {"flops_per_s": 1.0, "bytes_per_s": 1.0, "launch_s": 0.1}
    costs = tmp_path / "costs.json"
    costs.write_text(json.dumps({"compute": compute, "links": links}))
    plain, planned, dump = tmp_path / "plain.npz", tmp_path / "planned.npz", tmp_path / "dump"
    assert stretto("run", file, "--results", str(plain)).returncode == 0
    how = ["--costs", str(costs)] if by == "argument" else []
    more = {} if by == "argument" else {"STRETTO_COSTS": str(costs)}
    done = stretto("run", file, "--results", str(planned), *how, STRETTO_DUMP=str(dump), **more)
    assert done.returncode == 0, done.stderr
    (ran,) = dump.glob("*.program.txt")
    explained = stretto("explain", file, "--program", "--costs", str(costs)).stdout.decode()
    assert ran.read_text() == explained != stretto("explain", file, "--program").stdout.decode()
    before, after = np.load(plain), np.load(planned)
    assert sorted(before) == sorted(after)
    for name in before:
        np.testing.assert_array_equal(before[name], after[name])


def test_a_run_by_a_table_that_is_none(file: str, tmp_path: Path) -> None:
    costs = tmp_path / "costs.json"
    costs.write_text("{")
    done = stretto("run", file, "--costs", str(costs))
    assert done.returncode == hlo_input.BAD_INPUT
    assert b"costs.json" in done.stderr and b"Traceback" not in done.stderr


def test_a_dump_that_cannot_be_written(file: str) -> None:
    for command in ("explain", "run"):
        done = stretto(command, file, STRETTO_DUMP=f"{file}/folder")
        assert done.returncode == 2
        assert "the dump cannot be written (STRETTO_DUMP): " in done.stderr.decode()


def test_a_dump_that_ends_is_told_of_though_another_process_writes_it(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "dump"
    monkeypatch.setattr(options, "_chosen", options.Options(dump=str(folder)))

    def forked(work: Callable[[], Any], data: bytes) -> Any:
        """What a child does with the dump, and says about it, is not seen here."""
        folder.rmdir()
        answer = work()
        hlo_input._dumps(str(folder), 0).problem = ""
        caplog.clear()
        return answer

    monkeypatch.setattr(hlo_input, "in_fork", forked)
    compile_file(MODULE.encode(), 4, policy=ValidPolicy(trust=True))
    (record,) = [r for r in caplog.records if "the dump ends here" in r.getMessage()]
    assert "No such file" in record.getMessage()


@pytest.mark.mpi
def test_no_two_ranks_dump_to_one_file(file: str, tmp_path: Path) -> None:
    folder = tmp_path / "dump"
    done = run_ranks(
        2,
        ["-m", "stretto.cli", "run", file],
        env={"STRETTO_LOCAL_DEVICES": "2", "STRETTO_DUMP": str(folder), **TRUSTED},
    )
    assert done.returncode == 0, done.stderr
    ranks = [sorted(folder.glob(f"rank-0000{rank}-*.txt")) for rank in (0, 1)]
    assert len(ranks[0]) == len(ranks[1]) > 10
    stages = [{p.name.split(".", 1)[1]: p.read_text() for p in paths} for paths in ranks]
    assert stages[0] == stages[1]
