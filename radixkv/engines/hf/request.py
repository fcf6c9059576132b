"""One request of a batch: its rows, what of them is computed, and the news that its caller hasn't read yet.

    waiting ──start──▶ filling ──all rows computed up to their newest token──▶ choosing ──▶ over
       ▲                  │                                                       │
       └──── preempted ───┴───────────────────────────────────────────────────────┘

A row is a prompt and the tokens chosen after it. Until the first choice the rows of a prompt are one. A preempted
request keeps its rows and its generator: what it has chosen becomes prompt, so it resumes without losing a token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from radixkv.engines.protocol import Admission, Tally, TokenLogprobs
from radixkv.errors import CapacityError, StaleGeneration
from radixkv.index import tokens
from radixkv.index.sequence import Sequence

if TYPE_CHECKING:
    from torch import Tensor

    from radixkv.config import Namespace
    from radixkv.engines.hf.choose import Chooser
    from radixkv.engines.hf.packed import Newest
    from radixkv.index.announcements import Announcement
    from radixkv.index.below import Loading
    from radixkv.index.cache import RequestHints
    from radixkv.scheduling import WaitingRequest

Ids = NDArray[np.uint32]


class Prompt(NamedTuple):
    """A checked prompt: its key for the cache, and its ids for the model, which are a view of the key."""

    key: bytes
    ids: Ids


class ChunkDone(NamedTuple):
    """A part of a prompt was computed: its tokens that are done, of all."""

    done: int
    total: int


class StepDone(NamedTuple):
    """The new token of each output row, ``[]`` for rows that ended, and their log probabilities, if they were asked."""

    token_ids: list[list[int]]
    logprobs: list[TokenLogprobs] | None = None


class Filled(NamedTuple):
    """The prompts of a driven request are computed up to their last token."""


class LogitsDone(NamedTuple):
    """The logits after the tokens that a driven request asked for, ``[tokens, vocab_size]``."""

    logits: Tensor


class NoRoom(NamedTuple):
    """There are too few blocks to go on, and nothing else of the batch goes on."""

    error: CapacityError


class Failed(NamedTuple):
    """The request can't go on."""

    error: Exception


News = ChunkDone | Filled | StepDone | LogitsDone | NoRoom | Failed


class Row:
    """A prompt with the tokens chosen so far, and the sequence that holds their KV."""

    __slots__ = (
        "at",
        "chosen",
        "is_first",
        "is_loaded",
        "is_opened",
        "is_over",
        "key",
        "loading",
        "num_computed",
        "num_loaded",
        "prompt",
        "sequence",
    )

    def __init__(self, prompt: Prompt, chosen: list[int], at: int) -> None:
        self.prompt, self.chosen, self.at = prompt, chosen, at
        """``at``: the number of its prompt in the request."""
        self.sequence: Sequence | None = None
        self.num_computed = 0
        self.key = 0
        """A number of its sequence, given when it is opened or forked."""
        self.is_over = False
        self.is_first = True
        """Whether its sequence is the first that was opened for it."""
        self.is_opened = False
        """Whether its sequence was opened, not forked."""
        self.is_loaded = False
        """Whether nothing more comes from the tiers below the cache before it computes."""
        self.loading: Loading | None = None
        """What comes, or has come, to its sequence from the tiers. None before they were asked, and if that is over."""
        self.num_loaded = 0
        """Tokens that came from the tiers and are committed."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and those chosen."""
        return len(self.prompt.ids) + len(self.chosen)

    @property
    def cache_key(self) -> bytes:
        """The cache's key of all its tokens."""
        return self.prompt.key + tokens.encode(self.chosen) if self.chosen else self.prompt.key

    @property
    def opened(self) -> Sequence:
        """Its sequence, which is open."""
        assert self.sequence is not None
        return self.sequence

    def ids_between(self, start: int, stop: int) -> Ids:
        """Return the ids at positions ``[start, stop)``."""
        size = len(self.prompt.ids)
        if stop <= size:
            return self.prompt.ids[start:stop]
        return np.concatenate([self.prompt.ids, np.array(self.chosen, dtype=np.uint32)])[start:stop]

    @property
    def newest_id(self) -> int:
        """Its last token."""
        return self.chosen[-1] if self.chosen else int(self.prompt.ids[-1])

    def hand_over(self) -> Sequence:
        """Return its sequence, which is the caller's from now on."""
        sequence, self.sequence = self.opened, None
        return sequence

    def close(self, num_tokens: int | None = None) -> None:
        """Commit the first ``num_tokens`` that are computed, None for all, and release the sequence."""
        sequence, self.sequence = self.sequence, None
        count = self.num_computed if num_tokens is None else min(num_tokens, self.num_computed)
        self.num_computed = 0
        if self.loading is not None:
            self.loading.cancel()
            self.loading = None
        if sequence is not None:
            with sequence:  # releases it, also after a purge
                if sequence.is_open and count > sequence.num_committed_tokens:
                    with suppress(StaleGeneration):  # purged at this moment
                        sequence.commit(count)


class BatchRequest:
    """What a caller asked for, and its state.

    - ``open_row``: opens the sequence of a row.
    - ``chooser``: chooses the tokens; None to compute the prompts only.
    - ``fanout``: output rows of each prompt. ``max_new_tokens``: of each row. ``eos_token_ids`` end a row.
    - ``admission``: how it waits. With its ``on_no_room`` the caller takes ``NoRoom`` as a reason to wait.
    - ``as_of``: see ``PrefixCache.open``.
    - ``tally``: what it has read and computed; also what its sequences count for in the tenant's statistics.
    - ``is_driven``: whether the caller chooses by itself, such as a beam search: it sets ``asked``, and gets logits.
    """

    def __init__(
        self,
        namespace: Namespace,
        prompts: list[Prompt],
        open_row: Callable[[BatchRequest, Row], Sequence],
        *,
        chooser: Chooser | None = None,
        fanout: int = 1,
        max_new_tokens: int = 0,
        eos_token_ids: frozenset[int] = frozenset(),
        admission: Admission | None = None,
        hints: RequestHints | None = None,
        as_of: int | None = None,
        tally: Tally | None = None,
        is_driven: bool = False,
    ) -> None:
        self.is_driven = is_driven
        self.tally = Tally() if tally is None else tally
        self._loaded_before: dict[str, int] | None = None
        self._num_counted = [0] * len(prompts)  # computed tokens of each prompt that the statistics have
        self.asked: list[Newest] = []
        """The tokens that a driven request computes in the next step; their places exist."""
        self.namespace, self.prompts, self.open_row = namespace, prompts, open_row
        self.chooser, self.fanout, self.max_new_tokens = chooser, fanout, max_new_tokens
        self.eos_token_ids, self.hints, self.as_of = eos_token_ids, hints, as_of
        admission = Admission(lambda: None, None) if admission is None else admission
        self.may_start, self.is_patient = admission.may_start, admission.is_patient
        self.can_wait = admission.on_no_room is not None
        self.rows = [Row(prompt, [], at) for at, prompt in enumerate(prompts)]
        self._waits_since: float | None = None  # for the disk
        self.state: Literal["waiting", "filling", "choosing", "over"] = "waiting"
        self.news: deque[News] = deque()
        self.weight, self.num_passed = 1.0, 0
        """The weight of its tenant, and the steps in a row that it sat out because of their rows."""
        self.is_asleep = False
        """Its caller waits for room elsewhere."""
        self.lack: CapacityError | None = None
        """Why the last step left it out."""
        self.handle: WaitingRequest | None = None
        self.announcement: Announcement | None = None
        self.started_at: float | None = None
        """When it started first, on the batch's clock; None: it waits for its first start."""

    @property
    def tenant(self) -> str:
        """Its tenant."""
        return self.namespace.tenant

    @property
    def chooses(self) -> bool:
        """Whether tokens follow the prompts."""
        return self.is_driven or self.chooser is not None

    @property
    def is_greedy(self) -> bool:
        """Whether it takes the largest logits."""
        return self.chooser is not None and self.chooser.is_greedy

    @property
    def going(self) -> list[int]:
        """The numbers of its output rows that go on, also before the rows of a prompt differ."""
        if not self.num_chosen:
            return list(range(self.fanout * len(self.prompts)))
        return [number for number, row in enumerate(self.rows) if not row.is_over]

    @property
    def answers(self) -> dict[int, list[int]]:
        """The tokens chosen so far of the output rows that go on, by their numbers."""
        return {number: self.rows[number].chosen if self.num_chosen else [] for number in self.going}

    @property
    def may_step(self) -> bool:
        """Whether its caller has read everything and waits for the next step."""
        return not self.news and not self.is_asleep

    def has_news(self) -> bool:
        """Whether its caller has something to read."""
        return bool(self.news)

    @property
    def num_chosen(self) -> int:
        """Tokens of its longest row."""
        return max(len(row.chosen) for row in self.rows)

    @property
    def num_rows(self) -> int:
        """Tokens that a step computes and chooses after."""
        return len(self.asked) if self.is_driven else sum(not row.is_over for row in self.rows)

    @property
    def num_tokens(self) -> int:
        """Tokens to compute from the start, at least 1."""
        return max(sum(row.num_tokens for row in self.rows), 1)

    def target(self, row: Row) -> int:
        """Tokens of a row to compute before it chooses. The newest one is computed in the step that chooses."""
        return row.num_tokens - (1 if self.chooses else 0)

    def unfilled(self) -> Row | None:
        """Return the first row that isn't computed up to its target."""
        for row in self.rows:
            if not row.is_over and (row.sequence is None or row.num_computed < self.target(row)):
                return row
        return None

    @property
    def is_loading(self) -> bool:
        """Whether it has started, and waits for the disk."""
        return self._waits_since is not None

    def note_wait(self, is_waiting: bool, began_at: float, now: float) -> None:
        """Count the time while something of it is loaded: since ``began_at``, or since the disk brings some of it."""
        self.tally.loading_s += now - (began_at if self._waits_since is None else self._waits_since)
        self._waits_since = now if is_waiting else None

    def stop_waiting(self) -> None:
        """Take that it doesn't wait for the disk now."""
        self._waits_since = None

    def set_filled(self) -> None:
        """Go on after the prompts."""
        self.state = "choosing" if self.chooses else "over"
        if self.is_driven:
            self.news.append(Filled())

    def open(self, row: Row, sequence: Sequence) -> None:
        """Take the sequence that was opened for a row."""
        row.sequence, row.is_opened, row.is_loaded, row.num_loaded = sequence, True, False, 0
        row.is_first = len(self.tally.num_cached) < len(self.prompts)
        row.num_computed = sequence.num_cached_tokens
        if row.is_first:
            self._loaded_before = self.tally.num_loaded and {**self.tally.num_loaded}
            self.tally.begin(row.num_computed)

    def undo_open(self, row: Row) -> None:
        """Release the sequence of a row, as if it hadn't been opened: there is no room for more."""
        if row.is_first:
            self.tally.undo_begin()
            self.tally.num_loaded = self._loaded_before
        row.opened.recount(0, 0, 0)
        row.close(0)

    def reach(self, row: Row) -> None:
        """Count what a row has computed of its prompt."""
        self.tally.reach(row.at, min(row.num_computed, len(row.prompt.ids)))

    def close(self, row: Row, num_tokens: int | None = None) -> None:
        """Commit the first tokens of a row, see ``Row.close``, and release its sequence."""
        if row.sequence is not None:
            self.count(row, row.sequence)
        row.close(num_tokens)

    def count(self, row: Row, sequence: Sequence) -> None:
        """Let the tenant's statistics count what a sequence of this request was opened for, once it is over.

        Only the first of a prompt counts what was found, and none what is computed once more.
        """
        if row.is_opened:
            computed = self.tally.num_computed[row.at]
            num_hit = self.tally.num_cached[row.at] if row.is_first else 0
            sequence.recount(int(row.is_first), num_hit, computed - self._num_counted[row.at])
            self._num_counted[row.at], row.is_opened = computed, False

    def growing(self) -> list[Row]:
        """Return the rows whose newest token has no place yet."""
        return [row for row in self.rows if not row.is_over and row.opened.num_tokens < row.num_tokens]

    def fork(self) -> None:
        """Commit the prompts, and give each output row a sequence of its own, because the rows of a prompt differ."""
        rows: list[Row] = []
        stems = self.rows
        for row in stems:
            self.rows = [*rows, *stems[len(rows) // self.fanout :]]  # what to close after an error
            row.opened.commit(row.num_computed)
            rows.append(row)
            if self.fanout > 1:
                row.opened.drop()
                for child in row.opened.fork(self.fanout - 1):
                    twin = Row(row.prompt, [], row.at)
                    twin.sequence, twin.num_computed = child, row.num_computed
                    rows.append(twin)
        self.rows = rows

    def take_choices(self, token_ids: list[int], logprobs: list[TokenLogprobs] | None = None) -> None:
        """Add a token to each output row that isn't over, and tell the caller."""
        step: list[list[int]] = []
        self.tally.num_chosen += 1
        for row, token_id in zip(self.rows, token_ids, strict=True):
            step.append([] if row.is_over else [token_id])
            if not row.is_over:
                row.chosen.append(token_id)
                row.is_over = token_id in self.eos_token_ids or len(row.chosen) >= self.max_new_tokens
        self.news.append(StepDone(step, logprobs))
        if all(row.is_over for row in self.rows):
            self.state = "over"
