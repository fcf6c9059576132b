"""Blocks from bytes, shares and what a model leaves, and what the embedded engine allocates for them."""

from __future__ import annotations

from pathlib import Path

import pytest

from radixkv.config import KVLayout
from radixkv.engines import kv_memory
from radixkv.engines.kv_memory import AtOnce, at_once, left_bytes, num_blocks_of
from radixkv.engines.protocol import EngineSettings
from radixkv.errors import ConfigError
from radixkv.sizes import GIB, amount_of

LAYOUT = KVLayout(2, 2, 64, "float32")
BLOCK = 2 * 2 * 2 * 64 * 4 * 16


def blocks(text: str, left: int, device: str = "cpu") -> int:
    return num_blocks_of(amount_of("--kv-memory", text), LAYOUT, 16, device, left)


def test_what_amounts_make() -> None:
    assert blocks("1GiB", 2 * GIB) == GIB // BLOCK
    assert blocks("60%", 1_000 * BLOCK) == 600
    assert blocks("auto", 1_000 * BLOCK) == 500
    assert blocks("auto", 1_000 * BLOCK, "cuda:0") == 800
    assert blocks("4096", 0) == 4_096


@pytest.mark.parametrize(
    ("text", "left", "problem"),
    [
        ("1KiB", GIB, "at least 2 blocks; one is 32,768 bytes"),
        ("10%", 19 * BLOCK, "at least 2 blocks"),
        ("auto", 0, "and there are 0 bytes"),
        ("2GiB", GIB, "at most what the model leaves on cpu, 1,073,741,824 bytes"),
        ("99999M", GIB, "at most what the model leaves"),
        ("1", GIB, "at least 2 blocks"),
    ],
)
def test_too_little_and_too_much_are_refused(text: str, left: int, problem: str) -> None:
    with pytest.raises(ConfigError, match=f"^--kv-memory='{text}' is not allowed; allowed: .*{problem}"):
        blocks(text, left)


def test_a_container_may_have_less_than_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert left_bytes("cpu") > 2**20
    monkeypatch.setattr(kv_memory, "_CGROUP", tmp_path)
    for most, left in (("5000000", 4_000_000), ("1000000", 0)):
        (tmp_path / "memory.max").write_text(most)
        (tmp_path / "memory.current").write_text("1000000")
        assert left_bytes("cpu") == left
    (tmp_path / "memory.max").write_text("max\n")
    assert left_bytes("cpu") > 2**20


def test_requests_at_once() -> None:
    assert at_once(4_096, 16, 8_192) == AtOnce(8_192, 8, 4_096, 16)
    assert at_once(100, 16, 1_000) == AtOnce(1_000, 1, 1_000, 1)
    assert at_once(10, 16, 8_192) == AtOnce(8_192, 0, 4_096, 0)


@pytest.mark.slow
@pytest.mark.parametrize(("text", "wanted"), [("48MiB", 48 * 2**20), ("512", None)])
def test_the_embedded_engine_allocates_what_was_asked(text: str, wanted: int | None) -> None:
    pytest.importorskip("transformers")
    from radixkv.engines.hf.load import load_engine

    settings = EngineSettings(
        model=None,
        tokenizer_digest="0" * 64,
        vocab_size=256,
        num_blocks=7,
        block_size=16,
        kv_memory=amount_of("--kv-memory", text),
    )
    engine = load_engine(settings).start(None)
    data = engine.cache.storage.data
    held = data.numel() * data.element_size()
    if wanted is None:
        assert engine.limits.num_blocks == 512
    else:
        assert held == pytest.approx(wanted, rel=0.02) and held <= wanted
    engine.close()
