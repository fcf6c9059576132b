"""A chat template that shows the date: one time for each request, and what was promised keeps its date.

The clock of the date is set by the tests. The model is a tokenizer with such a template, over an engine without one.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from radixkv.cli.main import main
from radixkv.errors import ConfigError
from radixkv.index.tokens import encode
from radixkv.service.intake import Intake
from radixkv.service.options import RouteSettings, ServeSettings
from radixkv.service.prompt_times import NO_TIMES, Times, local_time
from radixkv.service.prompts import PromptRules
from radixkv.service.schemas.contents import ChatDocument, JoinedChat
from radixkv.service.schemas.pins import PinOrder
from radixkv.tokenizer import load_tokenizer
from tests.agents.scripted_engine import ENTRY, ScriptedEngine
from tests.redis_server import RedisServer
from tests.service.running import KEYS, Running, service_in_thread
from tests.tokenizer.folders import made
from tests.waiting import eventually

pytestmark = [pytest.mark.slow]
RULES = "".join(f"Rule {number}: answer politely, name the page, ask if in doubt.\n" for number in range(12))
EVENING, NIGHT = datetime(2026, 3, 1, 23, 50, tzinfo=UTC), datetime(2026, 3, 2, 0, 10, tzinfo=UTC)
NOON = datetime(2026, 3, 2, 12, 0, tzinfo=UTC)


class Dated(Running):
    """A service whose date is set. ``shown()``: the date in the last prompt."""

    @property
    def name(self) -> str:
        return self.service.fleet.coordinator.replica_id

    def at(self, moment: datetime) -> None:
        self.service.intake.wall = moment.timestamp

    @property
    def engine(self) -> ScriptedEngine:
        engine: Any = self.service.engine
        assert isinstance(engine, ScriptedEngine)
        return engine

    def shown(self) -> str:
        text = self.service.tokenizer.decode(self.engine.asked[-1].prompt)
        return text.partition("Today is ")[2].partition(".")[0]


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Settings of a service with such a template, while its engine's package can be found."""
    folder = tmp_path_factory.mktemp("site")
    info = folder / "scripted_engine-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: scripted-engine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRY)
    model = made(tmp_path_factory.mktemp("model"), "gpt2, dated")
    sys.path.insert(0, str(folder))
    try:
        yield {"engine": "scripted", "model": str(model), "time-zone": "UTC", "num-blocks": "4096"}
    finally:
        sys.path.remove(str(folder))


@contextmanager
def dated(settings: dict[str, str], **more: str) -> Iterator[Dated]:
    with service_in_thread(**settings, **more) as running:
        found = Dated(running.service, running.url)
        found.engine.says = found.service.tokenizer.encode("Yes.")
        found.at(EVENING)
        yield found
        found.close()


@pytest.fixture(scope="module")
def service(settings: dict[str, str]) -> Iterator[Dated]:
    with dated(settings) as found:
        yield found


@pytest.fixture
def live(service: Dated) -> Dated:
    """With nothing in the cache, before midnight."""
    for who in (service.acme, service.globex):
        who.delete("/v1/cache")
    service.at(EVENING)
    return service


def right(answer: httpx.Response) -> Any:
    assert answer.status_code in (200, 201, 204), answer.text
    return answer.json() if answer.content else None


def asked(who: httpx.Client, name: str, *, ttl: str | None = "1h", text: str = RULES) -> httpx.Response:
    block: dict[str, Any] = {"type": "text", "text": text}
    if ttl is not None:
        block["cache_control"] = {"type": "ephemeral", "ttl": ttl}
    body = {
        "model": name,
        "max_tokens": 4,
        "system": [block],
        "messages": [{"role": "user", "content": "Which page?"}],
    }
    answer = who.post("/v1/messages", json=body, headers={"anthropic-version": "2023-06-01"})
    right(answer)
    return answer


# ---- one time for a request


def test_a_request_reads_the_clock_once_however_often_it_is_rendered(live: Dated) -> None:
    calls = []

    def wall() -> float:
        calls.append(EVENING.timestamp() + 3600 * len(calls))  # each call is an hour later
        return calls[-1]

    live.service.intake.wall = wall
    asked(live.acme, live.service.model_name)
    assert len(calls) == 1 and live.shown() == "01 March 2026"
    assert live.engine.asked[-1].cached == 0
    right(live.acme.post("/v1/lookup", json={"messages": [{"role": "user", "content": RULES}]}))
    assert len(calls) == 2


def test_without_a_date_in_the_template_nothing_asks_for_the_time() -> None:
    tokenizer = load_tokenizer()
    intake = Intake(tokenizer, PromptRules(tokenizer.vocab_size, 8192, 16), None, wall=lambda: 1 / 0)
    assert intake.times(lambda date: 1 / 0) is NO_TIMES  # type: ignore[arg-type, return-value]


def test_the_time_is_that_of_the_zone() -> None:
    moment = EVENING.timestamp
    assert local_time("UTC", moment) == "2026-03-01T23:50:00"
    assert local_time("Asia/Tokyo", moment) == "2026-03-02T08:50:00"
    assert local_time(None, moment) == datetime.fromtimestamp(moment()).isoformat()
    assert Times("2026-12-31T10:00:00").of("tomorrow") == Times("2027-01-01T10:00:00")


@pytest.mark.parametrize("zone", ["Mars/Olympus", "", "../../etc/passwd", "/etc/passwd", "a\0b", "x" * 5000])
def test_a_zone_that_nobody_knows_stops_the_start(zone: str, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"a secret of this test's fleet")
    route = {"redis": "redis://127.0.0.1", "fleet-secret": str(secret)}
    for parse, more in ((ServeSettings.parse, {}), (RouteSettings.parse, route)):
        with pytest.raises(ConfigError) as caught:
            parse({"time-zone": zone, **more})
        assert caught.value.setting == "--time-zone" and "Europe/Berlin" in caught.value.allowed


# ---- what is promised keeps its date


def test_a_cached_content_is_read_after_midnight(live: Dated) -> None:
    name = live.service.model_name
    content = {
        "model": f"models/{name}",
        "ttl": "3600s",
        "systemInstruction": {"parts": [{"text": RULES}]},
        "contents": [{"role": "user", "parts": [{"text": "The manual."}]}],
    }
    made_content = right(live.acme.post("/v1beta/cachedContents", json=content))
    body = {"cachedContent": made_content["name"], "contents": [{"parts": [{"text": "Which page?"}]}]}
    for moment in (EVENING, NIGHT):
        live.at(moment)
        reply = right(live.acme.post(f"/v1beta/models/{name}:generateContent", json=body))
        total = made_content["usageMetadata"]["totalTokenCount"]
        assert reply["usageMetadata"]["cachedContentTokenCount"] >= total > 100
        assert live.shown() == "01 March 2026"
    del body["cachedContent"]
    right(live.acme.post(f"/v1beta/models/{name}:generateContent", json=body))
    assert live.shown() == "02 March 2026"
    live.acme.delete(f"/v1beta/{made_content['name']}")


def test_a_breakpoint_keeps_its_date_for_its_tenant_and_its_prefix_alone(live: Dated) -> None:
    name = live.service.model_name
    written = asked(live.acme, name).json()["usage"]["cache_creation_input_tokens"]
    assert written > 100 and live.shown() == "01 March 2026"
    live.at(NIGHT)
    answer = asked(live.acme, name, ttl=None)
    assert answer.json()["usage"]["cache_read_input_tokens"] >= written // 16 * 16
    assert live.shown() == "01 March 2026"
    asked(live.globex, name, ttl=None)
    assert live.shown() == "02 March 2026"
    asked(live.acme, name, ttl=None, text="Other rules.")
    assert live.shown() == "02 March 2026"


def test_a_later_request_never_makes_an_old_date_last_longer(live: Dated) -> None:
    name = live.service.model_name
    asked(live.acme, name, ttl="1h")
    live.at(NIGHT)
    longer = f"{RULES}And one more.\n"
    block = [
        {"type": "text", "text": RULES},
        {"type": "text", "text": longer, "cache_control": {"type": "ephemeral", "ttl": "1h"}},
    ]
    body = {"model": name, "max_tokens": 4, "system": block, "messages": [{"role": "user", "content": "?"}]}
    headers = {"anthropic-version": "2023-06-01"}
    answer = live.acme.post("/v1/messages", json=body, headers=headers)
    assert live.shown() == "01 March 2026"
    assert answer.headers["x-cache-write-refused"] == "date_ends"
    assert answer.json()["usage"]["cache_creation_input_tokens"] == 0
    block[1]["cache_control"] = {"type": "ephemeral", "ttl": "5m"}  # that ends before the first promise
    answer = live.acme.post("/v1/messages", json=body | {"max_tokens": 0}, headers=headers)
    assert "x-cache-write-refused" not in answer.headers


def test_a_promise_of_what_comes_before_the_date_keeps_no_date(live: Dated) -> None:
    """It holds for the prompt of today too."""
    service = live.service
    body = {"messages": [{"role": "system", "content": RULES}]}
    right(live.acme.post("/v1/warm", json=body))
    asked(live.acme, service.model_name, ttl=None)
    before = encode(live.engine.asked[-1].prompt[:4])  # the opening of the system's turn
    assert "Today" not in service.tokenizer.decode(live.engine.asked[-1].prompt[:4]) + "1"
    namespace = service.namespace("acme", "", None)
    service.promises.dates.keep(namespace, "2026-03-01", before, 3600.0)
    live.at(NIGHT)
    asked(live.acme, service.model_name, ttl=None)
    assert live.shown() == "02 March 2026"


def test_what_is_cleared_keeps_no_date(live: Dated) -> None:
    asked(live.acme, live.service.model_name)
    live.at(NIGHT)
    right(live.acme.delete("/v1/cache"))
    asked(live.acme, live.service.model_name, ttl=None)
    assert live.shown() == "02 March 2026"


@pytest.mark.parametrize("replicas", ["self", "all"])
def test_a_pin_of_messages_keeps_its_date_until_it_ends(live: Dated, replicas: str) -> None:
    pinned = {"messages": [{"role": "system", "content": RULES}], "replicas": replicas}
    right(live.acme.post("/v1/warm", json=pinned))
    pin = right(live.acme.post("/v1/pins", json={**pinned, "ttl_s": 3600}))
    assert pin["tokens"] > 100
    live.at(NIGHT)
    chat = {
        "model": live.service.model_name,
        "max_tokens": 4,
        "messages": [*pinned["messages"], {"role": "user", "content": "Which page?"}],
    }
    reply = right(live.acme.post("/v1/chat/completions", json=chat))
    assert live.shown() == "01 March 2026"
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] >= pin["tokens"]
    assert right(live.acme.post("/v1/lookup", json={"messages": pinned["messages"]}))["matched_tokens"] > 100
    right(live.acme.delete(f"/v1/pins/{pin['id']}"))
    right(live.acme.post("/v1/chat/completions", json=chat))
    assert live.shown() == "02 March 2026"


def test_a_prompt_is_warmed_for_tomorrow(live: Dated) -> None:
    prompt = {"messages": [{"role": "system", "content": RULES}]}
    warmed = right(live.acme.post("/v1/warm", json={**prompt, "day": "tomorrow"}))["tokens"]
    pin = right(live.acme.post("/v1/pins", json={**prompt, "day": "tomorrow", "ttl_s": 3600}))
    assert warmed == pin["tokens"] > 100
    assert right(live.acme.post("/v1/lookup", json=prompt))["matched_tokens"] < warmed
    asked(live.acme, live.service.model_name, ttl=None)
    assert live.shown() == "01 March 2026", "tomorrow's pin changes nothing today"
    live.at(NIGHT)
    assert right(live.acme.post("/v1/lookup", json=prompt))["matched_tokens"] == warmed
    live.at(NOON)
    assert right(live.acme.post("/v1/lookup", json=prompt))["matched_tokens"] == warmed
    refused = live.acme.post("/v1/warm", json={**prompt, "day": "yesterday"})
    assert (refused.status_code, refused.json()["error"]["field"]) == (422, "day")


def test_a_pin_of_the_fleet_keeps_its_date_on_each_replica_that_holds_it(
    settings: dict[str, str], redis_server: RedisServer, tmp_path: Path
) -> None:
    """Also on a replica that joins after midnight, and gets the pin from a holder."""
    secret = tmp_path / "secret"
    secret.write_bytes(b"a secret of this test's fleet")
    shared = {"redis": redis_server.url, "fleet-secret": str(secret)}
    pinned = {"messages": [{"role": "system", "content": RULES}]}

    def chats(live: Dated) -> str:
        chat = {
            "model": live.service.model_name,
            "max_tokens": 4,
            "messages": [*pinned["messages"], {"role": "user", "content": "Which page?"}],
        }
        right(live.acme.post("/v1/chat/completions", json=chat))
        return live.shown()

    def holds(live: Dated) -> bool:
        (pin,) = right(live.acme.get("/v1/pins"))["pins"]
        return {each["state"] for each in pin["replicas"] if each["replica"] == live.name} == {"done"}

    with ExitStack() as stack:
        one = stack.enter_context(dated(settings, replica="a", **shared))
        pin = right(one.acme.post("/v1/pins", json={**pinned, "ttl_s": 3600, "replicas": "all"}))
        one.at(NIGHT)
        assert chats(one) == "01 March 2026"
        other = stack.enter_context(dated(settings, replica="b", **shared))
        other.at(NIGHT)
        eventually(lambda: holds(other), "the replica that joined holds the pin")
        assert chats(other) == "01 March 2026" and other.engine.asked[-1].cached >= pin["tokens"]
        right(one.acme.delete(f"/v1/pins/{pin['id']}"))
        eventually(lambda: not right(other.acme.get("/v1/stats"))["num_pins"], "the pin has ended there")
        assert chats(other) == "02 March 2026"


@pytest.mark.parametrize("day", ["today", "tomorrow"])
def test_the_command_line_warms_and_pins_for_a_day(
    live: Dated, tmp_path: Path, day: str, capsys: pytest.CaptureFixture[str]
) -> None:
    messages = [{"role": "system", "content": RULES}]
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"messages": messages}) + "\n")
    command = ["warm", str(file), "--url", live.url, "--key", KEYS["acme"], "--pin", "60", "--day", day]
    with pytest.raises(SystemExit) as ended:
        main([*command, "--json"])
    (row,) = json.loads(capsys.readouterr().out)
    assert not ended.value.code and row["pin"]
    live.at(NIGHT if day == "tomorrow" else EVENING)
    right(live.acme.post("/v1/chat/completions", json={"model": live.service.model_name, "max_tokens": 4,
                         "messages": [*messages, {"role": "user", "content": "?"}]}))  # fmt: skip
    assert live.engine.asked[-1].cached >= row["tokens"] > 100
    assert live.shown() == ("02 March 2026" if day == "tomorrow" else "01 March 2026")


# ---- hostile


def test_nobody_but_the_service_says_with_which_time_a_chat_is_rendered(live: Dated) -> None:
    body = {"contents": [{"parts": [{"text": RULES}]}], "model": f"models/{live.service.model_name}"}
    for field in ("now", "date", "rendered_at"):
        answer = live.acme.post("/v1beta/cachedContents", json={**body, field: "2001-01-01T00:00:00"})
        assert answer.status_code == 400, field


@pytest.mark.parametrize("now", ["yesterday", "2026-13-01T00:00:00", "2026-03-01T00:00:00Z", "x" * 10_000, 7])
def test_a_content_with_a_time_that_is_none_is_refused(now: Any) -> None:
    with pytest.raises(ValidationError):
        ChatDocument.model_validate({"turns": [], "tools": [], "now": now})


def test_a_content_of_an_earlier_version_has_the_present_time() -> None:
    joined = JoinedChat.model_validate_json(json.dumps({"before": {"turns": [], "tools": []}}))
    assert joined.rendered_at is None


@pytest.mark.parametrize("date", ["today", "2026-3-1", "2026-03-01T00:00:00", "9" * 1000])
def test_an_order_to_pin_has_a_date_or_none(date: str) -> None:
    with pytest.raises(ValidationError):
        PinOrder(token_ids=[1], pin="0" * 32, date=date)
