"""What may lie below a cache: other places with evicted KV. The cache knows them only by these protocols.

    commit                       Below.keep         hears of new blocks, and copies them while it has room
    eviction                     Below.let_go       tells which blocks that leave have no copy below
                                 Below.leave        copies those
    Sequence.loading             Below.begin        tells what of a sequence lies below, and brings it back
    announce                     Below.expect       brings what is slow to come
    note, Session.pause          Below.prefetch     brings it shortly before the expected end of a pause
    purge, clear, forget         Below.forgetting   forgets it there too
    add_tenant, remove_tenant    Below.follow       takes the tenant's settings
    audit.check                  Below.violations   tells which laws are broken there

``load_target`` has the cache's half. ``CacheConfig`` names no module of engines: ``FACTORY`` is imported at the first
use, like a policy.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, SupportsIndex, TypeAlias, TypeVar, cast

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from radixkv.clock import Clock
    from radixkv.config import CacheConfig, Namespace, Tenant
    from radixkv.storage.device import BlockStorage
    from radixkv.storage.plan import BlockIds

T = TypeVar("T")
GiveAll: TypeAlias = Callable[[Callable[[], bool]], None]

FACTORY: Final = "radixkv.tiers.ladder", "tiers_below"
"""The module and the function that make what lies below a cache with ``host_blocks``."""


class Scope(NamedTuple):
    """What is to be forgotten: all of a tenant, or a namespace of it; without a tenant, everything but some tenants'.

    - ``namespace``: this one alone. A disk forgets the whole tenant all the same: its keys are those of a tenant.
    - ``generation``: the fleet gave it to the tenant by this purge; 0: it isn't the fleet's. A disk that has
      carried out this very purge before keeps what it has stored since.
    - ``but``: the tenants that stay.
    """

    tenant: str | None
    namespace: Namespace | None = None
    generation: int = 0
    but: frozenset[str] = frozenset()


class Part(NamedTuple):
    """Committed blocks of a sequence, to copy. ``key``: of all of them. ``release``: call it at the end."""

    namespace: Namespace
    key: bytes
    block_ids: BlockIds
    release: Callable[[], None]


class Expected(Protocol):
    """A prompt that will come: announced, or only asked about."""

    @property
    def namespace(self) -> Namespace:
        """Its namespace."""

    @property
    def key(self) -> bytes:
        """Its key; empty after its end."""

    @property
    def resident_tokens(self) -> int:
        """What the cache has of it."""

    @property
    def is_open(self) -> bool:
        """False for ever after it was withdrawn, opened or purged, or its time is over."""


class Target(Protocol):
    """The blocks of one sequence into which a load may write."""

    @property
    def namespace(self) -> Namespace:
        """The sequence's."""

    @property
    def key(self) -> bytes:
        """Of its whole blocks before its last token, when the load began."""

    @property
    def num_committed(self) -> int:
        """Its committed tokens."""

    @property
    def num_tokens(self) -> int:
        """All its tokens."""

    @property
    def is_current(self) -> bool:
        """False for ever after it was released, purged, cut back or given other blocks."""

    def put(self, start: int, stop: int, copy: Callable[[BlockIds], None]) -> bool:
        """Let ``copy`` write blocks ``[start, stop)``, unless that could be wrong. Returns whether it did."""

    def commit(self, num_tokens: int) -> bool:
        """Commit tokens that were put. Returns whether they are committed."""

    def keep(self) -> None:
        """Let ``Below.keep`` copy what is committed."""


class Loading(Protocol):
    """What lies below of one sequence, and its way back. See ``Sequence.loading``. Any thread may use it.

    Either wait, or claim. To ignore it is right too: call nothing of it, and compute everything. What changes the
    sequence's blocks ends it: ``fork``, ``truncate``, ``forget``, ``lend``. What had come by then stays.
    """

    @property
    def num_tokens(self) -> int:
        """Tokens that lay below when the load began, behind the committed ones.

        0 until a disk knows which purges it has to apply, and if it turns out to have nothing.
        """

    @property
    def num_host_tokens(self) -> int:
        """Of these, tokens that lay in host memory. They come first."""

    @property
    def num_loaded_tokens(self) -> int:
        """Tokens that have come so far."""

    @property
    def is_done(self) -> bool:
        """Whether nothing more comes. Reading it changes nothing. Beside ``poll``, ``wait`` and ``claim``, what lies
        below makes it true, if nobody calls them for seconds."""

    def poll(self) -> bool:
        """Take what has come, and commit what continues the committed tokens. Returns ``is_done``. Never waits."""

    def wait(self, timeout_s: float | None = None) -> bool:
        """Poll until nothing more comes, or for ``timeout_s`` seconds. Returns ``is_done``. Raises ArgumentError."""

    def __await__(self) -> Generator[Any, Any, int]:
        """Wait without holding up the event loop. Returns ``num_loaded_tokens``."""

    def claim(self, num_tokens: SupportsIndex) -> int:
        """Poll, then take up to ``num_tokens`` tokens for the engine to compute. Returns the token where they end.

        They begin behind the committed tokens, contain nothing that has been loaded, and nothing is loaded there any
        more. Commit them before the next claim. What was loaded behind them is committed as soon as they are, by the
        next call. After the load it returns what is left to compute, up to all tokens. Raises ArgumentError below 1.
        """

    def cancel(self) -> None:
        """Load nothing more. What has come stays: go on with ``claim``, or compute from the committed tokens on."""


class Below(Protocol):
    """What lies below one cache. No call but ``maintain`` raises what happens there."""

    def keep(self, tenant: str, take: Callable[[], Part | None]) -> None:
        """Take that what ``take`` returns was committed. Called after each commit of whole blocks."""

    @property
    def slice_blocks(self) -> int:
        """The most blocks that are evicted under one hold of the cache's lock, where that is up to the cache."""

    def attached(self, give_all: GiveAll, free_ahead: Callable[[int], None]) -> None:
        """Take what may be asked of the cache, outside of the gate of ``moving``.

        - ``give_all``: passes all that is resident to ``leave``, until its argument is true. For the end.
        - ``free_ahead``: evicts until so many blocks are free, if tenants have as many beyond their guarantees.
        """

    def moving(self) -> AbstractContextManager[None]:
        """Return a context in which blocks may be evicted, so that ``leave`` needs no wait. Enter it without the lock.

        Outside of it ``leave`` may have to give blocks up.
        """

    def let_go(self, block_ids: BlockIds) -> NDArray[np.bool_]:
        """Take that blocks are being evicted, and return which of them ``leave`` is to copy. The cache's lock is held.

        O(1) Python calls.
        """

    def leave(self, namespace: Namespace, key: bytes, start: int, block_ids: BlockIds) -> None:
        """Copy the blocks of a key from block ``start`` on, which are being evicted. The cache's lock is held."""

    def may_have(self, namespace: Namespace, key: bytes) -> bool:
        """Whether the last block of a key may lie below. False if it surely doesn't; fast then."""

    def begin(self, target: Target) -> Loading | None:
        """Begin to load what lies below of a sequence; None if there is nothing."""

    def expect(self, expected: Expected) -> None:
        """Bring near what lies far below of a prompt, before it is opened. O(1); the cache's lock is held."""

    def prefetch(
        self, namespace: Namespace, key: bytes, resident_tokens: Callable[[], int], in_s: float = 0.0
    ) -> None:
        """Bring near what lies far below of a prompt that may come in ``in_s`` seconds. Any thread; never waits.

        ``resident_tokens``: returns what the cache has of it, by any thread and without the lock.
        """

    def forgetting(self, scope: Scope) -> AbstractContextManager[None]:
        """Return a context in which the cache forgets a namespace, or a tenant. After it no tier serves any of it.

        Host memory has nothing of it then. A disk may still have to destroy its keys, and isn't waited for.
        """

    def follow(self, settings: Callable[[], Tenant]) -> None:
        """Follow a tenant's settings, which ``settings`` reads as they are now. Calls come one after the other."""

    def namespaces(self, tenant: str | None) -> list[Namespace]:
        """Return the namespaces that hold something below."""

    def maintain(self) -> None:
        """Let policies below learn. Raises what they raise."""

    def indexes(self) -> Mapping[str, Any]:
        """Return the indexes of tiers, which are caches too, by the names of the tiers. For the audit.

        Nothing of tiers that are closed or can't go on.
        """

    def violations(self, pause: Callable[[], None]) -> Mapping[str, list[tuple[str, str]]]:
        """Return the laws that tiers break now, and where, by the names of the tiers. For the audit.

        It reads memory alone, and waits for requests, but for no disk. ``pause`` is called between slices; it may
        sleep. Nothing of tiers that are closed or can't go on.
        """


def made_for(config: CacheConfig, storage: BlockStorage | None, clock: Clock) -> Below | None:
    """Return what lies below a cache with this configuration, on its clock. Raises ConfigError."""
    if not config.host_blocks:
        return None
    make = getattr(import_module(FACTORY[0]), FACTORY[1])
    return cast("Below", make(config, storage, clock=clock))


def moved(below: Below | None, call: Callable[[], T]) -> T:
    """Make a call that may evict blocks, and takes the cache's lock. See ``Below.moving``."""
    if below is None:
        return call()
    with below.moving():
        return call()


def forgetting(below: Below | None, scope: Scope) -> AbstractContextManager[None]:
    """Return a context in which the cache forgets a namespace, or a tenant."""
    return nullcontext() if below is None else below.forgetting(scope)
