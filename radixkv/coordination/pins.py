"""Pins of the fleet, as records in the store: which prefix to keep resident, where, until when, and its states.

A pin is stored under the digest of its tenant, with a part for each replica that took part. Every replica writes its
own part. A pin has no owner: any replica that holds the prefix can inform replicas that joined later. The end of a pin
is kept until the pin would have expired, so that a replica that was cut off learns of it.

    keep ──▶ state (each its own part) ──▶ end, or its time is over
    keep(anew=False): write it again after the store lost it
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from radixkv.coordination.keys import NAMESPACE_BYTES
from radixkv.coordination.replica import Replica
from radixkv.coordination.settings import REPLICA_ID
from radixkv.coordination.store.wire import is_pin_id
from radixkv.coordination.validation import (
    check_error,
    check_flag,
    check_instance,
    check_namespace,
    check_state,
    check_tenant,
    check_text,
    checked_seconds,
)
from radixkv.coordination.values import (
    MAX_FLEET_PINS,
    FleetPin,
    JobPart,
    JobState,
    check_amount,
)
from radixkv.errors import ArgumentError
from radixkv.signing import mac

if TYPE_CHECKING:
    from radixkv.config import Namespace

MAX_PIN_S = 366 * 86_400.0
_WANTED = re.compile(f"all|[1-9][0-9]{{0,3}}|={REPLICA_ID}(,{REPLICA_ID})*")


class PinRecords(Replica):
    """Operations of a replica on pins of the fleet."""

    def pin_digest(self, namespace: Namespace) -> bytes:
        """Return the 32-byte tag of the namespace's pins; it changes with each purge of the tenant; local.

        It depends on the purge, not on the generation's number: a store that lost a generation may give its number
        again.
        """
        check_namespace(namespace)
        raised = self.purges.raised(namespace.tenant)
        return mac(self.keys.namespace(namespace, raised.generation), "pin", raised.purge)

    def keep_pin(
        self, tenant: str, pin: FleetPin, ttl_s: float, *, anew: bool = True, most: int = MAX_FLEET_PINS
    ) -> bool:
        """Record that a prefix stays resident for ``ttl_s`` from now; ``anew=False``: only if no record of it exists.

        False if the tenant has ``most`` other pins, 0 to 256. Raises ArgumentError, StoreUnavailable.
        """
        check_tenant(tenant)
        _check_pin(pin)
        seconds = checked_seconds("ttl_s", ttl_s, MAX_PIN_S, above=0.0)
        check_flag("anew", anew)
        check_amount("most", most)
        bound = min(most, MAX_FLEET_PINS)
        kept = self.store.keep_pin(self.keys.tenant(tenant), pin, seconds, anew=anew, most=bound)
        return self._counted(kept).value == 1

    def end_pin(self, tenant: str, pin: FleetPin, keep_s: float) -> bool:
        """End a pin early. If the store has no record of it, keep its end for ``keep_s``.

        ``keep_s`` is limited to 366 days, and to at least one millisecond.

        False if there was none. Raises StoreUnavailable.
        """
        check_tenant(tenant)
        _check_pin(pin)
        seconds = min(checked_seconds("keep_s", keep_s, 1e15), MAX_PIN_S)
        return self._counted(self.store.end_pin(self.keys.tenant(tenant), pin, seconds)).value == 1

    def state_pin(
        self, tenant: str, pin_id: str, state: JobState, num_tokens: int = 0, error: str = ""
    ) -> bool:
        """Write the pin's state on this replica. False if there is none. Raises ArgumentError, StoreUnavailable."""
        check_tenant(tenant)
        check_text("pin_id", pin_id)
        check_state(state)
        check_amount("num_tokens", num_tokens)
        check_error(error)
        part = JobPart(*self.info().writer, state, num_tokens, error)
        return is_pin_id(pin_id) and self.store.state_pin(self.keys.tenant(tenant), pin_id, part)

    def fleet_pins(self, tenant: str) -> list[FleetPin]:
        """Return a tenant's pins, by id, ended ones included. Parts of registrations that aren't live are lost.

        Raises StoreUnavailable.
        """
        check_tenant(tenant)
        living = {each.writer for each in self.replicas() if each.live or each.is_self}
        return [
            replace(
                pin,
                parts=tuple(
                    part if part.writer in living else replace(part, state="lost") for part in pin.parts
                ),
            )
            for pin in self.store.pins(self.keys.tenant(tenant))
        ]


def _check_pin(pin: FleetPin) -> None:
    check_instance("pin", pin, FleetPin)
    if not isinstance(pin.id, str) or not is_pin_id(pin.id):
        raise ArgumentError("pin.id", pin.id, "32 hex digits")
    if not isinstance(pin.namespace_digest, bytes) or len(pin.namespace_digest) != NAMESPACE_BYTES:
        raise ArgumentError("pin.namespace_digest", pin.namespace_digest, f"{NAMESPACE_BYTES} bytes")
    check_amount("pin.num_tokens", pin.num_tokens)
    wanted: object = pin.wanted
    if not isinstance(wanted, str) or not _WANTED.fullmatch(wanted) or wanted.count(",") >= 1024:
        raise ArgumentError("pin.wanted", wanted, "all, a number, or = and up to 1,024 names")
