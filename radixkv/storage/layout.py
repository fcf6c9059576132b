"""KVLayout: the shape of a token's keys and values, and with it the bytes of a block.

Block-major: ``[num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]``, index 0 of the third
dimension being keys and 1 values. So a block is one contiguous run of bytes, and a fork, a demotion or a
scrub of it is one straight copy. Pure: needs no torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from radixkv.errors import ConfigError

ELEMENT_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
}


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Layers, KV heads (not query heads), head size and element type of a model's KV.

    ``dtype`` is the name of a torch dtype, with or without ``torch.``; a ``torch.dtype`` is taken too.
    Raises ConfigError for counts below 1 and dtypes outside ELEMENT_BYTES.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str = "float16"

    def __post_init__(self) -> None:
        for setting in ("num_layers", "num_kv_heads", "head_dim"):
            value = getattr(self, setting)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"KVLayout.{setting}", value, "an integer ≥ 1")
        name = str(self.dtype).removeprefix("torch.")
        if name not in ELEMENT_BYTES:
            raise ConfigError("KVLayout.dtype", self.dtype, f"one of {', '.join(ELEMENT_BYTES)}")
        object.__setattr__(self, "dtype", name)

    @property
    def element_bytes(self) -> int:
        """Bytes of one element."""
        return ELEMENT_BYTES[self.dtype]

    @property
    def bytes_per_token(self) -> int:
        """2 × layers × KV heads × head size × bytes of an element."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.element_bytes

    def block_shape(self, block_size: int) -> tuple[int, int, int, int, int]:
        """``[num_layers, 2, block_size, num_kv_heads, head_dim]``."""
        return (self.num_layers, 2, block_size, self.num_kv_heads, self.head_dim)
