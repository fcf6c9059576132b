"""Beam search as forks: four beams share their prompt's blocks and copy a block only where they part.

    python examples/beam_search.py

Runs the demo model (random weights: the text means nothing) on a prompt of 300 tokens, with transformers' own
cache and with radixkv's, and compares the tokens, the blocks held and the blocks copied.
"""

from __future__ import annotations

import torch

from radixkv import CacheConfig, PrefixCache, audit
from radixkv.engines.hf import HFEngine, demo_model, layout_of

NUM_BEAMS, PROMPT_TOKENS, NEW_TOKENS = 4, 300, 40


def main() -> None:
    torch.set_num_threads(1)
    model = demo_model()
    cache = PrefixCache(CacheConfig(num_blocks=1024, block_size=16, layout=layout_of(model)))
    assert cache.storage is not None
    engine = HFEngine(model, cache)
    namespace = engine.namespace("acme")
    prompt = torch.randint(3, 8000, (PROMPT_TOKENS,), generator=torch.Generator().manual_seed(0)).tolist()

    held = 0

    def watch() -> bool:
        """Called after every step; True would end the search."""
        nonlocal held
        stats = cache.stats()
        held = max(held, stats.num_blocks - stats.free_blocks)
        return False

    ours = engine.generate(namespace, prompt, NEW_TOKENS, num_beams=NUM_BEAMS, eos_token_id=-1, stop=watch)
    stock = model.generate(
        torch.tensor([prompt]),
        max_new_tokens=NEW_TOKENS,
        num_beams=NUM_BEAMS,
        do_sample=False,
        eos_token_id=None,
    )
    unshared = NUM_BEAMS * -(-(PROMPT_TOKENS + NEW_TOKENS - 1) // 16)
    print(f"{NUM_BEAMS} beams over {PROMPT_TOKENS} tokens, {NEW_TOKENS} new ones")
    print(f"same tokens as transformers' own cache: {ours.token_ids[0] == stock[0, PROMPT_TOKENS:].tolist()}")
    print(f"blocks held at most: {held}, without sharing: {unshared}")
    print(f"blocks copied: {cache.stats().copied_blocks}, in {cache.storage.num_launches} launches")

    again = engine.generate(namespace, prompt + ours.token_ids[0], 8, num_beams=NUM_BEAMS)
    print(f"the next turn finds {again.num_cached_tokens[0]} of {again.num_prompt_tokens[0]} tokens cached")
    print(f"audit: {'clean' if audit.check(cache).ok else 'broken'}")


if __name__ == "__main__":
    main()
