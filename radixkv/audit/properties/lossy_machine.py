"""The machine of a cache with a lossy ``tier_dtype``: ``LoadingMachine``, where KV may have small errors.

Half of the lives have fp8, half int8. What a sequence reads differs from what was computed by less than ``ERROR``: far
less than between two prompts, and than between two namespaces.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Final

from radixkv.audit.properties.loading_machine import LoadingMachine
from radixkv.config import LOSSY_DTYPES, CacheConfig, TierDtype

ERROR: Final = 2.0**-14
"""More than the relative error of a vector of one value in any lossy dtype, and far less than between two prompts."""


def with_lossy_memory(config: CacheConfig, dtype: TierDtype) -> CacheConfig:
    """Return a configuration with lossy memory below of three times as many blocks, and a layout that allows it."""
    layout = None if config.layout is None else replace(config.layout, dtype="float32")
    return replace(config, layout=layout, host_blocks=3 * config.num_blocks, tier_dtype=dtype)


class LossyMachine(LoadingMachine):
    """A cache under attack, with lossy host memory below it."""

    error: ClassVar[float] = ERROR

    def start(self, config: CacheConfig) -> None:
        """Make an empty cache with lossy memory below it."""
        number = config.block_size // 2 + config.writes_before_reads
        super().start(with_lossy_memory(config, LOSSY_DTYPES[number % len(LOSSY_DTYPES)]))
