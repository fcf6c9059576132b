"""What ``/openapi.json`` says of each operation beside its schemas: a tag, examples and the types of errors.

A request example is complete: sent to a new demo service with a key of the right kind, in the order of this table, it
is answered with its ``status``. The examples of parameters belong to the same demo: ``initech`` is a tenant that an
example creates. The types of errors are those that the status alone doesn't determine (409, 503).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

TAGS: Mapping[str, str] = {
    "Prefixes": "Warm prefixes, look them up and clear them. With a tenant's key.",
    "Completions": "Complete prompts and answer chats. With a tenant's key.",
    "Cached contents": "Keep chats resident under names, and answer contents in Gemini's form. With a tenant's key.",
    "Pins": "Keep prefixes resident for some time. With a tenant's key.",
    "Fleet": "The replicas, and the ranking of replicas for a prompt.",
    "Keys": "Keys of tenants and of the operator. With the operator's key.",
    "Tenants": "Settings, statistics, usage and purges of tenants. Only statistics and usage accept a tenant's key.",
    "Bases": "Prefixes that are computed once, for several tenants to read. With the operator's key.",
    "Process": "Health, metrics and this document.",
}
"""Groups of operations, in the order in which they are shown."""


@dataclass(frozen=True, slots=True)
class Example:
    """A request body, and the status of its answer."""

    summary: str
    status: int
    body: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Operation:
    """The tag of an operation, its request examples, an example of each kind of answer, and its types of errors."""

    tag: str
    requests: tuple[Example, ...] = ()
    replies: Mapping[int, Any] = field(default_factory=dict)
    errors: tuple[str, ...] = ()


_RULES = "".join(
    f"Rule {number}: answer politely, name the page of the manual, and ask if in doubt.\n"
    for number in range(1, 5)
)
_CHAT = [
    {"role": "system", "content": _RULES},
    {"role": "user", "content": "Which page explains pins?"},
]
_IDS = list(range(100, 140))
_JOB = "5f0b6a1d9c3e47b2a8d40e17c6f29b83"
_MODEL = "fp:9c56cc51b374c3ba189210d5b6d4bf57790d351c96c47c02190ecf1e430635ab"
_COMPUTE = (
    "conflict",
    "no_capacity",
    "quota_exceeded",
    "not_read",
    "engine_unavailable",
    "generation_unconfirmed",
)
_FLEET = (
    "store_unavailable",
    "unreachable",
    "left",
    "no_answer",
    "other_model",
    "other_weights",
    "unproven",
    "failed",
)
_WARMED = {"tokens": 64, "cached_before": 0, "computed": 64, "left_out": 3, "blocks": 4, "seconds": 0.041}
_OUTCOME = {
    "replica": "replica-ba3a0a99",
    "state": "done",
    "tokens": 64,
    "cached_before": 0,
    "computed": 64,
    "seconds": 0.041,
    "error": None,
}
_PIN = {
    "id": "1",
    "salt": "",
    "adapter": None,
    "tokens": 64,
    "blocks": 4,
    "ttl_s": 599.98,
    "replicas": None,
}
_BASE = {
    "id": "assistant-v3",
    "readers": ["acme", "globex"],
    "adapter": None,
    "tokens": 64,
    "blocks": 4,
    "state": "readable",
}
_SETTINGS = {
    "weight": 2.0,
    "guaranteed_blocks": 64,
    "max_blocks": 512,
    "mode": "burst",
    "max_pinned_blocks": None,
    "max_pins": 1024,
    "policy": None,
    "fleet_blocks": None,
    "on_unconfirmed_generation": "serve",
    "requests_per_s": 50.0,
    "burst": None,
    "max_body_bytes": None,
}
_TENANT = {
    "tenant": "initech",
    "settings": _SETTINGS,
    "num_keys": 1,
    "granted_blocks": None,
    "pending": None,
}
_KEY = {
    "id": "0f3a5c7e91b2d4f6",
    "tenant": "initech",
    "prefix": "rk_x7Qa2",
    "created": "2026-01-31T09:30:00+00:00",
}
_NEW_KEY = {**_KEY, "key": "rk_x7Qa2mXc9ZrL4pSdw8nHb3TfA6g0VtEk7yJq5uWi1oP"}
_STATS = {
    "tenant": "acme",
    "mode": "burst",
    "used_blocks": 96,
    "resident_blocks": 92,
    "sequence_blocks": 4,
    "evictable_blocks": 88,
    "num_namespaces": 2,
    "requests": 140,
    "hit_tokens": 180224,
    "missed_tokens": 9216,
    "evicted_blocks": 0,
    "declined_blocks": 0,
    "failed_policies": 0,
    "pinned_blocks": 4,
    "num_pins": 1,
}
_REPLICA = {
    "id": "replica-ba3a0a99",
    "is_self": True,
    "live": True,
    "reachable": True,
    "draining": False,
    "address": "http://127.0.0.1:8400",
    "epoch": 1769851800000,
    "last_seq": None,
    "lease_remaining_s": 8.2,
    "lag_entries": None,
    "lag_s": None,
    "staleness_s": 0.4,
    "load": None,
    "model": _MODEL,
    "block_size": 16,
    "weights": 0,
    "incompatible": None,
}
_PURGE = {
    "generation": 1,
    "complete": True,
    "confirmed": ["replica-ba3a0a99"],
    "pending": [],
    "unconfirmed": [],
    "owed": False,
}
_COMPLETION = {
    "id": "cmpl-5f0b6a1d9c3e47b2a8d40e17",
    "object": "text_completion",
    "created": 1769851800,
    "model": "radixkv-demo",
    "choices": [{"index": 0, "text": " page 12 explains it", "logprobs": None, "finish_reason": "length"}],
    "usage": {
        "prompt_tokens": 67,
        "completion_tokens": 8,
        "total_tokens": 75,
        "prompt_tokens_details": {"cached_tokens": 64, "cache_write_tokens": 0},
    },
    "timings": {"queued_s": 0.0002, "time_to_first_token_s": 0.006, "total_s": 0.031},
}
_CHAT_ANSWER = {
    **_COMPLETION,
    "id": "chatcmpl-5f0b6a1d9c3e47b2a8d40e17",
    "object": "chat.completion",
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Page 12.", "refusal": None, "tool_calls": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ],
}
_TOOL = {
    "type": "function",
    "function": {
        "name": "find_page",
        "description": "Find the page about a topic",
        "parameters": {"type": "object", "properties": {"topic": {"type": "string"}}},
    },
}
_MESSAGE = {
    "id": "msg_5f0b6a1d9c3e47b2a8d40e17",
    "type": "message",
    "role": "assistant",
    "model": "radixkv-demo",
    "content": [{"type": "text", "text": "Page 12.", "citations": None}],
    "stop_reason": "end_turn",
    "stop_sequence": None,
    "diagnostics": None,
    "usage": {
        "input_tokens": 3,
        "cache_creation_input_tokens": 16,
        "cache_read_input_tokens": 48,
        "cache_creation": {"ephemeral_5m_input_tokens": 16, "ephemeral_1h_input_tokens": 0},
        "output_tokens": 8,
        "service_tier": "standard",
    },
}
_RESPONSE = {
    "id": "resp_5f0b6a1d9c3e47b2a8d40e17",
    "object": "response",
    "created_at": 1769851800,
    "status": "completed",
    "error": None,
    "incomplete_details": None,
    "model": "radixkv-demo",
    "output": [
        {
            "id": "msg_5f0b6a1d9c3e47b2a8d40e17",
            "type": "message",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "Page 12.", "annotations": [], "logprobs": []}],
        }
    ],
    "parallel_tool_calls": True,
    "tool_choice": "auto",
    "tools": [],
    "store": False,
    "prompt_cache_diagnostics": None,
    "usage": {
        "input_tokens": 67,
        "input_tokens_details": {
            "cached_tokens": 48,
            "cache_write_tokens": 16,
            "cache_write_tokens_details": {"ttl_30m_tokens": 16, "ttl_12h_tokens": 0},
        },
        "output_tokens": 8,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 75,
    },
}
_CONTENT = {
    "name": "cachedContents/5f0b6a1d9c3e47b2a8d40e17c6f29b83",
    "model": "models/radixkv-demo",
    "displayName": "rules",
    "createTime": "2026-01-31T09:30:00Z",
    "updateTime": "2026-01-31T09:30:00Z",
    "expireTime": "2026-01-31T10:30:00Z",
    "usageMetadata": {"totalTokenCount": 64},
}
_CONTENTS_ASKED = [{"role": "user", "parts": [{"text": "Which page explains pins?"}]}]
_GENERATED = {
    "candidates": [
        {
            "index": 0,
            "content": {"role": "model", "parts": [{"text": "Page 12."}]},
            "finishReason": "STOP",
        }
    ],
    "usageMetadata": {
        "promptTokenCount": 67,
        "cachedContentTokenCount": 64,
        "candidatesTokenCount": 8,
        "totalTokenCount": 75,
    },
    "modelVersion": "radixkv-demo",
    "responseId": "req_5f0b6a1d9c3e47b2a8d40e17",
}
_GENERATE = {"contents": _CONTENTS_ASKED, "generationConfig": {"maxOutputTokens": 8}}
_ASKED = [{"role": "user", "content": "Which page explains pins?"}]
_SERVED = {
    "id": "radixkv-demo",
    "object": "model",
    "created": 1769851800,
    "owned_by": "radixkv",
    "max_model_len": 8192,
    "type": "model",
    "display_name": "radixkv-demo",
    "created_at": "2026-01-31T09:30:00Z",
    "lifecycle": "active",
    "max_input_tokens": 8192,
    "max_tokens": 8192,
    "forgeable_roles": None,
}
_CONTENT_MODEL = {
    "name": "models/radixkv-demo",
    "baseModelId": "radixkv-demo",
    "version": "1",
    "displayName": "radixkv-demo",
    "inputTokenLimit": 8192,
    "outputTokenLimit": 8192,
    "supportedGenerationMethods": [
        "generateContent",
        "streamGenerateContent",
        "countTokens",
        "createCachedContent",
    ],
}
_COUNTS = {
    "requests": 3,
    "read_tokens": 128,
    "read_host_tokens": 64,
    "read_disk_tokens": 0,
    "written_tokens": {"300": 64},
    "uncached_tokens": 9,
    "generated_tokens": 24,
    "held_token_s": 0.0,
    "pinned_token_s": 0.0,
}
_USED = {
    **_COUNTS,
    "hour": "2026-01-31T09:00:00Z",
    "tenant": "acme",
    "key": "0f3a5c7e91b2d4f6",
    "model": "radixkv-demo",
    "kind": "completion",
}
_HEALTHY = {"status": "ok", "reasons": [], "warnings": [], "coordination": "ok"}

OPERATIONS: Mapping[tuple[str, str], Operation] = {
    ("POST", "/v1/warm"): Operation(
        "Prefixes",
        (
            Example("A text", 200, {"prompt": _RULES}),
            Example("A chat, in a namespace of its own", 200, {"messages": _CHAT, "salt": "support-v3"}),
            Example("Token ids, in the background", 202, {"token_ids": _IDS, "wait": False}),
            Example("A text, on all replicas", 200, {"prompt": _RULES, "replicas": "all"}),
        ),
        {200: _WARMED, 202: {"job": _JOB}},
        (*_COMPUTE, *_FLEET),
    ),
    ("GET", "/v1/warm/{job}"): Operation(
        "Prefixes",
        replies={
            200: {
                "job": _JOB,
                "state": "done",
                "progress": {"computed": 64, "total": 64},
                "replicas": [_OUTCOME],
                "result": {**_WARMED, "replicas": [_OUTCOME]},
                "error": None,
            }
        },
        errors=("store_unavailable",),
    ),
    ("POST", "/v1/lookup"): Operation(
        "Prefixes",
        (
            Example("A text", 200, {"prompt": _RULES}),
            Example("A chat, in a namespace of its own", 200, {"messages": _CHAT, "salt": "support-v3"}),
        ),
        {200: {"matched_tokens": 64, "matched_blocks": 4}},
        ("not_read", "generation_unconfirmed"),
    ),
    ("DELETE", "/v1/cache"): Operation(
        "Prefixes", replies={200: {"namespaces": 1, "blocks": 4, "owed": False}}
    ),
    ("POST", "/v1/completions"): Operation(
        "Completions",
        (
            Example("Greedy", 200, {"prompt": _RULES, "max_tokens": 8, "temperature": 0}),
            Example(
                "Two samples, with a stop text",
                200,
                {"prompt": _RULES, "max_tokens": 8, "n": 2, "temperature": 0.7, "seed": 1, "stop": ["\n\n"]},
            ),
            Example(
                "A stream, with the usage at its end",
                200,
                {
                    "prompt": _RULES,
                    "max_tokens": 8,
                    "stream": True,
                    "stream_options": {"include_usage": True},
                },
            ),
            Example(
                "Several prompts as token ids",
                200,
                {"prompt": [_IDS, _IDS[:20]], "max_tokens": 4, "temperature": 0, "salt": "support-v3"},
            ),
            Example(
                "With hints for the eviction policy",
                200,
                {
                    "prompt": _RULES,
                    "max_tokens": 4,
                    "hints": {"labels": {"session": "s-17", "turn": 2}, "priority": 80, "duration_s": 600},
                },
            ),
        ),
        {200: _COMPLETION},
        (*_COMPUTE, "stalled"),
    ),
    ("POST", "/v1/chat/completions"): Operation(
        "Completions",
        (
            Example("A chat", 200, {"messages": _CHAT, "max_tokens": 8, "temperature": 0}),
            Example(
                "A chat that stays resident for half an hour",
                200,
                {
                    "messages": _CHAT,
                    "max_tokens": 8,
                    "prompt_cache_options": {"mode": "implicit", "ttl": "30m"},
                },
            ),
            Example(
                "A stream with a tool",
                200,
                {
                    "messages": _CHAT,
                    "max_tokens": 8,
                    "seed": 1,
                    "stream": True,
                    "stream_options": {"include_usage": True},
                    "tools": [_TOOL],
                },
            ),
        ),
        {200: _CHAT_ANSWER},
        (*_COMPUTE, "stalled"),
    ),
    ("POST", "/v1/responses"): Operation(
        "Completions",
        (
            Example(
                "A text with instructions that stay resident for twelve hours",
                200,
                {
                    "instructions": _RULES,
                    "input": "Which page explains pins?",
                    "max_output_tokens": 8,
                    "prompt_cache_options": {"ttl": "12h"},
                },
            ),
            Example(
                "The prompt alone, ahead of traffic",
                200,
                {"instructions": _RULES, "input": _ASKED, "prompt_cache_options": {"prewarm": True}},
            ),
            Example("A stream", 200, {"input": _ASKED, "max_output_tokens": 8, "stream": True}),
        ),
        {200: _RESPONSE},
        (*_COMPUTE, "stalled"),
    ),
    ("POST", "/v1/responses/input_tokens"): Operation(
        "Completions",
        (Example("A text with instructions", 200, {"instructions": _RULES, "input": "Which page?"}),),
        {200: {"object": "response.input_tokens", "input_tokens": 67}},
    ),
    ("POST", "/v1/messages"): Operation(
        "Completions",
        (
            Example(
                "A system text that stays resident for an hour",
                200,
                {
                    "max_tokens": 8,
                    "system": [
                        {
                            "type": "text",
                            "text": _RULES,
                            "cache_control": {"type": "ephemeral", "ttl": "1h"},
                        }
                    ],
                    "messages": _ASKED,
                },
            ),
            Example("The prompt alone, ahead of traffic", 200, {"max_tokens": 0, "messages": _ASKED}),
            Example("A stream", 200, {"max_tokens": 8, "messages": _ASKED, "stream": True}),
        ),
        {200: _MESSAGE},
        (*_COMPUTE, "stalled"),
    ),
    ("POST", "/v1/messages/count_tokens"): Operation(
        "Completions",
        (Example("A chat", 200, {"system": _RULES, "messages": _ASKED}),),
        {200: {"input_tokens": 67}},
    ),
    ("POST", "/v1beta/cachedContents"): Operation(
        "Cached contents",
        (
            Example(
                "A system text for an hour",
                200,
                {
                    "model": "models/radixkv-demo",
                    "displayName": "rules",
                    "systemInstruction": {"parts": [{"text": _RULES}]},
                    "ttl": "3600s",
                },
            ),
        ),
        {200: _CONTENT},
        (*_COMPUTE, "pin_budget_exceeded", "pin_limit_exceeded", "store_unavailable"),
    ),
    ("GET", "/v1beta/cachedContents"): Operation(
        "Cached contents",
        replies={200: {"cachedContents": [_CONTENT], "nextPageToken": ""}},
    ),
    ("GET", "/v1beta/cachedContents/{content}"): Operation("Cached contents", replies={200: _CONTENT}),
    ("PATCH", "/v1beta/cachedContents/{content}"): Operation(
        "Cached contents",
        (Example("Of a content that doesn't exist", 404, {"ttl": "7200s"}),),
        {200: _CONTENT},
    ),
    ("DELETE", "/v1beta/cachedContents/{content}"): Operation("Cached contents", replies={200: {}}),
    ("POST", "/v1beta/models/{model}:generateContent"): Operation(
        "Cached contents", (Example("A text", 200, _GENERATE),), {200: _GENERATED}, (*_COMPUTE, "stalled")
    ),
    ("POST", "/v1beta/models/{model}:streamGenerateContent"): Operation(
        "Cached contents",
        (Example("A text", 200, _GENERATE),),
        {200: [_GENERATED]},
        errors=(*_COMPUTE, "stalled"),
    ),
    ("POST", "/v1beta/models/{model}:countTokens"): Operation(
        "Cached contents",
        (
            Example("A text", 200, {"contents": _CONTENTS_ASKED}),
            Example(
                "A request with a system text",
                200,
                {
                    "generateContentRequest": {
                        "contents": _CONTENTS_ASKED,
                        "systemInstruction": {"parts": [{"text": _RULES}]},
                    }
                },
            ),
        ),
        {200: {"totalTokens": 67}},
    ),
    ("GET", "/v1beta/models"): Operation("Cached contents", replies={200: {"models": [_CONTENT_MODEL]}}),
    ("GET", "/v1beta/models/{model}"): Operation("Cached contents", replies={200: _CONTENT_MODEL}),
    ("GET", "/v1/models"): Operation(
        "Completions",
        replies={
            200: {
                "object": "list",
                "data": [_SERVED],
                "has_more": False,
                "first_id": "radixkv-demo",
                "last_id": "radixkv-demo",
            }
        },
    ),
    ("GET", "/v1/models/{model}"): Operation("Completions", replies={200: _SERVED}),
    ("POST", "/tokenize"): Operation(
        "Completions",
        (
            Example("A text", 200, {"prompt": "Which page explains pins?"}),
            Example("A chat", 200, {"messages": _CHAT}),
        ),
        {200: {"count": 3, "max_model_len": 8192, "tokens": [100, 101, 102]}},
    ),
    ("POST", "/detokenize"): Operation(
        "Completions",
        (Example("Token ids", 200, {"tokens": _IDS}),),
        {200: {"prompt": "Which page explains pins?"}},
    ),
    ("POST", "/v1/pins"): Operation(
        "Pins",
        (
            Example(
                "On all replicas, which compute it if they lack it",
                201,
                {
                    "prompt": _RULES,
                    "ttl_s": 600,
                    "replicas": "all",
                },
            ),
            Example("On this replica, after a warm", 201, {"prompt": _RULES, "ttl_s": 600}),
        ),
        {201: _PIN},
        (
            *_COMPUTE,
            "not_resident",
            "pin_budget_exceeded",
            "pin_limit_exceeded",
            "store_unavailable",
            "unreachable",
        ),
    ),
    ("GET", "/v1/pins"): Operation("Pins", replies={200: {"pins": [_PIN]}}, errors=("store_unavailable",)),
    ("DELETE", "/v1/pins/{pin}"): Operation("Pins", errors=("store_unavailable",)),
    ("POST", "/v1/route"): Operation(
        "Fleet",
        (
            Example("The three best replicas", 200, {"prompt": _RULES, "limit": 3}),
            Example(
                "Ranked by load and matches, without a later request",
                200,
                {"messages": _CHAT, "cost": "lmetric", "predict": False},
            ),
        ),
        {
            200: {
                "prompt_tokens": 64,
                "model": _MODEL,
                "by_load": False,
                "candidates": [
                    {
                        "replica": "replica-ba3a0a99",
                        "address": "http://127.0.0.1:8400",
                        "matched_tokens": {"device": 64},
                        "why": "linear: holds 64 of 64 tokens, 0 more predicted",
                    }
                ],
            }
        },
        ("no_replica", "not_read", "generation_unconfirmed"),
    ),
    ("GET", "/v1/replicas"): Operation("Fleet", replies={200: {"replicas": [_REPLICA]}}),
    ("GET", "/v1/keys"): Operation("Keys", replies={200: {"keys": [_KEY]}}),
    ("POST", "/v1/keys"): Operation(
        "Keys", replies={201: {**_NEW_KEY, "tenant": None}}, errors=("conflict", "not_saved")
    ),
    ("POST", "/v1/keys/{key}/rotate"): Operation(
        "Keys", replies={200: _NEW_KEY}, errors=("conflict", "not_saved")
    ),
    ("DELETE", "/v1/keys/{key}"): Operation("Keys", errors=("conflict", "not_saved")),
    ("PUT", "/v1/tenants/{tenant}"): Operation(
        "Tenants",
        (
            Example(
                "Guarantees and limits",
                200,
                {"weight": 2, "guaranteed_blocks": 64, "max_blocks": 512, "requests_per_s": 50},
            ),
            Example("Strict isolation", 200, {"mode": "strict", "guaranteed_blocks": 64}),
            Example("The defaults", 200, {}),
        ),
        {200: _TENANT},
        ("conflict", "not_saved", "not_read"),
    ),
    ("GET", "/v1/tenants"): Operation("Tenants", replies={200: {"tenants": [_TENANT], "unserved": []}}),
    ("POST", "/v1/tenants/{tenant}/keys"): Operation(
        "Keys", replies={201: _NEW_KEY}, errors=("conflict", "not_saved")
    ),
    ("POST", "/v1/tenants/{tenant}/purge"): Operation(
        "Tenants", replies={200: {**_PURGE, "blocks": 96}}, errors=("store_unavailable",)
    ),
    ("GET", "/v1/tenants/{tenant}/purge"): Operation(
        "Tenants", replies={200: _PURGE}, errors=("store_unavailable",)
    ),
    ("DELETE", "/v1/tenants/{tenant}"): Operation(
        "Tenants", errors=("conflict", "not_saved", "store_unavailable")
    ),
    ("GET", "/v1/stats"): Operation("Tenants", replies={200: _STATS}),
    ("GET", "/v1/usage"): Operation(
        "Tenants", replies={200: {"mode": "burst", "rows": [_USED], "total": _COUNTS}}
    ),
    ("POST", "/v1/bases"): Operation(
        "Bases",
        (
            Example("A text", 201, {"id": "assistant-v3", "prompt": _RULES, "readers": ["acme", "globex"]}),
            Example(
                "Token ids, for an adapter",
                201,
                {"id": "assistant-v3-sql", "token_ids": _IDS, "readers": ["acme"], "adapter": "sql"},
            ),
        ),
        {201: {**_BASE, "computed": 64, "left_out": 3, "seconds": 0.043}},
        _COMPUTE,
    ),
    ("GET", "/v1/bases"): Operation("Bases", replies={200: {"bases": [_BASE]}}),
    ("PUT", "/v1/bases/{base}/readers"): Operation(
        "Bases",
        (
            Example("One reader", 200, {"readers": ["acme"]}),
            Example("No reader", 200, {"readers": []}),
        ),
        {200: {**_BASE, "readers": ["acme"]}},
        ("not_read",),
    ),
    ("DELETE", "/v1/bases/{base}"): Operation("Bases"),
    ("GET", "/metrics"): Operation(
        "Process",
        replies={
            200: "# HELP radixkv_cache_num_blocks Capacity, in blocks\n"
            "# TYPE radixkv_cache_num_blocks gauge\nradixkv_cache_num_blocks 4096.0\n"
        },
    ),
    ("GET", "/health"): Operation(
        "Process",
        replies={
            200: _HEALTHY,
            503: {
                "status": "unhealthy",
                "reasons": ["integrity: an invariant of the cache is broken"],
                "warnings": [],
                "coordination": "ok",
            },
        },
    ),
    ("GET", "/version"): Operation("Process", replies={200: {"version": "0.1.0"}}),
    ("GET", "/healthz"): Operation(
        "Process",
        replies={
            200: _HEALTHY,
            503: {
                "status": "unhealthy",
                "reasons": ["integrity: an invariant of the cache is broken"],
                "warnings": [],
                "coordination": "ok",
            },
        },
    ),
    ("GET", "/readyz"): Operation(
        "Process",
        replies={200: _HEALTHY, 503: {**_HEALTHY, "status": "not_ready", "reasons": ["stopping"]}},
    ),
    ("GET", "/openapi.json"): Operation("Process"),
}
"""By method and path, in the order in which the request examples are sent."""

PARAMETERS: Mapping[str, str | int] = {
    "job": _JOB,
    "tenant": "initech",
    "key": "0f3a5c7e91b2d4f6",
    "pin": "1",
    "base": "assistant-v3",
    "model": "radixkv-demo",
    "limit": 100,
    "after": "1",
    "from": "2026-01-31T09:00:00Z",
    "to": "2026-02-01T00:00:00Z",
    "page": "1769850000-0f3a5c7e91b2d4f6",
    "all": "true",
    "alt": "sse",
    "content": "5f0b6a1d9c3e47b2a8d40e17c6f29b83",
    "pageSize": 100,
    "after_id": "radixkv-demo",
    "before_id": "radixkv-demo",
    "pageToken": "5f0b6a1d9c3e47b2a8d40e17c6f29b83",
    "updateMask": "ttl",
    "salt": "support-v3",
    "adapter": "sql",
    "Idempotency-Key": "warm-support-v3-2026-01-31",
}
"""Examples of parameters, by name."""
