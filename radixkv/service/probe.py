"""The cross-tenant probe, from outside: does a prompt that one tenant warmed show to another?

    B asks for P: nothing (P was never used)   A warms P   B asks for P: must be nothing
    B warms P                                  B asks for P: must be all of it, or the probe was blind

The positive control comes last on purpose: it shows that B's silence before was isolation, not a lookup that
never finds anything. Prompts are random, so every run asks about something new; what was warmed lies in a
salt of its own and is forgotten at the end.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from radixkv.service.client import Client

_WORDS = ("rule", "page", "answer", "manual", "order", "return", "price", "letter", "number", "question")


@dataclass(frozen=True, slots=True)
class ProbeReport:
    """What the probes saw. ``leaks``: prompts of A's that B matched; ``blind``: controls that did not match fully."""

    probes: int
    leaks: int
    blind: int
    tokens: int

    @property
    def ok(self) -> bool:
        """Whether nothing leaked, and the probe would have seen it."""
        return self.probes > 0 and not self.leaks and not self.blind

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON types."""
        return {"ok": self.ok, **asdict(self)}


def probe(a: Client, b: Client, num_probes: int, progress: Callable[[int], None]) -> ProbeReport:
    """Probe ``num_probes`` random prompts with the keys of two tenants. Raises ServiceError."""
    salt = f"probe-{secrets.token_hex(8)}"
    leaks = blind = tokens = 0
    for done in range(1, num_probes + 1):
        fields = {"prompt": _prompt(), "salt": salt}
        before = b.call("POST", "/v1/lookup", fields)["matched_tokens"]
        a.call("POST", "/v1/warm", fields)
        leaks += bool(before or b.call("POST", "/v1/lookup", fields)["matched_tokens"])
        warmed = b.call("POST", "/v1/warm", fields)
        found = b.call("POST", "/v1/lookup", fields)["matched_tokens"]
        leaks += bool(warmed["cached_before"])
        blind += not found or found != warmed["tokens"]
        tokens += found
        progress(done)
    for client in (a, b) if num_probes else ():
        client.call("DELETE", f"/v1/cache?salt={salt}")
    return ProbeReport(num_probes, leaks, blind, tokens)


def _prompt() -> str:
    return "".join(f"{secrets.choice(_WORDS)} {secrets.randbelow(1000)}. " for _ in range(60)) + "\n"
