"""Records of the disk tier: what was stored is found again, also after a restart, and only by its own identity."""

from __future__ import annotations

import random
import struct
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from radixkv.config import Namespace
from radixkv.errors import ArgumentError, ConfigError
from radixkv.files.private_folder import MASTER
from radixkv.files.system import PAGE_BYTES
from radixkv.tiers.disk import records as disk_records
from radixkv.tiers.disk.folder import seal
from radixkv.tiers.disk.identity import fingerprint_of
from radixkv.tiers.disk.records import DiskRecords, DiskSettings
from radixkv.tiers.disk.slab import HEADER, HEADER_BYTES, MAX_SEQUENCE, Header, checks
from tests.tiers.support import (
    ACME,
    ATTACKS,
    GLOBEX,
    NUM_SLOTS,
    RECORD_BYTES,
    SECRET,
    counted,
    kv,
    load,
    prompt,
    right_or_missing,
    settings,
    store,
    tier_in,
)


def test_what_was_stored_is_loaded_bit_for_bit(tmp_path: Path) -> None:
    key = prompt(1, 5)
    with tier_in(tmp_path / "t") as tier:
        assert tier.locate(ACME, key, 0) == 0 and load(tier, ACME, key) is None
        assert all(store(tier, ACME, key, segment) for segment in range(3))
        assert [tier.locate(ACME, key, first) for first in (0, 1, 3)] == [3, 2, 0]
        assert tier.locate(ACME, key, 0, most=2) == 2
        assert all(load(tier, ACME, key, each) == kv(ACME, key, each) for each in range(3))
        assert counted(tier, {"stored": 3, "loaded": 3, "absent": 1, "read_bytes": 3 * RECORD_BYTES})


def test_records_survive_a_restart_and_the_last_used_stay(tmp_path: Path) -> None:
    with tier_in(tmp_path / "t") as tier:
        for number in range(NUM_SLOTS + 3):
            assert store(tier, ACME, prompt(number))
        assert counted(tier, {"evicted": 3, "sealed": NUM_SLOTS})
    with tier_in(tmp_path / "t") as tier:
        found = [right_or_missing(tier, ACME, prompt(number)) for number in range(NUM_SLOTS + 3)]
        assert found == [False] * 3 + [True] * NUM_SLOTS
        assert store(tier, ACME, prompt(100))
        assert tier.locate(ACME, prompt(3), 0) == 0, "the oldest record leaves first, also after a restart"


def test_a_shorter_payload_and_one_that_does_not_fit(tmp_path: Path) -> None:
    with tier_in(tmp_path / "t") as tier:
        job = tier.store(ACME, prompt(1), 0, memoryview(b"short"))
        assert job is not None and job.wait()
        into = bytearray(6)
        job = tier.load(ACME, prompt(1), 0, memoryview(into))
        assert job is not None and not job.wait() and counted(tier, {"mismatched": 1})
        job = tier.load(ACME, prompt(1), 0, memoryview(into)[:5])
        assert job is not None and job.wait() and bytes(into) == b"short\0"
        with pytest.raises(
            ArgumentError, match=f"payload=601 is not allowed; allowed: 1 to {RECORD_BYTES} bytes"
        ):
            tier.store(ACME, prompt(1), 0, memoryview(bytes(601)))
        with pytest.raises(ArgumentError, match="into=600 is not allowed; allowed: writable memory"):
            tier.load(ACME, prompt(1), 0, memoryview(bytes(600)))
        with pytest.raises(ArgumentError, match=r"segment=1 is not allowed; allowed: .* 0 to 0"):
            tier.store(ACME, prompt(1), 1, memoryview(bytes(6)))
        assert len(tier) == 1


def test_arrays_of_any_dtype_are_payloads(tmp_path: Path) -> None:
    values = np.arange(72, dtype=np.float64).reshape(2, 36)
    with tier_in(tmp_path / "t") as tier:
        job = tier.store(ACME, prompt(1), 0, memoryview(values))
        assert job is not None and job.wait()
        into = np.zeros_like(values)
        job = tier.load(ACME, prompt(1), 0, memoryview(into))
        assert job is not None and job.wait() and np.array_equal(into, values)


OTHERS = {
    "tenant": GLOBEX,
    "model": ACME._replace(model="other"),
    "adapter": ACME._replace(adapter="a"),
    "salt": ACME._replace(salt="t"),
    "weights": ACME._replace(weights=1),
}


@pytest.mark.parametrize("field", OTHERS)
def test_another_namespace_finds_nothing_also_where_locators_collide(
    tmp_path: Path, field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = OTHERS[field]
    monkeypatch.setattr(DiskRecords, "_locator", lambda *_: b"the same for all")
    with tier_in(tmp_path / "t") as tier:
        assert store(tier, ACME, prompt(1)) and store(
            tier, other, prompt(1)
        )  # the second: there is one already
        for number in range(ATTACKS):
            assert load(tier, other, prompt(1 + number % 2)) is None
        assert load(tier, ACME, prompt(2)) is None and load(tier, ACME, prompt(1)) == kv(ACME, prompt(1))
        assert counted(tier, {"mismatched": ATTACKS + 1, "loaded": 1, "stored": 1})


@pytest.mark.parametrize("field", ["fingerprint", "scheme", "segment_tokens"])
def test_a_record_of_another_engine_is_refused_also_where_locators_collide(
    tmp_path: Path, field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DiskRecords, "_locator", lambda *_: b"the same for all")
    other = {"fingerprint": fingerprint_of(weights=b"x"), "scheme": "fp8", "segment_tokens": 2}[field]
    with tier_in(tmp_path / "t") as tier:
        assert store(tier, ACME, prompt(1))
    for _ in range(max(ATTACKS // 10, 1)):
        with tier_in(tmp_path / "t", **{} if field == "scheme" else {field: other}) as tier:
            tier.settings = replace(
                tier.settings, **{field: other}
            )  # a folder of another scheme has no records
            assert load(tier, ACME, prompt(1)) is None and counted(tier, {"mismatched": 1})
    with tier_in(tmp_path / "t") as tier:
        assert load(tier, ACME, prompt(1)) == kv(ACME, prompt(1))


def test_a_folder_of_another_scheme_begins_anew(tmp_path: Path) -> None:
    """One that doesn't say of which scheme its records are keeps them, and has the scheme of its next opening."""
    for scheme in ("exact", "fp8", "exact"):
        with tier_in(tmp_path / "t", scheme=scheme) as tier:
            assert len(tier) == 0 and load(tier, ACME, prompt(1)) is None
            assert store(tier, ACME, prompt(1)) and load(tier, ACME, prompt(1)) == kv(ACME, prompt(1))
    with tier_in(tmp_path / "t") as tier:
        assert load(tier, ACME, prompt(1)) == kv(ACME, prompt(1))
        *numbers, _ = tier.folder.master
        sealed = seal(tier.folder._wrapping[0], MASTER, struct.pack("<32sQQ", *numbers))
    (tmp_path / "t" / MASTER).write_bytes(sealed)
    for _ in range(2):
        with tier_in(tmp_path / "t") as tier:
            assert load(tier, ACME, prompt(1)) == kv(ACME, prompt(1))
    with tier_in(tmp_path / "t", scheme="fp8") as tier:
        assert len(tier) == 0


def test_the_tag_decides_even_if_identities_were_not_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the comparison, the associated data still refuses a record of another identity."""
    monkeypatch.setattr(DiskRecords, "_locator", lambda *_: b"the same for all")
    monkeypatch.setattr(disk_records, "compare_digest", lambda *_: True)
    for other in (ACME._replace(salt="t"), ACME._replace(weights=1), GLOBEX):
        with tier_in(tmp_path / "t") as tier:
            tier.folder.make_keys(other.tenant)
            assert store(tier, ACME, prompt(1))
            assert load(tier, other, prompt(1)) is None and counted(tier, {"refused": 1})
            assert load(tier, ACME, prompt(1)) is None, "a record that didn't open is forgotten"


# --- the slab is attacked


class Medium:
    """The bytes of a slab, changed behind the tier's back."""

    def __init__(self, folder: Path, tier: DiskRecords) -> None:
        self.path = folder / "slab"
        self.slots_at, self.slot_bytes = tier._slab.slots_at, tier._slab.slot_bytes

    def read(self, at: int, size: int) -> bytes:
        with self.path.open("rb") as file:
            file.seek(at)
            return file.read(size)

    def write(self, at: int, content: bytes) -> None:
        with self.path.open("r+b") as file:
            file.seek(at)
            file.write(content)

    def header(self, slot: int) -> tuple[int, int]:
        return PAGE_BYTES + slot * HEADER_BYTES, HEADER_BYTES

    def payload(self, slot: int) -> tuple[int, int]:
        return self.slots_at + slot * self.slot_bytes, RECORD_BYTES

    def exchange(self, one: tuple[int, int], other: tuple[int, int]) -> None:
        first, second = self.read(*one), self.read(*other)
        self.write(one[0], second)
        self.write(other[0], first)

    def flip(self, at: int, chance: random.Random) -> None:
        (byte,) = self.read(at, 1)
        self.write(at, bytes([byte ^ (1 << chance.randrange(8))]))


def slot_of(tier: DiskRecords, namespace: Namespace, key: bytes) -> int:
    keys = tier.folder.keys(namespace.tenant)
    assert keys is not None
    slot = tier._table.find(tier._locator(keys, namespace, key))
    assert slot is not None
    return slot


def test_flipped_bits_are_refused_while_the_process_runs(tmp_path: Path) -> None:
    chance = random.Random(1)
    with tier_in(tmp_path / "t", direct=False) as tier:
        medium = Medium(tmp_path / "t", tier)
        for number in range(ATTACKS):
            assert store(tier, ACME, prompt(number))
            at, size = medium.payload(slot_of(tier, ACME, prompt(number)))
            medium.flip(at + chance.randrange(size), chance)
            assert load(tier, ACME, prompt(number)) is None
        assert counted(tier, {"refused": ATTACKS, "loaded": 0, "sealed": 0})
        tier._table.check()


def test_flipped_bits_anywhere_give_no_wrong_kv_after_a_restart(tmp_path: Path) -> None:
    """In the head, in headers and in payloads: a record is as it was, or absent."""
    chance = random.Random(2)
    lost = 0
    for round_ in range(max(ATTACKS // 4, 3)):
        with tier_in(tmp_path / "t", direct=False) as tier:
            medium = Medium(tmp_path / "t", tier)
            for number in range(4):
                assert store(tier, ACME, prompt(number))
            slots = [slot_of(tier, ACME, prompt(number)) for number in range(4)]
        for slot in slots:
            at, size = chance.choice((medium.header(slot), medium.payload(slot)))
            medium.flip(at + chance.randrange(size), chance)
        if round_ % 3 == 0:
            medium.flip(chance.randrange(32), chance)  # magic and geometry: the slab is made anew
        with tier_in(tmp_path / "t", direct=False) as tier:
            lost += sum(not right_or_missing(tier, ACME, prompt(number)) for number in range(4))
    assert lost == 4 * max(ATTACKS // 4, 3)


@pytest.mark.parametrize("parts", ["headers", "payloads", "both"])
def test_exchanged_slots_are_refused(tmp_path: Path, parts: str) -> None:
    """While the process runs nothing but payloads counts. After a restart both parts together are a whole record."""
    keys = [prompt(1), prompt(2)]
    for _ in range(max(ATTACKS // 10, 2)):
        with tier_in(tmp_path / "t", direct=False) as tier:
            medium = Medium(tmp_path / "t", tier)
            assert store(tier, ACME, keys[0]) and store(tier, GLOBEX, keys[1])
            slots = slot_of(tier, ACME, keys[0]), slot_of(tier, GLOBEX, keys[1])
            if parts != "payloads":
                medium.exchange(*map(medium.header, slots))
            if parts != "headers":
                medium.exchange(*map(medium.payload, slots))
            found = right_or_missing(tier, ACME, keys[0]), right_or_missing(tier, GLOBEX, keys[1])
            assert found == ((True, True) if parts == "headers" else (False, False))
        with tier_in(tmp_path / "t", direct=False) as tier:
            found = right_or_missing(tier, ACME, keys[0]), right_or_missing(tier, GLOBEX, keys[1])
            assert found == (
                False,
                False,
            )  # headers alone don't fit; of the others the tier has forgotten both


def test_a_replayed_slot_is_refused(tmp_path: Path) -> None:
    """An older record of the same slot is put back, with its header, after another record took the slot."""
    with tier_in(tmp_path / "t", direct=False, disk_bytes=2 * 4096 + 4096 + 128) as tier:
        medium = Medium(tmp_path / "t", tier)
        assert tier.num_slots == 1 and store(tier, ACME, prompt(0))
        old = [(place, medium.read(*place)) for place in (medium.header(0), medium.payload(0))]
        for number in range(1, ATTACKS + 1):
            assert store(tier, ACME, prompt(number))
            for (at, _), content in old:
                medium.write(at, content)
            assert load(tier, ACME, prompt(number)) is None and load(tier, ACME, prompt(0)) is None
        assert counted(tier, {"refused": ATTACKS, "loaded": 0})


def test_forged_headers_give_nothing(tmp_path: Path) -> None:
    """An attacker can write headers with right checksums, and knows no key."""
    chance = random.Random(3)
    with tier_in(tmp_path / "t", direct=False) as tier:
        medium = Medium(tmp_path / "t", tier)
        assert store(tier, ACME, prompt(1))
        good = medium.read(*medium.header(slot_of(tier, ACME, prompt(1))))
    for number in range(2, 2 + max(ATTACKS // 4, 3)):
        for slot in range(NUM_SLOTS):
            row = np.frombuffer(good, HEADER).copy()
            for name in ("tag", "identity", "nonce", "locator", "key_id")[: 1 + slot % 5]:
                row[name] = np.void(chance.randbytes(row.dtype[name].itemsize))
            row["payload_bytes"] = chance.choice([0, 1, RECORD_BYTES, 2**31, 2**32 - 1])
            row["sequence"] = np.uint64(chance.choice([0, 5, 2**63, 2**64 - 1]))
            row["check"] = checks(row)
            medium.write(medium.header(slot)[0], row.tobytes())
        with tier_in(tmp_path / "t", direct=False) as tier:
            assert load(tier, ACME, prompt(number - 1)) is None
            assert store(tier, ACME, prompt(number)) and right_or_missing(tier, ACME, prompt(number))
            tier._table.check()
            good = medium.read(*medium.header(slot_of(tier, ACME, prompt(number))))


def test_a_cut_or_emptied_slab_is_made_anew(tmp_path: Path) -> None:
    for size in (0, 100, 5000):
        with tier_in(tmp_path / "t") as tier:
            assert store(tier, ACME, prompt(1))
        with (tmp_path / "t" / "slab").open("r+b") as file:
            file.truncate(size)
        with tier_in(tmp_path / "t") as tier:
            assert not right_or_missing(tier, ACME, prompt(1)) and store(tier, ACME, prompt(1))


# --- what is on the disk


def test_nothing_in_clear_is_on_the_disk(tmp_path: Path) -> None:
    tenant = Namespace("a-client-chose-this-name", "secret-model", salt="secret-salt")
    key = prompt(77, 3)
    with tier_in(tmp_path / "t") as tier:
        assert store(tier, tenant, key, 2)
    for path in (tmp_path / "t").rglob("*"):
        content = path.read_bytes() if path.is_file() else b""
        for clear in (b"client-chose", b"secret-", key[:16], kv(tenant, key, 2)[:16]):
            assert clear not in content and clear not in str(path.relative_to(tmp_path)).encode()
        mode = path.stat().st_mode & 0o777
        assert mode == (0o700 if path.is_dir() else 0o600), path
    assert (tmp_path / "t").stat().st_mode & 0o777 == 0o700


def test_each_opening_seals_with_data_keys_of_its_own(tmp_path: Path) -> None:
    parts = set()
    for _ in range(3):
        with tier_in(tmp_path / "t") as tier:
            parts.add(tier._part)
            assert store(tier, ACME, prompt(len(parts)))
    assert len(parts) == 3
    with tier_in(tmp_path / "t") as tier:
        assert all(right_or_missing(tier, ACME, prompt(number)) for number in (1, 2, 3))


# --- settings


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"record_bytes": 0}, "record_bytes=0 is not allowed; allowed: an integer from 1 to"),
        ({"num_threads": 65}, "num_threads=65 is not allowed; allowed: an integer from 1 to 64"),
        ({"disk_bytes": 9000}, "disk_bytes=9000 is not allowed; allowed: at least 12,416 bytes, one record"),
        ({"fingerprint": b"short"}, "fingerprint=5 is not allowed; allowed: 32 bytes"),
        (
            {"fingerprint": "x" * 32},
            "fingerprint='str' is not allowed; allowed: 32 bytes, from fingerprint_of",
        ),
        ({"fingerprint": bytearray(32)}, "fingerprint='bytearray' is not allowed"),
        ({"fingerprint": None}, "fingerprint='NoneType' is not allowed"),
        ({"scheme": "int4"}, "scheme='int4' is not allowed; allowed: one of exact, fp8, int8"),
        ({"sync_s": 0}, "sync_s=0 is not allowed; allowed: a number of seconds > 0"),
        ({"sync_s": float("nan")}, "sync_s=nan is not allowed"),
    ],
)
def test_a_wrong_setting_is_refused(tmp_path: Path, given: dict[str, object], message: str) -> None:
    with pytest.raises((ConfigError, ArgumentError), match=message), tier_in(tmp_path / "t", **given):
        pass


def test_settings_need_a_fingerprint(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="fingerprint"):
        DiskSettings(tmp_path, 1 << 20, RECORD_BYTES)  # type: ignore[call-arg]


def test_records_of_another_fingerprint_stand_in_nobodys_way(tmp_path: Path) -> None:
    both = fingerprint_of(weights=b"x"), fingerprint_of(weights=b"y")
    for number, fingerprint in enumerate(both * 2):
        with tier_in(tmp_path / "t", fingerprint=fingerprint) as tier:
            assert (
                right_or_missing(tier, ACME, prompt(1))
                == (tier.locate(ACME, prompt(1), 0) == 1)
                == (number > 1)
            )
            assert store(tier, ACME, prompt(1)) and right_or_missing(tier, ACME, prompt(1))
            assert len(tier) == min(number + 1, 2) and counted(tier, {"mismatched": 0})


def test_another_size_makes_a_new_slab_and_keeps_generations(tmp_path: Path) -> None:
    with tier_in(tmp_path / "t") as tier:
        assert store(tier, ACME, prompt(1))
        assert tier.purge("acme") == 1 and store(tier, ACME, prompt(1))
    with tier_in(tmp_path / "t", record_bytes=RECORD_BYTES + 1) as tier:
        assert not right_or_missing(tier, ACME, prompt(1)) and tier.folder.generation("acme") > 0
        assert store(tier, ACME, prompt(1)) and right_or_missing(tier, ACME, prompt(1))


def test_a_miss_is_quick_and_makes_no_system_call(tmp_path: Path) -> None:
    key = prompt(1, 700)
    with tier_in(tmp_path / "t") as tier:
        assert store(tier, ACME, prompt(2))
        began = time.thread_time_ns()
        for _ in range(200):
            assert tier.locate(ACME, key, 699) == 0
        assert (time.thread_time_ns() - began) / 200 < 100_000  # 2.5 µs; the bound is for a busy machine


def test_secrets_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="fleet_secret='5 bytes' is not allowed"):
        DiskRecords(settings(tmp_path / "t"), [b"short"])
    with pytest.raises(ConfigError, match="fleet_secret"):
        DiskRecords(settings(tmp_path / "t"), [])
    with tier_in(tmp_path / "t", secrets=(SECRET,)):
        pass


@pytest.mark.parametrize("is_known", [False, True])
def test_a_forged_header_with_the_last_number_spoils_no_later_record(tmp_path: Path, is_known: bool) -> None:
    """Who can write the folder makes a header that looks whole; one that says a key which there is, or another."""
    with tier_in(tmp_path / "t", direct=False) as tier:
        assert store(tier, ACME, prompt(1))
        keys = tier.folder.keys("acme")
        assert keys is not None
        key_id = keys.key_id if is_known else b"k" * 16
    forged = Header(10, MAX_SEQUENCE - 1, b"l" * 16, key_id, 0, b"n" * 12, b"t" * 16, b"i" * 32).packed()
    with (tmp_path / "t" / "slab").open("r+b") as file:
        file.seek(PAGE_BYTES + HEADER_BYTES * (NUM_SLOTS - 1))
        file.write(forged)
    for numbers in ([1], [1, 2, 3], [1, 2, 3, 4, 5]):
        with tier_in(tmp_path / "t", direct=False) as tier:
            assert counted(tier, {"torn": 0})
            for number in numbers[:-2] or numbers:
                assert right_or_missing(tier, ACME, prompt(number)), number
            assert all(store(tier, ACME, prompt(number)) for number in numbers[-2:])
