"""Random requests of all kinds that end in all ways: answers, usage records, ``/metrics`` and ``/v1/stats`` agree.

Several clients ask at a time: completions of all shapes, streams, several answers, beams, warms, jobs, prewarms and
pins. They hang up, don't read, or are answered too late. Prompts and answers that don't fit are among them. Meanwhile
tenants are purged, cleared, removed and made again, keys are revoked, blocks are evicted, and another tenant takes the
pool. At the end every token has the same account in all places.

``RADIXKV_EXAMPLES`` sets the number of requests, ``RADIXKV_SEED`` the seed.
"""

from __future__ import annotations

import json
import os
import random
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from radixkv import PrefixCache, audit
from radixkv.engines.hf.request import BatchRequest
from radixkv.errors import CapacityError
from radixkv.metering.records import Counts
from radixkv.service.endpoints.completions import Run
from radixkv.service.limits import Limits
from radixkv.service.metrics import Metrics
from radixkv.service.owner import Owner
from tests.isolation.lives import SEED
from tests.service.accounts import billed, counted, metered, settled
from tests.service.running import KEYS, Running, client, sent, service_in_thread

NUM_REQUESTS = int(os.environ.get("RADIXKV_EXAMPLES", "80"))
NUM_CLIENTS = 5
SETTINGS: dict[str, dict[str, Any]] = {
    "acme": {"max_pinned_blocks": 40},
    "small": {"max_blocks": 14, "max_pinned_blocks": 6},
    "strict": {"mode": "strict", "guaranteed_blocks": 40},
    "passing": {"max_pinned_blocks": 20},
}
"""``passing`` is removed and made again now and then."""
OPENAI, CHAT, RESPONSES, MESSAGES = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/messages",
)
CONTENTS = "/v1beta/models/radixkv-demo:generateContent"
IDS = re.compile(r"req_[0-9a-f]{24}")


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Running]:
    path = tmp_path / "keys.json"
    tenants = {name: {"keys": [f"key-of-{name}"], **own} for name, own in SETTINGS.items()}
    tenants["globex"] = {"keys": [KEYS["globex"]]}
    path.write_text(json.dumps({"operator": KEYS["operator"], "tenants": tenants}))
    path.chmod(0o600)
    settings = {
        "num-blocks": "160",
        "host-memory": "512KiB",
        "max-queued": "64",
        "usage": str(tmp_path / "usage"),
    }
    with service_in_thread(Limits(timeout_s=60.0), keys=str(path), **settings) as running:
        yield running
        audit.check(running.service.cache)


class Requests:
    """Random requests, by several clients at a time. ``seen`` counts what happened."""

    def __init__(self, live: Running, seed: int) -> None:
        self.live, self.random = live, random.Random(seed)
        self.keys = {name: [f"key-of-{name}"] for name in SETTINGS}
        self.seen, self.lock, self.one_change = Counter[str](), threading.Lock(), threading.Lock()
        self.spent: dict[str, Counts] = {}
        self.answers: dict[str, Counter[str]] = {}
        self.texts = [self._whole_text(number) for number in range(4)]

    def _whole_text(self, number: int) -> str:
        """A chat of one message whose prompt is whole blocks, so that all of it can be computed ahead."""
        text = f"Rule {number}: answer politely, and name the page. " * (number + 2)
        while (
            self.live.globex.post("/tokenize", json={"messages": [{"role": "user", "content": text}]}).json()[
                "count"
            ]
            % 16
        ):
            text += "!"
        return text

    def play(self, num_requests: int) -> None:
        orders = [self.order() for _ in range(num_requests)]
        with ThreadPoolExecutor(NUM_CLIENTS) as clients:
            for each in [clients.submit(order) for order in orders]:
                each.result()
        settled(self.live)

    # ---- what may happen: everything random is drawn before it begins

    def order(self) -> Callable[[], None]:
        draw, tenant = self.random, self.random.choice([*SETTINGS])
        kinds = [self.completion] * 8 + [self.shape] * 4 + [self.warm] * 4 + [self.pin, self.prewarm] * 2
        kinds += [self.disturb] * 4
        return draw.choice(kinds)(tenant, random.Random(draw.random()))

    def ids(self, draw: random.Random) -> list[int]:
        """One of few prompts, or one that continues it."""
        prompt, size = draw.randrange(4), draw.choice((20, 48, 64, 90, 130))
        own = [draw.randrange(3, 4_000) for _ in range(draw.choice((0, 0, 7)))]
        return [*range(100 + 200 * prompt, 100 + 200 * prompt + size), *own]

    def completion(self, tenant: str, draw: random.Random) -> Callable[[], None]:
        body: dict[str, Any] = {
            "prompt": self.ids(draw),
            "max_tokens": draw.choice((1, 3, 9, 40)),
            "ignore_eos": True,
        }
        body |= draw.choice((
            {}, {}, {"n": 2}, {"n": 2, "temperature": 1.0}, {"n": 2, "use_beam_search": True},
            {"prompt": [self.ids(draw), self.ids(draw)]}, {"stop": ["a", "e"]}, {"max_tokens": 900},
        ))  # fmt: skip
        if draw.random() < 0.1:
            body["salt"] = "another"
        if "use_beam_search" not in body and draw.random() < 0.5:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return self.asked(tenant, draw, OPENAI, body)

    def shape(self, tenant: str, draw: random.Random) -> Callable[[], None]:
        text, most = draw.choice(self.texts) + draw.choice(("", "Why?")), draw.choice((1, 5, 700))
        mark = {"cache_control": {"type": "ephemeral", "ttl": draw.choice(("5m", "1h"))}}
        path, body = draw.choice((
            (CHAT, {"messages": [{"role": "user", "content": text}], "max_tokens": most}),
            (RESPONSES, {"input": text, "max_output_tokens": most}),
            (CONTENTS, {"contents": [{"role": "user", "parts": [{"text": text}]}],
                        "generationConfig": {"maxOutputTokens": most}}),
            (MESSAGES, {"model": "radixkv-demo", "max_tokens": most,
                        "messages": [{"role": "user", "content": [{"type": "text", "text": text, **mark}]}]}),
        ))  # fmt: skip
        return self.asked(tenant, draw, path, body)

    def warm(self, tenant: str, draw: random.Random) -> Callable[[], None]:
        body = {"token_ids": self.ids(draw), "wait": draw.random() < 0.6}
        if draw.random() < 0.3:
            body["token_ids"] = [draw.randrange(3, 4_000) for _ in range(1_200)]
        return self.asked(tenant, draw, "/v1/warm", body)

    def prewarm(self, tenant: str, draw: random.Random) -> Callable[[], None]:
        mark = {"cache_control": {"type": "ephemeral", "ttl": "5m"}}
        content = [{"type": "text", "text": draw.choice(self.texts), **mark}]
        body = {"model": "radixkv-demo", "max_tokens": 0, "messages": [{"role": "user", "content": content}]}
        return self.asked(tenant, draw, MESSAGES, body)

    def pin(self, tenant: str, draw: random.Random) -> Callable[[], None]:
        body = {"token_ids": self.ids(draw), "ttl_s": 2, "replicas": draw.choice(("self", "all"))}
        return self.asked(tenant, draw, "/v1/pins", body)

    def asked(self, tenant: str, draw: random.Random, path: str, body: dict[str, Any]) -> Callable[[], None]:
        """A request that is answered, or whose client hangs up, at once or after it has read a little."""
        ending, moments = draw.choice(("read", "read", "read", "hang up", "unread")), draw.randrange(12)

        def ask() -> None:
            key = self.keys[tenant][-1]
            if ending == "read":
                with client(self.live.url, key) as someone:
                    self.take(path, body, someone.post(path, json=body))
                return
            try:
                with sent(self.live, key, path, body) as connection:
                    if ending == "unread":
                        connection.recv(200)
                    self.wait_a_little(moments)
            except OSError:
                pass
            self.saw(ending)

        return ask

    def disturb(self, tenant: str, draw: random.Random) -> Callable[[], None]:
        what = draw.choice(("purge", "clear", "revoke", "remove", "evict", "pool", "pool", "hurry", "hurry"))
        moments = draw.randrange(150 if what == "pool" else 20)
        operator = self.live.operator

        def change() -> None:
            if what == "purge":
                operator.post(f"/v1/tenants/{tenant}/purge")
            elif what == "clear":
                with client(self.live.url, self.keys[tenant][-1]) as someone:
                    someone.delete("/v1/cache")
            elif what == "evict":
                self.cache.evict(160)
            elif what == "pool":
                self.take_pool(moments)
            elif what == "hurry":
                with self.one_change:  # the operator's own requests aren't too late
                    self.live.service.limits = Limits(timeout_s=0.02)
                    self.wait_a_little(moments)
                    self.live.service.limits = Limits(timeout_s=60.0)
            else:
                with self.one_change:
                    self.change_keys(what, tenant)
            self.saw(what)

        return change

    def wait_a_little(self, moments: int) -> None:
        """Let the service answer that often."""
        for _ in range(moments):
            self.live.nobody.get("/healthz")

    @property
    def cache(self) -> PrefixCache:
        cache = self.live.service.cache
        assert isinstance(cache, PrefixCache)
        return cache

    def take_pool(self, moments: int) -> None:
        """Let another tenant have all blocks that it can get for a while."""
        namespace, size = self.live.service.namespace("globex", "", None), 160
        while size > 8:
            try:
                with self.cache.open(namespace, [9] * (16 * size)):
                    self.wait_a_little(moments)
                return
            except CapacityError:
                size -= 8

    def change_keys(self, what: str, tenant: str) -> None:
        operator = self.live.operator
        if what == "remove":
            tenant = "passing"
            assert operator.delete(f"/v1/tenants/{tenant}").status_code == 204
            assert operator.put(f"/v1/tenants/{tenant}", json=SETTINGS[tenant]).status_code == 200
        keys = operator.get("/v1/keys").json()["keys"]
        old = [each["id"] for each in keys if each["tenant"] == tenant]
        self.keys[tenant].append(operator.post(f"/v1/tenants/{tenant}/keys").json()["key"])
        for each in old:
            operator.delete(f"/v1/keys/{each}")

    # ---- what answers say

    def saw(self, what: str) -> None:
        with self.lock:
            self.seen[what] += 1

    def take(self, path: str, body: dict[str, Any], answer: httpx.Response) -> None:
        """Note what an answer says of its tokens, by the request's id."""
        is_stream, status = "event-stream" in answer.headers.get("content-type", ""), str(answer.status_code)
        if is_stream:
            events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
            if events[-1:] != ["[DONE]"]:
                self.saw(f"{path} {json.loads(events[-1])['error']['code'] if events else 'cut off'}")
                return
            usage = json.loads(events[-2])["usage"]
        elif answer.status_code not in (200, 201, 202):
            body = answer.json()
            error = body["error"]
            self.saw(f"{path} {status} {error.get('code') or error.get('type')}")
            return
        else:
            usage = answer.json().get("usage") or answer.json().get("usageMetadata")
        self.saw(f"{path} {'stream' if is_stream else status}")
        if usage is None or (path == MESSAGES and body["max_tokens"] == 0):
            return
        request_id = answer.headers.get("x-request-id") or answer.headers.get("request-id")
        request_id = request_id or IDS.search(answer.text)[0]  # type: ignore[index]
        with self.lock:
            self.answers[request_id] = tokens_of(usage)


def tokens_of(usage: dict[str, Any]) -> Counter[str]:
    """Read, computed and generated tokens of a usage in any shape."""
    if "promptTokenCount" in usage:
        read = usage.get("cachedContentTokenCount", 0)
        return Counter(
            read=read,
            computed=usage["promptTokenCount"] - read,
            generated=usage.get("candidatesTokenCount", 0),
        )
    if "cache_read_input_tokens" in usage:
        computed = usage["input_tokens"] + usage["cache_creation_input_tokens"]
        return Counter(
            read=usage["cache_read_input_tokens"], computed=computed, generated=usage["output_tokens"]
        )
    if "input_tokens" in usage:
        read = usage["input_tokens_details"]["cached_tokens"]
        return Counter(read=read, computed=usage["input_tokens"] - read, generated=usage["output_tokens"])
    read = usage["prompt_tokens_details"]["cached_tokens"]
    return Counter(read=read, computed=usage["prompt_tokens"] - read, generated=usage["completion_tokens"])


def tokens_spent(usage: Counts) -> Counter[str]:
    return Counter(read=usage.read, computed=usage.num_written + usage.uncached, generated=usage.generated)


def agree(live: Running, monkeypatch: pytest.MonkeyPatch, num_requests: int) -> None:
    """Play random requests, and compare what all places say of them."""
    requests = Requests(live, SEED)
    pay = Run._pay

    def paid(run: Run, generation: Any) -> None:
        pay(run, generation)
        requests.spent[run.call.id] = run._spent(generation)

    monkeypatch.setattr(Run, "_pay", paid)
    requests.play(num_requests)
    print(dict(sorted(requests.seen.items())))
    for request_id, said in requests.answers.items():
        assert +tokens_spent(requests.spent[request_id]) == +said, "an answer says what is billed"
    in_all = sum((tokens_spent(each) for each in requests.spent.values()), Counter[str]())
    records = Counter[str]()
    for tenant in SETTINGS:
        completions = billed(live, tenant, "completion")
        records += completions
        del completions["requests"]
        assert completions == metered(live, tenant), f"usage and metrics of {tenant}"
        with client(live.url, requests.keys[tenant][-1]) as own:
            now = Counter[str]()
            for row in own.get("/v1/usage", params={"limit": "1000"}).json()["rows"]:
                computed = row["uncached_tokens"] + sum(row["written_tokens"].values())
                now.update(read=row["read_tokens"], computed=computed)
        assert +now == +counted(live, tenant), f"usage and statistics of {tenant}, since it was made"
    assert records["requests"] == sum(not each.is_nothing for each in requests.spent.values())
    del records["requests"]
    assert +records == +in_all, "each record is a request"
    log = live.operator.get("/v1/stats").json()["usage_log"]
    assert log["lost"] == 0 and log["problem"] is None


@pytest.mark.slow
def test_every_token_has_the_same_account_everywhere(live: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    agree(live, monkeypatch, NUM_REQUESTS)


def _only_with_a_token(completed: Callable[..., None]) -> Callable[..., None]:
    def counted(metrics: Metrics, tenant: str, **named: Any) -> None:
        if named["generated"]:
            completed(metrics, tenant, **named)

    return counted


PLANTED: dict[str, tuple[type[Any], str, Any]] = {
    "what is computed twice counts twice": (BatchRequest, "count", lambda self, row, sequence: None),
    "errors aren't counted": (Metrics, "completed", _only_with_a_token(Metrics.completed)),
    "reads of what is resident aren't counted": (Owner, "count_reads", lambda owner, num_tokens: None),
}


@pytest.mark.slow
@pytest.mark.release
@pytest.mark.parametrize("bug", PLANTED)
def test_it_finds_planted_bugs(live: Running, monkeypatch: pytest.MonkeyPatch, bug: str) -> None:
    monkeypatch.setattr(*PLANTED[bug])
    with pytest.raises(AssertionError, match="usage and"):
        agree(live, monkeypatch, 200)
