"""Options: every variable, its origin, and what is said of a value that cannot be used."""

from __future__ import annotations

import pytest

from stretto.runtime.options import VARIABLES, Options, OptionsError, unknown


def test_defaults_and_their_origin() -> None:
    options = Options.from_environment({})
    assert (options.local_devices, options.engine, options.timeout) == (1, "xla:cpu", 300.0)
    assert {options.origin(name) for name in VARIABLES} == {"default"}


def test_every_variable_sets_its_field() -> None:
    texts_and_values: dict[str, tuple[str, object]] = {
        "local_devices": ("4", 4),
        "engine": ("null", "null"),
        "timeout": ("2.5", 2.5),
        "grace": ("0", 0.0),
        "launcher": ("none", "none"),
        "control_host": ("10.0.0.1", "10.0.0.1"),
        "pseudo_tokens": ("0", False),
        "trust_valid_iterations": ("1", True),
        "derive_valid_iterations": ("0", False),
        "poison_skipped": ("1", True),
        "overlap": ("0", False),
        "costs": ("costs.json", "costs.json"),
        "native": ("0", False),
        "nccl": ("0", False),
        "cuda_mpi": ("1", "1"),
        "profile": ("1", True),
        "skip_compute": ("0", False),
        "pipeline_loops": ("0", False),
        "rewrite": ("0", False),
        "split": ("1", True),
        "trace": ("folder", "folder"),
        "interleave": ("3", 3),
        "schedule": ("1f1b", "1f1b"),
        "finite_padding": ("1", True),
        "shared_memory": ("0", False),
        "share_compiled": ("0", False),
        "dump": ("stages", "stages"),
    }
    assert texts_and_values.keys() == VARIABLES.keys()
    options = Options.from_environment(
        {VARIABLES[name][0]: text for name, (text, _) in texts_and_values.items()}
    )
    for name, (_, value) in texts_and_values.items():
        assert getattr(options, name) == value, name
        assert value != getattr(Options(), name), f"the test sets {name} to its default"
    for name, (variable, _) in VARIABLES.items():
        assert options.origin(name) == variable


def test_an_empty_variable_is_unset() -> None:
    options = Options.from_environment({"STRETTO_TIMEOUT": " "})
    assert options.timeout == 300.0
    assert options.origin("timeout") == "default"


def test_what_a_program_sets_is_told_apart() -> None:
    assert Options(timeout=7.0).origin("timeout") == "program"


@pytest.mark.parametrize(
    ("variable", "text", "expected"),
    [
        (
            "STRETTO_LOCAL_DEVICES",
            "four",
            "STRETTO_LOCAL_DEVICES is 'four': expected a whole number",
        ),
        ("STRETTO_LOCAL_DEVICES", "0", "STRETTO_LOCAL_DEVICES is 0: expected a whole number"),
        ("STRETTO_LOCAL_DEVICES", "9" * 30, "expected a whole number of devices, from 1 to 65536"),
        ("STRETTO_LOCAL_DEVICES", "1.5", "STRETTO_LOCAL_DEVICES is '1.5'"),
        ("STRETTO_TIMEOUT", "-1", "STRETTO_TIMEOUT is -1.0: expected a number of seconds above 0"),
        ("STRETTO_TIMEOUT", "nan", "STRETTO_TIMEOUT is nan"),
        ("STRETTO_GRACE", "soon", "STRETTO_GRACE is 'soon'"),
        (
            "STRETTO_LAUNCHER",
            "ssh",
            "STRETTO_LAUNCHER is 'ssh': expected one of auto, mpi, jax, none",
        ),
    ],
)
def test_a_bad_value_is_named(variable: str, text: str, expected: str) -> None:
    with pytest.raises(OptionsError) as caught:
        Options.from_environment({variable: text})
    assert expected in str(caught.value)


def test_a_bad_value_of_a_program_is_named() -> None:
    with pytest.raises(OptionsError, match=r"option local_devices .* is -2"):
        Options(local_devices=-2)


def test_variables_that_are_no_options_are_found_with_what_they_resemble() -> None:
    environment = dict.fromkeys((variable for variable, _ in VARIABLES.values()), "1")
    assert unknown({**environment, "_STRETTO_RANK": "1 2", "STRETTO_TEST_FULL": "1"}) == {}
    assert unknown({"STRETTO_TIMOUT": "3", "stretto_trace": "here", "STRETTO_COLOUR": "red"}) == {
        "STRETTO_TIMOUT": "STRETTO_TIMEOUT",
        "stretto_trace": "STRETTO_TRACE",
        "STRETTO_COLOUR": "",
    }
