"""An exception between any two steps of a call, while sessions are open. See ``test_recovery``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from radixkv import Session
from tests.index.test_recovery import BASIC, SCENARIOS, A, Call, Plan, Run, World, _end, _holds, _steps

MINE, HELPERS, OTHERS = (2, 2, 1, 1, 0, 0), (2, 2, 1, 1, 2, 2), (2, 2, 0, 0)


@dataclass
class TalkingWorld(World):
    """The world, with an agent, its helper and another session. They share some prefixes."""

    sessions: list[Session] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.agent, self.other = self.cache.session(A), self.cache.session(A)
        self.helper = self.agent.fork()
        self.sessions = [self.agent, self.helper, self.other]
        for session, ids in zip(self.sessions, (MINE, HELPERS, OTHERS), strict=True):
            run = self.talk(session, ids)
            self.commit(run, len(ids))
            run.sequence.release()
            self.runs.remove(run)

    def talk(self, session: Session, ids: tuple[int, ...]) -> Run:
        """Open a request of a session and compute it."""
        run = self.add(session.open(ids), list(ids))
        self.write(run, run.sequence.num_cached_tokens)
        return run

    def go_on(self) -> None:
        """Each session makes a request and ends. What was shared stays."""
        for session in self.sessions:
            if session.is_open:
                run = self.talk(session, (*MINE, 2, 2))
                self.commit(run, 8)
                run.sequence.release()
                self.runs.remove(run)
                session.pause(5.0)
        self.check()
        for session in self.sessions:
            session.close()
            self.check()
        assert not [session.own_blocks for session in self.sessions if session.own_blocks]
        super().go_on()


def _opens(who: str, ids: tuple[int, ...]) -> Callable[[Any], Call]:
    """An open of a session. A lost one leaves nothing."""
    return lambda world: Call(lambda: getattr(world, who).open(ids), keep=lambda sequence: sequence.release())


def _commits(who: str, ids: tuple[int, ...], first: str = "") -> Callable[[Any], Call]:
    """A commit of a session's sequence, perhaps after another session committed a part of it."""

    def scenario(world: TalkingWorld) -> Call:
        run = world.talk(getattr(world, who), ids)
        world.oracle.commit(A, ids, len(ids))
        if first:
            twin = world.talk(getattr(world, first), ids[:8])
            world.commit(twin, 8)
            twin.sequence.release()
            world.runs.remove(twin)
        return Call(lambda: run.sequence.commit(len(ids)), [run], keep=lambda _: _end(run))

    return scenario


def _closes(who: str, after: tuple[str, ...] = ()) -> Callable[[Any], Call]:
    """An end of a session. What it did not free is freed later, by evictions."""

    def scenario(world: TalkingWorld) -> Call:
        for name in after:
            getattr(world, name).close()
        return Call(lambda: getattr(world, who).close() and None)

    return scenario


CALLS: dict[str, Callable[[Any], Call]] = {
    "session": lambda world: Call(lambda: world.cache.session(A), keep=lambda session: session.close()),
    "fork": lambda world: Call(lambda: world.agent.fork(), keep=lambda session: session.close()),
    "pause": lambda world: Call(lambda: world.agent.pause(4.0)),
    "open on its own path": _opens("agent", (*MINE, 2, 2)),
    "open on another's path": _opens("other", (*HELPERS, 2, 2)),
    "open inside another's node": _opens("other", (*MINE[:4], 2)),
    "open without a session": lambda world: Call(
        lambda: world.cache.open(A, (*MINE, 2)), keep=lambda sequence: sequence.release()
    ),
    "commit, attaching": _commits("agent", (*MINE, 0, 1, 0, 1)),
    "commit after another session": _commits("agent", (*MINE, 0, 1, 0, 1), first="other"),
    "commit after its helper": _commits("agent", (*MINE, 0, 1, 0, 1), first="helper"),
    "close": _closes("other"),
    "close the last of a family": _closes("agent", after=("helper",)),
    **{name: SCENARIOS[name] for name in ("clear", "evict", "commit, growing")},
}


PLAN = Plan(CALLS, ("lru", "learned"), make=TalkingWorld, after=BASIC)


@pytest.mark.pure
@pytest.mark.parametrize("policy", ["lru", "learned"])
@pytest.mark.parametrize("name", CALLS)
def test_an_exception_between_any_two_steps(name: str, policy: str) -> None:
    """No step of a call of a session, or beside one, may break anything."""
    for at, (world, _, stepper) in enumerate(_steps(PLAN, name, policy)):
        _holds(world, stepper, goes_on=at % 8 == 0 or stepper.where == "")
    assert stepper.where == "" and stepper.num_steps > 3
