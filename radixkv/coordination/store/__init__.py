"""The metadata store: what it promises, its records, and its implementations."""

from __future__ import annotations

from radixkv._compiled import follow

follow(__path__, "store")
