"""What the real vLLM shows outside with radixkv as its cache: events, metrics, the control channel."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from radixkv.signing import KeySet
from radixkv.tenancy.salt import make_salt
from tests.engines.vllm.test_same_tokens import ROOT, model

pytestmark = [pytest.mark.engines]

__all__ = ["model"]  # the fixture

SCRIPT = Path(__file__).with_name("shown.py")
KEYS = KeySet.derive([b"the fleet's own secret"])
RAW = ["support", "", "sälze"]


def shown(folder: Path, cache: str, model: str, environment: dict[str, str], **given: Any) -> dict[str, Any]:
    """What one process with one vLLM showed."""
    place = folder / f"{cache}-{len(list(folder.iterdir()))}"
    place.mkdir(mode=0o700)
    always = {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "kernels", ROOT / "policies")))}
    environment = {name: text.replace("FOLDER", str(place)) for name, text in environment.items()}
    arguments = {"cache": cache, "model": model, "folder": str(place), "salts": RAW, "algorithm": "sha256"}
    done = subprocess.run(
        [os.environ["RADIXKV_VLLM"], str(SCRIPT), json.dumps({**arguments, **given})],
        capture_output=True,
        text=True,
        env={**os.environ, **always, **environment},
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert lines, done.stdout[-2000:] + done.stderr[-6000:]
    found: dict[str, Any] = json.loads(lines[-1].removeprefix("FOUND "))
    return found


CLEAR = {
    "RADIXKV_EVENTS": "ipc://FOLDER/events",
    "RADIXKV_EVENTS_CONTENT": "prompts-in-clear",
    "RADIXKV_POLICY": "lru",
}


@pytest.mark.parametrize(
    ("algorithm", "seed", "has_keys"),
    [("sha256", None, False), ("xxhash_cbor", "7", False), ("sha256_cbor", "0", True)],
)
def test_hashes_in_clear_equal_vllms_own_and_metrics_count_what_requests_found(
    model: str, tmp_path: Path, algorithm: str, seed: str | None, has_keys: bool
) -> None:
    environment = {} if seed is None else {"PYTHONHASHSEED": seed}
    salts, keys = RAW, {}
    if has_keys:
        salts = [make_salt(KEYS, "acme"), make_salt(KEYS, "globex", 3, client_salt="s"), "no tenant's"]
        KEYS.write(tmp_path / "engine.keys")
        keys = {"RADIXKV_KEYS": str(tmp_path / "engine.keys")}
    given: dict[str, Any] = {"algorithm": algorithm, "salts": salts}
    stock = shown(tmp_path, "stock", model, environment, by_vllm=True, **given)
    ours = shown(tmp_path, "radixkv", model, {**environment, **CLEAR, **keys}, **given)
    assert ours["outputs"] == stock["outputs"]
    assert len(ours["stored"]) > 40 and ours["stored"] == stock["stored"]
    assert ours["cached"] >= stock["cached"] > 0
    for found in (stock, ours):
        assert found["metrics"]["vllm:prefix_cache_hits"] == found["cached"]
        assert found["metrics"]["vllm:prefix_cache_queries"] == found["queried"]
        assert found["metrics"]["vllm:kv_cache_usage_perc"] == 0


def test_operators_see_an_engine_and_a_purge_of_running_requests_changes_no_token(
    model: str, tmp_path: Path
) -> None:
    KEYS.write(tmp_path / "engine.keys")
    environment = {
        "RADIXKV_KEYS": str(tmp_path / "engine.keys"),
        "RADIXKV_SOCKET": "FOLDER/control/control.sock",
    }
    salts = [make_salt(KEYS, "acme"), make_salt(KEYS, "globex"), make_salt(KEYS, "acme", client_salt="x")]
    calm = shown(tmp_path, "radixkv", model, environment, by_vllm=True, salts=salts)
    hurt = shown(tmp_path, "radixkv", model, environment, by_vllm=True, salts=salts, purges=True)
    assert hurt["outputs"] == calm["outputs"]
    assert hurt["metrics"]["vllm:num_preemptions"] > 0 == calm["metrics"]["vllm:num_preemptions"]
    assert calm["topic"] == "kv@a@m"
    for found in (calm, hurt):
        control = found["control"]
        assert control["audit"] == [] and control["stats"]["num_sequences"] == 0
        assert len(found["stored"]) + found["num_tails"] == control["stats"]["resident_blocks"]
        assert all(len(name) > 16 and not ids for name, ids, _ in found["stored"])  # digests alone
        assert len(control["tenants"]) == 2
        (left,) = control["left"]
        assert left["resident_blocks"] == 0 and control["purge"]["generation"] == 1
    hits = sum(each["hit_tokens"] for each in calm["control"]["tenants"])
    assert 0 < hits <= calm["cached"]  # the rest was found in a step that another request computed
    assert calm["control"]["purge"]["blocks"] > 0
