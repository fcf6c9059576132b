"""Lookups, leases, pins and clears: the steps that a cache has, whoever has its free blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from radixkv.audit import invariants
from radixkv.audit.properties.checked import CheckedCache
from radixkv.audit.properties.material import (
    MAX_PINS,
    MAX_SESSIONS,
    MAX_WAITING,
    NAMESPACES,
    Held,
    expect,
    prompts,
    small,
    where_to,
)
from radixkv.config import Namespace
from radixkv.errors import (
    LeaseError,
    NotResident,
    OutOfBlocks,
    PinBudgetExceeded,
    PinLimitExceeded,
    StaleGeneration,
)
from radixkv.index.cache import RequestHints
from radixkv.index.snapshot import NodeSnapshot

_PLACES = {"free_ids", "lent_ids", "held_ids"}
"""Parts of a snapshot that a use leaves as they are. The others name nodes, which it may split."""


def _blocks_of(node: NodeSnapshot) -> list[int]:
    found: list[int] = np.frombuffer(node.block_ids, np.int32).tolist()
    return found


class Lookups(CheckedCache):
    """A cache under attack by lookups, leases, pins and clears."""

    # Matches and leases.

    @rule(where=where_to, prompt=prompts, opens=st.booleans())
    def match(self, where: int, prompt: tuple[int, ...], opens: bool) -> None:
        """A lookup changes nothing. Its match is kept for a lease, now or when it is stale.

        A request waits or waits no longer, and one may follow.
        """
        namespace, ids = self._place(where, prompt)
        before = self.cache.snapshot()
        match = self._matched(namespace, ids)
        self._same(before)
        self.held.append(Held(match, namespace, ids))
        unleased = [held for held in self.held if held.lease is None]
        if len(unleased) > 3:
            self.held.remove(unleased[0])
        self._note_end(match.end, namespace, ids[: match.num_tokens])
        self._wait(namespace, ids)
        if opens:
            self._follow(where, prompt)

    def _follow(self, where: int, prompt: tuple[int, ...]) -> None:
        """Called after a lookup: a request may follow."""

    @precondition(lambda self: self.held)
    @rule(which=small)
    def lease(self, which: int) -> None:
        """Lease a kept match, or release its lease, once."""
        held = self.held[which % len(self.held)]
        if held.lease is None:
            self._lease(held)
            return
        self.held.remove(held)
        held.lease.release()
        self._refused(held.lease.release, LeaseError)

    def _lease(self, held: Held) -> None:
        """A lease makes the block ids of a match valid, or refuses a stale match."""
        now = self.cache.match(held.namespace, held.ids[: held.match.num_tokens])
        before = self.cache.snapshot()
        try:
            lease = self.cache.lease(held.match)
        except OutOfBlocks as error:
            self._is_borrowed(error, before)
            return
        except LeaseError:
            self._same(before)
            expect(
                not np.array_equal(now.block_ids, held.match.block_ids),
                "a match that still holds was refused",
            )
            self.held.remove(held)
            return
        expect(
            np.array_equal(lease.block_ids, held.match.block_ids)
            and lease.num_tokens == held.match.num_tokens,
            "the lease names other blocks than its match",
        )
        self._note_end(lease.end, held.namespace, held.ids[: lease.num_tokens])
        held.lease = lease

    @rule(where=where_to, prompt=prompts)
    def match_and_lease(self, where: int, prompt: tuple[int, ...]) -> None:
        """One call leases what a match finds. The lease is kept."""
        namespace, ids = self._place(where, prompt)
        match = self._matched(namespace, ids)
        before = self.cache.snapshot()
        try:
            lease = self.cache.match_and_lease(namespace, ids)
        except OutOfBlocks as error:
            self._is_borrowed(error, before)
            return
        expect(
            np.array_equal(lease.block_ids, match.block_ids) and lease.num_tokens == match.num_tokens,
            "match_and_lease leases other blocks than are matched",
        )
        self._note_end(lease.end, namespace, ids[: lease.num_tokens])
        self.held.append(Held(match, namespace, ids, lease))

    @rule(where=where_to, prompt=prompts)
    def touch(self, where: int, prompt: tuple[int, ...]) -> None:
        """A use of what is resident changes neither what is resident nor what is in use."""
        namespace, ids = self._place(where, prompt)
        match = self._matched(namespace, ids)
        before, counted = self.cache.snapshot(), self._counted()
        try:
            touched = self.cache.touch(namespace, ids)
        except OutOfBlocks as error:
            self._is_borrowed(error, before)
            return
        expect(touched == match.num_tokens, f"{touched} tokens were touched, {match.num_tokens} are resident")
        if not self.declines:
            expect(self._counted() == counted, f"a touch changed {counted} to {self._counted()}")
            changed = _PLACES.intersection(invariants.differences(before, self.cache.snapshot()))
            now = self.cache.match(namespace, ids)
            expect(
                not changed and np.array_equal(now.block_ids, match.block_ids),
                f"a touch changed {', '.join(sorted(changed)) or 'what is matched'}",
            )

    def _counted(self) -> list[tuple[int, int, int]]:
        """What each tenant uses, and how much of it is resident and evictable."""
        told = [self.cache.tenant_stats(tenant) for tenant in self.counts]
        return [(each.used_blocks, each.resident_blocks, each.evictable_blocks) for each in told]

    def _note_end(self, end: Any, namespace: Namespace, ids: Sequence[int]) -> None:
        """Ends are equal exactly if their namespaces and prefixes are."""
        place = (namespace, tuple(ids))
        expect(end.num_tokens == len(ids), f"{end} of {len(ids)} tokens")
        for other, its in self.ends:
            same = place == its
            expect((end == other) == same, f"{end} and {other} of {place} and {its}")
            expect(not same or hash(end) == hash(other), f"equal ends, and other hashes: {end}")
        self.ends = [*self.ends[-11:], (end, place)]

    def _is_borrowed(self, error: OutOfBlocks, before: Any) -> None:
        """A lease may be refused only if it would take blocks that are guaranteed to other tenants."""
        self._same(before)
        expect(self.guaranteed, f"refused without a guarantee: {error}")

    # Pins.

    @precondition(lambda self: hasattr(self.cache, "pin"))
    @rule(where=where_to, prompt=prompts, seconds=st.integers(1, 20), which=small, unpins=st.booleans())
    def pin(self, where: int, prompt: tuple[int, ...], seconds: int, which: int, unpins: bool) -> None:
        """Pin up to three prefixes of a prompt, or pin them again; or end a pin early."""
        if unpins and self.pinned:
            pin, _ = self.pinned.pop(list(self.pinned)[which % len(self.pinned)])
            self.cache.unpin(pin)
            self._refused(lambda: self.cache.unpin(pin), LeaseError)
            return
        namespace, ids = self._place(where, prompt)
        num_blocks = len(ids) // self.block_size
        for stop in range(num_blocks, max(num_blocks - 1 - which % 3, 0), -1):
            self._pin(namespace, ids[: stop * self.block_size], float(seconds))

    def _pin(self, namespace: Namespace, ids: tuple[int, ...], seconds: float) -> None:
        before = self.cache.snapshot()
        resident = self._matched(namespace, ids).num_tokens
        held = self._pinned_prefixes(namespace.tenant)
        wanted = held | self._prefixes(namespace, ids)
        budget = self.cache.config.default_tenant.max_pinned_blocks
        num_pins = sum(where.tenant == namespace.tenant for where, _ in self.pinned)
        is_full = num_pins >= MAX_PINS and (namespace, ids) not in self.pinned
        try:
            pin = self.cache.pin(namespace, ids, seconds)
        except NotResident as error:
            self._same(before)
            expect(error.resident_tokens == resident < len(ids), f"{error}, but {resident} are resident")
            return
        except PinLimitExceeded as error:
            self._same(before)
            said = (error.num_pins, error.limit)
            expect(is_full and said == (num_pins, MAX_PINS), f"{error}, but the tenant has {num_pins} pins")
            return
        except PinBudgetExceeded as error:
            self._same(before)
            told, facts = (
                (error.needed, error.budget, error.pinned),
                (len(wanted) - len(held), budget, len(held)),
            )
            expect(told == facts and len(wanted) > budget, f"{error}, but the facts are {facts}")
            return
        except OutOfBlocks as error:
            self._is_borrowed(error, before)
            return
        expect(resident == len(ids) and len(wanted) <= budget, f"{pin} was granted")
        expect(not is_full, f"{pin} was granted beyond the {MAX_PINS} pins of a tenant")
        expect(pin.num_tokens == len(ids) and pin.ttl_s == seconds, f"{pin} is another one")
        self.pinned[namespace, ids] = pin, self.clock() + seconds

    # Requests that wait.

    def _wait(self, namespace: Namespace, ids: tuple[int, ...]) -> None:
        """A request waits, or one waits no longer. What the cache holds stays the same.

        Nothing is drawn for this, so that other steps stay as they were.
        """
        if not hasattr(self.cache, "announce"):
            return
        before, num_changed = self.cache.snapshot(), len(self.cache.changed_announcements())
        expect(num_changed <= len(self.waits), "changes of announcements that have ended")
        self.num_waited += 1
        if self.waits and (self.num_waited % 3 == 0 or len(self.waits) == MAX_WAITING):
            waits, _, _ = self.waits.pop(self.num_waited % len(self.waits))
            waits.withdraw()
            expect(not waits.is_open and waits not in self.cache.changed_announcements(), "it is open")
        else:
            seconds = 1.0 + 7 * self.num_waited % 40
            waits = self.cache.announce(namespace, ids, ttl_s=seconds)
            expect(waits.num_tokens == len(ids), f"{waits} of {len(ids)} tokens")
            self.waits.append((waits, ids, self.clock() + seconds))
            expect(not self.cache.changed_announcements(), "a new announcement has changed")
        changed = set(invariants.differences(before, self.cache.snapshot())) - {"announcements", "tenants"}
        expect(not changed, f"an announcement changed {', '.join(sorted(changed))}")

    # Sessions.

    def _opener(self, namespace: Namespace) -> Callable[..., Any]:
        """What opens the next request of a namespace: the cache, an old or new session, or a fork of one.

        Nothing is drawn for this, as for those that wait. A session may be closed before.
        """
        self.num_opened += 1
        if self.num_opened % 3 == 0 or not hasattr(self.cache, "session"):
            return lambda ids, **named: self.cache.open(namespace, ids, **named)
        if len(self.sessions) == MAX_SESSIONS:
            self._close(*self.sessions.pop(self.num_opened % MAX_SESSIONS))
        its = [each for each in self.sessions if each[0].namespace == namespace]
        if not its or self.num_opened % 5 == 0:
            self.sessions.append((self.cache.session(namespace), self.num_opened))
        elif self.num_opened % 4 == 0:
            self.sessions.append((its[0][0].fork(), its[0][1]))
        else:
            self.sessions.remove(its[0])
            self.sessions.append(its[0])
        session, _ = self.sessions[-1]
        if self.num_opened % 2:
            session.pause(1.0 + self.num_opened % 9)
        return lambda ids, **named: session.open(ids, **named)

    def _close(self, session: Any, family: int) -> None:
        """The end of a session frees unused blocks that only it, or its family, used, and no others."""
        own, before = session.own_blocks, self.cache.snapshot()
        freed = session.close()
        after = self.cache.snapshot()
        left = {block for tree in after.trees for node in tree.nodes for block in _blocks_of(node)}
        gone = [
            (node.uses, node.sole_user)
            for tree in before.trees
            for node in tree.nodes
            for block in _blocks_of(node)
            if block not in left
        ]
        expect(len(gone) == freed, f"a close freed {len(gone)} blocks, and says {freed}")
        users = {user for _, user in gone}
        is_last = not any(family == other for _, other in self.sessions)
        expect(
            not any(uses for uses, _ in gone) and None not in users and len(users) <= 1 + is_last,
            "a close freed blocks of others",
        )
        is_idle = not before.sequences and not before.leases and not before.bases
        expect(not is_idle or freed >= own, f"a close freed {freed} of the {own} blocks of a session alone")
        expect(session.close() == 0 and not session.is_open, "a closed session is open")

    @rule(where=where_to)
    def clear(self, where: int) -> None:
        """Clear a namespace. Its running sequences continue."""
        namespace = NAMESPACES[where % len(NAMESPACES)]
        self.cache.clear(namespace)
        self._cleared(namespace)

    @precondition(lambda self: hasattr(self.cache, "purge") and not self.away)
    @rule(tenant=st.sampled_from(("a", "b")))
    def purge(self, tenant: str) -> None:
        """Forget everything of a tenant. Its sequences accept only their release."""
        self.cache.purge(tenant)
        for namespace in NAMESPACES:
            if namespace.tenant == tenant:
                self._cleared(namespace)
        for run in [run for run in self.runs if run.namespace.tenant == tenant]:
            sequence = run.sequence
            self._refused(lambda sequence=sequence: sequence.commit(0), StaleGeneration)  # type: ignore[misc]
            self.runs.remove(run)
            sequence.release()
            self._is_consumed(sequence)

    def _cleared(self, namespace: Namespace) -> None:
        self.oracle.clear(namespace)
        self._forget(namespace)
        self.pinned = {key: pinned for key, pinned in self.pinned.items() if key[0] != namespace}
        for prompt in ((0,) * 8, (1,) * 8):
            expect(self.cache.match(namespace, prompt).num_tokens == 0, "a cleared namespace matches")

    def _forget(self, namespace: Namespace) -> None:
        """From now on, what runs in the namespace is never served."""
        for run in self.runs:
            run.forgotten |= run.namespace == namespace

    # Blocks that the engine filled.

    def _insert(
        self,
        namespace: Namespace,
        ids: tuple[int, ...],
        given: list[int],
        start: int,
        theirs: list[int],
        kind: str,
    ) -> Any:
        """Insert whole blocks from block ``start`` on, and check the record. ``theirs``: the resident blocks."""
        size = self.block_size
        hints = RequestHints(priority=80) if kind == "hints" else None
        self.oracle.commit(namespace, ids, len(ids))
        done = self.cache.insert(
            namespace, ids, given, start=start * size, hints=hints, lease=kind == "lease"
        )
        known = theirs[start:]
        surplus = [block for block, other in zip(given, known, strict=False) if block != other]
        table = [*theirs, *given[len(known) :]]
        expect(
            done.num_resident_tokens == len(theirs) * size,
            "insert and match disagree about what is resident",
        )
        expect(done.num_tokens == len(ids), f"{done.num_tokens} of {len(ids)} tokens were inserted")
        expect(done.surplus.tolist() == surplus, f"{surplus} are left over, not {done.surplus.tolist()}")
        expect(done.block_ids.tolist() == table, f"{done.block_ids.tolist()} are the tree's, not {table}")
        self._note_end(done.end, namespace, ids)
        expect((done.lease is None) == (kind != "lease"), "a lease that wasn't asked for, or none")
        if done.lease is not None:
            expect(done.lease.block_ids.tolist() == table, "the lease of an insert holds other blocks")
            self.held.append(Held(done, namespace, ids, done.lease))
        return done
