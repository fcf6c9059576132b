"""What a vLLM with radixkv shows to its operators: the control channel and KV events. Imports nothing of vLLM.

    RADIXKV_SOCKET           path of the control socket, …/control.sock, in a directory of this user's own (mode 0700)
    RADIXKV_EVENTS           where KV events are published: tcp://127.0.0.1:5557 or ipc:///path
    RADIXKV_EVENTS_REPLAY    where missed events are answered; default: the next port, or the path with .replay
    RADIXKV_EVENTS_TOPIC     their topic
    RADIXKV_EVENTS_CONTENT   digests (keyed; the default), or prompts-in-clear: token ids, adapters, salts, and block
                             hashes that equal vLLM's own for the same algorithm and seed
    RADIXKV_EVENTS_SCOPE     loopback (the default), or network: everybody who reaches the endpoint reads the events

Both need RADIXKV_KEYS, events in clear excepted. vLLM's own ``--kv-events-config`` sets endpoints and topic in place of
the variables. A data-parallel rank N above 0 has its socket in the folder ``rank-N`` beside rank 0's, and its events at
ports as many higher, as in vLLM (RADIXKV_EVENTS alone: twice as many, since the next port answers replays).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from radixkv.engines.control.server import SOCKET_NAME, ControlServer
from radixkv.errors import ConfigError
from radixkv.events.event_settings import EventSettings
from radixkv.index.cache import PrefixCache
from radixkv.signing import KeySet
from radixkv.tenancy.salt import SaltReader
from radixkv.uncopied import refuse_copies

if TYPE_CHECKING:
    from radixkv.events.engine_hashes import EngineHashes
    from radixkv.events.event_publisher import EventPublisher
    from radixkv.events.event_stream import EventStream

PATIENCE_S: Final = 0.02
"""How long a short command waits for the end of a step, before it runs beside the step."""

_TCP = re.compile(r"(tcp://.*:)([0-9]{1,5})")


class EngineCache(Protocol):
    """A cache inside an engine."""

    @property
    def cache(self) -> PrefixCache:
        """What operators reach."""

    def purged(self) -> None:
        """Note that a tenant was purged, or is about to be. From any thread."""


class Outlets:
    """The control channel and the events of one cache; either may be missing.

    - ``environment``: the variables above. ``rank``: the data-parallel rank.
    - ``events``: vLLM's own settings of events; None: not given, or switched off.
    - ``hashes``: makes vLLM's hashes of blocks, for events in clear.

    Raises ConfigError.
    """

    def __init__(
        self,
        environment: Mapping[str, str],
        block_size: int,
        *,
        rank: int = 0,
        events: Any = None,
        hashes: Callable[[], EngineHashes] | None = None,
    ) -> None:
        self._keys_file = environment.get("RADIXKV_KEYS")
        self._directory = _directory(environment.get("RADIXKV_SOCKET"), rank)
        if self._directory is not None and self._keys_file is None:
            raise ConfigError("RADIXKV_KEYS", None, "a file of keys, because RADIXKV_SOCKET is set")
        settings = event_settings(environment, block_size, rank, events)
        self._events = None if settings is None else self._publisher(settings, hashes)
        self._control: ControlServer | None = None

    @property
    def journal(self) -> EventStream | None:
        """The journal for the cache; None without events."""
        return None if self._events is None else self._events.journal

    def start(
        self,
        engine: EngineCache,
        salts: SaltReader | None,
        is_idle: Callable[[], bool],
        weights: Callable[[], int] = lambda: 0,
    ) -> None:
        """Serve. ``is_idle``: whether the engine makes no steps now. ``weights``: their version. Raises ConfigError."""
        cache = engine.cache
        if self._directory is not None:
            assert self._keys_file is not None
            self._directory.parent.mkdir(mode=0o700, exist_ok=True)
            self._control = ControlServer(
                cache,
                self._directory,
                self._keys_file,
                salts=salts,
                patience_s=PATIENCE_S,
                is_idle=is_idle,
                on_purge=engine.purged,
                weights=weights,
            )
            self._control.__enter__()
        if self._events is not None:
            try:
                self._events.start(cache)
            except BaseException:
                self.close()
                raise

    def run_pending(self) -> None:
        """Run commands that wait, between two steps. 0.1 µs if there are none."""
        if self._control is not None:
            self._control.run_pending()

    def close(self) -> None:
        """Stop serving. May be called again."""
        control, self._control = self._control, None
        if control is not None:
            control.stop()
        if self._events is not None:
            self._events.close()

    def _publisher(
        self, settings: EventSettings, hashes: Callable[[], EngineHashes] | None
    ) -> EventPublisher:
        from radixkv.events.event_publisher import EventPublisher

        if settings.publishes_prompts and hashes is not None:
            return EventPublisher(None, settings, hashes=hashes())
        if self._keys_file is None:
            raise ConfigError("RADIXKV_KEYS", None, "a file of keys, because KV events have keyed digests")
        return EventPublisher(KeySet.load(self._keys_file), settings)


refuse_copies(Outlets, "it holds sockets and threads. Make another")


def event_settings(
    environment: Mapping[str, str], block_size: int, rank: int, given: Any
) -> EventSettings | None:
    """Return the settings of events; None if they are off. ``given``: vLLM's own. Raises ConfigError."""
    content = _choice(environment, "RADIXKV_EVENTS_CONTENT", ("digests", "prompts-in-clear"))
    scope = _choice(environment, "RADIXKV_EVENTS_SCOPE", ("loopback", "network"))
    always: dict[str, Any] = {
        "block_size": block_size,
        "publishes_prompts": content == "prompts-in-clear",
        "allows_network": scope == "network",
        "data_parallel_rank": rank,
    }
    if given is not None:
        replay = given.replay_endpoint
        if replay is None:
            replay = _TCP.sub(r"\1*", given.endpoint)
            replay = None if replay == given.endpoint else replay  # ipc: beside the endpoint
        return EventSettings(
            endpoint=_of_rank(given.endpoint, rank),
            replay_endpoint=None if replay is None else _of_rank(replay, rank),
            topic=given.topic,
            replay_batches=min(given.buffer_steps, 1_024),
            **always,
        )
    endpoint, replay = environment.get("RADIXKV_EVENTS"), environment.get("RADIXKV_EVENTS_REPLAY")
    if endpoint is None:
        return None
    return EventSettings(
        endpoint=_of_rank(endpoint, rank if replay is not None else 2 * rank),
        replay_endpoint=None if replay is None else _of_rank(replay, rank),
        topic=environment.get("RADIXKV_EVENTS_TOPIC", ""),
        **always,
    )


def _choice(environment: Mapping[str, str], name: str, allowed: tuple[str, str]) -> str:
    value = environment.get(name, allowed[0])
    if value not in allowed:
        raise ConfigError(name, value, " or ".join(allowed))
    return value


def _of_rank(endpoint: str, offset: int) -> str:
    """Return an endpoint of a rank: with a higher port, or another path."""
    if not offset:
        return endpoint
    found = _TCP.fullmatch(endpoint)
    if found is not None:
        return f"{found[1]}{int(found[2]) + offset}"
    return endpoint if endpoint.endswith(":*") else f"{endpoint}.{offset}"


def _directory(socket: str | None, rank: int) -> Path | None:
    if socket is None:
        return None
    path = Path(socket)
    if path.name != SOCKET_NAME or not path.is_absolute():
        raise ConfigError("RADIXKV_SOCKET", socket, f"an absolute path that ends in /{SOCKET_NAME}")
    return path.parent / f"rank-{rank}" if rank else path.parent
