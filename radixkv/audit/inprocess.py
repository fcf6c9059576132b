"""The audit of a cache in this process: checks 1 to 8, 11 and 12 of the table in docs/guides/security.md.

A factory makes the caches: ``factory(config, clock=clock)``, with ``scrub_blocks=`` if the config has no layout.
The caches are small, and the audit uses only their public calls. A deterministic engine (``oracle.Engine``) writes
KV that identifies its owner. A check that finds nothing needs a positive control, which shows that it would have
found something. If the control fails, the verdict is *instrument blind*.

Strict mode (parts of 1, 2 and 11) needs a cache with tenants. Without tenants these checks are *not checked*, and
the verdict of the whole is at best *isolated in what was checked*.

Under a ``Limit`` the machines share the time that is left. One whose time is up has played fewer lives, and says how
many. If the audit is stopped, the report has what is known so far.
"""

from __future__ import annotations

import logging
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib.util import find_spec
from types import ModuleType
from typing import Any
from unittest.mock import patch

import numpy as np
import xxhash

from radixkv.audit import properties, statistics
from radixkv.audit.limit import Limit, Stopped
from radixkv.audit.oracle import cache_with_engine, chain
from radixkv.audit.properties import (
    LAYOUT,
    CacheAdapter,
    CacheFactory,
    has_loading,
    has_lossy,
    has_strict_tenants,
    strict_halves,
    strict_system,
)
from radixkv.audit.properties.lossy_machine import with_lossy_memory
from radixkv.audit.verdict import AuditReport, Check, Verdict
from radixkv.clock import ManualClock
from radixkv.config import CacheConfig, Namespace, Tenant, policy_names
from radixkv.errors import RadixKVError

A, B = Namespace("a", "m"), Namespace("b", "m")
BLOCK = 4
EXAMPLES, STEPS = 200, 50
"""Lives of a machine, and the most calls in one, of a default run."""
THOROUGH_EXAMPLES = 2_000
CONTROL_EXAMPLES = 100
HAND_OVERS = 1_000
TRIALS = 200
CANARY = -7.25e77
Found = tuple[Verdict | None, str, dict[str, Any]]
Progress = Callable[[str, int, int], None]
"""Called as ``progress(phase, done, of)``."""


def run(
    factory: CacheFactory,
    *,
    target: str = "radixkv:PrefixCache",
    version: str = "0",
    examples: int = EXAMPLES,
    steps: int = STEPS,
    seed: int = 0,
    progress: Progress = lambda phase, done, of: None,
    limit: Limit | None = None,
) -> AuditReport:
    """Audit the caches that ``factory`` makes.

    Each machine and mode plays ``examples`` lives (random sequences of calls) of up to ``steps`` calls. ``limit.stop``
    ends the audit early, from a signal handler too.
    """
    limit = limit or Limit()
    audit = InProcess(factory, examples, steps, seed, progress, limit=limit)
    rows: list[tuple[int, str, Callable[[], Found]]] = [
        (1, "laws and contents", audit.laws),
        (1, "non-interference, with room", audit.two_runs),
        (1, "non-interference, strict", audit.two_strict_runs),
        (2, "eviction signal", audit.eviction_signal),
        (3, "cross-tenant probe", audit.cross_tenant_probe),
        (4, "contents of fresh blocks", audit.fresh_blocks),
        (5, "digests of 8 bits", audit.short_digests),
        (6, "token boundaries", audit.token_boundaries),
        (7, "errors, counts and logs", audit.scrapes),
        (8, "handles", audit.names),
        (11, "order of service", audit.order),
        (12, "leak by eviction in burst mode", audit.burst_bits),
    ]
    if has_loading(factory):
        rows.insert(3, (1, "non-interference, strict, host memory below", audit.two_strict_runs_below))
        rows.insert(1, (1, "laws and contents, host memory below", audit.host_memory))
    if has_lossy(factory):
        rows.insert(2, (1, "laws and contents, lossy host memory below", audit.lossy_memory))
    checks = []
    for at, (number, name, check) in enumerate(rows):
        audit.phase, began = name, time.perf_counter()
        weights = [1.0 if each in MACHINES else 0.05 for _, each, _ in rows[at:]]
        with limit.part(weights[0] / sum(weights)):
            verdict, detail, figures = found_by(check, limit)
        checks.append(Check(number, name, verdict, detail, figures, time.perf_counter() - began))
        if name not in MACHINES:  # those tell it themselves
            progress(name, 1, 1)
    settings = {
        "examples": examples,
        "steps": steps,
        "seed": seed,
        "policies": list(policy_names()),
        "limit_s": limit.seconds,
    }
    return AuditReport(target, version, settings, tuple(checks), tried=_tried(checks, steps))


MACHINES = frozenset(
    {
        "laws and contents",
        "laws and contents, host memory below",
        "laws and contents, lossy host memory below",
        "non-interference, with room",
        "non-interference, strict",
        "non-interference, strict, host memory below",
    }
)
"""The checks that play lives: almost all of the time."""


def _tried(checks: Sequence[Check], steps: int) -> str:
    """Say how much was tried, and if it was less than by default."""
    played = [check.figures for check in checks if check.name in MACHINES]
    lives, calls = (sum(figures.get(name, 0) for figures in played) for name in ("examples", "steps"))
    tried = f"{calls} calls in {lives} random lives, at most {steps} in each"
    if steps >= STEPS and min((figures.get("examples", 0) for figures in played), default=0) >= EXAMPLES:
        return tried
    return f"{tried}. That is little: by default check 1 plays {EXAMPLES} lives of up to {STEPS} calls"


def found_by(check: Callable[[], Found], limit: Limit | None = None) -> Found:
    """Run a check. An AssertionError is a leak: another tenant's KV showed. Any other error leaves the check undone.

    If the limit ends it, it is *not checked*.
    """
    try:
        with (limit or Limit()).waiting():
            return check()
    except Stopped as stopped:
        return Verdict.NOT_CHECKED, str(stopped), {}
    except AssertionError as error:
        return Verdict.LEAKS, str(error), {"error": str(error)}
    except Exception as error:  # noqa: BLE001 - the cache under audit may raise anything
        told = f"{type(error).__name__}: {error}"
        return Verdict.INCONCLUSIVE, f"the check could not be done: {told}", {"error": told}


def _no_strict_mode() -> Found:
    return Verdict.NOT_CHECKED, "this cache has no strict tenants", {}


class InProcess:
    """The checks. Each returns its verdict, a sentence and figures."""

    def __init__(
        self,
        factory: CacheFactory,
        examples: int,
        steps: int,
        seed: int,
        progress: Progress,
        shrink: bool = True,
        limit: Limit | None = None,
    ) -> None:
        self._limit = limit or Limit()
        self.phase = ""
        """The check that runs, for the progress."""
        self._factory, self._examples, self._steps, self._seed = factory, examples, steps, seed
        self._shrink = shrink
        self._progress = progress
        self._with_storage = (False, True) if find_spec("torch") else (False,)
        self._has_strict = has_strict_tenants(factory)

    # 1

    def laws(self) -> Found:
        """Random lives against the oracle and the laws. The control: a planted leak must be found."""
        planted = properties.run(
            leaky(self._factory), CONTROL_EXAMPLES, 50, self._seed, with_storage=[False], shrink=False
        )
        if planted.ok:
            return Verdict.BLIND, "a planted leak was not found", {"examples": planted.examples}
        return self._attacked(properties.BeamMachine, "burst")

    def host_memory(self) -> Found:
        """The same lives with host memory below each cache. The control: what was evicted comes back."""
        num_tokens, _ = self._came_back(CacheConfig(16, BLOCK, LAYOUT, host_blocks=48))
        if not num_tokens:
            return Verdict.BLIND, "nothing that was evicted came back from host memory", {}
        return self._attacked(properties.LoadingMachine, "burst", (True,))

    def lossy_memory(self) -> Found:
        """The same lives with a lossy ``tier_dtype``: KV that come back have small errors.

        The control: errors show in what came back.
        """
        config = with_lossy_memory(CacheConfig(16, BLOCK, LAYOUT), "int8")
        num_tokens, is_exact = self._came_back(config)
        if not num_tokens:
            return Verdict.NOT_CHECKED, "nothing came back from below with a lossy tier_dtype", {}
        if is_exact:
            return (
                Verdict.BLIND,
                "with a lossy tier_dtype KV came back without errors, so none would show",
                {},
            )
        return self._attacked(properties.LossyMachine, "burst", (True,))

    def _came_back(self, config: CacheConfig, tenant: Tenant | None = None) -> tuple[int, bool]:
        """Return how many tokens come back from below after an eviction, and whether their KV are exact."""
        cache, engine = cache_with_engine(self._factory, config, clock=ManualClock())
        if tenant is not None:
            cache.add_tenant(tenant)
        prompt = list(range(4 * BLOCK))
        _serve(CacheAdapter(cache, engine), A, prompt)
        cache.evict(config.num_blocks)
        with cache.open(A, prompt) as sequence:
            if sequence.loading is not None:
                sequence.loading.poll()
            stop = sequence.num_committed_tokens
            return stop, engine.holds(sequence.block_table, chain(A, prompt)[:stop])

    def two_runs(self) -> Found:
        """A alone and among others.

        Its contents must be equal; in a pool large enough for all, everything else too.
        """
        return self._attacked(properties.TwoRuns, "burst")

    def two_strict_runs(self) -> Found:
        """The same in a full pool of strict tenants."""
        return self._attacked(properties.TwoRuns, "strict") if self._has_strict else _no_strict_mode()

    def two_strict_runs_below(self) -> Found:
        """The same with host memory below. The control: what was evicted of a strict tenant comes back from there."""
        if not self._has_strict:
            return _no_strict_mode()
        config = CacheConfig(64, BLOCK, LAYOUT, host_blocks=192)
        num_tokens, _ = self._came_back(config, strict_halves(64)[0])
        if not num_tokens:
            return Verdict.BLIND, "nothing that was evicted of a strict tenant came back from host memory", {}
        return self._attacked(properties.TwoLoadingRuns, "strict", (True,))

    def _attacked(
        self,
        machine: type[properties.CacheMachine] | type[properties.TwoRuns],
        mode: str,
        with_storage: tuple[bool, ...] | None = None,
    ) -> Found:
        policies = policy_names()
        each = -(-self._examples // len(policies))
        whole = each * len(policies)
        figures: dict[str, Any] = {"examples": 0, "steps": 0}
        for number, policy in enumerate(policies):
            before = figures["examples"]

            def lived(examples: int, before: int = before) -> None:
                figures["examples"] = max(before + examples, figures["examples"])
                self._progress(self.phase or machine.__name__, figures["examples"], whole)
                self._limit.check()

            play = partial(
                properties.run,
                self._factory,
                each,
                self._steps,
                self._seed * len(policies) + number,  # other lives for each policy
                policies=[policy],
                with_storage=with_storage or self._with_storage,
                modes=[mode],
                machine=machine,
                progress=lived,
            )
            with self._limit.part(1 / (len(policies) - number)):
                report = play(shrink=False)
            figures["steps"] += report.steps
            if not report.ok:
                figures["failure"], figures["policy"] = self._shrunk(report, play), policy
                return Verdict.LEAKS, figures["failure"].splitlines()[0], figures
            if self._limit.stopped is not None or not report.examples:
                why = self._limit.stopped or f"the time was up before any life under the policy {policy}"
                told = f"{why}; nothing was found in {figures['examples']} of {whole} lives"
                return Verdict.NOT_CHECKED, told, figures
        lives = f"{figures['examples']} lives, {figures['steps']} steps, policies {', '.join(policies)}"
        fewer = f"; {whole} were planned, and the time was up" if figures["examples"] < whole else ""
        return Verdict.ISOLATED, f"nothing found in {lives}{fewer}", figures

    def _shrunk(
        self, found: properties.PropertyReport, play: Callable[..., properties.PropertyReport]
    ) -> str:
        """Return the failure, shrunk if there is time for it."""
        failure = found.failure or ""
        if self._shrink:
            failure = play(shrink=True).failure or failure
        return failure

    # 2

    def eviction_signal(self) -> Found:
        """A fills its quota, B floods ten times the capacity, A looks up its prompts again."""
        if not self._has_strict:
            return _no_strict_mode()
        quiet, flooded, own = (self._hits(who) for who in (None, B, A))
        figures = {"before": quiet, "after": flooded, "after own flood": own}
        if quiet != flooded:
            return Verdict.LEAKS, "A's hits changed when B flooded the cache", figures
        if quiet == own or not any(quiet):
            return Verdict.BLIND, "A's own flood changed nothing", figures
        return Verdict.ISOLATED, "A's hits are exactly as before", figures

    def _hits(self, flooder: Namespace | None) -> list[int]:
        system = self._strict()
        prompts = [[at, *range(4 * BLOCK)] for at in range(6)]
        for prompt in prompts:
            _serve(system, A, prompt)
        if flooder is not None:
            _flood(system, flooder, 10 * 64 // 4)
        return [system.match(A, prompt) for prompt in prompts]

    # 3

    def cross_tenant_probe(self) -> Found:
        """B computes P, then A asks for P. The same with namespaces that differ from A's in one field."""
        others = [
            B,
            A._replace(salt="s"),
            A._replace(adapter="s"),
            A._replace(weights=1),
            A._replace(model="m2"),
            A._replace(tenant="am"),
        ]
        draw, leaks, probes = random.Random(self._seed), [], 0
        for other in others:
            system = self._system(256)
            for _ in range(20):
                prompt = [draw.randrange(2**31) for _ in range(draw.randrange(BLOCK + 1, 8 * BLOCK))]
                _serve(system, other, prompt)
                probes += 1
                if system.match(A, prompt) or _opened(system, A, prompt):
                    leaks.append(other.framed().decode())
                _serve(system, A, prompt)
                if system.match(A, prompt) != len(prompt) // BLOCK * BLOCK:
                    return Verdict.BLIND, "A doesn't find what A computed", {"probes": probes}
        figures = {"probes": probes, "leaks": len(leaks), "between": sorted(set(leaks))}
        if leaks:
            return Verdict.LEAKS, f"{len(leaks)} of {probes} prompts of others matched for A", figures
        return Verdict.ISOLATED, f"none of {probes} prompts of others matched for A; its own did", figures

    # 4

    def fresh_blocks(self) -> Found:
        """B writes canaries and gives up its blocks in every way. A reads its fresh blocks before it writes."""
        if True not in self._with_storage:
            return Verdict.NOT_CHECKED, "torch isn't installed, so there is no storage", {}
        cache = self._factory(CacheConfig(8, BLOCK, LAYOUT), clock=ManualClock())
        read = found = 0
        for at in range(HAND_OVERS):
            if not _leave_canaries(cache, at):
                return Verdict.BLIND, "B doesn't read the canaries that it wrote", {"hand_overs": read}
            with cache.open(A, [at, *range(1, 3 * BLOCK)]) as sequence:
                fresh = sequence.block_table[sequence.num_cached_tokens // BLOCK :]
                found += int((_bytes_of(cache, fresh) == CANARY).any(axis=(1, 2, 3, 4, 5)).sum())
                read += len(fresh)
            cache.clear(A)
        figures = {"fresh_blocks": read, "with_canaries": found}
        if found:
            return Verdict.LEAKS, f"{found} of {read} fresh blocks of A's held what B wrote", figures
        return Verdict.ISOLATED, f"no canary of B's in {read} fresh blocks of A's", figures

    # 5

    def short_digests(self) -> Found:
        """Namespace hashes and fast digests are cut to 8 bits: they collide, and no lookup may be wrong.

        This includes the digests by which a policy remembers evicted prefixes, one a block.
        """
        with _digests_of_8_bits():
            config = CacheConfig(4096, BLOCK, policy="learned", segment_tokens=BLOCK)
            system = strict_system(self._factory, config, ManualClock(), ())
            spaces = [_Colliding("a", "m", None, str(at)) for at in range(600)]
            for at, space in enumerate(spaces):
                _serve(system, space, [at % 3, *range(2 * BLOCK)])
            wrong = sum(
                system.match(space, [at % 3, *range(2 * BLOCK)]) != 2 * BLOCK
                or system.match(space, [(at + 1) % 3, *range(2 * BLOCK)]) != 0
                for at, space in enumerate(spaces)
            )
        collisions = len(spaces) - len({hash(space) for space in spaces})
        figures = {"namespaces": len(spaces), "collisions": collisions, "wrong": wrong}
        if wrong:
            return Verdict.LEAKS, f"{wrong} lookups were wrong once digests collided", figures
        if not collisions:
            return Verdict.BLIND, "no digests collided", figures
        return Verdict.ISOLATED, f"{collisions} collisions, and each namespace read its own KV", figures

    # 6

    def token_boundaries(self) -> Found:
        """Prompts of every length, and other ids for the same text, match the KV of exactly their ids."""
        system, wrong, tried = self._system(256), 0, 0
        prompt = [0, 0, 2, 0, 1, 2, 2, 0, 0, 1, 0, 2, 0, 0, 0, 1, 1, 2]
        _serve(system, A, prompt)
        for length in range(len(prompt) + 1):
            for ids in (prompt[:length], [*prompt[:length], 7], _retokenized(prompt[:length])):
                tried += 1
                common = next(
                    (at for at, (x, y) in enumerate(zip(ids, prompt, strict=False)) if x != y), None
                )
                whole = min(len(ids), len(prompt)) if common is None else common
                wrong += system.match(A, ids) != whole // BLOCK * BLOCK
        match = system.cache.match(A, prompt)
        figures = {"prompts": tried, "wrong": wrong}
        if wrong:
            return (
                Verdict.LEAKS,
                f"{wrong} of {tried} prompts matched something else than their own whole blocks",
                figures,
            )
        if not match.num_tokens or system.engine.holds(match.block_ids, chain(A, [9, *prompt[1:16]])):
            return Verdict.BLIND, "the engine's KV is equal for different ids", figures
        return Verdict.ISOLATED, f"{tried} prompts matched whole blocks of exactly their ids", figures

    # 7

    def scrapes(self) -> Found:
        """Everything that the cache tells A, without B and with B."""
        alone, beside, other = (self._told(*world) for world in ((0, 0), (3, 0), (0, 1)))
        changed = [name for name in alone if alone[name] != beside[name]]
        figures = {
            "compared": list(alone),
            "changed": {name: [alone[name], beside[name]] for name in changed},
        }
        if changed:
            return Verdict.LEAKS, f"A's errors, counts or logs depend on B: {', '.join(changed)}", figures
        if alone == other:
            return (
                Verdict.BLIND,
                "A's errors, counts and logs don't change with A's own calls either",
                figures,
            )
        return (
            Verdict.ISOLATED,
            f"{len(alone)} errors, counts and log lines of A are the same with and without B",
            figures,
        )

    def _told(self, num_others: int, more: int) -> dict[str, str]:
        """A's counts, namespaces, refusals and log lines, while ``num_others`` requests of B run."""
        system = self._system(64)
        with _logged() as lines, ExitStack() as running:
            for at in range(num_others):
                sequence = system.cache.open(B, [at, *range(3 * BLOCK)])
                running.enter_context(sequence)
                sequence.commit(2 * BLOCK)
                sequence.computing(3 * BLOCK, step=at)
            for at in range(2 + more):
                _serve(system, A, [at, *range(3 * BLOCK)])
            told = {name: _refusal(call) for name, call in _wrong_calls(system).items()}
            told["tokens ahead"] = _leaned(system, [2, *range(3 * BLOCK)])
            told["statistics"] = repr(system.stats("a"))
        told["log"] = "\n".join(lines)
        return told

    # 8

    def names(self) -> Found:
        """The names of A's sequences, matches and leases, with and without B's requests in between."""
        alone, beside, other = (self._named(*world) for world in ((0, 0), (2, 0), (0, 1)))
        figures = {"names": len(alone), "examples": alone[:3]}
        if alone != beside:
            return Verdict.LEAKS, "names of A's handles depend on B", figures
        if alone == other:
            return Verdict.BLIND, "names of A's handles never differ", figures
        return Verdict.ISOLATED, f"{len(alone)} names of A's handles are the same with and without B", figures

    def _named(self, num_others: int, longer: int) -> list[str]:
        system, names = self._system(256), []
        for at in range(8):
            for other in range(num_others):
                _serve(system, B, [at, other, *range(2 * BLOCK)])
            prompt = [at % 3, *range((2 + longer) * BLOCK)]
            with system.cache.open(A, prompt) as sequence:
                sequence.commit(len(prompt))
                (child,) = sequence.fork(1)
                names += [repr(sequence), repr(child)]
                child.release()
            match = system.cache.match(A, prompt)
            with system.cache.lease(match) as lease:
                names += [repr(match), f"lease of {lease.num_tokens}"]
        return names

    # 11

    def order(self) -> Found:
        """The order in which A's own prefixes are evicted for A's new ones must not depend on what B has cached."""
        if not self._has_strict:
            return _no_strict_mode()
        worlds = [self._order(others, 0) for others in (0, 1, 5)]
        figures = {"steps": len(worlds[0])}
        if any(world != worlds[0] for world in worlds):
            return Verdict.LEAKS, "the order in which A's prefixes are evicted depends on B's cache", figures
        if worlds[0] == self._order(0, 1):
            return Verdict.BLIND, "the order doesn't depend on A's own requests either", figures
        return Verdict.ISOLATED, "A's order doesn't depend on B's cache", figures

    def _order(self, num_others: int, turned: int) -> list[list[int]]:
        system, seen = self._strict(), []
        prompts = [[at, *range(4 * BLOCK - 1)] for at in range(6)]
        for prompt in prompts[turned:] + prompts[:turned]:
            _serve(system, A, prompt)
            for other in range(num_others):
                _serve(system, B, [*prompt, other])
        for at in range(12):
            _serve(system, A, [100 + at, *range(2 * BLOCK - 1)])
            for other in range(num_others):
                _serve(system, B, prompts[(at + other) % 6])
            seen.append([system.match(A, prompt) for prompt in prompts])
        return seen

    # 12

    def burst_bits(self) -> Found:
        """In a full pool, B makes a request or not, and A counts its own remaining tokens. Measured, not judged."""
        draw = random.Random(self._seed)
        arms: dict[bool, list[float]] = {True: [], False: []}
        for at in range(2 * TRIALS):
            system, acts = self._system(16), at % 2 == 0
            for own in range(2):
                _serve(system, A, [own, *range(8 * BLOCK - 1)])
            if acts:
                _serve(system, B, [*range(draw.randrange(1, 8 * BLOCK))])
            left = sum(system.match(A, [own, *range(8 * BLOCK - 1)]) for own in range(2))
            arms[acts].append(float(left))
        told = statistics.leaked_bits(arms[True], arms[False], self._seed)
        detail = f"{told} bits: A learns whether B sent a request, if the pool is full and all of it is A's"
        return None, detail, {"bits": told.as_dict(), "trials": 2 * TRIALS, "confidence": 0.95}

    def _system(self, num_blocks: int) -> CacheAdapter:
        return strict_system(self._factory, CacheConfig(num_blocks, BLOCK), ManualClock(), ())

    def _strict(self) -> CacheAdapter:
        return strict_system(self._factory, CacheConfig(64, BLOCK), ManualClock(), strict_halves(64))


def leaky(factory: CacheFactory) -> CacheFactory:
    """Caches that answer a miss with a match of another namespace: the audit's positive control."""

    def make(config: CacheConfig, **named: Any) -> Any:
        cache = factory(config, **named)
        match = cache.match

        def matched(namespace: Namespace, ids: Sequence[int]) -> Any:
            found = match(namespace, ids)
            others = [match(other, ids) for other in cache.namespaces()]
            return found if found.num_tokens else max([found, *others], key=lambda each: int(each.num_tokens))

        return _Overridden(cache, match=matched)

    return make


class _Overridden:
    """An object with some of its attributes replaced."""

    def __init__(self, wrapped: Any, **replaced: Any) -> None:
        self._wrapped = wrapped
        self.__dict__.update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wrapped, name)


def _serve(system: CacheAdapter, namespace: Namespace, ids: Sequence[int]) -> None:
    """Open, commit and release one request."""
    request, _ = system.open(namespace, ids)
    system.commit(request, len(ids))
    system.release(request)


def _flood(system: CacheAdapter, namespace: Namespace, num_requests: int) -> None:
    """Open ``num_requests`` requests of four blocks. They run until the pool is full; then all of them end."""
    running: list[Any] = []
    for at in range(num_requests):
        ids = [1000 + at, *range(4 * BLOCK - 1)]
        try:
            running.append(system.open(namespace, ids)[0])
        except RadixKVError:
            for request in running:
                system.release(request)
            running.clear()
            continue
        system.commit(running[-1], len(ids))
    for request in running:
        system.release(request)


def _opened(system: CacheAdapter, namespace: Namespace, ids: Sequence[int]) -> int:
    request, cached = system.open(namespace, ids)
    system.release(request)
    return cached


def _leaned(system: CacheAdapter, ids: Sequence[int]) -> str:
    """What a request of A finds of others' running steps."""
    with system.cache.open(A, ids, ahead=True) as sequence:
        return f"{sequence.num_ahead_tokens} tokens"


def _retokenized(ids: list[int]) -> list[int]:
    """Return other ids for the same text, if id 2 spells the same as 0, 0."""
    return [piece for token in ids for piece in ((0, 0) if token == 2 else (token,))]


def _leave_canaries(cache: Any, at: int) -> bool:
    """B fills blocks with canaries; they are released, evicted or cleared. Returns whether B reads its own canaries."""
    with cache.open(B, [at, *range(5 * BLOCK)]) as sequence:
        table = sequence.block_table
        cache.storage.data[table.tolist()] = CANARY
        sees = bool((_bytes_of(cache, table) == CANARY).all())
        if at % 3:
            sequence.commit(sequence.num_tokens)
    if at % 3 == 1:
        cache.evict(cache.config.num_blocks)
    cache.clear(B)
    return sees


def _bytes_of(cache: Any, block_ids: Any) -> Any:
    return cache.storage.data[np.asarray(block_ids).tolist()].cpu().numpy()


def _wrong_calls(system: CacheAdapter) -> dict[str, Callable[[], object]]:
    cache = system.cache

    def released_twice() -> None:
        sequence = cache.open(A, [1])
        sequence.release()
        sequence.release()

    return {
        "a request larger than the pool": lambda: cache.open(A, range(100 * BLOCK)),
        "ids that are none": lambda: cache.open(A, [0, -1]),
        "a second release": released_twice,
        "a name that is none": lambda: Namespace("a", ""),
        "a version that is none": lambda: Namespace("a", "m", weights=-1),
    }


def _refusal(call: Callable[[], object]) -> str:
    try:
        call()
    except RadixKVError as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


@contextmanager
def _logged() -> Iterator[list[str]]:
    """Collect the messages of the library's loggers."""
    lines: list[str] = []
    handler = logging.Handler(logging.DEBUG)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("radixkv")
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


class _Colliding(Namespace):
    """A namespace with a hash of 8 bits."""

    __slots__ = ()

    def __hash__(self) -> int:
        return super().__hash__() & 0xFF


@contextmanager
def _digests_of_8_bits() -> Iterator[None]:
    """Cut every xxHash function that a module of radixkv refers to, one-shot or streaming, to 256 values."""
    names = xxhash.algorithms_available
    fast = {vars(xxhash)[f"{name}{form}"] for name in names for form in ("", "_digest", "_intdigest")}
    with ExitStack() as patches:
        for module in [xxhash, *_modules()]:
            for name, value in list(vars(module).items()):
                if callable(value) and getattr(value, "__hash__", None) and value in fast:
                    patches.enter_context(patch.object(module, name, _cut(value)))
        yield


def _modules() -> list[ModuleType]:
    return [module for name, module in sys.modules.items() if name.split(".")[0].startswith("radixkv")]


def _cut(digest: Callable[..., Any]) -> Callable[..., Any]:
    def short(*args: Any, **named: Any) -> Any:
        found = digest(*args, **named)
        if hasattr(found, "update"):
            return _Overridden(found, digest=_cut(found.digest), intdigest=_cut(found.intdigest))
        return found & 0xFF if isinstance(found, int) else found[:1] * len(found)

    return short
