"""Release of forgotten handles by the next call of the cache."""

from __future__ import annotations

from radixkv.index import device_beams, requests
from radixkv.index.holders import RELEASE, LeaseState, Lending, SequenceState
from radixkv.index.locking import Held
from radixkv.index.recovery import mend
from radixkv.index.state import CacheState


def give_up(cache: CacheState, held: Held) -> None:
    """Release what a finaliser gave up, unless it is released already. Call it under the lock."""
    if isinstance(held, SequenceState):
        _give_up_sequence(cache, held)
    elif isinstance(held, LeaseState):
        _give_up_lease(cache, held)
    elif isinstance(held, Lending):
        _give_up_beams(cache, held)


def _give_up_sequence(cache: CacheState, sequence: SequenceState) -> None:
    beams = sequence._lent
    if not sequence._is_open and beams is not None:
        _give_up_beams(cache, beams)
    if sequence not in cache._sequences:
        return
    try:
        sequence._closed_by = RELEASE
        requests.release(cache, sequence)
    except BaseException as error:
        cache._damage.error, cache._lock.broken = error, cache
        mend(cache, error, sequence)
        raise


def _give_up_lease(cache: CacheState, lease: LeaseState) -> None:
    if not lease._is_open:
        return
    try:
        requests.end_lease(cache, lease)
    except BaseException as error:
        cache._damage.error, cache._lock.broken = error, cache
        mend(cache, error, lease=lease)
        raise


def _give_up_beams(cache: CacheState, beams: Lending) -> None:
    try:
        device_beams.take_back_now(cache, beams)
    except BaseException as error:
        cache._damage.error, cache._lock.broken = error, cache
        mend(cache, error, beams.sequences)
        raise
