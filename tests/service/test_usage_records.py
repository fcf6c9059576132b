"""``GET /v1/usage`` and ``--usage``: requests of a running service, and what is left of it after SIGKILL."""

from __future__ import annotations

import json
import stat
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from radixkv.errors import ConfigError
from radixkv.files.system import Files
from radixkv.metering.folder import UsageFolder
from radixkv.metering.records import UsageRecord
from radixkv.service.auth import Keyring
from radixkv.service.options import ServeSettings
from tests.metering.support import chained, found, record, record_files
from tests.service.running import KEYS, Running, client, served, service_in_thread
from tests.waiting import eventually

IDS = list(range(100, 180))
BODY = {"max_tokens": 4, "temperature": 0, "ignore_eos": True}
SUMMED = ("requests", "read_tokens", "uncached_tokens", "generated_tokens")


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A service that writes usage records."""
    folder = tmp_path_factory.mktemp("records") / "usage"
    with service_in_thread(usage=str(folder)) as running:
        yield running


def rows(who: httpx.Client, **query: str) -> list[dict[str, Any]]:
    answer = who.get("/v1/usage", params=query)
    assert answer.status_code == 200, answer.text
    return [each for each in answer.json()["rows"] if each["kind"] != "held"]


def total(who: httpx.Client, kind: str) -> dict[str, int]:
    return {name: sum(each[name] for each in rows(who) if each["kind"] == kind) for name in SUMMED}


def state_of(live: Running) -> dict[str, Any]:
    """What the operator sees of the folder of records."""
    state: dict[str, Any] = live.operator.get("/v1/stats").json()["usage_log"]
    return state


def records_of(live: Running) -> list[UsageRecord]:
    """All records, once nothing waits to be written. No request waits for that."""
    eventually(lambda: not state_of(live)["waiting"])
    writer = live.service.meter._log
    assert writer is not None
    return found(Path(writer._folder.path))


@pytest.mark.slow
def test_usage_of_every_kind_is_summed_and_written(live: Running, salt: str) -> None:
    before = {kind: total(live.acme, kind) for kind in ("completion", "warm")}
    assert live.acme.post("/v1/warm", json={"token_ids": IDS, "salt": salt}).json()["computed"] == 80
    job = live.acme.post("/v1/warm", json={"token_ids": IDS, "salt": salt, "wait": False}).json()["job"]
    eventually(lambda: live.acme.get(f"/v1/warm/{job}").json()["state"] == "done")
    body = {**BODY, "prompt": [*IDS, 5], "salt": salt}
    whole = live.acme.post("/v1/completions", json=body).json()["usage"]
    assert whole["prompt_tokens_details"]["cached_tokens"] == 80
    streamed = live.acme.post("/v1/completions", json={**body, "stream": True})
    assert streamed.text.endswith("data: [DONE]\n\n")
    chat = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "temperature": 0}
    told = live.acme.post("/v1/chat/completions", json=chat).json()["usage"]
    after = {kind: total(live.acme, kind) for kind in ("completion", "warm")}
    grown = {kind: [after[kind][name] - before[kind][name] for name in SUMMED] for kind in after}
    chat_cached = told["prompt_tokens_details"]["cached_tokens"]
    chat_uncached = told["prompt_tokens"] - chat_cached
    assert grown["warm"] == [2, 80, 80, 0]
    assert grown["completion"] == [3, 160 + chat_cached, 2 + chat_uncached, 8 + told["completion_tokens"]]
    written = [each for each in records_of(live) if each.tenant == "acme" and each.kind == "completion"]
    assert sum(each.counts.read for each in written) == after["completion"]["read_tokens"]
    assert sum(each.counts.requests for each in written) == after["completion"]["requests"] == len(written)
    key_id = next(key.id for key in Keyring.demo().keys if key.principal.tenant == "acme")
    assert {each.key for each in written} == {key_id} == {each["key"] for each in rows(live.acme)}
    shown = {key["id"] for key in live.operator.get("/v1/keys").json()["keys"]}
    assert key_id in shown and KEYS["acme"] not in json.dumps(rows(live.operator))


@pytest.mark.slow
def test_what_each_shape_says_is_what_is_billed(live: Running, text: str) -> None:
    """Reads, writes by TTL and uncached tokens of the answers, against the sums. Ahead of traffic is a warm."""
    marked = [{"type": "text", "text": text, "cache_control": {"type": "ephemeral", "ttl": "1h"}}]
    body = {"model": "radixkv-demo", "system": marked, "messages": [{"role": "user", "content": "Hello"}]}
    key = {"Authorization": "Bearer demo-acme"}
    before = {kind: everything(live.acme, kind) for kind in ("completion", "warm")}
    found: dict[str, Counter[str]] = {"completion": Counter(), "warm": Counter()}
    for kind, most in (("warm", 0), ("completion", 4), ("completion", 4)):
        answer = live.nobody.post("/v1/messages", json={**body, "max_tokens": most}, headers=key)
        assert answer.status_code == 200, answer.text
        usage = answer.json()["usage"]
        found[kind] += Counter(
            requests=1,
            read_tokens=usage["cache_read_input_tokens"],
            written_3600=usage["cache_creation"]["ephemeral_1h_input_tokens"],
            uncached_tokens=usage["input_tokens"],
            generated_tokens=usage["output_tokens"],
        )
    assert found["warm"]["written_3600"] > 64 and found["completion"]["read_tokens"] > 128
    for kind, counts in found.items():
        assert everything(live.acme, kind) - before[kind] == +counts


def test_pins_are_billed_to_the_key_that_asked(live: Running, salt: str) -> None:
    asked = {"prompt": "Rule 7: be polite. " * 30, "salt": salt}
    assert live.acme.post("/v1/warm", json=asked).status_code == 200

    def of_pins() -> dict[tuple[str | None, str], list[int]]:
        found = (each for each in rows(live.acme) if each["kind"] == "pin")
        counted = ("requests", "read_tokens", "uncached_tokens")
        return {
            (each["key"], each["model"]): [
                *(each[name] for name in counted),
                each["written_tokens"].get("300", 0),
            ]
            for each in found
        }

    before = of_pins()
    local = live.acme.post("/v1/pins", json={**asked, "ttl_s": 60})
    assert local.status_code == 201
    other = {"prompt": "Rule 8: be brief. " * 30, "salt": salt}
    fleet = live.acme.post("/v1/pins", json={**other, "ttl_s": 60, "replicas": "all", "wait": True}).json()
    ((who, model), now) = next(iter(of_pins().items()))
    assert who is not None and model
    assert [one - was for one, was in zip(now, before.get((who, model), [0, 0, 0, 0]), strict=True)] == [
        2,
        local.json()["tokens"],
        0,
        fleet["tokens"],
    ], "a pin of the fleet is a write"
    for each in (local.json(), fleet):
        assert live.acme.delete(f"/v1/pins/{each['id']}").status_code == 204


def everything(who: httpx.Client, kind: str) -> Counter[str]:
    """All counts of a kind."""
    found = Counter[str]()
    for row in (each for each in rows(who) if each["kind"] == kind):
        found.update({name: row[name] for name in SUMMED})
        found.update({f"written_{ttl_s}": tokens for ttl_s, tokens in row["written_tokens"].items()})
    return found


@pytest.mark.slow
def test_a_client_that_hangs_up_pays_for_what_was_done(live: Running, salt: str) -> None:
    before = total(live.globex, "completion")
    body = {**BODY, "max_tokens": 400, "prompt": IDS, "salt": salt, "stream": True}
    with live.globex.stream("POST", "/v1/completions", json=body) as stream:
        next(stream.iter_lines())
    eventually(lambda: total(live.globex, "completion")["requests"] == before["requests"] + 1)
    after = total(live.globex, "completion")
    assert after["uncached_tokens"] - before["uncached_tokens"] == 80
    assert 0 < after["generated_tokens"] - before["generated_tokens"] < 400


@pytest.mark.slow
def test_another_tenants_requests_change_no_answer(live: Running, salt: str) -> None:
    live.acme.post("/v1/completions", json={**BODY, "prompt": IDS, "salt": salt})
    before = rows(live.acme)
    for number in range(3):
        live.globex.post("/v1/completions", json={**BODY, "prompt": IDS, "salt": f"{salt}{number}"})
    assert rows(live.acme) == before
    assert {each["tenant"] for each in before} == {"acme"}
    assert {"acme", "globex"} <= {each["tenant"] for each in rows(live.operator)}
    assert {each["tenant"] for each in rows(live.operator, tenant="globex")} == {"globex"}
    assert rows(live.operator, tenant="nobody") == []
    refused = live.acme.get("/v1/usage", params={"tenant": "globex"})
    assert refused.status_code == 403 and "operator's key" in refused.text
    assert live.acme.get("/v1/usage", params={"tenant": "acme"}).content == refused.content
    assert live.nobody.get("/v1/usage").status_code == 401


@pytest.mark.slow
def test_pages_have_all_rows_once(live: Running, salt: str) -> None:
    for who in (live.acme, live.globex):
        who.post("/v1/warm", json={"token_ids": IDS, "salt": salt})
        who.post("/v1/completions", json={**BODY, "prompt": IDS, "salt": salt})
    whole, found, path = rows(live.operator), list[dict[str, Any]](), "/v1/usage?limit=1&from=0"
    while path:
        answer = live.operator.get(path)
        found += [each for each in answer.json()["rows"] if each["kind"] != "held"]
        assert len(answer.json()["rows"]) == 1
        link = answer.headers.get("link")
        assert link is None or link.endswith('>; rel="next"')
        path = "" if link is None else link[1:].partition(">")[0]
    assert found == whole and len(whole) >= 4
    assert (
        rows(live.operator, to="2020-01-01")
        == []
        == rows(live.operator, **{"from": "2100-01-01T00:00:00+01:00"})
    )


@pytest.mark.parametrize(
    "query",
    [
        {"from": "yesterday"}, {"to": ""}, {"from": "1" * 12}, {"from": "9" * 400}, {"to": "٣"}, {"limit": "0"},
        {"limit": "1001"}, {"limit": "x"}, {"page": "1"}, {"page": "9" * 13 + "-" + "0" * 16}, {"after": "1"},
        {"to": "2026-01-31T09:00:00" + "0" * 30}, {"from": "-1"}, {"from": "nan"},
    ],
)  # fmt: skip
def test_malformed_queries_are_refused(live: Running, query: dict[str, str]) -> None:
    assert live.acme.get("/v1/usage", params=query).status_code == 422
    assert live.operator.get("/v1/usage", params=query).status_code == 422


@pytest.mark.slow
def test_a_removed_tenants_usage_is_hidden_from_a_new_one(live: Running) -> None:
    made = live.operator.post("/v1/tenants/initech/keys").json()["key"]
    with client(live.url, made) as first:
        first.post("/v1/completions", json={**BODY, "prompt": IDS})
        assert len(rows(first)) == 1
    assert live.operator.delete("/v1/tenants/initech").status_code == 204
    made = live.operator.post("/v1/tenants/initech/keys").json()["key"]
    with client(live.url, made) as second:
        assert rows(second) == [] and second.get("/v1/usage").json()["total"]["requests"] == 0
    kinds = sorted(each["kind"] for each in rows(live.operator, tenant="initech"))
    assert kinds == ["completion", "removed"]


@pytest.mark.slow
def test_what_is_held_grows_with_time(live: Running, salt: str) -> None:
    live.acme.post("/v1/warm", json={"token_ids": IDS, "salt": salt})

    def held() -> float:
        return float(live.acme.get("/v1/usage").json()["total"]["held_token_s"])

    eventually(lambda: held() > 80, "a second of 80 tokens")
    first = held()
    eventually(lambda: held() > first)


class FullDisk(Files):
    """Files that a test can let run out of space."""

    def __init__(self) -> None:
        self.is_full = False

    def write(self, descriptor: int, content: memoryview, offset: int) -> int:
        if self.is_full:
            raise OSError(28, "No space left on device")
        return super().write(descriptor, content, offset)


@pytest.mark.slow
def test_a_full_disk_is_shown_and_stalls_nothing(tmp_path: Path) -> None:
    with service_in_thread(usage=str(tmp_path / "usage")) as live:
        writer = live.service.meter._log
        assert writer is not None
        disk = writer._appender._files = FullDisk()
        disk.is_full = True
        for number in range(3):
            answer = live.acme.post("/v1/completions", json={**BODY, "prompt": IDS, "salt": str(number)})
            assert answer.status_code == 200
        state = eventually(lambda: (now := state_of(live))["problem"] and now)
        assert state["problem"] == "No space left on device" and state["waiting"] == 3 and state["lost"] == 0
        assert "radixkv_usage_failing 1.0" in live.operator.get("/metrics").text
        assert total(live.acme, "completion")["requests"] == 3
        disk.is_full = False
        eventually(lambda: state_of(live)["problem"] is None and state_of(live)["durable"] >= 3)
        assert "radixkv_usage_failing 0.0" in live.operator.get("/metrics").text
    assert len([each for each in found(tmp_path / "usage") if each.kind == "completion"]) == 3


@pytest.mark.slow
def test_what_was_written_is_known_after_sigkill(tmp_path: Path) -> None:
    folder = tmp_path / "usage"
    options = ["--usage", str(folder), "--num-blocks", "1024"]
    with served(tmp_path / "log", *options) as process, client(process.url, KEYS["acme"]) as acme:
        for number in range(5):
            answer = acme.post("/v1/completions", json={**BODY, "prompt": IDS, "salt": f"{number}"})
            assert answer.status_code == 200
        process.kill()
    (file,) = record_files(folder)
    with file.open("ab") as content:
        content.write(b'{"id":"torn","ti')
    with served(tmp_path / "log2", *options) as process, client(process.url, KEYS["acme"]) as acme:
        assert total(acme, "completion")["requests"] == 5, "the next process knows them"
        with client(process.url, KEYS["operator"]) as operator:
            assert operator.get("/v1/stats").json()["usage_log"]["skipped"] == 1
        assert acme.post("/v1/completions", json={**BODY, "prompt": IDS}).status_code == 200
        assert process.stop() == 0
    told = (tmp_path / "log2").read_text()
    assert f"1 lines in {folder} are no usage records" in told and file.name in told
    with closing(UsageFolder(folder)) as read:
        completions = [each for each in read.records() if each.kind == "completion"]
    assert len(completions) == 6 == len({each.id for each in completions}) and len(record_files(folder)) == 2
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    assert b"demo-acme" not in b"".join(path.read_bytes() for path in folder.iterdir())


def test_a_folder_of_an_earlier_version_stops_the_start(tmp_path: Path) -> None:
    chained(tmp_path / "old", [record(1)])
    with (
        pytest.raises(ConfigError, match=r"--usage.*earlier version.*radixkv usage export"),
        service_in_thread(usage=str(tmp_path / "old")),
    ):
        pass


def test_a_folder_that_cannot_be_used_stops_the_start(tmp_path: Path) -> None:
    for text in ("", str(tmp_path / "no" / "usage")):
        with pytest.raises(ConfigError, match="--usage"):
            ServeSettings.parse({"usage": text})
    (tmp_path / "open").mkdir(mode=0o755)
    with pytest.raises(ConfigError, match="mode 0700"), service_in_thread(usage=str(tmp_path / "open")):
        pass
