"""The cache of vLLM's scheduler, without vLLM: requests by id, in PrefixCache's terms.

    vLLM's scheduler asks                 here
    which blocks are computed             lookup      also blocks that an unfinished step computes
    slots for the tokens of a step        allocate    opens a sequence, extends it, reserves room for unknown ids
    a step is over                        end_step    commits its blocks, which vLLM's own manager did before the step
    tokens of which the ids are known now commit
    the request ends, or is preempted     release     at once, or behind a fence

``radixkv.engines.vllm`` is the shell that vLLM loads. Block 0 is vLLM's null block and never handed out.

Tokens of a request may have no ids yet: drafts, look-ahead, and samples of a step that isn't over. Their room is
reserved, so the ids of blocks that the worker knows never change. What vLLM schedules is computed by the step in which
it is scheduled, and vLLM writes all KV of a layer before it reads any. So requests of one step share a prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any, Final

from radixkv.config import CacheConfig, Namespace, Tenant
from radixkv.engines.salt import SaltOwner, SaltReader
from radixkv.errors import ArgumentError, CapacityError, ConfigError, NamespaceError, SaltError, TokenError
from radixkv.index.cache import PrefixCache
from radixkv.index.fences import Fence
from radixkv.index.key_material import Material, key_of
from radixkv.index.sequence import Sequence as Held
from radixkv.index.tokens import TOKEN_BYTES, encode
from radixkv.signing import is_text

NULL_BLOCK: Final = 0


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """What a request's KV depend on, beside its ids.

    - ``cache_salt``: decides whose request it is (``SaltReader``).
    - ``adapter``: name of the LoRA adapter.
    - ``material``: ``(offset, length, identifier)`` of each image or sound in the prompt.
    - ``looks_up``: False for a request that needs the logits of all its tokens.
    - ``is_private``: True if its KV depend on something that no key covers, such as prompt embeddings. It finds nothing
      and leaves nothing.
    """

    cache_salt: str | None = None
    adapter: str | None = None
    material: tuple[tuple[int, int, str], ...] = ()
    looks_up: bool = True
    is_private: bool = False


class _Request:
    """A request that vLLM has named.

    ``num_told``: how many of its blocks vLLM knows. ``num_computing``: tokens up to which steps compute it.
    """

    __slots__ = ("facts", "key", "namespace", "num_computing", "num_keyed", "num_told", "sequence")

    def __init__(self, namespace: Namespace, facts: RequestFacts) -> None:
        self.namespace, self.facts = namespace, facts
        self.key = bytearray()
        self.num_computing = self.num_keyed = self.num_told = 0
        self.sequence: Held | None = None


class VllmCache:
    """One pool of ``num_blocks`` blocks of ``block_size`` tokens, for requests of at most ``max_model_len`` tokens.

    - ``model``: identity of model and tokenizer, for the namespaces.
    - ``salts``: reads whose request it is. None: all requests are of one tenant, by their salts in namespaces.
    - ``policy``: the eviction policy.
    - ``scrub``: whether blocks that change tenant are named by ``take_blocks_to_zero``.

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
        self._to_zero: list[int] = []
        self.cache = make(config, scrub_blocks=self._note_to_zero if scrub else None)
        every = self.cache.allocate(num_blocks)
        self.cache.free(every[every != NULL_BLOCK])
        self._size, self._max_model_len, self._model, self._salts = block_size, max_model_len, model, salts
        self._num_blocks = num_blocks - 1
        self._requests: dict[str, _Request] = {}
        self._step = self.num_refused_salts = 0

    # --- requests

    def knows(self, request_id: str) -> bool:
        """Whether a request was named already. Its facts are not read again, until its release."""
        return request_id in self._requests

    def lookup(self, request_id: str, facts: RequestFacts, ids: Sequence[int]) -> tuple[list[int], int]:
        """Return the blocks that are resident, and how many tokens are found: also those that a running step computes.

        Always less than all of ``ids``: the last token is computed for its logits.
        """
        request = self._request(request_id, facts, ids)
        if request.facts.is_private or not request.facts.looks_up or len(ids) < 2:
            return [], 0
        key = bytes(request.key)
        num_found = self.cache.match_ahead(request.namespace, key)
        match = self.cache.match(request.namespace, key[: num_found * TOKEN_BYTES])
        return match.block_ids.tolist(), num_found

    def allocate(
        self,
        request_id: str,
        facts: RequestFacts,
        ids: Sequence[int],
        num_computed: int,
        num_new: int,
        *,
        num_lookahead: int = 0,
        must_fit: bool = False,
        spare_blocks: int = 0,
    ) -> list[int] | None:
        """Return the new blocks that a step needs, which computes ``num_new`` tokens; None if there are too few.

        - ``ids``: all known ids. ``num_computed``: tokens before the step, with what ``lookup`` told.
        - ``num_lookahead``: further tokens without ids.
        - ``must_fit``: whether the blocks of all ``ids`` must be free now.
        - ``spare_blocks``: blocks that must stay free.
        """
        request = self._request(request_id, facts, ids)
        num_computed = min(num_computed, self._max_model_len)
        end = min(num_computed + num_new, self._max_model_len)
        needed = min(end + num_lookahead, self._max_model_len)
        known = min(needed, len(ids))
        sequence, is_new = request.sequence, request.sequence is None
        try:
            if sequence is None:
                sequence = self._open(
                    request, known, num_computed, len(ids) if must_fit else known, spare_blocks
                )
                if sequence is None:
                    return None
            elif known > sequence.num_tokens:
                sequence.extend(self._ids(request, sequence.num_tokens, known))
            if (room := needed - sequence.num_tokens - sequence.num_reserved_tokens) > 0:
                sequence.reserve(room)
        except CapacityError:
            if is_new and sequence is not None:
                sequence.release()
            return None
        if is_new:
            request.sequence, request.num_told, request.num_computing = (
                sequence,
                num_computed // self._size,
                0,
            )
        self._computes(request, sequence, min(end, known))
        told, request.num_told = request.num_told, sequence.num_blocks
        found: list[int] = sequence.block_table[told:].tolist()
        return found

    def _open(
        self, request: _Request, known: int, num_computed: int, num_fit: int, spare_blocks: int
    ) -> Held | None:
        """Open the request's sequence if it finds what was told, and if there is room. None otherwise."""
        cache, facts = self.cache, request.facts
        needed = -(-num_fit // self._size) - num_computed // self._size + spare_blocks
        if needed > cache.free_blocks + cache.evictable_blocks:
            return None
        looks_up = facts.looks_up and not facts.is_private
        key = self._ids(request, 0, known)
        sequence = cache.open(request.namespace, key, lookup=looks_up, ahead=looks_up)
        rest = -(-num_fit // self._size) - sequence.num_blocks + spare_blocks
        found = sequence.num_cached_tokens + sequence.num_ahead_tokens
        if found != num_computed or rest > cache.free_blocks + cache.evictable_blocks:
            sequence.release()
            return None
        return sequence

    def _computes(self, request: _Request, sequence: Held, end: int) -> None:
        """Note that the present step computes the tokens up to ``end``, of which the ids are known."""
        ahead = sequence.num_committed_tokens + sequence.num_ahead_tokens
        if not request.facts.is_private and end > max(ahead, request.num_computing):
            sequence.computing(end, step=self._step)
            request.num_computing = end

    def commit(self, request_id: str, ids: Sequence[int], num_tokens: int) -> None:
        """Note that the KV of the first ``num_tokens`` tokens exist; their ids are known now."""
        request = self._requests.get(request_id)
        if request is None or request.sequence is None or request.facts.is_private:
            return
        sequence = request.sequence
        self._read(request, ids)
        known = min(len(ids), sequence.num_tokens + sequence.num_reserved_tokens)
        if known > sequence.num_tokens:
            sequence.fill(self._ids(request, sequence.num_tokens, known))
        if (num_tokens := min(num_tokens, sequence.num_tokens)) > sequence.num_committed_tokens:
            sequence.commit(num_tokens)

    def blocks(self, request_id: str) -> list[int]:
        """Return all blocks of a request that vLLM knows."""
        request = self._requests.get(request_id)
        if request is None or request.sequence is None:
            return []
        found: list[int] = request.sequence.block_table[: request.num_told].tolist()
        return found

    def num_committed(self, request_id: str) -> int:
        """Return how many tokens of a request are in whole blocks that others may find."""
        request = self._requests.get(request_id)
        if request is None or request.sequence is None:
            return 0
        return request.sequence.num_committed_tokens // self._size * self._size

    def release(self, request_id: str, after: Fence | None = None) -> None:
        """Release a request's blocks: it ended, or it is preempted."""
        request = self._requests.pop(request_id, None)
        if request is not None and request.sequence is not None:
            request.sequence.release(after=after)

    # --- steps

    def begin_step(self) -> int:
        """Begin the next step. Returns its number, for ``end_step``."""
        self._step += 1
        return self._step

    def end_step(self, step: int) -> None:
        """Commit what a step computed, after its output has come."""
        self.cache.step_done(step)

    # --- the whole cache

    @property
    def usage(self) -> float:
        """The share of blocks that requests hold, from 0 to 1."""
        return 1 - (self.cache.free_blocks + self.cache.evictable_blocks) / self._num_blocks

    @property
    def has_requests(self) -> bool:
        """Whether a request holds blocks."""
        return any(request.sequence is not None for request in self._requests.values())

    def reset(self) -> bool:
        """Forget everything, unless a request holds blocks. Returns whether it was done."""
        if self.has_requests:
            return False
        for namespace in self.cache.namespaces():
            self.cache.clear(namespace)
        return True

    def take_blocks_to_zero(self) -> list[int]:
        """Return the blocks that changed tenant since the last call: zero them before the step."""
        taken, self._to_zero = self._to_zero, []
        return taken

    def _note_to_zero(self, block_ids: Any) -> None:
        self._to_zero += block_ids.tolist()

    # --- keys

    def _request(self, request_id: str, facts: RequestFacts, ids: Sequence[int]) -> _Request:
        request = self._requests.get(request_id)
        if request is None:
            request = self._requests[request_id] = self._named(facts)
        self._read(request, ids)
        return request

    def _named(self, facts: RequestFacts) -> _Request:
        """Return a request of its owner. One whose salt or adapter is refused gets no cache; vLLM must go on."""
        try:
            return _Request(self._owner(facts.cache_salt).namespace(self._model, facts.adapter), facts)
        except (SaltError, NamespaceError):
            self.num_refused_salts += 1
            return _Request(Namespace("refused", self._model), replace(facts, is_private=True))

    def _owner(self, cache_salt: str | None) -> SaltOwner:
        if self._salts is not None:
            return self._salts.read(cache_salt)
        if cache_salt is not None and not is_text(cache_salt):
            raise SaltError("cache_salt has no UTF-8 form")
        text = "" if cache_salt is None else sha256(cache_salt.encode()).hexdigest()
        return SaltOwner("default", text, 0, None)

    def _read(self, request: _Request, ids: Sequence[int]) -> None:
        """Add ids that are known since to the request's key. O(new ids)."""
        if len(ids) == request.num_keyed:
            return
        try:
            new = encode(ids[request.num_keyed :])
            if not request.num_keyed and request.facts.material:
                new = key_of(new, _material(request.facts, len(ids)), block_size=self._size)
        except (TokenError, ArgumentError):  # ids ≥ 2³², or images in one place: no key can hold them
            request.facts = replace(request.facts, is_private=True)
            new = bytes((len(ids) - request.num_keyed) * TOKEN_BYTES)
        request.key += new
        request.num_keyed = len(ids)

    def _ids(self, request: _Request, start: int, stop: int) -> bytes:
        return bytes(request.key[start * TOKEN_BYTES : stop * TOKEN_BYTES])


def _material(facts: RequestFacts, num_ids: int) -> list[Material]:
    """Return the ranges of images and sounds, and a digest of each."""
    return [
        Material(
            start, min(start + length, num_ids), sha256(identifier.encode("utf-8", "surrogatepass")).digest()
        )
        for start, length, identifier in sorted(facts.material)
        if start < num_ids
    ]
