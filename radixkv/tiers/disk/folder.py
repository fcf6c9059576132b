"""The folder of a disk tier: who may open it, its sealed files, and the keys of tenants.

    lock           made first: a folder with other files and without it is not ours. flock; the id of the last opening
    master         the folder's key, sealed under a key derived from the fleet's secret, and a checksum; made last
    slab           headers and slots (``slab``)
    store          the id of the store that the fleet's purges come from, sealed under the folder's key
    generations/   for each purged tenant its generation, here and in the fleet, sealed under the folder's key
    keys/          for each tenant and generation a random root key, sealed under the folder's key

Names in ``generations`` and ``keys`` are keyed digests: no path contains what a client chose. The folder has mode 0700,
its files 0600. All are opened relative to the folder's descriptor, and never through a symbolic link.

**Keys.** secret → wrapping key → folder's key → root key of a (tenant, generation) → data keys, keys of locators, key
of identities. A root key is random. Without its file, all records of that generation can't be opened, found, or
compared with a guessed prompt, also with the secret. A new secret seals ``master`` again.

**What nobody can read any more** is removed by the next opening that may make a slab: without ``master`` everything,
else keys that aren't what was sealed. If ``master`` is damaged, its checksum tells that from another secret. Then the
folder is left as it is, because a copy of ``master`` would open it: ``inspection.forget`` removes it.

**Incarnations.** A root key's file also says of which of several tenants of the same name it is, one after the other
(``Tenant.incarnation``). Once a process has named another one, the key is neither used nor replaced before a purge. A
key that says nothing gets the name that comes first.

**Purge.** First the file of the root key is renamed to ``.gone``, so that no later opening takes it, whatever fails or
hangs next. Then the generation is raised durably, and the key is overwritten, synced and removed. If the generation
can't be written, the key is destroyed nevertheless: that needs no space, and gives some. What a crash cut off is
finished at the next opening. What a flash medium keeps of overwritten bytes is in ``docs/tiers.md``.
"""

from __future__ import annotations

import logging
import secrets
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

from radixkv.config import Namespace
from radixkv.errors import ConfigError, TierError, require_extra
from radixkv.files.private_folder import (
    GENERATIONS,
    GONE,
    ID_BYTES,
    KEYS,
    MASTER,
    MAX_SMALL_BYTES,
    STORE,
    PrivateFolder,
    is_tag,
)
from radixkv.files.system import Files
from radixkv.signing import checked_secret, derived, mac

require_extra("radixkv.tiers.disk.folder", "tiers")

from cryptography.exceptions import InvalidTag as InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

_Read = TypeVar("_Read")
_KEY_BYTES: Final = 32
_NONCE_BYTES: Final = 12
_TAG_BYTES: Final = 16
_FORMAT: Final = b"radixkv tier 1\0\0"
_GENERATIONS: Final = struct.Struct("<QQ")
_ROOT: Final = struct.Struct(f"<{ID_BYTES}sQ{_KEY_BYTES}s")
_MOST_FIRST: Final = 2**62
_MOST_PARTS: Final = 64
_MOST_TAGS: Final = 65_536

log = logging.getLogger("radixkv.tiers")


class TenantKeys:
    """The keys of a tenant in one generation. ``key_id``: 16 bytes that name them. Thread-safe.

    ``incarnation``: of the tenant, as it stands in the key's file; empty if that says nothing.
    """

    def __init__(self, key_id: bytes, generation: int, root: bytes, incarnation: str = "") -> None:
        self.key_id, self.generation, self.incarnation = key_id, generation, incarnation
        self.root = root
        self._identities = mac(root, "identities")
        self._data: dict[int, AESGCM] = {}
        self._located: dict[Namespace, blake2b] = {}

    def data_key(self, part: int) -> AESGCM:
        """Return AES-128-GCM with the data key of a part: each opening of a folder writes with a part of its own."""
        found = self._data.get(part)
        if found is None:
            if len(self._data) >= _MOST_PARTS:
                self._data = {}
            found = self._data[part] = AESGCM(mac(self.root, "data", part)[:16])
        return found

    def locator(self, namespace: Namespace) -> blake2b:
        """Return the keyed start of the locators of a namespace: 16 bytes each. Copy it, don't change it."""
        found = self._located.get(namespace)
        if found is None:
            if len(self._located) >= 4 * _MOST_PARTS:
                self._located = {}
            key = mac(self.root, "locators", namespace.framed())
            found = self._located[namespace] = blake2b(digest_size=ID_BYTES, key=key)
        return found

    def identity(self, packed: bytes) -> bytes:
        """Return the keyed digest of a packed identity: 32 bytes."""
        return blake2b(packed, digest_size=32, key=self._identities).digest()


class Generations(NamedTuple):
    """Numbers of a tenant that grow with its purges: ``here``, and ``fleet`` when one of the fleet was done here last.

    After 0, the first one here is random: no key of the past has a later one, also if the file was removed meanwhile.
    """

    here: int = 0
    fleet: int = 0


_NOT_PURGED: Final = Generations()


def _first() -> int:
    return 1 + secrets.randbelow(_MOST_FIRST)


class Master(NamedTuple):
    """The content of ``master``: the folder's key, the geometry of the slab, and the scheme of its records."""

    key: bytes
    num_slots: int
    record_bytes: int
    scheme: str


_MASTER: Final = struct.Struct(f"<{_KEY_BYTES}sQQ16s")
_OLD_MASTER_BYTES: Final = _MASTER.size - 16
"""Of a folder of an earlier release, which doesn't say the scheme of its records: that of its next opening."""


_CHECK_BYTES: Final = 8
_SEALED_BYTES: Final = len(_FORMAT) + _NONCE_BYTES + _TAG_BYTES
_UNCHECKED: Final = (_SEALED_BYTES + _MASTER.size, _SEALED_BYTES + _OLD_MASTER_BYTES)
"""Bytes of a ``master`` of earlier releases, which has no checksum."""


class DamagedMaster(ConfigError):
    """The folder's ``master`` isn't what was written: nothing in the folder can be read."""

    def __init__(self, path: str) -> None:
        problem = (
            f"{path!r}: its key file {MASTER!r} is damaged, so fleet_secret doesn't open it any more, whichever it is, "
            f"and no record there can be read. `radixkv disk reset {path}` shows what is left, and deletes it"
        )
        super().__init__("folder", path, "a folder with a whole key file", problem=problem)


def _checksum(sealed: bytes) -> bytes:
    return blake2b(sealed, digest_size=_CHECK_BYTES).digest()


def seal(key: bytes, name: str, content: bytes) -> bytes:
    """Return a small file's bytes: authenticated under ``key``, bound to its name."""
    nonce = secrets.token_bytes(_NONCE_BYTES)
    return _FORMAT + nonce + AESGCM(key).encrypt(nonce, content, _FORMAT + name.encode())


def unseal(key: bytes, name: str, sealed: bytes) -> bytes | None:
    """Return the content of a small file, or None if it isn't what ``seal`` made under this key and name."""
    start = len(_FORMAT) + _NONCE_BYTES
    if len(sealed) < start + _TAG_BYTES or sealed[: len(_FORMAT)] != _FORMAT:
        return None
    try:
        return AESGCM(key).decrypt(sealed[len(_FORMAT) : start], sealed[start:], _FORMAT + name.encode())
    except InvalidTag:
        return None


class TierFolder(PrivateFolder):
    """An opened and locked folder. One process at a time; ``close`` gives it back.

    - ``secrets_``: the fleet's secret, then previous ones.
    - ``num_slots``, ``record_bytes`` and ``scheme``: of the slab to make. None to open only what is there.
    - ``is_new``: the slab must be made, because there was none of this geometry and scheme. ``why_new``: why.
    - ``may_make``: it may be made if it is missing or damaged.

    Raises ConfigError for a folder that isn't ours, isn't private, is in use or has foreign files, and for other
    secrets than its own, or DamagedMaster if no secret opens it. It has changed nothing then. Raises OSError if the
    disk fails.
    """

    def __init__(
        self,
        path: Path | str,
        secrets_: Sequence[bytes],
        *,
        num_slots: int | None = None,
        record_bytes: int | None = None,
        scheme: str | None = None,
        files: Files | None = None,
    ) -> None:
        if not secrets_:
            raise ConfigError("fleet_secret", None, "the fleet's secret")
        self._wrapping = [derived(checked_secret(each), "tiers") for each in secrets_]
        self._changing: dict[str, threading.Lock] = {}
        """By tag: what hangs for one tenant holds up no other one."""
        self._tags: dict[str, str] = {}
        self._generations: dict[str, Generations | None] = {}
        """By tag. None: nobody knows them, as the file is damaged or a purge has failed."""
        self._keys: dict[str, TenantKeys] = {}
        self._incarnations: dict[str, str] = {}
        """By tag, those that ``set_incarnation`` was told."""
        self._unnoted: set[str] = set()
        """Tags of tenants whose generation ``noted`` wasn't told of."""
        self._is_current = True
        if num_slots is None and not Path(path).is_dir():
            raise ConfigError("folder", str(path), "a folder that a disk tier has used; there is none")
        super().__init__(path, files, signs=False)
        try:
            master = self._master()
            is_adopted = False
            if master is not None and not master.scheme and scheme is not None:
                master, is_adopted = master._replace(scheme=scheme), True
            self.may_make = num_slots is not None
            self.is_new = master is None or (
                num_slots is not None and master[1:] != (num_slots, record_bytes, scheme)
            )
            if self.is_new and (num_slots is None or record_bytes is None or scheme is None):
                allowed = f"a folder that a disk tier has used; this one has no key file {MASTER!r}"
                raise ConfigError("folder", self.path, allowed)
            self.why_new = _why_new(master, num_slots, record_bytes)
            for name in (GENERATIONS, KEYS):
                self.require_tags(name)
            self.sign()  # before anything is changed
            self._in_generations = self.subfolder(GENERATIONS)
            self._in_keys = self.subfolder(KEYS)
            if master is None or self.is_new:
                assert num_slots is not None and record_bytes is not None and scheme is not None
                key = secrets.token_bytes(_KEY_BYTES) if master is None else master.key
                self.master = Master(key, num_slots, record_bytes, scheme)
            else:
                self.master = master
            if not self.is_new:
                self._seal_again()
                if is_adopted:
                    self.finish()
            self.store: str | None = None
            """The id of the store that ``remember_store`` was told last; None before, empty if its file is damaged."""
            self.make_private(self.folder)
            self.make_private(self._in_generations, f"{GENERATIONS}/")
            self.make_private(self._in_keys, f"{KEYS}/")
            if master is None:
                self._remove_unreadable()
            else:
                self._read_tenants()
                self._finish_purges()
                self.store = self._read_store()
        except BaseException as error:
            self.close(is_refused=isinstance(error, ConfigError))
            raise

    def finish(self) -> None:
        """After the slab of a new folder was made: write ``master``, which makes the folder valid."""
        content = _MASTER.pack(*self.master[:3], self.master.scheme.encode())
        sealed = seal(self._wrapping[0], MASTER, content)
        self.write_small(self.folder, MASTER, sealed + _checksum(sealed))
        self.is_new = False

    def remember_store(self, store: str) -> None:
        """Write durably from which store the fleet's purges come. Raises OSError; then the former is remembered."""
        self.write_small(self.folder, STORE, seal(self.master.key, STORE, store.encode()))
        self.store = store

    # --- tenants: questions read memory only

    def generation(self, tenant: str) -> int:
        """Return the tenant's generation, 0 before its first purge. O(1).

        Raises TierError if its file is damaged: then nobody knows what was purged.
        """
        tag = self.tag(tenant)
        found = self._generations.get(tag, _NOT_PURGED)
        if found is None:
            raise TierError(
                f"the generation of a tenant can't be read ({GENERATIONS}/{tag}): purge the tenant"
            )
        return found.here

    def fleet_generation(self, tenant: str) -> int:
        """Return the fleet's generation of a tenant for which its keys were destroyed last; 0 if nobody knows. O(1)."""
        return (self._generations.get(self.tag(tenant), _NOT_PURGED) or _NOT_PURGED).fleet

    def keys(self, tenant: str) -> TenantKeys | None:
        """Return the keys of the tenant's generation, or None if there are none of its incarnation. O(1)."""
        tag = self.tag(tenant)
        found, incarnation = self._keys.get(tag), self._incarnations.get(tag)
        is_its = found is None or not incarnation or found.incarnation == incarnation
        return found if is_its else None

    def keys_of(self, tag: str) -> TenantKeys | None:
        """Return the keys of the tenant with this tag, of any incarnation, or None if there are none. O(1)."""
        return self._keys.get(tag)

    def set_incarnation(self, tenant: str, incarnation: str) -> None:
        """Use from now on keys of this incarnation of a tenant alone; empty: of any. O(1), no I/O."""
        self._incarnations[self.tag(tenant)] = incarnation

    def incarnation_of_keys(self, tenant: str) -> str | None:
        """Return the incarnation that a tenant's keys are of, empty if they don't say; None without keys. O(1)."""
        found = self._keys.get(self.tag(tenant))
        return None if found is None else found.incarnation

    def make_keys(self, tenant: str) -> TenantKeys:
        """Return the keys of the tenant's generation. To make them, or to note its incarnation, takes two or four
        syncs.

        Raises OSError. Raises TierError if nobody knows its generation, or the keys are of another incarnation: then
        purge the tenant.
        """
        tag = self.tag(tenant)
        found = self.keys(tenant)
        if found is not None:
            return found
        with self._lock_of(tag):
            found, incarnation = self._keys.get(tag), self._incarnations.get(tag, "")
            if found is None:
                generation = self.generation(tenant)
                root, key_id = secrets.token_bytes(_KEY_BYTES), self._key_id(tag, generation)
                made = TenantKeys(key_id, generation, root, incarnation)
                self.write_small(self._in_keys, key_id.hex(), self._sealed_root(tag, made, incarnation))
                found = self._keys[tag] = made
            elif incarnation and not found.incarnation:
                self.rewrite_secret(
                    self._in_keys, found.key_id.hex(), self._sealed_root(tag, found, incarnation)
                )
                found.incarnation = incarnation
            elif incarnation and found.incarnation != incarnation:
                raise TierError("the keys of a tenant are those of an earlier one with its name: purge it")
            return found

    def _sealed_root(self, tag: str, keys: TenantKeys, incarnation: str) -> bytes:
        content = _ROOT.pack(bytes.fromhex(tag), keys.generation, keys.root) + incarnation.encode()
        return seal(self.master.key, f"{KEYS}/{keys.key_id.hex()}", content)

    def raise_generation(self, tenant: str, fleet: int | None = None) -> bool:
        """Forget everything of a tenant, as ``raise_generation_of`` does."""
        return self.raise_generation_of(self.tag(tenant), fleet)

    def raise_generation_of(self, tag: str, fleet: int | None = None, *, above: int = 0) -> bool:
        """Forget everything of the tenant with this tag: raise its generation and destroy its keys, durably.

        ``fleet``: the generation that the fleet has. ``above``: the generation here gets greater than this. If the
        folder has both already, or without ``fleet`` if the tenant has no key, nothing changes and this returns False.
        Takes about four syncs.

        Raises OSError; then the tenant has no keys until the call is repeated. Another opening finds none, unless
        the disk did nothing at all.
        """
        return self._raise(tag, fleet, above)

    @property
    def id(self) -> bytes:
        """16 bytes that name this folder and every copy of it, and reveal nothing without its key."""
        return mac(self.master.key, "folder")[:ID_BYTES]

    # --- notes of generations, kept outside of the folder, so that an older copy of it shows

    def purged_tags(self) -> list[str]:
        """Return the tags of tenants that have keys, or a generation. O(tenants)."""
        return sorted({*self._keys, *self._generations})

    def generation_in(self, tag: str, note: bytes | None) -> int:
        """Return the generation here that a note tells; 0 if it is none of a folder with this key."""
        content = None if note is None else unseal(self.master.key, f"{GENERATIONS}/{tag}", note)
        return _GENERATIONS.unpack(content)[0] if content and len(content) == _GENERATIONS.size else 0

    def compare_note(self, tag: str, generation: int) -> bool:
        """Whether a tenant's generation here is older than a note's. If it is newer, it must be noted. O(1)."""
        here = (self._generations.get(tag, _NOT_PURGED) or _NOT_PURGED).here
        if here > generation:
            self._unnoted.add(tag)
        return here < generation

    def unnoted(self) -> dict[str, bytes]:
        """Return notes of all tenants whose generation isn't noted yet, by tag. O(these)."""
        known = [(tag, self._generations.get(tag)) for tag in list(self._unnoted)]
        return {tag: self._sealed_generations(tag, each) for tag, each in known if each is not None}

    @property
    def has_unnoted(self) -> bool:
        """Whether there may be such tenants. O(1)."""
        return bool(self._unnoted)

    def noted(self, notes: Mapping[str, bytes]) -> None:
        """Take that these notes are kept now. O(these)."""
        for tag, note in notes.items():
            if self.generation_in(tag, note) == (self._generations.get(tag) or _NOT_PURGED).here:
                self._unnoted.discard(tag)

    def all_keys(self) -> list[TenantKeys]:
        """Return the keys of all tenants."""
        return list(self._keys.values())

    def tags(self) -> set[str]:
        """Return the tags of tenants that have keys, or may have some that a call failed to destroy. O(tenants)."""
        return {*self._keys, *self._damaged_tags()}

    def is_known(self, tenant: str) -> bool:
        """Whether a tenant has keys, or may have some that a call failed to destroy. O(1)."""
        tag = self.tag(tenant)
        return tag in self._keys or self._generations.get(tag, _NOT_PURGED) is None

    def num_damaged(self) -> int:
        """Return how many generations and keys can't be read. O(tenants)."""
        return len(self._damaged_tags()) + len(self._damaged_keys())

    def repair(self) -> int:
        """Forget tenants whose generation is damaged, and destroy damaged keys. Returns how many.

        Raises OSError if a key can't be destroyed, after all others were.
        """
        tags = self._damaged_tags()
        for tag in tags:
            self._raise(tag, None)
        names = self._damaged_keys()
        failed = self.destroy_all(self._in_keys, names)
        if failed:
            raise failed[0]
        return len(tags) + len(names)

    def _damaged_tags(self) -> list[str]:
        return [tag for tag, generation in self._generations.copy().items() if generation is None]

    def _damaged_keys(self) -> list[str]:
        names = filter(is_tag, self.files.names(self._in_keys))
        return [name for name in names if self._unless_unreadable(self._opened_root, name) is None]

    def _raise(self, tag: str, fleet: int | None, above: int = 0) -> bool:
        with self._lock_of(tag):
            is_certain = self._generations.get(tag, _NOT_PURGED) is not None
            keys = self._keys.get(tag)
            if (
                fleet is None and keys is not None
            ):  # first: whatever fails next, no later opening takes the key
                del self._keys[tag]
                self._generations[tag] = None
                self._mark({keys.key_id.hex()})
            known = self._read_generations(tag)
            generation, before = known or _NOT_PURGED
            if known is not None and is_certain and fleet is not None and fleet <= before:
                return False
            names = {self._key_id(tag, each).hex() for each in {0, max(generation - 1, 0), generation}}
            if (
                known is not None
                and is_certain
                and fleet is None
                and keys is None
                and generation >= above
                and not self._has_any(names)
            ):
                return False
            self._keys.pop(tag, None)
            self._generations[tag] = None
            if not is_certain:
                names |= self._names_of(tag)
            self._mark(names)
            here = max(generation + 1 if generation else _first(), above + 1)
            raised = Generations(here, max(before, fleet or 0))
            try:
                self._write_generations(tag, raised)
            except OSError:  # a full disk has space again when the keys are removed
                self._destroy_keys(names)
                self._write_generations(tag, raised)
            self._destroy_keys(names)
            self._generations[tag] = raised
            self._unnoted.add(tag)
            return True

    def _lock_of(self, tag: str) -> threading.Lock:
        return self._changing.setdefault(tag, threading.Lock())

    def _has_any(self, names: set[str]) -> bool:
        """Whether there is a key in a file with one of these names. Raises OSError."""
        files = [name + end for name in names for end in ("", GONE)]
        return any(self.read_small(self._in_keys, each) is not None for each in files)

    def _mark(self, names: set[str]) -> None:
        for name in names:
            with suppress(OSError):  # it is absent, or is overwritten under its own name
                self.files.rename(name, name + GONE, self._in_keys)

    def _destroy_keys(self, names: set[str]) -> None:
        for name in names:
            self.destroy(self._in_keys, name + GONE)
            self.destroy(self._in_keys, name)

    def owners(self) -> dict[bytes, bytes]:
        """Return the tag of the tenant of each key, by the key's id. O(tenants)."""
        return {keys.key_id: bytes.fromhex(tag) for tag, keys in self._keys.items()}

    def tag(self, tenant: str) -> str:
        """Return 32 hex digits that name a tenant in this folder, and reveal nothing without its key."""
        found = self._tags.get(tenant)
        if found is None:
            if len(self._tags) >= _MOST_TAGS:
                self._tags = {}
            found = self._tags[tenant] = mac(self.master.key, "tenant", tenant)[:ID_BYTES].hex()
        return found

    # --- parts

    def _key_id(self, tag: str, generation: int) -> bytes:
        return mac(self.master.key, "root", tag, generation)[:ID_BYTES]

    def _read_generations(self, tag: str) -> Generations | None:
        """Return the generations in a tenant's file. None if they are damaged."""
        sealed = self.read_small(self._in_generations, tag)
        if sealed is None:
            return _NOT_PURGED
        content = unseal(self.master.key, f"{GENERATIONS}/{tag}", sealed)
        if content is None or len(content) != _GENERATIONS.size:
            return None
        return Generations(*_GENERATIONS.unpack(content))

    def _write_generations(self, tag: str, generations: Generations) -> None:
        self.write_small(self._in_generations, tag, self._sealed_generations(tag, generations))

    def _sealed_generations(self, tag: str, generations: Generations) -> bytes:
        return seal(self.master.key, f"{GENERATIONS}/{tag}", _GENERATIONS.pack(*generations))

    def _names_of(self, tag: str) -> set[str]:
        """Return the names of all keys that a tenant has, also of those to destroy. O(tenants)."""
        found = set()
        for file in self.files.names(self._in_keys):
            name = file.removesuffix(GONE)
            root = self._opened_root(name, file) if is_tag(name) else None
            if root is not None and root[0].hex() == tag:
                found.add(name)
        return found

    def _opened_root(self, name: str, file: str = "") -> tuple[bytes, int, bytes, str] | None:
        """Return what stands in a key's file, by default the one with the key's name: tag, generation, root key,
        incarnation.
        """
        sealed = self.read_small(self._in_keys, file or name)
        content = None if sealed is None else unseal(self.master.key, f"{KEYS}/{name}", sealed)
        if content is None or len(content) < _ROOT.size:
            return None
        tag, generation, root = _ROOT.unpack_from(content)
        return tag, generation, root, content[_ROOT.size :].decode("ascii", "replace")

    def _read_tenants(self) -> None:
        """Read the generations and keys of all tenants. Destroy keys of past generations, which a crash left.

        A damaged key is no key: its records can't be found. O(tenants), about 60 µs each.
        """
        for tag in filter(is_tag, self.files.names(self._in_generations)):
            known = self._unless_unreadable(self._read_generations, tag)
            self._generations[tag] = known
            if known is None:
                log.error(
                    "%s/%s is damaged: that tenant has no disk tier until it is purged", GENERATIONS, tag
                )
        for name in filter(is_tag, self.files.names(self._in_keys)):
            root = self._unless_unreadable(self._opened_root, name)
            if root is None and self._unless_unreadable(self._is_overwritten, name):
                self.destroy(self._in_keys, name)  # it was overwritten, and is to be removed
                continue
            if root is None:
                log.error("%s/%s is damaged: the records under that key are lost", KEYS, name)
                if self.may_make and self._unless_unreadable(self._is_whole, name) is False:
                    with suppress(OSError):  # else the next opening says it again
                        self.destroy(self._in_keys, name)
                continue
            tag, known = root[0].hex(), self._generations.get(root[0].hex(), _NOT_PURGED)
            if known is not None and known.here == root[1]:
                self._keys[tag] = TenantKeys(bytes.fromhex(name), *root[1:])
            elif known is not None:
                self.destroy(self._in_keys, name)

    def _finish_purges(self) -> None:
        """Go on with purges that were cut off: destroy the keys that they marked. Raises OSError if that fails."""
        for file in self.files.names(self._in_keys):
            name = file.removesuffix(GONE)
            if name == file or not is_tag(name):
                continue
            root = self._opened_root(name, file)
            known = None if root is None else self._generations.get(root[0].hex(), _NOT_PURGED)
            if root is not None and known is not None and known.here == root[1]:
                try:
                    self._raise(root[0].hex(), None)
                except OSError as error:
                    log.error("a purge that was cut off isn't finished: %s; purge that tenant again", error)
            self.destroy(self._in_keys, file)

    def _read_store(self) -> str | None:
        sealed = self.read_small(self.folder, STORE)
        if sealed is None:
            return None
        content = unseal(self.master.key, STORE, sealed)
        return "" if content is None else content.decode("ascii", "replace")

    def _unless_unreadable(self, read: Callable[[str], _Read], name: str) -> _Read | None:
        """Return what ``read`` returns, or None if the disk fails: one file harms its tenant alone."""
        try:
            return read(name)
        except OSError as error:
            log.error("a small file of a tenant can't be read: %s: %s", name, error.strerror)
            return None

    def _is_whole(self, name: str) -> bool:
        return self._opened_root(name) is not None

    def _remove_unreadable(self) -> None:
        """Remove what was sealed under a folder's key that is gone. What the disk keeps is harmless."""
        failed, num_files = list[OSError](), 0
        for folder in (self._in_keys, self._in_generations):
            names = self.files.names(folder)
            num_files += len(names)
            failed += self.destroy_all(folder, names)
        failed += self.destroy_all(self.folder, [STORE])
        if num_files:
            log.warning(
                "%s: its key file %r is missing, so nothing there can be read any more; %d old files are removed",
                self.path,
                MASTER,
                num_files - len(failed),
            )
        for error in failed[:1]:
            log.warning("%s: %d old files can't be removed: %s", self.path, len(failed), error)

    def _is_overwritten(self, name: str) -> bool:
        content = self.read_small(self._in_keys, name)
        return bool(content) and not any(content or b"")

    # --- opening

    def _master(self) -> Master | None:
        """Return the master that the folder has; None if the folder was never finished. Raises ConfigError."""
        file = self.read_small(self.folder, MASTER)
        if file is None:
            return None
        is_checked = _is_checked(file)
        opened = _unsealed_master(file, self._wrapping)
        if opened is not None:
            number, master = opened
            self._is_current = number == 0
            return master
        if not is_checked and not (len(file) in _UNCHECKED and file.startswith(_FORMAT)):
            raise DamagedMaster(self.path)
        allowed = "the secret under which the folder was sealed, or that one as a previous secret"
        problem = f"doesn't open {self.path}; allowed: {allowed}"
        if not is_checked:
            problem += f". If it is that one, the key file {MASTER!r} is damaged: see `radixkv disk reset`"
        raise ConfigError("fleet_secret", "…", allowed, problem=problem)

    def _seal_again(self) -> None:
        """After a rotation: seal ``master`` under the current secret."""
        if not self._is_current:
            self.finish()
            log.warning("%s is sealed under the current secret now: it needs no previous one", self.path)


def master_in(path: Path | str, secrets_: Sequence[bytes]) -> Master | None:
    """Return the master of a folder, which another process may use; None without one that these secrets open.

    Changes nothing. Raises OSError.
    """
    try:
        with (Path(path) / MASTER).open("rb") as file:
            content = file.read(MAX_SMALL_BYTES)
    except FileNotFoundError:
        return None
    opened = _unsealed_master(content, [derived(checked_secret(each), "tiers") for each in secrets_])
    return None if opened is None else opened[1]


def _is_checked(file: bytes) -> bool:
    return file[-_CHECK_BYTES:] == _checksum(file[:-_CHECK_BYTES])


def _unsealed_master(file: bytes, keys: Sequence[bytes]) -> tuple[int, Master] | None:
    """Return which of the keys opens a file, and what it has; None if none does."""
    sealed = file[:-_CHECK_BYTES] if _is_checked(file) else file
    for number, key in enumerate(keys):
        content = unseal(key, MASTER, sealed)
        if content is not None and len(content) in (_MASTER.size, _OLD_MASTER_BYTES):
            folder_key, *size, scheme = _MASTER.unpack(content.ljust(_MASTER.size, b"\0"))
            return number, Master(folder_key, size[0], size[1], scheme.rstrip(b"\0").decode())
    return None


def _why_new(master: Master | None, num_slots: int | None, record_bytes: int | None) -> str:
    """Return why the slab that a folder has isn't the one that is wanted."""
    if master is None:
        return f"its key file {MASTER!r} is missing"
    if master.record_bytes != record_bytes:
        now = f"{record_bytes} bytes, not {master.record_bytes}"
        return f"a record has {now}: another block size, dtype or model"
    if master.num_slots != num_slots:
        return f"the disk has another size: {num_slots} records, not {master.num_slots}"
    return "it holds records of another tier_dtype, or is damaged"
