"""The metadata store: its contract, its records, and its implementations."""

from __future__ import annotations

from radixkv._compiled import follow

follow(__path__, "store")
