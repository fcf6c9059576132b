"""Parts of the trace simulator: traces, replay through a real cache, the offline optimum, scores, the report."""
