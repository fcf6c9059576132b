"""Tenants whose KV below the cache have 8 bits a value: what comes back, for whom, and what never mixes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from radixkv import CacheConfig, KVLayout, Namespace, PrefixCache, Sequence, Tenant, audit
from radixkv.audit.oracle import Engine, chain
from radixkv.errors import ArgumentError, ConfigError
from radixkv.storage.device import BlockStorage
from radixkv.tiers.lower_tiers import LowerTiers
from radixkv.tiers.tiered_cache import TieredCache
from radixkv.tiers.tiers_by_dtype import TiersByDtype
from radixkv_kernels import Pool
from tests.tiers.test_cache_tiers import NS, OTHER, PROMPT, SIZE, Owner, loading_of, sent_below
from tests.waiting import ended

LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=1, dtype="float32")
WITHIN = 2.0**-14
"""More than the error of a vector of one value, and far less than between two prompts."""
LOSSY = ("fp8", "int8")


class LossyOwner(Owner):
    """An engine of one's own. Tenant a is lossy, tenant b exact, and nobody sees the other's."""

    def __init__(
        self, dtype: Any = "int8", num_blocks: int = 16, host_blocks: int = 64, **settings: Any
    ) -> None:
        config = CacheConfig(
            num_blocks, SIZE, LAYOUT, host_blocks=host_blocks, lossy_host_blocks=64, **settings
        )
        self.cache = TieredCache(config)
        self.engine = Engine(self.cache)
        self.cache.add_tenant(Tenant("a", tier_dtype=dtype))

    @property
    def tiers(self) -> TiersByDtype:
        assert isinstance(self.cache.lower, TiersByDtype)
        return self.cache.lower

    def is_right(self, sequence: Sequence) -> bool:
        stop = sequence.num_committed_tokens
        states = chain(sequence.namespace, sequence.token_ids.tolist()[:stop])
        dtype = self.tiers.dtype_of(sequence.namespace.tenant)
        return self.engine.holds(sequence.block_table, states, 0.0 if dtype == "exact" else WITHIN)

    def is_exact(self, ids: list[int], namespace: Namespace) -> bool:
        """Whether what is resident of a prompt has the bits that were computed."""
        match = self.cache.match(namespace, ids)
        return self.engine.holds(match.block_ids, chain(namespace, ids[: match.num_tokens]))

    def kept(self, namespace: Namespace) -> list[str]:
        """The dtypes under which there is something of a namespace below."""
        return [dtype for dtype, each in self.tiers.tiers.items() if namespace in each.namespaces(None)]

    def check(self, errors: int = 0) -> None:
        for each in (self.cache, *(tiers.level.cache for tiers in self.tiers.tiers.values())):
            stats = each.stats()
            assert stats.num_sequences == 0
            assert stats.evictable_blocks == stats.resident_blocks
            assert audit.check(each).ok
        assert sum(counts["errors"] for counts in self.cache.tier_counts().values()) == errors


@pytest.mark.parametrize("dtype", LOSSY)
def test_what_was_evicted_comes_back_with_small_errors(dtype: str) -> None:
    owner = LossyOwner(dtype)
    owner.evicted(PROMPT)
    owner.evicted(PROMPT, OTHER)
    assert (owner.kept(NS), owner.kept(OTHER)) == ([dtype], ["exact"])
    assert owner.ask(PROMPT) == (40, 1)
    assert not owner.is_exact(PROMPT, NS), "it was quantised"
    owner.evict()
    assert owner.ask(PROMPT, OTHER) == (40, 1)
    assert owner.is_exact(PROMPT, OTHER), "beside a lossy tenant, an exact one has its own bits"
    counts = owner.cache.tier_counts()
    assert counts["host"]["hit_blocks"] == counts[f"host_{dtype}"]["hit_blocks"] == 10
    assert counts[f"host_{dtype}"]["written_bytes"] == 10 * 64
    assert set(counts) == {"host", "host_fp8", "host_int8"}
    owner.check()


@pytest.mark.parametrize("dtype", LOSSY)
def test_errors_do_not_grow_with_round_trips(dtype: str) -> None:
    """What came back is quantised again only if it isn't below any more, and then to the same bytes."""
    owner = LossyOwner(dtype)
    owner.evicted(PROMPT)
    tiers = owner.tiers.tiers[dtype]  # type: ignore[index]
    owner.ask(PROMPT)
    first = owner.engine.read(owner.cache.match(NS, PROMPT).block_ids).copy()
    assert tiers.counts()["host"]["written_bytes"] == 640, "what is below isn't written again"
    for turn in range(3):
        tiers.level.cache.evict(64)
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
    assert owner.kept(namespace) == []
    assert owner.ask(PROMPT, namespace) == (0, 41)
    owner.evict()
    assert owner.ask(PROMPT, other) == (40, 1), "another tenant's stays"
    owner.check()


@pytest.mark.parametrize(
    ("before", "after"), [("int8", "exact"), ("exact", "int8"), ("int8", "fp8"), ("fp8", "exact")]
)
def test_a_change_forgets_all_that_the_tenant_has(before: Any, after: Any) -> None:
    """Also what is resident: it may have come back with errors, and would be kept as exact."""
    owner = LossyOwner(before, 32)
    salted = Namespace("a", "m", salt="x")
    for namespace in (NS, salted, OTHER):
        owner.evicted(PROMPT, namespace)
        owner.ask(PROMPT, namespace)
    owner.cache.add_tenant(Tenant("a", tier_dtype=after))
    assert owner.cache.namespaces() == [OTHER]
    for namespace in (NS, salted):
        assert owner.ask(PROMPT, namespace) == (0, 41)
        assert owner.is_exact(PROMPT, namespace), "it was computed"
        owner.evict()
        assert owner.ask(PROMPT, namespace) == (40, 1)
        assert owner.is_exact(PROMPT, namespace) == (after == "exact")
        assert owner.kept(namespace) == [after]
    owner.ask(PROMPT)
    owner.cache.add_tenant(Tenant("a", tier_dtype=after, weight=2.0))
    assert owner.cache.match(NS, PROMPT).num_tokens == 40, "the same dtype: nothing is forgotten"
    owner.cache.add_tenant(Tenant("a", tier_dtype=before))
    assert owner.ask(PROMPT) == (0, 41), "and what was kept before isn't there again"
    owner.check()


def test_a_running_request_keeps_nothing_after_a_change() -> None:
    """It read KV with errors. What it commits later is in no tier, and matches nothing."""
    owner = LossyOwner("int8", 32)
    owner.evicted(PROMPT)
    with owner.cache.open(NS, [*PROMPT, *range(500, 520)]) as sequence:
        assert loading_of(sequence).wait() and sequence.num_committed_tokens == 40
        owner.cache.add_tenant(Tenant("a"))
        sequence.commit(61)
        assert sequence.loading is None or sequence.loading.is_done
    assert owner.kept(NS) == [] and owner.cache.match(NS, PROMPT).num_tokens == 0
    assert owner.ask(PROMPT) == (0, 41)
    owner.check()


def test_a_load_that_has_begun_ends_with_a_change() -> None:
    owner = LossyOwner("int8", 32)
    owner.evicted(PROMPT)
    with owner.cache.open(NS, PROMPT) as sequence:
        loading = loading_of(sequence)
        owner.cache.add_tenant(Tenant("a"))
        assert loading.poll() and (loading.num_loaded_tokens, sequence.num_committed_tokens) == (0, 0)
    owner.check()


def test_tenants_that_nobody_added_have_the_dtype_of_the_default() -> None:
    owner = LossyOwner("exact", default_tenant=Tenant("default", tier_dtype="fp8"))
    owner.evicted(PROMPT, OTHER)
    assert owner.kept(OTHER) == ["fp8"]
    owner.evicted(PROMPT, NS)
    assert owner.kept(NS) == ["exact"]
    owner.cache.remove_tenant("a")
    assert owner.ask(PROMPT, NS) == (0, 41)
    assert owner.kept(NS) == ["fp8"], "like a tenant that was never added"
    owner.cache.add_tenant(Tenant("b"))
    assert owner.ask(PROMPT, OTHER) == (0, 41) and owner.kept(OTHER) == ["exact"]
    owner.check()


def test_bases_are_never_lossy() -> None:
    """A base is read by other tenants, which may be exact."""
    owner = LossyOwner(num_blocks=48)
    with pytest.raises(ArgumentError, match="tier_dtype 'exact'"):
        owner.cache.publish("base", NS, PROMPT, ["b"])
    long = list(range(4_000))
    with pytest.raises(ArgumentError, match="tier_dtype 'exact'"):
        owner.cache.publish("base", NS, long, ["b"])
    with owner.cache.publish("base", OTHER, PROMPT, ["a"]) as sequence:
        owner.compute(sequence, 40)
    with owner.cache.open(NS, [*PROMPT, *range(700, 720)]) as sequence:
        assert sequence.num_cached_tokens == 40
        sequence.commit(61)
    assert owner.kept(NS) == [], "a reader of a base keeps nothing"
    owner.cache.add_tenant(Tenant("b", tier_dtype="fp8"))
    assert owner.cache.match(NS, PROMPT).num_tokens == 0, "its bases are withdrawn"
    owner.check()


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), 3e38])
def test_what_cannot_be_quantised_is_not_kept(wrong: float) -> None:
    owner = LossyOwner(num_blocks=32)
    with owner.cache.open(NS, PROMPT) as sequence:
        owner.engine.write(sequence.block_table, 0, chain(NS, PROMPT))
        owner.cache.storage.data[int(sequence.block_table[3])].view(-1)[2] = wrong  # type: ignore[union-attr]
        sequence.commit(41)
    assert owner.kept(NS) == []
    owner.evict()
    assert owner.ask(PROMPT) == (0, 41)
    assert owner.kept(NS) == ["int8"], "later ones are"
    assert owner.cache.tier_counts()["host_int8"]["errors"] == 20, (
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
    config = CacheConfig(16, SIZE, lossy_host_blocks=32, default_tenant=Tenant("default", tier_dtype=dtype))
    cache = PrefixCache(config, storage=BlockStorage(pool))
    wanted, found = ([layer.float() for layer in each] for each in sent_below(cache, layers))
    error = max(float((one - other).abs().max()) for one, other in zip(found, wanted, strict=True))
    assert 0 < error < 0.5 / (16 if dtype == "fp8" else 127)


def test_a_strict_lossy_tenant_has_its_own_share() -> None:
    owner = LossyOwner("exact", 32)
    owner.cache.add_tenant(Tenant("a", guaranteed_blocks=12, max_blocks=12, mode="strict", tier_dtype="int8"))
    owner.cache.add_tenant(Tenant("b", tier_dtype="int8"))
    owner.evicted(PROMPT)
    for seed in range(20):
        owner.ask([seed, *PROMPT], OTHER)
    owner.evict()
    assert owner.ask(PROMPT) == (40, 1)
    index = owner.tiers.tiers["int8"].level.index
    assert index.own_slots("a") == 24
    owner.cache.add_tenant(Tenant("a", tier_dtype="fp8"))
    left = owner.tiers.tiers["int8"].level.cache.tenant("a")
    assert left is None or left.guaranteed_blocks == 0, "its share is free again"
    assert index.own_slots("a") == 0
    owner.check()


def test_only_lossy_tenants_may_have_tiers() -> None:
    owner = LossyOwner(host_blocks=0)
    owner.evicted(PROMPT)
    owner.evicted(PROMPT, OTHER)
    assert owner.ask(PROMPT) == (40, 1)
    owner.evict()
    assert owner.ask(PROMPT, OTHER) == (0, 41), "an exact tenant never takes lossy memory"


def test_changes_while_requests_run() -> None:
    """One thread changes the dtype again and again. What an exact tenant reads always has its own bits."""
    owner, stop, wrong = LossyOwner("exact", 64), threading.Event(), list[str]()

    def change() -> None:
        while not stop.is_set():
            for dtype in ("int8", "exact", "fp8", "exact"):
                owner.cache.add_tenant(Tenant("a", tier_dtype=dtype))  # type: ignore[arg-type]

    thread = threading.Thread(target=change)
    thread.start()
    try:
        for turn in range(300):
            ids = [turn % 5, *PROMPT]
            with owner.cache.open(NS, ids) as sequence:
                if sequence.loading is not None:
                    sequence.loading.wait()
                if not owner.engine.holds(
                    sequence.block_table, chain(NS, ids[: sequence.num_committed_tokens]), WITHIN
                ):
                    wrong.append("a request has other KV than its own")
                owner.compute(sequence, len(ids))
            if turn % 3 == 0:
                owner.cache.evict(64)
    finally:
        stop.set()
        ended(thread)
    assert not wrong
    owner.cache.add_tenant(Tenant("a"))
    for seed in range(5):
        owner.ask([seed, *PROMPT])
        owner.evict()
        owner.ask([seed, *PROMPT])
        assert owner.is_exact([seed, *PROMPT], NS)
    owner.check()


def test_two_callers_who_set_a_dtype_agree_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiers take the settings that the cache has then, not those of the caller who comes last."""
    owner, original, seen = LossyOwner("exact"), TiersByDtype.follow, list[str]()

    def follow(self: TiersByDtype, settings: Any) -> None:
        if not seen:
            seen.append("first")
            owner.cache.add_tenant(Tenant("a", tier_dtype="fp8"))  # by another caller, just before
        original(self, settings)

    monkeypatch.setattr(TiersByDtype, "follow", follow)
    owner.cache.add_tenant(Tenant("a", tier_dtype="int8"))
    settings = owner.cache.tenant("a")
    assert settings is not None and settings.tier_dtype == owner.tiers.dtype_of("a") == "fp8"


# --- what is refused


@pytest.mark.parametrize("dtype", ["fp4", "", "EXACT", None, 8, b"int8"])
def test_other_dtypes_are_refused(dtype: Any) -> None:
    with pytest.raises(ArgumentError, match="'exact', 'fp8' or 'int8'"):
        Tenant("a", tier_dtype=dtype)


def test_a_lossy_tenant_without_memory_for_it_is_refused() -> None:
    owner = Owner()
    owner.evicted(PROMPT)
    with pytest.raises(ArgumentError, match=r"tier_dtype.*fp8.*lossy_host_blocks"):
        owner.cache.add_tenant(Tenant("a", weight=3.0, tier_dtype="fp8"))
    settings = owner.cache.tenant("a")
    assert settings is not None and (settings.weight, settings.tier_dtype) == (1.0, "exact")
    assert owner.ask(PROMPT) == (40, 1), "nothing has changed"
    with pytest.raises(ConfigError, match=r"default_tenant.tier_dtype.*lossy_host_blocks"):
        CacheConfig(16, host_blocks=4, default_tenant=Tenant("x", tier_dtype="int8"))


def test_without_tiers_a_dtype_changes_nothing() -> None:
    cache = PrefixCache(CacheConfig(16, SIZE))
    with cache.open(NS, PROMPT) as sequence:
        sequence.commit(41)
    cache.add_tenant(Tenant("a", tier_dtype="int8"))
    assert cache.match(NS, PROMPT).num_tokens == 40


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"lossy_host_blocks": -1}, "lossy_host_blocks"),
        ({"lossy_host_blocks": True}, "lossy_host_blocks"),
        ({"lossy_host_blocks": 4, "blocks": "engine"}, "engine"),
        ({"lossy_host_blocks": 4}, "a layout or a storage"),
        ({"lossy_host_blocks": 1, "layout": LAYOUT}, "lossy_host_blocks.*2 to 2,147,483,647 blocks"),
        ({"lossy_host_blocks": 2**30, "layout": KVLayout(80, 8, 128)}, "lossy_host_blocks.*the machine"),
        ({"lossy_host_blocks": 4, "layout": KVLayout(1, 1, 8, "float64")}, "float64"),
        ({"lossy_host_blocks": 4, "layout": KVLayout(1, 1, 8, "float8_e4m3fn")}, "float8_e4m3fn"),
    ],
)
def test_settings_that_are_refused(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        PrefixCache(CacheConfig(4, SIZE, **settings))


def test_a_storage_of_other_elements_is_refused() -> None:
    storage = BlockStorage(Pool([torch.zeros(4, SIZE, 1, 8, dtype=torch.float64)]))
    with pytest.raises(ConfigError, match="float64"):
        PrefixCache(CacheConfig(4, SIZE, lossy_host_blocks=8), storage=storage)


# --- planted bugs


def lossy_served_to_an_exact_tenant(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TiersByDtype, "dtype_of", lambda self, tenant: "int8")


def a_change_that_leaves_what_is_resident(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("radixkv.index.load_target.clear", lambda cache, namespace: 0)


def a_purge_that_skips_lossy_tiers(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        TiersByDtype,
        "forgetting",
        lambda self, scope: self.tiers["exact"].forgetting(scope),
    )


def a_tenant_served_by_tiers_of_another_dtype(patch: pytest.MonkeyPatch) -> None:
    """The wrong tiers are asked, and don't look whose tenant it is."""
    patch.setattr(TiersByDtype, "_of", lambda self, tenant: self.tiers["fp8"])
    patch.setattr(TiersByDtype, "_is_of", lambda self, dtype, tenant: True)


@pytest.mark.parametrize(
    ("plant", "run"),
    [
        (
            lossy_served_to_an_exact_tenant,
            lambda: test_what_was_evicted_comes_back_with_small_errors("int8"),
        ),
        pytest.param(
            a_change_that_leaves_what_is_resident,
            lambda: test_a_change_forgets_all_that_the_tenant_has("fp8", "exact"),
            marks=pytest.mark.pure,
        ),
        (a_purge_that_skips_lossy_tiers, lambda: test_what_was_forgotten_does_not_come_back("purge", NS)),
        (a_tenant_served_by_tiers_of_another_dtype, test_only_lossy_tenants_may_have_tiers),
    ],
    ids=lambda plant: plant.__name__,
)
def test_planted_bugs_are_found(
    plant: Callable[[pytest.MonkeyPatch], None], run: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    run()
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        run()


def test_the_wrong_tiers_alone_keep_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second line: tiers that are asked for a tenant of another dtype do nothing."""
    monkeypatch.setattr(TiersByDtype, "_of", lambda self, tenant: self.tiers["fp8"])
    owner = LossyOwner("int8")
    owner.evicted(PROMPT, OTHER)
    owner.evicted(PROMPT, NS)
    assert owner.kept(NS) == owner.kept(OTHER) == []
    assert isinstance(owner.tiers.tiers["fp8"], LowerTiers)
