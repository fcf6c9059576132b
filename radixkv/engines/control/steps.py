"""Changes of a cache between two steps of its engine, at the same step on all tensor parallel ranks.

Each rank has a tree of its own, and all must decide alike: they match, take and evict in the same order. So whatever
doesn't come with a request travels with a ``Step`` from rank 0, which all ranks apply at the same place:

    changes     purges, pins and other commands of the control channel
    now_s       the time, for pins and policies: each rank's cache has a ``StepClock``
    decisions   a digest of what rank 0 has decided so far; a rank that decided otherwise raises IntegrityError

One rank alone uses the same: then a scheduler may match and lock in one step, and nothing is purged between.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Final, NamedTuple, SupportsIndex

from radixkv.clock import Clock, monotonic
from radixkv.config import CacheConfig, Namespace, Tenant
from radixkv.errors import ArgumentError, ControlError, IntegrityError
from radixkv.index.cache import PrefixCache
from radixkv.index.pins import Pin
from radixkv.index.tokens import TokenIds
from radixkv.signing import KeySet
from radixkv.tenancy.salt import SaltReader

WAIT_S: Final = 60.0
"""Seconds that a change waits for the next step."""
MAINTAIN_S: Final = 1.0
"""Seconds between two calls of ``maintain``, where the cache is on a StepClock."""


class Step(NamedTuple):
    """What rank 0 tells all ranks at a step. It can be pickled."""

    now_s: float
    decisions: int
    changes: tuple[tuple[str, tuple[Any, ...]], ...]


class StepClock:
    """The time of rank 0 at the last step, in seconds."""

    __slots__ = ("now_s",)

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now_s


class _Change:
    """A change that waits for the next step."""

    __slots__ = ("answer", "arguments", "done", "error", "name")

    def __init__(self, name: str, arguments: tuple[Any, ...]) -> None:
        self.name, self.arguments, self.done = name, arguments, threading.Event()
        self.answer: Any = None
        self.error: Exception | None = None


class EngineSteps:
    """The steps of one rank. The thread that makes it is the engine's: its own changes are made at once.

    - ``clock``: the StepClock of the rank's cache; None if the cache has its own clock, on a single rank.
    - ``read``: the clock of rank 0.
    """

    def __init__(self, clock: StepClock | None = None, read: Clock = monotonic) -> None:
        self.decisions: Callable[[], int] = lambda: 0
        self.maintain: Callable[[], None] = lambda: None
        self._clock, self._read, self._maintained_s = clock, read, 0.0
        self._thread = threading.get_ident()
        self._waiting: deque[_Change] = deque()
        self._known: dict[str, Callable[..., Any]] = {}
        self._begun: list[_Change] = []

    def change(self, name: str, make: Callable[..., Any], *arguments: Any) -> Any:
        """Make a change at the next step, on all ranks; at once if the engine's thread asks. Returns rank 0's answer.

        Raises what the change raises, and ControlError if no step comes for WAIT_S.
        """
        if threading.get_ident() == self._thread:
            return make(*arguments)
        turn = _Change(name, arguments)
        self._waiting.append(turn)
        if not turn.done.wait(WAIT_S):
            try:
                self._waiting.remove(turn)
            except ValueError:  # it runs at this moment
                turn.done.wait()
            else:
                raise ControlError(f"the engine made no step for {WAIT_S:g} seconds")
        if turn.error is not None:
            raise turn.error
        return turn.answer

    def know(self, name: str, make: Callable[..., Any]) -> None:
        """Say how this rank makes a change."""
        self._known[name] = make

    def begin(self) -> Step:
        """Return the next step, on rank 0. ``apply`` follows. 0.5 µs if nothing waits."""
        self._begun = [self._waiting.popleft() for _ in range(len(self._waiting))]
        changes = tuple((each.name, each.arguments) for each in self._begun)
        return Step(self._read(), self.decisions(), changes)

    def apply(self, step: Step) -> None:
        """Make the changes of a step, on each rank. Raises IntegrityError if this rank decided otherwise before."""
        if step.decisions != self.decisions():
            raise IntegrityError("this tensor parallel rank decided otherwise than rank 0 about its KV cache")
        begun, self._begun = self._begun, []
        for at, (name, arguments) in enumerate(step.changes):
            turn = begun[at] if begun else _Change(name, arguments)
            try:
                turn.answer = self._known[name](*arguments)
            except Exception as error:  # noqa: BLE001 for the thread that asked; other ranks raise the same
                turn.error = error
            finally:
                turn.done.set()
        if self._clock is not None:
            self._clock.now_s = step.now_s
            if step.now_s >= self._maintained_s + MAINTAIN_S:
                self._maintained_s = step.now_s
                self.maintain()


class SteppedCache(PrefixCache):
    """A PrefixCache that other threads change only between steps. Its engine can't be refused a lease.

    So it gives no guarantees: ``add_tenant`` raises ArgumentError for ``guaranteed_blocks``.
    """

    def __init__(self, config: CacheConfig, *, steps: EngineSteps, clock: Clock, **named: Any) -> None:
        super().__init__(config, clock=clock, **named)
        self._between = steps
        known: dict[str, Callable[..., Any]] = {
            "purge": super().purge,
            "clear": super().clear,
            "touch": super().touch,
            "pin": super().pin,
            "unpin": super().unpin,
            "add_tenant": super().add_tenant,
            "remove_tenant": super().remove_tenant,
        }
        for name, make in known.items():
            steps.know(name, make)
        steps.maintain = super().maintain

    def purge(self, tenant: str) -> int:
        """See PrefixCache. Waits for the next step, like the following ones."""
        return int(self._between.change("purge", super().purge, tenant))

    def clear(self, namespace: Namespace) -> int:
        """See PrefixCache."""
        return int(self._between.change("clear", super().clear, namespace))

    def touch(self, namespace: Namespace, ids: TokenIds) -> int:
        """See PrefixCache."""
        return int(self._between.change("touch", super().touch, namespace, ids))

    def pin(
        self, namespace: Namespace, ids: TokenIds, ttl_s: Any, *, as_of: SupportsIndex | None = None
    ) -> Pin:
        """See PrefixCache."""
        found: Pin = self._between.change("pin", partial(super().pin, as_of=as_of), namespace, ids, ttl_s)
        return found

    def unpin(self, pin: Any) -> None:
        """See PrefixCache."""
        self._between.change("unpin", super().unpin, pin)

    def add_tenant(self, tenant: Tenant) -> None:
        """See PrefixCache."""
        if isinstance(tenant, Tenant) and tenant.guaranteed_blocks:
            raise ArgumentError(
                "guaranteed_blocks", tenant.guaranteed_blocks, "0, because this engine's pages are its own"
            )
        self._between.change("add_tenant", super().add_tenant, tenant)

    def remove_tenant(self, tenant: str) -> None:
        """See PrefixCache."""
        self._between.change("remove_tenant", super().remove_tenant, tenant)


class SteppedSalts(SaltReader):
    """A SaltReader that other threads change only between steps."""

    def __init__(self, keys: KeySet, steps: EngineSteps, *, allows_anonymous: bool = True) -> None:
        self._between = steps
        super().__init__(keys, allows_anonymous=allows_anonymous)
        steps.know("raise_generation", super().raise_generation)
        steps.know("use", super().use)

    def use(self, keys: KeySet) -> None:
        """See SaltReader. Waits for the next step, like ``raise_generation``."""
        self._between.change("use", super().use, keys)

    def raise_generation(self, tenant: str, generation: int) -> int:
        """See SaltReader."""
        return int(self._between.change("raise_generation", super().raise_generation, tenant, generation))
