"""radixkv inside the real SGLang, beside SGLang's own cache: the same tokens, at least as many cached.

``make engines`` sets SGLang up, in an environment of its own that ``RADIXKV_SGLANG`` names (its Python).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.engines.sglang.runs import folder as folder
from tests.engines.sglang.runs import ran
from tests.redis_server import free_port

pytestmark = [pytest.mark.engines]


@pytest.mark.parametrize(
    ("page", "tokens", "is_overlapping"),
    [(16, 16_384, False), (16, 2_304, False), (1, 4_096, False), (1, 2_304, True), (16, 2_304, True)],
)
def test_chats_get_the_same_tokens_and_at_least_as_many_cached(
    folder: Path, page: int, tokens: int, is_overlapping: bool
) -> None:
    stock = ran("stock", folder, page, tokens, is_overlapping=is_overlapping)
    ours = ran("radixkv", folder, page, tokens, is_overlapping=is_overlapping, RADIXKV_POLICY="lru")
    assert ours["outputs"] == stock["outputs"]
    assert ours["cached"] >= stock["cached"] > 0
    assert ours["warm"] == ours["cold"] and ours["cached_after_flush"] == 0
    assert ours["flushed"]


@pytest.mark.parametrize("page", [1, 16])
def test_samples_and_beams_are_the_same_and_compute_no_more(folder: Path, page: int) -> None:
    stock = ran("stock", folder, page, 4_096, workload="forks")
    ours = ran("radixkv", folder, page, 4_096, workload="forks")
    assert ours["outputs"] == stock["outputs"] and len(ours["outputs"]) == 8
    assert ours["beams"] == stock["beams"] and len(ours["beams"]) == (8 if page == 1 else 0)
    assert ours["cached"] == stock["cached"] and sum(ours["cached"]) > 6_000
    assert ours["flushed"]


def test_tenants_share_nothing_and_hostile_salts_get_no_cache(folder: Path) -> None:
    ours = ran("radixkv", folder, 16, 4_096, workload="tenants", RADIXKV_KEYS=str(folder / "engine.keys"))
    assert ours["cached"] == [0, 0, 496, 0, 0, 496, 0]
    assert ours["flushed"]


def test_off_is_the_engines_own_cache(folder: Path) -> None:
    stock = ran("stock", folder, 16, 2_304)
    off = ran("radixkv", folder, 16, 2_304, RADIXKV_OFF="1")
    assert off == stock


def test_what_it_cannot_serve_is_refused_by_name(folder: Path) -> None:
    with pytest.raises(AssertionError, match="an eviction policy's configuration"):
        ran(
            "radixkv",
            folder,
            16,
            2_304,
            settings={"radix_eviction_policy_config": {"protected_threshold": 3}},
        )


def test_events_are_those_of_sglangs_own_cache(folder: Path) -> None:
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    config = json.dumps({"publisher": "zmq", "endpoint": endpoint.replace("127.0.0.1", "*")})
    found: list[Any] = []
    for cache in ("stock", "radixkv"):
        told = ran(cache, folder, 16, 16_384, settings={"kv_events_config": config}, events=endpoint)
        assert told["events"]["cleared"] > 0 and told["events"]["block_size"] == 16
        found.append(told["events"]["stored"])
    assert found[0] == found[1] and len(found[0]) > 250


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_operators_reach_the_cache_and_a_purge_of_running_requests_changes_no_token(
    folder: Path, tmp_path: Path, num_ranks: int
) -> None:
    found = ran(
        "radixkv",
        folder,
        16,
        4_096,
        workload="control",
        settings={"tp_size": num_ranks},
        RADIXKV_KEYS=str(folder / "engine.keys"),
        RADIXKV_SOCKET=str(tmp_path / "control" / "control.sock"),
        SGLANG_CPU_OMP_THREADS_BIND="|".join("01"[:num_ranks]),
    )
    assert found["same"] and found["audit"] == found["audit_after"] == []
    assert found["lookup"] == 480 and found["pin"] == 64 and found["pins"] == 1 and found["tenants"] == 2
    assert found["purge"] == 1 and found["left"] == 0 and found["kept"] == 30
    assert found["cached_by_the_old_salt"] == 0 and found["flushed"]
