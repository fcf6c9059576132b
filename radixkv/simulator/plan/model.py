"""What is known of a model: what its layers keep, and its weights; and the parts of which families make it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from radixkv.simulator.plan.kv import Attention, KVLayers, State
from radixkv.simulator.plan.reading import MAX_LAYERS, Fields
from radixkv.simulator.plan.weights import Matrix, Split, active_parameters, parameters

Layers = tuple[int, ...]
DTYPES: Final = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class Model:
    """What a plan needs to know of a model.

    - ``max_tokens``: its context; None if its config names none.
    - ``dtype``: of its weights and its KV, if nothing else is said.
    - ``layers``, ``states``: what its layers keep.
    - ``matrices``: its weights; empty if only the files know them.
    - ``left_out``: parts of its config whose weights aren't computed.
    - ``head_dim``: of its attention, the mean of keys' and values' where they differ.
    - ``widest``: values of the widest activation of a layer, for a token.
    """

    model_type: str
    max_tokens: int | None
    dtype: str
    hidden_size: int
    num_layers: int
    num_heads: int
    head_dim: int
    vocab_size: int
    layers: tuple[KVLayers, ...]
    states: tuple[State, ...]
    matrices: tuple[Matrix, ...]
    left_out: tuple[str, ...] = ()
    widest: int = 0

    @property
    def num_parameters(self) -> int:
        """Its parameters, as its config says."""
        return parameters(self.matrices)

    @property
    def num_active_parameters(self) -> int:
        """Those that a token uses."""
        return active_parameters(self.matrices)

    @property
    def num_kv_heads(self) -> int:
        """KV heads that parallel GPUs divide; 1 if no layer has any."""
        return min((each.num_kv_heads for each in self.layers if isinstance(each, Attention)), default=1)

    @property
    def is_plain(self) -> bool:
        """Whether all its layers keep keys and values of one shape for all tokens, as the embedded engine needs."""
        if self.states or len(self.layers) != 1 or not isinstance(self.layers[0], Attention):
            return False
        only = self.layers[0]
        return only.window is None and only.key_dim == only.value_dim and only.num_layers == self.num_layers


class Parts:
    """Collects the weights of a model."""

    def __init__(self) -> None:
        self.matrices: list[Matrix] = []

    def linear(
        self,
        name: str,
        inputs: int,
        outputs: int,
        layers: Layers,
        *,
        count: int = 1,
        active: int = 1,
        split: Split = "split",
        bias: bool = False,
    ) -> None:
        """Add a projection of each layer, if there are layers."""
        if layers and count:
            self.matrices.append(Matrix(name, inputs, outputs, layers, count, active, True, split))
            if bias:
                self.matrices.append(Matrix(f"{name}.bias", outputs, 1, layers, count, active, False, split))

    def plain(
        self, name: str, values: int, layers: Layers | None = None, *, count: int = 1, split: Split = "copied"
    ) -> None:
        """Add values that no quantisation converts, of each layer or of the model."""
        if values and count and layers != ():
            self.matrices.append(Matrix(name, values, 1, layers, count, count, False, split))

    def embeddings(self, vocab: int, hidden: int, *, tied: bool, head_bias: bool = False) -> None:
        self.plain("model.embed_tokens", vocab * hidden, split="split")
        if not tied:
            self.plain("lm_head", vocab * hidden + head_bias * vocab, split="split")

    def mlp(
        self, prefix: str, hidden: int, width: int, layers: Layers, *, gated: bool, bias: bool = False
    ) -> None:
        if gated:
            self.linear(f"{prefix}.gate_proj", hidden, width, layers, bias=bias)
        self.linear(f"{prefix}.up_proj", hidden, width, layers, bias=bias)
        self.linear(f"{prefix}.down_proj", width, hidden, layers, bias=bias)

    def experts(
        self,
        hidden: int,
        width: int,
        layers: Layers,
        count: int,
        active: int,
        *,
        gated: bool = True,
        bias: bool = False,
        router_bias: bool = False,
        prefix: str = "mlp",
    ) -> None:
        """Add a router and its experts."""
        self.plain(f"{prefix}.gate", count * hidden + router_bias * count, layers)
        for side, inputs, outputs in (
            ("gate_proj", hidden, width),
            ("up_proj", hidden, width),
            ("down_proj", width, hidden),
        ):
            if gated or side != "gate_proj":
                name = f"{prefix}.experts.{side}"
                self.linear(name, inputs, outputs, layers, count=count, active=active, bias=bias)


Flag = bool | str
"""True or false, or the name of the field that says it (false without it)."""


class Shape(NamedTuple):
    """The numbers that most families have."""

    num_layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int


NEEDS_HEAD_DIM: Final = frozenset(
    (
        *(
            "gemma",
            "gemma2",
            "gemma3_text",
            "glm",
            "glm4",
            "gpt_oss",
            "llama4_text",
            "minimax_m2",
            "ministral3",
        ),
        *("nemotron_h", "qwen3", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"),
        "seed_oss",
    )
)
"""Types whose head size isn't that of hidden size ÷ heads if the config leaves it out: it must say."""

NEEDS_KV_HEADS: Final = NEEDS_HEAD_DIM | {
    *("bamba", "falcon_h1", "glm4_moe", "jamba", "minimax", "minimax_text_01", "mistral", "mixtral", "qwen2"),
    *("qwen2_moe", "qwen3_moe", "smollm3", "starcoder2"),
}
"""Types whose KV heads aren't as many as the query heads if the config leaves them out: it must say."""


def shape_of(fields: Fields) -> Shape:
    hidden = fields.count("hidden_size")
    heads = fields.count("num_attention_heads")
    kind = fields.text("model_type")
    kv_heads = fields.optional_count("num_key_value_heads") or heads
    head_dim = fields.optional_count("head_dim", "attention_head_dim")
    if kind in NEEDS_KV_HEADS and "num_key_value_heads" not in fields:
        raise fields.refused("num_key_value_heads", f"an integer, for a {kind}")
    if kind in NEEDS_HEAD_DIM and head_dim is None:
        raise fields.refused("head_dim", f"an integer, for a {kind}")
    if heads % kv_heads:
        raise fields.refused("num_key_value_heads", f"a divisor of the {heads} attention heads")
    if head_dim is None:
        if hidden % heads:
            raise fields.refused("hidden_size", f"a multiple of the {heads} attention heads, or a head_dim")
        head_dim = hidden // heads
    num_layers = fields.count("num_hidden_layers", high=MAX_LAYERS)
    return Shape(num_layers, hidden, heads, kv_heads, head_dim, fields.count("vocab_size"))


def flag_of(fields: Fields, given: Flag) -> bool:
    return given if isinstance(given, bool) else fields.flag(given, default=False)


FULL, SLIDING, CHUNKED, LINEAR = (
    "full_attention", "sliding_attention", "chunked_attention", "linear_attention",
)  # fmt: skip


def kinds_of(fields: Fields, num_layers: int, known: Iterable[str], default: Sequence[str]) -> list[str]:
    """Return the kind of each layer: of the field ``layer_types``, or the family's usual ones."""
    given = fields.texts("layer_types")
    if given is None:
        return list(default)
    if len(given) != num_layers:
        raise fields.refused("layer_types", f"{num_layers} kinds, one for each layer; it has {len(given)}")
    for each in given:
        if each not in known:
            raise fields.refused(
                "layer_types", f"kinds of layers that it has: {', '.join(known)}; not {each!r}"
            )
    return given


def where(kinds: Sequence[str], *wanted: str) -> Layers:
    return tuple(at for at, each in enumerate(kinds) if each in wanted)


def dtype_of(fields: Fields) -> str:
    """Return the dtype of a model's weights. Raises ConfigError if the config doesn't say."""
    name = "torch_dtype" if "torch_dtype" in fields and "dtype" not in fields else "dtype"
    dtype = (fields.text(name) or "").removeprefix("torch.")
    if dtype not in DTYPES:
        raise fields.refused(name, f"one of {', '.join(DTYPES)}; --dtype sets it")
    return dtype


def made_of(
    fields: Fields,
    shape: Shape,
    layers: Sequence[KVLayers],
    states: Sequence[State],
    parts: Parts,
    widest: int,
    max_tokens: int | None = None,
) -> Model:
    return Model(
        model_type=fields.text("model_type") or "",
        max_tokens=max_tokens
        or fields.optional_count("max_position_embeddings", "model_max_length", "max_seq_len", high=1 << 40),
        dtype=dtype_of(fields),
        hidden_size=shape.hidden,
        num_layers=shape.num_layers,
        num_heads=shape.heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocab,
        layers=tuple(each for each in layers if each.num_layers),
        states=tuple(each for each in states if each.num_layers),
        matrices=tuple(parts.matrices),
        widest=widest,
    )
