"""Counters and gauges for Prometheus, by its client library, in a separate registry.

Counts of the cache, its tenants and the fleet are read when scraped. So they cost nothing in between and can't drift
from the truth. Events (a request, a first token) are counted when they happen. Everything here is for the operator: the
tenant is a label. No token id, prompt or key appears.

At most MOST_NAMED tenants have series of their own, those that the process met first; the label of all others together
is OTHER. So the size of a scrape is bounded, however many tenants there are.
"""

from __future__ import annotations

from radixkv import _compiled
from radixkv.engines.protocol import Preempting, Tiered
from radixkv.errors import ControlError, require_extra
from radixkv.index.stats import TenantStats
from radixkv.tiers.usefulness import REASONS, TierWatch

require_extra("radixkv.service.metrics", "http")

from bisect import bisect_left
from collections import Counter as Counts
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from importlib.metadata import version
from math import inf
from threading import Lock
from typing import TYPE_CHECKING, Final

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    Histogram,
    PlatformCollector,
    ProcessCollector,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from radixkv.coordination.coordinator import Coordinator
    from radixkv.engines import Engine, EngineCache
    from radixkv.tiers.disk.durations import Durations

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4

_COUNTERS = frozenset(
    {
        "requests",
        "hit_tokens",
        "missed_tokens",
        "evicted_blocks",
        "declined_blocks",
        "failed_policies",
        "copied_blocks",
        "scrubbed_blocks",
    }
)
"""Counts of the cache that only grow; all others are levels."""

_TEXTS = {
    "num_blocks": "Capacity, in blocks",
    "free_blocks": "Blocks without an owner",
    "resident_blocks": "Blocks of cached prefixes, which can be matched",
    "sequence_blocks": "Blocks private to running sequences",
    "quarantined_blocks": "Blocks of cleared namespaces in use by sequences, and freed blocks that waiting copies read",
    "lent_blocks": "Blocks lent to the engine",
    "evictable_blocks": "Blocks of cached prefixes that no lease protects",
    "used_blocks": "Blocks owned by the tenant's trees and sequences",
    "num_nodes": "Nodes of all trees",
    "num_sequences": "Running sequences",
    "num_namespaces": "Namespaces that are not empty",
    "num_tenants": "Tenants",
    "requests": "Sequences opened",
    "hit_tokens": "Prompt tokens whose KV was found, or came back from the tiers below",
    "missed_tokens": "Prompt tokens whose KV had to be computed",
    "evicted_blocks": "Blocks evicted by policy",
    "copied_blocks": "Blocks that copy-on-write decided to copy",
    "scrubbed_blocks": "Blocks zeroed before another tenant could read them",
    "declined_blocks": "Blocks freed at the end of their use, because the policy did not admit them",
    "failed_policies": "Policies that raised an error and were replaced by lru, each for its tenant alone",
    "pinned_blocks": "Blocks kept by pins",
    "num_pins": "Pins",
    "device_blocks": "Blocks lent to the device for beam steps, in addition to the sequences' own",
    "num_bases": "Bases that are published or being computed",
    "base_blocks": "Resident blocks of bases",
}

_TIER_TEXTS = {
    "capacity_blocks": ("Capacity of the tier, in blocks", True),
    "resident_blocks": ("Blocks in the tier", True),
    "open": ("1 if the tier serves all tenants, 0 also while it rests for some", True),
    "owed_purges": ("Tenants that were purged, and whose records the tier couldn't destroy yet", True),
    "budget_bytes": ("What the write budget of the tier has left", True),
    "hit_blocks": (
        "Blocks of the tier that requests used instead of computing them; what was read and not used isn't counted",
        False,
    ),
    "read_bytes": ("Bytes read from the tier, also of blocks that no request used", False),
    "written_bytes": ("Bytes written to the tier", False),
    "unchosen_blocks": ("Blocks that the tier's write budget left out", False),
    "lost_blocks": ("Blocks that left the tier above and found no room or no time here", False),
    "errors": ("Reads and writes of the tier that failed, and records that were refused", False),
}

_TENANT_COUNTS = tuple(each.name for each in fields(TenantStats) if each.name != "tenant")
_USELESS_TEXT = "1 if the tier brings nothing now, for this reason; 0 also while it is too early to say"
_REASON_TEXTS = {
    "missed": "Records that were found in the tier, and couldn't be loaded",
    "unstored": "Records that were to be stored in the tier, and weren't",
}
_DURATION_TEXTS = {
    "load": "Seconds that requests' loads from the tier took, also those that found nothing",
    "operation": "Seconds that operations of the tier's disk took: reads and writes of a record, and syncs",
}

_STEP_SECONDS = (
    0.001,
    0.002,
    0.005,
    0.01,
    0.02,
    0.03,
    0.04,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.5,
    1.0,
    2.5,
    10.0,
)
_CONTEXTS = {1_024: "1k", 4_096: "4k", 16_384: "16k", 65_536: "64k", 262_144: "256k"}
"""Labels of contexts, by the most tokens that they have."""
_CONTEXT_SIZES = tuple(_CONTEXTS)
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


Level = tuple[str, str, Callable[[], float]]
"""A gauge: its name, its text, and the function that reads it."""

MOST_NAMED: Final = 50
"""Tenants that have series of their own."""
OTHER: Final = "other"
"""The label of all other tenants together, and of a tenant with this very name."""


class TenantLabels:
    """The tenants' labels: the first MOST_NAMED that the process met have their names. Thread-safe.

    A tenant that is removed keeps its label, because its counters stay.
    """

    def __init__(self) -> None:
        self._named: set[str] = set()
        self._lock = Lock()

    def label(self, tenant: str) -> str:
        """Return the label of a tenant. O(1)."""
        if tenant in self._named:
            return tenant
        with self._lock:
            if tenant == OTHER or len(self._named) >= MOST_NAMED:
                return OTHER
            self._named.add(tenant)
            return tenant


class RequestMetrics:
    """The metrics of any HTTP process. ``levels`` are read when scraped."""

    def __init__(self, levels: Sequence[Level] = ()) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        GCCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        build = Gauge(
            "radixkv_build_info", "1; the labels say what runs", ("version", "build"), registry=self.registry
        )
        build.labels(version("radixkv"), "compiled" if _compiled.is_compiled else "pure").set(1)
        for name, text, read in levels:
            Gauge(f"radixkv_{name}", text, registry=self.registry).set_function(read)
        self._requests = Counter(
            "radixkv_http_requests", "Requests answered", ("method", "path", "status"), registry=self.registry
        )
        self._seconds = Histogram(
            "radixkv_http_seconds",
            "Seconds until the answer",
            ("path",),
            registry=self.registry,
            buckets=_SECONDS,
        )

    def show_rules(self, uses: Callable[[], Mapping[str, int]]) -> None:
        """Show the uses of rules for lines of prompts, by name, at each scrape."""
        self.registry.register(_RuleCollector(uses))

    def answered(self, method: str, path: str, status: int, seconds: float) -> None:
        """Count an answered request; ``path`` is the endpoint's, never the client's text."""
        self._requests.labels(method, path, str(status)).inc()
        self._seconds.labels(path).observe(seconds)

    def read_cache(self) -> None:
        """Read the counts of the cache that ``render`` tells. From any thread."""

    def render(self) -> bytes:
        """Return the registry in Prometheus' text format. O(series)."""
        return generate_latest(self.registry)


class BetweenTokens:
    """Observes the seconds between the tokens of one completion. 2 µs a token."""

    __slots__ = ("_contexts", "_num_tokens", "_tenant")

    def __init__(self, tenant: Histogram, contexts: Sequence[Histogram], num_tokens: int) -> None:
        self._tenant, self._contexts, self._num_tokens = tenant, contexts, num_tokens

    def observe(self, seconds: float) -> None:
        """Take the time since the token before, and the next token."""
        self._tenant.observe(seconds)
        self._num_tokens += 1
        self._contexts[bisect_left(_CONTEXT_SIZES, self._num_tokens)].observe(seconds)


class Metrics(RequestMetrics):
    """The metrics of one service process. ``tenants`` lists the tenants at each scrape.

    ``tier_watch``: judges tiers.
    """

    def __init__(
        self,
        engine: Engine,
        tenants: Callable[[], Sequence[str]],
        coordinator: Coordinator,
        levels: Sequence[Level] = (),
        tier_watch: TierWatch | None = None,
    ) -> None:
        super().__init__(levels)
        self._labels = TenantLabels()
        self._cache = _CacheCollector(engine.cache, tenants, self._labels)
        self.registry.register(self._cache)
        if isinstance(engine.cache, Tiered):
            self.registry.register(_TierCollector(engine.cache, tier_watch or TierWatch()))
        if isinstance(engine, Preempting):
            self.registry.register(_PreemptionCollector(engine, self._labels))
        self.registry.register(_FleetCollector(coordinator))
        self._first_token = Histogram(
            "radixkv_time_to_first_token_seconds",
            "Seconds from the request's arrival to its first token; cached: whether any of its prompt was found",
            ("tenant", "cached"),
            registry=self.registry,
            buckets=_SECONDS,
        )
        self._queued = Histogram(
            "radixkv_queue_seconds",
            "Seconds that completions waited for the model, from their arrival to their start",
            ("tenant",),
            registry=self.registry,
            buckets=_SECONDS,
        )
        self._inter_token = Histogram(
            "radixkv_inter_token_seconds",
            "Seconds between two tokens of a completion, but where the model waited for its reader",
            ("tenant",),
            registry=self.registry,
            buckets=_STEP_SECONDS,
        )
        by_context = Histogram(
            "radixkv_inter_token_by_context_seconds",
            "Seconds between two tokens, by the tokens before the new one: at most as many as the label says",
            ("context",),
            registry=self.registry,
            buckets=_STEP_SECONDS,
        )
        self._by_context = [by_context.labels(name) for name in (*_CONTEXTS.values(), "more")]
        self._tokens = Counter(
            "radixkv_completion_tokens", "Tokens of completions: cached, prefilled or generated", ("tenant", "kind"),
            registry=self.registry,
        )  # fmt: skip

    def read_cache(self) -> None:
        """Read the counts of the cache that ``render`` tells. From any thread."""
        self._cache.read()

    def between_tokens(self, tenant: str, num_tokens: int) -> BetweenTokens:
        """Return what observes the time between the tokens of one completion, whose prompt has ``num_tokens``."""
        return BetweenTokens(
            self._inter_token.labels(self._labels.label(tenant)), self._by_context, num_tokens
        )

    def completed(
        self,
        tenant: str,
        *,
        prompt: int,
        cached: int,
        generated: int,
        first_token_s: float | None,
        queued_s: float | None,
    ) -> None:
        """Count a completion that ended, whichever way.

        ``first_token_s``: None if there was no token. ``queued_s``: None if it ended by an error.
        """
        label = self._labels.label(tenant)
        if first_token_s is not None:
            self._first_token.labels(label, "yes" if cached else "no").observe(first_token_s)
        if queued_s is not None:
            self._queued.labels(label).observe(queued_s)
        for kind, count in (("cached", cached), ("prefilled", prompt - cached), ("generated", generated)):
            self._tokens.labels(label, kind).inc(max(count, 0))


class _RuleCollector(Collector):
    def __init__(self, uses: Callable[[], Mapping[str, int]]) -> None:
        self._uses = uses

    def collect(self) -> Iterable[Metric]:
        text = "Conversations that a rule for lines of prompts has changed"
        family = CounterMetricFamily("radixkv_prompt_rule_uses", text, labels=["rule"])
        for name, count in self._uses().items():
            family.add_metric([name], count)
        yield family


class _CacheCollector(Collector):
    def __init__(
        self, cache: EngineCache, tenants: Callable[[], Sequence[str]], labels: TenantLabels
    ) -> None:
        self._cache, self._tenants, self._labels = cache, tenants, labels
        self._levels: dict[str, int] = {}
        self._rows: dict[str, Mapping[str, int]] = {}
        self._missed: dict[str, tuple[int, int]] = {}
        self._others: dict[str, dict[str, int]] = {}
        self._gone = Counts[str]()  # what tenants of OTHER counted that are no more

    def read(self) -> None:
        """Read all counts. Without an answer of an engine in another process there are none."""
        tenants = self._tenants()
        try:
            levels = {**asdict(self._cache.stats()), "num_tenants": len(tenants)}
            rows = {each: _counts_of(self._cache.tenant_stats(each)) for each in tenants}
        except ControlError:
            self._levels, self._rows = {}, {}
            return
        for whose, counts in {"": levels, **rows}.items():
            self._hold_missed(whose, counts)
        self._levels, self._rows = levels, self._labelled(rows)

    def _labelled(self, rows: Mapping[str, dict[str, int]]) -> dict[str, Mapping[str, int]]:
        """Return the rows by label; those of OTHER are added up."""
        found: dict[str, Mapping[str, int]] = {}
        others: dict[str, dict[str, int]] = {}
        for tenant, counts in rows.items():
            label = self._labels.label(tenant)
            if label == OTHER:
                others[tenant] = counts
            else:
                found[label] = counts
        for tenant, counts in self._others.items():
            now = others.get(tenant, {})
            for name in _COUNTERS & counts.keys():
                if (
                    now.get(name, 0) < counts[name]
                ):  # it was removed, perhaps made again: a counter never falls
                    self._gone[name] += counts[name]
        self._others = others
        if others or self._gone:
            total = Counts(self._gone)
            for counts in others.values():
                total.update(counts)
            found[OTHER] = total
        return found

    def _hold_missed(self, whose: str, counts: dict[str, int]) -> None:
        """Keep the missed tokens where they were while a load makes hits of some: a counter never falls."""
        total = counts["hit_tokens"] + counts["missed_tokens"]
        shown, before = self._missed.get(whose, (0, 0))
        if total >= before:  # otherwise the tenant is a new one
            counts["missed_tokens"] = max(counts["missed_tokens"], shown)
        self._missed[whose] = counts["missed_tokens"], total

    def collect(self) -> Iterable[Metric]:
        for name, value in self._levels.items():
            yield _family(f"radixkv_cache_{name}", name, [], [([], value)])
        for name in _TENANT_COUNTS if self._rows else ():
            samples = [([label], row.get(name, 0)) for label, row in self._rows.items()]
            yield _family(f"radixkv_tenant_{name}", name, ["tenant"], samples)


class _TierCollector(Collector):
    def __init__(self, cache: Tiered, watch: TierWatch) -> None:
        self._cache, self._watch = cache, watch

    def collect(self) -> Iterable[Metric]:
        tiers = self._cache.tier_counts()
        for name, (text, is_level) in _TIER_TEXTS.items():
            kind = GaugeMetricFamily if is_level else CounterMetricFamily
            family = kind(f"radixkv_tier_{name}", text, labels=["tier"])
            for tier, counts in tiers.items():
                family.add_metric([tier], counts[name])
            yield family
        details = self._cache.tier_details()
        yield _durations("load", [([tier], each.loads) for tier, each in details.items()], ["tier"])
        operations = [
            ([tier, name], durations)
            for tier, each in details.items()
            for name, durations in each.operations.items()
        ]
        yield _durations("operation", operations, ["tier", "operation"])
        for name, text in _REASON_TEXTS.items():
            family = CounterMetricFamily(f"radixkv_tier_{name}_records", text, labels=["tier", "reason"])
            for tier, each in details.items():
                for reason, count in getattr(each, name).items():
                    family.add_metric([tier, reason], count)
            yield family
        family = GaugeMetricFamily("radixkv_tier_useless", _USELESS_TEXT, labels=["tier", "reason"])
        for tier, verdict in self._watch.verdicts(tiers, details).items():
            for reason in REASONS:
                family.add_metric([tier, reason], verdict.reason == reason)
        yield family


class _PreemptionCollector(Collector):
    def __init__(self, engine: Preempting, labels: TenantLabels) -> None:
        self._engine, self._labels = engine, labels

    def collect(self) -> Iterable[Metric]:
        text = (
            "Running requests that gave their blocks up, to be computed again later. Reasons: the limit of the "
            "tenant, the end of the pool, an answer that stayed unread"
        )
        family = CounterMetricFamily("radixkv_preemptions", text, labels=["tenant", "reason"])
        counts = Counts[tuple[str, str]]()
        for (tenant, reason), count in sorted(self._engine.preemptions().items()):
            counts[self._labels.label(tenant), reason] += count
        for labels, count in counts.items():
            family.add_metric(labels, count)
        yield family


class _FleetCollector(Collector):
    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator

    def collect(self) -> Iterable[Metric]:
        health = asdict(self._coordinator.health())
        yield GaugeMetricFamily(
            "radixkv_replica_ok",
            "1 if this replica is registered and its lease is valid",
            value=health.pop("state") == "ok",
        )
        del health["reason"]
        for name, value in health.items():
            yield GaugeMetricFamily(f"radixkv_replica_{name}", f"{name} of the coordinator", value=value)


def _counts_of(stats: TenantStats) -> dict[str, int]:
    """Return a tenant's counts by name, without the copies that ``asdict`` makes."""
    return {name: getattr(stats, name) for name in _TENANT_COUNTS}


def _durations(name: str, samples: Iterable[tuple[list[str], Durations]], labels: list[str]) -> Metric:
    family = HistogramMetricFamily(f"radixkv_tier_{name}_seconds", _DURATION_TEXTS[name], labels=labels)
    for label_values, durations in samples:
        buckets = [("+Inf" if bound == inf else str(bound), count) for bound, count in durations.buckets()]
        family.add_metric(label_values, buckets, durations.seconds)
    return family


def _family(full_name: str, name: str, labels: list[str], samples: list[tuple[list[str], int]]) -> Metric:
    kind = CounterMetricFamily if name in _COUNTERS else GaugeMetricFamily
    family = kind(full_name, _TEXTS[name], labels=labels)
    for label_values, value in samples:
        family.add_metric(label_values, value)
    return family
