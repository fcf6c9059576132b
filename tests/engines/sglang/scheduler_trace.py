"""Recorded calls of SGLang's scheduler to a SglangCache, and their answers: written in SGLang, replayed without it.

    python -m tests.engines.sglang.scheduler_trace        records anew, with the SGLang that RADIXKV_SGLANG names

A trace is a gzip file of JSON lines. The first is about the run; each other one is a call, with its answer at the end:

    ["ids", base, common, more]      ids that later calls name by their number: the first ``common`` of an earlier one
    ["namespace", salt, extra]       a namespace; they have numbers too, like nodes and leases
    ["match", namespace, ids, tokens]
    ["touch", namespace, ids]
    ["insert", namespace, ids, pages, start, after, priority, labels, resident, surplus, evicted]
                                     leases what it inserts
    ["lock", node]                   a node is the number of the match or insert that returned it, null for the root
    ["release", lease]               a lease is the number of the lock or insert that returned it
    ["reclaim", pages, answer]
    ["reset"]
"""

from __future__ import annotations

import ast
import gzip
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from radixkv.engines.sglang.cache import ROOT, Node, SglangCache, Taken
from radixkv.index.leases import Lease

HERE = Path(__file__).parent
TRACES = HERE / "traces"
SHELL = HERE.parents[2] / "radixkv" / "engines" / "sglang" / "plugin.py"
_LOOKED_AT = 256
"""Earlier ids that new ones are compared with."""


def shell_digest() -> str:
    """A digest of the file that decides which calls SGLang's scheduler makes, without imports and docstrings."""
    text = SHELL.read_text()
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        is_text = (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        )
        if is_text or isinstance(node, (ast.Import, ast.ImportFrom)):
            lines[node.lineno - 1 : node.end_lineno] = [""] * (node.end_lineno - node.lineno + 1)
    return hashlib.sha256("\n".join(filter(None, lines)).encode()).hexdigest()[:16]


def read(path: Path) -> Iterator[Any]:
    """The lines of a trace, packed or as a run left it."""
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        yield from map(json.loads, lines)


class _Log:
    """Writes a trace."""

    def __init__(self, path: Path, about: dict[str, Any]) -> None:
        self._file = path.open("w")  # SGLang ends its processes without closing it, so each line is flushed
        self._ids: list[list[int]] = []
        self._namespaces: dict[Any, int] = {}
        self.num_returned = 0
        self.write(about)

    def write(self, line: Any) -> None:
        self._file.write(json.dumps(line, separators=(",", ":")) + "\n")
        self._file.flush()

    def ids(self, ids: Any) -> int:
        """The number of ids, which are written first if they are new."""
        new, best, base = list(ids), 0, 0
        for number in range(len(self._ids) - 1, max(-1, len(self._ids) - _LOOKED_AT), -1):
            old = self._ids[number]
            if old == new:
                return number
            common = next((at for at, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), None)
            common = min(len(old), len(new)) if common is None else common
            if common > best:
                best, base = common, number
        self._ids.append(new)
        self.write(["ids", base, best, new[best:]])
        return len(self._ids) - 1

    def namespace(self, found: Any, salt: str | None, extra: str | None) -> int | None:
        if found is not None and found not in self._namespaces:
            self._namespaces[found] = len(self._namespaces)
            self.write(["namespace", salt, extra])
        return None if found is None else self._namespaces[found]

    def number(self, namespace: Any) -> int | None:
        return None if namespace is None else self._namespaces[namespace]

    def returned(self) -> int:
        self.num_returned += 1
        return self.num_returned - 1


class _Held:
    """A lease whose release is written."""

    def __init__(self, log: _Log, number: int, lease: Lease) -> None:
        self._log, self._number, self._lease = log, number, lease

    def release(self) -> None:
        self._log.write(["release", self._number])
        self._lease.release()


class Recorded(SglangCache):
    """A SglangCache that writes its calls to the file RADIXKV_TRACE."""

    def __init__(self, num_pages: int, page_size: int, **named: Any) -> None:
        import sglang

        super().__init__(num_pages, page_size, **named)
        about = {"sglang": sglang.__version__, "shell": shell_digest(), "policy": named["policy"]}
        self._log = _Log(
            Path(os.environ["RADIXKV_TRACE"]), {**about, "num_pages": num_pages, "page_size": page_size}
        )
        self._nodes: dict[int, tuple[int, Node]] = {}  # the node itself: so its id stays its own

    def namespace(self, cache_salt: str | None, extra_key: str | None) -> Any:
        found = super().namespace(cache_salt, extra_key)
        self._log.namespace(found, cache_salt, extra_key)
        return found

    def match(self, namespace: Any, ids: Any) -> Node:
        number, found = self._log.ids(ids), super().match(namespace, ids)
        self._log.write(["match", self._log.number(namespace), number, found.num_tokens])
        return self._returned(found)

    def touch(self, namespace: Any, ids: Any) -> None:
        self._log.write(["touch", self._log.number(namespace), self._log.ids(ids)])
        super().touch(namespace, ids)

    def insert(
        self,
        namespace: Any,
        ids: Any,
        pages: Any,
        start: int = 0,
        *,
        after: Node | None = None,
        lease: bool = False,
        priority: int = 0,
        labels: Any = (),
    ) -> Taken | None:
        assert lease
        number = self._log.ids(ids)
        behind = None if after is None or after is ROOT else self._nodes[id(after)][0]
        taken = super().insert(
            namespace, ids, pages, start, after=after, lease=True, priority=priority, labels=labels
        )
        call = [
            "insert",
            self._log.number(namespace),
            number,
            pages.tolist(),
            start,
            behind,
            priority,
            labels,
        ]
        if taken is None:
            self._log.write([*call, None, None, None])
            self._log.returned()
            return None
        answer = taken.num_resident_tokens, taken.surplus.tolist(), taken.evicted.tolist()
        self._log.write([*call, *answer])
        at = self._log.num_returned
        self._returned(taken.node)
        assert taken.lease is not None
        held: Any = _Held(self._log, at, taken.lease)
        return taken._replace(lease=held)

    def lock(self, node: Node) -> Any:
        found = super().lock(node)
        if found is None:
            return None
        self._log.write(["lock", self._nodes[id(node)][0]])
        return _Held(self._log, self._log.returned(), found)

    def reclaim(self, num_pages: int) -> Any:
        found = super().reclaim(num_pages)
        self._log.write(["reclaim", num_pages, found.tolist()])
        return found

    def reset(self) -> None:
        self._log.write(["reset"])
        super().reset()

    def _returned(self, node: Node) -> Node:
        self._nodes[id(node)] = self._log.returned(), node
        return node


def register() -> None:
    """Have SGLang's processes record, where RADIXKV_TRACE is set. SGLang calls this as it loads its plug-ins."""
    if "RADIXKV_TRACE" in os.environ:
        from radixkv.engines.sglang import plugin as shell

        shell.SglangCache = Recorded  # type: ignore[misc]


def main() -> None:
    """Record at pages 1 and 16."""
    from tests.engines.sglang.runs import make_folder

    TRACES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        folder = make_folder(Path(place))
        for page in (1, 16):
            plain = record(folder, page, Path(place) / f"chats_{page}.jsonl")
            packed = gzip.compress(plain.read_bytes(), mtime=0)
            (TRACES / f"{plain.name}.gz").write_bytes(packed)


def record(folder: Path, page: int, trace: Path) -> Path:
    """Record the chats with little room, and return the trace."""
    from tests.engines.sglang.runs import answer_of

    given = {"cache": "radixkv", "model": str(folder / "model"), "page": page, "tokens": 2_304, "seed": 0}
    argument = json.dumps(given | {"workload": "chats", "is_overlapping": False})
    variables = (("RADIXKV_POLICY", "lru"), ("RADIXKV_TRACE", str(trace)))
    answer_of("in_process.py", argument, folder, variables)
    return trace


if __name__ == "__main__":
    main()
