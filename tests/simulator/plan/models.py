"""Configs of published models, with what was published of them, and folders of made-up ones."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from radixkv.simulator.plan.families import model_of
from radixkv.simulator.plan.model import Model
from radixkv.simulator.plan.reading import Fields

PUBLISHED: Final[Mapping[str, Mapping[str, Any]]] = json.loads(
    (Path(__file__).parent / "published.json").read_text()
)
"""By name: the fields of its config that matter here, its parameters, its KV a token, and who says so."""

LLAMA: Final[Mapping[str, Any]] = {
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 128,
    "max_position_embeddings": 4096,
}
"""A small Llama."""


def published(name: str) -> Model:
    """Return a published model."""
    return model_of(Fields(Path("config.json"), PUBLISHED[name]["config"]))


def model(**changes: Any) -> Model:
    """Return the small Llama, changed."""
    return model_of(Fields(Path("config.json"), {**LLAMA, **changes}))


def write_config(folder: Path, config: Mapping[str, Any]) -> Path:
    """Write the config.json of a folder. Returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_tensors(file: Path, tensors: Mapping[str, tuple[str, tuple[int, ...], int]]) -> None:
    """Write a safetensors file of zeros: by name an element type, a shape and the bits of an element."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    stop = 0
    for name, (dtype, shape, bits) in tensors.items():
        start, stop = stop, stop + int(np.prod(shape, dtype=np.int64)) * bits // 8
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}
    raw = json.dumps(header).encode()
    file.write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(stop))
