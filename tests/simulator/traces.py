"""Small random traces that share prefixes, and trace files for the reader."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from radixkv.simulator.trace import Request, Trace, build

FITTED = ("learned", "auto")
"""Policies that fit a model: a replay of a small trace costs 0.1 s, most of it for the fits. They get fewer seeds."""


def small(
    seed: int, *, requests: int = 8, lasting: bool = True, answers: bool = True, block_tokens: int = 4
) -> Trace:
    """Requests over an alphabet of 2 that often continue an earlier one. Every answer is new."""
    rng = random.Random(seed)
    paths: list[list[int]] = [[]]
    made = []
    for number in range(requests):
        known = rng.choice(paths)
        prompt = [
            *known[: rng.randint(0, len(known))],
            *(rng.randint(0, 1) for _ in range(rng.randint(0, 2))),
        ]
        answer = [1_000 + number] if answers and rng.random() < 0.4 else []
        paths.append([*prompt, *answer])
        made.append(
            Request(
                float(number),
                rng.choice("ab") if seed % 3 == 0 else "a",
                [*prompt, *answer],
                len(prompt),
                len(prompt) * block_tokens + rng.randint(0, block_tokens - 1),
                len(answer) * block_tokens,
                rng.choice([0.0, 0.0, 1.5, 2.5, 4.0]) if lasting else 0.0,
            )
        )
    return build(made, block_tokens)


def write(path: Path, *lines: dict[str, Any]) -> Path:
    """Write a file of JSON lines."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def mooncake(path: Path, *prompts: list[int], tokens: int = 512) -> Path:
    """Write a file in Mooncake's format: one request a second, whole blocks."""
    return write(
        path,
        *(
            {"timestamp": 1_000 * at, "input_length": tokens * len(ids), "output_length": 1, "hash_ids": ids}
            for at, ids in enumerate(prompts)
        ),
    )
