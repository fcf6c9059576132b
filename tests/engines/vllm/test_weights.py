"""Weights that change in a running vLLM: KV of the old ones are never found. With vLLM, and without."""

from __future__ import annotations

import functools
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from radixkv import audit
from radixkv.config import Namespace
from radixkv.engines.control.remote_cache import ControlCache
from radixkv.engines.control.server import ControlServer
from radixkv.engines.vllm.cache import VllmCache
from radixkv.signing import KeySet
from radixkv.tenancy.request_keys import RequestFacts
from radixkv.tenancy.salt import SaltReader

ROOT = Path(__file__).parents[3]
SCRIPT = Path(__file__).with_name("new_weights.py")
KEYS = KeySet.derive([b"a secret of the fleet"])
IDS = list(range(40))
SAME = ("nothing", "checksums", "pause, cache kept", "weight_version again", "sleep 0")
"""What leaves the weights and the cache as they are."""
RESETS = ("pause, cache cleared", "sleep 1", "sleep 2")
"""What vLLM itself resets its cache at."""
CHANGES = (
    "reload_weights, new",
    "reload_weights, old",
    "apply_model",
    "a function in the workers",
    "weight_version",
)


def make(**settings: Any) -> VllmCache:
    return VllmCache(40, 4, 512, model="m", policy="lru", **settings)


def served(cache: VllmCache, name: str, facts: RequestFacts) -> int:
    """Compute a prompt in one step. Return the tokens that were found."""
    step = cache.begin_step()
    _, found = cache.lookup(name, facts, IDS)
    assert cache.allocate(name, facts, IDS, found, len(IDS) - found) is not None
    cache.end_step(step)
    cache.release(name)
    return found


# --- without vLLM


def test_a_request_that_waits_begins_with_the_new_weights() -> None:
    cache, facts = make(), RequestFacts()
    served(cache, "a", facts)
    assert cache.lookup("b", facts, IDS)[1] == 36
    cache.weights_change()
    assert served(cache, "b", facts) == 0 and served(cache, "c", facts) == 36


def test_a_running_request_goes_on_and_leaves_nothing() -> None:
    """One of its steps runs while the weights change, one comes later."""
    cache, facts = make(copies=True), RequestFacts()
    step = cache.begin_step()
    assert cache.allocate("a", facts, IDS, 0, 20) is not None
    cache.weights_change()
    cache.end_step(step)
    step = cache.begin_step()
    assert cache.allocate("a", facts, IDS, 20, 20) is not None
    assert cache.lookup("b", facts, IDS) == ([], 0)
    cache.end_step(step)
    cache.commit("a", IDS, 40)
    assert cache.cache.stats().resident_blocks == 0 and len(cache.blocks("a")) == 10
    cache.release("a")
    cache.release("b")
    assert served(cache, "c", facts) == 0 and cache.usage == 0
    audit.check(cache.cache)


def test_a_failed_load_of_the_old_weights_changes_nothing_else() -> None:
    cache, facts = make(), RequestFacts()
    step = cache.begin_step()
    assert cache.allocate("a", facts, IDS, 16, 24, num_loaded=16) is not None
    cache.weights_change()
    served(cache, "b", facts)
    cache.lose(cache.blocks("a")[1:2])
    cache.end_step(step)
    cache.release("a")
    assert served(cache, "c", facts) == 36
    audit.check(cache.cache)


def test_the_control_channel_reaches_what_the_new_weights_computed(tmp_path: Path) -> None:
    reader = SaltReader(KEYS)
    cache = make(salts=reader)
    KEYS.write(tmp_path / "engine.keys")
    with ControlServer(
        cache.cache,
        tmp_path / "control",
        tmp_path / "engine.keys",
        salts=reader,
        patience_s=0.0,
        weights=lambda: cache.weights,
    ) as control:
        there = ControlCache(control.path, KEYS, "m")
        mine = Namespace("acme", "anything", None, "chat")
        facts = RequestFacts(there.cache_salt(mine))
        served(cache, "a", facts)
        there.pin(mine, IDS, 60.0)
        for _ in range(2):
            cache.weights_change()
            assert there.match(mine, IDS).num_tokens == 0
            assert there.pins("acme") == [] and there.namespaces("acme") == []
        served(cache, "b", facts)
        assert there.match(mine, IDS).num_tokens == there.touch(mine, IDS) == 40
        pin = there.pin(mine, IDS, 60.0)
        assert [each.id for each in there.pins("acme")] == [pin.id] and there.namespaces("acme") == [mine]
        there.unpin(pin)
        assert there.purge("acme") == 10 and there.match(mine, IDS).num_tokens == 0
        there.close()


# --- in the real vLLM


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two models that differ in their weights alone."""
    from radixkv.engines.hf import demo_model

    folders = [tmp_path_factory.mktemp(f"model{seed}") for seed in range(2)]
    for seed, folder in enumerate(folders):
        model = demo_model(seed, vocab_size=2048, num_layers=2, hidden_size=256, max_model_len=4096)
        model.save_pretrained(folder)
    return list(map(str, folders))


@functools.cache
def _ran(arguments: str) -> dict[str, Any]:
    path = os.pathsep.join(map(str, (ROOT, ROOT / "kernels", ROOT / "policies")))
    done = subprocess.run(
        [os.environ["RADIXKV_VLLM"], str(SCRIPT), arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert lines, done.stdout[-2000:] + done.stderr[-6000:]
    found: dict[str, Any] = json.loads(lines[-1].removeprefix("FOUND "))
    return found


@pytest.mark.engines
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_no_change_of_weights_lets_vllm_find_old_kv(models: list[str], is_async: bool) -> None:
    found = _ran(json.dumps({"cache": "radixkv", "is_async": is_async, "models": models}))
    for name in (*SAME, *RESETS, *CHANGES):
        each = found[name]
        assert each["all"]["outputs"] == each["cold"]["outputs"], name
        assert each["first"]["outputs"] == each["cold"]["outputs"][:1], name
        assert (each["first"]["cached"] == [0]) == (name not in SAME[1:]), name
        assert min(each["all"]["cached"]) > 0, name
    answers = [str(found[name]["cold"]["outputs"]) for name in CHANGES]
    assert len(set(answers)) == 3 and answers[0] != answers[1] == answers[3] == answers[4]
    running = found["running"]
    assert running["answered"] == 4 * 48
    assert running["first"]["cached"] == [0] and running["all"]["outputs"] == running["cold"]["outputs"]
    left = found["left"]
    assert (left["violations"], left["has_requests"], left["sequences"], left["unaccounted"]) == (
        [],
        False,
        0,
        0,
    )
    assert found["weights"] == 7, "five changes, the reload of sleep 2, and one while requests ran"


@pytest.mark.engines
def test_vllm_itself_leaves_changes_to_its_user(models: list[str]) -> None:
    """It resets its cache where this list says so. If this fails, radixkv may have less to do."""
    found = _ran(json.dumps({"cache": "stock", "is_async": False, "models": models}))
    assert all(found[name]["first"]["cached"] == [0] for name in RESETS)
    stale = [name for name in (*CHANGES, "running") if found[name]["first"]["cached"] != [0]]
    assert stale == [*CHANGES, "running"]
    assert (
        found["reload_weights, new"]["first"]["outputs"]
        != found["reload_weights, new"]["cold"]["outputs"][:1]
    )
