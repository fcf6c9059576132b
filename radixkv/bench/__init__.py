"""Benchmarks that users run on their own machines. Each module has ``run(…) -> dict`` and says what it compares."""
