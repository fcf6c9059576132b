"""Request bodies: their limits, where they are parsed, and that one tenant's bodies do not delay another tenant."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from pydantic import Field

from radixkv.service import reading_pool
from radixkv.service.app import ENDPOINTS
from radixkv.service.budgets import budget_of
from radixkv.service.engine_loop import Busy, Closed
from radixkv.service.intake import RECEIVING_BYTES, Intake
from radixkv.service.problems import ApiError
from radixkv.service.prompts import PromptRules
from radixkv.service.reading import Reader, asked, unpacked
from radixkv.service.reading_pool import Died, ReadingPool, ReadingProcess, Specification
from radixkv.service.reading_process import answer
from radixkv.service.schemas.base import RequestBody
from radixkv.service.schemas.bases import PublishRequest, ReadersRequest
from radixkv.service.schemas.chat import ChatRequest
from radixkv.service.schemas.completions import CompletionRequest
from radixkv.service.schemas.messages import MessagesRequest
from radixkv.service.schemas.prompts import LookupRequest
from radixkv.service.schemas.tenants import TenantSettings
from radixkv.service.schemas.warming import OrderRequest
from radixkv.service.threads import Threads
from radixkv.service.turns import Allowance
from radixkv.tokenizer import load_tokenizer
from tests.service.loop_watch import loop_watched
from tests.service.running import Running, service_in_thread
from tests.service.test_refusals import refusal
from tests.waiting import LIMIT_S, finished, is_set

TOKENIZER = load_tokenizer()
RULES = PromptRules(TOKENIZER.vocab_size, 8192, 16, 16384)
READER = Reader(TOKENIZER, RULES)
BODIES = [endpoint.body for endpoint in ENDPOINTS if endpoint.body is not None]
MAX_STALL_S = 0.05
NUM_TRIES = 5
"""Caches that other processes use too cost CPU time, so the least of some tries counts."""
JSON = {"content-type": "application/json"}


def refused(model: type[RequestBody], raw: bytes) -> dict[str, Any]:
    with pytest.raises(ApiError) as caught:
        READER.read(raw, model)
    return {"status": caught.value.status, **caught.value.body}


def names(num: int, value: str = "1") -> bytes:
    return ",".join(f'"{number}":{value}' for number in range(num)).encode()


# ---- budgets


@pytest.mark.slow
@pytest.mark.parametrize("model", BODIES, ids=lambda model: model.__name__)
def test_every_body_is_bounded_by_its_schema_before_it_is_parsed(model: type[RequestBody]) -> None:
    budget = budget_of(model, RULES.max_ids)
    assert budget.max_values < 80_000
    for raw in (
        b'{"a":[' + b"[],[" * 400_000,
        b"[" + b"1," * 2_000_000 + b"1]",
        b'{"a":{' + names(330_000) + b"}}",
    ):
        with pytest.raises(ApiError) as caught:
            budget.check(raw)
        assert caught.value.status in (400, 422)


def test_a_schema_that_bounds_nothing_is_refused_at_the_start() -> None:
    class Unbounded(RequestBody):
        names: list[str]

    class Mapped(RequestBody):
        names: dict[str, int] = Field(default_factory=dict)

    class Text(RequestBody):
        name: str

    for model in (Unbounded, Mapped, Text):
        with pytest.raises(AssertionError, match="max"):
            budget_of(model, 10)


def test_values_are_counted_and_text_is_not() -> None:
    commas = 'a, b [c] {d} \\\\ \\"e\\", ' * 100_000
    assert len(READER.read(b'{"prompt":"x","salt":""}', LookupRequest).prompts) == 1
    error = refused(LookupRequest, f'{{"prompt":"{commas}"}}'.encode())
    assert error["field"] == "prompt", (
        "commas in a text do not count; the text is refused for its length alone"
    )
    error = refused(LookupRequest, b'{"token_ids":[' + b"1," * 100_000 + b"1]}")
    assert (error["status"], error["value"]) == (422, 100_002) and "at most" in error["allowed"]


def test_a_body_that_is_slightly_too_long_still_names_its_field() -> None:
    error = refused(LookupRequest, json.dumps({"token_ids": [5] * (RULES.max_tokens + 1)}).encode())
    assert (error["field"], error["value"]) == ("token_ids", RULES.max_tokens + 1)


def test_short_schemas_have_short_bodies() -> None:
    assert budget_of(TenantSettings, RULES.max_ids).max_bytes == 16 * 1024
    assert budget_of(LookupRequest, RULES.max_ids).max_bytes is None
    assert (budget_of(ReadersRequest, RULES.max_ids).max_bytes or 0) > 10_000 * 256


# ---- errors


@pytest.mark.slow
@pytest.mark.parametrize("model", BODIES, ids=lambda model: model.__name__)
@pytest.mark.parametrize(
    "bad", [b"{%s}" % names(5000, '"x"'), b"[" + b"{}," * 5000 + b"{}]", b"[" + b'-1,"",' * 3000 + b"0]"]
)
def test_errors_beyond_a_few_are_counted_but_not_built(model: type[RequestBody], bad: bytes) -> None:
    """For any content of a field there are a few errors, not one for each bad item."""
    for field in [*model.model_fields, "unknown"]:
        error = refused(model, b'{"%s":%s}' % (field.encode(), bad))
        assert 400 <= error["status"] < 500 and len(json.dumps(error)) < 1500
        more = error["message"].rpartition("(and ")[2].removesuffix(" more)")
        is_one = error["message"].startswith("unknown field")  # however many there are
        assert is_one or not more.isdecimal() or int(more) < 20, error
    error = refused(model, b"{%s}" % names(100))
    assert error["message"] == "unknown field 0 (and 99 more)" and error["field"] == "0"


def test_the_first_error_is_named_and_the_others_counted() -> None:
    error = refused(LookupRequest, b'{"prompt":5,"salt":6,"adapter":7}')
    assert error["field"] == "prompt" and error["message"].endswith("(and 2 more)")
    assert refused(LookupRequest, b'{"messages":[{"role":"user","content":"x","a":1,"b":2}]}')["message"] == (
        "unknown field messages[0].a (and 1 more)"
    )


# ---- the same on the loop and in a process

TURNS = [{"role": "user", "content": "Hello, é.\n" * 20}]


def schema(of_answer: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": of_answer}}


@pytest.mark.parametrize(
    ("model", "body"),
    [
        (LookupRequest, {"prompt": "One sentence, and\nanother one. " * 9, "salt": "s"}),
        (LookupRequest, {"token_ids": [5] * 40, "adapter": "a"}),
        (LookupRequest, {"messages": [{"role": "user", "content": "Hello there.\n"}] * 9}),
        (LookupRequest, {"messages": [{"role": "wizard", "content": "x"}]}),
        (LookupRequest, {"token_ids": [9000]}),
        (LookupRequest, {"prompt": "x", "tenant": "y"}),
        (PublishRequest, {"id": "b", "readers": ["a", "é"], "prompt": "Hello there.\n" * 20}),
        (CompletionRequest, {"prompt": ["é 1", "two"], "echo": True, "temperature": 0, "user": "u" * 99, "stop": "z"}),
        (CompletionRequest, {"prompt": [[1, 2], [3]], "echo": True, "hints": {"labels": {"a": 1.5}, "priority": 3}}),
        (CompletionRequest, {"prompt": "x", "logit_bias": {"1": "x"}}),
        (OrderRequest, {"job": "0" * 32, "token_ids": [7] * 33, "left_out": 2}),
        (TenantSettings, {"weight": 2.0, "mode": "strict"}),
        (ChatRequest, {"messages": TURNS, "response_format": schema({"maximum": 10**30, "minimum": -1e300})}),
        (MessagesRequest, {"model": "m", "max_tokens": 9, "messages": TURNS, "cache_control": {"type": "ephemeral"}}),
    ],
)  # fmt: skip
def test_a_reading_process_parses_like_the_event_loop(model: type[RequestBody], body: dict[str, Any]) -> None:
    raw = json.dumps(body).encode()

    def outcome(read: Callable[[], Any]) -> Any:
        try:
            reading = read()
        except ApiError as error:
            return error.status, error.body
        return reading.body, reading.body.model_fields_set, reading.prompts

    def elsewhere() -> Any:
        return unpacked(answer(READER, *asked(raw, model)), model)

    here = outcome(lambda: READER.read(raw, model))
    there = outcome(elsewhere)
    assert here[0] == there[0] and here[-1] == there[-1]
    if len(here) == 3:
        assert {n for n in here[1] if getattr(here[0], n) is not None} == {
            n for n in there[1] if getattr(there[0], n) is not None
        }


def test_a_text_that_is_too_long_is_refused_after_tokenizing_its_beginning() -> None:
    seen: list[int] = []

    class Watched:
        vocab_size, digest = TOKENIZER.vocab_size, ""

        def stable_prefix(self, text: str) -> tuple[list[int], int]:
            seen.append(len(text))
            return TOKENIZER.stable_prefix(text)

        def encode(self, text: str) -> list[int]:
            seen.append(len(text))
            return TOKENIZER.encode(text)

    reader = Reader(Watched(), RULES)  # type: ignore[arg-type]
    for model in (LookupRequest, CompletionRequest):
        with pytest.raises(ApiError) as caught:
            reader.read(json.dumps({"prompt": "Many words, " * 43_000}).encode(), model)
        assert caught.value.body["field"] == "prompt" and "tokens or more" in caught.value.body["message"]
    assert seen == [8 * RULES.max_tokens] * 2
    reader.read(json.dumps({"prompt": " " * 16 * 8000}).encode(), LookupRequest)
    assert seen[-1] == 16 * 8000, "a long text of few tokens is read whole"


# ---- lanes


class StubProcess:
    """Answers each message with the message itself, once it is allowed to."""

    def __init__(self) -> None:
        self.asked: list[bytes] = []
        self.may = asyncio.Event()

    async def ask(self, parts: tuple[bytes, bytes]) -> bytearray:
        _, raw = parts
        self.asked.append(raw)
        await self.may.wait()
        if raw == b"die":
            raise Died
        return bytearray(raw)

    def stop(self) -> None:
        self.may.set()


def in_loop(test: Callable[[ReadingPool, StubProcess], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        pool, stub = ReadingPool(Specification(None, "", RULES), 1), StubProcess()
        pool.processes[:] = [stub]  # type: ignore[list-item]
        try:
            await finished(test(pool, stub))
        finally:
            pool.close()

    asyncio.run(run())


def asking(pool: ReadingPool, lane: str, *contents: bytes) -> list[asyncio.Task[bytearray]]:
    return [asyncio.create_task(pool.ask(lane, (b"", content))) for content in contents]


async def turn() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_lanes_are_served_in_turn() -> None:
    async def test(pool: ReadingPool, stub: StubProcess) -> None:
        tasks = asking(pool, "a", b"a0", b"a1", b"a2", b"a3")
        await turn()
        tasks += asking(pool, "b", b"b0") + asking(pool, "c", b"c0", b"c1")
        await turn()
        stub.may.set()
        assert [await task for task in tasks] == [b"a0", b"a1", b"a2", b"a3", b"b0", b"c0", b"c1"]
        assert stub.asked == [b"a0", b"a1", b"b0", b"c0", b"a2", b"c1", b"a3"]
        assert not pool.num_waiting

    in_loop(test)


def test_a_full_lane_is_busy_and_others_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading_pool, "MAX_WAITING", 3)
    monkeypatch.setattr(reading_pool, "MAX_WAITING_BYTES", 100)

    async def test(pool: ReadingPool, stub: StubProcess) -> None:
        tasks = asking(pool, "a", b"a0")
        await turn()
        tasks += asking(pool, "a", b"a1", b"a2", b"a3")
        await turn()
        with pytest.raises(Busy):
            await pool.ask("a", (b"", b"a4"))
        tasks += asking(pool, "b", b"x" * 200)
        await turn()
        with pytest.raises(Busy):
            await pool.ask("b", (b"", b"y" * 90))
        stub.may.set()
        await asyncio.gather(*tasks)

    in_loop(test)


def test_a_hung_up_client_leaves_its_lane_and_a_death_costs_one_body() -> None:
    async def test(pool: ReadingPool, stub: StubProcess) -> None:
        tasks = asking(pool, "a", b"die", b"gone", b"a1")
        await turn()
        tasks[1].cancel()
        await turn()
        assert pool.num_waiting == 1
        stub.may.set()
        with pytest.raises(ApiError) as caught:
            await tasks[0]
        assert caught.value.status == 503 and "Retry-After" in caught.value.headers
        assert await tasks[2] == b"a1" and stub.asked == [b"die", b"a1"]

    in_loop(test)


def test_closing_the_pool_ends_all_waits() -> None:
    async def test(pool: ReadingPool, stub: StubProcess) -> None:
        tasks = asking(pool, "a", b"a0", b"a1")
        await turn()
        pool.close()
        for task in tasks:
            with pytest.raises(Closed):
                await task
        with pytest.raises(Closed):
            await pool.ask("a", (b"", b"a2"))

    in_loop(test)


@pytest.mark.slow
def test_a_process_is_replaced_when_it_dies_and_needs_no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading_pool, "_RESTART_AFTER_S", 0.0)
    message = asked(b'{"token_ids":[1,2,3]}', LookupRequest)

    async def test() -> None:
        process = ReadingProcess(Specification(None, TOKENIZER.digest, RULES))
        try:
            assert unpacked(await process.ask(message), LookupRequest).prompts[0].left_out == 3
            assert process.pid is not None
            os.kill(process.pid, signal.SIGSTOP)
            asking = asyncio.create_task(process.ask(message))
            await turn()
            os.kill(process.pid, signal.SIGKILL)
            with pytest.raises(Died):
                await asking
            assert process.pid is None
            assert unpacked(await process.ask(message), LookupRequest).prompts[0].left_out == 3
        finally:
            process.stop()

    asyncio.run(test())
    code = "import sys, radixkv.service.reading_process; sys.exit('torch' in sys.modules or 'redis' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.slow
def test_a_process_ends_when_its_service_is_gone() -> None:
    process = ReadingProcess(Specification(None, TOKENIZER.digest, RULES))
    process.start()
    assert process._process is not None and process._socket is not None
    process._socket.close()
    try:
        assert process._process.wait(LIMIT_S) == 0
    finally:
        process.stop()


def test_processes_get_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RADIXKV_REDIS", "redis://:pa55word@127.0.0.1:6379/0")
    process = ReadingProcess(Specification(None, TOKENIZER.digest, RULES))
    try:
        process.start()
        place = Path(f"/proc/{process.pid}")
        assert b"pa55word" not in (place / "environ").read_bytes() + (place / "cmdline").read_bytes()
    finally:
        process.stop()


@pytest.mark.slow
def test_a_process_with_another_tokenizer_does_not_start() -> None:
    async def test() -> None:
        process = ReadingProcess(Specification(None, "another", RULES))
        with pytest.raises(Died):
            await process.ask(asked(b"{}", LookupRequest))
        with pytest.raises(Died):
            await process.ask(asked(b"{}", LookupRequest))
        assert process.pid is None, "the process is not started again at once"

    asyncio.run(test())


def test_each_tenant_has_its_own_loop_time_that_refills() -> None:
    now = [0.0]
    time = Allowance(lambda: now[0], 0.25, 0.1)
    time.spend("a", 0.1)
    assert not time.wait_s("a")
    time.spend("a", 0.05)
    assert time.wait_s("a") == pytest.approx(0.2) and not time.wait_s("b")
    now[0] = 0.2
    assert time.wait_s("a") == pytest.approx(0.0)


def test_bodies_of_a_tenant_beyond_its_byte_limit_wait() -> None:
    async def test() -> None:
        entered: list[str] = []
        inside = Intake(TOKENIZER, RULES, None)

        async def hold(name: str, lane: str, num_bytes: int, until: asyncio.Event) -> None:
            async with inside.admit(lane, num_bytes):
                entered.append(name)
                await until.wait()

        first, rest = asyncio.Event(), asyncio.Event()
        tasks = [
            asyncio.create_task(hold("most", "a", RECEIVING_BYTES - 10, first)),
            asyncio.create_task(hold("gone", "a", 20, rest)),
            asyncio.create_task(hold("next", "a", 2 * RECEIVING_BYTES, rest)),
            asyncio.create_task(hold("other", "b", 20, rest)),
        ]
        await turn()
        assert entered == ["most", "other"]
        tasks[1].cancel()
        first.set()
        await turn()
        assert entered == ["most", "other", "next"]
        rest.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert not inside._rooms

    asyncio.run(test())


# ---- threads


def test_the_operators_threads_never_wait_for_tenants() -> None:
    async def test() -> None:
        threads, release = Threads(), threading.Event()
        held = [
            asyncio.create_task(threads.run(f"t{number % 40}", lambda: is_set(release)))
            for number in range(200)
        ]
        await turn()
        assert await finished(threads.administer(lambda: 7)) == 7
        release.set()
        await asyncio.gather(*held)

    asyncio.run(test())


def test_a_tenant_has_few_threads_and_others_have_theirs() -> None:
    async def test() -> None:
        threads, release = Threads(), threading.Event()
        held = [asyncio.create_task(threads.run("a", lambda: is_set(release))) for _ in range(100)]
        await turn()
        assert await finished(threads.run("b", lambda: 7)) == 7
        release.set()
        await asyncio.gather(*held)

    asyncio.run(test())


# ---- all of it


@pytest.fixture(scope="module")
def attacked() -> Iterator[Running]:
    """A service for these tests alone, with its reading processes already started."""
    with service_in_thread() as running:
        for num in (3000, 20_000):
            running.acme.post("/v1/lookup", content=b'{"token_ids":[' + b"5," * num + b"5]}", headers=JSON)
        yield running


HOSTILE: list[tuple[str, str, bytes]] = [
    ("acme", "/v1/lookup", b'{"messages":[' + b'{"role":"user","content":""},' * 143_999 + b"{}]}"),
    ("acme", "/v1/lookup", b"{%s}" % names(330_000)),
    ("acme", "/v1/completions", b'{"prompt":"x","logit_bias":{%s}}' % names(330_000, '"x"')),
    ("acme", "/v1/completions", b'{"prompt":"x","hints":{"labels":{%s}}}' % names(380_000)),
    ("acme", "/v1/lookup", b'{"token_ids":[' + b"5," * 1_999_999 + b"5]}"),
    ("acme", "/v1/lookup", b'{"prompt":"%s"}' % (b"x" * 4_000_000)),
    ("acme", "/v1/completions", b'{"prompt":"%s"}' % (b"\\u00e9" * 690_000)),
    ("acme", "/v1/warm", b'{"messages":[' + b'{"role":"user","content":""},' * 5000 + b"{}]}"),
    ("acme", "/v1/pins", b'{"prompt":"x","ttl_s":1,"replicas":[%s"a"]}' % (b'"b",' * 900_000)),
    ("acme", "/v1/route", b'{"prompt":%s' % (b"[" * 4_000_000)),
    ("operator", "/v1/bases", b'{"id":"b","prompt":"x","readers":[%s"a"]}' % (b'"b",' * 900_000)),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("caller", "path", "body"), HOSTILE, ids=[f"{path}-{n}" for n, (_, path, _) in enumerate(HOSTILE)]
)
def test_no_body_stops_the_event_loop(attacked: Running, caller: str, path: str, body: bytes) -> None:
    least_s = float("inf")
    for _ in range(NUM_TRIES):
        with loop_watched(attacked.service) as watch:
            answer = getattr(attacked, caller).post(path, content=body, headers=JSON)
        assert answer.status_code in (400, 413, 422) and refusal(answer)["message"]
        least_s = min(least_s, watch.longest_work_s)
        if least_s < MAX_STALL_S:
            return
    raise AssertionError(f"{least_s} s of work between two turns of the loop")


@pytest.mark.slow
def test_settings_of_a_tenant_are_short(attacked: Running) -> None:
    answer = attacked.operator.put("/v1/tenants/new", content=b"{%s}" % names(100_000), headers=JSON)
    assert answer.status_code == 413 and refusal(answer)["allowed"] == "at most 16384 bytes"


@pytest.mark.slow
def test_long_texts_of_one_tenant_keep_no_other_waiting(attacked: Running) -> None:
    """While texts come without end, the service answers another tenant's lookups and clear, and the operator."""
    long = json.dumps({"prompt": "Many words, " * 43_000}).encode()
    mine = json.dumps({"prompt": "Rule 17: answer politely, ask if in doubt.\n" * 140}).encode()

    is_over, begun = threading.Event(), threading.Event()

    def flood(_: int) -> set[int]:
        found = set()
        while not is_over.is_set():
            found.add(attacked.acme.post("/v1/lookup", content=long, headers=JSON).status_code)
            begun.set()
        return found

    with ThreadPoolExecutor(12) as pool:
        flooding = [pool.submit(flood, number) for number in range(12)]
        try:
            is_set(begun)
            for _ in range(3):
                assert attacked.globex.post("/v1/lookup", content=mine, headers=JSON).status_code == 200
                assert attacked.globex.delete("/v1/cache").status_code == 200
                assert attacked.operator.put("/v1/tenants/third", json={}).status_code == 200
                assert attacked.nobody.get("/healthz").status_code == 200
        finally:
            is_over.set()
        assert set.union(*(each.result() for each in flooding)) == {422}
    assert attacked.operator.delete("/v1/tenants/third").status_code == 204


@pytest.mark.slow
def test_short_bodies_beyond_a_tenants_loop_time_are_read_in_a_process(
    attacked: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attacked.service.intake._loop_time, "wait_s", lambda lane: 1.0)
    answer = attacked.acme.post("/v1/lookup", json={"token_ids": [5] * 32})
    assert answer.json() == {"matched_tokens": 0, "matched_blocks": 0}
    assert attacked.acme.post("/v1/lookup", json={"token_ids": [-5]}).status_code == 422
