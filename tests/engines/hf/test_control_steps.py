"""HFEngine runs the commands of its control channel between steps, in its own thread."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from radixkv import CacheConfig, PrefixCache, StaleGeneration, audit
from radixkv.engines.control.client import ControlClient
from radixkv.engines.control.server import ControlServer
from radixkv.engines.hf import HFEngine, layout_of
from radixkv.signing import KeySet
from tests.engines.patience import patient_channels as patient_channels
from tests.engines.support import model_of, prompt_of, stock

KEYS = KeySet.derive([b"the fleet's secret"])


@pytest.fixture
def cache() -> PrefixCache:
    return PrefixCache(CacheConfig(512, 4, layout_of(model_of())))


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    KEYS.write(tmp_path / "engine.keys")
    return tmp_path / "engine.keys"


def test_commands_run_in_the_engines_thread_and_change_no_token(
    cache: PrefixCache, keys_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ControlServer(cache, tmp_path / "control", keys_file, patience_s=60.0) as control:
        engine = HFEngine(model_of(), cache, control=control, chunk_tokens=8)
        ran_in: list[threading.Thread] = []
        stats, fields, is_short = control._commands["stats"]

        def noted(given: Any, ids: bytes) -> dict[str, Any]:
            ran_in.append(threading.current_thread())
            return stats(given, ids)

        monkeypatch.setitem(control._commands, "stats", (noted, fields, is_short))
        answers: list[dict[str, Any]] = []

        def ask() -> None:
            with ControlClient(control.path, KEYS) as client:
                answers.extend(client.call("stats") for _ in range(3))

        asking = threading.Thread(target=ask)
        asking.start()
        prompt, rounds = prompt_of(30), 0
        while asking.is_alive():  # each generation has steps of prefill and of decoding
            made = engine.generate(engine.namespace("acme", salt=str(rounds)), prompt, 8)
            assert made.token_ids == stock(engine.model, [prompt], 8)
            rounds += 1
        assert ran_in == [threading.current_thread()] * 3
        assert len(answers) == 3 and any(each["cache"]["num_sequences"] for each in answers)
    audit.check(cache)


def test_a_purge_ends_the_tenants_running_request(
    cache: PrefixCache, keys_file: Path, tmp_path: Path
) -> None:
    with (
        ControlServer(cache, tmp_path / "control", keys_file) as control,
        ControlClient(control.path, KEYS) as client,
    ):
        engine = HFEngine(model_of(), cache, control=control)
        acme, globex = engine.namespace("acme"), engine.namespace("globex")
        engine.prefill(globex, prompt_of(20))

        def purge(done: list[list[int]]) -> None:
            client.call("purge", {"tenant": "acme"})

        with pytest.raises(StaleGeneration):
            engine.generate(acme, prompt_of(20), 8, on_step=purge)
        assert cache.match(acme, prompt_of(20)).num_tokens == 0
        assert cache.match(globex, prompt_of(20)).num_tokens == 20
        assert client.call("audit")["ok"]
        assert engine.generate(acme, prompt_of(20), 8).token_ids == stock(engine.model, [prompt_of(20)], 8)
