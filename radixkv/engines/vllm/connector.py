"""Host memory and a disk behind vLLM's own cache: a KV connector of vLLM 0.32.

    python -m vllm.entrypoints.openai.api_server --model … --kv-transfer-config '{
        "kv_connector": "RadixConnector", "kv_connector_module_path": "radixkv.engines.vllm.connector",
        "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"host_memory": "8GiB"}}'

The settings of ``kv_connector_extra_config`` are those of ``ConnectorSettings``. The scheduler's half decides
(``steps``), each worker holds its own shard of every block (``host.memory``). Loads happen between steps, so a
request waits until its load has ended, and what fails is computed by vLLM as any other token.

With ``"disk": FOLDER, "disk_size": "200GiB", "fleet_secret": FILE`` saved blocks are also kept on disk, sealed, and
come back after an eviction or a restart (``disk.tier``). This needs one worker, in the engine's own process.

Settings of tenants count in blocks of host memory, and in proportion on the disk, which keeps nothing of strict tenants
(``level_tenants``). ``"tenants": {"acme": {"mode": "strict", "guaranteed_blocks": 4096}}`` holds from the first step
on. What the control channel sets ends with the process.

vLLM's ``reset_prefix_cache(reset_connector=True)`` and new weights (``weights``) forget everything here, and begin
another version of the weights. A purge by the control channel reaches this level only. vLLM's own cache is keyed by
salts, so salts of a newer generation find nothing of an older one there.

Refused at the start, by name: another version of vLLM, several groups of KV blocks, anything but full attention or MLA,
context parallelism, and the policy that a failed load fails its request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from radixkv.engines.control.server import ControlServer
from radixkv.engines.vllm import weights
from radixkv.engines.vllm.settings import ConnectorSettings
from radixkv.engines.vllm.steps import COUNTS, VllmSteps
from radixkv.engines.vllm.tenants import OWED, LevelTenants
from radixkv.errors import ConfigError
from radixkv.signing import KeySet
from radixkv.tenancy.request_keys import facts_of
from radixkv.tenancy.salt import SaltReader
from radixkv.tiers.host.memory import HostBlocks, StepReport, StepWork
from radixkv.tiers.host.steps import MAX_STAGED_BLOCKS
from radixkv.tiers.settings import disk_errors

VERSIONS = ("0.32.",)
"""Versions of vLLM whose connectors this is one of."""
_MEMORY: dict[str, HostBlocks] = {}
"""Host memory of workers in this process, by the id of their engine, until the scheduler's half takes it."""


@dataclass
class RadixMetadata(KVConnectorMetadata):
    work: StepWork


@dataclass
class RadixWorkerMetadata(KVConnectorWorkerMetadata):
    """From the workers to the scheduler."""

    report: StepReport

    def aggregate(self, other: RadixWorkerMetadata) -> RadixWorkerMetadata:
        """Add another worker's report."""
        self.report.add(other.report)
        return self


@dataclass
class RadixStats(KVConnectorStats):
    """Counts since the last step, by name. Those of several workers are added up."""

    data: dict[str, Any] = field(default_factory=dict)

    def reset(self) -> None:
        """Forget the counts."""
        self.data = {}

    def aggregate(self, other: RadixStats) -> RadixStats:
        """Add other counts, which are newer."""
        for name, count in other.data.items():
            self.data[name] = count if name == OWED else self.data.get(name, 0) + count
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return the counts, for vLLM's log."""
        return dict(self.data)

    def is_empty(self) -> bool:
        """Whether there is no news."""
        return not self.data


class RadixMetrics(KVConnectorPromMetrics):
    """The counts as Prometheus counters ``vllm:radixkv_…_total``, and the gauge ``vllm:radixkv_disk_owed_purges``.

    vLLM takes them at its steps. What an idle engine owes is in the control channel's ``stats``.
    """

    def __init__(
        self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {
            name: self._counter_cls(name=f"vllm:radixkv_{name}", documentation=meaning, labelnames=labelnames)
            for name, meaning in COUNTS.items()
        }
        self._owed = self._gauge_cls(
            name=f"vllm:radixkv_{OWED}",
            documentation="tenants that were purged, and whose records the disk couldn't destroy yet",
            multiprocess_mode="mostrecent",
            labelnames=labelnames,
        )
        for values in per_engine_labelvalues.values():
            self._owed.labels(*values).set(0)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add counts."""
        values = self.per_engine_labelvalues[engine_idx]
        for name, count in transfer_stats_data.items():
            if name == OWED:
                self._owed.labels(*values).set(count)
            else:
                self._counters[name].labels(*values).inc(count)


class RadixConnector(KVConnectorBase_V1, SupportsHMA):
    """Both halves, one for each role. Arguments and methods are vLLM's."""

    _cache_hit_source = CacheHitSource.HOST

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        _require_known(vllm_config, self._kv_transfer_config)
        spec = _spec_of(kv_cache_config)
        settings = ConnectorSettings.read(self._kv_transfer_config.kv_connector_extra_config)
        block_bytes = (
            sum(each.size for each in kv_cache_config.kv_cache_tensors) // kv_cache_config.num_blocks
        )
        if settings.host_memory is not None and vllm_config.parallel_config.pipeline_parallel_size > 1:
            raise ConfigError("host_memory", settings.host_memory, "host_blocks, with pipeline parallelism")
        self._num_slots = settings.num_slots(block_bytes)
        self._num_engine_blocks = kv_cache_config.num_blocks
        self._requests: dict[str, Any] = {}
        self._control: ControlServer | None = None
        self._blocks: HostBlocks | None = None
        if role == KVConnectorRole.SCHEDULER:
            keys = None if settings.keys is None else KeySet.load(settings.keys)
            salts = None if keys is None else SaltReader(keys, allows_anonymous=settings.anonymous)
            self.radixkv = VllmSteps(
                self._num_slots,
                spec.block_size,
                model=settings.model,
                salts=salts,
                policy=settings.policy,
                scrub=settings.scrub,
                num_workers=vllm_config.parallel_config.world_size,
            )
            self._tenants = LevelTenants(self.radixkv)
            try:
                if settings.disk is not None:
                    self._attach_disk(vllm_config, settings, salts, block_bytes)
                if settings.tenants is not None and keys is not None:
                    self._tenants.configure(settings.tenants, keys)
                if settings.control is not None and settings.keys is not None:
                    self._serve_control(settings, settings.control, settings.keys, salts)
            except BaseException:
                self.shutdown()
                raise
            weights.watch(self.radixkv.reset)

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a save that is lost is a later miss."""
        return False

    def shutdown(self) -> None:
        """Stop the control channel, and give the disk's folder back."""
        if self._control is not None:
            self._control.stop()
            self._control = None
        if self.role == KVConnectorRole.SCHEDULER and self.radixkv.disk is not None:
            self.radixkv.disk.close()
            self.radixkv.disk = None

    def _serve_control(
        self, settings: ConnectorSettings, folder: str, keys_file: str, salts: SaltReader | None
    ) -> None:
        """Serve the control channel. Raises ConfigError."""
        self._control = ControlServer(
            self.radixkv.cache,
            folder,
            keys_file,
            salts=salts,
            weights=lambda: self.radixkv.weights,
            forgetting_below=self._tenants.forgetting,
            knows_below=self._tenants.is_on_disk,
            follow_below=self._tenants.follow,
            on_keys=partial(self._tenants.configure, settings.tenants or {}),
            tiers=self.radixkv.tiers,
        ).__enter__()

    def _attach_disk(
        self, vllm_config: Any, settings: ConnectorSettings, salts: SaltReader | None, block_bytes: int
    ) -> None:
        """Open the disk tier. Raises ConfigError."""
        from radixkv.tiers.disk.records import DiskRecords, DiskSettings
        from radixkv.tiers.disk.tier import DiskTier

        memory = _MEMORY.pop(self._kv_transfer_config.engine_id, None)
        if memory is None or vllm_config.parallel_config.world_size > 1:
            raise ConfigError("disk", settings.disk, "with one worker, in the engine's own process")
        assert settings.disk is not None
        with disk_errors(settings.disk, settings.disk_size):
            tier = DiskRecords(
                DiskSettings(
                    settings.disk,
                    settings.disk_bytes,
                    memory.block_bytes,
                    segment_tokens=self.radixkv.cache.config.block_size,
                    fingerprint=_fingerprint(vllm_config, memory.block_bytes),
                ),
                settings.secrets(),
            )
        fleet_generation = (lambda tenant: 0) if salts is None else salts.generation
        self.radixkv.disk = DiskTier(
            tier,
            self.radixkv.index,
            memory,
            self.radixkv.fill,
            fleet_generation=fleet_generation,
            bytes_per_s=settings.disk_bytes_per_s,
        )
        self.radixkv.disk.purges.keep_retrying()

    # --- the scheduler

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return how many tokens a load would bring; None while another request loads them."""
        self._requests[request.request_id] = request
        num_found = self.radixkv.found(
            request.request_id, facts_of(request), request._all_token_ids, num_computed_tokens
        )
        return num_found, bool(num_found)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Begin a load of so many tokens, if there are any."""
        if num_external_tokens > 0:
            self.radixkv.load(request.request_id, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> RadixMetadata:
        """Return the work of this step: its loads, and saves of what its requests compute."""
        if self._control is not None:
            self._control.run_pending()
        self._tenants.begin_step()
        blocks_of = scheduler_output.kv_connector_block_state.get_block_ids
        for request_id, num_new in scheduler_output.num_scheduled_tokens.items():
            request = self._requests.get(request_id)
            if request is not None:
                num_computed = request.num_computed_tokens + num_new
                blocks = partial(_first_group, blocks_of, request_id)
                self.radixkv.save(request_id, request._all_token_ids, num_computed, blocks)
        return RadixMetadata(self.radixkv.take_work(scheduler_output.total_num_scheduled_tokens))

    def update_connector_output(self, connector_output: Any) -> None:
        """Take what the workers report of a step."""
        found = connector_output.kv_connector_worker_meta
        report = found.report if isinstance(found, RadixWorkerMetadata) else StepReport()
        self.radixkv.reported(report, connector_output.invalid_block_ids)
        self.radixkv.loads_ended(connector_output.finished_recving or ())

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Forget a request. Its blocks can be freed: saves have read them in their step."""
        self._requests.pop(request.request_id, None)
        self.radixkv.forget(request.request_id)
        return False, None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Forget a request."""
        return self.request_finished(request, block_ids[0])

    def reset_cache(self) -> bool:
        """Forget everything. False if a load still runs: reset again after it."""
        self.radixkv.reset()
        return not self.radixkv.is_loading

    # --- a worker

    def register_kv_caches(self, kv_caches: Any) -> None:
        """Take host memory for the blocks of these tensors."""
        staged = 0
        if "disk" in self._kv_transfer_config.kv_connector_extra_config:
            staged = max(min(self._num_slots // 4, MAX_STAGED_BLOCKS), 1)
        self._blocks = HostBlocks(self._num_slots, kv_caches, self._num_engine_blocks, num_staging=staged)
        if staged:
            _MEMORY[self._kv_transfer_config.engine_id] = self._blocks

    def start_load_kv(self, forward_context: Any, **named: Any) -> None:
        """Load."""
        self._worker.load(self._step)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: no step reads what it loads."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **named: Any) -> None:
        """Do nothing: all layers are saved at once, at the end of the step."""

    def wait_for_save(self) -> None:
        """Save what the step computed."""
        self._worker.save(self._step)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Return the requests whose loads have ended, well or not."""
        return None, self._worker.take_loaded() or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks that were not loaded, though they were to be."""
        return self._worker.take_invalid()

    def build_connector_worker_meta(self) -> RadixWorkerMetadata | None:
        """Return what became of steps, for the scheduler."""
        report = self._worker.take_report()
        return None if report.is_empty else RadixWorkerMetadata(report)

    @property
    def _worker(self) -> HostBlocks:
        assert self._blocks is not None
        return self._blocks

    @property
    def _step(self) -> StepWork:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, RadixMetadata)
        return metadata.work

    # --- both

    def get_kv_connector_stats(self) -> RadixStats | None:
        """Return counts since the last call: a worker's, or the scheduler's."""
        owed: dict[str, int] = {}
        if self._blocks is not None:
            counts = self._blocks.take_counts()
        elif self.role == KVConnectorRole.SCHEDULER:
            counts, owed = self.radixkv.take_counts(), self._tenants.take_owed()
        else:
            return None
        return RadixStats(counts | owed) if owed or any(counts.values()) else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> RadixStats:
        """Return counts of these names."""
        return RadixStats(dict(data or {}))

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> RadixMetrics:
        """Return the Prometheus counters."""
        return RadixMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


def _first_group(blocks_of: Callable[[str], tuple[Sequence[int], ...]], request_id: str) -> Sequence[int]:
    return blocks_of(request_id)[0]


def _fingerprint(vllm_config: Any, block_bytes: int) -> bytes:
    """Return what decides the bytes of a block. A model in a folder counts with the sizes and times of its files."""
    from radixkv.tiers.disk.identity import fingerprint_of

    model, cache = vllm_config.model_config, vllm_config.cache_config
    files = [each for each in sorted(Path(model.model).glob("*")) if each.is_file()]
    return fingerprint_of(
        vllm=vllm.__version__,
        model=str(model.model),
        revision=str(model.revision),
        files=repr([(each.name, each.stat().st_size, each.stat().st_mtime_ns) for each in files]),
        dtype=str(model.dtype),
        quantization=str(model.quantization),
        cache_dtype=str(cache.cache_dtype),
        block_size=cache.block_size,
        block_bytes=block_bytes,
        platform=vllm.platforms.current_platform.device_name,
    )


def _spec_of(kv_cache_config: Any) -> Any:
    """Return the kind of the only group of blocks. Raises ConfigError."""
    groups = kv_cache_config.kv_cache_groups
    kinds = ", ".join(type(group.kv_cache_spec).__name__ for group in groups)
    if len(groups) != 1 or type(groups[0].kv_cache_spec) not in (FullAttentionSpec, MLAAttentionSpec):
        raise ConfigError("kv_cache_groups", kinds, "one group of full attention or MLA")
    return groups[0].kv_cache_spec


def _require_known(vllm_config: Any, transfer: Any) -> None:
    """Raise ConfigError for what the connector can't serve."""
    if not vllm.__version__.startswith(VERSIONS):
        raise ConfigError("vllm", vllm.__version__, " or ".join(f"{each}x" for each in VERSIONS))
    if transfer.kv_role != "kv_both":
        raise ConfigError("kv_role", transfer.kv_role, "kv_both")
    if transfer.kv_load_failure_policy != "recompute":
        raise ConfigError("kv_load_failure_policy", transfer.kv_load_failure_policy, "recompute")
    parallel = vllm_config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name) > 1:
            raise ConfigError(name, getattr(parallel, name), "1")
