"""Host memory behind an engine's own cache, driven by a small engine that behaves like vLLM, on real tensors.

Each KV is a hash of everything before it, of whose it is, and of when: before which purge and with which weights. So a
block that comes from another request's past, another tenant or an older version shows.
"""

from __future__ import annotations

import os
import pickle
import random
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from radixkv import Namespace, audit
from radixkv.engines.vllm.settings import ConnectorSettings
from radixkv.engines.vllm.steps import COUNTS, VllmSteps
from radixkv.errors import ConfigError
from radixkv.index.tokens import encode
from radixkv.signing import KeySet
from radixkv.tenancy.request_keys import RequestFacts
from radixkv.tenancy.salt import SaltReader, make_salt
from radixkv.tiers.host.index import ONE_MORE
from radixkv.tiers.host.memory import NEVER, HostBlocks, StepReport, StepWork

LIVES = max(int(os.environ.get("RADIXKV_EXAMPLES", "200")) // 33, 6)
SIZE = 4
PLAIN = RequestFacts()
KEYS = KeySet.derive([b"a secret of the fleet"])


class Ready:
    """An event of a GPU that is over at the third question."""

    def __init__(self) -> None:
        self.num_asked = 0

    def query(self) -> bool:
        self.num_asked += 1
        return self.num_asked > 2


class Worker(HostBlocks):
    """A worker whose copies fail at times, and whose saves end later, as on a GPU."""

    def __init__(
        self, num_slots: int, num_blocks: int, rank: int, *, is_slow: bool = False, num_staging: int = 0
    ) -> None:
        self.dice, self.load_faults, self.save_faults = random.Random(rank), 0.0, 0.0
        self.rank, self.is_slow = rank, is_slow
        self.wide = torch.zeros((num_blocks, 1, SIZE, 2), dtype=torch.int64)
        self.halves = torch.zeros((2, num_blocks * 2, SIZE // 2, 3), dtype=torch.bfloat16)
        layers = {"0": self.wide, "1": self.halves, "shared": self.wide}
        super().__init__(num_slots, layers, num_blocks, num_staging=num_staging)

    def write(self, block: int, kv: list[int]) -> None:
        """Compute a block's first tokens."""
        values = torch.tensor(kv, dtype=torch.int64) + self.rank
        self.wide[block, 0, : len(kv)] = values[:, None]
        small = (values % 251).to(torch.bfloat16)
        for at in range(len(kv)):
            self.halves[:, block * 2 + at // (SIZE // 2), at % (SIZE // 2)] = small[at]

    def holds(self, block: int, kv: list[int]) -> bool:
        expected = torch.tensor(kv, dtype=torch.int64) + self.rank
        wide = bool((self.wide[block, 0, : len(kv)] == expected[:, None]).all())
        halves = self.halves[:, block * 2 : block * 2 + 2].reshape(2, SIZE, 3)[:, : len(kv)]
        return wide and bool((halves == (expected % 251).to(torch.bfloat16)[None, :, None]).all())

    def _event(self) -> Any:
        return Ready() if self.is_slow else None

    def _copied_out(self, blocks: Any) -> list[torch.Tensor]:
        copies = super()._copied_out(blocks)
        return [each.clone() for each in copies] if self.is_slow else copies  # as those of a GPU

    def _copy_in(self, slots: Any, blocks: Any) -> None:
        if self.dice.random() < self.load_faults:
            raise OSError("planted")
        super()._copy_in(slots, blocks)

    def _write(self, save: Any) -> None:
        if self.dice.random() < self.save_faults:
            raise OSError("planted")
        super()._write(save)


@dataclass
class Request:
    """A request of the small engine. ``kv``: what is right for it."""

    name: str
    facts: RequestFacts
    ids: list[int]
    num_computed: int = 0
    status: str = "waiting"
    blocks: list[int] = field(default_factory=list)
    kv: list[int] = field(default_factory=list)


class Engine:
    """Runs requests in steps of at most ``budget`` tokens. With ``late`` an output comes after the next step."""

    def __init__(
        self, num_slots: int, *, num_workers: int = 1, late: bool = False, is_slow: bool = False
    ) -> None:
        self.level = VllmSteps(num_slots, SIZE, policy="lru", num_workers=num_workers)
        self.workers = [Worker(num_slots, 40, rank, is_slow=is_slow) for rank in range(num_workers)]
        self.late, self.free = late, list(range(1, 40))
        self.requests: list[Request] = []
        self.outputs: deque[tuple[StepReport, set[str], set[int]]] = deque()
        self.version = self.num_loaded = self.num_failed = self.num_computed = 0
        self.num_waits: dict[str, int] = {}

    def add(self, name: str, ids: list[int], facts: RequestFacts = PLAIN) -> Request:
        request = Request(name, facts, ids)
        self.requests.append(request)
        return request

    def kv_of(self, request: Request) -> list[int]:
        found, state = [], hash((request.facts.cache_salt, request.facts.adapter, self.version))
        for token in request.ids:
            state = hash((state, token)) >> 2
            found.append(state)
        return found

    def step(self, budget: int = 24) -> None:
        self._admit()
        for request in self.requests:
            if request.status == "running" and budget > 0:
                budget -= self._compute(request, budget)
        work = pickle.loads(pickle.dumps(self.level.take_work()))
        report, loaded, invalid = StepReport(), [], set()
        for worker in self.workers:
            worker.load(work)
            worker.save(work)
            report.add(pickle.loads(pickle.dumps(worker.take_report())))
            loaded.append(worker.take_loaded())
            invalid |= worker.take_invalid()
        assert all(each == loaded[0] for each in loaded)
        self.outputs.append((report, loaded[0], invalid))
        if len(self.outputs) > self.late:
            self._take(*self.outputs.popleft())

    def run(self, max_steps: int = 400) -> None:
        """Run until no request is left and nothing is on its way."""
        for _ in range(max_steps):
            if not (self.requests or self.outputs or self.level.num_running):
                break
            self.step()
            if not self.requests and self.late:
                while self.outputs:
                    self._take(*self.outputs.popleft())
        assert not self.requests and self.level.num_running == 0

    def _admit(self) -> None:
        for request in self.requests:
            needed = -(-len(request.ids) // SIZE)
            if request.status != "waiting" or needed > len(self.free):
                continue
            num_found = self.level.found(request.name, request.facts, request.ids, 0)
            if num_found is None:
                self.num_waits[request.name] = self.num_waits.get(request.name, 0) + 1
                continue
            request.kv = self.kv_of(request)
            request.blocks = [self.free.pop() for _ in range(needed)]
            request.status, request.num_computed = "running", 0
            if num_found:
                assert num_found < len(request.ids) and num_found % SIZE == 0
                self.level.load(request.name, request.blocks, num_found)
                request.status, request.num_computed = "loading", num_found

    def _compute(self, request: Request, budget: int) -> int:
        num_new = min(len(request.ids) - request.num_computed, budget)
        stop = request.num_computed + num_new
        for at in range(request.num_computed // SIZE, -(-stop // SIZE)):
            part = request.kv[at * SIZE : min(stop, at * SIZE + SIZE)]
            for worker in self.workers:
                worker.write(request.blocks[at], part)
        self.level.save(request.name, request.ids, stop, lambda: request.blocks)
        request.num_computed, self.num_computed = stop, self.num_computed + num_new
        if stop == len(request.ids):
            request.status = "done"
        return num_new

    def _take(self, report: StepReport, loaded: set[str], invalid: set[int]) -> None:
        self.level.reported(report, invalid)
        self.level.loads_ended(loaded)
        for request in list(self.requests):
            if request.name in loaded:
                self._loaded(request, invalid)
            if request.status in ("done", "aborted") and not (
                request.name in loaded and request.status == "done"
            ):
                self.end(request)

    def _loaded(self, request: Request, invalid: set[int]) -> None:
        if request.status == "aborted":
            return
        good = next(
            (at for at in range(request.num_computed // SIZE) if request.blocks[at] in invalid),
            request.num_computed // SIZE,
        )
        self.num_failed += good < request.num_computed // SIZE
        self.num_loaded += good
        for at in range(good):
            for worker in self.workers:
                assert worker.holds(request.blocks[at], request.kv[at * SIZE : at * SIZE + SIZE])
        request.num_computed, request.status = good * SIZE, "running"

    def end(self, request: Request) -> None:
        self.requests.remove(request)
        self.level.forget(request.name)
        self.free += request.blocks

    def preempt(self, request: Request) -> None:
        self.free += request.blocks
        request.blocks, request.status, request.num_computed = [], "waiting", 0

    def check(self) -> None:
        """Nothing is open, the audit is clean."""
        stats = self.level.cache.stats()
        assert stats.num_sequences == 0 and self.level.num_running == 0
        assert stats.resident_blocks == self.level.cache.evictable_blocks
        assert not self.level._is_loading.any() and not self.level._requests
        audit.check(self.level.cache)


def ids_of(size: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(3, 1000), k=size)


def test_what_was_saved_is_loaded_and_not_computed_again() -> None:
    engine = Engine(64)
    engine.add("a", ids_of(33))
    engine.run()
    assert engine.num_loaded == 0 and engine.num_computed == 33
    engine.add("b", [*ids_of(33), 1, 2, 3])
    engine.run()
    assert engine.num_loaded == 8 and engine.num_computed == 33 + 4
    engine.check()


def test_the_last_token_is_always_computed() -> None:
    engine = Engine(64)
    engine.add("a", ids_of(32))
    engine.run()
    engine.add("b", ids_of(32))
    engine.run()
    assert engine.num_loaded == 7 and engine.num_computed == 32 + 4
    engine.check()


def test_nothing_is_found_before_all_workers_have_saved_it() -> None:
    level = VllmSteps(64, SIZE, num_workers=2)
    level.found("a", PLAIN, ids_of(12), 0)
    level.save("a", ids_of(12), 12, lambda: [1, 2, 3])
    work = level.take_work()
    assert work.save_blocks.tolist() == [1, 2, 3]
    assert level.found("b", PLAIN, ids_of(12), 0) == 0
    level.save("b", ids_of(12), 12, lambda: [4, 5, 6])
    assert not level.take_work().save_slots.size  # another request saves it
    level.reported(StepReport({work.step: 1}))
    assert level.found("b", PLAIN, ids_of(12), 0) == 0
    level.reported(StepReport({work.step: 1}))
    assert level.found("b", PLAIN, ids_of(12), 0) == 8
    audit.check(level.cache)


def test_a_step_that_one_worker_could_not_save_is_never_found() -> None:
    engine = Engine(64, num_workers=3)
    engine.workers[1].save_faults = 1.0
    engine.add("a", ids_of(32))
    engine.run()
    assert engine.level.cache.resident_blocks == 0
    engine.workers[1].save_faults = 0.0
    engine.add("b", ids_of(32))
    engine.run()
    assert engine.num_loaded == 0 and engine.level.cache.resident_blocks == 8
    engine.check()


def test_blocks_that_another_connector_failed_to_load_take_back_the_saves_of_running_steps() -> None:
    engine = Engine(64, late=True)
    engine.add("a", ids_of(32))
    engine.step()
    engine.level.reported(StepReport(), {7})
    engine._take(*engine.outputs.popleft())
    assert engine.level.cache.resident_blocks == 0 and engine.level.num_running == 0
    engine.run()
    engine.check()


def test_a_load_that_fails_is_computed_and_forgotten_and_saved_again() -> None:
    engine = Engine(64, num_workers=2)
    engine.add("a", ids_of(38))
    engine.run()
    entries = engine.level.cache.match(_namespace(engine), ids_of(38)).block_ids
    engine.workers[1]._stamps[engine.level.index.slots_of(entries)[5]] = 0
    engine.add("b", ids_of(38))
    engine.run()
    assert (engine.num_failed, engine.num_loaded, engine.num_computed) == (1, 5, 38 + 18)
    assert engine.level.take_counts()["failed_loads"] == 1
    assert engine.workers[1].counts["failed_blocks"] == 1
    engine.add("c", ids_of(38))
    engine.run()
    assert (engine.num_failed, engine.num_loaded) == (1, 5 + 9)
    engine.check()


def test_a_load_whose_record_stays_bad_never_livelocks() -> None:
    engine = Engine(64)
    engine.workers[0].load_faults = 1.0
    for at in range(5):
        engine.add(f"r{at}", ids_of(40))
        engine.run(max_steps=20)
    assert engine.num_failed == 4 and engine.num_loaded == 0
    engine.check()


def test_two_requests_never_load_the_same_slots_at_once() -> None:
    engine = Engine(64)
    engine.add("a", ids_of(40))
    engine.run()
    engine.add("b", ids_of(40))
    engine.add("c", [*ids_of(40), 7])
    engine.run()
    assert engine.num_waits == {"c": 1} and engine.num_loaded == 9 + 10
    engine.check()


def test_a_purge_reaches_loads_that_no_worker_has_begun() -> None:
    engine = Engine(64)
    engine.add("a", ids_of(40))
    engine.run()
    request = engine.add("b", ids_of(40))
    engine._admit()
    assert request.status == "loading"
    engine.level.cache.purge("default")
    engine.version += 1
    request.kv = engine.kv_of(request)
    engine.run()
    assert engine.num_loaded == 0 and engine.num_failed == 1
    engine.check()


def test_a_request_that_runs_through_a_purge_or_a_reset_saves_nothing_more() -> None:
    for ends in (lambda level: level.cache.purge("default"), VllmSteps.reset):
        engine = Engine(64)
        engine.add("a", ids_of(60))
        engine.step(budget=20)
        ends(engine.level)
        engine.run()
        assert engine.level.cache.resident_blocks == 0
        engine.check()


def test_every_count_has_a_metric() -> None:
    engine = Engine(64)
    engine.add("a", ids_of(40))
    engine.run()
    assert {*engine.level.take_counts(), *engine.workers[0].take_counts()} <= COUNTS.keys()


def test_a_reset_says_if_a_load_still_runs() -> None:
    engine = Engine(64, late=True)
    engine.add("a", ids_of(40))
    engine.run()
    engine.level.reset()
    assert not engine.level.is_loading
    engine.add("b", ids_of(40))
    engine.run()
    engine.add("c", ids_of(40))
    engine.step()
    engine.level.reset()
    assert engine.level.is_loading
    engine.run()
    engine.level.reset()
    assert not engine.level.is_loading and engine.level.cache.resident_blocks == 0
    engine.check()


def test_slots_that_change_tenant_are_zeroed_first() -> None:
    reader = SaltReader(KEYS)
    level = VllmSteps(4, SIZE, salts=reader)
    worker = Worker(4, 40, 0)
    for name, tenant in (("a", "acme"), ("b", "globex")):
        facts = RequestFacts(make_salt(KEYS, tenant))
        level.found(name, facts, ids_of(17), 0)
        level.save(name, ids_of(17), 16, lambda: [1, 2, 3, 4])
        work = level.take_work()
        assert sorted(work.zero) == ([] if name == "a" else [0, 1, 2, 3])
        if name == "b":
            worker._zero(work.zero)
            assert not worker._rows.any()
        else:
            for block in (1, 2, 3, 4):
                worker.write(block, [5] * SIZE)
        worker.save(work)
        assert worker._rows.any()
        level.reported(worker.take_report())
        level.forget(name)
    assert level.found("c", RequestFacts(make_salt(KEYS, "acme")), ids_of(17), 0) == 0
    assert level.found("d", RequestFacts(make_salt(KEYS, "globex")), ids_of(17), 0) == 16
    audit.check(level.cache)


def test_scrub_always_zeroes_what_a_purge_frees() -> None:
    level, worker = VllmSteps(8, SIZE, scrub="always"), Worker(8, 40, 0)
    level.found("a", PLAIN, ids_of(17), 0)
    level.save("a", ids_of(17), 16, lambda: [1, 2, 3, 4])
    worker.write(1, [5] * SIZE)
    worker.save(level.take_work())
    level.reported(worker.take_report())
    level.cache.purge("default")
    worker.load(level.take_work())
    assert not worker._rows.any()


def test_salts_adapters_images_and_weights_find_nothing_of_each_other() -> None:
    level = VllmSteps(64, SIZE, salts=SaltReader(KEYS))
    worker = Worker(64, 40, 0)
    salt = make_salt(KEYS, "acme")
    different = [
        RequestFacts(salt),
        RequestFacts(make_salt(KEYS, "globex")),
        RequestFacts(make_salt(KEYS, "acme", 1)),
        RequestFacts(make_salt(KEYS, "globex", client_salt="x")),
        RequestFacts(make_salt(KEYS, "globex"), adapter="lora:1"),
        RequestFacts(make_salt(KEYS, "globex"), material=((0, 8, "an image"),)),
        RequestFacts(make_salt(KEYS, "globex"), material=((0, 8, "another image"),)),
    ]
    for at, facts in enumerate(different):
        assert level.found(str(at), facts, ids_of(9), 0) == 0
        level.save(str(at), ids_of(9), 8, lambda: [1, 2])
        worker.save(level.take_work())
        level.reported(worker.take_report())
    assert level.found("same", different[-1], ids_of(9), 0) == 8
    for facts in (
        RequestFacts(salt),
        RequestFacts("rks1.forged"),
        RequestFacts(make_salt(KEYS, "globex"), None, (), True, True),
    ):
        assert level.found("none", facts, ids_of(9), 0) == 0  # of an older generation, forged, and private
        level.save("none", ids_of(9), 8, lambda: [1, 2])
        assert not level.take_work().save_slots.size
        level.forget("none")
    assert (
        level.found("all logits", RequestFacts(make_salt(KEYS, "globex"), looks_up=False), ids_of(9), 0) == 0
    )
    assert level.take_counts()["refused_requests"] == 2
    level.reset()
    assert level.found("later", different[-1], ids_of(9), 0) == 0


def test_ids_that_no_key_holds_are_private() -> None:
    level = VllmSteps(16, SIZE)
    assert level.found("a", PLAIN, [2**32, *range(8)], 0) == 0
    level.save("a", [2**32, *range(8)], 8, lambda: [1, 2])
    assert not level.take_work().save_slots.size


def test_a_prompt_that_host_memory_cannot_hold_is_refused_and_counted() -> None:
    engine = Engine(4)
    engine.add("a", ids_of(60))
    engine.run()
    assert engine.level.take_counts()["refused_saves"] > 0
    engine.check()


def test_work_of_a_step_with_senseless_places_fails_and_changes_nothing() -> None:
    worker = Worker(8, 40, 0)
    before = worker.wide.clone(), worker.halves.clone()
    for slot, stamp, block in ((99, 1, 3), (-1, NEVER, 3), (1, 1, 99), (1, 0, 3), (1, -1, 3), (1, 7, -2)):
        arrays = [np.array([each]) for each in (slot, stamp, block)]
        worker.load(
            StepWork(1, loads=(("r", 1),), load_slots=arrays[0], load_stamps=arrays[1], load_blocks=arrays[2])
        )
        assert worker.take_invalid() == {block} and worker.take_report().failed == {"r": 0}
        assert worker.take_loaded() == {"r"}
    for slot, block in ((99, 1), (1, 99), (-1, 1), (1, -1)):
        worker.save(StepWork(2, save_slots=np.array([slot]), save_blocks=np.array([block])))
        report = worker.take_report()
        assert report.unsaved == {2} and report.ended == {2: 1}
    assert torch.equal(worker.wide, before[0]) and torch.equal(worker.halves, before[1])
    assert not worker._rows.any()


def test_a_slot_that_is_half_overwritten_has_no_stamp() -> None:
    worker = Worker(8, 40, 0)
    for step, faults in ((1, 0.0), (2, 1.0)):
        worker.save_faults = faults
        worker.save(StepWork(step, save_slots=np.array([3]), save_blocks=np.array([5])))
        assert worker._stamps[3] == (0 if faults else step)


def test_copies_of_many_blocks_are_made_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(64)
    monkeypatch.setattr("radixkv.tiers.host.memory._CACHED_BYTES", engine.workers[0].block_bytes * 3)
    engine.add("a", ids_of(60))
    engine.run()
    engine.add("b", ids_of(60))
    engine.run()
    assert engine.num_loaded == 14
    engine.check()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.uint8])
@pytest.mark.parametrize("shape", [(6, 2, 4, 8), (2, 6, 4, 2, 8), (12, 2, 2, 8)])
def test_blocks_come_back_bit_by_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(1)
    bits = torch.randint(
        0, 255, (*shape[:-1], shape[-1] * dtype.itemsize), generator=generator, dtype=torch.uint8
    )
    layer = bits.view(dtype)
    for tensor in (layer, layer.transpose(-1, -2)):
        worker = HostBlocks(5, {"0": tensor}, 6)
        before = bits.clone()
        worker.save(StepWork(1, save_blocks=np.array([4, 2]), save_slots=np.array([3, 0])))
        moved = StepWork(
            2,
            loads=(("r", 2),),
            load_slots=np.array([0, 3]),
            load_stamps=np.array([1, 1]),
            load_blocks=np.array([5, 1]),
        )
        worker.load(moved)
        by_block = worker._engine[0]
        assert torch.equal(by_block[5], by_block[2]) and torch.equal(by_block[1], by_block[4])
        assert torch.equal(
            by_block[2],
            HostBlocks(
                5, {"0": before.view(dtype) if tensor is layer else before.view(dtype).transpose(-1, -2)}, 6
            )._engine[0][2],
        )
        bits.copy_(before)


def test_tensors_without_an_axis_of_blocks_are_refused_by_name() -> None:
    for layers in ({"model.0": torch.zeros(5, 5, 5)}, {"model.0": [torch.zeros(6)]}, {}):
        with pytest.raises(ConfigError, match="kv_caches"):
            HostBlocks(5, layers, 6)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({}, "host_memory"),
        ({"host_memory": "8GiB", "host_blocks": 5}, "host_memory"),
        ({"host_memory": "8 G"}, "host_memory"),
        ({"host_memory": True}, "host_memory"),
        ({"host_memory": 10**16}, "host_memory"),
        ({"host_blocks": 0}, "host_blocks"),
        ({"host_blocks": True}, "host_blocks"),
        ({"host_blocks": 2**31}, "host_blocks"),
        ({"host_blocks": 5, "policy": ""}, "policy"),
        ({"host_blocks": 5, "model": 5}, "model"),
        ({"host_blocks": 5, "keys": 5}, "keys"),
        ({"host_blocks": 5, "control": "/run"}, "control"),
        ({"host_blocks": 5, "anonymous": "no"}, "anonymous"),
        ({"host_blocks": 5, "scrub": "never"}, "scrub"),
        ({"host_blocks": 5, "tenants": {"acme": {}}}, "tenants=.*with keys"),
        ({"host_blocks": 5, "keys": "k", "tenants": ["acme"]}, "tenants="),
        ({"host_blocks": 5, "keys": "k", "tenants": {"acme": "strict"}}, r"tenants\['acme'\]"),
        (
            {"host_blocks": 5, "keys": "k", "tenants": {"acme": {"mod": "strict"}}},
            r"tenants\['acme'\]=.*only .*mode",
        ),
        ({"host_blocks": 5, "keys": "k", "tenants": {"acme": {"id": "b"}}}, r"tenants\['acme'\]"),
        ({"host_blocks": 5, "num_blocks": 5}, "num_blocks"),
        ({"host_blocks": 5, "previous_secrets": "old"}, "previous_secrets"),
        ({"host_blocks": 5, "previous_secrets": ["old"]}, "previous_secrets"),
    ],
)
def test_settings_that_mean_nothing_are_refused_by_name(given: dict[str, Any], name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        ConnectorSettings.read(given)


@pytest.mark.parametrize(
    "given",
    [
        {"fleet_secret": ["S3cret"], "disk": "d", "disk_size": "1GiB"},
        {"fleet_secret": "S3cret", "disk": "d"},
        {"previous_secrets": "S3cret"},
        {"previous_secrets": {"S3cret": 1}},
        {"keys": ["S3cret"]},
    ],
)
def test_a_secret_in_a_refused_setting_is_not_shown(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        ConnectorSettings.read({"host_blocks": 5, **given})
    assert "S3cret" not in str(caught.value) + repr(caught.value.value)


def test_secrets_are_read_the_current_one_first(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    paths = [tmp_path / name for name in ("new", "old", "oldest")]
    for path in paths:
        path.write_text(path.name * 16)
        path.chmod(0o600)
    given = {"host_blocks": 5, "disk": "d", "disk_size": "1GiB", "fleet_secret": str(paths[0])}
    assert ConnectorSettings.read(given).secrets() == [b"new" * 16] and not caplog.records
    given["previous_secrets"] = f"{paths[1]},{paths[2]}"
    paths[2].chmod(0o644)
    assert ConnectorSettings.read(given).secrets() == [b"new" * 16, b"old" * 16, b"oldest" * 16]
    (warning,) = [each.getMessage() for each in caplog.records]
    assert warning.startswith(f"previous_secrets {paths[2]}: ") and "mode 0644" in warning
    with pytest.raises(ConfigError, match="previous_secrets=''"):
        ConnectorSettings.read({**given, "previous_secrets": f"{paths[1]},"}).secrets()


def test_host_memory_is_a_number_of_blocks() -> None:
    assert ConnectorSettings.read({"host_memory": "1GiB"}).num_slots(1 << 20) == 1024
    assert ConnectorSettings.read({"host_memory": 4096}).num_slots(1024) == 4
    assert ConnectorSettings.read({"host_blocks": 7}).num_slots(1024) == 7
    with pytest.raises(ConfigError, match="1,048,576"):
        ConnectorSettings.read({"host_memory": "1KiB"}).num_slots(1 << 20)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(LIVES))
def test_random_lives(seed: int) -> None:
    """Salts, preemptions, aborts, purges, resets, faults of loads and saves, a small pool: every load is right."""
    dice = random.Random(seed)
    engine = Engine(
        dice.choice([12, 24, 64]), num_workers=dice.choice([1, 2]), late=seed % 2 == 1, is_slow=seed % 3 == 0
    )
    for worker in engine.workers:
        worker.load_faults, worker.save_faults = dice.choice([0, 0.2]), dice.choice([0, 0.2])
    roots = [ids_of(24, each) for each in range(3)]
    for at in range(150):
        ids = [
            *dice.choice(roots)[: dice.randrange(8, 25)],
            *ids_of(dice.randrange(1, 20), dice.randrange(6)),
        ]
        engine.add(f"r{at}", ids, RequestFacts(dice.choice([None, "s"])))
        for _ in range(dice.randrange(3)):
            engine.step(budget=dice.choice([8, 24]))
        running = [each for each in engine.requests if each.status == "running"]
        if running and dice.random() < 0.1 and not engine.outputs:
            engine.preempt(dice.choice(running))
        if engine.requests and dice.random() < 0.1 and not engine.outputs:
            chosen = dice.choice(engine.requests)
            if chosen.status == "loading":
                chosen.status = "aborted"
            else:
                engine.end(chosen)
        if dice.random() < 0.05 and not any(each.status == "loading" for each in engine.requests):
            engine.level.cache.purge("default") if dice.random() < 0.5 else engine.level.reset()
            engine.version += 1
        audit.check(engine.level.cache)
    for worker in engine.workers:
        worker.load_faults = worker.save_faults = 0.0
    engine.run()
    assert engine.num_loaded > 20
    engine.check()


def _namespace(engine: Engine) -> Any:
    (namespace,) = engine.level.cache.namespaces()
    return namespace


def test_what_has_no_room_behind_a_running_save_is_not_known() -> None:
    """A longer prompt has entries and no slots. It leans on a save that isn't reported, so it isn't committed."""
    engine = Engine(10)
    engine.add("c", ids_of(20, 1))
    engine.run()
    index = engine.level.index
    index.use(index._slot_of[index._slot_of >= 0])  # a disk reads them
    engine.late, ids = True, ids_of(41)
    engine.add("a", ids[:20])
    engine.step()
    engine.add("b", ids)
    engine.run()
    assert engine.level.cache.stats().num_sequences == 0
    index.check()


def test_a_promotion_of_a_purged_tenant_leaves_no_bytes() -> None:
    """It was to fill a slot in the step in which the tenant was purged. The next step zeroes the slot again."""
    level = VllmSteps(8, SIZE, policy="lru", scrub="always")
    memory = HostBlocks(8, {"l": torch.zeros((8, 2, SIZE, 1, 2))}, 8, num_staging=2)
    namespace, key = Namespace("a", "m"), encode(list(range(SIZE)))
    memory.staging_bytes(0)[:] = b"\x77" * memory.block_bytes
    with level.cache.open(namespace, key + ONE_MORE) as sequence:
        sequence.commit(SIZE)
        entries = level.cache.match(namespace, key).block_ids.astype(np.int64)
        slots = level.index.give("a", entries, may_evict=True)
        level.fill(slots, np.array([0]))
        level.index.filled(entries)
    level.cache.purge("a")
    for _ in range(2):
        work = level.take_work(None)
        memory.load(work)
        memory.save(work)
        level.reported(memory.take_report())
        level.work_done()
    assert not any(memory.slot_bytes(int(slots[0]))) and not any(memory.staging_bytes(0))
