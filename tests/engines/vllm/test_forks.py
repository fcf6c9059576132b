"""Inside the real vLLM: blocks that change tenant are zeroed, and tails are copied instead of computed again."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

from radixkv.signing import KeySet

pytestmark = [pytest.mark.engines]

ROOT = Path(__file__).parents[3]
SCRIPT = Path(__file__).with_name("forks.py")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model, the fleet's keys, and radixkv's entry points as an installation would have them."""
    from radixkv.engines.hf import demo_model

    folder = tmp_path_factory.mktemp("vllm")
    demo_model(vocab_size=2048, num_layers=2, hidden_size=256, max_model_len=4096).save_pretrained(
        folder / "model"
    )
    KeySet.derive([b"the fleet's own secret"]).write(folder / "engine.keys")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    installed = folder / "plugin" / "radixkv-0.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: radixkv\nVersion: 0\n")
    lines = [
        f"[{group}]\n" + "".join(f"{name} = {path}\n" for name, path in points.items())
        for group, points in project["entry-points"].items()
    ]
    (installed / "entry_points.txt").write_text("\n".join(lines))
    return folder


@functools.cache
def _ran(arguments: str, folder: Path, has_plugin: bool) -> dict[str, Any]:
    paths = [ROOT, ROOT / "kernels", ROOT / "policies", *([folder / "plugin"] if has_plugin else [])]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "RADIXKV_KEYS": str(folder / "engine.keys"),
        "RADIXKV_POLICY": "lru",
    }
    command = [os.environ["RADIXKV_VLLM"], str(SCRIPT), arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert lines, done.stdout[-2000:] + done.stderr[-6000:]
    found: dict[str, Any] = json.loads(lines[-1].removeprefix("FOUND "))
    return found


def ran(
    cache: str, workload: str, folder: Path, blocks: int = 400, has_plugin: bool = True, **given: Any
) -> dict[str, Any]:
    """What one process with one vLLM found. The same arguments run once."""
    settings = {
        "cache": cache,
        "model": str(folder / "model"),
        "blocks": blocks,
        "is_async": False,
        "seed": 0,
    }
    return _ran(json.dumps(settings | {"workload": workload, **given}), folder, has_plugin)


# --- zeroing


@pytest.mark.parametrize("is_async", [False, True])
def test_another_tenant_finds_no_trace_in_the_blocks_it_takes(folder: Path, is_async: bool) -> None:
    ours = ran("radixkv", "canary", folder, blocks=72, is_async=is_async)
    assert ours["num_filled"] == 63 and ours["num_taken"] > 20
    assert ours["traces"] == 0
    assert ours["left"]["violations"] == []


def test_the_canary_sees_what_a_worker_does_not_zero(folder: Path) -> None:
    """A planted bug: without the plug-in no worker zeroes."""
    ours = ran("radixkv", "canary", folder, blocks=72, has_plugin=False)
    assert ours["num_taken"] > 20 and ours["traces"] > 0


# --- copied tails


def test_a_beam_search_computes_one_token_a_beam_and_step(folder: Path) -> None:
    stock, ours = (ran(cache, "beams", folder, batch=2048) for cache in ("stock", "radixkv"))
    assert ours["outputs"] == stock["outputs"]
    assert ours["num_steps"] <= stock["num_steps"]
    assert ours["num_computed"] <= 3 * (500 + 4 * 64) < stock["num_computed"]
    assert ours["left"]["violations"] == [] and ours["left"]["unaccounted"] == 0


@pytest.mark.parametrize("is_async", [False, True])
def test_a_request_that_leaves_another_inside_a_block_computes_only_its_own_tokens(
    folder: Path, is_async: bool
) -> None:
    stock, ours = (
        ran(cache, "siblings", folder, is_async=is_async and cache == "radixkv")
        for cache in ("stock", "radixkv")
    )
    assert ours["outputs"] == stock["outputs"]
    leaves = (*range(193, 229, 5), 229, 230)
    # The last token of the chat was never computed. Salt b finds what its own requests left.
    assert ours["cached"][::2] == [min(each, 229) for each in leaves]
    assert ours["cached"][1::2] == [0, *leaves[:-1]]
    assert ours["left"]["violations"] == []
