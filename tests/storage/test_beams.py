"""A beam search on a storage's device, as an engine runs it: steps and writes without the host, then the audit."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from radixkv import CacheConfig, KVLayout, LentBeams, Namespace, PrefixCache, audit
from tests.kernels.waiting import no_waiting

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
NUM_BEAMS, BLOCK_SIZE, NUM_STEPS = 6, 4, 40
PROMPT = list(range(10, 24))


def lent(device: str) -> tuple[PrefixCache, LentBeams]:
    """Return beams over one prompt. The KV of a token is its id, in every layer and head."""
    layout = KVLayout(3, 2, 8, "float16")
    cache = PrefixCache(CacheConfig(400, BLOCK_SIZE, layout, device))
    sequence = cache.open(Namespace("a", "m"), PROMPT)
    for position, token_id in enumerate(PROMPT):
        block = int(sequence.block_table[position // BLOCK_SIZE])
        cache.storage.data[block, :, :, position % BLOCK_SIZE] = token_id
    sequence.commit(len(PROMPT))
    return cache, cache.lend([sequence, *sequence.fork(NUM_BEAMS - 1)], NUM_STEPS)


def captured(call: Callable[[], None], device: str) -> Callable[[], None]:
    """Return the call itself. On a GPU return a captured graph of it; the call then ran once."""
    if device == "cpu":
        return call
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


@pytest.mark.parametrize("device", DEVICES)
def test_a_search_in_a_cuda_graph(device: str) -> None:
    """Every beam ends with its own ids and their KV. A replay after that changes nothing."""
    cache, beams = lent(device)
    data = cache.storage.data
    rng = np.random.default_rng(0)
    parents = torch.from_numpy(rng.integers(0, NUM_BEAMS, (NUM_STEPS, NUM_BEAMS), dtype=np.int32)).to(device)
    ids = torch.from_numpy(rng.integers(0, 2_000, (NUM_STEPS, NUM_BEAMS))).to(device)
    these_parents, these_ids = parents[0].clone(), ids[0].clone()

    def step() -> None:
        beams.step(these_parents, these_ids)
        blocks, rows = beams.slots()
        data[blocks, :, :, rows] = these_ids.to(data.dtype)[:, None, None, None, None]

    replay = captured(step, device)
    first = 0 if device == "cpu" else 1
    for at in range(first, NUM_STEPS):
        these_parents.copy_(parents[at])
        these_ids.copy_(ids[at])
        replay()
    audit.check(cache)
    assert beams.reconcile()[0] == NUM_STEPS
    audit.check(cache)
    expected = [PROMPT] * NUM_BEAMS
    for chosen, new in zip(parents.tolist(), ids.tolist(), strict=True):
        expected = [[*expected[parent], token_id] for parent, token_id in zip(chosen, new, strict=True)]
    before = data.clone()
    replay() if device == "cuda" else beams._device.step(these_parents, these_ids)
    assert beams._device.books.read().num_steps == NUM_STEPS
    for sequence, tokens in zip(beams.sequences, expected, strict=True):
        assert sequence.token_ids.tolist() == tokens
        rows = before[sequence.block_table.tolist()].permute(1, 2, 4, 5, 0, 3).flatten(4)[..., : len(tokens)]
        assert (rows == torch.tensor(tokens, device=device)).all()
        sequence.commit(sequence.num_tokens)
        sequence.release()
    audit.check(cache)


@pytest.mark.gpu
def test_a_step_does_not_wait_for_the_device() -> None:
    """It also doesn't wait when more blocks are lent."""
    _, beams = lent("cuda")
    parents = torch.zeros(NUM_BEAMS, dtype=torch.int32, device="cuda")
    ids = torch.zeros(NUM_BEAMS, dtype=torch.int64, device="cuda")
    beams.step(parents, ids)
    torch.cuda.synchronize()
    with no_waiting():
        beams.lend_more(3)
        beams.step(parents, ids)
        beams.slots()
    assert beams.reconcile().num_steps == 2
