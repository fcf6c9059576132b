"""The journal reports exactly the resident blocks, at its grain."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

from radixkv import CacheConfig, Namespace, PrefixCache
from radixkv.audit import properties
from radixkv.index.tokens import TAIL_FILL, Key
from tests.index.support import NS, compute

EXAMPLES = int(os.environ.get("RADIXKV_EXAMPLES", "240")) // 6


class Recorder:
    """Keeps the segments that are resident by the journal's calls: (namespace, ids up to the segment's end)."""

    def __init__(self, grain_tokens: int) -> None:
        self.grain_tokens = grain_tokens
        self.held: set[tuple[Namespace, bytes]] = set()
        self.calls: list[tuple[str, int, int]] = []

    def stored(self, namespace: Namespace, key: Key, start: int, stop: int) -> None:
        """Segments that end in ``(start, stop]`` became resident."""
        self.calls.append(("stored", start, stop))
        for segment in self._segments(namespace, key, start, stop):
            assert segment not in self.held, "stored twice"
            self.held.add(segment)

    def removed(self, namespace: Namespace, key: Key, start: int, stop: int) -> None:
        """Segments that end in ``(start, stop]`` left."""
        self.calls.append(("removed", start, stop))
        for segment in self._segments(namespace, key, start, stop):
            self.held.remove(segment)

    def cleared(self, namespace: Namespace) -> None:
        """All segments of the namespace left."""
        self.calls.append(("cleared", 0, 0))
        self.held = {segment for segment in self.held if segment[0] != namespace}

    def _segments(
        self, namespace: Namespace, key: Key, start: int, stop: int
    ) -> set[tuple[Namespace, bytes]]:
        whole = key if isinstance(key, bytes) else b"".join(key)
        assert 4 * stop <= len(whole) <= 8 * stop and start < stop
        ends = range(
            start // self.grain_tokens * self.grain_tokens + self.grain_tokens, stop + 1, self.grain_tokens
        )
        assert ends, "a range without the end of a segment was reported"
        return {(namespace, whole[: 4 * end]) for end in ends}


def resident_segments(snapshot: Any, grain_tokens: int) -> set[tuple[Namespace, bytes]]:
    """The resident segments, read from the trees. Tails are none: the journal never hears of them."""
    found = set()
    for tree in snapshot.trees:
        keys: list[bytes] = []
        for node in tree.nodes:
            above = keys[node.parent] if node.parent is not None else b""
            keys.append(above + node.label)
            step = 4 * grain_tokens
            first = len(above) // step * step + step
            end = len(keys[-1]) - (4 * snapshot.block_size if node.label.endswith(TAIL_FILL) else 0)
            if not tree.detached and tree.base is None:
                found |= {(tree.namespace, keys[-1][:stop]) for stop in range(first, end + 1, step)}
    return found


class JournalMachine(properties.CacheMachine):
    """The state machine, which compares the journal with the resident segments after each step."""

    def laws(self) -> None:
        """Check the laws, and the journal against the trees."""
        super().laws()
        recorder = self.cache.recorder
        assert recorder.held == resident_segments(self.cache.snapshot(), recorder.grain_tokens)


class Recorded(PrefixCache):
    """A cache with a recorder with a grain of two or four tokens."""

    def __init__(self, config: CacheConfig, **settings: Any) -> None:
        self.recorder = Recorder(max(config.block_size * (1 + config.num_blocks % 2), 2))
        super().__init__(config, journal=self.recorder, **settings)


@pytest.mark.slow
def test_the_journal_reports_exactly_what_is_resident() -> None:
    """Over random lives, segments that were stored and not removed or cleared are exactly those in the trees."""
    report = properties.run(Recorded, EXAMPLES, 50, machine=JournalMachine, with_storage=[False])
    assert report.ok, report.failure


def test_short_ranges_are_not_reported() -> None:
    """Only ranges that contain a multiple of the grain are reported, in tokens, with the whole key."""
    recorder = Recorder(256)
    cache = PrefixCache(CacheConfig(num_blocks=200, block_size=16), journal=recorder)
    with cache.open(NS, np.arange(600)) as sequence:
        for stop in (100, 255, 256, 300, 511, 600):
            sequence.commit(stop)
    assert recorder.calls == [("stored", 240, 256), ("stored", 496, 592)]
    cache.evict(4)
    assert len(recorder.calls) == 2
    cache.evict(2)
    assert recorder.calls[2:] == [("removed", 496, 528)]
    compute(cache, np.arange(600))
    assert recorder.calls[3:] == [("stored", 496, 592)]
    cache.clear(NS)
    assert recorder.calls[4:] == [("cleared", 0, 0)] and not recorder.held


def test_the_highest_id_at_the_end_of_a_block_is_reported_like_any_other() -> None:
    """It also fills up tails, which the journal leaves out. A cache without tails has none to leave out."""
    highest = 2**32 - 1
    recorder = Recorder(2)
    cache = PrefixCache(CacheConfig(num_blocks=8, block_size=2), journal=recorder)
    compute(cache, [1, highest, 3, 4, 5, highest])
    assert recorder.calls == [("stored", 0, 6)]
    cache.evict(3)
    assert sum(stop - start for call, start, stop in recorder.calls if call == "removed") == 6
    assert not recorder.held
