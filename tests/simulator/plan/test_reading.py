"""Configs and headers of safetensors from anywhere: what is hostile is refused, fast, with its name."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from radixkv.errors import ConfigError
from radixkv.simulator.plan.families import KNOWN, model_of
from radixkv.simulator.plan.reading import MAX_CONFIG_BYTES, Fields, read_config, tensors_in
from tests.simulator.plan.models import LLAMA, PUBLISHED, write_config, write_tensors


def test_a_folder_or_its_config(tmp_path: Path) -> None:
    folder = write_config(tmp_path / "m", LLAMA)
    assert read_config(folder).count("hidden_size") == 64
    assert read_config(folder / "config.json").count("hidden_size") == 64


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"{",
        b'{"a": 1, "a": 2}',
        b"\xff\xfe{}",
        b"[" * 100_000,
        b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
        b'{"hidden_size": ' + b"9" * 10_000 + b"}",
        b" " * (MAX_CONFIG_BYTES + 1),
    ],
)
def test_files_that_are_no_config_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"config\.json|JSON|at most"):
        read_config(tmp_path)


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    for place in (tmp_path, tmp_path / "absent", "meta-llama/Llama-3.1-8B", "\0"):
        with pytest.raises(
            ConfigError, match=r"--model=.* is not allowed; allowed: a folder with a config.json"
        ):
            read_config(place)


_VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**80), 2**80),
    st.floats(),
    st.text(max_size=10),
    st.lists(st.integers(-2, 2**40), max_size=4),
    st.lists(
        st.sampled_from(["full_attention", "sliding_attention", "linear_attention", "mamba", "x"]), max_size=5
    ),
    st.dictionaries(st.text(max_size=4), st.integers(), max_size=2),
)
_NAMES = sorted(
    {name for each in PUBLISHED.values() for name in each["config"]} | {"text_config", "layer_types"}
)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(
    st.sampled_from(sorted(PUBLISHED)),
    st.dictionaries(st.sampled_from(_NAMES), _VALUES, max_size=3),
    st.sampled_from(KNOWN),
    st.booleans(),
)
def test_any_config_gives_a_model_or_a_config_error(
    name: str, changes: dict[str, Any], kind: str, changes_kind: bool
) -> None:
    config = {**PUBLISHED[name]["config"], **changes, **({"model_type": kind} if changes_kind else {})}
    try:
        found = model_of(Fields(Path("config.json"), config))
    except ConfigError as error:
        assert len(str(error)) < 2_000
        return
    assert found.num_layers >= 1 and found.num_parameters > 0
    assert all(each.num_layers > 0 for each in (*found.layers, *found.states))


# --- headers


TENSORS = {
    "model.layers.0.self_attn.k_proj.weight": ("BF16", (8, 4), 16),
    "lm_head.weight": ("F32", (3,), 32),
}


def test_headers_are_read_without_the_data(tmp_path: Path) -> None:
    assert tensors_in(tmp_path) is None
    write_tensors(tmp_path / "a.safetensors", TENSORS)
    write_tensors(tmp_path / "b.safetensors", {"x": ("F4", (2, 3), 4), "empty": ("I64", (0, 5), 64)})
    found = tensors_in(tmp_path)
    assert found is not None
    assert {each.name: (each.shape, each.num_bytes) for each in found} == {
        "model.layers.0.self_attn.k_proj.weight": ((8, 4), 64),
        "lm_head.weight": ((3,), 12),
        "x": ((2, 3), 3),
        "empty": ((0, 5), 0),
    }


def _file(header: object, data: bytes = b"", size: int | None = None) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(raw) if size is None else size).to_bytes(8, "little") + raw + data


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "a header of 2 to"),
        (b"\1\2\3", "a header of 2 to"),
        (_file(b"{}", size=2**63), "a header of 2 to"),
        (_file(b"{}", size=100), "a header of 2 to"),
        (_file(b"[]"), "a JSON object"),
        (_file(b"{}x"), "JSON"),
        (_file({"a": 3}), "dtype is not set"),
        (_file({"a": {"dtype": "Q4", "shape": [1], "data_offsets": [0, 1]}}, b"1"), "dtype='Q4'"),
        (_file({"a": {"dtype": "I8", "shape": [-1], "data_offsets": [0, 1]}}, b"1"), "shape"),
        (_file({"a": {"dtype": "I8", "shape": [2**60], "data_offsets": [0, 1]}}, b"1"), "shape"),
        (_file({"a": {"dtype": "I8", "shape": [2], "data_offsets": [0, 1]}}, b"1"), "the bytes of I8"),
        (_file({"a": {"dtype": "I8", "shape": [1], "data_offsets": [1, 0]}}, b"1"), "the bytes of I8"),
        (_file({"a": {"dtype": "I8", "shape": [9], "data_offsets": [0, 9]}}, b"1"), "a whole file"),
        (_file({"a": {"dtype": "I8", "shape": [1], "data_offsets": [0, 1]}}, b"1234"), "a whole file"),
        (_file(b'{"a": 1, "a": 2}'), "a name occurs twice"),
    ],
)
def test_damaged_headers_are_refused(tmp_path: Path, content: bytes, problem: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match=problem):
        tensors_in(tmp_path)


def test_names_in_two_files_are_refused(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_tensors(tmp_path / f"{name}.safetensors", TENSORS)
    with pytest.raises(ConfigError, match="names of tensors that no other file has"):
        tensors_in(tmp_path)


def test_a_pipe_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match="a safetensors file"):
        tensors_in(tmp_path)
