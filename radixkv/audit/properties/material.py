"""What the machines use: namespaces, prompts that share prefixes on purpose, and the mirror of an open sequence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

from radixkv.config import KVLayout, Namespace

CacheFactory = Callable[..., Any]
"""Called as ``factory(config, clock=clock)``, with ``scrub_blocks`` if the config has no layout (see PrefixCache).

Returns a PrefixCache, or an object that behaves like one.
"""

NAMESPACES = (
    Namespace("a", "m"),
    Namespace("b", "m"),
    Namespace("a", "m", None, "s"),
    Namespace("a", "m", "s", ""),
    Namespace("a", "m", weights=1),
)
LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=1, dtype="float64")
MAX_OPEN = 6
MAX_PROMPT_BLOCKS = 4
MAX_PINS = 2
"""Maximum pins of a tenant, in all machines."""

MAX_WAITING = 6
"""Requests that wait at a time."""

MAX_SESSIONS = 5
"""Open sessions at a time."""

small = st.integers(0, 7)
WITH_MATERIAL = len(NAMESPACES)
"""Where a prompt of the first namespace has an image in place of its second token."""
where_to = st.sampled_from((*[0] * 6, *[1] * 3, 2, 3, 4, WITH_MATERIAL))
token_id = st.integers(0, 2)


def _universe() -> list[tuple[int, ...]]:
    """Prompts that share prefixes: all zeros, or zeros with one id changed, of up to 17 ids; short ones first."""
    found: list[tuple[int, ...]] = []
    for length in range(1, 18):
        plain = (0,) * length
        found.append(plain)
        found.extend((*plain[:at], other, *plain[at + 1 :]) for at in range(length) for other in (1, 2))
    return [*found, ()]


_HOT = ((0,) * 4, (0,) * 8, (0,) * 5, (0, 0, 0, 0, 1, 0, 0, 0, 0), (0, 0, 1, 0, 0))

prompts = st.one_of(st.sampled_from(_universe()), st.sampled_from(_HOT))
"""Half of the draws come from five prompts, so that requests meet."""


def expect(truth: object, said: object) -> None:
    """Raise AssertionError unless ``truth``. An ``assert`` statement would not work under ``python -O``."""
    if not truth:
        raise AssertionError(said)


@dataclass
class Awaited:
    """Tokens up to ``end`` that a step computes, from the entry before or from the committed part on.

    ``is_leaned``: as tokens of another sequence.
    """

    step: int
    end: int
    is_leaned: bool
    is_done: bool = False


@dataclass
class Mirror:
    """What the oracle knows of one open sequence."""

    sequence: Any
    namespace: Namespace
    ids: list[int]
    states: list[int]
    num_committed: int
    num_computed: int
    forgotten: bool = False
    """Its namespace was cleared while it ran: what it commits is no longer served."""
    num_reserved: int = 0
    """Tokens with room and without ids."""
    ahead: list[Awaited] = field(default_factory=list)
    """What running steps compute, in order."""
    offered_at: int | None = None
    """A number that says when it began to offer what it computes; None if it doesn't."""
    num_asked: int = 0
    """Tokens of the prompt that its opening counted."""
    num_missed: int = 0
    """Those that count as missed."""

    @property
    def num_tokens(self) -> int:
        return len(self.ids)

    # What running steps compute: written independently of the cache, and as simple as can be.

    @property
    def leaned_end(self) -> int:
        """Tokens up to the last one that another sequence computes; 0 without one."""
        return max([each.end for each in self.ahead if each.is_leaned], default=0)

    @property
    def num_ahead(self) -> int:
        """Tokens after the committed ones that others compute."""
        return max(self.leaned_end - self.num_committed, 0)

    @property
    def committable(self) -> int:
        """Tokens that may be committed: all before the first that another sequence's step has yet to compute."""
        start = self.num_committed
        for each in self.ahead:
            if each.is_leaned and not each.is_done:
                return start
            start = each.end
        return self.num_tokens

    def compute_ahead(self, step: int, stop: int, now: int) -> None:
        """A step computes its tokens up to ``stop``."""
        self.ahead.append(Awaited(step, stop, False))
        self.offered_at = now if self.offered_at is None else self.offered_at

    def leaned_to(self, stop: int) -> list[Awaited]:
        """What a sequence leans on that shares the first ``stop`` tokens."""
        starts = [self.num_committed, *[each.end for each in self.ahead]]
        return [
            Awaited(each.step, min(each.end, stop), True, each.is_done)
            for start, each in zip(starts, self.ahead, strict=False)
            if start < stop
        ]

    def pass_to(self, stop: int) -> None:
        """The first ``stop`` tokens are committed."""
        self._keep([each for each in self.ahead if each.end > stop])

    def cut_ahead(self, stop: int) -> None:
        """Only the first ``stop`` tokens are left."""
        starts = [self.num_committed, *[each.end for each in self.ahead]]
        left = [each for start, each in zip(starts, self.ahead, strict=False) if start < stop]
        for each in left:
            each.end = min(each.end, stop)
        self._keep(left)

    def step_done(self, step: int) -> int:
        """Return how many tokens are committed then: all up to the first that a step has yet to compute."""
        stop, is_next = self.num_committed, True
        for each in self.ahead:
            each.is_done = each.is_done or each.step == step
            is_next = is_next and each.is_done
            stop = each.end if is_next else stop
        return stop

    def step_failed(self, step: int) -> bool:
        """Forget what the step, and all after it, was to compute. Returns whether the sequence leaned on it."""
        for at, each in enumerate(self.ahead):
            if each.step == step and not each.is_done:
                self._keep(self.ahead[:at])
                return each.is_leaned
        return False

    def _keep(self, left: list[Awaited]) -> None:
        self.ahead = left
        if not left:
            self.offered_at = None


@dataclass
class Held:
    """A match that was kept, and its lease once there is one."""

    match: Any
    namespace: Namespace
    ids: tuple[int, ...]
    lease: Any = None
