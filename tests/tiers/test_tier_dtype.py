"""A cache whose tiers keep KV with 8 bits a value: what comes back, and with which errors."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from typing import Any

import pytest
import torch

from radixkv import CacheConfig, KVLayout, Namespace, PrefixCache, Tenant
from radixkv.audit.oracle import Engine, chain
from radixkv.errors import ArgumentError, ConfigError
from radixkv.storage.device import BlockStorage
from radixkv.tiers.tiered_cache import TieredCache
from radixkv_kernels import Pool
from tests.tiers.test_tiered_cache import NS, OTHER, PROMPT, SIZE, Owner, loading_of, sent_below

LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=1, dtype="float32")
WITHIN = 2.0**-14
"""More than the error of a vector of one value, and far less than between two prompts."""
LOSSY = ("fp8", "int8")


class LossyOwner(Owner):
    """An engine of one's own, with lossy host memory."""

    error = WITHIN

    def __init__(
        self, dtype: Any = "int8", num_blocks: int = 16, host_blocks: int = 64, **settings: Any
    ) -> None:
        config = CacheConfig(num_blocks, SIZE, LAYOUT, host_blocks=host_blocks, tier_dtype=dtype, **settings)
        self.cache = TieredCache(config)
        self.engine = Engine(self.cache)

    def is_exact(self, ids: list[int], namespace: Namespace) -> bool:
        """Whether what is resident of a prompt has the bits that were computed."""
        match = self.cache.match(namespace, ids)
        return self.engine.holds(match.block_ids, chain(namespace, ids[: match.num_tokens]))


@pytest.mark.parametrize("dtype", LOSSY)
def test_what_was_evicted_comes_back_with_small_errors(dtype: str) -> None:
    owner = LossyOwner(dtype)
    owner.ask(PROMPT)
    assert owner.is_exact(PROMPT, NS), "what was computed has its own bits"
    owner.evict()
    assert owner.ask(PROMPT) == (40, 1)
    assert not owner.is_exact(PROMPT, NS), "it was quantised"
    assert owner.ask(PROMPT, OTHER) == (0, 41)
    assert owner.is_exact(PROMPT, OTHER)
    counts = owner.cache.tier_counts()
    assert set(counts) == {"host"}
    assert (counts["host"]["hit_blocks"], counts["host"]["written_bytes"]) == (10, 20 * 64)
    owner.check()


@pytest.mark.parametrize("dtype", LOSSY)
def test_errors_do_not_grow_with_round_trips(dtype: str) -> None:
    """What came back is quantised again only if it isn't below any more, and then to the same bytes."""
    owner = LossyOwner(dtype)
    owner.evicted(PROMPT)
    tiers = owner.below
    owner.ask(PROMPT)
    first = owner.engine.read(owner.cache.match(NS, PROMPT).block_ids).copy()
    assert tiers.counts()["host"]["written_bytes"] == 640, "what is below isn't written again"
    for turn in range(3):
        tiers.host.cache.evict(64)
        owner.ask([*PROMPT, *[900 + turn] * 4])  # a whole block more, so all of them are kept again
        owner.evict()
        assert owner.ask(PROMPT) == (40, 1)
        assert (owner.engine.read(owner.cache.match(NS, PROMPT).block_ids) == first).all()
    assert tiers.counts()["host"]["written_bytes"] == 640 + 3 * 704
    owner.check()


@pytest.mark.parametrize("forget", ["purge", "clear", "remove"])
@pytest.mark.parametrize("namespace", [NS, OTHER])
def test_what_was_forgotten_does_not_come_back(forget: str, namespace: Namespace) -> None:
    owner = LossyOwner()
    owner.cache.add_tenant(Tenant("a"))
    owner.cache.add_tenant(Tenant("b"))
    other = OTHER if namespace is NS else NS
    for each in (NS, OTHER):
        owner.evicted(PROMPT, each)
    match forget:
        case "purge":
            owner.cache.purge(namespace.tenant)
        case "clear":
            owner.cache.clear(namespace)
        case _:
            owner.cache.remove_tenant(namespace.tenant)
    assert owner.below.namespaces(None) == [other]
    assert owner.ask(PROMPT, namespace) == (0, 41)
    owner.evict()
    assert owner.ask(PROMPT, other) == (40, 1), "another tenant's stays"
    owner.check()


def test_a_reader_of_a_base_gets_what_came_back_of_it() -> None:
    """All tenants of a cache accept these errors, so any of them may publish."""
    owner = LossyOwner(num_blocks=48)
    owner.evicted(PROMPT)
    with owner.cache.publish("base", NS, PROMPT, ["b"]) as sequence:
        assert loading_of(sequence).wait()
        owner.compute(sequence, 40)
    with owner.cache.open(OTHER, [*PROMPT, *range(700, 720)]) as sequence:
        assert sequence.num_cached_tokens == 40
        assert owner.engine.holds(sequence.block_table, chain(NS, PROMPT)[:40], WITHIN)
        sequence.commit(61)
    assert owner.below.namespaces(None) == [NS], "a reader of a base keeps nothing"
    owner.cache.unpublish("base")
    owner.check()


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), 3e38])
def test_what_cannot_be_quantised_is_not_kept(wrong: float) -> None:
    owner = LossyOwner(num_blocks=32)
    with owner.cache.open(NS, PROMPT) as sequence:
        owner.engine.write(sequence.block_table, 0, chain(NS, PROMPT))
        owner.cache.storage.data[int(sequence.block_table[3])].view(-1)[2] = wrong  # type: ignore[union-attr]
        sequence.commit(41)
    assert owner.below.namespaces(None) == []
    owner.evict()
    assert owner.ask(PROMPT) == (0, 41)
    assert owner.below.namespaces(None) == [NS], "later ones are"
    assert owner.cache.tier_counts()["host"]["errors"] == 20, (
        "they were tried at the commit and when they left"
    )
    owner.check(errors=20)


@pytest.mark.parametrize("dtype", LOSSY)
@pytest.mark.parametrize("elements", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("form", ["apart", "together", "hnd"])
def test_the_tensors_may_be_the_engines(form: str, elements: torch.dtype, dtype: Any) -> None:
    shape = {"apart": (16, SIZE, 3, 8), "together": (16, 2, SIZE, 3, 8), "hnd": (16, 3, SIZE, 8)}[form]
    layers = [torch.zeros(shape, dtype=elements) for _ in range(4)]
    views = [layer.transpose(1, 2) for layer in layers] if form == "hnd" else layers
    pool = Pool.together(layers, dim=1) if form == "together" else Pool(views[:2], views[2:])
    config = CacheConfig(16, SIZE, host_blocks=32, tier_dtype=dtype)
    cache = PrefixCache(config, storage=BlockStorage(pool))
    wanted, found = ([layer.float() for layer in each] for each in sent_below(cache, layers))
    error = max(float((one - other).abs().max()) for one, other in zip(found, wanted, strict=True))
    assert 0 < error < 0.5 / (16 if dtype == "fp8" else 127)


def test_a_strict_tenant_has_its_own_share() -> None:
    owner = LossyOwner(num_blocks=32)
    owner.cache.add_tenant(Tenant("a", guaranteed_blocks=12, max_blocks=12, mode="strict"))
    owner.evicted(PROMPT)
    for seed in range(20):
        owner.ask([seed, *PROMPT], OTHER)
    owner.evict()
    assert owner.ask(PROMPT) == (40, 1)
    assert owner.below.host.index.own_slots("a") == 24
    owner.check()


# --- what is refused


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        *(
            ({"tier_dtype": wrong, "host_blocks": 4}, "tier_dtype.*'exact', 'fp8' or 'int8'")
            for wrong in ("fp4", "", "EXACT", None, 8, b"int8")
        ),
        ({"tier_dtype": "int8"}, "tier_dtype='int8'.*'exact' without host_blocks"),
        ({"tier_dtype": "fp8", "host_blocks": 4, "blocks": "engine"}, "engine"),
        ({"tier_dtype": "fp8", "host_blocks": 4}, "a layout or a storage"),
        ({"tier_dtype": "fp8", "host_blocks": 1, "layout": LAYOUT}, "host_blocks.*2 to 2,147,483,647 blocks"),
        (
            {"tier_dtype": "fp8", "host_blocks": 2**30, "layout": KVLayout(80, 8, 128)},
            "host_blocks.*the machine",
        ),
        *(
            (
                {"tier_dtype": "fp8", "host_blocks": 4, "layout": KVLayout(1, 1, 8, name)},
                f"'exact' with.*{name}",
            )
            for name in ("float64", "float8_e4m3fn")
        ),
        (
            {"lossy_host_blocks": 4},
            "lossy_host_blocks=4 is not allowed; allowed: host_blocks, with a tier_dtype",
        ),
    ],
)
def test_settings_that_are_refused(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        PrefixCache(CacheConfig(4, SIZE, **settings))


def test_a_tenant_has_no_dtype_of_its_own() -> None:
    """The error says what is there in its place. So does that of disks for each dtype."""
    with pytest.raises(ArgumentError, match=r"tier_dtype='int8' is not allowed; .*CacheConfig\.tier_dtype"):
        Tenant("a", tier_dtype="int8")  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match=r"lossy_disks=.*allowed: disk, with CacheConfig\.tier_dtype"):
        TieredCache(CacheConfig(4, SIZE), lossy_disks={})
    assert replace(Tenant("a"), weight=2.0) == Tenant("a", 2.0) and copy(Tenant("a")) == Tenant("a")


def test_a_storage_of_other_elements_is_refused() -> None:
    storage = BlockStorage(Pool([torch.zeros(4, SIZE, 1, 8, dtype=torch.float64)]))
    with pytest.raises(ConfigError, match="float64"):
        PrefixCache(CacheConfig(4, SIZE, host_blocks=8, tier_dtype="int8"), storage=storage)
