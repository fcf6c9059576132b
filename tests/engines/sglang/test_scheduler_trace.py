"""Calls of the real SGLang's scheduler, recorded, and made again without it: the same answers."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from radixkv import Namespace, audit
from radixkv.engines.sglang.cache import ROOT, Node, SglangCache
from radixkv.tenancy.request_keys import Label
from tests.engines.sglang.runs import folder as folder
from tests.engines.sglang.scheduler_trace import TRACES, read, record, shell_digest

RECORD_AGAIN = "record again: python -m tests.engines.sglang.scheduler_trace"


class Replay:
    """One cache, and what a trace's numbers mean."""

    def __init__(self, about: dict[str, Any]) -> None:
        self.cache = SglangCache(
            about["num_pages"], about["page_size"], model="sglang", policy=about["policy"]
        )
        self.page_size: int = about["page_size"]
        self.ids: list[list[int]] = []
        self.namespaces: list[Namespace | None] = []
        self.returned: list[Any] = []
        self.counts: Counter[str] = Counter()

    def make(self, name: str, *given: Any) -> None:
        """Make one call, and compare its answer."""
        self.counts[name] += 1
        made: dict[str, Any] = {
            "ids": self.read_ids,
            "namespace": lambda *of: self.namespaces.append(self.cache.namespace(*of)),
            "match": self.match,
            "touch": lambda of, ids: self.cache.touch(self.namespace(of), self.ids[ids]),
            "insert": self.insert,
            "lock": self.lock,
            "release": lambda lease: self.returned[lease][1].release(),
            "reclaim": self.reclaim,
            "reset": self.cache.reset,
        }
        made[name](*given)

    def namespace(self, number: int | None) -> Namespace | None:
        return None if number is None else self.namespaces[number]

    def read_ids(self, base: int, common: int, more: list[int]) -> None:
        self.ids.append([*(self.ids[base][:common] if common else []), *more])

    def match(self, namespace: int | None, ids: int, num_tokens: int) -> None:
        node = self.cache.match(self.namespace(namespace), self.ids[ids])
        assert node.num_tokens == num_tokens
        self.counts["matched tokens"] += num_tokens
        self.returned.append((node, None))

    def insert(
        self,
        namespace: int,
        ids: int,
        pages: list[int],
        start: int,
        after: int | None,
        priority: int,
        labels: list[tuple[str, Label]],
        *told: Any,
    ) -> None:
        given = self.ids[ids]
        taken = self.cache.insert(
            self.namespace(namespace),
            given,
            np.array(pages, np.int32),
            start,
            after=ROOT if after is None else self.returned[after][0],
            lease=True,
            priority=priority,
            labels=tuple((name, value) for name, value in labels),
        )
        assert taken is not None
        assert len(given) == len(pages) * self.page_size  # a checkpoint encodes what is new since the last
        assert [taken.num_resident_tokens, taken.surplus.tolist(), taken.evicted.tolist()] == list(told)
        self.counts["surplus pages"] += len(taken.surplus)
        self.returned.append((taken.node, taken.lease))

    def lock(self, number: int) -> None:
        node: Node = self.returned[number][0]
        self.returned.append((node, self.cache.lock(node)))

    def reclaim(self, num_pages: int, told: list[int]) -> None:
        assert self.cache.reclaim(num_pages).tolist() == told
        self.counts["evicted pages"] += len(told)


@pytest.mark.parametrize("page", [1, 16])
def test_a_recorded_scheduler_gets_the_same_answers(page: int) -> None:
    about, *calls = read(TRACES / f"chats_{page}.jsonl.gz")
    replay = Replay(about)
    for call in calls:
        replay.make(*call)
    counts = replay.counts
    assert counts["insert"] > 100 and counts["lock"] > 40 and counts["reset"] >= 1
    assert counts["matched tokens"] > 10_000 and counts["evicted pages"] * page > 2_000
    assert counts["release"] == counts["insert"] + counts["lock"]
    assert replay.cache.resident_tokens == 0
    audit.check(replay.cache.cache)


@pytest.mark.parametrize("page", [1, 16])
def test_the_recording_is_of_this_shell(page: int) -> None:
    """``radixkv/engines/sglang/plugin.py`` decides which calls there are."""
    about = next(read(TRACES / f"chats_{page}.jsonl.gz"))
    assert about["shell"] == shell_digest() and about["sglang"] == "0.5.23", RECORD_AGAIN


@pytest.mark.engines
def test_sglang_makes_the_recorded_calls(folder: Path, tmp_path: Path) -> None:
    recorded, made = (
        Counter(call[0] for call in list(read(path))[1:])
        for path in (TRACES / "chats_16.jsonl.gz", record(folder, 16, tmp_path / "trace.jsonl"))
    )
    assert made.keys() == recorded.keys(), RECORD_AGAIN
    assert all(abs(made[name] - recorded[name]) <= recorded[name] // 5 + 5 for name in recorded), RECORD_AGAIN
