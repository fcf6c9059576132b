"""Inject faults into a fleet of real processes over a real Redis, and check the histories afterwards.

  python fuzz/faults.py --seconds 600 [--store single] [--seed 7] [--minutes 60]
  python fuzz/faults.py --seed 7 --store single --rounds 1        the same round again

A round has four replica processes and two routers. Clients send requests to the replicas that the routers rank first.
An operator purges tenants, starts warm jobs and reserves shares of a quota. The seed decides the faults, their targets
and their times: ``fuzz/fleet/plan.py``. Then all faults are healed, and these invariants must hold:

- No request got KV of another prompt or tenant. No request got KV from before a purge that its replica had confirmed.
  A tenant that refuses stale replicas got no KV from before a purge from a replica that had been cut off either.
- No router ranked a replica that had been dead for longer than its lease.
- Of all processes that claimed an id, one is left. The others know that they are fenced. Logs end in the newest epoch.
- The shares of a quota never exceeded its limit, from a lease after the limit was set. In the end all know the limit.
- Every warm job ended: done, failed, lost, or taken over and done.
- The views of the routers and of the replicas agree with the blocks that the replicas hold, within ``HEAL_S`` seconds.

Prints a line for each round. If a round finds something, prints its seed, its schedule and the violations, and ends
with exit code 1.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

from fuzz.fleet import history, plan, worker
from fuzz.fleet.history import Purged
from fuzz.fleet.plan import NAMES, STORES, Step
from fuzz.fleet.worker import LEASE_S, NUM_PROMPTS, TENANTS, namespace
from fuzz.fleet.world import Replica, World, answered
from radixkv.coordination import Router
from radixkv.coordination.keys import FleetKeys
from radixkv.coordination.quotas import Limits
from radixkv.coordination.store.redis import RedisStore
from radixkv.errors import StoreUnavailable

HEAL_S = 90.0
"""The fleet must recover within this time. It takes some 3 s on an idle machine."""
SLACK_S = 0.2
"""A store or a process that answers later than this has stalled.

A dead replica's last messages may arrive as late as the stall ends.
"""
LIMIT = 100
_WANTED = 40
_TENANT = "serves"


class Job(NamedTuple):
    """A warm job that was started."""

    id: str
    tenant: str
    prompt: int


class Ranked(NamedTuple):
    """A replica that was ranked though it had been dead for longer than its lease."""

    name: str
    dead_since: float
    asked_at: float

    def is_excused_by(self, stall: tuple[float, float]) -> bool:
        """Return whether its last beat may have arrived at the end of the stall. Its lease then began no earlier."""
        began, ended = stall
        return began < self.dead_since + SLACK_S and self.asked_at < ended + LEASE_S + SLACK_S


class Round:
    """One fleet with one schedule."""

    def __init__(self, seed: int, store: str, seconds: float, folder: Path) -> None:
        self.seed, self.seconds, self.folder = seed, seconds, folder
        self.steps = plan.draw(seed, store, seconds)
        self.world = World(store, folder, seed)
        self.prompts = worker.prompts(seed)
        self.wrong: list[str] = []
        self.purges: list[Purged] = []
        self.jobs: list[Job] = []
        self.num_ranked = 0
        self._ranked_late: list[Ranked] = []
        self._stalls: list[tuple[float, float]] = []
        self._store = RedisStore(self.world.servers.url, 1.0)
        keys = FleetKeys(worker.SECRET)
        self._tenant, self._limits = keys.tenant(_TENANT), Limits(keys, self._store)
        self._losses: list[float] = []
        self._is_over = threading.Event()
        self._threads: list[threading.Thread] = []

    def run(self) -> float:
        """Run the round. Return the seconds until the fleet had recovered."""
        try:
            self._until(lambda: len(self._members()) == len(NAMES), "the fleet never came together")
            for at, router in enumerate(self.world.routers):
                self._start(self._send, router, random.Random(f"{self.seed} client {at}"))
            self._start(self._enforce_limit)
            self._start(self._watch)
            self._follow_schedule()
            self.world.heal()
            healed_at = time.monotonic()
            self._settle()
            took_s = time.monotonic() - healed_at
        finally:
            self._is_over.set()
            for thread in self._threads:
                thread.join()
            self._store.close()
            self.world.close()
        self.wrong += [
            f"replica {late.name}, dead for {late.asked_at - late.dead_since:.2f} s, was ranked"
            for late in self._ranked_late
            if not any(map(late.is_excused_by, self._stalls))
        ]
        stale, self.num_served = history.wrongs(self.folder, self._lasting_purges())
        self.wrong += stale
        return took_s

    # ---- during the faults

    def _follow_schedule(self) -> None:
        """Follow the schedule."""
        began, ending = time.monotonic(), list[tuple[float, Step]]()
        for step in [*self.steps, Step(self.seconds, "", "", 0.0, 0)]:
            while ending and ending[0][0] <= step.at_s:
                self._wait(began, ending[0][0])
                self.world.end(ending.pop(0)[1])
            self._wait(began, step.at_s)
            self.world.servers.tend()
            if step.what in ("purge", "job", "reserve"):
                self._work(step)
            elif step.what:
                self._begin(step)
                ending = sorted([*ending, (step.at_s + step.lasts_s, step)])
        for _, step in ending:
            self.world.end(step)

    def _begin(self, step: Step) -> None:
        before = self.world.servers.losses
        with suppress(OSError, RuntimeError):  # a server that is down can't be controlled
            self.world.begin(step)
        if self.world.servers.losses != before:
            self._losses.append(time.monotonic())

    def _wait(self, began: float, at_s: float) -> None:
        time.sleep(max(0.0, began + at_s - time.monotonic()))

    def _work(self, step: Step) -> None:
        living = self.world.living()
        if not living:
            return
        replica, tenant = living[step.chance % len(living)], plan.tenant_of(step)
        if step.what == "purge":
            self._start(self._purge, replica, tenant)
        elif step.what == "reserve":
            replica.ask("reserve", _TENANT, _WANTED)
        else:
            self._start(self._warm, Job(uuid.UUID(int=step.chance).hex, tenant, plan.prompt_of(step)), living)

    def _purge(self, replica: Replica, tenant: str) -> None:
        """Purge a tenant, until the purge is complete, Redis has lost data, or the round is over."""
        raised_at, num_losses = time.monotonic(), len(self._losses)
        if raised_at < replica.spawned_at + 2 * LEASE_S:
            return  # it can't know data that Redis lost before it started
        answer = self._answer(replica, "purge", tenant)
        while isinstance(answer, dict) and num_losses == len(self._losses):
            if answer["complete"]:
                confirmed, inf = answer["confirmed"], float("inf")
                self.purges.append(Purged(tenant, raised_at, time.monotonic(), confirmed, inf))
                return
            if self._is_over.wait(0.1):
                return
            knowing = [each for each in self.world.living() if each.spawned_at + 2 * LEASE_S < raised_at]
            answer = self._answer(knowing[0], "purge_report", tenant) if knowing else answer

    def _warm(self, job: Job, asked: list[Replica]) -> None:
        """Start a warm job on two replicas."""
        chosen = asked[:2]
        if self._answer(asked[-1], "begin_job", job.id, job.tenant, [each.name for each in chosen]) is True:
            self.jobs.append(job)
            for each in chosen:
                each.ask("do_job", job.id, job.tenant, job.prompt)

    def _answer(self, replica: Replica, command: str, *arguments: Any) -> Any:
        """Return the answer, or None if the process or the round ends before."""
        asked = replica.ask(command, *arguments)
        while not asked.done() and not self._is_over.wait(0.02):
            pass
        return answered(asked, 0.0)

    def _send(self, router: Router, chance: random.Random) -> None:
        """Act as a client: ask a router, and send to the first replica that answers."""
        while not self._is_over.is_set():
            tenant, number = chance.choice(TENANTS), chance.randrange(NUM_PROMPTS)
            asked_at = time.monotonic()
            found = router.rank(namespace(tenant), self.prompts[number])
            if not router.is_blind:
                self._check_liveness([each.replica.id for each in found], asked_at)
            for candidate in found[:2]:
                claimants = self.world.claimants[candidate.replica.id]
                if claimants and answered(claimants[-1].ask("serve", tenant, number), 0.5) is not None:
                    router.routed(namespace(tenant), self.prompts[number], candidate.replica.id)
                    break
            self._is_over.wait(0.01)

    def _check_liveness(self, names: list[str], asked_at: float) -> None:
        self.num_ranked += 1
        for name in names:
            dead_since = self.world.dead_since.get(name, float("inf"))
            latest = max(dead_since, self.world.disturbed_until(name)) + LEASE_S + SLACK_S
            if asked_at > latest:
                self._ranked_late.append(Ranked(name, dead_since, asked_at))

    def _watch(self) -> None:
        """Record the stalls of Redis or of this process that the schedule didn't cause, as on a busy machine."""
        answered_at = time.monotonic()
        while not self._is_over.wait(SLACK_S / 10):
            with suppress(StoreUnavailable):
                self._store.fetch(list(NAMES))
            before, answered_at = answered_at, time.monotonic()
            if answered_at - before > SLACK_S:
                self._stalls.append((before, answered_at))

    def _enforce_limit(self) -> None:
        """Act as an operator: set a tenant's limit whenever Redis has lost it, and check the sum of the shares."""
        set_at = float("inf")
        while not self._is_over.wait(0.05):
            try:
                before = time.monotonic()
                facts = self._store.tenant(self._tenant)
                if facts.limit is None:
                    self._limits.state(self._tenant, LIMIT)
                    set_at = time.monotonic()
                elif sum(share.blocks for share in facts.shares) > LIMIT:
                    latest = max(set_at, *(self.world.disturbed_until(name) for name in NAMES))
                    if before > latest + 2 * LEASE_S:
                        self.wrong.append(f"shares of more than {LIMIT} blocks: {facts.shares}")
            except StoreUnavailable:
                set_at = time.monotonic()

    # ---- afterwards

    def _settle(self) -> None:
        """Wait until the fleet has recovered. A condition that is never met is a violation."""
        self._until(self._one_claimant_each, "of all that claim an id, one is left")
        self._until(self._jobs_end, "every job ends")
        self._is_over.set()
        for thread in self._threads:
            thread.join()
        self._until(self._quota_is_kept, "the shares that are held add up to the limit")
        self._until(self._logs_are_whole, "the logs end where their registrations say, in the youngest epoch")
        self._until(self._views_agree, "the views agree with what is held")

    def _one_claimant_each(self) -> str:
        """Check that one claimant of each id is left. The others are fenced, and are ended here."""
        for name, claimants in self.world.claimants.items():
            states = [(answered(each.ask("state", False), 5.0) or {}).get("state") for each in claimants]
            if sorted(states, key=str) != sorted(["ok", *["fenced"] * (len(states) - 1)]):
                return f"{name}: {states}"
        for claimants in self.world.claimants.values():
            for each in list(claimants):
                if (answered(each.ask("state", False), 5.0) or {}).get("state") == "fenced":
                    each.kill()
                    claimants.remove(each)
        return ""

    def _members(self) -> set[str]:
        states = {
            name: (answered(claimants[-1].ask("state", False), 5.0) or {}).get("state")
            for name, claimants in self.world.claimants.items()
            if claimants
        }
        return {name for name, state in states.items() if state == "ok"}

    def _jobs_end(self) -> str:
        living, left = {each.name: each for each in self.world.living()}, list[object]()
        for job in list(self.jobs):
            asked = next(iter(living.values()))
            found = answered(asked.ask("job", job.id, job.tenant), 5.0)
            if found is None or isinstance(found, str) or found["ended"]:
                if not isinstance(found, str):
                    self.jobs.remove(job)
                continue
            states = dict(found["parts"])
            left.append(found)
            for name, state in states.items():
                if (
                    state in ("queued", "running") and name in living
                ):  # Redis may have lost the replica's report
                    living[name].ask("do_job", job.id, job.tenant, job.prompt)
            helpers = [name for name in living if states.get(name) not in ("queued", "running", "done")]
            for each in living.values():
                if helpers and answered(each.ask("take_job", job.id, job.tenant, helpers[0]), 5.0) is True:
                    living[helpers[0]].ask("do_job", job.id, job.tenant, job.prompt)
                    break
        return f"{len(self.jobs)} go on: {left}" if self.jobs else ""

    def _quota_is_kept(self) -> str:
        states = [answered(each.ask("state", False), 5.0) or {} for each in self.world.living()]
        facts = self._store.tenant(self._tenant)
        if facts.limit is None:
            self._limits.state(self._tenant, LIMIT)
            return "the limit was lost"
        unaware = [state.get("epoch") for state in states if state.get("limits") != {_TENANT: LIMIT}]
        if unaware:
            return f"epochs {unaware} don't know the limit"
        granted = sum(state.get("granted", {}).get(_TENANT, 0) for state in states)
        stated = sum(share.blocks for share in facts.shares)
        return "" if granted <= LIMIT and stated <= LIMIT else f"{granted} granted, {stated} stated"

    def _logs_are_whole(self) -> str:
        seen = {each.registration.replica_id: each.registration for each in self._store.fetch().seen}
        for replica in self.world.living():
            state, found = answered(replica.ask("state", False), 5.0) or {}, seen.get(replica.name)
            if found is None or found.epoch != state.get("epoch"):
                return f"{replica.name}: registered as {found}, runs as {state}"
            log = self._store.read({replica.name: (0, 0)}).get(replica.name, [])
            numbers = [(entry.epoch, entry.seq) for entry in log]
            if numbers and numbers != [(found.epoch, numbers[0][1] + at) for at in range(len(numbers))]:
                return f"{replica.name}: numbers {numbers} in epoch {found.epoch}"
        return ""

    def _views_agree(self) -> str:
        """Check the view that each router and each replica has of all other replicas."""
        states = {each.name: answered(each.ask("state", True), 10.0) for each in self.world.living()}
        if None in states.values() or len(states) < len(NAMES):
            return f"no answer: {states}"
        for at in ((tenant, number) for tenant in TENANTS for number in range(NUM_PROMPTS)):
            truth = {name: state["held"][at] for name, state in states.items() if state["held"][at]}
            for name, state in states.items():
                others = {holder: size for holder, size in truth.items() if holder != name}
                if state["hints"][at] != others:
                    brief = {other: (each["peers"], each["generations"]) for other, each in states.items()}
                    return f"{name} thinks of {at}: {state['hints'][at]}, and it is {others}; {brief}"
            for router in self.world.routers:
                ranked = router.rank(namespace(at[0]), self.prompts[at[1]])
                found = {each.replica.id: each.matched_tokens["device"] for each in ranked}
                if found != dict.fromkeys(NAMES, 0) | truth:
                    return f"a router thinks of {at}: {found}, and it is {truth}"
        return ""

    def _lasting_purges(self) -> list[Purged]:
        """Return the purges, each with the time at which Redis may have lost it."""
        return [
            purge._replace(
                lost_at=min((at for at in self._losses if at > purge.raised_at), default=float("inf"))
            )
            for purge in self.purges
        ]

    def _until(self, holds: Callable[[], object], what: str) -> None:
        """Wait for a condition that returns "" or True. If it never does, its last answer is a violation."""
        deadline, answer = time.monotonic() + HEAL_S, object()
        while time.monotonic() < deadline:
            try:
                answer = holds()
            except StoreUnavailable as error:
                answer = str(error)
            if answer in ("", True):
                return
            time.sleep(0.1)
        self.wrong.append(f"not within {HEAL_S:g} s: {what}: {answer}")
        self.wrong += self._states_and_stacks()

    def _states_and_stacks(self) -> list[str]:
        """Return the state and the stacks of each claimant, to show the calls that never end."""
        states = []
        for name, claimants in self.world.claimants.items():
            for each in claimants:
                state, stacks = each.ask("state", False), each.ask("stacks")
                states.append(f"{name}: {answered(state, 5.0)}\n{answered(stacks, 5.0)}")
        return states

    def _start(self, act: Callable[..., None], *arguments: Any) -> None:
        def run() -> None:
            try:
                act(*arguments)
            except BaseException as error:
                self.wrong.append(f"{act.__name__}: {error!r}")
                raise

        self._threads.append(threading.Thread(target=run, daemon=True))
        self._threads[-1].start()


def run_round(seed: int, store: str, seconds: float) -> bool:
    """Run one round and print its figures. Return whether it found nothing."""
    with tempfile.TemporaryDirectory() as folder:
        one_round = Round(seed, store, seconds, Path(folder))
        took_s = one_round.run()
    num_faults = sum(step.what not in ("purge", "job", "reserve") for step in one_round.steps)
    print(
        f"seed {seed}, {store}: {num_faults} faults in {seconds:.0f} s, {one_round.num_served} requests, "
        f"{one_round.num_ranked} rankings, {len(one_round.purges)} purges; right again after {took_s:.1f} s",
        flush=True,
    )
    if one_round.wrong:
        print(
            "the schedule:", *one_round.steps, "wrong:", *dict.fromkeys(one_round.wrong), sep="\n", flush=True
        )
        print(f"again: python fuzz/faults.py --seed {seed} --store {store} --length {seconds:g} --rounds 1")
    return not one_round.wrong


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--seconds", type=float, default=60.0, help="how long to go on (default 60)")
    options.add_argument("--minutes", type=float, help="the same in minutes")
    options.add_argument("--rounds", type=int, help="how many rounds, instead")
    options.add_argument(
        "--length", type=float, default=20.0, help="seconds of faults in a round (default 20)"
    )
    options.add_argument("--store", choices=STORES, help="only over this (default: all in turn)")
    options.add_argument("--seed", type=int, default=1, help="first seed (default 1)")
    chosen = options.parse_args()
    seconds = chosen.seconds if chosen.minutes is None else 60 * chosen.minutes
    began, done = time.monotonic(), 0
    while done < chosen.rounds if chosen.rounds else time.monotonic() - began < seconds:
        left_s = seconds - (time.monotonic() - began)
        length = chosen.length if chosen.rounds else min(chosen.length, max(2.0, left_s / 2))
        if not run_round(chosen.seed + done, chosen.store or STORES[done % len(STORES)], length):
            return 1
        done += 1
    print(f"{done} rounds: nothing found")
    return 0


if __name__ == "__main__":
    sys.exit(main())
