"""The tests. They are a package, so that shared parts import as ``tests.<name>`` in any environment."""
