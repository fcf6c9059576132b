"""The simulation of tiers counts each block once, writes it once, and equals a slow model of LRU lists."""

from __future__ import annotations

import json
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from radixkv.cli.main import commands
from radixkv.simulator.tiers import Restart, TieredOutcome, replay_tiers
from radixkv.simulator.trace import Request, Trace, build


def trace_of(prompts: list[list[int]]) -> Trace:
    """One request a second with these blocks of 16 tokens."""
    return build(
        [Request(float(at), "acme", ids, len(ids), 16 * len(ids)) for at, ids in enumerate(prompts)], 16
    )


def test_what_leaves_a_tier_goes_to_the_one_below_and_comes_back() -> None:
    """The device has the last prompt, the host 7 before it and two free slots, and the disk 8 before these."""
    numbers = [*range(40), 24, 35, 20]
    found = replay_tiers(trace_of([[2 * each, 2 * each + 1] for each in numbers]), "lru", 2, 16, 16)
    assert found.device_hits.tolist() == [0] * 43
    assert found.disk_hits.tolist() == [0] * 40 + [2, 0, 0]
    assert found.host_hits.tolist() == [0] * 40 + [0, 2, 0]


def test_a_full_disk_gets_what_the_host_can_keep_for_it() -> None:
    """A prompt of a 16th of the host leaves whole, after the first; of one of a half, an eighth of the host leaves."""
    for size, kept in ((10, 10), (80, 20)):
        starts = [size * each for each in range(2_000 // size)]
        prompts = [list(range(start, start + size)) for start in starts]
        half = len(prompts) // 2
        whole = replay_tiers(trace_of(prompts), "lru", size, 160, 160)
        first = replay_tiers(trace_of(prompts[:half]), "lru", size, 160, 160)
        assert whole.disk_writes - first.disk_writes == kept * (len(prompts) - half)


def test_without_a_disk_the_host_keeps_nothing_free_for_it() -> None:
    prompts = [[8 * each + at for at in range(8)] for each in range(5)] * 4
    without, with_disk = (replay_tiers(trace_of(prompts), "lru", 8, 36, disk) for disk in (0, 8))
    assert without.host_hits.sum() == 92, "as a host that nobody asks for room"
    assert with_disk.host_hits.sum() == 64


def test_a_copy_that_stays_below_is_not_written_again() -> None:
    found = replay_tiers(trace_of([[1], [2], [1], [2], [1], [2]]), "lru", 1, 2, 2)
    assert found.host_hits.tolist() == [0, 0, 1, 1, 1, 1]
    assert (found.host_writes, found.disk_writes) == (2, 2)


def test_tiers_of_no_size_have_nothing() -> None:
    found = replay_tiers(trace_of([[1, 2, 3], [4, 5, 6], [1, 2, 3]]), "lru", 3, 0, 0)
    assert not (found.host_hits.any() or found.disk_hits.any())
    assert found.disk_writes == found.host_writes == 0
    found = replay_tiers(trace_of([[1, 2, 3], [4, 5, 6], [1, 2, 3]]), "lru", 3, 0, 3)
    assert found.disk_hits.tolist() == [0, 0, 3], "without a host, evicted blocks go to the disk"


def test_a_write_budget_is_spent_first_come_first_served() -> None:
    """It has half of what leaves memory: a prompt that finds no bytes is offered again when it comes back."""
    trace = trace_of([[at, at + 1_000] for at in (*range(100), *range(100), *range(100))])
    whole = replay_tiers(trace, "lru", 8, 40, 30_000)
    some = replay_tiers(trace, "lru", 8, 40, 30_000, disk_writes=0.5)
    assert whole.disk_hits.sum() == 400 and 0 < some.disk_writes <= 0.5 * (300 + 61) + 64
    assert 0 < some.disk_hits[100:200].sum() < some.disk_hits[200:].sum() <= some.disk_writes
    assert some.disk_hits[:100].sum() == 0


def hits(found: TieredOutcome) -> list[int]:
    return (found.device_hits + found.host_hits + found.disk_hits).tolist()


@pytest.mark.parametrize(
    ("restart", "expected"),
    [
        (None, [2, 2, 2, 2]),
        (Restart(40.0, drains=False), [2, 2, 0, 0]),
        (Restart(40.0, drains=True), [0, 2, 2, 2]),
    ],
)
def test_a_full_disk_keeps_the_newest(restart: Restart | None, expected: list[int]) -> None:
    """The disk has prompts 22 to 31, then a drain brings 32 to 38 from the host and 39 from the device."""
    numbers = [*range(40), 24, 31, 32, 39]
    trace = trace_of([[2 * each, 2 * each + 1] for each in numbers])
    found = replay_tiers(trace, "lru", 2, 16, 20, restart=restart)
    assert hits(found)[40:] == expected
    assert restart is None or found.disk_hits[40:].tolist() == expected


@pytest.mark.parametrize("host", [0, 2])
@pytest.mark.parametrize("policy", ["lru", "learned"])
def test_after_a_drain_the_disk_has_all(host: int, policy: str) -> None:
    """A crash takes the three blocks on the device with it, which an idle host hasn't copied either."""
    trace = trace_of([[each] for each in (*range(9), *range(9))])
    crashed = replay_tiers(trace, policy, 3, host, 40, restart=Restart(9.0, drains=False))
    drained = replay_tiers(trace, policy, 3, host, 40, restart=Restart(9.0, drains=True))
    assert hits(crashed)[9:] == [1] * 6 + [0] * 3
    assert hits(drained)[9:] == [1] * 9 == drained.disk_hits[9:].tolist()


def test_a_drain_keeps_to_the_write_budget() -> None:
    """Without writes left, only what was written before comes back."""
    trace = trace_of([[each] for each in (*range(400), *range(400))])
    found = [
        replay_tiers(trace, "lru", 90, 200, 4_000, disk_writes=0.5, restart=Restart(400.0, drains=drains))
        for drains in (False, True)
    ]
    at_once = [sum(hits(each)[400:]) for each in found]
    assert 0 < at_once[0] <= at_once[1] <= 0.5 * 400 + 64


def test_after_a_restart_the_disk_evicts_what_was_written_first() -> None:
    """It was used again before the restart. A full disk of three then gets a fourth."""
    trace = trace_of([[1], [2], [3], [1], [4], [5], [2], [1]])
    found = replay_tiers(trace, "lru", 1, 0, 3, restart=Restart(4.0, drains=False))
    assert hits(found) == [0, 0, 0, 1, 0, 0, 1, 0]


def test_requests_that_run_end_with_a_restart() -> None:
    """The first one's answer is lost, its prompt is not."""
    requests = [
        Request(0.0, "acme", [1, 2], 1, 16, 16, duration_s=10.0),
        Request(20.0, "acme", [1, 2], 2, 32),
    ]
    whole = replay_tiers(build(requests, 16), "lru", 4, 4, 8)
    drained = replay_tiers(build(requests, 16), "lru", 4, 4, 8, restart=Restart(5.0, drains=True))
    assert (hits(whole), hits(drained)) == ([0, 2], [0, 1])


@pytest.mark.parametrize("given", [["--disk-writes", "5"], ["--disk", "8", "--disk-writes", "0"]])
def test_a_write_budget_needs_a_disk(given: list[str], tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text('{"time": 0, "token_ids": [1, 2]}\n')
    done = CliRunner().invoke(commands, ["simulate", str(tmp_path / "t.jsonl"), *given])
    assert "--disk-writes" in str(done.exception) and "with --disk" in str(done.exception)


class Model:
    """A slow model of LRU tiers, for prompts of one block. Lists have the least recently used first."""

    def __init__(self, capacity: int, host: int, disk: int) -> None:
        self.sizes = capacity, host, disk
        self.device: OrderedDict[int, None] = OrderedDict()
        self.entries: OrderedDict[int, bool] = OrderedDict()
        """The blocks that the host knows, and whether it has them."""
        self.spare: dict[int, None] = {}
        self.disk: OrderedDict[int, None] = OrderedDict()
        self.leaving = 0
        """Slots of the host that are in use until the next request begins."""

    @property
    def free(self) -> int:
        return self.sizes[1] - sum(self.entries.values()) - self.leaving

    def ask(self, block: int) -> bool:
        self.leaving = 0
        is_loaded = block not in self.device and self.entries.get(block, False)
        if is_loaded:
            self.entries.move_to_end(block)
        is_hit = block in self.device or is_loaded
        if not is_hit and block in self.disk:
            is_hit = True
            self.disk.move_to_end(block)
        if block not in self.device and len(self.device) == self.sizes[0]:
            self.leave(next(iter(self.device)))
        self.device[block] = None
        self.device.move_to_end(block)
        if is_loaded and self.entries.get(block, False):
            self.spare.setdefault(block)
        if block in self.entries:
            self.entries.move_to_end(block)
        else:
            self.know(block)
            if self.free:
                self.entries[block], self.spare[block] = True, None
                self.copied(block)
        return is_hit

    def leave(self, block: int) -> None:
        del self.device[block]
        self.spare.pop(block, None)
        if not self.entries.get(block, False):
            self.know(block)
            self.entries.move_to_end(block)
            self.make_room(block)
            self.entries[block] = True
            self.make_reserve(block)
            self.copied(block)

    def make_room(self, block: int) -> None:
        if not self.free and self.spare:
            oldest = next(iter(self.spare))
            del self.spare[oldest]
            self.entries[oldest] = False
        step = 1
        while not self.free:
            for _ in range(step):
                if len(self.entries) > 1:
                    self.drop(self.oldest(block))
            step *= 2

    def make_reserve(self, block: int) -> None:
        """A host of 8 has one slot free or leaving, and smaller ones have none."""
        wanted = self.sizes[1] // 8 if self.is_later else 0
        if wanted > self.free + len(self.spare) + self.leaving and len(self.entries) > 1:
            self.drop(self.oldest(block))

    def oldest(self, block: int) -> int:
        return next(each for each in self.entries if each != block)

    def know(self, block: int) -> None:
        if block not in self.entries:
            if len(self.entries) == self.sizes[0] + 1 + self.sizes[1]:
                self.drop(next(iter(self.entries)))
            self.entries[block] = False

    def drop(self, block: int) -> None:
        self.spare.pop(block, None)
        if self.entries.pop(block) and self.is_later and not self.leaving:
            self.store(block)
            self.leaving = 1

    @property
    def is_later(self) -> bool:
        return len(self.disk) == self.sizes[2]

    def copied(self, block: int) -> None:
        if not self.is_later:
            self.store(block)

    def store(self, block: int) -> None:
        if block not in self.disk:
            if self.is_later:
                self.disk.popitem(last=False)
            self.disk[block] = None


def test_it_equals_a_slow_model() -> None:
    chance = np.random.default_rng(1)
    for sizes in ((2, 3, 5), (4, 2, 9), (3, 8, 6)):
        prompts = [[int(each)] for each in chance.zipf(1.3, 400) % 30]
        found = replay_tiers(trace_of(prompts), "lru", *sizes)
        total = found.device_hits + found.host_hits + found.disk_hits
        model = Model(*sizes)
        assert total.tolist() == [model.ask(block) for (block,) in prompts]


def test_the_command(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    lines = [{"time": at, "hashes": [at % 6], "tokens": 16, "block_tokens": 16} for at in range(30)]
    path.write_text("\n".join(map(json.dumps, lines)))
    base = ["simulate", str(path), "--policy", "lru", "--capacity", "2", "--host", "2"]
    done = CliRunner().invoke(commands, [*base, "--disk", "6", "--json"])
    assert done.exit_code == 0, done.output
    (row,) = json.loads(done.output)["results"]
    # six blocks go round, and the oldest is on the disk
    assert row["token_hit_rate"] == 0.8 == row["disk"]["token_hit_rate"]
    assert row["disk"]["written_blocks"] > 0 == row["device"]["written_blocks"]
    done = CliRunner().invoke(commands, [*base, "--disk", "6", "--restart", "20s", "--json"])
    (again,) = json.loads(done.output)["results"]
    # the disk has all six
    assert again.pop("restart") == {"undisturbed": 1.0, "after_drain": 1.0, "after_crash": 1.0}
    assert again == row
    shown = CliRunner().invoke(commands, [*base, "--disk", "6", "--restart", "0.3m"]).output
    assert "the 10 minutes from a restart at 0.3 minutes on" in shown and "after a crash" in shown
    shown = CliRunner().invoke(commands, [*base, "--disk", "6"]).output
    assert "restart" not in shown
    assert "host 2 blocks, disk 6" in shown and "80.00" in shown


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--disk", "1.5", "a whole number of blocks"),
        ("--disk", "20m", "0 to 10,000,000 blocks"),
        ("--jobs", "2", "--jobs without --host and --disk"),
        ("--restart", "0", "with --disk"),
        ("--restart", "later", "--restart='later'"),
    ],
)
def test_wrong_options_are_refused(tmp_path: Path, option: str, value: str, message: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"time": 0, "hashes": [1], "tokens": 16, "block_tokens": 16}')
    done = CliRunner().invoke(commands, ["simulate", str(path), "--host", "5", option, value])
    assert done.exit_code and message in str(done.exception)


def test_a_restart_is_within_the_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"time": 0, "hashes": [1], "tokens": 16, "block_tokens": 16}')
    done = CliRunner().invoke(commands, ["simulate", str(path), "--disk", "5", "--restart", "2h"])
    assert done.exit_code and "--restart=7200.0" in str(done.exception), done.exception
    done = CliRunner().invoke(commands, ["simulate", str(path), "--serve", "--restart", "2h"])
    assert done.exit_code and "only without --serve" in str(done.exception)


def test_a_request_without_room_begins_when_others_have_ended() -> None:
    """Three at a time need more than the device has. None is refused, but one that is larger than the device."""
    prompts = [[1, 2], [3, 4], [5, 6]] * 2 + [[91, 92, 93, 94, 95]]
    requests = [
        Request(float(at), "acme", ids, len(ids), 16 * len(ids), duration_s=100.0)
        for at, ids in enumerate(prompts)
    ]
    found = replay_tiers(build(requests, 16), "lru", 4, 8, 0)
    assert (found.device_hits + found.host_hits).tolist() == [0, 0, 0, 2, 2, 2, 0]
