"""Writes to a store that a replica of the fleet could make, signed with the fleet's secret."""

from __future__ import annotations

import time
from dataclasses import replace

from radixkv.coordination.keys import FleetKeys
from radixkv.coordination.proofs import Proofs
from radixkv.coordination.store.protocol import Store, WriteResult
from radixkv.coordination.store.wire import Raised, Registration, new_token
from radixkv.coordination.values import WIRE_VERSION, Load, Writer


def beat(
    store: Store, keys: FleetKeys, writer: Writer, number: int, lease_s: float = 10.0, address: str = ""
) -> WriteResult:
    """Write one beat of a registration. Its model and block size match those of the other tests."""
    stated = Registration(
        writer.replica_id, writer.epoch, writer.nonce, address, "fp:model", 16, WIRE_VERSION, keys.canary,
        lease_ms=int(lease_s * 1000), beats=number, stated_ms=int(time.time() * 1000),
    )  # fmt: skip
    return store.beat(replace(stated, proof=Proofs(keys).of_beat(stated)), Load())


def raise_generation(store: Store, keys: FleetKeys, tenant: bytes, above: int = 0) -> Raised:
    """Raise a tenant's generation to ``above + 1``, regardless of the store's generation, and return the raise."""
    (looked,) = store.look_at([tenant])
    assert looked is not None
    raised = Raised(above + 1, new_token(), "another", "ab" * 16)
    raised = raised._replace(proof=Proofs(keys).of_raise(tenant, raised))
    assert store.raise_generation(tenant, raised, looked.standing).value == 1
    return raised


def confirm(store: Store, keys: FleetKeys, tenant: bytes, writer: Writer, raised: Raised) -> bool:
    """Confirm a raise for a registration. Return whether the store accepted it."""
    proof = Proofs(keys).of_confirmation(tenant, raised, writer.replica_id, writer.nonce)
    return store.confirm(tenant, writer, raised, proof)
