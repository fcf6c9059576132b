"""The machine of a cache whose tenant a has a lossy ``tier_dtype``, in addition to all that ``LoadingMachine`` does.

Tenant a changes its dtype now and then. Tenant b is exact, and all that it reads is compared bit for bit, always. So is
what a reads while it is exact, but for what it held when its dtype changed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from radixkv.audit.properties.loading_machine import LoadingMachine
from radixkv.audit.properties.material import MAX_OPEN, NAMESPACES, Held, Mirror, prompts, where_to
from radixkv.config import CacheConfig, KVLayout, Namespace, Tenant, TierDtype

LOSSY: Final = "a"
ERROR: Final = 2.0**-14
"""More than the relative error of a vector of one value in any lossy dtype, and far less than between two prompts."""


def with_lossy_memory(config: CacheConfig, layout: KVLayout) -> CacheConfig:
    """Return a configuration with three times as many blocks of lossy memory, and a layout that can be quantised."""
    layout = replace(layout, dtype="float32")
    return replace(config, layout=layout, lossy_host_blocks=3 * config.num_blocks)


class LossyMachine(LoadingMachine):
    """A cache under attack, with lossy host memory below it."""

    def start(self, config: CacheConfig) -> None:
        """Make an empty cache with lossy memory below it, and a lossy tenant."""
        self.dtype: TierDtype = "exact"
        self.old: list[Any] = []
        """What read KV when the dtype changed."""
        if config.layout is not None:
            config = with_lossy_memory(config, config.layout)
        super().start(config)
        self._set("int8")

    @precondition(lambda self: not self.away)
    @rule(dtype=st.sampled_from(("exact", "fp8", "int8")))
    def change_dtype(self, dtype: TierDtype) -> None:
        """A tenant's KV are kept in another way from now on. All that it has is forgotten."""
        is_other = dtype != self.dtype
        if is_other:
            self.old += [*self.held, *self.runs, *(run for _, run, _ in self.fenced)]
        self._set(dtype)
        for namespace in NAMESPACES if is_other else ():
            if namespace.tenant == LOSSY:
                self._cleared(namespace)

    @precondition(lambda self: len(self.runs) < MAX_OPEN and not self.away)
    @rule(dtype=st.sampled_from(("exact", "fp8", "int8")), where=where_to, prompt=prompts)
    def come_back_after_a_change(self, dtype: TierDtype, where: int, prompt: tuple[int, ...]) -> None:
        """A long prompt is served and evicted after the change, and comes again as it is kept now."""
        self.change_dtype(dtype)
        self.come_back(where, prompt, "", "poll", 1, ())

    def _set(self, dtype: TierDtype) -> None:
        settings = self.cache.config.default_tenant or Tenant(LOSSY)
        self.cache.add_tenant(replace(settings, id=LOSSY, tier_dtype=dtype))
        self.dtype = dtype

    def _error_of(self, owner: Mirror | Held | Namespace) -> float:
        namespace = owner if isinstance(owner, Namespace) else owner.namespace
        if namespace.tenant != LOSSY:
            return 0.0
        is_old = (isinstance(owner, Mirror) and owner.forgotten) or any(owner is each for each in self.old)
        return ERROR if is_old or self.dtype != "exact" else 0.0
