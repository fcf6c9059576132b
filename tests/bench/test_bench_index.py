"""The index benchmark: deterministic workloads, checks that hold and catch false results, output as JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from radixkv import Namespace, PrefixCache, Sequence
from radixkv.bench import index
from radixkv.bench.drive import OPERATIONS
from radixkv.cli.main import commands
from radixkv.errors import ConfigError, IntegrityError

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", ["trace", "thin", "unique"])
def test_run_is_checked_and_is_json(name: str) -> None:
    seen: list[int] = []
    result = index.run(name, limit=70, num_blocks=60_000, progress=seen.append)
    assert json.loads(json.dumps(result)) == result
    assert result["radixkv"]["requests"] == 70
    assert result["radixkv"]["hit_tokens"] == result["hit_tokens_if_nothing_were_forgotten"]
    assert set(result["floors"]) == {"memcmp", "xxh3", "sha256"}
    assert seen == [1, 65]
    assert name in index.table(result)


def test_a_result_has_percentiles_rates_memory_and_versions() -> None:
    """Percentiles of each operation, rates, hit rate and memory; machine, versions and seed."""
    result = index.run("thin", limit=250, num_blocks=5_000, seed=7)
    ours = result["radixkv"]
    assert (
        set(ours["operations"]) == set(OPERATIONS) == {"open", "commit", "extend", "commit_answer", "release"}
    )
    assert all(0 < each["p50_us"] <= each["p99_us"] for each in ours["operations"].values())
    (power,) = ours["by_prompt_tokens"]
    assert (power["tokens_from"], power["tokens_below"], power["requests"]) == (32, 64, 250)
    assert set(ours["p99_over_p50"]) == set(OPERATIONS)
    assert ours["operations_per_s"] == pytest.approx(5 * ours["requests_per_s"])
    assert ours["hit_rate"] == ours["tokens_matched_per_s"] == 0
    assert result["seed"] == 7 and "CPython" in result["machine"]
    assert set(result["versions"]) == {"python", "radixkv", "numpy", "xxhash"}
    text = index.table(result)
    for word in (
        "seed 7",
        "p50 µs",
        "p99 µs",
        "operations/s",
        "tokens matched/s",
        "hit rate",
        "bytes a block",
    ):
        assert word in text
    assert result["machine"] in text and "memcmp" in text and "audit clean" in text


def test_eviction_keeps_the_hits_below_the_bound() -> None:
    result = index.run("trace", limit=60, num_blocks=12_000)
    assert result["radixkv"]["evicted_blocks"] > 0
    assert result["radixkv"]["hit_tokens"] <= result["hit_tokens_if_nothing_were_forgotten"]


def test_the_empty_pool_counts_as_memory() -> None:
    """A pool of 4 million blocks has a free list of at least 16 MB, however few blocks are in use."""
    code = (
        "from radixkv.bench import index\n"
        "ours = index.run('unique', limit=3, num_blocks=4_000_000)['radixkv']\n"
        "print(ours['bytes_per_block'] * ours['resident_blocks'])"
    )  # a fresh process: no freed memory is left that the pool could reuse
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(result.stdout) > 16e6


class Leaky(PrefixCache):
    """Shares everything between all tenants."""

    def open(self, namespace: Namespace, ids: Any, **options: Any) -> Sequence:
        return super().open(Namespace("all", "m"), ids, **options)


class Forgetful(PrefixCache):
    """Uses another namespace for every seventh request."""

    opened = 0

    def open(self, namespace: Namespace, ids: Any, **options: Any) -> Sequence:
        self.opened += 1
        if self.opened % 7 == 0:
            namespace = Namespace(namespace.tenant, "m", salt="elsewhere")
        return super().open(namespace, ids, **options)


@pytest.mark.parametrize("wrong", [Leaky, Forgetful])
def test_a_wrong_cache_is_detected(wrong: type[PrefixCache], monkeypatch: pytest.MonkeyPatch) -> None:
    """Too many hits contradict the dict model. So do too few while everything fits."""
    assert index.run("chat", limit=100, num_blocks=60_000)["radixkv"]["requests"] == 100
    monkeypatch.setattr(index, "PrefixCache", wrong)
    with pytest.raises(IntegrityError, match="hit tokens, a dict that forgets nothing has"):
        index.run("chat", limit=100, num_blocks=60_000)


def test_the_cache_that_ran_is_audited(monkeypatch: pytest.MonkeyPatch) -> None:
    audited: list[int] = []
    monkeypatch.setattr(index.audit, "check", lambda cache: audited.append(cache.stats().requests))
    index.run("thin", limit=9, num_blocks=100)
    assert audited == [9]


def test_impossible_options_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="trace, chat, thin or unique"):
        index.run("nonsense")
    with pytest.raises(ConfigError, match="--trace"):
        index.run("chat", trace=tmp_path)


def test_a_trace_file_is_measured(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 700, "output_length": 5, "hash_ids": [0, 1]}\n' * 2)
    assert index.run("trace", trace=path, num_blocks=1_000)["radixkv"]["hit_tokens"] == 688


def test_the_command() -> None:
    arguments = [
        "bench",
        "index",
        "--workload",
        "thin",
        "--limit",
        "30",
        "--num-blocks",
        "200",
        "--no-figures",
    ]
    done = CliRunner().invoke(commands, [*arguments, "--json"])
    assert done.exit_code == 0 and json.loads(done.stdout)["workload"] == "thin", done
    assert "operations/s" in CliRunner().invoke(commands, arguments).stdout
