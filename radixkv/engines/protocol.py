"""Engine: what the service needs of an engine, whatever runs the model.

    Engine          names and limits of the model; generate, prefill, publish; health and audit
    Engine.cache    an EngineCache: lookups, pins, purges, tenants and counts of the engine's cache

``HFEngine`` is an Engine and ``PrefixCache`` an EngineCache, without naming either. An engine says what it can't do
(``abilities``), and the service refuses such requests by name. An engine is made by a function with the signature of
``LoadEngine``, which an installed package can register as an entry point of the group ``radixkv.engines``: see
``find_engine``. This module imports no model, so a process without torch can use it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, Protocol, TypeAlias, cast, runtime_checkable

from radixkv.config import Namespace, Scrub, Tenant
from radixkv.engines.steps import Steps
from radixkv.engines.vocabulary import Vocabulary
from radixkv.errors import CapacityError, ConfigError
from radixkv.index.bases import BaseInfo
from radixkv.index.below import Scope
from radixkv.index.cache import RequestHints
from radixkv.index.changes import Journal
from radixkv.index.endings import Endings
from radixkv.index.pins import Pin
from radixkv.index.snapshot import Snapshot
from radixkv.index.stats import CacheStats, TenantStats
from radixkv.index.tokens import TokenIds
from radixkv.sizes import Amount
from radixkv.tiers.pending import FolderNotes, Pending
from radixkv.tiers.settings import TierSettings
from radixkv.tiers.tier import TierDetails

Ability: TypeAlias = Literal[
    "as_of", "beams", "forms", "logprobs", "penalties", "pins", "prefill", "publish", "samples", "tally"
]
"""What an engine may lack: the argument ``as_of``, beam search, answers in a given form (``Forming``), log
probabilities of tokens, penalties and biases of tokens (``Penalties``), pins, prefill without generation, bases,
several samples of one prompt, the argument ``tally``."""

ABILITIES: Final[frozenset[Ability]] = frozenset(
    (
        "as_of",
        "beams",
        "forms",
        "logprobs",
        "penalties",
        "pins",
        "prefill",
        "publish",
        "samples",
        "tally",
    )
)
"""All abilities."""

Preemption: TypeAlias = Literal["tenant", "pool", "unread"]
"""Why a running request gave its room up: a request of its tenant grew at the tenant's limit, or any at the end of the
pool; or nobody read its answer while another request needed the room."""

WaitForRoom: TypeAlias = Callable[[CapacityError], bool]
"""Called with the error when a step finds too few blocks. True tries the step again, False raises the error."""


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What a request may need: ids below ``vocab_size``, at most ``max_model_len`` tokens with their answer.

    The cache has ``num_blocks`` blocks of ``block_size`` tokens. ``num_together``: how many calls of ``generate`` of
    one tenant the engine batches; 1 if they run one after another. ``cache_waits``: whether calls of the cache wait,
    because it is in another process.
    """

    vocab_size: int
    max_model_len: int
    num_blocks: int
    block_size: int
    num_together: int = 1
    cache_waits: bool = False

    @property
    def num_cache_tokens(self) -> int:
        """Tokens that the whole cache holds."""
        return self.num_blocks * self.block_size


@dataclass(frozen=True, slots=True)
class Loaded:
    """What came back from the tiers below the cache: cached tokens by tier, and the seconds spent on it."""

    host_tokens: int
    disk_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Part:
    """JSON that follows a schema, between two texts."""

    before: str
    schema: Mapping[str, Any]
    after: str = ""


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """What an answer has to be: one of the ``parts``; with a ``separator``, one or more of them with it between."""

    parts: Sequence[Part]
    separator: str | None = None


class Tally:
    """What a request has read, computed and chosen so far. The engine keeps it up, so it is right whichever way the
    request ends. The caller makes an empty one for each call.

    - ``num_cached``: tokens of each prompt that has begun, in order, which were found here or in the tiers below.
    - ``num_computed``: tokens of the same prompts that were computed.
    - ``num_loaded``: of the cached ones, those from each tier below. None: the engine doesn't know.
    - ``num_chosen``: tokens chosen for an output row that hasn't ended.
    """

    __slots__ = ("loading_s", "num_cached", "num_chosen", "num_computed", "num_loaded")

    def __init__(self) -> None:
        self.num_cached: list[int] = []
        self.num_computed: list[int] = []
        self.num_loaded: dict[str, int] | None = None
        self.num_chosen = 0
        self.loading_s = 0.0

    def begin(self, num_cached: int) -> None:
        """Count the next prompt, with what was found of it."""
        self.num_cached.append(num_cached)
        self.num_computed.append(0)

    def undo_begin(self) -> None:
        """Take the last prompt back, of which nothing was computed."""
        self.num_cached.pop()
        self.num_computed.pop()

    def reach(self, prompt: int, num_tokens: int) -> None:
        """Take that the first tokens of a prompt exist now: those that weren't cached were computed."""
        self.num_computed[prompt] = max(self.num_computed[prompt], num_tokens - self.num_cached[prompt])

    @property
    def loaded(self) -> Loaded | None:
        """What came from the tiers below."""
        if self.num_loaded is None:
            return None
        return Loaded(self.num_loaded["host"], self.num_loaded["disk"], self.loading_s)


@dataclass(frozen=True, slots=True)
class Penalties:
    """What changes the scores of tokens before one is chosen.

    - ``presence``, ``frequency``: OpenAI's: a token's score falls by ``presence`` if it is in the answer so far, and by
      ``frequency`` for each time.
    - ``repetition``: transformers': scores of tokens that are in the prompt or the answer are divided by it if they are
      positive, otherwise multiplied.
    - ``bias``: what is added to the scores of tokens, by id.
    - ``min_new_tokens``: the answer doesn't end before it has so many tokens.
    """

    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0
    bias: Mapping[int, float] = field(default_factory=dict)
    min_new_tokens: int = 0


class TokenLogprobs(NamedTuple):
    """The natural logarithm of a chosen token's probability, and the most likely tokens of its step, likeliest first.

    They are the model's own: before penalties, forms, temperature, ``top_k`` and ``top_p``.
    """

    token_id: int
    logprob: float
    top: list[tuple[int, float]]


class Logprobs:
    """The log probabilities of a request's tokens. The caller makes an empty one for each call.

    - ``num_top``: the most likely tokens of each step, 0 for none.
    - ``rows``: of each output row, those of its tokens so far, except of one that ends it. They are there before
      ``on_step`` has the tokens.
    """

    __slots__ = ("num_top", "rows")

    def __init__(self, num_top: int = 0) -> None:
        self.num_top = num_top
        self.rows: list[list[TokenLogprobs]] = []


@dataclass(frozen=True, slots=True)
class Prefill:
    """The result of ``Engine.prefill``: tokens of the prompt, cached and computed ones, blocks, and seconds.

    ``loaded``: see ``Generation``.
    """

    num_tokens: int
    num_cached_tokens: int
    num_computed_tokens: int
    num_blocks: int
    seconds: float
    loaded: Loaded | None = None


@dataclass(frozen=True, slots=True)
class Generation:
    """The result of ``Engine.generate``.

    - ``token_ids``: the new tokens of each output row, with an end-of-sequence token. The rows of a prompt are
      adjacent.
    - ``num_prompt_tokens``, ``num_cached_tokens``: of each prompt.
    - ``finish_reasons``: of each output row: "length" if it has ``max_new_tokens`` and didn't end by itself, else
      "stop".
    - ``time_to_first_token_s``: from the call to the choice of the first new token; ``seconds`` if there was none.
    - ``queued_s``: from the call to its start, while it waited for room or for its turn among the requests that step
      together. 0 if the engine doesn't know.
    - ``loaded``: what of the cached tokens came from the tiers below the cache; None without tiers, or if the engine
      doesn't know.
    """

    token_ids: list[list[int]]
    num_prompt_tokens: list[int]
    num_cached_tokens: list[int]
    finish_reasons: list[Literal["stop", "length"]]
    time_to_first_token_s: float
    seconds: float
    queued_s: float = 0.0
    loaded: Loaded | None = None


class Resident(Protocol):
    """The result of a lookup."""

    @property
    def num_tokens(self) -> int:
        """Leading tokens that are resident."""

    @property
    def num_blocks(self) -> int:
        """Their blocks."""


class EngineCache(Protocol):
    """The engine's cache, from any thread. The methods are those of ``PrefixCache``, with its errors.

    Arguments are positional unless they have defaults. An engine without the ability ``pins`` or ``publish`` is never
    asked for pins or bases, except for lists, which are empty.
    """

    def match(self, namespace: Namespace, ids: TokenIds, /) -> Resident:
        """Return how much of a prefix is resident. Changes nothing."""

    def touch(self, namespace: Namespace, ids: TokenIds, /) -> int:
        """Count a use of what is resident. Returns its tokens."""

    @property
    def endings(self) -> Endings:
        """When what was purged, cleared or removed. Must not wait.

        A request notes ``endings.num`` when its caller is known, and gives it as ``as_of``. So it is refused if what it
        belongs to was forgotten while it waited.
        """

    def pin(self, namespace: Namespace, ids: TokenIds, ttl_s: float, /, *, as_of: int | None = None) -> Pin:
        """Keep a resident prefix for some seconds. ``as_of``: see ``Engine.generate``."""

    def unpin(self, pin: Pin, /) -> None:
        """End a pin."""

    def pins(self, tenant: str | None = None, *, after: int = 0, limit: int | None = None) -> list[Pin]:
        """Return active pins, by id."""

    def clear(self, namespace: Namespace, /) -> int:
        """Forget a namespace. Returns how many blocks were resident."""

    def purge(self, tenant: str, /) -> int:
        """Forget a tenant, and raise its generation. Returns how many blocks were resident."""

    def generation(self, tenant: str, /) -> int:
        """Return how often a tenant was purged."""

    def namespaces(self, tenant: str | None = None, /) -> list[Namespace]:
        """Return the namespaces that hold something."""

    def add_tenant(self, tenant: Tenant, /) -> None:
        """Set a tenant's guarantee and limit."""

    def remove_tenant(self, tenant: str, /) -> None:
        """Forget a tenant and its settings."""

    def bases(self) -> list[BaseInfo]:
        """Return all bases."""

    def set_readers(self, base_id: str, readers: Iterable[str], /) -> None:
        """Replace the readers of a base."""

    def unpublish(self, base_id: str, /) -> None:
        """Withdraw a base."""

    def tenants(self) -> list[str]:
        """Return the tenants that the cache has seen."""

    def stats(self) -> CacheStats:
        """Return counts of the whole cache."""

    def tenant_stats(self, tenant: str, /) -> TenantStats:
        """Return counts of one tenant."""

    def snapshot(self) -> Snapshot:
        """Return everything resident, so that the fleet's view of it can be rebuilt."""


class Engine(Protocol):
    """An engine that serves one model. Its calls of ``generate``, ``prefill`` and ``publish`` run one at a time.

    Each may come from another thread. While one is in a callback, another may run. To cancel a request, return True
    from ``stop`` or raise from any callback: nothing of the request stays open then.
    """

    @property
    def abilities(self) -> Collection[Ability]:
        """What it can do, beyond one answer to each prompt."""

    @property
    def limits(self) -> EngineLimits:
        """What a request may need."""

    @property
    def fingerprint(self) -> str:
        """Identity of model, tokenizer and block size: the ``model`` of its namespaces."""

    @property
    def weights_version(self) -> int:
        """Version of the weights now."""

    @property
    def cache(self) -> EngineCache:
        """Its cache."""

    def namespace(self, tenant: str, adapter: str | None = None, salt: str = "") -> Namespace:
        """Return a tenant's namespace for the model and its present weights."""

    def generate(
        self,
        ns: Namespace,
        ids: Any,
        max_new_tokens: int,
        *,
        do_sample: bool = False,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        num_beams: int = 1,
        num_return_sequences: int = 1,
        eos_token_id: int | Iterable[int] | None = None,
        on_step: Callable[[list[list[int]]], None] | None = None,
        stop: Callable[[], bool] | None = None,
        on_no_room: WaitForRoom | None = None,
        hints: RequestHints | None = None,
        as_of: int | None = None,
        tally: Tally | None = None,
        penalties: Penalties | None = None,
        form: Any = None,
        logprobs: Logprobs | None = None,
    ) -> Generation:
        """Continue a batch of prompts (keys or ids). ``on_step`` gets the new tokens of each row as they come.

        ``as_of``: ``EngineCache.endings.num`` when the request came. Raises StaleGeneration, at the latest when it
        begins, if what it belongs to was forgotten since.

        ``tally``: kept up until the call ends, also by an error.

        ``form``: what ``Forming.form`` returned. ``logprobs``: kept up as the tokens come.

        See ``HFEngine.generate``. Needs ``samples`` for several rows of a prompt, ``beams`` for several beams, and the
        abilities ``penalties``, ``forms`` and ``logprobs`` for these arguments. They aren't given otherwise.
        """

    def prefill(
        self,
        ns: Namespace,
        ids: TokenIds,
        *,
        on_chunk: Callable[[int, int], None] | None = None,
        on_no_room: WaitForRoom | None = None,
        hints: RequestHints | None = None,
        as_of: int | None = None,
        tally: Tally | None = None,
    ) -> Prefill:
        """Compute a prompt that isn't cached yet, and make it resident. Needs ``prefill``.

        ``as_of``, ``tally``: see ``generate``.
        """

    def publish(
        self,
        base_id: str,
        ns: Namespace,
        ids: TokenIds,
        readers: Iterable[str],
        *,
        on_chunk: Callable[[int, int], None] | None = None,
        on_no_room: WaitForRoom | None = None,
        as_of: int | None = None,
        tally: Tally | None = None,
    ) -> Prefill:
        """Compute a base, and make it readable. Needs ``publish``. ``as_of``, ``tally``: see ``generate``."""

    def health(self) -> list[str]:
        """Return the reasons to replace the process; empty if it is healthy. Repairs what it can first. O(1).

        Raises IntegrityError if an invariant of its cache is broken.
        """

    def audit(self) -> list[str]:
        """Return which laws its cache breaks now; empty if it is sound. O(resident blocks), in slices."""


@dataclass(frozen=True, slots=True)
class Admission:
    """How a call in steps waits for its start, and for room.

    - ``may_start``: called just before it starts, maybe several times; what it raises ends the call.
    - ``on_no_room``: that of ``Engine.generate``, in steps.
    - ``is_patient``: whether it still lets the running requests of its tenant go first.
    - ``in_steps``: False: the calling thread runs it to its end.
    """

    may_start: Callable[[], object]
    on_no_room: Callable[[CapacityError], Steps[bool]] | None
    is_patient: Callable[[], bool] = bool
    in_steps: bool = True


@runtime_checkable
class Stepping(Protocol):
    """An engine that one thread runs, with all its requests: see ``steps``. Others get a thread for each running call.

    The thread resumes the steps of each call that can go on, then calls ``make_step``, and so on. It runs the
    callbacks, so they have to be quick. Calls wait in the engine's own order, and without a thread. It is also a
    ``Queueing``.
    """

    @property
    def makes_steps(self) -> bool:
        """Whether it does so for its model. Otherwise the other methods aren't called."""

    def generating(
        self, ns: Namespace, ids: Any, max_new_tokens: int, admission: Admission, /, **options: Any
    ) -> Steps[Generation]:
        """Do what ``generate`` does, with its other arguments but ``on_no_room``."""

    def prefilling(
        self, ns: Namespace, ids: TokenIds, admission: Admission, /, **options: Any
    ) -> Steps[Prefill]:
        """Do what ``prefill`` does, with its other arguments but ``on_no_room``."""

    def publishing(
        self,
        base_id: str,
        ns: Namespace,
        ids: TokenIds,
        readers: Iterable[str],
        admission: Admission,
        /,
        **options: Any,
    ) -> Steps[Prefill]:
        """Do what ``publish`` does, with its other arguments but ``on_no_room``."""

    def make_step(self) -> float | None:
        """Make a step of all requests whose steps wait for it. Returns in how many seconds to call it again.

        0.0: now. None: once a call has come, gone on or ended.
        """


@runtime_checkable
class Closing(Protocol):
    """An engine that has to be closed, such as one with a process of its own. Others are left alone."""

    def close(self) -> None:
        """End it, after all its calls."""


@runtime_checkable
class Preempting(Protocol):
    """An engine that may take a running request's room, and computes it again later. Others are left alone."""

    def preemptions(self) -> Mapping[tuple[str, Preemption], int]:
        """Return how often it did so, by the tenant of the request and the reason. From any thread."""


@runtime_checkable
class Queueing(Protocol):
    """An engine that orders its waiting requests itself. Of others the service counts whole prompts."""

    def prefill_tokens(self, missing: float = 1.0) -> int | None:
        """Return the prompt tokens to compute before those of a new request. None: it doesn't know.

        ``missing``: the share of the new request's tokens that isn't resident.
        """


@runtime_checkable
class Forming(Protocol):
    """An engine whose answers can be bound to a form. It has the ability ``forms``, unless its model can't have one."""

    def form(self, tenant: str, alternatives: str, field: str) -> object:
        """Return a form for ``generate``: from any thread, and without the model's turn. It may take some seconds.

        ``alternatives``: JSON text, see ``AnswerForm``. ``field``: what errors name. Raises ArgumentError for schemas
        that can't be followed.
        """


@runtime_checkable
class Counting(Protocol):
    """A cache that counts what requests read without a run of the engine. Others are left alone."""

    def count_reads(self, tenant: str, num_tokens: int, /, *, as_of: int | None = None) -> None:
        """Count tokens that a tenant's request read, as hits. Must not wait. ``as_of``: see ``Engine.generate``."""


@runtime_checkable
class Noting(Protocol):
    """A cache whose policy hears what becomes known of a request at its end. Others are left alone."""

    def note(self, namespace: Namespace, ids: TokenIds, hints: RequestHints, /) -> None:
        """Tell the policy more of the last request of a prompt. Must not wait."""


@runtime_checkable
class Tiered(Protocol):
    """A cache with tiers below it. Others are left alone."""

    def tier_counts(self) -> Mapping[str, Mapping[str, float]]:
        """Return counts by tier: see ``Ladder.counts``. Empty if there is none. From any thread."""

    def tier_details(self) -> Mapping[str, TierDetails]:
        """Return details by tier, of the same tiers as ``tier_counts``. From any thread."""

    def follow_generations(
        self,
        generation: Callable[[str], int | None],
        knows: Callable[[], bool],
        store_id: Callable[[], str],
        notes: FolderNotes | None,
    ) -> None:
        """Take the fleet's generations of tenants, whether all are known, and the id of their store from these.

        A generation is a number that grows with each purge. None: a purge is known, and hasn't reached the cache yet.
        The id is empty without a store. A tier that outlives the process forgets everything if it changes. ``notes``:
        kept by that store, by which a tier notices that it is an older copy of itself.
        """

    @property
    def has_disk(self) -> bool:
        """Whether what lies below outlives the process."""

    def forget_in_tiers(self, scope: Scope, wait_s: float | None = None) -> Pending:
        """Forget something in the tiers, also what lies nowhere else. Waits for a disk for at most ``wait_s`` seconds.

        Returns what a disk still has to destroy of it. No tier serves any of it, and it is tried until it is done.
        """

    def pending(self, tenant: str | None = None) -> Pending:
        """Return what a disk still has to destroy of a tenant, or of all. From any thread."""

    def purge(self, tenant: str, /, *, generation: int = 0, wait_s: float | None = None) -> int:
        """See EngineCache. Waits for a disk for at most ``wait_s`` seconds.

        ``generation``: the fleet gave it to the tenant by this purge. Tiers whose disk has learned this very generation
        keep what they have: it came after that purge. 0: it isn't a purge of the fleet.
        """

    def clear(self, namespace: Namespace, /, *, wait_s: float | None = None) -> int:
        """See EngineCache, and ``purge``."""

    def add_tenant(self, tenant: Tenant, /, *, wait_s: float | None = None) -> None:
        """See EngineCache, and ``purge``."""

    def remove_tenant(self, tenant: str, /, *, wait_s: float | None = None) -> None:
        """See EngineCache, and ``purge``."""


def purge(cache: EngineCache, tenant: str, generation: int = 0) -> int:
    """Purge a tenant without waiting for a disk. See Tiered for ``generation``."""
    if isinstance(cache, Tiered):
        return cache.purge(tenant, generation=generation, wait_s=0.0)
    return cache.purge(tenant)


def pending_of(cache: EngineCache, tenant: str | None = None) -> Pending:
    """Return what disks below a cache still have to destroy of a tenant, or of all."""
    return cache.pending(tenant) if isinstance(cache, Tiered) else Pending()


@runtime_checkable
class Prefetching(Protocol):
    """A cache that brings nearer what lies far below of a prompt, before its request comes. Others are left alone."""

    def prefetch(self, namespace: Namespace, ids: TokenIds, /) -> None:
        """Begin to, for a request that may come within moments. Must not wait, and promises nothing."""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What ``radixkv serve`` knows when it loads an engine.

    - ``model``: folder of the model; None for a small demo model.
    - ``tokenizer_digest``: SHA-256 of the tokenizer's files, a part of the fingerprint.
    - ``vocab_size``: of the tokenizer, for the demo model.
    - ``threads``: compute threads; 0 for the library's own choice.
    - ``kv_memory``: memory of the cache, which decides its blocks once the model is loaded; None: ``num_blocks``.
    - ``default_tenant``: settings of tenants that weren't added; None refuses them.
    - ``tiers``: what lies below the cache; None: nothing.
    - ``vocabulary``: the text of the tokenizer's tokens; None: unknown, so no answer can be bound to a form.
    """

    model: Path | None
    tokenizer_digest: str
    vocab_size: int
    num_blocks: int
    block_size: int
    policy: str = "learned"
    scrub: Scrub = "cross-tenant"
    device: str = "cpu"
    dtype: str = "float32"
    threads: int = 0
    default_tenant: Tenant | None = field(default=None)
    tiers: TierSettings | None = None
    vocabulary: Vocabulary | None = None
    kv_memory: Amount | None = None


class LoadedEngine(Protocol):
    """A loaded model. The fleet needs its fingerprint before there is a cache, since the cache reports to the fleet."""

    @property
    def fingerprint(self) -> str:
        """That of the engine."""

    def start(self, journal: Journal | None) -> Engine:
        """Make the engine and its cache, which reports to the journal. Called once."""


LoadEngine: TypeAlias = Callable[[EngineSettings], LoadedEngine]
"""Loads a model. Takes seconds, and the model's memory. Raises ConfigError."""

ENTRY_POINTS: Final = "radixkv.engines"
"""The group of entry points by which other packages bring engines: a name, and a ``LoadEngine``."""

_BUILT_IN: Mapping[str, str] = {"hf": "radixkv.engines.hf.load", "vllm": "radixkv.engines.vllm.serve"}


def find_engine(name: str) -> LoadEngine:
    """Return the function that loads an engine: a built-in one, or one that an installed package registers.

    Raises ConfigError for an unknown name.
    """
    if name in _BUILT_IN:
        return cast(LoadEngine, import_module(_BUILT_IN[name]).load_engine)
    found = entry_points(group=ENTRY_POINTS)
    if name in found.names:
        try:
            return cast(LoadEngine, found[name].load())
        except (ImportError, AttributeError) as error:
            raise ConfigError("--engine", name, f"an engine that can be imported: {error}") from None
    known = ", ".join(sorted({*_BUILT_IN, *found.names}))
    raise ConfigError("--engine", name, f"an engine that is installed: {known}")
