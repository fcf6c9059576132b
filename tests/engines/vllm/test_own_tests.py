"""vLLM's own tests of its scheduler, with radixkv's schedulers in the place of vLLM's.

They come with vLLM's sdist from PyPI, and aren't part of this project. Those that need a model from a hub fail with
vLLM's own schedulers too, and count nowhere. What else fails is in ``EXPLAINED``, with the reason.
"""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import tarfile
from pathlib import Path

import pytest

pytestmark = [pytest.mark.engines, pytest.mark.limit(wall_s=1200)]

ROOT = Path(__file__).parents[3]
VERSION = "0.32.0"
BUILD_TOOLS = ("setuptools==78.1.1", "setuptools-scm", "setuptools-rust", "wheel")
TEST_TOOLS = ("pytest", "iniconfig", "pluggy", "pytest-asyncio", "tblib")

SCHEDULER = "v1/core/test_scheduler.py"
FILES = (
    "v1/core/test_async_scheduler.py",
    "v1/core/test_priority_scheduler_random.py",
    "v1/core/test_priority_preemption_bug.py",
    "v1/core/test_deferred_block_free.py",
    *(
        f"v1/kv_connector/unit/test_{name}.py"
        for name in (
            "kv_load_failure_recovery",
            "invalid_blocks_correctness",
            "error_propagation",
            "cache_pollution_prevention",
            "kv_connector_lifecycle",
            "remote_prefill_lifecycle",
            "remote_decode_lifecycle",
            "scheduler_kv_connector_override",
        )
    ),
)
"""Asynchronous scheduling, priorities, deferred frees, and KV connectors."""

GROUPS = "several groups of KV blocks (Mamba, hybrid, cross attention): refused at the start"
INTERNALS = "changes or reads the tables inside vLLM's own block pool"
UNSHARED = "a request that leans on a load before the load is verified: radixkv shares loaded blocks after it"

EXPLAINED = {
    "test_cross_attn_": GROUPS,
    "test_variable_length_cross_attn_block_allocation": GROUPS,
    "test_hybrid_": GROUPS,
    "test_block_level_load_failure_fails_closed_with_multiple_groups": GROUPS,
    "test_async_load_does_not_double_reserve_mamba_spec_blocks": GROUPS,
    "test_async_load_reserves_blocks_for_promotion_margin": GROUPS,
    "test_p_side_chunked_prefill_mamba": GROUPS,
    "test_kv_connector_basic": UNSHARED,
    "test_cow_retentions_deferred_until_copy_step_processed": INTERNALS,
    "test_invalid_blocks_evicted_prevents_cache_pollution": INTERNALS,
    "test_sync_load_failure_with_shared_blocks": UNSHARED,
}
"""Tests that fail with radixkv only, by the beginning of their names."""


@functools.cache
def sources() -> Path:
    """The folder with vLLM's tests, a model's configuration at the name they use, and pytest. Made once."""
    python = os.environ["RADIXKV_VLLM"]
    folder = Path(python).parents[2] / f"vllm-{VERSION}-tests"
    if (folder / ".made").exists():
        return folder
    build, target = folder / "build_tools", folder / "test_tools"
    pip = [python, "-m", "pip", "--quiet", "--disable-pip-version-check", "--no-input"]
    subprocess.run([*pip, "install", "--upgrade", "--target", build, *BUILD_TOOLS], check=True)
    subprocess.run([*pip, "install", "--upgrade", "--no-deps", "--target", target, *TEST_TOOLS], check=True)
    settings = {
        "PYTHONPATH": str(build),
        "VLLM_VERSION_OVERRIDE": VERSION,
        "VLLM_TARGET_DEVICE": "empty",
    }
    what = ["--no-deps", "--no-binary", ":all:", "--no-build-isolation", f"vllm=={VERSION}"]
    subprocess.run([*pip, "download", "--dest", folder, *what], check=True, env=os.environ | settings)
    with tarfile.open(folder / f"vllm-{VERSION}.tar.gz") as archive:
        start = f"vllm-{VERSION}/tests/"
        wanted = [each for each in archive if each.name.startswith(start)]
        archive.extractall(folder, wanted, filter="data")
    (folder / f"vllm-{VERSION}").rename(folder / "sources")
    (folder / "sources" / "tests" / "conftest.py").unlink()  # needs more than these tests do
    _write_model(folder / "sources" / "facebook" / "opt-125m")
    (folder / ".made").touch()
    return folder


def _write_model(folder: Path) -> None:
    folder.mkdir(parents=True)
    model = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "float32"}
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}
    more = {"num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 4096, "vocab_size": 2048}
    ends = {"bos_token_id": 1, "eos_token_id": 2}
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"w{number}": number for number in range(3, 2048)}
    words = {"type": "WordLevel", "vocab": vocab, "unk_token": "<unk>"}
    tokenizer = {"version": "1.0", "pre_tokenizer": {"type": "WhitespaceSplit"}, "model": words}
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    files = {
        "config.json": model | sizes | more | ends,
        "tokenizer.json": tokenizer | {"added_tokens": []},
        "tokenizer_config.json": names | {"tokenizer_class": "PreTrainedTokenizerFast"},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))


@functools.cache
def passed(files: tuple[str, ...], is_ours: bool) -> frozenset[str]:
    """The tests that pass. They count whole blocks, so tails are off."""
    folder = sources()
    paths = [folder / "test_tools", ROOT, ROOT / "kernels", ROOT / "policies", Path(__file__).parent]
    settings = {
        "PYTHONPATH": os.pathsep.join(map(str, [*paths, folder / "sources"])),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "RADIXKV_TAILS": "0",
    }
    plug_in = ["-p", "stand_in"] if is_ours else []
    options = ["-q", "-rA", "--tb=no", "--show-capture=no", "-p", "no:cacheprovider", "-W", "ignore"]
    done = subprocess.run(
        [
            os.environ["RADIXKV_VLLM"],
            "-m",
            "pytest",
            *options,
            *plug_in,
            *(f"tests/{each}" for each in files),
        ],
        cwd=folder / "sources",
        env=os.environ | settings,
        capture_output=True,
        text=True,
        check=False,
    )
    found = frozenset(re.findall(r"^PASSED \S+/(\S+)", done.stdout, re.MULTILINE))
    assert found, done.stdout[-3000:] + done.stderr[-3000:]
    return found


@pytest.mark.parametrize(
    ("files", "least", "reach"), [((SCHEDULER,), 161, 151), (FILES, 77, 66)], ids=["scheduler", "others"]
)
def test_vllm_s_own_tests_pass_but_for_the_explained_ones(
    files: tuple[str, ...], least: int, reach: int
) -> None:
    stock, ours = passed(files, is_ours=False), passed(files, is_ours=True)
    assert len(stock) >= least
    only_stock = {each.split("::")[1] for each in stock - ours}
    explained = {each for each in only_stock if each.startswith(tuple(EXPLAINED))}
    assert not only_stock - explained, sorted(only_stock - explained)
    assert len(stock & ours) >= reach, (len(stock & ours), sorted(only_stock))
