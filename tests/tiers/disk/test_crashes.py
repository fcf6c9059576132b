"""Crashes: SIGKILL at every step of the write path, and power failures that drop and reorder unsynced writes.

After each, the folder opens again, no record is wrong, none that was sealed and synced is lost, and a purge holds.
RADIXKV_KILLS and RADIXKV_CRASHES say how many are tried. Many need ``--wall-limit-s`` and ``--cpu-limit-s``.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from radixkv.tiers.disk.records import DiskRecords
from tests.tiers.lossy_files import LossyFiles
from tests.tiers.support import (
    ACME,
    NAMESPACES,
    NUM_PROMPTS,
    Record,
    evicted_by,
    failing,
    held,
    prompt,
    right_or_missing,
    store,
    tier_in,
)

pytestmark = pytest.mark.slow

KILLS = int(os.environ.get("RADIXKV_KILLS", "40"))
CRASHES = int(os.environ.get("RADIXKV_CRASHES", "40"))
DAMAGING = "write sync rename sync_folder remove"


@pytest.mark.slow
def test_sigkill_at_every_step_gives_no_wrong_kv_and_loses_nothing_synced(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.tiers.disk.crash_driver", str(tmp_path), str(KILLS), "1"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads(done.stdout)
    assert result["wrong"] == result["lost"] == result["purged_found"] == 0, result
    assert result["kills"] == KILLS and result["kills_by_call"].keys() >= {"write", "sync"}
    assert result["kept"] > KILLS, "most records that were synced were there to be checked"


def test_sigkill_at_every_step_of_learning_a_purge_of_the_fleet(tmp_path: Path) -> None:
    """Either the next opening doesn't know the purge, and learns it again, or nothing older is there."""
    command = [sys.executable, "-m", "tests.tiers.disk.crash_driver", str(tmp_path), "learn"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads(done.stdout)
    assert result["found_in_spite_of_2"] == result["found_after_all"] == result["others_lost"] == 0, result
    assert result["knows_1"] > 3 and result["knows_2"] > 3, result
    assert result["kills_by_call"].keys() >= set(DAMAGING.split()), result


class World:
    """A tier on files that lose unsynced writes, and what has to be found after a power failure."""

    def __init__(self, folder: Path, chance: random.Random) -> None:
        self.folder, self.chance = folder, chance
        self.synced: list[Record] = []
        """Records at the last sync that no store has evicted since."""
        self.kept = 0
        self.gone: set[Record] = set()

    def live(self) -> None:
        """Open, check, store, sync and purge at random, and lose power."""
        files, chance = LossyFiles(self.folder), self.chance
        with tier_in(self.folder, files=files, direct=False, num_threads=1) as tier:
            self.check(tier)
            self.synced = held(tier)
            for _ in range(chance.randint(1, 25)):
                tenant, number = chance.choice(list(NAMESPACES)), chance.randrange(NUM_PROMPTS)
                deed = chance.random()
                if deed < 0.7:
                    self.gone.discard((tenant, number))
                    victim = evicted_by(tier, (tenant, number))
                    self.synced = [each for each in self.synced if each != victim]
                    assert store(tier, NAMESPACES[tenant], prompt(number))
                elif deed < 0.92:
                    tier.sync()
                    self.synced = held(tier)
                elif not self.purge(tier, files, tenant):
                    break
            tier._sealed_at_sync = tier._sequence  # so that closing the tier doesn't sync
        files.lose_power(chance)

    def purge(self, tier: DiskRecords, files: LossyFiles, tenant: str) -> bool:
        """Purge a tenant. Sometimes the disk fails on the way, and the power fails before it is repeated: False."""
        self.synced = [each for each in self.synced if each[0] != tenant]
        if self.chance.random() < 0.5:
            files.before = failing(DAMAGING, after=self.chance.randrange(9), times=1)
        try:
            tier.purge(tenant)
        except OSError:
            return False
        finally:
            files.before = lambda call: None
        self.gone |= {(tenant, number) for number in range(NUM_PROMPTS)}
        return True

    def check(self, tier: DiskRecords) -> None:
        """What the folder must hold after a power failure."""
        must = self.synced
        for tenant, namespace in NAMESPACES.items():
            for number in range(NUM_PROMPTS):
                is_there = right_or_missing(tier, namespace, prompt(number))
                assert not (is_there and (tenant, number) in self.gone), "a purged record was found"
                assert is_there or (tenant, number) not in must, "a synced record was lost"
        self.kept += len(must)


def test_a_power_failure_gives_no_wrong_kv_and_loses_nothing_synced(tmp_path: Path) -> None:
    kept = 0
    for seed in range(max(CRASHES // 8, 1)):
        world = World(tmp_path / f"t{seed}", random.Random(seed))
        for _ in range(8):
            world.live()
        kept += world.kept
    assert kept > CRASHES, "most records that were synced were there to be checked"


def test_files_that_lose_power_lose_what_was_not_synced(tmp_path: Path) -> None:
    """The test above would find nothing if these files lost nothing."""
    num_lost = 0
    for seed in range(12):
        files = LossyFiles(tmp_path / f"t{seed}")
        with tier_in(tmp_path / f"t{seed}", files=files, direct=False) as tier:
            for number in range(4):
                assert store(tier, ACME, prompt(number))
            tier._sealed_at_sync = tier._sequence
        files.lose_power(random.Random(seed))
        with tier_in(tmp_path / f"t{seed}", direct=False) as tier:
            num_lost += sum(not right_or_missing(tier, ACME, prompt(number)) for number in range(4))
    assert num_lost > 12
