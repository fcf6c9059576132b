"""Recorded calls of vLLM's scheduler to a VllmCache, and their answers: written in vLLM, replayed without it.

    python -m tests.engines.vllm.scheduler_trace        records anew, with the vLLM that RADIXKV_VLLM names

A trace is a gzip file of JSON lines. The first is about the run: settings of the cache, the version of vLLM, what
``shell_calls`` said, and the signatures of vLLM's methods that the shell replaces. Each other one is a call:

    ["ids", base, common, more]         ids of a new request: the first ``common`` of earlier ones, and more
    ["request", ids, facts]             a request; they have numbers, in this order
    ["more", request, ids]              further ids of a request
    ["lift", copy]                      a copy's source may be evicted again; copies have numbers
    ["withdraw", announcement]          an announcement ends; they have numbers
    [name, request, arguments, answer]  a method of VllmCache; request: its number, or null
"""

from __future__ import annotations

import ast
import gzip
import inspect
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import astuple
from pathlib import Path
from typing import Any

from radixkv.engines.vllm.cache import VllmCache
from tests.engines.sglang.scheduler_trace import _Log

ENGINES = Path(__file__).parents[3] / "radixkv" / "engines" / "vllm"
TRACES = Path(__file__).with_name("traces")
RECORDED = (
    "allocate",
    "announce",
    "begin_step",
    "blocks",
    "commit",
    "end_step",
    "fits_its_tenant",
    "goes_on",
    "leave_unzeroed",
    "lookup",
    "lose",
    "num_committed",
    "release",
    "reset",
    "take_blocks_to_zero",
    "take_copies",
    "take_stale",
    "weights_change",
    "zero_from",
)
"""The methods whose calls are written."""

RUNS = {
    "chats": {"workload": "chats", "is_async": False},
    "chats_async": {"workload": "chats", "is_async": True},
}


def shell_tree(*names: str) -> ast.Module:
    """The sources of the shell, which decide which calls there are."""
    return ast.parse("\n".join((ENGINES / f"{name}.py").read_text() for name in names))


def shell_calls() -> list[str]:
    """The calls of a VllmCache in the shell: names, number of positional arguments, names of the others."""
    found = set()
    for node in ast.walk(shell_tree("queue", "manager")):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            of = node.func.value
            owner = of.attr if isinstance(of, ast.Attribute) else of.id if isinstance(of, ast.Name) else ""
            if owner in ("radixkv", "_cache"):
                named = ", ".join(sorted(f"{each.arg}=" for each in node.keywords))
                found.add(f"{node.func.attr}({len(node.args)}; {named})")
    return sorted(found)


def shell_methods() -> dict[str, list[str]]:
    """The public methods of the shell's manager, with the names of their parameters."""
    (manager,) = (
        node
        for node in shell_tree("manager").body
        if isinstance(node, ast.ClassDef) and node.name == "RadixManager"
    )
    return {
        node.name: [each.arg for each in node.args.args[1:]]
        for node in manager.body
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
    }


def vllm_signatures() -> dict[str, list[str]]:
    """The methods of vLLM's own manager, with the names of their parameters. Needs vLLM."""
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    return {
        name: list(inspect.signature(found).parameters)[1:]
        for name, found in inspect.getmembers(KVCacheManager, inspect.isfunction)
        if not name.startswith("_")
    }


def plain(answer: Any) -> Any:
    """An answer as JSON has it."""
    if isinstance(answer, tuple):
        return [plain(each) for each in answer]
    return [plain(each) for each in answer] if isinstance(answer, list) else answer


class _Hold:
    """A copy's source, whose end is written."""

    def __init__(self, log: _Log, number: int, source: Any) -> None:
        self._log, self._number, self._source = log, number, source

    def lift(self) -> None:
        self._log.write(["lift", self._number])
        self._source.lift()


class Recorded(VllmCache):
    """A VllmCache that writes its calls to the file RADIXKV_TRACE."""

    def __init__(self, num_blocks: int, block_size: int, max_model_len: int, **named: Any) -> None:
        import vllm

        self._log: _Log | None = None
        super().__init__(num_blocks, block_size, max_model_len, **named)
        settings = {name: named[name] for name in ("model", "policy", "scrub", "copies")}
        about = {"vllm": vllm.__version__, "calls": shell_calls(), "signatures": vllm_signatures()}
        size = {"num_blocks": num_blocks, "block_size": block_size, "max_model_len": max_model_len}
        self._log = _Log(Path(os.environ["RADIXKV_TRACE"]), {**about, **size, **settings})
        self._numbers: dict[str, int] = {}
        self._told: list[int] = []
        self._announcements: dict[Any, int] = {}
        self._num_announced = 0
        self._is_inside = False

    def called(self, name: str, call: Callable[..., Any], *given: Any, **named: Any) -> Any:
        """Make a call, and write it unless it is a part of another one."""
        log = self._log
        if log is None or self._is_inside:
            return call(self, *given, **named)
        arguments = inspect.signature(call).bind(self, *given, **named).arguments
        arguments.pop("self")
        request_id = arguments.get("request_id")
        if request_id is not None and request_id not in self._numbers and "facts" not in arguments:
            return call(self, *given, **named)  # the cache never heard of this request
        request = self._read(arguments)
        self._is_inside = True
        try:
            answer = call(self, *given, **named)
        finally:
            self._is_inside = False
        arguments = {key: sorted(of) if isinstance(of, set) else of for key, of in arguments.items()}
        if name == "take_copies":
            log.write([name, None, {}, [[source, target] for source, target, _ in answer]])
            return [(a, b, _Hold(log, log.returned(), hold)) for a, b, hold in answer]
        if name == "announce":
            tenant, announcement, missing = answer
            if announcement is not None:
                self._announcements[announcement] = self._num_announced
                self._num_announced += 1
            log.write([name, request, arguments, [tenant, announcement is not None, missing]])
            return answer
        log.write([name, request, arguments, plain(answer)])
        return answer

    def withdraws(self, announcement: Any) -> None:
        """Write that an announcement ends."""
        if self._log is not None and announcement is not None:
            self._log.write(["withdraw", self._announcements.pop(announcement)])

    def _read(self, arguments: dict[str, Any]) -> int | None:
        """Write what is new of the request in a call's arguments, and take it out of them. Returns its number."""
        log, request_id = self._log, arguments.pop("request_id", None)
        facts, ids = arguments.pop("facts", None), arguments.pop("ids", None)
        assert log is not None
        if request_id is not None and request_id not in self._numbers:
            assert facts is not None and ids is not None, request_id
            self._numbers[request_id] = len(self._numbers)
            log.write(["request", log.ids(ids), self._facts(request_id, facts)])
            self._told.append(len(ids))
        number = self._numbers.get(request_id)
        if ids is not None and number is not None and len(ids) > self._told[number]:
            log.write(["more", number, list(ids[self._told[number] :])])
            self._told[number] = len(ids)
        return number

    def _facts(self, request_id: str, facts: Any) -> list[Any]:
        assert not self.knows(request_id)
        return list(astuple(facts))


def _recorded(name: str) -> Callable[..., Any]:
    call = getattr(VllmCache, name)
    return lambda self, *given, **named: self.called(name, call, *given, **named)


for _name in RECORDED:
    setattr(Recorded, _name, _recorded(_name))


def register() -> None:
    """Have a vLLM in this process record."""
    from radixkv.engines.vllm import manager as shell
    from radixkv.engines.vllm.queue import RadixQueue

    withdraw = RadixQueue._withdraw

    def withdrawing(queue: Any, handle: Any) -> None:
        queue._cache.withdraws(queue._announced.get(handle))
        withdraw(queue, handle)

    shell.VllmCache = Recorded  # type: ignore[misc]
    RadixQueue._withdraw = withdrawing  # type: ignore[method-assign]


def main() -> None:
    """Record all runs."""
    TRACES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        from radixkv.engines.hf import demo_model

        folder = Path(place)
        model = demo_model(vocab_size=2048, num_layers=2, hidden_size=256, max_model_len=4096)
        model.save_pretrained(folder / "model")
        for name in RUNS:
            packed = gzip.compress(record(name, str(folder / "model"), folder).read_bytes(), mtime=0)
            (TRACES / f"{name}.jsonl.gz").write_bytes(packed)


def record(name: str, model: str, folder: Path) -> Path:
    """Record one run in a small pool, and return the trace."""
    from tests.engines.vllm.test_same_tokens import ran

    trace = folder / f"{name}.jsonl"
    ran("radixkv", model, blocks=150, trace=str(trace), **RUNS[name])
    return trace


def calls_of(lines: Iterator[Any]) -> dict[str, int]:
    """How often each call is in a trace, without its first line."""
    counts: dict[str, int] = {}
    for line in list(lines)[1:]:
        counts[line[0]] = counts.get(line[0], 0) + 1
    return counts


if __name__ == "__main__":
    main()
