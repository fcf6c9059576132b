"""Whose turn it is on the event loop: one account for each tenant, and its order.

    bytes ─▶ heads, READING_S a turn of the loop ─▶ account ─▶ line ─▶ step ─▶ waits for bytes, a thread, the model …
                                                                 ▲──────────────────────┘

A request's work on the loop is a chain of *steps*, each from one wait to the next. The CPU time of a step is charged to
its account. While the loop has time, a step goes on at once. When the steps of one turn of the loop have used SLICE_S,
further ones stand in line, and each turn takes about SLICE_S of them, at least one:

- **Ranks.** FIRST (the operator and strict tenants), then TENANT, then NOBODY (all requests without a valid key, one
  account). A lower rank that waits gets LEAST of the time, so that nobody can starve health checks.
- **Within a rank** by weight: start-time fair queueing over the time that was used, as in ``radixkv.scheduling``; the
  cost of a step is known only when it is over. Within an account in order of arrival.

So a step of the first rank waits for the step that is running, and for about two slices, however many wait. Nothing is
preempted: ``intake`` keeps steps short.

An account has a share of the loop's time, LOOP_SHARE on average and LOOP_BURST_S at once. ``wait_s`` tells how much
it is above it. That depends on its own steps alone, so a refusal reveals nothing of others.

Everything here is used from the event loop's thread. Enter and leave take O(log accounts).
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from heapq import heappop, heappush, heapreplace
from typing import Any, Final, Generic, TypeVar

from radixkv.clock import Clock, monotonic

T = TypeVar("T")

FIRST, TENANT, NOBODY = 0, 1, 2
"""The ranks of accounts."""
LEAST: Final = (0.0, 0.1, 0.05)
"""The share of the time that a rank gets while it waits, whatever those before it want."""
SLICE_S: Final = 0.001
"""Time of the steps in one turn of the loop, before others stand in line."""
READING_S: Final = 0.0005
"""Time in one turn of the loop in which heads are parsed, whose tenants aren't known yet."""
LOOP_SHARE = 0.5
LOOP_BURST_S = 2.0
READ_FIRST: Final = "radixkv.read_first"
"""The name in a scope's state that says that the request is of the first rank. Then the next one on its connection
doesn't wait to be parsed."""
_LIKELY_S: Final = 0.0005
"""The cost of an account's step, until one was measured."""
_MAX_KEPT: Final = 1024


class Allowance:
    """A limit on what each lane uses: ``rate`` a second, ``burst`` at once. O(1)."""

    def __init__(self, clock: Clock, rate: float, burst: float) -> None:
        self._clock, self._rate, self._burst = clock, rate, burst
        self._debts: dict[str, tuple[float, float]] = {}

    def wait_s(self, lane: str) -> float:
        """Return the seconds until the lane may use more; 0.0 if it may now."""
        return max(self._debt(lane) - self._burst, 0.0) / self._rate

    def spend(self, lane: str, amount: float) -> None:
        """Record that the lane has used this amount."""
        self._debts[lane] = (self._debt(lane) + amount, self._clock())
        if len(self._debts) > _MAX_KEPT:
            self._debts = {each: debt for each, debt in self._debts.items() if self._debt(each)}

    def _debt(self, lane: str) -> float:
        debt, since = self._debts.get(lane, (0.0, 0.0))
        return max(debt - self._rate * (self._clock() - since), 0.0)


class Account:
    """Who pays for steps.

    - ``rank``: FIRST, TENANT or NOBODY; ``weight``: its part of the rank's time, relative to others.
    - ``likely_s``: what its next step costs, by its last ones.
    """

    __slots__ = ("likely_s", "listed_in", "name", "rank", "tag", "waiting", "weight")

    def __init__(self, name: str, rank: int) -> None:
        self.name, self.rank, self.weight = name, rank, 1.0
        self.likely_s = _LIKELY_S
        self.tag = 0.0
        """The virtual time at which its next step may begin."""
        self.waiting: deque[asyncio.Future[None]] = deque()
        self.listed_in: _Rank | None = None


class _Rank:
    """The accounts of a rank that wait, by tag."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Account]] = []
        self._now = 0.0
        self._num_listed = self.num_waiting = 0
        self.used_s = 0.0
        self.waits_since = (0.0, 0.0)
        """Time that it, and all ranks, had used when it began to wait."""

    def enter(self, account: Account) -> None:
        """Let an account take part that waits."""
        if account.listed_in is not self:
            account.listed_in = self
            account.tag = max(account.tag, self._now)
            self._num_listed += 1
            heappush(self._heap, (account.tag, self._num_listed, account))

    def first(self) -> Account:
        """Return the account that is next. One must wait."""
        while True:
            tag, number, account = self._heap[0]
            if not account.waiting or account.listed_in is not self:
                heappop(self._heap)
                if account.listed_in is self:
                    account.listed_in = None
            elif tag < account.tag:
                heapreplace(self._heap, (account.tag, number, account))
            else:
                self._now = max(self._now, tag)
                return account


class Turns:
    """The accounts of one event loop, and the line before it."""

    def __init__(self, clock: Clock = monotonic, work_clock: Clock = time.thread_time) -> None:
        """``work_clock``: the CPU time of the event loop's thread."""
        self.work_clock = work_clock
        self._share = Allowance(clock, LOOP_SHARE, LOOP_BURST_S)
        self._accounts: dict[str, Account] = {}
        self._ranks = (_Rank(), _Rank(), _Rank())
        self._used_s = 0.0
        self._slice_s = self._first_s = self._reading_s = 0.0
        """Time used in this turn of the loop: by all steps, by those of the first rank, for parsing heads."""
        self._unread: deque[Callable[[], None]] = deque()
        self._is_scheduled = False

    def account(self, name: str, rank: int = TENANT, weight: float = 1.0) -> Account:
        """Return the account of a name, with this rank and weight from now on."""
        found = self._accounts.get(name)
        if found is None:
            if len(self._accounts) > _MAX_KEPT:
                self._forget()
            found = self._accounts[name] = Account(name, rank)
        if found.rank != rank:
            self._move(found, rank)
        found.weight = weight
        return found

    def wait_s(self, account: Account) -> float:
        """Return the seconds until the account is within its share again; 0.0 if it is."""
        return self._share.wait_s(account.name)

    @property
    def num_waiting(self) -> int:
        """Steps that stand in line."""
        return sum(each.num_waiting for each in self._ranks)

    # ---- steps

    def may_step(self, account: Account) -> bool:
        """Whether a step may begin without standing in line."""
        if account.rank == FIRST:
            used_s, num_before = self._first_s, self._ranks[FIRST].num_waiting
        else:
            used_s, num_before = self._slice_s, self.num_waiting
        return not num_before and (not used_s or used_s + account.likely_s <= SLICE_S)

    def enter(self, account: Account) -> asyncio.Future[None]:
        """Stand in line. The future ends when it is the account's turn."""
        turn = asyncio.get_running_loop().create_future()
        rank = self._ranks[account.rank]
        self._begin_wait(rank)
        account.waiting.append(turn)
        rank.num_waiting += 1
        rank.enter(account)
        self._schedule()
        return turn

    def leave(self, account: Account, turn: asyncio.Future[None]) -> None:
        """Leave the line before it was one's turn; without effect afterwards. O(steps of the account that wait)."""
        if turn in account.waiting:
            account.waiting.remove(turn)
            self._ranks[account.rank].num_waiting -= 1

    def spend(self, account: Account, seconds: float, *, is_refusal: bool = False) -> None:
        """Charge a step that is over. A refusal doesn't count against the account's share of the loop."""
        self._used_s += seconds
        self._slice_s += seconds
        if account.rank == FIRST:
            self._first_s += seconds
        self._ranks[account.rank].used_s += seconds
        account.tag += seconds / account.weight
        account.likely_s += (seconds - account.likely_s) / 8
        if not is_refusal:
            self._share.spend(account.name, seconds)
        self._schedule()

    # ---- heads

    def may_read(self) -> bool:
        """Whether a head may be parsed without waiting."""
        return not self._unread and self._reading_s < READING_S

    def read_later(self, parse: Callable[[], None]) -> None:
        """Call ``parse()`` in turn."""
        self._unread.append(parse)
        self._schedule()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Count the time of the ``with`` as that of parsing."""
        began = self.work_clock()
        try:
            yield
        finally:
            self._reading_s += self.work_clock() - began
            self._schedule()

    # ---- turns of the loop

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._next_turn)

    def _next_turn(self) -> None:
        self._is_scheduled = False
        self._slice_s, self._first_s, self._reading_s = *self._granted(), 0.0
        try:
            while self._unread and self._reading_s < READING_S:
                self._unread.popleft()()
        finally:
            if self.num_waiting or self._unread:
                self._schedule()

    def _granted(self) -> tuple[float, float]:
        """Let the next steps begin, those of about one slice. Return their likely cost, and that of the first rank."""
        cost_s = first_s = 0.0
        while self.num_waiting and cost_s < SLICE_S:
            account = self._next_account()
            cost_s += account.likely_s
            if account.rank == FIRST:
                first_s += account.likely_s
            self._ranks[account.rank].num_waiting -= 1
            turn = account.waiting.popleft()
            if not turn.done():
                turn.set_result(None)
        return cost_s, first_s

    def _next_account(self) -> Account:
        for number in (NOBODY, TENANT):
            rank = self._ranks[number]
            used, all_used = rank.waits_since
            if rank.num_waiting:
                first = rank.first()
                if rank.used_s - used + first.likely_s <= LEAST[number] * (self._used_s - all_used):
                    return first
        return next(rank for rank in self._ranks if rank.num_waiting).first()

    def _move(self, account: Account, rank: int) -> None:
        """Give an account another rank, also to its steps that wait."""
        self._ranks[account.rank].num_waiting -= len(account.waiting)
        account.rank, account.tag, account.listed_in = rank, 0.0, None
        if account.waiting:
            self._begin_wait(self._ranks[rank])
            self._ranks[rank].num_waiting += len(account.waiting)
            self._ranks[rank].enter(account)

    def _begin_wait(self, rank: _Rank) -> None:
        if not rank.num_waiting:
            rank.waits_since = (rank.used_s, self._used_s)

    def _forget(self) -> None:
        """Forget accounts that wait for nothing."""
        self._accounts = {name: each for name, each in self._accounts.items() if each.waiting}


class Payer:
    """Whose account the present request's steps are charged to. It may change when the tenant is known.

    ``is_refused``: its steps only refuse the request.
    """

    __slots__ = ("account", "is_refused", "turns")

    def __init__(self, turns: Turns, account: Account) -> None:
        self.turns, self.account, self.is_refused = turns, account, False


_payer: ContextVar[Payer | None] = ContextVar("radixkv_payer", default=None)


class _Steps(Generic[T]):
    """Awaits a coroutine step by step, each in its payer's turn."""

    __slots__ = ("_payer", "_work")

    def __init__(self, payer: Payer, work: Coroutine[Any, Any, T]) -> None:
        self._payer, self._work = payer, work

    def __await__(self) -> Generator[Any, Any, T]:
        payer, turns, work = self._payer, self._payer.turns, self._work
        error: BaseException | None = None
        while True:
            if error is None and not turns.may_step(payer.account):
                account = payer.account
                turn = turns.enter(account)
                try:
                    yield from turn
                except BaseException as cancelled:  # noqa: BLE001 the coroutine gets it
                    turns.leave(account, turn)
                    error = cancelled
            began = turns.work_clock()
            try:
                if error is None:
                    waits_for = work.send(None)
                else:
                    thrown, error = error, None
                    waits_for = work.throw(thrown)
            except StopIteration as end:
                found: T = end.value
                return found
            finally:
                turns.spend(payer.account, turns.work_clock() - began, is_refusal=payer.is_refused)
            try:
                yield waits_for
            except BaseException as raised:  # noqa: BLE001 the coroutine gets it
                error = raised


async def run(turns: Turns, account: Account, work: Coroutine[Any, Any, T]) -> T:
    """Await ``work``, the main coroutine of a request, in turn and on an account."""
    payer = Payer(turns, account)
    token = _payer.set(payer)
    try:
        return await _Steps(payer, work)
    finally:
        _payer.reset(token)


async def in_turn(work: Coroutine[Any, Any, T]) -> T:
    """Await a part of a request's work that runs in a task of its own, on the account of the request."""
    payer = _payer.get()
    return await (work if payer is None else _Steps(payer, work))


def payer() -> Payer | None:
    """Return whose account the present request's steps are charged to; None outside of ``run``."""
    return _payer.get()
