"""The sizes of a plan: what a machine holds of a model's KV, and what that is worth.

On each of the GPUs, which divide the model (tensor parallel):

    usable    = GPU's memory × utilisation
    KV        = usable − weights − reserved
    blocks    = KV ÷ bytes of a block on this GPU
    requests  = KV ÷ bytes of a request, in whole blocks and with its states

``reserved`` is for activations, graphs and the driver. It is an estimate unless it is given: a GiB, the activations of
``STEP_TOKENS`` tokens, and the logits of 256 requests. Host memory and disks hold blocks of all GPUs.

``describe`` reads a model, ``Planner`` computes its sizes, and ``Planner.result`` is the plan as a dict.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from radixkv.config import LOSSY_DTYPES, QUANTIZABLE, TierDtype
from radixkv.errors import ConfigError
from radixkv.files.system import PAGE_BYTES, round_up
from radixkv.simulator.plan.families import KNOWN, from_tensors, model_of
from radixkv.simulator.plan.kv import PLAIN_BYTES, Attention, IndexKeys, Kept, dtypes_for
from radixkv.simulator.plan.model import DTYPES, Model
from radixkv.simulator.plan.reading import Fields, read_config, tensors_in
from radixkv.simulator.plan.weights import Quantisation, bytes_of_tensors, share_of_a_gpu, total_bytes
from radixkv.simulator.profiles import DEFAULT_TFLOPS, ModelProfile
from radixkv.simulator.trace import Trace
from radixkv.sizes import GIB

STEP_TOKENS: Final = 8_192
"""Tokens that an engine computes at once."""
TYPICAL_TOKENS: Final = 4_096
"""Tokens of an expected request, if nobody says and there is no trace."""
UTILISATION: Final = 0.9
_CONTEXT_BYTES: Final = GIB
_LOGITS_REQUESTS: Final = 256
_HOURS_OF_A_MONTH: Final = 730
_DISK_HEADER_BYTES: Final = 128
_CODEC_ALIGNMENT: Final = 64
_SCALE_BYTES: Final = 4
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Machine:
    """What there is. ``gpu_bytes``: of one GPU. ``reserved_bytes``: of one GPU; None for an estimate."""

    gpu_bytes: int
    gpus: int = 1
    host_bytes: int = 0
    disk_bytes: int = 0
    utilisation: float = UTILISATION
    reserved_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Options:
    """How it is used. None: the model's own dtype, its whole context, the trace's mean."""

    block_size: int = 16
    dtype: str | None = None
    kv_dtype: str | None = None
    tier_dtype: TierDtype = "exact"
    context: int | None = None
    expected_tokens: int | None = None
    weights_bytes: int | None = None
    policy: str = "learned"
    tflops: float = DEFAULT_TFLOPS
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Prices:
    """Dollars: of a GPU for an hour, of a GiB of host memory or disk for a month."""

    gpu_hour: float = 0.0
    host_gib_month: float = 0.0
    disk_gib_month: float = 0.0


@dataclass(frozen=True, slots=True)
class PlannedProfile(ModelProfile):
    """A profile of a model that was read. ``bytes_per_token``: of its KV, on all GPUs."""

    bytes_per_token: int = 0

    @property
    def kv_bytes_per_token(self) -> int:
        """KV bytes per token."""
        return self.bytes_per_token


@dataclass(frozen=True, slots=True)
class Described:
    """A model with its weights. ``source``: where the bytes of the weights come from."""

    path: str
    model: Model
    weights_bytes: int
    source: str
    left_out_bytes: int
    quantisation: str | None

    def profile(self, kept: Kept, tflops: float = DEFAULT_TFLOPS) -> PlannedProfile:
        """Return the profile for a simulation; ``tflops``: of one GPU. Windows count as whole attention."""
        model = self.model
        layers = sum(each.num_layers for each in model.layers if not isinstance(each, IndexKeys))
        parameters = model.num_active_parameters or self.weights_bytes // PLAIN_BYTES[model.dtype]
        return PlannedProfile(
            name=self.path,
            parameters=float(parameters),
            num_layers=max(layers, 1),
            num_heads=model.num_heads,
            head_dim=model.head_dim,
            kv_values=0,
            tflops=tflops * kept.gpus,
            bytes_per_token=max(kept.token_bytes * kept.gpus, 1),
        )


def describe(place: str, dtype: str | None = None, weights_bytes: int | None = None) -> Described:
    """Read a model's folder or its config.json. Reads no data of weights. Raises ConfigError.

    ``dtype``: in place of the model's. ``weights_bytes``: in place of what the files or the config say.
    """
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError("--dtype", dtype, f"one of {', '.join(DTYPES)}")
    fields = read_config(place)
    tensors = tensors_in(Path(place)) if Path(place).is_dir() else None
    is_known = _type_of(fields) in KNOWN
    model = model_of(fields, dtype) if is_known or tensors is None else from_tensors(fields, tensors, dtype)
    text = fields.inner("text_config")
    given = fields.inner("quantization_config") or (text and text.inner("quantization_config")) or None
    method = None if given is None else given.text("quant_method") or "missing"
    if weights_bytes is not None:
        return Described(place, model, weights_bytes, "--weights", 0, method)
    if tensors is not None:
        loaded, left = bytes_of_tensors(tensors, model.num_layers, model.dtype)
        return Described(place, model, loaded, "safetensors", left, method)
    if model.left_out:
        allowed = (
            "none without its safetensors files beside the config.json, or --weights: its size isn't known"
        )
        raise ConfigError(f"{fields.path}: {model.left_out[0]}", "an object", allowed)
    quantisation = None if given is None else Quantisation(given)
    found = total_bytes(model.matrices, model.dtype, quantisation)
    return Described(place, model, found, "config", 0, None if quantisation is None else quantisation.name)


def _type_of(fields: Fields) -> str | None:
    text = fields.inner("text_config")
    kind = None if text is None else text.text("model_type")
    return kind or fields.text("model_type")


class Planner:
    """The sizes of a model on a machine."""

    def __init__(self, described: Described, machine: Machine, options: Options) -> None:
        self.described, self.machine, self.options = described, machine, options
        self.model, self.gpus = described.model, machine.gpus
        if self.model.num_heads % self.gpus:
            raise ConfigError("--gpus", self.gpus, f"a divisor of the {self.model.num_heads} attention heads")
        self.kept = self._kept(options.kv_dtype or self.model.dtype)
        self.context = self._context()
        share = 1 / self.gpus
        if self.model.matrices:
            share = share_of_a_gpu(self.model.matrices, self.gpus, self.model.num_kv_heads)
        self.weights_of_a_gpu = round(described.weights_bytes * share)
        self.reserved = self._reserved() if machine.reserved_bytes is None else machine.reserved_bytes
        self.usable = int(machine.gpu_bytes * machine.utilisation)
        self.kv_bytes = self.usable - self.weights_of_a_gpu - self.reserved
        least = self.kept.request_bytes(self.options.block_size, STEP_TOKENS)
        if self.kv_bytes < least:
            needed = (self.weights_of_a_gpu + self.reserved + least) / machine.utilisation
            allowed = (
                f"at least {needed / GIB:.1f} GiB: weights take {self.weights_of_a_gpu / GIB:.1f} GiB of each of "
                f"{self.gpus} GPUs, {self.reserved / GIB:.1f} GiB are reserved, and {machine.utilisation:.0%} are used"
            )
            raise ConfigError("--gpu", f"{machine.gpu_bytes / GIB:.4g} GiB", allowed)

    def _kept(self, dtype: str) -> Kept:
        kept = Kept(self.model.layers, self.model.states, dtype, self.gpus, self.options.block_size)
        kept.token_bytes, kept.state_bytes  # noqa: B018 raises for a dtype or a number of GPUs that doesn't fit
        return kept

    def _context(self) -> int:
        most, given = self.model.max_tokens, self.options.context
        if given is None and most is None:
            raise ConfigError("--context", None, "tokens: the config names no max_position_embeddings")
        if given is not None and most is not None and given > most:
            raise ConfigError("--context", given, f"at most the {most:,} tokens of the model")
        return given or most or 1

    def _reserved(self) -> int:
        model, width = self.model, PLAIN_BYTES[self.model.dtype]
        activations = STEP_TOKENS * (4 * model.hidden_size + 2 * model.widest // self.gpus) * width
        return _CONTEXT_BYTES + activations + 2 * 4 * _LOGITS_REQUESTS * model.vocab_size // self.gpus

    def expected_tokens(self, trace: Trace | None) -> int:
        """Return the tokens of an expected request."""
        if self.options.expected_tokens is not None:
            return min(self.options.expected_tokens, self.context)
        if trace is None:
            return min(TYPICAL_TOKENS, self.context)
        return min(max(int(np.ceil((trace.prompt_tokens + trace.output_tokens).mean())), 1), self.context)

    def blocks_of_gpu(self, kept: Kept) -> int:
        """Return the blocks of the GPUs, beside the states of as many whole requests as fit."""
        if not kept.block_bytes:
            return 0
        running = kept.num_requests(self.kv_bytes, self.context, STEP_TOKENS)
        return (self.kv_bytes - running * kept.state_bytes) // kept.block_bytes

    def tier_block_bytes(self, kept: Kept, dtype: str) -> int:
        """Return the bytes of a block in host memory: of all GPUs, in this dtype of the tiers."""
        if dtype == "exact":
            return kept.block_bytes * self.gpus
        vectors = dim = 0
        for each in self.model.layers:
            if (
                not isinstance(each, Attention)
                or each.key_dim != each.value_dim
                or kept.dtype not in QUANTIZABLE
            ):
                allowed = (
                    f"exact for {each.kind} in {kept.dtype}: only keys and values of 16 or 32 bits can be"
                )
                raise ConfigError("--tier-dtype", dtype, allowed)
            dim = each.key_dim
            whole = Attention(each.num_layers, each.num_kv_heads, 1, 1)
            vectors += whole.token_bytes("fp8", self.gpus) * kept.block_size
        codes = _up(vectors * dim, _SCALE_BYTES)
        return self.gpus * _up(codes + vectors * _SCALE_BYTES, _CODEC_ALIGNMENT)

    def tiers(self, kept: Kept, dtype: str) -> list[dict[str, Any]]:
        """Return the tiers that there are: their bytes, blocks and tokens."""
        of_gpu = self.blocks_of_gpu(kept)
        rows = [("gpu", self.kv_bytes * self.gpus, kept.block_bytes * self.gpus, of_gpu)]
        if self.machine.host_bytes or self.machine.disk_bytes:
            size = self.tier_block_bytes(kept, dtype)
            rows.append(("host", self.machine.host_bytes, size, self.machine.host_bytes // max(size, 1)))
            slot = round_up(size) + _DISK_HEADER_BYTES
            room = max(self.machine.disk_bytes - 2 * PAGE_BYTES, 0)
            rows.append(("disk", self.machine.disk_bytes, slot, room // slot))
        return [
            {
                "tier": tier,
                "bytes": num,
                "block_bytes": size,
                "blocks": blocks,
                "tokens": blocks * kept.block_size,
            }
            for tier, num, size, blocks in rows
            if num
        ]

    def requests(self, kept: Kept, tokens: int, step_tokens: int) -> int:
        """Return how many requests of so many tokens the GPUs hold at once."""
        return kept.num_requests(self.kv_bytes, tokens, step_tokens)

    def dtypes(self) -> list[str]:
        """Return the dtypes of KV to compare: the planned one, the model's, and the smaller ones."""
        wide = [each for each in PLAIN_BYTES if PLAIN_BYTES[each] > 1]
        found = [each for each in dtypes_for(self.model.layers) if each not in wide]
        return list(dict.fromkeys([self.kept.dtype, self.model.dtype, *found]))

    def result(self, replayed: dict[str, Any] | None, prices: Prices) -> dict[str, Any]:
        model, kept, described, machine = self.model, self.kept, self.described, self.machine
        expected = self.expected_tokens(None) if replayed is None else replayed["expected_tokens"]
        notes = self._notes()
        found = {
            "benchmark": "plan",
            "model": {
                "path": described.path,
                "model_type": model.model_type,
                "layers": model.num_layers,
                "max_tokens": model.max_tokens,
                "dtype": model.dtype,
                "parameters": model.num_parameters or None,
                "active_parameters": model.num_active_parameters or None,
            },
            "weights": {
                "bytes": described.weights_bytes,
                "bytes_of_a_gpu": self.weights_of_a_gpu,
                "source": described.source,
                "quantisation": described.quantisation,
                "left_out_bytes": described.left_out_bytes,
            },
            "gpu": {
                "count": self.gpus,
                "bytes": machine.gpu_bytes,
                "utilisation": machine.utilisation,
                "usable_bytes": self.usable,
                "reserved_bytes": self.reserved,
                "reserved_is_estimate": machine.reserved_bytes is None,
                "kv_bytes": self.kv_bytes,
            },
            "kv": {
                "dtype": kept.dtype,
                "block_size": kept.block_size,
                "bytes_per_token": self._whole_token_bytes(),
                "bytes_per_token_of_a_gpu": kept.token_bytes,
                "bytes_per_token_of_a_gpu_beyond_windows": kept.token_bytes_beyond_windows,
                "state_bytes_per_request_of_a_gpu": kept.state_bytes,
                "layers": [*map(self._layer, model.layers), *map(self._state, model.states)],
            },
            "tiers": self.tiers(kept, self.options.tier_dtype),
            "tier_dtype": self.options.tier_dtype,
            "requests": {
                "pessimistic": {
                    "tokens": self.context,
                    "requests": self.requests(kept, self.context, STEP_TOKENS),
                },
                "expected": {"tokens": expected, "requests": self.requests(kept, expected, 1)},
            },
            "kv_dtypes": [self._of_dtype(each, expected, replayed) for each in self.dtypes()],
            "tier_dtypes": self._of_tier_dtypes(),
            "trace": replayed,
        }
        command, why = self._command()
        return found | {"cost": self._cost(prices, replayed), "command": command, "notes": [*why, *notes]}

    def _whole_token_bytes(self) -> int:
        """Return the bytes of a token in a model that no GPUs divide."""
        return sum(each.token_bytes(self.kept.dtype) for each in self.model.layers)

    def _layer(self, each: Any) -> dict[str, Any]:
        dtype = self.kept.dtype
        return {
            "kind": each.kind,
            "layers": each.num_layers,
            "window": each.window,
            "bytes_per_token": each.token_bytes(dtype),
            "bytes_per_request": None,
            "formula": each.formula(dtype),
        }

    def _state(self, each: Any) -> dict[str, Any]:
        return {
            "kind": each.kind,
            "layers": each.num_layers,
            "window": None,
            "bytes_per_token": None,
            "bytes_per_request": each.request_bytes(),
            "formula": each.formula(),
        }

    def _of_dtype(self, dtype: str, expected: int, replayed: dict[str, Any] | None) -> dict[str, Any]:
        kept = replace(self.kept, dtype=dtype)
        return {
            "dtype": dtype,
            "bytes_per_token_of_a_gpu": kept.token_bytes,
            "blocks": self.blocks_of_gpu(kept),
            "pessimistic_requests": self.requests(kept, self.context, STEP_TOKENS),
            "expected_requests": self.requests(kept, expected, 1),
            "token_hit_rate": None if replayed is None else replayed["kv_dtypes"].get(dtype),
        }

    def _of_tier_dtypes(self) -> list[dict[str, Any]]:
        if not self.machine.host_bytes and not self.machine.disk_bytes:
            return []
        rows = []
        for dtype in ("exact", *LOSSY_DTYPES):
            try:
                found = {each["tier"]: each["blocks"] for each in self.tiers(self.kept, dtype)}
            except ConfigError:
                continue
            rows.append(
                {"dtype": dtype, "host_blocks": found.get("host", 0), "disk_blocks": found.get("disk", 0)}
            )
        return rows

    def _cost(self, prices: Prices, replayed: dict[str, Any] | None) -> dict[str, Any] | None:
        if prices == Prices():
            return None
        machine, month = self.machine, _HOURS_OF_A_MONTH
        of_gpus = prices.gpu_hour * self.gpus
        found: dict[str, Any] = {
            "gpu_dollars_per_hour": of_gpus,
            "host_dollars_per_hour": prices.host_gib_month * machine.host_bytes / GIB / month,
            "disk_dollars_per_hour": prices.disk_gib_month * machine.disk_bytes / GIB / month,
        }
        found["dollars_per_hour"] = sum(found.values())
        if replayed is not None and replayed["seconds"]:
            hours = replayed["seconds"] / 3_600
            saved = {
                each["tier"]: each["prefill_seconds_saved"] / 3_600 * of_gpus / hours
                for each in replayed["tiers"]
            }
            found["prefill_dollars_per_hour_without_cache"] = (
                replayed["prefill_seconds"] / 3_600 * of_gpus / hours
            )
            found["prefill_dollars_saved_per_hour"] = saved
        return found

    def _notes(self) -> list[str]:
        model, found = self.model, []
        if model.states:
            found.append(
                "A request resumes only where a state was kept. For a trace, one state is kept for each request."
            )
        if any(each.window is not None for each in model.layers):
            found.append(
                "Requests at once are counted for engines that free what lies before a window; blocks and hit "
                "rates for a cache that keeps all tokens."
            )
        if not self.requests(self.kept, self.context, STEP_TOKENS):
            found.append(
                f"Not even one request of {self.context:,} tokens fits: --context sets a shorter one."
            )
        if self.described.left_out_bytes:
            found.append(
                f"{self.described.left_out_bytes / GIB:.1f} GiB of the files predict further tokens: not loaded."
            )
        if self.machine.reserved_bytes is None:
            found.append(
                "What is reserved is an estimate: --reserve sets it, from what your engine logs at its start."
            )
        return found

    def _command(self) -> tuple[str | None, list[str]]:
        """Return the command to run, and why there is none or what is different."""
        model, kept, machine = self.model, self.kept, self.machine
        path, tiers = (
            shlex.quote(self.described.path),
            {each["tier"]: each for each in self.tiers(kept, self.options.tier_dtype)},
        )
        is_embedded = model.is_plain and self.gpus == 1 and kept.dtype == model.dtype
        if is_embedded and self.described.quantisation is None:
            words = [
                f"radixkv serve --model {path} --keys keys.json --device cuda --dtype {model.dtype}",
                f"--block-size {kept.block_size} --num-blocks {tiers['gpu']['blocks']}",
            ]
            if "host" in tiers:
                words.append(f"--host-memory {machine.host_bytes}")
            if self.options.tier_dtype != "exact":
                words.append(f"--tier-dtype {self.options.tier_dtype}")
            if "disk" in tiers:
                words.append(
                    f"--disk /var/lib/radixkv --disk-size {machine.disk_bytes} --fleet-secret fleet.secret"
                )
            return " ".join(words), []
        return self._vllm_command(path, tiers)

    def _vllm_command(self, path: str, tiers: dict[str, dict[str, Any]]) -> tuple[str | None, list[str]]:
        model, kept, machine = self.model, self.kept, self.machine
        if model.states or any(isinstance(each, IndexKeys) for each in model.layers):
            kinds = [each.kind for each in (*model.states, *model.layers) if not isinstance(each, Attention)]
            said = (
                f"No engine of radixkv caches {kinds[0]}: use your engine's own prefix cache, of these sizes"
            )
            return None, [f"{said}."]
        words = [
            f"python -m vllm.entrypoints.openai.api_server --model {path} --tensor-parallel-size {self.gpus}",
            f"--gpu-memory-utilization {machine.utilisation:g} --block-size {kept.block_size}",
            f"--max-model-len {self.context}",
        ]
        if kept.dtype != model.dtype:
            words.append(f"--kv-cache-dtype {kept.dtype}")
        has_windows = any(each.window is not None for each in model.layers)
        if has_windows and len(model.layers) > 1:
            words.append("--disable-hybrid-kv-cache-manager")
        why = list[str]()
        if "host" in tiers and not has_windows:
            connector: dict[str, Any] = {
                "kv_connector": "RadixConnector",
                "kv_connector_module_path": "radixkv.engines.vllm.connector",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {"host_memory": machine.host_bytes},
            }
            words.append(f"--kv-transfer-config {shlex.quote(json.dumps(connector))}")
        else:
            words.append("--scheduler-cls radixkv.engines.vllm.Scheduler")
            why = ["Host memory behind vLLM needs attention without windows."] if "host" in tiers else []
        if "disk" in tiers:
            why.append("A disk behind vLLM: see docs/engines.md.")
        return " ".join(words), why


def _up(num: int, grain: int) -> int:
    return -(-num // grain) * grain
