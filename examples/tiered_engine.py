"""Serve a prompt whose KV left the cache: from host memory, and after a restart from disk. Needs `hf` and `tiers`.

python examples/tiered_engine.py
"""

from __future__ import annotations

import tempfile
from contextlib import closing
from pathlib import Path

from radixkv import CacheConfig
from radixkv.engines.hf import HFEngine, demo_model, layout_of
from radixkv.tiers.settings import DiskOptions, TierSettings
from radixkv.tiers.tiered_cache import TieredCache

SECRET = b"the fleet's secret, from a file in practice"
PROMPT = [3 + 7 * at % 2_000 for at in range(1_529)]


def main() -> None:
    """Ask four times: cold, with the cache emptied, after a restart, and as another tenant."""
    model = demo_model(vocab_size=2_048)
    with tempfile.TemporaryDirectory() as folder:
        below = TierSettings(64 << 20, DiskOptions(Path(folder) / "kv", 256 << 20, SECRET))

        def start() -> HFEngine:
            cache = TieredCache(CacheConfig(num_blocks=128, block_size=16, layout=layout_of(model)))
            return HFEngine(model, cache, tiers=below)

        with closing(start()) as engine:
            ask(engine, "acme", "cold")
            engine.cache.evict(128)  # other prompts would do the same
            ask(engine, "acme", "from host memory")
        with closing(start()) as engine:
            ask(engine, "acme", "from disk, after a restart")
            ask(engine, "globex", "another tenant")


def ask(engine: HFEngine, tenant: str, what: str) -> None:
    """Compute the first token of the answer, and print how long that took."""
    done = engine.generate(engine.namespace(tenant), PROMPT, 1)
    cached, seconds = done.num_cached_tokens[0], done.time_to_first_token_s
    print(f"{what}: {cached:,} of {len(PROMPT):,} tokens cached, first token after {1e3 * seconds:.0f} ms")


if __name__ == "__main__":
    main()
