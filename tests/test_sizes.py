"""Amounts of memory, as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.errors import ConfigError
from radixkv.sizes import GIB, amount_of, bytes_of, in_units


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("20GiB", 20 * GIB),
        ("64GB", 64 * 10**9),
        ("1.5 TiB", 3 * 2**39),
        ("500 MB", 5 * 10**8),
        ("0.001KB", 1),
        (" 2KiB ", 2048),
    ],
)
def test_bytes(text: str, num_bytes: int) -> None:
    assert bytes_of("--gpu", text) == num_bytes
    assert amount_of("--gpu", text).bytes("--gpu", None) == num_bytes


@pytest.mark.parametrize(
    ("text", "blocks"), [("4096", 4096), ("10k", 10_000), ("0.5k", 500), ("2M", 2_000_000)]
)
def test_blocks(text: str, blocks: int) -> None:
    amount = amount_of("--kv-memory", text)
    assert amount.unit == "blocks" and amount.blocks("--kv-memory", 2**20, None) == blocks
    assert amount.bytes("--kv-memory", None, 100) == 100 * blocks


def test_shares_are_of_what_there_is() -> None:
    assert amount_of("--kv-memory", "60%").bytes("--kv-memory", 1_000) == 600
    assert amount_of("--kv-memory", "auto").bytes("--kv-memory", 1_000) == 1_000
    assert amount_of("--kv-memory", "12.5 %").blocks("--kv-memory", 10, 1_000) == 12
    with pytest.raises(ConfigError, match=r"--kv-memory='60%' is not allowed.*isn't known"):
        amount_of("--kv-memory", "60%").bytes("--kv-memory", None)


def test_too_little_says_what_a_block_takes() -> None:
    with pytest.raises(ConfigError, match="at least 2 blocks; one is 1,000 bytes, and there are 1,500 bytes"):
        amount_of("--kv-memory", "auto").blocks("--kv-memory", 1_000, 1_500, least=2)
    with pytest.raises(ConfigError, match="at least 1 blocks; one is 1,000 bytes"):
        amount_of("--kv-memory", "0").blocks("--kv-memory", 1_000, None)


@pytest.mark.parametrize(
    "text",
    ["", "GiB", "-1GiB", "1e3GiB", "1.5", "0%", "101%", "60 percent", "20gib", "1 G", "٣GiB", "9" * 40, "0KiB",
     "99999999PiB", "nan", "inf", "20GiB\x00", "1_000", "auto!", "1/2"],
)  # fmt: skip
def test_others_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^--kv-memory=.* is not allowed; allowed: bytes with a unit"):
        amount_of("--kv-memory", text)


def test_units_that_a_setting_does_not_take_are_refused() -> None:
    with pytest.raises(ConfigError, match="--gpu='60%' is not allowed; allowed: bytes with a unit, such as"):
        bytes_of("--gpu", "60%")
    with pytest.raises(ConfigError, match="--gpu='4096' is not allowed"):
        bytes_of("--gpu", "4096")
    assert amount_of("--share", "60%", ("share",)).value * 10 == 6


@given(st.text(max_size=30))
def test_any_text_is_an_amount_or_a_config_error(text: str) -> None:
    try:
        found = amount_of("--kv-memory", text)
    except ConfigError:
        return
    assert found.bytes("--kv-memory", 2**40, 2**20) >= 0


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 bytes"),
        (576, "576 bytes"),
        (1_024, "1 KiB"),
        (70_272, "68.6 KiB"),
        (20 * GIB, "20 GiB"),
        (1.25 * GIB, "1.25 GiB"),
        (1_000_000_000_000, "931 GiB"),
        (10**18, "888 PiB"),
    ],
)
def test_in_units(num_bytes: float, text: str) -> None:
    assert in_units(num_bytes) == text
