"""``radixkv route``: a router as a separate process, for any number of replicas. Needs no torch.

It follows the replicas over Redis, registers nothing, and serves ``/v1/route``, ``/v1/replicas``, ``/metrics`` and
health. The model's fingerprint comes from the replicas; if they serve several, a request names one. Tenants
and their keys are those of the replicas' keys file, the tokenizer is their model's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from radixkv.clock import Clock, monotonic
from radixkv.config import Namespace
from radixkv.coordination import ReplicaInfo, Router
from radixkv.coordination.routing.replica_sources import Member, Observer
from radixkv.service.app import make_app
from radixkv.service.auth import Keyring
from radixkv.service.draining import Drain
from radixkv.service.endpoints import routing
from radixkv.service.failures import Failures
from radixkv.service.intake import Intake
from radixkv.service.key_store import KeyStore, key_levels
from radixkv.service.limits import Gate, Limits
from radixkv.service.metrics import Level, RequestMetrics
from radixkv.service.options import RouteSettings
from radixkv.service.problems import invalid, no_replica
from radixkv.service.prompt_lines import DEFAULT_RULES, LineRule
from radixkv.service.prompts import Prompt, PromptRules
from radixkv.service.reload_counts import ReloadCounts, reload_levels
from radixkv.service.reloading import Reloader
from radixkv.service.schemas.base import RequestBody
from radixkv.service.schemas.replicas import RouteRequest
from radixkv.service.server import Listener, base_url, bind, catching, keep_latency_low
from radixkv.service.threads import Threads
from radixkv.service.turns import Turns
from radixkv.tokenizer import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    import socket

_RULES = PromptRules(vocab_size=2**32, max_tokens=2**21, block_size=1)


class RouterHost:
    """The host of a router's endpoints. ``close`` it when done."""

    def __init__(
        self,
        router: Router,
        keys: KeyStore,
        tokenizer: Tokenizer,
        *,
        limits: Limits | None = None,
        clock: Clock = monotonic,
        tokenizer_path: str | None = None,
        cors_origins: Sequence[str] = (),
        time_zone: str | None = None,
        lines: tuple[LineRule, ...] = DEFAULT_RULES,
    ) -> None:
        """``tokenizer_path``: the path from which ``load_tokenizer`` loads the same tokenizer."""
        source = router.source
        assert isinstance(source, Observer)
        self.router, self.source, self.keys, self.clock = router, source, keys, clock
        self.limits, self.reloads = limits or Limits(), ReloadCounts()
        self.cors_origins = tuple(cors_origins)
        self.gate, self.turns = Gate(self.limits.max_concurrent, clock), Turns(clock)
        self.failures, self.fleet = Failures(), None
        self.drain, self.rules = (
            Drain(),
            replace(_RULES, roles=tokenizer.roles, time_zone=time_zone, lines=lines),
        )
        self.intake, self.threads = Intake(tokenizer, self.rules, tokenizer_path), Threads()
        self.metrics = RequestMetrics(self._levels())
        self.metrics.show_rules(lambda: self.intake.rule_uses)

    @property
    def keyring(self) -> Keyring:
        """The keyring in force now."""
        return self.keys.ring

    def promised_dates(self, tenant: str, today: str) -> tuple[str, ...]:
        """Nothing is promised here, so prompts have the present date."""
        return ()

    def as_promised(self, tenant: str, body: RequestBody, prompt: Prompt) -> Prompt:
        """Return the prompt."""
        return prompt

    num_endings = 0
    """Nothing is cached here."""

    def owner(self, tenant: str | None, key_id: str, as_of: int) -> None:
        """Nothing here outlives the check of a key by long."""

    def set_limits(self, limits: Limits) -> None:
        """Replace the bounds on requests."""
        self.limits, self.gate.max_concurrent = limits, limits.max_concurrent

    def close(self) -> None:
        """Close the router."""
        self.keys.close()
        self.intake.close()
        self.router.close()

    def replicas(self) -> list[ReplicaInfo]:
        """Return all known replicas, by id."""
        known = [each.info for each in self.source.reader.known()]
        return sorted(known, key=lambda info: info.id)

    def routed_to(self, tenant: str, body: RouteRequest) -> Namespace:
        """Return the namespace of a prompt. Raises ApiError."""
        model = body.model or self._model()
        return Namespace(tenant, model, body.adapter, body.salt, self.router.newest_weights(model))

    def sickness(self) -> list[str]:
        """Return the reasons to replace this process."""
        failure = self.source.failure
        return [] if failure is None else [f"following: {failure!r}"]

    def warnings(self) -> list[str]:
        """Return what an operator should look at, although requests are routed."""
        return self.keys.warnings()

    def coordination(self) -> str:
        """Return ``ok``, or the problem with the store."""
        return "unavailable" if self.source.is_lost else "ok"

    def unreadiness(self) -> list[str]:
        """Return the reasons to send no requests here now; a lost store is no reason while replicas are known."""
        reasons = self.sickness()
        if self.drain.is_stopping:
            reasons.append("stopping")
        if not self.source.members():
            reasons.append("store: lost" if self.source.is_lost else "replicas: none is known")
        return reasons

    def _levels(self) -> list[Level]:
        return [
            *reload_levels(lambda: self.reloads),
            *key_levels(lambda: self.keys),
            ("router_store_lost", "1 while the store doesn't answer", lambda: self.source.is_lost),
            ("router_replicas", "Live replicas", lambda: len(self._living())),
            (
                "router_view_segments",
                "Different segments in the view",
                lambda: self.source.view.num_segments,
            ),
            ("router_view_bytes", "Memory of the view", lambda: self.source.view.num_bytes),
            (
                "router_view_forgotten",
                "Placements that the view had no space for",
                lambda: self.source.view.num_forgotten,
            ),
            ("router_view_gaps", "Gaps found in logs", lambda: self.source.view.num_gaps),
            (
                "router_predicted_bytes",
                "Memory of the index of predicted prefixes",
                lambda: self.router.predicted_bytes,
            ),
            (
                "router_tenant_bytes",
                "Memory of the generations of tenants",
                lambda: self.source.tenant_bytes,
            ),
        ]

    def _living(self) -> list[Member]:
        now = self.source.clock()
        return [each for each in self.source.members() if each.live_until > now]

    def _model(self) -> str:
        """Return the one model of the live replicas, or of the last known ones if none is live."""
        found = sorted({each.info.fingerprint for each in self._living() or self.source.members()})
        if not found:
            raise no_replica("no replica is known")
        if len(found) > 1:
            raise invalid("replicas serve several models", "model", None, f"one of {', '.join(found)}")
        return found[0]


def run(
    settings: RouteSettings,
    version: str,
    on_ready: Callable[[RouterHost, str], None],
    reloader: Reloader | None = None,
) -> None:
    """Route until a signal comes. ``on_ready`` gets the host and its base URL. Raises ConfigError."""
    with catching(reloader), bind(settings.host, settings.port) as listener:
        host = make_host(settings)
        try:
            host.intake.start()
            host.keys.follow()
            keep_latency_low()
            url = base_url(listener, settings.tls)
            app = make_app(host, routing.ENDPOINTS, version)
            server = Listener(app, host, lambda: on_ready(host, url), settings.tls, reloader)
            server.run(sockets=[_listening(listener)])
        finally:
            host.close()


def make_host(settings: RouteSettings) -> RouterHost:
    """Return a router that follows the replicas already. Raises ConfigError."""
    keys = KeyStore.open(settings.keys)
    tokenizer_path = None if settings.model is None else str(settings.model)
    tokenizer = load_tokenizer(tokenizer_path)
    assert settings.store_url is not None, "a router needs one"
    router = Router.connect(
        settings.store_url.get_secret_value(),
        fleet_secret=settings.fleet_secret.get_secret_value(),
        max_segments=settings.max_segments,
        cost=settings.cost,
        temperature=settings.temperature,
    )
    return RouterHost(
        router,
        keys,
        tokenizer,
        limits=settings.limits,
        tokenizer_path=tokenizer_path,
        cors_origins=settings.cors_origin,
        time_zone=settings.time_zone,
        lines=settings.prompt_rules,
    )


def _listening(listener: socket.socket) -> socket.socket:
    listener.listen(128)
    return listener
