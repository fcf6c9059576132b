"""A planted bug: radixkv inside vLLM checks the salt of a request, and then leaves it out of the namespace."""

from __future__ import annotations

from radixkv.engines.vllm import manager
from radixkv.tenancy.salt import SaltOwner, SaltReader

__all__ = ["Scheduler"]

_read = SaltReader.read


def _without_owner(self: SaltReader, cache_salt: str | None) -> SaltOwner:
    return _read(self, cache_salt)._replace(tenant=f"t-{'0' * 32}", salt="")


SaltReader.read = _without_owner  # type: ignore[method-assign]
Scheduler = manager.Scheduler
