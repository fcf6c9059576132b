"""Beam search copies as many blocks as copy-on-write needs, and holds less than half of the unshared ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as SequenceABC

import pytest

from radixkv import audit
from radixkv.engines.hf import HFEngine
from radixkv.index.cache import PrefixCache
from radixkv.index.sequence import Sequence
from tests.engines.support import engine_over, model_of, prompt_of, stock


class RecordingCache(PrefixCache):
    """Records the parents of each beam step."""

    def reorder(self, sequences: SequenceABC[Sequence], parents: Iterable[int]) -> list[Sequence]:
        chosen = list(parents)
        self.__dict__.setdefault("steps", []).append(chosen)
        return super().reorder(sequences, chosen)


def copies_by_formula(steps: list[list[int]], num_prompt_tokens: list[int], block_size: int) -> int:
    """Return Σ (writers − 1) over the shared partial tails written in a step. In a beam search every owner writes.

    ``steps[i][row]`` is the row that ``row`` continues. Nothing is written after the last step.
    """
    rows_each = len(steps[0]) // len(num_prompt_tokens)
    tails: list[object] = [prompt for prompt in range(len(num_prompt_tokens)) for _ in range(rows_each)]
    copies = 0
    for number, parents in enumerate(steps[:-1]):
        tails = [tails[parent] for parent in parents]
        for tail, writers in Counter(tails).items():
            position = num_prompt_tokens[tails.index(tail) // rows_each] + number
            if position % block_size:
                copies += writers - 1
        tails = [object() for _ in tails]  # each row now writes into a block of its own
    return copies


def test_the_formula_by_hand() -> None:
    """A prompt of 5 in blocks of 4. 3 copies; all continue row 0: 3 copies; two pairs: 2; a new block: none."""
    steps = [[0, 0, 0, 0], [0, 0, 0, 0], [1, 1, 2, 2], [0, 0, 0, 0], [0, 1, 2, 3]]
    assert copies_by_formula(steps, [5], 4) == 3 + 3 + 2


@pytest.mark.slow
@pytest.mark.parametrize(("block_size", "num_returned"), [(1, 4), (3, 1), (16, 4)])
def test_copies_of_four_beams_over_300_tokens(block_size: int, num_returned: int) -> None:
    model, prompt, new = model_of(), prompt_of(300), 40
    with engine_over(model, block_size=block_size, num_blocks=2048, kind=RecordingCache) as engine:
        cache = engine.cache
        held: list[int] = []

        def count() -> bool:
            audit.check(cache)
            held.append(cache.stats().num_blocks - cache.stats().free_blocks)
            return False

        made = engine.generate(
            engine.namespace("acme"), prompt, new, num_beams=4, num_return_sequences=num_returned,
            eos_token_id=-1, stop=count,
        )  # fmt: skip
        settings = {"num_beams": 4, "num_return_sequences": num_returned}
        assert made.token_ids == stock(model, [prompt], new, eos=None, **settings)
        steps = cache.__dict__["steps"]
        assert len(steps) == new
        assert cache.stats().copied_blocks == copies_by_formula(steps, [300], block_size)
        assert cache.storage is not None
        assert cache.storage.num_copied_blocks == cache.stats().copied_blocks
        assert cache.storage.num_launches <= new - 1
        unshared = 4 * -(-(300 + new - 1) // block_size)
        assert max(held) < unshared / 2


def test_copies_of_a_batch_of_beams() -> None:
    model, prompts, new = model_of(), [prompt_of(30), prompt_of(17, 1)], 25
    with engine_over(model, block_size=4, kind=RecordingCache) as engine:
        made = engine.generate(engine.namespace("acme"), prompts, new, num_beams=3, eos_token_id=-1)
        assert made.token_ids == stock(model, prompts, new, eos=None, num_beams=3)
        assert engine.cache.stats().copied_blocks == copies_by_formula(
            engine.cache.__dict__["steps"], [30, 17], 4
        )


@pytest.mark.parametrize("num_prompt_tokens", [15, 16, 17])
def test_returned_sequences_copy_the_tail_once_each(num_prompt_tokens: int) -> None:
    model, prompt = model_of(), prompt_of(num_prompt_tokens)
    with engine_over(model, block_size=16) as engine:
        engine.generate(
            engine.namespace("acme"),
            prompt,
            8,
            do_sample=True,
            seed=1,
            num_return_sequences=4,
            eos_token_id=-1,
        )
        assert engine.cache.stats().copied_blocks == (0 if num_prompt_tokens == 16 else 3)
        storage = engine.cache.storage
        assert storage is not None
        assert storage.num_launches == (0 if num_prompt_tokens == 16 else 1)


def compute(engine: HFEngine, sequence: Sequence) -> None:
    """Compute and commit the uncommitted tokens of one sequence."""
    paged = engine._paged([sequence], [sequence.num_committed_tokens])
    with paged.attached(engine.model):
        for _ in engine._compute(paged, sequence.token_ids):
            pass


def test_a_fork_that_does_not_write_keeps_its_bytes() -> None:
    """An idle owner forces every writer to copy, and reads its old bytes afterwards."""
    model, prompt = model_of(), prompt_of(21)
    with engine_over(model, block_size=4) as engine:
        cache, ns = engine.cache, engine.namespace("acme")
        assert cache.storage is not None
        with cache.open(ns, prompt) as parent:
            compute(engine, parent)
            (idle,) = parent.fork(1)
            tail = int(idle.block_table[-1])
            before = cache.storage.data[tail, :, :, :1].clone()
            parent.append(9)
            compute(engine, parent)
            assert cache.stats().copied_blocks == 1
            assert int(idle.block_table[-1]) == tail != int(parent.block_table[-1])
            assert cache.storage.data[int(parent.block_table[-1]), :, :, :1].equal(before)
            assert cache.storage.data[tail, :, :, :1].equal(before)
            assert cache.storage.data[tail, :, :, 1:].eq(0).all()
            idle.release()
