"""What the machines use: namespaces, prompts that share prefixes on purpose, and the mirror of an open sequence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
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

small = st.integers(0, 7)
where_to = st.sampled_from((*[0] * 6, *[1] * 3, 2, 3, 4))
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

    @property
    def num_tokens(self) -> int:
        return len(self.ids)


@dataclass
class Held:
    """A match that was kept, and its lease once there is one."""

    match: Any
    namespace: Namespace
    ids: tuple[int, ...]
    lease: Any = None
