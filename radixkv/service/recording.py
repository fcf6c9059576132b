"""Recorder: a service's own traffic as a trace for ``radixkv simulate``, in the plain format.

docs/guides/researchers.md describes the format. The recorder writes for each request its arrival time, duration,
tenant, and the lengths of prompt and answer. It also writes a keyed hash for each whole block, and the request's hints,
unchanged.
The hashes are chained from the namespace and its tenant's generation. It writes no token id, and no text of a prompt or
an answer. The key comes from the fleet secret, so hashes of replicas that share it can be compared; without ``--redis``
it is drawn anew at each start. A reader of the file without the key can't confirm a guessed prompt. Equal prefixes have
equal hashes; that is the purpose of the file.

A request that makes several answers is one line, with its first answer. A failed or cancelled request is not written.
Cost: a BLAKE2b a block, in the model's thread, and only if recording is on.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from radixkv.errors import ConfigError
from radixkv.index.cache import RequestHints
from radixkv.index.tokens import TOKEN_BYTES, encode
from radixkv.signing import mac

if TYPE_CHECKING:
    from radixkv.config import Namespace

COMPLETION: Final = "completion"
WARM: Final = "warm"
"""Types of requests, unless a client labels them otherwise: recorded, and passed to eviction policies."""

_HASH_BYTES = 8

log = logging.getLogger("radixkv.service")


def labels_of(hints: RequestHints) -> dict[str, Any]:
    """Return the hints that the cache gets, as a trace's labels; a simulation makes the same hints from them."""
    given = {"priority": hints.priority, "priority_duration_s": hints.duration_s}
    return {**hints.labels, **{name: value for name, value in given.items() if value is not None}}


class Recorder:
    """Appends to a file that only its owner may read. Thread-safe; ``close`` it when done. Raises ConfigError.

    ``generation_of``: the number of purges of a tenant; requests after a purge have other hashes.
    """

    def __init__(
        self,
        path: Path,
        secret: bytes,
        block_size: int,
        generation_of: Callable[[str], int] = lambda tenant: 0,
    ) -> None:
        self._generation_of = generation_of
        self._key, self._block_size = mac(secret, "trace"), block_size
        self._lock = threading.Lock()
        try:
            path.touch(mode=0o600)
            self._file = path.open("a", encoding="utf-8", buffering=1)
        except OSError as error:
            raise ConfigError(
                "--record", str(path), f"a file that can be written ({error.strerror})"
            ) from None

    def record(
        self,
        namespace: Namespace,
        prompt_key: bytes,
        answer: Sequence[int],
        seconds: float,
        hints: RequestHints,
    ) -> None:
        """Record a request that ends now and began ``seconds`` ago. O(tokens)."""
        answer_key = encode(answer)
        fields = {
            "time": round(time.time() - seconds, 3),
            "duration_s": round(seconds, 3),
            "tenant": namespace.tenant,
            "tokens": len(prompt_key) // TOKEN_BYTES,
            "output_tokens": len(answer_key) // TOKEN_BYTES,
            "block_tokens": self._block_size,
            "hashes": list(self._hashes(namespace, prompt_key + answer_key)),
            "labels": labels_of(hints),
        }
        self._write(json.dumps(fields, ensure_ascii=False) + "\n")

    def close(self) -> None:
        """End the recording; nothing is written afterwards."""
        with self._lock:
            self._file.close()

    def _write(self, line: str) -> None:
        with self._lock:
            if self._file.closed:
                return
            try:
                self._file.write(line)
            except OSError as error:  # a full disk ends the recording, not the request
                self._file.close()
                log.error("recording stopped: %s", error)

    def _hashes(self, namespace: Namespace, key: bytes) -> Iterator[str]:
        generation, size = self._generation_of(namespace.tenant), self._block_size * TOKEN_BYTES
        link = mac(self._key, "namespace", namespace.framed(), generation)
        for at in range(0, len(key) - size + 1, size):
            link = hashlib.blake2b(
                link + key[at : at + size], digest_size=_HASH_BYTES, key=self._key
            ).digest()
            yield link.hex()
