"""A replica's disk after a restart: what came after the fleet's last purge is there, what is older never is.

Each life is a start of the service, with a real Redis and the same folder.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis

from tests.redis_server import RedisServer
from tests.service.running import KEYS, Running, client, served, service_in_thread
from tests.service.test_tiers_served import PROMPT, ask, metric, tier_options
from tests.waiting import eventually

pytestmark = pytest.mark.slow

OTHER = PROMPT[::-1]


class Replica:
    """Replica b with its disk, and replica a without one, over one Redis."""

    def __init__(self, redis_server: RedisServer, folder: Path) -> None:
        self.redis, self.folder = redis_server, folder / "kv"
        self.fleet = {"redis": redis_server.url}
        self.options = {**tier_options(folder), **self.fleet, "replica": "b"}

    @contextmanager
    def life(self) -> Iterator[Running]:
        """A start until a stop, which stores what isn't stored yet."""
        with service_in_thread(**self.options) as live:
            eventually(lambda: metric(live.operator, "open", "disk") == 1)
            yield live

    @contextmanager
    def other(self) -> Iterator[Running]:
        secret = {"fleet-secret": self.options["fleet-secret"]}
        with service_in_thread(**self.fleet, **secret, replica="a") as live:
            yield live

    def purge_while_down(self, times: int = 1) -> None:
        with self.other() as live:
            for _ in range(times):
                purge(live)


@pytest.fixture
def replica(redis_server: RedisServer, tmp_path: Path) -> Replica:
    return Replica(redis_server, tmp_path)


def purge(live: Running, tenant: str = "acme") -> Any:
    answer = live.operator.post(f"/v1/tenants/{tenant}/purge")
    assert answer.status_code == 200, answer.text
    return answer.json()


def found(live: Running) -> tuple[bool, bool]:
    """Whether acme's and globex' prompts are there."""
    return ask(live.acme)[1] > 100, ask(live.globex)[1] > 100


def purged_long_ago(replica: Replica) -> None:
    """Both tenants are purged, and have records from after that."""
    with replica.life() as live:
        found(live)
        for tenant in ("acme", "globex"):
            purged = purge(live, tenant)
            assert purged["complete"], purged
        assert found(live) == (False, False)


def test_a_purge_that_was_paid_costs_nothing_at_the_next_starts(replica: Replica) -> None:
    purged_long_ago(replica)
    for _ in range(3):
        with replica.life() as live:
            assert found(live) == (True, True)
            assert metric(live.operator, "hit_blocks_total", "disk") > 0
            state = live.operator.get("/v1/tenants/acme/purge").json()
            assert state["complete"] and not state["owed"] and state["generation"] == 1


def test_a_purge_that_another_replica_began_is_paid_once(replica: Replica) -> None:
    with replica.life() as live, replica.other() as other:
        ask(live.acme)
        eventually(lambda: metric(live.operator, "resident_blocks", "disk") > 0)
        purge(other)
        eventually(lambda: other.operator.get("/v1/tenants/acme/purge").json()["complete"])
        assert ask(live.acme)[1] == 0
    with replica.life() as live:
        assert ask(live.acme)[1] > 100


@pytest.mark.parametrize("times", [1, 2])
def test_a_purge_while_the_replica_was_down_destroys(replica: Replica, times: int) -> None:
    purged_long_ago(replica)
    replica.purge_while_down(times)
    with replica.life() as live:
        assert found(live) == (False, True)
    with replica.life() as live:
        assert found(live) == (True, True), "that one is paid too"


def test_two_purges_in_a_row_and_what_came_between(replica: Replica) -> None:
    purged_long_ago(replica)
    with replica.life() as live:
        assert [purge(live)["generation"] for _ in range(2)] == [2, 3]
        assert ask(live.acme)[1] == 0
        assert purge(live)["generation"] == 4
    with replica.life() as live:
        assert found(live) == (False, True), "nothing came after the last one"


def test_an_older_folder_put_back_is_purged_again(replica: Replica, tmp_path: Path) -> None:
    purged_long_ago(replica)
    shutil.copytree(replica.folder, tmp_path / "old")
    with replica.life() as live:
        purge(live)
        assert ask(live.acme)[1] == 0
    shutil.rmtree(replica.folder)
    (tmp_path / "old").rename(replica.folder)
    with replica.life() as live:
        assert found(live) == (False, True)


@pytest.mark.parametrize("was_purged", [False, True])
def test_an_older_folder_put_back_is_cleared_again(
    replica: Replica, tmp_path: Path, was_purged: bool
) -> None:
    """A clear concerns this disk alone: the fleet's generation of the tenant stays."""
    if was_purged:
        purged_long_ago(replica)
    else:
        with replica.life() as live:
            found(live)
    old = Path(shutil.copytree(replica.folder, tmp_path / "old"))
    with replica.life() as live:
        cleared = live.acme.delete("/v1/cache")
        assert cleared.status_code == 200 and not cleared.json()["owed"]
        assert ask(live.acme)[1] == 0
    with replica.life() as live:
        assert found(live) == (True, True), "what came after it is there"
    shutil.rmtree(replica.folder)
    shutil.copytree(old, replica.folder)
    with replica.life() as live:
        assert found(live) == (False, True)
    with replica.life() as live:
        assert found(live) == (True, True), "once is enough"


def test_a_clear_while_redis_is_away_is_noted_later(
    replica: Replica, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("radixkv.tiers.pending.RETRY_S", 0.05)
    with replica.life() as live:
        found(live)
    shutil.copytree(replica.folder, tmp_path / "old")
    with replica.life() as live:
        replica.redis.go_away()
        try:
            assert live.acme.delete("/v1/cache").status_code == 200
            assert ask(live.acme)[1] == 0
        finally:
            replica.redis.come_back()
        with closing(redis.Redis.from_url(replica.redis.url)) as store:
            eventually(lambda: store.keys("rk1:{d:*}:n"))
    shutil.rmtree(replica.folder)
    (tmp_path / "old").rename(replica.folder)
    with replica.life() as live:
        assert found(live) == (False, True)


@pytest.mark.parametrize("change", ["torn", "too large", "other tenant's", "removed"])
def test_a_wrong_file_of_generations_destroys_that_tenants_records_alone(
    replica: Replica, change: str
) -> None:
    with replica.life() as live:
        ask(live.acme)
        purge(live)
        assert ask(live.acme)[1] == 0
        (file,) = (replica.folder / "generations").iterdir()
        ask(live.globex)
        purge(live, "globex")
        assert ask(live.globex)[1] == 0
    (others,) = (each for each in (replica.folder / "generations").iterdir() if each != file)
    content = file.read_bytes()
    if change == "removed":
        file.unlink()
    else:
        changed = {"torn": content[:-7], "too large": content * 100, "other tenant's": others.read_bytes()}
        file.write_bytes(changed[change])
    with replica.life() as live:
        assert found(live) == (False, True)
    with replica.life() as live:
        assert found(live) == (True, True)


def test_a_store_that_lost_its_data_destroys_all_also_if_another_replica_knows_the_purges(
    replica: Replica,
) -> None:
    purged_long_ago(replica)
    with replica.other(), closing(redis.Redis.from_url(replica.redis.url)) as store:
        num_purges = len(store.keys("rk1:{t:*}:q"))
        store.flushall()
        eventually(lambda: len(store.keys("rk1:{t:*}:q")) == num_purges >= 2)
        with replica.life() as live:
            assert found(live) == (False, False)


def test_a_store_that_gives_a_generation_again_has_another_purge(replica: Replica) -> None:
    """A failover lost the purge that was paid, and the next one has its generation: the store's id is the same."""
    purged_long_ago(replica)
    with replica.life() as live:
        digest = live.service.fleet.coordinator.keys.tenant("acme").hex()
    with closing(redis.Redis.from_url(replica.redis.url)) as store:
        (key,) = store.keys(f"rk1:{{t:{digest}}}:q")
        store.delete(key)
    with replica.other() as other:
        assert purge(other)["generation"] == 1
    with replica.life() as live:
        assert found(live) == (False, True)


def test_a_process_that_is_killed_after_a_purge_leaves_nothing_older(
    replica: Replica, tmp_path: Path
) -> None:
    options = [each for name, value in replica.options.items() for each in (f"--{name}", value)]
    for life, expected in enumerate((0, 0, 0)):
        with (
            served(tmp_path / f"{life}.log", *options) as process,
            client(process.url, KEYS["acme"]) as acme,
            client(process.url, KEYS["operator"]) as operator,
        ):
            eventually(lambda operator=operator: metric(operator, "open", "disk") == 1)
            assert ask(acme)[1] == expected
            eventually(lambda operator=operator: metric(operator, "resident_blocks", "disk") > 0)
            operator.post("/v1/tenants/acme/purge").raise_for_status()
            process.kill()
    with replica.life() as live:
        assert ask(live.acme)[1] == 0
    with replica.life() as live:
        assert ask(live.acme)[1] > 100
