"""The service over a Cluster and under Sentinel: the URLs that ``serve --redis`` accepts, and work of the fleet through
them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from radixkv import audit
from tests.coordination.test_redis_coordinator import client_of, everything
from tests.redis_server import ClusterServers, SentinelServers
from tests.service.patience import patient_services
from tests.service.running import Running, service_in_thread
from tests.waiting import eventually

IDS = list(range(5, 5 + 16 * 40))
SALT = "a salt that stays here"
Pair = tuple[Running, Running]


@pytest.fixture(params=["redis_cluster", pytest.param("redis_sentinel", marks=pytest.mark.release)])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pair]:
    """Two replicas in threads of this process."""
    servers: ClusterServers | SentinelServers = request.getfixturevalue(request.param)
    (tmp_path / "secret").write_bytes(b"a secret of this test's fleet")
    common = {"redis": servers.url, "fleet-secret": str(tmp_path / "secret")}
    with ExitStack() as stack:
        stack.enter_context(patient_services())
        found = [stack.enter_context(service_in_thread(**common, replica=name)) for name in ("a", "b")]
        for each, quota in (
            (found[1], {}),
            (found[0], {"fleet_blocks": 600}),
        ):  # the quota is set on one replica and reaches both
            each.operator.put("/v1/tenants/acme", json={"max_pinned_blocks": 100, **quota})
        for each in found:
            eventually(lambda each=each: len(reachable(each)) == 2, "the replicas know each other")
        yield found[0], found[1]
        for each in found:
            audit.check(each.service.cache)
        with closing(client_of(servers)) as client:
            written = b"\n".join(everything(client))
    assert len(written) > 1_000
    for name in (b"acme", SALT.encode(), b"a secret of this test's fleet"):
        assert name not in written and name.hex().encode() not in written


def reachable(each: Running) -> list[str]:
    rows = each.acme.get("/v1/replicas").json()["replicas"]
    return [row["id"] for row in rows if row["reachable"]]


def matched(each: Running, salt: str = "") -> int:
    body = {"token_ids": IDS, "salt": salt}
    return int(each.acme.post("/v1/lookup", json=body).json()["matched_tokens"])


def states(outcome: Any) -> dict[str, str]:
    return {each["replica"]: each["state"] for each in outcome["replicas"]}


@pytest.mark.slow
def test_a_fleet_works_over_cluster_and_sentinel(pair: Pair) -> None:
    a, b = pair
    assert [each.nobody.get("/readyz").json()["coordination"] for each in pair] == ["ok", "ok"]

    def granted() -> list[int]:
        rows = [each.operator.get("/v1/tenants").json()["tenants"] for each in pair]
        return [{row["tenant"]: row["granted_blocks"] for row in each}["acme"] for each in rows]

    eventually(lambda: granted() == [300, 300], "the quota is shared")

    warmed = a.acme.post("/v1/warm", json={"token_ids": IDS, "replicas": "all"}).json()
    assert states(warmed) == {"a": "done", "b": "done"} and matched(b) == len(IDS)

    a.acme.post("/v1/warm", json={"token_ids": IDS, "salt": SALT})
    routed = {"token_ids": IDS, "salt": SALT, "predict": False}

    def is_routed_to_a() -> bool:
        first = b.acme.post("/v1/route", json=routed).json()["candidates"][0]
        return bool(first["replica"] == "a" and first["matched_tokens"]["device"] == 512)

    eventually(is_routed_to_a, "b's view has what a published")

    pin = a.acme.post("/v1/pins", json={"token_ids": IDS, "ttl_s": 3600, "replicas": "all"}).json()
    assert states(pin) == {"a": "done", "b": "done"}
    assert [each["id"] for each in b.acme.get("/v1/pins").json()["pins"]] == [pin["id"]]

    assert b.operator.post("/v1/tenants/acme/purge").status_code == 200
    eventually(lambda: a.operator.get("/v1/tenants/acme/purge").json()["complete"], "both have confirmed")
    assert [matched(a), matched(b), matched(a, SALT)] == [0, 0, 0]
    eventually(lambda: a.acme.get("/v1/pins").json() == b.acme.get("/v1/pins").json() == {"pins": []})
