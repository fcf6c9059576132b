"""The bodies of requests and replies. OpenAPI is generated from these, so they are the interface.

Requests are strict: no text for a number, no unknown names (``tenant`` is one). A known optional field may be
null, which means that it was left out. Replies are built from these classes too, so that what is documented
is what is sent.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    WithJsonSchema,
    model_validator,
)

from radixkv.coordination.costs import MAX_TEMPERATURE, CostName
from radixkv.coordination.settings import REPLICA_ID
from radixkv.errors import ArgumentError, shown
from radixkv.namespaces import Tenant
from radixkv.pins import MAX_TTL_S

MAX_NAME = 256
MAX_CHOICES = 32
MAX_PROMPTS = 64
MAX_NAMED_REPLICAS = 64
MAX_LABELS = 16
MAX_LABEL_NAME = 64
MAX_LABEL_NUMBER = 1e15


class RequestBody(BaseModel):
    """A body that a client sends: strict, without unknown names; null means left out."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {
            name: value for name, value in data.items() if value is not None or name not in cls.model_fields
        }


Seconds = Annotated[float, AfterValidator(lambda seconds: round(seconds, 6))]


class ReplyBody(BaseModel):
    """A body that the service sends."""

    model_config = ConfigDict(frozen=True)


TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=2**32)]], Field(min_length=1, fail_fast=True)]
Text = Annotated[str, Field(min_length=1)]
Salt = Annotated[str, Field(max_length=MAX_NAME, description="names one of the tenant's own namespaces")]
Adapter = Annotated[
    str, Field(min_length=1, max_length=MAX_NAME, description="key space of an adapter; loads no weights")
]


class Message(RequestBody):
    """One message of a chat."""

    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: str


class PromptForms(RequestBody):
    """A prompt in one of three forms."""

    prompt: Text | None = Field(None, description="text; exactly one of prompt, messages and token_ids")
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)] | None = None
    token_ids: TokenIds | None = None


class PromptFields(PromptForms):
    """A prompt in one of three forms, and the namespace it belongs to."""

    salt: Salt = ""
    adapter: Adapter | None = None


class LookupRequest(PromptFields):
    """What to look up."""


def _place_form(value: Any) -> str | None:
    if isinstance(value, list):
        return "names"
    if isinstance(value, int) and not isinstance(value, bool):
        return "count"
    return "place" if value in ("self", "all") else None


ReplicaName = Annotated[str, Field(pattern=f"^{REPLICA_ID}$")]
Where = Annotated[
    Annotated[Literal["self", "all"], Tag("place")]
    | Annotated[int, Field(ge=1, le=1024), Tag("count")]
    | Annotated[list[ReplicaName], Field(min_length=1, max_length=MAX_NAMED_REPLICAS), Tag("names")],
    Discriminator(
        _place_form,
        custom_error_type="where",
        custom_error_message="Input should be 'self', 'all', a number of replicas or a list of their names",
    ),
]


class WarmRequest(PromptFields):
    """What to warm, where, and whether to wait for it."""

    wait: bool = Field(True, description="false: answer 202 with a job at once")
    replicas: Where = Field(
        "self",
        description="self: the one that is asked; all: every live one; a number: so many, the best first, and others "
        "in the place of those that fail; a list: these, by name",
    )


class OrderRequest(RequestBody):
    """What a replica is to warm as its part of a job, or to know in case the one that sees to the job dies."""

    job: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    token_ids: TokenIds
    salt: Salt = ""
    adapter: Adapter | None = None
    left_out: int = Field(0, ge=0)


class PinRequest(PromptFields):
    """What to pin, and for how long."""

    ttl_s: float = Field(gt=0.0, le=MAX_TTL_S, description="seconds until the pin ends by itself")
    replicas: Where = Field(
        "self",
        description="self: the one that is asked, where it is resident already; all: every one, also those that "
        "join; a number: so many, with others in the place of those that are gone; a list: these. All but self "
        "compute it first",
    )
    wait: bool = Field(True, description="false: answer before the replicas have it; no difference for self")


class PinOrder(RequestBody):
    """What a replica is to keep resident as its part of a pin of the fleet."""

    pin: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    token_ids: TokenIds
    salt: Salt = ""
    adapter: Adapter | None = None


class RouteRequest(PromptFields):
    """A prompt that is to be sent to a replica."""

    cost: CostName | None = Field(None, description="what ranks the replicas; null: the server's")
    temperature: float | None = Field(
        None, ge=0.0, le=MAX_TEMPERATURE, description="0: the best first; above, by chance"
    )
    limit: int | None = Field(None, ge=1, description="most candidates in the answer")
    model: Annotated[str, Field(min_length=1, max_length=MAX_NAME)] | None = Field(
        None, description="fingerprint; needed where replicas serve several"
    )
    predict: bool = Field(True, description="false: the prompt won't be sent, so don't count on it")


def _prompt_form(value: Any) -> str:
    if isinstance(value, list):
        first = value[0] if value else 0
        return "texts" if isinstance(first, str) else "batch" if isinstance(first, list) else "ids"
    return "text"


Prompt = Annotated[
    Annotated[Text, Tag("text")]
    | Annotated[TokenIds, Tag("ids")]
    | Annotated[list[Text], Field(max_length=MAX_PROMPTS, fail_fast=True), Tag("texts")]
    | Annotated[list[TokenIds], Field(max_length=MAX_PROMPTS, fail_fast=True), Tag("batch")],
    Discriminator(_prompt_form),
]


def _stop_form(value: Any) -> str:
    return "many" if isinstance(value, list) else "one"


Stop = Annotated[
    Annotated[Text, Tag("one")] | Annotated[list[Text], Field(max_length=4, fail_fast=True), Tag("many")],
    Discriminator(_stop_form),
]


class StreamOptions(RequestBody):
    """Options of a stream."""

    include_usage: bool = False


_OWN_FIELDS = ("priority", "priority_duration_s")
"""Labels of a trace that are no labels of a request: ``Hints`` has fields for them."""
_LABEL_ALLOWED = (
    f"at most {MAX_LABELS} strings of at most {MAX_NAME} characters, numbers within ±{MAX_LABEL_NUMBER:g} and "
    f"booleans, by names of 1 to {MAX_LABEL_NAME} characters other than {' and '.join(_OWN_FIELDS)}"
)


def _is_label(name: str, value: Any) -> bool:
    if not 1 <= len(name) <= MAX_LABEL_NAME or name in _OWN_FIELDS:
        return False
    if isinstance(value, str):
        return len(value) <= MAX_NAME
    return isinstance(value, int | float) and abs(value) <= MAX_LABEL_NUMBER


def _checked_labels(labels: dict[str, Any]) -> dict[str, Any]:
    bad = next((name for name, value in labels.items() if not _is_label(name, value)), None)
    if bad is not None or len(labels) > MAX_LABELS:
        which = "" if bad is None else f" (not so: {shown(bad, MAX_LABEL_NAME)})"
        raise ValueError(_LABEL_ALLOWED + which)
    return labels


Labels = Annotated[
    dict[str, Any],
    AfterValidator(_checked_labels),
    WithJsonSchema(
        {
            "type": "object",
            "maxProperties": MAX_LABELS,
            "propertyNames": {
                "minLength": 1,
                "maxLength": MAX_LABEL_NAME,
                "not": {"enum": list(_OWN_FIELDS)},
            },
            "additionalProperties": {
                "anyOf": [
                    {"type": "string", "maxLength": MAX_NAME},
                    {"type": "number", "minimum": -MAX_LABEL_NUMBER, "maximum": MAX_LABEL_NUMBER},
                    {"type": "boolean"},
                ]
            },
        }
    ),
]


class Hints(RequestBody):
    """What the tenant's eviction policy may use of a request; it changes no answer, and no other tenant's cache."""

    labels: Labels = Field(
        default_factory=dict,
        description="policies look at type (completion, unless it says otherwise), session, turn, session_over and "
        "tool_pending; others are ignored",
    )
    priority: int | None = Field(default=None, ge=0, le=100, description="of all its blocks: 0 goes first")
    duration_s: float | None = Field(
        default=None,
        gt=0.0,
        le=MAX_TTL_S,
        description="seconds that the priority holds after the last use; null: for ever",
    )


class CompletionRequest(RequestBody):
    """OpenAI's completion request with OpenAI's defaults, and salt, adapter, hints, top_k, use_beam_search, ignore_eos.

    Fields of OpenAI's that would change the output and can't be honoured are taken at their neutral value
    only (``logprobs`` null, penalties 0, ``logit_bias`` empty, ``suffix`` empty); ``user`` changes nothing.
    """

    model: Annotated[str, Field(max_length=MAX_NAME)] | None = None
    prompt: Prompt
    salt: Salt = ""
    adapter: Adapter | None = None
    hints: Hints | None = None
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    best_of: int | None = Field(
        None, ge=1, le=MAX_CHOICES, description="number of beams; equal to n when sampling"
    )
    max_tokens: int = Field(16, ge=1, le=2**31 - 1)
    temperature: float = Field(1.0, ge=0.0, le=2.0, description="0 is greedy; with beam search 0 or left out")
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    top_k: int | None = Field(None, ge=1, le=2**31 - 1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: Stop | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    use_beam_search: bool = Field(False, description="n beams (or best_of), the n best returned, best first")
    ignore_eos: bool = False
    echo: bool = False
    user: str | None = Field(None, description="changes nothing")
    suffix: Literal[""] | None = None
    logprobs: None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None
    presence_penalty: Annotated[float, Field(ge=0, le=0)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=0, le=0)] = 0.0

    @property
    def stops(self) -> list[str]:
        """The stop strings as a list."""
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else list(self.stop)


class TenantSettings(RequestBody):
    """What a tenant is promised and held to. A rate or a size that is null, or left out, is what holds for all."""

    weight: Annotated[float, Field(ge=1e-6, le=1e6, allow_inf_nan=False)] = Field(
        default=1.0, description="its part, beside others' weights, of what nobody is guaranteed"
    )
    guaranteed_blocks: Annotated[int, Field(ge=0, lt=2**31)] = Field(
        default=0, description="blocks that it can always have"
    )
    max_blocks: Annotated[int, Field(ge=1, lt=2**31)] | None = Field(
        default=None, description="blocks that it may use at most; null: no limit of its own"
    )
    mode: Literal["burst", "strict"] = Field(
        default="burst",
        description="strict: borrows nothing, and nothing that others do changes what it sees",
    )
    max_pinned_blocks: Annotated[int, Field(ge=0, lt=2**31)] | None = Field(
        default=None, description="blocks that it may pin; null: as many as it is guaranteed"
    )
    policy: Annotated[str, Field(min_length=1, max_length=64)] | None = Field(
        default=None, description="name of its eviction policy; null: the server's"
    )
    fleet_blocks: Annotated[int, Field(ge=1, lt=2**31)] | None = Field(
        default=None,
        description="blocks that it may use on all replicas together, an equal share on each; null: no limit",
    )
    on_unconfirmed_generation: Literal["serve", "refuse"] = Field(
        default="serve",
        description="what a replica does that can't know whether the tenant was purged, its lease being over",
    )
    requests_per_s: Annotated[float, Field(gt=0.0, le=1e6, allow_inf_nan=False)] | None = Field(
        default=None, description="requests a second, in the long run"
    )
    burst: Annotated[int, Field(ge=1, le=10**6)] | None = Field(default=None, description="requests at once")
    max_body_bytes: Annotated[int, Field(ge=1, le=2**30)] | None = None

    def tenant(self, name: str, granted_blocks: int | None = None) -> Tenant:
        """The tenant as the cache knows it: with a quota, held to what is granted here, once that is known.

        One block it always has. Raises ArgumentError for settings that can't go together.
        """
        whole = Tenant(
            name,
            self.weight,
            self.guaranteed_blocks,
            self.max_blocks,
            self.mode,
            self.max_pinned_blocks,
            self.policy,
        )
        if self.fleet_blocks is not None and self.fleet_blocks < self.guaranteed_blocks:
            allowed = f"at least {self.guaranteed_blocks}, which each replica guarantees, or null"
            raise ArgumentError("fleet_blocks", self.fleet_blocks, allowed)
        if self.fleet_blocks is None or granted_blocks is None:
            return whole
        granted = max(granted_blocks, 1)
        guaranteed = min(self.guaranteed_blocks, granted)
        is_strict = self.mode == "strict"
        limit = None if is_strict else min(self.max_blocks or granted, granted)
        pinned = self.max_pinned_blocks
        if pinned is not None:
            pinned = min(pinned, guaranteed if is_strict else granted)
        return replace(whole, guaranteed_blocks=guaranteed, max_blocks=limit, max_pinned_blocks=pinned)


class ErrorDetail(ReplyBody):
    """What was wrong."""

    type: str
    message: str
    field: str | None
    value: Any
    allowed: str | None


class ErrorReply(ReplyBody):
    """Every answer that is not a success."""

    error: ErrorDetail


class LookupReply(ReplyBody):
    """How much of a prompt is resident."""

    matched_tokens: int
    matched_blocks: int


class ReplicaOutcome(ReplyBody):
    """What became of a warm on one replica, or how far it has come there."""

    replica: str
    state: Literal["queued", "running", "done", "failed"]
    tokens: int = 0
    cached_before: int = 0
    computed: int = 0
    seconds: Seconds = 0.0
    error: str | None = None


class WarmReply(ReplyBody):
    """A prefix that is resident now: ``tokens`` = ``cached_before`` + ``computed``, in ``blocks`` whole blocks."""

    tokens: int
    cached_before: int
    computed: int
    left_out: int = Field(
        description="tokens of the prompt behind the last stable boundary and the last whole block"
    )
    blocks: int
    seconds: Seconds


class FleetWarmReply(WarmReply):
    """A warm that was asked for on several replicas; its counts are those of the first that is done."""

    replicas: list[ReplicaOutcome]


class JobAccepted(ReplyBody):
    """A warm that goes on in the background."""

    job: str = Field(description="what to ask any replica for, at /v1/warm/{job}")


class Progress(ReplyBody):
    """How far a warm is, in tokens of all replicas; those that were resident before count as computed."""

    computed: int
    total: int


class JobReply(ReplyBody):
    """A job of the caller's."""

    job: str
    state: Literal["queued", "running", "done", "failed"]
    progress: Progress
    replicas: list[ReplicaOutcome]
    result: FleetWarmReply | None = Field(description="once it is done: on one replica at least")
    error: ErrorDetail | None = Field(description="if it failed on all")


class Choice(ReplyBody):
    """One completion."""

    index: int
    text: str
    logprobs: None = None
    finish_reason: Literal["stop", "length"] | None


class PromptTokensDetails(ReplyBody):
    """Where the prompt's tokens came from."""

    cached_tokens: int


class Usage(ReplyBody):
    """Tokens read, cached and written."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class Timings(ReplyBody):
    """Seconds since the request arrived; the wait for the model counts."""

    queued_s: Seconds
    time_to_first_token_s: Seconds
    total_s: Seconds


class CompletionReply(ReplyBody):
    """OpenAI's completion object, with timings. Of a stream: one chunk of it."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[Choice]
    usage: Usage | None = None
    timings: Timings | None = None


class ClearReply(ReplyBody):
    """What was forgotten."""

    namespaces: int
    blocks: int


class TenantStatsReply(ReplyBody):
    """A tenant's own counts: blocks at this moment, tokens and requests since the start."""

    tenant: str
    mode: Literal["burst", "strict"] = Field(
        description="strict: nothing that others do changes these counts"
    )
    used_blocks: int
    resident_blocks: int
    sequence_blocks: int
    evictable_blocks: int
    num_namespaces: int
    requests: int
    hit_tokens: int
    missed_tokens: int
    evicted_blocks: int
    declined_blocks: int
    pinned_blocks: int
    num_pins: int


class PinPart(ReplyBody):
    """What became of a pin of the fleet on one replica: it holds where it is done."""

    replica: str
    state: Literal["queued", "running", "done", "failed"]
    error: str | None = None


class PinReply(ReplyBody):
    """A pin of the caller's: a prefix of ``tokens`` tokens in ``blocks`` blocks, for ``ttl_s`` more seconds."""

    id: str
    salt: str | None = Field(description="null: not known on a replica that doesn't keep it")
    adapter: str | None
    tokens: int
    blocks: int
    ttl_s: Seconds
    replicas: list[PinPart] | None = Field(
        None, description="of a pin of several replicas; null: this one's own"
    )


class PinsReply(ReplyBody):
    """The caller's pins on this replica, and those of the fleet."""

    pins: list[PinReply]


class OperatorStatsReply(ReplyBody):
    """All tenants' counts and the pool's."""

    cache: dict[str, int]
    tenants: list[TenantStatsReply]


class LoadReply(ReplyBody):
    """What a replica has to do; absolute, as of its last beat."""

    queued_prefill_tokens: int
    decode_blocks: int
    resident_blocks: int


class CandidateReply(ReplyBody):
    """A replica that the prompt may be sent to. What others make it do shows in the order at most."""

    replica: str
    address: str | None
    matched_tokens: dict[str, int] = Field(
        description="leading tokens by the tier that holds them; predicted: just sent there"
    )
    why: str = Field(description="the cost that ranked it, and what it holds")


class RouteReply(ReplyBody):
    """Replicas for a prompt, best first. ``by_load``: the store is lost, and what they hold isn't known."""

    prompt_tokens: int
    model: str
    by_load: bool
    candidates: list[CandidateReply]


class ReplicaReply(ReplyBody):
    """One replica as this one sees it."""

    id: str
    is_self: bool
    live: bool
    reachable: bool = Field(description="live, its address proven, compatible: requests may be sent there")
    address: str | None
    epoch: int = Field(description="grows with each registration of the same id")
    last_seq: int | None = Field(
        description="number of its last entry; null for tenants, as it counts everybody's"
    )
    lease_remaining_s: Seconds
    lag_entries: int | None = Field(
        description="entries of its log that the view is known to lack; null: not followed, and for tenants"
    )
    lag_s: Seconds | None = Field(description="how long the view has lacked any; null with lag_entries")
    staleness_s: Seconds | None = Field(description="since its registration and load were last heard")
    load: LoadReply | None = Field(description="null for tenants, as it is everybody's")
    model: str = Field(description="fingerprint")
    block_size: int
    incompatible: str | None


class ReplicasReply(ReplyBody):
    """This replica and the live ones that it sees; with ``all=true`` those whose lease ran out, too."""

    replicas: list[ReplicaReply]


class KeyReply(ReplyBody):
    """A key, without the key."""

    id: str = Field(description="what it is called in /v1/keys/{key}")
    tenant: str | None = Field(description="whose it is; null: the operator's")
    prefix: str | None = Field(description="how it begins, if that is known")
    created: str | None = Field(description="when it was made, if that is known")


class KeysReply(ReplyBody):
    """All keys."""

    keys: list[KeyReply]


class NewKeyReply(KeyReply):
    """A key that was just made: the only time that it is shown."""

    key: str


class TenantReply(ReplyBody):
    """A tenant, what holds for it, and how many keys it has."""

    tenant: str
    settings: TenantSettings
    num_keys: int
    granted_blocks: int | None = Field(
        description="this replica's share of fleet_blocks; null without a limit"
    )


class TenantsReply(ReplyBody):
    """All tenants."""

    tenants: list[TenantReply]


BaseName = Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,128}$", description="letters, digits and . _ -")]
Readers = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=MAX_NAME)]],
    Field(max_length=10_000, fail_fast=True, description="tenants that may read it"),
]


class PublishRequest(PromptForms):
    """A prefix for tenants to read: cut where a warm cuts it."""

    id: BaseName
    readers: Readers
    adapter: Adapter | None = None


class ReadersRequest(RequestBody):
    """Who may read a base from now on."""

    readers: Readers


class BaseReply(ReplyBody):
    """A base of this replica."""

    id: str
    readers: list[str]
    adapter: str | None
    tokens: int
    blocks: int
    state: Literal["computing", "readable"]


class BasesReply(ReplyBody):
    """All bases of this replica."""

    bases: list[BaseReply]


class PublishedReply(BaseReply):
    """A base that was just published."""

    computed: int = Field(description="tokens that weren't resident")
    left_out: int = Field(description="tokens behind the last stable boundary and the last whole block")
    seconds: Seconds


class PurgeStateReply(ReplyBody):
    """How far a tenant's last purge has come: which replicas match nothing of before any more."""

    generation: int = Field(description="how often the tenant was purged; grows with each")
    complete: bool = Field(description="every live replica has confirmed")
    confirmed: list[str]
    pending: list[str] = Field(description="live replicas that haven't confirmed yet; ask again")
    unconfirmed: list[str] = Field(
        description="replicas whose lease is over; one that comes back purges first, one that is only cut off still "
        "serves the tenant what it has, unless on_unconfirmed_generation is refuse"
    )


class PurgeReply(PurgeStateReply):
    """What was forgotten here, and how far the purge has come."""

    blocks: int


class HealthReply(ReplyBody):
    """Whether the process is well, or ready, and why not."""

    status: Literal["ok", "unhealthy", "not_ready"]
    reasons: list[str]
    coordination: str = Field(
        description="ok, or what is wrong: unavailable (the store is lost, everything local goes on), fenced, …"
    )
