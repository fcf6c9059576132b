"""Proofs that a replica of the fleet wrote a record: a MAC under a key derived from the fleet secret for each purpose.

    record                 covered
    raise of a generation  tenant digest, generation, token, replica, nonce of its registration
    confirmation           tenant digest, generation, token, replica, nonce of its registration
    beat                   replica, epoch, nonce, number and time of the beat, lease, address, and its other fields
    drain, farewell        replica, epoch, nonce
    answer to a challenge  challenge, audience (replica, epoch, nonce), address

Each purpose has its own key: HMAC-SHA256(fleet secret, ("key", purpose)). The fields are framed, so no two records
share bytes. A MAC is 64 hex digits and is compared in constant time. Cost: about 5 µs for each raise, confirmation,
beat, and replica that is read. Blocks and client requests need no proof.
"""

from __future__ import annotations

import hmac
from typing import TYPE_CHECKING

from radixkv.signing import mac

if TYPE_CHECKING:
    from radixkv.coordination.keys import FleetKeys
    from radixkv.coordination.store.wire import Raised, Registration
    from radixkv.coordination.values import Writer


class Proofs:
    """Makes and checks proofs; see the module's docstring. Thread-safe."""

    def __init__(self, keys: FleetKeys) -> None:
        self._raise, self._confirmation = keys.derived("raise"), keys.derived("confirmation")
        self._beat, self._drain = keys.derived("beat"), keys.derived("drain")
        self._farewell = keys.derived("farewell")
        self._challenge = keys.derived("challenge")

    def of_raise(self, tenant: bytes, raised: Raised) -> str:
        """Return the proof of a raise; ``raised.proof`` is ignored."""
        fields = raised.generation, raised.token, raised.replica_id, raised.nonce
        return mac(self._raise, "raise", tenant, *fields).hex()

    def is_raise(self, tenant: bytes, raised: Raised) -> bool:
        """Whether a replica of the fleet made this raise of the tenant's generation."""
        return raised.generation > 0 and _is_same(raised.proof, self.of_raise(tenant, raised))

    def of_confirmation(self, tenant: bytes, raised: Raised, replica_id: str, nonce: str) -> str:
        """Return the proof that a registration holds nothing from before a raise."""
        fields = raised.generation, raised.token, replica_id, nonce
        return mac(self._confirmation, "confirmation", tenant, *fields).hex()

    def is_confirmation(self, proof: str, tenant: bytes, raised: Raised, replica_id: str, nonce: str) -> bool:
        """Whether ``proof`` is the proof of this confirmation."""
        return _is_same(proof, self.of_confirmation(tenant, raised, replica_id, nonce))

    def of_beat(self, registration: Registration) -> str:
        """Return the proof of a beat's fields; ``registration.proof`` is ignored.

        It doesn't cover the last number of the log, nor the remaining lease of an earlier process: the store writes
        those.
        """
        return mac(
            self._beat,
            "beat",
            registration.writer.audience,
            registration.replica_id,
            registration.epoch,
            registration.nonce,
            registration.beats,
            registration.stated_ms,
            registration.lease_ms,
            registration.address,
            registration.fingerprint,
            registration.block_size,
            registration.wire_version,
            registration.canary,
            registration.weights,
        ).hex()

    def is_beat(self, registration: Registration) -> bool:
        """Whether this registration itself stated all covered fields; the reader must check the age."""
        return registration.beats > 0 and _is_same(registration.proof, self.of_beat(registration))

    def of_drain(self, writer: Writer) -> str:
        """Return the proof that a registration drains, from now until it leaves.

        It is beside the beat's proof, not in it: replicas that don't know of it can still check the beat.
        """
        return mac(self._drain, "drain", *writer).hex()

    def is_drain(self, registration: Registration) -> bool:
        """Whether this registration itself has said that it drains."""
        return registration.draining != "" and _is_same(
            registration.draining, self.of_drain(registration.writer)
        )

    def of_farewell(self, writer: Writer) -> str:
        """Return the proof that a registration gave its lease back."""
        return mac(self._farewell, "farewell", *writer).hex()

    def is_farewell(self, registration: Registration) -> bool:
        """Whether this registration itself has left."""
        return registration.beats == 0 and _is_same(registration.proof, self.of_farewell(registration.writer))

    def answer(self, challenge: str, audience: str, address: str) -> str:
        """Return the answer of registration ``audience``, reached at ``address``, to a challenge."""
        return mac(self._challenge, "challenge", challenge, audience, address).hex()

    def is_answer(self, answer: str, challenge: str, audience: str, address: str) -> bool:
        """Whether ``answer`` is the right answer to the challenge."""
        return _is_same(answer, self.answer(challenge, audience, address))


def _is_same(proof: str, expected: str) -> bool:
    return hmac.compare_digest(proof.encode(), expected.encode())
