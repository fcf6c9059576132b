"""The trace simulator: what `radixkv simulate` computes, and the traces that `radixkv workload` generates.

``simulate``, ``simulate_tiers``, ``simulate_serving`` and ``simulate_grid`` have ``run(…) -> dict`` and ``table``. The
other modules are their parts: traces, replay through a real cache, the offline optimum, scores, the report.
"""
