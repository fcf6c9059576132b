"""Calls of the real vLLM's scheduler, recorded, and made again without it: the same answers."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from radixkv import audit
from radixkv.engines.vllm.cache import Copied, VllmCache
from radixkv.index.announcements import Announcement
from radixkv.tenancy.request_keys import RequestFacts
from tests.engines.sglang.scheduler_trace import read
from tests.engines.vllm.scheduler_trace import (
    RECORDED,
    RUNS,
    TRACES,
    calls_of,
    plain,
    record,
    shell_calls,
    shell_methods,
)
from tests.engines.vllm.test_same_tokens import model as model

RECORD_AGAIN = "record again: python -m tests.engines.vllm.scheduler_trace"


class Replay:
    """One cache, and what a trace's numbers mean."""

    def __init__(self, about: dict[str, Any]) -> None:
        settings = {name: about[name] for name in ("model", "policy", "scrub", "copies")}
        size = about["num_blocks"], about["block_size"], about["max_model_len"]
        self.cache = VllmCache(*size, **settings)
        self.ids: list[list[int]] = []
        self.requests: list[tuple[list[int], RequestFacts]] = []
        self.copies: list[Copied] = []
        self.announcements: list[Announcement] = []
        self.counts: Counter[str] = Counter()

    def make(self, name: str, *given: Any) -> None:
        """Make one call, and compare its answer."""
        self.counts[name] += 1
        if name == "ids":
            base, common, more = given
            self.ids.append([*(self.ids[base][:common] if common else []), *more])
        elif name == "request":
            number, (salt, adapter, material, *others, labels) = given
            facts = RequestFacts(
                salt, adapter, tuple(map(tuple, material)), *others, labels=tuple(map(tuple, labels))
            )
            self.requests.append((list(self.ids[number]), facts))
        elif name == "more":
            self.requests[given[0]][0].extend(given[1])
        elif name == "lift":
            self.copies[given[0]].lift()
        elif name == "withdraw":
            self.announcements[given[0]].withdraw()
        else:
            self.call(name, *given)

    def call(self, name: str, request: int | None, arguments: dict[str, Any], answer: Any) -> None:
        """Call a method of the cache."""
        assert name in RECORDED
        first: dict[str, Any] = {}
        if request is not None:
            ids, facts = self.requests[request]
            first["request_id"] = str(request)
            if name in ("lookup", "allocate", "fits_its_tenant", "announce"):
                first |= {"facts": facts, "ids": ids}
            elif name in ("goes_on", "commit"):
                first["ids"] = ids
        found = getattr(self.cache, name)(**first, **arguments)
        if name == "take_copies":
            self.copies += [hold for *_, hold in found]
            found = [(source, target) for source, target, _ in found]
        if name == "announce":
            tenant, announcement, missing = found
            self.announcements += [] if announcement is None else [announcement]
            found = tenant, announcement is not None, missing
        assert plain(found) == answer, (name, request, arguments)
        if name == "lookup":
            self.counts["found tokens"] += answer[1]
        if name == "allocate" and answer is None:
            self.counts["refusals"] += 1
        self.counts["noted steps"] += name == "goes_on" and answer


@pytest.mark.parametrize("name", RUNS)
def test_a_recorded_scheduler_gets_the_same_answers(name: str) -> None:
    about, *calls = read(TRACES / f"{name}.jsonl.gz")
    replay = Replay(about)
    for call in calls:
        replay.make(*call)
    counts, stats = replay.counts, replay.cache.cache.stats()
    assert counts["announce"] >= counts["withdraw"] > 0
    assert counts["request"] == 48 and counts["found tokens"] > 20_000
    assert counts["noted steps"] > counts["allocate"] > counts["request"]
    assert counts["release"] >= counts["request"] and counts["refusals"] > 0
    assert stats.evicted_blocks > 100 and stats.num_sequences == 0 and not replay.cache.has_requests
    audit.check(replay.cache.cache)


@pytest.mark.parametrize("name", RUNS)
def test_the_recording_is_of_this_shell(name: str) -> None:
    """The calls in ``manager.py`` and ``queue.py``, and the parameters of the methods of vLLM that are replaced."""
    about = next(read(TRACES / f"{name}.jsonl.gz"))
    assert about["vllm"].startswith("0.32.0") and about["calls"] == shell_calls(), RECORD_AGAIN
    signatures, methods = about["signatures"], shell_methods()
    replaced = {method: names for method, names in methods.items() if method in signatures}
    assert {"allocate_slots", "get_computed_blocks", "free", "take_new_block_ids"} <= replaced.keys()
    for method, names in replaced.items():
        if method != "remove_skipped_blocks":  # it takes anything
            assert names == signatures[method], f"{method}: {RECORD_AGAIN}"


@pytest.mark.engines
@pytest.mark.parametrize("name", RUNS)
def test_vllm_makes_the_recorded_calls(name: str, model: str, tmp_path: Path) -> None:
    made = list(read(record(name, model, tmp_path)))
    recorded = list(read(TRACES / f"{name}.jsonl.gz"))
    assert made[0] == recorded[0], RECORD_AGAIN
    counts, expected = calls_of(iter(made)), calls_of(iter(recorded))
    assert counts.keys() == expected.keys(), RECORD_AGAIN
    assert all(abs(counts[each] - expected[each]) <= expected[each] // 5 + 5 for each in expected), (
        RECORD_AGAIN
    )
