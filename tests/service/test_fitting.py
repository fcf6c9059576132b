"""A request that can never fit is told so at once, with the numbers; one that fits is served, up to the last block."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from radixkv import audit
from radixkv.service.fitting import Room, blocks_needed
from radixkv.service.problems import ApiError
from tests.service.accounts import Accounts, settled
from tests.service.running import KEYS, Running, service_in_thread

pytestmark = pytest.mark.slow

SIZE = 16
MOST = 12
"""Blocks that the tenant may use."""
TEXT = "Rule: answer politely, and name the page. " * 4
ASKS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": TEXT, "max_tokens": 400},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 400},
    "/v1/responses": {"input": TEXT, "max_output_tokens": 400},
    "/v1/messages": {
        "model": "radixkv-demo",
        "messages": [{"role": "user", "content": TEXT}],
        "max_tokens": 400,
    },
    "/v1beta/models/radixkv-demo:generateContent": {
        "contents": [{"role": "user", "parts": [{"text": TEXT}]}],
        "generationConfig": {"maxOutputTokens": 400},
    },
}
CHAT, RESPONSES, MESSAGES, CONTENTS = [*ASKS][1:]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    path = tmp_path_factory.mktemp("keys") / "keys.json"
    tenants = {name: {"keys": [KEYS[name]]} for name in ("acme", "globex")}
    path.write_text(json.dumps({"operator": KEYS["operator"], "tenants": tenants}))
    path.chmod(0o600)
    with service_in_thread(keys=str(path), **{"num-blocks": "64"}) as running:
        yield running
        audit.check(running.service.cache)


@pytest.fixture
def live(shared: Running) -> Running:
    """A service whose tenants have nothing resident, and no settings."""
    for tenant in ("acme", "globex"):
        assert shared.operator.post(f"/v1/tenants/{tenant}/purge").json()["complete"]
        put(shared, {}, tenant)
    return shared


def put(live: Running, settings: dict[str, Any], tenant: str = "acme") -> None:
    answer = live.operator.put(f"/v1/tenants/{tenant}", json=settings)
    assert answer.status_code == 200, answer.text


def message_of(body: dict[str, Any]) -> str:
    return str(body["error"]["message"])


def with_stream(path: str, body: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    return (
        (path.replace(":generate", ":streamGenerate"), body)
        if path == CONTENTS
        else (path, {**body, "stream": True})
    )


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("path", ASKS)
@pytest.mark.parametrize("kind", ["own", "strict", "others"])
def test_what_can_never_fit_is_a_400_with_the_numbers(
    live: Running, path: str, is_stream: bool, kind: str
) -> None:
    if kind == "others":
        put(live, {"guaranteed_blocks": 64 - MOST}, "globex")
    else:
        strict = {"guaranteed_blocks": MOST, "mode": "strict"}
        put(live, strict if kind == "strict" else {"max_blocks": MOST})
    accounts = Accounts(live)
    asked, body = with_stream(path, ASKS[path]) if is_stream else (path, ASKS[path])
    answer = live.acme.post(asked, json=body)
    assert answer.status_code == 400 and "retry-after" not in answer.headers, answer.text
    assert f"{MOST} that this tenant" in message_of(answer.json()) and "blocks of 16" in answer.text
    usage, metrics, stats = accounts.grown()
    assert not usage and not metrics and not stats, "nothing was computed"


@pytest.mark.parametrize("path", [CHAT, RESPONSES, CONTENTS])
def test_an_answer_of_no_stated_length_is_as_long_as_fits(live: Running, path: str) -> None:
    fitting = 7  # the demo model's own limit is 64 tokens
    put(live, {"max_blocks": fitting})
    body = {
        name: value
        for name, value in ASKS[path].items()
        if name not in ("max_tokens", "max_output_tokens", "generationConfig")
    } | ({} if path == CONTENTS else {"ignore_eos": True})
    answer = live.acme.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert live.acme.get("/v1/stats").json()["used_blocks"] <= fitting
    if path == CHAT:
        assert answer.json()["usage"]["total_tokens"] == fitting * SIZE + 1
        assert answer.json()["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    "num_tokens",
    [1, pytest.param(15, marks=pytest.mark.release), 16, 17, pytest.param(100, marks=pytest.mark.release)],
)
@pytest.mark.parametrize("kind", ["greedy", "samples", "prompts", "pool"])
def test_the_longest_answer_that_fits_is_served_and_one_more_token_is_not(
    live: Running, num_tokens: int, kind: str
) -> None:
    """The last token needs no place. Two samples each have a tail; two prompts share their first blocks."""
    most = 64 if kind == "pool" else MOST
    put(live, {} if kind == "pool" else {"max_blocks": most})
    prompt = list(range(40, 40 + num_tokens))
    whole, rest = divmod(num_tokens, SIZE)
    rows = 2 if kind in ("samples", "prompts") else 1
    longest = (most - whole) // rows * SIZE - rest + 1
    body: dict[str, Any] = {"prompt": prompt, "ignore_eos": True, "max_tokens": longest}
    if kind == "samples":
        body |= {"n": 2, "temperature": 1.0, "seed": 3}
    if kind == "prompts":
        body["prompt"] = [prompt, [*prompt[: whole * SIZE], *range(900, 900 + rest)]]
    answer = live.acme.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == rows * longest
    more = live.acme.post("/v1/completions", json={**body, "max_tokens": longest + 1})
    if kind in ("greedy", "pool") or (most - whole) % 2 == 0:
        assert more.status_code == 400 and "retry-after" not in more.headers


def test_prefixes_that_can_never_fit(live: Running) -> None:
    put(live, {"max_blocks": MOST})
    ids = list(range(40, 40 + SIZE * (MOST + 1)))
    for body in ({}, {"wait": False}, {"replicas": "all"}, {"replicas": 1, "wait": False}):
        answer = live.acme.post("/v1/warm", json={"token_ids": ids, **body})
        assert answer.status_code == 400 and "retry-after" not in answer.headers
        error = answer.json()["error"]
        assert (error["type"], error["value"], error["allowed"]) == (
            "quota_exceeded", MOST + 1, f"at most {MOST} blocks",
        )  # fmt: skip
    assert live.acme.post("/v1/warm", json={"token_ids": ids[: SIZE * MOST]}).status_code == 200


def test_a_base_counts_for_no_reader(live: Running) -> None:
    put(live, {"max_blocks": MOST})
    ids = list(range(40, 40 + SIZE * 20))
    base = {"id": "base", "token_ids": ids, "readers": ["acme"]}
    assert live.operator.post("/v1/bases", json=base).status_code == 201
    try:
        body = {"prompt": [*ids, 7, 8], "max_tokens": 8}
        answer = live.acme.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        assert live.globex.post("/v1/completions", json=body).status_code == 200
        more = live.acme.post("/v1/completions", json={**body, "max_tokens": SIZE * MOST})
        assert more.status_code == 400
    finally:
        assert live.operator.delete("/v1/bases/base").status_code == 204
    assert live.acme.post("/v1/completions", json=body).status_code == 400


def test_what_has_no_room_now_is_told_to_try_again(live: Running) -> None:
    cache: Any = live.service.cache
    held = cache.open(live.service.namespace("globex", "", None), [5] * (SIZE * 60))
    answer = live.acme.post("/v1/completions", json={"prompt": [6] * 100, "max_tokens": 8})
    assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
    held.release()


def test_a_share_that_may_grow_is_a_503_before_anything_is_computed() -> None:
    room = Room(None, 10, 64)
    with pytest.raises(ApiError) as found:
        room.require(11, SIZE, "max_tokens")
    assert found.value.status == 503 and found.value.headers["Retry-After"] == "1"
    room.require(10, SIZE, "max_tokens")
    assert room.most == 10 and room.tokens_left(20, 1, SIZE) == 9 * SIZE - 4 + 1


def test_a_guarantee_counts_only_as_far_as_its_share(live: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    put(live, {"guaranteed_blocks": 40}, "globex")
    quotas = live.service.quotas
    assert quotas.room("acme") == Room(None, None, 24) and quotas.room("globex") == Room(None, None, 64)
    monkeypatch.setattr(quotas, "_limits", {"globex": 60})
    monkeypatch.setattr(type(quotas), "granted", lambda self, tenant: 30 if tenant == "globex" else None)
    monkeypatch.setattr(type(quotas), "limit", lambda self, tenant: self._limits.get(tenant))
    assert quotas.room("acme") == Room(None, None, 34) and quotas.room("globex") == Room(60, 30, 64)


def test_blocks_are_counted_once() -> None:
    a, b = bytes(range(64)) * 3, bytes(range(64)) * 2 + b"x" * 64  # of three blocks; two are equal
    assert blocks_needed([a], 1, 1, SIZE) == 3 and blocks_needed([a], 1, 2, SIZE) == 4
    assert blocks_needed([a, b], 1, 1, SIZE) == 4 and blocks_needed([a, a, b], 2, 17, SIZE) == 4 + 6
    assert blocks_needed([a[:60]], 3, 2, SIZE) == 3 and blocks_needed([a, b], 1, 1, SIZE, [2, 2]) == 2
    assert blocks_needed([b"x" * 64, b"y" * 64, b"x" * 128], 1, 1, SIZE) == 3


@pytest.mark.parametrize(
    "settings",
    [
        {"max_blocks": 20, "max_pinned_blocks": 20},
        {"max_blocks": 20, "max_pinned_blocks": 19},
        {"guaranteed_blocks": 20, "mode": "strict"},
        {"guaranteed_blocks": 20, "max_blocks": 20},
        {"max_pinned_blocks": 64},
    ],
    ids=str,
)
def test_a_tenant_cannot_lock_itself_out_by_its_pins(live: Running, settings: dict[str, Any]) -> None:
    """It pins what it may, for an hour. Then a new prompt is served, and a pinned one is read."""
    if (
        settings.get("max_pinned_blocks") == settings.get("max_blocks")
        and len(settings) == 2
        and "mode" not in settings
    ):
        refused = live.operator.put("/v1/tenants/acme", json=settings)
        error = refused.json()["error"]
        assert (refused.status_code, error["field"]) == (422, "max_pinned_blocks")
        assert error["allowed"].startswith("at most 19")
        return
    put(live, settings)
    most = settings.get("max_blocks", settings.get("guaranteed_blocks", 64))
    refusals, pinned = [], list[list[int]]()
    for number in range(most):
        ids = [*range(100 * number, 100 * number + 2 * SIZE)]
        warmed = live.acme.post("/v1/warm", json={"token_ids": ids})
        if warmed.status_code != 200:
            break
        answer = live.acme.post("/v1/pins", json={"token_ids": ids, "ttl_s": 3600})
        if answer.status_code == 201:
            pinned.append(ids)
        else:
            refusals.append(answer.json()["error"])
    assert {each["type"] for each in refusals} == {"pin_budget_exceeded"}
    assert len(pinned) == (most - most // 8) // 2
    for ids in (*pinned, [7, 8, 9]):
        body = {"prompt": ids, "max_tokens": 2, "ignore_eos": True}
        answer = live.acme.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        if ids in pinned:
            assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == SIZE
    pins = live.acme.get("/v1/pins").json()["pins"]
    assert len(pins) == len(pinned), "and stays pinned"
    for path, fields in (("/v1/completions", {"max_tokens": 1}), ("/v1/warm", {})):
        name = "prompt" if fields else "token_ids"
        late = live.acme.post(path, json={name: [*range(7_000 - 16 * (most - 1), 7_000)], **fields})
        assert late.status_code == 503, "the pins leave too little to this one"
        if "max_blocks" in settings or "mode" in settings:
            assert f"{2 * len(pinned)} are pinned: end a pin" in message_of(late.json())
            assert int(late.headers["retry-after"]) > 3_000
    for each in pins:
        assert live.acme.delete(f"/v1/pins/{each['id']}").status_code == 204


def test_the_next_turn_of_a_pinned_conversation_is_served(live: Running) -> None:
    """The breakpoint that would pin nearly all is refused; the answer says so."""
    put(live, {"max_blocks": 20, "max_pinned_blocks": 19})
    marked = {"type": "ephemeral", "ttl": "1h"}
    messages: list[dict[str, Any]] = []
    refused = 0
    for turn in range(20):
        block = {"type": "text", "text": f"Turn {turn}: go on. " * 3, "cache_control": marked}
        body = {
            "model": "radixkv-demo",
            "max_tokens": 4,
            "messages": [*messages, {"role": "user", "content": [block]}],
        }
        answer = live.acme.post("/v1/messages", json=body)
        if answer.status_code == 400:
            assert "20 that this tenant" in message_of(answer.json())
            break
        assert answer.status_code == 200, answer.text
        refused += answer.headers.get("x-cache-write-refused") == "pin_budget_exceeded"
        messages += [
            {"role": "user", "content": body["messages"][-1]["content"][0]["text"]},
            {"role": "assistant", "content": "Yes."},
        ]
    assert turn > 3 and refused
    again = live.acme.post("/v1/completions", json={"prompt": "Something else", "max_tokens": 4})
    assert again.status_code == 200
    settled(live)
    for each in live.acme.get("/v1/pins").json()["pins"]:
        live.acme.delete(f"/v1/pins/{each['id']}")


def test_a_keys_file_that_would_lock_a_tenant_out_says_so(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    own = {"keys": [KEYS["acme"]], "max_blocks": 9, "max_pinned_blocks": 9}
    path.write_text(json.dumps({"operator": KEYS["operator"], "tenants": {"acme": own}}))
    path.chmod(0o600)
    with pytest.raises(Exception, match="max_pinned_blocks"), service_in_thread(keys=str(path)):
        pass
