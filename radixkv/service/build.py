"""From settings to a service: tokenizer, model, fingerprint, coordinator, cache, engine, in this order.

The fingerprint covers model, tokenizer and block size. The coordinator needs it, and the cache reports to the
coordinator's journal, so the engine comes last. Nothing here listens, registers or sends.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from radixkv.config import CacheConfig, Tenant, load_registered
from radixkv.coordination import connect
from radixkv.errors import ArgumentError, ConfigError
from radixkv.service.auth import OPERATOR_ACCOUNT
from radixkv.service.core import Service
from radixkv.service.fleet.peers import Fleet
from radixkv.service.key_store import KeyStore
from radixkv.service.limits import Limits
from radixkv.service.options import ServeSettings
from radixkv.service.recording import Recorder
from radixkv.service.tenant_sync import TenantSync
from radixkv.tokenizer import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from radixkv.engines.hf_models import Model
    from radixkv.index.cache import PrefixCache

DEMO_MODEL = "radixkv-demo"


def build_service(settings: ServeSettings, address: str | None, limits: Limits | None = None) -> Service:
    """Load everything that ``settings`` name. Takes seconds, and the model's memory. Raises ConfigError.

    ``address`` is the base URL at which other replicas reach this one; ``limits`` replace those of ``settings``.
    """
    keys = KeyStore.open(settings.keys)

    import torch

    from radixkv.engines.hf import HFEngine, fingerprint, layout_of
    from radixkv.index.cache import PrefixCache

    if settings.threads:
        torch.set_num_threads(settings.threads)
    tokenizer_path = None if settings.model is None else str(settings.model)
    tokenizer = load_tokenizer(tokenizer_path)
    model = _model(settings, tokenizer)
    coordinator = connect(
        settings.redis,
        replica_id=settings.replica,
        fleet_secret=settings.fleet_secret,
        fingerprint=fingerprint(model, tokenizer.digest, settings.block_size),
        block_size=settings.block_size,
        address=address,
        lease_s=settings.lease_s,
    )
    config = CacheConfig(
        num_blocks=settings.num_blocks,
        block_size=settings.block_size,
        layout=layout_of(model),
        device=settings.device,
        policy=settings.policy,
        scrub=settings.scrub,
        default_tenant=None,
    )
    cache = PrefixCache(config, journal=coordinator.journal)
    cache.add_tenant(Tenant(OPERATOR_ACCOUNT))
    coordinator.attach(cache, partial(_purge, cache))
    load_registered()
    tenant_sync = TenantSync(cache, coordinator)
    keys.on_change = tenant_sync.take
    try:
        keys.on_change(keys.ring)
    except ArgumentError as error:
        raise ConfigError(
            "keys", str(settings.keys), f"guarantees and limits that fit into the cache: {error}"
        ) from None
    engine = HFEngine(model, cache, tokenizer_digest=tokenizer.digest)
    fleet = Fleet(coordinator, settings.fleet_secret, is_alone=settings.redis is None)
    recorder = None
    if settings.record is not None:
        recorder = Recorder(settings.record, settings.fleet_secret, settings.block_size, cache.generation)
    return Service(
        engine,
        tokenizer,
        keys,
        fleet,
        tenant_sync,
        model_name=model_name(settings),
        limits=limits or settings.limits,
        recorder=recorder,
        tokenizer_path=tokenizer_path,
    )


def model_name(settings: ServeSettings) -> str:
    """Return the model's name in requests and replies."""
    return DEMO_MODEL if settings.model is None else settings.model.resolve().name


def _model(settings: ServeSettings, tokenizer: Tokenizer) -> Model:
    import torch

    from radixkv.engines.hf import demo_model, load_model

    _check_device(settings.device)
    if settings.model is not None:
        return load_model(str(settings.model), settings.device, settings.dtype)
    model = demo_model(vocab_size=tokenizer.vocab_size)
    torch.nn.Module.to(model, torch.device(settings.device))
    return model


def _check_device(device: str) -> None:
    import torch

    kind = torch.device(device).type
    if kind != "cpu" and not getattr(torch, kind).is_available():
        raise ConfigError(
            "--device", device, f"a device that torch finds on this machine; it finds no {kind}"
        )


def _purge(cache: PrefixCache, tenant: str, generation: int) -> None:
    """Drop what this replica has of a tenant, because the fleet raised the tenant's generation."""
    cache.purge(tenant)
