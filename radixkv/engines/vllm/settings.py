"""Settings of host memory and a disk behind vLLM: those of ``kv_connector_extra_config``. Imports nothing of vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final, Self, get_args

from radixkv.config import Tenant
from radixkv.configuration.private_files import read_secrets
from radixkv.errors import ConfigError
from radixkv.tiers.host.index import Scrub
from radixkv.tiers.settings import bytes_of, rate_of

MAX_SLOTS: Final = 2**31 - 1


@dataclass(frozen=True, slots=True)
class ConnectorSettings:
    """Settings of host memory and a disk behind vLLM. Raises ConfigError.

    - ``host_memory``: bytes on each worker, or a text such as ``"8GiB"``. ``host_blocks``: blocks, in its place.
    - ``policy``: the eviction policy. ``scrub``: see CacheConfig.
    - ``keys``: file of the engine's keys (``radixkv keys derive``): tenants come from salts. ``anonymous``: whether
      requests without such a salt are served.
    - ``tenants``: settings of tenants from the start on, by the fleet's names: fields of ``config.Tenant``; needs
      ``keys``.
    - ``model``: identity of model and tokenizer in namespaces.
    - ``control``: folder of a control channel; needs ``keys``.
    - ``disk``: folder of a disk tier below. ``disk_size``: its bytes, or a text such as ``"200GiB"``. ``fleet_secret``:
      file of the secret under which its keys are sealed. All three, or none. ``previous_secrets``: files of previous
      ones, between commas.
    - ``disk_writes``: the most that the disk tier writes on average, first come, first served: ``"2TB/day"``.
    """

    host_memory: int | str | None = None
    host_blocks: int | None = None
    policy: str = "learned"
    scrub: Scrub = "cross-tenant"
    keys: str | None = None
    anonymous: bool = True
    tenants: Mapping[str, Mapping[str, Any]] | None = None
    model: str = "vllm"
    control: str | None = None
    disk: str | None = None
    disk_size: int | str | None = None
    disk_writes: str | None = None
    fleet_secret: str | None = None
    previous_secrets: str | None = None

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Self:
        """Return settings by name. Raises ConfigError for other names too."""
        names = [each.name for each in fields(cls)]
        for name in given:
            if name not in names:
                raise ConfigError("kv_connector_extra_config", name, f"only {', '.join(names)}")
        return cls(**given)

    def __post_init__(self) -> None:
        if (self.host_memory is None) == (self.host_blocks is None):
            allowed = "one of the two: bytes, or blocks, of host memory"
            raise ConfigError("host_memory, host_blocks", (self.host_memory, self.host_blocks), allowed)
        if self.host_blocks is not None and not _is_count(self.host_blocks):
            raise ConfigError("host_blocks", self.host_blocks, f"an integer from 1 to {MAX_SLOTS}")
        if self.host_memory is not None:
            bytes_of("host_memory", self.host_memory)
        for name in ("policy", "model"):
            if not isinstance(getattr(self, name), str) or not getattr(self, name):
                raise ConfigError(name, getattr(self, name), "a text")
        for name in ("keys", "control", "disk", "fleet_secret", "previous_secrets"):
            value = getattr(self, name)
            if not isinstance(value, str | None) or value == "":
                is_shown = name in ("control", "disk") or value == ""  # others may be the secret itself
                raise ConfigError(name, value if is_shown else "…", "a path")
        if not isinstance(self.anonymous, bool):
            raise ConfigError("anonymous", self.anonymous, "true or false")
        if self.scrub not in get_args(Scrub):
            raise ConfigError("scrub", self.scrub, f"one of {', '.join(get_args(Scrub))}")
        if self.control is not None and self.keys is None:
            raise ConfigError("control", self.control, "with keys, of the purpose 'control'")
        if self.tenants is not None:
            self._check_tenants(self.tenants)
        below = (self.disk, self.disk_size, self.fleet_secret)
        if None in below and below != (None, None, None):
            raise ConfigError("disk, disk_size, fleet_secret", below[:2], "all three, or none")
        if self.previous_secrets is not None and self.fleet_secret is None:
            raise ConfigError("previous_secrets", "…", "with fleet_secret")
        if self.disk_size is not None:
            bytes_of("disk_size", self.disk_size)
        if self.disk_writes is not None:
            rate_of("disk_writes", self.disk_writes)
            if self.disk is None:
                raise ConfigError("disk_writes", self.disk_writes, "with disk")

    def _check_tenants(self, tenants: object) -> None:
        if self.keys is None or not isinstance(tenants, Mapping):
            allowed = """settings by name, such as {"acme": {"mode": "strict", "guaranteed_blocks": 64}}, with keys"""
            raise ConfigError("tenants", tenants, allowed)
        names = [each.name for each in fields(Tenant) if each.name != "id"]
        for tenant, given in tenants.items():
            if not isinstance(given, Mapping) or not given.keys() <= set(names):
                raise ConfigError(f"tenants[{tenant!r}]", given, f"only {', '.join(names)}, by name")

    @property
    def disk_bytes(self) -> int:
        """Bytes of the disk tier; 0 without one."""
        return 0 if self.disk_size is None else bytes_of("disk_size", self.disk_size)

    @property
    def disk_bytes_per_s(self) -> float | None:
        """The most that the disk tier writes on average; None for no bound."""
        return None if self.disk_writes is None else rate_of("disk_writes", self.disk_writes)

    def secrets(self) -> list[bytes]:
        """Read the fleet's secrets, the current one first. Warns of files that others can access.

        Raises ConfigError.
        """
        assert self.fleet_secret is not None
        previous = () if self.previous_secrets is None else self.previous_secrets.split(",")
        files = [("previous_secrets", each) for each in previous]
        return read_secrets([("fleet_secret", self.fleet_secret), *files])

    def num_slots(self, block_bytes: int) -> int:
        """Return the number of slots, for blocks of so many bytes on a worker. Raises ConfigError if none fits."""
        if self.host_memory is None:
            assert self.host_blocks is not None
            return self.host_blocks
        num_slots = bytes_of("host_memory", self.host_memory) // block_bytes
        if not _is_count(num_slots):
            raise ConfigError("host_memory", self.host_memory, f"at least a block, {block_bytes:,} bytes")
        return num_slots


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_SLOTS
