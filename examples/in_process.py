"""Use the cache in process, as an engine would: match, compute the missing tokens, commit, fork, evict.

    python examples/in_process.py

The example needs no model. The "KV" of a token is a number that the example writes into the block storage. So it can
show that forks share memory and never see each other's writes.
"""

from __future__ import annotations

import torch

from radixkv import CacheConfig, KVLayout, Namespace, PrefixCache, Sequence, audit


def compute(cache: PrefixCache, sequence: Sequence, value: float) -> None:
    """Replaces a prefill: write ``value`` as the KV of every token that isn't cached."""
    assert cache.storage is not None
    size = cache.config.block_size
    blocks = torch.from_numpy(sequence.block_table.copy()).long()
    positions = torch.arange(sequence.num_committed_tokens, sequence.num_tokens)
    cache.storage.data[blocks[positions // size], :, :, positions % size] = value
    sequence.commit(sequence.num_tokens)


def read(cache: PrefixCache, sequence: Sequence) -> list[float]:
    """The "KV" of the sequence's last three tokens."""
    assert cache.storage is not None
    size = cache.config.block_size
    blocks = torch.from_numpy(sequence.block_table.copy()).long()
    positions = torch.arange(sequence.num_tokens - 3, sequence.num_tokens)
    values: list[float] = cache.storage.data[blocks[positions // size], 0, 0, positions % size, 0, 0].tolist()
    return values


def main() -> None:
    layout = KVLayout(num_layers=2, num_kv_heads=1, head_dim=4, dtype="float32")
    cache = PrefixCache(CacheConfig(num_blocks=64, block_size=16, layout=layout, policy="lru"))
    acme = Namespace(tenant="acme", model="example-model")
    globex = Namespace(tenant="globex", model="example-model")
    prompt = list(range(1_000, 1_100))

    with cache.open(acme, prompt) as sequence:
        print(f"first request: {sequence.num_cached_tokens} of {sequence.num_tokens} tokens cached")
        compute(cache, sequence, 1.0)
    with cache.open(acme, prompt) as sequence:
        print(f"second request: {sequence.num_cached_tokens} of {sequence.num_tokens} tokens cached")
        compute(cache, sequence, 1.0)

        children = sequence.fork(3)
        print(f"forked into {len(children)}: {cache.stats().copied_blocks} blocks copied")
        cache.append(children, [7, 8, 9])
        print(f"each wrote a token of its own: {cache.stats().copied_blocks} blocks copied, in one launch")
        for number, child in enumerate(children):
            compute(cache, child, 2.0 + number)
        print(f"their last three tokens: {[read(cache, child) for child in children]}")
        for child in children:
            child.release()

    print(f"the same prompt of another tenant: {cache.match(globex, prompt).num_tokens} tokens matched")
    print(f"evicted {cache.evict(3)} blocks; now {cache.match(acme, prompt).num_tokens} tokens match")
    report = audit.check(cache)
    print(f"audit: {'clean' if report.ok else report}")


if __name__ == "__main__":
    main()
