"""The tests. A package, so that shared parts import as ``tests.<name>`` whatever else is installed."""
