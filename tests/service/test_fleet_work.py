"""Work of the whole fleet, over real processes on a real Redis: quotas, and warm jobs and pins that survive deaths.

Three replicas are started once and share a keys file. A test may kill a replica and leave it dead: the fixture restarts
it for the next test.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.redis_server import RedisServer, need_binary
from tests.service.patience import HELD_BY
from tests.service.running import Process, answered, client, lease_over
from tests.waiting import eventually

pytestmark = [pytest.mark.slow]
IDS = list(range(5, 5 + 16 * 40))
BUDGET = {"max_pinned_blocks": 200}
TENANTS = {
    "acme": {"keys": ["demo-acme"], **BUDGET},
    "globex": "demo-globex",
}


class Fleet:
    """Three replicas by name."""

    def __init__(self, folder: Path, redis: RedisServer) -> None:
        self.folder, self.redis = folder, redis
        (folder / "secret").write_bytes(b"a secret of this test's fleet")
        (folder / "keys.json").write_text(json.dumps({"operator": "demo-operator", "tenants": TENANTS}))
        self.members: dict[str, Process] = {}
        self.num_started = 0
        self._clients: dict[tuple[str, str], httpx.Client] = {}

    def whole(self, wanted: str = "abc") -> None:
        """Start the replicas in ``wanted`` that do not run, and wait until each of them sees the others."""
        for name in wanted:
            if name not in self.members or self.members[name].process.poll() is not None:
                self.members[name] = self.begin(name)
        for name in wanted:
            self.members[name].wait_ready()
        for name in wanted:
            eventually(lambda name=name: self.sees(name) >= set(wanted), f"{name} sees all replicas")

    def begin(self, name: str) -> Process:
        self.num_started += 1
        options = {
            "port": "0", "redis": self.redis.url, "replica": name, "num-blocks": "512",
            "keys": str(self.folder / "keys.json"), "fleet-secret": str(self.folder / "secret"),
        }  # fmt: skip
        arguments = [part for setting, value in options.items() for part in (f"--{setting}", value)]
        held_by = {HELD_BY: str(self._held_by(name))}
        return Process(arguments, self.folder / f"{name}-{self.num_started}.log", held_by)

    def kill(self, name: str) -> None:
        """End a replica, and its lease, for which it would count as alive."""
        self.members[name].kill()
        lease_over(self.redis, name)

    def replicas(self, name: str) -> list[dict[str, Any]]:
        return list(self.ask(name, "GET", "/v1/replicas", "operator").json()["replicas"])

    def sees(self, name: str) -> set[str]:
        """The replicas that this replica can reach at their current addresses.

        A dead replica's lease may still be valid.
        """
        here = {each.url for each in self.members.values()}
        return {each["id"] for each in self.replicas(name) if each["reachable"] and each["address"] in here}

    def settled(self) -> bool:
        """Whether each replica knows that all others are idle, and how many blocks they hold.

        Then the router prefers a holder.
        """
        path, rows = "/v1/stats", {name: self.replicas(name) for name in self.members}
        resident = {
            name: self.ask(name, "GET", path, "operator").json()["cache"]["resident_blocks"] for name in rows
        }
        return all(
            (row["load"]["queued_prefill_tokens"], row["load"]["resident_blocks"]) == (0, resident[row["id"]])
            for name in rows
            for row in rows[name]
        )

    def ask(
        self, name: str, method: str, path: str, who: str = "acme", body: Any = None, **headers: str
    ) -> httpx.Response:
        place = self.members[name].url, f"demo-{who}"
        if place not in self._clients:
            self._clients[place] = client(*place)
        return self._clients[place].request(method, path, json=body, headers=headers)

    def asked(
        self, name: str, method: str, path: str, who: str = "acme", body: Any = None, **headers: str
    ) -> httpx.Response:
        """Repeat a request until the answer is final. A Redis that stalls for two seconds counts as unavailable."""
        return answered(lambda: self.ask(name, method, path, who, body, **headers))

    def warm(self, name: str, who: str = "acme", *, key: str | None = None, **fields: Any) -> dict[str, Any]:
        headers = {"Idempotency-Key": key} if key else {}
        answer = self.asked(name, "POST", "/v1/warm", who, {"token_ids": IDS, **fields}, **headers)
        assert answer.is_success, answer.text
        return dict(answer.json())

    def job(self, name: str, job: str, who: str = "acme") -> dict[str, Any]:
        return dict(self.asked(name, "GET", f"/v1/warm/{job}", who).json())

    def matched(self, name: str, who: str = "acme", **fields: Any) -> int:
        answer = self.asked(name, "POST", "/v1/lookup", who, {"token_ids": IDS, **fields})
        return int(answer.json()["matched_tokens"])

    def purge(self, name: str, tenant: str) -> None:
        answer = self.asked(name, "POST", f"/v1/tenants/{tenant}/purge", "operator")
        assert answer.status_code == 200, answer.text

    def pin(self, name: str, who: str = "acme", **fields: Any) -> dict[str, Any]:
        body = {"token_ids": IDS[:512], "ttl_s": 1200, "replicas": "all", **fields}
        answer = self.asked(name, "POST", "/v1/pins", who, body)
        assert answer.status_code == 201, answer.text
        return dict(answer.json())

    def pins(self, name: str, who: str = "acme") -> dict[str, dict[str, Any]]:
        answer = self.ask(name, "GET", "/v1/pins", who)
        assert answer.status_code == 200, answer.text
        return {each["id"]: each for each in answer.json()["pins"]}

    def pinned_blocks(self, name: str, who: str = "acme") -> int:
        return int(self.ask(name, "GET", "/v1/stats", who).json()["pinned_blocks"])

    def granted(self, name: str) -> int | None:
        rows = self.ask(name, "GET", "/v1/tenants", "operator").json()["tenants"]
        return {each["tenant"]: each["granted_blocks"] for each in rows}["acme"]  # type: ignore[no-any-return]

    @contextmanager
    def held(self, *names: str) -> Iterator[None]:
        """Let replicas compute no warm while the ``with`` block runs."""
        files = [self._held_by(name) for name in names]
        for file in files:
            file.touch()
        try:
            yield
        finally:
            for file in files:
                file.unlink()

    def _held_by(self, name: str) -> Path:
        return self.folder / f"{name}.held"

    def close(self) -> None:
        for someone in self._clients.values():
            someone.close()
        for each in self.members.values():
            each.kill()


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("fleet")
    redis = RedisServer(need_binary(), folder)
    fleet = Fleet(folder, redis)
    try:
        yield fleet
    finally:
        fleet.close()
        redis.kill()


@pytest.fixture
def fleet(started: Fleet) -> Fleet:
    started.whole()
    return started


def names(document: dict[str, Any], state: str) -> list[str]:
    return [each["replica"] for each in document["replicas"] if each["state"] == state]


def hinted(fleet: Fleet, name: str, salt: str = "") -> dict[str, int]:
    body = {"token_ids": IDS, "predict": False, "salt": salt}
    found = fleet.asked(name, "POST", "/v1/route", body=body).json()["candidates"]
    return {each["replica"]: each["matched_tokens"]["device"] for each in found}


def test_every_replica_reports_a_job_on_some_replicas(fleet: Fleet) -> None:
    best = fleet.warm("a", replicas=2, salt="best")
    assert len(names(best, "done")) == len(best["replicas"]) == 2 and best["tokens"] == len(IDS)
    fleet.warm("b", salt="there")
    eventually(lambda: hinted(fleet, "a", "there")["b"] == 512 and fleet.settled(), "a knows what b holds")
    assert hinted_best(fleet, "a", "there") == "b"
    there = fleet.warm("a", replicas=1, salt="there")
    assert names(there, "done") == ["b"] and there["cached_before"] == len(IDS), (
        "the replica that holds the prefix is the best"
    )

    first = fleet.warm("a", replicas=["c", "b"], salt="named", wait=False, key="once")["job"]
    # A request that comes before b has heard of the job would begin b's part, and the job find it computed.
    eventually(lambda: fleet.matched("b", salt="named"), "b works on the job")
    again = fleet.warm("b", replicas=["c", "b"], salt="named", wait=False, key="once")["job"]
    assert first == again, "another replica returns the same job"
    for name in "abc":
        eventually(lambda name=name: fleet.job(name, first)["state"] == "done", f"{name} reports its end")
    told = [fleet.job(name, first) for name in "abc"]
    assert told[0] == told[1] == told[2] and names(told[0], "done") == ["b", "c"]
    assert [each["computed"] for each in told[0]["replicas"]] == [len(IDS)] * 2
    assert [fleet.matched(name, salt="named") for name in "abc"] == [0, len(IDS), len(IDS)]
    waited = fleet.warm("c", replicas=["c", "b"], salt="named", key="once")
    assert waited["replicas"] == told[0]["replicas"]

    headers = {"Idempotency-Key": "once"}
    other = fleet.asked("c", "POST", "/v1/warm", body={"token_ids": IDS, "salt": "other"}, **headers)
    assert (other.status_code, other.json()["error"]["field"]) == (409, "Idempotency-Key")
    theirs = fleet.warm("a", "globex", wait=False, key="once")["job"]
    assert theirs != first, "idempotency keys belong to one tenant"
    hidden = [fleet.asked("b", "GET", f"/v1/warm/{job}", "globex") for job in (first, "0" * 32)]
    assert [each.status_code for each in hidden] == [404, 404] and hidden[0].content == hidden[1].content
    nobody = fleet.asked("a", "POST", "/v1/warm", body={"token_ids": IDS, "replicas": ["a", "nobody"]})
    assert (nobody.status_code, nobody.json()["error"]["value"]) == (422, "nobody")


def hinted_best(fleet: Fleet, name: str, salt: str) -> str:
    body = {"token_ids": IDS, "predict": False, "salt": salt}
    return str(fleet.asked(name, "POST", "/v1/route", body=body).json()["candidates"][0]["replica"])


def best_two(fleet: Fleet, name: str, salt: str) -> set[str]:
    body = {"token_ids": IDS, "predict": False, "salt": salt, "limit": 2}
    return {each["replica"] for each in fleet.ask(name, "POST", "/v1/route", body=body).json()["candidates"]}


def test_live_replicas_share_a_quota(fleet: Fleet) -> None:
    path = "/v1/tenants/acme"
    refused = fleet.ask("a", "PUT", path, "operator", {"fleet_blocks": 5, "guaranteed_blocks": 9})
    assert (refused.status_code, refused.json()["error"]["field"]) == (422, "fleet_blocks")
    put = fleet.ask("a", "PUT", path, "operator", {**BUDGET, "fleet_blocks": 127})
    assert put.status_code == 200 and put.json()["settings"]["fleet_blocks"] == 127
    try:
        eventually(lambda: [fleet.granted(name) for name in "abc"] == [43, 42, 42], "an equal share each")
        for salt in "wxyz":
            fleet.warm("a", replicas="all", salt=salt)
        used = [fleet.ask(name, "GET", "/v1/stats").json()["used_blocks"] for name in "abc"]
        assert used == [43, 42, 42], "all of the share, and no more"
        too_long = fleet.ask("b", "POST", "/v1/warm", body={"token_ids": list(range(5, 5 + 16 * 50))})
        assert (too_long.status_code, too_long.json()["error"]["type"]) == (503, "quota_exceeded")
        assert too_long.json()["error"]["allowed"] == "at most 42 blocks"
    finally:
        assert fleet.ask("b", "PUT", path, "operator", BUDGET).status_code == 200
    eventually(lambda: [fleet.granted(name) for name in "abc"] == [None] * 3, "no limit any more")


def test_a_job_survives_the_death_of_the_replica_that_manages_it(fleet: Fleet) -> None:
    """A client asks ``a`` for two replicas, and ``a`` dies. Then ``b`` manages the job, and ``c`` replaces ``a``."""
    fleet.warm("a", replicas=["a", "b"], salt="two", token_ids=IDS[:512])
    eventually(lambda: hinted(fleet, "a", salt="two") == {"a": 512, "b": 512, "c": 0} and fleet.settled())
    eventually(lambda: best_two(fleet, "a", "two") == {"a", "b"}, "a and b hold the prefix and a knows it")
    with fleet.held("a", "b"):
        two = fleet.warm("a", replicas=2, salt="two", wait=False, key="two")["job"]
        named = fleet.warm("a", replicas=["a", "b"], salt="named", wait=False)["job"]
        asked = [each["replica"] for each in fleet.job("c", two)["replicas"]]
        assert names(fleet.job("c", two), "done") == names(fleet.job("c", named), "done") == []
        fleet.kill("a")
    eventually(lambda: fleet.job("c", named)["state"] == "done", "b finished its part")
    assert [
        (each["replica"], each["state"], each["error"]) for each in fleet.job("c", named)["replicas"]
    ] == [
        ("a", "failed", "left"),
        ("b", "done", None),
    ], "no replica replaces one that was named"
    eventually(lambda: fleet.job("b", two)["state"] == "done", "another replica took over")
    done = fleet.job("c", two)
    assert asked == ["a", "b"] and names(done, "done") == ["b", "c"]
    assert [fleet.matched(name, salt="two") for name in "bc"] == [len(IDS)] * 2
    assert fleet.warm("c", replicas=2, salt="two", wait=False, key="two")["job"] == two, (
        "it still is that one"
    )


def test_a_job_for_one_replica_survives_the_death_of_that_replica(started: Fleet) -> None:
    """``b`` accepts the job for itself alone. ``c`` reads its record, and does the job when ``b`` dies."""
    started.whole("bc")
    started.warm("b", salt="alone", token_ids=IDS[:512])
    eventually(lambda: hinted_best(started, "b", "alone") == "b")
    with started.held("b"):
        job = started.warm("b", replicas=1, salt="alone", wait=False)["job"]
        assert [each["replica"] for each in started.job("c", job)["replicas"]] == ["b"]
        started.kill("b")
    eventually(lambda: started.job("c", job)["state"] == "done", "another replica did it")
    parts = started.job("c", job)["replicas"]
    failed, done = sorted(parts, key=lambda each: str(each["state"]), reverse=True)
    assert failed["replica"] == "b" and failed["error"] in ("left", "unreachable")
    assert done["state"] == "done" and started.matched(done["replica"], salt="alone") == len(IDS)


def states(pin: dict[str, Any]) -> dict[str, str]:
    return {each["replica"]: each["error"] or each["state"] for each in pin["replicas"]}


def test_the_life_of_a_pin_of_the_fleet(fleet: Fleet) -> None:
    pin = fleet.pin("a", salt="pinned")
    assert states(pin) == {"a": "done", "b": "done", "c": "done"}
    assert (pin["tokens"], pin["blocks"], pin["salt"]) == (512, 32, "pinned") and 1100 < pin["ttl_s"] <= 1200
    assert [fleet.pinned_blocks(name) for name in "abc"] == [32] * 3
    for name in "abc":
        listed = fleet.pins(name)
        assert list(listed) == [pin["id"]] and states(listed[pin["id"]]) == states(pin)
        assert fleet.pins(name, "globex") == {}
    theirs = fleet.asked("b", "DELETE", f"/v1/pins/{pin['id']}", "globex")
    never = fleet.asked("b", "DELETE", f"/v1/pins/{'0' * 32}", "globex")
    assert theirs.status_code == 404 and theirs.content == never.content

    again = fleet.pin("b", salt="pinned", ttl_s=3000)
    assert again["id"] == pin["id"] and again["ttl_s"] > 2900, (
        "a second pin of the same prefix restarts its time"
    )
    eventually(lambda: fleet.pins("c")[pin["id"]]["ttl_s"] > 2000)

    fleet.redis.restart()  # it restarts empty, and the replicas write the pin again
    leases = " ".join(f"rk1:{{r:{name}}}:lease" for name in "abc")
    eventually(lambda: fleet.redis.command(f"EXISTS {leases}") == ":3", "all have registered again")
    eventually(lambda: set(fleet.pins("c")) == {pin["id"]}, "the pin outlives the store")
    eventually(lambda: states(fleet.pins("c")[pin["id"]]) == states(pin))
    fleet.whole()

    fleet.kill("b")
    eventually(lambda: states(fleet.pins("a")[pin["id"]])["b"] == "left")
    fleet.whole("b")
    eventually(lambda: fleet.pinned_blocks("b") == 32, "a restarted replica learns of the pin")
    assert fleet.matched("b", token_ids=IDS[:512], salt="pinned") == 512

    assert fleet.asked("c", "DELETE", f"/v1/pins/{pin['id']}").status_code == 204
    assert fleet.asked("c", "DELETE", f"/v1/pins/{pin['id']}").status_code == 404
    eventually(
        lambda: [fleet.pinned_blocks(name) for name in "abc"] == [0] * 3, "the pin has ended everywhere"
    )
    assert [fleet.pins(name) for name in "abc"] == [{}] * 3


def pin_rows(fleet: Fleet, name: str, who: str = "acme") -> list[dict[str, Any]]:
    answer = fleet.asked(name, "GET", "/v1/usage", who)
    return [row for row in answer.json()["rows"] if row["kind"] in ("pin", "warm")]


def test_pins_are_billed_on_each_replica_to_the_key_that_asked(fleet: Fleet) -> None:
    """Pins, cached contents and warms that another replica ordered, and the pin that a new replica gets."""
    keys = {
        each["tenant"]: each["id"] for each in fleet.asked("a", "GET", "/v1/keys", "operator").json()["keys"]
    }
    before = {name: pin_rows(fleet, name) for name in "abc"}
    pin = fleet.pin("a", salt="billed", ttl_s=1200)
    contents = [{"role": "user", "parts": [{"text": "Rule 9: name the page. " * 20}]}]
    body = {"model": "models/radixkv-demo", "contents": contents, "ttl": "3000s"}
    made = fleet.asked("b", "POST", "/v1beta/cachedContents", body=body).json()
    num_tokens = made["usageMetadata"]["totalTokenCount"]
    fleet.warm("c", salt="billed too", replicas="all")

    def grown(name: str, field: str, kind: str) -> int:
        of = [
            sum(row[field] for row in rows if row["kind"] == kind)
            for rows in (pin_rows(fleet, name), before[name])
        ]
        return int(of[0] - of[1])

    def written(name: str, ttl_s: int) -> int:
        rows = (pin_rows(fleet, name), before[name])
        now, was = (sum(row["written_tokens"].get(str(ttl_s), 0) for row in each) for each in rows)
        return int(now - was)

    for name in "abc":
        eventually(lambda name=name: grown(name, "requests", "pin") == 2, "both are billed")
        assert (written(name, 1800), written(name, 3600)) == (pin["tokens"], num_tokens), name
        assert grown(name, "uncached_tokens", "pin") == 0 and grown(name, "uncached_tokens", "warm") == len(
            IDS
        )
        assert {row["key"] for row in pin_rows(fleet, name)} == {keys["acme"]}, "none without a key"
        assert all(row["key"] == keys["globex"] for row in pin_rows(fleet, name, "globex"))

    fleet.kill("b")
    eventually(lambda: states(fleet.pins("a")[pin["id"]])["b"] == "left")
    fleet.whole("b")
    eventually(lambda: fleet.pinned_blocks("b") == (pin["tokens"] + num_tokens) // 16, "it learns of both")
    rows = eventually(lambda: (found := pin_rows(fleet, "b")) and found)
    assert {row["key"] for row in rows} == {keys["acme"]}
    assert sum(sum(row["written_tokens"].values()) for row in rows) == pin["tokens"] + num_tokens
    assert fleet.asked("c", "DELETE", f"/v1/pins/{pin['id']}").status_code == 204
    assert fleet.asked("c", "DELETE", f"/v1beta/{made['name']}").status_code == 200
    eventually(lambda: [fleet.pinned_blocks(name) for name in "abc"] == [0] * 3)


def test_pins_on_some_replicas(fleet: Fleet) -> None:
    named = fleet.pin("a", ttl_s=600, replicas=["b", "c"], salt="b and c")
    assert states(named) == {"b": "done", "c": "done"} and named["salt"] is None, "a does not know the salt"
    two = fleet.pin("c", ttl_s=600, replicas=2, salt="two")
    assert set(states(two).values()) == {"done"} and len(states(two)) == 2
    nobody = fleet.asked(
        "a", "POST", "/v1/pins", body={"token_ids": IDS, "ttl_s": 9, "replicas": ["a", "nobody"]}
    )
    assert (nobody.status_code, nobody.json()["error"]["value"]) == (422, "nobody")
    much = {"token_ids": list(range(5, 5 + 16 * 201)), "ttl_s": 600, "replicas": ["a", "b"]}
    answer = fleet.asked("a", "POST", "/v1/pins", body=much).json()
    assert states(answer) == {"a": "pin_budget_exceeded", "b": "pin_budget_exceeded"}
    found = [fleet.matched(name, token_ids=much["token_ids"]) for name in "ab"]
    assert found == [0, 0], "a prefix over the pin budget is not computed"

    (gone, *_) = [name for name in states(two) if name != "c"] or ["c"]
    (spare,) = set("abc") - states(two).keys()
    fleet.kill(gone)
    asked = next(name for name in "abc" if name not in (gone, spare))
    eventually(
        lambda: states(fleet.pins(asked)[two["id"]]).get(spare) == "done", "another replica replaces it"
    )
    fleet.whole(gone)

    fleet.purge("b", "acme")
    eventually(lambda: [fleet.pinned_blocks(name) for name in "abc"] == [0] * 3, "a purge ends them")
    eventually(lambda: [fleet.pins(name) for name in "abc"] == [{}] * 3)


def stored(redis: RedisServer) -> bytes:
    """Everything in the store, not compressed."""
    import redis as library

    with library.Redis.from_url(redis.url) as store:
        store.config_set("rdbcompression", "no")
        return b"".join(store.dump(key) or b"" for key in store.keys("*"))


def test_a_cached_content_lives_with_its_holders_and_never_in_the_store(fleet: Fleet) -> None:
    text = "".join(f"Rule {number}: answer politely and name the page.\n" for number in range(40))
    path, asked = "/v1beta/cachedContents", {"contents": [{"parts": [{"text": "Which page?"}]}]}
    model = fleet.ask("a", "GET", "/v1/models").json()["data"][0]["id"]
    body = {"model": model, "systemInstruction": {"parts": [{"text": text}]}, "ttl": "900s"}

    generate = f"/v1beta/models/{model}:generateContent"

    def read(replica: str, name: str) -> int:
        few = {"maxOutputTokens": 2, "temperature": 0}
        answer = fleet.asked(
            replica, "POST", generate, body={**asked, "cachedContent": name, "generationConfig": few}
        )
        return int(answer.json()["usageMetadata"]["cachedContentTokenCount"]) if answer.is_success else 0

    def held_by_all() -> tuple[str, int] | None:
        made = fleet.asked("a", "POST", path, body=body)
        if made.status_code == 409:
            return None
        assert made.status_code == 200, made.text
        name, num_tokens = made.json()["name"], made.json()["usageMetadata"]["totalTokenCount"]
        if all(read(replica, name) >= num_tokens for replica in "abc"):
            return name, num_tokens
        fleet.asked("a", "DELETE", f"/v1beta/{name}")
        return None

    # A test before may have lost the store's data. Each replica that notices it later purges once more.
    name, num_tokens = eventually(held_by_all, "no purge ends the content while it is made and read")
    one = f"/v1beta/{name}"
    assert b"answer politely" not in stored(fleet.redis)
    assert fleet.pins("b")[name.removeprefix("cachedContents/")]["ttl_s"] > 800
    theirs = fleet.asked("b", "GET", one, "globex")
    never = fleet.asked("b", "GET", f"{path}/{'0' * 32}", "globex")
    assert theirs.status_code == 404 and theirs.content == never.content

    fleet.kill("a")
    assert read("b", name) >= num_tokens
    fleet.whole("a")
    eventually(lambda: read("a", name) >= num_tokens, "a restarted replica gets the content from a holder")
    later = fleet.asked("c", "PATCH", one, body={"ttl": "5000s"})
    assert later.status_code == 200, later.text
    eventually(lambda: fleet.pins("a")[name.removeprefix("cachedContents/")]["ttl_s"] > 4000)
    assert fleet.asked("c", "DELETE", one).json() == {}
    eventually(lambda: [fleet.ask(each, "GET", one).status_code for each in "abc"] == [404] * 3)
    eventually(lambda: [fleet.pinned_blocks(each) for each in "abc"] == [0] * 3)
