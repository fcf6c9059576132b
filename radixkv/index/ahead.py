"""Computing ahead: blocks that a running step computes are shared before their KV exist.

    computing       the engine says what a step computes: whole blocks of it are offered
    open_sequence   a request of the same namespace leans on offered blocks that continue its match
    step_done       the KV exist: everybody who waits for them commits them
    step_failed     they don't: offers are withdrawn, and sequences that lean on them are cut to their committed part

Offered blocks are private to running sequences. The tree has none of them, so no match, journal, policy or statistic
sees them. A leaning sequence shares them as a fork does (``holders.Run``). So a purge, a release and a repair need
nothing of their own.

Each sequence lists what it waits for (``holders.Ahead``): its own steps, and those of the sequences that it leans on.
A step concerns the sequences that list it (``CacheState._steps``), whatever became of the one that computes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from radixkv.errors import ArgumentError
from radixkv.index import requests
from radixkv.index.bases import Publication
from radixkv.index.holders import Ahead, SequenceState
from radixkv.index.recovery import mend
from radixkv.index.state import CacheState
from radixkv.index.tokens import ID_BYTES, TOKEN_BYTES
from radixkv.index.tree import Node, SoleUser, num_common_bytes, path_between

if TYPE_CHECKING:
    from radixkv.config import Namespace
    from radixkv.index.arguments import Hints
    from radixkv.index.requests import Place


def computing(cache: CacheState, sequence: SequenceState, num_tokens: int, step: int) -> None:
    """See Sequence.computing."""
    requests.require_open(sequence)
    entries = sequence._ahead or []
    start = max(sequence._num_committed, entries[-1].end if entries else 0)
    if not start <= num_tokens <= sequence.num_tokens:
        raise ArgumentError("num_tokens", num_tokens, f"an integer from {start} to {sequence.num_tokens}")
    if not cache._config.writes_before_reads:
        for each in entries:
            if each.is_leaned and each.step == step and not each.is_done:
                allowed = (
                    f"a step after {step}, which computes what this sequence reads (writes_before_reads)"
                )
                raise ArgumentError("step", step, allowed)
    if num_tokens > start:
        sequence._ahead = [*entries, Ahead(step, num_tokens, False)]
        cache._computing[sequence] = None
        cache._steps.setdefault(step, {})[sequence] = None


def num_found(cache: CacheState, namespace: Namespace, key: bytes) -> int:
    """See PrefixCache.match_ahead."""
    tree = cache._registry.resident_tree(namespace, key, len(key) - 1)
    if tree is None:
        return 0
    place = requests._walk(cache, tree, key, len(key) - 1)
    return max(place.num_blocks, _offer(cache, place, key)[1]) * cache._block_size


def open_sequence(
    cache: CacheState,
    namespace: Namespace,
    key: bytes,
    hints: Hints,
    already_touched: Node | None,
    publication: Publication | None,
    user: SoleUser | None = None,
) -> SequenceState:
    """Open a sequence that may lean on offered blocks. It isn't registered."""
    place = requests._locate(cache, namespace, key, len(key) - 1) if cache._computing else None
    owner, stop = (None, 0) if place is None else _offer(cache, place, key)
    if place is None or owner is None:
        return requests.open_sequence(cache, namespace, key, hints, already_touched, publication, True, user)
    return _lean(cache, place, owner, stop, key, hints, already_touched, user)


def _offer(cache: CacheState, place: Place, key: bytes) -> tuple[SequenceState | None, int]:
    """Return the sequence whose offer continues the match furthest, and the position where it ends.

    O(sequences that compute), and a comparison of the offered tokens.
    """
    best, stop, size = None, place.num_blocks, cache._block_bytes
    usable = max(len(key) - 1, 0) // size
    if place.child is not None or usable == stop:
        return None, stop
    at = stop * size
    block = key[at : at + size]
    for each in cache._computing:
        if each._node is not place.node or not each._is_open or each._ahead is None:
            continue
        if each._prompt_size >= at + size and not each._prompt_key.startswith(block, at):
            continue
        last = min(each._ahead[-1].end // cache._block_size, usable)
        if last <= stop:
            continue
        offered = each.key_between(at, last * size)
        end = place.num_blocks + num_common_bytes(offered, key, at, len(key), size) // size
        if end > stop:
            best, stop = each, end
    return best, stop


def _lean(
    cache: CacheState,
    place: Place,
    owner: SequenceState,
    stop: int,
    key: bytes,
    hints: Hints,
    already_touched: Node | None,
    user: SoleUser | None,
) -> SequenceState:
    """Open a sequence that shares the owner's blocks up to position ``stop``."""
    tree, tenant, cached = place.tree, place.tree.tenant, place.num_blocks
    total = -(-len(key) // cache._block_bytes)
    needed = total - stop
    node = requests._admit(cache, place, cached + needed, needed, 0, already_touched, user)
    sequence = owner.child()
    sequence._ahead = owner.leaned_to(stop * cache._block_size)
    cache._runs.cut(sequence, stop)
    del sequence._table[stop * ID_BYTES :]
    sequence.become_request(node, key, cached * cache._block_size)
    sequence._user = user
    cache._evictor.take_granted(needed, tenant, sequence._table)
    cache._evictor.charge(tenant, needed)
    sequence._counted = tenant.count(len(key) // TOKEN_BYTES, sequence._num_cached)
    if tenant.on_opened is not None:
        path = path_between(tree.root, node)
        sequence._hints = tenant.on_opened(path, max(len(key) - TOKEN_BYTES, 0) // cache._block_bytes, hints)
    requests.follow_steps(cache, sequence)
    return sequence


MAX_STEP: Final = 2**63 - 1
"""The greatest number of a step."""


def end_step(cache: CacheState, step: int, end: Callable[[CacheState, int], int]) -> int:
    """Take the lock and call ``end``. If it is interrupted, the sequences of the step are lost."""
    with cache._lock:
        concerned = list(cache._steps.get(step, ()))
        try:
            return end(cache, step)
        except BaseException as error:
            cache._damage.error, cache._lock.broken = error, cache
            mend(cache, error, concerned)
            raise


def step_done(cache: CacheState, step: int) -> int:
    """See PrefixCache.step_done."""
    num_tokens = 0
    for sequence in cache._steps.pop(step, {}):
        if not _runs(cache, sequence):
            continue
        before, is_next = sequence._num_committed, True
        end = before
        for each in sequence._ahead or ():
            each.is_done = each.is_done or each.step == step
            is_next = is_next and each.is_done
            end = each.end if is_next else end
        if end > before:
            requests.commit(cache, sequence, end)
            num_tokens += end - before
    return num_tokens


def _runs(cache: CacheState, sequence: SequenceState) -> bool:
    """Whether the user has this sequence open. One whose making was interrupted is in no list but those of steps."""
    return sequence._is_open and sequence in cache._sequences


def step_failed(cache: CacheState, step: int) -> int:
    """See PrefixCache.step_failed."""
    num_cut = 0
    for sequence in cache._steps.pop(step, {}):
        entries = sequence._ahead or []
        left, leans = list[Ahead](), False
        for each in entries:
            if each.step == step and not each.is_done:
                leans = each.is_leaned
                break
            left.append(each)
        if not _runs(cache, sequence) or len(left) == len(entries):
            continue
        requests.keep_ahead(cache, sequence, left)
        if leans:
            requests.truncate(cache, sequence, sequence._num_committed)
            num_cut += 1
    return num_cut
