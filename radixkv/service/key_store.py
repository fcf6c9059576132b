"""The KeyStore: the keyring in force, and its changes while the service runs.

    create, rotate, revoke, tenants ──▶ edit ──▶ applied to the cache ──▶ written to the file ──▶ in force

A change starts from the file's present content, under a lock that all processes with this file share: a lock on
``.NAME.lock`` beside it, which only this user may open. It replaces the whole file atomically (mode 0600, digests
only). So replicas that share a file lose none of each other's changes. A change that doesn't get the lock within
LOCK_WAIT_S is refused with FileBusy.

Changes by other writers are noticed within LOOK_EVERY_S: by a thread after ``follow``, so that no request waits for
them, or else by the next request. Removed keys and tenants are refused from then on, whatever else the file says. What
can't be in force yet, such as a guarantee that running requests leave no room for, is *pending* (``Keyring.pending``),
and tried again at each look. While the file isn't a keys file at all, the keyring in force stays; ``problem`` says why.

Each tenant of the file gets an incarnation (``auth``): from the process that makes it, or that first notices it in the
file and gets the lock. A tenant that has none at a start gets one that depends on its name alone (``_named``). A tenant
that is in force keeps its own, if an edit leaves it out. If the file can't be written,
all processes compute the same one from the name; then a tenant made again between two looks isn't noticed. Without a
file (the demo keys), changes last as long as the process.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from secrets import token_urlsafe

from radixkv.clock import Clock, monotonic
from radixkv.configuration.private_files import LockHeld, private_lock, warn_unless_private
from radixkv.errors import ConfigError, RadixKVError, shown
from radixkv.service.auth import (
    Entry,
    Key,
    Keyring,
    KeysFile,
    Principal,
    lasting_incarnation,
    new_incarnation,
    read_document,
    with_incarnations,
)
from radixkv.service.schemas.tenants import TenantSettings
from radixkv.signing import write_private

LOOK_EVERY_S = 1.0
LOCK_WAIT_S = 3.0
"""Longest time that a change waits for other changes, of this process and of others."""
_LOCK_AGAIN_S = 0.02
MAX_KEYS = 16
"""Most keys of one principal: enough to rotate, few enough to compare each with every request."""

log = logging.getLogger("radixkv.service")


class UnknownKey(Exception):
    """There is no such key, or no such tenant."""


class KeyRefused(Exception):
    """The change would lock the operator out; the message has the reason."""


class FileBusy(Exception):
    """Another change holds the keys, or the lock of their file, for too long; the message says what to do."""


Refused = Mapping[str, RadixKVError]
"""Why what a keyring says of a tenant can't be in force now, by name."""


class KeyStore:
    """Keys that can be changed while in force. Thread-safe; ``ring`` costs a ``stat`` a second, or nothing.

    ``on_change(ring)`` is called before a new keyring comes into force. It returns the tenants whose settings, or whose
    removal, are refused now. A change of such a tenant over HTTP raises that error. In the file it is pending.
    """

    def __init__(self, ring: Keyring, path: Path | None = None, *, clock: Clock = monotonic) -> None:
        self.on_change: Callable[[Keyring], Refused] = lambda ring: {}
        self.problem: str | None = None
        """Why the file, or something in it outside of tenants, can't be read now."""
        self._ring, self._path, self._clock = ring, path, clock
        self._file = KeysFile.of(ring)
        self._lock = threading.Lock()
        self._look_again_at = clock() + LOOK_EVERY_S
        self._seen = self._signature()
        self._must_read = self._is_unwritable = False
        self._logged: frozenset[tuple[str, str]] = frozenset()
        self._follower: threading.Thread | None = None
        self._is_closed = threading.Event()

    @classmethod
    def open(cls, path: Path | None) -> KeyStore:
        """Open the keys of a file, or the demo keys. Gives the tenants of the file incarnations.

        Raises ConfigError, also if a tenant needs one and another process holds the file's lock for LOCK_WAIT_S.
        """
        if path is None:
            return cls(Keyring.demo())
        warn_unless_private(path, "keys file")
        store = cls(Keyring.load(path), path)
        try:
            store._file = store._named(LOCK_WAIT_S, lasting_incarnation)
        except FileBusy as error:
            raise ConfigError(
                "keys", str(path), f"a keys file that no other process locks ({error})"
            ) from None
        store._file.require_sound()
        store._ring = store._file.ring()
        return store

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
        """End the thread of ``follow``, and waits for the lock. The keyring stays as it is."""
        self._is_closed.set()
        if self._follower is not None:
            self._follower.join()

    def _follow(self) -> None:
        crash = None
        while not self._is_closed.wait(LOOK_EVERY_S):
            try:
                self._look_again()
            except Exception as error:  # a bug: try again, but don't fill the log
                if crash != repr(error):
                    log.exception("the changed keys file isn't wholly in force")
                crash = repr(error)

    def apply(self) -> Refused:
        """Bring the keyring into force again, for example after ``on_change`` was set. Returns what is refused."""
        with self._lock:
            return self._apply(self._file)

    def warnings(self) -> list[str]:
        """Return what isn't in force here, without names, numbers or reasons: anybody may read it."""
        found = []
        if self.problem is not None:
            found.append("keys: the keys file can't be read, or not wholly; the log says why")
        if self.ring.pending:
            found.append("keys: settings in the keys file are pending; the log and GET /v1/tenants say why")
        return found

    def create(self, principal: Principal) -> tuple[str, Key]:
        """Make a new key; return it, and its stored record.

        Creates the tenant if it doesn't exist. Raises KeyRefused.
        """
        text, key = _new_key(principal)

        def edit(file: KeysFile) -> KeysFile:
            entry = file.entry(principal)
            if len(entry.keys) >= MAX_KEYS:
                raise KeyRefused(
                    f"there are already {MAX_KEYS} keys of this tenant or the operator; revoke one first"
                )
            return file.with_entry(principal, replace(entry, keys=(*entry.keys, key)))

        self._change(edit)
        return text, key

    def rotate(self, key_id: str) -> tuple[str, Key]:
        """Replace an old key by a new one; the old one is refused from then on. Raises UnknownKey."""
        made: list[tuple[str, Key]] = []

        def edit(file: KeysFile) -> KeysFile:
            entry, old = _find(file, key_id)
            made.append(_new_key(old.principal))
            keys = tuple(made[-1][1] if key is old else key for key in entry.keys)
            return file.with_entry(old.principal, replace(entry, keys=keys))

        self._change(edit)
        return made[-1]

    def revoke(self, key_id: str) -> None:
        """Revoke a key from now on. Raises UnknownKey, or KeyRefused for the operator's last."""

        def edit(file: KeysFile) -> KeysFile:
            entry, old = _find(file, key_id)
            if old.principal.is_operator and len(entry.keys) == 1:
                raise KeyRefused("the operator's last key can't be revoked; rotate it")
            keys = tuple(key for key in entry.keys if key is not old)
            return file.with_entry(old.principal, replace(entry, keys=keys))

        self._change(edit)

    def put_tenant(self, tenant: str, settings: TenantSettings) -> None:
        """Set a tenant's settings; its keys stay."""

        def edit(file: KeysFile) -> KeysFile:
            entry = file.entry(Principal(tenant))
            return file.with_entry(Principal(tenant), entry.set(settings))

        self._change(edit)

    def remove_tenant(self, tenant: str) -> None:
        """Remove the tenant and its keys. Raises UnknownKey."""

        def edit(file: KeysFile) -> KeysFile:
            if tenant not in file.tenants:
                raise UnknownKey(tenant)
            return file.without([tenant])

        self._change(edit)

    def _change(self, edit: Callable[[KeysFile], KeysFile]) -> None:
        """Apply an edit and write it.

        Raises what ``edit`` raises, the error for which ``on_change`` refuses the tenant that it changes, ConfigError
        for a file that can't be read, FileBusy, OSError. Then nothing of the edit is in force or in the file.
        """
        with self._locked():
            before, seen = self._file, self._signature()
            if self._path is not None:
                before = self._parsed()
                before = before.named(self._incarnations_of(before))
            after = KeysFile.parse(edit(before).document(), self._place)
            refused = self._apply(after)
            for name, error in refused.items():
                if _differs(before.tenants.get(name), after.tenants.get(name)):
                    self._apply(before)
                    raise error
            try:
                self._write(after.document(), seen)
            except OSError:
                self._apply(before)
                raise
            self._report()

    def _apply(self, file: KeysFile) -> Refused:
        """Bring what a file says into force, as far as possible. What is gone ends first, whatever fails then."""
        self._must_read = True  # until all of it is done
        wanted = file.ring(self._ring)
        self._ring = self._ring.less(wanted)
        refused = self.on_change(wanted)
        self._ring = wanted.refusing({name: str(error) for name, error in refused.items()}, self._ring)
        self._file = file
        self.problem = str(file.problems[0]) if file.problems else None
        self._must_read = False
        return refused

    def _look_again(self) -> None:
        """Bring a file that another writer has changed into force, and try again what is pending.

        If this process is making a change, do it next time.
        """
        if self._path is None or not self._lock.acquire(blocking=False):
            return
        try:
            self._look(self._path)
        except ConfigError as error:
            self.problem = str(error)
        finally:
            self._report()
            self._lock.release()

    def _look(self, path: Path) -> None:
        seen, file, waits = self._signature(), self._file, None
        if seen != self._seen:
            warn_unless_private(path, "keys file")
        if seen != self._seen or self._must_read:
            self._seen, self._must_read = seen, True
            try:
                file = self._named(wait_s=0.0)
            except FileBusy as error:
                file = self._parsed()
                file = file.named(self._incarnations_of(file, lambda name: ""))
                file, waits = (
                    file.without(file.unnamed),
                    f"new tenants of the file can't be served yet: {error}",
                )
        elif not self._ring.pending:
            return
        self._apply(file)
        self.problem, self._must_read = waits or self.problem, waits is not None

    def _report(self) -> None:
        """Log what isn't in force, once each."""
        found = {
            ("tenant", name): f"{reason} (tenant {shown(name)})"
            for name, reason in self._ring.pending.items()
        }
        if self.problem is not None:
            found["file", self.problem] = self.problem
        for what in found.keys() - self._logged:
            log.error("the keys file is not wholly in force: %s", found[what])
        self._logged = frozenset(found)

    def _parsed(self) -> KeysFile:
        assert self._path is not None
        return KeysFile.parse(read_document(self._path), self._place)

    def _named(self, wait_s: float, make: Callable[[str], str] = lambda name: new_incarnation()) -> KeysFile:
        """Return what the file says, with an incarnation of each tenant. Those that it lacks are written, if possible.

        ``make``: makes one by the tenant's name. A tenant that is there at the start has one that depends on its name
        alone: a file that is written anew between two starts, without incarnations, names the same tenants.

        Raises ConfigError, and FileBusy if that needs the lock and another process has it for ``wait_s``.
        """
        file = self._parsed()
        if not file.unnamed or self._path is None:
            return file
        try:
            with self._file_lock(wait_s):
                seen, document = self._signature(), read_document(self._path)
                file = KeysFile.parse(document, self._place)
                found = self._incarnations_of(file, make)
                if found:
                    self._write(with_incarnations(document, found), seen)
        except BlockingIOError as error:
            raise FileBusy(str(error.strerror)) from None
        except OSError as error:
            if not self._is_unwritable:
                log.warning(
                    "the keys file can't be written (%s): tenants have incarnations by name, so that one that is "
                    "removed and made again within %g s is taken for the old one",
                    error.strerror,
                    LOOK_EVERY_S,
                )
            self._is_unwritable = True
            found = self._incarnations_of(file, lasting_incarnation)
        return file.named(found)

    def _incarnations_of(
        self, file: KeysFile, make: Callable[[str], str] = lambda name: new_incarnation()
    ) -> dict[str, str]:
        """Return incarnations of the tenants without one: those in force, or else new ones. No two have the same."""
        taken = {entry.incarnation for entry in file.tenants.values()}
        found = {}
        for name in file.unnamed:
            known = self._ring.incarnation(name)
            found[name] = known if known not in taken else make(name)
        return found

    def _signature(self) -> tuple[int, int, int] | None:
        if self._path is None:
            return None
        with suppress(OSError):  # a missing file has no signature; the keyring stays in force
            status = self._path.stat()
            return status.st_ino, status.st_size, status.st_mtime_ns
        return None

    @property
    def _place(self) -> str:
        return "demo keys" if self._path is None else str(self._path)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Lock out all other changes: of this process, and of others with this file. Raises FileBusy, OSError."""
        until = self._clock() + LOCK_WAIT_S
        if not self._lock.acquire(timeout=LOCK_WAIT_S):
            raise FileBusy("another change of the keys has not ended; try again")
        try:
            with nullcontext() if self._path is None else self._file_lock(until - self._clock()):
                yield
        finally:
            self._lock.release()

    @contextmanager
    def _file_lock(self, wait_s: float) -> Iterator[None]:
        """Lock out other processes that change the file. Raises FileBusy, and OSError if there can be no lock."""
        assert self._path is not None
        target, until = self._path.resolve(), self._clock() + wait_s
        lock = target.with_name(f".{target.name}.lock")

        def may_wait() -> bool:
            return self._clock() < until and not self._is_closed.wait(_LOCK_AGAIN_S)

        try:
            with private_lock(lock, may_wait):
                yield
        except LockHeld:
            message = f"another process holds the lock {lock}; try again, and if this lasts, end that process"
            raise FileBusy(message) from None

    def _write(self, document: object, seen: tuple[int, int, int] | None) -> None:
        """Replace the file, unless somebody has edited it since ``seen``: an editor takes no lock. Raises OSError."""
        if self._path is not None:
            write_private(self._path, _as_json(document), lambda: self._signature() == seen)


def _new_key(principal: Principal) -> tuple[str, Key]:
    text = f"rk_{token_urlsafe(32)}"
    return text, Key.of(text, principal, datetime.now(UTC).isoformat(timespec="seconds"))


def _find(file: KeysFile, key_id: str) -> tuple[Entry, Key]:
    found = file.find(key_id)
    if found is None:
        raise UnknownKey(key_id)
    return found


def _differs(before: Entry | None, after: Entry | None) -> bool:
    """Whether the settings of a tenant differ, or the tenant itself."""
    if before is None or after is None:
        return before is not after
    return (before.settings, before.incarnation) != (after.settings, after.incarnation)


def _as_json(document: object) -> bytes:
    try:
        return json.dumps(document, indent=2, ensure_ascii=False).encode() + b"\n"
    except UnicodeEncodeError:  # text without a UTF-8 form, in a part of the file that can't be read
        return json.dumps(document, indent=2).encode() + b"\n"


def key_levels(keys: Callable[[], KeyStore]) -> list[tuple[str, str, Callable[[], float]]]:
    """Return the gauges of keys and tenants."""
    return [
        (
            "tenants_pending",
            "Tenants of the keys file of which not everything is in force here; the log says why",
            lambda: len(keys().ring.pending),
        ),
        (
            "keys_file_failing",
            "1 while the keys file can't be read, or something in it that belongs to no tenant; the log says why",
            lambda: keys().problem is not None,
        ),
    ]
