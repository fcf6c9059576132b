"""Branching over a long shared prompt: beam search and tree of thought, beside transformers' own cache.

    python examples/branching.py                                   the demo model on a CPU, half a minute
    python examples/branching.py --model llama-3-8b --device cuda  random weights in Llama-3-8B's shape, bfloat16

Beams and the branches of a thought are forks. They share the prompt's blocks, and copy a block only where they
diverge. Tree of thought makes some branches, keeps the best, and branches again from it. The cache holds everything
that was computed before. The value of a thought is its number of different tokens, because weights are random and the
text has no meaning. Stock transformers does the same work with a DynamicCache. Each of its rows has a whole copy of
the prompt, and each round starts from the beginning.

The script prints the time of a step, the KV held, and the time to the first token (of each round). The transformers
engine gathers a contiguous working copy from the blocks, because stock attention needs one. Its size is printed too.
In bfloat16 a prompt computed in other chunks rounds differently, so the two may generate different tokens.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedModel, StoppingCriteriaList

from radixkv import CacheConfig, PrefixCache, audit
from radixkv.engines.hf import HFEngine, demo_model, layout_of
from radixkv.engines.hf.paged_cache import CACHE_ARGUMENT

BLOCK_SIZE = 16
SAMPLING: dict[str, Any] = {"do_sample": True, "temperature": 1.0, "top_k": 50}
LLAMA_3_8B = LlamaConfig(
    vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
    num_key_value_heads=8, max_position_embeddings=8192, rope_theta=500000.0, tie_word_embeddings=False,
    bos_token_id=128000, eos_token_id=128001,
)  # fmt: skip


@dataclass
class Watch:
    """Measures seconds to the first token and of each step, and the blocks held. It is called after every step."""

    device: torch.device
    cache: PrefixCache | None = None
    blocks_held: int = 0
    first_s: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    _stamps: list[float] = field(default_factory=list)

    def start(self) -> None:
        self._stamps = [self._now()]

    def step(self, *_: Any, **__: Any) -> bool:
        """Called after every step, and by radixkv after every chunk of a prompt. True would stop the generation."""
        self._stamps.append(self._now())
        if self.cache is not None:
            stats = self.cache.stats()
            self.blocks_held = max(self.blocks_held, stats.num_blocks - stats.free_blocks)
        return False

    def stop(self, num_tokens: int) -> None:
        steps = self._stamps[-num_tokens:]
        self.first_s.append(steps[0] - self._stamps[0])
        self.step_s += [after - before for before, after in pairwise(steps)]

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def row(self, name: str, kv_bytes: int, copy_bytes: int = 0) -> str:
        held = f"{kv_bytes / 2**20:9.1f}{copy_bytes / 2**20:14.1f}"
        first = "  ".join(f"{seconds:.3f}" for seconds in self.first_s)
        return f"  {name:14}{statistics.median(self.step_s) * 1e3:9.2f}{held}   {first}"


HEADER = f"  {'':14}{'ms a step':>9}{'KV MiB':>9}{'working copy':>14}   s to the first token"


class Radix:
    """Both searches through the prefix cache."""

    def __init__(self, model: PreTrainedModel, num_tokens: int) -> None:
        layout = layout_of(model)
        num_blocks = -(-num_tokens // BLOCK_SIZE)
        self.cache = PrefixCache(
            CacheConfig(num_blocks, block_size=BLOCK_SIZE, layout=layout, device=str(model.device))
        )
        self.token_bytes = layout.bytes_per_token
        self.engine = HFEngine(model, self.cache)
        self.namespace = self.engine.namespace("acme")
        self.watch = Watch(model.device, self.cache)
        self.found: list[int] = []

    def generate(self, ids: list[int], num_new: int, **how: Any) -> list[list[int]]:
        self.watch.start()
        made = self.engine.generate(
            self.namespace, ids, num_new, eos_token_id=-1, stop=self.watch.step, **how
        )
        self.watch.stop(num_new)
        self.found += made.num_cached_tokens
        return made.token_ids

    def row(self, num_rows: int, num_tokens: int) -> str:
        copy_bytes = num_rows * num_tokens * self.token_bytes
        return self.watch.row("radixkv", self.watch.blocks_held * BLOCK_SIZE * self.token_bytes, copy_bytes)


class Stock:
    """Both searches with ``model.generate``, and a new DynamicCache for each call."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model: Any = model
        self.watch = Watch(model.device)
        self.kv_bytes = 0

    def generate(self, ids: list[int], num_new: int, seed: int = 0, **how: Any) -> list[list[int]]:
        torch.manual_seed(seed)
        past = DynamicCache(config=self.model.config)
        self.watch.start()
        rows = self.model.generate(
            torch.tensor([ids], device=self.model.device),
            attention_mask=torch.ones((1, len(ids)), dtype=torch.long, device=self.model.device),
            max_new_tokens=num_new,
            eos_token_id=None,
            stopping_criteria=StoppingCriteriaList([self._told]),
            **({"do_sample": False, CACHE_ARGUMENT: past} | how),
        )
        self.watch.stop(num_new)
        self.kv_bytes = max(
            self.kv_bytes, sum(layer.keys.nbytes + layer.values.nbytes for layer in past.layers)
        )
        made: list[list[int]] = rows[:, len(ids) :].tolist()
        return made

    def _told(self, input_ids: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return torch.full((len(input_ids),), self.watch.step(), device=input_ids.device)

    def row(self) -> str:
        return self.watch.row("transformers", self.kv_bytes)


def value(thought: list[int]) -> tuple[int, list[int]]:
    """The value of a thought: its number of different tokens, then the tokens themselves, to order equal ones."""
    return len(set(thought)), thought


def beam_search(model: PreTrainedModel, prompt: list[int], num_beams: int, num_new: int) -> None:
    """Run one search in both ways, and compare the tokens."""
    length = len(prompt) + num_new
    ours, stock = Radix(model, length + num_beams * (num_new + 2 * BLOCK_SIZE)), Stock(model)
    mine, theirs = (each.generate(prompt, num_new, num_beams=num_beams) for each in (ours, stock))
    print(f"\nbeam search, {num_beams} beams, {num_new} steps\n{HEADER}")
    print(ours.row(num_beams, length))
    print(stock.row())
    stats, storage = ours.cache.stats(), ours.cache.storage
    assert storage is not None
    unshared = num_beams * -(-(length - 1) // BLOCK_SIZE)
    print(f"  blocks held at most: {ours.watch.blocks_held}, without sharing: {unshared}")
    how = f"in {storage.num_launches} launches" if storage.num_launches else "by beam steps of the device"
    print(f"  blocks copied: {stats.copied_blocks}, {how}")
    print(f"  same tokens as transformers' own cache: {mine == theirs}")
    print(f"  audit: {'clean' if audit.check(ours.cache).ok else 'broken'}")


def tree_of_thought(
    model: PreTrainedModel, prompt: list[int], num_branches: int, num_new: int, num_rounds: int
) -> None:
    """Run rounds of branches of ``num_new`` tokens in both ways. Each round starts from the best of the last."""
    length = len(prompt) + num_rounds * num_new
    ours, stock = Radix(model, length + num_rounds * num_branches * (num_new + 2 * BLOCK_SIZE)), Stock(model)
    paths = []
    for each in (ours, stock):
        path = list(prompt)
        for seed in range(num_rounds):
            thoughts = each.generate(path, num_new, seed=seed, num_return_sequences=num_branches, **SAMPLING)
            path += max(thoughts, key=value)
        paths.append(path)
    print(f"\ntree of thought, {num_rounds} rounds of {num_branches} thoughts of {num_new} tokens\n{HEADER}")
    print(ours.row(num_branches, length))
    print(stock.row())
    stats = ours.cache.stats()
    print(f"  tokens found cached, round by round: {', '.join(map(str, ours.found))}")
    print(f"  blocks held in the end, with all thoughts: {stats.num_blocks - stats.free_blocks}")
    print(f"  blocks copied: {stats.copied_blocks}")
    print(f"  same path as with transformers' own cache: {paths[0] == paths[1]}")
    print(f"  audit: {'clean' if audit.check(ours.cache).ok else 'broken'}")


def made(name: str, device: str) -> PreTrainedModel:
    """The model with random weights, in eval mode."""
    if name == "demo":
        return demo_model().to(device)
    torch.manual_seed(0)
    with torch.device(device):
        model = LlamaForCausalLM._from_config(LLAMA_3_8B, dtype=torch.bfloat16)
    return model.eval()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=("demo", "llama-3-8b"), default="demo")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--prompt", type=int, default=1000, help="tokens of the shared prompt")
    parser.add_argument("--branches", type=int, default=4, help="beams, and branches of a thought")
    parser.add_argument("--steps", type=int, default=32, help="new tokens, of the search and of a thought")
    parser.add_argument("--rounds", type=int, default=3, help="thoughts one after the other")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = made(options.model, options.device)
    count = sum(parameter.numel() for parameter in model.parameters())
    print(
        f"{options.model}, {count / 1e6:,.0f} M parameters, {model.dtype} on {options.device}; "
        f"a prompt of {options.prompt:,} tokens"
    )
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(3, 8000, (options.prompt,), generator=generator).tolist()
    beam_search(model, prompt, options.branches, options.steps)
    tree_of_thought(model, prompt, options.branches, options.steps, options.rounds)


if __name__ == "__main__":
    main()
