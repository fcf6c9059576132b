"""A Redis Cluster and a Redis Sentinel group.

Each is started once, and reset to whole and empty for every test that uses it.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.redis_server import ClusterServers, SentinelServers, need_binary


@pytest.fixture(scope="session")
def _cluster_processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterServers]:
    servers = ClusterServers(need_binary(), tmp_path_factory.mktemp("cluster"))
    try:
        yield servers
    finally:
        servers.kill()


@pytest.fixture
def redis_cluster(_cluster_processes: ClusterServers) -> ClusterServers:
    """Three primaries that share the slots."""
    _cluster_processes.reset()
    return _cluster_processes


@pytest.fixture(scope="session")
def _sentinel_processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SentinelServers]:
    servers = SentinelServers(need_binary(), tmp_path_factory.mktemp("sentinel"))
    try:
        yield servers
    finally:
        servers.kill()


@pytest.fixture
def redis_sentinel(_sentinel_processes: SentinelServers) -> SentinelServers:
    """A master, a replica and three sentinels."""
    _sentinel_processes.reset()
    return _sentinel_processes
