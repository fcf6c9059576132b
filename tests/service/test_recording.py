"""``radixkv serve --record`` writes the service's own traffic as a trace that contains no token id."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest

from radixkv.config import Namespace
from radixkv.errors import ConfigError
from radixkv.index.tokens import encode
from radixkv.service.recording import Recorder
from radixkv.simulator.simulate import run
from radixkv.simulator.trace import hints_of, read
from radixkv_policies import Learned, RequestHints
from tests.service.running import service_in_thread

SECRET = b"0123456789abcdef"
NS = Namespace(tenant="acme", model="m")
HINTS = RequestHints({"type": "completion"})


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_traffic_is_recorded_and_simulated(tmp_path: Path) -> None:
    path = tmp_path / "traffic.jsonl"
    ids = list(range(100, 180))
    body = {"max_tokens": 20, "temperature": 0, "ignore_eos": True}
    with service_in_thread(record=str(path)) as live:
        assert live.acme.post("/v1/warm", json={"token_ids": ids}).status_code == 200
        cached = []
        for client, prompt in ((live.acme, ids), (live.acme, [*ids, 5]), (live.globex, ids)):
            reply = client.post("/v1/completions", json={**body, "prompt": prompt}).json()
            cached.append(reply["usage"]["prompt_tokens_details"]["cached_tokens"])
        policy = live.service.engine.cache._tenants["acme"].policy
        assert isinstance(policy, Learned)
        told = {name[1] for name in policy._groups if isinstance(name, tuple)}
    assert told == {"warm", "completion"}, "the cache gets the labels that are recorded"
    warm, first, second, other = lines(path)
    assert warm["labels"] == {"type": "warm"} and warm["tokens"] == 80 and warm["output_tokens"] == 0
    assert first["labels"] == {"type": "completion"} and first["output_tokens"] == 20
    assert len(first["hashes"]) == 100 // 16 and first["duration_s"] > 0
    assert first["hashes"][:5] == second["hashes"][:5] == warm["hashes"]
    assert not set(first["hashes"]) & set(other["hashes"]), "tenants share no hash"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600

    trace = read([path])
    assert trace.tenants == ("acme", "globex")
    assert trace.block_tokens == 16
    (row,) = run([path], policies=["lru"], capacities=[100], jobs=1)["results"]
    assert cached == [64, 80, 0], "the last token of the first prompt is always computed"
    assert round(row["token_hit_rate"] * row["prompt_tokens"]) == 80 + 80


@pytest.mark.slow
def test_hints_reach_the_policy_and_the_record(tmp_path: Path) -> None:
    path = tmp_path / "traffic.jsonl"
    kept, gone, last = ([first] * 256 for first in (7, 8, 9))
    labels = {"session": "s-1", "turn": 2, "tool_pending": True, "mood": 0.5}
    with service_in_thread(**{"record": str(path), "policy": "priority", "num-blocks": "40"}) as live:
        for ids, hints in (
            (kept, {"priority": 90, "duration_s": 600.0}),
            (gone, {"priority": 10, "labels": labels}),
            (last, {"labels": {"type": "agent"}}),
        ):
            body = {"prompt": ids, "max_tokens": 1, "temperature": 0, "hints": hints}
            body["prompt_cache_key"] = f"key-{ids[0]}"
            assert live.acme.post("/v1/completions", json=body).status_code == 200
        found = [
            live.acme.post("/v1/lookup", json={"token_ids": ids}).json()["matched_tokens"]
            for ids in (kept, gone, last)
        ]
    assert found[0] == found[2] == 256 and found[1] < 256, "the oldest request has a high priority and stays"
    told = [line["labels"] for line in lines(path)]
    assert told == [
        {"type": "completion", "session": "key-7", "priority": 90, "priority_duration_s": 600.0},
        {"type": "completion", **labels, "priority": 10},
        {"type": "agent", "session": "key-9"},
    ]
    first, second, third = map(hints_of, read([path]).labels)
    assert first is not None and (first.priority, first.duration_s) == (90, 600.0)
    assert second is not None and second.priority == 10 and labels.items() <= second.labels.items()
    assert third == RequestHints({"type": "agent", "session": "key-9"})


def test_no_token_id_is_written(tmp_path: Path) -> None:
    path = tmp_path / "traffic.jsonl"
    recorder = Recorder(path, SECRET, 4)
    recorder.record(NS, encode(range(987_650, 987_670)), [987_671], 1.0, HINTS)
    recorder.close()
    recorder.record(NS, encode([1] * 8), [], 1.0, HINTS)
    (line,) = lines(path)
    assert "9876" not in path.read_text()
    assert set(line) == {
        "time", "duration_s", "tenant", "tokens", "output_tokens", "block_tokens", "hashes", "labels",
    }  # fmt: skip
    assert len(line["hashes"]) == 5


def test_hashes_depend_on_secret_namespace_and_everything_before(tmp_path: Path) -> None:
    def hashes(secret: bytes, namespace: Namespace, ids: list[int], generation: int = 0) -> list[str]:
        path = tmp_path / "one.jsonl"
        recorder = Recorder(path, secret, 4, lambda tenant: generation)
        recorder.record(namespace, encode(ids), [], 0.0, HINTS)
        recorder.close()
        found: list[str] = lines(path)[-1]["hashes"]
        return found

    ids = [1, 2, 3, 4, 5, 6, 7, 8]
    known = hashes(SECRET, NS, ids)
    assert hashes(SECRET, NS, [*ids, 9]) == known
    others = [
        hashes(b"another secret..", NS, ids),
        hashes(SECRET, Namespace(tenant="acme", model="m", salt="s"), ids),
        hashes(SECRET, NS._replace(weights=1), ids),
        hashes(SECRET, NS, [9, *ids[1:]]),
        hashes(SECRET, NS, ids, generation=1),
    ]
    for other in others:
        assert not set(other) & set(known)


def test_recording_is_off_by_default(tmp_path: Path) -> None:
    with service_in_thread() as live:
        assert live.service.recorder is None


def test_an_unwritable_path_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--record"):
        Recorder(tmp_path / "missing" / "x", SECRET, 4)
