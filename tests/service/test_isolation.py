"""Two tenants over HTTP: no data of one reaches the other, not even the fact that it exists."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from radixkv import audit
from tests.service.running import Running, client
from tests.waiting import eventually


def without_date(answer: httpx.Response) -> tuple[int, bytes, dict[str, str]]:
    headers = {name: value for name, value in answer.headers.items() if name != "date"}
    return answer.status_code, answer.content, headers


@pytest.mark.parametrize("form", ["prompt", "messages", "token_ids"])
def test_the_same_prompt_of_two_tenants_never_matches(live: Running, salt: str, text: str, form: str) -> None:
    prompts: dict[str, Any] = {
        "prompt": text,
        "messages": [{"role": "system", "content": text}],
        "token_ids": live.service.tokenizer.encode(text),
    }
    body = {form: prompts[form], "salt": salt}
    warmed = live.acme.post("/v1/warm", json=body).json()
    assert live.globex.post("/v1/lookup", json=body).json() == {"matched_tokens": 0, "matched_blocks": 0}
    theirs = live.globex.post("/v1/warm", json=body).json()
    assert (theirs["cached_before"], theirs["computed"]) == (0, warmed["tokens"])
    for each in (live.acme, live.globex):  # a positive control: each tenant finds its own prefix
        assert each.post("/v1/lookup", json=body).json()["matched_tokens"] == warmed["tokens"]
    audit.check(live.service.cache)


def test_a_completion_is_cold_after_a_warm_of_another_tenant(live: Running, salt: str, text: str) -> None:
    live.acme.post("/v1/warm", json={"prompt": text, "salt": salt})
    body = {"prompt": text, "salt": salt, "max_tokens": 2, "temperature": 0}
    cold, warm = (
        live.globex.post("/v1/completions", json=body).json(),
        live.acme.post("/v1/completions", json=body).json(),
    )
    assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert warm["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert cold["choices"] == warm["choices"]


def test_fields_of_a_namespace_cannot_be_shifted_into_each_other(live: Running, salt: str) -> None:
    ids = list(range(20, 52))
    live.acme.post("/v1/warm", json={"token_ids": ids, "salt": salt, "adapter": "x"})
    for fields in (
        {"salt": salt + "x"},
        {"salt": "x", "adapter": salt},
        {"salt": salt},
        {"adapter": salt + "x"},
    ):
        assert live.acme.post("/v1/lookup", json={"token_ids": ids, **fields}).json()["matched_tokens"] == 0


def test_another_tenants_job_looks_like_one_that_does_not_exist(live: Running, salt: str, text: str) -> None:
    job = live.acme.post("/v1/warm", json={"prompt": text, "salt": salt, "wait": False}).json()["job"]
    for _ in range(2):  # while it runs, and after it has finished
        theirs = live.globex.get(f"/v1/warm/{job}")
        none = live.globex.get("/v1/warm/" + "x" * len(job))
        assert theirs.status_code == 404 and without_date(theirs) == without_date(none)
        eventually(lambda: live.acme.get(f"/v1/warm/{job}").json()["state"] == "done")


def test_jobs_cannot_be_guessed(live: Running, text: str) -> None:
    bodies = [{"prompt": text, "salt": str(number), "wait": False} for number in range(20)]
    jobs = {live.acme.post("/v1/warm", json=body).json()["job"] for body in bodies}
    assert len(jobs) == 20 and all(len(job) >= 32 for job in jobs)
    assert len({job[:4] for job in jobs}) > 15, "ids with a common beginning would count something"


def test_another_tenants_namespace_looks_like_one_that_does_not_exist(
    live: Running, salt: str, text: str
) -> None:
    live.acme.post("/v1/warm", json={"prompt": text, "salt": salt, "adapter": "a"})
    none = live.globex.delete("/v1/cache", params={"salt": "never-used"})
    assert none.status_code == 404
    for params in ({"salt": salt}, {"salt": salt, "adapter": "a"}, {"adapter": "a"}):
        assert without_date(live.globex.delete("/v1/cache", params=params)) == without_date(none)
    assert (
        live.acme.post("/v1/lookup", json={"prompt": text, "salt": salt, "adapter": "a"}).json()[
            "matched_tokens"
        ]
        > 0
    )


def test_a_clear_leaves_other_tenants_alone(live: Running, salt: str, text: str) -> None:
    body = {"prompt": text, "salt": salt}
    for each in (live.acme, live.globex):
        each.post("/v1/warm", json=body)
    live.globex.delete("/v1/cache")
    assert live.globex.post("/v1/lookup", json=body).json()["matched_tokens"] == 0
    assert live.acme.post("/v1/lookup", json=body).json()["matched_tokens"] > 0


def test_statistics_show_only_the_tenants_own_requests(live: Running, salt: str, text: str) -> None:
    before = live.globex.get("/v1/stats").content
    live.acme.post("/v1/completions", json={"prompt": text, "salt": salt, "max_tokens": 1})
    after = live.globex.get("/v1/stats")
    assert after.content == before and set(after.json()) == set(live.acme.get("/v1/stats").json())
    assert "acme" not in after.text
    everybody = live.operator.get("/v1/stats").json()
    assert [each["tenant"] for each in everybody["tenants"]] == ["acme", "globex"]
    assert everybody["cache"]["num_tenants"] == len(everybody["tenants"])
    assert f"radixkv_cache_num_tenants {len(everybody['tenants'])}.0" in live.operator.get("/metrics").text
    eventually(  # a request that an earlier test gave up may still end in between
        lambda: live.operator.get("/v1/stats").json()["tenants"][0] == live.acme.get("/v1/stats").json()
    )
    assert everybody["cache"]["num_blocks"] == 1024


def test_the_operator_sees_counts_and_no_content(live: Running, salt: str) -> None:
    live.acme.post("/v1/warm", json={"prompt": "the secret of the emerald\n" * 20, "salt": f"{salt}-emerald"})
    for path in ("/metrics", "/v1/stats", "/v1/replicas"):
        assert "emerald" not in live.operator.get(path).text


def test_a_tenant_header_is_ignored(live: Running, salt: str, text: str) -> None:
    body = {"prompt": text, "salt": salt}
    live.acme.post("/v1/warm", json=body)
    with client(live.url, "demo-globex") as forging:
        headers = {"x-tenant": "acme", "x-radixkv-tenant": b"acme".hex()}
        assert forging.post("/v1/lookup", json=body, headers=headers).json()["matched_tokens"] == 0
