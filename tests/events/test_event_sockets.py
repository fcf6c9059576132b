"""Publisher and reader over real sockets, and hostile consumers."""

from __future__ import annotations

import base64
import random
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from radixkv import CacheConfig, ConfigError, Namespace, PrefixCache
from radixkv.clock import Clock, ManualClock, monotonic
from radixkv.coordination.view.event_view import EventView
from radixkv.events import event_publisher, event_subscriber
from radixkv.events.event_messages import MAX_BATCH_BYTES
from radixkv.events.event_publisher import EventPublisher
from radixkv.events.event_settings import EventSettings
from radixkv.events.event_subscriber import EventSubscriber
from tests.events.support import BLOCK, KEYS, Held, VBatch, VCleared, VRemoved, VStored, vllm_decoder
from tests.waiting import LIMIT_S, eventually

pytestmark = pytest.mark.slow

LIMIT_MS = int(1_000 * LIMIT_S)
ANY = "tcp://127.0.0.1:*"
SALT = "salt-of-a-tenant-0123456789"
IDS = [0x51A7C0DE + step for step in range(0, 0x400, 0x40)]
NAMESPACE = Namespace("tenant-of-acme", "model-of-acme", "adapter-of-acme", SALT)


@contextmanager
def published(**settings: Any) -> Iterator[tuple[EventPublisher, PrefixCache]]:
    chosen = {"block_size": BLOCK, "endpoint": ANY, "restate_s": 0.2, **settings}
    publisher = EventPublisher(KEYS, EventSettings(**chosen))
    cache = PrefixCache(CacheConfig(num_blocks=256, block_size=BLOCK), journal=publisher.journal)
    publisher.start(cache)
    try:
        yield publisher, cache
    finally:
        publisher.close()


@contextmanager
def reading(
    publisher: EventPublisher, view: EventView, clock: Clock = monotonic
) -> Iterator[EventSubscriber]:
    sink = view.follow("a")
    subscriber = EventSubscriber(publisher.endpoint, publisher.replay_endpoint, sink, clock=clock)
    subscriber.start()
    try:
        yield subscriber
    finally:
        subscriber.close()


def commit(cache: PrefixCache, ids: list[int], namespace: Namespace = NAMESPACE) -> None:
    with cache.open(namespace, ids) as sequence:
        sequence.commit(len(ids))


def replayed(publisher: EventPublisher, wanted: int = 0) -> list[list[bytes]]:
    """What a consumer of vLLM's protocol gets: the frames behind the empty one, up to the end."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.connect(publisher.replay_endpoint)
        dealer.send_multipart([b"", wanted.to_bytes(8, "big")])
        found = []
        while dealer.poll(LIMIT_MS):
            empty, *frames = dealer.recv_multipart()
            assert empty == b"" and len(frames) == 3
            if frames[1] == b"\xff" * 8:
                assert frames == [b"", b"\xff" * 8, b""]
                return found
            found.append(frames)
    raise AssertionError("no end")


def test_a_reader_follows_a_publisher() -> None:
    view = EventView(KEYS, BLOCK)
    with published() as (publisher, cache), reading(publisher, view):
        commit(cache, IDS)
        eventually(lambda: view.held(NAMESPACE, [*IDS, 1, 2, 3, 4]) == {"a": 16}, "stored")
        assert view.held(NAMESPACE, IDS[:7]) == {"a": 4}
        assert view.held(NAMESPACE._replace(tenant="other"), IDS) == {}
        assert view.held(NAMESPACE._replace(salt=""), IDS) == {}
        cache.evict(1)
        eventually(lambda: view.held(NAMESPACE, IDS) == {"a": 12}, "evicted")
        cache.purge(NAMESPACE.tenant)
        eventually(lambda: view.held(NAMESPACE, IDS) == {}, "purged")
        assert view.num_blocks == 0
        commit(cache, IDS)
        eventually(lambda: view.held(NAMESPACE, IDS) == {"a": 16}, "stored again")
    assert view.held(NAMESPACE, IDS) == {}


def test_a_late_reader_and_one_behind_a_restart_know_everything(
    short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second publisher has the first one's place. Its numbers are higher, and its first batch is a base."""
    monkeypatch.setattr(event_subscriber, "POLL_S", 0.3)
    view = EventView(KEYS, BLOCK)
    at = f"ipc://{short_folder}/events"
    with published(endpoint=at) as (publisher, cache):
        commit(cache, IDS)
        with reading(publisher, view) as subscriber:
            eventually(lambda: view.held(NAMESPACE, IDS) == {"a": 16}, "stated")
            publisher.close()
            with published(endpoint=at) as (_, other):
                commit(other, IDS[:8])
                eventually(lambda: view.held(NAMESPACE, IDS) == {"a": 8}, "the other publisher's")
            assert subscriber.follower.num_malformed == 0


def test_a_publisher_that_is_gone_is_forgotten() -> None:
    view, clock = EventView(KEYS, BLOCK), ManualClock(1_000.0)
    with published() as (publisher, cache), reading(publisher, view, clock) as subscriber:
        commit(cache, IDS)
        eventually(lambda: view.held(NAMESPACE, IDS) == {"a": 16}, "stored")
        for _ in range(2 * int(event_subscriber.LOST_S / event_subscriber.POLL_S)):  # silent, but it answers
            clock.advance(event_subscriber.POLL_S)
            eventually(lambda: subscriber._heard_at == clock.now, "an answer")
            assert view.held(NAMESPACE, IDS) == {"a": 16}
        publisher.close()

        def is_forgotten() -> bool:
            clock.advance(1.0)
            return view.held(NAMESPACE, IDS) == {}

        eventually(is_forgotten, "forgotten")


@pytest.mark.parametrize("seed", range(3))
def test_readers_over_sockets_know_what_is_resident(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One reader sees everything, one loses a third of the live batches and asks for them."""
    monkeypatch.setattr(event_subscriber, "POLL_S", 0.3)
    choose, lost = random.Random(seed), random.Random(seed)

    class Lossy(EventSubscriber):
        def _take(self, frames: list[bytes]) -> None:
            if lost.random() > 0.3:
                super()._take(frames)

    whole, lossy = Held(), Held()
    with published(replay_batches=8) as (publisher, cache):
        readers = [
            EventSubscriber(publisher.endpoint, publisher.replay_endpoint, whole),
            Lossy(publisher.endpoint, publisher.replay_endpoint, lossy),
        ]
        for reader in readers:
            reader.start()
        try:
            for number in range(120):
                ids = [choose.randrange(3) for _ in range(choose.randrange(4, 80))]
                commit(cache, ids, NAMESPACE._replace(tenant=f"t{number % 3}"))
                if number % 10 == 0:
                    cache.purge(f"t{choose.randrange(3)}")
                if number % 7 == 0:
                    time.sleep(0.02)
            journal = publisher.journal
            resident = sum(tree.num_blocks for tree in cache.snapshot().trees if not tree.detached)
            eventually(lambda: journal.is_idle and journal.num_blocks == resident, "published")
            eventually(lambda: len(whole.digests) == resident, "the whole reader")
            eventually(lambda: lossy.digests == whole.digests, "the lossy reader")
        finally:
            for reader in readers:
                reader.close()


def test_the_wire_is_that_of_vllm() -> None:
    with published(topic="kv@pod@model", publishes_prompts=True, data_parallel_rank=3) as (publisher, cache):
        with zmq.Context() as context, context.socket(zmq.SUB) as sub:
            sub.linger = 0
            sub.connect(publisher.endpoint)
            sub.subscribe("kv@")
            eventually(lambda: publisher.journal.restate() or sub.poll(100), "it has subscribed")
            commit(cache, IDS)
            cache.evict(1)
            cache.clear(NAMESPACE)
            live = []
            while sum(isinstance(e, VRemoved) for b in live for e in b[1].events) < 2:
                assert sub.poll(LIMIT_MS)
                topic, number, payload = sub.recv_multipart()
                assert topic == b"kv@pod@model" and len(number) == 8
                live.append((int.from_bytes(number, "big"), vllm_decoder.decode(payload)))
        kept = replayed(publisher)
    numbers = [int.from_bytes(number, "big") for _, number, _ in kept]
    assert numbers == list(range(numbers[0], numbers[0] + len(kept)))
    assert [topic for topic, _, _ in kept] == [b"kv@pod@model"] * len(kept)
    batches = [vllm_decoder.decode(payload) for _, _, payload in kept]
    assert [each for each in zip(numbers, batches, strict=True) if each[0] >= live[0][0]] == live
    events = [event for batch in batches for event in batch.events]
    assert isinstance(events[0], VCleared)
    (stored,) = [event for event in events if isinstance(event, VStored)]
    assert stored == VStored(
        stored.block_hashes, None, IDS, BLOCK, None, "GPU", NAMESPACE.adapter,
        [("adapter-of-acme", SALT), *[("adapter-of-acme",)] * 3],
    )  # fmt: skip
    assert all(isinstance(each, bytes) and len(each) == 16 for each in stored.block_hashes)
    removed = [event for event in events if isinstance(event, VRemoved)]
    assert [event.block_hashes for event in removed] == [[stored.block_hashes[3]], removed[1].block_hashes]
    assert set(removed[1].block_hashes) == set(stored.block_hashes[:3])
    assert all(batch.data_parallel_rank == 3 and abs(batch.ts - time.time()) < LIMIT_S for batch in batches)
    raw: Any = msgspec.msgpack.decode(kept[-1][2])
    assert isinstance(raw, list) and isinstance(raw[1][0], dict) and isinstance(VBatch, type)


def spellings(content: bytes) -> list[bytes]:
    """Bytes as they are, and the middle of their base64 at each alignment, hexadecimal, and reversed."""
    found = [content, content[::-1], content.hex().encode()]
    return found + [base64.b64encode(b"\0" * shift + content)[4:-4] for shift in range(3)]


def test_nothing_of_a_prompt_is_on_the_wire_by_default() -> None:
    """Neither ids in any usual encoding, nor salt, adapter, tenant or model."""
    secret = [spelling for text in NAMESPACE[:4] for spelling in spellings(str(text).encode())]
    for token in IDS:
        msgpacked = msgspec.msgpack.encode(token)
        for content in (struct.pack("<I", token), struct.pack(">I", token), msgpacked, str(token).encode()):
            secret.append(content)
        secret.append(base64.b64encode(struct.pack("<3I", token, token + 0x40, token + 0x80))[4:-4])

    def wire(**settings: Any) -> bytes:
        with published(**settings) as (publisher, cache):
            commit(cache, IDS)
            cache.evict(2)
            cache.purge(NAMESPACE.tenant)
            eventually(lambda: publisher.journal.num_blocks == 0 and publisher.journal.is_idle, "purged")
            return b"".join(b"".join(frames) for frames in replayed(publisher))

    plain = wire()
    assert len(plain) > 150 and [each for each in secret if each in plain] == []
    in_clear = wire(publishes_prompts=True)
    assert SALT.encode() in in_clear and all(msgspec.msgpack.encode(token) in in_clear for token in IDS)


def test_digests_need_the_key() -> None:
    """Another key, namespace or prefix gives other digests; a view with another key knows nothing."""
    from radixkv.events.event_messages import BlockDigests
    from radixkv.signing import KeySet

    key = struct.pack("<16I", *IDS)
    mine, other = (
        BlockDigests(KEYS, BLOCK),
        BlockDigests(KeySet.derive([b"another secret!!"], ["events"]), BLOCK),
    )
    digests = mine.of(NAMESPACE, key)
    assert len(digests) == len(set(digests)) == 4
    assert not set(digests) & set(other.of(NAMESPACE, key))
    for changed in ({"tenant": "b"}, {"model": "b"}, {"adapter": None}, {"salt": ""}, {"weights": 1}):
        assert not set(digests) & set(mine.of(NAMESPACE._replace(**changed), key))
    assert not set(digests) & set(mine.of(NAMESPACE, b"\1" + key[1:]))
    assert mine.of(NAMESPACE, key[:-1]) == digests[:3]
    with pytest.raises(ConfigError, match="events"):
        BlockDigests(KeySet.derive([b"a secret of the fleet"], ["salts"]), BLOCK)


def test_hostile_consumers_neither_stall_nor_grow_the_publisher() -> None:
    """Garbage, thousands of requests, requests without reading; an honest reader sees everything meanwhile.

    The hostile ones never read: whoever waits for them would never go on.
    """
    view = EventView(KEYS, BLOCK)
    with (
        published(replay_batches=64) as (publisher, cache),
        reading(publisher, view),
        zmq.Context() as context,
        ExitStack() as stack,
    ):

        def connected(kind: int, endpoint: str) -> zmq.Socket[bytes]:
            socket = stack.enter_context(context.socket(kind))
            socket.linger, socket.sndhwm, socket.rcvhwm = 0, 10_000, 1
            socket.connect(endpoint)
            return socket

        silent = connected(zmq.SUB, publisher.endpoint)
        silent.subscribe(b"")
        garbage = connected(zmq.DEALER, publisher.replay_endpoint)
        for frames in (
            [b""],
            [b"", b""],
            [b"x"] * 50,
            [b"", b"\xff" * 9],
            [b"x", bytes(8)],
            [random.Random(1).randbytes(200)],
        ):
            garbage.send_multipart(frames)
        greedy = [connected(zmq.DEALER, publisher.replay_endpoint) for _ in range(100)]
        for _ in range(50):
            for socket in greedy:
                socket.send_multipart([b"", bytes(8)])
        huge = connected(zmq.DEALER, publisher.replay_endpoint)
        huge.send_multipart([b"", bytes(1 << 20)])
        for number in range(200):
            commit(cache, [number, *IDS])
        resident = sum(tree.num_blocks for tree in cache.snapshot().trees if not tree.detached)
        eventually(lambda: view.num_blocks == resident, "the honest reader")
        eventually(lambda: publisher.num_refused >= 6, "all requests are read")
        assert len(publisher._kept) <= 64
        assert len(replayed(publisher)) <= 64


def test_a_restatement_that_many_ask_for_is_made_at_intervals() -> None:
    with published(replay_batches=1, restate_s=3600) as (publisher, cache):
        for number in range(20):
            commit(cache, [number, *IDS])
            eventually(lambda: publisher.journal.is_idle, "published")
        before = publisher.journal._restated_at
        for _ in range(5):
            assert [VCleared() in vllm_decoder.decode(each[2]).events for each in replayed(publisher)] == [
                False
            ]
        assert publisher.journal._restated_at == before


def test_a_reader_survives_a_hostile_publisher() -> None:
    """Batches that are too long, malformed, deeply nested, or of wrong frames: nothing is known, nothing fails."""
    held, before = Held(), threading.enumerate()
    with zmq.Context() as context, context.socket(zmq.XPUB) as pub:
        pub.linger = 0
        pub.bind(ANY)
        subscriber = EventSubscriber(pub.getsockopt_string(zmq.LAST_ENDPOINT), None, held)
        subscriber.start()
        assert pub.poll(LIMIT_MS) and pub.recv() == b"\1", "it has subscribed"
        clear = msgspec.msgpack.encode([0.0, [{"type": "AllBlocksCleared"}]])
        bad = [
            b"",
            b"\xc1",
            random.Random(1).randbytes(1000),
            b"\x91" * 100_000,
            b"\xdd\xff\xff\xff\xff",
            msgspec.msgpack.encode([0.0, [{"type": "BlockStored", "block_hashes": [b"short"]}]]),
            msgspec.msgpack.encode([0.0, [{"type": "BlockStored", "block_hashes": [1, 2]}]]),
            msgspec.msgpack.encode([0.0, [{"type": "Other"}]]),
            b"\x92\xcb"
            + bytes(8)
            + b"\x91\x82\xa4type\xb0AllBlocksCleared\xa1x"
            + b"\x91" * 100_000
            + b"\xc0",
        ]
        try:
            for number, payload in enumerate(bad):
                pub.send_multipart([b"", number.to_bytes(8, "big"), payload])
            for frames in ([b""], [b"", b"1", clear], [b"", bytes(8), clear, clear]):
                pub.send_multipart(frames)
            eventually(lambda: subscriber.follower.num_malformed >= len(bad) + 2, "refused")
            assert not subscriber.follower.is_current
            stored = msgspec.msgpack.encode(
                [
                    0.0,
                    [
                        {"type": "AllBlocksCleared"},
                        {"type": "BlockStored", "block_hashes": [bytes(16)], "new": {}},
                    ],
                ]
            )
            pub.send_multipart([b"", (100).to_bytes(8, "big"), stored])
            eventually(lambda: held.digests == {bytes(16)}, "read")
            pub.send_multipart([b"", (102).to_bytes(8, "big"), msgspec.msgpack.encode([0.0, []])])
            eventually(lambda: not held.digests, "a gap without replays")
            pub.send_multipart([b"", (103).to_bytes(8, "big"), stored])
            eventually(lambda: subscriber.follower.wanted == 104, "read again")
            pub.send_multipart([b"", (5).to_bytes(8, "big"), clear])
            eventually(lambda: subscriber.follower.wanted == 6 and not held.digests, "another process")
            pub.send_multipart([b"", (6).to_bytes(8, "big"), bytes(MAX_BATCH_BYTES + 1)])
        finally:
            subscriber.close()
    left = {*threading.enumerate()} - {*before}
    assert not [each for each in left if each.name == "radixkv-event-reader"]


def test_endpoints_in_use_and_invalid_settings_are_refused(short_folder: Path) -> None:
    with published() as (publisher, _), pytest.raises(ConfigError, match="endpoint"):
        EventPublisher(KEYS, EventSettings(BLOCK, publisher.endpoint)).start(
            PrefixCache(CacheConfig(num_blocks=2))
        )
    private, shared = short_folder / "private", short_folder / "shared"
    private.mkdir(mode=0o700)
    shared.mkdir()
    shared.chmod(0o755)
    assert EventSettings(BLOCK, f"ipc://{private}/e").replays == f"ipc://{private}/e.replay"
    assert EventSettings(BLOCK, "tcp://127.0.0.1:5557").replays == "tcp://127.0.0.1:5558"
    assert EventSettings(BLOCK, "tcp://[::1]:5557").replays == "tcp://[::1]:5558"
    network = (
        "tcp://*:5557",
        "tcp://0.0.0.0:5557",
        "tcp://10.0.0.1:5557",
        "tcp://[::]:1",
        f"ipc://{shared}/e",
    )
    for endpoint in network:
        with pytest.raises(ConfigError, match="loopback"):
            EventSettings(BLOCK, endpoint)
        with pytest.raises(ConfigError, match="loopback"):
            EventSettings(BLOCK, replay_endpoint=endpoint)
        assert EventSettings(BLOCK, endpoint, allows_network=True).endpoint == endpoint
    for endpoint in (
        "", "tcp://", "tcp://host:1", "tcp://127.0.0.1", "tcp://127.0.0.1:0", "tcp://127.0.0.1:65535", "inproc://a",
        "tcp://1.2.3:5", "ipc://@abstract", "ipc:///" + "x" * 200, "tcp://127.0.0.1:1\n", "tcp://eth0:1", 5, None,
    ):  # fmt: skip
        with pytest.raises(ConfigError):
            EventSettings(BLOCK, endpoint)  # type: ignore[arg-type]
    for name, value in {
        "block_size": 0, "queue_records": True, "topic": "x" * 300, "medium": "\ud800", "restate_s": -1,
        "allows_network": 1, "publishes_prompts": "yes", "data_parallel_rank": -1,
    }.items():  # fmt: skip
        with pytest.raises(ConfigError, match=name):
            EventSettings(**{"block_size": BLOCK, name: value})  # type: ignore[arg-type]


def test_an_ipc_endpoint_has_the_longest_path_that_the_kernel_allows(short_folder: Path) -> None:
    """That for replays has 107 bytes. A longer one is refused, with its length."""
    longest = f"{short_folder}/".ljust(107 - len(".replay"), "x")
    view = EventView(KEYS, BLOCK)
    with published(endpoint=f"ipc://{longest}") as (publisher, cache), reading(publisher, view):
        commit(cache, IDS)
        eventually(lambda: view.held(NAMESPACE, IDS) == {"a": 16}, "stored")
        assert replayed(publisher)
    with pytest.raises(ConfigError, match=rf"^endpoint .*{longest}x\.replay. has 108 bytes, .* 107 at most"):
        EventSettings(BLOCK, f"ipc://{longest}x")
    with pytest.raises(ConfigError, match=r"^replay_endpoint .* has 200 bytes"):
        EventSettings(BLOCK, replay_endpoint="ipc://" + f"{short_folder}/".ljust(200, "x"))
    with pytest.raises(ConfigError, match=r"^endpoint .* has 200 bytes"):
        EventSubscriber("ipc://" + f"{short_folder}/".ljust(200, "x"), None, Held())


def test_few_replays_wait_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests beyond the limit are refused; a consumer's newer request replaces its older one."""
    monkeypatch.setattr(event_publisher, "_MAX_REPLAYS", 3)
    requests = [[bytes([who]), b"", bytes(8)] for who in (1, 2, 3, 4, 5, 2)] + [
        [b"\1", b"", b"\1" + bytes(7)]
    ]

    class Router:
        def recv_multipart(self, _: int) -> list[bytes]:
            if not requests:
                raise zmq.Again
            return requests.pop(0)

    publisher = EventPublisher(KEYS, EventSettings(BLOCK))
    publisher._take_requests(Router())  # type: ignore[arg-type]
    assert publisher._replays == {b"\1": 1 << 56, b"\2": 0, b"\3": 0} and publisher.num_refused == 2
