"""What a request's KV depend on, as a namespace and a key: for the adapters between vLLM's scheduler and a cache.

    RequestFacts    what the engine knows of a request, beside its ids
    RequestKeys     reads whose request it is
    RequestKey      the namespace of one request, and the key of its ids as far as they are known

No request can stop the scheduler: one whose salt or adapter is refused, or whose ids no key can hold, is private. It
finds nothing and leaves nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any, Final

from radixkv._compiled import mypyc_attr
from radixkv.config import MAX_FIELD_BYTES, Namespace
from radixkv.errors import ArgumentError, NamespaceError, SaltError, TokenError
from radixkv.index.cache import RequestHints
from radixkv.index.key_material import Material, key_of
from radixkv.index.tokens import TAIL_FILL, TOKEN_BYTES, encode
from radixkv.signing import is_text
from radixkv.tenancy.salt import SaltOwner, SaltReader

Label = str | int | float
"""The value of a label."""


_NUMBERS: Final = ("turn", "tool_pending", "session_over", "expected_gap_s")
"""Labels that a client gives as numbers."""


@mypyc_attr(native_class=False)  # compiled, it could not be copied
@dataclass(frozen=True, slots=True)
class RequestFacts:
    """What a request's KV depend on, beside its ids.

    - ``cache_salt``: decides whose request it is (``SaltReader``).
    - ``adapter``: name of the LoRA adapter.
    - ``material``: ``(offset, length, identifier)`` of each image or sound in the prompt.
    - ``looks_up``: False for a request that needs the logits of all its tokens.
    - ``is_private``: True if its KV depend on something that no key covers, such as prompt embeddings. It finds nothing
      and leaves nothing.
    - ``num_most``: the most tokens that it may come to have.
    - ``labels``: what its client says of its session, for the eviction policy.
    """

    cache_salt: str | None = None
    adapter: str | None = None
    material: tuple[tuple[int, int, str], ...] = ()
    looks_up: bool = True
    is_private: bool = False
    num_most: int = 0
    labels: tuple[tuple[str, Label], ...] = ()


def facts_of(request: Any) -> RequestFacts:
    """Return the facts of a request of vLLM.

    An adapter that was reloaded in place keeps its name, number and maybe its path. Its requests say that it was, and
    are private: they must not meet KV of its old weights. A request that goes on with further input is private too: its
    ids and images may change.
    """
    lora = request.lora_request
    is_private = request.prompt_embeds is not None or request.resumable
    material = tuple(
        (each.mm_position.offset, each.mm_position.length, str(each.identifier))
        for each in request.mm_features
    )
    return RequestFacts(
        request.cache_salt,
        None if lora is None else f"{lora.lora_name}:{lora.lora_int_id}:{_digest(lora.lora_path)}",
        material,
        not request.skip_reading_prefix_cache,
        is_private or (lora is not None and lora.load_inplace),
        request.num_prompt_tokens + request.max_tokens,
        labels_of(getattr(request, "session_id", None), getattr(request.sampling_params, "extra_args", None)),
    )


def labels_of(session: object, given: object) -> tuple[tuple[str, Label], ...]:
    """Return what a client says of its session: the engine's own session id, and numbers beside the request.

    The numbers are ``radixkv_turn``, ``radixkv_tool_pending``, ``radixkv_session_over`` and
    ``radixkv_expected_gap_s``. Anything else is ignored.
    """
    found: list[tuple[str, Label]] = []
    if isinstance(session, str) and 0 < len(session) <= MAX_FIELD_BYTES:
        found.append(("session", session))
    if isinstance(given, dict):
        for name in _NUMBERS:
            number = given.get(f"radixkv_{name}")
            if isinstance(number, (int, float)):
                found.append((name, number))
    return tuple(found)


def hints_of(namespace: Namespace, labels: tuple[tuple[str, Label], ...]) -> RequestHints | None:
    """Return hints with these labels. A session is one of its namespace: equal names of others are other sessions."""
    if not labels:
        return None
    told = dict(labels)
    if "session" in told:
        told["session"] = _digest(repr((namespace._replace(weights=0), told["session"])))
    return RequestHints(told)


def _digest(text: str) -> str:
    return sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


@mypyc_attr(allow_interpreted_subclasses=True)
class RequestKey:
    """The key of one request. ``num_keyed``: how many ids it has read."""

    __slots__ = ("_block_size", "facts", "hints", "key", "namespace", "num_keyed")

    def __init__(self, namespace: Namespace, facts: RequestFacts, block_size: int) -> None:
        self.namespace, self.facts, self._block_size = namespace, facts, block_size
        self.hints = hints_of(namespace, facts.labels)
        self.key = bytearray()
        self.num_keyed = 0

    def read(self, ids: Sequence[int]) -> None:
        """Add ids that are known since. O(new ids)."""
        if len(ids) == self.num_keyed:
            return
        try:
            new = encode(ids[self.num_keyed :])
            if not self.num_keyed and self.facts.material:
                new = key_of(new, _material(self.facts, len(ids)), block_size=self._block_size)
            is_held = TAIL_FILL not in new  # no prompt may name what fills a tail
        except (TokenError, ArgumentError):  # ids ≥ 2³², or images in one place: no key can hold them
            is_held = False
        if not is_held:
            self.facts = replace(self.facts, is_private=True)
            new = bytes((len(ids) - self.num_keyed) * TOKEN_BYTES)
        self.key += new
        self.num_keyed = len(ids)

    def between(self, start: int, stop: int) -> bytes:
        """Return the key of the tokens ``[start, stop)``."""
        return bytes(self.key[start * TOKEN_BYTES : stop * TOKEN_BYTES])


class RequestKeys:
    """Decides whose requests are.

    - ``model``: identity of model and tokenizer.
    - ``salts``: reads whose request it is. None: all requests are of one tenant, by their salts in namespaces.
    """

    def __init__(self, model: str, salts: SaltReader | None) -> None:
        self._model, self._salts = model, salts
        self.num_refused = 0

    def read(self, facts: RequestFacts, weights: int = 0) -> tuple[Namespace, RequestFacts]:
        """Return the namespace of a request, and its facts. They are private if its salt or adapter is refused."""
        try:
            return self._owner(facts.cache_salt).namespace(self._model, facts.adapter, weights), facts
        except (SaltError, NamespaceError):
            self.num_refused += 1
            return Namespace("refused", self._model), replace(facts, is_private=True)

    def cache_salt(self, tenant: str, salt: str) -> str | None:
        """Return the ``cache_salt`` of requests with a tenant and a salt, None for none: what ``read`` was given."""
        return salt or None if self._salts is None else self._salts.cache_salt(tenant, salt)

    def refuses(self, cache_salt: str | None) -> bool:
        """Whether only requests with a valid salt are served, and this one isn't."""
        if self._salts is None or self._salts.allows_anonymous:
            return False
        try:
            self._salts.read(cache_salt)
        except (SaltError, NamespaceError):
            return True
        return False

    def _owner(self, cache_salt: str | None) -> SaltOwner:
        if self._salts is not None:
            return self._salts.read(cache_salt)
        if cache_salt is not None and not is_text(cache_salt):
            raise SaltError("cache_salt has no UTF-8 form")
        text = cache_salt or ""
        if len(text.encode()) > MAX_FIELD_BYTES:
            text = sha256(text.encode()).hexdigest()
        return SaltOwner("default", text, 0, None)


def _material(facts: RequestFacts, num_ids: int) -> list[Material]:
    """Return the ranges of images and sounds, and a digest of each."""
    return [
        Material(
            start, min(start + length, num_ids), sha256(identifier.encode("utf-8", "surrogatepass")).digest()
        )
        for start, length, identifier in sorted(facts.material)
        if start < num_ids
    ]
