"""Host memory behind the real vLLM's own cache: the same tokens, most of the prompts from host memory.

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
SCRIPT = Path(__file__).with_name("connected.py")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A small model whose tokens depend on the whole context."""
    from radixkv.engines.hf import demo_model

    folder = tmp_path_factory.mktemp("connected")
    demo_model(vocab_size=2048, num_layers=2, hidden_size=256, max_model_len=4096).save_pretrained(folder)
    return str(folder)


def started(arguments: str, keys: str = "") -> subprocess.CompletedProcess[str]:
    """One process with one vLLM."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "kernels", ROOT / "policies"))),
        "RADIXKV_KEYS": keys,
    }
    command = [os.environ["RADIXKV_VLLM"], str(SCRIPT), arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


@functools.cache
def _ran(arguments: str, keys: str) -> dict[str, Any]:
    done = started(arguments, keys)
    lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert lines, done.stdout[-2000:] + done.stderr[-6000:]
    found: dict[str, Any] = json.loads(lines[-1].removeprefix("FOUND "))
    return found


def _arguments(connector: str, model: str, given: dict[str, Any]) -> str:
    defaults = {"blocks": 90, "host_blocks": 600, "is_async": False, "workload": "chats", "seed": 0}
    return json.dumps({"connector": connector, "model": model, **defaults, **given})


def ran(connector: str, model: str, keys: str = "", **given: Any) -> dict[str, Any]:
    """What one process with one vLLM found. The same arguments run once."""
    return _ran(_arguments(connector, model, given), keys)


def nothing_is_left(found: dict[str, Any]) -> None:
    left = dict(found["left"])
    del left["evicted"], left["resident"]
    expected = dict.fromkeys(("running", "requests", "sequences", "unaccounted", "leased"), 0)
    assert left == {"violations": [], **expected}


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("is_async", [False, True])
def test_chats_get_the_same_tokens_and_most_of_their_prompts(model: str, is_async: bool, seed: int) -> None:
    stock = ran("none", model, blocks=400, seed=seed)
    ours = ran("radixkv", model, is_async=is_async, seed=seed)
    assert ours["outputs"] == stock["outputs"]
    assert ours["external"] >= 29_000  # of 36,528
    assert ours["metrics"]["loaded_blocks"] * 32 == ours["external"]
    assert ours["metrics"]["failed_blocks"] == ours["metrics"]["refused_saves"] == 0
    nothing_is_left(ours)


def test_each_tensor_parallel_worker_holds_its_own_shard(model: str) -> None:
    stock = ran("none", model, blocks=400)
    ours = ran("radixkv", model, num_workers=2)
    assert ours["outputs"] == stock["outputs"] and ours["external"] >= 29_000
    assert ours["metrics"]["loaded_blocks"] * 32 == 2 * ours["external"]  # counted by each
    nothing_is_left(ours)


@pytest.mark.parametrize("is_async", [False, True])
def test_requests_that_are_preempted_load_what_they_computed(model: str, is_async: bool) -> None:
    stock = ran("none", model, blocks=400, workload="long")
    ours = ran("radixkv", model, blocks=66, host_blocks=100, workload="long", is_async=is_async)
    assert ours["outputs"] == stock["outputs"]
    assert ours["num_preempted"] > 0 and ours["metrics"]["loads"] > 0 and ours["left"]["evicted"] > 0
    nothing_is_left(ours)


@pytest.mark.parametrize("is_async", [False, True])
def test_loads_that_fail_are_computed_and_never_counted_as_loaded(model: str, is_async: bool) -> None:
    stock = ran("none", model, blocks=400)
    ours = ran("radixkv", model, workload="faults", is_async=is_async)
    counts = ours["metrics"]
    assert ours["outputs"] == stock["outputs"]
    assert counts["failed_loads"] > 5 and counts["failed_blocks"] > 0
    assert (counts["loaded_blocks"] + counts["failed_blocks"]) * 32 == ours["external"]
    assert ours["num_computed"] > stock["num_computed"]
    nothing_is_left(ours)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_disk_keeps_what_was_saved_over_restarts(
    model: str, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each turn of the chats is served by a process of its own, which computes no more than one that never ends."""
    stock = ran("none", model, blocks=400, seed=seed)
    secret = tmp_path / "fleet.secret"
    secret.write_text("the fleet's own secret")
    extra = {"disk": str(tmp_path / "disk"), "disk_size": "64MiB", "fleet_secret": str(secret)}
    monkeypatch.setenv("RADIXKV_CHATS", str(tmp_path / "chats.json"))
    turns = [
        ran("radixkv", model, workload="turn", seed=seed, turn=at, extra=extra, folder=str(tmp_path))
        for at in range(4)
    ]
    assert [each for turn in turns for each in turn["outputs"]] == stock["outputs"]
    assert sum(turn["num_prompt"] for turn in turns) == 36_528
    assert sum(turn["num_computed"] for turn in turns) <= 1.02 * stock["num_computed"]
    assert all(turn["metrics"]["disk_loaded_blocks"] > 100 for turn in turns[1:])
    for turn in turns:
        nothing_is_left(turn)


def test_it_works_beside_the_example_connector(model: str, tmp_path: Path) -> None:
    stock = ran("none", model, blocks=400)
    ours = ran("example", model, folder=str(tmp_path))
    assert ours["outputs"] == stock["outputs"] and ours["external"] >= 29_000
    assert any(tmp_path.iterdir())
    nothing_is_left(ours)


def test_tenants_share_nothing_and_a_purge_is_for_ever(model: str, tmp_path: Path) -> None:
    keys = tmp_path / "engine.keys"
    KeySet.derive([b"the fleet's own secret"]).write(keys)
    found = ran("radixkv", model, str(keys), workload="tenants", extra={"keys": str(keys)})
    assert found["external"] == [0, 0, 480, 0, 0]
    assert found["purged"] == 30
    nothing_is_left(found)


def test_an_idle_vllm_s_disk_pays_what_it_owes_and_has_nothing_of_a_strict_tenant(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, secret = tmp_path / "engine.keys", tmp_path / "fleet.secret"
    secret.write_text("the fleet's own secret")
    KeySet.derive([b"the fleet's own secret"]).write(keys)
    monkeypatch.setenv("RADIXKV_CONTROL", str(tmp_path / "control" / "control.sock"))
    extra = {
        **{"disk": str(tmp_path / "disk"), "disk_size": "64MiB", "fleet_secret": str(secret)},
        **{"keys": str(keys), "control": str(tmp_path / "control")},
        "tenants": {"initech": {"mode": "strict", "guaranteed_blocks": 100}},
    }
    found = ran("radixkv", model, str(keys), workload="owed", extra=extra)
    assert found["is_owed"] and found["owed"] == [[0, 0], [1, 1], [0, 0]]
    assert found["external"] == [0, 0, 0, 480] and found["are_stored"] == [2, False]
    nothing_is_left(found)


def test_resets_and_new_weights_reach_the_second_level(model: str) -> None:
    found = ran("radixkv", model, workload="reset")
    assert found["external"] == [0, 480, 0, 0]
    nothing_is_left(found)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"extra": {"blocks": 5}}, "kv_connector_extra_config"),
        ({"policy": "fail"}, "kv_load_failure_policy"),
        ({"role": "kv_consumer"}, "kv_role"),
        ({"extra": {"tenants": {"acme": {"mode": "strict"}}}}, "tenants"),
    ],
)
def test_settings_that_cannot_be_served_end_the_start_by_name(
    model: str, given: dict[str, Any], name: str
) -> None:
    done = started(_arguments("radixkv", model, given))
    assert done.returncode and "FOUND" not in done.stdout
    assert f"ConfigError: {name}" in done.stderr
