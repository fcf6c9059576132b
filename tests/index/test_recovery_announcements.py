"""An exception between any two steps of a call, while prompts are announced. See ``test_recovery``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from radixkv import Announcement, Namespace
from tests.index.test_recovery import (
    BASIC,
    NEW,
    SCENARIOS,
    ZEROS,
    A,
    B,
    Call,
    Plan,
    Scenario,
    World,
    _holds,
    _steps,
)

PROMPTS = (
    (A, ZEROS[:8]),
    (A, (*ZEROS[:6], 1, 0, 2)),
    (A, (*ZEROS[:3], 1)),
    (A, (2, *ZEROS[:8])),
    (B, (*ZEROS[:4], 1, 1, 1, 1)),
    (NEW, ZEROS[:5]),
)


@dataclass
class WaitingWorld(World):
    """The world, with prompts that wait. Those that the call doesn't end stay, and show what is resident."""

    waits: list[tuple[Announcement, tuple[int, ...]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        for namespace, ids in PROMPTS:
            self.announce(namespace, ids)

    def announce(self, namespace: Namespace, ids: tuple[int, ...], ttl_s: float = 60.0) -> Announcement:
        """Announce a prompt that must stay announced."""
        waits = self.cache.announce(namespace, ids, ttl_s=ttl_s)
        self.waits.append((waits, ids))
        return waits

    def check(self) -> None:
        """Check the announcements too."""
        super().check()
        told = set(self.cache.changed_announcements())
        for waits, ids in self.waits:
            assert waits.is_open
            assert waits.resident_tokens == self.cache.match(waits.namespace, ids).num_tokens
        assert told <= {waits for waits, _ in self.waits}

    def go_on(self) -> None:
        """What waits is opened and ends."""
        for waits, ids in self.waits:
            self.cache.open(waits.namespace, ids, announcement=waits).release()
            assert not waits.is_open
        self.waits = []
        super().go_on()


def _announce(namespace: Namespace, ids: tuple[int, ...]) -> Scenario:
    return lambda world: Call(
        lambda: world.cache.announce(namespace, ids), keep=lambda waits: waits.withdraw()
    )


def _on_one(call: Callable[[WaitingWorld, Announcement], Any]) -> Callable[[WaitingWorld], Call]:
    """A call that ends an announcement. After an interruption it has ended, or is as before."""

    def scenario(world: WaitingWorld) -> Call:
        waits = world.announce(A, ZEROS[:9])

        def after() -> None:
            if not waits.is_open:
                world.waits = [each for each in world.waits if each[0] is not waits]

        def keep(result: Any) -> None:
            if result is not None:
                result.release()

        return Call(lambda: call(world, waits), keep=keep, after=after)

    return scenario


def _expired(call: Callable[[WaitingWorld], Any]) -> Callable[[WaitingWorld], Call]:
    """A call that ends announcements whose time is over."""

    def scenario(world: WaitingWorld) -> Call:
        for ids in (ZEROS[:8], (1, 1, 1, 1), ZEROS[:3]):
            world.cache.announce(B, ids, ttl_s=1.0)
        world.clock.advance(2.0)
        return Call(lambda: call(world))

    return scenario


def _ended_of(tenant: str, call: Callable[[WaitingWorld], Any]) -> Callable[[WaitingWorld], Call]:
    """A call that ends all of a tenant's. After an interruption some may have ended."""

    def scenario(world: WaitingWorld) -> Call:
        def after() -> None:
            world.waits = [each for each in world.waits if each[0].is_open]

        return Call(lambda: call(world), after=after)

    return scenario


CALLS: dict[str, Callable[[Any], Call]] = {
    "announce": _announce(A, (*ZEROS[:8], 1)),
    "announce in a namespace that is new": _announce(Namespace("new", "m"), ZEROS[:5]),
    "withdraw": _on_one(lambda world, waits: waits.withdraw()),
    "open": _on_one(lambda world, waits: world.cache.open(A, ZEROS[:9], announcement=waits)),
    "changed": lambda world: Call(lambda: world.cache.changed_announcements() and None),
    "ending, evicting": _expired(lambda world: world.cache.evict(3) and None),
    "ending, in upkeep": _expired(lambda world: world.cache.maintain()),
    "ending, asking": _expired(lambda world: world.cache.changed_announcements() and None),
    "purge": _ended_of("b", lambda world: world.cache.purge("b") and None),
    **{
        name: SCENARIOS[name]
        for name in (
            "open, splitting a node that nobody uses",
            "open, evicting",
            "commit, growing",
            "commit, attaching",
            "clear",
            "evict",
        )
    },
}


PLAN = Plan(CALLS, make=WaitingWorld, after=BASIC)


@pytest.mark.pure
@pytest.mark.parametrize("name", CALLS)
def test_an_exception_between_any_two_steps(name: str) -> None:
    """No step of a call that concerns announcements, or changes what is resident, may break anything."""
    for at, (world, _, stepper) in enumerate(_steps(PLAN, name, "lru")):
        _holds(world, stepper, goes_on=at % 8 == 0 or stepper.where == "")
    assert stepper.where == "" and stepper.num_steps > 5
