"""Grammars that bind answers to a form, by llguidance, and the cache of them.

    alternatives ─▶ llguidance's grammar ─▶ a trial in a process of its own ─▶ compiled here ─▶ a matcher a row

A schema comes from a client, so its compilation is tried first where the kernel bounds what it costs
(``grammar_trial``). What passes is compiled here, which costs the same once more: some milliseconds, outside of the
interpreter's lock. Then each step's mask has llguidance's limits on work and memory.

A tenant's compiled grammars are kept for its next requests. No other tenant has them, nor can it tell that they are
there.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from threading import BoundedSemaphore, Lock
from typing import Any, Final, NamedTuple

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from radixkv.engines.vocabulary import Vocabulary
from radixkv.errors import ArgumentError
from radixkv.uncopied import refuse_copies

TRIAL_S: Final = 2.0
"""CPU time in which a grammar is compiled."""
TRIAL_BYTES: Final = 256 * 2**20
"""Memory of the process that tries it, with about 60 MB of its own."""
MAX_PROBLEM_CHARS: Final = 400
MAX_GRAMMAR_CHARS: Final = 256 * 1024
MAX_TENANT_GRAMMARS: Final = 16
MAX_GRAMMARS: Final = 256
_STACK_BYTES: Final = 2**20
_WAIT_S: Final = 60.0
"""Longest wait for the process, whose CPU time is bounded: it waits for a core on a busy machine."""
_LIMITS: Final[Mapping[str, Any]] = {
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_lexer_states": 100_000,
    "max_grammar_size": 200_000,
    "precompute_large_lexemes": False,
    "verbose_errors": False,
}
"""About 15 ms of work for the mask of a row, and some tens of MB for a grammar, at most."""
_OPTIONS: Final[Mapping[str, Any]] = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,32}"}
"""A model that goes on with spaces for ever would never end its answer."""
_trials: Final = BoundedSemaphore(4)
"""Processes at the same time. Each tenant's threads wait in turn, so hostile schemas of one delay others by seconds."""
_TRIAL: Final = Path(__file__).with_name("grammar_trial.py")


class _Key(NamedTuple):
    tenant: str
    generation: int
    alternatives: str


class Grammar:
    """A compiled grammar. ``field``: what errors name.

    A mask has ``num_ids`` ids. ``eos_token_id`` is in it where an answer may end.
    """

    def __init__(
        self, template: LLMatcher, eos_token_id: int, num_ids: int, field: str, discard: Callable[[], None]
    ) -> None:
        self.eos_token_id, self.num_ids, self.field = eos_token_id, num_ids, field
        self._template, self._discard = template, discard

    def matcher(self) -> LLMatcher:
        """Return a matcher at the beginning of an answer. All of a grammar share the states of its lexer."""
        return self._template.deep_copy()

    def require_sound(self, matcher: LLMatcher) -> None:
        """Raise ArgumentError if a matcher has reached llguidance's limits. Then the grammar isn't used again."""
        if matcher.is_error():
            self._discard()
            raise self.error(_told(matcher.get_error()))

    def error(self, reason: str) -> ArgumentError:
        """Return the error of an answer that can't go on."""
        allowed = "a simpler schema"
        problem = f"can't be followed further: {reason}; allowed: {allowed}"
        return ArgumentError(self.field, None, allowed, problem=problem)


class Grammars:
    """Compiles grammars for one model, and keeps them. Thread-safe.

    ``eos_token_id``: the id that ends an answer in a mask. ``num_ids``: of the model.
    """

    def __init__(self, vocabulary: Vocabulary, eos_token_id: int, num_ids: int) -> None:
        self._vocabulary, self._eos_token_id, self._model_ids = vocabulary, eos_token_id, num_ids
        self._tokenizer: tuple[LLTokenizer, Mapping[str, int]] | None = None
        self._kept: OrderedDict[_Key, LLMatcher] = OrderedDict()
        self._lock, self._loading = Lock(), Lock()

    def grammar(self, tenant: str, generation: int, alternatives: str, field: str) -> Grammar:
        """Return the grammar of some ``AnswerForm`` as JSON text. It may take some seconds.

        ``generation``: of the tenant. What was kept for an earlier one is not used, and goes with the next new grammar.
        Raises ArgumentError for a grammar that llguidance refuses, or that takes too much.
        """
        key = _Key(tenant, generation, alternatives)
        with self._lock:
            known = self._kept.get(key)
            if known is not None:
                self._kept.move_to_end(key)
        template = known or self._compiled(key, field)
        num_ids = self._loaded()[0].vocab_size
        return Grammar(template, self._eos_token_id, num_ids, field, lambda: self._discard(key))

    def _discard(self, key: _Key) -> None:
        with self._lock:
            self._kept.pop(key, None)

    def _compiled(self, key: _Key, field: str) -> LLMatcher:
        if len(key.alternatives) > MAX_GRAMMAR_CHARS:
            allowed = f"schemas of at most {MAX_GRAMMAR_CHARS:,} characters together"
            problem = f"has {len(key.alternatives):,} characters; allowed: {allowed}"
            raise ArgumentError(field, len(key.alternatives), allowed, problem=problem)
        forms = json.loads(key.alternatives)
        if problem := tried(llguidance_grammar(forms, {})):
            raise _refused(field, problem)
        try:
            tokenizer, added = self._loaded()
        except ValueError as error:
            problem = f"is refused, because the tokens of this model aren't known: {error}; allowed: left out"
            raise ArgumentError(field, None, "left out", problem=problem) from None
        text = llguidance_grammar(forms, added)
        matcher = LLMatcher(tokenizer, text, log_level=0, limits=LLParserLimits(**_LIMITS))
        if matcher.is_error():
            raise _refused(field, matcher.get_error())
        self._keep(key, matcher)
        return matcher

    def _keep(self, key: _Key, matcher: LLMatcher) -> None:
        with self._lock:
            self._kept[key] = matcher
            own = [each for each in self._kept if each.tenant == key.tenant]
            current = [each for each in own if each.generation == key.generation]
            for each in {*own} - {*current[-MAX_TENANT_GRAMMARS:]}:
                del self._kept[each]
            while len(self._kept) > MAX_GRAMMARS:
                self._kept.popitem(last=False)

    def _loaded(self) -> tuple[LLTokenizer, Mapping[str, int]]:
        with self._loading:
            if self._tokenizer is None:
                tokenizer = self._vocabulary.tokenizer(self._eos_token_id, self._model_ids)
                self._tokenizer = tokenizer, self._vocabulary.added()
            return self._tokenizer


refuse_copies(Grammars, "it holds compiled grammars and locks. Make another")


def tried(grammar: str) -> str:
    """Compile a grammar in a process of its own. Returns why it can't be, in llguidance's words; empty if it can."""
    order = {
        "grammar": grammar,
        "limits": dict(_LIMITS),
        "seconds": TRIAL_S,
        "bytes": TRIAL_BYTES,
        "stack_bytes": _STACK_BYTES,
    }
    try:
        with _trials:
            done = subprocess.run(
                [sys.executable, "-P", str(_TRIAL)],
                input=json.dumps(order).encode("ascii"),
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=_environment(),
                timeout=_WAIT_S,
                check=False,
            )
    except subprocess.TimeoutExpired:
        done = None
    if done is None or done.returncode:
        stack = f"{_STACK_BYTES >> 20} MiB of stack"
        return f"compiling it needs more than {TRIAL_S:g} s, {TRIAL_BYTES >> 20} MiB or {stack}"
    error: str = json.loads(done.stdout)["error"]
    return error


def llguidance_grammar(forms: list[dict[str, Any]], added: Mapping[str, int]) -> str:
    """Return llguidance's grammar of some ``AnswerForm``. Each schema is a grammar, with its own ``$ref``.

    ``added``: tokens that stand for a text as a whole. Models have learned them where that text is written.

    The model chooses how a text is cut into tokens, also where the text is forced: where a tokenizer's cut is forced,
    llguidance can't follow a text that has the name of a token in it.
    """
    rules = ['%llguidance {"no_forcing": true}']
    schemas: list[dict[str, Any]] = []
    for number, form in enumerate(forms):
        names = []
        for part in form["parts"]:
            name = f"schema{len(schemas)}"
            schemas.append({"name": name, "json_schema": {**part["schema"], "x-guidance": dict(_OPTIONS)}})
            around = _texts(part["before"], added), f"@{name}", _texts(part["after"], added)
            names.append(f"part_{name}")
            rules.append(f"{names[-1]}: {' '.join(filter(None, around))}")
        separator = form["separator"]
        more = "" if separator is None else f" ({_texts(separator, added)} one{number})*"
        rules += [f"one{number}: {' | '.join(names)}", f"form{number}: one{number}{more}"]
    start = " | ".join(f"form{number}" for number in range(len(forms)))
    return json.dumps({"grammars": [{"lark_grammar": "\n".join([*rules, f"start: {start}"])}, *schemas]})


def _texts(text: str, added: Mapping[str, int]) -> str:
    """Return the terminals of a text: strings, and tokens by their ids."""
    names = "|".join(map(re.escape, sorted((each for each in added if each in text), key=len, reverse=True)))
    pieces = re.split(f"({names})", text) if names else [text]
    return " ".join(f"<[{added[each]}]>" if each in added else json.dumps(each) for each in pieces if each)


def _refused(field: str, problem: str) -> ArgumentError:
    allowed = "a JSON schema that llguidance can follow"
    return ArgumentError(field, None, allowed, problem=f"is refused: {_told(problem)}; allowed: {allowed}")


def _told(problem: str) -> str:
    """Return llguidance's words, without the middle if they repeat a long pattern."""
    words, half = problem.partition("\n<non-verbose/>")[0], MAX_PROBLEM_CHARS // 2
    return words if len(words) <= MAX_PROBLEM_CHARS else f"{words[:half]} … {words[-half:]}"


def _environment() -> dict[str, str]:
    """Return the environment without radixkv's settings, because some are secrets; module paths are kept."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RADIXKV_")}
    return {**kept, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
