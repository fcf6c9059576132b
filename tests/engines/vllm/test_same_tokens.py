"""radixkv inside the real vLLM, beside vLLM's own cache: the same tokens, at least as many cached.

``make engines`` sets vLLM up, in an environment of its own that ``RADIXKV_VLLM`` names (its Python).
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

pytestmark = [pytest.mark.engines]

ROOT = Path(__file__).parents[3]
SCRIPT = Path(__file__).with_name("in_process.py")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A small model whose tokens depend on the whole context."""
    from radixkv.engines.hf import demo_model

    folder = tmp_path_factory.mktemp("model")
    demo_model(vocab_size=2048, num_layers=2, hidden_size=256, max_model_len=4096).save_pretrained(folder)
    return str(folder)


@functools.cache
def _ran(arguments: str, policy: str, keys: str) -> dict[str, Any]:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "kernels", ROOT / "policies"))),
    }
    environment |= {"RADIXKV_POLICY": policy} | ({"RADIXKV_KEYS": keys} if keys else {})
    done = subprocess.run(
        [os.environ["RADIXKV_VLLM"], str(SCRIPT), arguments],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert lines, done.stdout[-2000:] + done.stderr[-6000:]
    found: dict[str, Any] = json.loads(lines[-1].removeprefix("FOUND "))
    return found


def ran(cache: str, model: str, policy: str = "lru", keys: str = "", **given: Any) -> dict[str, Any]:
    """What one process with one vLLM found. The same arguments run once."""
    defaults = {"blocks": 400, "is_async": False, "workload": "chats", "seed": 0}
    return _ran(json.dumps({"cache": cache, "model": model, **defaults, **given}), policy, keys)


def nothing_is_left(found: dict[str, Any]) -> None:
    left = found["left"]
    assert (left["violations"], left["has_requests"], left["sequences"], left["unaccounted"]) == (
        [],
        False,
        0,
        0,
    ), left


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(("blocks", "is_async"), [(400, False), (150, False), (150, True)])
def test_chats_get_the_same_tokens_and_at_least_as_many_cached(
    model: str, blocks: int, is_async: bool, seed: int
) -> None:
    stock = ran("stock", model, blocks=blocks, seed=seed)
    ours = ran("radixkv", model, blocks=blocks, seed=seed, is_async=is_async)
    assert ours["scheduler"] == ("AsyncScheduler" if is_async else "Scheduler")
    assert ours["outputs"] == stock["outputs"]
    assert ours["cached"] >= stock["cached"]
    assert (ours["left"]["evicted"] > 0) == (blocks == 150)
    nothing_is_left(ours)


def test_eight_samples_compute_their_prompt_once(model: str) -> None:
    stock, ours = (ran(cache, model, workload="burst", batch=2048) for cache in ("stock", "radixkv"))
    assert ours["outputs"] == stock["outputs"]
    assert ours["num_computed"] <= stock["num_computed"] and ours["num_steps"] <= stock["num_steps"]
    nothing_is_left(ours)


def test_tenants_share_nothing_and_a_forged_salt_gets_no_cache(model: str, tmp_path: Path) -> None:
    keys = tmp_path / "engine.keys"
    KeySet.derive([b"the fleet's own secret"]).write(keys)
    ours = ran("radixkv", model, keys=str(keys), workload="tenants")
    assert ours["cached"] == [0, 0, 499, 0], "all but the last token, the last block by a copy"
    nothing_is_left(ours)


def test_where_salts_are_required_others_end_with_an_error_and_disturb_nobody(
    model: str, tmp_path: Path
) -> None:
    keys = tmp_path / "engine.keys"
    KeySet.derive([b"the fleet's own secret"]).write(keys)
    ours = ran("radixkv", model, keys=str(keys), workload="strict")
    assert ours["outputs"] == [["length", "error", "error", "error", "length"], ["error"]]
    assert ours["num_computed"] == 2 * (300 + 3), "something of a refused request was computed"
    nothing_is_left(ours)


def test_a_tenant_at_its_limit_keeps_no_other_waiting(model: str, tmp_path: Path) -> None:
    """Two of the flood's requests fit at a time. The other tenant begins at once, and is never preempted."""
    keys = tmp_path / "engine.keys"
    KeySet.derive([b"the fleet's own secret"]).write(keys)
    ours = ran("radixkv", model, keys=str(keys), workload="limits")
    assert ours["reasons"] == ["length"] * 6 + ["error"] + ["length"] * 4
    assert ours["preempted"] == []
    assert max(ours["first_at"][7:]) < ours["first_at"][2]
    whole = [at for at in range(11) if at != 6]
    assert [ours["outputs"][at] for at in whole] == [ours["cold"][at] for at in whole]
    nothing_is_left(ours)
