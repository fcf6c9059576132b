"""``radixkv bench hostile``: a short run against a real service, and the arithmetic of its figures."""

from __future__ import annotations

import asyncio
from contextlib import closing
from typing import Any

import pytest

from radixkv.bench import attacks, hostile, service_process
from radixkv.errors import ArgumentError
from tests.bench.forking import fork_services
from tests.waiting import LIMIT_S, finished


@pytest.fixture
def short_run(monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, Any], list[int]]:
    """The result of ten calls idle and under one attack, and its steps."""
    fork_services(monkeypatch, service_process)
    monkeypatch.setattr(hostile, "_SETTLE_S", 0.0)
    monkeypatch.setattr(hostile, "ROUND_S", LIMIT_S)
    steps: list[int] = []
    result = hostile.run(calls=10, rounds=1, names=["internal"], progress=steps.append)
    return result, steps


@pytest.mark.slow
def test_a_short_run_measures_every_call_idle_and_under_attack(
    short_run: tuple[dict[str, Any], list[int]],
) -> None:
    result, steps = short_run
    measured = {(each["call"], each["state"]): each for each in result["figures"]}
    assert set(measured) == {
        (probe.name, state) for probe in hostile.PROBES for state in ("idle", "internal")
    }
    assert all(each["calls"] == 10 for each in measured.values()) and set(result["answers"]) == {"internal"}
    assert steps == [1, 2] and hostile.num_steps(1, ["internal"]) == 2
    assert "DELETE /v1/cache" in hostile.table(result)


@pytest.mark.timing
def test_an_attack_is_answered_and_nobody_else_is_refused(
    short_run: tuple[dict[str, Any], list[int]],
) -> None:
    result, _ = short_run
    assert not any(each["refused"] for each in result["figures"])
    assert sum(result["answers"]["internal"].values()), (
        "forged signatures were answered before their bodies ended"
    )


def test_the_limit_is_three_times_idle_or_15_ms() -> None:
    def rounds(p99_ms: float) -> list[hostile.Round]:
        return [hostile.Round({"lookup": p99_ms * times}, {"lookup": 10}, 0, {}) for times in (1, 2, 9)]

    slow = {"idle": rounds(3.0), "bodies": rounds(9.0)}
    found = hostile.figure(slow, "bodies", "lookup")
    assert (found["p99_ms"], found["limit_ms"], found["met"]) == (18.0, 18.0, True)
    assert hostile.figure(slow, "idle", "lookup")["limit_ms"] == 5.0
    fast = {"idle": rounds(1.0), "bodies": rounds(8.0)}
    assert not hostile.figure(fast, "bodies", "lookup")["met"]


def test_an_unknown_attack_is_refused_by_name() -> None:
    with pytest.raises(ArgumentError, match="bodies"):
        hostile.run(names=["rain"])


@pytest.mark.release
def test_attacks_stay_within_the_limit_of_bodies() -> None:
    for attack in attacks.attacks("127.0.0.1:1", "key"):
        for request in attack.requests:
            body = request.partition(b"\r\n\r\n")[2]
            assert len(body) <= attacks.MAX_BODY_BYTES


def test_wide_floods_have_a_wider_limit_and_keyless_ones_none_for_healthz() -> None:
    def rounds(p99_ms: float) -> list[hostile.Round]:
        names = ("lookup", "/healthz")
        return [hostile.Round(dict.fromkeys(names, p99_ms), dict.fromkeys(names, 10), 0, {})]

    measured = {
        "idle": rounds(1.0),
        **dict.fromkeys(("routes", "lookups", "keyless", "downloads"), rounds(20.0)),
    }
    limits = {state: hostile.figure(measured, state, "lookup")["limit_ms"] for state in measured}
    assert limits == {"idle": 5.0, "routes": 15.0, "lookups": 30.0, "keyless": 30.0, "downloads": 15.0}
    found = hostile.figure(measured, "downloads", "/healthz")
    assert found["limit_ms"] is None and found["met"]


@pytest.mark.slow
def test_a_flood_sends_its_request_again_with_each_answer() -> None:
    """A stub answers in pieces; each connection of the flood asks three times, whatever the status is."""
    answers = [
        b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello",
        b"HTTP/1.1 429 X\r\nContent-Length: 0\r\n\r\n",
    ]
    seen = attacks.Seen()

    async def test() -> None:
        asked: list[bytes] = []
        done = asyncio.Event()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with closing(writer):
                while len(asked) < 9:
                    asked.append(await reader.readuntil(b"\r\n\r\n"))
                    for at, byte in enumerate(answers[len(asked) % 2]):
                        writer.write(bytes([byte]))
                        await asyncio.sleep(0 if at % 10 else 0.001)
                done.set()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        address = server.sockets[0].getsockname()[:2]
        (flood,) = (each for each in attacks.attacks("127.0.0.1:1", "key") if each.name == "keyless")
        tasks = [asyncio.create_task(attacks._client(address, flood, 0, seen)) for _ in range(3)]
        await finished(done.wait())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        server.close()
        assert set(asked) == {flood.requests[0]}

    asyncio.run(test())
    assert seen.statuses[200] and seen.statuses[429] and sum(seen.statuses.values()) >= 6
