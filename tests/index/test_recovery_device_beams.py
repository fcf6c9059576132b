"""An exception between any two steps of a call while beams are lent to the device. See ``test_recovery``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from radixkv import LeaseError, LentBeams, SequenceLent
from tests.index.test_device_beams import beams_read, reads, step
from tests.index.test_recovery import BASIC, ZEROS, A, Call, Plan, Scenario, World, _holds, _steps
from tests.index.test_recovery import SCENARIOS as OTHERS


class BeamWorld(World):
    """The world with three beams that made two steps on the device, and share blocks with a sequence on the host."""

    def __post_init__(self) -> None:
        super().__post_init__()
        parent = self.open(A, (*ZEROS[:4], 2, 1, 2))
        children = parent.sequence.fork(3)
        self.beams: LentBeams | None = self.cache.lend(children, 8, num_blocks=8)
        self.ids = [list(parent.ids)] * 3
        step(self.beams, self.engine, self.ids, [0, 1, 2], [1, 2, 0])
        step(self.beams, self.engine, self.ids, [2, 0, 0], [2, 2, 1])

    def check(self) -> None:
        """Also check the beams: lent and equal to the device's state, or sequences with these tokens, or all closed."""
        super().check()
        if self.beams is None:
            return
        sequences = self.beams.sequences
        if not self.beams.is_over:
            assert all(sequence.is_lent for sequence in sequences)
            assert beams_read(self.beams, self.engine, self.ids)
            self.beams._device.books.check()
            return
        for sequence, ids in zip(sequences, self.ids, strict=True):
            assert not sequence.is_lent
            if sequence.is_open:
                assert sequence.token_ids.tolist() == ids and reads(self.engine, sequence)
        self.beams._device.step(
            self.beams._device.books.tables.new_tensor([0] * 3), self.beams._device.books.lengths
        )

    def go_on(self) -> None:
        """Also take the beams back."""
        self.come_back()
        super().go_on()

    def come_back(self) -> None:
        """Make one more step if the beams still can. Then take them back, read them and release them."""
        if self.beams is None:
            return
        beams, self.beams = self.beams, None
        if not beams.is_over:
            step(beams, self.engine, self.ids, [1, 1, 0], [0, 1, 2])
            beams.reconcile()
        for sequence, ids in zip(beams.sequences, self.ids, strict=True):
            if sequence.is_open:
                assert sequence.token_ids.tolist() == ids and reads(self.engine, sequence)
                sequence.release()


def _lend(world: World) -> Call:
    """Some sequences that share a tail, and one that shares nothing."""
    parent = world.open(A, (2, *ZEROS[:4]))
    children = [world.add(child, parent.ids) for child in parent.sequence.fork(1)]
    runs = [parent, *children, world.open(A, (2, 2, 2))]

    def keep(beams: LentBeams) -> None:
        for sequence in beams.sequences:
            sequence.release()

    return Call(lambda: world.cache.lend([run.sequence for run in runs], 4, num_blocks=4), runs, keep)


def _with_beams(call: Callable[[LentBeams], Callable[[], Any]]) -> Scenario:
    """A call on the world's own beams. Afterwards all are lent, all are taken back, or all are closed."""

    def scenario(world: World) -> Call:
        assert isinstance(world, BeamWorld) and world.beams is not None
        beams, sequences = world.beams, world.beams.sequences

        def after() -> None:
            closed = [sequence for sequence in sequences if not sequence.is_open]
            if beams.is_over and len(closed) == len(sequences):
                with pytest.raises(LeaseError):
                    sequences[0].append(1)
            else:
                assert len(closed) <= 1  # the one that was released

        return Call(call(beams), after=after)

    return scenario


def _refused(call: Callable[[], Any]) -> None:
    with pytest.raises(SequenceLent):
        call()


CALLS: dict[str, Scenario] = {
    "lend": _lend,
    "lend more": _with_beams(lambda beams: lambda: beams.lend_more(2)),
    "reconcile": _with_beams(lambda beams: beams.reconcile),
    "release one": _with_beams(lambda beams: beams.sequences[1].release),
    "leave with": _with_beams(lambda beams: lambda: beams.__exit__(None, None, None)),
    "refuse": _with_beams(lambda beams: lambda: _refused(lambda: beams.sequences[0].extend([1]))),
}


PLAN = Plan(CALLS, stored=True, make=BeamWorld, after=BASIC)


@pytest.mark.pure
@pytest.mark.parametrize("name", CALLS)
def test_an_exception_between_any_two_steps(name: str) -> None:
    """Calls that concern beams."""
    for at, (world, _, stepper) in enumerate(_steps(PLAN, name, "lru")):
        _holds(world, stepper, goes_on=at % 4 == 0 or stepper.where == "")
    assert stepper.where == "" and stepper.num_steps > 5


BESIDE = Plan(
    {
        name: OTHERS[name]
        for name in ("open, evicting", "commit between forks", "append", "fork", "reorder", "evict", "clear")
    },
    ("lfu",),
    stored=True,
    make=BeamWorld,
    after=PLAN,
)


@pytest.mark.pure
@pytest.mark.parametrize("name", BESIDE.scenarios)
def test_beams_are_bystanders(name: str) -> None:
    """Calls that do not concern beams: the beams stay lent and notice nothing."""
    for world, call, stepper in _steps(BESIDE, name, "lfu"):
        for run in call.involved:
            if run in world.runs:
                run.ids = run.sequence.token_ids.tolist()
        assert isinstance(world, BeamWorld) and world.beams is not None and not world.beams.is_over
        _holds(world, stepper, goes_on=False)
        world.come_back()
        _holds(world, stepper, goes_on=False)
