"""``radixkv bench``: what each benchmark takes, and how its result is shown; ``radixkv.bench`` has the benchmarks."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from typing import Any

import click

from radixkv.cli.output import counter, json_option, listed, needs_extra, print_result, progress_bar, table
from radixkv.errors import require_extra


@click.group()
def bench() -> None:
    """Measure on this machine."""


@bench.command("ttft")
@click.option("--url", envvar="RADIXKV_URL", help="A running service.  [a demo service of its own]")
@click.option("--key", envvar="RADIXKV_KEY", help="Key of a tenant.")
@click.option("--tokens", type=click.IntRange(1), default=1500, show_default=True, help="Prompt length.")
@click.option("--pairs", type=click.IntRange(1), default=5, show_default=True)
@json_option
@needs_extra("http")
def bench_ttft(url: str | None, key: str | None, tokens: int, pairs: int, as_json: bool) -> None:
    """Time to first token, cold against warmed."""
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


@bench.command("index")
@click.option(
    "--workload", type=click.Choice(["chat", "trace", "thin", "unique"]), default="chat", show_default=True
)
@click.option(
    "--trace", type=click.Path(exists=True, dir_okay=False), help="Trace file (JSONL) for --workload trace."
)
@click.option("--limit", type=click.IntRange(1), help="Most requests.")
@click.option("--num-blocks", type=click.IntRange(2), default=200_000, show_default=True)
@click.option("--block-size", type=click.IntRange(1), default=16, show_default=True)
@click.option("--policy", default="lru", show_default=True)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@click.option(
    "--figures/--no-figures", default=True, show_default=True, help="Single calls, growth and shapes too."
)
@json_option
def bench_index(trace: str | None, figures: bool, as_json: bool, **options: Any) -> None:
    """What the index costs a request, beside floors that do less."""
    from pathlib import Path

    from radixkv.bench import index
    from radixkv.bench.figures import Sizes

    sizes = Sizes() if figures else None
    with counter("requests") as count:
        result = index.run(trace=Path(trace) if trace else None, figures=sizes, progress=count, **options)
    print_result(result, index.table, as_json)


@bench.command("policies")
@click.option(
    "--workload", type=click.Choice(["chat", "trace", "thin", "unique"]), default="chat", show_default=True
)
@click.option(
    "--trace", type=click.Path(exists=True, dir_okay=False), help="Trace file (JSONL) for --workload trace."
)
@click.option("--policy", "policies", default="all", show_default=True, help="all, or some, between commas.")
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True)
@click.option("--limit", type=click.IntRange(1), help="Most requests of a round.")
@click.option("--num-blocks", type=click.IntRange(2), default=200_000, show_default=True)
@click.option("--block-size", type=click.IntRange(1), default=16, show_default=True)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@json_option
def bench_policies(trace: str | None, policies: str, as_json: bool, **options: Any) -> None:
    """What each eviction policy costs a request, as a multiple of LRU."""
    from pathlib import Path

    from radixkv.bench import policies as comparison

    path = Path(trace) if trace else None
    with counter("requests") as count:
        result = comparison.run(policies=listed(policies) or ("all",), trace=path, progress=count, **options)
    print_result(result, comparison.table, as_json)


@bench.command("concurrency")
@click.option("--num-blocks", type=click.IntRange(2), default=200_000, show_default=True)
@click.option(
    "--evict-blocks",
    type=click.IntRange(1),
    default=40_000,
    show_default=True,
    help="Blocks of each eviction.",
)
@click.option("--matches", type=click.IntRange(1), default=200_000, show_default=True)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@json_option
def bench_concurrency(as_json: bool, **options: Any) -> None:
    """How long a match takes while another thread evicts and commits."""
    from radixkv.bench import concurrency

    with progress_bar(2 * len(concurrency.BESIDE), "measuring") as advance:
        result = concurrency.run(progress=advance, **options)
    print_result(result, concurrency.table, as_json)


@bench.command("fork")
@click.option("--device", default="cpu", show_default=True)
@click.option("--dtype", default="bfloat16", show_default=True)
@click.option("--num-layers", type=click.IntRange(1), default=32, show_default=True)
@click.option("--num-kv-heads", type=click.IntRange(1), default=8, show_default=True)
@click.option("--head-dim", type=click.IntRange(1), default=128, show_default=True)
@click.option("--block-size", type=click.IntRange(2), default=16, show_default=True)
@click.option("--num-pairs", type=click.IntRange(1), multiple=True, default=(1, 4, 16), show_default=True)
@click.option("--num-rows", type=click.IntRange(1), help="Valid rows of each tail.  [drawn]")
@click.option("--repeats", type=click.IntRange(1), default=30, show_default=True)
@click.option("--num-threads", type=click.IntRange(1), default=1, show_default=True)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@json_option
@needs_extra("storage")
def bench_fork(as_json: bool, **options: Any) -> None:
    """What a fork's copies cost."""
    from radixkv.bench import fork

    with progress_bar(len(options["num_pairs"]), "measuring") as advance:
        result = fork.run(progress=lambda done, _: advance(done), **options)
    print_result(result, _fork_table, as_json)


@bench.command("kernels")
@click.option("--device", help="[the GPU if there is one, otherwise cpu]")
@click.option(
    "--dtype", type=click.Choice(["float32", "float16", "bfloat16"]), default="bfloat16", show_default=True
)
@click.option("--num-layers", type=click.IntRange(1), default=32, show_default=True)
@click.option("--num-kv-heads", type=click.IntRange(1), default=8, show_default=True)
@click.option("--head-dim", type=click.IntRange(2), default=128, show_default=True)
@click.option("--block-size", type=click.IntRange(1), default=16, show_default=True)
@click.option("--num-blocks", type=click.IntRange(1), default=1000, show_default=True)
@click.option("--repeats", type=click.IntRange(1), default=30, show_default=True)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@json_option
@needs_extra("storage")
def bench_kernels(as_json: bool, **options: Any) -> None:
    """Whether the kernels are right, and on a GPU how fast."""
    from radixkv.bench import kernels

    print_result(kernels.run(**options), _kernels_table, as_json)


@bench.command("replicas")
@click.option("--figure", "groups", multiple=True, help="Only this group of figures; may be repeated.  [all]")
@click.option(
    "--trace", type=click.Path(exists=True, dir_okay=False), help="Trace file (JSONL).  [generated]"
)
@click.option("--requests", type=click.IntRange(1), default=4_000, show_default=True, help="Of the trace.")
@click.option("--segments", type=click.IntRange(2), default=100_000, show_default=True, help="A replica.")
@click.option("--num-blocks", type=click.IntRange(2), default=5_000, show_default=True, help="A replica.")
@click.option(
    "--fleet", "fleets", type=click.IntRange(1), multiple=True, default=(8, 64, 1_000), show_default=True
)
@click.option("--redis", help="URL of a Redis to use.  [one of its own]")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@json_option
@needs_extra("redis")
def bench_replicas(trace: str | None, groups: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """What routing costs, and what it gains."""
    from pathlib import Path

    from radixkv.bench import replicas

    def tell(what: str) -> None:
        if sys.stderr.isatty():
            click.echo(what, err=True)

    chosen = replicas.Options(trace=Path(trace) if trace else None, progress=tell, **options)
    print_result(replicas.run(chosen, groups), replicas.table, as_json)


@bench.command("hostile")
@click.option("--attack", "names", multiple=True, help="Only this attack; may be repeated.  [all]")
@click.option(
    "--calls", type=click.IntRange(10), default=1_000, show_default=True, help="Of each kind, a round."
)
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True)
@json_option
@needs_extra("service")
def bench_hostile(names: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """What other tenants and the operator feel while the service is attacked."""
    from radixkv.bench import hostile

    with progress_bar(hostile.num_steps(options["rounds"], names), "attacking") as advance:
        result = hostile.run(names=names, progress=advance, **options)
    print_result(result, hostile.table, as_json)


def _fork_table(result: dict[str, Any]) -> str:
    head = f"{result['device']}, {result['path']}, copy {result['copy_bytes_per_s'] / 1e9:.1f} GB/s"
    return "\n".join([head, table(result["results"], tuple(result["results"][0]))])


def _kernels_table(result: dict[str, Any]) -> str:
    head = f"{result['device']}, {result['path']}; as the reference: {', '.join(result['checked'])}"
    rows = result["results"]
    return "\n".join([head, table(rows, tuple(rows[0])) if rows else result["note"]])
