"""Adapters between engines and the cache, each behind its own optional dependency.

``radixkv.engines.hf`` serves transformers models. This package itself imports nothing.
"""
