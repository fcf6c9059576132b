"""Ranks the replicas that should get a prompt: a scored list with reasons. The caller picks.

    source ──▶ members (live replicas and load) ─────┐
           ──▶ view (holders of each segment)        ├─▶ rank ─▶ [Candidate], best first ─▶ the gateway picks
    routed ──▶ predicted index (what was just sent) ─┘                                      └─▶ routed

A decision is local: it digests the prompt, looks up its segments, and computes one array of costs. It never asks the
store. Liveness is checked at the moment of the call, so a lost replica is in no answer after its lease. When the
store is lost and all other leases are over, the last known replicas are ranked by their load alone.

The **predicted index** keeps siblings together before the first event arrives. For ``predict_s`` seconds, prompts
reported by ``routed`` count as held, and their tokens as queued until the replica reports a newer load. The predicted
part of a prompt doesn't count as queued before this prompt, because a prompt doesn't wait for its own prefix.

A replica's **queue** is that of ``radixkv.scheduling``. So cold tokens in it, also those that were just sent there,
don't count for a replica that holds enough of the prompt for it to go first.

Predictions are kept by tenant. A tenant's ``routed`` changes only that tenant's rankings, because a tenant may call it
through ``/v1/route`` and send nothing. The turn of ``round_robin`` is kept by tenant too. Cost: other tenants see the
tenant's real load only with the replica's next report, up to a third of a lease later.

Ties are broken at random. With a ``temperature`` the order is drawn from the softmax of
``−(cost − least) ÷ (temperature × (greatest − least))`` without replacement, so it has no unit.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from numbers import Integral
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from radixkv.config import Namespace
from radixkv.coordination.keys import DIGEST_BYTES, SEGMENT_TOKENS
from radixkv.coordination.routing.costs import BASELINES, COSTS, MAX_TEMPERATURE, CostName, Facts, Floats
from radixkv.coordination.routing.replica_sources import Member, Observer, Source
from radixkv.coordination.settings import check_count, check_number
from radixkv.coordination.store.wire import TIERS
from radixkv.coordination.validation import check_flag, check_namespace
from radixkv.coordination.values import Load, ReplicaInfo
from radixkv.errors import ArgumentError, ConfigError, needs
from radixkv.index import tokens
from radixkv.index.tokens import TOKEN_BYTES
from radixkv.scheduling import WHOLE_MISSING
from radixkv.uncopied import refuse_copies

TIER_WEIGHTS: Mapping[str, float] = {"device": 1.0, "host": 0.75, "disk": 0.25}
PREDICT_S = 5.0
MAX_PREDICT_S = 3600.0
_LOAD_AGE_S = 1.0
"""A load is measured up to this long before the beat that brings it."""
_MAX_PREDICTED = 262_144
"""Most placements in the predicted index: segments, each counted once for every replica that it was sent to."""
_MAX_PREDICTED_EACH = 65_536
"""Most placements of one tenant."""
_MAX_TURNS = 65_536
"""Most tenants whose turn of ``round_robin`` is kept."""
_PLACEMENT_BYTES, _SENT_BYTES = 400, 130
_COLD = 1e-9
"""Up to this temperature, chance decides only ties."""
_TICKS = 500
"""Resolution in time: tokens sent to one replica within ``predict_s / 500`` are kept as one number."""

Tokens = NDArray[np.int64]


class Candidate(NamedTuple):
    """One replica that a prompt may be sent to."""

    replica: ReplicaInfo
    """As of the last fetch of the registrations."""
    matched_tokens: dict[str, int]
    """Leading tokens by the tier that holds them; ``predicted``: those that were just sent there."""
    load: Load
    """The reported load, plus what was sent there since."""
    cost: float
    why: str


class Router:
    """Ranks replicas for prompts. Thread-safe.

    cost: a name of ``costs.COSTS``. temperature: 0 for the best first, at most 1e6. tier_weights: value of a token in
    each tier, relative to one on the device. Raises ConfigError.
    """

    def __init__(
        self,
        source: Source,
        *,
        cost: str = "linear",
        temperature: float = 0.0,
        tier_weights: Mapping[str, float] = TIER_WEIGHTS,
        predict_s: float = PREDICT_S,
        seed: int | None = None,
    ) -> None:
        self.source = source
        self.is_blind = False
        """Whether the last ranking was by load alone, because the store is lost."""
        self.cost = _checked_cost(cost)
        self.temperature = _checked_temperature(temperature)
        self._weights = _checked_weights(tier_weights)
        self._predicted = Predictions(predict_s)
        self._random = np.random.default_rng(_checked_seed(seed))
        self._lock = threading.Lock()
        self._roster = _Roster(())
        self._turns: OrderedDict[str, int] = OrderedDict()

    @classmethod
    def connect(
        cls,
        url: str,
        *,
        fleet_secret: bytes,
        max_segments: int = 2_000_000,
        background: bool = True,
        **options: Any,
    ) -> Router:
        """Make a router over the Redis at ``url``, for any number of replicas; ``close`` it when done.

        On return the view is complete, if Redis can be reached. ``max_segments``: most different segments in the view,
        about 20 bytes each. ``options`` are those of ``Router``. Raises ConfigError.
        """
        check_count("max_segments", max_segments)
        try:
            from radixkv.coordination.store.redis import RedisStore
        except ModuleNotFoundError as error:
            raise ConfigError("redis", url, "None", problem=needs("redis")) from error
        source = Observer(RedisStore(url), fleet_secret, max_segments=max_segments, background=background)
        try:
            return cls(source, **options)
        except BaseException:
            source.close()
            raise

    @property
    def predicted_bytes(self) -> int:
        """Approximate bytes of the predicted index; at most about 100 MB. O(tenants × replicas)."""
        with self._lock:
            return self._predicted.num_bytes

    def close(self) -> None:
        """Close the source. Idempotent."""
        self.source.close()

    def rank(
        self,
        namespace: Namespace,
        token_ids: tokens.TokenIds,
        *,
        cost: str | None = None,
        temperature: float | None = None,
        limit: int | None = None,
        ignore_load: bool = False,
    ) -> list[Candidate]:
        """Return the replicas that serve the namespace's model, best first, at most ``limit``; local.

        Empty if there are none.

        ``ignore_load``: leave load out, so that the order reveals nothing about other tenants. Round robin is then
        random.

        A ranking changes no prediction; ``routed`` does. Raises TokenError, ConfigError, ArgumentError. O(tokens +
        segments + replicas log replicas), plus one digest a segment.
        """
        name = self.cost if cost is None else _checked_cost(cost)
        heat = self.temperature if temperature is None else _checked_temperature(temperature)
        most = None if limit is None else _checked_limit(limit)
        check_flag("ignore_load", ignore_load)
        check_namespace(namespace)
        key = tokens.encode(token_ids)
        now = self.source.clock()
        roster, by_load = self._living(namespace.model, now)
        self.is_blind = by_load
        if not roster.members:
            return []
        if by_load:
            name, known = "least_loaded", self._unknown(namespace.tenant, roster, now)
        else:
            known = self._known(namespace, key, roster, now)
        if ignore_load:
            roster, known = roster.unloaded(), known.unloaded()
            name = "random" if name == "round_robin" else name
        return self._scored(roster, known, len(key) // TOKEN_BYTES, name, heat, most)

    def newest_weights(self, model: str) -> int:
        """Return the newest version of the weights among the replicas that serve a model; local.

        Those that live count, or all known ones if none lives. Prompts are ranked by what replicas hold in one version.
        While an update goes from replica to replica, those without the newest version count as holding nothing.
        """
        members, now = self.source.members(), self.source.clock()
        serving = [each for each in members if each.info.fingerprint == model]
        living = [each for each in serving if each.live_until > now]
        return max([each.info.weights for each in living or serving], default=0)

    def routed(self, namespace: Namespace, token_ids: tokens.TokenIds, replica_id: str) -> None:
        """Report that a prompt was sent to a replica, for the predicted index; an unknown replica is no error.

        If it is the replica that runs the router, its cache may prepare for the prompt (``LocalSource``). Raises
        TokenError, ArgumentError. O(tokens).
        """
        check_namespace(namespace)
        if not isinstance(replica_id, str):
            raise ArgumentError("replica_id", replica_id, "the id of a replica, a string")
        key, now = tokens.encode(token_ids), self.source.clock()
        member = next((each for each in self.source.members() if each.info.id == replica_id), None)
        if member is None:
            return
        if member.sent is not None:
            member.sent(namespace, key)
        digests, roster, name = self._digests(namespace, key), _Roster((member,)), member.info.audience
        num_tokens, held = len(key) // TOKEN_BYTES, int(self._held(namespace, key, digests, roster).sum())
        digests = self._with_rest(namespace, key, digests)
        with self._lock:
            sent = self._predicted.of(namespace.tenant).leading(digests, now).get(name, 0)
            num_lacking = max(0, num_tokens - max(held, sent))
            is_cold = num_lacking > WHOLE_MISSING * num_tokens
            self._predicted.add(namespace.tenant, digests, name, num_lacking, now, is_cold)

    def _digests(self, namespace: Namespace, key: bytes) -> list[bytes]:
        generation = self.source.generation(namespace.tenant)
        return self.source.keys.digests(namespace, key, generation=generation)

    def _with_rest(self, namespace: Namespace, key: bytes, digests: list[bytes]) -> list[bytes]:
        """Return the digests, plus one for the tail behind the last whole segment, so that a repeated prompt is
        recognised."""
        rest = key[len(digests) * SEGMENT_TOKENS * TOKEN_BYTES :]
        if not rest:
            return digests
        generation = self.source.generation(namespace.tenant)
        before = digests[-1] if digests else self.source.keys.namespace(namespace, generation)
        return [*digests, blake2b(rest, key=before, digest_size=DIGEST_BYTES).digest()]

    def _living(self, model: str, now: float) -> tuple[_Roster, bool]:
        """Return the replicas that may be ranked, and whether to rank by load alone."""
        members, known = self.source.members(), self._roster
        if members is not known.source:
            known = self._roster = _Roster(members)
        roster = known.of(model)
        living = roster.live_until > now
        if living.all():
            return roster, False
        if self.source.is_lost and not living[np.isfinite(roster.live_until)].any():
            return roster, True
        return roster.only(np.flatnonzero(living)), False

    def _known(self, namespace: Namespace, key: bytes, roster: _Roster, now: float) -> _Known:
        """Return the known facts of the members about this prompt."""
        digests = self._digests(namespace, key)
        held = self._held(namespace, key, digests, roster)
        known = self._unknown(namespace.tenant, roster, now)
        whole = self._with_rest(namespace, key, digests)
        with self._lock:
            sent = self._predicted.of(namespace.tenant).leading(whole, now)
        if not sent:
            return known._replace(held=held)
        told = np.array([sent.get(name, 0) for name in roster.names])
        ahead = np.minimum(told, len(key) // TOKEN_BYTES) - held.sum(axis=1)
        return known._replace(held=held, predicted=np.maximum(ahead, 0))

    def _unknown(self, tenant: str, roster: _Roster, now: float) -> _Known:
        """Return the same for a prompt of the tenant that no replica holds."""
        num_members = len(roster.members)
        with self._lock:
            turn = self._next_turn(tenant)
            queued = self._predicted.of(tenant).queued(roster, now)
        nothing = np.zeros((num_members, len(TIERS)), np.int64)
        return _Known(nothing, np.zeros(num_members, np.int64), queued, turn)

    def _next_turn(self, tenant: str) -> int:
        """Return the number of the tenant's rankings, from a random start."""
        turn = self._turns.pop(tenant, None)
        if turn is None:
            turn = int(self._random.integers(2**31))
            if len(self._turns) >= _MAX_TURNS:
                self._turns.popitem(last=False)
        self._turns[tenant] = turn + 1
        return turn

    def _held(self, namespace: Namespace, key: bytes, digests: list[bytes], roster: _Roster) -> Tokens:
        """Return leading tokens by member and tier: int64 ``[members, 3]``."""
        counts = self.source.view.leading(b"".join(digests)).counts()
        columns = np.array([member.column for member in roster.members])
        held: Tokens = counts[np.minimum(columns, len(counts) - 1)] * SEGMENT_TOKENS
        for place in np.flatnonzero(columns < 0).tolist():
            match = roster.members[place].match
            held[place, 0] = 0 if match is None else match(namespace, key)
        return held

    def _scored(
        self, roster: _Roster, known: _Known, prompt: int, name: CostName, heat: float, limit: int | None
    ) -> list[Candidate]:
        credit = known.held @ self._weights + known.predicted
        whole, cold = (roster.queued + known.queued).T
        ahead = whole + cold
        if name not in BASELINES:
            goes_first = prompt - credit <= WHOLE_MISSING * prompt
            ahead = np.maximum(np.where(goes_first, whole, ahead) - known.predicted, 0)
        costs = COSTS[name](Facts(prompt, credit, ahead, roster.decode, known.turn))
        order = self._order(costs, heat)[:limit].tolist()
        held, predicted, queued = known.held.tolist(), known.predicted.tolist(), known.queued.tolist()
        values = costs.tolist()
        return [
            _candidate(roster.members[at].info, held[at], predicted[at], queued[at], values[at], name, prompt)
            for at in order
        ]

    def _order(self, costs: Floats, heat: float) -> NDArray[np.intp]:
        with self._lock:
            chance = self._random.random(len(costs))
        spread = float(costs.max() - costs.min())
        if heat > _COLD and spread > 0:
            gumbel = -np.log(-np.log(np.maximum(chance, np.finfo(float).tiny)))
            return np.argsort((costs - costs.min()) / spread / heat - gumbel)
        return np.lexsort((chance, costs))


refuse_copies(Router, "it holds threads and connections. Make another")


class _Known(NamedTuple):
    """Tokens held by member and tier, further tokens predicted, and tokens sent since the load was reported, whole
    and cold."""

    held: Tokens
    predicted: Tokens
    queued: Floats
    turn: int

    def unloaded(self) -> _Known:
        """Return the same without the tokens sent since."""
        return self._replace(queued=np.zeros_like(self.queued), turn=0)


class _Roster:
    """Members as arrays, for one state of a source."""

    def __init__(self, members: Sequence[Member]) -> None:
        self.source = members
        self.members = tuple(members)
        self.names = [each.info.audience for each in members]
        self.live_until = np.array([each.live_until for each in members], np.float64)
        loads = [each.info.load for each in members]
        queued = [
            (each.queued_prefill_tokens - each.queued_cold_tokens, each.queued_cold_tokens) for each in loads
        ]
        self.queued = np.array(queued, np.float64).reshape(-1, 2)
        """By member: queued tokens that are whole or begun, and cold ones."""
        self.decode = np.array([each.info.load.decode_blocks for each in members], np.float64)
        self._by_model: dict[str, _Roster] = {}

    def of(self, model: str) -> _Roster:
        """Return the members that serve a model."""
        known = self._by_model.get(model)
        if known is None:
            known = _Roster([each for each in self.members if each.info.fingerprint == model])
            if known.members:
                self._by_model[model] = known
        return known

    def unloaded(self) -> _Roster:
        """Return the same members with zero load."""
        other = _Roster(self.members)
        other.queued, other.decode = np.zeros_like(self.queued), np.zeros_like(self.decode)
        return other

    def only(self, places: NDArray[np.intp]) -> _Roster:
        """Return some of the members."""
        return _Roster([self.members[place] for place in places.tolist()])


class Predictions:
    """Predicted placements of each tenant's prompts during the last ``keep_s`` seconds. Not thread-safe.

    Bound: 262,144 placements in all. Beyond it, the tenant with the most placements loses its oldest. So a tenant can't
    displace the placements of a tenant that has fewer.
    """

    def __init__(self, keep_s: float) -> None:
        self._keep_s = keep_s
        self._nothing = Predicted(keep_s)
        self._tenants: OrderedDict[str, tuple[Predicted, float]] = OrderedDict()
        self._num_held = 0

    @property
    def num_bytes(self) -> int:
        """Approximate bytes of all of it. O(tenants × replicas)."""
        return sum(predicted.num_bytes for predicted, _ in self._tenants.values())

    def of(self, tenant: str) -> Predicted:
        """Return a tenant's placements, for reading."""
        return self._tenants.get(tenant, (self._nothing, 0.0))[0]

    def add(
        self,
        tenant: str,
        digests: Sequence[bytes],
        replica_id: str,
        num_tokens: int,
        now: float,
        is_cold: bool,
    ) -> None:
        """Record that a prompt of the tenant was sent to a replica, which has ``num_tokens`` of it to compute.

        ``is_cold``: whether that is most of it.
        """
        self._expire(now)
        predicted = self._tenants.pop(tenant, (None, 0.0))[0] or Predicted(self._keep_s)
        self._tenants[tenant] = predicted, now + self._keep_s
        self._num_held -= predicted.num_held
        predicted.add(digests, replica_id, num_tokens, now, is_cold)
        self._num_held += predicted.num_held
        while self._num_held > _MAX_PREDICTED:
            most = max((each for each, _ in self._tenants.values()), key=lambda each: each.num_held)
            self._num_held -= most.drop_oldest()

    def _expire(self, now: float) -> None:
        while self._tenants and next(iter(self._tenants.values()))[1] <= now:
            self._num_held -= self._tenants.popitem(last=False)[1][0].num_held


class Predicted:
    """One tenant's placements during the last ``keep_s`` seconds. Not thread-safe.

    A placement names a registration by its ``audience``, because a restarted replica has nothing of what was sent
    before. Bounds: 65,536 placements, oldest segments dropped first; 500 numbers a replica for the tokens that were
    sent.
    """

    def __init__(self, keep_s: float) -> None:
        check_number("predict_s", keep_s, 0, MAX_PREDICT_S, f"0 to {MAX_PREDICT_S:.0f} seconds")
        self._keep_s = float(keep_s)
        self._held: OrderedDict[bytes, dict[str, float]] = OrderedDict()
        self.num_held = 0
        self._sent: dict[tuple[str, bool], _Sent] = {}

    @property
    def num_bytes(self) -> int:
        """Approximate bytes of all of it. O(replicas)."""
        return self.num_held * _PLACEMENT_BYTES + sum(len(sent) for sent in self._sent.values()) * _SENT_BYTES

    def add(
        self, digests: Sequence[bytes], replica_id: str, num_tokens: int, now: float, is_cold: bool
    ) -> None:
        """Record that a prompt was sent to a replica, which has ``num_tokens`` of it to compute."""
        self._expire(now)
        until = now + self._keep_s
        for digest in digests:
            holders = self._held.setdefault(digest, {})
            self.num_held += replica_id not in holders
            holders[replica_id] = until
            self._held.move_to_end(digest)
        while self.num_held > _MAX_PREDICTED_EACH:
            self.drop_oldest()
        sent = self._sent.setdefault((replica_id, is_cold), _Sent(self._keep_s / _TICKS))
        sent.add(now, num_tokens)

    def leading(self, digests: Sequence[bytes], now: float) -> dict[str, int]:
        """Return how many leading tokens were sent to each replica; each digest counts as one segment."""
        counts: dict[str, int] = {}
        for place, digest in enumerate(digests):
            found = self._held.get(digest)
            if found is None:
                break
            for replica_id, until in found.items():
                if until > now and counts.get(replica_id, 0) == place:
                    counts[replica_id] = place + 1
        return {replica_id: count * SEGMENT_TOKENS for replica_id, count in counts.items()}

    def queued(self, roster: _Roster, now: float) -> Floats:
        """Return the tokens that were sent to each member since its load was measured, whole and cold ones.

        float64 ``[members, 2]``.
        """
        queued = np.zeros((len(roster.members), 2))
        if self._sent:
            oldest = now - self._keep_s
            for place, (name, member) in enumerate(zip(roster.names, roster.members, strict=True)):
                since = max(oldest, member.loaded_at - _LOAD_AGE_S)
                for is_cold in (False, True):
                    sent = self._sent.get((name, is_cold))
                    if sent is not None:
                        queued[place, int(is_cold)] = sent.since(since)
        return queued

    def _expire(self, now: float) -> None:
        while self._held and max(next(iter(self._held.values())).values()) <= now:
            self.drop_oldest()
        for replica_id in [name for name, sent in self._sent.items() if not sent.since(now - self._keep_s)]:
            del self._sent[replica_id]

    def drop_oldest(self) -> int:
        """Forget the segment that was sent longest ago; return its number of placements."""
        num_dropped = len(self._held.popitem(last=False)[1])
        self.num_held -= num_dropped
        return num_dropped


class _Sent:
    """Times and tokens of what was sent to one replica; sends within one ``tick_s`` count as sent at its start."""

    def __init__(self, tick_s: float) -> None:
        self._tick_s = tick_s
        self._items: deque[tuple[float, int]] = deque()
        self._num_tokens = 0

    def __len__(self) -> int:
        return len(self._items)

    def add(self, at: float, num_tokens: int) -> None:
        self._num_tokens += num_tokens
        if self._items and self._items[-1][0] <= at < self._items[-1][0] + self._tick_s:
            at, earlier = self._items.pop()
            num_tokens += earlier
        self._items.append((at, num_tokens))

    def since(self, start: float) -> int:
        """Return the tokens sent after ``start``, and forget older ones. Amortised O(1)."""
        while self._items and self._items[0][0] <= start:
            self._num_tokens -= self._items.popleft()[1]
        return self._num_tokens


def _candidate(
    info: ReplicaInfo,
    held: list[int],
    predicted: int,
    queued: list[float],
    cost: float,
    name: str,
    prompt: int,
) -> Candidate:
    matched = {"device": held[0], "host": held[1], "disk": held[2]}
    if predicted:
        matched["predicted"] = predicted
    load = info.load
    if any(queued):
        load = replace(
            load,
            queued_prefill_tokens=load.queued_prefill_tokens + int(sum(queued)),
            queued_cold_tokens=load.queued_cold_tokens + int(queued[1]),
        )
    why = (
        f"{name}: holds {sum(held)} of {prompt} tokens, {predicted} more predicted; "
        f"{load.queued_prefill_tokens} tokens queued, {load.decode_blocks} decode blocks"
    )
    return Candidate(info, matched, load, cost, why)


def _checked_cost(cost: str) -> CostName:
    for name in COSTS:
        if isinstance(cost, str) and name == cost:
            return name
    raise ConfigError("cost", cost, f"one of {', '.join(COSTS)}")


def _checked_temperature(temperature: Any) -> float:
    check_number("temperature", temperature, 0, MAX_TEMPERATURE, f"a number from 0 to {MAX_TEMPERATURE:g}")
    return float(temperature)


def _checked_seed(seed: Any) -> int | None:
    if seed is None:
        return None
    if not isinstance(seed, Integral) or isinstance(seed, bool) or int(seed) < 0:
        raise ConfigError("seed", seed, "an integer ≥ 0, or None")
    return int(seed)


def _checked_limit(limit: Any) -> int:
    if not isinstance(limit, Integral) or isinstance(limit, bool) or int(limit) < 1:
        raise ArgumentError("limit", limit, "an integer, at least 1, or None")
    return int(limit)


def _checked_weights(weights: object) -> Floats:
    allowed = f"0 to 1 for each of {', '.join(TIERS)}"
    if not isinstance(weights, Mapping) or set(weights) != set(TIERS):
        raise ConfigError("tier_weights", weights, allowed)
    for weight in weights.values():
        check_number("tier_weights", weight, 0, 1, allowed)
    return np.array([weights[tier] for tier in TIERS], np.float64)
