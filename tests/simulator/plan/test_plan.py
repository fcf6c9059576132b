"""Whole plans: sizes, requests, traces, dollars, the command to run; as a library and as a command."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from radixkv.cli.main import commands
from radixkv.errors import ConfigError
from radixkv.simulator.plan.plan import run
from radixkv.simulator.plan.planner import Machine, Options, Prices
from radixkv.simulator.plan.report import text
from radixkv.sizes import GIB
from tests.cli.test_examples import parsed
from tests.simulator.command import complaint
from tests.simulator.command import run as command
from tests.simulator.plan.models import PUBLISHED, write_config

pytestmark = pytest.mark.slow

H100 = Machine(80 * GIB)


@pytest.fixture
def llama(tmp_path: Path) -> str:
    return str(write_config(tmp_path / "llama", PUBLISHED["Llama-3.1-8B"]["config"]))


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Twenty requests that share a prompt of 2,048 tokens and add 512 of their own, twice."""
    lines = [
        {"time": number, "tokens": 2_560, "block_tokens": 512, "hashes": [0, 1, 2, 3, 100 + number % 10]}
        for number in range(20)
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def published(folder: Path, name: str) -> str:
    return str(write_config(folder / name, PUBLISHED[name]["config"]))


def test_the_memory_of_a_gpu_is_divided_without_rest(llama: str) -> None:
    found = run(llama, H100, Options(context=8_192))
    gpu, weights = found["gpu"], found["weights"]
    assert gpu["usable_bytes"] == int(80 * GIB * 0.9)
    assert weights["bytes"] == weights["bytes_of_a_gpu"] == 2 * 8_030_261_248
    assert gpu["kv_bytes"] + weights["bytes_of_a_gpu"] + gpu["reserved_bytes"] == gpu["usable_bytes"]
    (tier,) = found["tiers"]
    assert tier["blocks"] == gpu["kv_bytes"] // 2**21 and tier["tokens"] == 16 * tier["blocks"]
    assert found["requests"]["pessimistic"] == {"tokens": 8_192, "requests": gpu["kv_bytes"] // 2**30}
    assert found["requests"]["expected"] == {"tokens": 4_096, "requests": gpu["kv_bytes"] // 2**29}
    assert json.loads(json.dumps(found)) == found


def test_given_sizes_are_taken(llama: str) -> None:
    machine = Machine(
        80 * GIB, host_bytes=64 * GIB, disk_bytes=10**12, utilisation=1.0, reserved_bytes=2 * GIB
    )
    found = run(llama, machine, Options(weights_bytes=14 * GIB, expected_tokens=700))
    assert found["gpu"]["kv_bytes"] == 64 * GIB and not found["gpu"]["reserved_is_estimate"]
    assert [each["blocks"] for each in found["tiers"]][:2] == [32_768, 32_768]
    assert found["requests"]["expected"] == {"tokens": 700, "requests": 32_768 // 44}
    assert found["requests"]["pessimistic"]["requests"] == 64 // 16


def test_a_disk_has_as_many_records_as_the_tier_makes(llama: str) -> None:
    from radixkv.tiers.disk.slab import slots_in

    machine = Machine(80 * GIB, host_bytes=GIB, disk_bytes=10**12)
    for dtype in ("exact", "int8"):
        found = {each["tier"]: each for each in run(llama, machine, Options(tier_dtype=dtype))["tiers"]}
        assert found["disk"]["blocks"] == slots_in(10**12, found["host"]["block_bytes"])


def test_tiers_of_8_bits_are_as_large_as_the_codec_makes_them(llama: str) -> None:
    from radixkv.config import CacheConfig, KVLayout
    from radixkv.index.cache import PrefixCache
    from radixkv.storage.lossy_codec import LossyCodec

    small = {"num_hidden_layers": 3, "num_key_value_heads": 5, "head_dim": 12, "num_attention_heads": 5}
    config = {**PUBLISHED["Llama-3.1-8B"]["config"], **small}
    write_config(Path(llama), config)
    found = run(llama, Machine(80 * GIB, host_bytes=GIB), Options(tier_dtype="fp8", block_size=7))
    cache = PrefixCache(CacheConfig(4, 7, KVLayout(3, 5, 12, "bfloat16")))
    assert cache.storage is not None
    assert found["tiers"][1]["block_bytes"] == LossyCodec(cache.storage.pool, "fp8").record_bytes


def test_two_gpus_hold_a_model_that_one_does_not(tmp_path: Path) -> None:
    path = published(tmp_path, "Llama-3.1-70B")
    with pytest.raises(
        ConfigError, match=r"--gpu='80 GiB' is not allowed; allowed: at least 14\d\.\d GiB: weights"
    ):
        run(path, H100)
    with pytest.raises(
        ConfigError, match="--gpus=3 is not allowed; allowed: a divisor of the 64 attention heads"
    ):
        run(path, Machine(80 * GIB, 3))
    four = run(path, Machine(80 * GIB, 4))
    assert four["kv"]["bytes_per_token"] == 327_680
    assert four["kv"]["bytes_per_token_of_a_gpu"] == 327_680 // 4
    assert 0.25 <= four["weights"]["bytes_of_a_gpu"] / four["weights"]["bytes"] < 0.26
    (tier,) = four["tiers"]
    assert tier["block_bytes"] == 16 * 327_680


def test_latents_are_on_each_gpu(tmp_path: Path) -> None:
    found = run(published(tmp_path, "DeepSeek-V3"), Machine(141 * GIB, 16), Options(kv_dtype="fp8"))
    assert found["kv"]["bytes_per_token"] == found["kv"]["bytes_per_token_of_a_gpu"] == 61 * 576
    assert [each["dtype"] for each in found["kv_dtypes"]] == ["fp8", "bfloat16"]


def test_states_take_room_beside_blocks(tmp_path: Path) -> None:
    found = run(published(tmp_path, "Nemotron-H-8B"), H100, Options(expected_tokens=16))
    kv, gpu = found["kv"], found["gpu"]
    state = PUBLISHED["Nemotron-H-8B"]["state_bytes_per_request"]
    assert kv["state_bytes_per_request_of_a_gpu"] == state
    assert found["requests"]["expected"]["requests"] == gpu["kv_bytes"] // (state + 16 * 16_384)
    full = found["requests"]["pessimistic"]["requests"]
    assert found["tiers"][0]["blocks"] == (gpu["kv_bytes"] - full * state) // (16 * 16_384)
    assert found["command"] is None and "No engine of radixkv caches Mamba-2" in found["notes"][0]


def test_a_context_that_does_not_fit_is_said(llama: str) -> None:
    found = run(llama, Machine(20 * GIB), Options(context=131_072))
    assert found["requests"]["pessimistic"]["requests"] == 0
    assert any("Not even one request of 131,072 tokens fits" in note for note in found["notes"])
    with pytest.raises(
        ConfigError, match="--context=131073 is not allowed; allowed: at most the 131,072 tokens"
    ):
        run(llama, H100, Options(context=131_073))


def test_tiers_need_what_is_above_them(llama: str) -> None:
    with pytest.raises(ConfigError, match="--host is not set; allowed: host memory, because --disk is set"):
        run(llama, Machine(80 * GIB, disk_bytes=10**12))
    with pytest.raises(
        ConfigError, match="--host is not set; allowed: host memory, because --tier-dtype is set"
    ):
        run(llama, H100, Options(tier_dtype="fp8"))
    with pytest.raises(ConfigError, match=r"--tier-dtype='int8' is not allowed.*can be"):
        run(llama, Machine(80 * GIB, host_bytes=GIB), Options(tier_dtype="int8", kv_dtype="fp8"))


# --- a trace


def test_a_trace_says_what_each_tier_adds(llama: str, trace: Path) -> None:
    """The GPU holds five blocks of the trace, so the shared prompt. The second round of tails comes from below."""
    machine = Machine(
        80 * GIB, utilisation=1.0, reserved_bytes=int(80 * GIB) - 16_060_522_496 - 6 * 512 * 131_072
    )
    found = run(llama, machine, Options(context=2_560, policy="lru"), traces=[trace])["trace"]
    assert found["requests"] == 20 and found["mean_tokens"] == 2_560 and found["block_tokens"] == 512
    (gpu,) = found["tiers"]
    assert gpu["blocks_of_trace"] == 6
    assert found["token_hit_rate"] == pytest.approx(19 * 4 / 100)
    assert found["endless_token_hit_rate"] == pytest.approx((9 * 4 + 10 * 5 + 0) / 100 + 4 / 100 - 4 / 100)
    with_host = Machine(machine.gpu_bytes, 1, GIB, 0, 1.0, machine.reserved_bytes)
    both = run(llama, with_host, Options(context=2_560, policy="lru"), traces=[trace])["trace"]
    assert [each["tier"] for each in both["tiers"]] == ["gpu", "host"]
    assert both["token_hit_rate"] == pytest.approx(both["endless_token_hit_rate"])
    assert both["prefill_seconds_saved"] == pytest.approx(
        sum(each["prefill_seconds_saved"] for each in both["tiers"])
    )
    assert both["prefill_seconds_saved"] < both["prefill_seconds"]


def test_smaller_kv_hits_more(llama: str, trace: Path) -> None:
    reserved = int(80 * GIB) - 16_060_522_496 - 6 * 512 * 131_072
    machine = Machine(80 * GIB, utilisation=1.0, reserved_bytes=reserved)
    found = run(llama, machine, Options(context=2_560, policy="lru"), traces=[trace])
    rates = {each["dtype"]: each["token_hit_rate"] for each in found["kv_dtypes"]}
    assert rates["bfloat16"] == found["trace"]["token_hit_rate"]
    assert rates["bfloat16"] <= rates["fp8"] <= rates["nvfp4"]
    blocks = {each["dtype"]: each["blocks"] for each in found["kv_dtypes"]}
    assert blocks["fp8"] == 2 * blocks["bfloat16"]


def test_states_leave_less_room_for_a_trace(tmp_path: Path, trace: Path) -> None:
    path = published(tmp_path, "Nemotron-H-8B")
    found = run(path, H100, Options(policy="lru"), traces=[trace])
    state = PUBLISHED["Nemotron-H-8B"]["state_bytes_per_request"]
    most = found["gpu"]["kv_bytes"] / (16_384 + state / 2_560) / 512
    assert found["trace"]["tiers"][0]["blocks_of_trace"] == min(int(most), 14)


def test_dollars(llama: str, trace: Path) -> None:
    machine = Machine(80 * GIB, host_bytes=73 * GIB)
    free = run(llama, machine, traces=[trace])
    assert free["cost"] is None
    cost = run(llama, machine, prices=Prices(2.5, 1.0), traces=[trace])["cost"]
    assert cost["gpu_dollars_per_hour"] == 2.5
    assert cost["host_dollars_per_hour"] == pytest.approx(0.1)
    assert cost["dollars_per_hour"] == pytest.approx(2.6)
    hours = free["trace"]["seconds"] / 3_600
    saved = free["trace"]["tiers"][0]["prefill_seconds_saved"] / 3_600 * 2.5 / hours
    assert cost["prefill_dollars_saved_per_hour"]["gpu"] == pytest.approx(saved)
    assert (
        sum(cost["prefill_dollars_saved_per_hour"].values()) < cost["prefill_dollars_per_hour_without_cache"]
    )


# --- the command to run


def test_the_command_of_a_plain_model_is_one_of_ours(
    llama: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from radixkv.service.options import ServeSettings

    for name in ("keys.json", "fleet.secret"):
        (tmp_path / name).write_text("{}" if name == "keys.json" else "s" * 32)
        (tmp_path / name).chmod(0o600)
    monkeypatch.chdir(tmp_path)
    machine = Machine(80 * GIB, host_bytes=64 * GIB, disk_bytes=10**12)
    found = run(llama, machine, Options(tier_dtype="int8", block_size=32))
    line = found["command"].replace("/var/lib/radixkv", "disk")
    settings = {
        name.replace("_", "-"): each for name, each in parsed(line).params.items() if each is not None
    }
    made = ServeSettings.parse({name: each for name, each in settings.items() if isinstance(each, str)})
    assert made.num_blocks == found["tiers"][0]["blocks"] and made.block_size == 32
    assert made.tiers is not None and made.tiers.host_bytes == 64 * GIB and made.tiers.dtype == "int8"
    assert made.tiers.disk is not None and made.tiers.disk.num_bytes == 10**12
    assert "serve" in commands.commands


@pytest.mark.parametrize(
    ("name", "machine", "options", "words"),
    [
        ("Llama-3.1-8B", Machine(80 * GIB, 2), {}, ["--tensor-parallel-size 2", "--scheduler-cls radixkv"]),
        ("Llama-3.1-8B", H100, {"kv_dtype": "fp8"}, ["--kv-cache-dtype fp8"]),
        ("Llama-3.1-8B", Machine(80 * GIB, 2, GIB), {}, ["RadixConnector", '"host_memory": 1073741824']),
        ("Gemma-2-9B", H100, {}, ["--disable-hybrid-kv-cache-manager"]),
        ("DeepSeek-V2-Lite", H100, {"context": 1_000}, ["--max-model-len 1000"]),
    ],
)
def test_the_command_of_others_is_of_vllm(
    tmp_path: Path, name: str, machine: Machine, options: dict[str, Any], words: list[str]
) -> None:
    found = run(published(tmp_path, name), machine, Options(**options))["command"]
    assert found.startswith("python -m vllm.entrypoints.openai.api_server --model ")
    assert all(each in found for each in words), found
    assert shlex.split(found)[4] == str(tmp_path / name)


# --- as a command


def test_a_plan_as_text(llama: str, trace: Path) -> None:
    done = command(
        "plan", "--model", llama, "--gpu", "80GiB", "--host", "64GiB", "--disk", "1TB", "--trace", str(trace),
        "--gpu-price", "2.5", "--context", "8192",
    )  # fmt: skip
    assert done.code == 0 and not done.stderr, done
    for part in (
        "llama, 32 layers, 8.03 billion parameters, 131,072 tokens of context",
        "attention: 2 × 32 layers × 8 KV heads × 128 × 2 bytes = 128 KiB a token",
        "pessimistic: 8,192 tokens each",
        "expected: 2,560 tokens each",
        "int8_per_token_head",
        "adds to the hit rate",
        "together                            $2.5000",
        "Run:\nradixkv serve --model ",
    ):
        assert part in done.stdout, done.stdout
    lines = [line for line in done.stdout.splitlines() if llama not in line]
    assert max(map(len, lines)) <= 110


@pytest.mark.parametrize(
    "name", ["DeepSeek-V3.2-Exp", "Kimi-Linear-48B-A3B", "Gemma-2-9B", "Falcon-H1-7B", "GPT-2"]
)
def test_plans_of_all_kinds_have_a_text(tmp_path: Path, name: str) -> None:
    found = run(published(tmp_path, name), Machine(1_500 * GIB, host_bytes=GIB))
    said = text(found)
    assert all(each["formula"] in said for each in found["kv"]["layers"])
    assert json.loads(json.dumps(found)) == found


def test_a_plan_as_json(llama: str) -> None:
    done = command(
        "plan", "--model", llama, "--gpu", "80GiB", "--utilization", "50%", "--reserve", "1GiB", "--json"
    )
    found = json.loads(done.stdout)
    assert found["gpu"]["usable_bytes"] == 40 * GIB and found["gpu"]["reserved_bytes"] == GIB
    assert list(found) == [
        "benchmark", "model", "weights", "gpu", "kv", "tiers", "tier_dtype", "requests", "kv_dtypes", "tier_dtypes",
        "trace", "cost", "command", "notes", "traces",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--gpu", "80"), "--gpu='80' is not allowed; allowed: bytes with a unit"),
        (("--gpu", "60%"), "--gpu='60%' is not allowed"),
        (("--gpu", "80GiB", "--host", "auto"), "--host='auto' is not allowed"),
        (("--gpu", "80GiB", "--utilization", "120%"), "--utilization='120%' is not allowed"),
        (
            ("--gpu", "80GiB", "--kv-dtype", "int4"),
            "--kv-dtype='int4' is not allowed; allowed: one of float32, ",
        ),
        (("--gpu", "1GiB"), "--gpu='1 GiB' is not allowed; allowed: at least"),
        (("--gpu", "80GiB", "--trace", "absent.jsonl"), "TRACE='absent.jsonl' is not allowed"),
        (("--gpu", "80GiB", "--policy", "best"), "policy='best' is not allowed"),
    ],
)
def test_what_is_invalid_is_one_line(llama: str, trace: Path, arguments: tuple[str, ...], said: str) -> None:
    more = ("--trace", str(trace)) if "best" in arguments else ()
    assert said in complaint(command("plan", "--model", llama, *arguments, *more))


# --- simulate with a model


def test_capacities_of_a_simulation_in_bytes(llama: str, trace: Path) -> None:
    arguments = ("simulate", str(trace), "--policy", "lru", "--jobs", "1", "--json")
    done = command(*arguments, "--capacity", "512MiB,1GB,5", "--model", llama)
    found = json.loads(done.stdout)
    assert [each["capacity"] for each in found["results"]] == [5, 8, 14]
    assert found["block_bytes"] == 64 * 2**20 and found["profile"]["name"] == llama
    default = json.loads(command(*arguments, "--capacity", "512MiB").stdout)
    assert [each["capacity"] for each in default["results"]] == [8], "of the profile llama-3-8b"


def test_tiers_of_a_simulation_in_bytes(llama: str, trace: Path) -> None:
    done = command(
        "simulate", str(trace), "--policy", "lru", "--capacity", "6", "--host", "256MiB", "--disk", "1GiB", "--model",
        llama, "--json",
    )  # fmt: skip
    found = json.loads(done.stdout)
    assert (found["host_blocks"], found["disk_blocks"]) == (4, 16)


def test_a_capacity_below_a_block_is_refused(llama: str, trace: Path) -> None:
    done = command("simulate", str(trace), "--capacity", "1MB", "--model", llama)
    assert "--capacity=0 is not allowed; allowed: from 1 to" in complaint(done)
