"""Bytes of KV: what each kind of layer keeps for a token, and for a request.

    Attention    2 × layers × KV heads × head size × bytes of a value         MHA, GQA, MQA; KV heads, not query heads
    Latent       layers × (rank + rope) × bytes of a value                    multi-head latent attention (MLA)
    IndexKeys    layers × (head size + 4 for each 128)                        the FP8 keys of a sparse indexer (DSA)
    State        per request, whatever its length                             Mamba, gated delta nets, linear attention

With a *window*, a layer needs the KV of its last tokens only. Tensor parallel GPUs divide KV heads. If there are more
GPUs than KV heads, each GPU has one head, several the same one. Latents and index keys are on each GPU whole.

A dtype of KV is one of ``KV_DTYPES``, named as in vLLM. ``fp8`` has one scale for a tensor, which takes nothing here;
the ``_per_token_head`` dtypes have a float32 beside each vector of a head; ``nvfp4`` has 4 bits a value and an 8-bit
scale for each 16. Sparse MLA in fp8 keeps the latent in 8 bits with a float32 for each 128 values, and the rope part in
16 bits: 656 bytes for 512 + 64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from radixkv.errors import ConfigError

KV_DTYPES: Final = (
    "float32", "bfloat16", "float16", "fp8", "fp8_per_token_head", "int8_per_token_head", "nvfp4",
)  # fmt: skip
PLAIN_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1}
_SCALE_BYTES: Final = 4
_VALUES_OF_A_SCALE: Final = 128
_VALUES_OF_AN_FP4_SCALE: Final = 16


def vector_bytes(dtype: str, dim: int) -> int:
    """Return the bytes of one head's key or value of one token. Raises ConfigError if the dtype can't hold it."""
    if dtype in PLAIN_BYTES:
        return dim * PLAIN_BYTES[dtype]
    if dtype == "nvfp4":
        if dim % _VALUES_OF_AN_FP4_SCALE:
            raise ConfigError(
                "--kv-dtype", dtype, f"another one for heads of {dim}: its scales are of 16 values"
            )
        return dim // 2 + dim // _VALUES_OF_AN_FP4_SCALE
    if dtype in KV_DTYPES:
        return dim + _SCALE_BYTES
    raise ConfigError("--kv-dtype", dtype, f"one of {', '.join(KV_DTYPES)}")


def heads_on_a_gpu(num_heads: int, gpus: int) -> int:
    """Return how many KV heads a GPU has. Raises ConfigError unless they divide evenly."""
    if num_heads % gpus and gpus % num_heads:
        raise ConfigError("--gpus", gpus, f"a divisor or a multiple of the {num_heads} KV heads")
    return max(num_heads // gpus, 1)


@dataclass(frozen=True, slots=True)
class Attention:
    """Layers with keys and values of heads. ``window``: tokens that they read, with the present one; None for all."""

    num_layers: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None

    def token_bytes(self, dtype: str, gpus: int = 1) -> int:
        """Return bytes a token on one GPU."""
        vectors = vector_bytes(dtype, self.key_dim) + vector_bytes(dtype, self.value_dim)
        return self.num_layers * heads_on_a_gpu(self.num_kv_heads, gpus) * vectors

    @property
    def kind(self) -> str:
        """What it is, in words."""
        return "attention" if self.window is None else f"attention, window of {self.window:,}"

    def formula(self, dtype: str) -> str:
        """How its bytes a token come about."""
        layers, heads = f"{self.num_layers} layers", f"{self.num_kv_heads} KV heads"
        if self.key_dim == self.value_dim:
            return f"2 × {layers} × {heads} × {_in_words(dtype, self.key_dim)}"
        sides = f"({_in_words(dtype, self.key_dim)} + {_in_words(dtype, self.value_dim)})"
        return f"{layers} × {heads} × {sides}"


@dataclass(frozen=True, slots=True)
class Latent:
    """Layers of multi-head latent attention: one latent and one rope key a token. ``is_sparse``: an indexer chooses."""

    num_layers: int
    rank: int
    rope_dim: int
    is_sparse: bool = False
    window: None = None

    def token_bytes(self, dtype: str, gpus: int = 1) -> int:
        """Return bytes a token on one GPU; each GPU has all of them."""
        return self.num_layers * self._vector_bytes(dtype)

    def _vector_bytes(self, dtype: str) -> int:
        if dtype == "fp8" and self.is_sparse:
            return self.rank + _scales(self.rank) + 2 * self.rope_dim
        if dtype not in PLAIN_BYTES:
            allowed = f"one of {', '.join(PLAIN_BYTES)} for multi-head latent attention"
            raise ConfigError("--kv-dtype", dtype, allowed)
        return (self.rank + self.rope_dim) * PLAIN_BYTES[dtype]

    @property
    def kind(self) -> str:
        """What it is, in words."""
        return "sparse latent attention" if self.is_sparse else "latent attention"

    def formula(self, dtype: str) -> str:
        """How its bytes a token come about."""
        if dtype == "fp8" and self.is_sparse:
            parts = f"({self.rank} + {_scales(self.rank)} of scales + 2 × {self.rope_dim})"
            return f"{self.num_layers} layers × {parts}"
        return f"{self.num_layers} layers × ({self.rank} + {self.rope_dim}) × {PLAIN_BYTES[dtype]} bytes"


@dataclass(frozen=True, slots=True)
class IndexKeys:
    """Layers of a sparse indexer: one key a token, always FP8 with a float32 for each 128 values."""

    num_layers: int
    dim: int
    window: None = None

    def token_bytes(self, dtype: str, gpus: int = 1) -> int:
        """Return bytes a token on one GPU; each GPU has all of them. The dtype of the KV changes nothing."""
        return self.num_layers * (self.dim + _scales(self.dim))

    @property
    def kind(self) -> str:
        """What it is, in words."""
        return "keys of the sparse indexer"

    def formula(self, dtype: str) -> str:
        """How its bytes a token come about."""
        return f"{self.num_layers} layers × ({self.dim} + {_scales(self.dim)} of scales), FP8"


@dataclass(frozen=True, slots=True)
class State:
    """Layers that keep a state for each request, whatever its length.

    ``conv_values``: of one layer, in ``conv_dtype``. ``recurrent_values``: of one layer, in ``recurrent_dtype``.
    Parallel GPUs divide both, by ``num_heads``. ``group_values``: conv values of each of ``num_groups`` groups that
    heads share; a GPU has at least one group.
    """

    num_layers: int
    what: str
    conv_values: int
    recurrent_values: int
    conv_dtype: str
    recurrent_dtype: str
    num_heads: int
    num_groups: int = 0
    group_values: int = 0

    def request_bytes(self, gpus: int = 1) -> int:
        """Return bytes a request on one GPU. Raises ConfigError if GPUs can't divide it."""
        if self.num_heads % gpus:
            raise ConfigError("--gpus", gpus, f"a divisor of the {self.num_heads} heads of its {self.what}")
        groups = self.num_groups // gpus if self.num_groups % gpus == 0 else 1
        conv = self.conv_values // gpus + groups * self.group_values
        recurrent = self.recurrent_values // gpus
        return self.num_layers * (
            conv * PLAIN_BYTES[self.conv_dtype] + recurrent * PLAIN_BYTES[self.recurrent_dtype]
        )

    @property
    def kind(self) -> str:
        """What it is, in words."""
        return self.what

    def formula(self) -> str:
        """How its bytes a request come about."""
        parts = [
            f"{values:,} × {PLAIN_BYTES[dtype]} bytes"
            for values, dtype in (
                (self.conv_values + self.num_groups * self.group_values, self.conv_dtype),
                (self.recurrent_values, self.recurrent_dtype),
            )
            if values
        ]
        return f"{self.num_layers} layers × ({' + '.join(parts)})"


KVLayers = Attention | Latent | IndexKeys


@dataclass(frozen=True, slots=True)
class Kept:
    """All that a model keeps: KV by the token, states by the request, in one dtype, on one of ``gpus`` GPUs."""

    layers: tuple[KVLayers, ...]
    states: tuple[State, ...]
    dtype: str
    gpus: int
    block_size: int

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in all layers, on one GPU."""
        return sum(each.token_bytes(self.dtype, self.gpus) for each in self.layers)

    @property
    def token_bytes_beyond_windows(self) -> int:
        """Bytes of one token in the layers without a window, on one GPU: what a long request grows by."""
        return sum(each.token_bytes(self.dtype, self.gpus) for each in self.layers if each.window is None)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all layers, on one GPU."""
        return self.token_bytes * self.block_size

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of one request, on one GPU."""
        return sum(each.request_bytes(self.gpus) for each in self.states)

    def request_bytes(self, num_tokens: int, step_tokens: int) -> int:
        """Return the bytes of a request of so many tokens, in whole blocks, on one GPU.

        ``step_tokens``: tokens that it computes at once. A layer with a window needs these, and the window before
        them, and one block more, because a window may begin inside a block.
        """
        found = self.state_bytes
        for each in self.layers:
            blocks = -(-num_tokens // self.block_size)
            if each.window is not None:
                needed = min(each.window - 1 + step_tokens, num_tokens)
                blocks = min(-(-needed // self.block_size) + 1, blocks)
            found += blocks * self.block_size * each.token_bytes(self.dtype, self.gpus)
        return found

    def num_requests(self, kv_bytes: int, num_tokens: int, step_tokens: int) -> int:
        """Return how many such requests fit into the bytes of one GPU."""
        return kv_bytes // max(self.request_bytes(num_tokens, step_tokens), 1)


def dtypes_for(layers: Sequence[KVLayers]) -> tuple[str, ...]:
    """Return the dtypes that can hold the KV of these layers."""
    return tuple(dtype for dtype in KV_DTYPES if _holds(dtype, layers))


def _holds(dtype: str, layers: Sequence[KVLayers]) -> bool:
    try:
        for each in layers:
            each.token_bytes(dtype)
    except ConfigError:
        return False
    return True


def _scales(dim: int) -> int:
    return _SCALE_BYTES * -(-dim // _VALUES_OF_A_SCALE)


def _in_words(dtype: str, dim: int) -> str:
    if dtype in PLAIN_BYTES:
        plural = "byte" if PLAIN_BYTES[dtype] == 1 else "bytes"
        return f"{dim} × {PLAIN_BYTES[dtype]} {plural}"
    if dtype == "nvfp4":
        return f"({dim} ÷ 2 + {dim} ÷ 16) bytes"
    return f"({dim} + 4) bytes"
