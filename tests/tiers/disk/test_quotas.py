"""Quotas of a disk tier: by tenant, while records come and go, and again after a restart."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from radixkv.config import Namespace
from radixkv.errors import ArgumentError
from radixkv.tiers.disk.records import DiskRecords
from radixkv.tiers.disk.slots import NO_QUOTA, Quota
from tests.tiers.support import (
    ACME,
    GLOBEX,
    NUM_SLOTS,
    counted,
    num_of,
    prompt,
    right_or_missing,
    store,
    tier_in,
)

MANY = 3 * NUM_SLOTS


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[DiskRecords]:
    with tier_in(tmp_path / "t", num_threads=1) as tier:
        yield tier


def there(tier: DiskRecords, namespace: Namespace, num: int = MANY) -> list[int]:
    return [number for number in range(num) if right_or_missing(tier, namespace, prompt(number))]


def flood(tier: DiskRecords, namespace: Namespace, num: int = MANY) -> None:
    for number in range(num):
        assert store(tier, namespace, prompt(number))


def test_a_flood_evicts_nothing_that_a_tenant_is_guaranteed(tier: DiskRecords) -> None:
    tier.set_quota("acme", Quota(guaranteed=5))
    flood(tier, ACME, 5)
    flood(tier, GLOBEX)
    assert there(tier, ACME) == [0, 1, 2, 3, 4] and len(there(tier, GLOBEX)) == NUM_SLOTS - 5
    assert counted(tier, {"evicted": MANY + 5 - NUM_SLOTS, "no_slot": 0})


def test_a_tenant_without_a_quota_has_a_share_like_the_others(tier: DiskRecords) -> None:
    flood(tier, GLOBEX)
    flood(tier, ACME)
    flood(tier, GLOBEX)
    assert len(there(tier, ACME)) == len(there(tier, GLOBEX)) == NUM_SLOTS // 2
    tier.set_quota(
        "nobody", Quota(guaranteed=NUM_SLOTS // 4)
    )  # it has no records, so it takes none of theirs
    flood(tier, GLOBEX)
    assert len(there(tier, ACME)) == NUM_SLOTS // 2


def test_quotas_given_again_after_a_restart_count(tmp_path: Path) -> None:
    with tier_in(tmp_path / "t", num_threads=1) as tier:
        tier.set_quota("acme", Quota(guaranteed=6))
        flood(tier, ACME, 6)
        flood(tier, GLOBEX)
    with tier_in(tmp_path / "t", num_threads=1) as tier:
        assert there(tier, ACME) == [*range(6)]
        tier.set_quota("acme", Quota(guaranteed=6))
        tier.set_quota("globex", Quota(most=7))
        flood(tier, GLOBEX)
        assert there(tier, ACME) == [*range(6)] and there(tier, GLOBEX) == [*range(MANY - 7, MANY)]


def test_without_its_guarantee_a_flood_leaves_a_tenant_its_equal_share_alone(tier: DiskRecords) -> None:
    """The planted bug of the first test: nobody tells the tier of the guarantee."""
    flood(tier, ACME, NUM_SLOTS - 2)
    flood(tier, GLOBEX)
    assert len(there(tier, ACME)) == NUM_SLOTS // 2


def test_a_lower_limit_shrinks_a_tenant_with_each_record_and_a_moment_of_it_costs_nothing(
    tmp_path: Path,
) -> None:
    with tier_in(tmp_path / "t", num_threads=1) as tier:
        flood(tier, ACME, 9)
        tier.set_quota("acme", Quota(most=1))
        tier.set_quota("acme", Quota(most=7))
        assert there(tier, ACME) == [*range(9)] and counted(tier, {"evicted": 0})
    with tier_in(tmp_path / "t", num_threads=1) as tier:
        tier.set_quota("acme", Quota(most=7))
        assert there(tier, ACME) == [*range(9)]
        sizes = []
        for number in range(9, 13):
            assert store(tier, ACME, prompt(number))
            sizes.append(len(tier))
        assert sizes == [8, 7, 7, 7] and counted(tier, {"evicted": 6, "sealed": 7})
        assert there(tier, ACME) == [*range(6, 13)]
        assert tier.purge("acme") == 7
    with tier_in(tmp_path / "t", num_threads=1) as tier:
        assert there(tier, ACME) == [] and len(tier) == 0, "a purge reaches what a limit evicted"


def test_a_guarantee_that_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    with tier_in(tmp_path / "t") as tier:
        tier.set_quota("acme", Quota(guaranteed=NUM_SLOTS - 2))
        allowed = "guaranteed=3 is not allowed; allowed: 0 to 2: others have the rest"
        with pytest.raises(ArgumentError, match=allowed):
            tier.set_quota("globex", Quota(guaranteed=3))
        tier.set_quota("globex", Quota(guaranteed=2))
        tier._table.check()


@pytest.mark.slow
def test_quotas_that_change_at_random_lose_nothing_that_is_guaranteed(tmp_path: Path) -> None:
    """Three tenants store, restart and get other quotas; each keeps at least what it had of its guarantee."""
    names = ("acme", "globex", "initech")
    evictions = 0
    for seed in range(4):
        chance, quotas = random.Random(seed), dict.fromkeys(names, NO_QUOTA)
        for _ in range(3):
            with tier_in(tmp_path / f"t{seed}", num_threads=1) as tier:
                for name, quota in quotas.items():
                    tier.set_quota(name, quota)
                for number in range(60):
                    name = chance.choice(names)
                    if chance.random() < 0.1:
                        guaranteed = chance.randint(0, NUM_SLOTS // 3)
                        most = chance.choice((None, guaranteed + chance.randint(0, 5)))
                        quotas[name] = Quota(guaranteed, most, chance.choice((1.0, 5.0)))
                        tier.set_quota(name, quotas[name])
                    before = Counter(records(tier))
                    assert store(tier, Namespace(name, "m"), prompt(100 * seed + number)) or most_is_0(quotas)
                    after = Counter(records(tier))
                    for each, quota in quotas.items():
                        if each != name:
                            assert after[each] >= min(before[each], quota.guaranteed)
                        assert quota.most is None or after[each] <= max(quota.most, before[each])
                tier._table.check()
                evictions += tier.counts()["evicted"]
    assert evictions > 200


def most_is_0(quotas: dict[str, Quota]) -> bool:
    return any(quota.most == 0 for quota in quotas.values())


def records(tier: DiskRecords) -> dict[str, int]:
    """The slots that each tenant has."""
    names = ("acme", "globex", "initech")
    return {name: num_of(tier._table, bytes.fromhex(tier.folder.tag(name))) for name in names}
