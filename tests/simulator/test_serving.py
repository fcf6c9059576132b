"""The simulator of serving: times that can be computed by hand, and what schedulers and policies change."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from radixkv.cli.main import commands
from radixkv.errors import ConfigError
from radixkv.index.announcements import Announcement
from radixkv.index.cache import PrefixCache
from radixkv.simulator import simulate_serving
from radixkv.simulator.packed_sessions import Session, Turn, read_sessions
from radixkv.simulator.profiles import profile_of
from radixkv.simulator.serving import CLAIRVOYANT, Served, Serving, Settings

EXCERPT = Path(__file__).parents[1] / "engines" / "agent_sessions.jsonl.gz"


def session(*prompts: tuple[float, list[int], int], name: str = "s", answer: int = 100) -> Session:
    """A session of (pause, blocks, tokens behind the last whole block)."""
    turns = [
        Turn(pause, np.array(blocks, np.uint32), 512 * len(blocks) + rest, answer, True, True)
        for pause, blocks, rest in prompts
    ]
    return Session(name, "acme", turns, 1 + max(max(blocks) for _, blocks, _ in prompts))


def served(pool: list[Session], capacity: int, **settings: Any) -> list[Served]:
    given = {
        "sessions": len(pool),
        "prefill": 512.0,
        "decode": 10.0,
        "warm_up_s": 0.0,
        "measure_s": 400.0,
        **settings,
    }
    scheduler, policy = given.pop("scheduler", "cache-first"), given.pop("policy", "lru")
    return Serving(pool, Settings(**given), scheduler, policy, capacity).run().served


def test_the_times_of_one_session_are_those_of_the_model() -> None:
    """Four blocks take 4 s of prefill; the next prompt has them cached and computes one more."""
    first, second = served([session((0, [0, 1, 2, 3], 0), (20, [0, 1, 2, 3, 4], 256))], 100)[:2]
    assert first.started == first.arrived
    assert first.first_token - first.started == pytest.approx(4.0)
    assert first.ended - first.first_token == pytest.approx(10.0)
    assert second.arrived == pytest.approx(first.ended + 20)
    assert second.first_token - second.arrived == pytest.approx(1.5)
    assert (second.cached_tokens, second.prompt_tokens, second.recomputed) == (2_048, 2_816, 0)
    assert second.ideal_s == pytest.approx(second.ended - second.arrived)


def test_evicted_blocks_are_computed_again_and_counted() -> None:
    """Two sessions of 6 blocks in a cache of 8 evict each other."""
    pool = [session(*[(1.0, list(range(6)), 1)] * 50, name=name, answer=1) for name in "ab"]
    found = served(pool, 8, scheduler="fcfs")
    assert sum(each.recomputed for each in found) > 512 * 50
    assert all(each.recomputed + each.cached_tokens <= each.prompt_tokens for each in found)


def test_a_host_tier_gives_blocks_back_at_its_speed() -> None:
    pool = [session(*[(1.0, list(range(6)), 0)] * 50, name=name, answer=1) for name in "ab"]
    found = served(pool, 8, scheduler="fcfs", host_blocks=100, block_bytes=10**9, host_gb_per_s=10.0)
    later = [each for each in found if each.arrived > 100]
    assert all(each.recomputed == 0 for each in later)
    again = [each for each in later if each.cached_tokens]  # a session that begins again has other blocks
    assert len(again) > 10
    for each in again:  # four blocks come back, and one token is computed
        assert each.cached_tokens == 3_072 and each.first_token - each.started == pytest.approx(0.4 + 1 / 512)


def test_a_policy_may_hear_of_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every waiting request is announced, and each announcement ends as its request starts."""
    made: list[Announcement] = []
    announce = PrefixCache.announce

    def noted(self: PrefixCache, *given: Any, **named: Any) -> Announcement:
        made.append(announce(self, *given, **named))
        return made[-1]

    monkeypatch.setattr(PrefixCache, "announce", noted)
    settings = Settings(sessions=8, prefill=2_000.0, warm_up_s=0.0, measure_s=600.0)
    pool = read_sessions([EXCERPT])
    assert Serving(pool, settings, "fcfs", "lru", 300).run().served and not made
    result = Serving(pool, settings, "fcfs", "lru+queue", 300).run()
    assert len(made) > len(result.served) > 10
    assert sum(each.is_open for each in made) == len(result.still_waiting)


def test_a_request_larger_than_the_cache_is_refused_and_the_session_goes_on() -> None:
    result = Serving(
        [session((0, [0], 0), (1, list(range(50)), 0), (1, [0], 0))],
        Settings(sessions=1, warm_up_s=0, measure_s=100),
        "fcfs",
        "lru",
        10,
    ).run()
    assert result.refused > 0
    assert {each.prompt_tokens for each in result.served} == {512}


def test_prefills_slow_answers_down_by_their_chunks() -> None:
    pool = [session(*[(0.5, [at], 0) for at in range(40)], name=str(name)) for name in range(3)]
    plain, chunked = (
        [
            (each.ended - each.first_token) / each.output_tokens
            for each in served(pool, 100, chunk_tokens=chunk)
        ]
        for chunk in (0, 512)
    )
    assert max(plain) == pytest.approx(0.1) and max(chunked) == pytest.approx(0.118)


def test_a_profile_gives_the_time_of_a_prefill() -> None:
    model = profile_of("llama-3-8b", 10.0)
    (first, *_) = served([session((0, list(range(100)), 0))], 200, profile=model)
    seconds = float(model.prefill_seconds(np.array([51_200]))[0])
    assert first.first_token - first.started == pytest.approx(seconds)


def test_open_sessions_begin_at_their_rate() -> None:
    pool = [session((0, [0], 0))]
    found = served(pool, 100, rate=360.0, measure_s=7_200.0, decode=1_000.0)
    assert len(found) == pytest.approx(720, rel=0.15)


@pytest.mark.slow
def test_replicas_share_the_load_and_keep_sessions() -> None:
    pool = read_sessions([EXCERPT])
    one, two = (
        Serving(
            pool,
            Settings(sessions=16, prefill=2_000.0, replicas=replicas, measure_s=1_800),
            "cache-first",
            "lru",
            600,
        ).run()
        for replicas in (1, 2)
    )
    assert len(two.served) > 1.2 * len(one.served)
    hits = [
        sum(x.cached_tokens for x in each.served) / sum(x.prompt_tokens for x in each.served)
        for each in (one, two)
    ]
    assert hits[1] > 0.8 * hits[0] > 0


@pytest.mark.slow
def test_the_same_seed_gives_the_same_simulation() -> None:
    pool = read_sessions([EXCERPT])
    for policy in ("lru", CLAIRVOYANT):
        runs = [
            Serving(pool, Settings(sessions=6, measure_s=600), "cache-first", policy, 500).run() for _ in "ab"
        ]
        assert runs[0].served == runs[1].served and runs[0].served
    other = Serving(pool, Settings(sessions=6, measure_s=600, seed=1), "cache-first", "lru", 500).run()
    assert other.served != runs[0].served


@pytest.mark.slow
def test_cache_first_serves_more_than_fcfs_and_a_clairvoyant_more() -> None:
    result = simulate_serving.run(
        [EXCERPT],
        capacities=[600],
        settings=Settings(sessions=16, prefill=2_000.0),
        policies=["lru", CLAIRVOYANT],
    )
    rows = {(row["scheduler"], row["policy"]): row for row in result["results"]}
    assert rows["fcfs", "lru"]["against_baseline"] == 1.0
    assert rows["cache-first", "lru"]["against_baseline"] > 1.5
    for scheduler in ("fcfs", "lpm", "cache-first"):
        assert rows[scheduler, CLAIRVOYANT]["recomputed_tokens"] < rows[scheduler, "lru"]["recomputed_tokens"]
    for row in rows.values():
        assert (
            0 < row["ttft_p50_s"] <= row["ttft_p95_s"] and 1.0 <= row["slowdown_p50"] <= row["slowdown_p95"]
        )
        assert row["itl_p50_s"] == pytest.approx(0.02)
    assert json.loads(json.dumps(result)) == result
    text = simulate_serving.table(result)
    assert "cache-first  clairvoyant" in text and "16 sessions at a time" in text


@pytest.mark.parametrize(
    "wrong",
    [
        {"sessions": 0}, {"rate": -1.0}, {"prefill": 0.0}, {"decode": float("nan")}, {"replicas": 0},
        {"route": "fastest"}, {"pauses": -1.0}, {"kappa": -1}, {"measure_s": 0.0}, {"host_blocks": -1},
    ],
)  # fmt: skip
def test_settings_are_checked(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Settings(**wrong)


@pytest.mark.parametrize(
    "wrong", [{"capacities": []}, {"capacities": [0]}, {"schedulers": ["sjf"]}, {"policies": ["nothing"]}]
)
def test_cells_are_checked(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        simulate_serving.run([EXCERPT], **{"capacities": [10], **wrong})


def test_the_command_writes_text_json_and_a_report(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    base = ["simulate", "--serve", str(EXCERPT), "--sessions", "4", "--capacity", "1k", "--policy", "lru"]
    base += ["--scheduler", "cache-first", "--warm-up", "5m", "--measure", "10m"]
    done = CliRunner().invoke(commands, [*base, "--html", str(page)], catch_exceptions=False)
    assert done.exit_code == 0 and "cache-first  lru" in done.output
    html = page.read_text("utf-8")
    assert "Requests an hour" in html and "<td>cache-first</td>" in html and "default-src 'none'" in html
    done = CliRunner().invoke(commands, [*base, "--json"], catch_exceptions=False)
    rows = json.loads(done.output)["results"]
    assert [(row["scheduler"], row["policy"]) for row in rows] == [("fcfs", "lru"), ("cache-first", "lru")]


@pytest.mark.parametrize(
    "wrong",
    [
        ["simulate", "x", "--sessions", "4"],
        ["simulate", "x", "--serve", "--jobs", "2"],
        ["simulate", str(EXCERPT), "--serve", "--prefill", "fast"],
        ["simulate", str(EXCERPT), "--serve", "--route", "fast"],
        ["simulate", str(EXCERPT), "--serve", "--scheduler", "sjf"],
    ],
)
def test_wrong_options_are_refused(wrong: list[str]) -> None:
    done = CliRunner().invoke(commands, wrong)
    assert isinstance(done.exception, ConfigError), done.output
