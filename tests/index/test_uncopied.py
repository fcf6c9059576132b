"""What exists once refuses copies; values and errors can be copied; no misuse of a class ends the process."""

from __future__ import annotations

import copy
import inspect
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from radixkv import (
    CacheConfig,
    KVLayout,
    Match,
    Namespace,
    PrefixCache,
    RequestHints,
    Tenant,
    audit,
    errors,
)
from radixkv.audit import Report, Violation
from radixkv.coordination import Load, Settings
from radixkv.storage.plan import BeamsState, StepPlan
from radixkv.tenancy.request_keys import RequestFacts
from radixkv.tokenizer.chat import MarkerChat
from radixkv_policies.gdsf import PrefillProfile

COMPILED = ("radixkv.index", "radixkv.coordination", "radixkv_policies")
ALL = (
    *COMPILED,
    *("radixkv.engines", "radixkv.tiers", "radixkv.storage", "radixkv.tokenizer", "radixkv.events"),
    *("radixkv.audit", "radixkv.metering", "radixkv.signing", "radixkv.config", "radixkv.service.api_client"),
)
WAYS: tuple[Callable[[Any], Any], ...] = (
    copy.copy,
    copy.deepcopy,
    lambda what: pickle.loads(pickle.dumps(what)),
)
NS = Namespace("acme", "model", salt="s")


@pytest.mark.slow
@pytest.mark.parametrize(("build", "packages"), [("compiled", ALL), ("pure", COMPILED)])
def test_no_misuse_of_a_class_ends_the_process(build: str, packages: tuple[str, ...], tmp_path: Path) -> None:
    command = [sys.executable, "-X", "faulthandler", str(Path(__file__).with_name("misuse.py")), *packages]
    env = {**os.environ, "RADIXKV_PURE": "1" if build == "pure" else "0"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    tried = done.stdout.splitlines()
    assert done.returncode == 0, f"{tried[-1:]} ended the process:\n{done.stderr}"
    assert not [line for line in tried if line.startswith("FAULT")]
    assert {"copies of Sequence", "radixkv.index.sequence.Sequence"} <= set(tried)


def values() -> Iterator[object]:
    """Values that public calls take and return."""
    ids = list(range(8))
    cache = PrefixCache(CacheConfig(num_blocks=16, block_size=4))
    yield from (cache.config, KVLayout(2, 1, 8), NS, Tenant("acme", max_blocks=4), RequestHints({"turn": 1}))
    with cache.open(NS, [*ids, 1]) as sequence:
        sequence.commit(9)
        sequence.fork(1)[0].append(2)
        yield cache.flush()
    with cache.publish("base", NS, ids, ["globex"]):
        yield from cache.bases()
    match = cache.match(NS, ids)
    yield from (match, match.end, cache.pin(NS, ids, ttl_s=9), cache.stats(), cache.tenant_stats("acme"))
    yield audit.inspect(cache)
    yield from (BeamsState(1, 2, True, False, False, False), Load(4, 3, 2, 1))
    yield from (Settings("a", b"s" * 32, "f", 4), RequestFacts(num_most=3), PrefillProfile(1.0, 2.0))
    yield MarkerChat(1, {"user": 2, "assistant": 3}, 4)


def content(value: Any) -> Any:
    """Return what a copy must share with the original."""
    if isinstance(value, Match):
        return value.namespace, value.num_tokens, value.block_ids.tolist(), value.end
    if isinstance(value, MarkerChat):
        return value.roles
    return list(value) if isinstance(value, StepPlan) else value


def test_values_can_be_copied() -> None:
    for value in values():
        for way in WAYS:
            found = way(value)
            assert type(found) is type(value) and content(found) == content(value), value


def kinds(kind: type[BaseException]) -> Iterator[type[BaseException]]:
    """Return an error and those of radixkv that derive from it; tests have further ones."""
    yield kind
    for each in kind.__subclasses__():
        if each.__module__.startswith("radixkv"):
            yield from kinds(each)


EXAMPLES: Mapping[str, object] = {
    "str": "text",
    "int": 7,
    "int | None": 7,
    "float": 0.5,
    "object": [1],
    "Mapping[str, int]": {"free": 1},
    "Report": Report((Violation("law", "where"),), {}, 1.0),
}
"""By annotation."""


def made(kind: type[BaseException]) -> BaseException:
    """Make an error with all arguments that it takes."""
    _, *taken = inspect.signature(kind.__init__).parameters.values()
    named = {each.name: EXAMPLES.get(each.annotation) for each in taken if each.annotation is not each.empty}
    return kind(**named) if named else kind("text", 1)


@pytest.mark.parametrize("kind", sorted({*kinds(errors.RadixKVError), errors.MissingExtra}, key=repr))
def test_a_copied_error_keeps_its_message_and_its_fields(kind: type[BaseException]) -> None:
    error = made(kind)
    error.add_note("a note")
    for way in WAYS:
        found = way(error)
        assert type(found) is kind and str(found) == str(error) and found.args == error.args
        assert vars(found) == vars(error) and getattr(found, "name", "") == getattr(error, "name", "")


def test_an_error_with_a_handle_in_it_can_be_raised_and_shown() -> None:
    cache = PrefixCache(CacheConfig(num_blocks=16, block_size=4))
    with cache.open(NS, [1, 2]) as sequence:
        error = errors.ArgumentError("sequence", sequence, "a sequence of this cache")
        assert copy.copy(error).value is sequence
        with pytest.raises(TypeError, match="it holds blocks"):
            pickle.dumps(error)
