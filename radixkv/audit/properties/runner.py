"""Runs a machine: a number of lives under a seed, and the result."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import HealthCheck, Phase, Verbosity, settings
from hypothesis import seed as with_seed
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from radixkv.audit.limit import Stopped
from radixkv.audit.properties.adapter import Adapter
from radixkv.audit.properties.checked import CheckedCache
from radixkv.audit.properties.machine import CacheMachine
from radixkv.audit.properties.material import CacheFactory
from radixkv.audit.properties.two_systems import TwoAdapters, TwoRuns
from radixkv.config import policy_names
from radixkv.errors import ArgumentError

_NOISE = ("state.after_each_step()", "state.nothing_seen_differs()")


@dataclass(frozen=True, slots=True)
class PropertyReport:
    """The result of a run. ``failure``: the smallest life that breaks something, as steps and the error; or None."""

    examples: int
    steps: int
    seconds: float
    seed: int
    failure: str | None

    @property
    def ok(self) -> bool:
        """Whether nothing was found."""
        return self.failure is None


def run(
    factory: CacheFactory,
    max_examples: int = 200,
    steps: int = 50,
    seed: int = 0,
    *,
    policies: Sequence[str] = ("lru", "lfu"),
    with_storage: Sequence[bool] = (False, True),
    modes: Sequence[str] = ("burst",),
    machine: type[CheckedCache] | type[TwoRuns] = CacheMachine,
    shrink: bool = True,
    progress: Callable[[int], None] | None = None,
) -> PropertyReport:
    """Attack the caches that ``factory`` makes with ``max_examples`` lives of up to ``steps`` calls.

    ``with_storage``: run without a storage, with one (needs torch), or both. ``modes``: ``"strict"`` needs a cache
    with tenants (``TwoRuns`` only). ``progress`` is called after each example that found nothing, with their
    number. If it raises Stopped, the run ends, and the report has what was played until then.

    The same arguments give the same run as long as the same modules are loaded, because Hypothesis also draws
    constants from their sources. The run prints nothing and stores nothing on disk. A failure is shrunk, which
    takes some hundred more examples, and reported. Raises ArgumentError.
    """
    for argument, names, known in (
        ("policies", policies, policy_names()),
        ("modes", modes, ("burst", "strict")),
        ("with_storage", with_storage, (False, True)),
    ):
        if not names or not set(names) <= set(known):
            raise ArgumentError(argument, names, f"some of {', '.join(map(str, known))}")
    attributes = {
        "factory": staticmethod(factory),
        "policies": tuple(policies),
        "with_storage": tuple(with_storage),
        "modes": tuple(modes),
    }
    return _run(machine, attributes, _settings(max_examples, steps, shrink), seed, progress)


def run_adapter(
    factory: Callable[[], Adapter],
    max_examples: int = 200,
    steps: int = 50,
    seed: int = 0,
    *,
    contents_only: bool = False,
    shrink: bool = True,
    progress: Callable[[int], None] | None = None,
) -> PropertyReport:
    """Attack the systems that ``factory()`` makes with two-system lives. Each example makes two systems.

    Everything that a tenant observes must be independent of other tenants. This holds in a pool large enough for
    all (some hundred blocks), or if each tenant has a quota that others can't use. For systems in which one tenant
    may evict another's blocks, set ``contents_only``: it compares bytes, and checks answers only with the oracle.
    Otherwise like ``run``.
    """
    attributes = {"factory": staticmethod(factory), "contents_only": contents_only}
    return _run(TwoAdapters, attributes, _settings(max_examples, steps, shrink), seed, progress)


def _run(
    machine: type[RuleBasedStateMachine],
    attributes: dict[str, Any],
    chosen: settings,
    seed: int,
    progress: Callable[[int], None] | None,
) -> PropertyReport:
    done = Counter[str]()

    def finished(_: object) -> None:
        done["examples"] += 1
        if progress is not None:
            progress(done["examples"])

    def counted(_: object) -> None:
        done["steps"] += 1

    hooks = {"_finished": finished, "_stepped": counted}
    attacked = type(machine.__name__, (machine,), attributes | hooks)
    started = time.perf_counter()
    failure = None
    try:
        run_state_machine_as_test(with_seed(seed)(attacked), settings=chosen)
    except Stopped:
        pass
    except Exception as error:  # noqa: BLE001 - any error is the finding
        failure = _told(error)
    return PropertyReport(done["examples"], done["steps"], time.perf_counter() - started, seed, failure)


def _settings(max_examples: int, steps: int, shrink: bool) -> settings:
    for argument, number in (("max_examples", max_examples), ("steps", steps)):
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise ArgumentError(argument, number, "an integer ≥ 1")
    return settings(
        max_examples=max_examples,
        stateful_step_count=steps,
        deadline=None,
        database=None,
        derandomize=False,
        print_blob=False,
        report_multiple_bugs=False,
        verbosity=Verbosity.normal,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink) if shrink else (Phase.generate,),
    )


def _told(error: BaseException) -> str:
    """The error, with the notes that Hypothesis added: the steps of the smallest example."""
    notes = [line for note in getattr(error, "__notes__", ()) for line in note.splitlines()]
    steps = [line for line in notes if not line.startswith(_NOISE)]
    return "\n".join([f"{type(error).__name__}: {error}", *steps])
