"""Whatever was computed or sent is recorded, whichever way a request ends: in usage, metrics and statistics alike."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import httpx
import pytest

from radixkv import PrefixCache, audit
from radixkv.engines.hf import HFEngine
from radixkv.errors import OutOfBlocks
from radixkv.index.sequence import Sequence
from radixkv.service.limits import Limits
from tests.service.accounts import Accounts
from tests.service.running import KEYS, Running, client, sent, service_in_thread
from tests.service.test_warm import prefill_held
from tests.waiting import eventually, is_set

pytestmark = pytest.mark.slow

NUM_BLOCKS = 256
STEPS = 5
STREAM = {"max_tokens": 40, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    path = tmp_path_factory.mktemp("keys") / "keys.json"
    tenants = {name: {"keys": [KEYS[name]], "max_pinned_blocks": 100} for name in ("acme", "globex")}
    path.write_text(json.dumps({"operator": KEYS["operator"], "tenants": tenants}))
    path.chmod(0o600)
    with service_in_thread(keys=str(path), **{"num-blocks": str(NUM_BLOCKS)}) as running:
        yield running
        audit.check(running.service.cache)


@pytest.fixture
def live(shared: Running) -> Running:
    """A service whose tenant is new, with a key of its own."""
    made_again(shared)
    return shared


def made_again(live: Running) -> None:
    live.operator.delete("/v1/tenants/acme")
    assert live.operator.put("/v1/tenants/acme", json={"max_pinned_blocks": 100}).status_code == 200
    live.acme.close()
    live.acme = client(live.url, live.operator.post("/v1/tenants/acme/keys").json()["key"])


def purged(live: Running) -> None:
    assert live.operator.post("/v1/tenants/acme/purge").json()["complete"]


def revoked(live: Running) -> None:
    keys = live.operator.get("/v1/keys").json()["keys"]
    (key_id,) = (each["id"] for each in keys if each["tenant"] == "acme")
    live.operator.post("/v1/tenants/acme/keys")
    assert live.operator.delete(f"/v1/keys/{key_id}").status_code == 204


def cleared(live: Running) -> None:
    assert live.acme.delete("/v1/cache").status_code == 200


def out_of_room(live: Running) -> None:
    """Take all blocks that another tenant can get, until the service's tenant is made again."""
    cache = live.service.cache
    assert isinstance(cache, PrefixCache)
    blocks = cache.stats()
    size = 16 * (blocks.free_blocks + blocks.evictable_blocks)
    TAKEN.append(cache.open(live.service.namespace("globex", "", None), [7] * size))


TAKEN: list[Sequence] = []


@contextmanager
def generation_held(live: Running, num_steps: int = STEPS) -> Iterator[threading.Event]:
    """Stop each generation after some steps, until the ``with`` block ends. The event is set once one has stopped."""
    engine, arrived, go_on = live.service.engine, threading.Event(), threading.Event()
    generate, num_done = engine.generating, [0]  # type: ignore[attr-defined]

    def held(*arguments: Any, on_step: Any, stop: Callable[[], bool], **named: Any) -> Any:
        def counted(new: list[list[int]]) -> None:
            num_done[0] += 1
            if on_step is not None:
                on_step(new)

        def stopped() -> bool:
            num_done[0] += on_step is None  # beams report no steps
            if num_done[0] == num_steps:
                arrived.set()
                is_set(go_on)
            return stop()

        return generate(*arguments, on_step=on_step and counted, stop=stopped, **named)

    engine.generating = held  # type: ignore[attr-defined]
    try:
        yield arrived
    finally:
        go_on.set()
        engine.generating = generate  # type: ignore[attr-defined]


@contextmanager
def asked(
    live: Running, path: str, body: dict[str, Any], held: AbstractContextManager[threading.Event]
) -> Iterator[Future[httpx.Response]]:
    """A request that ``held`` has stopped when the ``with`` block begins, until it ends. Then it is answered."""
    url, key = live.url, live.acme.headers["authorization"].removeprefix("Bearer ")

    def ask() -> httpx.Response:
        with client(url, key) as someone:
            return someone.post(path, json=body)

    with ThreadPoolExecutor(1) as thread, held as arrived:
        answer = thread.submit(ask)
        is_set(arrived)
        yield answer


def sent_tokens(text: str) -> int:
    """Generated tokens by the last chunk of a stream that says its usage."""
    chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    return max([each["usage"]["completion_tokens"] for each in chunks if each.get("usage")], default=0)


ENDINGS: dict[str, Callable[[Running], None]] = {
    "purge": purged,
    "removal": made_again,
    "revocation": revoked,
    "no room": out_of_room,
}


@pytest.mark.parametrize("end", ENDINGS)
@pytest.mark.parametrize("n", [1, 3])
def test_a_stream_that_ends_in_an_error_is_recorded(live: Running, end: str, n: int) -> None:
    """Two blocks of the prompt were cached, one and a half are computed."""
    prompt = list(range(50, 50 + 56))
    assert live.acme.post("/v1/warm", json={"token_ids": prompt[:32]}).status_code == 200
    accounts = Accounts(live)
    body = {**STREAM, "prompt": prompt, "stream_options": {"continuous_usage_stats": True}}
    body |= {"n": n, "seed": 1, "temperature": 1.0} if n > 1 else {}
    with asked(live, "/v1/completions", body, generation_held(live)) as answer:
        ENDINGS[end](live)
    text = answer.result().text
    while TAKEN:
        TAKEN.pop().release()
    assert '"error"' in text
    usage, metrics, stats = accounts.grown()
    generated = n * (9 if end == "no room" else STEPS)  # the ninth has no place in the prompt's last block
    assert usage == Counter(requests=1, read=32, computed=24, generated=generated)
    assert metrics == usage - Counter(requests=1)
    assert sent_tokens(text) <= generated
    if end != "removal":
        assert stats == Counter(read=32, computed=24)
        return
    assert stats == Counter(), "the new tenant has nothing of it"
    rows = live.acme.get("/v1/usage").json()["rows"]
    assert [each for each in rows if each["kind"] != "held"] == [], "nor pays for it"


def test_beams_that_end_in_an_error_are_recorded(live: Running) -> None:
    accounts = Accounts(live)
    body = {
        "prompt": list(range(50, 106)),
        "max_tokens": 20,
        "n": 2,
        "use_beam_search": True,
        "ignore_eos": True,
    }
    with asked(live, "/v1/completions", body, generation_held(live, 8)) as answer:
        purged(live)
    assert answer.result().status_code == 409
    usage, metrics, stats = accounts.grown()
    assert usage["computed"] == stats["computed"] == metrics["computed"] == 56
    assert usage["generated"] == metrics["generated"] > 0 and usage["generated"] % 2 == 0


@pytest.mark.parametrize("end", [purged, made_again, cleared])
@pytest.mark.parametrize("is_job", [False, True])
def test_a_warm_that_ends_in_an_error_is_recorded(
    live: Running, is_job: bool, end: Callable[[Running], None]
) -> None:
    """It ends after its first chunk, or, by a clear, at its end: then all was computed."""
    chunk, accounts = live.service.engine._chunk_tokens, Accounts(live)  # type: ignore[attr-defined]
    body = {"token_ids": [*range(20, 20 + 2 * chunk)], "wait": not is_job}
    with asked(live, "/v1/warm", body, prefill_held(live)) as answer:
        end(live)
    answer.result()
    usage, metrics, stats = accounts.grown()
    assert usage == Counter(requests=1, computed=2 * chunk if end is cleared else chunk)
    assert stats == (Counter() if end is made_again else Counter(computed=usage["computed"]))
    assert metrics == Counter()


def test_a_base_that_ends_in_an_error_is_recorded(live: Running) -> None:
    engine: Any = live.service.engine
    publish, chunk = engine.publishing, engine._chunk_tokens

    def failing(*arguments: Any, on_chunk: Any, **named: Any) -> Any:
        def fail(done: int, total: int) -> None:
            on_chunk(done, total)
            raise OutOfBlocks(1, 0, 0)

        return publish(*arguments, on_chunk=fail, **named)

    engine.publishing = failing
    before = live.operator.get("/v1/usage").json()["rows"]
    try:
        body = {"id": "base", "token_ids": [*range(20, 20 + 2 * chunk)], "readers": ["globex"]}
        assert live.operator.post("/v1/bases", json=body).status_code == 503
    finally:
        engine.publishing = publish
    rows = [each for each in live.operator.get("/v1/usage").json()["rows"] if each not in before]
    assert [(each["kind"], each["uncached_tokens"]) for each in rows if each["kind"] != "held"] == [
        ("base", chunk)
    ]


def test_a_prompt_that_is_left_midway_is_paid_as_far_as_it_was_computed(live: Running) -> None:
    """The client hangs up after the first chunk of its prompt."""
    engine: Any = live.service.engine
    accounts, chunk = Accounts(live), engine._chunk_tokens
    key = live.acme.headers["authorization"].removeprefix("Bearer ")
    generate, arrived, go_on = engine.generating, threading.Event(), threading.Event()

    def held(*arguments: Any, stop: Callable[[], bool], **named: Any) -> Any:
        def stopped() -> bool:
            arrived.set()
            is_set(go_on)
            return stop()

        return generate(*arguments, stop=stopped, **named)

    engine.generating = held
    try:
        with sent(live, key, "/v1/completions", {"prompt": [*range(20, 20 + 2 * chunk)], "max_tokens": 4}):
            is_set(arrived)
        eventually(
            lambda: all(each.stopping for each in [*live.service.engine_loop._unfinished]), "it is cancelled"
        )
    finally:
        go_on.set()
        engine.generating = generate
    usage, metrics, stats = accounts.grown()
    assert usage == Counter(requests=1, computed=chunk)
    assert metrics == stats == Counter(computed=chunk)


def test_who_waits_for_room_and_hangs_up_pays_nothing(live: Running) -> None:
    cache, worker = live.service.cache, live.service.engine_loop
    assert isinstance(cache, PrefixCache)
    accounts, key = Accounts(live), live.acme.headers["authorization"].removeprefix("Bearer ")
    other = cache.open(live.service.namespace("globex", "", None), [7] * (16 * (NUM_BLOCKS - 9)))
    with (
        generation_held(live) as arrived,
        sent(live, key, "/v1/completions", {"prompt": [3] * 100, **STREAM}),
    ):
        is_set(arrived)
        with sent(live, key, "/v1/completions", {"prompt": [4] * 100, "max_tokens": 9}):
            eventually(lambda: worker.num_unfinished == 2)
        eventually(lambda: sum(not each.stopping for each in [*worker._unfinished]) == 1, "it is cancelled")
    eventually(lambda: worker.num_unfinished == 0)
    other.release()
    usage, metrics, stats = accounts.grown()
    assert usage["requests"] == 1 and usage["computed"] == 100
    assert metrics == usage - Counter(requests=1) and stats == Counter(computed=100)


def test_an_answer_that_takes_too_long_is_recorded() -> None:
    with service_in_thread(Limits(timeout_s=0.5), **{"num-blocks": str(NUM_BLOCKS)}) as live:
        accounts = Accounts(live)
        with asked(live, "/v1/completions", {"prompt": [5] * 40}, generation_held(live)) as answer:
            assert answer.result().status_code == 504
        usage, metrics, stats = accounts.grown()
    assert usage == Counter(requests=1, computed=40, generated=STEPS)
    assert metrics == Counter(computed=40, generated=STEPS) and stats == Counter(computed=40)


def test_an_engine_without_tallies_is_recorded_as_far_as_it_tells(
    live: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HFEngine, "abilities", HFEngine.abilities - {"tally"})  # type: ignore[operator]
    accounts = Accounts(live)
    with asked(live, "/v1/completions", {**STREAM, "prompt": [9] * 40}, generation_held(live)) as answer:
        purged(live)
    assert '"error"' in answer.result().text
    usage, metrics, _ = accounts.grown()
    assert usage == Counter(requests=1, computed=40, generated=STEPS) == metrics + Counter(requests=1)
