"""Amounts of memory, as people write them: 20GiB, 64GB, 60%, auto, or a number of blocks.

    20GiB, 1.5 TiB    bytes, in powers of 1,024
    64GB, 500 MB      bytes, in powers of 1,000
    60%               a share of what there is
    auto              the share that the setting usually takes
    4096              blocks, where a setting takes them

An ``Amount`` is what was written. ``blocks`` turns it into blocks, once it is known how large one is and how much there
is. Imports nothing but errors.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from decimal import Decimal
from typing import Final, Literal

from radixkv.errors import ConfigError

GIB: Final = 1 << 30
MAX_BYTES: Final = 1 << 60
_POWERS: Final = {"K": 1, "M": 2, "G": 3, "T": 4, "P": 5}
_BYTES: Final = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,9})?)\s*([KMGTP])(i?)B", re.ASCII)
_SHARE: Final = re.compile(r"([0-9]{1,3}(?:\.[0-9]{1,6})?)\s*%", re.ASCII)
_BLOCKS: Final = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,9})?)\s*([kKmM]?)", re.ASCII)
_THOUSANDS: Final = {"": 1, "k": 1_000, "m": 1_000_000}

IN_BYTES: Final = "bytes with a unit, such as 20GiB or 64GB"

Unit = Literal["bytes", "share", "auto", "blocks"]


@dataclass(frozen=True, slots=True)
class Amount:
    """An amount of memory. ``value``: bytes, blocks, or a share in (0, 1]; 1 for ``auto``. ``text``: as written."""

    unit: Unit
    value: Decimal
    text: str

    def bytes(self, setting: str, available_bytes: int | None, block_bytes: int | None = None) -> int:
        """Return bytes. ``available_bytes``: what shares are of, and ``auto`` is; None if nobody knows.

        Raises ConfigError, with the setting, for a share of something unknown, and for blocks of unknown size.
        """
        if self.unit == "bytes":
            return int(self.value)
        if self.unit == "blocks":
            if block_bytes is None:
                raise ConfigError(setting, self.text, IN_BYTES)
            return int(self.value) * block_bytes
        if available_bytes is None:
            raise ConfigError(setting, self.text, f"{IN_BYTES}: it isn't known here what a share is of")
        return int(self.value * max(available_bytes, 0))

    def blocks(self, setting: str, block_bytes: int, available_bytes: int | None, least: int = 1) -> int:
        """Return whole blocks of ``block_bytes`` bytes. Raises ConfigError if they are fewer than ``least``."""
        found = self.bytes(setting, available_bytes, block_bytes) // block_bytes
        if found < least:
            allowed = f"at least {least:,} blocks; one is {block_bytes:,} bytes"
            if available_bytes is not None:
                allowed += f", and there are {max(available_bytes, 0):,} bytes"
            raise ConfigError(setting, self.text, allowed)
        return found


def amount_of(
    setting: str, text: str, units: tuple[Unit, ...] = ("bytes", "share", "auto", "blocks")
) -> Amount:
    """Parse an amount. ``units``: those that the setting takes. Raises ConfigError, with the setting."""
    stripped = text.strip()
    found: Amount | None = None
    if stripped.lower() == "auto":
        found = Amount("auto", Decimal(1), text)
    elif given := _SHARE.fullmatch(stripped):
        share = Decimal(given[1]) / 100
        found = Amount("share", share, text) if 0 < share <= 1 else None
    elif given := _BYTES.fullmatch(stripped):
        value = Decimal(given[1]) * (1_024 if given[3] else 1_000) ** _POWERS[given[2]]
        found = Amount("bytes", value, text) if 1 <= value <= MAX_BYTES else None
    elif given := _BLOCKS.fullmatch(stripped):
        value = Decimal(given[1]) * _THOUSANDS[given[2].lower()]
        found = Amount("blocks", value, text) if value == int(value) else None
    if found is None or found.unit not in units:
        raise ConfigError(setting, text, allowed_amounts(units))
    return found


def allowed_amounts(units: tuple[Unit, ...]) -> str:
    """Return the forms that a setting takes, in words."""
    words = {
        "bytes": IN_BYTES,
        "share": "a share above 0% and up to 100%, such as 60%",
        "auto": "auto",
        "blocks": "a whole number of blocks, such as 4096 or 10k",
    }
    return ", or ".join(words[unit] for unit in words if unit in units)


AUTO_SHARE: Final = 0.5
"""What ``auto`` takes of a machine's memory or disk: others use these too."""


def memory_of(setting: str, text: str, whole_bytes: int) -> int:
    """Return bytes of host memory or a disk: a number of bytes, 8GiB, 60% of ``whole_bytes``, or auto, half of them.

    Raises ConfigError, with the setting.
    """
    if re.fullmatch(r"[0-9]{1,18}", text.strip(), re.ASCII):
        return int(text)
    amount = amount_of(setting, text, ("bytes", "share", "auto"))
    return amount.bytes(setting, int(whole_bytes * AUTO_SHARE) if amount.unit == "auto" else whole_bytes)


def physical_bytes() -> int:
    """Return the machine's memory in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def bytes_of(setting: str, text: str) -> int:
    """Return bytes, written with a unit: 20GiB, 64GB. Raises ConfigError, with the setting."""
    return int(amount_of(setting, text, ("bytes",)).value)


def in_units(num_bytes: float) -> str:
    """Return bytes as text with three significant digits: 1.25 GiB, 328 KiB."""
    size, unit = float(num_bytes), "bytes"
    for larger in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        if abs(size) < 999.5:
            break
        size, unit = size / 1_024, larger
    if unit == "bytes":
        return f"{size:.0f} bytes"
    digits = 2 if abs(size) < 9.995 else 1 if abs(size) < 99.95 else 0
    text = f"{size:.{digits}f}"
    return f"{text.rstrip('0').rstrip('.') if '.' in text else text} {unit}"
