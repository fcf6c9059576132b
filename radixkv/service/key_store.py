"""The KeyStore: the keyring in force, and its changes while the service runs.

    create, rotate, revoke, tenants ──▶ edit ──▶ applied to the cache ──▶ written to the file ──▶ in force

A change starts from the file's present content, under a lock that all processes with this file share. It replaces the
whole file atomically (mode 0600, digests only). So replicas that share a file lose none of each other's changes.
Changes by other writers are noticed within LOOK_EVERY_S: by a thread after ``follow``, so that no request waits for
them, or else by the next request. A malformed file is reported in the log, and the keyring in force stays. Without a
file (the demo keys), changes last as long as the process.
"""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

import pydantic_core

from radixkv.clock import Clock, monotonic
from radixkv.configuration.private_files import warn_unless_private
from radixkv.errors import RadixKVError
from radixkv.service.auth import Key, Keyring, Principal
from radixkv.service.schemas.tenants import TenantSettings
from radixkv.signing import write_private

LOOK_EVERY_S = 1.0
MAX_KEYS = 16
"""Most keys of one principal: enough to rotate, few enough to compare each with every request."""

log = logging.getLogger("radixkv.service")


class UnknownKey(Exception):
    """There is no such key, or no such tenant."""


class KeyRefused(Exception):
    """The change would lock the operator out; the message has the reason."""


class KeyStore:
    """Keys that can be changed while in force. Thread-safe; ``ring`` costs a ``stat`` a second, or nothing.

    ``on_change(ring)`` is called before a new keyring comes into force; if it raises, the change is refused.
    """

    def __init__(self, ring: Keyring, path: Path | None = None, *, clock: Clock = monotonic) -> None:
        self.on_change: Callable[[Keyring], object] = lambda ring: None
        self._ring, self._path, self._clock = ring, path, clock
        self._lock = threading.Lock()
        self._look_again_at = clock() + LOOK_EVERY_S
        self._seen = self._signature()
        self._follower: threading.Thread | None = None
        self._is_closed = threading.Event()

    @classmethod
    def open(cls, path: Path | None) -> KeyStore:
        """Open the keys of a file, or the demo keys. Raises ConfigError."""
        if path is None:
            return cls(Keyring.demo())
        warn_unless_private(path, "keys file")
        return cls(Keyring.load(path), path)

    @property
    def ring(self) -> Keyring:
        """The keyring in force."""
        now = self._clock()
        if self._path is not None and self._follower is None and now >= self._look_again_at:
            self._look_again_at = now + LOOK_EVERY_S
            self._look_again()
        return self._ring

    def follow(self) -> None:
        """Look for changes by other writers in a thread from now on, until ``close``."""
        if self._path is not None and self._follower is None:
            self._follower = threading.Thread(target=self._follow, name="radixkv-keys", daemon=True)
            self._follower.start()

    def close(self) -> None:
        """End the thread of ``follow``. The keyring stays as it is."""
        self._is_closed.set()
        if self._follower is not None:
            self._follower.join()

    def _follow(self) -> None:
        while not self._is_closed.wait(LOOK_EVERY_S):
            try:
                self._look_again()
            except Exception:
                log.exception("the changed keys file is ignored")

    def create(self, principal: Principal) -> tuple[str, Key]:
        """Make a new key; return it, and its stored record.

        Creates the tenant if it doesn't exist. Raises KeyRefused.
        """
        text, key = _new_key(principal)

        def edit(ring: Keyring) -> Keyring:
            if len(ring.of(principal)) >= MAX_KEYS:
                raise KeyRefused(
                    f"there are already {MAX_KEYS} keys of this tenant or the operator; revoke one first"
                )
            settings = dict(ring.settings)
            if principal.tenant is not None:
                settings.setdefault(principal.tenant, TenantSettings())
            return Keyring([*ring.keys, key], settings)

        self._change(edit)
        return text, key

    def rotate(self, key_id: str) -> tuple[str, Key]:
        """Replace an old key by a new one; the old one is refused from then on. Raises UnknownKey."""
        made: list[tuple[str, Key]] = []

        def edit(ring: Keyring) -> Keyring:
            old = _find(ring, key_id)
            made.append(_new_key(old.principal))
            return Keyring([made[-1][1] if key is old else key for key in ring.keys], ring.settings)

        self._change(edit)
        return made[-1]

    def revoke(self, key_id: str) -> None:
        """Revoke a key from now on. Raises UnknownKey, or KeyRefused for the operator's last."""

        def edit(ring: Keyring) -> Keyring:
            old = _find(ring, key_id)
            if old.principal.is_operator and len(ring.of(old.principal)) == 1:
                raise KeyRefused("the operator's last key can't be revoked; rotate it")
            return Keyring([key for key in ring.keys if key is not old], ring.settings)

        self._change(edit)

    def put_tenant(self, tenant: str, settings: TenantSettings) -> None:
        """Set a tenant's settings; its keys stay."""
        self._change(lambda ring: Keyring(ring.keys, {**ring.settings, tenant: settings}))

    def remove_tenant(self, tenant: str) -> None:
        """Remove the tenant and its keys. Raises UnknownKey."""

        def edit(ring: Keyring) -> Keyring:
            if tenant not in ring.settings:
                raise UnknownKey(tenant)
            kept = {name: settings for name, settings in ring.settings.items() if name != tenant}
            return Keyring([key for key in ring.keys if key.principal.tenant != tenant], kept)

        self._change(edit)

    def _change(self, edit: Callable[[Keyring], Keyring]) -> None:
        """Apply an edit. Raises what ``edit`` and ``on_change`` raise, ConfigError for a malformed file, OSError."""
        with self._lock, self._file_lock():
            before = self._ring if self._path is None else Keyring.load(self._path)
            after = edit(before)
            self.on_change(after)
            try:
                self._write(after)
            except OSError:
                self.on_change(before)
                raise
            self._ring = after

    def _look_again(self) -> None:
        """Load a file that another writer has changed; if this process is writing a change, do it next time."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            seen = self._signature()
            if seen != self._seen and self._path is not None:
                self._seen = seen
                warn_unless_private(self._path, "keys file")
                ring = Keyring.load(self._path)
                self.on_change(ring)
                self._ring = ring
        except RadixKVError as error:
            log.error("the changed keys file is ignored: %s", error)
        finally:
            self._lock.release()

    def _signature(self) -> tuple[int, int, int] | None:
        if self._path is None:
            return None
        with suppress(OSError):  # a missing file has no signature; the keyring stays in force
            status = self._path.stat()
            return status.st_ino, status.st_size, status.st_mtime_ns
        return None

    @contextmanager
    def _file_lock(self) -> Iterator[None]:
        """Lock out other processes that change files of this directory."""
        if self._path is None:
            yield
            return
        directory = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(directory, fcntl.LOCK_EX)
            yield
        finally:
            os.close(directory)

    def _write(self, ring: Keyring) -> None:
        if self._path is not None:
            write_private(self._path, pydantic_core.to_json(ring.document(), indent=2) + b"\n")
            self._seen = self._signature()


def _new_key(principal: Principal) -> tuple[str, Key]:
    text = f"rk_{secrets.token_urlsafe(32)}"
    return text, Key.of(text, principal, datetime.now(UTC).isoformat(timespec="seconds"))


def _find(ring: Keyring, key_id: str) -> Key:
    for key in ring.keys:
        if key.id == key_id:
            return key
    raise UnknownKey(key_id)
