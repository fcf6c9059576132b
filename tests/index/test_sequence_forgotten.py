"""A handle that is collected before its release gives a ResourceWarning. The next call releases it."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from radixkv import LeaseError, Namespace, StaleGeneration, audit
from tests.index.support import NS, collect_leftovers, make_cache

SECRET = 31_337


@pytest.fixture(autouse=True)
def _nothing_is_left() -> None:
    collect_leftovers()


def test_a_forgotten_sequence_warns_and_is_released() -> None:
    """The warning names the tenant and the number of tokens, but no token id. The blocks are free again."""
    cache = make_cache()
    sequence = cache.open(Namespace("acme", "m"), [SECRET] * 9)
    with pytest.warns(ResourceWarning, match="sequence of tenant 'acme' with 9 tokens in 3 blocks") as warned:
        del sequence
        gc.collect()
    assert len(warned) == 1 and str(SECRET) not in str(warned[0].message)
    stats = cache.stats()
    assert (stats.num_sequences, stats.free_blocks) == (0, 16)
    audit.check(cache)


def test_committed_blocks_of_a_forgotten_sequence_stay() -> None:
    """The sequence is released as by ``release``."""
    cache = make_cache()
    sequence = cache.open(NS, range(9))
    sequence.commit(9)
    with pytest.warns(ResourceWarning):
        del sequence
    assert cache.match(NS, range(9)).num_tokens == 8 and cache.evict(9) == 2
    assert cache.stats().free_blocks == 16


def test_forgotten_forks_and_results_of_reorder() -> None:
    """Each sequence is separate: those that are kept continue."""
    cache = make_cache()
    sequence = cache.open(NS, range(6))
    children = sequence.fork(3)
    with pytest.warns(ResourceWarning) as warned:
        del children[1:]
    assert len(warned) == 2 and cache.stats().num_sequences == 2
    with pytest.warns(ResourceWarning) as warned:
        cache.reorder([sequence, *children], [0, 0, 1])
    assert len(warned) == 3 and cache.stats().free_blocks == 16
    audit.check(cache)


def test_a_sequence_forgotten_in_a_cycle_frees_blocks_for_the_next_call() -> None:
    """The next call needs these blocks and gets them."""
    cache = make_cache()
    cycle = [cache.open(NS, range(60))]
    cycle.append(cycle)  # type: ignore[arg-type]
    with pytest.warns(ResourceWarning):
        del cycle
        gc.collect()
    cache.open(NS, range(100, 160)).release()


def test_a_forgotten_lease() -> None:
    """The lease's blocks can be evicted again."""
    cache = make_cache()
    with cache.open(NS, range(8)) as sequence:
        sequence.commit(8)
    lease = cache.lease(cache.match(NS, range(8)))
    with pytest.warns(ResourceWarning, match="lease of tenant 'a' on 8 tokens"):
        del lease
    assert cache.evict(9) == 2
    audit.check(cache)


def test_a_stale_sequence_that_is_forgotten() -> None:
    """The sequence's quarantined blocks are freed."""
    cache = make_cache()
    sequence = cache.open(NS, range(8))
    cache.purge("a")
    with pytest.raises(StaleGeneration):
        sequence.commit(8)
    with pytest.warns(ResourceWarning):
        del sequence
    assert cache.stats().free_blocks == 16


@pytest.mark.filterwarnings("error::ResourceWarning")
def test_a_released_handle_gives_no_warning() -> None:
    """A sequence that was released, left or consumed gives no warning."""
    cache = make_cache()
    sequence = cache.open(NS, range(8))
    heirs = cache.reorder([sequence], [0, 0])
    del sequence
    heirs[0].release()
    with heirs[1]:
        pass
    with cache.lease(cache.match(NS, range(8))):
        pass
    del heirs
    gc.collect()
    assert cache.stats().num_sequences == 0


def test_the_end_of_the_interpreter_gives_no_warning() -> None:
    """There is no output and no crash."""
    code = (
        "from radixkv import *\n"
        "cache = PrefixCache(CacheConfig(16, 4))\n"
        "sequence = cache.open(Namespace('a', 'm'), range(9))\n"
        "cycle = [sequence]; cycle.append(cycle)\n"
        "lease = cache.lease(cache.match(Namespace('a', 'm'), range(9)))\n"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_block_table_of_a_sequence_that_has_no_blocks() -> None:
    """The property raises the same error as the calls. A table that was read before stays as it was."""
    cache = make_cache()
    released, left, consumed, stale = (cache.open(NS, [at] * 6) for at in range(4))
    before = released.block_table
    released.release()
    with left:
        pass
    (heir,) = cache.reorder([consumed], [0])
    for sequence in (released, left, consumed):
        with pytest.raises(LeaseError, match="released or was consumed"):
            _ = sequence.block_table
        assert sequence.num_tokens == 6 and sequence.num_blocks == 2
    assert len(before) == len(heir.block_table) == 2
    cache.purge("a")
    assert len(stale.block_table) == 2, "quarantined blocks stay its own until the release"
    stale.release()
    heir.release()
    for sequence in (stale, heir):
        with pytest.raises(LeaseError):
            _ = sequence.block_table


def test_the_blocks_of_a_lease_that_is_released() -> None:
    """Its blocks may already belong to another owner."""
    cache = make_cache()
    with cache.open(NS, range(8)) as sequence:
        sequence.commit(8)
    with cache.lease(cache.match(NS, range(8))) as lease:
        assert len(lease.block_ids) == 2
    with pytest.raises(LeaseError, match="released"):
        _ = lease.block_ids
