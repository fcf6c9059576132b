"""Logits of a model over KV in a cache's blocks, by transformers' own cache: to compare what KV from tiers say."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import DynamicCache

from radixkv.engines.hf.models import Model
from radixkv.engines.hf.paged_cache import CACHE_ARGUMENT
from radixkv.storage.device import DeviceStorage
from radixkv.storage.plan import BlockIds


@torch.no_grad()
def logits_behind(
    model: Model, storage: DeviceStorage, block_ids: BlockIds, ids: Sequence[int]
) -> torch.Tensor:
    """Return the logits of ``ids``, which follow the tokens of these whole blocks: ``[len(ids), vocabulary]``, float64.

    They are on the CPU. The blocks must not change meanwhile: lease them. Costs a copy of them, and one forward pass.
    """
    blocks, past = storage.data[block_ids.tolist()], DynamicCache()
    for layer in range(storage.layout.num_layers):
        keys, values = (
            blocks[:, layer, side].flatten(0, 1).transpose(0, 1).unsqueeze(0).contiguous() for side in (0, 1)
        )
        past.update(keys, values, layer)
    input_ids = torch.tensor([list(ids)], dtype=torch.long, device=model.device)
    out = model(input_ids=input_ids, use_cache=True, **{CACHE_ARGUMENT: past})
    found: torch.Tensor = out.logits[0].double().cpu()
    return found
