"""Time limits of the control channel that a busy machine could exceed."""

from __future__ import annotations

import pytest

from tests.waiting import LIMIT_S

LIMITS = (
    "control.channel.HANDSHAKE_S",
    "control.channel.MESSAGE_S",
    "control.server.IDLE_S",
    "control.remote_cache._IDLE_S",
    "control.remote_cache._SHORT_S",
    "control.client._CONNECT_S",
)


@pytest.fixture(autouse=True)
def patient_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    """For all tests of a module that imports it. A test of what happens when a time is over sets that one."""
    for name in LIMITS:
        monkeypatch.setattr(f"radixkv.engines.{name}", LIMIT_S)
