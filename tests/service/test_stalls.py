"""No request body blocks the event loop. ``fuzz/stalls.py`` found these bodies, the worst 20 for an older service."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fuzz.stalls import LIMIT_S, Loop, Recipe, least_stall_s, places, watched_service
from radixkv.service.app import ENDPOINTS

pytestmark = pytest.mark.slow

MAX = 4 * 2**20
WORST = [
    Recipe("tenant", "POST", "/v1/lookup", ("messages",), "list of empty messages", MAX),  # 6.1 s
    Recipe("tenant", "POST", "/v1/completions", ("logit_bias",), "map of lists", MAX),  # 4.7 s
    Recipe("tenant", "POST", "/v1/lookup", (), "map of 1", MAX),  # 4.4 s
    Recipe("tenant", "POST", "/v1/route", (), "list of lists of an id", MAX),  # 1.5 s
    Recipe("tenant", "POST", "/v1/completions", ("hints", "labels"), "list of lists of an id", MAX),  # 1.2 s
    Recipe("tenant", "POST", "/v1/completions", ("hints", "labels"), "map of 1", MAX),  # 0.8 s
    Recipe("tenant", "POST", "/v1/pins", ("messages",), "list of messages of newlines", MAX),  # 0.7 s
    Recipe("tenant", "POST", "/v1/lookup", ("messages", "[]", "role"), "map of lists", MAX),  # 0.6 s
    Recipe("tenant", "POST", "/v1/lookup", ("token_ids",), "list of 1", MAX),  # 0.6 s
    Recipe("tenant", "POST", "/v1/warm", ("replicas",), "map of lists", MAX),  # 0.6 s
    Recipe("tenant", "POST", "/v1/route", ("temperature",), "map of lists", MAX),  # 0.5 s
    Recipe(
        "operator",
        "PUT",
        "/v1/tenants/{tenant}",
        ("on_unconfirmed_generation",),
        "list of lists of an id",
        483_981,
    ),
    Recipe("tenant", "POST", "/v1/warm", ("wait",), "list of maps", MAX),  # 0.2 s, like those below
    Recipe("operator", "PUT", "/v1/tenants/{tenant}", ("burst",), "list of maps", MAX),
    Recipe("operator", "POST", "/v1/bases", ("messages",), "map of ids", MAX),
    Recipe("tenant", "POST", "/v1/completions", ("echo",), "map of ids", MAX),
    Recipe("tenant", "POST", "/v1/completions", ("top_k",), "list of 1", MAX),
    Recipe("operator", "PUT", "/v1/tenants/{tenant}", ("max_blocks",), "list of 1", MAX),
    Recipe("tenant", "POST", "/v1/pins", ("messages", "[]", "role"), "list of 0.1", MAX),
    Recipe("tenant", "POST", "/v1/completions", (), "list of empty strings", MAX),
]


@pytest.fixture(scope="module")
def service() -> Iterator[Loop]:
    with watched_service() as found:
        yield found


@pytest.mark.parametrize(
    "recipe", WORST, ids=lambda recipe: f"{recipe.path} {'.'.join(recipe.place)} {recipe.filler}"
)
def test_a_body_does_not_block_other_requests(service: Loop, recipe: Recipe) -> None:
    assert len(recipe.body()) <= MAX
    stall_s, status = least_stall_s(service, recipe)
    assert stall_s <= LIMIT_S
    assert status in (0, 400, 413, 422), "the body was refused, or its connection was closed"


def test_the_watch_sees_a_stall(service: Loop) -> None:
    service.block(2 * LIMIT_S)
    assert service.longest > LIMIT_S


def test_the_generator_reaches_every_field() -> None:
    completions = next(each for each in ENDPOINTS if each.path == "/v1/completions")
    found = places(completions)
    assert {(), ("unknown",), ("prompt",), ("prompt", "[]"), ("hints", "labels"), ("stop", "[]")} <= set(
        found
    )
