"""Whose turn it is on the event loop: order, slices, shares. Time is what the steps say that they cost."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Callable, Coroutine
from itertools import groupby, pairwise
from typing import Any

import pytest

from radixkv.clock import ManualClock
from radixkv.service import turns as turns_module
from radixkv.service.app import ENDPOINTS
from radixkv.service.arrivals import Arrivals, _Endpoints
from radixkv.service.auth import Keyring
from radixkv.service.endpoint import FLEET_ACCOUNT, NOBODY_ACCOUNT, Streamed
from radixkv.service.turns import (
    FIRST,
    LEAST,
    LOOP_BURST_S,
    LOOP_SHARE,
    NOBODY,
    SLICE_S,
    TENANT,
    Account,
    Turns,
    in_turn,
    payer,
    run,
)
from tests.service.running import Running, service_in_thread
from tests.service.test_refusals import refusal
from tests.waiting import eventually


class Loop:
    """Turns whose steps cost what the tests say."""

    def __init__(self) -> None:
        self.clock, self.work_s = ManualClock(), 0.0
        self.turns = Turns(self.clock, lambda: self.work_s)
        self.served: list[str] = []
        self.tasks: list[asyncio.Task[None]] = []

    def account(self, name: str, rank: int = TENANT, weight: float = 1.0) -> Account:
        return self.turns.account(name, rank, weight)

    def ask(self, account: Account, num: int = 1, *, steps: int = 1, cost_s: float = SLICE_S) -> None:
        """Let requests arrive. Each takes some steps, and notes its account at each."""

        async def work() -> None:
            for at in range(steps):
                self.work_s += cost_s
                self.served.append(account.name)
                if at + 1 < steps:
                    await asyncio.sleep(0)

        for _ in range(num):
            self.tasks.append(asyncio.create_task(run(self.turns, account, work())))

    async def drained(self) -> list[str]:
        """Wait until all is served."""
        await asyncio.gather(*self.tasks)
        return self.served


def in_loop(test: Callable[[Loop], Coroutine[Any, Any, None]]) -> None:
    async def start() -> None:
        await asyncio.wait_for(test(Loop()), 60)

    asyncio.run(start())


def test_strict_tenants_go_first_and_those_without_a_key_last() -> None:
    async def test(loop: Loop) -> None:
        a, nobody = loop.account("a"), loop.account("nobody", NOBODY)
        strict = loop.account("strict", FIRST)
        loop.ask(nobody, 3)
        loop.ask(a, 3)
        loop.ask(strict, 3)
        served = await loop.drained()
        assert served[0] == "nobody", "nobody else was there yet"
        assert served.index("strict") == 1
        assert [name for name in served[1:] if name != "strict"] == ["a"] * 3 + ["nobody"] * 2

    in_loop(test)


@pytest.mark.parametrize("others", [32, 250])
def test_a_strict_request_waits_for_about_two_slices_however_many_others_wait(others: int) -> None:
    async def test(loop: Loop) -> None:
        a, strict = loop.account("a"), loop.account("strict", FIRST)
        loop.ask(a, others, steps=3, cost_s=SLICE_S / 2)
        for _ in range(6):
            await asyncio.sleep(0)
        before = len(loop.served)
        loop.ask(strict)
        while "strict" not in loop.served:
            await asyncio.sleep(0)
        waited = loop.served.index("strict") - before
        assert waited * SLICE_S / 2 <= 2.5 * SLICE_S, waited
        await loop.drained()

    in_loop(test)


def test_a_slice_of_steps_is_run_in_each_turn_of_the_loop() -> None:
    async def test(loop: Loop) -> None:
        a = loop.account("a")
        loop.ask(a, 40, cost_s=SLICE_S / 4)
        seen = [0]
        while len(loop.served) < 40:
            await asyncio.sleep(0)
            seen.append(len(loop.served))
        steps = [after - before for before, after in pairwise(seen)]
        assert max(steps) <= 8 and sum(steps) == 40, steps

    in_loop(test)


def test_tenants_share_by_weight_whatever_their_number_of_requests_and_their_cost() -> None:
    async def test(loop: Loop) -> None:
        few, many = loop.account("few", weight=2.0), loop.account("many")
        loop.ask(many, 200, cost_s=SLICE_S / 2)
        loop.ask(few, 20, steps=2, cost_s=SLICE_S)
        served = await loop.drained()
        while_both = served[: max(at for at, name in enumerate(served) if name == "few")]
        used = {"few": while_both.count("few") * 1.0, "many": while_both.count("many") * 0.5}
        assert 1.5 < used["few"] / used["many"] < 2.5, used

    in_loop(test)


def test_further_steps_of_a_request_stand_in_line_too() -> None:
    async def test(loop: Loop) -> None:
        a, b = loop.account("a"), loop.account("b")
        loop.ask(a, 1, steps=40)
        loop.ask(b, 1, steps=40)
        served = await loop.drained()
        both = served[: len(served) - len(list(groupby(served[::-1]).__next__()[1]))]
        assert max(len(list(each)) for _, each in groupby(both)) <= 2
        assert abs(both.count("a") - both.count("b")) <= 8, "".join(served)

    in_loop(test)


def test_no_rank_is_starved() -> None:
    async def test(loop: Loop) -> None:
        strict, a = loop.account("strict", FIRST), loop.account("a")
        nobody = loop.account("nobody", NOBODY)
        loop.ask(strict, 300)
        loop.ask(a, 100)
        loop.ask(nobody, 20)
        served = await loop.drained()
        first = served[:200]
        assert 0.5 * LEAST[TENANT] * 200 <= first.count("a") <= 2 * LEAST[TENANT] * 200
        assert 0.5 * LEAST[NOBODY] * 200 <= first.count("nobody") <= 2 * LEAST[NOBODY] * 200

    in_loop(test)


def test_an_account_is_above_its_share_by_its_own_steps_alone() -> None:
    async def test(loop: Loop) -> None:
        a, b = loop.account("a"), loop.account("b")
        loop.ask(a, 1, cost_s=LOOP_BURST_S)
        loop.ask(b, 50, cost_s=SLICE_S)
        await loop.drained()
        assert not loop.turns.wait_s(a), "at once it may use as much"
        loop.ask(a, 1, cost_s=0.5)
        await loop.drained()
        assert loop.turns.wait_s(a) == pytest.approx(0.5 / LOOP_SHARE) and not loop.turns.wait_s(b)
        loop.clock.advance(0.5 / LOOP_SHARE)
        assert not loop.turns.wait_s(a)

    in_loop(test)


def test_refusals_are_not_charged_to_the_share() -> None:
    async def test(loop: Loop) -> None:
        a = loop.account("a")

        async def refuse() -> None:
            paying = payer()
            assert paying is not None
            paying.is_refused = True
            loop.work_s += 2 * LOOP_BURST_S

        await run(loop.turns, a, refuse())
        assert not loop.turns.wait_s(a) and a.tag > 0, "they count for whose turn it is"

    in_loop(test)


def test_a_request_that_is_cancelled_leaves_the_line_and_hears_of_it() -> None:
    async def test(loop: Loop) -> None:
        a, heard = loop.account("a"), []

        async def waiting() -> None:
            try:
                loop.work_s += SLICE_S
                await asyncio.sleep(0)
            except asyncio.CancelledError:
                heard.append("cancelled")
                raise

        loop.ask(a, 5)
        task = asyncio.create_task(run(loop.turns, a, waiting()))
        late = asyncio.create_task(run(loop.turns, a, waiting()))
        await asyncio.sleep(0)
        late.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await late
        await task
        await loop.drained()
        assert not loop.turns.num_waiting and not heard, "it had not begun"
        task = asyncio.create_task(run(loop.turns, a, asyncio.sleep(3600)))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    in_loop(test)


def test_timeouts_errors_and_results_pass_through() -> None:
    async def test(loop: Loop) -> None:
        a = loop.account("a")

        async def failing() -> None:
            await asyncio.sleep(0)
            raise KeyError("x")

        async def late() -> str:
            try:
                async with asyncio.timeout(0):
                    await asyncio.sleep(3600)
            except TimeoutError:
                return "late"
            return "never"

        async def parts() -> list[str]:
            loop.work_s += 1.0
            found = await asyncio.gather(in_turn(late()), in_turn(late()))
            return list(found)

        with pytest.raises(KeyError):
            await run(loop.turns, a, failing())
        assert await run(loop.turns, a, parts()) == ["late", "late"]
        assert await in_turn(late()) == "late", "outside of any request"

    in_loop(test)


def test_the_rank_of_an_account_may_change_while_it_waits() -> None:
    async def test(loop: Loop) -> None:
        a, b = loop.account("a"), loop.account("b")
        loop.ask(a, 20)
        loop.ask(b, 20)
        for _ in range(3):
            await asyncio.sleep(0)
        before = len(loop.served)
        loop.account("b", FIRST)
        served = (await loop.drained())[before + 3 :]
        rest = "".join(served)
        assert rest.index("aaa") > rest.rindex("b") - 3 and rest[:6].count("b") >= 5, rest
        loop.account("b", TENANT)
        loop.ask(b, 3)
        await loop.drained()
        assert not loop.turns.num_waiting

    in_loop(test)


def test_accounts_are_forgotten() -> None:
    turns = Turns()
    for number in range(5 * turns_module._MAX_KEPT):
        turns.account(f"t{number}")
    assert len(turns._accounts) <= turns_module._MAX_KEPT + 1


# ---- in a service


@pytest.fixture(scope="module")
def served() -> Any:
    with service_in_thread(**{"num-blocks": "64"}) as running:
        yield running


def test_a_tenant_above_its_share_gets_429_in_the_form_of_the_api(
    served: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = served.service.turns
    assert served.acme.get("/v1/stats").status_code == 200
    monkeypatch.setattr(turns, "wait_s", lambda account: 7.2 if account.name == "acme" else 0.0)
    for path, field in (("/v1/lookup", "type"), ("/v1/completions", "code"), ("/v1/nowhere", "type")):
        answer = served.acme.post(path, content=b"not read")
        assert answer.status_code == 429 and answer.headers["Retry-After"] == "8"
        assert answer.json()["error"][field] in ("rate_limited", "rate_limit_exceeded")
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
    told = served.acme.post("/v1/messages", json={})
    assert told.json()["error"]["type"] == "rate_limit_error" and told.headers["request-id"]
    assert "loop" in refusal(served.acme.delete("/v1/pins/unknown"))["allowed"]
    assert served.globex.get("/v1/stats").status_code == 200
    assert served.nobody.get("/healthz").status_code == 200
    counted = served.operator.get("/metrics").text
    assert 'radixkv_http_requests_total{method="POST",path="/v1/lookup",status="429"} 1.0' in counted
    assert re.search(r'path="/v1/pins/\{[a-z_]+\}",status="429"', counted)


def test_each_request_has_an_account_and_strict_tenants_the_first_rank(served: Running) -> None:
    turns, seen = served.service.turns, []
    served.operator.put("/v1/tenants/strict", json={"mode": "strict", "guaranteed_blocks": 8})
    key = served.operator.post("/v1/tenants/strict/keys").json()["key"]
    spend = turns.spend

    def noting(account: Account, seconds: float, *, is_refusal: bool = False) -> None:
        seen.append((account.name, account.rank))
        spend(account, seconds, is_refusal=is_refusal)

    turns.spend = noting  # type: ignore[method-assign]
    try:
        for headers, expected in (
            ({"Authorization": f"Bearer {key}"}, ("strict", FIRST)),
            ({"Authorization": "Bearer demo-operator"}, ("\x00operator", FIRST)),
            ({"x-api-key": "demo-acme"}, ("acme", TENANT)),
            ({"Authorization": "Bearer wrong"}, (NOBODY_ACCOUNT, NOBODY)),
            ({}, (NOBODY_ACCOUNT, NOBODY)),
        ):
            served.nobody.get("/openapi.json", headers=headers)
            eventually(lambda: expected in seen, str(expected))  # noqa: B023 it is called here
            seen[:] = [each for each in seen if each != expected]
        assert not seen
    finally:
        turns.spend = spend  # type: ignore[method-assign]
    assert FLEET_ACCOUNT != NOBODY_ACCOUNT
    assert served.operator.delete("/v1/tenants/strict").status_code == 204


def test_the_parts_of_a_stream_are_charged_to_its_request() -> None:
    async def test(loop: Loop) -> None:
        a = loop.account("a")

        async def parts() -> AsyncIterator[bytes]:
            for _ in range(10):
                loop.work_s += 1.0
                yield b"x"
                await asyncio.sleep(0)

        async def receive() -> Any:
            await asyncio.sleep(3600)

        async def send(message: Any) -> None:
            pass

        scope = {"type": "http", "asgi": {"spec_version": "2.3"}}
        await run(loop.turns, a, Streamed(parts())(scope, receive, send))
        assert a.tag == pytest.approx(10.0)

    in_loop(test)


def test_the_endpoint_of_a_refusal_is_found_without_routing() -> None:
    endpoints = _Endpoints(ENDPOINTS)
    for each in ENDPOINTS:
        found = endpoints.find(each.method, each.path.replace("{", "").replace("}", ""))
        assert found is not None and found.dialect is each.dialect, each.path
    assert endpoints.find("GET", "/nowhere") is None
    assert Keyring.demo().tenants and Arrivals.__doc__
