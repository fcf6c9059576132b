"""Evicted KV come back from host memory to an engine of your own, which computes only the rest. Needs `storage`.

python examples/loading.py
"""

from __future__ import annotations

import torch

from radixkv import CacheConfig, KVLayout, Namespace, PrefixCache, Sequence, audit


def serve(cache: PrefixCache, tenant: str, prompt: list[int]) -> str:
    """Serve one prompt. The "KV" of a token is its id. Returns who brought how many tokens."""
    with cache.open(Namespace(tenant, "toy"), prompt) as sequence:
        loading, computed = sequence.loading, 0
        while sequence.num_committed_tokens < sequence.num_tokens:
            stop = sequence.num_tokens if loading is None else loading.claim(64)
            computed += stop - sequence.num_committed_tokens
            compute(cache, sequence, stop)
        loaded = 0 if loading is None else loading.num_loaded_tokens
        return f"{sequence.num_cached_tokens} cached, {loaded} loaded, {computed} computed"


def compute(cache: PrefixCache, sequence: Sequence, stop: int) -> None:
    """Compute the tokens from the committed ones up to ``stop``, in place of a model, and commit them."""
    assert cache.storage is not None
    positions, size = torch.arange(sequence.num_committed_tokens, stop), cache.config.block_size
    blocks = torch.from_numpy(sequence.block_table.copy()).long()[positions // size]
    ids = torch.from_numpy(sequence.token_ids.astype("float32"))[positions]
    cache.storage.data[blocks, :, :, positions % size] = ids[:, None, None, None, None]
    sequence.commit(stop)


def main() -> None:
    layout = KVLayout(num_layers=2, num_kv_heads=1, head_dim=4, dtype="float32")
    cache = PrefixCache(CacheConfig(num_blocks=64, layout=layout, host_blocks=256))
    prompts = [list(range(at, at + 500)) for at in (0, 1_000, 2_000)]
    for prompt in prompts:  # each evicts most of the one before
        print(f"first time: {serve(cache, 'acme', prompt)}")
    print(f"again: {serve(cache, 'acme', prompts[0])}")
    print(f"another tenant: {serve(cache, 'globex', prompts[0])}")
    print(f"audit: {'clean' if audit.check(cache).ok else 'broken'}")


if __name__ == "__main__":
    main()
