"""A tenant sees the same replies whether or not other tenants are active.

The test runs acme's requests in two worlds. In one, acme is alone. In the other, globex sends requests between any two
requests of acme, and the operator creates, changes, purges and removes other tenants and their keys.

The test compares every reply of every endpoint that a tenant may call: status, headers, body and the events of streams.
Before that it removes, by name, the values that are random or depend on time: acme's random handles, and durations.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from radixkv.service.app import ENDPOINTS
from tests.service.running import Running, service_in_thread
from tests.waiting import eventually

pytestmark = pytest.mark.slow

RANDOM = {"id", "job", "responseId", "name"}
TIMES = {
    "seconds", "created", "queued_s", "time_to_first_token_s", "total_s", "lease_remaining_s", "lag_s", "staleness_s",
    "ttl_s", "held_token_s", "pinned_token_s", "hour", "createTime", "updateTime", "expireTime", "created_at",
    "completed_at",
}  # fmt: skip
PLACES = {"epoch", "address"}
"""Values of the process, not of tenants: when it started, and the port that the test chose."""

TEXT = "".join(f"Rule {number}: answer politely, name the page, ask if in doubt.\n" for number in range(12))
IDS = list(range(40, 200))
USAGE = {"include_usage": True}
CHAT = {"messages": [{"role": "user", "content": TEXT}]}

Ask = Callable[..., httpx.Response]


def scene(ask: Ask) -> None:
    """Send acme's requests: every endpoint, and every reason for a refusal."""
    greedy = {"max_tokens": 4, "temperature": 0, "ignore_eos": True}
    for _ in range(2):
        ask("POST", "/v1/lookup", {"prompt": TEXT})
        ask("POST", "/v1/warm", {"prompt": TEXT})
        ask("POST", "/v1/warm", {"token_ids": IDS, "salt": "s", "replicas": "all"})
        ask("POST", "/v1/completions", {"prompt": IDS, **greedy, "n": 2})
        ask("POST", "/v1/completions", {"prompt": TEXT, **greedy, "use_beam_search": True, "n": 2})
        ask("POST", "/v1/completions", {"prompt": TEXT, "max_tokens": 4, "seed": 1, "n": 2, "echo": True})
        ask("POST", "/v1/completions", {"prompt": TEXT, **greedy, "stream": True})
        ask(
            "POST",
            "/v1/completions",
            {"prompt": IDS, **greedy, "stream": True, "n": 2, "stream_options": USAGE},
        )
        ask("POST", "/v1/chat/completions", {**CHAT, **greedy, "n": 2})
        ask("POST", "/v1/chat/completions", {**CHAT, **greedy, "stream": True, "stream_options": USAGE})
        ask("POST", "/v1/route", {"prompt": TEXT, "predict": False})
        ask("POST", "/v1/route", {"prompt": TEXT, "cost": "lmetric"})
        ask("GET", "/v1/stats")
        ask("GET", "/v1/replicas")
        providers(ask, greedy)
    ask("POST", "/v1/pins", {"token_ids": IDS, "salt": "s", "ttl_s": 600})
    ask("POST", "/v1/pins", {"token_ids": IDS, "salt": "nowhere", "ttl_s": 600})
    ask("GET", "/v1/pins")
    ask("DELETE", "/v1/pins/1")
    ask("DELETE", "/v1/pins/1")
    jobs = [ask("POST", "/v1/warm", {"token_ids": IDS[n:], "wait": False}).json()["job"] for n in (0, 1)]
    for job in jobs:
        eventually(lambda job=job: ask("GET", f"/v1/warm/{job}", note=False).json()["state"] == "done")
        ask("GET", f"/v1/warm/{job}")
    ask("GET", "/v1/warm/none")
    ask("DELETE", "/v1/cache?salt=s")
    ask("DELETE", "/v1/cache?salt=s")
    ask("DELETE", "/v1/cache?adapter=theirs")
    for path in ("/v1/warm", "/v1/lookup", "/v1/completions"):
        ask("POST", path, {"prompt": TEXT, "tenant": "globex"})
        ask("POST", path, {"prompt": 7})
    ask("POST", "/v1/completions", {"prompt": IDS, "max_tokens": 80000})
    ask("POST", "/v1/warm", {"token_ids": [7] * 80_000})
    for content in (b"{", b"[]", b"\xff", b'{"prompt": "' + b"x" * (9 << 20) + b'"}'):
        ask("POST", "/v1/lookup", content=content)
    for method in ("HEAD", "OPTIONS", "PATCH"):
        ask(method, "/v1/stats")
    for path in (
        "/metrics",
        "/v1/keys",
        "/v1/tenants",
        "/v1/bases",
        "/healthz",
        "/readyz",
        "/health",
        "/version",
        "/v1/models",
        "/v1/models/radixkv-demo",
        "/v1/models/theirs",
        "/openapi.json",
        "/nowhere",
    ):
        ask("GET", path)
    for method, path in (
        ("POST", "/v1/keys"), ("POST", "/v1/keys/x/rotate"), ("DELETE", "/v1/keys/x"), ("PUT", "/v1/tenants/globex"),
        ("DELETE", "/v1/tenants/globex"), ("POST", "/v1/tenants/globex/purge"),
        ("GET", "/v1/tenants/globex/purge"), ("POST", "/v1/tenants/globex/keys"), ("PUT", "/v1/stats"),
        ("POST", "/v1/bases"), ("PUT", "/v1/bases/both/readers"), ("DELETE", "/v1/bases/both"),
    ):  # fmt: skip
        ask(method, path)
    ask("GET", "/v1/stats")
    ask("DELETE", "/v1/cache")
    ask("GET", "/v1/stats")


def providers(ask: Ask, greedy: dict[str, Any]) -> None:
    """The shapes of the providers, with breakpoints, and a cached content from its creation to its end."""
    short = {"max_tokens": 4, "temperature": 0}
    marked = [{"type": "text", "text": TEXT, "cache_control": {"type": "ephemeral"}}]
    chat = {"model": MODEL, "messages": [{"role": "user", "content": marked}]}
    ask("POST", "/v1/messages", {**chat, **short})
    ask("POST", "/v1/messages/count_tokens", chat)
    ask("POST", "/v1/responses", {"model": MODEL, "input": TEXT, "max_output_tokens": 4, "temperature": 0})
    ask("POST", "/v1/responses/input_tokens", {"model": MODEL, "input": TEXT})
    ask("POST", "/tokenize", {"prompt": TEXT})
    ask("POST", "/detokenize", {"tokens": IDS})
    contents = [{"role": "user", "parts": [{"text": TEXT}]}]
    made = ask(
        "POST", "/v1beta/cachedContents", {"model": f"models/{MODEL}", "contents": contents, "ttl": "600s"}
    )
    ask("GET", "/v1beta/cachedContents")
    path = f"/v1beta/{made.json()['name']}"
    ask("GET", path)
    ask("PATCH", path, {"ttl": "900s"})
    asked = {"contents": contents, "generationConfig": {"maxOutputTokens": 4, "temperature": 0}}
    ask("POST", f"/v1beta/models/{MODEL}:generateContent", asked)
    ask("POST", f"/v1beta/models/{MODEL}:streamGenerateContent?alt=sse", asked)
    ask("POST", f"/v1beta/models/{MODEL}:countTokens", {"contents": contents})
    ask("GET", "/v1beta/models")
    ask("GET", f"/v1beta/models/{MODEL}")
    ask("DELETE", path)
    ask("GET", path)
    ask("GET", "/v1/usage")
    ask("GET", "/v1/usage?tenant=globex")


def disturb(live: Running, number: int) -> None:
    """Send requests of some kind for other tenants, also with acme's prompts.

    The kind and the amount change with ``number``. The operator's requests concern other tenants only.
    """
    globex, operator = live.globex, live.operator
    body = {"max_tokens": 2, "ignore_eos": True, "n": 1 + number % 3}
    kinds: list[tuple[str, dict[str, Any]]] = [
        ("/v1/warm", {"prompt": TEXT, "salt": ("", "s")[number % 2], "adapter": "theirs"}),
        ("/v1/completions", {**body, "prompt": [*IDS, number], "salt": str(number)}),
        ("/v1/completions", {"prompt": "x", "bad": number}),
        ("/v1/warm", {"token_ids": IDS[number % 30 :], "wait": False}),
        ("/v1/chat/completions", {**CHAT, "max_tokens": 2, "n": 1 + number % 3}),
    ]
    path, asked = kinds[number % len(kinds)]
    globex.post(path, json=asked)
    if number % 7 == 6:
        globex.delete("/v1/cache", params={"salt": str(number)})
    if number % 9 == 8:
        other = f"other{number}"
        assert operator.post(f"/v1/tenants/{other}/keys").is_success
        operator.put(f"/v1/tenants/{other}", json={"weight": 1.0 + number, "guaranteed_blocks": number % 3})
        assert operator.post("/v1/tenants/globex/purge").is_success
        assert operator.delete(f"/v1/tenants/{other}").is_success


@contextmanager
def service(mode: str, folder: Path) -> Iterator[Running]:
    """In burst mode the cache has enough blocks for both.

    In strict mode acme has a guarantee, and globex has fewer blocks than it asks for.
    """
    keys = folder / "keys.json"
    tenants = {
        "acme": {"keys": ["demo-acme"], "mode": mode, "guaranteed_blocks": 300},
        "globex": {"keys": ["demo-globex"], "mode": mode, "guaranteed_blocks": 40},
    }
    keys.write_text(json.dumps({"operator": "demo-operator", "tenants": tenants}))
    num_blocks = {"burst": "4096", "strict": "344"}[mode]
    base = {"id": "both", "token_ids": IDS[:64], "readers": ["acme", "globex"]}
    with service_in_thread(replica="one", keys=str(keys), **{"num-blocks": num_blocks}) as running:
        assert running.operator.post("/v1/bases", json=base).status_code == 201
        yield running


def observed(
    mode: str, folder: Path, with_others: bool
) -> tuple[list[Any], set[tuple[str, str]], dict[str, list[str]]]:
    """The replies to acme without values that may differ, the endpoints that it called, and its random handles."""
    seen: list[Any] = []
    called: set[tuple[str, str]] = set()
    handles: dict[str, list[str]] = {name: [] for name in RANDOM}
    with service(mode, folder) as live:

        def ask(
            method: str, path: str, body: Any = None, *, note: bool = True, content: bytes | None = None
        ) -> httpx.Response:
            if with_others and note:
                disturb(live, len(seen))
            sent = {} if body is None else {"json": body}
            answer = live.acme.request(method, path, **sent if content is None else {"content": content})
            if note:
                called.add((method, urlsplit(path).path))
                seen.append(
                    (
                        method,
                        re.sub(r"[\w-]{32}", "{job}", path),
                        answer.status_code,
                        headers(answer),
                        contents(answer, handles),
                    )
                )
            return answer

        scene(ask)
    return seen, called, handles


def headers(answer: httpx.Response) -> dict[str, str]:
    return {name: text for name, text in answer.headers.items() if name not in NO_FACTS}


def contents(answer: httpx.Response, handles: dict[str, list[str]]) -> Any:
    if answer.headers.get("content-type", "").startswith("text/event-stream"):
        is_gemini = answer.url.path.endswith(":streamGenerateContent")
        return (gemini_events if is_gemini else events)(answer.text, handles)
    if answer.url.path == "/openapi.json":
        return answer.json()  # its examples are no handles
    if answer.url.path == "/v1/usage" and answer.is_success:
        usage = answer.json()
        return plain(usage | {"rows": over_all_hours(usage["rows"])}, handles)
    return plain(answer.json(), handles) if answer.content else None


def over_all_hours(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of a usage report, added up over hours, which may change at any time.

    Without what is held: that has a row once a second has passed.
    """
    sums: dict[str, dict[str, Any]] = {}
    for row in rows:
        labels = {name: each for name, each in row.items() if isinstance(each, str) and name != "hour"}
        counts = {name: each for name, each in row.items() if not isinstance(each, str) and name not in TIMES}
        if row["kind"] != "held":
            before = sums.setdefault(json.dumps(labels, sort_keys=True), labels)
            sums[json.dumps(labels, sort_keys=True)] = before | {
                name: added(before.get(name), each) for name, each in counts.items()
            }
    return [sums[label] for label in sorted(sums)]


def added(one: Any, other: Any) -> Any:
    """The sum of two counts, or of two mappings to counts; None counts nothing."""
    if one is None or not isinstance(other, dict):
        return other if one is None else one + other
    return {name: one.get(name, 0) + other.get(name, 0) for name in sorted(one | other)}


ROLE = {"role": "assistant", "refusal": None}
"""The first delta of a chat, without its text."""
MODEL = "radixkv-demo"
STREAMED = ("text_completion", "chat.completion.chunk")
NO_FACTS = (
    *("date", "content-length", "x-request-id", "request-id"),
    *(f"x-ratelimit-{name}-requests" for name in ("limit", "remaining", "reset")),
)
"""Headers that are random, or depend on time or on the length of random values. The last ones depend on the times of
the tenant's own requests alone: see ``test_provider_errors``."""


def text_of(choice: dict[str, Any]) -> str:
    """Take the text off a choice of a completion or of a chat."""
    return str(choice.pop("text") if "text" in choice else choice["delta"].pop("content", ""))


def events(text: str, handles: dict[str, list[str]]) -> Any:
    """The text of each choice of a stream, and all values of its last events once.

    Check that the stream has only data lines and one id, and that earlier events have nothing but text: a busy machine
    joins some of them.
    """
    *lines, end = text.split("\n\n")
    assert end == "" and lines.pop() == "data: [DONE]" and all(line.startswith("data: {") for line in lines)
    found = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert len({each["id"] for each in found}) == 1
    said: dict[int, str] = {}
    others: list[Any] = []
    for each in found:
        each = plain(each, handles)
        choices = each.pop("choices")
        for choice in choices:
            said[choice["index"]] = said.get(choice["index"], "") + text_of(choice)
        if choices and all(choice["finish_reason"] is None for choice in choices):
            assert each.pop("usage", None) is None
            assert each in [{"object": kind, "model": "radixkv-demo"} for kind in STREAMED]
            assert all(choice.pop("delta", {}) in ({}, ROLE) for choice in choices)
            assert all(set(choice) == {"index", "logprobs", "finish_reason"} for choice in choices)
            assert all(choice["logprobs"] is None for choice in choices)
            continue
        for other in (*choices, each):
            others += [other] if other not in others else []
    return said, sorted(map(json.dumps, others))


def gemini_events(text: str, handles: dict[str, list[str]]) -> Any:
    """The whole text of a stream of Gemini's, and all else of its last event."""
    found = [json.loads(line.removeprefix("data: ")) for line in text.split("\n\n") if line.strip()]
    parts = [part["text"] for each in found for part in each["candidates"][0]["content"].pop("parts")]
    return "".join(parts), plain(found[-1], handles)


def plain(value: Any, handles: dict[str, list[str]]) -> Any:
    """A document without the values that may differ."""
    if isinstance(value, list):
        return [plain(each, handles) for each in value]
    if not isinstance(value, dict):
        return value
    for name in RANDOM & set(value):
        if (
            isinstance(value[name], str) and value[name] != "one" and not value[name].isdecimal()
        ):  # a pin's id
            handles[name].append(value[name])
    kept = {name: each for name, each in value.items() if name not in RANDOM | TIMES | PLACES}
    return {name: plain(each, handles) for name, each in kept.items()}


@pytest.fixture(scope="module", params=["burst", "strict"])
def worlds(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("worlds")
    return observed(request.param, folder, False), observed(request.param, folder, True)


def test_a_tenant_sees_the_same_in_both_worlds(worlds: Any) -> None:
    (alone, _, _), (beside, _, _) = worlds
    assert len(alone) == len(beside) > 50
    for one, other in zip(alone, beside, strict=True):
        assert one == other


def test_every_endpoint_was_called(worlds: Any) -> None:
    (_, called, _), _ = worlds
    patterns = {
        (each.method, re.compile(re.sub(r"{\w+}", r"[^?]+", each.path) + r"\Z"))
        for each in ENDPOINTS
        if not each.internal
    }
    missed = [
        (method, pattern.pattern)
        for method, pattern in patterns
        if not any(method == each and pattern.match(path) for each, path in called)
    ]
    assert missed == []


def test_handles_are_random_and_count_nothing(worlds: Any) -> None:
    for _, _, handles in worlds:
        assert len(handles["job"]) >= 4 and len(handles["id"]) >= 8
        for names, pattern in (
            (handles["job"], r"[A-Za-z0-9_-]{32}"),
            (
                [name for name in handles["id"] if name != MODEL],
                r"((chat)?cmpl-|(msg|resp|req)_)[0-9a-f]{24}",
            ),
            (handles["responseId"], r"req_[0-9a-f]{24}"),
            (
                [name for name in handles["name"] if "/" in name and MODEL not in name],
                r"cachedContents/[A-Za-z0-9_-]{20,}",
            ),
        ):
            assert all(re.fullmatch(pattern, name) for name in names)
            drawn = [re.sub(r"^(chat)?(cmpl-|[a-z]+_|cachedContents/)", "", name) for name in names]
            assert len({name[:8] for name in drawn}) == len({name[-8:] for name in drawn}) == len(set(names))
    shared = set(worlds[0][2]["id"]) & set(worlds[1][2]["id"])
    assert shared <= {MODEL}, "another process uses other ids for the same requests"


def test_no_reply_names_a_block(worlds: Any) -> None:
    """Block ids, node ids and sequence numbers have no field in any reply. Replies have no unknown fields."""
    (alone, _, _), _ = worlds
    names = set(
        re.findall(r'"(\w+)":', json.dumps([each[4] for each in alone if each[1] != "/openapi.json"]))
    )
    assert not {
        name for name in names if re.search(r"block_id|block_table|node|_seq|generation|counter", name)
    } - {"last_seq", "stop_sequence"}
    replicas = [each[4]["replicas"][0] for each in alone if each[1] == "/v1/replicas"]
    assert replicas and all(each["last_seq"] is None for each in replicas)


def test_no_header_counts_anything(worlds: Any) -> None:
    """Every header of every reply is in a fixed list. No header identifies a request, a connection or a process."""
    (alone, _, _), _ = worlds
    known = {
        "allow", "cache-control", "content-security-policy", "content-type", "cross-origin-resource-policy",
        "referrer-policy", "retry-after",
        "transfer-encoding", "vary", "x-accel-buffering", "x-content-type-options", "x-frame-options",
    }  # fmt: skip
    names = {name for each in alone for name in each[3]}
    assert names <= known, names - known
