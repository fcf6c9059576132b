"""The view agrees with plain dicts for any logs, and stays within its bounds."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.coordination.store.wire import TIERS, Entry
from radixkv.coordination.view.segment_table import Segments
from radixkv.coordination.view.view import RemoteLog, View

NAMESPACES = (b"a" * 32, b"b" * 32)
PATHS = [
    [random.Random(seed).randbytes(16) for _ in range(1)] + [bytes([seed, i]) * 8 for i in range(150)]
    for seed in range(2)
]


class Truth:
    """The logs of one view, and dicts with the same content."""

    def __init__(self, view: View, num_logs: int) -> None:
        self.view = view
        self.logs = [RemoteLog(1, "nonce", view) for _ in range(num_logs)]
        self.held: list[dict[bytes, str]] = [{} for _ in self.logs]

    def offer(self, at: int, op: str, space: int | None, run: list[bytes], tier: str) -> None:
        namespace = b"" if space is None else NAMESPACES[space]
        entry = Entry(op, namespace, b"", b"".join(run), tier)
        assert self.logs[at].offer(self.logs[at].seq + 1, entry) == "applied"
        held = self.held[at]
        if op == "clear":
            self.held[at] = {} if space is None else {d: t for d, t in held.items() if d not in PATHS[space]}
        for digest in run:
            if op == "store" or (op == "tier" and digest in held):
                held[digest] = tier
            elif op == "remove":
                held.pop(digest, None)

    def forget(self, at: int) -> None:
        self.logs[at].forget(self.logs[at].seq)
        self.held[at] = {}

    def check(self) -> None:
        self.view.flush()
        assert self.view.num_digests == sum(map(len, self.held))
        assert self.view.num_segments == len({digest for held in self.held for digest in held})
        for path in PATHS:
            for start in (0, 40, 149):
                counts = self.view.leading(b"".join(path[start:])).counts()
                for log, held in zip(self.logs, self.held, strict=True):
                    found = [0, 0, 0] if log.column is None else counts[log.column].tolist()
                    assert found == leading(path[start:], held)
                assert not counts[-1].any()


def leading(path: list[bytes], held: dict[bytes, str]) -> list[int]:
    counts = [0, 0, 0]
    for digest in path:
        if digest not in held:
            break
        counts[TIERS.index(held[digest])] += 1
    return counts


@given(st.integers(0, 2**32), st.integers(1, 40))
def test_random_logs_match_plain_dicts(seed: int, num_logs: int) -> None:
    chance = random.Random(seed)
    truth = Truth(View(10_000), num_logs)
    for _ in range(60):
        at, space = chance.randrange(num_logs), chance.randrange(2)
        start = chance.randrange(150)
        run = PATHS[space][start : start + chance.randrange(64)]
        if chance.random() < 0.2:
            run = chance.choices(PATHS[space], k=8)
        kind = chance.choices(["store", "remove", "tier", "clear", "forget"], [8, 3, 3, 1, 1])[0]
        if kind == "forget":
            truth.forget(at)
        elif kind == "clear":
            truth.offer(at, kind, chance.choice([None, space]), [], "device")
        else:
            truth.offer(at, kind, space, run, chance.choice(TIERS))
        if chance.random() < 0.1:
            truth.check()
    truth.check()


def test_a_log_is_followed_by_number() -> None:
    view = View(100)
    log = RemoteLog(1, "n", view)
    entry = Entry("store", NAMESPACES[0], b"", PATHS[0][0])
    assert log.offer(1, entry) == "applied" and log.offer(1, entry) == "old" and log.offer(3, entry) == "gap"
    assert view.num_digests == 1
    log.load([(NAMESPACES[0], "host", b"".join(PATHS[0][:3]))], 7)
    assert log.offer(7, entry) == "old" and view.leading(b"".join(PATHS[0])).counts()[0].tolist() == [0, 3, 0]
    log.forget(9)
    assert view.num_digests == 0 and log.offer(10, entry) == "applied"


def test_a_reused_column_starts_empty() -> None:
    view = View(100)
    first, second = RemoteLog(1, "n", view), RemoteLog(1, "n", view)
    first.load([(NAMESPACES[0], "device", b"".join(PATHS[0][:3]))], 1)
    column = first.column
    first.forget(0)
    second.load([(NAMESPACES[0], "disk", PATHS[0][0])], 1)
    assert second.column == column
    assert view.leading(b"".join(PATHS[0])).counts()[second.column].tolist() == [0, 0, 1]


def test_segments_beyond_the_budget_are_left_out_and_counted() -> None:
    view = View(50)
    log = RemoteLog(1, "n", view)
    log.offer(1, Entry("store", NAMESPACES[0], b"", b"".join(PATHS[0][:60])))
    assert (view.num_segments, view.num_forgotten) == (50, 10)
    assert view.leading(b"".join(PATHS[0])).counts()[0, 0] == 50, (
        "the first segments are kept, so a path has no hole"
    )
    log.offer(2, Entry("remove", NAMESPACES[0], b"", b"".join(PATHS[0][40:50])))
    log.offer(3, Entry("store", NAMESPACES[0], b"", b"".join(PATHS[0][40:60])))
    assert (view.num_segments, view.num_forgotten) == (50, 20), "removed segments made room"


def test_a_growing_table_finds_exactly_its_digests() -> None:
    table = Segments(200_000)
    digests = np.random.default_rng(0).bytes(16 * 100_000)
    keys = table.keys_of(digests)
    space = np.full(1000, table.sets.id_of(NAMESPACES[0], 0), np.uint32)
    for start in range(0, 100_000, 1000):
        space[:] = table.sets.id_of(NAMESPACES[0], 0)
        table.apply(start // 1000 % 7, keys[start : start + 1000], np.ones(1000, np.uint8), space)
    assert table.count() == (100_000, 100_000)
    assert all(table.holders(digests)) and not any(table.holders(np.random.default_rng(1).bytes(16 * 1000)))
    assert table.num_bytes < 24 * 100_000


@pytest.mark.parametrize("num_columns", [1, 7, 8, 9, 64, 1000])
def test_bitmaps_of_any_width(num_columns: int) -> None:
    truth = Truth(View(1000), num_columns)
    for at in {0, num_columns // 2, num_columns - 1}:
        truth.offer(at, "store", 0, PATHS[0][: at + 1][:100], TIERS[at % 3])
    for at in range(num_columns):
        truth.offer(at, "store", 1, PATHS[1][:3], "device")
    truth.check()
