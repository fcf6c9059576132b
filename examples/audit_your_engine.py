"""Audit an engine of your own for isolation: ten lines between its prefix cache and the two-system machine.

    python examples/audit_your_engine.py

``MyEngine`` stands for whatever you have. The machine makes two of them, plays the same requests of one tenant on
both, other tenants' requests on one, and compares all that the tenant observes. If your engine has more calls
(``append``, ``fork``, ``purge``, ``read``, …: see ``radixkv.audit.properties.adapter``), give them to the adapter.
"""

from __future__ import annotations

from radixkv.audit import properties


class MyEngine:
    """An engine with a prefix cache: for each tenant the prompts that it has computed, 16 tokens a block."""

    def __init__(self) -> None:
        self.prompts: dict[tuple[str, str], list[list[int]]] = {}

    def num_cached(self, tenant: str, salt: str, ids: list[int]) -> int:
        """Leading tokens of ``ids`` that needn't be computed."""
        seen = self.prompts.get((tenant, salt), [])
        return max(
            (n for n in range(0, len(ids) + 1, 16) for known in seen if known[:n] == ids[:n]), default=0
        )

    def remember(self, tenant: str, salt: str, ids: list[int]) -> None:
        """``ids`` are computed."""
        self.prompts.setdefault((tenant, salt), []).append(ids[: len(ids) // 16 * 16])


class Adapter(MyEngine):  # ten lines: what your engine calls its things
    block_size = 16

    def match(self, namespace, ids):
        return self.num_cached(namespace.tenant, repr(namespace[1:]), list(ids))

    def open(self, namespace, ids):
        return (namespace, list(ids)), self.match(namespace, ids[:-1])

    def commit(self, request, num_tokens):
        self.remember(request[0].tenant, repr(request[0][1:]), request[1][:num_tokens])

    def release(self, request):
        pass


def audit(examples: int = 300) -> properties.PropertyReport:
    """Attack the engine with so many lives."""
    return properties.run_adapter(Adapter, max_examples=examples)


if __name__ == "__main__":
    report = audit()
    print(report.failure or f"nothing found in {report.examples} lives of {report.steps} steps")
