"""The service says in words whether a tier is useful: in its statistics, metrics and log, and on the command line."""

from __future__ import annotations

import errno
import logging
import re
import threading
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from radixkv.cli.main import commands
from radixkv.tiers.usefulness import REASONS
from tests.redis_server import RedisServer
from tests.service.running import KEYS, Running, service_in_thread
from tests.service.test_tiers_served import ask, evict_all, metric, tier_options, with_files
from tests.tiers.support import FaultyFiles, failing
from tests.waiting import eventually, is_set

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A verdict needs no hour and few blocks."""
    monkeypatch.setattr("radixkv.tiers.usefulness.LEAST_S", 0.0)
    monkeypatch.setattr("radixkv.tiers.usefulness.LEAST_BLOCKS", 20)


def is_shown(live: Running, tier: str, worth: str, reason: str | None, text: str) -> bool:
    """Whether statistics, metrics and the command line have this verdict over a tier."""
    found = live.operator.get("/v1/stats").json()["tier_verdicts"][tier]
    if (found["worth"], found["reason"]) != (worth, reason):
        return False
    assert text in found["text"], found["text"]
    for each in REASONS:
        assert metric(live.operator, "useless", tier, reason=each) == (each == reason)
    shown = CliRunner().invoke(commands, ["stats", "--url", live.url, "--key", KEYS["operator"]]).stdout
    said = f"{tier} is {worth}" + (f" ({reason}): " if reason else ": ")
    assert re.search(rf"^{re.escape(said)}.*{re.escape(text)}", shown, re.M), shown
    return True


def prompt_of(number: int) -> str:
    return "".join(f"Prompt {number}, line {line} of page {7 * line}.\n" for line in range(12))


def test_a_tier_is_useful_once_requests_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with service_in_thread(**{"host-memory": "16MiB"}) as live:
        assert is_shown(live, "host", "too early", None, "0 blocks were written")
        ask(live.acme)
        evict_all(live)
        assert is_shown(live, "host", "useless", "never_read", "and nothing was read back")
        monkeypatch.setattr("radixkv.tiers.usefulness.LEAST_S", 3_600.0)
        assert is_shown(live, "host", "too early", None, "ask again after 20 blocks and 60 minutes")
        ask(live.acme)
        assert is_shown(live, "host", "useful", None, "requests used")


def test_a_disk_that_nobody_reads_is_useless_and_the_log_says_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("radixkv.service.core._LOOK_EVERY_S", 0.01)
    monkeypatch.setattr("radixkv.service.core._UPKEEP_EVERY_S", 0.01)
    with (
        caplog.at_level(logging.WARNING, "radixkv.service"),
        service_in_thread(**tier_options(tmp_path)) as live,
    ):
        ask(live.acme)
        eventually(
            lambda: is_shown(live, "disk", "useless", "never_read", "and nothing was read back: prompts")
        )
        eventually(lambda: "tier disk is useless (never_read): " in caplog.text)
        num_looks = live.service.tier_watch._clock()
        eventually(lambda: live.service.tier_watch._clock() > num_looks + 0.2)
    assert caplog.text.count("tier disk is useless (never_read)") == 1, "not at each look"


def test_records_of_another_identity_are_named_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = tier_options(tmp_path)
    with service_in_thread(**options) as live:
        ask(live.acme)
        eventually(lambda: metric(live.operator, "resident_blocks", "disk") >= 20)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", "99.0")
        with service_in_thread(**options) as live:
            held = int(metric(live.operator, "resident_blocks", "disk"))
            assert is_shown(live, "disk", "useless", "identity_changed", f"{held} of the {held} records")
            assert ask(live.acme, prompt_of(1))[1] == 0
    with service_in_thread(**options) as live:
        assert ask(live.acme)[1] > 100
        assert is_shown(live, "disk", "useful", None, "requests used"), "its records came back"


def test_a_disk_that_is_too_small_for_the_time_between_two_uses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("radixkv.tiers.usefulness.LEAST_RETURNED", 1)
    monkeypatch.setattr("radixkv.tiers.usefulness.LEAST_SHARE", 10.0)  # whatever it brings is too little
    with service_in_thread(**tier_options(tmp_path)) as live:
        size = live.service.cache.lower.block_bytes  # type: ignore[attr-defined]
    small = tmp_path / "small"
    small.mkdir()
    sizes = {"host-memory": str(12 * size), "disk-size": str(24 * max(size, 4_096) + 16_384)}
    with service_in_thread(**{**tier_options(small), **sizes}) as live:
        for turn in range(18):
            ask(live.acme, prompt_of(turn % 6))
            evict_all(live)
            eventually(lambda: live.service.cache.lower.host.disk.demotions.is_idle)  # type: ignore[attr-defined]
        assert is_shown(live, "disk", "useless", "too_old", "asked for blocks that had been evicted before")


def test_a_disk_that_is_slower_than_computing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("radixkv.tiers.usefulness.LEAST_ERRORS", 1)
    options = tier_options(tmp_path)
    with service_in_thread(**options) as live:
        ask(live.acme)
    monkeypatch.setattr("radixkv.tiers.disk.patience.LEAST_WAIT_S", 0.05)
    files, is_over = FaultyFiles(), threading.Event()
    with with_files(options, files) as live:
        files.before = lambda call: is_set(is_over) if call == "read" else None
        try:
            assert ask(live.acme)[1] == 0
            assert is_shown(live, "disk", "useless", "too_slow", "1 of 1 loads ended early")
        finally:
            is_over.set()


def test_a_disk_that_fails(tmp_path: Path) -> None:
    files = FaultyFiles()
    with with_files(tier_options(tmp_path), files) as live:
        files.before = failing("write")
        ask(live.acme)
        eventually(lambda: is_shown(live, "disk", "useless", "errors", "operations failed, 0 worked"))


def test_a_disk_that_cannot_be_opened(tmp_path: Path) -> None:
    with with_files(tier_options(tmp_path), FaultyFiles(failing("open", errno.EROFS))) as live:
        assert is_shown(live, "disk", "useless", "closed", "couldn't be opened at the start")
        assert is_shown(live, "host", "too early", None, "ask again")


def test_a_disk_whose_purges_are_pending(tmp_path: Path) -> None:
    files = FaultyFiles()
    with (
        pytest.raises(Exception, match="may still have the records"),
        with_files(tier_options(tmp_path), files) as live,
    ):
        ask(live.acme)
        eventually(lambda: metric(live.operator, "resident_blocks", "disk") >= 20)
        files.before = failing("write")
        live.operator.post("/v1/tenants/acme/purge").raise_for_status()
        assert is_shown(live, "disk", "useless", "closed", "the purges of 1 tenants are pending")


def test_a_disk_waits_for_the_store(
    redis_server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("radixkv.tiers.pending.PendingPurges.know_generations", lambda purges: None)
    with service_in_thread(**tier_options(tmp_path), redis=redis_server.url, replica="a") as live:
        assert is_shown(live, "disk", "useless", "closed", "waits for the fleet's store")
