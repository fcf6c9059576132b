"""What shows that a replica of the fleet wrote a record: a MAC under a key that the fleet's secret gives each purpose.

    record                 covered
    raise of a generation  tenant digest, generation, token, replica, nonce of its registration
    confirmation           tenant digest, generation, token, replica, nonce of its registration
    beat                   replica, epoch, nonce, number and time of the beat, lease, address, and what else it states
    farewell               replica, epoch, nonce
    answer to a challenge  challenge, audience (replica, epoch, nonce), address

Each purpose has a key of its own: HMAC-SHA256(fleet secret, ("key", purpose)). The fields are framed, so no two records
share bytes. A MAC is 64 hex digits; it is compared in constant time. Cost: some 5 µs each. Nothing of this is done for
a block or a request of a client: once a raise, a confirmation, a beat, and a replica that is read.
"""

from __future__ import annotations

import hmac
from typing import TYPE_CHECKING

from radixkv.coordination.keys import mac

if TYPE_CHECKING:
    from radixkv.coordination.keys import FleetKeys
    from radixkv.coordination.store.wire import Raised, Registration
    from radixkv.coordination.values import Writer


class Proofs:
    """See the module's docstring. Thread-safe."""

    def __init__(self, keys: FleetKeys) -> None:
        self._raise, self._confirmation = keys.derived("raise"), keys.derived("confirmation")
        self._beat, self._farewell = keys.derived("beat"), keys.derived("farewell")
        self._challenge = keys.derived("challenge")

    def of_raise(self, tenant: bytes, raised: Raised) -> str:
        """The proof of a raise, whatever ``raised.proof`` is."""
        fields = raised.generation, raised.token, raised.replica_id, raised.nonce
        return mac(self._raise, "raise", tenant, *fields).hex()

    def is_raise(self, tenant: bytes, raised: Raised) -> bool:
        """Whether a replica of the fleet raised the tenant's generation so."""
        return raised.generation > 0 and _is_same(raised.proof, self.of_raise(tenant, raised))

    def of_confirmation(self, tenant: bytes, raised: Raised, replica_id: str, nonce: str) -> str:
        """The proof that a registration has nothing of before a raise."""
        fields = raised.generation, raised.token, replica_id, nonce
        return mac(self._confirmation, "confirmation", tenant, *fields).hex()

    def is_confirmation(self, proof: str, tenant: bytes, raised: Raised, replica_id: str, nonce: str) -> bool:
        """Whether ``proof`` is that."""
        return _is_same(proof, self.of_confirmation(tenant, raised, replica_id, nonce))

    def of_beat(self, registration: Registration) -> str:
        """The proof of what a beat states, whatever ``registration.proof`` is.

        It leaves out the last number of the log and what is left of an earlier process's lease: the store states them.
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
        ).hex()

    def is_beat(self, registration: Registration) -> bool:
        """Whether that very registration stated all that is covered; how long ago is the reader's to check."""
        return registration.beats > 0 and _is_same(registration.proof, self.of_beat(registration))

    def of_farewell(self, writer: Writer) -> str:
        """The proof that a registration has given its lease back."""
        return mac(self._farewell, "farewell", *writer).hex()

    def is_farewell(self, registration: Registration) -> bool:
        """Whether that very registration has left."""
        return registration.beats == 0 and _is_same(registration.proof, self.of_farewell(registration.writer))

    def answer(self, challenge: str, audience: str, address: str) -> str:
        """What the registration ``audience``, reached at ``address``, answers a challenge."""
        return mac(self._challenge, "challenge", challenge, audience, address).hex()

    def is_answer(self, answer: str, challenge: str, audience: str, address: str) -> bool:
        """Whether ``answer`` is that."""
        return _is_same(answer, self.answer(challenge, audience, address))


def _is_same(proof: str, expected: str) -> bool:
    return hmac.compare_digest(proof.encode(), expected.encode())
