"""Errors of lossy tiers: what a model says over KV that came back from host memory, exact, fp8 and int8, in one run.

There is a cache for each dtype. Each prompt is computed, kept below, evicted and loaded again in all of them. Then the
model reads the text that follows it over the loaded KV. Its logits are compared with those over the KV that were
computed. So the errors are those of the whole way, not of the codec alone. ``exact`` is the control: no difference.

- ``max_logit``, ``mean_logit``: absolute differences of logits.
- ``same_choice``: the share of positions whose likeliest token is the same.
- ``kl``: Kullback–Leibler divergence from the exact distribution, the mean in nats.
- ``loss``: of the text, in nats a token.
- ``bytes_per_token``: in host memory. ``of_16_bits``: as a share of what KV of 16 bits take.

The model is trained here (``trained_model``). With ``model``, it is that of a folder, over the ids of its own text.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any, Final, NamedTuple

import click
import torch

from benchmarks import trained_model
from radixkv.bench.measure import heading, surroundings
from radixkv.cli.output import finish, int_option, json_option, print_result, progress_bar, seed_option
from radixkv.config import LOSSY_DTYPES, CacheConfig, Namespace, TierDtype
from radixkv.engines.hf import HFEngine, layout_of
from radixkv.engines.hf.logits import logits_behind
from radixkv.engines.hf.models import Model, load_model
from radixkv.errors import ConfigError
from radixkv.storage.device import DeviceStorage
from radixkv.tables import columns
from radixkv.tiers.tiered_cache import TieredCache
from radixkv.tokenizer.load import load_tokenizer

DTYPES: Final[tuple[TierDtype, ...]] = ("exact", *LOSSY_DTYPES)
BLOCK_SIZE: Final = 16
MOST_TEXT: Final = 400_000
FOLLOWING: Final = 64
"""Tokens of text behind each prompt, over which logits are compared."""


class _Sums(NamedTuple):
    """Of one dtype, over all positions."""

    differences: list[torch.Tensor]
    same: list[torch.Tensor]
    kl: list[torch.Tensor]
    losses: list[torch.Tensor]


def run(
    *,
    model: Path | None = None,
    steps: int = 600,
    prompts: int = 64,
    tokens: int = 256,
    seed: int = 0,
    progress: Callable[[int], None] = lambda number: None,
) -> dict[str, Any]:
    """Measure ``prompts`` prompts of ``tokens`` tokens. Returns a dict that JSON can encode.

    ``steps``: of training. ``model``: a folder with a model and its tokenizer, in place of training. Raises ConfigError
    for a folder without them, and for too few tokens of text. ``progress`` gets the number of finished steps.
    """
    steps_done = count(1)

    def done() -> None:
        progress(next(steps_done))

    loaded, ids, loss = _material(model, steps, tokens, seed, done)
    starts = _starts(len(ids), prompts, tokens + FOLLOWING)
    engines = {dtype: _serving(loaded, tokens, dtype) for dtype in DTYPES}
    sums = {dtype: _Sums([], [], [], []) for dtype in DTYPES}
    try:
        for start in starts:
            prompt = ids[start : start + tokens]
            following = ids[start + tokens - 1 : start + tokens + FOLLOWING]
            for dtype, (engine, cache) in engines.items():
                _measure(engine, cache, dtype, prompt, following, sums[dtype])
            done()
        rows = [_row(dtype, sums[dtype], cache) for dtype, (_, cache) in engines.items()]
    finally:
        for engine, cache in engines.values():
            engine.close()
            cache.close()
    return {
        "benchmark": "tier-dtype",
        "seed": seed,
        **surroundings(),
        "model": "trained here" if model is None else model.name,
        "steps": steps if model is None else 0,
        "training_loss": loss,
        "prompts": prompts,
        "tokens": tokens,
        "positions": prompts * FOLLOWING,
        "results": rows,
    }


def _material(
    folder: Path | None, steps: int, tokens: int, seed: int, done: Callable[[], None]
) -> tuple[Model, list[int], float | None]:
    """Return a model, ids of text that it hasn't been trained on, and its loss in training."""
    if folder is None:
        made = trained_model.trained(steps, tokens + FOLLOWING + 1, seed, done)
        return made.model, list(made.held_out), made.loss
    model, tokenizer = load_model(str(folder)), load_tokenizer(str(folder))
    held_out = trained_model.text()[-MOST_TEXT:].decode(errors="ignore")
    return model, list(tokenizer.encode(held_out)), None


def _starts(num_ids: int, prompts: int, length: int) -> list[int]:
    """Return where prompts begin, spread over the text without overlap."""
    if num_ids < prompts * length:
        raise ConfigError("prompts", prompts, f"at most {num_ids // length} of {length} tokens")
    return [number * (num_ids // prompts) for number in range(prompts)]


def _serving(model: Model, tokens: int, dtype: TierDtype) -> tuple[HFEngine, TieredCache]:
    num_blocks = 2 * (tokens + FOLLOWING) // BLOCK_SIZE + 2
    config = CacheConfig(
        num_blocks,
        BLOCK_SIZE,
        layout_of(model),
        device=str(model.device),
        host_blocks=4 * num_blocks,
        tier_dtype=dtype,
    )
    cache = TieredCache(config)
    return HFEngine(model, cache), cache


def _measure(
    engine: HFEngine,
    cache: TieredCache,
    dtype: TierDtype,
    prompt: list[int],
    following: list[int],
    sums: _Sums,
) -> None:
    """Compare the logits over KV that were computed with those over the same after they came back."""
    namespace = engine.namespace("default")
    engine.prefill(namespace, prompt)
    computed = _logits(engine, cache, namespace, prompt, following)
    cache.evict(cache.evictable_blocks)
    with cache.open(namespace, prompt) as sequence:
        loading = sequence.loading
        if loading is None or not loading.wait() or loading.num_loaded_tokens != loading.num_tokens:
            raise AssertionError(f"{dtype}: a prompt didn't come back whole")
    loaded = _logits(engine, cache, namespace, prompt, following)
    exact, found = computed.log_softmax(-1), loaded.log_softmax(-1)
    sums.differences.append((loaded - computed).abs().flatten())
    sums.same.append((loaded.argmax(-1) == computed.argmax(-1)).double())
    sums.kl.append((exact.exp() * (exact - found)).sum(-1))
    sums.losses.append(-found.gather(1, torch.tensor(following[1:]).unsqueeze(1)).flatten())
    cache.evict(cache.evictable_blocks)


def _logits(
    engine: HFEngine, cache: TieredCache, namespace: Namespace, prompt: list[int], following: list[int]
) -> torch.Tensor:
    """Return the logits of the text behind a prompt: ``[FOLLOWING, vocabulary]``."""
    assert isinstance(cache.storage, DeviceStorage)
    with cache.lease(cache.match(namespace, prompt[:-1])) as lease:
        ids = [*prompt[lease.num_tokens : -1], *following[:-1]]
        return logits_behind(engine.model, cache.storage, lease.block_ids, ids)[-FOLLOWING:]


def _row(dtype: TierDtype, sums: _Sums, cache: TieredCache) -> dict[str, Any]:
    tiers, layout = cache.lower, cache.config.layout
    assert tiers is not None and layout is not None
    differences, bytes_per_token = torch.cat(sums.differences), tiers.block_bytes / BLOCK_SIZE
    return {
        "dtype": dtype,
        "max_logit": float(differences.max()),
        "mean_logit": float(differences.mean()),
        "same_choice": float(torch.cat(sums.same).mean()),
        "kl": float(torch.cat(sums.kl).mean().clamp(min=0.0)),
        "loss": float(torch.cat(sums.losses).mean()),
        "bytes_per_token": bytes_per_token,
        "of_16_bits": bytes_per_token / (layout.bytes_per_token / layout.element_bytes * 2),
    }


def table(result: dict[str, Any]) -> str:
    """Return the result as text."""
    trained_here = f", {result['steps']} steps, loss {result['training_loss']:.2f}" if result["steps"] else ""
    head = (
        f"{heading(result)}\nmodel {result['model']}{trained_here}; {result['prompts']} prompts of {result['tokens']} "
        f"tokens, {result['positions']:,} positions"
    )
    rows = [
        (
            row["dtype"],
            f"{row['max_logit']:.3g}",
            f"{row['mean_logit']:.2g}",
            f"{100 * row['same_choice']:.2f} %",
            f"{row['kl']:.2g}",
            f"{row['loss']:.4f}",
            f"{row['bytes_per_token']:,.0f}",
            f"{100 * row['of_16_bits']:.1f} %",
        )
        for row in result["results"]
    ]
    names = ("dtype", "max |Δlogit|", "mean", "same choice", "KL", "loss", "bytes a token", "of 16 bits")
    return "\n".join([head, columns([names, *rows])])


# --- the command


@click.command()
@click.option(
    "--model",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder of a model and its tokenizer.  [trains a small model of bytes]",
)
@int_option("--steps", 600, "Steps of training.", most=10**5)
@int_option("--prompts", 64, "Prompts to measure.", most=1000)
@int_option("--tokens", 256, "Tokens in a prompt.", least=17, most=8000)
@seed_option
@json_option
def main(model: Path | None, steps: int, prompts: int, as_json: bool, **options: Any) -> None:
    """Compare what a model says over KV that came back from host memory: exact, fp8 and int8."""
    with progress_bar(prompts + (steps if model is None else 0), "measuring") as advance:
        result = run(model=model, steps=steps, prompts=prompts, progress=advance, **options)
    print_result(result, table, as_json)


if __name__ == "__main__":
    finish(main, "python -m benchmarks.tier_dtype")
