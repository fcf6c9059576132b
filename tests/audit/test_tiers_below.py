"""The audit of tiers below a cache: each broken law is named, and sound tiers under load break none."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from radixkv import IntegrityError, Namespace, Tenant, audit
from radixkv.errors import ArgumentError, CapacityError, LeaseError
from radixkv.tiers.disk.slots import FREE
from radixkv.tiers.host.index import NO_SLOT
from radixkv.tiers.ladder import Ladder
from radixkv.tiers.tiered_cache import TieredCache
from tests.tiers.support import FaultyFiles
from tests.tiers.support import patience as patience
from tests.tiers.test_loading import DiskOwner
from tests.tiers.test_lossy_disk import LossyDiskOwner
from tests.tiers.test_tier_dtype import LossyOwner
from tests.tiers.test_tiered_cache import PROMPT, Owner
from tests.waiting import ended, eventually, is_set


def _parts(tiers: Ladder) -> SimpleNamespace:
    """What the tests break. ``entries`` have slots, ``free`` ones are free, ``blocks`` of the cache are joined."""
    index: Any = tiers.host.index
    parts = SimpleNamespace(index=index, pool=index._pools[0], copies=index._copies)
    parts.tenant = index.cache._tenants["a"]
    parts.entries, parts.empty = np.flatnonzero(index._is_filled), np.flatnonzero(index._slot_of == NO_SLOT)
    parts.slots, parts.free = index._slot_of[parts.entries], index._free[: index._num_free]
    parts.blocks = np.flatnonzero(index._copies._entry_of[:-1] != NO_SLOT)
    if tiers.disk is not None:
        tier: Any = tiers.disk.records
        parts.table, parts.headers = tier._table, tier._slab.headers
        parts.owner = next(each for each in parts.table._owners.values() if each.order)
        (parts.locator, parts.slot), (parts.other, _), *_ = parts.owner.order.items()
    return parts


def _abandoned(parts: SimpleNamespace) -> None:
    parts.index._slot_of[parts.entries[0]] = NO_SLOT
    parts.index._is_filled[parts.entries[0]] = False
    parts.index._is_orphan[parts.slots[0]] = True


def _put(array: str, at: Callable[[SimpleNamespace], Any], value: Callable[[SimpleNamespace], Any]) -> Any:
    return lambda parts: getattr(parts.index, array).__setitem__(at(parts), value(parts))


def _more(owner: str, name: str, by: int = 1) -> Any:
    def damage(parts: SimpleNamespace) -> None:
        found: Any = parts
        for each in owner.split("."):
            found = getattr(found, each)
        setattr(found, name, getattr(found, name) + by)

    return damage


def _spare(parts: SimpleNamespace) -> None:
    parts.pool.spare.add(parts.empty[:1])


HOST: dict[str, tuple[str, Callable[[SimpleNamespace], object]]] = {
    "a slot lost": ("host-slots", _more("index", "_num_free", -1)),
    "a slot of two entries": ("host-slots", _put("_slot_of", lambda p: p.entries[0], lambda p: p.slots[1])),
    "a slot of an entry and free": ("host-slots", _put("_free", lambda p: 0, lambda p: p.slots[0])),
    "a slot out of range": ("host-slots", _put("_slot_of", lambda p: p.entries[0], lambda p: 10_000)),
    "a slot of no entry that nobody uses": ("host-slots", _abandoned),
    "a free slot in use": ("host-slots", _put("_uses", lambda p: p.free[0], lambda p: 1)),
    "a filled entry without a slot": (
        "host-filled",
        _put("_is_filled", lambda p: p.empty[0], lambda p: True),
    ),
    "a pool with too many": ("host-pools", _more("pool", "used", 3)),
    "a pool with another size": ("host-pools", _more("pool", "capacity")),
    "a free slot of a pool": ("host-pools", _put("_pool_of", lambda p: p.free[0], lambda p: 0)),
    "a used slot of no pool": ("host-pools", _put("_pool_of", lambda p: p.slots[0], lambda p: NO_SLOT)),
    "a spare slot that isn't there": ("host-spare", _spare),
    "a spare slot more": ("host-spare", _more("pool.spare", "_num")),
    "a block joined to what isn't joined to it": (
        "host-copies",
        lambda p: p.copies._block_of.__setitem__(p.copies._entry_of[p.blocks[0]], p.blocks[1]),
    ),
    "an entry joined to what isn't joined to it": (
        "host-copies",
        lambda p: p.copies._entry_of.__setitem__(p.blocks[0], NO_SLOT),
    ),
    "an index that counts wrongly": (
        "host-usage",
        _more("tenant", "evictable_blocks"),
    ),
}
DISK: dict[str, tuple[str, Callable[[SimpleNamespace], object]]] = {
    "a record in a free slot": ("disk-slots", lambda p: p.table._states.__setitem__(p.slot, FREE)),
    "a slot free twice": ("disk-slots", lambda p: p.table._free.append(p.table._free[0])),
    "a free slot lost": ("disk-slots", lambda p: p.table._free.pop()),
    "a free slot leased": ("disk-slots", lambda p: p.table._leases.__setitem__(p.table._free[0], 1)),
    "a record that is found elsewhere": (
        "disk-slots",
        lambda p: p.table._slots.update({p.locator: p.table._slots[p.other]}),
    ),
    "a slot that its owner hasn't": ("disk-slots", lambda p: p.owner.slots.discard(p.slot)),
    "a record without a slot": ("disk-slots", lambda p: p.table._entries.pop(p.slot)),
    "an owner with a slot too many": ("disk-owners", lambda p: p.owner.slots.add(p.table._free[0])),
    "an owner that counts wrongly": ("disk-owners", _more("owner", "used")),
    "guarantees that are counted wrongly": ("disk-owners", _more("table", "_guaranteed")),
    "another record's header": (
        "disk-records",
        lambda p: p.headers["locator"].__setitem__(p.slot, np.void(b"x" * 16)),
    ),
    "a record of another generation": (
        "disk-records",
        lambda p: p.headers["key_id"].__setitem__(p.slot, np.void(b"x" * 16)),
    ),
}
BROKEN = HOST | DISK


def _served(owner: Owner) -> Owner:
    """Half of what was computed was evicted, and has left its blocks; the rest has copies."""
    for number in range(2):
        owner.evicted([number, *PROMPT])
    for number in range(2):
        assert owner.ask([number, *PROMPT])[0]
    return owner


@pytest.fixture(params=["exact", "int8"])
def on_disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[DiskOwner]:
    """An owner whose disk has records of this dtype."""
    owner = LossyDiskOwner(tmp_path / "disk", request.param)
    _served(owner)
    eventually(lambda: owner.cache.tier_counts()["disk"]["resident_blocks"] >= 20)
    eventually(lambda: not owner.disk.num_running)
    try:
        yield owner
    finally:  # what was broken is not stored
        owner.below.stop()
        owner.disk.records.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_law_is_named(on_disk: DiskOwner, name: str) -> None:
    cache, tiers = on_disk.cache, on_disk.below
    assert audit.check(cache).ok
    (law, damage), parts = BROKEN[name], _parts(tiers)
    with tiers.gate:
        assert len(parts.blocks) > 1 < len(parts.free)
        damage(parts)
    report = audit.inspect(cache)
    assert law in {each.law for each in report.violations}, str(report)
    with pytest.raises(IntegrityError, match=law.partition("-")[0]):
        audit.check(cache, at_once=True)


@pytest.mark.parametrize("name", HOST)
def test_a_broken_law_is_named_without_a_disk(name: str) -> None:
    owner = _served(Owner(num_blocks=40))
    assert audit.check(owner.cache).ok
    law, damage = HOST[name]
    damage(_parts(owner.below))
    assert law in {each.law for each in audit.inspect(owner.cache).violations}
    with audit.Watch(owner.cache, budget=1) as watch:
        eventually(lambda: watch.report)
    with pytest.raises(IntegrityError, match=law):
        watch.check()


def test_tiers_that_are_closed_break_no_law(tmp_path: Path) -> None:
    owner = _served(DiskOwner(tmp_path / "disk"))
    owner.cache.close()
    owner.below.host.index._pools[0].used += 1
    assert audit.check(owner.cache).ok


def test_tiers_that_cannot_go_on_break_no_law(monkeypatch: pytest.MonkeyPatch) -> None:
    owner = _served(Owner(num_blocks=40))

    def fail(*_: object) -> None:
        raise RuntimeError

    for name in ("take_work", "undo"):
        monkeypatch.setattr(owner.below.host, name, fail)
    owner.ask([7, *PROMPT])
    assert not owner.cache.tier_counts()["host"]["open"]
    owner.below.host.index._pools[0].used += 1
    assert audit.check(owner.cache).ok


def test_an_audit_waits_for_no_disk_that_is_being_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, begun, go_on = _served(DiskOwner(tmp_path / "disk")), threading.Event(), threading.Event()
    close = owner.disk.close
    monkeypatch.setattr(owner.disk, "close", lambda give_all: (begun.set(), go_on.wait(), close(give_all)))
    closing = threading.Thread(target=owner.cache.close)
    closing.start()
    is_set(begun, "the close")
    assert audit.check(owner.cache).ok
    go_on.set()
    ended(closing)


def test_an_audit_waits_for_no_disk_that_hangs(tmp_path: Path) -> None:
    go_on, files = threading.Event(), FaultyFiles()
    owner = _served(DiskOwner(tmp_path / "disk", files))

    def hang(call: str) -> None:
        go_on.wait()

    files.before = hang
    owner.evicted([7, *PROMPT])
    assert audit.check(owner.cache).ok
    go_on.set()
    owner.cache.close()


def _live(cache: TieredCache, engine: Owner, seed: int) -> None:
    """Serve, evict, purge, clear, and change tenants."""
    dice = random.Random(seed)
    for _ in range(60):
        namespace = Namespace(dice.choice("abc"), "m", salt=dice.choice(("", "s")))
        what = dice.random()
        if what < 0.06:
            cache.purge(namespace.tenant)
        elif what < 0.12:
            cache.clear(namespace)
        elif what < 0.2:
            cache.evict(dice.randrange(20))
        elif what < 0.3 and namespace.tenant == "c":
            own = dice.choice((0, 6))
            mode: Any = "strict" if own else "burst"
            with suppress(ArgumentError):  # it uses more now
                cache.add_tenant(Tenant("c", guaranteed_blocks=own, max_blocks=own or None, mode=mode))
        else:
            with suppress(CapacityError, LeaseError):
                engine.ask([dice.randrange(3), *PROMPT[: dice.randrange(4, 40)]], namespace)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["exact", "lossy", "disk", "lossy disk"])
def test_sound_tiers_under_load_break_no_law(kind: str, tmp_path: Path) -> None:
    owner = {
        "exact": lambda: Owner(num_blocks=40, host_blocks=24),
        "lossy": lambda: LossyOwner("int8"),
        "disk": lambda: DiskOwner(tmp_path / "disk", host_blocks=24),
        "lossy disk": lambda: LossyDiskOwner(tmp_path / "disk"),
    }[kind]()
    reports = list[audit.Report]()
    lives = [threading.Thread(target=_live, args=(owner.cache, owner, seed)) for seed in range(3)]
    for each in lives:
        each.start()
    while any(each.is_alive() for each in lives):
        reports.append(audit.inspect(owner.cache))
    for each in lives:
        ended(each)
    reports.append(audit.inspect(owner.cache))
    owner.cache.close()
    assert [str(report) for report in reports if not report.ok] == []
