"""Generated sessions of coding agents, packed as ``sessions`` reads them: for ``radixkv simulate --serve``.

The numbers were measured on half of the corpus ``callanjfox/kv-cache-tester`` (Apache-2.0): 353 sessions, 24,962
requests. Sizes in tokens and seconds are log-normal, given by median and σ. Measured values stand beside, with
quantiles where the form differs.

    requests of the main agent   46, σ 1.18                          median 46, σ 1.18, p99 312 of all agents
    first prompt                 fresh, 55 %: 18,500, σ 0.25         quartiles 18.4k, 25.6k, 106.9k; p90 250k
                                 gone on with, 45 %: 120,000, σ 0.8
    a step adds                  640, σ 1.30: mean 1,490             median 641, mean 1,619, p90 3.4k, p99 14k
    answers                      222, σ 0.9                          median 222, p90 899
    answers a second             39 tokens                           median 39
    runs a tool next             86 % of answers                     86 %
    a tool takes                 8.5 s, σ 1.2; 1 in 15: 120 s, σ 1.2  median 8.5, p75 18, p90 64, p99 610
    a person thinks              25 s, σ 1.0; 1 in 4: 600 s, σ 1.8    median 25, p75 160, p90 970
    fold: the prompt is rebuilt  1.5 % of steps, and above a limit   1.9 % of steps
      the limit                  155,000 for 92 %, else 400,000      p75 of the sizes before a fold: 154k
      it keeps of the old        10 %, up to 37 %                    median 10 %, p90 37 %
      its size                   0.68 to 1.05; above the limit 0.25  p10 0.25, median 1.0
    all prompts                                                      median 104k, p75 141k, p90 238k
    sessions with subagents      3.7 %, with 3 each                  3.7 %, 3.3
      requests of each           11, σ 0.53                          median 11, σ 0.53
      first prompt               10,400, σ 0.15                      median 10,441, σ 0.15
      a step adds                2,470, σ 1.26                       median 2,466, σ 1.26

Prompts end at a million tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import log
from typing import Any, Final

import numpy as np

from radixkv.errors import ConfigError
from radixkv.simulator.packed_sessions import TOKENS_AN_ID

MAX_SESSIONS: Final = 100_000
_MAX_PROMPT: Final = 1_000_000
_LIMIT: Final = 155_000
_LARGE_LIMIT: Final = 400_000
_TOKENS_PER_S: Final = 39.0


def generate_sessions(sessions: int, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Generate sessions as objects of a packed file. The same arguments give the same sessions. Raises ConfigError.

    Each session has its own random stream, so more sessions don't change the first ones.
    """
    if not 1 <= sessions <= MAX_SESSIONS:
        raise ConfigError("--sessions", sessions, f"from 1 to {MAX_SESSIONS:,}")
    for number in range(sessions):
        yield _Session(np.random.Generator(np.random.PCG64([seed, number]))).packed(f"agent-{seed}-{number}")


class _Agent:
    """An agent's prompt of ``size`` tokens, which is ``num_ids`` ids. Above ``limit`` it is folded."""

    def __init__(self, name: str, size: int, growth: tuple[float, float], limit: int = _MAX_PROMPT) -> None:
        self.name, self.size, self.growth, self.limit = name, size, growth, limit
        self.num_ids = 0


class _Session:
    def __init__(self, dice: np.random.Generator) -> None:
        self._dice = dice
        self._next_id = 1
        self._now = 0.0
        self._rows: list[list[Any]] = []

    def packed(self, name: str) -> dict[str, Any]:
        """Return the whole session."""
        steps = self._draw(46, 1.18, 2_000)
        is_fresh = self._dice.random() < 0.55
        first = self._draw(18_500, 0.25, _MAX_PROMPT) if is_fresh else self._draw(120_000, 0.8, _MAX_PROMPT)
        is_small = first < _LIMIT and self._dice.random() < 0.92
        main = _Agent("0", first, (640, 1.30), _LIMIT if is_small else _LARGE_LIMIT)
        forks = set(self._dice.integers(0, steps, 3).tolist()) if self._dice.random() < 0.037 else set()
        for step in range(steps):
            self._ask(main, is_first=not step)
            if step in forks:
                self._subagent(f"{step + 1}")
        return {"id": name, "tool_tokens": 12_200, "system_tokens": 2_770, "requests": self._rows}

    def _subagent(self, name: str) -> None:
        agent = _Agent(name, self._draw(10_400, 0.15, _MAX_PROMPT), (2_470, 1.26))
        for step in range(self._draw(11, 0.53, 100)):
            self._ask(agent, is_first=not step)

    def _ask(self, agent: _Agent, *, is_first: bool) -> None:
        """Add a request of an agent."""
        keep = agent.num_ids
        is_full = agent.size > agent.limit
        if not is_first and (self._dice.random() < 0.015 or is_full):
            keep = int(agent.num_ids * min(self._dice.exponential(0.145), 0.9))
            factor = 0.25 if is_full else self._dice.choice((0.68, 1.0, 1.0, 1.05))
            agent.size = max(int(agent.size * factor), keep * TOKENS_AN_ID)
        elif not is_first:
            agent.size = min(agent.size + self._draw(*agent.growth, 100_000), _MAX_PROMPT)
        new = max(agent.size // TOKENS_AN_ID - keep, 0)
        agent.num_ids = keep + new
        answer = self._draw(222, 0.9, 32_000)
        api_s, is_tool = answer / _TOKENS_PER_S, bool(self._dice.random() < 0.86)
        pause_s = self._pause(is_tool)
        stop = "tool_use" if is_tool else "end_turn"
        runs = [[self._next_id, new]] if new else []
        row = [
            round(self._now, 3),
            agent.name,
            agent.size,
            answer,
            round(api_s, 2),
            round(pause_s, 1),
            keep,
            runs,
            stop,
        ]
        self._rows.append(row)
        self._next_id += new
        self._now += api_s + pause_s

    def _pause(self, is_tool: bool) -> float:
        is_long = self._dice.random() < (1 / 15 if is_tool else 1 / 4)
        median, sigma = (
            ((120, 1.2) if is_long else (8.5, 1.2)) if is_tool else ((600, 1.8) if is_long else (25, 1.0))
        )
        return float(min(self._dice.lognormal(log(median), sigma), 100_000.0))

    def _draw(self, median: float, sigma: float, most: int) -> int:
        return int(min(max(self._dice.lognormal(log(median), sigma), 1.0), most))
