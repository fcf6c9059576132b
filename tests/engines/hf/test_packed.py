"""A packed forward gives the logits of transformers' own attention, for any mix of chunks, sharing and lengths."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from radixkv.engines.hf import packed as hf_packed
from radixkv.engines.hf.packed import Chunk, Newest, PackedForward, serves
from radixkv.engines.hf.paged_cache import layout_of
from radixkv.storage.device import DeviceStorage
from tests.engines.support import ARCHITECTURES, model_of, prompt_of

pytestmark = pytest.mark.slow

SIZE = 4


def logits_of(model: Any, ids: list[int]) -> torch.Tensor:
    """The logits after the last of ``ids``, by transformers alone."""
    given_ids = torch.tensor([ids])
    with torch.no_grad():
        output = model(input_ids=given_ids, attention_mask=torch.ones_like(given_ids), use_cache=False)
    found: torch.Tensor = output.logits[0, -1]
    return found


class Rows:
    """Sequences over one storage. Those of a group share the blocks of their common prefix."""

    def __init__(self, model: Any, num_blocks: int = 400) -> None:
        self.model = model
        self.storage = DeviceStorage(layout_of(model), num_blocks, SIZE)
        self.storage.data.fill_(torch.nan)  # what isn't written must not be read
        self.forward = PackedForward(model, self.storage)
        self._free = list(np.random.default_rng(1).permutation(num_blocks))
        self.ids: list[list[int]] = []
        self.tables: list[np.ndarray[Any, Any]] = []

    def add(self, ids: list[int], shared: np.ndarray[Any, Any] | None = None) -> int:
        table = [] if shared is None else list(shared)
        need = (len(ids) + 40) // SIZE - len(table)
        table += [self._free.pop() for _ in range(need)]
        self.ids.append(ids)
        self.tables.append(np.array(table, dtype=np.int32))
        return len(self.ids) - 1

    def chunk(self, row: int, start: int, stop: int) -> Chunk:
        return Chunk(np.array(self.ids[row][start:stop], dtype=np.uint32), start, self.tables[row])

    def newest(self, row: int) -> Newest:
        ids = self.ids[row]
        return Newest(row, ids[-1], len(ids) - 1, self.tables[row])

    def step(self, rows: list[int], chunks: list[Chunk]) -> None:
        """Make a step, and compare the logits of ``rows``, whose earlier tokens are computed."""
        found = self.forward.run([self.newest(row) for row in rows], chunks)
        assert found.shape[0] == len(rows)
        for row, logits in zip(rows, found, strict=True):
            torch.testing.assert_close(logits, logits_of(self.model, self.ids[row]), rtol=1e-3, atol=2e-4)


@pytest.mark.parametrize("architecture", [each for each in ARCHITECTURES if each != "falcon"])
def test_chunks_and_newest_tokens_in_one_step(architecture: str) -> None:
    rows = Rows(model_of(architecture))
    first, second, third = (rows.add(prompt_of(size, size)) for size in (19, 7, 1))
    rows.forward.run([], [rows.chunk(first, 0, 10)])
    rows.forward.run([], [rows.chunk(second, 0, 6), rows.chunk(first, 10, 18)])
    rows.step([first, third], [])
    for row in (first, third):
        rows.ids[row].append(5)
    rows.step([first, second, third], [])


def test_every_architecture_is_served_or_refused() -> None:
    served = {name: serves(model_of(name), layout_of(model_of(name))) for name in ARCHITECTURES}
    assert served == {name: name != "falcon" for name in ARCHITECTURES}, "falcon has an attention of its own"


def test_another_attention_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """An attention that is not the one of the packed forward: a wrong scale, or an argument that it doesn't know."""
    model = model_of()
    real = hf_packed._Step.attend
    monkeypatch.setattr(
        hf_packed._Step, "attend", lambda self, q, k, v, scale: real(self, q, k, v, scale * 0.5)
    )
    assert not serves(model, layout_of(model))
    monkeypatch.undo()
    layer = model.model.layers[0].self_attn
    monkeypatch.setattr(hf_packed, "_NOT_PLAIN", ("dropout",))
    assert layer.training is False and not serves(model, layout_of(model))


def test_the_models_own_attention_is_back_after_a_step_and_after_an_error() -> None:
    rows = Rows(model_of())
    row = rows.add(prompt_of(5))
    before = rows.model.config._attn_implementation
    with pytest.raises(IndexError):
        rows.forward.run([], [Chunk(np.array([3], dtype=np.uint32), 10_000, rows.tables[row])])
    rows.forward.run([], [rows.chunk(row, 0, 4)])
    assert rows.model.config._attn_implementation == before


GROUPS = st.tuples(st.integers(0, 60), st.lists(st.integers(1, 30), min_size=1, max_size=4))
"""Tokens that the rows of a group share, and the other tokens of each."""


@settings(max_examples=settings.default.max_examples // 5)
@given(
    groups=st.lists(GROUPS, min_size=1, max_size=4),
    steps=st.integers(1, 4),
    worth=st.sampled_from([1, 40]),
    data=st.data(),
)
def test_random_groups_of_rows(
    groups: list[tuple[int, list[int]]], steps: int, worth: int, data: st.DataObject
) -> None:
    """Rows that share prefixes of whole blocks step together, in changing company."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hf_packed, "_WORTH_TOKENS", worth)
        rows, members = Rows(model_of(), 1200), list[int]()
        for number, (num_shared, sizes) in enumerate(groups):
            head = prompt_of(num_shared // SIZE * SIZE, number)
            table: Any = None
            for size in sizes:
                row = rows.add([*head, *prompt_of(size, 100 + size)], table)
                start = 0 if table is None else len(head)
                table = rows.tables[row][: len(head) // SIZE]
                if start < len(rows.ids[row]) - 1:
                    rows.forward.run([], [rows.chunk(row, start, len(rows.ids[row]) - 1)])
                members.append(row)
        for number in range(steps):
            chosen = (
                data.draw(st.lists(st.sampled_from(members), min_size=1, unique=True))
                if number % 2
                else members
            )
            rows.step(chosen, [])
            for row in chosen:
                rows.ids[row].append(3 + (row + number) % 90)


def test_a_working_copy_grows_and_is_kept() -> None:
    """More steps than a working copy has room for. Between, the blocks aren't gathered again."""
    rows = Rows(model_of())
    members = [rows.add(prompt_of(size, size)) for size in (9, 12)]
    rows.forward.run([], [rows.chunk(row, 0, len(rows.ids[row]) - 1) for row in members])
    gathered = 0
    real = hf_packed._Copy._gathered

    def counting(self: Any, data: torch.Tensor) -> torch.Tensor:
        nonlocal gathered
        gathered += 1
        return real(self, data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hf_packed._Copy, "_gathered", counting)
        for number in range(30):
            rows.step(members, [])
            for row in members:
                rows.ids[row].append(3 + number)
    assert gathered == layout_of(rows.model).num_layers


def test_bytes_behind_the_end_of_a_row_have_no_effect() -> None:
    """NaN there, as a prompt of another tenant may have left, reaches no output."""
    rows = Rows(model_of())
    short, long = rows.add(prompt_of(2)), rows.add(prompt_of(23, 1))
    rows.forward.run([], [rows.chunk(short, 0, 1), rows.chunk(long, 0, 22)])
    assert torch.isnan(rows.storage.data[int(rows.tables[short][0])]).any()
    rows.step([short, long], [])
