"""Adapters between engines and the cache. Each has its own optional dependency.

``radixkv.engines.hf`` serves transformers models. This package itself imports nothing.
"""
