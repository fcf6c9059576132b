"""vLLM as the engine ``vllm`` of ``radixkv serve``: it runs in processes of its own, with radixkv as its cache.

    tokens    vLLM's /v1/completions, over a Unix socket (``completion_stream``)
    cache     the control channel (``control_cache``)
    process   ``process``; its variables are there

A prompt's tenant, generation and salt travel in ``cache_salt``, signed here. What vLLM refuses is raised as what it
means: a purge that came between, or an argument. vLLM batches what comes together. It has
no bases, no beam search and no adapters here, and hints for the policy don't reach it. A fleet (``--redis``) and
``--events`` are refused: set vLLM's own ``--kv-events-config`` in RADIXKV_VLLM_ARGS.
"""

from __future__ import annotations

import json
import secrets
import select
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, closing, contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from radixkv.clock import monotonic
from radixkv.config import Namespace
from radixkv.engines.control.remote_cache import MAX_CONNECTIONS, ControlCache
from radixkv.engines.protocol import (
    Ability,
    EngineLimits,
    EngineSettings,
    Generation,
    Prefill,
    WaitForRoom,
)
from radixkv.engines.vllm.completion_stream import CompletionRefused, CompletionStream, fetched
from radixkv.engines.vllm.process import VllmProcess
from radixkv.errors import ArgumentError, ConfigError, ControlError, NamespaceError, StaleGeneration
from radixkv.index.cache import RequestHints
from radixkv.index.changes import Journal
from radixkv.index.tokens import TOKEN_BYTES, TokenIds, decode, encode
from radixkv.signing import KeySet
from radixkv.uncopied import refuse_copies

SERVED_NAME: Final = "radixkv"
_POLL_MS: Final = 5
NUM_TOGETHER: Final = 16
"""Requests of one tenant that vLLM gets at the same time. It batches those of all tenants."""
_HASHED_BYTES: Final = 1 << 20
"""Bytes at the start and the end of a file of weights that the fingerprint covers."""


def load_engine(settings: EngineSettings) -> VllmModel:
    """Read what names the model. Raises ConfigError. vLLM loads it at ``start``."""
    return VllmModel(settings)


class VllmModel:
    """A model that vLLM will load."""

    def __init__(self, settings: EngineSettings) -> None:
        if settings.model is None:
            raise ConfigError("--model", None, "the folder of a model, for the engine vllm")
        self._settings, self._folder = settings, settings.model.resolve()
        self.fingerprint = _fingerprint(self._folder, settings)
        self._vocab_size = _vocab_size(self._folder)

    def start(self, journal: Journal | None) -> VllmEngine:
        """Start vLLM, and wait until it serves. Raises ConfigError."""
        if journal is not None:
            raise ConfigError(
                "--engine", "vllm", "an engine of this process, because --redis or --events is set"
            )
        settings = self._settings
        if settings.tiers is not None:
            allowed = "none with the engine vllm, which keeps KV in its cache alone"
            raise ConfigError("--host-memory", settings.tiers.host_bytes, allowed)
        if settings.kv_memory is not None:
            allowed = "none with the engine vllm: --num-blocks sets its blocks"
            raise ConfigError("--kv-memory", settings.kv_memory.text, allowed)
        keys = KeySet.derive([secrets.token_bytes(32)])
        process = VllmProcess(
            [
                *("--model", str(self._folder), "--served-model-name", SERVED_NAME),
                *("--scheduler-cls", "radixkv.engines.vllm.Scheduler"),
                *("--no-enable-prefix-caching", "--enable-prompt-tokens-details", "--skip-tokenizer-init"),
                *("--block-size", str(settings.block_size), "--dtype", settings.dtype),
                *("--num-gpu-blocks-override", str(settings.num_blocks + 1)),  # one is vLLM's null block
            ],
            {
                "RADIXKV_MODEL": self.fingerprint,
                "RADIXKV_POLICY": settings.policy,
                **({"OMP_NUM_THREADS": str(settings.threads)} if settings.threads else {}),
            },
            keys,
        )
        cache = ControlCache(process.control, keys, self.fingerprint)
        process.on_ready = cache.restore
        process.start()
        try:
            limits = EngineLimits(
                self._vocab_size,
                _max_model_len(process.http),
                settings.num_blocks,
                settings.block_size,
                NUM_TOGETHER,
                cache_waits=True,
            )
        except BaseException:
            process.close()
            raise
        return VllmEngine(process, cache, limits, self.fingerprint)


class VllmEngine:
    """See ``Engine``."""

    abilities: Collection[Ability] = frozenset(("as_of", "pins", "prefill", "samples"))
    weights_version = 0

    def __init__(
        self, process: VllmProcess, cache: ControlCache, limits: EngineLimits, fingerprint: str
    ) -> None:
        self.process, self.cache, self.limits, self.fingerprint = process, cache, limits, fingerprint
        self._lookups = ThreadPoolExecutor(MAX_CONNECTIONS, "radixkv-lookup")

    def namespace(self, tenant: str, adapter: str | None = None, salt: str = "") -> Namespace:
        """Return a tenant's namespace. Raises NamespaceError for an adapter."""
        if adapter is not None:
            raise NamespaceError("this engine serves no adapters; allowed: none")
        return Namespace(tenant, self.fingerprint, None, salt)

    def generate(
        self,
        ns: Namespace,
        ids: Any,
        max_new_tokens: int,
        *,
        do_sample: bool = False,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        num_beams: int = 1,
        num_return_sequences: int = 1,
        eos_token_id: int | Iterable[int] | None = None,
        on_step: Callable[[list[list[int]]], None] | None = None,
        stop: Callable[[], bool] | None = None,
        on_no_room: WaitForRoom | None = None,
        hints: RequestHints | None = None,
        as_of: int | None = None,
    ) -> Generation:
        """Continue prompts: see ``Engine``. ``hints`` have no effect; vLLM itself waits for room.

        Raises ArgumentError for beams and for what vLLM refuses, QuotaExceeded if the tenant may never use so much,
        StaleGeneration if it is purged before vLLM begins, and ControlError if vLLM ends or answers nonsense.
        """
        if num_beams != 1:
            raise ArgumentError("num_beams", num_beams, "1: this engine has no beam search")
        began_at, n = monotonic(), num_return_sequences
        sampling: dict[str, Any] = {"temperature": 0.0}
        if do_sample:
            top_p = 1.0 if top_p is None else top_p
            sampling = {"temperature": temperature, "top_k": top_k or 0, "top_p": top_p}
            sampling |= {} if seed is None else {"seed": seed}
        sampling |= _ends(eos_token_id)
        keys = [encode(each) for each in ids]
        rows: list[list[int]] = [[] for _ in range(n * len(keys))]
        first_s: float | None = None
        sizes = [len(key) // TOKEN_BYTES for key in keys]
        self.cache.require_fit(ns.tenant, -(-(max(sizes) + max_new_tokens) // self.limits.block_size))
        found, is_stopped = self._resident(ns, keys, stop)
        streams: list[CompletionStream] = []
        with self._explained(ns, as_of) as salt, ExitStack() as stack:
            for key in keys:
                streams.append(self._stream(salt, key, max_new_tokens, n, sampling))
                stack.callback(streams[-1].close)
            while not is_stopped and not all(each.is_over for each in streams):
                new: list[list[int]] = [[] for _ in rows]
                for at, stream in _readable(streams):
                    for row, some in stream.take():
                        new[at * n + row] += some
                        rows[at * n + row] += some
                if any(new):
                    first_s = monotonic() - began_at if first_s is None else first_s
                    if on_step is not None:
                        on_step(new)
                is_stopped = stop is not None and stop()
        cached = [
            min(was, size - 1) if each.num_cached_tokens is None else each.num_cached_tokens
            for each, was, size in zip(streams, found, sizes, strict=True)
        ]
        seconds = monotonic() - began_at
        reasons = [reason or "stop" for each in streams for reason in each.reasons]
        return Generation(rows, sizes, cached, reasons, seconds if first_s is None else first_s, seconds)

    def prefill(
        self,
        ns: Namespace,
        ids: TokenIds,
        *,
        on_chunk: Callable[[int, int], None] | None = None,
        on_no_room: WaitForRoom | None = None,
        hints: RequestHints | None = None,
        as_of: int | None = None,
    ) -> Prefill:
        """Compute a prompt, with one further token. ``on_chunk`` is called while it waits. Raises ControlError."""
        began_at, key = monotonic(), encode(ids)
        total = len(key) // TOKEN_BYTES
        self.cache.require_fit(ns.tenant, -(-(total + 1) // self.limits.block_size))
        with (
            self._explained(ns, as_of) as salt,
            closing(self._stream(salt, key, 1, 1, {"temperature": 0.0})) as stream,
        ):
            while not stream.is_over:
                for _, each in _readable([stream]):
                    each.take()
                if on_chunk is not None:
                    on_chunk(total if stream.is_over else 0, total)
        cached = stream.num_cached_tokens or 0
        num_blocks = -(-total // self.limits.block_size)
        return Prefill(total, cached, total - cached, num_blocks, monotonic() - began_at)

    def publish(
        self,
        base_id: str,
        ns: Namespace,
        ids: TokenIds,
        readers: Iterable[str],
        *,
        on_chunk: Callable[[int, int], None] | None = None,
        on_no_room: WaitForRoom | None = None,
        as_of: int | None = None,
    ) -> Prefill:
        """Never called without the ability ``publish``."""
        raise ArgumentError("base_id", base_id, "no base: this engine has none")

    def health(self) -> list[str]:
        """Return why vLLM can't serve now; empty if it can. It is started again without help."""
        return [] if self.process.problem is None else [self.process.problem]

    def audit(self) -> list[str]:
        """Return which laws vLLM's cache breaks now."""
        return self.cache.audit()

    def close(self) -> None:
        """End vLLM."""
        self._lookups.shutdown(cancel_futures=True)
        self.cache.close()
        self.process.close()

    def _resident(
        self, ns: Namespace, keys: list[bytes], stop: Callable[[], bool] | None
    ) -> tuple[list[int], bool]:
        """Return how many tokens of each prompt are resident, and whether to stop. Other calls go on meanwhile."""
        asked = [self._lookups.submit(self.cache.match, ns, key) for key in keys]
        while wait(asked, _POLL_MS / 1_000).not_done:
            if stop is not None and stop():
                return [0] * len(keys), True
        return [each.result().num_tokens for each in asked], False

    @contextmanager
    def _explained(self, ns: Namespace, as_of: int | None) -> Iterator[str]:
        """Yield the salt of a request. What vLLM refuses is raised as what it means."""
        salt = self.cache.cache_salt(ns, as_of)
        try:
            yield salt
        except CompletionRefused as error:
            if self.cache.cache_salt(ns) != salt:
                raise StaleGeneration("the tenant was purged before vLLM began") from None
            if error.status in (400, 422):
                raise ArgumentError(
                    "prompt", "…", "what vLLM serves", problem=f"is refused by vLLM: {error.reason}"
                ) from None
            raise

    def _stream(
        self, salt: str, key: bytes, max_new_tokens: int, n: int, sampling: dict[str, Any]
    ) -> CompletionStream:
        if self.process.problem is not None:
            raise ControlError(self.process.problem)
        body = {
            "model": SERVED_NAME,
            "prompt": decode(key).tolist(),
            "max_tokens": max_new_tokens,
            "n": n,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            "cache_salt": salt,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            **sampling,
        }
        return CompletionStream(
            self.process.http,
            body,
            num_rows=n,
            num_prompt_tokens=len(key) // TOKEN_BYTES,
            max_new_tokens=max_new_tokens,
            vocab_size=self.limits.vocab_size,
        )


refuse_copies(VllmEngine, "it holds sockets and a process. Make another")


def _readable(streams: list[CompletionStream]) -> list[tuple[int, CompletionStream]]:
    """Wait for a moment. Returns the unfinished streams that have something to read."""
    waiting = {each.fileno(): (at, each) for at, each in enumerate(streams) if not each.is_over}
    poll = select.poll()
    for number in waiting:
        poll.register(number, select.POLLIN)
    return [waiting[number] for number, _ in poll.poll(_POLL_MS)]


def _ends(eos_token_id: int | Iterable[int] | None) -> dict[str, Any]:
    if eos_token_id is None:
        return {}
    ids = [eos_token_id] if isinstance(eos_token_id, int) else list(eos_token_id)
    return {"ignore_eos": True, "stop_token_ids": [each for each in ids if each >= 0]}


def _fingerprint(folder: Path, settings: EngineSettings) -> str:
    """SHA-256 of the folder's configuration, the sizes and both ends of its weights, dtype, tokenizer, block size."""
    digest = sha256(b"radixkv-vllm-1")
    for text in (settings.tokenizer_digest, settings.dtype, str(settings.block_size)):
        digest.update(f"{len(text)}:{text}".encode())
    for path in sorted(folder.iterdir()):
        if not path.is_file() or path.suffix not in (".json", ".safetensors", ".bin", ".pt"):
            continue
        size = path.stat().st_size
        digest.update(f"{len(path.name)}:{path.name}:{size}:".encode())
        with path.open("rb") as file:
            digest.update(file.read(_HASHED_BYTES))
            file.seek(max(_HASHED_BYTES, size - _HASHED_BYTES))
            digest.update(file.read(_HASHED_BYTES))
    return f"fp:{digest.hexdigest()}"


def _vocab_size(folder: Path) -> int:
    try:
        config = json.loads((folder / "config.json").read_bytes())
        size = config.get("vocab_size", config.get("text_config", {}).get("vocab_size"))
    except (OSError, ValueError, AttributeError):
        size = None
    if type(size) is not int or not 0 < size < 2**32:
        raise ConfigError("--model", str(folder), "a folder whose config.json has a vocab_size")
    return size


def _max_model_len(path: Path) -> int:
    """Return the tokens of a request: one less than vLLM's, since a prefill needs a further one. Raises ConfigError."""
    try:
        (model,) = json.loads(fetched(path, "/v1/models"))["data"]
        length = model["max_model_len"]
    except (ValueError, KeyError, TypeError, ControlError) as error:
        raise ConfigError("RADIXKV_VLLM", "…", f"a vLLM that tells its max_model_len: {error}") from None
    if type(length) is not int or not 2 <= length < 2**31:
        raise ConfigError("RADIXKV_VLLM", length, "a vLLM whose max_model_len is a number")
    return length - 1
