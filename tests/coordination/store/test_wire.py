"""Data from a store is untrusted until it is parsed: round trips, and named refusals."""

from __future__ import annotations

import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_128_hexdigest

from radixkv.coordination.store import wire
from radixkv.coordination.store.holdings import split
from radixkv.coordination.store.wire import Confirmed, Raised, Registration, WireError
from radixkv.coordination.values import JobPart, Load, WarmJob, Writer

REGISTRATION = Registration(
    "a",
    7,
    "nonce",
    "http://h",
    "fp",
    16,
    1,
    "canary",
    3,
    "proof",
    1500,
    4,
    7,
    1_700_000_000_000,
    2**53 - 1,
    "drains",
)

digests = st.binary(min_size=16, max_size=16)
namespaces = st.binary(min_size=32, max_size=32)
held_by_tier = st.dictionaries(
    st.tuples(namespaces, st.sampled_from(wire.TIERS)), st.sets(digests, min_size=1), max_size=5
)
Held = dict[tuple[bytes, str], set[bytes]]


def packed_snapshot(held: Held) -> wire.Snapshot:
    return wire.pack_snapshot((name, tier, found) for (name, tier), found in held.items())


@given(held_by_tier)
def test_snapshots_survive_a_round_trip(held: Held) -> None:
    snapshot = packed_snapshot(held)
    found = wire.unpack_snapshot(snapshot.chunks, snapshot.checksum)
    assert {(name, tier): set(split(run)) for name, tier, run in found} == held
    assert sum(len(run) // 16 for *_, run in found) == sum(map(len, held.values()))


entries = st.builds(
    wire.Entry,
    st.sampled_from(wire.OPS),
    namespaces,
    st.one_of(st.just(b""), digests),
    st.lists(digests, max_size=64).map(b"".join),
    st.sampled_from(wire.TIERS),
)


@given(st.lists(entries, max_size=5))
def test_packed_entries_are_complete(some: list[wire.Entry]) -> None:
    packed, at = wire.pack_entries(some), 0
    for entry in some:
        op, tier, named, parented, count = packed[at : at + 5]
        lengths = (named, parented, 16 * count)
        at += 5
        assert entry.op.startswith(chr(op)) and wire.TIERS[tier] == entry.tier
        for field, length in zip(entry[1:4], lengths, strict=True):
            assert packed[at : at + length] == field
            at += length
    assert at == len(packed)


def test_large_snapshots_go_in_chunks_and_the_largest_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    held = {
        (bytes([n]) * 32, "device"): {f"{n}-{i:013}".encode()[:16].ljust(16) for i in range(2000)}
        for n in range(1, 4)
    }
    monkeypatch.setattr(wire, "SNAPSHOT_CHUNK_BYTES", 1000)
    snapshot = packed_snapshot(held)
    assert len(snapshot.chunks) > 3 and max(map(len, snapshot.chunks)) == 1000
    assert len(wire.unpack_snapshot(snapshot.chunks, snapshot.checksum)) == 3
    monkeypatch.setattr(wire, "MAX_SNAPSHOT_DIGESTS", 2500)
    snapshot = packed_snapshot(held)
    assert [len(run) // 16 for *_, run in wire.unpack_snapshot(snapshot.chunks, snapshot.checksum)] == [
        2000,
        500,
    ]


def packed(body: bytes) -> tuple[list[bytes], str]:
    data = zlib.compress(body)
    return [data], xxh3_128_hexdigest(data)


@given(st.binary(max_size=200))
def test_a_malformed_snapshot_is_refused(body: bytes) -> None:
    with pytest.raises(WireError):
        wire.unpack_snapshot([body], "0" * 32)
    with pytest.raises(WireError):
        wire.unpack_snapshot([body], xxh3_128_hexdigest(body))
    with pytest.raises(WireError):
        wire.unpack_snapshot(*packed(b"RKS1" + body))
    with pytest.raises(WireError):
        wire.unpack_snapshot(*packed(b"RKS2" + b"n" * 32 + b"\x00" + (100).to_bytes(4, "little") + body))


def test_a_snapshot_that_inflates_too_far_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "_MAX_SNAPSHOT_BYTES", 10_000)
    with pytest.raises(WireError, match="too large"):
        wire.unpack_snapshot(*packed(b"RKS2" + bytes(1_000_000)))


def entry_fields(**changes: bytes) -> dict[bytes, bytes]:
    fields = {"e": b"7", "s": b"3", "o": b"store", "n": b"n" * 32, "p": b"", "t": b"device", "b": b"d" * 32}
    return {name.encode(): value for name, value in (fields | changes).items()}


def test_an_entry_is_parsed() -> None:
    entry = wire.parse_entry(entry_fields(), 7, 3)
    assert entry == ("store", b"n" * 32, b"", b"d" * 32, "device")
    assert wire.parse_entry(entry_fields(o=b"clear", n=b"", b=b""), 7, 3) == (
        "clear",
        b"",
        b"",
        b"",
        "device",
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"e": b"8"},
        {"s": b"4"},
        {"s": b"-3"},
        {"o": b"tear"},
        {"o": b"\xff"},
        {"n": b"short"},
        {"n": b""},
        {"b": b"d" * 17},
        {"b": b"d" * 16 * 65},
        {"t": b"tape"},
        {"p": b"d" * 15},
    ],
)
def test_malformed_entries_are_refused(changes: dict[str, bytes]) -> None:
    with pytest.raises(WireError):
        wire.parse_entry(entry_fields(**changes), 7, 3)
    for name in entry_fields():
        with pytest.raises(WireError):
            wire.parse_entry({key: value for key, value in entry_fields().items() if key != name}, 7, 3)


def test_registrations_survive_a_round_trip() -> None:
    fields = wire.registration_fields(REGISTRATION) | {"epoch": "7", "last_seq": "3", "proof": "proof"}
    fields |= {"lease_ms": "1500", "beats": "4", "replaced_ms": "7", "stated_ms": "1700000000000"}
    fields |= {"draining": "drains"}
    values = [fields[name].encode() for name in wire.REGISTRATION_FIELDS]
    assert wire.parse_registration("a", values) == REGISTRATION
    unheard = wire.parse_registration("a", [*values[:-6], *[None] * 6])
    stated = unheard.proof, unheard.lease_ms, unheard.beats, unheard.replaced_ms, unheard.stated_ms
    assert (*stated, unheard.draining) == ("", 0, 0, 0, 0, ""), "before the first beat"
    for index in range(len(values) - 6):
        for bad in (None, b"\xff", b"9" * 300):
            if bad is None and wire.REGISTRATION_FIELDS[index] == "weights":
                continue  # wire versions before 6 had no weights
            with pytest.raises(WireError):
                wire.parse_registration("a", [*values[:index], bad, *values[index + 1 :]])


def test_a_malformed_load_is_less_load() -> None:
    assert wire.parse_load([b"7", b"8", b"9", b"6"]) == Load(7, 8, 9, 6)
    assert wire.parse_load([b"7", b"x", None, b"9"]) == Load(7, queued_cold_tokens=7)
    assert wire.parse_load([b"-1", None, None, b"10000000000000000"]) == Load()


@pytest.mark.parametrize("bad", [b"", b"-1", b"1.0", b"9007199254740992", b"1" * 17, b" 1", b"\xd9\xa1"])
def test_a_version_of_weights_is_a_number_up_to_its_maximum(bad: bytes) -> None:
    fields = wire.beat_fields(REGISTRATION) | {"epoch": "7", "last_seq": "3", "replaced_ms": "7"}
    values = {name: fields[name].encode() for name in wire.REGISTRATION_FIELDS}
    assert wire.parse_registration("a", values.values()).weights == 2**53 - 1
    with pytest.raises(WireError, match="weights"):
        wire.parse_registration("a", (values | {"weights": bad}).values())
    older: dict[str, bytes | None] = {**values, "weights": None}
    assert wire.parse_registration("a", older.values()).weights == 0, (
        "of a replica with an older wire version"
    )


def test_the_difference_of_two_registrations_is_named() -> None:
    assert REGISTRATION.difference(REGISTRATION) is None
    for field, value, setting in (
        ("wire_version", 2, "wire_version"),
        ("canary", "other", "fleet_secret"),
        ("block_size", 32, "block_size"),
    ):
        other = Registration(
            **{**{n: getattr(REGISTRATION, n) for n in Registration.__slots__}, field: value}
        )
        difference = REGISTRATION.difference(other)
        assert difference is not None and difference[0] == setting


job_parts = st.builds(
    JobPart,
    st.from_regex(r"[A-Za-z0-9._-]{1,64}", fullmatch=True),
    st.integers(0, 10**14),
    st.from_regex(r"[0-9a-f]{32}", fullmatch=True),
    st.sampled_from(["queued", "running", "done", "failed"]),
    st.integers(0, 10**14),
    st.from_regex(r"[a-z_]{0,64}", fullmatch=True),
    st.integers(0, 10**14),
    st.integers(0, 10**14),
)


@given(st.lists(job_parts, max_size=4, unique_by=lambda part: part.replica_id))
def test_jobs_survive_a_round_trip(parts: list[JobPart]) -> None:
    named = tuple(sorted(parts, key=lambda part: part.replica_id))
    job = WarmJob("1f", b"t" * 32, b"n" * 32, 5, named, Writer("owner-1", 9, "ab12"), 3, 7, "ab" * 32)
    fields = {name.encode(): value.encode() for name, value in wire.job_fields(job).items()}
    assert wire.parse_job("1f", fields) == job


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (b"tenant", b"no hex"),
        (b"num_tokens", b"many"),
        (b"wanted", b"all"),
        (b"owner", b"me"),
        (b"part:a", b"7 done 1"),
        (b"left_out", b"-1"),
        (b"part:a", b"7 nonce done 1 0 0"),
        (b"part:a", b"7 nonce lost? 1 0 0 "),
        (b"part:a", b"x nonce done 1 0 0 "),
        (b"part:a", b"7 nonce done 1 -1 0 "),
        (b"part:a", b"7 nonce done 1 0 x "),
        (b"part:a", b"7 nonce done 1 0 0 Not-a-code"),
        (b"part:a", b"7 done 1 0 0 "),
        (b"owner", b"7 a"),
        (b"owner", b"x nonce a"),
    ],
)
def test_malformed_jobs_are_refused(name: bytes, value: bytes) -> None:
    job = WarmJob("1f", b"t" * 32, b"n" * 32, 5, (JobPart("a", 7, "nonce", "done", 1),))
    fields = {key.encode(): text.encode() for key, text in wire.job_fields(job).items()}
    with pytest.raises(WireError):
        wire.parse_job("1f", fields | {name: value})
    for missing in (b"tenant", b"namespace", b"num_tokens", b"wanted", b"owner", b"left_out", b"request"):
        with pytest.raises(WireError):
            wire.parse_job("1f", {key: text for key, text in fields.items() if key != missing})


def test_malformed_fields_of_a_tenant_are_ignored() -> None:
    raised = Raised(3, "0123456789abcdef" * 2, "a", "ab12", "0f" * 32)
    stands = dict(zip((b"generation", b"token", b"raised"), wire.raised_fields(raised), strict=True))
    fields = stands | {
        b"limit": b"10",
        b"r:a": b"7:ab12:5:99:fp:model",
        b"r:b": b"7:ab12:5",
        b"r:c": b"7:5:99:fp:model",
        b"c:a": b"ab12:" + b"0f" * 32,
        b"c:b": b"ab12",
        b"c:d": b"a nonce:" + b"0f" * 32,
        b"x": b"7",
    }
    shares, confirmed = {"a": (7, "ab12", 5, 99, "fp:model")}, {"a": Confirmed("ab12", "0f" * 32)}
    assert wire.parse_tenant(fields) == (10, raised, raised.standing, shares, confirmed)
    for name in stands:
        for bad in (b"", b"-1", b"3.0", b"9" * 16, b"03", b"\xff" * 32, b"ab12:00:a"):
            found = wire.parse_tenant(fields | {name: bad})
            assert (found.raised, found.limit, found.shares) == (wire.NEVER, 10, shares)
            assert found.standing != raised.standing and found.standing != wire.NOTHING
    assert wire.parse_tenant({}) == (None, wire.NEVER, wire.NOTHING, {}, {})
    assert wire.parse_tenant({b"limit": b"many"}) == (None, wire.NEVER, wire.NOTHING, {}, {})


def test_purges_are_ordered_by_the_purges_that_their_raisers_knew(monkeypatch: pytest.MonkeyPatch) -> None:
    def at(wall_s: float, generation: int, after: tuple[Raised, ...] = ()) -> Raised:
        monkeypatch.setattr("time.time", lambda: wall_s)
        return Raised(generation, wire.new_token(after=after))

    known = at(1.7e9, 3)
    given_back = known._replace(token=wire.new_token(known.purge))
    assert given_back.token != known.token and given_back.relation(known) == "same"
    assert at(1.7e9 + 1, 3).relation(known) == at(1.7e9 + 1, 4).relation(known) == "later"
    assert at(1.7e9 - 3600, 4, after=(known,)).relation(known) == "later", "for any clock of its raiser"
    assert at(1.7e9 - 31, 3).relation(known) == at(1.7e9 - 31, 1).relation(known) == "earlier"
    for other in (at(1.7e9 - 29, 3), at(1.7e9 - 31, 4), at(1.7e9 + 1, 2)):
        assert other.relation(known) == "apart", "its raiser did not know the known purge and may be later"
    assert known.relation(wire.NEVER) == "later"
    assert len(at(1e12, 1).token) == 32
