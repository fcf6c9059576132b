"""A cache that lives at random, vLLM's declarations of events, and a reader that needs no sockets."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import msgspec

from radixkv import CacheConfig, Namespace, PrefixCache
from radixkv.errors import CapacityError
from radixkv.events.event_messages import BlockDigests, Change
from radixkv.events.event_settings import EventSettings
from radixkv.events.event_stream import Batch, EventStream
from radixkv.events.event_subscriber import Follower
from radixkv.events.replay_buffer import ReplayBuffer
from radixkv.index import tails
from radixkv.index.tokens import TAIL_FILL
from radixkv.signing import KeySet

KEYS = KeySet.derive([b"a secret of the fleet"], ["events"])
BLOCK = 4
NAMESPACES = [
    Namespace("acme", "m"),
    Namespace("acme", "m", salt="s"),
    Namespace("other", "m"),
    Namespace("other", "m", adapter="a"),
]


class VBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """A batch as vLLM 0.24 to 0.33 declares it."""

    ts: float
    events: list[VStored | VRemoved | VCleared]
    data_parallel_rank: int | None = None


class VEvent(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """vLLM's base of events."""


class VStored(VEvent, tag="BlockStored"):
    """vLLM's BlockStored."""

    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None


class VRemoved(VEvent, tag="BlockRemoved"):
    """vLLM's BlockRemoved."""

    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None


class VCleared(VEvent, tag="AllBlocksCleared"):
    """vLLM's AllBlocksCleared."""


vllm_decoder = msgspec.msgpack.Decoder(VBatch)


class Held:
    """A sink: the digests that a publisher holds."""

    def __init__(self) -> None:
        self.digests: set[bytes] = set()

    def apply(self, changes: list[Change]) -> None:
        for op, packed in changes:
            some = {packed[at : at + 16] for at in range(0, len(packed), 16)}
            if op == "store":
                assert not some & self.digests, "stored twice"
                self.digests |= some
            elif op == "remove":
                assert some <= self.digests, "removed without being stored"
                self.digests -= some
            else:
                self.digests = set()

    def forget(self) -> None:
        self.digests = set()


class Reader:
    """A reader over a transport in memory, which loses the batches that ``loses`` says."""

    def __init__(self, kept: ReplayBuffer[bytes], stream: EventStream, loses: Callable[[], bool]) -> None:
        self.held = Held()
        self.follower = Follower(self.held)
        self.num_lost = 0
        self._kept, self._stream, self._loses = kept, stream, loses

    def take(self, batch: Batch) -> None:
        if self._loses():
            self.num_lost += 1
        elif not self.follower.live(batch.number, batch.payload):
            self.replay()
            if not self.follower.take(batch.number, batch.payload):
                self.follower.miss()

    def replay(self) -> None:
        wanted = self.follower.wanted
        batches = self._kept.since(wanted, len(self._kept))
        if not self._kept.covers(wanted):
            self._stream.restate()
        for number, payload in batches:
            self.follower.take(number, payload)


class Life:
    """A cache with a stream of events, in which random things happen."""

    def __init__(
        self,
        seed: int,
        *,
        num_blocks: int = 48,
        queue_records: int = 10_000,
        queue_bytes: int = 1 << 26,
        restate_s: float = 0.0,
    ) -> None:
        self.random = random.Random(seed)
        self.now = 1000.0
        settings = EventSettings(
            block_size=BLOCK, queue_records=queue_records, queue_bytes=queue_bytes, restate_s=restate_s
        )
        self.stream = EventStream(KEYS, settings, clock=lambda: self.now, wall=lambda: 1e9 + self.now)
        self.cache = PrefixCache(CacheConfig(num_blocks=num_blocks, block_size=BLOCK), journal=self.stream)
        self.stream.attach(self.cache)
        self.open: list[Any] = []
        self.num_tails = 0

    def act(self) -> None:
        """Do one random thing."""
        choose, cache = self.random, self.cache
        namespace = choose.choice(NAMESPACES)
        roll = choose.random()
        try:
            if roll < 0.45:
                ids = [choose.randrange(2) for _ in range(choose.randrange(1, 60))]
                with cache.open(namespace, ids) as sequence:
                    sequence.commit(sequence.num_tokens)
            elif roll < 0.6:
                ids = [choose.randrange(2) for _ in range(choose.randrange(1, 30))]
                self.open.append(cache.open(namespace, ids))
            elif roll < 0.75 and self.open:
                sequence = choose.choice(self.open)
                for _ in range(choose.randrange(10)):
                    sequence.append(choose.randrange(2))
                sequence.commit(sequence.num_tokens)
            elif roll < 0.85 and self.open:
                sequence = self.open.pop(choose.randrange(len(self.open)))
                if choose.random() < 0.5:
                    self.num_tails += tails.keep(cache, sequence)
                sequence.release()
            elif roll < 0.93:
                cache.evict(choose.randrange(1, 8))
            elif roll < 0.97:
                cache.clear(namespace)
            else:
                cache.purge(namespace.tenant)
        except CapacityError:
            self.end()
        except Exception as error:
            if type(error).__name__ != "StaleGeneration":
                raise
            self.end()
        self.now += choose.random()

    def end(self) -> None:
        """Release all sequences."""
        while self.open:
            self.open.pop().release()

    def batches(self) -> list[Batch]:
        """Return all batches that there are now."""
        found = []
        while True:
            batch = self.stream.step()
            if batch is not None:
                found.append(batch)
            elif self.stream.is_idle:
                return found

    def parents(self) -> dict[bytes, bytes | None]:
        """Return all resident blocks but tails, each with the one before it, one by one from their whole prefixes."""
        digests, found = BlockDigests(KEYS, BLOCK), {}
        for tree in self.cache.snapshot().trees:
            if tree.detached or tree.base is not None:
                continue
            keys: list[bytes] = []
            for node in tree.nodes:
                above = b"" if node.parent is None else keys[node.parent]
                keys.append(above + node.label)
                has_tail = node.label.endswith(TAIL_FILL)
                chain = digests.of(tree.namespace, keys[-1])[: -1 if has_tail else None]
                found.update(zip(chain, [None, *chain], strict=False))
        return found
