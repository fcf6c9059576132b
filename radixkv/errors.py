"""Every error that radixkv raises on purpose, as one tree.

    RadixKVError
    ├── ConfigError           a setting that can't work: names it, its value and what is allowed
    ├── ArgumentError         a call with an argument that can't work (also a ValueError)
    ├── TokenError            token ids that are no token ids (also a ValueError)
    ├── NamespaceError        a namespace or tenant that can't be one (also a ValueError)
    ├── CapacityError         there is no room, and nothing was changed
    │   ├── OutOfBlocks       the pool can't give what is needed
    │   │   └── FlushRequired it can, once the engine has fetched the copies that wait
    │   ├── QuotaExceeded     the tenant's own limit can't
    │   ├── PinBudgetExceeded the tenant may not pin so much
    │   └── PinLimitExceeded  the tenant may not have so many pins
    ├── LeaseError            a lease, match or sequence that isn't valid any more
    │   ├── StaleGeneration   its tenant was purged meanwhile
    │   ├── SequenceLent      it is lent to the device, which moves it on by itself
    │   └── NotResident       a prefix that is to be pinned isn't resident as a whole
    ├── PendingError          another sequence computes the prefix, and the caller would not wait longer
    ├── CoordinationError     the metadata store or another replica
    │   ├── StoreUnavailable  the store can't be reached
    │   │   └── UnreadableRecord it can, but what it has of this tenant is of no replica's making
    │   ├── StaleEpoch        a younger process has registered this replica's id
    │   └── UnverifiedRequest a request that claims to come from another replica and doesn't prove it
    ├── KernelError           a kernel was given what it can't run, or its launch failed
    ├── ReentrantCall         a callback called the cache that was running it
    └── IntegrityError        a law is broken: a bug of radixkv's, never handled, never retried
        └── BrokenLaws        the same, found by the audit, with its report (in radixkv.audit)

A miss is not an error: it is a match of length 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec

MAX_SHOWN = 200
"""Characters of a value that a message shows."""


def shown(value: object, most: int = MAX_SHOWN) -> str:
    """A value as messages show it: its repr, cut after so many characters."""
    if isinstance(value, int) and value.bit_length() > 3 * most:  # Python won't print the longest
        return f"{'a negative' if value < 0 else 'an'} integer of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= most else text[: most - 3] + "..."


class RadixKVError(Exception):
    """Base of all errors of radixkv."""


def refusal(name: str, value: object, allowed: str) -> str:
    """The one form of a refused value: ``NAME=VALUE is not allowed; allowed: WHAT``."""
    return f"{name}={shown(value)} is not allowed; allowed: {allowed}"


class ConfigError(RadixKVError):
    """A setting that can't work. Carries the ``setting``, its ``value`` and what is ``allowed``.

    ``problem`` says it in other words where the value is not at fault, as of a missing setting. It follows the
    setting's name: ``SETTING PROBLEM``.
    """

    def __init__(self, setting: str, value: object, allowed: str, *, problem: str | None = None) -> None:
        self.setting, self.value, self.allowed, self.problem = setting, value, allowed, problem
        if problem is None and value is None:
            problem = f"is not set; allowed: {allowed}"
        super().__init__(refusal(setting, value, allowed) if problem is None else f"{setting} {problem}")


class ArgumentError(RadixKVError, ValueError):
    """An argument that can't work. Carries the ``argument``, its ``value`` and what is ``allowed``.

    ``problem`` says it in other words, after the argument's name, where the value alone would mislead.
    """

    def __init__(self, argument: str, value: object, allowed: str, *, problem: str | None = None) -> None:
        self.argument, self.value, self.allowed, self.problem = argument, value, allowed, problem
        super().__init__(refusal(argument, value, allowed) if problem is None else f"{argument} {problem}")


def wrong_count(argument: str, found: int, allowed: str) -> ArgumentError:
    """The error of an argument that has too many or too few items: the value would say less than their number."""
    items = "item" if found == 1 else "items"
    return ArgumentError(argument, found, allowed, problem=f"has {found} {items}; allowed: {allowed}")


class TokenError(RadixKVError, ValueError):
    """Token ids that are no token ids. ``index`` is the position of the first bad one, if one is to blame."""

    def __init__(self, message: str, index: int | None = None) -> None:
        self.index = index
        super().__init__(message)


class NamespaceError(RadixKVError, ValueError):
    """A field of a namespace or a tenant that can't be one."""


class CapacityError(RadixKVError):
    """There is no room. The call changed nothing."""


class OutOfBlocks(CapacityError):
    """The pool can't give ``needed`` blocks now, without those that others hold or are promised.

    ``free`` is what the tenant's own limit leaves it, ``evictable`` what it could evict of its own: no number of the
    pool's or of anybody else's. (For ``PrefixCache.allocate``, which is the engine's own, they are the pool's.)
    """

    def __init__(self, needed: int, free: int, evictable: int) -> None:
        self.needed, self.free, self.evictable = needed, free, evictable
        super().__init__(
            f"{needed} blocks needed: {free} are left within the limit and {evictable} evictable, "
            "and the pool has no more for now"
        )


class FlushRequired(OutOfBlocks):
    """Room for ``needed`` blocks can be made, once the engine has called ``flush`` and executed the plan.

    Only where the engine executes copies itself: blocks that nobody keeps any more are missing, because copies that
    wait read them. The engine's to handle, by executing those and calling again, and not a tenant's to see: whether it
    comes depends on when the engine made its last step.
    """

    def __init__(self, needed: int, free: int) -> None:
        super().__init__(needed, free, 0)
        self.args = (
            f"{needed} blocks needed, {free} to be had, and more once copies are made that wait: "
            "call flush, execute its plan, and try again",
        )


class QuotaExceeded(CapacityError):
    """The tenant's own limit can't give ``needed`` blocks; says nothing of anybody else's."""

    def __init__(self, needed: int, limit: int, used: int, evictable: int) -> None:
        self.needed, self.limit, self.used, self.evictable = needed, limit, used, evictable
        super().__init__(
            f"{needed} blocks needed, {used} of the tenant's {limit} used, {evictable} of them evictable"
        )


class PinBudgetExceeded(CapacityError):
    """Pinning ``needed`` further blocks would exceed the ``budget`` of the tenant, which has ``pinned`` so many."""

    def __init__(self, needed: int, budget: int, pinned: int) -> None:
        self.needed, self.budget, self.pinned = needed, budget, pinned
        super().__init__(
            f"{needed} blocks to pin, {pinned} of the tenant's budget of {budget} pinned already"
        )


class PinLimitExceeded(CapacityError):
    """The tenant has as many pins as its ``limit`` allows; ``num_pins`` are more where the limit was lowered."""

    def __init__(self, limit: int, num_pins: int) -> None:
        self.limit, self.num_pins = limit, num_pins
        super().__init__(f"{num_pins} of the tenant's {limit} pins are in use: unpin one, or let one end")


class LeaseError(RadixKVError):
    """A lease, match or sequence that is not valid any more: released, consumed, or its blocks are gone."""


class StaleGeneration(LeaseError):
    """The tenant was purged while this sequence ran."""


class SequenceLent(LeaseError):
    """The sequence is lent to the device (``PrefixCache.lend``): reconcile first, or release it."""


class NotResident(LeaseError):
    """Of a prefix of ``num_tokens`` tokens in whole blocks only ``resident_tokens`` are resident: compute it first."""

    def __init__(self, num_tokens: int, resident_tokens: int) -> None:
        self.num_tokens, self.resident_tokens = num_tokens, resident_tokens
        super().__init__(
            f"only {resident_tokens} of {num_tokens} tokens are resident: compute the prefix, then pin it"
        )


class PendingError(RadixKVError):
    """Another sequence is computing the prefix: ``on_pending="raise"``, or waiting timed out."""


class CoordinationError(RadixKVError):
    """The metadata store or another replica can't do what was asked."""


class StoreUnavailable(CoordinationError):
    """The metadata store can't be reached. Matching goes on; the views of others grow old."""


class UnreadableRecord(StoreUnavailable):
    """The store has something of this tenant that no replica of the fleet wrote. Others are not concerned."""


class StaleEpoch(CoordinationError):
    """A younger process has registered this replica's id; this one is fenced and must not write."""


class UnverifiedRequest(CoordinationError):
    """A request that claims to come from a replica of the fleet and doesn't prove it, or not freshly."""


class KernelError(RadixKVError):
    """A kernel was given what it can't run, or its launch failed."""


class ReentrantCall(RadixKVError):
    """A callback called the cache that was running it. Nothing was done; without this error it would wait for ever.

    The clock, the journal, ``scrub_blocks``, policies and the storage are called under the cache's lock.
    """

    def __init__(
        self,
        message: str = "the cache was called by a callback that it runs under its lock (clock, journal, scrub_blocks, "
        "policy or storage): return from the callback first, then call the cache",
    ) -> None:
        super().__init__(message)


class IntegrityError(RadixKVError):
    """A law of the cache is broken, or the cache is dead: its state could not be repaired after an error.

    Report it, never handle it, never retry. A dead cache raises it from every call: replace the cache.
    """


_TOKENIZER = ("jinja2", "sentencepiece", "tokenizers")
_STORAGE = ("torch",)
_HF = (*_STORAGE, "transformers", "safetensors")
_HTTP = (*_TOKENIZER, "httpx", "prometheus_client", "pydantic", "starlette", "uvicorn")

EXTRA_LIBRARIES: Mapping[str, tuple[str, ...]] = {
    "storage": _STORAGE,
    "hf": _HF,
    "tokenizer": _TOKENIZER,
    "redis": ("redis",),
    "http": _HTTP,
    "service": (*_HF, *_HTTP),
    "route": (*_HTTP, "redis"),
    "audit": ("httpx", "hypothesis", "scipy"),
    "bench": ("matplotlib", "plotly"),
}
"""Modules that an extra of ``pyproject.toml`` brings. Triton is left out: only Linux has it."""


class MissingExtra(ModuleNotFoundError):
    """A part of radixkv needs an extra that isn't installed. ``extra`` is its name, ``name`` that of a module of it."""

    def __init__(self, what: str, extra: str, library: str) -> None:
        self.extra = extra
        super().__init__(f"{what} {needs(extra)} (no module named {library!r})", name=library)


def needs(extra: str) -> str:
    """What to say of a part that needs an extra, after the name of that part."""
    return f"needs the extra '{extra}': pip install 'radixkv[{extra}]'"


def require_extra(what: str, extra: str) -> None:
    """Raise MissingExtra unless the libraries of an extra are installed; ``what`` needs them."""
    for library in EXTRA_LIBRARIES[extra]:
        if find_spec(library) is None:
            raise MissingExtra(what, extra, library)
