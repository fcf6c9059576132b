"""Runs of a script with SGLang's Python, in the environment that ``RADIXKV_SGLANG`` names."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from radixkv.signing import KeySet

ROOT = Path(__file__).parents[3]
HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for runs of SGLang."""
    return make_folder(tmp_path_factory.mktemp("sglang"))


def make_folder(folder: Path) -> Path:
    """Put a small model there whose tokens depend on the whole context, keys, and radixkv's entry points."""
    from radixkv.engines.hf import demo_model

    model = demo_model(vocab_size=2048, num_layers=2, hidden_size=256, max_model_len=4096)
    model.save_pretrained(folder / "model")
    KeySet.derive([b"the fleet's own secret"]).write(folder / "engine.keys")
    installed = folder / "plugin" / "radixkv-0.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: radixkv\nVersion: 0\n")
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    entry = points["sglang.srt.plugins"]["radixkv"]
    plugins = "".join(
        f"{name} = {each}\n"
        for name, each in {
            "radixkv": entry,
            "trace": "tests.engines.sglang.scheduler_trace:register",
            "planted": "tests.engines.sglang.planted:register",
        }.items()
    )
    (installed / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{plugins}")
    return folder


def variables_for(folder: Path | None, given: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process with SGLang."""
    paths = [ROOT, ROOT / "kernels", ROOT / "policies", HERE / "stubs"]
    if folder is not None:
        paths.append(folder / "plugin")
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "SGLANG_USE_CPU_ENGINE": "1",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        **given,
    }


@functools.cache
def answer_of(
    script: str, argument: str, folder: Path | None, variables: tuple[tuple[str, str], ...] = ()
) -> dict[str, Any]:
    """What a script of this folder printed behind FOUND. The same arguments run once."""
    done = subprocess.run(
        [os.environ["RADIXKV_SGLANG"], str(HERE / script), argument],
        capture_output=True,
        text=True,
        env=variables_for(folder, dict(variables)),
        check=False,
    )
    _, found, line = done.stdout.partition("FOUND ")
    assert found, done.stdout[-2000:] + done.stderr[-40_000:]
    answer: dict[str, Any] = json.JSONDecoder().raw_decode(line)[0]
    return answer


def ran(
    cache: str, folder: Path, page: int, tokens: int, script: str = "in_process.py", **given: Any
) -> dict[str, Any]:
    """What one SGLang found: see the script. Names in capitals are environment variables."""
    variables = tuple((name, given.pop(name)) for name in list(given) if name.isupper())
    settings = {"cache": cache, "model": str(folder / "model"), "page": page, "tokens": tokens, "seed": 0}
    usual = {"workload": "chats", "is_overlapping": False}
    return answer_of(script, json.dumps(settings | usual | given), folder, variables)
