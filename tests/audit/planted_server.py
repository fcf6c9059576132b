"""A small server with radixkv's endpoints and one selectable bug.

It answers by a function call, without a socket or a thread. It caches prompts in blocks of 16 tokens in a namespace of
tenant, salt and adapter. ``leak`` names the bug; ``None`` is a sound server.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from urllib.parse import parse_qs

import httpx
import pytest

from radixkv.audit import target as target_module

BLOCK = 16
KEYS = {"Key-a": "acme", "Key-b": "globex"}
OPERATOR = "operator"
KNOWN = {
    "model", "prompt", "messages", "token_ids", "salt", "adapter", "n", "max_tokens", "temperature", "stream", "echo",
    "stream_options", "use_beam_search", "wait", "replicas", "ttl_s", "predict", "user",
}  # fmt: skip
Ids = list[int]
Space = tuple[str, str, str]


class Refused(Exception):
    """An answer with a status other than 200."""

    def __init__(self, status: int, document: Any = None) -> None:
        super().__init__(status)
        self.status, self.document = status, document or {"error": f"status {status}"}


def blocks(ids: Ids) -> list[int]:
    """A name for each prefix of whole blocks."""
    names, name = [], 0
    for at in range(0, len(ids) // BLOCK * BLOCK, BLOCK):
        name = hash((name, tuple(ids[at : at + BLOCK])))
        names.append(name)
    return names


class PlantedServer:
    """The server. ``tokenizer`` converts a text to ids. ``tells``: usage reports the cached tokens.

    ``num_a_step``: after so many requests of a tenant, the headers say that its rate leaves one less; 0: they don't.
    """

    def __init__(
        self,
        leak: str | None = None,
        *,
        tokenizer: Callable[[str], Ids] = lambda text: list(text.encode()),
        tells: bool = True,
        caches: bool = True,
        counts_prompts: bool = True,
        absent: tuple[str, ...] = (),
        num_a_step: int = 0,
    ) -> None:
        self.leak, self.tokenizer, self.tells, self.caches = leak, tokenizer, tells, caches
        self.counts_prompts, self.absent = counts_prompts, absent
        self.num_a_step = num_a_step
        self.known: dict[Space, set[int]] = {}
        self.uses: dict[tuple[Space, int], int] = {}
        self.pins: dict[str, tuple[str, dict[str, Any]]] = {}
        self.jobs: dict[str, tuple[str, dict[str, Any]]] = {}
        self.by_key: dict[tuple[str, str], tuple[str, Any]] = {}
        self.bases: dict[str, tuple[Ids, list[str]]] = {}
        self.requests: dict[str, int] = {}
        self.last_prompt = ""
        self.num_requests = 0
        self.fails_from, self.failure = float("inf"), "dies"
        """The request from which on it ``dies``, is ``busy`` or is ``broken``."""
        self.dice = random.Random(0)

    def __call__(self, request: httpx.Request) -> httpx.Response:
        """Answer a request."""
        self.num_requests += 1
        if self.num_requests > self.fails_from:
            if self.failure == "dies":
                raise httpx.ConnectError("refused", request=request)
            return httpx.Response({"busy": 429, "broken": 502}[self.failure], json={"error": "not now"})
        try:
            return self._answered(request)
        except Refused as refused:
            return httpx.Response(refused.status, json=refused.document)

    def _answered(self, request: httpx.Request) -> httpx.Response:
        tenant = self._tenant(request)
        path, method = request.url.path, request.method
        if path in self.absent:
            raise Refused(404)
        if tenant == OPERATOR:
            return self._administered(method, path, json.loads(request.content or b"{}"))
        if method != "POST":
            return self._read(method, path, tenant, request)
        body = self._body(request)
        tenant = self._claimed(tenant, body, request)
        self.requests[tenant] = self.requests.get(tenant, 0) + 1
        answer = {
            "/v1/completions": self._completions,
            "/v1/chat/completions": self._completions,
            "/v1/lookup": self._lookup,
            "/v1/warm": self._warm,
            "/v1/pins": self._pin,
            "/v1/route": self._route,
        }.get(path)
        if answer is None:
            if self.leak == "a pin renewed by id" and path.endswith("/renew"):
                name = path.split("/")[-2]
                if name in self.pins:
                    self.pins[name][1]["ttl_s"] = body["ttl_s"]
            raise Refused(404)
        return answer(tenant, body, request)

    # the caller, and the tenant that it acts for

    def _tenant(self, request: httpx.Request) -> str:
        key = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if key == OPERATOR:
            return OPERATOR
        if self.leak == "keys in any case":
            found = {name.lower(): tenant for name, tenant in KEYS.items()}.get(key.lower())
        elif self.leak == "keys compared by their beginning":
            found = next((tenant for name, tenant in KEYS.items() if key.startswith(name)), None)
        elif self.leak == "no key is the first tenant":
            found = KEYS.get(key, None if key else "acme")
        else:
            found = KEYS.get(key)
        if found is None:
            raise Refused(401)
        return found

    def _claimed(self, tenant: str, body: dict[str, Any], request: httpx.Request) -> str:
        named = {
            "the header X-Tenant": request.headers.get("X-Tenant"),
            "the header X-Tenant of tenants": request.headers.get("X-Tenant"),
            "the field tenant": body.pop("tenant", None) if self.leak == "the field tenant" else None,
            "the field user": body.get("user"),
            "the field cache_salt": body.pop("cache_salt", None)
            if self.leak == "the field cache_salt"
            else None,
            "a parameter": request.url.params.get("tenant"),
        }.get(self.leak or "")
        if self.leak == "the header X-Tenant of tenants" and named not in KEYS.values():
            named = None
        return named or tenant

    def _body(self, request: httpx.Request) -> dict[str, Any]:
        try:
            body = json.loads(request.content)
        except ValueError:
            raise Refused(400) from None
        known = (
            KNOWN | {"tenant", "cache_salt"}
            if self.leak in ("the field tenant", "the field cache_salt")
            else KNOWN
        )
        unknown = sorted(set(body) - known)
        if unknown:
            quoted = self.last_prompt if self.leak == "errors quote the last prompt" else ""
            raise Refused(422, {"error": f"unknown field {unknown[0]} {quoted}".strip()})
        return dict(body)

    def _prompts(self, body: dict[str, Any]) -> tuple[list[Ids], str]:
        given = body.get("prompt") or body.get("token_ids") or body.get("messages")
        if not given:
            raise Refused(422)
        form = "text"
        if isinstance(given, str):
            found = [given]
        elif isinstance(given[0], dict):
            form, found = "messages", ["".join(each["content"] for each in given)]
        elif isinstance(given[0], int):
            return [given], "ids"
        elif isinstance(given[0], list):
            return given, "ids"
        else:
            found = given
        self.last_prompt = found[0][:100]
        return [self.tokenizer(each) for each in found], form

    def _space(self, tenant: str, body: dict[str, Any], ids: Ids, form: str, kind: str) -> Space:
        salt, adapter = body.get("salt", ""), body.get("adapter") or ""
        shares = {
            "no salt": not salt,
            "the same salt": bool(salt),
            "an adapter": bool(adapter),
            "an adapter without a salt": bool(adapter) and not salt,
            "long prompts": len(ids) > 600,
            "very long prompts": len(ids) > 4000,
            "prompts as ids": form == "ids",
            "messages": form == "messages",
            "streams": bool(body.get("stream")),
            "two choices": body.get("n", 1) > 1,
            "echoes": bool(body.get("echo")),
            "lookups of messages": False,
        }.get(self.leak or "", False)
        if self.leak == "a salt is a tenant":
            return (salt or tenant, "", adapter)
        if self.leak == "salts and adapters are one" and (salt or adapter):
            return (f"{salt}{adapter}", "", "")
        if self.leak == "salts without case" and salt:
            return ("", salt.lower() if kind == "read" and salt.isupper() else f"{tenant} {salt}", adapter)
        return ("" if shares else tenant, salt, adapter)

    def _found(self, tenant: str, body: dict[str, Any], ids: Ids, form: str, kind: str) -> int:
        """The number of cached tokens."""
        space = self._space(tenant, body, ids, form, "read")
        places = [space]
        everywhere = {
            "lookups": kind == "lookup",
            "lookups of messages": kind == "lookup" and form == "messages",
            "warms tell": kind == "warm",
            "routes": kind == "route",
            "pins": kind == "pin",
            "batches": isinstance(body.get("prompt"), list) and isinstance(body["prompt"][0], list | str),
        }.get(self.leak or "", False)
        if everywhere:
            places = [each for each in self.known if each[1:] == space[1:]]
        places += [("shared", space[1], space[2])]
        return max(self._longest(self.known.get(place, set()), ids) for place in places) * BLOCK

    @staticmethod
    def _longest(known: set[int], ids: Ids) -> int:
        return next((at for at, name in enumerate(blocks(ids)) if name not in known), len(ids) // BLOCK)

    def _of_bases(self, tenant: str, ids: Ids) -> int:
        found = [
            base for base, readers in self.bases.values() if tenant in readers or self.leak == "bases for all"
        ]
        return max((self._longest(set(blocks(base)), ids) * BLOCK for base in found), default=0)

    def _keep(self, tenant: str, body: dict[str, Any], ids: Ids, form: str, kind: str) -> None:
        if not self.caches:
            return
        space = self._space(tenant, body, ids, form, "write")
        names = set(blocks(ids))
        self.known.setdefault(space, set()).update(names)
        last = (space, hash(tuple(ids)))
        self.uses[last] = self.uses.get(last, 0) + 1
        is_shared = {
            "the second use": self.uses[last] > 1,
            "warms share": kind == "warm",
            "jobs share": kind == "job",
            "pins share": kind == "pin",
        }.get(self.leak or "", False)
        if is_shared:
            self.known.setdefault(("shared", space[1], space[2]), set()).update(names)

    # prompts

    def _completions(self, tenant: str, body: dict[str, Any], request: httpx.Request) -> httpx.Response:
        prompts, form = self._prompts(body)
        if (form == "messages") != ("chat" in request.url.path):
            raise Refused(422)
        cached = 0
        for ids in prompts:
            cached += max(self._found(tenant, body, ids, form, "completion"), self._of_bases(tenant, ids))
            self._keep(tenant, body, ids, form, "completion")
        usage: dict[str, Any] = {"prompt_tokens": sum(map(len, prompts)) if self.counts_prompts else 7}
        if self.tells:
            usage["prompt_tokens_details"] = {"cached_tokens": cached}
        text = "x" * min(body.get("max_tokens", 1), 4)
        if self.leak == "text" and body.get("stream"):
            text = f"x{sum(self.requests.values()) - self.requests[tenant]}"
        if body.get("echo"):
            text = f"{body['prompt']}{text}"
        document = {
            "id": f"cmpl-{self.dice.randbytes(12).hex()}",
            "choices": [{"text": text}],
            "usage": usage,
        }
        headers = {}
        if self.num_a_step:
            headers["X-RateLimit-Limit-Requests"] = "1000"
            headers["X-RateLimit-Remaining-Requests"] = str(1000 - self.requests[tenant] // self.num_a_step)
            headers["X-RateLimit-Reset-Requests"] = f"{self.requests[tenant] // self.num_a_step / 100}s"
        if self.leak == "a header":
            is_hit = any(self._longest(known, prompts[0]) for known in self.known.values()) and cached == 0
            seen = {name for space, known in self.known.items() if space[0] != tenant for name in known}
            is_hit = self._longest(seen, prompts[0]) > 0 or cached > 0
            headers["X-Cache"] = "hit" if is_hit else "miss"
        if not body.get("stream"):
            return httpx.Response(200, json=document, headers=headers)
        content = f"data: {json.dumps(document)}\n\ndata: [DONE]\n\n"
        return httpx.Response(200, text=content, headers={**headers, "Content-Type": "text/event-stream"})

    def _lookup(self, tenant: str, body: dict[str, Any], request: httpx.Request) -> httpx.Response:
        (ids, *_), form = self._prompts(body)
        found = max(self._found(tenant, body, ids, form, "lookup"), self._of_bases(tenant, ids))
        return httpx.Response(200, json={"matched_tokens": found, "matched_blocks": found // BLOCK})

    def _warm(self, tenant: str, body: dict[str, Any], request: httpx.Request) -> httpx.Response:
        (ids, *_), form = self._prompts(body)
        key = request.headers.get("Idempotency-Key")
        place = ("" if self.leak == "Idempotency-Key" else tenant, key or "")
        if key is not None and place in self.by_key:
            name, earlier = self.by_key[place]
            if earlier != ids:
                raise Refused(409)
            return httpx.Response(202, json={"job": name})
        before = self._found(tenant, body, ids, form, "warm")
        self._keep(tenant, body, ids, form, "warm" if body.get("wait", True) else "job")
        result = {"tokens": len(ids), "cached_before": before}
        if body.get("wait", True):
            return httpx.Response(200, json=result)
        name = self.dice.randbytes(16).hex()
        self.jobs[name] = (tenant, {"job": name, "state": "done", "result": result})
        if key is not None:
            self.by_key[place] = (name, ids)
        return httpx.Response(202, json={"job": name})

    def _route(self, tenant: str, body: dict[str, Any], request: httpx.Request) -> httpx.Response:
        (ids, *_), form = self._prompts(body)
        found = self._found(tenant, body, ids, form, "route")
        predicted = ("" if self.leak == "predictions" else f"predicted {tenant}", body.get("salt", ""), "")
        expected = self._longest(self.known.get(predicted, set()), ids) * BLOCK
        if body.get("predict", True):
            self.known.setdefault(predicted, set()).update(blocks(ids))
        matched = {"device": found, "predicted": expected}
        return httpx.Response(200, json={"candidates": [{"replica": "one", "matched_tokens": matched}]})

    def _pin(self, tenant: str, body: dict[str, Any], request: httpx.Request) -> httpx.Response:
        (ids, *_), form = self._prompts(body)
        if self._found(tenant, body, ids, form, "pin") < len(ids) // BLOCK * BLOCK:
            raise Refused(409)
        self._keep(tenant, body, ids, form, "pin")
        name = str(1 + sum(owner == tenant for owner, _ in self.pins.values()))
        if self.leak in ("a pin ended by id", "a pin renewed by id"):
            name = str(len(self.pins) + 1)
        while name in self.pins:
            name = f"{name}0"
        pin = {"id": name, "salt": body.get("salt", ""), "tokens": len(ids), "ttl_s": body["ttl_s"]}
        self.pins[name] = (tenant, pin)
        return httpx.Response(201, json=pin)

    # reading and ending

    def _read(self, method: str, path: str, tenant: str, request: httpx.Request) -> httpx.Response:
        query = parse_qs(request.url.query.decode(), keep_blank_values=True)
        if path.startswith("/v1/pins"):
            return self._pins(method, path, tenant)
        if path.startswith("/v1/warm"):
            return self._jobs(path, tenant)
        if (method, path) == ("DELETE", "/v1/cache"):
            return self._cleared(tenant, query)
        if path == "/v1/stats":
            who = "globex" if self.leak == "stats of a header" and "X-Tenant" in request.headers else tenant
            if who != tenant and request.headers["X-Tenant"] != "globex":
                who = tenant
            counted = sum(self.requests.values()) if self.leak == "stats" else self.requests.get(who, 0)
            used = sum(len(known) for space, known in self.known.items() if space[0] == tenant)
            return httpx.Response(200, json={"requests": counted, "used_blocks": used})
        if path == "/metrics":
            if self.leak != "metrics":
                raise Refused(403)
            return httpx.Response(200, text=f"requests_total {sum(self.requests.values())}\n")
        if path in ("/v1/bases", "/v1/keys", "/v1/tenants"):
            if self.leak != "tenants":
                raise Refused(403)
            return httpx.Response(200, json={"tenants": [{"tenant": each} for each in KEYS.values()]})
        raise Refused(404)

    def _pins(self, method: str, path: str, tenant: str) -> httpx.Response:
        if path == "/v1/pins" and method == "GET":
            shown = [
                pin for owner, pin in self.pins.values() if owner == tenant or self.leak == "pins listed"
            ]
            return httpx.Response(200, json={"pins": shown})
        name = path.rpartition("/")[2]
        owner = self.pins.get(name, (None,))[0]
        if method == "DELETE" and (owner == tenant or (owner and self.leak == "a pin ended by id")):
            del self.pins[name]
            return httpx.Response(204)
        if owner and owner != tenant and self.leak == "pins exist":
            raise Refused(403)
        raise Refused(404)

    def _jobs(self, path: str, tenant: str) -> httpx.Response:
        name = path.removeprefix("/v1/warm").strip("/")
        if not name and self.leak == "jobs listed":
            return httpx.Response(200, json={"jobs": list(self.jobs)})
        owner, job = self.jobs.get(name, (None, {}))
        if owner == tenant or (owner and self.leak == "jobs"):
            return httpx.Response(200, json=job)
        raise Refused(403 if owner and self.leak == "jobs exist" else 404)

    def _cleared(self, tenant: str, query: dict[str, list[str]]) -> httpx.Response:
        salt, adapter = (query.get(name, [None])[0] for name in ("salt", "adapter"))
        wide = {"a clear of all": not query, "a clear of a salt": salt is not None}.get(
            self.leak or "", False
        )
        found = [
            space
            for space in self.known
            if (wide or space[0] == tenant) and salt in (None, space[1]) and adapter in (None, space[2])
        ]
        if query and not found:
            raise Refused(404)
        for space in found:
            del self.known[space]
        if not query:
            self.pins = {name: pin for name, pin in self.pins.items() if pin[0] != tenant}
        return httpx.Response(200, json={"namespaces": len(found)})

    def _administered(self, method: str, path: str, body: dict[str, Any]) -> httpx.Response:
        if path == "/v1/tenants":
            return httpx.Response(200, json={"tenants": [{"tenant": each} for each in KEYS.values()]})
        if (method, path) == ("POST", "/v1/bases"):
            (ids, *_), _ = self._prompts(body)
            self.bases[body["id"]] = (ids, body["readers"])
            return httpx.Response(201, json={"id": body["id"]})
        name = path.split("/")[3]
        if method == "PUT":
            self.bases[name] = (self.bases[name][0], body["readers"])
        elif self.leak != "bases outlive" and name in self.bases:
            del self.bases[name]
        return httpx.Response(200, json={})


class _Client:
    """What the audit uses of ``httpx.Client``, without its redirects, cookies and transports: half of the time."""

    def __init__(self, server: PlantedServer, base_url: str, headers: dict[str, str], **_: Any) -> None:
        self._server, self._url, self._headers = server, base_url, headers

    def request(self, method: str, path: str, **named: Any) -> httpx.Response:
        headers = {**self._headers, **(named.pop("headers", None) or {})}
        request = httpx.Request(method, f"{self._url}{path}", headers=headers, **named)
        answer = self._server(request)
        answer.request = request
        return answer

    @contextmanager
    def stream(self, method: str, path: str, **named: Any) -> Iterator[httpx.Response]:
        yield self.request(method, path, **named)

    def close(self) -> None:
        pass


@contextmanager
def in_place_of_a_socket(server: PlantedServer) -> Iterator[str]:
    """Send all requests of the audit to this server, and yield its base URL."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vars(target_module)["httpx"], "Client", partial(_Client, server))
        yield "http://127.0.0.1:1"
