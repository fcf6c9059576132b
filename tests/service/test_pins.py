"""Pins over HTTP: a tenant's own pins, within its budget, survive a flood of other prompts.

The command line can pin too.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from radixkv import audit
from radixkv.cli.main import commands
from radixkv.service.tenant_sync import pin_share
from radixkv_policies import LRFU
from tests.service.running import Running, service_in_thread
from tests.service.test_refusals import refusal

PROMPT = {"token_ids": [*range(100, 164)]}


@pytest.fixture(scope="module")
def service() -> Iterator[Running]:
    with service_in_thread(**{"num-blocks": "64"}) as running:
        settings = {"max_pinned_blocks": 6, "policy": "lrfu"}
        assert (
            running.operator.put("/v1/tenants/acme", json=settings).json()["settings"].items()
            >= settings.items()
        )
        yield running


@pytest.fixture(autouse=True)
def nothing_pinned(service: Running) -> Iterator[None]:
    yield
    for who in (service.acme, service.globex):
        who.delete("/v1/cache")
        assert who.get("/v1/pins").json() == {"pins": []}
    audit.check(service.service.cache)


def warm_and_pin(service: Running, prompt: Any = PROMPT, **fields: Any) -> dict[str, Any]:
    place = {name: value for name, value in fields.items() if name in ("salt", "adapter")}
    assert service.acme.post("/v1/warm", json={**prompt, **place}).status_code == 200
    answer = service.acme.post("/v1/pins", json={**prompt, "ttl_s": 600, **fields})
    assert answer.status_code == 201, answer.text
    return dict(answer.json())


def test_a_pinned_prefix_survives_a_flood(service: Running) -> None:
    pin = warm_and_pin(service, salt="s")
    assert (pin["tokens"], pin["blocks"], pin["salt"], pin["adapter"]) == (64, 4, "s", None)
    for at in range(20):
        service.acme.post("/v1/warm", json={"token_ids": [at] * 16 * 8})
    assert service.acme.post("/v1/lookup", json={**PROMPT, "salt": "s"}).json()["matched_blocks"] == 4
    (listed,) = service.acme.get("/v1/pins").json()["pins"]
    assert listed["id"] == pin["id"] and 0 < listed["ttl_s"] <= 600
    stats = service.acme.get("/v1/stats").json()
    assert (stats["pinned_blocks"], stats["num_pins"]) == (4, 1)
    metrics = service.operator.get("/metrics").text
    assert (
        'radixkv_tenant_pinned_blocks{tenant="acme"} 4.0' in metrics
        and "radixkv_cache_num_pins 1.0" in metrics
    )
    again = warm_and_pin(service, salt="s", ttl_s=1000)
    assert again["id"] == pin["id"] and again["ttl_s"] > 900
    assert service.acme.delete(f"/v1/pins/{pin['id']}").status_code == 204
    gone, never = (service.acme.delete(f"/v1/pins/{which}") for which in (pin["id"], "none"))
    assert gone.status_code == 404 and gone.content == never.content


def test_a_pin_of_a_prefix_not_resident_or_over_budget_is_refused(service: Running) -> None:
    absent = service.acme.post("/v1/pins", json={**PROMPT, "salt": "absent", "ttl_s": 600})
    error = refusal(absent)
    assert (absent.status_code, error["type"], error["value"]) == (409, "not_resident", 0)
    long = {"token_ids": [7] * 16 * 7}
    service.acme.post("/v1/warm", json=long)
    over = service.acme.post("/v1/pins", json={**long, "ttl_s": 600})
    error = refusal(over)
    assert (over.status_code, error["type"]) == (409, "pin_budget_exceeded")
    assert error["allowed"].startswith(
        "at most 6 blocks: max_pinned_blocks of the tenant, or else its guarantee"
    )
    nothing_to_pin = {"max_pinned_blocks": 0}
    assert service.operator.put("/v1/tenants/globex", json=nothing_to_pin).status_code == 200
    service.globex.post("/v1/warm", json=PROMPT)
    nothing = service.globex.post("/v1/pins", json={**PROMPT, "ttl_s": 600})
    assert refusal(nothing)["allowed"].startswith("at most 0 blocks")


def test_a_tenant_without_settings_may_pin_its_part_of_a_quarter_of_the_pool(service: Running) -> None:
    assert service.operator.put("/v1/tenants/globex", json={}).status_code == 200
    num_blocks = service.service.engine.limits.num_blocks
    whole = [
        {"token_ids": [token] * 16 * (num_blocks // 8), "ttl_s": 600, "salt": "share"} for token in (3, 4)
    ]
    for each in whole:
        prompt = {name: each[name] for name in ("token_ids", "salt")}
        assert service.globex.post("/v1/warm", json=prompt).status_code == 200
    first, second = (service.globex.post("/v1/pins", json=each) for each in whole)
    assert first.status_code == 201, first.text
    assert second.status_code == 409 and f"at most {num_blocks // 8} blocks" in refusal(second)["allowed"]
    service.globex.delete(f"/v1/pins/{first.json()['id']}")


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (PROMPT, "ttl_s"),
        ({**PROMPT, "ttl_s": 0}, "ttl_s"),
        ({**PROMPT, "ttl_s": 1e12}, "ttl_s"),
        ({**PROMPT, "ttl_s": "60"}, "ttl_s"),
        ({**PROMPT, "ttl_s": 600, "tenant": "globex"}, "tenant"),
        ({"token_ids": [1] * 15, "ttl_s": 600}, "prompt, messages, token_ids"),
        ({"ttl_s": 600}, "prompt, messages, token_ids"),
    ],
)
def test_bad_pin_requests_are_422(service: Running, body: Any, field: str) -> None:
    answer = service.acme.post("/v1/pins", json=body)
    assert answer.status_code == 422 and refusal(answer)["field"] == field


def test_another_tenants_pin_looks_like_one_that_does_not_exist(service: Running) -> None:
    pin = warm_and_pin(service)
    assert service.globex.get("/v1/pins").json() == {"pins": []}
    theirs = service.globex.delete(f"/v1/pins/{pin['id']}")
    assert theirs.status_code == 404 and theirs.content == service.globex.delete("/v1/pins/none").content
    assert len(service.acme.get("/v1/pins").json()["pins"]) == 1
    for who, status in ((service.operator, 403), (service.nobody, 401)):
        assert who.get("/v1/pins").status_code == who.delete(f"/v1/pins/{pin['id']}").status_code == status
        assert who.post("/v1/pins", json={**PROMPT, "ttl_s": 600}).status_code == status


def test_a_purge_ends_pins(service: Running) -> None:
    warm_and_pin(service)
    assert service.operator.post("/v1/tenants/acme/purge").status_code == 200
    assert service.acme.get("/v1/pins").json() == {"pins": []}


def test_a_tenant_can_have_its_own_policy(service: Running) -> None:
    tenants = service.service.cache._tenants
    assert isinstance(tenants["acme"].policy, LRFU) and not isinstance(tenants["globex"].policy, LRFU)
    answer = service.operator.put("/v1/tenants/acme", json={"policy": "best"})
    assert answer.status_code == 422 and refusal(answer)["field"] == "policy"
    assert "lrfu" in str(refusal(answer)["allowed"])


def test_a_policy_over_http_is_never_imported(
    service: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any class is refused, whether or not it exists.

    Only short names of policies that were loaded at the start are allowed.
    """
    (tmp_path / "canary_over_http.py").write_text("from radixkv_policies import LRU as Canary\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("canary_over_http:Canary", "radixkv_policies:LRU", "canary_over_http", "os:system"):
        answer = service.operator.put("/v1/tenants/acme", json={"policy": name})
        assert answer.status_code == 422 and refusal(answer)["field"] == "policy"
    assert "canary_over_http" not in sys.modules


def test_the_command_line_can_pin(service: Running, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps(PROMPT) + "\n")
    done = CliRunner().invoke(commands, ["warm", str(path), "--url", service.url, "--pin", "600", "--json"])
    assert done.exit_code == 0, done.output
    (row,) = json.loads(done.stdout)
    assert [each["id"] for each in service.acme.get("/v1/pins").json()["pins"]] == [row["pin"]]
    table = CliRunner().invoke(commands, ["warm", str(path), "--url", service.url, "--pin", "600"])
    assert table.stdout.split("\n")[0].split()[-1] == "pin"
    other = {"token_ids": [*range(900, 964)]}
    path.write_text(json.dumps(other) + "\n")
    for wrong in ("-1", "0", "nan", "inf", "x"):
        refused = CliRunner().invoke(commands, ["warm", str(path), "--url", service.url, "--pin", wrong])
        assert refused.exit_code == 2 and "'--pin'" in refused.stderr and wrong in refused.stderr
    assert service.acme.post("/v1/lookup", json=other).json()["matched_tokens"] == 0, "nothing was warmed"


def test_the_number_of_pins_of_a_tenant_is_limited(service: Running) -> None:
    """Pins of the fleet count, and pins of another tenant do not. The operator's settings define the limit."""
    settings = {"max_pinned_blocks": 6, "policy": "lrfu"}
    for wrong in (-1, 65_537, 1.5, "3"):
        answer = service.operator.put("/v1/tenants/acme", json={**settings, "max_pins": wrong})
        assert answer.status_code == 422 and refusal(answer)["field"] == "max_pins"
    answer = service.operator.put("/v1/tenants/acme", json={**settings, "max_pins": 2})
    assert answer.json()["settings"]["max_pins"] == 2
    try:
        pins = [warm_and_pin(service, {"token_ids": PROMPT["token_ids"][:size]}) for size in (16, 32)]
        assert service.acme.post("/v1/warm", json=PROMPT).status_code == 200
        error = refusal(answer := service.acme.post("/v1/pins", json={**PROMPT, "ttl_s": 600}))
        assert (answer.status_code, error["type"], error["value"], error["allowed"]) == (
            409,
            "pin_limit_exceeded",
            2,
            "at most 2 pins",
        )
        part = service.acme.post("/v1/pins", json={**PROMPT, "ttl_s": 600, "replicas": "all"}).json()
        (mine,) = part["replicas"]
        assert (mine["state"], mine["error"]) == ("failed", "pin_limit_exceeded")
        for pin in pins:
            assert service.acme.delete(f"/v1/pins/{pin['id']}").status_code == 204
        fleet = {"ttl_s": 600, "replicas": "all"}
        second = service.acme.post("/v1/pins", json={**fleet, "token_ids": PROMPT["token_ids"][:16]})
        assert second.json()["replicas"][0]["state"] == "done"
        third = service.acme.post("/v1/pins", json={**fleet, "token_ids": PROMPT["token_ids"][:32]})
        error = refusal(third)
        assert (third.status_code, error["type"], error["value"]) == (409, "pin_limit_exceeded", 2)
        assert error["allowed"] == "at most 2 pins of the fleet"
        for pin in service.acme.get("/v1/pins").json()["pins"]:
            assert service.acme.delete(f"/v1/pins/{pin['id']}").status_code == 204
    finally:
        assert service.operator.put("/v1/tenants/acme", json=settings).status_code == 200
    assert warm_and_pin(service)["blocks"] == 4


def test_many_pins_are_listed_and_unpublished_in_parts(service: Running) -> None:
    """A reader pins a base in 1,500 namespaces.

    Each answer lists one part, and no call does the work for all of them.
    """
    cache = service.service.cache
    settings = {"max_pinned_blocks": 6, "policy": "lrfu"}
    put = {**settings, "max_pins": 1_500}
    assert service.operator.put("/v1/tenants/acme", json=put).status_code == 200
    ids = PROMPT["token_ids"]
    base = {"id": "many", "token_ids": ids, "readers": ["acme"]}
    assert service.operator.post("/v1/bases", json=base).status_code == 201
    for salt in range(1_500):
        cache.pin(service.service.engine.namespace("acme", salt=str(salt)), ids, 600)
    try:
        first = service.acme.get("/v1/pins")
        assert len(first.json()["pins"]) == 1_024
        found, link = first.json()["pins"], first.headers.get("link")
        while link is not None:
            assert link.endswith('; rel="next"')
            part = service.acme.get(link.partition(">")[0][1:])
            assert 0 < len(part.json()["pins"]) <= 1_024
            found, link = found + part.json()["pins"], part.headers.get("link")
        assert [pin["salt"] for pin in found] == [str(salt) for salt in range(1_500)]
        few = service.acme.get("/v1/pins", params={"limit": 2, "after": found[9]["id"]})
        assert [pin["id"] for pin in few.json()["pins"]] == [pin["id"] for pin in found[10:12]]
        for query in (
            {"limit": "0"},
            {"limit": "1025"},
            {"limit": "x"},
            {"after": "-1"},
            {"after": "x" * 32},
        ):
            answer = service.acme.get("/v1/pins", params=query)
            assert answer.status_code == 422 and refusal(answer)["field"] == next(iter(query))
        assert service.acme.delete(f"/v1/pins/{found[700]['id']}").status_code == 204
    finally:
        assert service.operator.delete("/v1/bases/many").status_code == 204
        assert service.operator.put("/v1/tenants/acme", json=settings).status_code == 200
    assert service.acme.get("/v1/pins").json() == {"pins": []}


@pytest.mark.slow
def test_a_plain_keys_file_is_enough_for_prompt_caching(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    keys.write_text(json.dumps({"operator": "demo-operator", "tenants": {"acme": "demo-acme"}}))
    rules = "Answer politely, and name the page of the manual. " * 8
    marked = {"type": "text", "text": rules, "cache_control": {"type": "ephemeral"}}
    asked = [{"role": "user", "content": "Why?"}]
    content = {"model": "radixkv-demo", "systemInstruction": {"parts": [{"text": rules}]}, "ttl": "60s"}
    with service_in_thread(keys=str(keys)) as running:
        body = {"system": [marked], "messages": asked, "max_tokens": 1}
        usage = running.acme.post("/v1/messages", json=body).json()["usage"]
        held = running.acme.post("/v1beta/cachedContents", json=content)
    assert usage["cache_creation_input_tokens"] > 0
    assert held.status_code == 200 and held.json()["usageMetadata"]["totalTokenCount"] > 0


@pytest.mark.parametrize(
    ("num_tenants", "blocks"), [(0, 1024), (1, 1024), (2, 512), (3, 256), (4, 256), (5, 128)]
)
def test_parts_are_equal_and_together_at_most_a_quarter(num_tenants: int, blocks: int) -> None:
    assert pin_share(4096, num_tenants) == blocks and num_tenants * blocks <= 1024
    assert pin_share(7, num_tenants) <= 1
