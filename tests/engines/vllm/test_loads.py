"""Loads of a KV connector into the blocks of vLLM's requests: what failed is never matched, and required salts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from radixkv import audit
from radixkv.engines.vllm.cache import VllmCache
from radixkv.index.fences import Fence
from radixkv.signing import KeySet
from radixkv.tenancy.request_keys import RequestFacts, facts_of
from radixkv.tenancy.salt import SaltReader, make_salt

SIZE = 4
PLAIN = RequestFacts()
IDS = list(range(20))
KEYS = KeySet.derive([b"a secret of the fleet"])


def make(num_blocks: int = 40, salts: SaltReader | None = None) -> VllmCache:
    return VllmCache(num_blocks, SIZE, 512, model="m", policy="lru", salts=salts)


def found(cache: VllmCache, name: str = "probe") -> int:
    """How many tokens another request would find."""
    num_found = cache.lookup(name, PLAIN, IDS)[1]
    cache.release(name)
    return num_found


def test_loaded_tokens_are_offered_and_matched_only_after_their_step() -> None:
    cache = make()
    step = cache.begin_step()
    blocks = cache.allocate("a", PLAIN, IDS, 12, 8, num_loaded=12)
    assert blocks is not None and len(blocks) == 5 and cache.blocks("a") == blocks
    assert found(cache) == 0, "others lean on a load that may fail"
    cache.end_step(step)
    assert found(cache) == 16 and cache.num_committed("a") == 20
    cache.release("a")
    assert cache.usage == 0 and audit.check(cache.cache).ok


def test_a_failed_load_is_never_matched_and_its_blocks_are_computed_in_place() -> None:
    cache = make()
    first = cache.begin_step()
    blocks = cache.allocate("a", PLAIN, IDS, 12, 4, num_loaded=12) or []
    second = cache.begin_step()  # scheduled before the failure is known
    more = cache.allocate("a", PLAIN, IDS, 16, 4) or []
    assert cache.lose({blocks[1]}) == []
    cache.end_step(first)
    again = cache.begin_step()
    assert found(cache) == 0
    assert cache.allocate("a", PLAIN, IDS, 4, 16) == [] and cache.blocks("a") == blocks + more
    cache.end_step(second)
    assert found(cache) == 0, "what was computed behind wrong KV is matched"
    cache.end_step(again)
    assert found(cache) == 16
    cache.release("a")
    assert cache.usage == 0 and audit.check(cache.cache).ok


def test_a_failure_that_comes_late_takes_back_what_was_committed() -> None:
    cache = make()
    step = cache.begin_step()
    blocks = cache.allocate("a", PLAIN, IDS, 12, 8, num_loaded=12) or []
    cache.end_step(step)
    step = cache.begin_step()
    assert cache.lookup("b", PLAIN, [*IDS, 1])[1] == 20
    assert cache.allocate("b", PLAIN, [*IDS, 1], 20, 1) is not None
    cache.end_step(step)
    assert sorted(cache.lose({blocks[2]})) == ["a", "b"]
    assert found(cache) == 8
    for name in "ab":
        cache.release(name)
    assert found(cache) == 8 and cache.usage == 0 and audit.check(cache.cache).ok


def test_a_late_failure_while_steps_run_forgets_the_whole_namespace() -> None:
    cache = make()
    step = cache.begin_step()
    blocks = cache.allocate("a", PLAIN, IDS[:12], 8, 4, num_loaded=8) or []
    cache.end_step(step)
    step = cache.begin_step()
    assert cache.allocate("a", PLAIN, IDS, 12, 8) is not None
    assert cache.lose({blocks[1]}) == ["a"] and found(cache) == 0
    cache.end_step(step)
    assert found(cache) == 0
    cache.release("a")
    assert cache.usage == 0 and audit.check(cache.cache).ok


@pytest.mark.parametrize(("num_valid", "num_found"), [(16, 16), (8, 8), (0, 0)])
def test_a_load_beside_the_steps_counts_as_far_as_it_came(num_valid: int, num_found: int) -> None:
    cache = make()
    cache.begin_step()
    blocks = cache.allocate("a", PLAIN, IDS, 16, 0, num_loaded=16, is_beside=True) or []
    assert len(blocks) == 4 and found(cache) == 0
    if num_valid:
        assert cache.lose(set(blocks[num_valid // SIZE :])) == []
        cache.commit("a", IDS, num_valid)
    else:
        cache.release("a")
    assert found(cache) == num_found
    step = cache.begin_step()
    assert cache.allocate("a", PLAIN, IDS, num_valid, 20 - num_valid) is not None
    cache.end_step(step)
    assert found(cache) == 16
    cache.release("a", fence := Fence())
    fence.lift()
    assert cache.usage == 0 and audit.check(cache.cache).ok


def test_reserved_blocks_gate_what_is_allocated_but_not_what_must_fit() -> None:
    cache = make(8)  # 7 of them are for requests
    assert cache.allocate("a", PLAIN, IDS, 8, 0, num_loaded=8, is_beside=True, reserved_blocks=6) is None
    given = {"num_loaded": 8, "is_beside": True, "must_fit": True, "reserved_blocks": 5}
    assert cache.allocate("a", PLAIN, IDS, 8, 0, **given) is not None  # type: ignore[arg-type]
    assert cache.num_available == 5
    assert cache.allocate("a", PLAIN, IDS, 8, 12, must_fit=True, spare_blocks=3) is None
    assert cache.allocate("a", PLAIN, IDS, 8, 12, must_fit=True, spare_blocks=2) is not None
    cache.release("a")


@pytest.mark.parametrize("salt", [None, "", "any text", "\ud800", "rks1." + "A" * 180, "x" * 5_000_000])
def test_where_salts_are_required_all_others_are_refused(salt: str | None) -> None:
    strict = make(salts=SaltReader(KEYS, allows_anonymous=False))
    forged = make_salt(KeySet.derive([b"another fleet, other secret"]), "acme")
    assert strict.refuses(salt) and strict.refuses(forged)
    assert not strict.refuses(make_salt(KEYS, "acme"))
    assert not make(salts=SaltReader(KEYS)).refuses(salt) and not make().refuses(salt)


def test_an_adapter_that_is_reloaded_under_its_name_never_meets_old_kv() -> None:
    def facts(path: str, is_inplace: bool) -> RequestFacts:
        lora = SimpleNamespace(lora_name="x", lora_int_id=1, lora_path=path, load_inplace=is_inplace)
        given = {
            "cache_salt": None,
            "mm_features": [],
            "skip_reading_prefix_cache": False,
            "sampling_params": None,
            "resumable": False,
        }
        return facts_of(
            SimpleNamespace(**given, prompt_embeds=None, lora_request=lora, num_prompt_tokens=1, max_tokens=1)
        )

    old, moved, again = facts("/a", False), facts("/b", False), facts("/a", True)
    assert old == facts("/a", False) and old.adapter != moved.adapter and not moved.is_private
    assert again.is_private
