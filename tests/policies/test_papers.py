"""Policies beside the algorithms of their papers, block by block, on traces whose prompts are single blocks.

Each algorithm is written here from its paper, with plain lists and no tree. It departs from the paper where the
policy's docstring says so. The last tests do the same for LFU-DA on prompts of many blocks, which a tree is for.
"""

from __future__ import annotations

import random
from collections import OrderedDict

import pytest

from radixkv.simulator.replay import replay
from radixkv.simulator.trace import Request, Trace, build

SIZES = (1, 2, 3, 5, 8, 9, 10, 11, 13, 20, 33)


class ARC:
    """Megiddo and Modha, FAST 2003, figure 4. REPLACE comes first: a cache evicts before it tells what comes.

    Without the coming page it can't know whether that is in B2, so T1 loses a page only above its target.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity, self.target = capacity, 0.0
        self.once, self.again = (
            OrderedDict[int, None](),
            OrderedDict[int, None](),
        )  # T1 and T2, the oldest first
        self.ghosts_once, self.ghosts_again = OrderedDict[int, None](), OrderedDict[int, None]()

    def request(self, page: int) -> bool:
        """Return whether a page is there, and use it."""
        if page in self.once or page in self.again:  # case I
            self.once.pop(page, None)
            self.again.pop(page, None)
            self.again[page] = None
            return True
        if len(self.once) + len(self.again) == self.capacity:
            self.replace()
        num_once, num_again = len(self.ghosts_once), len(self.ghosts_again)
        if page in self.ghosts_once:  # case II
            self.target = min(self.target + max(1.0, num_again / num_once), self.capacity)
            del self.ghosts_once[page]
            self.again[page] = None
        elif page in self.ghosts_again:  # case III
            self.target = max(self.target - max(1.0, num_once / num_again), 0.0)
            del self.ghosts_again[page]
            self.again[page] = None
        else:  # case IV: at most c pages in T1 and B1, and at most 2c in all
            self.once[page] = None
            while len(self.once) + len(self.ghosts_once) > self.capacity:
                self.ghosts_once.popitem(last=False)
            while self.num_known > 2 * self.capacity:
                self.ghosts_again.popitem(last=False)
        return False

    @property
    def num_known(self) -> int:
        """Pages in all four lists."""
        return len(self.once) + len(self.again) + len(self.ghosts_once) + len(self.ghosts_again)

    def replace(self) -> None:
        """Evict the oldest page of a list."""
        if self.once and (len(self.once) > self.target or not self.again):
            self.ghosts_once[self.once.popitem(last=False)[0]] = None
        else:
            self.ghosts_again[self.again.popitem(last=False)[0]] = None


class S3FIFO:
    """Yang et al., SOSP 2023, algorithm 1. One page is evicted for one that comes, never one of each queue."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.small, self.main, self.ghosts = list[int](), list[int](), list[int]()  # the tail first
        self.uses: dict[int, int] = {}

    def request(self, page: int) -> bool:
        """Return whether a page is there, and use it."""
        if page in self.uses:
            self.uses[page] = min(self.uses[page] + 1, 3)
            return True
        if len(self.uses) == self.capacity:
            self.evict()
        if page in self.ghosts:
            self.ghosts.remove(page)
            self.main.append(page)
        else:
            self.small.append(page)
        self.uses[page] = 0
        return False

    def evict(self) -> None:
        """Evict one page."""
        while True:
            if self.small and (len(self.small) >= 0.1 * self.capacity or not self.main):
                page = self.small.pop(0)
                if self.uses[page] > 1:
                    self.uses[page] = 0
                    self.main.append(page)
                    continue
                self.ghosts.append(page)
                del self.ghosts[: -max(int(0.9 * self.capacity), 1)]
            else:
                page = self.main.pop(0)
                if self.uses[page]:
                    self.uses[page] -= 1
                    self.main.append(page)
                    continue
            del self.uses[page]
            return


def singles(seed: int, num: int = 1_500) -> list[int]:
    """Pages: some hot, some in loops, a scan now and then."""
    rng = random.Random(seed)
    pages = list[int]()
    while len(pages) < num:
        kind = rng.randrange(4)
        if kind < 2:
            pages += [int(rng.paretovariate(0.7)) % 60 for _ in range(40)]
        elif kind == 2:
            pages += list(range(100, 100 + rng.randrange(4, 30))) * 2
        else:
            pages += [1_000 + len(pages) + each for each in range(rng.randrange(3, 20))]
    return pages


def trace_of(pages: list[int]) -> Trace:
    """Each page is a request of one block, used at once."""
    requests = [Request(float(at), "a", [page], 1, 512) for at, page in enumerate(pages)]
    return build(requests, 512)


@pytest.mark.parametrize(("policy", "algorithm"), [("arc", ARC), ("s3fifo", S3FIFO)])
@pytest.mark.parametrize("capacity", SIZES)
def test_the_same_hits_as_the_algorithm(
    policy: str, algorithm: type[ARC] | type[S3FIFO], capacity: int
) -> None:
    for seed in range(2):
        pages, model = singles(seed), algorithm(capacity)
        expected = [int(model.request(page)) for page in pages]
        assert replay(trace_of(pages), policy, capacity).hit_blocks.tolist() == expected, seed


class LFUDA:
    """Arlitt et al., 1999, block by block: the count of uses plus the age, which is the priority of the last victim."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.age, self.now = capacity, 0, 0
        self.uses: dict[int, int] = {}
        self.order: dict[int, tuple[int, int]] = {}

    def request(self, path: list[int]) -> int:
        """Return how many of a path's first blocks are there, and use all of them. The deepest is the oldest."""
        num_hits = next((at for at, block in enumerate(path) if block not in self.uses), len(path))
        for block in path:
            if block in self.uses:
                self.uses[block] += 1
        used = set(path)
        for _ in range(len(self.uses.keys() | used) - self.capacity):
            victim = min((block for block in self.uses if block not in used), key=self.order.__getitem__)
            self.age = max(self.age, self.order[victim][0])
            del self.uses[victim], self.order[victim]
        for block in reversed(path):
            self.now += 1
            self.order[block] = self.age + self.uses.setdefault(block, 1), self.now
        return num_hits


def hot_prompts(seed: int, num_prompts: int, num_blocks: int, num_own: int) -> Trace:
    """System prompts, some far hotter than others. Each request continues one with blocks that nobody uses again."""
    rng = random.Random(seed)
    requests = []
    for at in range(300):
        prompt = min(int(rng.expovariate(0.5)), num_prompts - 1)
        num_asked = rng.choice((0, 2))  # the rest of its own blocks is the answer, which extends the leaf
        blocks = [f"{prompt}-{block}" for block in range(num_blocks)] + [
            f"{at}+{own}" for own in range(num_own)
        ]
        requests.append(Request(float(at), "a", blocks, num_blocks + num_asked, (num_blocks + num_asked) * 512,
                                (num_own - num_asked) * 512))  # fmt: skip
    return build(requests, 512)


@pytest.mark.parametrize("shape", [(8, 30, 6), (16, 10, 6), (6, 30, 20)])
@pytest.mark.parametrize("capacity", [60, 100, 150])
def test_lfu_has_the_hits_of_lfu_da_on_hot_system_prompts(shape: tuple[int, int, int], capacity: int) -> None:
    trace, model, expected = hot_prompts(capacity, *shape), LFUDA(capacity), list[int]()
    for number, prompt in enumerate(trace.num_prompt_blocks.tolist()):
        start, stop = trace.starts[number : number + 2].tolist()
        expected.append(min(model.request(trace.blocks[start:stop].tolist()), prompt))
    hits = replay(trace, "lfu", capacity).hit_blocks
    assert hits.tolist() == expected
