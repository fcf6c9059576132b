"""Web pages of other origins: only those that the operator names, and never around the accounts of the event loop."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from radixkv.errors import ConfigError
from radixkv.service import arrivals
from radixkv.service.endpoint import NOBODY_ACCOUNT
from radixkv.service.options import RouteSettings, ServeSettings
from tests.service.running import Running, service_in_thread

PAGE, OTHER = "https://chat.example.org", "https://evil.example.org"


@pytest.fixture(scope="module")
def open_to_pages() -> Iterator[Running]:
    with service_in_thread(**{"cors-origin": f"{PAGE},http://localhost:3000", "num-blocks": "64"}) as running:
        yield running


def preflight(live: Running, origin: str, path: str = "/v1/chat/completions") -> httpx.Response:
    headers = {
        "Origin": origin,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization, content-type, x-stainless-lang, anthropic-version",
    }
    return live.nobody.options(path, headers=headers)


def test_a_page_of_a_named_origin_may_call(open_to_pages: Running) -> None:
    for origin in (PAGE, "http://localhost:3000"):
        asked = preflight(open_to_pages, origin)
        assert asked.status_code == 200 and asked.headers["Access-Control-Allow-Origin"] == origin
        assert "POST" in asked.headers["Access-Control-Allow-Methods"]
        assert "x-stainless-lang" in asked.headers["Access-Control-Allow-Headers"]
        assert "Access-Control-Allow-Credentials" not in asked.headers
    body = {"messages": [{"role": "user", "content": "Why?"}], "max_tokens": 1}
    answer = open_to_pages.acme.post("/v1/chat/completions", json=body, headers={"Origin": PAGE})
    assert answer.status_code == 200 and answer.headers["Access-Control-Allow-Origin"] == PAGE
    assert "x-request-id" in answer.headers["Access-Control-Expose-Headers"]


@pytest.mark.parametrize(("path", "status"), [("/v1/models", 401), ("/nowhere", 404)])
def test_a_page_can_read_errors(open_to_pages: Running, path: str, status: int) -> None:
    answer = open_to_pages.nobody.get(path, headers={"Origin": PAGE})
    assert answer.status_code == status and answer.headers["Access-Control-Allow-Origin"] == PAGE


def test_a_page_of_another_origin_may_not(open_to_pages: Running) -> None:
    assert preflight(open_to_pages, OTHER).status_code == 400
    answer = open_to_pages.acme.get("/v1/models", headers={"Origin": OTHER})
    assert "Access-Control-Allow-Origin" not in answer.headers, "the browser doesn't show it to the page"


def test_no_page_may_call_by_default(live: Running) -> None:
    assert preflight(live, PAGE).status_code == 405
    answer = live.acme.get("/v1/models", headers={"Origin": PAGE})
    assert not [name for name in answer.headers if name.startswith("access-control")]


def test_a_preflight_is_charged_to_those_without_a_key(
    open_to_pages: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    charged = []
    run = arrivals.turns.run

    async def watched(turns: object, account: object, work: object) -> None:
        charged.append(account)
        await run(turns, account, work)  # type: ignore[arg-type]

    monkeypatch.setattr(arrivals.turns, "run", watched)
    assert preflight(open_to_pages, PAGE).status_code == 200
    assert charged == [open_to_pages.service.turns.account(NOBODY_ACCOUNT, arrivals.turns.NOBODY)]


def test_a_refusal_above_a_tenants_share_can_be_read(
    open_to_pages: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(open_to_pages.service.turns, "wait_s", lambda account: 2.0)
    answer = open_to_pages.acme.get("/v1/models", headers={"Origin": PAGE})
    assert answer.status_code == 429 and answer.headers["Access-Control-Allow-Origin"] == PAGE


@pytest.mark.parametrize("settings", [ServeSettings, RouteSettings])
@pytest.mark.parametrize(
    "text", ["chat.example.org", f"{PAGE}/", f"{PAGE}/chat", "", f"{PAGE},", "https://*.x.org"]
)
def test_what_is_no_origin_is_named(settings: type[ServeSettings], text: str, tmp_path: object) -> None:
    values = {"cors-origin": text, "redis": "redis://127.0.0.1", "fleet-secret": __file__}
    with pytest.raises(ConfigError) as caught:
        settings.parse(values)
    assert caught.value.setting == "--cors-origin" and "https://chat.example.org" in caught.value.allowed


def test_all_origins_may_be_allowed() -> None:
    assert ServeSettings.parse({"cors-origin": "*"}).cors_origin == ("*",)
    assert ServeSettings.parse({}).cors_origin == ()
