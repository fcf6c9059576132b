"""reorder compared with a model of the values that each beam has written, and with the reference's tables and counters.

On its own this file tests the torch path, and CUDA if there is a GPU. ``test_interpreter.py`` runs the same file in a
process that interprets the Triton kernels.
"""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from radixkv_kernels import (
    BAD_PARENT,
    BAD_TOKEN,
    CLOSED,
    HISTORY_FULL,
    OUT_OF_BLOCKS,
    TABLE_FULL,
    Beams,
    InputError,
    Pool,
    reference,
    reorder,
)
from radixkv_kernels.beams import NUM_COPIED, NUM_FREE, NUM_STEPS, STATUS
from tests.kernels.pools import DEVICES, IS_INTERPRETING, examples

FIELDS = ("tables", "lengths", "refs", "free", "history")
COUNTERS = (NUM_FREE, STATUS, NUM_STEPS, NUM_COPIED)
"""The counters that have a meaning between steps."""


class Search:
    """Beams of several groups over a pool, and the numbers that each beam has written.

    Each row has a different number.
    """

    def __init__(
        self,
        group_sizes: list[int],
        prompt: int,
        prefix: int,
        *,
        block_size: int,
        spare: int,
        columns: int,
        device: str,
        held: tuple[int, ...] = (),
        max_steps: int = 0,
    ) -> None:
        self.block_size = block_size
        num_prompt = -(-prompt // block_size)
        groups = [group for group, size in enumerate(group_sizes) for _ in range(size)]
        starts = [group * num_prompt for group in range(len(group_sizes))]
        tables = [list(range(starts[group], starts[group] + num_prompt)) for group in groups]
        used = num_prompt * len(group_sizes)
        num_blocks = used + spare + 2
        self.pool = Pool([torch.full((num_blocks, block_size, 1, 2), -1, dtype=torch.int32, device=device)])
        self.beams = Beams(
            tables, [prompt] * len(groups), [prefix] * len(groups), list(range(used, used + spare)),
            num_blocks=num_blocks, block_size=block_size, max_columns=columns, groups=groups, device=device,
            held=held, max_steps=max_steps,
        )  # fmt: skip
        self.written: list[list[int]] = [[] for _ in groups]
        self.last = 0
        for beam in range(len(groups)):
            start = starts[groups[beam]]
            for row in range(prompt):
                self.written[beam].append(1000 * start + row)
                self._write(start + row // block_size, row % block_size, 1000 * start + row)

    def step(self, parents: list[int], token_ids: torch.Tensor | None = None) -> None:
        """Call reorder, and then write one row for each beam at its slot."""
        parents_there = torch.tensor(parents, dtype=torch.int32, device=self.beams.device)
        reorder(self.pool, self.beams, parents_there, token_ids)
        books = self.beams.read()
        if books.status:
            return
        self.written = [list(self.written[parent]) for parent in parents]
        for beam, (table, length) in enumerate(zip(books.tables, books.lengths, strict=True)):
            self.last -= 1
            self.written[beam].append(self.last)
            self._write(table[(length - 1) // self.block_size], (length - 1) % self.block_size, self.last)

    def read(self) -> list[list[int]]:
        """Return the values that each beam reads through its table."""
        books, plane = self.beams.read(), self.pool.plane(0, 0)[:, :, 0, 0].tolist()
        return [
            [value for block_id in table for value in plane[block_id]][:length]
            for table, length in zip(books.tables, books.lengths, strict=True)
        ]

    def _write(self, block_id: int, row: int, value: int) -> None:
        self.pool.plane(0, 0)[block_id, row] = value


@st.composite
def searches(draw: st.DrawFn) -> dict[str, object]:
    block_size = draw(st.integers(1, 4))
    prompt = draw(st.integers(1, 9))
    return {
        "group_sizes": draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)),
        "prompt": prompt,
        "prefix": draw(st.integers(0, prompt // block_size)),
        "block_size": block_size,
        "spare": draw(st.integers(0, 40)),
        "columns": -(-prompt // block_size) + draw(st.integers(0, 4)),
        "held": draw(st.sets(st.integers(0, -(-prompt // block_size) - 1)).map(tuple)),
        "max_steps": draw(st.sampled_from((0, 0, 3, 8))),
    }


@pytest.mark.parametrize("device", DEVICES)
@examples(80)
@given(search=searches(), data=st.data())
def test_every_beam_reads_what_it_and_its_ancestors_wrote(
    device: str, search: dict, data: st.DataObject
) -> None:
    search = Search(**search, device=device)
    groups = search.beams.groups.tolist()
    for _ in range(data.draw(st.integers(1, 5))):
        members = [[beam for beam, other in enumerate(groups) if other == group] for group in groups]
        parents = [data.draw(st.sampled_from(family)) for family in members]
        before = _snapshot(search.beams)
        twin, twin_pool = _twin(search)
        token_ids = _token_ids(search, data) if search.beams.max_steps else None
        reference.reorder(twin_pool, twin, torch.tensor(parents, dtype=torch.int32), token_ids)
        search.step(parents, token_ids)
        _assert_same_state(search.beams, twin)
        status = search.beams.read().status
        search.beams.check()
        assert search.read() == search.written
        if status:
            assert status & ~(OUT_OF_BLOCKS | TABLE_FULL | HISTORY_FULL) == 0
            assert _differing(before, _snapshot(search.beams)) == {"counters"}
            search.beams.clear_status()
            assert _differing(before, _snapshot(search.beams)) == set()


def _token_ids(search: Search, data: st.DataObject) -> torch.Tensor:
    """One id for each beam, of either type and up to its largest value."""
    dtype = data.draw(st.sampled_from((torch.int32, torch.int64)))
    most = 2**31 - 1 if dtype == torch.int32 else 2**32 - 1
    ids = [data.draw(st.sampled_from((0, 7, most))) for _ in range(search.beams.num_beams)]
    return torch.tensor(ids, dtype=dtype, device=search.beams.device)


def _twin(search: Search) -> tuple[Beams, Pool]:
    twin = copy.copy(search.beams)
    for name, value in vars(search.beams).items():
        if isinstance(value, torch.Tensor):
            setattr(twin, name, value.clone())
    return twin, Pool([search.pool.plane(0, 0).clone()])


def _snapshot(beams: Beams) -> dict[str, torch.Tensor]:
    counters = {"counters": beams.counters[list(COUNTERS)]}
    return counters | {name: getattr(beams, name).clone() for name in FIELDS}


def _differing(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> set[str]:
    return {name for name in left if not torch.equal(left[name], right[name])}


def _assert_same_state(left: Beams, right: Beams) -> None:
    assert left.read() == right.read()
    assert torch.equal(left.refs, right.refs) and torch.equal(left.history, right.history)
    origins, token_ids = left.lineage()
    assert origins == right.lineage().origins and (token_ids == right.lineage().token_ids).all()


@pytest.mark.parametrize("device", DEVICES)
def test_the_lineage_of_beams(device: str) -> None:
    """The lineage gives each beam's original beam and the ids appended since, up to 2³² − 1.

    Invalid ids are refused.
    """
    search = Search([3], 4, 1, block_size=4, spare=20, columns=4, device=device, max_steps=3)
    written: list[tuple[int, list[int]]] = [(beam, []) for beam in range(3)]
    for parents, new in (([2, 2, 0], [5, 2**32 - 1, 7]), ([1, 0, 0], [2**31, 1, 2]), ([2, 0, 1], [3, 4, 5])):
        for wrong in ([0, 2**32, 0], [0, 0, -1]):
            search.step(parents, torch.tensor(wrong, device=device))
            assert search.beams.read().status == BAD_TOKEN
            search.beams.clear_status()
        search.step(parents, torch.tensor(new, device=device))
        written = [
            (written[parent][0], [*written[parent][1], token_id])
            for parent, token_id in zip(parents, new, strict=True)
        ]
    origins, token_ids = search.beams.lineage()
    assert list(zip(origins, token_ids.tolist(), strict=True)) == written
    search.step([0, 1, 2], torch.tensor([1, 1, 1], device=device))
    assert search.beams.read().status == HISTORY_FULL
    assert search.beams.read()[4:] == (3, 1)  # steps, copies
    assert search.read() == search.written
    search.beams.check()


@pytest.mark.parametrize("device", DEVICES)
def test_held_blocks_are_neither_written_nor_freed(device: str) -> None:
    """All beams copy a held tail. A held block that no beam uses any more stays out of the free stack."""
    search = Search([2], 6, 0, block_size=4, spare=8, columns=4, device=device, held=(1,))
    content = search.pool.plane(0, 0)[1].clone()
    for _ in range(4):
        search.step([0, 0])
        search.beams.check()
    assert 1 not in search.beams.read().free and search.beams.refs[1] == 1
    assert torch.equal(search.pool.plane(0, 0)[1], content) and search.read() == search.written


@pytest.mark.parametrize("device", DEVICES)
def test_blocks_can_be_added_and_closed_beams_stay_closed(device: str) -> None:
    search = Search([2], 4, 0, block_size=4, spare=1, columns=4, device=device)
    search.step([0, 1])
    assert search.beams.read().status == OUT_OF_BLOCKS
    for wrong, argument in (([2, 2], "block_ids[1]"), ([9], "block_ids[0]")):
        with pytest.raises(InputError) as caught:
            search.beams.lend(wrong)
        assert caught.value.argument == argument
    search.beams.lend([3])
    search.beams.clear_status()
    search.step([0, 1])
    assert [table[1] for table in search.beams.read().tables] == [3, 1]
    search.beams.check()
    before = _snapshot(search.beams)
    search.beams.close()
    for _ in range(2):
        search.step([0, 0])
        search.beams.clear_status()
    assert search.beams.read().status == CLOSED
    assert _differing(before, _snapshot(search.beams)) == {"counters"} and search.read() == search.written


@pytest.mark.parametrize("device", DEVICES)
def test_only_one_child_of_a_shared_tail_keeps_it(device: str) -> None:
    search = Search([4], 6, 1, block_size=4, spare=8, columns=4, device=device)
    search.step([0, 0, 1, 3])
    books = search.beams.read()
    assert books.lengths == [7] * 4
    assert [table[0] for table in books.tables] == [0] * 4  # the prefix, not counted
    assert [table[1] for table in books.tables] == [
        1,
        9,
        8,
        7,
    ]  # from the end of the stack, in the order of the beams
    assert search.beams.refs.tolist()[0] == 0
    search.step([2, 2, 2, 2])
    books = search.beams.read()
    assert [table[1] for table in books.tables] == [8, 6, 5, 4]
    assert books.free == [2, 3, 1, 9, 7]  # freed in the order of the beams that held them
    search.beams.check()


@pytest.mark.parametrize("device", DEVICES)
def test_many_beams_over_many_columns(device: str) -> None:
    count, steps = (9, 6) if IS_INTERPRETING else (64, 12)
    search = Search([count], 70, 2, block_size=1, spare=count * steps, columns=128, device=device)
    parents = torch.Generator().manual_seed(0)
    for _ in range(steps):
        search.step(torch.randint(0, count, (count,), generator=parents).tolist())
        search.beams.check()
        assert search.beams.read().status == 0
        assert search.read() == search.written


if IS_INTERPRETING:

    def test_the_programs_of_a_launch_may_run_backwards(monkeypatch: pytest.MonkeyPatch) -> None:
        """The interpreter runs programs in order, a GPU in any order.

        No program may write what another program of its launch reads.
        """
        from triton.runtime.interpreter import interpreter_builder as builder

        in_order = builder.set_grid_idx
        monkeypatch.setattr(
            builder, "set_grid_idx", lambda x, y, z: in_order(builder.grid_dim[0] - 1 - x, y, z)
        )
        searches = [Search([9], 70, 2, block_size=2, spare=60, columns=128, device="cpu") for _ in range(2)]
        steps = torch.randint(0, 9, (6, 9), generator=torch.Generator().manual_seed(1)).tolist()
        for parents in steps:
            searches[0].step(parents)
        monkeypatch.undo()
        for parents in steps:
            searches[1].step(parents)
        _assert_same_state(searches[0].beams, searches[1].beams)
        assert searches[0].read() == searches[0].written == searches[1].read()
        assert searches[0].beams.read().status == 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("parents", [[0, 1, -1], [0, 3, 2], [0, 2, 2], [2**31 - 1, 0, 0]])
def test_invalid_parents_set_a_flag_and_nothing_else(device: str, parents: list[int]) -> None:
    search = Search([2, 1], 3, 0, block_size=2, spare=6, columns=4, device=device)
    before, content = _snapshot(search.beams), search.pool.plane(0, 0).clone()
    search.step(parents)
    assert search.beams.read().status == BAD_PARENT
    search.step([0, 1, 2])  # later steps wait until the host has seen the flag
    assert _differing(before, _snapshot(search.beams)) == {"counters"}
    assert torch.equal(search.pool.plane(0, 0), content)
    search.beams.clear_status()
    search.step([1, 0, 2])
    assert search.beams.read().lengths == [4, 4, 4]
    search.beams.check()


def test_check_detects_a_wrong_count_and_a_block_in_two_places() -> None:
    def fresh() -> Beams:
        return Search([2], 3, 0, block_size=2, spare=3, columns=4, device="cpu").beams

    beams = fresh()
    beams.refs[0] += 1
    with pytest.raises(AssertionError, match="counted, held"):
        beams.check()
    beams = fresh()
    beams.free[0] = 0
    with pytest.raises(AssertionError, match="free and held"):
        beams.check()
    beams = fresh()
    beams.free[0] = beams.free[1]
    with pytest.raises(AssertionError, match="free twice"):
        beams.check()
    beams = fresh()
    beams.counters[0] -= 1
    with pytest.raises(AssertionError):
        beams.check()


GOOD = {
    "tables": [[0, 1], [0, 2]], "lengths": [3, 3], "num_prefix_blocks": [1, 1], "free": [4],
    "num_blocks": 6, "block_size": 2, "max_columns": 3,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "argument"),
    [
        ({"tables": []}, "len(tables)"),
        ({"lengths": [3]}, "len(lengths)"),
        ({"num_prefix_blocks": [1, 1, 1]}, "len(num_prefix_blocks)"),
        ({"groups": [0]}, "len(groups)"),
        ({"tables": [[0, 1], [0, 6]]}, "tables[1][1]"),
        ({"tables": [[0, 1], [0]]}, "len(tables[1])"),
        ({"max_columns": 1}, "len(tables[0])"),
        ({"num_prefix_blocks": [1, 2]}, "num_prefix_blocks[1]"),
        ({"tables": [[0, 0], [0, 2]]}, "tables[0][1]"),
        ({"tables": [[0, 1], [3, 2]]}, "tables[1]"),
        ({"tables": [[0, 1], [0, 1]], "groups": [0, 1]}, "tables[1][1]"),
        ({"tables": [[0, 1], [2, 0]], "groups": [0, 1]}, "tables[1][1]"),
        ({"free": [4, 4]}, "free[1]"),
        ({"free": [1]}, "free[0]"),
        ({"free": [6]}, "free[0]"),
        ({"block_size": 0}, "block_size"),
        ({"num_blocks": 6.0}, "num_blocks"),
        ({"max_columns": True}, "max_columns"),
        ({"max_steps": -1}, "max_steps"),
        ({"lengths": ["3", 3]}, "lengths.dtype"),
        ({"num_prefix_blocks": [1.0, 1.0]}, "num_prefix_blocks.dtype"),
        ({"groups": [0, 2**40]}, "groups[1]"),
    ],
)
def test_invalid_beams_are_named(changed: dict, argument: str) -> None:
    Beams(**GOOD).check()
    with pytest.raises(InputError) as caught:
        Beams(**{**GOOD, **changed})
    assert caught.value.argument == argument


@pytest.mark.parametrize(
    ("parents", "argument"),
    [
        ([0, 1], "parents"),
        (torch.tensor([0, 1]), "parents"),
        (torch.zeros(3, dtype=torch.int32), "parents.shape"),
        (torch.zeros(2, dtype=torch.int32, device="meta"), "devices of parents, beams, pool"),
    ],
)
def test_parents_of_a_wrong_form_are_named(parents: object, argument: str) -> None:
    with pytest.raises(InputError) as caught:
        reorder(torch.zeros(6, 1, 2, 2, 1, 1), Beams(**GOOD), parents)
    assert caught.value.argument == argument
    with pytest.raises(InputError, match="block_size"):
        reorder(torch.zeros(6, 1, 2, 3, 1, 1), Beams(**GOOD), torch.zeros(2, dtype=torch.int32))


@pytest.mark.parametrize(
    ("max_steps", "token_ids", "argument"),
    [
        (0, torch.zeros(2, dtype=torch.int64), "token_ids"),
        (2, None, "token_ids"),
        (2, torch.zeros(2), "token_ids"),
        (2, torch.zeros(3, dtype=torch.int64), "token_ids.shape"),
        (2, torch.zeros(2, dtype=torch.int64, device="meta"), "token_ids.device"),
    ],
)
def test_ids_of_a_wrong_form_are_named(max_steps: int, token_ids: object, argument: str) -> None:
    beams = Beams(**GOOD, max_steps=max_steps)
    with pytest.raises(InputError) as caught:
        reorder(torch.zeros(6, 1, 2, 2, 1, 1), beams, torch.zeros(2, dtype=torch.int32), token_ids)
    assert caught.value.argument == argument
