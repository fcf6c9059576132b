"""Runs of a machine: so many lives under a seed, and what they found."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import HealthCheck, Phase, Verbosity, settings
from hypothesis import seed as with_seed
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from radixkv.audit.properties.adapter import Adapter
from radixkv.audit.properties.machine import CacheMachine
from radixkv.audit.properties.material import CacheFactory
from radixkv.audit.properties.two_systems import TwoAdapters, TwoRuns
from radixkv.config import policy_names
from radixkv.errors import ArgumentError

_NOISE = ("state.after_each_step()", "state.nothing_seen_differs()")


@dataclass(frozen=True, slots=True)
class PropertyReport:
    """What a run did and found. ``failure`` is the smallest life that breaks something, as steps and the error."""

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
    machine: type[CacheMachine] | type[TwoRuns] = CacheMachine,
    shrink: bool = True,
    progress: Callable[[int], None] | None = None,
) -> PropertyReport:
    """Attack the caches that ``factory`` makes with ``max_examples`` lives of up to ``steps`` calls.

    ``with_storage``: run without a storage, with one (needs torch), or both. ``modes``: ``"strict"`` needs a
    cache with tenants (``TwoRuns`` alone). ``progress`` is called after each example that found nothing, with
    their number. The same arguments do the same while the same modules are loaded: Hypothesis draws constants of their
    sources too. It is quiet and keeps nothing on disk; a failure is shrunk, which takes some hundred further examples,
    and reported. Raises ArgumentError.
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
    """Attack the systems that ``factory()`` makes with two-system lives; each example makes two of them.

    Everything that a tenant observes must be independent of others, which holds where there is room for all
    (some hundred blocks) or quotas that nobody else touches; ``contents_only`` compares bytes and holds
    answers against the oracle, for systems in which a tenant may take another's room. Otherwise as ``run``.
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
    except Exception as error:  # noqa: BLE001 - whatever broke is the finding
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
    """The error with the notes that Hypothesis left on it: the steps of the smallest example."""
    notes = [line for note in getattr(error, "__notes__", ()) for line in note.splitlines()]
    steps = [line for line in notes if not line.startswith(_NOISE)]
    return "\n".join([f"{type(error).__name__}: {error}", *steps])
