"""From settings to a service: tokenizer, model, fingerprint, coordinator, cache, engine, in this order.

The fingerprint covers model, tokenizer and block size; the coordinator needs it, and the cache reports to the
coordinator's journal, so the engine comes last. Nothing here listens, registers or sends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from radixkv.config import CacheConfig
from radixkv.coordination import connect
from radixkv.errors import ConfigError
from radixkv.service.auth import Keyring
from radixkv.service.core import Limits, Service
from radixkv.service.fleet import Fleet
from radixkv.service.settings import ServeSettings
from radixkv.tokenizer import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DEMO_MODEL = "radixkv-demo"


def build_service(settings: ServeSettings, address: str | None, limits: Limits | None = None) -> Service:
    """Load everything that ``settings`` name. Seconds, and the model's memory. Raises ConfigError.

    ``address`` is the base URL at which other replicas reach this one.
    """
    keyring = Keyring.demo() if settings.keys is None else Keyring.load(settings.keys)

    import torch

    from radixkv.cache import PrefixCache
    from radixkv.engines.hf import HFEngine, fingerprint, layout_of

    if settings.threads:
        torch.set_num_threads(settings.threads)
    tokenizer = load_tokenizer(None if settings.model is None else str(settings.model))
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
    )
    cache = PrefixCache(config, journal=coordinator.journal)
    coordinator.attach(cache)
    engine = HFEngine(model, cache, tokenizer_digest=tokenizer.digest)
    fleet = Fleet(coordinator, settings.fleet_secret)
    return Service(engine, tokenizer, keyring, fleet, model_name=model_name(settings), limits=limits)


def model_name(settings: ServeSettings) -> str:
    """What the model is called in requests and replies."""
    return DEMO_MODEL if settings.model is None else settings.model.resolve().name


def _model(settings: ServeSettings, tokenizer: Tokenizer) -> PreTrainedModel:
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
        raise ConfigError("--device", device, f"a device that torch finds here; it finds no {kind}")
