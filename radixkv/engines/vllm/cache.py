"""The cache of vLLM's scheduler, without vLLM: requests by id, in PrefixCache's terms.

    vLLM's scheduler asks                 here
    which blocks are computed             lookup      also blocks that an unfinished step computes
    slots for the tokens of a step        allocate    opens a sequence, extends it, reserves room for unknown ids
    loads into blocks failed              lose        before end_step: nothing of them is ever matched
    a step is over                        end_step    commits its blocks, which vLLM's own manager did before the step
    tokens of which the ids are known now commit
    the request ends, or is preempted     release     at once, or behind a fence

``radixkv.engines.vllm.manager`` is the shell that vLLM loads. Block 0 is vLLM's null block and never handed out.

Most steps compute one more token of a request, in a block that it has. Such a step is only noted (``goes_on``): nobody
but the request can see a token before its block is whole. What was noted is made up for at the next block, at the
request's end, and before failed loads are looked at.

Tokens of a request may have no ids yet: drafts, look-ahead, and samples of a step that isn't over. Their room is
reserved, so the ids of blocks that the worker knows never change. What vLLM schedules is computed by the step in which
it is scheduled, and vLLM writes all KV of a layer before it reads any. So requests of one step share a prompt.

A KV connector may load tokens in a step, or beside the steps. Such a load may fail. So loaded tokens, and what is
computed behind them, are offered to no other request until their step is over, and committed only if no load failed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from hashlib import sha256
from threading import Lock
from typing import Final

from radixkv._compiled import mypyc_attr
from radixkv.config import CacheConfig, Namespace, Tenant
from radixkv.errors import (
    AnnouncementLimitExceeded,
    ArgumentError,
    CapacityError,
    ConfigError,
    LeaseError,
    StaleGeneration,
)
from radixkv.index.announcements import Announcement
from radixkv.index.cache import PrefixCache
from radixkv.index.fences import Fence
from radixkv.index.leases import Lease
from radixkv.index.sequence import Sequence as Held
from radixkv.index.tails import drop, find, keep
from radixkv.index.tokens import TAIL_FILL, TOKEN_BYTES
from radixkv.tenancy.request_keys import RequestFacts, RequestKey, RequestKeys
from radixkv.tenancy.salt import SaltReader
from radixkv.uncopied import refuse_copies

NULL_BLOCK: Final = 0


class _Request(RequestKey):
    """A request that vLLM has named.

    - ``num_told``: how many of its blocks vLLM knows.
    - ``num_computing``: up to which token steps compute it.
    - ``num_given``: tokens at its first lookup.
    - ``has_looked``: whether it was looked up.
    - ``copied``: the key, to its end, of the block whose first rows it found. ``copies``: False once that had no room.
    - ``ids``: all its ids, as last given. ``room``: tokens for which it has blocks. ``block_end``: the first token that
      ends a block which isn't offered yet; 0 while its steps can't be noted.
    - ``noted``: the steps that were only noted, and up to which token each computes; 0 for a step that has ended.
    - ``num_most_blocks``: the most blocks that it may come to have; 0 if its tenant has no limit.
    - ``num_unverified``: running steps that load its tokens, or compute behind loaded ones. Steps before ``valid_from``
      don't count: a load failed.
    """

    __slots__ = (
        "block_end",
        "copied",
        "copies",
        "has_looked",
        "ids",
        "noted",
        "num_computing",
        "num_given",
        "num_most_blocks",
        "num_told",
        "num_unverified",
        "room",
        "sequence",
        "valid_from",
    )

    def __init__(self, namespace: Namespace, facts: RequestFacts, block_size: int) -> None:
        super().__init__(namespace, facts, block_size)
        self.num_computing = self.num_given = self.num_told = self.num_unverified = self.valid_from = 0
        self.num_most_blocks = self.room = self.block_end = 0
        self.ids: Sequence[int] = ()
        self.noted: list[tuple[int, int]] = []
        self.sequence: Held | None = None
        self.copied, self.copies, self.has_looked = b"", True, False


class Copied:
    """The source of a copy, the block ``block_id``, which nobody may evict before ``lift``."""

    __slots__ = ("_lease", "block_id")

    def __init__(self, lease: Lease) -> None:
        self._lease, self.block_id = lease, int(lease.block_ids[-1])

    def lift(self) -> None:
        """Let the source be evicted."""
        if self._lease.is_open:
            self._lease.release()


@mypyc_attr(allow_interpreted_subclasses=True)
class VllmCache:
    """One pool of ``num_blocks`` blocks of ``block_size`` tokens, for requests of at most ``max_model_len`` tokens.

    - ``model``: identity of model and tokenizer, for the namespaces.
    - ``salts``: reads whose request it is. None: all requests are of one tenant, by their salts in namespaces.
    - ``policy``: the eviction policy.
    - ``scrub``: whether blocks that change tenant are named by ``take_blocks_to_zero``.
    - ``copies``: whether the engine copies blocks before a step (``take_copies``). Then a request also finds tokens in
      the middle of a block, such as a beam of the last step, and gets a copy of them.

    ``weights`` is the version of the model's weights, in the namespaces of requests that begin now.

    Raises ConfigError. One thread uses it at a time, except for what the control channel does with ``cache``.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        max_model_len: int,
        *,
        model: str,
        salts: SaltReader | None = None,
        policy: str = "learned",
        scrub: bool = False,
        copies: bool = False,
        make: Callable[..., PrefixCache] = PrefixCache,
    ) -> None:
        if num_blocks < 2:
            raise ConfigError("num_blocks", num_blocks, "at least 2: one is vLLM's null block")
        config = CacheConfig(
            num_blocks,
            block_size,
            policy=policy,
            default_tenant=Tenant("default"),
            writes_before_reads=True,
        )
        self._to_zero: dict[int, None] = {}
        self._zeroing, self._scrubs = Lock(), scrub
        self._has_copies, self._copies = copies, dict[str, tuple[int, int, Copied]]()
        self.cache = make(config, scrub_blocks=self._note_to_zero if scrub else None)
        every = self.cache.allocate(num_blocks)
        self.cache.free(every[every != NULL_BLOCK])
        self._size, self._max_model_len = block_size, max_model_len
        self._keys = RequestKeys(model, salts)
        self.weights = 0
        self._num_blocks = num_blocks - 1
        self._requests: dict[str, _Request] = {}
        self._may_be_stale = False
        self._most_blocks: Counter[str] = Counter()
        self._pinned_blocks: dict[str, int] = {}
        self._step = self._ended = 0
        self._computing: set[int] = set()
        self._unverified: dict[int, list[tuple[_Request, int]]] = {}

    @property
    def block_size(self) -> int:
        """Tokens a block."""
        return self._size

    @property
    def num_refused_salts(self) -> int:
        """Requests that got no cache because their salt or adapter was refused."""
        return self._keys.num_refused

    def refuses(self, cache_salt: str | None) -> bool:
        """Whether only requests with a valid salt are served, and this one isn't."""
        return self._keys.refuses(cache_salt)

    # --- requests

    def knows(self, request_id: str) -> bool:
        """Whether a request was named already. Its facts are not read again, until its release."""
        return request_id in self._requests

    def lookup(self, request_id: str, facts: RequestFacts, ids: Sequence[int]) -> tuple[list[int], int]:
        """Return the blocks that are resident, and how many tokens are found: also those that a running step computes.

        Always less than all of ``ids``: the last token is computed for its logits. With copies the last block may be
        found in part.
        """
        request = self._request(request_id, facts, ids)
        request.has_looked = True
        if request.facts.is_private or not request.facts.looks_up or len(ids) < 2:
            return [], 0
        key = bytes(request.key)
        found = find(self.cache, request.namespace, key, self._has_copies and request.copies)
        request.copied = key[: found.num_tokens * TOKEN_BYTES] + found.tail_key if found.num_rows else b""
        return found.block_ids.tolist(), found.num_tokens + found.num_rows

    def announce(
        self, request_id: str, facts: RequestFacts, ids: Sequence[int], *, ttl_s: float
    ) -> tuple[str, Announcement | None, float]:
        """Announce a request that waits. Returns its tenant, its announcement, and its share that isn't resident.

        None without an announcement: it finds nothing in the cache, or its tenant has announced too many.
        """
        request = self._request(request_id, facts, ids)
        tenant = request.namespace.tenant
        if request.facts.is_private or not request.facts.looks_up:
            return tenant, None, 1.0
        key = bytes(request.key)
        try:
            announcement = self.cache.announce(request.namespace, key, request.hints, ttl_s=ttl_s)
        except AnnouncementLimitExceeded:
            return tenant, None, 1.0 - self.cache.match(request.namespace, key).num_tokens / max(len(ids), 1)
        return tenant, announcement, announcement.missing

    def fits_its_tenant(
        self, request_id: str, facts: RequestFacts, ids: Sequence[int], num_lookahead: int = 0
    ) -> bool | None:
        """Return whether a request can begin, and run to its end, within its tenant's limit. None: it never can.

        The tenant's running requests are taken at the most tokens that they may come to have. So none of them meets the
        limit later, where vLLM would preempt requests of others to make room. O(1) but for a tenant's first call of a
        step: O(its namespaces).
        """
        request = self._request(request_id, facts, ids)
        tenant = request.namespace.tenant
        settings = self.cache.tenant(tenant)
        limit = None if settings is None else settings.limit
        if limit is None or request.sequence is not None:
            return True
        most = max(request.facts.num_most, len(ids)) + num_lookahead
        request.num_most_blocks = self._blocks_of(min(most, self._max_model_len))
        if request.num_most_blocks > limit:
            return None
        request.copies = False  # a copy holds one more block
        if tenant not in self._pinned_blocks:
            self._pinned_blocks[tenant] = self.cache.tenant_stats(tenant).pinned_blocks
        left = limit - self._most_blocks[tenant] - request.num_most_blocks
        if left >= (pinned := self._pinned_blocks[tenant]) or left < 0:
            return left >= 0
        return left >= pinned - self.cache.match(request.namespace, bytes(request.key)).num_blocks

    def goes_on(self, request_id: str, ids: Sequence[int], end: int, num_lookahead: int = 0) -> bool:
        """Note that the present step computes a running request up to token ``end``, if it has blocks for them.

        True: ``allocate`` would return no block, and needn't be called. False: call it. ``ids``: all known ids; the
        cache reads them later, so the list must stay the request's own. O(1), without a lock.
        """
        request = self._requests.get(request_id)
        if request is None or end + num_lookahead > request.room or end > self._max_model_len:
            return False
        if (known := len(ids)) > end:
            known = end
        if known >= request.block_end or not request.sequence.is_open:  # type: ignore[union-attr]
            return False
        request.ids = ids
        request.noted.append((self._step, known))
        return True

    def allocate(
        self,
        request_id: str,
        facts: RequestFacts,
        ids: Sequence[int],
        num_computed: int,
        num_new: int,
        *,
        num_lookahead: int = 0,
        num_rows: int = 0,
        must_fit: bool = False,
        spare_blocks: int = 0,
        reserved_blocks: int = 0,
        num_loaded: int = 0,
        is_beside: bool = False,
    ) -> list[int] | None:
        """Return the new blocks that a step needs, which computes ``num_new`` tokens; None if there are too few.

        - ``ids``: all known ids. ``num_computed``: before the step, with what ``lookup`` told and ``num_loaded``.
        - ``num_lookahead``: further tokens without ids.
        - ``num_rows``: the last tokens of ``num_computed``, if ``lookup`` found a block in part: they are copied.
        - ``must_fit``: whether the blocks of all ``ids`` must be free now.
        - ``spare_blocks``: blocks that must stay free. ``reserved_blocks``: further ones, but not for ``must_fit``.
        - ``num_loaded``: tokens that a KV connector loads. ``is_beside``: beside the steps; ``commit`` follows.

        None also for a request whose tenant is purged at this moment: see ``take_stale``.
        """
        request = self._request(request_id, facts, ids)
        try:
            self._settle(request)
            end = min(num_computed + num_new, self._max_model_len)
            needed = min(end + num_lookahead, self._max_model_len)
            num_blocks = self._blocks_of(needed) + spare_blocks + reserved_blocks
            if must_fit:
                full = self._blocks_of(min(len(ids), self._max_model_len))
                num_blocks = max(num_blocks, full + spare_blocks)
            is_gated = must_fit or spare_blocks + reserved_blocks > 0
            local = min(num_computed, self._max_model_len) - num_loaded
            known = min(needed, len(ids))
            sequence = self._hold(request_id, request, known, needed, local, num_rows, num_blocks, is_gated)
        except StaleGeneration:
            self._may_be_stale = True
            return None
        if sequence is None:
            return None
        if not is_beside:
            self._computes(request, sequence, min(end, known), num_loaded > 0)
        told, request.num_told = request.num_told, sequence.num_blocks
        request.room, request.block_end = request.num_told * self._size, 0
        if request.facts.is_private:
            request.block_end = self._max_model_len + 1
        elif not request.num_unverified and not is_beside:
            request.block_end = (self._num_offered(request, sequence) // self._size + 1) * self._size
        if told == request.num_told:
            return []
        found: list[int] = sequence.block_table[told:].tolist()
        return found

    def _settle(self, request: _Request) -> None:
        """Make up for steps that were only noted. Raises StaleGeneration."""
        sequence, noted = request.sequence, request.noted
        if not noted or sequence is None:
            return
        request.noted, request.block_end = [], 0
        request.read(request.ids)
        if request.facts.is_private:
            return
        known = max(end for _, end in noted)
        if known > sequence.num_tokens:
            sequence.extend(request.between(sequence.num_tokens, known))
        self._commit_to(sequence, max((end for step, end in noted if step <= self._ended), default=0))
        for step, end in noted:
            if step > self._ended:
                self._computes_in(step, request, sequence, end)

    def _hold(
        self,
        request_id: str,
        request: _Request,
        known: int,
        needed: int,
        num_local: int,
        num_rows: int,
        num_blocks: int,
        is_gated: bool,
    ) -> Held | None:
        """Return the request's sequence with room for ``needed`` tokens, ``known`` of them with ids. None: too few.

        ``num_blocks``: of the whole request, with those that must stay free, looked at if it is new or ``is_gated``.
        """
        sequence, is_new = request.sequence, request.sequence is None
        source: Copied | None = None
        try:
            if sequence is None:
                source = self._source(request) if num_rows else None
                if source is not None or not num_rows:
                    sequence = self._open(request, known, num_local - num_rows, num_blocks)
            elif is_gated and num_blocks - sequence.num_blocks > self.num_available:
                return None
            elif known > sequence.num_tokens:
                sequence.extend(request.between(sequence.num_tokens, known))
            if sequence is not None:
                room = needed - sequence.num_tokens - sequence.num_reserved_tokens
                if room > 0:
                    sequence.reserve(room)
        except (CapacityError, StaleGeneration) as error:
            if is_new and sequence is not None:
                sequence.release()
            if isinstance(error, StaleGeneration):
                if source is not None:
                    source.lift()
                raise
            sequence = None
        if sequence is None:
            if num_rows:  # without the copy there may be room
                request.copies = False
            if source is not None:
                source.lift()
            return None
        if source is not None:
            target = int(sequence.block_table[num_local // self._size])
            self._copies[request_id] = (source.block_id, target, source)
        if is_new:
            request.sequence, request.num_told, request.num_computing = sequence, num_local // self._size, 0
            if request.num_most_blocks:
                self._most_blocks[request.namespace.tenant] += request.num_most_blocks
        return sequence

    def _blocks_of(self, num_tokens: int) -> int:
        return -(-num_tokens // self._size)

    def _source(self, request: _Request) -> Copied | None:
        """Lease the block that ``lookup`` found in part. None if it is gone, or can't be protected."""
        key = request.copied
        try:
            lease = self.cache.match_and_lease(request.namespace, key)
        except CapacityError:
            return None
        if key and lease.num_tokens * TOKEN_BYTES == len(key):
            return Copied(lease)
        lease.release()
        return None

    def _open(self, request: _Request, known: int, num_local: int, num_blocks: int) -> Held | None:
        """Open the request's sequence if it finds what was told, and if there is room. None otherwise."""
        cache, facts, hints = self.cache, request.facts, request.hints
        if num_blocks - num_local // self._size > self.num_available:
            return None
        if num_local and not request.has_looked:
            # The engine says that tokens are computed which nobody has looked up. So nobody else may find them.
            request.facts = replace(facts, is_private=True)
            return cache.open(request.namespace, request.between(0, known), lookup=False)
        looks_up = facts.looks_up and not facts.is_private
        key = request.between(0, known)
        sequence = cache.open(request.namespace, key, hints=hints, lookup=looks_up, ahead=looks_up)
        found = sequence.num_cached_tokens + sequence.num_ahead_tokens
        if found > num_local == 0:
            # It finds more than was told, such as a base. Telling it again would change nothing.
            sequence.release()
            sequence, found = cache.open(request.namespace, key, hints=hints, lookup=False), 0
        if found != num_local or num_blocks - sequence.num_blocks > self.num_available:
            sequence.release()
            return None
        return sequence

    def _computes(self, request: _Request, sequence: Held, end: int, loads: bool) -> None:
        """Note that the present step computes or loads the tokens up to ``end``, of which the ids are known."""
        if request.facts.is_private:
            return
        if not loads and not request.num_unverified:
            self._computes_in(self._step, request, sequence, end)
        elif end > self._num_offered(request, sequence):
            self._unverified.setdefault(self._step, []).append((request, end))
            request.num_unverified += 1

    def _computes_in(self, step: int, request: _Request, sequence: Held, end: int) -> None:
        if end > self._num_offered(request, sequence):
            sequence.computing(end, step=step)
            self._computing.add(step)
            request.num_computing = end

    def _num_offered(self, request: _Request, sequence: Held) -> int:
        """Return up to which token the KV exist, or are computed by running steps."""
        return max(sequence.num_committed_tokens + sequence.num_ahead_tokens, request.num_computing)

    def commit(self, request_id: str, ids: Sequence[int], num_tokens: int) -> None:
        """Note that the KV of the first ``num_tokens`` tokens exist; their ids are known now."""
        request = self._requests.get(request_id)
        if request is None or request.sequence is None or request.facts.is_private:
            return
        if num_tokens < request.block_end and num_tokens <= request.room:  # it completes no block: note it
            request.ids = ids
            request.noted.append((0, num_tokens))
            return
        try:
            self._settle(request)
            request.read(ids)
            self._commit(request, request.sequence, ids, num_tokens)
        except StaleGeneration:
            self._may_be_stale = True

    def _commit(self, request: _Request, sequence: Held, ids: Sequence[int], num_tokens: int) -> None:
        known = min(len(ids), sequence.num_tokens + sequence.num_reserved_tokens)
        if known > sequence.num_tokens:
            sequence.fill(request.between(sequence.num_tokens, known))
        self._commit_to(sequence, num_tokens)

    def _commit_to(self, sequence: Held, num_tokens: int) -> None:
        try:
            if (num_tokens := min(num_tokens, sequence.num_tokens)) > sequence.num_committed_tokens:
                sequence.commit(num_tokens)
        except StaleGeneration:
            self._may_be_stale = True

    def blocks(self, request_id: str) -> list[int]:
        """Return all blocks of a request that vLLM knows."""
        request = self._requests.get(request_id)
        if request is None or request.sequence is None:
            return []
        found: list[int] = request.sequence.block_table[: request.num_told].tolist()
        return found

    def holders(self) -> list[str]:
        """Return the requests that hold blocks. O(requests)."""
        return [name for name, request in self._requests.items() if request.sequence is not None]

    def block_names(self, request_id: str) -> list[bytes | None]:
        """Return a name for each block of ``blocks``; None for those that no other request may find.

        Others find blocks that are computed, and those that a running step computes. Blocks of the same name hold the
        same KV. O(tokens).
        """
        request = self._requests.get(request_id)
        if request is None or request.sequence is None:
            return []
        size = self._size
        num_offered = 0 if request.facts.is_private else self._num_offered(request, request.sequence) // size
        digest, names = sha256(repr(request.namespace).encode()), list[bytes | None]()
        for at in range(min(num_offered, request.num_told)):
            digest.update(request.between(at * size, at * size + size))
            names.append(digest.digest())
        return names + [None] * (request.num_told - len(names))

    def num_committed(self, request_id: str) -> int:
        """Return how many tokens of a request are in whole blocks that others may find."""
        request = self._requests.get(request_id)
        if request is None or request.sequence is None:
            return 0
        return request.sequence.num_committed_tokens // self._size * self._size

    def release(self, request_id: str, after: Fence | None = None) -> None:
        """Release a request's blocks: it ended, or it is preempted."""
        request = self._requests.pop(request_id, None)
        if request is None or request.sequence is None:
            return
        if (copy := self._copies.pop(request_id, None)) is not None:
            copy[2].lift()
        replaced = b""
        if self._has_copies and not request.facts.is_private:
            self._settle_any(request)
            replaced = self._keep_tail(request, request.sequence)
        sequence, request.sequence = request.sequence, None
        if request.num_most_blocks:
            self._most_blocks[request.namespace.tenant] -= request.num_most_blocks
        sequence.release(after=after)
        if replaced:
            drop(self.cache, request.namespace, replaced)

    def _settle_any(self, request: _Request) -> None:
        """Make up for noted steps, unless the request's tenant was purged."""
        try:
            self._settle(request)
        except StaleGeneration:
            self._may_be_stale = True

    def _keep_tail(self, request: _Request, sequence: Held) -> bytes:
        """Keep what the request has computed of its last block, for requests that go on from there.

        A tail takes a block from others. So it is kept for a request that computed its prompt alone, as a beam's step
        does, and for any while half of the blocks are free.

        Returns the key of a tail that nobody needs any more: the request has copied it, and leaves its tokens and more.
        """
        committed, copied = sequence.num_committed_tokens, request.copied
        if committed != request.num_given and 2 * self.cache.free_blocks < self._num_blocks:
            return b""
        try:
            keep(self.cache, sequence)
        except LeaseError:  # purged
            return b""
        if not copied.endswith(TAIL_FILL):
            return b""
        end = copied.index(TAIL_FILL)
        return copied if committed * TOKEN_BYTES > end and request.key.startswith(copied[:end]) else b""

    # --- purges

    def purged(self) -> None:
        """Note that a tenant was purged, or is about to be. From any thread."""
        self._may_be_stale = True

    def take_stale(self) -> list[str]:
        """Return the requests that lost their tenant's generation since the last call.

        They hold their blocks, but can't go on: ``release`` them, and compute them anew.
        """
        if not self._may_be_stale:
            return []
        self._may_be_stale = False
        return [
            request_id
            for request_id, request in self._requests.items()
            if request.sequence is not None and not request.sequence.is_open
        ]

    # --- steps

    def begin_step(self) -> int:
        """Begin the next step. Returns its number, for ``end_step``."""
        self._step += 1
        self._pinned_blocks.clear()
        return self._step

    def end_step(self, step: int) -> None:
        """Commit what a step computed, after its output has come."""
        self._ended = step
        if step in self._computing:
            self._computing.remove(step)
            self.cache.step_done(step)
        for request, end in self._unverified.pop(step, ()):
            request.num_unverified -= 1
            if request.sequence is not None and step >= request.valid_from:
                self._commit_to(request.sequence, end)

    def lose(self, block_ids: Iterable[int]) -> list[str]:
        """Note that loads into these blocks failed. Call it before ``end_step`` of the step that said so.

        What running steps compute behind them is not committed. Returns the requests that had committed such blocks
        already, because the failure came late: their blocks are forgotten. ``release`` them, and compute them anew.

        O(blocks of all requests).
        """
        wrong, late = set(block_ids), []
        for request_id, request in self._requests.items():
            sequence = request.sequence
            if sequence is None:
                continue
            table = sequence.block_table.tolist()
            if wrong.isdisjoint(table):
                continue
            self._settle_any(request)
            request.valid_from = self._step + 1
            start = min(table.index(each) for each in wrong if each in table) * self._size
            if sequence.num_committed_tokens > start:
                late.append((request_id, sequence, start))
        for _, sequence, start in late:
            self._forget(sequence, start)
        return [request_id for request_id, _, _ in late]

    def _forget(self, sequence: Held, start: int) -> None:
        """Forget KV from token ``start`` on. If running steps or forks hold them, the whole namespace."""
        try:
            self.cache.forget(sequence, start)
        except (StaleGeneration, CapacityError, LeaseError, ArgumentError):
            self.cache.clear(sequence.namespace)

    # --- the whole cache

    @property
    def usage(self) -> float:
        """The share of blocks that requests hold, from 0 to 1."""
        return 1 - self.num_available / self._num_blocks

    @property
    def num_available(self) -> int:
        """Blocks that requests can get: free ones, and those that can be evicted. O(1)."""
        return self.cache.free_blocks + self.cache.evictable_blocks

    @property
    def has_requests(self) -> bool:
        """Whether a request holds blocks."""
        return any(request.sequence is not None for request in self._requests.values())

    def reset(self) -> bool:
        """Forget everything, unless a request holds blocks. Returns whether it was done."""
        if self.has_requests:
            return False
        self._forget_all()
        return True

    def _forget_all(self) -> None:
        for namespace in self.cache.namespaces():
            self.cache.clear(namespace)

    def weights_change(self) -> None:
        """Begin the next version of the weights. What was computed so far, or in steps that run, is found no more.

        Requests that run go on with the KV that they have, as in vLLM, and leave nothing. O(namespaces + requests).
        """
        self.weights += 1
        self._requests = {
            request_id: request
            for request_id, request in self._requests.items()
            if request.sequence is not None
        }
        self._forget_all()

    def take_blocks_to_zero(self) -> list[int]:
        """Return the blocks that changed tenant since the last call, each once: zero them before the step.

        The worker must zero them behind the steps that run already: one of these may still write for the last owner.
        """
        if not self._to_zero:
            return []
        with self._zeroing:
            taken, self._to_zero = self._to_zero, {}
        return list(taken)

    def take_copies(self) -> list[tuple[int, int, Copied]]:
        """Return the copies of this step as ``(source, target, source's hold)``. They run before it computes."""
        taken, self._copies = self._copies, {}
        return list(taken.values())

    def leave_unzeroed(self, block_ids: Iterable[int]) -> None:
        """Don't name these blocks: a load that runs beside the step writes them. If it fails, ``zero_from`` does."""
        with self._zeroing:
            for each in block_ids:
                self._to_zero.pop(each, None)

    def zero_from(self, request_id: str, start_token: int) -> None:
        """Name the blocks of a request from ``start_token`` on, a multiple of the block size, to be zeroed."""
        if self._scrubs:
            self._note_to_zero(self.blocks(request_id)[start_token // self._size :])

    def _note_to_zero(self, block_ids: Iterable[int]) -> None:
        """Called under the cache's lock, by any thread."""
        with self._zeroing:
            self._to_zero.update(dict.fromkeys(map(int, block_ids)))

    def _request(self, request_id: str, facts: RequestFacts, ids: Sequence[int]) -> _Request:
        request = self._requests.get(request_id)
        if request is None:
            request = self._requests[request_id] = _Request(*self._keys.read(facts, self.weights), self._size)
            request.num_given = len(ids)
        request.read(ids)
        return request


refuse_copies(VllmCache, "it holds the sequences of a cache. Make another")
