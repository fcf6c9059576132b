"""Audit an engine of your own for isolation: ten lines between its prefix cache and the two-system machine.

    python examples/audit_your_engine.py

Replace ``MyEngine`` by your engine. The machine creates two of them. It sends one tenant's requests to both, and
other tenants' requests to one. Then it compares everything that the tenant observes. If your engine has more calls
(``append``, ``fork``, ``purge``, ``read``, …: see ``radixkv.audit.properties.adapter``), add them to the adapter.
"""

from __future__ import annotations

from radixkv.audit import properties


class MyEngine:
    """An engine with a prefix cache of blocks of 16 tokens. It stores each tenant's computed prompts."""

    def __init__(self) -> None:
        self.prompts: dict[tuple[str, str], list[list[int]]] = {}

    def num_cached(self, tenant: str, salt: str, ids: list[int]) -> int:
        """The number of leading tokens of ``ids`` that are cached."""
        seen = self.prompts.get((tenant, salt), [])
        return max(
            (n for n in range(0, len(ids) + 1, 16) for known in seen if known[:n] == ids[:n]), default=0
        )

    def remember(self, tenant: str, salt: str, ids: list[int]) -> None:
        """Store ``ids`` as computed."""
        self.prompts.setdefault((tenant, salt), []).append(ids[: len(ids) // 16 * 16])


class Adapter(MyEngine):  # ten lines: they map the machine's calls to your engine's
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
    """Test the engine with ``examples`` random lives."""
    return properties.run_adapter(Adapter, max_examples=examples)


if __name__ == "__main__":
    report = audit()
    print(report.failure or f"nothing found in {report.examples} lives of {report.steps} steps")
