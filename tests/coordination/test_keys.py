"""Digests: the exact values of this wire version, and that digests for different uses never collide."""

from __future__ import annotations

import hashlib
import hmac
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_128_digest

from radixkv import Namespace
from radixkv.coordination.keys import SEGMENT_BYTES, FleetKeys, chains
from radixkv.errors import ConfigError
from radixkv.signing import frame

SECRET = b"0123456789abcdef0123456789abcdef"
ACME = Namespace("acme", "fp:model", adapter=None, salt="salt")


def key(num_tokens: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).integers(0, 2**32, num_tokens).astype("<u4").tobytes()


def test_values_do_not_change_within_a_wire_version() -> None:
    """A changed value is a change of the wire version: old and new replicas would miss each other's prefixes."""
    keys = FleetKeys(SECRET)
    ids = np.arange(512, dtype="<u4").tobytes()
    assert keys.canary == "c8bc6ca761f2ad6afe48aba2f752f4ddc0be59c5b5053108b6ff972168a8f1a8"
    assert keys.tenant("acme").hex() == "23d774b94b53c1094f2386c9152c0fa525c2c4d210e351695c9d11823f0ba2e3"
    assert keys.namespace(ACME).hex() == "dc4b42a9e0e8708e1fc9a2046944ce5e822a9ba62154e66088f1de2a29a96b53"
    assert [digest.hex() for digest in keys.digests(ACME, ids)] == [
        "5b508bd02c40c4e5b7e74f573b51e2e1",
        "7ae63f96a97663750ffe94fac0324391",
    ]
    assert keys.derived("beat") == hmac.digest(SECRET, frame("key", "beat"), "sha256")


def test_digests_match_their_documented_formula() -> None:
    keys = FleetKeys(SECRET)
    ids = key(600)
    framed = ACME.framed()
    secret = hmac.digest(SECRET, frame("prefix", framed, 0), "sha256")
    first, second = xxh3_128_digest(ids[:1024]), xxh3_128_digest(ids[:2048])
    expected = [hashlib.blake2b(link, digest_size=16, key=secret).digest() for link in (first, second)]
    assert list(keys.digests(ACME, ids)) == expected
    assert list(keys.digests(ACME, ids, 1)) == list(keys.digests(ACME, ids, 1, 9)) == expected[1:]
    assert list(keys.digests(ACME, ids, 0, 1)) == expected[:1]
    assert list(keys.digests(ACME, ids[:1023])) == []
    assert keys.namespace(ACME) == hmac.digest(SECRET, frame("namespace", framed, 0), "sha256")
    assert keys.tenant("acme") == hmac.digest(SECRET, frame("tenant", "acme"), "sha256")


def test_everything_depends_on_the_secret_namespace_and_generation() -> None:
    keys, others = FleetKeys(SECRET), FleetKeys(SECRET[::-1])
    ids = key(256)
    namespaces = [
        ACME,
        Namespace("acme", "fp:model", "salt"),
        Namespace("acme", "fp:modelsalt"),
        Namespace("acme2", "fp:model", salt="salt"),
        Namespace("acme", "fp:model", salt="salt2"),
        ACME._replace(weights=1),
    ]
    seen = [
        (k.namespace(namespace, generation), *k.digests(namespace, ids, generation=generation))
        for k in (keys, others)
        for namespace in namespaces
        for generation in (0, 1)
    ]
    assert all(not set(one) & set(other) for one, other in combinations(seen, 2))
    assert keys.canary != others.canary and keys.tenant("acme") != others.tenant("acme")


def test_the_cache_of_namespaces_is_bounded_and_changes_nothing() -> None:
    keys = FleetKeys(SECRET)
    first = keys.namespace(ACME)
    for index in range(5000):
        keys.namespace(Namespace("acme", "fp:model", salt=str(index)))
    assert len(keys._known) <= 4096 and keys.namespace(ACME) == first


@pytest.mark.parametrize("secret", [b"", b"fifteen bytes..", "a text that is long enough", None])
def test_an_invalid_secret_is_refused_without_quoting_it(secret: bytes) -> None:
    with pytest.raises(ConfigError) as refusal:
        FleetKeys(secret)
    assert refusal.value.setting == "fleet_secret" and "fifteen" not in str(refusal.value)
    assert "long enough" not in str(refusal.value)


@given(st.lists(st.integers(0, 3_000), max_size=6), st.integers(0, 4), st.integers(0, 5))
def test_a_key_in_pieces_has_the_chain_of_the_whole(sizes: list[int], first: int, count: int) -> None:
    chance = np.random.default_rng(sum(sizes))
    pieces = tuple(chance.bytes(size) for size in sizes)
    whole = b"".join(pieces)
    stop = min(first + count, len(whole) // SEGMENT_BYTES)
    expected = [xxh3_128_digest(whole[: SEGMENT_BYTES * (i + 1)]) for i in range(first, stop)]
    assert chains(whole, first, stop) == chains(pieces, first, stop) == expected


def test_a_long_key_in_pieces_has_the_chain_of_the_whole() -> None:
    whole = key(64 * 1024)
    pieces = whole[:100_000], whole[100_000:100_001], whole[100_001:]
    expected = [xxh3_128_digest(whole[: SEGMENT_BYTES * (i + 1)]) for i in range(90, 256)]
    assert chains(whole, 90, 256) == chains(pieces, 90, 256) == expected
