"""Random lives of a tenant on two replicas: what came before a purge, a clear, a removal or a revocation doesn't go on.

Two services with disks share a keys file and a Redis, each behind a proxy. A life is one tenant's. Its requests wait or
run at both, their bodies arrive late, their answers are not read, or they find KV that only the host's memory or the
disk still has. Meanwhile it is purged, cleared, removed and made again, its keys are revoked and rotated, it gets
settings that fit or don't, its blocks are evicted, a replica loses Redis for a while or restarts with its disk, and
Redis loses everything or fails over. Only requests that ask again have a prompt of another one. So at the end it is
known whose KV a match finds.
"""

from __future__ import annotations

import gc
import http.client
import json
import os
import random
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from radixkv import PrefixCache, audit
from radixkv.service import key_store
from radixkv.service.core import Service
from radixkv.service.owner import Owner
from tests.isolation.lives import SEED
from tests.redis_server import RedisServer, follows, need_binary
from tests.service.running import KEYS, Running, answered, client, model_held, sent, service_in_thread
from tests.service.surroundings import surroundings as surroundings
from tests.tcp_proxy import TcpProxy
from tests.waiting import LIMIT_S, eventually

PARTS = 4
LIVES = max(int(os.environ.get("RADIXKV_EXAMPLES", "8")) // PARTS, 1)
"""Of each part."""
STEPS = 14
NAMES = ("one", "two")
REST_BYTES = 20
NUM_BLOCKS = {"one": "2048", "two": "1024"}
AT_ONCE = ("--repl-diskless-sync", "yes", "--repl-diskless-sync-delay", "0")
SETTINGS = {"max_pinned_blocks": 600, "max_pins": 200}
MOST_OPEN = 8
"""Requests of one life that aren't answered yet."""
KINDS = (
    "completion", "several", "beams", "stream", "unread", "warm", "job", "everywhere", "pin", "message", "again",
    "late",
)  # fmt: skip
ERRORS = {401, 404, 408, 409, 499, 503}
"""What a request may be answered that was ended: revoked, gone, too slow, forgotten, cut off, or not possible now."""


def body_of(kind: str, ids: list[int]) -> tuple[str, dict[str, Any]]:
    """The path and the body of a request."""
    if kind in ("warm", "job", "everywhere"):
        fleet = {"replicas": "all"} if kind == "everywhere" else {}
        return "/v1/warm", {"token_ids": ids, "wait": kind != "job", **fleet}
    if kind == "pin":
        return "/v1/pins", {"token_ids": ids, "ttl_s": 600, "replicas": "all"}
    if kind == "message":
        text = " ".join(f"{each}" for each in ids)
        return "/v1/messages", {
            "model": "radixkv-demo",
            "max_tokens": 2,
            "messages": [{"role": "user", "content": text}],
        }
    body: dict[str, Any] = {"prompt": ids, "max_tokens": 4}
    if kind == "several":
        body |= {"n": 2, "temperature": 1.0}
    if kind == "beams":
        body |= {"n": 2, "use_beam_search": True}
    if kind in ("stream", "unread"):
        body |= {"stream": True, "max_tokens": 40, "ignore_eos": True}
    return "/v1/completions", body


def status_of(answer: httpx.Response) -> int:
    """The status of an answer, of the error that ends a stream, or of a pin that isn't held."""
    if '"error":{' in answer.text and "event-stream" in answer.headers.get("content-type", ""):
        error = json.loads(answer.text.split("data: ")[-1].strip())["error"]
        return {"conflict": 409, "unauthorized": 401, "stalled": 503, "shutting_down": 503}[error["code"]]
    if answer.status_code == 201:
        return 201 if any(each["state"] == "done" for each in answer.json()["replicas"]) else 409
    return answer.status_code


@dataclass(eq=False, repr=False)
class Asked:
    """One request, and what has ended it."""

    kind: str
    replica: str
    key_id: str
    ids: list[int]
    answer: Future[httpx.Response] | None
    unread: socket.socket | None = None
    rest: bytes = b""
    """What has not been sent yet of a late body."""
    held: ExitStack | None = None
    """What held the model when it came."""
    is_over: bool = False
    is_forgotten: bool = False
    """Whether also what it left is over: a revoked key's requests end, and what they had computed stays."""
    was_waiting: bool = False
    """Whether it surely had no answer when what ended it was said to be complete."""

    def __repr__(self) -> str:
        return f"{self.kind} at {self.replica} with {self.key_id}, {self.ids[:3]} …"


class Fleet:
    """Two replicas, and what their tests may do to them."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        self.servers: list[RedisServer] = []
        for name in ("redis-one", "redis-two"):
            (folder / name).mkdir()
            self.servers.append(RedisServer(need_binary(), folder / name, *AT_ONCE))
            stack.callback(self.servers[-1].kill)
        self.num_arrived = Counter[str]()
        keys = folder / "keys.json"
        keys.write_text(
            json.dumps({"operator": KEYS["operator"], "tenants": {"globex": {"keys": [KEYS["globex"]]}}})
        )
        keys.chmod(0o600)
        (folder / "secret").write_bytes(b"a secret of this test's fleet")
        (folder / "secret").chmod(0o600)
        self.given = {
            "keys": str(keys),
            "fleet-secret": str(folder / "secret"),
            "max-queued": "64",
            "host-memory": "4MiB",
            "disk-size": "32MiB",
            "drain-s": "0.1",
            "lease-s": "30",  # a purge waits for it if nobody saw how a replica left that restarts
            "policy": "lru",  # the learning ones take 5 MB for each tenant that ever was
        }
        self.proxies: dict[str, TcpProxy] = {}
        self.live: dict[str, Running] = {}
        self.stacks: dict[str, ExitStack] = {}
        self.folder = folder
        for name in NAMES:
            self.proxies[name] = stack.enter_context(
                closing(TcpProxy(self.servers[0].host, self.servers[0].port))
            )
            stack.callback(lambda name=name: self.stacks[name].close())  # type: ignore[misc]
            self.start(name)
        self.threads = stack.enter_context(ThreadPoolExecutor(2 * MOST_OPEN))
        self.settle()

    def start(self, name: str) -> None:
        """Start a replica, with what its disk has. Before, stop the one of that name."""
        if name in self.stacks:
            gc.unfreeze()  # a start has its objects skipped by the collector, for the life of a process
            self.stacks[name].close()
            for other in NAMES:
                if other != name:  # purges wait for the lease of a replica whose leave nobody saw
                    eventually(lambda other=other: not self.sees(other, name), "its leave is seen")  # type: ignore[misc]
        self.stacks[name] = ExitStack()
        own = {
            "replica": name,
            "redis": f"redis://127.0.0.1:{self.proxies[name].port}/0",
            "disk": str(self.folder / name),
            "num-blocks": NUM_BLOCKS[name],
        }
        self.live[name] = self.stacks[name].enter_context(service_in_thread(**self.given, **own))

    def settle(self) -> None:
        """Wait until both replicas know each other, and Redis."""
        for live in self.live.values():
            eventually(lambda live=live: self._is_well(live), "the replicas know each other")  # type: ignore[misc]

    def sees(self, name: str, other: str) -> bool:
        """Whether a replica takes another one for live."""
        return any(each.id == other and each.live for each in self.live[name].service.replicas())

    def _is_well(self, live: Running) -> bool:
        known = live.operator.get("/v1/replicas").json()["replicas"]
        return live.service.fleet.coordinator.health().state == "ok" and {
            each["id"] for each in known if each["reachable"]
        } == {*NAMES}

    def lose_everything(self) -> None:
        """Let Redis lose all that it had."""
        self.servers[0].restart()

    def fail_over(self) -> None:
        """Let a replica of Redis take its place. Connections to the demoted server stay."""
        old, new = self.servers
        new.command(f"REPLICAOF {old.host} {old.port}")
        eventually(lambda: follows(new), "the replica of Redis follows")
        new.command("REPLICAOF NO ONE")
        old.command(f"REPLICAOF {new.host} {new.port}")
        self.servers.reverse()
        for proxy in self.proxies.values():
            proxy.target = new.host, new.port

    def count(self, service: Service, tenant: str | None) -> None:
        """Note that a request's key was checked."""
        name = next((name for name, live in self.live.items() if live.service is service), "")
        self.num_arrived[f"{name}:{tenant}"] += 1


class Life:
    """One tenant. ``seen`` counts what happened in all lives."""

    def __init__(self, fleet: Fleet, seed: int, seen: Counter[str]) -> None:
        self.fleet, self.random, self.seen = fleet, random.Random(seed), seen
        self.tenant = f"t{seed}"
        self.asked: list[Asked] = []
        self.keys: dict[str, str] = {}
        self.held: dict[str, ExitStack] = {}
        self.num_prompts = 0
        self.story: list[str] = []
        """What happened, for the message of a failure."""
        self.make()

    # ---- steps

    def play(self) -> None:
        """Make random steps, and compare what is left with what may be."""
        steps = [self.ask] * 9 + [self.hold, self.let_go] * 2
        steps += [
            self.purge,
            self.clear,
            self.revoke,
            self.rotate,
            self.make_again,
            self.outage,
            self.settings,
        ]
        steps += [self.evict] * 2 + ([self.restart] if self.random.random() < 0.2 else [])
        try:
            for _ in range(STEPS):
                self.random.choice(steps)()
        finally:
            self.end()
        self.compare()

    def note(self, what: str, key: str = "") -> None:
        """Tell that something happened, and count it under ``key``."""
        self.story.append(what)
        self.seen[key or what] += 1

    def operator(self) -> httpx.Client:
        return self.fleet.live[self.random.choice(NAMES)].operator

    def make(self) -> None:
        operator = self.operator()
        answer = answered(lambda: operator.put(f"/v1/tenants/{self.tenant}", json=SETTINGS))
        assert answer.status_code == 200, answer.text
        self.add_key(operator)

    def add_key(self, operator: httpx.Client) -> None:
        made = operator.post(f"/v1/tenants/{self.tenant}/keys").json()
        self.keys[made["id"]] = made["key"]
        for name in NAMES:
            eventually(lambda name=name: self.knows(name, made["key"]), "each replica knows the key")  # type: ignore[misc]

    def knows(self, name: str, key: str) -> bool:
        with client(self.fleet.live[name].url, key) as someone:
            return someone.get("/v1/stats").status_code == 200

    def prompt(self) -> list[int]:
        self.num_prompts += 1
        return [self.random.randrange(3, 4_000) for _ in range(64)]

    def ask(self) -> None:
        if len([each for each in self.asked if each.answer is None or not each.answer.done()]) >= MOST_OPEN:
            return
        name, kind = self.random.choice(NAMES), self.random.choice(KINDS)
        key_id = self.random.choice([*self.keys])
        ids, live, key = self.prompt(), self.fleet.live[name], self.keys[key_id]
        if kind == "again" and self.asked:
            ids = self.random.choice(self.asked).ids
        path, body = body_of(kind, ids)
        place = f"{name}:{self.tenant}"
        before = self.fleet.num_arrived[place]
        if kind == "unread":
            asked = Asked(kind, name, key_id, ids, None, sent(live, key, path, body))
        elif kind == "late":
            asked = Asked(kind, name, key_id, ids, None, sent(live, key, path, body, REST_BYTES))
            asked.rest = json.dumps(body).encode()[-REST_BYTES:]
        else:
            asked = Asked(kind, name, key_id, ids, self.fleet.threads.submit(_ask, live.url, key, path, body))
        eventually(lambda: self.fleet.num_arrived[place] > before, "the key of the request is checked")
        asked.held = self.held.get(name)
        self.asked.append(asked)
        self.note(f"asked {asked}", f"asked {kind}")

    def hold(self) -> None:
        name = self.random.choice(NAMES)
        if name not in self.held:
            self.story.append(f"the model of {name} is held")
            self.held[name] = ExitStack()
            self.held[name].enter_context(model_held(self.fleet.live[name].service, "globex"))

    def let_go(self) -> None:
        self.story.append("the models go on")
        for stack in [self.held.pop(name) for name in [*self.held]]:
            stack.close()
        for each in self.asked:
            if each.rest and each.unread is not None:
                each.answer = self.fleet.threads.submit(_finish, each.unread, each.rest)
                each.rest = b""

    def evict(self) -> None:
        """Let a replica have blocks only in its host's memory and on its disk."""
        cache = self.fleet.live[self.random.choice(NAMES)].service.cache
        assert isinstance(cache, PrefixCache)
        if cache.evict(max(map(int, NUM_BLOCKS.values()))):
            self.note("evicted")

    # ---- what ends requests

    def ends(self, what: str, which: Callable[[Asked], bool], said: Callable[[], object]) -> None:
        """End requests: what had come when ``said`` began is over when it has returned."""
        ended = [each for each in self.asked if which(each) and not each.is_forgotten]
        said()
        for each in ended:
            each.is_over = True
            each.is_forgotten = what not in ("revocation", "rotation")
            each.was_waiting = bool(each.rest) or (
                each.held is not None and self.held.get(each.replica) is each.held
            )
            ended_what = f"{what} ended {'waiting ' * each.was_waiting}"
            self.note(f"{ended_what}{each}", f"{ended_what}{each.kind}")

    def purge(self) -> None:
        operator, path = self.operator(), f"/v1/tenants/{self.tenant}/purge"

        def said() -> None:
            assert answered(lambda: operator.post(path)).status_code == 200
            eventually(
                lambda: answered(lambda: operator.get(path)).json()["complete"], "the purge is complete"
            )

        self.ends("purge", lambda each: True, said)

    def clear(self) -> None:
        name, key = self.random.choice(NAMES), self.random.choice([*self.keys.values()])

        def said() -> None:
            with client(self.fleet.live[name].url, key) as tenant:
                assert tenant.delete("/v1/cache").status_code == 200

        def is_here(each: Asked) -> bool:
            return each.replica == name and each.kind not in ("everywhere", "pin")

        self.ends("clear", is_here, said)

    def revoke(self) -> None:
        if len(self.keys) == 1:
            self.add_key(self.operator())
        key_id = self.random.choice([*self.keys])
        key, operator = self.keys.pop(key_id), self.operator()

        def said() -> None:
            assert operator.delete(f"/v1/keys/{key_id}").status_code == 204
            self.wait_until_refused(key)

        self.ends("revocation", lambda each: each.key_id == key_id and each.kind not in ("job", "pin"), said)

    def rotate(self) -> None:
        key_id, operator = self.random.choice([*self.keys]), self.operator()
        key = self.keys.pop(key_id)

        def said() -> None:
            made = operator.post(f"/v1/keys/{key_id}/rotate").json()
            self.keys[made["id"]] = made["key"]
            self.wait_until_refused(key)

        self.ends("rotation", lambda each: each.key_id == key_id and each.kind not in ("job", "pin"), said)
        for name in NAMES:
            eventually(partial(self.knows, name, [*self.keys.values()][-1]), "each replica knows the new key")

    def wait_until_refused(self, key: str) -> None:
        for name in NAMES:
            eventually(lambda name=name: not self.knows(name, key), "each replica refuses the old key")  # type: ignore[misc]

    def make_again(self) -> None:
        operator, old = self.operator(), {**self.keys}

        def said() -> None:
            assert operator.delete(f"/v1/tenants/{self.tenant}").status_code == 204
            if self.random.random() < 0.5:
                self.keys.clear()
                self.make()  # the other replica may not have seen the removal
            for key in old.values():
                self.wait_until_refused(key)

        self.ends("removal", lambda each: True, said)
        if self.keys == old:
            self.keys.clear()
            self.make()

    def settings(self) -> None:
        """Settings that fit at both replicas, at one of them, or at none."""
        blocks = self.random.choice((8, 1_500, 4_000))
        body = {**SETTINGS, "guaranteed_blocks": blocks}
        operator = self.fleet.live["one"].operator
        answer = answered(lambda: operator.put(f"/v1/tenants/{self.tenant}", json=body))
        assert answer.status_code in (200, 409, 422), answer.text
        self.note(f"settings of {blocks} blocks: {answer.status_code}")

    def fit(self) -> None:
        """Let the tenant have no guarantee any more."""
        operator = self.fleet.live["one"].operator
        assert answered(lambda: operator.put(f"/v1/tenants/{self.tenant}", json=SETTINGS)).status_code == 200

    def restart(self) -> None:
        """A replica stops and starts again, with its disk."""
        name = self.random.choice(NAMES)
        if name in self.held:
            self.held.pop(name).close()
        self.fit()  # a replica doesn't start with guarantees that it can't keep
        self.fleet.settle()  # it takes its leave; otherwise purges wait for its lease
        self.fleet.start(name)
        self.fleet.settle()
        self.note(f"{name} restarted", "a replica restarted")

    def outage(self) -> None:
        """A replica loses Redis for a while, or Redis loses everything."""
        what = self.random.choice(("cut off", "cut off", "lost", "failed over"))
        if what == "lost":
            self.fleet.lose_everything()
            self.note("Redis lost everything")
            return
        if what == "failed over":
            self.fleet.fail_over()
            self.note("Redis failed over")
            return
        name = self.random.choice(NAMES)
        proxy, coordinator = self.fleet.proxies[name], self.fleet.live[name].service.fleet.coordinator
        proxy.refuse = True
        eventually(lambda: coordinator.health().state == "unavailable")
        self.ask()
        proxy.refuse = False
        self.note(f"{name} was cut off", "a replica was cut off")

    # ---- the end

    def end(self) -> None:
        """Let everything go on, and wait for its end."""
        self.let_go()
        self.fit()
        for each in self.asked:
            if each.answer is not None:
                each.answer.exception(timeout=LIMIT_S)
            if each.unread is not None:
                each.unread.close()
        for live in self.fleet.live.values():
            eventually(partial(_is_idle, live), "the model has no work left")
        self.fleet.settle()

    def compare(self) -> None:
        key = next(iter(self.keys.values()))
        for each in self.asked:
            if not each.is_over:
                continue
            what = "\n".join([*self.story, f"{each}, tenant {self.tenant}"])
            if each.was_waiting and each.answer is not None and each.kind not in ("job", "pin"):
                assert status_of(each.answer.result()) in ERRORS, (
                    f"{what}: answered {each.answer.result().text}"
                )
            if each.kind == "message":
                continue  # its ids are made of text
            for name in NAMES:
                if not self.is_gone(each, name) or any(
                    other.ids is each.ids and name in self.where(other) and not self.is_gone(other, name)
                    for other in self.asked
                ):
                    continue
                assert self.matched(name, key, each.ids) == 0, f"{what}: matched at {name}"

    def is_gone(self, each: Asked, name: str) -> bool:
        """Whether nothing that it left at a replica may be matched."""
        if name not in self.where(each):
            return False
        return each.is_forgotten or (each.was_waiting and name == each.replica)

    def where(self, each: Asked) -> tuple[str, ...]:
        """The replicas where nothing of it may be."""
        return NAMES if each.kind in ("everywhere", "pin") else (each.replica,)

    def matched(self, name: str, key: str, ids: list[int]) -> int:
        with client(self.fleet.live[name].url, key) as tenant:
            return int(
                answered(lambda: tenant.post("/v1/lookup", json={"token_ids": ids})).json()["matched_tokens"]
            )


def _is_idle(live: Running) -> bool:
    return live.service.engine_loop.num_unfinished == 0


def _ask(url: str, key: str, path: str, body: dict[str, Any]) -> httpx.Response:
    with client(url, key) as someone:
        return someone.post(path, json=body)


def _finish(connection: socket.socket, rest: bytes) -> httpx.Response:
    """Send the rest of a request, and return its answer: 499 if the connection is closed."""
    answer = http.client.HTTPResponse(connection)
    try:
        connection.sendall(rest)
        answer.begin()
        return httpx.Response(answer.status, content=answer.read(), headers=dict(answer.getheaders()))
    except (OSError, http.client.HTTPException):
        return httpx.Response(499)


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, surroundings: None) -> Iterator[Fleet]:
    monkeypatch.setattr(key_store, "LOOK_EVERY_S", 0.02)
    made: list[Fleet] = []
    owner = Service.owner

    def counted(service: Service, tenant: str | None, key_id: str, as_of: int) -> Owner:
        found = owner(service, tenant, key_id, as_of)
        for each in made:
            each.count(service, tenant)
        return found

    monkeypatch.setattr(Service, "owner", counted)
    with ExitStack() as stack:
        made.append(Fleet(stack, tmp_path))
        yield made[0]
        for live in made[0].live.values():
            audit.check(live.service.cache)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_nothing_that_came_before_goes_on(fleet: Fleet, part: int) -> None:
    seen: Counter[str] = Counter()
    first = 1_000 * SEED + 100_000 * part
    for seed in range(first, first + LIVES):
        Life(fleet, seed, seen).play()
    print(dict(seen))


PLANTED: dict[str, tuple[type[Any], str, Any]] = {
    "the engine begins what was forgotten": (Owner, "arguments", property(lambda owner: {})),
    "a revoked key's requests go on": (Owner, "require_key", lambda owner: None),
}


@pytest.mark.slow
@pytest.mark.release
@pytest.mark.parametrize("bug", PLANTED)
def test_it_finds_planted_bugs(fleet: Fleet, monkeypatch: pytest.MonkeyPatch, bug: str) -> None:
    monkeypatch.setattr(*PLANTED[bug])
    seen: Counter[str] = Counter()
    with pytest.raises(AssertionError):
        for seed in range(1_000, 1_060):
            Life(fleet, seed, seen).play()
