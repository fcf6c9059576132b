"""Warming and lookups: the computed tokens, the tokens left out, and requests that share one computation."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from radixkv.coordination import JobPart, WarmJob
from radixkv.coordination.values import Writer
from radixkv.index.tokens import encode
from radixkv.service.core import Limits
from radixkv.service.fleet.job_table import Job
from tests.service.running import Running, model_held, sent, service_in_thread
from tests.waiting import ended, eventually, is_set

MESSAGES = [
    {"role": "system", "content": "Answer politely. " * 12},
    {"role": "user", "content": "Which page of the manual tells how to return a letter?"},
]


def test_the_lookup_after_a_warm_finds_exactly_what_was_warmed(live: Running, salt: str, text: str) -> None:
    for fields in ({"prompt": text}, {"messages": MESSAGES}, {"token_ids": list(range(5, 105))}):
        body = {**fields, "salt": salt}
        warmed = live.acme.post("/v1/warm", json=body)
        assert warmed.status_code == 200
        reply = warmed.json()
        assert set(reply) == {"tokens", "cached_before", "computed", "left_out", "blocks", "seconds"}
        assert reply["tokens"] == reply["cached_before"] + reply["computed"] == 16 * reply["blocks"] > 0
        found = live.acme.post("/v1/lookup", json=body).json()
        assert found == {"matched_tokens": reply["tokens"], "matched_blocks": reply["blocks"]}


def test_warming_again_computes_nothing(live: Running, salt: str, text: str) -> None:
    first, second = (live.acme.post("/v1/warm", json={"prompt": text, "salt": salt}).json() for _ in range(2))
    assert (first["cached_before"], first["computed"]) == (0, first["tokens"])
    assert (second["cached_before"], second["computed"]) == (first["tokens"], 0)
    assert (second["tokens"], second["blocks"], second["left_out"]) == (
        first["tokens"], first["blocks"], first["left_out"],
    )  # fmt: skip


def test_a_longer_prompt_computes_what_it_adds(live: Running, salt: str) -> None:
    ids = list(range(10, 170))
    live.acme.post("/v1/warm", json={"token_ids": ids[:80], "salt": salt})
    reply = live.acme.post("/v1/warm", json={"token_ids": ids, "salt": salt}).json()
    assert (reply["tokens"], reply["cached_before"], reply["computed"]) == (160, 80, 80)


@pytest.mark.parametrize(
    ("num_ids", "tokens", "left_out"), [(1, 0, 1), (15, 0, 15), (16, 16, 0), (17, 16, 1), (40, 32, 8)]
)
def test_ids_are_warmed_in_whole_blocks(
    live: Running, salt: str, num_ids: int, tokens: int, left_out: int
) -> None:
    reply = live.acme.post("/v1/warm", json={"token_ids": list(range(7, 7 + num_ids)), "salt": salt}).json()
    assert (reply["tokens"], reply["left_out"], reply["blocks"]) == (tokens, left_out, tokens // 16)


def test_a_warmed_text_serves_every_continuation(live: Running, salt: str, text: str) -> None:
    cut_inside_a_word = text + "Rule 12: ans"
    warmed = live.acme.post("/v1/warm", json={"prompt": cut_inside_a_word, "salt": salt}).json()
    total = len(live.service.tokenizer.encode(cut_inside_a_word))
    assert warmed["tokens"] + warmed["left_out"] == total
    for end in ("wer", "\n", "!?", "atz", " a"):
        body = {"prompt": cut_inside_a_word + end, "salt": salt, "max_tokens": 1}
        usage = live.acme.post("/v1/completions", json=body).json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == warmed["tokens"]


def test_salts_and_adapters_are_namespaces_of_their_own(live: Running, salt: str, text: str) -> None:
    text = f"Of {salt} only: {text}"
    live.acme.post("/v1/warm", json={"prompt": text, "salt": salt})
    for other in (
        {"salt": salt + "x"},
        {"salt": ""},
        {"salt": salt, "adapter": "a"},
        {"salt": "", "adapter": salt},
    ):
        assert live.acme.post("/v1/lookup", json={"prompt": text, **other}).json()["matched_tokens"] == 0


def test_a_lookup_leaves_no_trace(live: Running, salt: str, text: str) -> None:
    before = live.service.cache.snapshot(), live.acme.get("/v1/stats").json()
    live.acme.post("/v1/lookup", json={"prompt": text, "salt": salt})
    after = live.service.cache.snapshot(), live.acme.get("/v1/stats").json()
    assert before[0].trees == after[0].trees and before[1] == after[1]


def test_lookups_answer_while_the_model_is_busy(live: Running, salt: str, text: str) -> None:
    with model_held(live.service):
        assert live.acme.post("/v1/lookup", json={"prompt": text, "salt": salt}).status_code == 200
        assert live.nobody.get("/healthz").status_code == 200


def test_a_job_reports_its_state_and_its_progress(live: Running, salt: str, text: str) -> None:
    with model_held(live.service):
        accepted = live.acme.post("/v1/warm", json={"prompt": text, "salt": salt, "wait": False})
        assert accepted.status_code == 202 and set(accepted.json()) == {"job"}
        path = f"/v1/warm/{accepted.json()['job']}"
        waiting = live.acme.get(path).json()
        assert (waiting["state"], waiting["result"], waiting["error"]) == ("queued", None, None)
        assert waiting["progress"]["computed"] == 0 < waiting["progress"]["total"]
    eventually(lambda: live.acme.get(path).json()["state"] == "done")
    done = live.acme.get(path).json()
    assert done["progress"] == {"computed": done["result"]["tokens"], "total": done["result"]["tokens"]}
    assert done["result"]["computed"] == done["result"]["tokens"] == waiting["progress"]["total"]


def num_waiting(live: Running) -> int:
    """The number of requests and jobs that wait for prefixes."""
    return sum(each.num_shares for each in live.service.warmer.under_way())


def test_warms_of_the_same_prefix_share_one_computation(live: Running, salt: str, text: str) -> None:
    body = {"prompt": text, "salt": salt}
    missed = live.acme.get("/v1/stats").json()["missed_tokens"]
    replies: list[httpx.Response] = []
    with model_held(live.service):
        threads = [
            threading.Thread(target=lambda: replies.append(live.acme.post("/v1/warm", json=body)))
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        job = live.acme.post("/v1/warm", json={**body, "wait": False}).json()["job"]
        eventually(lambda: num_waiting(live) == 5)
        assert live.service.warmer.num_under_way == 1
    for thread in threads:
        ended(thread)
    eventually(lambda: live.acme.get(f"/v1/warm/{job}").json()["state"] == "done")
    tokens = replies[0].json()["tokens"]
    assert {(each.json()["tokens"], each.json()["computed"]) for each in replies} == {(tokens, tokens)}
    assert live.acme.get("/v1/stats").json()["missed_tokens"] == missed + tokens


def test_a_client_that_hangs_up_does_not_cancel_a_shared_warm(live: Running, salt: str, text: str) -> None:
    body = {"prompt": text, "salt": salt}
    replies: list[httpx.Response] = []
    with model_held(live.service):
        with sent(live, "acme", "/v1/warm", body):
            eventually(lambda: num_waiting(live) == 1)
        eventually(lambda: live.service.warmer.num_under_way == 0, "a warm without waiters is cancelled")
        thread = threading.Thread(target=lambda: replies.append(live.acme.post("/v1/warm", json=body)))
        thread.start()
        eventually(lambda: num_waiting(live) == 1)
        with sent(live, "acme", "/v1/warm", body):
            eventually(lambda: num_waiting(live) == 2)
        eventually(lambda: num_waiting(live) == 1)
    ended(thread)
    assert replies[0].status_code == 200 and replies[0].json()["tokens"] > 0
    assert eventually(lambda: live.service.engine_loop.num_unfinished == 0)


def test_a_clear_reports_how_much_it_forgot(live: Running, salt: str) -> None:
    ids = list(range(3, 67))
    for adapter in (None, "a"):
        live.globex.post("/v1/warm", json={"token_ids": ids, "salt": salt, "adapter": adapter})
    live.globex.post("/v1/warm", json={"token_ids": ids, "salt": salt + "-kept"})
    assert live.globex.delete("/v1/cache", params={"salt": salt, "adapter": "a"}).json() == {
        "namespaces": 1,
        "blocks": 4,
        "owed": False,
    }
    assert live.globex.delete("/v1/cache", params={"salt": salt}).json() == {
        "namespaces": 1,
        "blocks": 4,
        "owed": False,
    }
    assert live.globex.post("/v1/lookup", json={"token_ids": ids, "salt": salt}).json()["matched_tokens"] == 0
    assert (
        live.globex.post("/v1/lookup", json={"token_ids": ids, "salt": salt + "-kept"}).json()[
            "matched_tokens"
        ]
        == 64
    )
    assert live.globex.delete("/v1/cache").json()["namespaces"] >= 1
    assert live.globex.get("/v1/stats").json()["resident_blocks"] == 0
    assert live.globex.delete("/v1/cache").json() == {"namespaces": 0, "blocks": 0, "owed": False}


@contextmanager
def prefill_held(live: Running) -> Iterator[threading.Event]:
    """Stop each prefill after its first chunk while the ``with`` block runs.

    The event is set once a prefill has stopped.
    """
    engine: Any = live.service.engine
    arrived, go_on = threading.Event(), threading.Event()
    prefill = engine.prefilling

    def held(*arguments: Any, on_chunk: Callable[[int, int], object], **named: Any) -> Any:
        def stop(num_ready: int, total: int) -> None:
            arrived.set()
            is_set(go_on)
            on_chunk(num_ready, total)

        return prefill(*arguments, on_chunk=stop, **named)

    engine.prefilling = held
    try:
        yield arrived
    finally:
        go_on.set()
        engine.prefilling = prefill


def test_a_warm_that_is_purged_midway_is_409(live: Running, salt: str) -> None:
    body = {"token_ids": list(range(5, 5 + 64 * 16)), "salt": salt}
    answers: list[httpx.Response] = []
    with prefill_held(live) as arrived:
        thread = threading.Thread(target=lambda: answers.append(live.acme.post("/v1/warm", json=body)))
        thread.start()
        job = live.acme.post("/v1/warm", json={**body, "wait": False}).json()["job"]
        is_set(arrived)
        purged = live.operator.post("/v1/tenants/acme/purge").json()
        assert purged["complete"] and purged["generation"] >= 1
        assert live.operator.get("/v1/tenants/acme/purge").json()["generation"] == purged["generation"]
        assert live.service.warmer.num_under_way == 0, "no request can join it any more"
    ended(thread)
    assert (answers[0].status_code, answers[0].json()["error"]["type"]) == (409, "conflict")
    assert answers[0].headers["Retry-After"] == "1"
    gone, never = live.acme.get(f"/v1/warm/{job}"), live.acme.get(f"/v1/warm/{'0' * 32}")
    assert gone.status_code == 404 and gone.content == never.content, "a purge drops the jobs"
    assert live.acme.post("/v1/lookup", json=body).json()["matched_tokens"] == 0
    again = live.acme.post("/v1/warm", json=body).json()
    assert (again["cached_before"], again["computed"]) == (0, 64 * 16)


def test_a_completion_that_is_purged_midway_ends_with_the_error(live: Running, salt: str) -> None:
    body = {
        "prompt": list(range(5, 105)),
        "salt": salt,
        "max_tokens": 8000,
        "ignore_eos": True,
        "stream": True,
    }
    with live.acme.stream("POST", "/v1/completions", json=body) as stream:
        pieces = stream.iter_lines()
        assert "text_completion" in next(pieces)
        assert live.operator.post("/v1/tenants/acme/purge").status_code == 200
        events = [json.loads(line[6:]) for line in pieces if line.startswith("data: {")]
    assert events[-1]["error"]["code"] == "conflict", "the status of the stream was already sent"


def test_a_completion_that_is_purged_midway_may_be_asked_again(live: Running, salt: str) -> None:
    body = {"prompt": list(range(5, 105)), "salt": salt, "max_tokens": 8000, "ignore_eos": True}
    answers: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: answers.append(live.acme.post("/v1/completions", json=body)))
    thread.start()
    eventually(lambda: live.service.cache.stats().num_sequences, "it runs")
    assert live.operator.post("/v1/tenants/acme/purge").status_code == 200
    ended(thread)
    assert (answers[0].status_code, answers[0].headers["Retry-After"]) == (409, "1")
    described = live.nobody.get("/openapi.json").json()["paths"]["/v1/completions"]["post"]["responses"]
    assert "Retry-After" in described["409"]["headers"]


def test_an_idempotency_key_makes_a_warm_one_job(live: Running, salt: str) -> None:
    body = {"token_ids": list(range(9, 109)), "salt": salt}
    headers = {"Idempotency-Key": salt}
    first = live.acme.post("/v1/warm", json=body, headers=headers).json()
    again = live.acme.post("/v1/warm", json=body, headers=headers).json()
    assert first["computed"] == again["computed"] == 96, "the same answer, and no second warm"
    assert [each["state"] for each in first["replicas"]] == ["done"]
    job = live.acme.post("/v1/warm", json={**body, "wait": False}, headers=headers).json()["job"]
    assert live.acme.get(f"/v1/warm/{job}").json()["result"]["computed"] == 96
    other = live.acme.post("/v1/warm", json={**body, "token_ids": [7, *range(10, 109)]}, headers=headers)
    assert (other.status_code, other.json()["error"]["field"]) == (409, "Idempotency-Key")
    for bad in ("with a space", "x" * 256, ""):
        answer = live.acme.post("/v1/warm", json=body, headers={"Idempotency-Key": bad})
        assert (answer.status_code, answer.json()["error"]["field"]) == (422, "Idempotency-Key")


@pytest.mark.parametrize(
    "where", ["both", 0, 2000, True, 1.5, [], ["a b"], ["x"] * 65, {"best": 2}, ["nobody-of-this-fleet"]]
)
def test_an_invalid_replicas_value_is_422(live: Running, where: object) -> None:
    answer = live.acme.post("/v1/warm", json={"token_ids": [5] * 16, "replicas": where})
    error = answer.json()["error"]
    assert answer.status_code == 422 and error["field"].startswith("replicas")
    if not isinstance(where, int | list) or isinstance(where, bool):
        assert error["allowed"] == "'self', 'all', a number of replicas or a list of their names"


def test_jobs_are_bounded_and_counted(text: str) -> None:
    with service_in_thread(Limits(max_jobs=3)) as live:
        jobs = []
        for number in range(5):
            body = {"prompt": text, "salt": str(number), "wait": False}
            jobs.append(live.acme.post("/v1/warm", json=body).json()["job"])
            eventually(lambda: live.acme.get(f"/v1/warm/{jobs[-1]}").json()["state"] == "done")
            eventually(lambda: live.service.warm_jobs.table.num_unfinished == 0)
        states = [lambda job=job: live.acme.get(f"/v1/warm/{job}").status_code for job in jobs]
        for state in states[:2]:
            eventually(lambda state=state: state() == 404, "the oldest job was dropped")
        assert [state() for state in states[2:]] == [200] * 3
        assert "radixkv_warm_jobs_kept 3.0" in live.operator.get("/metrics").text


def test_too_many_waiting_requests_are_429_for_that_tenant_only(text: str) -> None:
    with service_in_thread(Limits(max_queued=2, max_jobs=2)) as live, model_held(live.service, "globex"):
        bodies = [{"prompt": text, "salt": str(number), "wait": False} for number in range(3)]
        answers = [live.acme.post("/v1/warm", json=body) for body in bodies]
        assert [answer.status_code for answer in answers] == [202, 202, 429]
        assert answers[2].headers["Retry-After"] == "1"
        assert live.globex.post("/v1/warm", json=bodies[0]).status_code == 202
        assert live.acme.post("/v1/warm", json=bodies[0]).status_code == 429, "the table of jobs is full"
        assert live.acme.post("/v1/completions", json={"prompt": "x"}).status_code == 429, (
            "no room in the lane"
        )


def test_finished_jobs_leave_the_table(text: str) -> None:
    with service_in_thread(Limits(job_ttl_s=0.0)) as live:
        job = live.acme.post("/v1/warm", json={"prompt": text, "wait": False}).json()["job"]
        eventually(lambda: live.acme.get(f"/v1/warm/{job}").status_code == 404)


def test_a_warm_without_free_blocks_is_503_and_changes_nothing(salt: str) -> None:
    with service_in_thread(**{"num-blocks": "8"}) as live:
        cache = live.service.cache
        held = cache.open(live.service.namespace("globex", "", None), range(100, 196))
        answer = live.acme.post("/v1/warm", json={"token_ids": list(range(3, 67))})
        assert answer.status_code == 503 and answer.headers["Retry-After"]
        assert answer.json()["error"]["type"] == "no_capacity"
        held.release()
        assert live.acme.post("/v1/warm", json={"token_ids": list(range(3, 67))}).status_code == 200


def test_no_replica_replaces_three_that_died_or_continues_after_a_purge(live: Running) -> None:
    """A prompt that kills replicas must not travel through the fleet. The job's records say how each replica ended."""
    namespace = live.service.namespace("acme", "", None)
    job = Job("0" * 32, live.service.owner("acme", "", 0), namespace, encode(range(5, 21)), 0)

    def spare(*parts: JobPart) -> int:
        record = WarmJob(job.id, b"", b"", 16, parts, Writer("one", 1, "nonce"), num_wanted=1)
        return len(live.service.warm_jobs._spare(job, record))

    lost = [JobPart(name, 1, "nonce", "lost") for name in "abc"]
    assert spare(*lost[:2]) == 1 and spare(*lost) == 0
    assert spare(JobPart("a", 1, "nonce", "failed", error="no_capacity")) == 1
    assert spare(JobPart("a", 1, "nonce", "failed", error="conflict")) == 0
    own = live.service.fleet.coordinator.replica_id
    assert spare(JobPart(own, 1, "nonce", "failed", error="busy")) == 0, (
        "a replica that failed is not asked again"
    )
