"""Cache salts: one text for one owner, and 10,000 forgeries that nobody reads as a tenant."""

from __future__ import annotations

import gc
import random
import time
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv import Namespace
from radixkv.audit import statistics
from radixkv.audit.verdict import Verdict
from radixkv.errors import ArgumentError, ConfigError, SaltError
from radixkv.signing import KeySet
from radixkv.tenancy.salt import (
    ANONYMOUS,
    MAX_GENERATION,
    PREFIX,
    SALT_CHARACTERS,
    SaltReader,
    is_engine_tenant,
    make_salt,
)

SECRET, OLD, FOREIGN = b"the fleet's secret", b"the fleet's previous one", b"another fleet's secret"
KEYS = KeySet.derive([SECRET], ["salts", "digests"])
tenants = st.text(min_size=1, max_size=20).filter(
    lambda name: "/" not in name and name not in (".", "..", ANONYMOUS) and name.isprintable()
)


def refuses(reader: SaltReader, text: str) -> str:
    with pytest.raises(SaltError) as refusal:
        reader.read(text)
    return str(refusal.value)


def raw(salt: str) -> bytes:
    return urlsafe_b64decode(salt.removeprefix(PREFIX))


def text_of(content: bytes) -> str:
    return PREFIX + urlsafe_b64encode(content).decode()


@pytest.mark.slow
@given(tenants, st.integers(0, MAX_GENERATION), st.none() | st.text(max_size=9), st.text(max_size=9))
def test_a_salt_says_whose_request_it_is(
    tenant: str, generation: int, base: str | None, client_salt: str
) -> None:
    reader = SaltReader(KEYS)
    salt = make_salt(KEYS, tenant, generation, base, client_salt)
    assert salt == make_salt(KEYS, tenant, generation, base, client_salt)
    assert len(salt) == SALT_CHARACTERS and salt.isascii()
    owner = reader.read(salt)
    assert [owner.tenant] == reader.tenant_ids(tenant) and is_engine_tenant(owner.tenant)
    assert owner.generation == generation and (owner.base is None) == (base is None)
    assert owner.namespace("m", "a", 3) == Namespace(owner.tenant, "m", "a", owner.salt, 3)


def test_a_salt_does_not_contain_its_texts() -> None:
    for name in ("acme-corporation", "a-base-of-acme", "a-salt-of-acme"):
        salt = make_salt(KEYS, "acme-corporation", 0, "a-base-of-acme", "a-salt-of-acme")
        assert name not in salt and name.encode() not in raw(salt)


def test_owners_differ_in_each_field() -> None:
    reader = SaltReader(KEYS)
    fields = [
        ("acme",),
        ("globex",),
        ("acme", 0, "base"),
        ("acme", 0, "base2"),
        ("acme", 0, None, "a"),
        ("acme", 0, None, "b"),
        ("globex", 0, None, "a"),
        ("acme", 1),
        ("acme", 1, "base"),
    ]
    owners = [reader.read(make_salt(KEYS, *each)) for each in fields]  # type: ignore[arg-type]
    assert len({owner.namespace("m") for owner in owners}) == len(fields)
    assert len({owner.tenant for owner in owners}) == 2
    same_text = {owner.salt.split(".")[2] for owner in (owners[4], owners[6])}
    assert len(same_text) == 2, "a client's salt must not show that another tenant sent the same"


def test_anonymous_requests_are_one_tenant_with_namespaces_of_its_own() -> None:
    reader = SaltReader(KEYS)
    texts = [None, "a", "b", "t-" + "0" * 32, "rk", "ks1.", " rks1.", "x" * 512, "é" * 256]
    owners = [reader.read(text) for text in texts]
    assert {owner.tenant for owner in owners} == {ANONYMOUS}
    assert len({owner.namespace("m") for owner in owners}) == len(texts)
    assert reader.read("") == reader.read(None)
    salted = reader.read(make_salt(KEYS, "acme"))
    assert reader.read(salted.salt).namespace("m") != salted.namespace("m")


def test_anonymous_requests_can_be_switched_off() -> None:
    reader = SaltReader(KEYS, allows_anonymous=False)
    for text in (None, "", "a", "t-" + "0" * 32):
        with pytest.raises(SaltError, match="without a cache_salt"):
            reader.read(text)
    assert reader.read(make_salt(KEYS, "acme")).tenant.startswith("t-")


@pytest.mark.parametrize(
    "text",
    ["x" * 513, "é" * 257, "x" * 10_000_000, "é" * 10_000_000, "\ud800", "rks1." + "A" * 508, 7, b"rks1."],
)
def test_what_is_too_long_or_no_text_is_refused(text: str) -> None:
    assert len(refuses(SaltReader(KEYS), text)) < 200


@pytest.mark.parametrize("tenant", [ANONYMOUS, "t-" + "0" * 32, "", "a/b", "..", "x" * 2000, None, 7])
def test_names_that_no_tenant_of_a_gateway_has(tenant: str) -> None:
    with pytest.raises(ArgumentError):
        make_salt(KEYS, tenant)


@pytest.mark.parametrize("generation", [-1, 2**53, 1.0, True, "1", None])
def test_generations_are_integers(generation: int) -> None:
    with pytest.raises(ArgumentError):
        make_salt(KEYS, "acme", generation)
    with pytest.raises(ArgumentError):
        SaltReader(KEYS).raise_generation("t-" + "0" * 32, generation)


def test_texts_of_clients_are_bounded() -> None:
    for fields in ({"base": "x" * 1025}, {"client_salt": "x" * 1025}, {"client_salt": "\ud800"}):
        with pytest.raises(ArgumentError):
            make_salt(KEYS, "acme", **fields)


def forgery(draw: random.Random, mine: str, other: str, foreign: str) -> str:
    """Return what somebody can make of two valid salts and of another fleet's, without the key."""
    content, second = bytearray(raw(mine)), raw(other)
    kind = draw.randrange(9)
    if kind == 0:  # flipped bits
        for _ in range(draw.randrange(1, 4)):
            content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        return text_of(bytes(content))
    if kind == 1:  # cut, at the end or in the middle
        start = draw.randrange(len("rks"), len(mine))
        return mine[:start] + mine[draw.randrange(start + 1, len(mine) + 1) :]
    if kind == 2:  # fields of two salts
        edges = [0, 16, 23, 39, 55, 87]
        field = draw.randrange(5)
        part = slice(edges[field], edges[field + 1])
        content[part] = second[part]
        return text_of(bytes(content))
    if kind == 3:  # fields in other places
        edges = [0, 23, 39, 55]
        one, two = draw.sample(edges, 2)
        content[one : one + 32], content[two : two + 32] = content[two : two + 32], content[one : one + 32]
        return text_of(bytes(content))
    if kind == 4:
        return foreign
    if kind == 5:  # another generation
        content[32:39] = draw.randrange(MAX_GENERATION).to_bytes(7, "big")
        return text_of(bytes(content))
    if kind == 6:  # concatenations
        return draw.choice(
            [mine + other, mine + "=", mine + "\n", mine + other[5:], mine + "A", PREFIX + mine]
        )
    if kind == 7:  # another spelling
        at = draw.randrange(len(mine))
        swapped = mine[:at] + mine[at].swapcase() + mine[at + 1 :]
        spelled = [
            mine.upper(),
            swapped,
            mine.replace("rks1", "rks2"),
            mine.replace(".", ":"),
            PREFIX + " " + mine[5:],
        ]
        spelled += [
            mine.translate(str.maketrans("-_", "+/")),
            mine[:-1] + "\u0661",
            mine[:-1] + "=",
            mine[:-4],
        ]
        return draw.choice(spelled)
    return text_of(draw.randbytes(135))


@pytest.mark.slow
def test_ten_thousand_forgeries_are_refused() -> None:
    draw, reader, refused, forgeries = random.Random(7), SaltReader(KEYS), 0, 0
    foreign_keys = KeySet.derive([FOREIGN], ["salts", "digests"])
    valid = set()
    while forgeries < 10_000:
        fields = [
            (f"t{draw.randrange(9)}", 0, draw.choice([None, "b"]), f"c{draw.randrange(9)}") for _ in range(3)
        ]
        mine, other = make_salt(KEYS, *fields[0]), make_salt(KEYS, *fields[1])
        valid |= {mine, other}
        text = forgery(draw, mine, other, make_salt(foreign_keys, *fields[2]))
        if text in valid:  # two salts with an equal field
            continue
        forgeries += 1
        try:
            reader.read(text)
        except SaltError as error:
            refused += 1
            assert str(error) == "cache_salt was not made with a key of this fleet"
    assert refused == forgeries
    assert reader.num_tenants == 0, "a forgery must not raise a generation"
    assert all(reader.read(text).tenant.startswith("t-") for text in valid)


def test_a_salt_has_one_text() -> None:
    """No change of one character, and no ending, gives another text that is read."""
    salt, reader = make_salt(KEYS, "acme", 3, "base", "mine"), SaltReader(KEYS)
    alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_+/=. "
    for at in range(len(PREFIX), len(salt)):
        for character in alphabet:
            if character != salt[at]:
                refuses(reader, salt[:at] + character + salt[at + 1 :])
    for ending in ("=", "==", "\n", "\0", " "):
        refuses(reader, salt + ending)
    for prefix in ("RKS1.", "Rks1.", "rks1", "rks1..", "rks01.", "rks."):
        refuses(reader, prefix + salt[len(PREFIX) :])


def test_older_generations_are_refused() -> None:
    reader = SaltReader(KEYS)
    salts = [make_salt(KEYS, "acme", generation) for generation in range(4)]
    (acme,) = reader.tenant_ids("acme")
    assert reader.read(salts[0]).generation == 0 and reader.num_tenants == 0
    assert reader.raise_generation(acme, 2) == 2
    assert "older" in refuses(reader, salts[0]) and "older" in refuses(reader, salts[1])
    assert reader.read(salts[2]).generation == 2
    assert reader.read(salts[3]).generation == 3, "a valid salt is a word of the fleet too"
    assert "older" in refuses(reader, salts[2])
    assert reader.raise_generation(acme, 1) == 3 == reader.generation(acme), "a generation never falls"
    assert reader.read(make_salt(KEYS, "globex")).generation == 0
    with pytest.raises(ArgumentError):
        reader.raise_generation(ANONYMOUS, 1)


def test_no_generation_is_forgotten_for_another() -> None:
    reader = SaltReader(KEYS, max_tenants=3)
    old = [make_salt(KEYS, f"t{at}", 0) for at in range(3)]
    for at in range(3):
        reader.read(make_salt(KEYS, f"t{at}", 1))
    for at in range(3, 200):
        assert "forgotten" in refuses(reader, make_salt(KEYS, f"t{at}", 1))
        assert reader.read(make_salt(KEYS, f"t{at}", 0)).generation == 0
        with pytest.raises(SaltError, match="forgotten"):
            reader.raise_generation(*reader.tenant_ids(f"t{at}"), 5)
    assert reader.num_tenants == 3
    assert all("older" in refuses(reader, salt) for salt in old)
    assert reader.read(make_salt(KEYS, "t0", 2)).generation == 2, "known tenants go on"
    assert reader.raise_generation(*reader.tenant_ids("t1"), 9) == 9


def test_keys_rotate_without_a_gap() -> None:
    before, after = KeySet.derive([OLD]), KeySet.derive([SECRET])
    both = KeySet.derive([SECRET, OLD])
    old, new = make_salt(before, "acme"), make_salt(both, "acme")
    assert new == make_salt(after, "acme") != old
    reader = SaltReader(before)
    refuses(reader, new)
    reader.use(both)
    assert [reader.read(new).tenant, reader.read(old).tenant] == reader.tenant_ids("acme")
    for tenant in reader.tenant_ids("acme"):
        reader.raise_generation(tenant, 1)
    assert "older" in refuses(reader, old) and "older" in refuses(reader, new)
    reader.use(after)
    assert "key" in refuses(reader, make_salt(before, "acme", 1))
    assert reader.read(make_salt(after, "acme", 1)).generation == 1


def test_a_reader_needs_keys() -> None:
    with pytest.raises(ConfigError, match="salts"):
        SaltReader(KeySet.derive([SECRET], ["digests"]))
    with pytest.raises(ConfigError, match="max_tenants"):
        SaltReader(KEYS, max_tenants=0)
    reader = SaltReader(KeySet.derive([SECRET], ["salts"]))
    assert reader.read(make_salt(KEYS, "acme")).tenant in SaltReader(KEYS).tenant_ids("acme")
    assert reader.tenant_ids(ANONYMOUS) == [ANONYMOUS]
    with pytest.raises(ConfigError, match="digests"):
        reader.tenant_ids("acme")
    with pytest.raises(ArgumentError):
        reader.tenant_ids("a/b")


def timed(read: Callable[[str], object], first: list[str], last: list[str]) -> statistics.Interval:
    """Compare the times of forgeries whose MAC differs in its first byte and in its last byte; taken in turn."""
    arms: tuple[list[float], list[float]] = ([], [])
    draw, clock = random.Random(1), time.perf_counter_ns
    gc.disable()
    try:
        for pair in zip(first, last, strict=True):
            for arm in draw.sample((0, 1), 2):
                text = pair[arm]
                began = clock()
                try:
                    read(text)
                except SaltError:
                    arms[arm].append(float(clock() - began))
    finally:
        gc.enable()
    return statistics.auc(*arms)


@pytest.mark.timing
def test_time_does_not_say_how_much_of_a_mac_is_right() -> None:
    reader, valid = SaltReader(KEYS), [raw(make_salt(KEYS, f"t{at}")) for at in range(20_000)]
    first = [text_of(each[:55] + bytes([each[55] ^ 1]) + each[56:]) for each in valid]
    last = [text_of(each[:86] + bytes([each[86] ^ 1])) for each in valid]
    for _ in range(3):  # a busy machine may leave one run undecided
        interval = timed(reader.read, first, last)
        if statistics.judged(interval) is not Verdict.INCONCLUSIVE:
            break
    assert statistics.judged(interval) is Verdict.ISOLATED, interval

    right = dict(zip(first + last, valid + valid, strict=True))

    def leaky(text: str) -> None:
        for one, other in zip(raw(text)[55:], right[text][55:], strict=True):
            if one != other:
                raise SaltError("")

    assert statistics.judged(timed(leaky, first, last)) is Verdict.LEAKS, "the control must be seen"
