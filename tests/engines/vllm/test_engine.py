"""The engine ``vllm`` of the service, over a real control channel and a server in vLLM's place."""

from __future__ import annotations

import json
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from radixkv.config import CacheConfig, Namespace, Tenant
from radixkv.engines.control.remote_cache import MAX_CONNECTIONS, ControlCache
from radixkv.engines.control.server import ControlServer
from radixkv.engines.protocol import EngineLimits, EngineSettings
from radixkv.engines.vllm.process import VllmProcess
from radixkv.engines.vllm.serve import VllmEngine, VllmModel
from radixkv.errors import ArgumentError, ConfigError, ControlError, QuotaExceeded, StaleGeneration
from radixkv.index.cache import PrefixCache
from radixkv.signing import KeySet
from radixkv.tenancy.salt import SaltReader
from radixkv.tiers.settings import TierSettings
from tests.engines.patience import patient_channels as patient_channels
from tests.engines.vllm.test_completion_stream import HEAD, answering, choice, event

__all__ = ["answering"]  # the fixture

KEYS = KeySet.derive([b"the fleet's own secret"])
IDS = list(range(10))
ACME = Namespace("acme", "m")


class Served:
    """A cache behind its control channel. ``is_busy``: commands wait for the end of a ``step``."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.is_busy = folder, False
        KEYS.write(folder / "engine.keys")
        self.control: ControlServer | None = None
        self.cache = ControlCache(folder / "control" / "control.sock", KEYS, "m")

    def begin(self) -> None:
        self.end()
        config = CacheConfig(64, 4, default_tenant=Tenant("default"))
        self.control = ControlServer(
            PrefixCache(config),
            self.folder / "control",
            self.folder / "engine.keys",
            salts=SaltReader(KEYS, allows_anonymous=False),
            patience_s=60.0,
            is_idle=lambda: not self.is_busy,
        )
        self.control.__enter__()

    def step(self) -> None:
        """End a step."""
        assert self.control is not None
        self.control.run_pending()

    def end(self) -> None:
        if self.control is not None:
            self.control.stop()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    found = Served(tmp_path)
    found.begin()
    yield found
    found.cache.close()
    found.end()


def engine_of(served: Served, http: Path) -> VllmEngine:
    process: Any = SimpleNamespace(http=http, problem=None)
    return VllmEngine(process, served.cache, EngineLimits(100, 64, 64, 4, cache_waits=True), "m")


def refusal(status: int, message: str) -> bytes:
    body = json.dumps({"error": {"message": message, "type": "x", "code": status}})
    return f"HTTP/1.1 {status} no\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode()


def test_what_vllm_cannot_serve_is_an_argument(served: Served, answering: Callable[..., Path]) -> None:
    answer = refusal(400, "the prompt\nis too odd" + "!" * 1_000)
    for call in ("generate", "prefill"):
        engine = engine_of(served, answering(answer))
        with pytest.raises(ArgumentError, match=r"refused by vLLM: the prompt is too odd!+$") as found:
            engine.generate(ACME, [IDS], 2) if call == "generate" else engine.prefill(ACME, IDS)
        assert len(str(found.value)) < 400


def test_a_purge_during_a_lookup_leaves_nothing_to_find(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = served.cache._where(ACME)
    served.cache.purge("acme")
    assert served.cache._where(ACME) != before
    monkeypatch.setattr(served.cache, "_where", lambda namespace: before)
    assert served.cache.match(ACME, IDS).num_tokens == 0
    assert served.cache.touch(ACME, IDS) == 0
    with pytest.raises(StaleGeneration, match="was purged"):
        served.cache.pin(ACME, IDS, 5.0)


@pytest.mark.parametrize(
    "answer",
    [
        refusal(500, "Internal server error"),
        HEAD + event({"error": {"message": "Internal server error", "code": 500}}),
        HEAD + event({"error": "odd"}),
        b"HTTP/1.1 404 no\r\nconnection: close\r\n\r\n",
        b"HTTP/1.1 500 no\r\nconnection: close\r\n\r\n" + b"x" * 100_000,
    ],
)
def test_what_vllm_fails_at_is_a_purge_or_its_own_fault(
    served: Served, answering: Callable[..., Path], answer: bytes
) -> None:
    with pytest.raises(ControlError, match=r"refuses a request: (500|404)"):
        engine_of(served, answering(answer)).generate(ACME, [IDS], 2)

    asked, purged = threading.Event(), threading.Event()

    def purging() -> bool:
        if asked.is_set():
            served.cache.purge("acme")
            purged.set()
        return False

    engine = engine_of(served, answering(b"", answer, asked=asked, go_on=purged))
    with pytest.raises(StaleGeneration, match="purged before vLLM began"):
        engine.generate(ACME, [IDS], 2, stop=purging)


def test_a_tenant_that_may_never_use_so_much_is_told_before_vllm_is_asked(
    served: Served, short_folder: Path
) -> None:
    served.cache.add_tenant(Tenant("acme", max_blocks=3))
    engine = engine_of(served, short_folder / "none")
    for ask in (lambda: engine.generate(ACME, [IDS], 3), lambda: engine.prefill(ACME, list(range(12)))):
        with pytest.raises(QuotaExceeded) as found:
            ask()
        assert (found.value.needed, found.value.limit) == (4, 3)
    with pytest.raises(ControlError, match="can't be reached"):
        engine.generate(ACME, [IDS], 2)


def test_others_have_their_turn_while_a_lookup_waits(served: Served, answering: Callable[..., Path]) -> None:
    usage = {"prompt_tokens": 10, "prompt_tokens_details": {"cached_tokens": 8}}
    answer = HEAD + choice([1], "stop") + event({"choices": [], "usage": usage}) + b"data: [DONE]\n\n"
    served.is_busy, turns = True, 0

    def stop() -> bool:
        nonlocal turns
        turns += 1
        if turns > 10:
            served.step()
        return False

    found = engine_of(served, answering(answer)).generate(ACME, [IDS], 2, stop=stop)
    assert turns > 10 and (found.token_ids, found.num_cached_tokens) == ([[1]], [8])


def test_lookups_are_made_together_and_a_broken_connection_is_replaced(served: Served) -> None:
    with ThreadPoolExecutor(3 * MAX_CONNECTIONS) as pool:
        found = list(pool.map(lambda at: served.cache.match(ACME, [at] * 8).num_tokens, range(60)))
        assert found == [0] * 60
        served.begin()  # the engine restarts
        with pytest.raises(ControlError):
            served.cache.match(ACME, IDS)
        assert list(pool.map(lambda at: served.cache.match(ACME, [at]).num_tokens, range(20))) == [0] * 20
        served.begin()
        served.cache.restore()
        assert served.cache.match(ACME, IDS).num_tokens == 0


CONNECTOR = '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}'


@pytest.mark.parametrize(
    "arguments",
    [
        f"--max-num-seqs 8 --kv-transfer-config '{CONNECTOR}'",
        f"--kv-transfer-config='{CONNECTOR}'",
        "--kv_transfer_config.kv_connector RadixConnector",
        "--kv-offloading-size 8 --kv-offloading-backend lmcache",
        "--kv_offloading_size=8",
    ],
)
def test_a_connector_that_no_purge_would_reach_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: str
) -> None:
    monkeypatch.setenv("RADIXKV_VLLM_ARGS", arguments)
    with pytest.raises(ConfigError, match=r"RADIXKV_VLLM_ARGS=.*purges .* would not reach .* leave it out"):
        VllmProcess([], {}, KEYS)


def test_a_folder_that_is_too_deep_for_a_socket_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with pytest.raises(ConfigError, match=r"^TMPDIR needs a shorter path: .* has \d+ bytes, .* 107 at most"):
        VllmProcess([], {}, KEYS).start()
    assert not list(deep.iterdir())


def test_tiers_of_the_service_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 100}')
    settings = EngineSettings(tmp_path, "", 100, 64, 4, tiers=TierSettings(1 << 20))
    with pytest.raises(ConfigError, match=r"--host-memory=1048576.*keeps KV in its cache alone"):
        VllmModel(settings).start(None)
