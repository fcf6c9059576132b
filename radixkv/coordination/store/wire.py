"""Formats of the records in the store: registrations, log entries, snapshots, parts of jobs. Bytes in, bytes out.

The bytes read here come from other writers and may be anything. A record without this version's format raises
WireError, and sizes are bounded before memory is allocated. No store client is used here.
"""

from __future__ import annotations

import re
import secrets
import struct
import time
import zlib
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Final, Literal, NamedTuple

from xxhash import xxh3_128_hexdigest

from radixkv.config import MAX_WEIGHTS
from radixkv.coordination.keys import DIGEST_BYTES, NAMESPACE_BYTES
from radixkv.coordination.values import (
    MAX_AMOUNT,
    MAX_CLOCK_SKEW_S,
    FleetPin,
    JobPart,
    JobState,
    Load,
    WarmJob,
    Writer,
)

DIGESTS_AN_ENTRY: Final = 64
SNAPSHOT_CHUNK_BYTES = 512 << 10
MAX_SNAPSHOT_CHUNKS = 256
MAX_SNAPSHOT_DIGESTS = 4_000_000
"""A replica with more digests publishes only this many, so hints may be missing."""

TIERS = ("device", "host", "disk")
"""The tiers of a segment's KV, fastest first. The fastest one is published."""
OPS = ("store", "remove", "clear", "tier")

PROCESS_DIGITS = 16
"""How many digits of a nonce identify the process."""
_RANDOM_BYTES = 8

_MAX_SNAPSHOT_BYTES = MAX_SNAPSHOT_DIGESTS * (DIGEST_BYTES + NAMESPACE_BYTES + 5)
_MAGIC = b"RKS2"
_GROUP = struct.Struct(f"<{NAMESPACE_BYTES}sBI")
_OPS = frozenset(OPS)
_JOB_STATES: dict[str, JobState] = {
    "queued": "queued",
    "running": "running",
    "done": "done",
    "failed": "failed",
    "lost": "lost",
}
_NUMBER = re.compile(rb"[0-9]{1,15}")
_VERSION = re.compile(rb"[0-9]{1,16}")
_CODE = re.compile(r"[a-z_]{0,64}")
_MAX_FIELD = 256
_MAX_JOB_FIELDS = 1100


class WireError(ValueError):
    """Bytes in the store don't have this version's format. Handled here: their writer is left out."""


class Entry(NamedTuple):
    """One entry of a log.

    - ``op``: one of ``OPS``. ``store`` puts the digests into ``tier``; ``tier`` moves those that are held there.
    - ``digests``: up to 64, packed, each the child of the one before.
    - ``parent``: the digest before the first of them; empty at a prefix's start.

    A ``clear`` without a namespace means all namespaces.
    """

    op: str
    namespace: bytes
    parent: bytes = b""
    digests: bytes = b""
    tier: str = "device"


@dataclass(frozen=True, slots=True)
class Registration:
    """A replica's registration."""

    replica_id: str
    epoch: int
    nonce: str
    address: str
    """Empty if it has none."""
    fingerprint: str
    block_size: int
    """0 for a reader that has no blocks; it is compatible with any size."""
    wire_version: int
    canary: str
    last_seq: int = 0
    proof: str = ""
    lease_ms: int = 0
    """From the last beat; 0 before the first."""
    beats: int = 0
    """The number of the last beat: only a new number extends the lease. 0 before the first beat, and after leaving."""
    replaced_ms: int = 0
    """How long another process that had the id before may think that its lease runs; from the last beat."""
    stated_ms: int = 0
    """When the last beat was sent: milliseconds since 1970 by the replica's own clock."""
    weights: int = 0
    """Version of the weights that it serves."""
    draining: str = ""
    """See ``Proofs.of_drain``; empty until it drains."""

    @property
    def writer(self) -> Writer:
        """The signer of its writes."""
        return Writer(self.replica_id, self.epoch, self.nonce)

    @property
    def process(self) -> str:
        """The part of the nonce that a process keeps when it registers again."""
        return self.nonce[:PROCESS_DIGITS]

    def difference(self, other: Registration) -> tuple[str, object, object] | None:
        """Return the setting that keeps the two out of one fleet, with both values, or None."""
        if self.wire_version != other.wire_version:
            return "wire_version", self.wire_version, other.wire_version
        if self.canary != other.canary:
            return "fleet_secret", f"(canary {self.canary[:8]})", f"(canary {other.canary[:8]})"
        if self.block_size and self.block_size != other.block_size:
            return "block_size", self.block_size, other.block_size
        return None


REGISTRATION_FIELDS = (
    "epoch",
    "nonce",
    "address",
    "fingerprint",
    "block_size",
    "wire",
    "canary",
    "weights",
    "last_seq",
    "proof",
    "lease_ms",
    "beats",
    "replaced_ms",
    "stated_ms",
    "draining",
)
MAX_LEASE_MS = 3_600_000
"""No replica uses a longer lease."""


def registration_fields(registration: Registration) -> dict[str, str]:
    """Return the fields that a replica writes when it registers and with each beat; the scripts write the rest."""
    return {
        "nonce": registration.nonce,
        "address": registration.address,
        "fingerprint": registration.fingerprint,
        "block_size": str(registration.block_size),
        "wire": str(registration.wire_version),
        "canary": registration.canary,
        "weights": str(registration.weights),
        "tiers": "device",
    }


def beat_fields(registration: Registration) -> dict[str, str]:
    """Return a beat's fields: all that is signed, so that the beat restores any overwritten field."""
    return registration_fields(registration) | {
        "lease_ms": str(registration.lease_ms),
        "beats": str(registration.beats),
        "stated_ms": str(registration.stated_ms),
        "proof": registration.proof,
        "draining": registration.draining,
    }


def parse_registration(replica_id: str, values: Iterable[bytes | None]) -> Registration:
    """Parse the values of ``REGISTRATION_FIELDS``; fields that come with the first beat may be absent."""
    found = dict(zip(REGISTRATION_FIELDS, values, strict=True))
    lease_ms = number(found["lease_ms"] or b"0")
    if lease_ms > MAX_LEASE_MS:
        raise WireError(f"a lease of {lease_ms} ms")
    return Registration(
        replica_id=replica_id,
        epoch=number(found["epoch"]),
        nonce=_text(found["nonce"]),
        address=_text(found["address"]),
        fingerprint=_text(found["fingerprint"]),
        block_size=number(found["block_size"]),
        wire_version=number(found["wire"]),
        canary=_text(found["canary"]),
        last_seq=number(found["last_seq"]),
        proof=_text(found["proof"] or b""),
        lease_ms=lease_ms,
        beats=number(found["beats"] or b"0"),
        replaced_ms=_bounded(found["replaced_ms"], MAX_LEASE_MS),
        stated_ms=number(found["stated_ms"] or b"0"),
        weights=_weights(found["weights"]),
        draining=_text(found["draining"] or b""),
    )


LOAD_FIELDS = ("queued_prefill_tokens", "decode_blocks", "resident_blocks", "queued_cold_tokens")


def parse_load(values: Iterable[bytes | None]) -> Load:
    """Parse the values of ``LOAD_FIELDS``; absent or malformed ones are 0, because a load is a hint."""
    queued, decode, resident, cold = (_bounded(value, MAX_AMOUNT) for value in values)
    return Load(queued, decode, resident, min(cold, queued))


def parse_entry(fields: Mapping[bytes, bytes], epoch: int, seq: int) -> Entry:
    """Parse the entry at ``epoch-seq`` of a stream."""
    try:
        op, namespace, parent, digests, tier = (fields[name] for name in (b"o", b"n", b"p", b"b", b"t"))
        stated = number(fields[b"e"]), number(fields[b"s"])
    except KeyError as missing:
        raise WireError(f"an entry without field {missing}") from None
    entry = Entry(op.decode("ascii", "replace"), namespace, parent, digests, tier.decode("ascii", "replace"))
    whole = len(digests) % DIGEST_BYTES == 0 and len(digests) <= DIGESTS_AN_ENTRY * DIGEST_BYTES
    named = len(namespace) == NAMESPACE_BYTES or (not namespace and not digests)
    known = entry.op in _OPS and entry.tier in TIERS and len(parent) in (0, DIGEST_BYTES)
    if not (known and whole and named) or stated != (epoch, seq):
        raise WireError(f"a malformed entry at {epoch}-{seq}")
    return entry


_CODES = {(op, tier): op[0].encode() + bytes([at]) for op in OPS for at, tier in enumerate(TIERS)}


def pack_entries(entries: Iterable[Entry]) -> bytes:
    """Pack entries as one argument of a script: op's first letter, tier's index, three lengths, then the fields.

    The lengths are bytes: of the namespace, of the parent, and of the digests in units of one digest. Packing here and
    unpacking in the script costs the replica a fifth of the cost of five arguments an entry.
    """
    parts: list[bytes] = []
    for op, namespace, parent, digests, tier in entries:
        parts += _head(op, tier, len(namespace), len(parent), len(digests)), namespace, parent, digests
    return b"".join(parts)


@lru_cache(maxsize=1_024)
def _head(op: str, tier: str, *lengths: int) -> bytes:
    namespace, parent, digests = lengths
    return _CODES[op, tier] + bytes((namespace, parent, digests // DIGEST_BYTES))


class Snapshot(NamedTuple):
    """Holdings as chunks, with the count and checksum that show a reader whether they are complete."""

    chunks: list[bytes]
    checksum: str


Groups = list[tuple[bytes, str, bytes]]
"""``(namespace digest, tier, packed digests)``: holdings in a snapshot."""


def pack_snapshot(groups: Iterable[tuple[bytes, str, AbstractSet[bytes]]]) -> Snapshot:
    """Pack ``(namespace digest, tier, digests)`` groups into chunks, in zlib's format. O(digests).

    Level 0: keyed digests are random bytes, so compression would cost 30 ms a MB and gain nothing.
    """
    room = MAX_SNAPSHOT_DIGESTS
    parts = [_MAGIC]
    for namespace, tier, held in groups:
        digests = held if len(held) <= room else list(islice(held, room))
        room -= len(digests)
        if digests:
            parts.append(_GROUP.pack(namespace, TIERS.index(tier), len(digests)) + b"".join(digests))
    data = zlib.compress(b"".join(parts), 0)
    chunks = [data[at : at + SNAPSHOT_CHUNK_BYTES] for at in range(0, len(data), SNAPSHOT_CHUNK_BYTES)]
    return Snapshot(chunks, xxh3_128_hexdigest(data))


def unpack_snapshot(chunks: Iterable[bytes], checksum: str) -> Groups:
    """Return the groups of a snapshot. Raises WireError if it is torn, malformed or too large."""
    data = b"".join(chunks)
    if xxh3_128_hexdigest(data) != checksum:
        raise WireError("a snapshot that doesn't have its checksum")
    inflater = zlib.decompressobj()
    try:
        body = inflater.decompress(data, _MAX_SNAPSHOT_BYTES)
    except zlib.error as error:
        raise WireError(f"a snapshot that can't be inflated: {error}") from None
    if not inflater.eof or not body.startswith(_MAGIC):
        raise WireError("a snapshot of another form, or too large")
    return _groups(body)


def _groups(body: bytes) -> Groups:
    groups: Groups = []
    at = len(_MAGIC)
    while at < len(body):
        if at + _GROUP.size > len(body):
            raise WireError("a snapshot that ends inside a group")
        namespace, tier, count = _GROUP.unpack_from(body, at)
        at += _GROUP.size
        end = at + count * DIGEST_BYTES
        if end > len(body) or tier >= len(TIERS):
            raise WireError("a snapshot that ends inside a group, or of an unknown tier")
        groups.append((namespace, TIERS[tier], body[at:end]))
        at = end
    return groups


PART_PREFIX = "part:"


def job_fields(job: WarmJob) -> dict[str, str]:
    """Return a job as fields of a hash."""
    fields = {
        "tenant": job.tenant_digest.hex(),
        "namespace": job.namespace_digest.hex(),
        "num_tokens": str(job.num_tokens),
        "wanted": str(job.num_wanted),
        "left_out": str(job.num_left_out),
        "request": job.request,
        "owner": format_owner(job.owner),
    }
    return fields | {PART_PREFIX + part.replica_id: format_part(part) for part in job.parts}


def format_owner(owner: Writer) -> str:
    """Return ``epoch nonce replica``."""
    return f"{owner.epoch} {owner.nonce} {owner.replica_id}"


def _parse_owner(value: bytes | None) -> Writer:
    words = _text(value).split(" ")
    if len(words) != 3:
        raise WireError("a malformed owner of a job")
    return Writer(words[2], number(words[0].encode()), words[1])


def format_part(part: JobPart) -> str:
    """Return ``epoch nonce state done cached ms error``."""
    numbers = f"{part.num_tokens_done} {part.num_tokens_cached} {part.ms}"
    return f"{part.epoch} {part.nonce} {part.state} {numbers} {part.error}"


def parse_job(job_id: str, fields: Mapping[bytes, bytes]) -> WarmJob:
    """Parse a job from all fields of its hash."""
    try:
        tenant, namespace = (bytes.fromhex(_text(fields[name])) for name in (b"tenant", b"namespace"))
        num_tokens, num_wanted = number(fields[b"num_tokens"]), number(fields[b"wanted"])
        num_left_out, request = number(fields[b"left_out"]), _text(fields[b"request"])
        owner = _parse_owner(fields[b"owner"])
    except (KeyError, ValueError):
        raise WireError(f"a malformed job {job_id}") from None
    prefix = PART_PREFIX.encode()
    if len(fields) > _MAX_JOB_FIELDS:
        raise WireError(f"a job {job_id} of {len(fields)} fields")
    named = sorted((name, value) for name, value in fields.items() if name.startswith(prefix))
    parts = tuple(_parse_part(_text(name)[len(prefix) :], value) for name, value in named)
    return WarmJob(job_id, tenant, namespace, num_tokens, parts, owner, num_wanted, num_left_out, request)


def _parse_part(replica_id: str, value: bytes) -> JobPart:
    words = _text(value).split(" ")
    if len(words) != 7 or not is_code(words[6]):
        raise WireError(f"a malformed part of replica {replica_id}")
    epoch, done, cached, ms = (number(words[place].encode()) for place in (0, 3, 4, 5))
    return JobPart(replica_id, epoch, words[1], _job_state(words[2]), done, words[6], cached, ms)


def _job_state(word: str) -> JobState:
    if word not in _JOB_STATES:
        raise WireError(f"not a state of a job: {word[:32]!r}")
    return _JOB_STATES[word]


def is_code(text: str) -> bool:
    """Whether ``text`` may be the error of a part: up to 64 of a-z and _."""
    return _CODE.fullmatch(text) is not None


def number(value: bytes | None) -> int:
    """Parse a non-negative decimal of at most 15 digits."""
    if value is None or not _NUMBER.fullmatch(value):
        raise WireError(f"not a number: {value[:32] if value else value!r}")
    return int(value)


def _bounded(value: bytes | None, most: int) -> int:
    """Return a number, at most ``most``; 0 if malformed. For hints, and for values that only make a reader wait."""
    return min(int(value), most) if value is not None and _NUMBER.fullmatch(value) else 0


def _text(value: bytes | None) -> str:
    if value is None or len(value) > _MAX_FIELD:
        raise WireError("a field that is missing or too long")
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise WireError("a field that isn't text") from None


def _weights(value: bytes | None) -> int:
    """Parse a version of weights. Wire versions before 6 had none."""
    if value is None:
        return 0
    if not _VERSION.fullmatch(value) or int(value) > MAX_WEIGHTS:
        raise WireError("no version of weights")
    return int(value)


_SHARE = re.compile(rb"([0-9]{1,15}):([!-9;-~]{1,64}):([0-9]{1,15}):([0-9]{1,15}):(.{1,1024})")

_TOKEN = re.compile(rb"[0-9a-f]{32}")
_PURGE_DIGITS = 16
_TIME_DIGITS = 13
_MAX_TIME = 16**_TIME_DIGITS - 1


Relation = Literal["same", "later", "earlier", "apart"]
"""How a stored raise relates to a known one: the same purge, a later one that replaces it, an earlier one that it
replaced, or apart. Apart: raised without knowledge of the other, so it is unknown which of the two all have applied."""


class Raised(NamedTuple):
    """One raise of a tenant's generation. A store that lost one may reuse its number, but never its token."""

    generation: int = 0
    """0: never raised."""
    token: str = ""
    """See ``new_token``."""
    replica_id: str = ""
    """The replica that raised it."""
    nonce: str = ""
    """Nonce of that replica's registration."""
    proof: str = ""
    """See ``Proofs.of_raise``: a raise without its proof is ignored."""

    @property
    def purge(self) -> str:
        """The purge that it belongs to: the same if a lost raise was written again."""
        return self.token[:_PURGE_DIGITS]

    @property
    def number(self) -> int:
        """A number of the purge, below 2**64: no other purge has it, also if the store gives its generation again.

        Greater than those of all purges that its raiser knew. 0: never raised.
        """
        return int(self.purge or "0", 16)

    def relation(self, known: Raised) -> Relation:
        """Return the relation of this raise to ``known``, the last one applied; both are proven.

        A purge's token has a later time than all purges that its raiser knew (``new_token``). So a purge with an
        earlier time than ``known`` was raised without knowledge of it. Two purges raised without knowledge of each
        other can still be ordered if their times differ by more than the allowed clock skew.
        """
        if (self.generation, self.purge) == (known.generation, known.purge):
            return "same"
        if self.purge > known.purge:
            return "later" if self.generation >= known.generation else "apart"
        is_before = _drawn_us(self.purge) + MAX_CLOCK_SKEW_S * 1e6 < _drawn_us(known.purge)
        return "earlier" if is_before and self.generation <= known.generation else "apart"

    @property
    def standing(self) -> bytes:
        """Its raw form in a store."""
        return _joined(*raised_fields(self)) if self != NEVER else NOTHING


class Confirmed(NamedTuple):
    """One replica's confirmation of a raise."""

    nonce: str = ""
    """Nonce of its registration; empty: it hasn't confirmed."""
    proof: str = ""
    """See ``Proofs.of_confirmation``."""


NEVER = Raised()
RAISED_FIELDS = ("generation", "token", "raised")
_SIGNED = re.compile(rb"([!-9;-~]{1,64}):([0-9a-f]{64}):([A-Za-z0-9._-]{1,64})")
_CONFIRMED = re.compile(rb"([!-9;-~]{1,64}):([0-9a-f]{64})")


def raised_fields(raised: Raised) -> tuple[bytes, bytes, bytes]:
    """Return the values of ``RAISED_FIELDS``."""
    signed = f"{raised.nonce}:{raised.proof}:{raised.replica_id}"
    return str(raised.generation).encode(), raised.token.encode(), signed.encode()


def _joined(*values: bytes | None) -> bytes:
    return b"\n".join(value or b"" for value in values)


NOTHING = _joined(*[None] * len(RAISED_FIELDS))
"""The raw form of a tenant that was never raised."""


class Limit(NamedTuple):
    """The limit that an operator set for a tenant over all replicas. The highest stamp wins."""

    blocks: int | None = None
    """None: no limit, or a withdrawn one."""
    stamp: int = 0
    """0: never set, or not in this version's format."""
    proof: str = ""
    """See ``FleetKeys.limit_proof``."""


NO_LIMIT = Limit()
_SAID = re.compile(rb"([0-9]{1,15}):([0-9a-f]{64})")


def format_said(limit: Limit) -> str:
    """Return the field beside a limit's blocks: ``stamp:proof``."""
    return f"{limit.stamp}:{limit.proof}"


def parse_limit(blocks: bytes | None, said: bytes | None) -> Limit:
    """Parse two fields of a tenant's hash; values without this version's format are ignored."""
    number_of = int(blocks) if blocks and _NUMBER.fullmatch(blocks) else None
    stated = _SAID.fullmatch(said or b"")
    return Limit(number_of, int(stated[1]), stated[2].decode()) if stated else Limit(number_of)


class TenantFields(NamedTuple):
    """All fields of a tenant's hash; ``shares``: ``(epoch, nonce, blocks, until in ms, fingerprint)`` by replica."""

    limit: int | None
    raised: Raised
    standing: bytes
    shares: dict[str, tuple[int, str, int, int, str]]
    confirmed: dict[str, Confirmed]


def new_nonce(process: str) -> str:
    """Return a nonce for a registration of this process: 32 hex digits that begin with ``process``."""
    return process + secrets.token_hex(_RANDOM_BYTES)


def new_process() -> str:
    """Return the beginning of all nonces of a process: 16 hex digits, random."""
    return secrets.token_hex(_RANDOM_BYTES)


def new_token(purge: str = "", *, after: Iterable[Raised] = ()) -> str:
    """Return a token for a raise: 16 hex digits for the purge, a new one unless given, and 16 for this raise.

    The digits of a new purge begin with its time in µs since 1970, by this machine's clock, and later than the times of
    ``after``.
    """
    drawn_us = max(int(time.time() * 1e6), *(_drawn_us(each.purge) + 1 for each in after), 0)
    new = f"{min(drawn_us, _MAX_TIME):013x}{secrets.randbits(12):03x}"
    return (purge or new) + secrets.token_hex(_RANDOM_BYTES)


def _drawn_us(purge: str) -> int:
    return int(purge[:_TIME_DIGITS] or "0", 16)


def parse_raised(generation: bytes | None, token: bytes | None, signed: bytes | None) -> tuple[Raised, bytes]:
    """Parse ``RAISED_FIELDS`` of a tenant's hash: return the raise, or ``NEVER`` if malformed, and the raw record."""
    standing = _joined(generation, token, signed)
    by = _SIGNED.fullmatch(signed or b"")
    if not (generation and _NUMBER.fullmatch(generation) and token and _TOKEN.fullmatch(token) and by):
        return NEVER, standing
    raised = Raised(int(generation), token.decode(), by[3].decode(), by[1].decode(), by[2].decode())
    return (raised if raised.standing == standing else NEVER), standing


def format_confirmed(confirmed: Confirmed) -> str:
    """Return ``nonce:proof``."""
    return f"{confirmed.nonce}:{confirmed.proof}"


def parse_confirmed(value: bytes | None) -> Confirmed:
    """Parse a replica's confirmation; empty if malformed."""
    found = _CONFIRMED.fullmatch(value or b"")
    return Confirmed(found[1].decode(), found[2].decode()) if found else Confirmed()


def parse_tenant(fields: Mapping[bytes, bytes]) -> TenantFields:
    """Parse all fields of a tenant's hash; malformed ones are left out."""
    limit = fields.get(b"limit", b"")
    shares, confirmed = {}, {}
    for name, value in fields.items():
        stated = _SHARE.fullmatch(value)
        replica_id = name[2:].decode("ascii", "replace")
        if name.startswith(b"r:") and stated:
            epoch, blocks, ends = (int(stated[place]) for place in (1, 3, 4))
            model = stated[5].decode("utf-8", "replace")
            shares[replica_id] = epoch, stated[2].decode(), blocks, ends, model
        elif name.startswith(b"c:") and (said := parse_confirmed(value)).nonce:
            confirmed[replica_id] = said
    raised, standing = parse_raised(*(fields.get(name.encode()) for name in RAISED_FIELDS))
    known_limit = int(limit) if _NUMBER.fullmatch(limit) else None
    return TenantFields(known_limit, raised, standing, shares, confirmed)


_PIN = re.compile(
    rb"([0-9]{1,15}):(live|ended):([0-9a-f]{64}):([0-9]{1,15}):(all|[0-9]{1,4}|=[A-Za-z0-9._,-]{0,70000})"
)
_PIN_ID = re.compile(r"[0-9a-f]{32}")


def is_pin_id(text: str) -> bool:
    """Whether ``text`` may be the id of a pin of the fleet: 32 hex digits."""
    return _PIN_ID.fullmatch(text) is not None


def format_pin(pin: FleetPin) -> str:
    """Return the rest of a pin's field, after its end and state: ``namespace:tokens:wanted``."""
    return f"{pin.namespace_digest.hex()}:{pin.num_tokens}:{pin.wanted}"


def parse_pins(fields: Mapping[bytes, bytes], now_ms: int) -> list[FleetPin]:
    """Parse all fields of a tenant's pins, by id; malformed ones are left out."""
    parts: dict[str, list[JobPart]] = {}
    for name, value in sorted(fields.items()):
        kind, _, rest = name.decode("ascii", "replace").partition(":")
        pin_id, _, replica_id = rest.partition(":")
        if kind == "s":
            with suppress(WireError):
                parts.setdefault(pin_id, []).append(_parse_part(replica_id, value))
    found = []
    for name, value in sorted(fields.items()):
        pin_id, stated = name[2:].decode("ascii", "replace"), _PIN.fullmatch(value)
        if name.startswith(b"p:") and is_pin_id(pin_id) and stated and int(stated[1]) > now_ms:
            found.append(
                FleetPin(
                    id=pin_id,
                    namespace_digest=bytes.fromhex(stated[3].decode()),
                    num_tokens=int(stated[4]),
                    wanted=stated[5].decode(),
                    remaining_s=(int(stated[1]) - now_ms) / 1000,
                    is_ended=stated[2] == b"ended",
                    parts=tuple(parts.get(pin_id, ())),
                )
            )
    return found
