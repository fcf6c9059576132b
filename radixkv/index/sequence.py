"""Sequence: a request's token ids, and the blocks that hold their KV.

A ``Sequence`` is the user's handle of a ``SequenceState`` (``holders``). Each method takes the cache's lock and calls
the function of ``requests`` that does the work. If that is interrupted, the method repairs the cache.
"""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Any, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from radixkv.errors import ArgumentError, IntegrityError, ReentrantCall, wrong_count
from radixkv.index import ahead, device_beams, requests
from radixkv.index.fences import Fence
from radixkv.index.holders import PURGE, RELEASE, SequenceState
from radixkv.index.load_target import keep, loading_of
from radixkv.index.locking import Guard, defer
from radixkv.index.recovery import mend
from radixkv.index.state import CacheState
from radixkv.index.tokens import TOKEN_BYTES, TokenIds, decode, encode, encode_one
from radixkv.index.validation import require_between
from radixkv.uncopied import refuse_copies

if TYPE_CHECKING:
    from radixkv.config import Namespace
    from radixkv.index.below import Loading
    from radixkv.storage.plan import BlockIds, StepPlan

MAX_CHILDREN = 65_536
"""Most children of one fork."""


def append_to(cache: CacheState, sequences: list[SequenceState], ids: TokenIds) -> None:
    """See PrefixCache.append."""
    if len(sequences) == 1 and type(ids) is tuple and len(ids) == 1:
        keys = [encode_one(ids[0])]
    else:
        key = encode(ids)
        if len(key) != len(sequences) * TOKEN_BYTES:
            raise wrong_count("ids", len(key) // TOKEN_BYTES, f"one for each of {len(sequences)} sequences")
        keys = [key[at : at + TOKEN_BYTES] for at in range(0, len(key), TOKEN_BYTES)]
    if cache._below is None:
        _append(cache, sequences, keys)
    else:
        with cache._below.moving():
            _append(cache, sequences, keys)


def _append(cache: CacheState, sequences: list[SequenceState], keys: list[bytes]) -> None:
    unsure = sequences
    with cache._lock:
        try:
            copied = requests.append(cache, sequences, keys)
            if copied and cache._storage is not None:
                unsure = copied  # if a copy fails, only these tails have no KV
                requests.execute_copies(cache)
        except BaseException as error:
            cache._damage.error, cache._lock.broken = error, cache
            mend(cache, error, unsure)
            raise


def _extend(cache: CacheState, state: SequenceState, key: bytes) -> None:
    with cache._lock:
        try:
            requests.extend(cache, state, key)
        except BaseException as error:
            cache._damage.error, cache._lock.broken = error, cache
            mend(cache, error, state)
            raise


def _reserve(cache: CacheState, state: SequenceState, num_tokens: int) -> None:
    with cache._lock:
        try:
            requests.reserve(cache, state, num_tokens)
        except BaseException as error:
            cache._damage.error, cache._lock.broken = error, cache
            mend(cache, error, state)
            raise


def flush(cache: CacheState) -> StepPlan:
    """See PrefixCache.flush."""
    with cache._lock:
        waiting = cache._pool.copies
        try:
            return requests.take_plan(cache)
        except BaseException as error:
            cache._damage.error, cache._lock.broken = error, cache
            cache._pool.copies = waiting
            mend(cache, error)
            raise


def reorder(cache: CacheState, inputs: list[SequenceState], parents: list[int]) -> list[Sequence]:
    """See PrefixCache.reorder. ``parents`` are in range."""
    result: list[SequenceState] = []
    with cache._lock:
        try:
            requests.require_batch(inputs, may_have_room=False)
            result = [requests.fork(cache, inputs[parent]) for parent in parents]
            handles = [Sequence(cache, child) for child in result]
            cache._sequences.update(result)
            for sequence in inputs:
                requests.release(cache, sequence)
            return handles
        except BaseException as error:
            cache._damage.error, cache._lock.broken = error, cache
            mend(cache, error, inputs, result)
            raise


def states_of(cache: CacheState, sequences: list[Any]) -> list[SequenceState]:
    """Return the states of sequences that a user gave. Raises ArgumentError unless all are sequences of the cache."""
    states = []
    for at, sequence in enumerate(sequences):
        if not isinstance(sequence, Sequence) or sequence._cache is not cache:
            raise ArgumentError(f"sequences[{at}]", sequence, "a sequence of this cache")
        states.append(sequence._state)
    return states


class Sequence:
    """A request's token ids and the blocks that hold their KV. Made by ``PrefixCache.open``; use it in a ``with``.

    The KV of the first ``num_cached_tokens`` tokens exist already. The engine computes the rest into the blocks of
    ``block_table`` and then calls ``commit``. It is safe to use from several threads: one call takes effect at a time.

    Every method except ``release`` raises LeaseError after the sequence is released or consumed, StaleGeneration after
    its tenant was purged, and SequenceLent while the device advances it.

    If a sequence is garbage-collected before its release, it gives a ResourceWarning, and the next call of the cache
    releases it.
    """

    __slots__ = ("_cache", "_guard", "_loading", "_state")
    __deletable__ = ("_state",)  # so that compiled code asks whether it is set
    _guard: Guard  # set only by the finaliser

    def __init__(self, cache: CacheState, state: SequenceState) -> None:
        if not isinstance(state, SequenceState):
            raise TypeError("Sequence is made by PrefixCache.open")
        self._cache = cache
        self._state = state
        self._loading: Loading | None = None

    def __del__(self) -> None:
        try:
            state = self._state
        except AttributeError:  # __init__ didn't come to its end
            return
        if state._is_open or (state in self._cache._sequences and not state._is_fenced):
            self._guard = Guard(self._cache, state)

    def __repr__(self) -> str:
        status = "lent" if self.is_lent else "open" if self._state._is_open else "released"
        tenant, tokens = self.namespace.tenant, f"{self.num_tokens} tokens"
        known = f"{self.num_cached_tokens} cached, {self.num_committed_tokens} committed"
        return f"<Sequence of tenant {tenant!r}, {status}: {tokens} in {self.num_blocks} blocks, {known}>"

    # --- properties

    @property
    def namespace(self) -> Namespace:
        """The namespace where the sequence matches and commits."""
        return self._state._tree.namespace

    @property
    def is_open(self) -> bool:
        """False after a release, after the sequence was consumed, or after a purge of its tenant."""
        state = self._state
        return state._is_open or (state.is_lent and state._closed_by != PURGE)

    @property
    def is_lent(self) -> bool:
        """Whether the device advances the sequence. Its other properties then show the state before it was lent."""
        return self._state.is_lent

    @property
    def num_tokens(self) -> int:
        """Tokens that have a place in its blocks: the prompt and everything appended."""
        return self._state.num_tokens

    @property
    def num_cached_tokens(self) -> int:
        """Leading tokens whose KV were found by ``open``. The prefill can skip these."""
        return self._state._num_cached

    @property
    def num_base_tokens(self) -> int:
        """Leading tokens that it reads of another tenant's published base."""
        return len(self._state._tree.head_key) // TOKEN_BYTES

    @property
    def num_ahead_tokens(self) -> int:
        """Tokens after the committed ones whose KV steps of other sequences compute. This one must not compute them."""
        state = self._state
        return max(state.leaned_end - state._num_committed, 0)

    @property
    def num_committed_tokens(self) -> int:
        """Leading tokens whose KV exist."""
        return self._state._num_committed

    @property
    def num_reserved_tokens(self) -> int:
        """Tokens without ids yet that have a place in its blocks, after the others (``reserve``)."""
        return self._state._reserved

    @property
    def num_blocks(self) -> int:
        """Blocks of its block table: ⌈(num_tokens + num_reserved_tokens) ÷ block_size⌉."""
        return self._state.num_blocks

    @property
    def block_table(self) -> BlockIds:
        """Block ids in order, int32 ``[num_blocks]``, read-only. A snapshot: later calls don't change it. O(blocks).

        Raises LeaseError after the sequence is released or consumed, and IntegrityError if the cache is dead, because
        the blocks may have other owners by then. After a purge of its tenant, the sequence keeps its blocks until its
        release. For a lent sequence, see ``is_lent``.
        """
        if not self._state._is_open or self._cache.is_broken:
            with self._cache._lock:
                if not self._state.is_held:
                    requests.require_open(self._state)
        return self._state.block_table

    @property
    def token_ids(self) -> NDArray[np.uint32]:
        """Its ids, uint32 ``[num_tokens]``, read-only. O(tokens) copy."""
        state = self._state
        with self._cache._lock:
            key = state.key_between(0, state._size)
        return decode(key)

    @property
    def loading(self) -> Loading | None:
        """What lies below of it (``CacheConfig.host_blocks``), behind its committed tokens; None if there is nothing.

        With a disk that was just opened, it may turn out that there is nothing: it is done then, with no token.

        The first time, this begins to load it. See ``below.Loading``. Read it before anything is computed. O(tokens).
        """
        if self._loading is None and self._cache._below is not None:
            self._loading = loading_of(self._cache, self._state)
        return self._loading

    # --- changes

    def commit(self, num_tokens: SupportsIndex) -> None:
        """Declare that the KV of the first ``num_tokens`` tokens exist. Their whole blocks become matchable.

        Blocks that another sequence committed first stay private to this sequence until its release. The block table
        never changes. Raises ArgumentError unless ``num_committed_tokens ≤ num_tokens ≤ num_tokens of the sequence``.
        O(nodes passed), independent of what is committed already.
        """
        cache, state = self._cache, self._state
        if cache._below is None:  # the usual case: nothing happens after the lock is released
            _commit(cache, state, num_tokens)
        else:
            before, depth = state._node, state._node.depth
            _commit(cache, state, num_tokens)
            if state._node is not before or before.depth > depth:
                keep(cache, [state])

    def computing(self, num_tokens: SupportsIndex, *, step: SupportsIndex) -> None:
        """Declare that step ``step`` computes the KV of the tokens up to ``num_tokens``.

        Their whole blocks are offered to requests of the same namespace that open with ``ahead=True``. Call it when the
        step is scheduled, and ``PrefixCache.step_done`` or ``step_failed`` when it has ended, whatever became of this
        sequence. ``step``: any number that the engine doesn't reuse while the step runs, from 0 to 2⁶³ − 1.

        Raises ArgumentError for fewer tokens than are committed or computed already, for more than there are, and for
        the step of a block that this sequence leans on, unless ``CacheConfig.writes_before_reads``. O(1).
        """
        cache, state = self._cache, self._state
        step = require_between("step", step, 0, ahead.MAX_STEP)
        num_tokens = require_between("num_tokens", num_tokens, 0, None)
        with cache._lock:
            try:
                ahead.computing(cache, state, num_tokens, step)
            except BaseException as error:
                cache._damage.error, cache._lock.broken = error, cache
                mend(cache, error, state)
                raise

    def append(self, token_id: SupportsIndex) -> None:
        """Append one token id, with a place for its KV: ``PrefixCache.append`` with a batch of one."""
        append_to(self._cache, [self._state], (token_id,))

    def extend(self, ids: TokenIds) -> None:
        """Append ``ids``, with places for their KV. A shared tail block is copied first.

        Raises TokenError, CapacityError, and then changes nothing. O(ids).
        """
        cache, state, key = self._cache, self._state, encode(ids)
        if requests.takes_slices(cache, len(key)):
            with cache._lock:
                requests.require_open(state)
                needed = requests.missing_blocks(cache, state, len(key))
            requests.make_room(cache, needed, state._tree.tenant)
        if cache._below is None:
            _extend(cache, state, key)
        else:
            with cache._below.moving():
                _extend(cache, state, key)

    def reserve(self, num_tokens: SupportsIndex) -> None:
        """Make room for ``num_tokens`` more tokens whose ids come later: look-ahead, drafts, async scheduling.

        Their blocks are in the block table at once, and keep their ids until ``fill`` or ``drop``. A shared tail block
        is copied first. ``append`` and ``extend`` use reserved room before they take more. A commit never covers it.
        While there is room, the sequence can't be forked, reordered or lent. Raises ArgumentError, CapacityError, and
        then changes nothing. O(tokens).
        """
        cache, state = self._cache, self._state
        most = cache._config.num_blocks * cache._block_size
        num_tokens = require_between("num_tokens", num_tokens, 0, most)
        if cache._below is None:
            _reserve(cache, state, num_tokens)
        else:
            with cache._below.moving():
                _reserve(cache, state, num_tokens)

    def fill(self, ids: TokenIds) -> None:
        """Give the ids of the first reserved tokens. They become tokens of the sequence; no block changes.

        Raises TokenError, and ArgumentError for more ids than reserved tokens, and then changes nothing. O(ids).
        """
        cache, state, key = self._cache, self._state, encode(ids)
        with cache._lock:
            try:
                requests.fill(state, key)
            except BaseException as error:
                cache._damage.error, cache._lock.broken = error, cache
                mend(cache, error, state)
                raise

    def drop(self, num_tokens: SupportsIndex | None = None) -> None:
        """Give up the room of the last ``num_tokens`` reserved tokens, or of all. Frees whole blocks.

        Raises ArgumentError, and changes nothing, for more than ``num_reserved_tokens``. O(blocks freed).
        """
        cache, state = self._cache, self._state
        with cache._lock:
            try:
                requests.drop(cache, state, num_tokens)
            except BaseException as error:
                cache._damage.error, cache._lock.broken = error, cache
                mend(cache, error, state)
                raise

    def truncate(self, num_tokens: SupportsIndex) -> None:
        """Roll back to ``num_tokens``, for example after rejected draft tokens. Frees whole blocks and reserved room.

        Only tokens that were never committed can be rolled back. Raises ArgumentError unless ``num_committed_tokens ≤
        num_tokens ≤ num_tokens of the sequence``.
        """
        cache, state = self._cache, self._state
        with cache._lock:
            try:
                requests.truncate(cache, state, num_tokens)
            except BaseException as error:
                cache._damage.error, cache._lock.broken = error, cache
                mend(cache, error, state)
                raise

    def fork(self, num_children: SupportsIndex) -> list[Sequence]:
        """Make ``num_children`` (1 to 65,536) sequences that share every block with this one. This one stays open.

        Copies no block: the first write into a shared tail block copies it. Tokens that were not computed before must
        get the same KV from each that computes them, because it may be resident by then. A ``loading`` brings nothing
        more, neither here nor to the children, because their blocks are shared: fork when it is done. Raises
        ArgumentError, and LeaseError while room is reserved. O(children).
        """
        num_children = require_between("num_children", num_children, 1, MAX_CHILDREN)
        cache, state = self._cache, self._state
        children: list[SequenceState] = []
        with cache._lock:
            try:
                requests.require_open(state)
                requests.require_filled(state)
                children = [requests.fork(cache, state) for _ in range(num_children)]
                handles = [Sequence(cache, child) for child in children]
                cache._sequences.update(children)
                return handles
            except BaseException as error:
                cache._damage.error, cache._lock.broken = error, cache
                mend(cache, error, state, children)
                raise

    def release(self, *, after: Fence | None = None) -> None:
        """Release the lease and free private blocks. Committed blocks stay resident.

        ``after``: keep all of it until this fence is lifted, because a transfer or a kernel still uses the blocks. The
        sequence is over at once. Its blocks stay as they are, also after a clear or a purge, and count for the tenant.

        If the sequence is lent to the device, the cache first takes back all sequences that were lent with it. This
        waits for the device. A second call raises LeaseError. If a finaliser calls this in the middle of a call of the
        same cache, the next call releases the sequence. O(nodes on the path).
        """
        if after is not None and not isinstance(after, Fence):
            raise ArgumentError("after", after, "a Fence, or None")
        try:
            self._release(after)
        except ReentrantCall as error:
            if after is not None:
                raise
            defer(self._cache, self._state, error)

    def _release(self, after: Fence | None) -> None:
        cache, state = self._cache, self._state
        if not state._is_open and (beams := state._lent) is not None:
            cache.require_alive()
            device_beams.take_back(cache, beams)
        with cache._lock:
            try:
                if not state._is_open:
                    if state._closed_by != PURGE:
                        requests.require_open(state)
                    state._closed_by = RELEASE
                if after is None:
                    requests.release(cache, state)
                else:
                    requests.release_after(cache, state, after)
            except BaseException as error:
                cache._damage.error, cache._lock.broken = error, cache
                mend(cache, error, state)
                raise

    def recount(
        self, requests: SupportsIndex, hit_tokens: SupportsIndex, missed_tokens: SupportsIndex
    ) -> None:
        """Count the request otherwise in the tenant's statistics than its opening did: 1, what was found, and the rest.

        For an engine that loads a part from a tier below, computes only a part because the request ends, or opens one
        request several times. Also after the release. Without effect once the tenant was removed.
        """
        counts = [
            require_between(name, value, 0, None)
            for name, value in (
                ("requests", requests),
                ("hit_tokens", hit_tokens),
                ("missed_tokens", missed_tokens),
            )
        ]
        state = self._state
        if not self._cache.is_dead:
            with self._cache._lock:
                tenant = state._tree.tenant
                state._counted = tenant.recount(state._counted, counts[0], counts[1], counts[2])

    def __enter__(self) -> Sequence:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._state.is_held and not self._cache.is_dead:
            try:
                self.release()
            except IntegrityError:
                if error is None or not self._cache.is_dead:
                    raise  # otherwise the error that ended the block propagates


refuse_copies(Sequence, "it holds blocks, and a copy would release them twice. Pass it on, or fork() it")


def _commit(cache: CacheState, state: SequenceState, num_tokens: SupportsIndex) -> None:
    with cache._lock:
        try:
            requests.commit(cache, state, num_tokens)
        except BaseException as error:
            cache._damage.error, cache._lock.broken = error, cache
            mend(cache, error, state)
            raise
