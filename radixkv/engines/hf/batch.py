"""Continuous batching: the requests of all tenants step together. It decides who starts, steps and gives way.

    a request    joined ─▶ take ─▶ its callbacks ─▶ take ─▶ ... ─▶ finish, or leave
    a step       rows: who chooses in it                  (``scheduling.row_shares``)
                 grow: a place for each newest token      (preempts, if there is none)
                 fill: chunks of prompts, within a budget (starts waiting requests that have room, and loads what the
                       tiers below have of them)
                 one forward of all of it, choices, news

There is no thread of the batch. The loop of a service takes the news of all requests, then makes a step
(``make_step``). Without a loop each request has the thread of its caller: one without news makes a step itself, of
which every request gets its part (``advance``). A request takes part when its caller has read all its news, so one
whose reader is slow stops, and is at most one step ahead.

Waiting requests start in the order of ``radixkv.scheduling``: fair between tenants, cache-first within one. One that
has no room is passed over, for a bounded number of later starts. One whose prefix another request is computing waits
for it. Of a tenant NUM_TOGETHER run at a time; if none of them is read, one gives its place up. Each step gives its
budget of prompt tokens to the filling requests in turn, those of strict tenants first: then the others have MAX_ROWS
tokens of the step.

An error of one request, such as a purge of its tenant, ends this request alone. An error of the forward ends those in
the step. A step that was interrupted is made again.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from radixkv.clock import Clock
from radixkv.engines.hf.forms import fill_masks
from radixkv.engines.hf.packed import Chunk, Newest, PackedForward
from radixkv.engines.hf.request import BatchRequest, ChunkDone, Failed, LogitsDone, News, NoRoom, Row
from radixkv.engines.hf.room import Room
from radixkv.engines.protocol import Preemption
from radixkv.engines.steps import Pause, Wait
from radixkv.errors import AnnouncementLimitExceeded, CapacityError, NamespaceError, QuotaExceeded
from radixkv.index.announcements import Announcement
from radixkv.index.cache import PrefixCache
from radixkv.index.tokens import TOKEN_BYTES
from radixkv.scheduling import RequestQueue, RowShares, WaitingRequest
from radixkv.tiers.fair_lock import FairLock

if TYPE_CHECKING:
    from torch import Tensor


Fill: TypeAlias = tuple[BatchRequest, Row, int]
"""A chunk that a step computes: the request, its row, and the row's computed tokens afterwards."""

NUM_TOGETHER: Final = 32
"""Requests of one tenant that run at the same time."""
MAX_ROWS: Final = 64
"""Rows of other tenants in a step, once a strict tenant has asked something."""
_MAX_PASSED: Final = 32
"""Requests that start before one that has no room; then it is the next of those that aren't strict."""
_MAX_TRIED: Final = 64
"""Waiting requests that a step looks at."""
_TRY_AGAIN_STEPS: Final = 16
"""Steps after which a request without room is tried again, though nothing of the batch has ended."""
_IDLE_S: Final = 0.001
"""Pause of a caller that could do nothing."""
_LEAST_CHUNK: Final = 32
"""Fewest tokens of a chunk that doesn't end a prompt, if others take most of the budget."""
_TTL_S: Final = 86_400.0


class Batch:
    """Requests that step together. Safe to use from several threads.

    - ``chunk_tokens``: prompt tokens that a step computes.
    - ``gate``: who is in it uses the model. A thread is not in it when it calls a method.
    - ``after_step``: called after each step, within the gate.
    - ``computed``: hears how many tokens of prompts a step has computed, and in how many seconds.
    """

    def __init__(
        self,
        cache: PrefixCache,
        forward: PackedForward,
        chunk_tokens: int,
        gate: FairLock,
        after_step: Callable[[], object],
        clock: Clock,
        computed: Callable[[int, float], object] | None = None,
    ) -> None:
        self._cache, self._forward, self._chunk_tokens, self._computed = (
            cache,
            forward,
            chunk_tokens,
            computed,
        )
        self._gate, self._after_step, self._clock = gate, after_step, clock
        self._room = Room(cache)
        self._queue = RequestQueue()
        self._shares = RowShares(MAX_ROWS, self._strict_tenants)
        self._met_strict: set[str] = set()
        self._running: dict[BatchRequest, None] = {}
        self._keys = count(1)
        self._announced: dict[Announcement, WaitingRequest] = {}
        self._lacking: dict[BatchRequest, int] = {}
        """Waiting requests that lack room, and how many had started when they lacked it first."""
        self._num_read = self._num_steps = self._num_started = 0
        self._may_start = False
        """Whether something changed since the waiting requests were looked at."""
        self.preemptions: Counter[tuple[str, Preemption]] = Counter()
        """How often requests gave their room up so far, by tenant and reason."""

    # --- for callers

    @contextmanager
    def joined(self, request: BatchRequest) -> Iterator[None]:
        """Let a request wait for its start. It has left after the context, and holds nothing."""
        with self._gate:
            self._enqueue(request)
        try:
            yield
        finally:
            with self._gate:
                self._leave(request)

    def take(self, request: BatchRequest) -> News | None:
        """Return the oldest news of a request that weren't taken yet, if there are any."""
        with self._gate:
            request.is_asleep = False
            if not request.news:
                return None
            self._num_read += 1
            news = request.news.popleft()
            request.is_asleep = isinstance(news, NoRoom)
            return news

    def make_step(self) -> float | None:
        """Make a step, for a thread that runs all requests: see ``Stepping.make_step``."""
        with self._gate:
            if self._step():
                return 0.0
            return _IDLE_S if self._is_wanted() else None

    def advance(self, wait: Wait, offered_at: int | None) -> int | None:
        """Make a step, for a thread that runs one request, which ``wait``s. Others do so too, one after another.

        If others have unread news, it makes none the first time, so that they can read. Returns ``offered_at`` for the
        next call of the same wait.
        """
        with self._gate:
            if wait():
                return None
            is_idle, num_read = False, self._num_read
            if num_read == offered_at or not self._has_unread():
                is_idle = not self._step()
        if is_idle:
            time.sleep(_IDLE_S)
        return num_read

    def logits(
        self, request: BatchRequest, asked: list[Newest], pause: Pause, ask: Callable[[], object]
    ) -> Tensor:
        """Return the logits after the tokens of a driven request, ``[tokens, vocab_size]``, from the next step.

        ``pause``: lets the others go on. ``ask``: called when there is nothing yet. Raises what ended the request.
        """
        request.asked = asked
        while True:
            match self.take(request):
                case None:
                    pause(request.has_news)
                    if not request.news:
                        ask()
                case LogitsDone(logits):
                    return logits
                case Failed(error):
                    raise error

    def make_room(self, request: BatchRequest, error: CapacityError) -> bool:
        """Preempt a request for a driven one that can't grow, or take what ended ones still hold.

        Called within the gate. False if there is none.
        """
        if self._close_ended(request):
            return True
        victim = self._room.victim(request, error, self._running)
        if victim is None or victim is request:
            return False
        self._preempt(victim, _shortage(error))
        return True

    def prefill_tokens(self, missing: float = 1.0) -> int:
        """Return the prompt tokens to compute before those of a new request with this missing share.

        From any thread. O(running).
        """
        begun = [each for each in list(self._running) if each.state == "filling"]
        rows = [(each.target(row), row) for each in begun for row in list(each.rows) if not row.is_over]
        begun_tokens = sum([max(end - row.num_computed, 0) for end, row in rows])
        return begun_tokens + self._queue.tokens_ahead(missing)

    def new_key(self) -> int:
        """Return a number that no sequence has had."""
        return next(self._keys)

    def finish(self, request: BatchRequest, num_tokens: list[int]) -> None:
        """Commit what is computed of the first ``num_tokens`` tokens of each output row. Then it holds nothing."""
        with self._gate:
            if len(num_tokens) == len(request.rows):
                for row, num in zip(request.rows, num_tokens, strict=True):
                    request.close(row, num)
            if request.num_chosen:
                self._room.ended(request)

    # --- who waits and who runs

    def _enqueue(self, request: BatchRequest) -> None:
        settings = self._cache.tenant(request.tenant)
        if settings is not None:
            request.weight = settings.weight
            if settings.mode == "strict":
                self._met_strict.add(request.tenant)
        self._queue.set_weight(request.tenant, request.weight)
        request.handle = self._queue.add(
            request.tenant, tokens=request.num_tokens, missing=self._missing(request), item=request
        )
        self._may_start = True

    def _missing(self, request: BatchRequest) -> float:
        """The share of its tokens that isn't resident."""
        keys = [row.cache_key for row in request.rows if not row.is_over]
        found = sum(self._cache.match(request.namespace, key).num_tokens for key in keys)
        return max(1.0 - found / request.num_tokens, 0.0)

    def _leave(self, request: BatchRequest) -> None:
        self._drop(request)
        request.news.clear()
        for row in request.rows:
            request.close(row, 0)
        if not self._running:
            self._forward.forget()

    def _fail(self, request: BatchRequest, error: Exception) -> None:
        """End a request. What it holds is released when its caller leaves."""
        self._drop(request)
        request.news.append(Failed(error))

    def _drop(self, request: BatchRequest) -> None:
        if request.handle is not None and request.handle.state == "waiting":
            self._queue.remove(request.handle)
        self._withdraw(request)
        self._lacking.pop(request, None)
        self._running.pop(request, None)
        request.state, self._may_start = "over", True

    def _preempt(self, request: BatchRequest, reason: Preemption) -> None:
        """Release a running request's blocks. It waits before all that never started, and goes on from its tokens."""
        for row in request.rows:
            request.close(row)
        request.stop_waiting()
        self._running.pop(request, None)
        request.state, self._may_start = "waiting", True
        assert request.handle is not None
        self._queue.requeue(request.handle, self._missing(request))
        self.preemptions[request.tenant, reason] += 1

    def _has_unread(self) -> bool:
        """Whether a running request would take part in a step if its caller had its turn first."""
        return any(request.news or self._goes_on(request) for request in self._running)

    def _withdraw(self, request: BatchRequest) -> None:
        if request.announcement is not None:
            self._announced.pop(request.announcement, None)
            request.announcement.withdraw()
            request.announcement = None

    def _announce(self, request: BatchRequest) -> None:
        """Tell the cache of a request that waits for room."""
        if request.announcement is None and request.handle is not None:
            key = request.rows[0].cache_key
            try:
                found = self._cache.announce(request.namespace, key, request.hints, ttl_s=_TTL_S)
            except (AnnouncementLimitExceeded, NamespaceError):  # it waits all the same
                return
            request.announcement = found
            self._announced[found] = request.handle

    def _refresh(self) -> None:
        """Read how much of the waiting prompts is resident now."""
        if self._announced:
            for announcement in self._cache.changed_announcements():
                handle = self._announced.get(announcement)
                if handle is not None and handle.state == "waiting":
                    self._queue.update(handle, announcement.missing)

    # --- a step

    def _step(self) -> bool:
        """Make a step of all requests whose callers wait for it. Returns whether it did anything."""
        self._num_steps += 1
        self._shares.begin()
        ready = {each: None for each in self._running if self._is_ready(each)}
        seated = {*self._shares.admit(ready)}  # the others sit this step out, with their KV and their place
        self._grow(seated)
        fills = self._fill()
        later = [each for each in self._running if self._is_ready(each) and each not in ready]
        seated.update(self._shares.admit(later))
        chosen = [
            each for each in self._running if each in seated and self._is_ready(each) and each.lack is None
        ]
        if not fills and not chosen:
            return self._relieve()
        try:
            self._compute(chosen, fills)
        except Exception as error:  # noqa: BLE001 each caller raises it
            self._forward.forget()
            for request in {*chosen, *(request for request, _, _ in fills)}:
                self._fail(request, error)
        self._after_step()
        return True

    @staticmethod
    def _is_ready(request: BatchRequest) -> bool:
        """Whether it can choose in the next step."""
        may_choose = request.state == "choosing" and request.may_step
        return may_choose and (not request.is_driven or bool(request.asked))

    def _strict_tenants(self) -> set[str]:
        """The strict tenants that have asked something."""
        self._met_strict = {name for name in self._met_strict if self._room.is_strict(name)}
        return self._met_strict

    def _grow(self, seated: set[BatchRequest]) -> None:
        """Give each newest token a place, all in one call if there is room for all."""
        growing = []
        for request in self._running:
            request.lack = None
            if request in seated and not request.is_driven and (rows := request.growing()):
                growing.append((request, rows))
        try:
            self._append([row for _, rows in growing for row in rows])
        except Exception:  # noqa: BLE001 some request can't grow: each tries by itself
            for request, rows in growing:
                self._grow_one(request, rows)

    def _grow_one(self, request: BatchRequest, rows: list[Row]) -> None:
        while request.state == "choosing":
            try:
                self._append(rows)
                return
            except CapacityError as error:
                victim = self._room.victim(request, error, self._running)
                if victim is None:
                    request.lack = error
                    return
                self._preempt(victim, _shortage(error))
            except Exception as error:  # noqa: BLE001 its caller raises it
                self._fail(request, error)

    def _append(self, rows: list[Row]) -> None:
        if rows:
            self._cache.append([row.opened for row in rows], [row.newest_id for row in rows])

    def _compute(self, chosen: list[BatchRequest], fills: list[Fill]) -> None:
        newest = [each for request in chosen for each in self._newest(request)]
        chunks = [
            Chunk(row.ids_between(row.num_computed, stop), row.num_computed, row.opened.block_table)
            for _, row, stop in fills
        ]
        started = 0.0 if self._computed is None else self._clock()
        logits = self._forward.run(newest, chunks)
        fill_masks(
            [
                (each.chooser.form, each.answers)
                for each in chosen
                if each.chooser is not None and each.chooser.form is not None
            ]
        )
        if self._computed is not None and not newest:
            self._computed(sum([len(chunk.ids) for chunk in chunks]), self._clock() - started)
        for request, row, stop in fills:
            self._filled(request, row, stop)
        best = logits.argmax(-1).tolist() if any(request.is_greedy for request in chosen) else []
        at = 0
        for request in chosen:
            stop = at + request.num_rows
            try:
                self._choose(request, logits[at:stop], best[at:stop])
            except Exception as error:  # noqa: BLE001 its caller raises it
                self._fail(request, error)
            at = stop

    @staticmethod
    def _newest(request: BatchRequest) -> list[Newest]:
        """The tokens of a request that the step computes and chooses after."""
        if request.is_driven:
            return request.asked
        rows = [row for row in request.rows if not row.is_over]
        return [Newest(row.key, row.newest_id, row.num_tokens - 1, row.opened.block_table) for row in rows]

    def _filled(self, request: BatchRequest, row: Row, stop: int) -> None:
        row.num_computed, self._may_start = stop, True
        try:
            row.opened.commit(stop)
        except Exception as error:  # noqa: BLE001 its caller raises it
            self._fail(request, error)
            return
        request.reach(row)
        request.news.append(ChunkDone(stop, row.num_tokens))
        if request.unfilled() is None:
            request.set_filled()

    def _choose(self, request: BatchRequest, logits: Tensor, best: list[int]) -> None:
        """Choose the next token of each row. ``logits``: of the rows that go on; ``best``: their largest."""
        if request.is_driven:
            request.asked = []
            request.news.append(LogitsDone(logits))
            return
        assert request.chooser is not None
        for row in request.rows:
            if not row.is_over:
                row.num_computed = row.num_tokens
        if not request.num_chosen:
            request.fork()
            for row in request.rows:
                request.reach(row)
            if request.fanout > 1:
                logits = logits.repeat_interleave(request.fanout, 0)
                self._name(request)
        going = request.going
        if request.is_greedy:
            following = iter(best)
            token_ids = [0 if row.is_over else next(following) for row in request.rows]
        else:
            scores = logits
            if len(going) < len(request.rows):
                scores = logits.new_zeros((len(request.rows), logits.shape[1]))
                scores[going] = logits
            token_ids = request.chooser.choose(scores, [row.chosen for row in request.rows])
        logprobs = None
        if request.chooser.num_top is not None:
            logprobs = request.chooser.logprobs(logits, [token_ids[row] for row in going])
        request.take_choices(token_ids, logprobs)

    def _name(self, request: BatchRequest) -> None:
        for row in request.rows:
            row.key = self.new_key()

    # --- prompts

    def _fill(self) -> list[Fill]:
        """Return which tokens of prompts this step computes, and start requests that have room."""
        fills: list[Fill] = []
        budget = self._chunk_tokens
        filling = [each for each in self._running if each.state == "filling" and each.may_step]
        strict = [each for each in filling if self._room.is_strict(each.tenant)]
        for request in strict:
            budget = self._fill_one(request, budget, fills)
        if strict:  # the others get a little of each step
            budget = max(budget, min(MAX_ROWS, self._chunk_tokens))
        for request in [each for each in filling if each not in strict]:
            budget = self._fill_one(request, budget, fills)
        if len(self._queue) and (self._may_start or self._num_steps % _TRY_AGAIN_STEPS == 0):
            self._may_start = False
            self._refresh()
            self._start_waiting(budget, fills)
        for request in [each for each, _, _ in fills if each in self._running]:
            self._running[request] = self._running.pop(request)  # the others go first in the next step
        return fills

    def _fill_one(self, request: BatchRequest, budget: int, fills: list[Fill]) -> int:
        """Add the next chunk of a request, of at most ``budget`` tokens. Returns the rest of the budget."""
        while (row := request.unfilled()) is not None:
            if row.sequence is None:
                error = self._open(request, row)
                if error is not None:
                    request.lack = error if isinstance(error, CapacityError) else None
                    return budget
                continue
            if not row.is_loaded and self._waits_for_tiers(request, row):
                return budget
            target = request.target(row)
            if budget < min(self._chunk_tokens, _LEAST_CHUNK, target - row.num_computed):
                return budget
            stop = row.num_computed + budget
            if row.loading is not None:  # it has brought tokens behind a gap
                stop = row.loading.claim(budget)
                self._count_loaded(request, row, row.opened.num_committed_tokens, "disk")
            stop = min(stop, target)
            if stop > row.num_computed:
                fills.append((request, row, stop))
                return budget - (stop - row.num_computed)
        request.set_filled()
        return budget

    def _open(self, request: BatchRequest, row: Row) -> Exception | None:
        """Open a row's sequence. Returns the error; if it isn't of capacity, the request has failed."""
        try:
            for other in request.rows:
                if other.sequence is not None:
                    other.sequence.drop()  # was reserved for this row too
            sequence = request.open_row(request, row)
        except CapacityError as error:
            return error
        except Exception as error:  # noqa: BLE001 its caller raises it
            self._fail(request, error)
            return error
        request.open(row, sequence)
        row.key = self.new_key()
        return None

    def _waits_for_tiers(self, request: BatchRequest, row: Row) -> bool:
        """Take what has come from the tiers below the cache. Whether more comes, or the request has failed.

        The row has its blocks, and computes nothing meanwhile. It is asked again in each step.
        """
        began_at, num_host, is_done = 0.0, 0, True
        try:
            if row.loading is None:
                row.loading = row.opened.loading
                num_host = 0 if row.loading is None else row.loading.num_host_tokens
            if row.loading is not None:
                began_at = self._clock()
                is_done = row.loading.poll()
            there = row.opened.num_committed_tokens
        except Exception as error:  # noqa: BLE001 its caller raises it
            self._fail(request, error)
            return True
        row.is_loaded = is_done
        if row.loading is not None:
            self._count_loaded(request, row, min(there, row.num_computed + num_host), "host")
            self._count_loaded(request, row, there, "disk")
            request.note_wait(not is_done, began_at, self._clock())
            if is_done and row.loading.num_loaded_tokens == row.num_loaded:
                row.loading = None
        return not is_done

    @staticmethod
    def _count_loaded(request: BatchRequest, row: Row, stop: int, tier: Literal["host", "disk"]) -> None:
        """Take that a tier brought the tokens up to ``stop``. They count as cached."""
        num_tokens = stop - row.num_computed
        row.num_computed, row.num_loaded = stop, row.num_loaded + num_tokens
        if row.is_first:
            request.tally.num_cached[row.at] += num_tokens
            assert request.tally.num_loaded is not None
            request.tally.num_loaded[tier] += num_tokens

    def _start_waiting(self, budget: int, fills: list[Fill]) -> None:
        passed: list[WaitingRequest] = []
        overdue = self._overdue()
        try:
            while len(passed) < _MAX_TRIED and (handle := self._queue.peek(0.0)) is not None:
                self._queue.start(handle)
                passed.append(handle)
                request: BatchRequest = handle.item
                is_next = budget > 0 or not self._is_filling(request.tenant)
                if overdue not in (None, request) and not self._room.is_strict(request.tenant):
                    is_next = False
                if is_next and self._started(request):
                    passed.pop()
                    overdue = self._overdue()
                    if request.state == "filling":
                        budget = self._fill_one(request, budget, fills)
        finally:
            for handle in reversed(passed):
                self._queue.give_back(handle)
        for handle in passed:
            if handle.item.lack is not None:
                self._announce(handle.item)

    def _overdue(self) -> BatchRequest | None:
        """The waiting request that lacks room since so many starts that no other one may start before it."""
        for request, since in self._lacking.items():
            if request.may_step:
                return request if self._num_started - since >= _MAX_PASSED else None
        return None

    def _lacks(self, request: BatchRequest, error: CapacityError) -> None:
        """Let a request wait for room. A limit of its own tenant is no reason for others to wait for it."""
        request.lack = error
        if not isinstance(error, QuotaExceeded) and not self._room.is_strict(request.tenant):
            self._lacking.setdefault(request, self._num_started)

    def _is_filling(self, tenant: str) -> bool:
        return any(each.state == "filling" and each.tenant == tenant for each in self._running)

    def _started(self, request: BatchRequest) -> bool:
        """Start a waiting request if it can start. What it raises ends this request alone."""
        try:
            return self._start(request)
        except Exception as error:  # noqa: BLE001 its caller raises it
            self._fail(request, error)
            return True

    def _has_place(self, request: BatchRequest) -> bool:
        """Whether it may start beside the running requests of its tenant.

        If as many run as may, and all of them wait for their readers, one gives its place up.
        """
        own = [each for each in self._running if each.tenant == request.tenant]
        is_full = len(own) >= NUM_TOGETHER
        if any(each.may_step for each in own):
            return not is_full and not request.is_patient()
        idle = [each for each in own if each.state in ("filling", "choosing") and not each.is_driven]
        if is_full and idle:
            self._preempt(idle[0], "unread")
        return bool(idle) or not is_full

    def _start(self, request: BatchRequest) -> bool:
        """Start a waiting request if it has room. True if it doesn't wait any more: it may have failed."""
        row = request.unfilled()
        assert row is not None, "a request that waits has something to compute"
        request.lack = None
        if not request.may_step or self._is_being_computed(request, row) or not self._has_place(request):
            return False
        error: Exception | None = self._make_room(request)
        if error is None and (beside := self._beside(request)):
            error = self._room.crowding(request, beside) or self._room.obstacle(request)
        if error is None:
            request.may_start()
            error = self._open(request, row)
        if isinstance(error, CapacityError):
            self._lacks(request, error)
            return False
        if error is not None:
            return True
        error = self._reserve(request)
        if isinstance(error, CapacityError):
            request.undo_open(row)
            self._lacks(request, error)
            return False
        if error is not None:
            self._fail(request, error)
            return True
        self._withdraw(request)
        self._lacking.pop(request, None)
        self._num_started += 1
        if request.started_at is None:
            request.started_at = self._clock()
        self._running[request] = None
        request.state = "filling"
        return True

    def _beside(self, request: BatchRequest) -> list[BatchRequest]:
        """The running requests whose needs count when this one starts. For a strict tenant these are its own."""
        tenant, is_strict = request.tenant, self._room.is_strict(request.tenant)
        return [
            each
            for each in self._running
            if each.tenant == tenant or not (is_strict or self._room.is_strict(each.tenant))
        ]

    def _make_room(self, request: BatchRequest) -> CapacityError | None:
        """Reserve what the running requests are expected to need. Returns why not."""
        for each in self._beside(request):
            try:
                self._room.reserve(each)
            except QuotaExceeded as error:
                if each.tenant == request.tenant:
                    return error
            except CapacityError as error:
                return error
            except Exception as error:  # noqa: BLE001 its caller raises it
                self._fail(each, error)
        return None

    def _reserve(self, request: BatchRequest) -> Exception | None:
        """Reserve what a request is expected to need, unless nothing runs that could take it. Returns why not."""
        beside = self._beside(request)
        if not beside:
            return None
        try:
            self._room.reserve(request)
        except Exception as error:  # noqa: BLE001 its caller raises it
            is_alone = not any(each.tenant == request.tenant for each in beside)
            return None if is_alone and isinstance(error, QuotaExceeded) else error
        return None

    def _is_being_computed(self, request: BatchRequest, row: Row) -> bool:
        """Whether a filling request computes the next block that this one lacks."""
        others = [
            each
            for each in self._running
            if each.state == "filling" and each.may_step and each.namespace == request.namespace
        ]
        if not others:
            return False
        key = row.cache_key
        stop = self._cache.match(request.namespace, key).num_tokens + self._cache.config.block_size
        head = key[: stop * TOKEN_BYTES]
        for each in others:
            other = each.unfilled()
            if other is None or stop > min(each.target(other), request.target(row)):
                continue
            if other.cache_key.startswith(head):
                return True
        return False

    # --- too little room

    def _close_ended(self, request: BatchRequest) -> bool:
        """Take the room of requests that are over, though their callers haven't finished. False if there are none."""
        ended = [each for each in self._running if each.state == "over" and each is not request]
        for each in ended:
            self._running.pop(each)
            for row in each.rows:
                each.close(row)
        return bool(ended)

    def _relieve(self) -> bool:
        """Nothing could be computed: help one request that lacks room. False if there is nothing to do."""
        self._may_start = True
        waiting = [handle.item for handle in self._queue]
        lacking = [(each, each.lack) for each in (*self._running, *waiting) if each.may_step]
        return any(error is not None and self._help(request, error) for request, error in lacking)

    def _help(self, request: BatchRequest, error: CapacityError) -> bool:
        """Take the room of a request that is over or waits for its reader, or tell the caller. False: it waits on."""
        if self._close_ended(request):
            return True
        idle = [each for each in self._running if each is request or not each.may_step]
        victim = self._room.victim(request, error, idle)
        if victim is not None and victim is not request:
            self._preempt(victim, "unread")
            return True
        if any(each.is_loading or self._goes_on(each) for each in self._running):
            return False
        if request.can_wait or not any(each is not request for each in self._running):
            request.news.append(NoRoom(error))
            return True
        return False

    @staticmethod
    def _goes_on(request: BatchRequest) -> bool:
        """Whether it is driven, and its caller will ask for logits without another step."""
        return request.is_driven and request.state == "choosing" and request.may_step and not request.asked

    def _is_wanted(self) -> bool:
        """Whether somebody waits for a step, though the last one did nothing."""
        waiting = [handle.item for handle in self._queue]
        return any(each.may_step and not self._goes_on(each) for each in (*self._running, *waiting))


def _shortage(error: CapacityError) -> Preemption:
    return "tenant" if isinstance(error, QuotaExceeded) else "pool"
