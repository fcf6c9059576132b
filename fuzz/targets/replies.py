"""Redis' replies and stream entries: any content of the store is parsed in its format, or refused with WireError."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fuzz.targets.material import Material
from radixkv.coordination.keys import DIGEST_BYTES, NAMESPACE_BYTES
from radixkv.coordination.store import wire

_ENTRY = (b"o", b"n", b"p", b"b", b"e", b"s")


def one(data: bytes) -> None:
    """Parse one reply as one of the kinds."""
    material = Material(data)
    (_entry, _registration, _load, _snapshot, _job)[material.byte() % 5](material)


def _read(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except wire.WireError:
        return None


def _values(material: Material, count: int) -> list[bytes | None]:
    return [None if material.byte() == 255 else material.chunk() for _ in range(count)]


def _entry(material: Material) -> None:
    fields = {
        name: value for name, value in zip(_ENTRY, _values(material, 6), strict=True) if value is not None
    }
    entry = _read(lambda: wire.parse_entry(fields, material.byte(), material.byte()))
    if entry is not None:
        assert len(entry.digests) % DIGEST_BYTES == 0
        assert len(entry.namespace) in (0, NAMESPACE_BYTES) and entry.op in ("store", "remove", "clear")


def _registration(material: Material) -> None:
    values = _values(material, len(wire.REGISTRATION_FIELDS))
    found = _read(lambda: wire.parse_registration("replica", values))
    if found is not None:
        assert 0 <= found.epoch < 10**15 and len(found.nonce.encode()) <= 256


def _load(material: Material) -> None:
    values = _values(material, len(wire.LOAD_FIELDS))
    _read(lambda: wire.parse_load(values))


def _snapshot(material: Material) -> None:
    """Half of the inputs get their right checksum, so that their content is parsed."""
    is_right = material.byte() % 2
    chunks = [material.rest()]
    checksum = wire.xxh3_128_hexdigest(chunks[0]) if is_right else "0" * 32
    groups = _read(lambda: wire.unpack_snapshot(chunks, checksum))
    for namespace, digests in groups or ():
        assert len(namespace) == NAMESPACE_BYTES and len(digests) % DIGEST_BYTES == 0


def _job(material: Material) -> None:
    names = [b"tenant", b"namespace", b"num_tokens", b"part:a", b"part:" + material.chunk(), material.chunk()]
    values = _values(material, len(names))
    fields = {name: value for name, value in zip(names, values, strict=True) if value is not None}
    _read(lambda: wire.parse_job("job", fields))
