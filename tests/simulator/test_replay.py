"""A replay equals a live cache: the same hits as a PrefixCache of real blocks and real token ids."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest
from numpy.typing import NDArray

from radixkv import audit
from radixkv.clock import ManualClock
from radixkv.config import CacheConfig, Namespace, Tenant, policy_names
from radixkv.errors import CapacityError
from radixkv.index.cache import PrefixCache
from radixkv.index.sequence import Sequence
from radixkv.simulator.generator import Part, generate, line
from radixkv.simulator.replay import replay, sized
from radixkv.simulator.trace import Trace, events, read
from radixkv_policies import POLICIES, RequestHints
from radixkv_policies.policy import SEGMENT_TOKENS
from tests.simulator.traces import FITTED, small


def live(trace: Trace, policy: str, capacity: int, size: int = 2) -> list[int]:
    """Return the cached blocks of each request, as in a service: whole prompts of token ids, with partial blocks."""
    clock = ManualClock()
    running: dict[int, Sequence] = {}
    hits = [0] * len(trace)
    segment_tokens = max(SEGMENT_TOKENS // trace.block_tokens, 1) * size
    default = Tenant("*", policy=sized(POLICIES[policy], capacity))
    config = CacheConfig(capacity + 1, size, segment_tokens=segment_tokens, default_tenant=default)
    cache, maintain_at = PrefixCache(config, clock=clock), 0.0

    def ids(start: int, stop: int) -> NDArray[np.int64]:
        return (trace.blocks[start:stop, None].astype(np.int64) * size + np.arange(size)).ravel()

    for number, ends in events(trace):
        start, stop = trace.starts[number : number + 2].tolist()
        split = start + int(trace.num_prompt_blocks[number])
        clock.now = max(clock.now, trace.times[number] + (trace.durations[number] if ends else 0.0))
        if clock.now >= maintain_at:
            cache.maintain()
            maintain_at = clock.now + 1.0
        if not ends:
            tail = [2**31 + number]
            namespace = Namespace(tenant=trace.tenants[trace.tenant[number]], model="live")
            try:
                labels = trace.labels[number]
                hints = RequestHints(labels=labels) if labels else None
                sequence = cache.open(namespace, np.concatenate([ids(start, split), tail]), hints=hints)
            except CapacityError:
                continue
            hits[number] = sequence.num_cached_tokens // size
            sequence.commit((split - start) * size)
            sequence.truncate((split - start) * size)
            running[number] = sequence
        elif number in running:
            with running.pop(number) as sequence:
                if stop > split:
                    try:
                        sequence.extend(np.concatenate([ids(split, stop), [0]]))
                    except CapacityError:
                        continue
                    sequence.commit((stop - start) * size)
    audit.check(cache)
    return hits


@pytest.mark.slow
@pytest.mark.parametrize("policy", policy_names())
def test_the_same_hits_as_a_live_cache(policy: str) -> None:
    for seed in range(5 if policy in FITTED else 20):
        trace = small(seed, requests=50)
        for capacity in (3, 6, 12):
            assert replay(trace, policy, capacity).hit_blocks.tolist() == live(trace, policy, capacity), seed


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """Five minutes of requests of two tenants."""
    parts = [Part("acme", "chat", 1.0, 0.0, 300.0), Part("globex", "rag", 1.0, 0.0, 300.0)]
    path = tmp_path_factory.mktemp("generated") / "trace.jsonl"
    path.write_text("\n".join(line(call, 512, tokens_per_s=50) for call in generate(parts)))
    return read([path])


@pytest.mark.slow
@pytest.mark.parametrize("policy", policy_names())
def test_the_same_hits_on_a_generated_workload(policy: str, generated: Trace) -> None:
    assert replay(generated, policy, 700).hit_blocks.tolist() == live(generated, policy, 700)


def test_lru_equals_an_ordered_dict() -> None:
    """Textbook LRU over blocks, where the end of a path is older than its beginning."""
    for seed in range(40):
        trace = small(seed * 3 + 1, requests=60, lasting=False, answers=False)
        order: OrderedDict[int, None] = OrderedDict()
        expected = []
        for start, stop in zip(trace.starts, trace.starts[1:], strict=False):
            path = trace.blocks[start:stop].tolist()
            if len(path) > 6:
                expected.append(0)
                continue
            expected.append(next((at for at, block in enumerate(path) if block not in order), len(path)))
            for block in path:
                order.pop(block, None)
            while len(order) + len(path) > 6:
                order.popitem(last=False)
            order.update(dict.fromkeys(reversed(path)))
        assert replay(trace, "lru", 6).hit_blocks.tolist() == expected
