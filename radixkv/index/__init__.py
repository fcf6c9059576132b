"""The index: radix trees of tenants over reference-counted blocks. ``cache.py`` is its interface."""

from __future__ import annotations

from radixkv._compiled import follow

follow(__path__)
