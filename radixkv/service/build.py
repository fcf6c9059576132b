"""From settings to a service: tokenizer, model, fingerprint, coordinator, engine with its cache, in this order.

The fingerprint covers model, tokenizer and block size. The coordinator needs it, and the cache reports to the
coordinator's journal, so the engine comes last. Nothing here listens, registers or sends.
"""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from radixkv.config import Tenant, load_registered
from radixkv.coordination import Coordinator, connect
from radixkv.engines import EngineCache, EngineSettings, find_engine
from radixkv.engines.protocol import Tiered, purge
from radixkv.errors import ArgumentError, ConfigError, shown
from radixkv.index.below import Scope
from radixkv.metering.folder import UsageFolder
from radixkv.metering.meter import KEEP_S, Meter
from radixkv.metering.sums import UsageSums
from radixkv.metering.writer import UsageWriter
from radixkv.service.auth import OPERATOR_ACCOUNT
from radixkv.service.core import Service
from radixkv.service.fleet.peers import Fleet
from radixkv.service.journals import JournalPair
from radixkv.service.key_store import KeyStore
from radixkv.service.limits import Limits
from radixkv.service.options import ServeSettings
from radixkv.service.recording import Recorder
from radixkv.service.schemas.chat import DEFAULT_MAX_TOKENS
from radixkv.service.tenant_sync import TenantSync
from radixkv.service.vocabulary import vocabulary_of
from radixkv.signing import KeySet
from radixkv.tokenizer import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from radixkv.coordination.store.wire import Raised
    from radixkv.events.event_publisher import EventPublisher
    from radixkv.events.event_settings import EventSettings
    from radixkv.index.changes import Journal

DEMO_MODEL = "radixkv-demo"
DEMO_ANSWER_TOKENS = 64
"""Most tokens of the demo model's answers if a request doesn't say: it goes on and on, and clients would time out."""

log = logging.getLogger("radixkv.service")


def build_service(settings: ServeSettings, address: str | None, limits: Limits | None = None) -> Service:
    """Load everything that ``settings`` name. Takes seconds, and the model's memory. Raises ConfigError.

    ``address`` is the base URL at which other replicas reach this one; ``limits`` replace those of ``settings``.
    """
    keys = KeyStore.open(settings.keys)

    tokenizer_path = None if settings.model is None else str(settings.model)
    tokenizer = load_tokenizer(tokenizer_path)
    loaded = find_engine(settings.engine)(_engine_settings(settings, tokenizer))
    store, secret = settings.store_url, settings.fleet_secret.get_secret_value()
    coordinator = connect(
        None if store is None else store.get_secret_value(),
        replica_id=settings.replica,
        fleet_secret=secret,
        fingerprint=loaded.fingerprint,
        block_size=settings.block_size,
        address=address,
        lease_s=settings.lease_s,
    )
    published = settings.event_settings
    events = None if published is None else _events(published, secret)
    engine = loaded.start(_journal(events, coordinator.journal))
    _check_vocabulary(tokenizer, engine.limits.vocab_size, settings)
    cache = engine.cache
    cache.add_tenant(Tenant(OPERATOR_ACCOUNT))
    _attach(coordinator, cache)
    load_registered()
    tenant_sync = TenantSync(cache, coordinator, engine.limits.num_blocks)
    keys.on_change = tenant_sync.take
    for name, error in keys.apply().items():
        allowed = f"guarantees and limits that fit into the cache; those of the tenant {shown(name)}: {error}"
        raise ConfigError("keys", str(settings.keys), allowed)
    if isinstance(cache, Tiered):
        cache.forget_in_tiers(Scope(None, but=frozenset({*keys.ring.tenants, OPERATOR_ACCOUNT})))
        if cache.has_disk:
            _tell_of_strict_tenants(keys)
    fleet = Fleet(coordinator, secret, is_alone=settings.redis is None)
    recorder = None
    if settings.record is not None:
        recorder = Recorder(settings.record, secret, settings.block_size, cache.generation)
    name, meter = model_name(settings), None
    if settings.usage is not None:
        meter = _meter(settings.usage, settings.usage_file_bytes, name, keys, tenant_sync)
    return Service(
        engine,
        tokenizer,
        keys,
        fleet,
        tenant_sync,
        model_name=name,
        limits=limits or settings.limits,
        recorder=recorder,
        events=events,
        tokenizer_path=tokenizer_path,
        meter=meter,
        cors_origins=settings.cors_origin,
        time_zone=settings.time_zone,
        lines=settings.prompt_rules,
        answer_tokens=DEMO_ANSWER_TOKENS if settings.model is None else DEFAULT_MAX_TOKENS,
    )


def _tell_of_strict_tenants(keys: KeyStore) -> None:
    """Log once which tenants a disk keeps nothing of."""
    strict = [name for name, own in keys.ring.settings.items() if own.mode == "strict"]
    if strict:
        log.info(
            "strict tenants have no disk, their KV is kept in host memory alone: %s", shown(", ".join(strict))
        )


def _check_vocabulary(tokenizer: Tokenizer, num_ids: int, settings: ServeSettings) -> None:
    """Raise ConfigError if texts or chats get ids that the model lacks. Log what else users should know."""
    ids = list(tokenizer.encode("x"))
    with suppress(ArgumentError):
        ids += tokenizer.encode_chat([{"role": "user", "content": "x"}], ())
    largest = max([*ids, tokenizer.num_plain_ids - 1])
    if largest >= num_ids:
        known = f"a folder whose tokenizer has the model's ids, 0 to {num_ids - 1}"
        allowed = f"{known}; its texts or chats have ids up to {largest}"
        raise ConfigError("model", str(settings.model), allowed)
    if tokenizer.vocab_size > num_ids:
        log.warning("the tokenizer has ids up to %d, the model up to %d: prompts with others are refused",
                    tokenizer.vocab_size - 1, num_ids - 1)  # fmt: skip
    if tokenizer.forgeable is not None:
        log.warning("a message can look like several messages to this model: %s", tokenizer.forgeable)


def _meter(path: Path, file_bytes: int, model: str, keys: KeyStore, tenant_sync: TenantSync) -> Meter:
    """Open the folder of usage records, and take the sums of the last weeks from it. See ``UsageFolder.sums``."""
    kept = UsageSums(KEEP_S)
    try:
        folder = UsageFolder(path, writes=True)
        for each in folder.sums(time.time() - KEEP_S):
            kept.add(each)
    except ConfigError as error:
        raise ConfigError("--usage", error.value, error.allowed) from None
    except OSError as error:
        allowed = f"a folder that can be used ({error.strerror})"
        raise ConfigError("--usage", str(path), allowed) from None
    if folder.num_skipped:
        log.warning("%d lines in %s are no usage records and don't count, as a crash leaves the end of a file: %s",
                    folder.num_skipped, folder.path, "; ".join(folder.problems))  # fmt: skip
    writer = UsageWriter(folder, file_bytes)
    meter = Meter(model, kept, writer, tenant_sync.num_removals, lambda tenant: keys.ring.incarnation(tenant))
    meter.forget_absent(keys.ring.tenants)
    return meter


def model_name(settings: ServeSettings) -> str:
    """Return the model's name in requests and replies."""
    return DEMO_MODEL if settings.model is None else settings.model.resolve().name


def _engine_settings(settings: ServeSettings, tokenizer: Tokenizer) -> EngineSettings:
    return EngineSettings(
        model=settings.model,
        tokenizer_digest=tokenizer.digest,
        vocab_size=tokenizer.vocab_size,
        num_blocks=settings.num_blocks,
        kv_memory=settings.kv_memory,
        block_size=settings.block_size,
        policy=settings.policy,
        scrub=settings.scrub,
        device=settings.device,
        dtype=settings.dtype,
        threads=settings.threads,
        tiers=settings.tiers,
        vocabulary=vocabulary_of(tokenizer),
    )


def _events(settings: EventSettings, fleet_secret: bytes) -> EventPublisher:
    from radixkv.events.event_publisher import EventPublisher

    return EventPublisher(KeySet.derive([fleet_secret], ["events"]), settings)


def _journal(events: EventPublisher | None, coordinated: Journal | None) -> Journal | None:
    if events is None or coordinated is None:
        return coordinated if events is None else events.journal
    return JournalPair(events.journal, coordinated)


def _attach(coordinator: Coordinator, cache: EngineCache) -> None:
    """Let the coordinator purge the cache, and know what it still owes; let disks below follow the fleet's purges."""
    if not isinstance(cache, Tiered):
        coordinator.attach(cache, partial(_purge, cache))
        return
    coordinator.attach(
        cache,
        partial(_purge, cache),
        lambda: cache.pending().tenants,
        lambda: cache.pending().num_removed > 0,
    )
    cache.follow_generations(
        coordinator.purges.applied,
        lambda: coordinator.knows_generations,
        lambda: coordinator.store_id,
        coordinator,
    )


def _purge(cache: EngineCache, tenant: str, raised: Raised) -> None:
    """Drop what this replica has of a tenant, because the fleet raised the tenant's generation.

    It doesn't wait for the disk, because no beat is sent meanwhile. The coordinator asks what is owed. A disk that has
    paid this very purge before, perhaps in an earlier process, keeps what it has stored since.
    """
    purge(cache, tenant, raised.number)
