"""The trace simulator's parts: traces, replay through a live cache, the offline optimum, scores, the report."""
