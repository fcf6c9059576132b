"""A tier of your own below host memory: here a dict, in practice a store on another machine. Needs `hf`.

python examples/further_tier.py

A tier gets blocks as bytes, in the order in which host memory saves them, and gives them back into memory. It says
nothing of tokens or of the model; a block is found under its namespace and all ids up to its end.
"""

from __future__ import annotations

from contextlib import closing

from radixkv import CacheConfig, Namespace
from radixkv.engines.hf import HFEngine, demo_model, layout_of
from radixkv.index.below import Scope
from radixkv.tiers.disk.io_threads import Job
from radixkv.tiers.pending import Pending
from radixkv.tiers.tier import Offer, Records
from radixkv.tiers.tiered_cache import TieredCache

BLOCK_BYTES = 4 * 16  # the ids of a block of 16 tokens, as uint32


class Shelf:
    """Keeps the newest ``capacity`` blocks in memory."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.read_bytes = capacity, 0
        self.kept: dict[tuple[Namespace, bytes], bytes] = {}

    def offer(self, offer: Offer, source: Records) -> None:
        """Keep copies; the oldest ones make way. A store on another machine would send them in a thread."""
        for block, content in source:
            self.kept[offer.namespace, offer.key[: (block + 1) * BLOCK_BYTES]] = bytes(content)
        while len(self.kept) > self.capacity:
            del self.kept[next(iter(self.kept))]

    def find(self, namespace: Namespace, key: bytes, first: int) -> int:
        """Return how many blocks in a row are here."""
        stop = first
        while (stop + 1) * BLOCK_BYTES <= len(key) and (
            namespace,
            key[: (stop + 1) * BLOCK_BYTES],
        ) in self.kept:
            stop += 1
        return stop - first

    def read(
        self,
        namespace: Namespace,
        key: bytes,
        block: int,
        into: memoryview,
        *,
        begun: list[Job] | None = None,
    ) -> Job | None:
        """Copy a block at once, so the job has ended. A slow store would return one that hasn't."""
        content = self.kept.get((namespace, key[: (block + 1) * BLOCK_BYTES]))
        if content is None:
            return None
        into[:] = content
        self.read_bytes += len(content)
        return Job.ended(True)

    def forget(self, scope: Scope) -> Pending:
        """Forget a namespace, a tenant, or everybody but some. Nothing is left to do afterwards."""
        for namespace, key in list(self.kept):
            is_kept = (
                namespace.tenant in scope.but if scope.tenant is None else namespace.tenant != scope.tenant
            )
            if not is_kept and scope.namespace in (None, namespace):
                del self.kept[namespace, key]
        return Pending()

    def wait(self, timeout_s: float) -> bool:
        """Nothing is under way here."""
        return True

    def counts(self) -> dict[str, float]:
        """Return what `/v1/stats` and the metrics show."""
        return {
            "capacity_blocks": self.capacity,
            "resident_blocks": len(self.kept),
            "read_bytes": self.read_bytes,
        }

    def close(self) -> None:
        """Let go of everything."""
        self.kept.clear()


def main() -> None:
    """Serve three prompts, which don't fit into the cache and host memory together; then the first one again."""
    model, shelf = demo_model(vocab_size=2_048), Shelf(1_000)
    config = CacheConfig(num_blocks=100, block_size=16, layout=layout_of(model), host_blocks=100)
    prompts = [[3 + (7 * at + 700 * number) % 2_000 for at in range(1_200)] for number in range(3)]
    with closing(TieredCache(config, tiers=[shelf])) as cache:
        engine = HFEngine(model, cache)
        for number, prompt in [*enumerate(prompts), (0, prompts[0])]:
            done = engine.generate(engine.namespace("acme"), prompt, 1)
            print(f"prompt {number}: {done.num_cached_tokens[0]:,} of {len(prompt):,} tokens cached")
        print(f"the shelf gave {cache.tier_counts()['Shelf']['hit_blocks']:.0f} blocks")
        cache.purge("acme")
        print(f"after a purge it has {len(shelf.kept)}")


if __name__ == "__main__":
    main()
