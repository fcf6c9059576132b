"""Tails: the tokens of a request behind its last whole block, which another request may copy."""

from __future__ import annotations

from radixkv import CacheConfig, PrefixCache, audit
from radixkv.index import tails
from radixkv.index.tokens import encode
from tests.index.support import NS


def test_a_tail_is_found_only_where_its_ids_continue() -> None:
    cache, ids = PrefixCache(CacheConfig(num_blocks=16, block_size=2)), [2, 0, 0, 0, 0, 0, 0]
    with cache.open(NS, ids) as sequence:
        sequence.commit(7)
        assert tails.keep(cache, sequence)
    audit.check(cache)
    assert cache.match(NS, ids).num_tokens == 6, "a match has whole blocks only"
    for wanted, rows in (([*ids, 1], 1), ([*ids[:6], 5, 1], 0), (ids, 0), (ids[:6], 1)):
        found = tails.find(cache, NS, encode(wanted), with_rows=True)
        assert found.num_rows == rows and found.num_tokens + rows < len(wanted), wanted
    key = encode(ids[:6]) + tails.find(cache, NS, encode([*ids, 1]), with_rows=True).tail_key
    assert tails.drop(cache, NS, key)
    assert tails.find(cache, NS, encode([*ids, 1]), with_rows=True).num_rows == 0
    audit.check(cache)
