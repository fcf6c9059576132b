"""A transformers ``Cache`` over the paged block storage. Only this module uses transformers' internals.

Rows and columns. transformers sees a rectangle of ``rows × columns``. Row ``r`` holds the tokens of one sequence,
right-aligned, so that shorter rows have columns of padding on their left:

    column   0        pad[r]                      width
    row r    ·········t0 t1 t2 ... t[length[r]-1] │ the step's tokens go here

Only the rectangle has padding. Blocks hold tokens at their own positions, from 0, and nothing else.

A step (one ``forward``): 1. ``begin_step(ids)``, from a hook on the model's forward, gets the blocks with one
``PrefixCache.append`` for all rows. So the copies of copy-on-write go in one launch. It also decides where the KV of
each new token goes. 2. Each layer's ``update(keys, values)`` writes the new tokens into the blocks and returns the
rectangle. 3. After the last layer, ``width`` and the lengths advance.

The rectangle is a working copy of the blocks, head-major as attention needs it. It is kept from step to step and grown
in place. A beam step that permutes the rows drops it, and the next step gathers it from the blocks again. For rows of
one length this is one index operation a layer, without a loop over blocks. So beams read what the blocks hold.

Rows form groups of ``fanout`` rows that continue one prompt (beams, or several returned sequences). Up to the step
after the prompt's last token, the rows of a group are one sequence, and the group's first row writes its KV. Then the
sequence is forked. A row is finished when its newest token is in ``eos_token_ids``. transformers then feeds it padding
until the other rows end too. That padding enters no sequence and takes no block.

With ``beam_steps``, the rows are lent to the device after the fork, one group for each prompt. A beam step is then a
``LentBeams.step``, and neither parents nor tokens come to the host. A step takes at most one block a row. So the number
of steps for which there are blocks is known without asking the device. After these steps, more blocks are lent. If
there are too few, the beams come back, and continue by ``reorder`` and ``append``, which take exactly what they need.

``layout_of`` measures the shape of a model's KV: it runs one token through the model with transformers' own cache. It
doesn't guess from the names in a configuration. A model is refused, with the reason, if its KV of a prefix is not a
plain run of per-token keys and values.
"""

from __future__ import annotations

from radixkv.errors import require_extra

require_extra("radixkv.engines.hf.paged_cache", "hf")

import inspect
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import groupby
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, GenerationMixin, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer, get_layer_types_and_kwargs

from radixkv.config import KVLayout
from radixkv.errors import CapacityError, ConfigError, KernelError
from radixkv.index.cache import PrefixCache
from radixkv.index.lent_beams import LentBeams
from radixkv.index.sequence import Sequence
from radixkv.storage.device import DeviceStorage

R = TypeVar("R")

CACHE_ARGUMENT = (
    "cache"
    if "cache" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
    else "past_key_values"
)
"""The name of a model's argument for its cache: transformers renamed it in 5.24."""

_GROWTH_COLUMNS = 256
"""The rectangle grows by this many columns: one copy every 256 decode steps, and at most 256 unused columns."""


_STEPS_AHEAD = (16, 4, 1)
"""Beam steps for which blocks are lent at once: the largest number for which there are enough blocks."""


class PagedLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One layer of a PagedCache, as transformers' masks and attention see it."""

    is_sliding = False
    is_compileable = False
    is_croppable = False

    def __init__(self, owner: PagedCache, index: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._owner = weakref.proxy(owner)  # no reference cycle: the working copy is freed with the last user
        self._index = index
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the storage exists."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store the step's keys and values, ``[rows, kv_heads, tokens, head_dim]``. Returns those of all columns."""
        stored: tuple[Tensor, Tensor] = self._owner.write(self._index, key_states, value_states)
        return stored

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of columns after a step of ``query_length`` tokens, and the first column, 0."""
        return self._owner.width + query_length, 0

    def get_seq_length(self) -> int:
        """Return the number of columns so far, with padding."""
        return int(self._owner.width)

    def get_max_length(self) -> int:
        """-1: unlimited, for transformers."""
        return -1


class _Slots(NamedTuple):
    """Where a step's KV goes: token ``i`` is ``(row, column)`` of the step and ``(block, offset)`` of the storage.

    Without rows and columns, token ``i`` is the only token of row ``i``.
    """

    blocks: Tensor
    offsets: Tensor
    rows: Tensor | None = None
    columns: Tensor | None = None

    def of_step(self, states: Tensor) -> Tensor:
        """``[tokens, kv_heads, head_dim]`` of a step's ``[rows, kv_heads, tokens, head_dim]``."""
        if self.rows is None:
            return states[:, :, 0]
        return states.transpose(1, 2)[self.rows, self.columns]


class PagedCache(Cache):
    """The KV of some sequences, for ``forward`` and ``generate`` of a transformers model.

    - ``sequences``: one for each group of ``fanout`` rows. The cache owns them, and ``release`` releases them.
    - ``num_computed[i]``: how many of their tokens are in the blocks already.
    - ``width``: the sequence length of transformers.
    - ``beam_steps``: the most steps of a beam search, if the device makes them; otherwise 0.
    - ``on_no_room``: called with the error when a step finds too few blocks; True tries the step again.
    """

    def __init__(
        self,
        prefix_cache: PrefixCache,
        storage: DeviceStorage,
        sequences: list[Sequence],
        num_computed: list[int],
        *,
        fanout: int = 1,
        eos_token_ids: frozenset[int] = frozenset(),
        beam_steps: int = 0,
        on_no_room: Callable[[CapacityError], bool] | None = None,
    ) -> None:
        self._prefix_cache, self._storage = prefix_cache, storage
        self._block_size = prefix_cache.config.block_size
        self._eos_token_ids = eos_token_ids
        self.sequences = list(sequences)
        self.fanout = fanout
        self.width = self.num_found = max(num_computed)
        self.lengths = list(num_computed)
        self._pads = [self.width - length for length in num_computed]
        self._finished = [False] * len(sequences)
        self._is_decoding = False
        self._beam_steps, self.on_no_room = beam_steps, on_no_room
        self._beams: LentBeams | None = None
        self._parents: Tensor | None = None  # for the next beam step, on the device
        self._steps_ahead = 0  # beam steps for which blocks are lent
        self._num_step_tokens = 0
        self._slots: _Slots | None = None
        self._tables: list[tuple[int, Tensor]] = []
        self._rectangle: list[Tensor | None] = [None] * storage.layout.num_layers
        super().__init__(layers=[PagedLayer(self, index) for index in range(storage.layout.num_layers)])

    # A step ---------------------------------------------------------------------------------------------------

    @contextmanager
    def attached(self, model: PreTrainedModel) -> Iterator[None]:
        """Within the context, each forward of ``model`` with this cache first calls ``begin_step``."""

        def before(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if kwargs.get(CACHE_ARGUMENT) is self:
                self._begin_with_room(kwargs["input_ids"])

        handle = model.register_forward_pre_hook(before, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()

    def _begin_with_room(self, input_ids: Tensor) -> None:
        self.with_room(self.begin_step, input_ids)

    def with_room(self, begin: Callable[[Tensor], R], input_ids: Tensor) -> R:
        """``begin(input_ids)``, tried again as long as there are too few blocks and ``on_no_room`` says so."""
        while True:
            try:
                return begin(input_ids)
            except CapacityError as error:
                if self.on_no_room is None or not self.on_no_room(error):
                    raise

    def begin_step(self, input_ids: Tensor) -> None:
        """Get the blocks for ``input_ids`` ``[rows, tokens]``. For more than one token a row they must exist already.

        Raises CapacityError. Nothing has changed then, except that groups may be forked.
        """
        rows, num_tokens = input_ids.shape
        rows_each = self._grow(input_ids)
        if self._has_beams():
            self._step_beams(input_ids[:, 0])
            return
        if num_tokens == 1:
            self._append(input_ids[::rows_each, 0].tolist())
        slots = torch.from_numpy(self._place(num_tokens, rows_each)).to(self._storage.device)
        rows_of, columns, blocks, offsets = slots.unbind(0)
        is_plain = num_tokens == rows_each == 1 and len(blocks) == rows
        self._slots = _Slots(blocks, offsets) if is_plain else _Slots(blocks, offsets, rows_of, columns)
        self._tables = self._tables_to_gather() if self._rectangle[0] is None else []

    def begin_packed_step(self, input_ids: Tensor) -> list[tuple[int, int, Sequence]]:
        """Get the blocks for one token a row, ``[rows, 1]``. ``end_packed_step`` follows the write of their KV.

        Returns the token, its position and the sequence, once for each sequence. Raises CapacityError like
        ``begin_step``.
        """
        rows_each = self._grow(input_ids)
        token_ids = input_ids[::rows_each, 0].tolist()
        self._append(token_ids)
        return list(zip(token_ids, self.lengths, self.sequences, strict=True))

    def end_packed_step(self) -> None:
        """Count the step's tokens as computed."""
        self._end_step()

    def _grow(self, input_ids: Tensor) -> int:
        """Fork the rows of a prompt if they differ from now on. Returns the rows of each sequence."""
        rows, self._num_step_tokens = input_ids.shape
        if not self._is_decoding and self._has_no_room(0):
            self._start_decoding()
        return int(rows) // len(self.sequences)

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write a layer's new keys and values into the blocks, and return those of the rectangle."""
        slots = self._slots
        assert slots is not None, "update without begin_step"
        data = self._storage.layer(layer)
        data[:, 0][slots.blocks, slots.offsets] = slots.of_step(keys)
        data[:, 1][slots.blocks, slots.offsets] = slots.of_step(values)
        stop = self.width + self._num_step_tokens
        rectangle = self._rectangle_of(layer, keys.shape[0], stop)
        rectangle[0, :, :, self.width : stop] = keys
        rectangle[1, :, :, self.width : stop] = values
        if layer == len(self.layers) - 1:
            self._end_step()
        return rectangle[0, :, :, :stop], rectangle[1, :, :, :stop]

    def commit(self) -> None:
        """Make the KV of all computed tokens matchable, in whole blocks."""
        for sequence, length in zip(self.sequences, self.lengths, strict=True):
            sequence.commit(length)

    def release(self) -> None:
        """Release all sequences that aren't released yet."""
        for sequence in self.sequences:
            with sequence:  # releases it, also after a purge
                pass

    def settle(self) -> None:
        """Take the beams back from the device, so that every row's sequence on the host equals the device's."""
        beams, parents = self._beams, self._parents
        self._beams = self._parents = None
        if beams is not None and any((state := beams.reconcile())[2:]):
            raise KernelError(f"a beam step failed, so the results after it are invalid: {state}")
        if parents is not None:
            self._permute(parents.tolist())

    def drop_working_copy(self) -> None:
        """Forget the rectangle; the next step gathers it from the blocks."""
        self._rectangle = [None] * len(self.layers)

    def _has_no_room(self, index: int) -> bool:
        return bool(self.sequences[index].num_tokens == self.lengths[index])

    def _append(self, token_ids: list[int]) -> None:
        growing: list[Sequence] = []
        growing_ids: list[int] = []
        for index, token_id in enumerate(token_ids):
            if self._finished[index] or not self._has_no_room(index):
                continue
            if token_id in self._eos_token_ids:
                self._finished[index] = True
                continue
            growing.append(self.sequences[index])
            growing_ids.append(token_id)
        if growing:
            self._prefix_cache.append(growing, growing_ids)

    def _place(self, num_tokens: int, rows_each: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Row, column, block id and offset of each token that the step stores: int64 ``[4, tokens]``."""
        parts = []
        steps = np.arange(num_tokens)
        for index, sequence in enumerate(self.sequences):
            if self._finished[index]:
                continue
            positions = self.lengths[index] + steps
            blocks = sequence.block_table[positions // self._block_size]
            parts.append(
                (np.full(num_tokens, index * rows_each), steps, blocks, positions % self._block_size)
            )
        if not parts:
            return np.zeros((4, 0), dtype=np.int64)
        return np.concatenate([np.stack(part).astype(np.int64) for part in parts], axis=1)

    def _end_step(self) -> None:
        for index, finished in enumerate(self._finished):
            if not finished:
                self.lengths[index] += self._num_step_tokens
        self.width += self._num_step_tokens
        self._slots = None

    # The rectangle --------------------------------------------------------------------------------------------

    def _rectangle_of(self, layer: int, rows: int, columns: int) -> Tensor:
        """``[2, rows, kv_heads, ≥ columns, head_dim]``, with the first ``width`` columns filled."""
        rectangle = self._rectangle[layer]
        if rectangle is None:
            rectangle = self._gather(layer, rows, columns)
        elif rectangle.shape[3] < columns:
            rectangle = torch.nn.functional.pad(
                rectangle, (0, 0, 0, columns + _GROWTH_COLUMNS - rectangle.shape[3])
            )
        self._rectangle[layer] = rectangle
        return rectangle

    def _gather(self, layer: int, rows: int, columns: int) -> Tensor:
        layout, size = self._storage.layout, self._block_size
        rooms = [pad + sequence.num_tokens for pad, sequence in zip(self._pads, self.sequences, strict=True)]
        capacity = max(columns, *rooms) + _GROWTH_COLUMNS + size
        data = self._storage.layer(layer)
        rectangle = data.new_zeros((2, rows, layout.num_kv_heads, capacity, layout.head_dim))
        rows_each = rows // len(self.sequences)
        for first, tables in self._tables:
            count, num_blocks = tables.shape
            blocks = data.index_select(0, tables.flatten())
            blocks = blocks.view(count, 1, num_blocks, 2, size, layout.num_kv_heads, layout.head_dim)
            start, row = self._pads[first], first * rows_each
            target = rectangle[:, row : row + count * rows_each, :, start : start + num_blocks * size]
            shape = (2, count, rows_each, layout.num_kv_heads, num_blocks, size, layout.head_dim)
            target.view(shape).copy_(blocks.permute(3, 0, 1, 5, 2, 4, 6).expand(shape))
        return rectangle

    def _tables_to_gather(self) -> list[tuple[int, Tensor]]:
        """Return the blocks with computed tokens, for runs of sequences.

        Each run has its first sequence and the tables ``[count, blocks]``.
        """
        tables = []
        for first, stop, num_blocks in self._alike():
            rows = np.stack([sequence.block_table[:num_blocks] for sequence in self.sequences[first:stop]])
            tables.append((first, torch.from_numpy(rows.astype(np.int64)).to(self._storage.device)))
        return tables

    def _alike(self) -> Iterator[tuple[int, int, int]]:
        """Runs of sequences ``[first, stop)`` with the same first column and number of blocks."""
        sizes = [
            (pad, -(-length // self._block_size))
            for pad, length in zip(self._pads, self.lengths, strict=True)
        ]
        first = 0
        for (_, num_blocks), run in groupby(sizes):
            stop = first + len(list(run))
            yield first, stop, num_blocks
            first = stop

    # Forks ----------------------------------------------------------------------------------------------------

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """A beam step: row ``i`` continues row ``beam_idx[i]``. Copies nothing; the next step does."""
        if not self._is_decoding:
            self._start_decoding()
        if self._beams is None:
            self._permute(beam_idx.tolist())
            return
        self._parents = beam_idx if self._parents is None else self._parents[beam_idx]
        self.drop_working_copy()

    def _start_decoding(self) -> None:
        """The prompts are computed to the end: commit them, and give every row its own sequence."""
        self.commit()
        if self.fanout > 1:
            self._fork()
        self._is_decoding = True
        if self._beam_steps:
            self._lend()

    def _fork(self) -> None:
        rows: list[Sequence] = []
        with ExitStack() as undo:
            for sequence in self.sequences:
                children = sequence.fork(self.fanout - 1)
                rows += [sequence, *children]
                for child in children:
                    undo.callback(child.release)
            undo.pop_all()
        groups = [index for index in range(len(self.sequences)) for _ in range(self.fanout)]
        self.sequences = rows
        self._take(groups)

    # Beams on the device --------------------------------------------------------------------------------------

    def _lend(self) -> None:
        """Lend all rows, without blocks for a first step."""
        groups = [row // self.fanout for row in range(len(self.sequences))]
        self._beams = self._prefix_cache.lend(self.sequences, self._beam_steps, num_blocks=0, groups=groups)

    def _has_beams(self) -> bool:
        """Whether the device makes the next step: there are beams, and enough blocks for any step."""
        if self._beams is not None and self._steps_ahead == 0:
            self._steps_ahead = self._secured_steps(self._beams)
            if self._steps_ahead == 0:
                self.settle()
        return self._beams is not None

    def _secured_steps(self, beams: LentBeams) -> int:
        """Steps for which the device has blocks, after more were lent if possible."""
        rows, free = len(self.sequences), beams.state().num_free_blocks
        for steps in _STEPS_AHEAD:
            if free >= steps * rows:
                return steps
            try:
                beams.lend_more(steps * rows - free)
            except CapacityError:
                continue
            return steps
        return 0

    def _step_beams(self, token_ids: Tensor) -> None:
        """Each row continues its parent with one more token. Nothing of it comes to the host."""
        beams = self._beams
        assert beams is not None
        rows = torch.arange(len(self.sequences), device=self._storage.device)
        parents = rows if self._parents is None else self._parents
        beams.step(parents.to(torch.int32).contiguous(), token_ids.contiguous())
        self._parents, self._steps_ahead = None, self._steps_ahead - 1
        self._slots = _Slots(*beams.slots())
        self._tables = [
            (first, beams.tables[first:stop, :num_blocks]) for first, stop, num_blocks in self._alike()
        ]

    def _permute(self, parents: list[int]) -> None:
        self.sequences = self._prefix_cache.reorder(self.sequences, parents)
        if parents != list(range(len(self.lengths))):
            self.drop_working_copy()
        self._take(parents)

    def _take(self, parents: list[int]) -> None:
        self.lengths = [self.lengths[parent] for parent in parents]
        self._pads = [self._pads[parent] for parent in parents]
        self._finished = [self._finished[parent] for parent in parents]


def layout_of(model: PreTrainedModel) -> KVLayout:
    """Return layers, KV heads, head size and dtype of the model's KV. Runs one token through the model.

    Raises ConfigError, with the reason, for:

    - encoder-decoder and recurrent models;
    - layers without full attention (sliding window, chunked, hybrid, shared KV);
    - keys and values of different shapes (multi-head latent attention).
    """
    config = model.config.get_text_config(decoder=True)
    name = type(model).__name__
    if getattr(model.config, "is_encoder_decoder", False):
        raise ConfigError("model", name, "a decoder-only model: an encoder's output isn't a prefix of tokens")
    if getattr(model, "_is_stateful", False):
        raise ConfigError(
            "model", name, "attention in every layer: a recurrent state can't be split into blocks"
        )
    if not model.can_generate():
        raise ConfigError("model", name, "a causal language model that can generate")
    if getattr(config, "kv_lora_rank", None) is not None:
        raise ConfigError(
            "model", name, "plain keys and values: multi-head latent attention is not supported"
        )
    kinds = set(get_layer_types_and_kwargs(config)[0])
    if kinds != {"full_attention"}:
        others = ", ".join(sorted(kinds - {"full_attention"}))
        raise ConfigError(
            "model", name, f"full attention in every layer: it has {others}, which forget or mix tokens"
        )
    return _measure(model, config, name)


@torch.no_grad()
def _measure(model: PreTrainedModel, config: Any, name: str) -> KVLayout:
    past = DynamicCache(config=config)
    input_ids = torch.zeros((1, 1), dtype=torch.long, device=model.device)
    model(input_ids=input_ids, use_cache=True, **{CACHE_ARGUMENT: past})
    layers = [layer for layer in past.layers if type(layer) is DynamicLayer and layer.is_initialized]
    shapes = {
        tuple(tensor.shape) for layer in layers for tensor in (layer.keys, layer.values) if tensor is not None
    }
    dtypes = {tensor.dtype for layer in layers for tensor in (layer.keys, layer.values) if tensor is not None}
    if len(layers) != len(past.layers) or not layers:
        raise ConfigError("model", name, "keys and values in every layer of transformers' DynamicCache")
    if len(shapes) != 1 or len(dtypes) != 1:
        raise ConfigError(
            "model", name, f"keys and values of one shape and dtype in all layers, not {sorted(shapes)}"
        )
    _, num_kv_heads, num_tokens, head_dim = shapes.pop()
    if num_tokens != 1:
        raise ConfigError("model", name, f"one key a token and layer, not {num_tokens}")
    return KVLayout(len(layers), num_kv_heads, head_dim, str(dtypes.pop()))
