"""``radixkv bench``: the options of each benchmark and the output; ``radixkv.bench`` has the benchmarks."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

from radixkv.cli.output import (
    Command,
    counter,
    examples,
    int_option,
    json_option,
    needs_extra,
    print_result,
    progress_bar,
    seed_option,
    table,
)
from radixkv.errors import ConfigError, require_extra


def workload_options(command: Command) -> Command:
    """Options of the requests and of the cache that serves them."""
    for option in (
        seed_option,
        int_option("--block-size", 16, "Tokens in a block."),
        int_option("--num-blocks", 200_000, "Blocks in the cache.", least=2),
        click.option("--limit", type=click.IntRange(1), help="Most requests."),
        click.option(
            "--trace",
            type=click.Path(exists=True, dir_okay=False, path_type=Path),
            help="Trace file (JSONL) for --workload trace.",
        ),
        click.option(
            "--workload",
            type=click.Choice(["chat", "trace", "thin", "unique"]),
            default="chat",
            show_default=True,
            help="Kind of requests.",
        ),
    ):
        command = option(command)
    return command


MOVED = ("concurrency", "control", "policies", "scheduling", "serving", "tier-dtype")
"""Benchmarks for developers, which earlier versions had here."""


class _Group(click.Group):
    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] in MOVED:
            module = args[0].replace("-", "_")
            ctx.fail(f"{args[0]!r} is `python -m benchmarks.{module}` now, in a checkout of the repository.")
        return super().resolve_command(ctx, args)


@click.group(cls=_Group, epilog=examples("radixkv bench ttft", "radixkv bench index --limit 1000"))
def bench() -> None:
    """Run a benchmark on this machine."""


@bench.command(
    "ttft",
    short_help="Compare cold and warm first tokens.",
    epilog=examples("radixkv bench ttft", "radixkv bench ttft --url http://127.0.0.1:8400 --tokens 4000"),
)
@click.option("--url", envvar="RADIXKV_URL", help="Base URL of a running service.  [starts a demo service]")
@click.option("--key", envvar="RADIXKV_KEY", help="Key of a tenant.")
@int_option("--tokens", 1500, "Tokens in a prompt.")
@int_option("--pairs", 5, "Pairs of a cold and a warm request.")
@json_option
@needs_extra("http")
def bench_ttft(url: str | None, key: str | None, tokens: int, pairs: int, as_json: bool) -> None:
    """Compare the time to the first token, cold and warm."""
    from radixkv.bench import ttft
    from radixkv.service.api_client import Client

    with ExitStack() as stack:
        if url is None:
            require_extra("radixkv bench ttft without --url", "service")
            from radixkv.service.local import demo_service

            url = stack.enter_context(demo_service())
        client = stack.enter_context(Client(url, key))
        advance = stack.enter_context(progress_bar(pairs, "measuring"))
        result = ttft.run(client, tokens=tokens, pairs=pairs, progress=lambda done, _: advance(done))
    print_result(result, ttft.table, as_json)


@bench.command(
    "index",
    short_help="Measure the index.",
    epilog=examples(
        "radixkv bench index",
        "radixkv bench index --workload trace --trace trace.jsonl --policy lfu --no-figures",
    ),
)
@workload_options
@click.option("--policy", default="lru", show_default=True, help="Eviction policy.")
@click.option(
    "--figures/--no-figures",
    default=True,
    show_default=True,
    help="Measure single calls, growth and shapes too.",
)
@json_option
def bench_index(figures: bool, as_json: bool, **options: Any) -> None:
    """Measure the time of the index for each request, beside lower bounds that do less."""
    from radixkv.bench import index
    from radixkv.bench.figures import Sizes

    sizes = Sizes() if figures else None
    with counter("requests") as count:
        result = index.run(figures=sizes, progress=count, **options)
    print_result(result, index.table, as_json)


@bench.command(
    "fork",
    short_help="Measure the copies of a fork.",
    epilog=examples("radixkv bench fork", "radixkv bench fork --device cuda --num-pairs 1 --num-pairs 64"),
)
@click.option("--device", default="cpu", show_default=True, help="Torch device.")
@click.option("--dtype", default="bfloat16", show_default=True, help="Element type of the KV.")
@int_option("--num-layers", 32, "Layers of the KV.")
@int_option("--num-kv-heads", 8, "KV heads of a layer.")
@int_option("--head-dim", 128, "Elements of a KV head.")
@int_option("--block-size", 16, "Tokens in a block.", least=2)
@click.option(
    "--num-pairs",
    type=click.IntRange(1),
    multiple=True,
    default=(1, 4, 16),
    show_default=True,
    help="Copies in a call; may be repeated.",
)
@click.option("--num-rows", type=click.IntRange(1), help="Valid rows in each last block.  [random]")
@int_option("--repeats", 30, "Timed repetitions.")
@int_option("--num-threads", 1, "Compute threads.")
@seed_option
@json_option
@needs_extra("storage")
def bench_fork(as_json: bool, **options: Any) -> None:
    """Measure the copies of a fork."""
    from radixkv.bench import fork

    with progress_bar(len(options["num_pairs"]), "measuring") as advance:
        result = fork.run(progress=lambda done, _: advance(done), **options)
    print_result(result, _fork_table, as_json)


@bench.command(
    "kernels",
    short_help="Check and measure the kernels.",
    epilog=examples("radixkv bench kernels", "radixkv bench kernels --device cuda --dtype float16"),
)
@click.option("--device", help="Torch device.  [the GPU if there is one, otherwise cpu]")
@click.option(
    "--dtype",
    type=click.Choice(["float32", "float16", "bfloat16"]),
    default="bfloat16",
    show_default=True,
    help="Element type of the KV.",
)
@int_option("--num-layers", 32, "Layers of the KV.")
@int_option("--num-kv-heads", 8, "KV heads of a layer.")
@int_option("--head-dim", 128, "Elements of a KV head.", least=2)
@int_option("--block-size", 16, "Tokens in a block.")
@int_option("--num-blocks", 1000, "Blocks in the cache.")
@int_option("--repeats", 30, "Timed repetitions.")
@seed_option
@json_option
@needs_extra("storage")
def bench_kernels(as_json: bool, **options: Any) -> None:
    """Compare the kernels with their reference; on a GPU also measure them."""
    from radixkv.bench import kernels

    print_result(kernels.run(**options), _kernels_table, as_json)


@bench.command(
    "replicas",
    short_help="Measure routing.",
    epilog=examples(
        "radixkv bench replicas", "radixkv bench replicas --redis redis://127.0.0.1:6379/0 --requests 1000"
    ),
)
@click.option("--figure", "groups", multiple=True, help="Only this group of figures; may be repeated.  [all]")
@click.option(
    "--trace",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Trace file (JSONL).  [generated]",
)
@int_option("--requests", 4_000, "Requests of the trace.")
@int_option("--segments", 100_000, "Segments of each replica.", least=2)
@int_option("--num-blocks", 5_000, "Blocks of each replica.", least=2)
@click.option(
    "--fleet",
    "fleets",
    type=click.IntRange(1),
    multiple=True,
    default=(8, 64, 1_000),
    show_default=True,
    help="Replicas of a simulated fleet; may be repeated.",
)
@click.option("--redis", help="URL of a Redis to use.  [starts one]")
@seed_option
@json_option
@needs_extra("redis")
def bench_replicas(groups: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Measure the cost and the benefit of routing."""
    from radixkv.bench import replicas

    def tell(what: str) -> None:
        if sys.stderr.isatty():
            click.echo(what, err=True)

    chosen = replicas.Options(progress=tell, **options)
    print_result(replicas.run(chosen, groups), replicas.table, as_json)


@bench.command(
    "hostile",
    short_help="Measure latencies during attacks.",
    epilog=examples("radixkv bench hostile", "radixkv bench hostile --attack routes --rounds 2"),
)
@click.option("--attack", "names", multiple=True, help="Only this attack; may be repeated.  [all]")
@int_option("--calls", 200, "Calls of each kind in a round.", least=10)
@int_option("--rounds", 5, "Rounds; the median counts.")
@json_option
@needs_extra("service")
def bench_hostile(names: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Measure the latency of other tenants and of the operator while the service is attacked."""
    from radixkv.bench import hostile

    with progress_bar(hostile.num_steps(options["rounds"], names), "attacking") as advance:
        result = hostile.run(names=names, progress=advance, **options)
    print_result(result, hostile.table, as_json)


@bench.command(
    "tiers",
    short_help="Measure the disk tier.",
    epilog=examples("radixkv bench tiers", "radixkv bench tiers --folder . --num-records 1024"),
)
@click.option(
    "--folder",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder on the disk to measure.  [the system's for temporary files]",
)
@int_option("--record-mib", 1, "Size of a record.", most=256)
@int_option("--num-records", 256, "Records a round.")
@int_option("--num-slots", 100_000, "Slots to open.", least=10)
@int_option("--num-purged", 10_000, "Slots to purge.")
@int_option("--rounds", 5, "Rounds; the best counts.")
@json_option
@needs_extra("tiers")
def bench_tiers(as_json: bool, **options: Any) -> None:
    """Measure CPU a MiB, the time to open a folder and to purge a tenant, and the share of the disk's speed."""
    from radixkv.bench import tiers

    if options["num_purged"] >= options["num_slots"]:
        raise ConfigError("--num-purged", options["num_purged"], "fewer than --num-slots")
    with progress_bar(options["rounds"] + 1, "measuring") as advance:
        result = tiers.run(progress=advance, **options)
    print_result(result, tiers.table, as_json)


@bench.command(
    "ttft-tiers",
    short_help="Compare first tokens from host memory and disk.",
    epilog=examples("radixkv bench ttft-tiers", "radixkv bench ttft-tiers --tokens 500 --rounds 3"),
)
@int_option("--tokens", 1529, "Tokens in a prompt.", least=64, most=2000)
@int_option("--rounds", 5, "Prompts to measure.", most=1000)
@json_option
@needs_extra("hf")
def bench_ttft_tiers(tokens: int, rounds: int, as_json: bool) -> None:
    """Compare the time to the first token: computed, from each tier, and beside a disk that is slow or hangs."""
    require_extra("radixkv bench ttft-tiers", "tiers")
    from radixkv.bench import ttft_tiers

    with progress_bar(3 * (rounds + 1), "measuring") as advance:
        result = ttft_tiers.run(tokens=tokens, rounds=rounds, progress=lambda done, _: advance(done))
    print_result(result, ttft_tiers.table, as_json)


def _fork_table(result: dict[str, Any]) -> str:
    head = f"{result['device']}, {result['path']}, copy {result['copy_bytes_per_s'] / 1e9:.1f} GB/s"
    return "\n".join([head, table(result["results"], tuple(result["results"][0]))])


def _kernels_table(result: dict[str, Any]) -> str:
    head = f"{result['device']}, {result['path']}; as the reference: {', '.join(result['checked'])}"
    rows = result["results"]
    return "\n".join([head, table(rows, tuple(rows[0])) if rows else result["note"]])
