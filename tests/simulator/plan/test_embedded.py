"""Plans beside what the embedded engine uses in fact: its weights, and the tensor that holds the KV."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers")

from radixkv.config import CacheConfig
from radixkv.engines.hf.models import demo_model, load_model
from radixkv.engines.hf.paged_cache import layout_of
from radixkv.index.cache import PrefixCache
from radixkv.simulator.plan.kv import Kept
from radixkv.simulator.plan.plan import run
from radixkv.simulator.plan.planner import Machine, Options, describe

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The demo model, as ``save_pretrained`` writes it."""
    path = tmp_path_factory.mktemp("demo")
    demo_model().save_pretrained(path)
    return str(path)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_are_what_the_loaded_model_holds(folder: str, dtype: str) -> None:
    loaded = load_model(folder, dtype=dtype)
    held = sum(each.numel() * each.element_size() for each in loaded.parameters())
    found = describe(folder, dtype)
    assert found.source == "safetensors" and found.weights_bytes == pytest.approx(held, rel=0.02)
    (Path(folder) / "model.safetensors").rename(Path(folder) / "aside")
    try:
        assert describe(folder, dtype).weights_bytes == pytest.approx(held, rel=0.02)
    finally:
        (Path(folder) / "aside").rename(Path(folder) / "model.safetensors")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_blocks_are_as_large_as_the_storage_makes_them(folder: str, dtype: str) -> None:
    layout = layout_of(load_model(folder, dtype=dtype))
    model = describe(folder, dtype).model
    kept = Kept(model.layers, model.states, dtype, 1, 16)
    assert kept.token_bytes == layout.bytes_per_token
    machine = Machine(2**27, utilisation=1.0, reserved_bytes=2**20)
    plan = run(folder, machine, Options(dtype=dtype, context=1_024))
    num_blocks = plan["tiers"][0]["blocks"]
    cache = PrefixCache(CacheConfig(num_blocks=num_blocks, layout=layout))
    assert cache.storage is not None
    held = cache.storage.data.numel() * cache.storage.data.element_size()
    assert held == pytest.approx(plan["gpu"]["kv_bytes"], rel=0.02)
