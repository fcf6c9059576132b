"""A soak of the real vLLM: sessions, cancels, preemptions, purges, reloaded weights; all tokens equal a cold run's.

``RADIXKV_SOAK_S=1800 make engines PYTEST="-k soak"`` soaks for half an hour each.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from radixkv.signing import KeySet

SECONDS = float(os.environ.get("RADIXKV_SOAK_S", "15"))
ROOT = Path(__file__).parents[3]
SCRIPT = Path(__file__).with_name("soak.py")
MARGIN_KIB = 128 << 10
LONG_S = 600
FLAT_KIB = 48 << 10

pytestmark = [pytest.mark.engines, pytest.mark.limit(wall_s=600 + 10 * SECONDS)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a small model whose tokens depend on the whole context, with keys beside it."""
    from radixkv.engines.hf import demo_model

    folder = tmp_path_factory.mktemp("soaked")
    demo_model(vocab_size=2048, num_layers=2, hidden_size=256, max_model_len=4096).save_pretrained(folder)
    KeySet.derive([b"the fleet's own secret"]).write(folder / "engine.keys")
    return str(folder)


@functools.cache
def soaked(folder: str, cache: str, is_async: bool = False) -> dict[str, Any]:
    """What one soak found. The same one runs once."""
    given = {
        "cache": cache,
        "blocks": 120,
        "host_blocks": 300,
        "is_async": is_async,
        "seconds": SECONDS,
        "seed": 0,
    }
    given |= {"model": folder, "keys": f"{folder}/engine.keys"}
    given |= {"answers": f"{folder}/{cache}-{is_async}.jsonl"}
    path = os.pathsep.join(map(str, (ROOT, ROOT / "kernels", ROOT / "policies")))
    done = subprocess.run(
        [os.environ["RADIXKV_VLLM"], str(SCRIPT), json.dumps(given)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert lines, done.stdout[-2000:] + done.stderr[-6000:]
    found: dict[str, Any] = json.loads(lines[-1].removeprefix("FOUND "))
    return found


@pytest.mark.parametrize(("cache", "is_async"), [("radixkv", False), ("radixkv", True), ("connector", True)])
def test_no_token_is_wrong_nothing_is_left_and_memory_is_as_flat_as_stock(
    folder: str, cache: str, is_async: bool
) -> None:
    found = soaked(folder, cache, is_async)
    assert found["wrong"] == []
    nothing = dict.fromkeys(("requests", "sequences", "leased", "unaccounted"), 0)
    assert found["left"] == {"violations": [], **nothing}
    for name in ("num_finished", "num_cancelled", "num_preempted", "num_purges", "num_reloads"):
        assert found[name] > 0, name
    memory, stock = ([kib for _, kib in each["memory"]] for each in (found, soaked(folder, "stock")))
    print(cache, is_async, found["memory"], "stock", stock)
    assert max(memory) < max(stock) + MARGIN_KIB
    if SECONDS >= LONG_S:
        assert _growth(memory) < _growth(stock) + FLAT_KIB


def _growth(memory: list[int]) -> int:
    """How much more memory the second half took than the first. vLLM's own grows too, with each reload."""
    at = len(memory) // 2
    return max(memory[at:]) - max(memory[:at])
