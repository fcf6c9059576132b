"""The slab: one preallocated file with all records of a disk tier.

    [0, 4096)                 magic and geometry
    [4096, slots_at)          one header of 128 bytes for each slot
    [slots_at, end)           slots of whole pages: the ciphertext of a record

Headers are one contiguous table, because it is read in one go at a start: 12.8 MB for 100,000 slots. The same table is
in memory. Only that counts while the process runs: bytes that were exchanged for others, or for older ones, don't fit
the tag in memory.

A record is *sealed* by its header, written last. Nothing is synced for one slot. So after a crash a header may be there
without its payload, or torn. A checksum finds torn headers; the tag of AES-GCM finds the rest when the record is read.
The checksum is not secret: who forges a header gets a record that doesn't open.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
import struct
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from radixkv.errors import ConfigError
from radixkv.files.private_folder import SLAB
from radixkv.files.system import PAGE_BYTES, Files, aligned, read_exactly, round_up, write_exactly
from radixkv.tiers.disk.folder import TierFolder
from radixkv.uncopied import refuse_copies

HEADER: Final = np.dtype(
    [
        ("magic", "<u4"),
        ("payload_bytes", "<u4"),
        ("sequence", "<u8"),
        ("locator", "V16"),
        ("key_id", "V16"),
        ("part", "<u8"),
        ("nonce", "V12"),
        ("origin", "<u4"),
        ("tag", "V16"),
        ("identity", "V32"),
        ("check", "<u8"),
    ]
)
"""A header. ``sequence`` counts the records that the folder has sealed. ``origin``: see Header."""

PACKED: Final = struct.Struct("<IIQ16s16sQ12sI16s32sQ")
HEADER_BYTES: Final = PACKED.size
MAGIC: Final = 0x316B7652
AUTHENTICATED_BYTES: Final = 72
"""The first bytes of a header are associated data of its payload: all before the tag."""

_GEOMETRY: Final = struct.Struct("<16sQQ")
_SLAB_MAGIC: Final = b"radixkv slab 1\0\0"
TAG_BYTES: Final = 16
MAX_SEQUENCE: Final = 2**62
MAX_SLOTS: Final = 2**31
MAX_RECORD_BYTES: Final = 2**31
_NUM_WORDS: Final = HEADER_BYTES // 8 - 1
_FACTORS: Final = (np.arange(1, _NUM_WORDS + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)) | np.uint64(
    1
)
_FACTORS_OF_ONE: Final[list[int]] = _FACTORS.tolist()
_WORDS: Final = struct.Struct(f"<{_NUM_WORDS}Q")
_MASK: Final = 2**64 - 1
_MAGIC_BYTES: Final = 4

Headers = NDArray[np.void]

log = logging.getLogger("radixkv.tiers")


class Header(NamedTuple):
    """The fields of a header but its magic and check; see HEADER.

    ``origin``: 32 bits of a digest of what made the record. It tells records of others when a folder is opened; the
    identity decides. 0 in records of versions that didn't note it.
    """

    payload_bytes: int
    sequence: int
    locator: bytes
    key_id: bytes
    part: int
    nonce: bytes
    tag: bytes
    identity: bytes
    origin: int = 0

    def packed(self) -> bytes:
        """Return its 128 bytes. About 10 µs."""
        content = PACKED.pack(
            MAGIC, *self[:3], self.key_id, self.part, self.nonce, self.origin, self.tag, self.identity, 0
        )
        return content[:-8] + _check(content).to_bytes(8, "little")

    def associated(self, identity: bytes) -> bytes:
        """Return the associated data of the payload of a record with this identity."""
        return self.packed_start() + identity

    def packed_start(self) -> bytes:
        """Return the authenticated bytes."""
        fields = (MAGIC, *self[:3], self.key_id, self.part, self.nonce, self.origin, b"", b"", 0)
        return PACKED.pack(*fields)[:AUTHENTICATED_BYTES]


def checks(headers: Headers) -> NDArray[np.uint64]:
    """Return the checksum of each header: uint64. About 0.1 µs each."""
    words = np.ascontiguousarray(headers).view(np.uint64).reshape(-1, HEADER_BYTES // 8)[:, :_NUM_WORDS]
    mixed = (words ^ (words >> np.uint64(29))) * _FACTORS
    found: NDArray[np.uint64] = np.bitwise_xor.reduce(mixed ^ (mixed >> np.uint64(32)), axis=1)
    return found


def _check(header: bytes) -> int:
    """Return the checksum of one header, as ``checks`` does of many."""
    found = 0
    for word, factor in zip(_WORDS.unpack_from(header), _FACTORS_OF_ONE, strict=True):
        mixed = (word ^ (word >> 29)) * factor & _MASK
        found ^= mixed ^ (mixed >> 32)
    return found


def is_sealed(headers: Headers, record_bytes: int) -> NDArray[np.bool_]:
    """Return which headers are whole: their magic, size, sequence and checksum are right."""
    sizes = headers["payload_bytes"]
    is_formed = (headers["magic"] == MAGIC) & (sizes > 0) & (sizes <= record_bytes)
    is_formed &= headers["sequence"] < MAX_SEQUENCE
    found = np.zeros(len(headers), np.bool_)
    at = np.flatnonzero(is_formed)
    found[at] = checks(headers[at]) == headers["check"][at]
    return found


class Slab:
    """The slab of an opened folder. Its methods do I/O in the calling thread, and raise OSError.

    ``headers``: the table in memory, ``[num_slots]`` of HEADER. Only the caller's lock guards it.
    ``is_direct``: whether slots bypass the page cache.
    ``disk_bytes``: the size that was asked for, which errors show; None: that of the file.
    """

    def __init__(self, folder: TierFolder, *, direct: bool = True, disk_bytes: int | None = None) -> None:
        self._files: Files = folder.files
        self.num_slots, self.record_bytes = folder.master.num_slots, folder.master.record_bytes
        self.slot_bytes = round_up(self.record_bytes)
        self.slots_at = PAGE_BYTES + round_up(self.num_slots * HEADER_BYTES)
        self.num_bytes = self.slots_at + self.num_slots * self.slot_bytes
        self._disk_bytes = disk_bytes or self.num_bytes
        try:
            self._table = memoryview(bytearray(self.slots_at - PAGE_BYTES))
        except MemoryError:
            allowed = f"a size whose headers fit in memory, {HEADER_BYTES} bytes a record"
            raise ConfigError("disk_bytes", self._disk_bytes, allowed) from None
        if folder.is_new or (folder.may_make and not self._fits(folder)):
            self._make(folder)
        elif not self._fits(folder):
            allowed = "a slab of the size that its folder says; `radixkv disk reset` removes a damaged one"
            raise ConfigError("folder", folder.path, allowed)
        self._descriptor = folder.open_file(SLAB, os.O_RDWR)
        self._direct = self._open_direct(folder) if direct else self._descriptor
        self.headers: Headers = np.frombuffer(self._table, HEADER, self.num_slots)
        if folder.is_new:
            folder.finish()
        else:
            read_exactly(self._files, self._descriptor, self._table, PAGE_BYTES)

    @property
    def is_direct(self) -> bool:
        """Whether slots bypass the page cache (O_DIRECT)."""
        return self._direct != self._descriptor

    def header(self, slot: int) -> Header:
        """Return the header of a slot, from memory. About 1 µs."""
        fields = PACKED.unpack_from(self._table, slot * HEADER_BYTES)
        _, size, sequence, locator, key_id, part, nonce, origin, tag, identity, _ = fields
        return Header(size, sequence, locator, key_id, part, nonce, tag, identity, origin)

    def is_clear(self, slot: int) -> bool:
        """Whether a slot has no header in memory."""
        start = slot * HEADER_BYTES
        return not any(self._table[start : start + _MAGIC_BYTES])

    def set_header(self, slot: int, content: bytes) -> None:
        """Change the header of a slot in memory."""
        self._table[slot * HEADER_BYTES : (slot + 1) * HEADER_BYTES] = content

    def write_header(self, slot: int, content: bytes) -> None:
        """Write the header of one slot to the file."""
        at = PAGE_BYTES + slot * HEADER_BYTES
        write_exactly(self._files, self._descriptor, memoryview(content), at)

    def write_headers(self, slots: list[int]) -> None:
        """Write the headers of these slots as they are in memory, with all between them. One write; O(the range)."""
        start, stop = min(slots) * HEADER_BYTES, (max(slots) + 1) * HEADER_BYTES
        write_exactly(self._files, self._descriptor, self._table[start:stop], PAGE_BYTES + start)

    def read_slot(self, slot: int, into: memoryview, num_bytes: int) -> None:
        """Read the first bytes of a slot into aligned memory, in whole pages."""
        part = into[: round_up(num_bytes)]
        try:
            read_exactly(self._files, self._direct, part, self._offset(slot))
        except OSError as error:
            if not self._without_direct(error):
                raise
            read_exactly(self._files, self._descriptor, part, self._offset(slot))

    def write_slot(self, slot: int, content: memoryview, num_bytes: int) -> None:
        """Write the first bytes of a slot from aligned memory, in whole pages."""
        part = content[: round_up(num_bytes)]
        try:
            write_exactly(self._files, self._direct, part, self._offset(slot))
        except OSError as error:
            if not self._without_direct(error):
                raise
            write_exactly(self._files, self._descriptor, part, self._offset(slot))

    def sync(self) -> None:
        """Wait until all that was written is on the medium."""
        self._files.sync(self._descriptor)

    def _offset(self, slot: int) -> int:
        return self.slots_at + slot * self.slot_bytes

    def _make(self, folder: TierFolder) -> None:
        """Make the file. Raises ConfigError if there is no space for it."""
        if SLAB in self._files.names(folder.folder):
            log.warning(
                "%s: a new slab of %d records of %d bytes replaces the old one (%s): all its records are lost",
                folder.path,
                self.num_slots,
                self.record_bytes,
                folder.why_new,
            )
        new = SLAB + ".new"
        with folder.new_file(folder.folder, new) as descriptor:
            free = self._files.free_bytes(folder.folder)
            if free < self.num_bytes:
                allowed = f"a size for which {folder.path} has space: {free:,} bytes are free"
                raise ConfigError("disk_bytes", self._disk_bytes, allowed)
            try:
                self._files.allocate(descriptor, self.num_bytes)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
                    raise
                allowed = f"a size for which {folder.path} has space ({error.strerror})"
                raise ConfigError("disk_bytes", self._disk_bytes, allowed) from None
            head = _GEOMETRY.pack(_SLAB_MAGIC, self.num_slots, self.record_bytes)
            write_exactly(self._files, descriptor, memoryview(head), 0)
            self._files.sync(descriptor)
        self._files.rename(new, SLAB, folder.folder)
        self._files.sync_folder(folder.folder)

    def _fits(self, folder: TierFolder) -> bool:
        """Whether the file has the geometry that the folder says."""
        try:
            descriptor = self._files.open(SLAB, os.O_RDONLY, folder.folder)
        except FileNotFoundError:
            return False
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.ENXIO):
                raise
            raise ConfigError("folder", folder.path, f"one whose {SLAB!r} is a regular file") from None
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise ConfigError("folder", folder.path, f"one whose {SLAB!r} is a regular file")
            head = memoryview(bytearray(_GEOMETRY.size))
            is_whole = os.fstat(descriptor).st_size == self.num_bytes
            if is_whole:
                read_exactly(self._files, descriptor, head, 0)
            return is_whole and _GEOMETRY.unpack(head) == (_SLAB_MAGIC, self.num_slots, self.record_bytes)
        finally:
            self._files.close(descriptor)

    def _open_direct(self, folder: TierFolder) -> int:
        try:
            return folder.open_file(SLAB, os.O_RDWR | os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return self._descriptor

    def _without_direct(self, error: OSError) -> bool:
        """Whether the file system turned out not to do O_DIRECT, and the page cache is used from now on."""
        if error.errno != errno.EINVAL or not self.is_direct:
            return False
        log.warning("the file system refuses O_DIRECT; the page cache is used")
        self._direct = self._descriptor
        return True


refuse_copies(Slab, "it holds an open file, and a copy would close it twice. Pass it on")


def slots_in(disk_bytes: int, record_bytes: int) -> int:
    """Return how many records of so many bytes fit in a disk of this size."""
    return (disk_bytes - 2 * PAGE_BYTES) // (round_up(record_bytes) + HEADER_BYTES)


def slot_buffer(record_bytes: int) -> memoryview:
    """Return aligned memory for a slot's ciphertext and its tag."""
    return aligned(buffer_bytes(record_bytes))


def buffer_bytes(record_bytes: int) -> int:
    """Bytes of memory that a slot's I/O needs: its pages, and a page for the tag."""
    return round_up(record_bytes) + PAGE_BYTES
