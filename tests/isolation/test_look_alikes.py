"""Similar namespaces: no two share a frame, a digest or a match, for any content of their fields."""

from __future__ import annotations

import unicodedata
from itertools import combinations
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from radixkv import CacheConfig, Namespace, NamespaceError, PrefixCache, Tenant, audit
from radixkv.config import MAX_FIELD_BYTES, MAX_WEIGHTS
from radixkv.coordination.keys import FleetKeys
from radixkv.index.ghost_keys import SegmentKeys
from radixkv.signing import frame, mac

SECRET = b"the secret of the fleet under test"
KEYS = FleetKeys(SECRET)
IDS = [1, 2, 3, 4, 5]

PIECES = (
    "a", "b", "ab", "1", "12345", " ", "None", "none", "\0", "\n", ":", "/", "|", "\x1f", "\u200b", "\ufeff", "\u202e",
    "é", "e\u0301", "Å", "\u212b", "K", "\u212a", "ﬁ", "fi", "ß", "ss", "İ", "i\u0307", "i", "I", "😀",
    "str:", "none:0:", ":str:1:a", "tenant:str:1:a", "model:str:1:m", "adapter:none:0:", "salt:str:0:",
    "weights:int:1:0", ":int:1:1",
    "s" + (1).to_bytes(8, "little").decode(), "\0\0\0\0\0\0\0\1", "\1\0\0\0\0\0\0\0",
)  # fmt: skip
"""Prefixes of each other, separators, words of the frames, and one character in several forms."""

text = st.lists(st.sampled_from(PIECES), min_size=1, max_size=4).map("".join)
ids = text.map(lambda each: each.replace("/", "|"))
"""Text for tenants, which must not contain a slash."""
versions = st.sampled_from([0, 0, 0, 1, 2, 10, 11, 111, MAX_WEIGHTS])
spaces = st.builds(Namespace, ids, text, st.none() | text, st.just("") | text, versions)


def cut_anew(fields: str, cuts: tuple[int, int, int]) -> Namespace | None:
    """A text cut into four fields, or None if a required field is empty."""
    a, b, c = sorted(min(cut, len(fields)) for cut in cuts)
    tenant, model, adapter, salt = fields[:a], fields[a:b], fields[b:c], fields[c:]
    return Namespace(tenant, model, adapter or None, salt) if tenant and model and "/" not in tenant else None


cuts = st.tuples(*[st.integers(0, 12)] * 3)


def parsed(framed: bytes) -> Namespace:
    """The namespace of a frame. If every frame can be parsed back, no two namespaces have the same one."""
    fields: list[str | int | None] = []
    for name in Namespace._fields:
        begin = framed.index(b":") + 1
        assert framed[: begin - 1].decode() == name
        kind, size, rest = framed[begin:].split(b":", 2)
        content = rest[: int(size)].decode()
        fields.append({b"none": lambda _: None, b"int": int, b"str": str}[kind](content))
        framed = rest[int(size) :]
    assert framed == b""
    return Namespace(*fields)  # type: ignore[arg-type]


def named(namespace: Namespace, generation: int) -> dict[str, bytes]:
    """All digests that represent a namespace outside the process."""
    key = b"\0" * 1024
    return {
        "namespace": KEYS.namespace(namespace, generation),
        "prefix": KEYS.digests(namespace, key, generation=generation)[0],
    }


@given(st.lists(spaces, min_size=2, max_size=6, unique=True))
@example([Namespace("org_1", "2345"), Namespace("org_12345", "m"), Namespace("org_1", "2345", None, "m")])
@example([Namespace("é", "m"), Namespace("e\u0301", "m")])
@example([Namespace("a", "m", weights=version) for version in (0, 1, 10, 11, MAX_WEIGHTS)])
@example(
    [
        Namespace("a", "m", salt="1"),
        Namespace("a", "m", weights=1),
        Namespace("a", "m", salt="weights:int:1:1"),
    ]
)
def test_no_two_namespaces_share_a_frame_or_a_digest(found: list[Namespace]) -> None:
    for one in found:
        assert parsed(one.framed()) == one
    assert len({one.framed() for one in found}) == len(found)
    for one, other in combinations(found, 2):
        assert not one.framed().startswith(other.framed())
    seen = [
        digest for one in found for generation in (0, 1, 10) for digest in named(one, generation).values()
    ]
    assert len(set(seen)) == len(seen) == 6 * len(found)
    tenants = {one.tenant for one in found}
    assert len({KEYS.tenant(tenant) for tenant in tenants}) == len(tenants)
    keys = [SegmentKeys(one, 8).between(0, 8, b"\0" * 8, 8, bytearray()) for one in found]
    assert len(set(keys)) == len(found)


@given(text, cuts, cuts)
def test_moving_a_boundary_between_fields_gives_another_namespace(
    fields: str, one: tuple[int, int, int], other: tuple[int, int, int]
) -> None:
    first, second = cut_anew(fields, one), cut_anew(fields, other)
    if first is None or second is None or first == second:
        return
    assert first.framed() != second.framed()
    assert not set(named(first, 0).values()) & set(named(second, 0).values())


@given(st.lists(spaces, min_size=2, max_size=5, unique=True))
def test_look_alikes_never_match_each_other(found: list[Namespace]) -> None:
    cache = PrefixCache(CacheConfig(num_blocks=32, block_size=1))
    for at, namespace in enumerate(found):
        assert [cache.match(each, IDS).num_tokens for each in found] == [5] * at + [0] * (len(found) - at)
        with cache.open(namespace, IDS) as sequence:
            sequence.commit(5)
    audit.check(cache)


@given(ids, st.sampled_from(("NFC", "NFD", "NFKC", "NFKD")))
def test_text_is_not_normalized(tenant: str, form: Any) -> None:
    other = unicodedata.normalize(form, tenant)
    same = Namespace(tenant, "m") == Namespace(other, "m")
    assert same == (tenant == other) == (KEYS.tenant(tenant) == KEYS.tenant(other))


def test_a_digest_is_an_hmac_of_the_frame_and_the_generation() -> None:
    """A digest cannot be computed without the secret. A purge changes all digests."""
    namespace = Namespace("acme", "m", None, "s")
    for generation in (0, 7):
        assert KEYS.namespace(namespace, generation) == mac(
            SECRET, "namespace", namespace.framed(), generation
        )
    assert KEYS.tenant("acme") == mac(SECRET, "tenant", "acme") != mac(SECRET[::-1], "tenant", "acme")
    assert frame(namespace.framed(), 11) != frame(namespace.framed() + b"1", 1)


@pytest.mark.parametrize("size", [MAX_FIELD_BYTES + 1, 1_000_000])
@pytest.mark.parametrize("field", Namespace._fields[:4])
@pytest.mark.parametrize("letter", ["a", "é", "\0"])
def test_a_field_that_is_too_long_is_refused_with_its_limit(field: str, size: int, letter: str) -> None:
    """The limit is in bytes of the UTF-8 form. A field of exactly the limit is accepted."""
    width = len(letter.encode())
    fields = {"tenant": "a", "model": "m", field: letter * -(-size // width)}
    with pytest.raises(NamespaceError, match=f"field {field} has .* bytes; allowed: at most 1024") as error:
        Namespace(**fields)
    assert len(str(error.value)) < 200
    fits = Namespace(**{**fields, field: letter * (MAX_FIELD_BYTES // width)})
    assert parsed(fits.framed()) == fits


def test_a_tenant_s_name_has_the_same_limit() -> None:
    with pytest.raises(NamespaceError, match="at most 1024"):
        Tenant("a" * 1_000_000)
    assert Tenant("a" * MAX_FIELD_BYTES).id


def test_a_namespace_made_of_another_is_checked_too() -> None:
    namespace = Namespace("a", "m")
    assert namespace._replace(salt="s") == Namespace("a", "m", None, "s")
    for field, wrong in (
        ("tenant", ""),
        ("tenant", 5),
        ("adapter", ""),
        ("salt", "x" * 2_000),
        ("model", None),
        ("weights", True),
    ):
        with pytest.raises(NamespaceError, match=f"namespace field {field} "):
            namespace._replace(**{field: wrong})
    with pytest.raises(NamespaceError, match="namespace field model is empty"):
        Namespace._make(["a", "", None, ""])
