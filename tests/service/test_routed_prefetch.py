"""A replica that names itself for a prompt brings it from its disk into host memory, before the request comes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import httpx
import pytest

from radixkv.index.cache import PrefixCache
from tests.service.running import Running, service_in_thread
from tests.waiting import eventually

pytestmark = pytest.mark.slow

if TYPE_CHECKING:
    from radixkv.tiers.ladder import Ladder
    from radixkv.tiers.prefetch import Prefetch

IDS = list(range(5, 5 + 16 * 20))
SIZE = 16


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A service with a disk."""
    folder = tmp_path_factory.mktemp("tiers")
    secret = folder / "fleet.secret"
    secret.write_text("s" * 40)
    secret.chmod(0o600)
    disk = {"disk": str(folder / "kv"), "disk-size": "64MiB", "fleet-secret": str(secret)}
    with service_in_thread(**{"host-memory": "16MiB", **disk}) as running:
        yield running


@pytest.fixture
def live(service: Running) -> Running:
    """A service whose disk alone has the KV of the prompt, of two tenants."""
    for tenant, someone in (("acme", service.acme), ("globex", service.globex)):
        service.operator.post(f"/v1/tenants/{tenant}/purge").raise_for_status()
        assert loaded(someone) == (0, 0)
    evict(service)
    return service


def tiers(live: Running) -> Ladder:
    from radixkv.tiers.ladder import Ladder
    from radixkv.tiers.tiered_cache import TieredCache

    cache = live.service.engine.cache
    assert isinstance(cache, TieredCache) and isinstance(cache.lower, Ladder)
    return cache.lower


def asked(live: Running) -> Prefetch:
    found = tiers(live)._prefetch
    assert found is not None
    return found


def evict(live: Running) -> None:
    """Evict all from the cache, and from host memory once the disk has it."""
    disk, cache = tiers(live).disk, live.service.engine.cache
    assert disk is not None and isinstance(cache, PrefixCache)
    eventually(lambda: not disk.demotions.num_waiting and not disk.num_running and not disk.purges.owed)
    for each in (cache, tiers(live).host.cache):
        each.evict(1_000_000)
        assert each.resident_blocks == 0


def in_host(live: Running, tenant: str = "acme", salt: str = "") -> int:
    """Tokens of the prompt in host memory."""
    namespace = live.service.engine.namespace(tenant, salt=salt)
    return tiers(live).host.cache.match(namespace, IDS).num_tokens


def loaded(someone: httpx.Client, salt: str = "") -> tuple[int, int]:
    """Send the prompt. Returns the tokens that came from host memory, and from the disk."""
    body = {"prompt": IDS, "max_tokens": 2, "temperature": 0, "salt": salt}
    found = someone.post("/v1/completions", json=body).json()["timings"]["loaded"]
    return found["host_tokens"], found["disk_tokens"]


def route(someone: httpx.Client, ids: list[int] = IDS, **fields: object) -> httpx.Response:
    return someone.post("/v1/route", json={"token_ids": ids, **fields})


def has_ended(live: Running) -> bool:
    return bool(eventually(lambda: not asked(live).is_busy))


def test_the_request_finds_the_prompt_in_host_memory(live: Running) -> None:
    assert loaded(live.acme) == (0, len(IDS) - SIZE), "without a question it waits for the disk"
    evict(live)
    (candidate,) = route(live.acme).raise_for_status().json()["candidates"]
    assert candidate["address"] == live.url
    eventually(lambda: in_host(live) == len(IDS), "the prompt comes")
    assert loaded(live.acme) == (len(IDS) - SIZE, 0)
    assert in_host(live, "globex") == 0


def test_a_salt_is_heeded(live: Running) -> None:
    loaded(live.acme, "one")
    evict(live)
    assert route(live.acme, salt="two").status_code == 200 and has_ended(live)
    assert in_host(live, salt="one") == 0
    assert route(live.acme, salt="one").status_code == 200
    eventually(lambda: in_host(live, salt="one") == len(IDS))
    assert in_host(live) == 0


def test_a_mere_question_brings_nothing(live: Running) -> None:
    assert route(live.acme, predict=False).status_code == 200
    assert has_ended(live) and in_host(live) == 0


def test_only_the_tenant_itself_brings_its_prompts(live: Running) -> None:
    """Whoever may not send its requests gets nothing moved."""
    assert route(live.nobody).status_code == 401
    assert route(live.operator).status_code == 403
    assert route(live.acme, tenant="globex").status_code == 422
    assert route(live.acme, model="another").status_code == 503
    assert has_ended(live) and in_host(live) == in_host(live, "globex") == 0
    assert route(live.globex).status_code == 200
    eventually(lambda: in_host(live, "globex") == len(IDS))
    assert in_host(live) == 0


def test_the_answer_waits_for_no_step_and_a_purge_ends_it(live: Running) -> None:
    with tiers(live).gate:  # a step of the engine that takes long
        assert route(live.acme).status_code == 200
        assert asked(live).is_busy
        live.operator.post("/v1/tenants/acme/purge").raise_for_status()
    assert has_ended(live) and in_host(live) == 0
    assert loaded(live.acme) == (0, 0)


def test_a_flood_of_one_tenant_delays_no_other(live: Running) -> None:
    """It keeps a few prompts, and its host memory stays its own."""
    from radixkv.tiers.prefetch import MAX_ASKED

    with tiers(live).gate:
        for at in range(100):
            assert route(live.acme, [*IDS[: SIZE + at], 7]).status_code == 200
            if at == 5:
                assert route(live.globex).status_code == 200
        assert {name: len(line) for name, line in asked(live)._asked.items()} == {
            "acme": MAX_ASKED,
            "globex": 1,
        }
    eventually(lambda: in_host(live, "globex") == len(IDS))
    assert loaded(live.globex) == (len(IDS) - SIZE, 0)
