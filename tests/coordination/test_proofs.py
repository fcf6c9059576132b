"""A proof covers one statement, by one fleet, for one purpose.

Beats that are too old or from the future do not count.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from radixkv.clock import ManualClock
from radixkv.coordination.keys import FleetKeys
from radixkv.coordination.proofs import Proofs
from radixkv.coordination.routing.replica_sources import Followed
from radixkv.coordination.settings import Settings
from radixkv.coordination.store.memory import MemoryStore
from radixkv.coordination.store.wire import Raised, Registration
from radixkv.coordination.values import WIRE_VERSION, Load, Writer
from radixkv.coordination.view.reader import Reader

SECRET = b"the secret of the fleet under test"
PROOFS, OTHERS = Proofs(FleetKeys(SECRET)), Proofs(FleetKeys(SECRET[::-1]))
TENANT = b"t" * 32
RAISED = Raised(3, "ab" * 16, "a", "nonce")
BEAT = Registration(
    "a", 7, "nonce", "http://h", "fp:model", 16, WIRE_VERSION, "canary", lease_ms=10_000, beats=4, stated_ms=5
)


def test_proofs_of_a_raise_and_its_confirmation_fit_one_purge() -> None:
    signed = RAISED._replace(proof=PROOFS.of_raise(TENANT, RAISED))
    assert PROOFS.is_raise(TENANT, signed) and not OTHERS.is_raise(TENANT, signed)
    others = [
        signed._replace(generation=4), signed._replace(token="cd" * 16), signed._replace(replica_id="b"),
        signed._replace(nonce="other"), signed._replace(proof=""), signed._replace(proof="é"),
    ]  # fmt: skip
    assert not any(PROOFS.is_raise(TENANT, each) for each in others) and not PROOFS.is_raise(
        b"u" * 32, signed
    )
    proof = PROOFS.of_confirmation(TENANT, signed, "b", "n")
    assert PROOFS.is_confirmation(proof, TENANT, signed, "b", "n")
    assert not PROOFS.is_confirmation(proof, b"u" * 32, signed, "b", "n")
    assert not PROOFS.is_confirmation(proof, TENANT, signed, "c", "n")
    assert not PROOFS.is_confirmation(proof, TENANT, signed, "b", "m")
    assert not any(PROOFS.is_confirmation(proof, TENANT, each, "b", "n") for each in others[:2])
    assert not OTHERS.is_confirmation(proof, TENANT, signed, "b", "n")
    assert not PROOFS.is_confirmation(signed.proof, TENANT, signed, "a", "nonce"), (
        "a proof for another purpose"
    )


def test_the_proof_of_a_beat_covers_all_that_it_states() -> None:
    signed = replace(BEAT, proof=PROOFS.of_beat(BEAT))
    assert PROOFS.is_beat(signed) and not OTHERS.is_beat(signed) and not PROOFS.is_farewell(signed)
    assert PROOFS.is_beat(replace(signed, last_seq=9, replaced_ms=9)), "the store adds these fields"
    for changed in (
        replace(signed, replica_id="b"), replace(signed, epoch=8), replace(signed, nonce="other"),
        replace(signed, address="http://i"), replace(signed, fingerprint="fp:other"), replace(signed, block_size=32),
        replace(signed, wire_version=4), replace(signed, canary="other"), replace(signed, lease_ms=9),
        replace(signed, beats=5), replace(signed, beats=0), replace(signed, stated_ms=6), replace(signed, proof=""),
        replace(signed, weights=1),
    ):  # fmt: skip
        assert not PROOFS.is_beat(changed) and not PROOFS.is_farewell(changed), changed
    gone = replace(signed, beats=0, proof=PROOFS.of_farewell(signed.writer))
    assert PROOFS.is_farewell(gone) and not PROOFS.is_farewell(replace(gone, nonce="other"))
    assert not PROOFS.is_farewell(replace(gone, beats=1))


def test_the_proof_of_a_drain_fits_one_registration() -> None:
    """It is beside the proof of the beat, which replicas can check that know of no drain."""
    signed = replace(BEAT, draining=PROOFS.of_drain(BEAT.writer))
    signed = replace(signed, proof=PROOFS.of_beat(BEAT))
    assert PROOFS.is_beat(signed) and PROOFS.is_drain(signed) and not OTHERS.is_drain(signed)
    for changed in (
        replace(signed, draining=""), replace(signed, draining=PROOFS.of_farewell(BEAT.writer)),
        replace(signed, replica_id="b"), replace(signed, epoch=8), replace(signed, nonce="other"),
    ):  # fmt: skip
        assert not PROOFS.is_drain(changed), changed


def test_an_answer_is_for_one_challenge_of_one_registration_at_one_address() -> None:
    answer = PROOFS.answer("ab" * 32, "a@7.nonce", "http://h")
    assert PROOFS.is_answer(answer, "ab" * 32, "a@7.nonce", "http://h")
    for other in (
        ("cd" * 32, "a@7.nonce", "http://h"),
        ("ab" * 32, "a@8.nonce", "http://h"),
        ("ab" * 32, "a@7.nonce", "http://i"),
    ):
        assert not PROOFS.is_answer(answer, *other)
    assert not OTHERS.is_answer(answer, "ab" * 32, "a@7.nonce", "http://h")


@pytest.mark.parametrize(
    ("seconds", "counts"), [(0.0, True), (39.0, True), (41.0, False), (-29.0, True), (-31.0, False)]
)
def test_a_beat_counts_for_its_lease_and_the_skew(seconds: float, counts: bool) -> None:
    """The lease that the store names is ignored: any writer to the store can change it."""
    clock, store, keys = ManualClock(50.0), MemoryStore(ManualClock(1000.0)), FleetKeys(SECRET)
    stated = replace(BEAT, epoch=0, canary=keys.canary, stated_ms=1_000_000)
    stated = replace(stated, epoch=store.boot(stated).value)
    store.beat(replace(stated, proof=PROOFS.of_beat(stated)), Load())
    wall_s = 1_000.0 + seconds
    reader = Reader(Settings("b", SECRET, "fp:model", 16), keys, store, clock, wall=lambda: wall_s)
    reader.refresh()
    (known,) = reader.known()
    assert known.info.live and (known.info.proven, known.info.reachable) == (counts, counts)
    assert ("s old by the clock here" in (known.info.incompatible or "")) is not counts
    assert [each.registration.writer for each in reader.remotes.values()] == [
        Writer("a", stated.epoch, "nonce")
    ]
    assert bool(Followed(reader, keys, clock, lambda tenant: 0).members()) is counts, (
        "such a replica is not ranked either"
    )


def test_a_restored_registration_lives_for_at_most_one_lease() -> None:
    """A repeated beat extends nothing, even if an attacker renews its lease all the time."""
    clock, store, keys = ManualClock(50.0), MemoryStore(ManualClock(1000.0)), FleetKeys(SECRET)
    stated = replace(BEAT, epoch=0, canary=keys.canary, stated_ms=1_000_000)
    stated = replace(stated, epoch=store.boot(stated).value)
    store.beat(replace(stated, proof=PROOFS.of_beat(stated)), Load())
    reader = Reader(Settings("b", SECRET, "fp:model", 16), keys, store, clock, wall=lambda: 1_000.0)
    live = []
    for _ in range(60):
        store.records["a"].live_until = store.records["a"].listed_until = 1e9
        reader.refresh()
        live.append(reader.known()[0].info.live)
        clock.advance(1.0)
    assert live == [True] * 10 + [False] * 50
