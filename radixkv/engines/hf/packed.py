"""One forward of a transformers model for tokens of many sequences, over the blocks of the cache.

    step    newest tokens of n sequences │ chunk │ chunk │ ...      one row [1, tokens], each token at its own position
    layer   1. write the step's KV into the blocks    2. attend, each sequence to its own blocks

The attention is registered with transformers (``AttentionInterface``), and is chosen only within ``PackedForward.run``.

Newest tokens attend in two parts, which are merged by their log-sum-exp:

- *shared*: blocks that several sequences have in common at their start. All of these sequences attend in one call, and
  the blocks are read once.
- *private*: the blocks after them. Sequences of about the same number of blocks attend in one call, padded.

On a CPU both parts are working copies, head-major. They are kept while the same sequences make the next step, which
writes one more column. Elsewhere each step gathers them, so that they take no memory between steps. Columns behind a
sequence's end are zeros and masked. So no byte of another sequence takes part, whatever it is.

``serves`` says whether a model can be served so: it compares the logits with those of transformers' own attention.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface, PreTrainedModel

from radixkv.config import KVLayout
from radixkv.storage.plan import BlockIds

Ids = NDArray[np.uint32]

_NAME = "radixkv_packed"
_GROWTH_COLUMNS = 64
"""Columns of a working copy for later tokens: a copy every 64 steps."""
_WORTH_TOKENS = 128
"""A shared part is apart only if it saves reading this many tokens a layer."""
_CLOSENESS = 0.05
"""Largest difference of two logits, as a share of their standard deviation, that rounding of 16-bit models explains."""


class Blocks(Protocol):
    """The storage of a model's KV."""

    @property
    def device(self) -> torch.device:
        """Where it is."""

    @property
    def block_size(self) -> int:
        """Tokens a block."""

    def layer(self, index: int, /) -> Tensor:
        """A layer's blocks, ``[num_blocks, 2, block_size, num_kv_heads, head_dim]``."""


class Chunk(NamedTuple):
    """Tokens of one sequence, from position ``start`` on. ``table`` has the blocks of all tokens up to their end."""

    ids: Ids
    start: int
    table: BlockIds


class Newest(NamedTuple):
    """The newest token of a sequence, at ``position``; all before it are computed.

    ``key`` names the sequence: two steps with the same key differ by what was appended.
    """

    key: int
    token_id: int
    position: int
    table: BlockIds


class PackedForward:
    """Forwards of one model over one storage. One thread at a time."""

    def __init__(self, model: PreTrainedModel, storage: Blocks) -> None:
        self._model, self._storage = model, storage
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._keeps_copies = storage.device.type == "cpu"
        self._parts: _Parts | None = None

    @torch.no_grad()
    def run(self, newest: list[Newest], chunks: list[Chunk]) -> Tensor:
        """Compute the KV of all tokens. Returns the logits after the newest ones, ``[len(newest), vocab_size]``.

        The blocks must exist and belong to these sequences alone. After an error the step can be made again.
        """
        parts, self._parts = self._parts_of(newest), None
        step = _Step(self._storage, newest, chunks, parts)
        settings: dict[str, Any] = {}
        if self._keeps_logits:
            settings["logits_to_keep"] = (
                torch.arange(len(newest), device=step.positions.device) if newest else 1
            )
        with _attending(self._model, step):
            output: Any = self._model(
                input_ids=step.input_ids, position_ids=step.positions, use_cache=False, **settings
            )
        if self._keeps_copies:
            self._parts = parts
        logits: Tensor = output.logits[0]
        return logits[: len(newest)]

    def forget(self) -> None:
        """Drop the working copies."""
        self._parts = None

    def _parts_of(self, newest: list[Newest]) -> _Parts | None:
        if self._parts is not None and self._parts.advance(newest):
            return self._parts
        return _Parts(self._storage, newest, self._keeps_copies) if newest else None


class _Step:
    """The inputs of a forward, and its attention."""

    def __init__(
        self, storage: Blocks, newest: list[Newest], chunks: list[Chunk], parts: _Parts | None
    ) -> None:
        self._storage, self._parts, self._num_newest = storage, parts, len(newest)
        size, device = storage.block_size, storage.device
        first_ids = np.array([each.token_id for each in newest], dtype=np.uint32)
        ids = np.concatenate([first_ids, *(chunk.ids for chunk in chunks)])
        spans = [np.arange(chunk.start, chunk.start + len(chunk.ids)) for chunk in chunks]
        own = np.array([each.position for each in newest], dtype=np.int64)
        heads = np.array([each.table[each.position // size] for each in newest], dtype=np.int64)
        blocks = [chunk.table[span // size] for chunk, span in zip(chunks, spans, strict=True)]
        positions = np.concatenate([own, *spans]).astype(np.int64)
        self.input_ids = torch.from_numpy(ids.astype(np.int64)).to(device)[None]
        self.positions = torch.from_numpy(positions).to(device)[None]
        self._blocks = torch.from_numpy(np.concatenate([heads, *blocks]).astype(np.int64)).to(device)
        self._offsets = torch.from_numpy(positions % size).to(device)
        ends = np.cumsum([self._num_newest, *(len(chunk.ids) for chunk in chunks)]).tolist()
        self._chunks = [
            _ChunkAttention(storage, chunk, first) for chunk, first in zip(chunks, ends, strict=False)
        ]
        self.num_layers = 0
        """Layers that have attended so far."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """Write a layer's KV, ``[1, kv_heads, tokens, head_dim]``, and return the attention of ``query``,
        ``[1, heads, tokens, head_dim]``, as ``[1, tokens, heads, head_dim]``."""
        data = self._storage.layer(self.num_layers)
        keys, values = key[0].transpose(0, 1), value[0].transpose(0, 1)
        data[:, 0][self._blocks, self._offsets] = keys
        data[:, 1][self._blocks, self._offsets] = values
        queries = query[0].transpose(0, 1)
        scale = queries.shape[-1] ** -0.5 if scale is None else scale
        output = torch.empty_like(queries, memory_format=torch.contiguous_format)
        stop = self._num_newest
        if self._parts is not None:
            new = (queries[:stop], keys[:stop], values[:stop])
            output[:stop] = self._parts.attend(self.num_layers, data, *new, scale)
        for chunk in self._chunks:
            output[chunk.span] = chunk.attend(data, queries[chunk.span], scale)
        self.num_layers += 1
        return output[None]


class _ChunkAttention:
    """The attention of a chunk to its sequence up to itself."""

    def __init__(self, storage: Blocks, chunk: Chunk, first: int) -> None:
        count, device = len(chunk.ids), storage.device
        self.span = slice(first, first + count)
        self._length = chunk.start + count
        num_blocks = -(-self._length // storage.block_size)
        self._table = torch.from_numpy(chunk.table[:num_blocks].astype(np.int64)).to(device)
        self._mask: Tensor | None = None
        if count > 1:
            whole = torch.ones((count, self._length), dtype=torch.bool, device=device)
            self._mask = whole.tril(chunk.start)

    def attend(self, data: Tensor, queries: Tensor, scale: float) -> Tensor:
        """``[tokens, heads, head_dim]`` of the queries, of the same shape."""
        states = data.index_select(0, self._table).permute(1, 3, 0, 2, 4).flatten(2, 3)
        keys, values = states[:, None, :, : self._length]
        found = functional.scaled_dot_product_attention(
            queries.transpose(0, 1)[None],
            keys,
            values,
            attn_mask=self._mask,
            scale=scale,
            enable_gqa=queries.shape[1] != keys.shape[1],
        )
        return found[0].transpose(0, 1)


class _Parts:
    """The shared and private blocks of the sequences that make a step, with their working copies."""

    def __init__(self, storage: Blocks, newest: list[Newest], keeps_copies: bool) -> None:
        size = storage.block_size
        self._keys = [each.key for each in newest]
        self._positions = np.array([each.position for each in newest])
        tables = [each.table for each in newest]
        firsts = np.zeros(len(newest), dtype=np.int64)  # the first private block
        self._shared = []
        for rows, num_blocks in _shared_blocks(tables, self._positions // size, size):
            firsts[rows] = num_blocks
            table = tables[rows[0]][:num_blocks].astype(np.int64)[None]
            part = _Copy(rows, len(newest), table, np.zeros(1, np.int64), keeps_copies, storage)
            part.set_ends(np.array([num_blocks * size]))
            self._shared.append(part)
        counts = self._positions // size + 1 - firsts
        self._private = []
        for rows in _of_like_size(counts):
            # A row that is shorter repeats its last block: its own, and masked.
            steps = firsts[rows][:, None] + np.arange(counts[rows].max())
            steps = np.minimum(steps, (self._positions[rows] // size)[:, None])
            table = np.stack([tables[row][at] for row, at in zip(rows, steps, strict=True)]).astype(np.int64)
            copy = _Copy(rows, len(newest), table, firsts[rows] * size, keeps_copies, storage)
            self._private.append(copy)
        self._set_ends()

    def advance(self, newest: list[Newest]) -> bool:
        """Take the next step of the same sequences. False, without effect, for any other step."""
        positions = np.array([each.position for each in newest])
        if [each.key for each in newest] != self._keys or (positions != self._positions + 1).any():
            return False
        if not all(part.has_room(positions[part.rows]) for part in self._private):
            return False
        self._positions = positions
        self._set_ends()
        return True

    def _set_ends(self) -> None:
        for part in self._private:
            part.set_ends(self._positions[part.rows] + 1)

    def attend(
        self, layer: int, data: Tensor, queries: Tensor, keys: Tensor, values: Tensor, scale: float
    ) -> Tensor:
        """``[rows, heads, head_dim]`` of the rows' queries, ``keys`` and ``values``: those of the newest tokens."""
        rows, _, head_dim = queries.shape
        grouped = queries.reshape(rows, keys.shape[1], -1, head_dim)
        output = torch.empty_like(grouped)
        sums = torch.empty(grouped.shape[:-1], dtype=torch.float32, device=queries.device)
        for part in self._private:
            at = part.index
            copy = part.states(layer, data, keys[at], values[at])
            output[at], sums[at] = _attend(grouped[at], *copy, part.mask, scale)
        for part in self._shared:
            at = part.index
            copy = part.states(layer, data)
            folded = grouped[at].transpose(0, 1)
            found, found_sums = _attend(folded.flatten(1, 2)[None], *copy, None, scale)
            found = found[0].view(folded.shape).transpose(0, 1)
            found_sums = found_sums[0].view(folded.shape[:-1]).transpose(0, 1)
            share = torch.sigmoid(found_sums - sums[at])[..., None]
            output[at] = torch.lerp(output[at], found, share.to(output.dtype))
        return output.flatten(1, 2)


class _Copy:
    """Columns of some rows: blocks gathered head-major, ``[2, rows, kv_heads, columns, head_dim]`` a layer.

    ``table`` ``[rows, blocks]`` holds the positions from ``starts`` on, with one row for all if they share it.
    """

    def __init__(
        self,
        rows: list[int],
        num_rows: int,
        table: NDArray[np.int64],
        starts: NDArray[np.int64],
        is_kept: bool,
        storage: Blocks,
    ) -> None:
        self.rows, self._starts, self._is_kept = rows, starts, is_kept
        self._device, self._dtype = storage.device, storage.layer(0).dtype
        self._numbers = torch.arange(len(rows), device=self._device)
        self.index: Tensor | slice = slice(None)
        """Its rows among ``num_rows``."""
        if len(rows) < num_rows:
            self.index = torch.tensor(rows, device=self._device)
        self._table = torch.from_numpy(table).to(self._device)
        self._layers: dict[int, Tensor] = {}
        self._capacity = 0
        self.mask: Tensor | None = None
        """What is added to the scores of each row's columns, ``[rows, 1, 1, columns]``; None if all end there."""

    def has_room(self, positions: NDArray[Any]) -> bool:
        """Whether a token at these positions has a column."""
        return int((positions - self._starts).max()) < self._capacity

    def set_ends(self, ends: NDArray[Any]) -> None:
        """Let each row end before this position."""
        lengths = ends - self._starts
        self._width = int(lengths.max())
        self._lengths = torch.from_numpy(lengths.astype(np.int64)).to(self._device)
        self._newest = self._lengths - 1
        self.mask = None
        if int(lengths.min()) < self._width:
            is_behind = torch.arange(self._width, device=self._device) >= self._lengths[:, None]
            self.mask = torch.zeros(is_behind.shape, dtype=self._dtype, device=self._device)
            self.mask = self.mask.masked_fill_(is_behind, -torch.inf)[:, None, None]

    def states(
        self, layer: int, data: Tensor, keys: Tensor | None = None, values: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """A layer's keys and values of all columns, ``[rows, kv_heads, columns, head_dim]`` each.

        ``data`` has the newest KV already, but a kept copy has not.
        """
        copy = self._layers.get(layer)
        if copy is None:
            copy = self._gathered(data)
            if self._is_kept:
                self._layers[layer] = copy
        elif keys is not None and values is not None:
            copy[0][self._numbers, :, self._newest] = keys
            copy[1][self._numbers, :, self._newest] = values
        found = copy[:, :, :, : self._width]
        return found[0], found[1]

    def _gathered(self, data: Tensor) -> Tensor:
        count, num_blocks = self._table.shape
        _, _, size, kv_heads, head_dim = data.shape
        width = num_blocks * size
        self._capacity = width + (_GROWTH_COLUMNS if self._is_kept else 0)
        copy = data.new_zeros((2, count, kv_heads, self._capacity, head_dim))
        blocks = data.index_select(0, self._table.flatten()).view(count, num_blocks, *data.shape[1:])
        target = copy[:, :, :, :width].view(2, count, kv_heads, num_blocks, size, head_dim)
        target.copy_(blocks.permute(2, 0, 4, 1, 3, 5))
        columns = torch.arange(self._capacity, device=data.device)
        copy.masked_fill_((columns >= self._lengths[:, None])[None, :, None, :, None], 0)
        return copy


def _attend(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention and its log-sum-exp, ``[rows, kv_heads, queries, head_dim]`` and float32 without the last axis."""
    if queries.device.type == "cpu":
        output, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            queries, keys, values, 0.0, False, attn_mask=mask, scale=scale
        )
        return output, sums
    scores = (queries @ keys.transpose(-1, -2)).float() * scale
    if mask is not None:
        scores += mask
    sums = scores.logsumexp(-1)
    return (scores - sums[..., None]).exp_().to(values.dtype) @ values, sums


def _shared_blocks(
    tables: list[BlockIds], full: NDArray[np.int64], size: int
) -> Iterator[tuple[list[int], int]]:
    """Yield disjoint groups of rows, and the number of blocks that each has in common, where it is worth it.

    ``full``: blocks of each row before the one of its newest token.
    """
    by_first = defaultdict(list)
    for row, table in enumerate(tables):
        if full[row]:
            by_first[int(table[0])].append(row)
    for rows in by_first.values():
        _, groups = _best_groups(rows, tables, full)
        for group, num_blocks in groups:
            if (len(group) - 1) * num_blocks * size >= _WORTH_TOKENS:
                yield group, num_blocks


def _best_groups(
    rows: list[int], tables: list[BlockIds], full: NDArray[np.int64]
) -> tuple[int, list[tuple[list[int], int]]]:
    """Return how many blocks need not be read, and the groups, for rows with the same first block."""
    if len(rows) == 1:
        return 0, []
    most = int(full[rows].min())
    heads = np.stack([tables[row][:most] for row in rows])
    differs = (heads != heads[0]).any(axis=0)
    num_blocks = int(differs.argmax()) if differs.any() else most
    saved = (len(rows) - 1) * num_blocks
    branches = defaultdict(list)
    for row in rows:
        if full[row] > num_blocks:
            branches[int(tables[row][num_blocks])].append(row)
    apart = [_best_groups(each, tables, full) for each in branches.values() if len(each) < len(rows)]
    if sum(each for each, _ in apart) > saved:
        return sum(each for each, _ in apart), [group for _, groups in apart for group in groups]
    return saved, [(rows, num_blocks)]


def _of_like_size(counts: NDArray[np.int64]) -> list[list[int]]:
    """Rows in groups whose counts differ by a factor of at most about two."""
    groups: list[list[int]] = []
    least = 0
    for row in np.argsort(counts, kind="stable").tolist():
        if not groups or counts[row] > 2 * least + 4:
            groups.append([])
            least = int(counts[row])
        groups[-1].append(row)
    return [sorted(group) for group in groups]


_current: ContextVar[_Step | None] = ContextVar("step", default=None)


class _NotServed(Exception):
    """The model's attention is not plain attention to all earlier tokens."""


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The attention of a layer, called by transformers."""
    step = _current.get()
    if step is None:
        raise _NotServed("outside a step")
    if attention_mask is not None or any(others.get(name) is not None for name in _NOT_PLAIN):
        raise _NotServed(type(module).__name__)
    return step.attend(query, key, value, scaling), None


_NOT_PLAIN = ("softcap", "s_aux", "sliding_window", "position_bias", "head_mask")
"""Arguments by which a layer asks for another attention."""

AttentionInterface.register(_NAME, _attention)


@contextmanager
def _attending(model: PreTrainedModel, step: _Step) -> Iterator[None]:
    """Within the context, the model's layers attend as the step does."""
    config = model.config
    before, token = config._attn_implementation, _current.set(step)
    config._attn_implementation = _NAME
    try:
        yield
    finally:
        config._attn_implementation = before
        _current.reset(token)


class _OwnBlocks:
    """A small storage of its own."""

    def __init__(self, layout: KVLayout, num_blocks: int, block_size: int, device: torch.device) -> None:
        self.block_size, self.device = block_size, device
        shape = (num_blocks, *layout.block_shape(block_size))
        self._data = torch.zeros(shape, dtype=getattr(torch, layout.dtype), device=device)

    def layer(self, index: int) -> Tensor:
        """See ``Blocks``."""
        return self._data[:, index]


@torch.no_grad()
def serves(model: PreTrainedModel, layout: KVLayout) -> bool:
    """Whether the model's logits are the same in packed forwards. Runs 24 tokens through the model."""
    parameters = inspect.signature(model.forward).parameters
    if not getattr(model, "_supports_attention_backend", False) or "position_ids" not in parameters:
        return False
    generator = np.random.default_rng(0)
    embeddings: Any = model.get_input_embeddings()
    vocab_size = int(embeddings.weight.shape[0])
    first, other = generator.integers(0, vocab_size, (2, 6), dtype=np.uint32)
    blocks = _OwnBlocks(layout, 4, 4, model.device)
    forward = PackedForward(model, blocks)
    tables = np.array([[0, 1], [2, 3]], dtype=np.int32)
    try:
        forward.run([], [Chunk(first[:5], 0, tables[0]), Chunk(other[:3], 0, tables[1])])
        forward.run([Newest(1, int(first[5]), 5, tables[0])], [Chunk(other[3:5], 3, tables[1])])
        found = forward.run([Newest(2, int(other[5]), 5, tables[1])], [])
    except _NotServed:
        return False
    ids = torch.from_numpy(other.astype(np.int64)).to(model.device)[None]
    expected = (
        model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits[0, -1:].float()
    )
    return bool((found.float() - expected).abs().max() <= _CLOSENESS * expected.std())
