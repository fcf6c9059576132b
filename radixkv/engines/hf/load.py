"""Loads a transformers model, and makes its engine: the engine ``hf`` of ``radixkv serve``."""

from __future__ import annotations

import torch

from radixkv.config import CacheConfig
from radixkv.engines.hf.engine import HFEngine
from radixkv.engines.hf.models import Model, demo_model, fingerprint, load_model
from radixkv.engines.hf.paged_cache import layout_of
from radixkv.engines.kv_memory import num_blocks_of
from radixkv.engines.protocol import EngineSettings
from radixkv.errors import ConfigError
from radixkv.index.cache import PrefixCache
from radixkv.index.changes import Journal
from radixkv.tiers.tiered_cache import TieredCache


def load_engine(settings: EngineSettings) -> LoadedModel:
    """Load the model of a folder, or the demo model. Raises ConfigError."""
    if settings.threads:
        torch.set_num_threads(settings.threads)
    return LoadedModel(_model(settings), settings)


class LoadedModel:
    """A loaded model, before its cache is made."""

    def __init__(self, model: Model, settings: EngineSettings) -> None:
        self._model, self._settings = model, settings
        self.fingerprint = fingerprint(model, settings.tokenizer_digest, settings.block_size)

    def start(self, journal: Journal | None) -> HFEngine:
        """Make the cache on the model's device, and the engine."""
        settings, layout = self._settings, layout_of(self._model)
        num_blocks = settings.num_blocks
        if settings.kv_memory is not None:
            num_blocks = num_blocks_of(settings.kv_memory, layout, settings.block_size, settings.device)
        config = CacheConfig(
            num_blocks=num_blocks,
            block_size=settings.block_size,
            layout=layout,
            device=settings.device,
            policy=settings.policy,
            scrub=settings.scrub,
            default_tenant=settings.default_tenant,
        )
        kind = PrefixCache if settings.tiers is None else TieredCache
        cache = kind(config, journal=journal)
        return HFEngine(
            self._model,
            cache,
            tokenizer_digest=settings.tokenizer_digest,
            tiers=settings.tiers,
            vocabulary=settings.vocabulary,
        )


def _model(settings: EngineSettings) -> Model:
    _check_device(settings.device)
    if settings.model is not None:
        return load_model(str(settings.model), settings.device, settings.dtype)
    model = demo_model(vocab_size=settings.vocab_size)
    torch.nn.Module.to(model, torch.device(settings.device))
    return model


def _check_device(device: str) -> None:
    kind = torch.device(device).type
    if kind != "cpu" and not getattr(torch, kind).is_available():
        raise ConfigError(
            "--device", device, f"a device that torch finds on this machine; it finds no {kind}"
        )
