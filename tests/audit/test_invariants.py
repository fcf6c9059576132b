"""The audit's laws: a sound cache passes, and each broken law is named. The tests break snapshots, never a cache."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from radixkv import IntegrityError, Namespace, PrefixCache, Tenant, audit
from radixkv.audit import invariants
from radixkv.index.snapshot import LendingSnapshot, Snapshot
from tests.audit import test_tiers_below
from tests.index.support import NS, compute, make_cache


class Frozen:
    """A cache that has only a snapshot."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def snapshot(self) -> Snapshot:
        """The snapshot that it was made with."""
        return self._snapshot


def _busy() -> tuple[PrefixCache, list[Any]]:
    """A cache with split nodes, forks, shared and adopted runs, leases, pins, lent blocks and a base."""
    cache = make_cache(64, 2, default_tenant=Tenant("default", max_pinned_blocks=8))
    compute(cache, range(12))
    compute(cache, [0, 1, 2, 3, 50, 51])
    compute(cache, range(4), Namespace("b", "m"))
    kept: list[Any] = [cache.lease(cache.match(NS, range(8))), cache.allocate(3)]
    cache.pin(NS, range(6), 3_600)
    parent = cache.open(NS, [*range(4), 60, 61, 62, 63, 64])
    children = parent.fork(2)
    parent.commit(7)
    children[0].append(9)
    cache.flush()
    cache.evict(1)
    with cache.publish("base", Namespace("op", "m"), range(6), ["r"]) as sequence:
        sequence.commit(6)
    compute(cache, [*range(6), 7, 7], Namespace("r", "m"))
    cache.announce(NS, [*range(5), 7, 7])
    cache.announce(Namespace("r", "m"), range(8))
    sessions = [cache.session(NS), cache.session(NS)]
    prompts = [8, 8, 0, 0, 1, 1], [8, 8, 3, 3], [8, 8, 0, 0, 2, 2]
    for session, ids in zip([*sessions, sessions[0].fork()], prompts, strict=True):
        with session.open(ids) as sequence:
            sequence.commit(len(ids))
    runs = sessions[0].open([8, 8, 0, 0, 1])
    return cache, [*kept, runs, *sessions, parent, *children]


@pytest.fixture
def snapshot() -> Snapshot:
    """The snapshot of the busy cache, with no law broken."""
    cache, kept = _busy()
    report = audit.check(cache)
    assert report.ok and kept
    found = cache.snapshot()
    assert len(found.trees) == 4 and len(found.leases) == 2 and len(found.lent_ids) == 3
    assert found.trees[3].base == 0 and found.trees[3].head_ids == found.bases[0].block_ids
    assert any(run.node is None for run in found.runs) and any(run.node is not None for run in found.runs)
    assert any(sequence.run is not None for sequence in found.sequences)
    return found


def _node(snapshot: Snapshot, pick: Callable[[Any], bool], **changes: Any) -> Snapshot:
    """The snapshot, with changes to the first node that ``pick`` accepts."""
    trees = list(snapshot.trees)
    for at, tree in enumerate(trees):
        for index, node in enumerate(tree.nodes):
            if pick(node):
                nodes = (*tree.nodes[:index], replace(node, **changes), *tree.nodes[index + 1 :])
                trees[at] = replace(tree, nodes=nodes)
                return replace(snapshot, trees=tuple(trees))
    raise AssertionError("no such node")


def _first(items: tuple[Any, ...], pick: Callable[[Any], bool], **changes: Any) -> tuple[Any, ...]:
    at = next(index for index, item in enumerate(items) if pick(item))
    return (*items[:at], replace(items[at], **changes), *items[at + 1 :])


def _of_base(snapshot: Snapshot, **changes: Any) -> Snapshot:
    return replace(snapshot, bases=(replace(snapshot.bases[0], **changes),))


def _behind(snapshot: Snapshot, **changes: Any) -> Snapshot:
    return replace(snapshot, trees=(*snapshot.trees[:3], replace(snapshot.trees[3], **changes)))


def _waiting(snapshot: Snapshot, **changes: Any) -> Snapshot:
    return replace(snapshot, announcements=_first(snapshot.announcements, _any, **changes))


def _used_by(snapshot: Snapshot, at: int) -> Snapshot:
    """A node above those of several sessions is that of one alone."""
    tree = snapshot.trees[0]
    above = [node.parent for node in tree.nodes if node.sole_user is not None and node.parent is not None][at]
    return _node(snapshot, lambda node: node is tree.nodes[above], sole_user=len(snapshot.sole_users) - 1)


def _any(_: Any) -> bool:
    return True


def _twice(snapshot: Snapshot) -> Snapshot:
    return replace(snapshot, free_ids=np.concatenate([snapshot.free_ids, snapshot.free_ids[:1]]))


def _owned_and_free(snapshot: Snapshot) -> Snapshot:
    owned = np.frombuffer(snapshot.trees[0].nodes[0].block_ids, np.int32)[:1]
    return replace(snapshot, free_ids=np.concatenate([snapshot.free_ids, owned]))


def _of_tree(snapshot: Snapshot, **changes: Any) -> Snapshot:
    return replace(snapshot, trees=(replace(snapshot.trees[0], **changes), *snapshot.trees[1:]))


BROKEN: dict[str, tuple[str, Callable[[Snapshot], Snapshot]]] = {
    "a block lost": ("conservation", lambda s: replace(s, free_ids=s.free_ids[1:])),
    "a block free twice": ("conservation", _twice),
    "a block owned and free": ("conservation", _owned_and_free),
    "a block lent and free": (
        "conservation",
        lambda s: replace(s, lent_ids=(*s.lent_ids, int(s.free_ids[0]))),
    ),
    "a block lent to the device and free": (
        "conservation",
        lambda s: replace(s, lendings=(LendingSnapshot("a", (0,), s.free_ids[:1].tobytes()),)),
    ),
    "a block lent to the device and not counted": (
        "usage",
        lambda s: replace(
            s,
            free_ids=s.free_ids[1:],
            lendings=(LendingSnapshot("a", (0,), s.free_ids[:1].tobytes()),),
        ),
    ),
    "a sequence lent by nobody": (
        "lendings",
        lambda s: replace(s, sequences=_first(s.sequences, _any, is_lent=True)),
    ),
    "a lending of what isn't lent": (
        "lendings",
        lambda s: replace(s, lendings=(LendingSnapshot("a", (0,), b""),)),
    ),
    "a lending of what doesn't run": (
        "lendings",
        lambda s: replace(s, lendings=(LendingSnapshot("a", (99,), b""),)),
    ),
    "a lending of somebody else's": (
        "lendings",
        lambda s: replace(
            s,
            sequences=_first(s.sequences, _any, is_lent=True),
            lendings=(LendingSnapshot("b", (0,), b""),),
        ),
    ),
    "an id out of range": ("conservation", lambda s: replace(s, lent_ids=(*s.lent_ids, 64))),
    "a negative id": ("conservation", lambda s: replace(s, lent_ids=(*s.lent_ids, -1))),
    "a run counts too many": ("reference-counts", lambda s: replace(s, runs=_first(s.runs, _any, owners=9))),
    "a run counts nobody": ("reference-counts", lambda s: replace(s, runs=_first(s.runs, _any, owners=0))),
    "a run of nobody's": ("reference-counts", lambda s: replace(s, sequences=())),
    "a run without a parent": (
        "reference-counts",
        lambda s: replace(s, runs=_first(s.runs, _any, parent=99)),
    ),
    "a sequence without its run": (
        "reference-counts",
        lambda s: replace(s, sequences=_first(s.sequences, _any, run=99)),
    ),
    "another namespace's tree": (
        "one-namespace",
        lambda s: replace(s, sequences=_first(s.sequences, _any, namespace=Namespace("b", "m"))),
    ),
    "a base of other ids": ("bases", lambda s: _of_base(s, key=bytes(len(s.bases[0].key)))),
    "a base of other blocks": ("bases", lambda s: _of_base(s, block_ids=s.bases[0].block_ids[::-1])),
    "a base that leases nothing": ("leases", lambda s: _of_base(s, node=(0, 99))),
    "a base gone, and one behind it": ("bases", lambda s: replace(s, bases=())),
    "behind a base that holds nothing": ("bases", lambda s: _behind(s, base=-1)),
    "behind other blocks than the base's": ("bases", lambda s: _behind(s, head_ids=bytes(12))),
    "other blocks behind nothing": ("bases", lambda s: _behind(s, base=None)),
    "behind a base of another's": ("one-namespace", lambda s: _of_base(s, readers=frozenset("ab"))),
    "behind a base that is over": ("one-namespace", lambda s: _of_base(s, is_over=True)),
    "behind a base of another model": (
        "one-namespace",
        lambda s: _behind(s, namespace=Namespace("r", "other")),
    ),
    "behind a base of another adapter": (
        "one-namespace",
        lambda s: _behind(s, namespace=Namespace("r", "m", "adapter")),
    ),
    "a parent that isn't there": (
        "prefix-closure",
        lambda s: _node(s, lambda n: n.parent is not None, parent=77),
    ),
    "a child before its parent": ("prefix-closure", lambda s: _node(s, lambda n: n.parent is None, parent=0)),
    "a wrong depth": ("prefix-closure", lambda s: _node(s, _any, depth=77)),
    "a short label": ("labels", lambda s: _node(s, _any, label=b"1234")),
    "a node without blocks": ("labels", lambda s: _node(s, _any, block_ids=b"")),
    "a child under a wrong key": ("siblings", lambda s: _node(s, _any, child_key=b"12345678")),
    "siblings that begin alike": (
        "siblings",
        lambda s: _of_tree(s, nodes=(*s.trees[0].nodes, s.trees[0].nodes[0])),
    ),
    "a child of another tree's": ("siblings", lambda s: _of_tree(s, root_children=9)),
    "a child of another node's": (
        "siblings",
        lambda s: _node(s, lambda n: n.parent is not None, num_children=9),
    ),
    "a use too many": ("leases", lambda s: _node(s, _any, uses=7)),
    "a leased node that says it isn't": ("leases", lambda s: _node(s, lambda n: n.uses > 0, uses=0)),
    "a root's use too many": ("leases", lambda s: _of_tree(s, root_uses=9)),
    "a lease that nobody holds": ("leases", lambda s: replace(s, leases=())),
    "a lease on nothing": ("leases", lambda s: replace(s, leases=_first(s.leases, _any, node=(0, 99)))),
    "a lease on no tree": ("leases", lambda s: replace(s, leases=_first(s.leases, _any, node=(-1, None)))),
    "a table of other blocks": (
        "tables",
        lambda s: replace(
            s, sequences=_first(s.sequences, _any, block_ids=bytes(len(s.sequences[0].block_ids)))
        ),
    ),
    "a table too short": (
        "tables",
        lambda s: replace(s, sequences=_first(s.sequences, _any, block_ids=s.sequences[0].block_ids[4:])),
    ),
    "a lease of other blocks": (
        "tables",
        lambda s: replace(s, leases=_first(s.leases, _any, block_ids=b"\0" * 16)),
    ),
    "a run that leases other blocks": (
        "tables",
        lambda s: replace(s, runs=_first(s.runs, lambda run: run.node is not None, start=0)),
    ),
    "committed beyond the end": (
        "committed",
        lambda s: replace(s, sequences=_first(s.sequences, _any, num_committed_tokens=99)),
    ),
    "cached beyond committed": (
        "committed",
        lambda s: replace(s, sequences=_first(s.sequences, _any, num_cached_tokens=8)),
    ),
    "ids of another length": (
        "committed",
        lambda s: replace(s, sequences=_first(s.sequences, _any, key=b"1234")),
    ),
    "a leased path of other ids": (
        "committed",
        lambda s: replace(s, sequences=_first(s.sequences, _any, key=b"\xff" * len(s.sequences[0].key))),
    ),
    "a tenant's use miscounted": (
        "usage",
        lambda s: replace(s, tenants=_first(s.tenants, _any, used_blocks=1)),
    ),
    "evictable miscounted": (
        "usage",
        lambda s: replace(s, tenants=_first(s.tenants, _any, evictable_blocks=99)),
    ),
    "a limit passed": (
        "quotas",
        lambda s: replace(s, tenants=_first(s.tenants, _any, max_blocks=0)),
    ),
    "a guarantee that can't be met": (
        "quotas",
        lambda s: replace(s, tenants=_first(s.tenants, _any, guaranteed_blocks=s.num_blocks + 1)),
    ),
    "a tenant forgotten": ("usage", lambda s: replace(s, tenants=())),
    "a tree miscounted": ("usage", lambda s: _of_tree(s, num_blocks=99)),
    "a policy that lost a node": (
        "policy",
        lambda s: replace(s, tenants=_first(s.tenants, _any, policy_nodes=99)),
    ),
    "a pin without a lease": (
        "pins",
        lambda s: replace(s, pins=_first(s.pins, _any, block_ids=s.pins[0].block_ids[:4])),
    ),
    "two pins with one lease": ("pins", lambda s: replace(s, pins=s.pins * 2)),
    "a pin in another tenant's tree": ("pins", lambda s: replace(s, pins=_first(s.pins, _any, tenant="b"))),
    "an announcement in another namespace's tree": (
        "announcements",
        lambda s: _waiting(s, namespace=Namespace("b", "m")),
    ),
    "an announcement in no tree": ("announcements", lambda s: _waiting(s, hooks=())),
    "an announcement of a node that is gone": (
        "announcements",
        lambda s: _waiting(s, hooks=(((-1, None), 0),)),
    ),
    "an announcement that stayed behind": (
        "announcements",
        lambda s: _waiting(s, hooks=(((0, None), 0),), resident=0),
    ),
    "an announcement of other ids": ("announcements", lambda s: _waiting(s, key=b"\7" * 28)),
    "an announcement miscounted": ("announcements", lambda s: _waiting(s, resident=8)),
    "a session's node in another namespace": (
        "sessions",
        lambda s: replace(s, sole_users=_first(s.sole_users, _any, namespace=Namespace("b", "m"))),
    ),
    "a session's node that another one used": ("sessions", lambda s: _used_by(s, 0)),
    "a family's node that another one used": ("sessions", lambda s: _used_by(s, 2)),
    "a sequence on another session's path": (
        "sessions",
        lambda s: replace(s, sequences=_first(s.sequences, lambda each: each.sole_user, sole_user=None)),
    ),
    "pinned blocks miscounted": (
        "pins",
        lambda s: replace(s, tenants=_first(s.tenants, _any, pinned_blocks=99)),
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_law_is_named(name: str, snapshot: Snapshot) -> None:
    """``check`` raises IntegrityError with the report, and ``inspect`` returns it. It contains no token id."""
    law, damage = BROKEN[name]
    broken = Frozen(damage(snapshot))
    report = audit.inspect(broken)
    assert not report.ok and law in {violation.law for violation in report.violations}, str(report)
    with pytest.raises(IntegrityError) as error:
        audit.check(broken)
    assert error.value.report.violations == report.violations  # type: ignore[attr-defined]
    assert law in str(error.value)
    assert json.loads(json.dumps(report.as_dict()))["violations"][0]["law"]


def test_every_law_is_tested() -> None:
    """Each law that the module names is broken above, or below a cache."""
    named = [line.split()[0] for line in (invariants.__doc__ or "").splitlines() if line.startswith("    ")]
    below = {law for law, _ in test_tiers_below.BROKEN.values()} - {"host-usage"}
    assert {law for law, _ in BROKEN.values()} | below == set(named)


def test_a_report_of_a_sound_cache() -> None:
    """The report says what was checked and how long it took, as text and as JSON."""
    cache, kept = _busy()
    report = audit.check(cache)
    assert report.violations == () and report.seconds > 0 and kept
    assert report.counts["blocks"] == 64 and report.counts["sequences"] == 4 and report.counts["lent"] == 3
    assert json.loads(json.dumps(report.as_dict()))["ok"] is True
    assert "all laws hold" in str(report)


def test_an_empty_cache() -> None:
    """An empty cache passes too."""
    assert audit.check(make_cache(1, 1)).counts["nodes"] == 0


def test_differences_name_what_changed() -> None:
    """The differences of two snapshots. The order of free blocks does not count."""
    cache, _ = _busy()
    before = cache.snapshot()
    assert invariants.differences(before, cache.snapshot()) == []
    assert invariants.differences(before, replace(before, free_ids=before.free_ids[::-1])) == []
    cache.evict(1)
    assert invariants.differences(before, cache.snapshot()) == ["free_ids", "trees", "tenants"]


@pytest.mark.slow
def test_the_audit_is_cheap_to_import() -> None:
    """The import loads neither Hypothesis nor torch, redis or starlette."""
    code = (
        "import sys, radixkv, radixkv.audit\n"
        "found = {'hypothesis', 'torch', 'triton', 'redis', 'starlette', 'transformers'} & set(sys.modules)\n"
        "assert not found, found\n"
        "import radixkv.audit.properties\n"
        "found = {'torch', 'triton', 'redis', 'starlette', 'transformers'} & set(sys.modules)\n"
        "assert not found, found\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)
