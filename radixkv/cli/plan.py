"""``radixkv plan``: its options; ``radixkv.simulator.plan`` does the work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from radixkv.cli.output import (
    Number,
    examples,
    find_in_working_directory,
    int_option,
    json_option,
    print_result,
    progress_bar,
    seed_option,
)
from radixkv.sizes import amount_of, bytes_of


def _bytes(option: str, text: str | None) -> int:
    return 0 if text is None else bytes_of(option, text)


@click.command(
    short_help="Plan memory before a start.",
    epilog=examples(
        "radixkv plan --model models/llama --gpu 80GiB",
        "radixkv plan --model models/qwen/config.json --gpu 80GiB --gpus 2 --host 256GiB --kv-dtype fp8 --json",
        "radixkv plan --model models/llama --gpu 80GiB --host 64GiB --trace traffic.jsonl --gpu-price 2.50",
    ),
)
@click.option("--model", required=True, metavar="PATH", help="Folder of a model, or its config.json.")
@click.option("--gpu", required=True, metavar="SIZE", help="Memory of a GPU, such as 80GiB.")
@int_option("--gpus", 1, "GPUs that divide the model (tensor parallel).", most=1_024)
@click.option("--host", metavar="SIZE", help="Host memory for KV, such as 256GiB.  [none]")
@click.option("--disk", metavar="SIZE", help="Disk for KV, such as 2TB; needs --host.  [none]")
@click.option(
    "--trace",
    "traces",
    metavar="FILE",
    multiple=True,
    help="Recorded traffic, in a format that `radixkv simulate` reads. May be repeated.",
)
@click.option("--policy", default="learned", show_default=True, help="Eviction policy for the trace.")
@click.option(
    "--context", type=click.IntRange(1), help="Tokens of the longest request.  [the model's context]"
)
@click.option(
    "--expected",
    type=click.IntRange(1),
    help="Tokens of an expected request.  [the trace's mean, or 4,096]",
)
@click.option("--dtype", help="Load the weights as float32, bfloat16 or float16.  [the model's]")
@click.option(
    "--kv-dtype",
    help="Dtype of the KV: the model's, fp8, fp8_per_token_head, int8_per_token_head, nvfp4 …  [the model's]",
)
@click.option(
    "--tier-dtype",
    type=click.Choice(["exact", "fp8", "int8"]),
    default="exact",
    show_default=True,
    help="How host memory and disk keep KV.",
)
@int_option("--block-size", 16, "Tokens in a block.", most=1_024)
@click.option("--weights", metavar="SIZE", help="Bytes of all weights.  [from the files, or the config]")
@click.option("--utilization", default="90%", show_default=True, help="Share of a GPU's memory that is used.")
@click.option("--reserve", metavar="SIZE", help="Memory of a GPU for activations and graphs.  [an estimate]")
@click.option("--tflops", type=Number(0, min_open=True), help="TFLOP/s that a GPU sustains.  [400]")
@click.option("--gpu-price", type=Number(0), default=0.0, help="Dollars for a GPU and an hour.")
@click.option(
    "--host-price", type=Number(0), default=0.0, help="Dollars for a GiB of host memory and a month."
)
@click.option("--disk-price", type=Number(0), default=0.0, help="Dollars for a GiB of disk and a month.")
@seed_option
@json_option
def plan(
    model: str,
    gpu: str,
    gpus: int,
    host: str | None,
    disk: str | None,
    traces: tuple[str, ...],
    utilization: str,
    reserve: str | None,
    weights: str | None,
    expected: int | None,
    tflops: float | None,
    gpu_price: float,
    host_price: float,
    disk_price: float,
    as_json: bool,
    **options: Any,
) -> None:
    """Plan the memory of a model: weights, KV a token, blocks by tier, requests at once, and the command to run.

    Reads the model's config.json, and the headers of its safetensors files if there are any: no data of weights, no
    code. What isn't known is refused by its name. With --trace, it also says which hit rates the tiers reach, and
    what prefill that saves; with prices, what that costs.
    """
    from radixkv.simulator.plan import report
    from radixkv.simulator.plan.plan import run
    from radixkv.simulator.plan.planner import Machine, Options, Prices
    from radixkv.simulator.profiles import DEFAULT_TFLOPS

    machine = Machine(
        gpu_bytes=bytes_of("--gpu", gpu),
        gpus=gpus,
        host_bytes=_bytes("--host", host),
        disk_bytes=_bytes("--disk", disk),
        utilisation=float(amount_of("--utilization", utilization, ("share",)).value),
        reserved_bytes=None if reserve is None else bytes_of("--reserve", reserve),
    )
    find_in_working_directory(options["policy"])
    with progress_bar(1_000, "replaying") as advance:
        result = run(
            model,
            machine,
            Options(
                expected_tokens=expected,
                weights_bytes=None if weights is None else bytes_of("--weights", weights),
                tflops=DEFAULT_TFLOPS if tflops is None else tflops,
                **options,
            ),
            Prices(gpu_price, host_price, disk_price),
            [Path(each) for each in traces],
            lambda done, of: advance(1_000 * done // of),
        )
    print_result(result, report.text, as_json)
