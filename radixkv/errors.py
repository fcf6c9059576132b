"""Every error that radixkv raises on purpose, as one tree.

    RadixKVError
    ├── ConfigError           an invalid setting: names it, its value and what is allowed
    ├── ArgumentError         an invalid argument of a call (also a ValueError)
    ├── TokenError            invalid token ids (also a ValueError)
    ├── NamespaceError        an invalid namespace or tenant (also a ValueError)
    ├── SaltError             a cache salt that an engine doesn't accept (also a ValueError)
    │   └── StaleSaltError    it is older than the last purge of its tenant
    ├── CapacityError         too few blocks; nothing was changed
    │   ├── OutOfBlocks       the pool can't give the needed blocks
    │   │   └── FlushRequired the pool can give them after the engine has executed waiting copies
    │   ├── QuotaExceeded     the tenant's own limit is too low
    │   ├── PinBudgetExceeded the tenant may not pin that many blocks
    │   ├── PinLimitExceeded  the tenant may not have that many pins
    │   └── AnnouncementLimitExceeded the tenant may not have that many announcements
    ├── LeaseError            a lease, match or sequence that is no longer valid
    │   ├── StaleGeneration   its tenant was purged while it ran
    │   ├── SequenceLent      it is lent to the device, which advances it by itself
    │   └── NotResident       a prefix to pin isn't completely resident
    ├── CoordinationError     an error of the metadata store or another replica
    │   ├── StoreUnavailable  the store can't be reached, or refuses to work
    │   │   └── UnreadableRecord the store's record of a tenant was written by no replica
    │   ├── StaleEpoch        a younger process has registered this replica's id
    │   └── UnverifiedRequest a request that claims to come from another replica and doesn't prove it
    ├── ControlError          an engine's control channel: no proof, no message, or a refused command
    │   └── CommandRefused    the engine refused a command with an error of its own
    ├── TierError             a folder of a disk tier is damaged, or another process took it
    ├── KernelError           a kernel was given what it can't run, or its launch failed
    ├── ReentrantCall         a callback called the cache that was running it
    ├── ClosedByFork          a cache of the parent process was used in a forked child
    └── IntegrityError        an invariant is broken: a bug in radixkv, never handled, never retried
        └── BrokenLaws        found by the audit, with its report (in radixkv.audit)

A miss is not an error: it is a match of length 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any, ClassVar

MAX_SHOWN = 200
"""Characters of a value that a message shows."""


def shown(value: object, most: int = MAX_SHOWN) -> str:
    """Return a value as messages show it: its repr, cut after ``most`` characters."""
    if isinstance(value, int) and value.bit_length() > 3 * most:  # Python refuses to print very long integers
        return f"{'a negative' if value < 0 else 'an'} integer of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= most else text[: most - 3] + "..."


class RadixKVError(Exception):
    """Base of all errors of radixkv. ``hint`` is one line about what to do; each class has its own."""

    hint: ClassVar[str] = "Read the message: it names what was wrong, and what is allowed."

    def __reduce__(self) -> tuple[Any, ...]:
        return made_again(self)


def made_again(error: Exception) -> tuple[Any, ...]:
    """Return how ``copy`` and ``pickle`` make an error again: from its message and fields, without ``__init__``.

    For ``__reduce__``. Without it, an error whose ``__init__`` takes something else than the message can't be
    unpickled. Whoever waits for the process that raised it may then wait for ever.
    """
    return _new, (type(error), error.args), error.__dict__


def _new(kind: type[Exception], args: tuple[Any, ...]) -> Exception:
    return kind.__new__(kind, *args)


def refusal(name: str, value: object, allowed: str) -> str:
    """Format the message of a refused value: ``NAME=VALUE is not allowed; allowed: WHAT``."""
    return f"{name}={shown(value)} is not allowed; allowed: {allowed}"


class ConfigError(RadixKVError):
    """An invalid setting. Carries the ``setting``, its ``value`` and what is ``allowed``.

    ``problem`` describes the error where the value isn't the cause, for example a missing setting. The message is then
    ``SETTING PROBLEM``.
    """

    hint: ClassVar[str] = "Correct the setting that the message names, and start again."

    def __init__(self, setting: str, value: object, allowed: str, *, problem: str | None = None) -> None:
        self.setting, self.value, self.allowed, self.problem = setting, value, allowed, problem
        if problem is None and value is None:
            problem = f"is not set; allowed: {allowed}"
        super().__init__(refusal(setting, value, allowed) if problem is None else f"{setting} {problem}")


class ArgumentError(RadixKVError, ValueError):
    """An invalid argument. Carries the ``argument``, its ``value`` and what is ``allowed``.

    ``problem`` describes the error, after the argument's name, where the value alone would mislead.
    """

    hint: ClassVar[str] = "Correct the argument that the message names. The call changed nothing."

    def __init__(self, argument: str, value: object, allowed: str, *, problem: str | None = None) -> None:
        self.argument, self.value, self.allowed, self.problem = argument, value, allowed, problem
        super().__init__(refusal(argument, value, allowed) if problem is None else f"{argument} {problem}")


def wrong_count(argument: str, found: int, allowed: str) -> ArgumentError:
    """Return the error of an argument with too many or too few items. It shows their number instead of the value."""
    items = "item" if found == 1 else "items"
    return ArgumentError(argument, found, allowed, problem=f"has {found} {items}; allowed: {allowed}")


class TokenError(RadixKVError, ValueError):
    """Invalid token ids. ``index`` is the position of the first invalid one, if there is such a position."""

    hint: ClassVar[str] = "Pass integers of the model's vocabulary, from 0 to 2**32 - 1."

    def __init__(self, message: str, index: int | None = None) -> None:
        self.index = index
        super().__init__(message)


class NamespaceError(RadixKVError, ValueError):
    """An invalid field of a namespace or a tenant."""

    hint: ClassVar[str] = (
        "Correct the field that the message names: text that can name a namespace or a tenant."
    )


class SaltError(RadixKVError, ValueError):
    """A request's cache salt is forged or outdated, or the engine serves no request without one."""

    hint: ClassVar[str] = "Send the request through the gateway that makes the salts, with the engine's keys."


class StaleSaltError(SaltError):
    """A request's cache salt was made before the last purge of its tenant."""

    hint: ClassVar[str] = "Send the request again, with a salt of the tenant's present generation."


class CapacityError(RadixKVError):
    """Too few blocks. The call changed nothing."""

    hint: ClassVar[str] = "Release sequences or leases, or let other requests end, then call again."


class OutOfBlocks(CapacityError):
    """The pool can't give ``needed`` blocks now, because other tenants hold blocks or have them guaranteed.

    ``free`` is what the tenant's own limit leaves it. ``evictable`` is what it could evict of its own. They reveal
    nothing of the pool or of other tenants. For ``PrefixCache.allocate``, which the engine itself calls, they are the
    pool's.
    """

    hint: ClassVar[str] = (
        "Let running requests end, then call again. Or guarantee the tenant blocks, or enlarge the pool."
    )

    def __init__(self, needed: int, free: int, evictable: int) -> None:
        self.needed, self.free, self.evictable = needed, free, evictable
        super().__init__(
            f"{needed} blocks needed: {free} are left within the limit and {evictable} evictable, "
            "and the pool has no more for now"
        )


class FlushRequired(OutOfBlocks):
    """The pool can give ``needed`` blocks once the engine has called ``flush`` and executed the plan.

    Raised only if the engine executes copies itself. The missing blocks no longer have an owner, but waiting copies
    read them. The engine handles this error: it executes the copies and calls again. Don't show it to a tenant, because
    it depends on when the engine made its last step.
    """

    hint: ClassVar[str] = "Call flush, execute its plan, and call again."

    def __init__(self, needed: int, free: int) -> None:
        super().__init__(needed, free, 0)
        self.args = (
            f"{needed} blocks needed, {free} to be had, and more once copies are made that wait: "
            "call flush, execute its plan, and try again",
        )


class QuotaExceeded(CapacityError):
    """The tenant's own limit can't give ``needed`` blocks. Reveals nothing of other tenants."""

    hint: ClassVar[str] = "Let the tenant's other requests end, or raise max_blocks."

    def __init__(self, needed: int, limit: int, used: int, evictable: int) -> None:
        self.needed, self.limit, self.used, self.evictable = needed, limit, used, evictable
        super().__init__(
            f"{needed} blocks needed, {used} of the tenant's {limit} used, {evictable} of them evictable"
        )


class PinBudgetExceeded(CapacityError):
    """Pinning ``needed`` more blocks would exceed the tenant's ``budget``. The tenant has pinned ``pinned`` blocks."""

    hint: ClassVar[str] = "Unpin something, pin a shorter prefix, or raise max_pinned_blocks."

    def __init__(self, needed: int, budget: int, pinned: int) -> None:
        self.needed, self.budget, self.pinned = needed, budget, pinned
        super().__init__(
            f"{needed} blocks to pin, {pinned} of the tenant's budget of {budget} pinned already"
        )


class PinLimitExceeded(CapacityError):
    """The tenant has as many pins as its ``limit`` allows. ``num_pins`` is greater if the limit was lowered."""

    hint: ClassVar[str] = "Unpin something, wait until a pin ends, or raise max_pins."

    def __init__(self, limit: int, num_pins: int) -> None:
        self.limit, self.num_pins = limit, num_pins
        super().__init__(f"{num_pins} of the tenant's {limit} pins are in use: unpin one, or let one end")


class AnnouncementLimitExceeded(CapacityError):
    """The tenant has as many open announcements as ``limit`` allows (``CacheConfig.max_announcements``)."""

    hint: ClassVar[str] = "Open or withdraw announced requests, or raise max_announcements."

    def __init__(self, limit: int) -> None:
        self.limit = limit
        super().__init__(f"the tenant has {limit} announcements, its limit: open or withdraw one first")


class LeaseError(RadixKVError):
    """A lease, match or sequence that is no longer valid: released, consumed, or its blocks were evicted."""

    hint: ClassVar[str] = "Match again, and open a new sequence."


class StaleGeneration(LeaseError):
    """The tenant was purged while this sequence ran."""

    hint: ClassVar[str] = "Release the sequence and start the request again."


class SequenceLent(LeaseError):
    """The sequence is lent to the device (``PrefixCache.lend``). Reconcile first, or release it."""

    hint: ClassVar[str] = "Call reconcile, or release the sequence."


class NotResident(LeaseError):
    """Only ``resident_tokens`` of a prefix of ``num_tokens`` tokens (whole blocks) are resident. Compute it first."""

    hint: ClassVar[str] = "Compute and commit the whole prefix, then pin it."

    def __init__(self, num_tokens: int, resident_tokens: int) -> None:
        self.num_tokens, self.resident_tokens = num_tokens, resident_tokens
        super().__init__(
            f"only {resident_tokens} of {num_tokens} tokens are resident: compute the prefix, then pin it"
        )


class CoordinationError(RadixKVError):
    """The metadata store or another replica can't do what was requested."""

    hint: ClassVar[str] = "Read the message. Matching and computing on this replica continue."


class StoreUnavailable(CoordinationError):
    """The metadata store can't be reached, or refuses to work. Matching continues.

    Views of other replicas become outdated.
    """

    hint: ClassVar[str] = "Check Redis and the network to it, then call again."


class UnreadableRecord(StoreUnavailable):
    """The store has a record of this tenant that no replica of the fleet wrote. Other tenants are not affected."""

    hint: ClassVar[str] = "Find what else writes into this Redis. A purge of the tenant replaces the record."


class StaleEpoch(CoordinationError):
    """A younger process has registered this replica's id. This process is fenced and must not write."""

    hint: ClassVar[str] = "End this process, or start it with another replica id."


class UnverifiedRequest(CoordinationError):
    """A request claims to come from a replica of the fleet, but its proof is missing, wrong or too old."""

    hint: ClassVar[str] = "Check that all replicas have the same fleet secret, and that their clocks agree."


class ControlError(RadixKVError):
    """The control channel of an engine: a side doesn't prove its key or sends no message, or a command was refused."""

    hint: ClassVar[str] = "Check the path of the socket, and that both sides have keys of one fleet."


class CommandRefused(ControlError):
    """The engine refused a command with an error: ``kind`` is its type's name, ``numbers`` its numbers by name."""

    hint: ClassVar[str] = "Correct what the message names. The command changed nothing."

    def __init__(self, message: str, kind: str, numbers: Mapping[str, int]) -> None:
        self.kind, self.numbers = kind, numbers
        super().__init__(message)


class TierError(RadixKVError):
    """A folder of a disk tier is damaged, or another process took it over. Matching and computing continue."""

    hint: ClassVar[str] = "Run `radixkv disk check` on the folder while no server uses it."


class KernelError(RadixKVError):
    """A kernel was given what it can't run, or its launch failed."""

    hint: ClassVar[str] = (
        "Read the message: it names the shape, the dtype or the device that the kernel needs."
    )


class ReentrantCall(RadixKVError):
    """A callback called the cache that was running it. The call did nothing. Without this error it would wait for ever.

    The clock, the journal, ``scrub_blocks``, policies and the storage are called under the cache's lock.
    """

    hint: ClassVar[str] = "Return from the callback, then call the cache."

    def __init__(
        self,
        message: str = "the cache was called by a callback that it runs under its lock (clock, journal, scrub_blocks, "
        "policy or storage): return from the callback first, then call the cache",
    ) -> None:
        super().__init__(message)


class ClosedByFork(RadixKVError):
    """A cache, or tiers below one, were used in a forked child of their process. They are closed there.

    The child has no other thread of its parent. So a lock that one of them held would never be released, and what it
    was changing stays half changed. In the parent the cache goes on.
    """

    hint: ClassVar[str] = "Make the cache in the process that uses it, or start processes with 'spawn'."

    def __init__(
        self,
        message: str = "the cache is closed here, because this process was forked from the one that made it: make "
        "another cache in this process, or start processes with the method 'spawn', or before the cache is made",
    ) -> None:
        super().__init__(message)


class IntegrityError(RadixKVError):
    """An invariant of the cache is broken, or the cache is dead: its state couldn't be repaired after an error.

    Report it, and don't hide it. If a repair has failed, the message says that the next call tries again. A dead cache
    raises it from every call: replace the cache.
    """

    hint: ClassVar[str] = (
        "Report it as a bug of radixkv. Replace the cache, unless the message says that the next call repairs it."
    )


_TOKENIZER = ("jinja2", "sentencepiece", "tiktoken", "tokenizers", "transformers")
_STORAGE = ("torch",)
_HF = (*_STORAGE, "llguidance", "transformers", "safetensors")
_HTTP = (
    *_TOKENIZER,
    "httptools",
    "httpx",
    "msgspec",
    "prometheus_client",
    "pydantic",
    "starlette",
    "uvicorn",
    "yaml",
)

EXTRA_LIBRARIES: Mapping[str, tuple[str, ...]] = {
    "storage": _STORAGE,
    "hf": _HF,
    "tokenizer": _TOKENIZER,
    "redis": ("redis",),
    "events": ("msgspec", "zmq"),
    "tiers": ("cryptography",),
    "http": _HTTP,
    "service": (*_HF, *_HTTP, "swagger_ui"),
    "route": (*_HTTP, "swagger_ui", "redis"),
    "audit": ("httpx", "hypothesis", "scipy"),
    "bench": ("matplotlib", "plotly"),
}
"""Modules that each extra of ``pyproject.toml`` installs. Triton is left out, because only Linux has it, and
protobuf, which transformers asks for."""


class MissingExtra(ModuleNotFoundError):
    """A part of radixkv needs an extra that isn't installed. ``extra`` is its name, ``name`` is one of its modules."""

    def __init__(self, what: str, extra: str, library: str) -> None:
        self.what, self.extra = what, extra
        super().__init__(f"{what} {needs(extra)} (no module named {library!r})", name=library)

    def __reduce__(self) -> tuple[Any, ...]:
        return MissingExtra, (self.what, self.extra, self.name), self.__dict__


def needs(extra: str) -> str:
    """Return the text that follows the name of a part that needs an extra."""
    return f"needs the extra '{extra}': pip install 'radixkv[{extra}]'"


def require_extra(what: str, extra: str) -> None:
    """Raise MissingExtra unless the libraries of an extra are installed. ``what`` names the part that needs them."""
    for library in EXTRA_LIBRARIES[extra]:
        if find_spec(library) is None:
            raise MissingExtra(what, extra, library)
