"""Pins of the fleet: a prefix that several replicas keep resident, also when replicas die or join.

    client's request ──▶ fact in the store ──▶ signed request to each replica ──▶ each computes, pins, writes its part
                              │
    once a second, each replica with pins reads the facts ─┬─ ended, expired, purged, not for this replica ──▶ unpin
                                                           ├─ missing in the store ──▶ write it again
                                                           └─ a replica lacks it ──▶ the first holder sends it

The store never has the prompt. Only the replicas that hold the pin have it. So a pin has no owner: it lives as long as
any replica holds it, or until it expires. A replica that joins, returns, or replaces another one gets the pin from a
holder. A request from another replica is compared with the store. Without the store, each replica keeps its pins.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from math import ceil
from typing import TYPE_CHECKING

from radixkv.coordination.store.protocol import MAX_PINS
from radixkv.coordination.values import FleetPin, JobPart, JobState
from radixkv.errors import ControlError, CoordinationError, LeaseError, PinBudgetExceeded
from radixkv.index.pins import Pin
from radixkv.index.tokens import TOKEN_BYTES, decode
from radixkv.service.fleet.peers import PIN_PATH
from radixkv.service.problems import RETRY_AFTER_S, ApiError, invalid, not_found, store_unavailable
from radixkv.service.promises import budget_of
from radixkv.service.schemas.tenants import TenantSettings
from radixkv.service.usage import Promise
from radixkv.signing import mac

if TYPE_CHECKING:
    from radixkv.clock import Clock
    from radixkv.config import Namespace
    from radixkv.coordination.values import ReplicaInfo
    from radixkv.engines import Engine
    from radixkv.service.failures import Failures
    from radixkv.service.fleet.peers import Fleet
    from radixkv.service.fleet.placement import Placement
    from radixkv.service.fleet.quotas import Quotas
    from radixkv.service.key_store import KeyStore
    from radixkv.service.owner import Owner
    from radixkv.service.promises import Promises
    from radixkv.service.tenant_sync import TenantSync
    from radixkv.service.threads import Threads
    from radixkv.service.warming import Warmer

_RENEW_S = 1.0
"""If the end in the store is later by more than this, the pin was renewed."""
_AGAIN_S = 15.0
"""Seconds until a pin is tried again after a temporary failure."""
_LOOK_S = 0.05
CONTENT_CHARS = 16
"""Most characters of a tenant's contents for each token that the pool can hold."""


@dataclass(frozen=True, slots=True)
class PinContent:
    """What a pin of its own name has beside its prefix: it goes from holder to holder, never to the store.

    - ``nonce``: 32 hex digits that make the pin's id another than that of the same prefix.
    - ``about``: the caller's description, as JSON.
    - ``chat``: the turns and tools that the prefix was made from, as JSON.
    """

    nonce: str
    about: str
    chat: str

    @property
    def num_chars(self) -> int:
        """Its length."""
        return len(self.about) + len(self.chat)


@dataclass(eq=False, slots=True)
class PinReplica:
    """A pin as this replica has it.

    - ``until``: its end on the service's clock.
    - ``prompt_key``: None if the pin isn't tried again.
    - ``pin``: it has the prefix ``pinned_key``.
    - ``renewed_at``: Unix time of its last request here.
    - ``owner``: who asked for it last, here or at another replica. It pays for what is computed.
    - ``date``: that the chat template showed in the prefix; empty: none.
    """

    owner: Owner
    fact: FleetPin
    namespace: Namespace
    prompt_key: bytes | None
    until: float
    pin: Pin | None = None
    pinned_key: bytes = b""
    content: PinContent | None = None
    date: str = ""
    renewed_at: float = field(default_factory=time.time)
    state: JobState = "queued"
    error: str = ""
    failed_at: float = float("-inf")
    task: asyncio.Task[None] | None = None


class FleetPins:
    """See the module's docstring. To be used from the event loop's thread."""

    def __init__(
        self,
        fleet: Fleet,
        placement: Placement,
        threads: Threads,
        tenant_sync: TenantSync,
        engine: Engine,
        warmer: Warmer,
        promises: Promises,
        keys: KeyStore,
        quotas: Quotas,
        failures: Failures,
        clock: Clock,
    ) -> None:
        self._fleet, self._coordinator, self._placement = fleet, fleet.coordinator, placement
        self._ask_store, self._ask_cache, self._tenant_sync = (
            threads.ask_store,
            threads.ask_cache,
            tenant_sync,
        )
        self._cache, self._limits = engine.cache, engine.limits
        self._warmer, self._promises, self._keys, self._quotas = warmer, promises, keys, quotas
        self._failures, self._clock = failures, clock
        self._tenants: dict[str, dict[str, PinReplica]] = {}
        self._step: asyncio.Task[None] | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of the prompts of pins, and characters of their contents: for each tenant, at most 4 bytes and
        CONTENT_CHARS characters for each token that the pool can hold."""
        return sum(4 * self._num_tokens(tenant) + self._num_chars(tenant) for tenant in self._tenants)

    # ---- requests of clients

    async def start(
        self,
        owner: Owner,
        namespace: Namespace,
        prompt_key: bytes,
        ttl_s: float,
        where: str | int | list[str],
        content: PinContent | None = None,
        date: str = "",
    ) -> str:
        """Pin on several replicas, or renew such a pin. A content makes it another pin than that of the prefix.

        Returns the pin's id. Raises ApiError, and the store's errors.
        """
        tenant, names = namespace.tenant, self._asked(namespace, prompt_key, where)
        self._tenant_sync.require_purged(tenant)
        fact = self._fact(namespace, prompt_key, where, content)
        owner.require()
        try:
            most = self._max_pins(tenant)
            is_kept = await self._ask_store(self._coordinator.keep_pin, tenant, fact, ttl_s, most=most)
        except CoordinationError:
            raise store_unavailable("the store of pins can't be reached; nothing was pinned") from None
        if not is_kept:
            message = f"the tenant already has {most} pins of the fleet, its limit: end one of them first"
            allowed = f"at most {most} pins of the fleet"
            raise ApiError(409, "pin_limit_exceeded", message, value=most, allowed=allowed)
        until = self._clock() + ttl_s
        mine = PinReplica(owner, fact, namespace, prompt_key, until, content=content, date=date)
        if self._name in names:
            self._keep(mine)
        peers = [peer for peer in self._coordinator.peers() if peer.id in names]
        told = await asyncio.gather(*(self._tell(mine, peer) for peer in peers))
        if self._name not in names and None not in told:
            with suppress(CoordinationError):
                await self._ask_store(self._coordinator.end_pin, tenant, fact, ttl_s)
            codes = ", ".join(sorted({code for code in told if code})) or "there is none"
            message = f"no replica took the pin: {codes}"
            raise ApiError(503, "unreachable", message, retry_after_s=RETRY_AFTER_S)
        return fact.id

    async def end(self, tenant: str, pin_id: str) -> None:
        """Unpin everywhere: here at once, on other replicas within about a second. Raises ApiError."""
        self._tenant_sync.require_purged(tenant)
        mine = self._tenants.get(tenant, {}).get(pin_id)
        known = {pin.id: pin for pin in await self._stated(tenant)}.get(pin_id)
        fact = known or (mine.fact if mine is not None else None)
        if fact is None or fact.is_ended:
            raise not_found("pin")
        keep_s = fact.remaining_s if mine is None else mine.until - self._clock()
        try:
            await self._ask_store(self._coordinator.end_pin, tenant, fact, max(keep_s, _RENEW_S))
        except CoordinationError:
            raise store_unavailable("the store of pins can't be reached; the pin stays") from None
        if mine is not None:
            await self._drop(mine)

    async def settled(self, owner: Owner, pin_id: str) -> tuple[FleetPin, PinReplica | None]:
        """Wait until no replica is still working on a pin, and return it. Raises ApiError, StaleGeneration."""
        while True:
            owner.require()
            found = {pin.id: (pin, mine) for pin, mine in await self.known(owner.tenant)}.get(pin_id)
            if found is None:
                raise not_found("pin")
            pin, mine = found
            if not any(part.is_open for part in pin.parts) and (mine is None or mine.task is None):
                return found
            await asyncio.sleep(_LOOK_S)

    async def known(self, tenant: str) -> list[tuple[FleetPin, PinReplica | None]]:
        """Return a tenant's active pins, each with this replica's state of it.

        Without the store, only the pins held here.

        Raises ApiError 503 if the pins may be those of a removed tenant of the same name.
        """
        self._tenant_sync.require_purged(tenant)
        mine = self._tenants.get(tenant, {})
        try:
            facts = [
                pin for pin in await self._ask_store(self._coordinator.fleet_pins, tenant) if not pin.is_ended
            ]
        except CoordinationError:
            now = self._clock()
            held = [each for each in mine.values() if each.until > now and not self._is_purged(each)]
            facts = [replace(each.fact, remaining_s=each.until - now) for each in held]
        return [(replace(pin, parts=self._parts(pin, mine.get(pin.id))), mine.get(pin.id)) for pin in facts]

    async def local(self, tenant: str, after: int, limit: int) -> list[Pin]:
        """Return the pins of this replica alone, by id: at most ``limit`` pins after an id."""
        kept = {mine.pin.id for mine in self._tenants.get(tenant, {}).values() if mine.pin is not None}
        most = limit + len(kept)
        pins = await self._ask_cache(tenant, self._cache.pins, tenant, after=after, limit=most)
        return [pin for pin in pins if pin.id not in kept][:limit]

    async def _holds(self, tenant: str, pin: Pin | None) -> bool:
        """Whether the cache still has a pin."""
        if pin is None:
            return False
        found = await self._ask_cache(tenant, self._cache.pins, tenant, after=pin.id - 1, limit=1)
        return any(each.id == pin.id for each in found)

    # ---- requests of other replicas

    async def receive(
        self,
        owner: Owner,
        namespace: Namespace,
        prompt_key: bytes,
        pin_id: str,
        content: PinContent | None,
        date: str = "",
    ) -> None:
        """Take part in a pin that is in the store. Raises ApiError 404, 503."""
        fact = {pin.id: pin for pin in await self._stated(namespace.tenant)}.get(pin_id)
        is_it = fact is not None and self._fact(namespace, prompt_key, "all", content).id == pin_id
        if fact is None or fact.is_ended or not is_it or not self._is_for(fact, self._name):
            raise not_found("pin")
        until = self._clock() + fact.remaining_s
        mine = self._keep(PinReplica(owner, fact, namespace, prompt_key, until, content=content, date=date))
        try:
            await self._state(mine)
        except CoordinationError:
            raise store_unavailable("the store of pins can't be reached") from None

    # ---- once a second

    def cleared(self, tenant: str, namespaces: Collection[Namespace]) -> None:
        """Mark pins of namespaces that were cleared here as failed. Other replicas keep them."""
        for mine in self._tenants.get(tenant, {}).values():
            if mine.namespace in namespaces:
                mine.state, mine.error, mine.prompt_key, mine.pin = "failed", "cleared", None, None

    def weights_changed(self, version: int) -> None:
        """Mark pins of other versions of the weights as failed."""
        for tenant, kept in self._tenants.items():
            self.cleared(
                tenant, {each.namespace for each in kept.values() if each.namespace.weights != version}
            )

    async def purged(self, tenant: str, facts: Sequence[FleetPin]) -> None:
        """End the pins of a purged tenant. Without the store, each holder ends its own."""
        for mine in list(self._tenants.get(tenant, {}).values()):
            if self._is_purged(mine):
                await self._drop(mine)
        end, held = self._coordinator.end_pin, [fact for fact in facts if not fact.is_ended]
        with suppress(CoordinationError):
            await asyncio.gather(*(self._ask_store(end, tenant, fact, fact.remaining_s) for fact in held))

    async def removed(self, tenant: str) -> None:
        """Drop all pins of a removed tenant here."""
        for mine in list(self._tenants.get(tenant, {}).values()):
            await self._drop(mine)

    def tick(self) -> None:
        """Begin a step, unless the last one is still running."""
        if self._tenants and (self._step is None or self._step.done()):
            self._step = asyncio.create_task(self._compare(), name="radixkv-fleet-pins")

    async def _compare(self) -> None:
        """Compare the pins of this replica with the facts in the store, and correct differences."""
        for tenant, kept in list(self._tenants.items()):
            if tenant in self._tenant_sync.unpurged:
                continue  # what a removed tenant has is dropped when the fleet has purged it
            for mine in [mine for mine in kept.values() if mine.until <= self._clock()]:
                await self._drop(mine)
            try:
                facts = {pin.id: pin for pin in await self._ask_store(self._coordinator.fleet_pins, tenant)}
                for mine in list(kept.values()):
                    if self._is_current(mine) and mine.until > self._clock():
                        await self._update(mine, facts.get(mine.fact.id))
            except CoordinationError:
                continue  # each replica keeps its pins until they expire
            except Exception as error:  # noqa: BLE001 a bug in radixkv must not end all other pins
                self._failures.log(error)

    async def close(self) -> None:
        """Cancel all running tasks."""
        tasks = [mine.task for kept in self._tenants.values() for mine in kept.values() if mine.task]
        tasks += [self._step] if self._step is not None else []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _update(self, mine: PinReplica, fact: FleetPin | None) -> None:
        tenant, now, as_of = mine.namespace.tenant, self._clock(), self._cache.endings.num
        if self._is_purged(mine):
            await self._drop(mine)
            await self._ask_store(self._coordinator.end_pin, tenant, mine.fact, mine.until - now)
        elif fact is None:
            await self._ask_store(self._coordinator.keep_pin, tenant, mine.fact, mine.until - now, anew=False)
            await self._state(mine)
        elif fact.is_ended or not self._is_for(fact, self._name):
            await self._drop(mine)
        else:
            mine.fact = fact
            await self._pin_again(mine, now, as_of)
            await self._state(mine)
            await self._tell_lacking(mine, fact)

    async def _pin_again(self, mine: PinReplica, now: float, as_of: int) -> None:
        """Pin again if the pin was renewed, if it failed and may work now, or if the cache lost it without a purge.

        The cache loses a pin without a purge if a store lost a generation: see ``coordination.purges``. ``as_of``: when
        the pin was known not to be purged.
        """
        is_gone = mine.state == "done" and not await self._holds(mine.namespace.tenant, mine.pin)
        if mine.task is not None or not self._is_current(mine):
            return
        is_later = mine.fact.remaining_s > mine.until - now + _RENEW_S
        mine.until = now + mine.fact.remaining_s
        may_pass = mine.state == "failed" and now > mine.failed_at + _AGAIN_S
        if mine.prompt_key is not None and (is_gone or may_pass or (mine.state == "done" and is_later)):
            mine.owner = replace(
                mine.owner, as_of=as_of, keys=None
            )  # a pin outlives the key that asked for it
            mine.task = asyncio.create_task(self._hold(mine), name="radixkv-fleet-pin")

    # ---- this replica's part

    def _keep(self, mine: PinReplica) -> PinReplica:
        """Begin to keep a pin, or renew it."""
        kept = self._tenants.setdefault(mine.namespace.tenant, {})
        known = kept.get(mine.fact.id)
        if known is not None:
            known.fact, known.prompt_key, known.until = mine.fact, mine.prompt_key, mine.until
            known.failed_at, known.renewed_at = float("-inf"), mine.renewed_at
            known.owner, known.date = mine.owner, mine.date or known.date
            mine = known
        kept[mine.fact.id] = mine
        tenant, most = mine.namespace.tenant, self._limits.num_cache_tokens
        if self._num_tokens(tenant) > most or self._num_chars(tenant) > CONTENT_CHARS * most:
            mine.state, mine.error, mine.prompt_key = "failed", "no_capacity", None
        elif mine.task is None:
            mine.task = asyncio.create_task(self._hold(mine), name="radixkv-fleet-pin")
        return mine

    async def _hold(self, mine: PinReplica) -> None:
        """Compute the prefix, if it isn't resident and the budget allows it, and pin it."""
        prompt_key = mine.prompt_key
        assert prompt_key is not None
        try:
            if mine.state == "failed":
                mine.state, mine.error = "queued", ""
            with suppress(CoordinationError):
                await self._state(mine)
            await self._ask_cache(mine.namespace.tenant, self._require_budget, mine.namespace, prompt_key)
            asked = Promise(len(prompt_key) // TOKEN_BYTES, ceil(max(mine.until - self._clock(), 1.0)))
            with self._warmer.join(mine.namespace, prompt_key, mine.owner, kind="pin") as share:
                await share.result()
                left_s = mine.until - self._clock()
                if self._is_current(mine) and left_s > 0:
                    await self._ask_cache(mine.namespace.tenant, self._pin, mine, prompt_key, left_s)
                    await share.settled([asked])
            mine.state, mine.error = "done", ""
        except Exception as error:  # noqa: BLE001 no request waits for it: its part has the error
            problem = self._failures.answer(error)
            mine.state, mine.error, mine.failed_at = "failed", problem.type, self._clock()
            if problem.status not in (429, 503):
                mine.prompt_key = None
        finally:
            mine.task = None
        with suppress(CoordinationError):
            await self._state(mine)

    def _pin(self, mine: PinReplica, prompt_key: bytes, left_s: float) -> None:
        """Pin a prefix. In a thread, ``_drop`` may come meanwhile: then one of the two finds the other's work."""
        mine.pinned_key = prompt_key
        mine.pin = self._promises.hold(
            mine.fact.id, mine.namespace, prompt_key, left_s, mine.owner.as_of, mine.date
        )
        if not self._is_current(mine):
            self._unpin(mine, prompt_key, mine.pin)

    def _unpin(self, mine: PinReplica, prompt_key: bytes, pin: Pin) -> None:
        with suppress(
            LeaseError, ControlError
        ):  # it has expired, or was cleared; an engine that ended has no pins
            self._promises.release(mine.fact.id, mine.namespace, prompt_key, pin)

    def _require_budget(self, namespace: Namespace, prompt_key: bytes) -> None:
        """Raise PinBudgetExceeded before the prefix is computed, if it couldn't be pinned afterwards."""
        tenant = namespace.tenant
        settings = self._keys.ring.settings.get(tenant)
        num_blocks = len(prompt_key) // TOKEN_BYTES // self._limits.block_size
        lacking = num_blocks - self._cache.match(namespace, prompt_key).num_blocks
        if settings is not None and lacking:
            budget = settings.tenant(tenant, self._quotas.granted(tenant)).pin_budget
            budget = min(budget, budget_of(self._quotas.room(tenant).most))
            pinned = self._cache.tenant_stats(tenant).pinned_blocks
            if pinned + lacking > budget:
                raise PinBudgetExceeded(lacking, budget, pinned)

    async def _state(self, mine: PinReplica) -> None:
        """Write the present state of this replica's part to the store. Raises CoordinationError."""
        info, tenant = self._coordinator.info(), mine.namespace.tenant
        stated = next((part for part in mine.fact.parts if part.replica_id == info.id), None)
        part = self._part(mine)
        if part != stated and self._is_current(mine):
            call = self._coordinator.state_pin
            await self._ask_store(call, tenant, mine.fact.id, part.state, part.num_tokens_done, part.error)
            others = tuple(each for each in mine.fact.parts if each.replica_id != info.id)
            mine.fact = replace(mine.fact, parts=(*others, part))

    async def _drop(self, mine: PinReplica) -> None:
        """Drop a pin here: unpin it, or cancel its task."""
        kept = self._tenants.get(mine.namespace.tenant, {})
        if kept.get(mine.fact.id) is mine:
            del kept[mine.fact.id]
            if not kept:
                del self._tenants[mine.namespace.tenant]
        if mine.task is not None:
            mine.task.cancel()
        if mine.pin is not None:
            await self._ask_cache(mine.namespace.tenant, self._unpin, mine, mine.pinned_key, mine.pin)

    # ---- other replicas

    async def _tell_lacking(self, mine: PinReplica, fact: FleetPin) -> None:
        """Send the pin to replicas that lack it, if this replica is the first holder."""
        having = sorted(part.replica_id for part in fact.parts if part.state == "done")
        if mine.prompt_key is None or mine.state != "done" or having[:1] != [self._name]:
            return
        lacking = self._lacking(mine, fact)
        await asyncio.gather(*(self._tell(mine, peer) for peer in lacking))

    def _lacking(self, mine: PinReplica, fact: FleetPin) -> list[ReplicaInfo]:
        """Return live replicas that should have a part and have none, the best first.

        A replica that drains doesn't count as one of a number of replicas.
        """
        parts = {part.replica_id: part for part in fact.parts if part.state != "lost"}
        others = {
            peer.id: peer
            for peer in self._coordinator.peers()
            if (peer.fingerprint, peer.weights) == (mine.namespace.model, mine.namespace.weights)
            and peer.id not in parts
        }
        if not fact.wanted.isdecimal():
            return [peer for peer in others.values() if self._is_for(fact, peer.id)]
        leaving = {each.id for each in self._coordinator.replicas() if each.draining}
        num_hopeful = sum(
            part.state in ("queued", "running", "done") and name not in leaving
            for name, part in parts.items()
        )
        assert mine.prompt_key is not None
        best = [name for name in self._placement.best(mine.namespace, mine.prompt_key) if name in others]
        return [others[name] for name in best[: max(0, int(fact.wanted) - num_hopeful)]]

    async def _tell(self, mine: PinReplica, peer: ReplicaInfo) -> str | None:
        """Send a pin to a replica. Returns None, or a code with the reason why the replica doesn't have it now."""
        if mine.prompt_key is None:
            return mine.error
        if peer.fingerprint != mine.namespace.model:
            return "other_model"
        namespace = mine.namespace
        document: dict[str, object] = {
            "pin": mine.fact.id,
            "token_ids": decode(mine.prompt_key).tolist(),
            "salt": namespace.salt,
            "adapter": namespace.adapter,
            "weights": namespace.weights,
            "key_id": mine.owner.key_id,
            **mine.owner.names_tenant,
        }
        if mine.date:  # replicas of earlier versions don't know the field
            document["date"] = mine.date
        if mine.content is not None:
            document["content"] = asdict(mine.content)
        return await self._fleet.order(peer, namespace.tenant, json.dumps(document).encode(), PIN_PATH)

    # ---- helpers

    def _max_pins(self, tenant: str) -> int:
        """Return the maximum number of fleet pins of a tenant."""
        return min(self._keys.ring.settings.get(tenant, TenantSettings()).max_pins, MAX_PINS)

    @property
    def _name(self) -> str:
        return self._coordinator.replica_id

    async def _stated(self, tenant: str) -> list[FleetPin]:
        """Return the facts in the store. Raises ApiError if the store can't be reached."""
        try:
            return await self._ask_store(self._coordinator.fleet_pins, tenant)
        except CoordinationError:
            raise store_unavailable("the store of pins can't be reached") from None

    def _asked(self, namespace: Namespace, prompt_key: bytes, where: str | int | list[str]) -> list[str]:
        names = self._placement.asked(namespace, prompt_key, where)
        live = {self._name, *(peer.id for peer in self._coordinator.peers())}
        unknown = next((name for name in names if name not in live), None)
        if unknown is not None:
            raise invalid("no such live replica", "replicas", unknown, f"of {', '.join(sorted(live))}")
        return names

    def _fact(
        self,
        namespace: Namespace,
        prompt_key: bytes,
        where: str | int | list[str],
        content: PinContent | None,
    ) -> FleetPin:
        """Return the fact of a prefix. The same prefix always gives the same pin id, without a content."""
        digest = self._digest(namespace)
        name = ("pin", digest) if content is None else ("content", digest, content.nonce)
        pin_id = mac(self._fleet.secret, *name, prompt_key).hex()[:32]
        wanted = "=" + ",".join(where) if isinstance(where, list) else str(where)
        return FleetPin(pin_id, digest, len(prompt_key) // TOKEN_BYTES, wanted)

    def _digest(self, namespace: Namespace) -> bytes:
        return self._coordinator.pin_digest(namespace)

    def _is_purged(self, mine: PinReplica) -> bool:
        """Whether the tenant was purged after this pin was made."""
        return mine.fact.namespace_digest != self._digest(mine.namespace)

    def _is_for(self, fact: FleetPin, name: str) -> bool:
        """Whether the pin is meant for a replica."""
        return not fact.wanted.startswith("=") or name in fact.wanted[1:].split(",")

    def _num_tokens(self, tenant: str) -> int:
        return sum(
            mine.fact.num_tokens
            for mine in self._tenants.get(tenant, {}).values()
            if mine.prompt_key is not None
        )

    def _num_chars(self, tenant: str) -> int:
        kept = self._tenants.get(tenant, {}).values()
        return sum(mine.content.num_chars for mine in kept if mine.content is not None)

    def _is_current(self, mine: PinReplica) -> bool:
        return self._tenants.get(mine.namespace.tenant, {}).get(mine.fact.id) is mine

    def _part(self, mine: PinReplica) -> JobPart:
        info = self._coordinator.info()
        tokens = mine.fact.num_tokens if mine.state == "done" else 0
        return JobPart(*info.writer, mine.state, tokens, mine.error)

    def _parts(self, fact: FleetPin, mine: PinReplica | None) -> tuple[JobPart, ...]:
        """Return all parts, with the present state of this replica's part."""
        if mine is None:
            return fact.parts
        others = [part for part in fact.parts if part.replica_id != self._name]
        return tuple(sorted([*others, self._part(mine)], key=lambda part: part.replica_id))
