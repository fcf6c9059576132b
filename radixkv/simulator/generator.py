"""Workloads from a seed: traces in the plain format, with the labels that a service would know.

A mix says which tenant sends which requests, how often and when. ``acme:chat=2,rag=0.5@10m-40m`` means 2 chat
requests and half a RAG request a second by ``acme``, from minute 10 to minute 40. Rates are averages over long runs:
a trace of an hour cuts off the sessions that began late. Gaps between sessions have a gamma distribution, burstier
than Poisson, as in BurstGPT (2401.17644). Every part of a mix has its own random stream. Adding parts at the end
doesn't change the earlier parts.

Sources: *mooncake*, measured on the first 30 minutes of Mooncake's public conversation trace (FAST'25); *wild*,
"KVCache Cache in the Wild" (2506.02634, ATC'25); *tracelab*, 357,161 steps of coding agents (2606.30560); *ragcache*,
2404.12457. A number without a source is our choice. Sizes in tokens are log-normal, given by median and σ.

    chat     Conversations.
             continues after turn t with p = .28 .40 .56 .54 .74 .75 .75 …   mooncake
             until the next turn: median 120 s, p90 430 s                     mooncake: 120, 432
             first prompt: 5,000, σ 1.3                                       mooncake: quartiles 1.6k, 6.7k, 15.4k
             a turn adds 130, σ 1.2; one in eight attaches 5,000, σ 0.8       mooncake, answer included: 487, p90 4.7k
             answers: 350, σ 0.9                                              mooncake: 356
    agent    Loops of tool calls, in bursts; chat's gaps between its tasks.
             steps a task: median 1.5, p90 17, at most 100                    tracelab: p50 1, p90 20, p99 86
             tasks a session: mean 5                                          tracelab: mean 9, p90 18
             a step adds 1,500, σ 1.5: mean 4.6k                              tracelab: mean 6.4k
             answers: 250, σ 1.2: mean 510                                    tracelab: mean 523
             a tool takes 3 s, σ 1.5; at 120,000 tokens the context is folded into a summary of 2,000
    rag      A question over two documents, the more popular one first.
             Zipf over 10,000 documents: the first 3 % get 62 % of the draws  ragcache: 60 %
             documents: 1,500, σ 0.7                                          ragcache: more than 1,000
    batch    Jobs: one prompt of 1,500 tokens over 200 to 2,000 items, each once, 4 a second.
             hits are of single-turn requests that share a system prompt      wild: 97 % of the hits in API traffic
             a hit comes within 10 s                                          wild: 80 % of them
    scan     A flood of prompts, 8,000, σ 0.8, that share nothing and never return.
    loop     600 documents of 10,240 tokens, over and over in one order: a loop larger than the cache.

System prompts are drawn by Zipf's law with exponent 1 too, so a few of them get most of the use (wild: 10 % of the
blocks get 77 % of the reuses). There are 64 for chat (600, σ 0.6) and 8 for agents (10,000, σ 0.6).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import accumulate, count
from math import log
from operator import mul
from typing import Any, NamedTuple

import numpy as np

from radixkv.config import TENANT_ID_ALLOWED, is_tenant_id
from radixkv.errors import ConfigError

DEFAULT_MIX = ("chat=2,agent=1,rag=0.5,batch=0.3",)

_CONTINUES = (0.28, 0.40, 0.56, 0.54, 0.74, 0.75)
_MAX_TURNS = 60
_MAX_PROMPT = 120_000
_DOCUMENTS = 10_000
_ARRIVAL_SHAPE = 0.5
"""Shape of the gamma gaps between sessions: a coefficient of variation of 1.4."""


class Part(NamedTuple):
    """One kind of traffic of one tenant: ``rate`` requests a second on average, from ``start_s`` to ``stop_s``."""

    tenant: str
    kind: str
    rate: float
    start_s: float
    stop_s: float


class Call(NamedTuple):
    """One request of a session. ``blocks``: block ids of prompt and answer."""

    time_s: float
    tenant: str
    blocks: Sequence[int]
    prompt_tokens: int
    output_tokens: int
    labels: dict[str, Any]


# mixes ----------------------------------------------------------------------------------------------------------------

_SPEC = re.compile(r"(?:(?P<tenant>[^:=@,]+):)?(?P<parts>[^@]+)(?:@(?P<start>[^-]+)(?:-(?P<stop>.+))?)?")


def parse_mix(specs: Sequence[str], duration_s: float, seconds: Callable[[str], float]) -> list[Part]:
    """Parse specs ``[tenant:]kind=rate[,kind=rate…][@from[-to]]`` into parts. Raises ConfigError."""
    if not duration_s > 0:
        raise ConfigError("--duration", duration_s, "a time > 0")
    return [part for spec in specs for part in _parts(spec, duration_s, seconds)]


def _parts(spec: str, duration_s: float, seconds: Callable[[str], float]) -> Iterator[Part]:
    allowed = (
        f"[tenant:]kind=rate[,kind=rate…][@from[-to]], kinds {', '.join(KINDS)}, rates > 0, "
        f"from is before to and before the end of the trace ({duration_s:g} s)"
    )
    found = _SPEC.fullmatch(spec.strip())
    if found is None or not is_tenant_id(found["tenant"] or "default"):
        raise ConfigError("--mix", spec, f"{allowed}; tenant: {TENANT_ID_ALLOWED}")
    start = seconds(found["start"]) if found["start"] else 0.0
    stop = min(seconds(found["stop"]), duration_s) if found["stop"] else duration_s
    for each in found["parts"].split(","):
        kind, _, rate = each.partition("=")
        kind = kind.strip()
        if (
            kind not in KINDS
            or not re.fullmatch(r"\s*\d*\.?\d+\s*", rate)
            or not float(rate) > 0
            or start >= stop
        ):
            raise ConfigError("--mix", spec, allowed)
        yield Part(found["tenant"] or "default", kind, float(rate), start, stop)


# contents -------------------------------------------------------------------------------------------------------------


class _Blocks:
    """Block ids, which depend on the content of the block and of all blocks before it."""

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self._ids: dict[tuple[int, tuple[tuple[int, int], ...]], int] = {}

    def id_of(self, parent: int, pieces: list[tuple[int, int]]) -> int:
        return self._ids.setdefault((parent, tuple(pieces)), len(self._ids))


class Context:
    """A prompt that grows by texts. Equal beginnings have equal blocks. ``tokens``: of the whole prompt."""

    def __init__(self, blocks: _Blocks) -> None:
        self._blocks = blocks
        self._ids: list[int] = []
        self._open: list[
            tuple[int, int]
        ] = []  # of the last, partial block: (text, its tokens before the block's end)
        self.tokens = 0

    def add(self, text: int, tokens: int) -> None:
        """Append ``tokens`` of a text. The same text at the same position has the same content."""
        size, at = self._blocks.block_tokens, 0
        while at < tokens:
            taken = min(tokens - at, size - self.tokens % size)
            at += taken
            self.tokens += taken
            self._open.append((text, at))
            if self.tokens % size == 0:
                parent = self._ids[-1] if self._ids else -1
                self._ids.append(self._blocks.id_of(parent, self._open))
                self._open = []

    @property
    def blocks(self) -> list[int]:
        """A copy of the ids of the whole blocks."""
        return self._ids[:]


@dataclass(slots=True)
class World:
    """The contents and the random stream that all sessions of one kind and tenant share."""

    part: Part
    blocks: _Blocks
    texts: Iterator[int]
    rng: np.random.Generator
    shared: dict[tuple[str, int], tuple[int, int]] = field(default_factory=dict)

    def size(self, median: float, sigma: float, most: float = _MAX_PROMPT) -> int:
        """Draw a log-normal number ≥ 1."""
        return int(min(max(self.rng.lognormal(log(median), sigma), 1.0), most))

    def text(self, name: str, number: int, median: float, sigma: float) -> tuple[int, int]:
        """Return id and number of tokens of a named text, the same in all sessions of this tenant and kind."""
        if (name, number) not in self.shared:
            self.shared[name, number] = next(self.texts), self.size(median, sigma, 40_000)
        return self.shared[name, number]

    def pause(self) -> float:
        """Draw the seconds until a person writes again."""
        return min(float(self.rng.lognormal(log(120), 1.0)), 7_200.0)

    def zipf(self, most: int) -> int:
        """Draw a rank below ``most`` by Zipf's law with exponent 1."""
        return int(np.exp(self.rng.random() * log(most + 1))) - 1

    def context(self, *begins: tuple[int, int]) -> Context:
        """Make a prompt that begins with these texts."""
        made = Context(self.blocks)
        for text, tokens in begins:
            made.add(text, tokens)
        return made

    def system(self, most: int, median: float) -> tuple[int, int]:
        """Draw one of ``most`` system prompts."""
        return self.text("system", self.zipf(most), median, 0.6)

    def fresh(self, tokens: int) -> tuple[int, int]:
        """Make a new text."""
        return next(self.texts), tokens

    def call(
        self, context: Context, time_s: float, answer: int, session: int, turn: int, **labels: Any
    ) -> Call:
        """Make a call with the current context as its prompt, then append the answer to the context."""
        prompt = context.tokens
        context.add(next(self.texts), answer)
        known = {
            "type": self.part.kind,
            "session": f"{self.part.tenant}/{self.part.kind}/{session}",
            "turn": turn,
        }
        known |= {name: value for name, value in labels.items() if value}
        return Call(time_s, self.part.tenant, context.blocks, prompt, answer, known)


# kinds ----------------------------------------------------------------------------------------------------------------

Session = Callable[[World, float, int], Iterator[Call]]
"""A function of world, start time and session number that yields the session's calls in order."""


def _chat(world: World, time_s: float, session: int) -> Iterator[Call]:
    context = world.context(world.system(64, 600), world.fresh(world.size(5_000, 1.3)))
    for turn in range(1, _MAX_TURNS + 1):
        answer = world.size(350, 0.9, 8_000)
        goes_on = world.rng.random() < _CONTINUES[min(turn, len(_CONTINUES)) - 1]
        over = not goes_on or context.tokens > _MAX_PROMPT or turn == _MAX_TURNS
        yield world.call(context, time_s, answer, session, turn, session_over=over)
        if over:
            return
        time_s += world.pause() + answer / 50
        context.add(*world.fresh(world.size(130, 1.2)))
        if world.rng.random() < 1 / 8:
            context.add(*world.fresh(world.size(5_000, 0.8)))


def _agent(world: World, time_s: float, session: int) -> Iterator[Call]:
    system = world.system(8, 10_000)
    context, turns, tasks = world.context(system), count(1), world.size(1.5, 1.6, 40)
    for task in range(tasks):
        context.add(*world.fresh(world.size(300, 1.0, 8_000)))
        steps = world.size(1.5, 1.9, 100)
        for step in range(steps):
            answer, pending = world.size(250, 1.2, 8_000), step < steps - 1
            over = not pending and task == tasks - 1
            yield world.call(
                context, time_s, answer, session, next(turns), tool_pending=pending, session_over=over
            )
            if pending:
                time_s += float(world.rng.lognormal(log(3), 1.5)) + answer / 50
                context.add(*world.fresh(world.size(1_500, 1.5, 30_000)))
            if context.tokens > _MAX_PROMPT:
                context = world.context(system, world.fresh(2_000))
        time_s += world.pause()


def _rag(world: World, time_s: float, session: int) -> Iterator[Call]:
    documents = sorted({world.zipf(_DOCUMENTS), world.zipf(_DOCUMENTS)})
    context = world.context(
        world.system(1, 400),
        *(world.text("document", document, 1_500, 0.7) for document in documents),
        world.fresh(world.size(40, 0.6, 1_000)),
    )
    yield world.call(context, time_s, world.size(150, 0.8, 4_000), session, 1, session_over=True)


def _batch(world: World, time_s: float, session: int) -> Iterator[Call]:
    instructions, items = world.fresh(1_500), int(world.rng.integers(200, 2_001))
    for item in range(1, items + 1):
        context = world.context(instructions, world.fresh(world.size(2_000, 0.8)))
        answer = world.size(100, 0.8, 2_000)
        yield world.call(context, time_s, answer, session, item, session_over=item == items)
        time_s += float(world.rng.exponential(0.25))


def _scan(world: World, time_s: float, session: int) -> Iterator[Call]:
    yield world.call(world.context(world.fresh(world.size(8_000, 0.8))), time_s, 16, session, 1)


def _loop(world: World, time_s: float, session: int) -> Iterator[Call]:
    document, _ = world.text("document", session % 600, 1, 0.0)
    yield world.call(world.context((document, 10_240)), time_s, 16, session, 1)


class Kind(NamedTuple):
    """The sessions of a kind, and their mean number of calls."""

    session: Session
    mean_calls: float


KINDS: dict[str, Kind] = {
    "chat": Kind(_chat, 1 + sum(accumulate((*_CONTINUES, *[_CONTINUES[-1]] * 30), mul))),
    "agent": Kind(_agent, 24.0),
    "rag": Kind(_rag, 1.0),
    "batch": Kind(_batch, 1_100.0),
    "scan": Kind(_scan, 1.0),
    "loop": Kind(_loop, 1.0),
}


# traces ---------------------------------------------------------------------------------------------------------------


def generate(parts: Sequence[Part], *, seed: int = 0, block_tokens: int = 512) -> Iterator[Call]:
    """Generate the calls of a mix in the order of time. The same arguments give the same calls. O(blocks)."""
    blocks, order = _Blocks(block_tokens), count()
    waiting: list[tuple[float, int, Part, Iterator[Call], Call | None]] = []
    for index, part in enumerate(parts):
        world = World(part, blocks, count(index << 48), np.random.Generator(np.random.PCG64([seed, index])))
        for session, start_s in enumerate(_arrivals(world)):
            calls = KINDS[part.kind].session(world, start_s, session)
            waiting.append((start_s, next(order), part, calls, None))
    heapify(waiting)
    while waiting:
        _, _, part, calls, call = heappop(waiting)
        if call is not None:
            yield call
        following = next(calls, None)
        if following is not None and following.time_s < part.stop_s:
            heappush(waiting, (following.time_s, next(order), part, calls, following))


def _arrivals(world: World) -> Iterator[float]:
    """The start times of sessions."""
    part = world.part
    gap = KINDS[part.kind].mean_calls / part.rate
    time_s = part.start_s + world.rng.random() * min(gap, part.stop_s - part.start_s)
    while time_s < part.stop_s:
        yield time_s
        time_s += world.rng.gamma(_ARRIVAL_SHAPE, gap / _ARRIVAL_SHAPE)


def line(call: Call, block_tokens: int, *, labels: bool = True, tokens_per_s: float | None = None) -> str:
    """Format a call as a line of the plain format.

    tokens_per_s: speed of the answer, which gives the time for which the request holds its blocks; by default none.
    """
    fields: dict[str, Any] = {
        "time": round(call.time_s, 3),
        "tenant": call.tenant,
        "tokens": call.prompt_tokens,
        "output_tokens": call.output_tokens,
        "block_tokens": block_tokens,
        "hashes": call.blocks,
    }
    if tokens_per_s is not None:
        fields["duration_s"] = round(call.output_tokens / tokens_per_s, 3)
    if labels:
        fields["labels"] = call.labels
    return json.dumps(fields, ensure_ascii=False)
