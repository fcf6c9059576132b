"""Generated workloads: the seed determines them, and their shape matches the sources."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from radixkv.errors import ConfigError
from radixkv.simulator.generator import DEFAULT_MIX, KINDS, Call, Part, generate, line, parse_mix
from radixkv.simulator.trace import read


def calls(kind: str, *, seconds: float = 1_800.0, rate: float = 2.0, seed: int = 0) -> list[Call]:
    return list(generate([Part("acme", kind, rate, 0.0, seconds)], seed=seed))


def seconds(text: str) -> float:
    return float(text)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_deterministic_in_order_and_readable(kind: str, tmp_path: Path) -> None:
    made = calls(kind, seconds=300)
    assert made == calls(kind, seconds=300) != calls(kind, seconds=300, seed=1)
    assert all(a.time_s <= b.time_s < 300 for a, b in pairwise(made))
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(line(call, 512) for call in made))
    trace = read([path])
    assert len(trace) == len(made) > 0
    assert trace.prompt_tokens.tolist() == [call.prompt_tokens for call in made]
    assert trace.labels[0] is not None and trace.labels[0]["type"] == kind


@pytest.mark.slow
def test_conversations_continue_as_often_as_in_the_trace() -> None:
    made = calls("chat", seconds=8_000)
    turns = Counter(call.labels["turn"] for call in made if call.time_s < 4_000)
    over = Counter(
        call.labels["turn"] for call in made if call.time_s < 4_000 and call.labels.get("session_over")
    )
    for turn, share in ((1, 0.28), (2, 0.40), (3, 0.56)):
        assert 1 - over[turn] / turns[turn] == pytest.approx(share, abs=0.03)
    mean = sum(call.prompt_tokens for call in made) / len(made)
    assert mean == pytest.approx(12_000, rel=0.25)


@pytest.mark.slow
def test_a_turn_begins_with_the_whole_previous_turn() -> None:
    last: dict[str, Call] = {}
    for call in calls("chat"):
        before = last.get(call.labels["session"])
        if before is not None:
            assert call.blocks[: len(before.blocks)] == before.blocks
            assert call.labels["turn"] == before.labels["turn"] + 1
        last[call.labels["session"]] = call


def test_agents_wait_for_tools_in_bursts() -> None:
    made = calls("agent", seconds=7_200, rate=1.0)
    last: dict[str, Call] = {}
    gaps: dict[bool, list[float]] = {True: [], False: []}
    for call in made:
        before = last.get(call.labels["session"])
        if before is not None:
            gaps[bool(before.labels.get("tool_pending"))].append(call.time_s - before.time_s)
        last[call.labels["session"]] = call
    tool, person = (sorted(gaps[pending])[len(gaps[pending]) // 2] for pending in (True, False))
    assert tool < 15 < 60 < person


@pytest.mark.slow
def test_few_documents_get_most_of_the_requests() -> None:
    firsts = Counter(call.blocks[2] for call in calls("rag", seconds=1_800, rate=5.0) if len(call.blocks) > 2)
    top = sum(uses for _, uses in firsts.most_common(len(firsts) // 30))
    assert top > 0.4 * firsts.total()


def test_batches_share_their_instructions_only() -> None:
    made = calls("batch", rate=4.0)
    by_job: dict[str, list[Call]] = {}
    for call in made:
        by_job.setdefault(call.labels["session"], []).append(call)
    for job in by_job.values():
        assert len({tuple(call.blocks[:2]) for call in job}) == 1
        assert len({call.blocks[3] for call in job if len(call.blocks) > 3}) == sum(
            len(c.blocks) > 3 for c in job
        )


def test_scans_never_return_and_loops_do() -> None:
    scanned = [block for call in calls("scan", seconds=300) for block in call.blocks]
    assert len(set(scanned)) == len(scanned)
    looped = Counter(call.blocks[0] for call in calls("loop", seconds=1_200))
    assert len(looped) == 600 and max(looped.values()) - min(looped.values()) <= 1


def test_rates_and_windows() -> None:
    parts = parse_mix(["acme:rag=5@100-200", "globex:scan=1,rag=0.5"], 1_000, seconds)
    made = list(generate(parts))
    acme = [call for call in made if call.tenant == "acme"]
    assert all(100 <= call.time_s < 200 for call in acme)
    assert len(acme) == pytest.approx(500, rel=0.25)
    assert len(made) - len(acme) == pytest.approx(1_500, rel=0.25)


def test_a_part_of_a_mix_does_not_depend_on_the_others() -> None:
    def times(*specs: str) -> list[tuple[float, int]]:
        made = generate(parse_mix(specs, 200, seconds), seed=3)
        return [(call.time_s, call.prompt_tokens) for call in made if call.tenant == "acme"]

    assert times("acme:chat=2") == times("acme:chat=2", "globex:agent=2,scan=1")


def test_labels_and_durations_of_lines_are_optional() -> None:
    (call, *_) = calls("rag", seconds=100)
    assert "labels" not in json.loads(line(call, 512, labels=False))
    assert json.loads(line(call, 512, tokens_per_s=10))["duration_s"] == pytest.approx(
        call.output_tokens / 10
    )


@pytest.mark.parametrize(
    "spec",
    ["", "chat", "chat=", "chat=0", "chat=-1", "chat=x", "talk=1", "a:b:chat=1", "chat=1@9-3", "chat=inf"],
)
def test_an_invalid_mix_is_refused(spec: str) -> None:
    with pytest.raises(ConfigError, match="--mix"):
        parse_mix([spec], 10, seconds)


def test_the_default_mix() -> None:
    assert {part.kind for part in parse_mix(DEFAULT_MIX, 10, seconds)} == {"chat", "agent", "rag", "batch"}
