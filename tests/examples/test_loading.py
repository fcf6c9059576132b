"""The example of an engine of one's own loads what was evicted, for its tenant only."""

from __future__ import annotations

from tests.examples.running import printed


def test_evicted_kv_come_back_to_their_tenant() -> None:
    lines = printed("loading.py").splitlines()
    assert lines[:3] == ["first time: 0 cached, 0 loaded, 500 computed"] * 3
    assert lines[3] == "again: 16 cached, 480 loaded, 4 computed"
    assert lines[4:] == ["another tenant: 0 cached, 0 loaded, 500 computed", "audit: clean"]
