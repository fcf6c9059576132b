"""Bytes of weights: exact from the headers of safetensors files, otherwise computed from what a family's layers have.

A family gives its weights as ``Matrix``. ``parameters`` and ``total_bytes`` add them up:

    bytes = parameters × bytes of the dtype         not quantised: embeddings, heads, norms, routers, and what a
                                                    quantisation leaves out
          + what the quantisation makes of the rest, with its scales

    fp8                  inputs × outputs + 4 for each block of ``weight_block_size``, or 4 for a matrix
    mxfp4                inputs × outputs ÷ 2 + an 8-bit scale for each 32
    awq, gptq            bits ÷ 8 a value + 16-bit scales and packed zeros for each group; gptq has 4 for each input too
    compressed-tensors   bits ÷ 8 a value + 16-bit scales for each group or channel
    modelopt             FP8 as above; NVFP4: half a byte a value + an 8-bit scale for each 16

Other methods are refused by name: the files' headers, or ``--weights``, have their bytes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from radixkv.simulator.plan.kv import PLAIN_BYTES
from radixkv.simulator.plan.reading import Fields, Tensor

Split = Literal["split", "heads", "copied"]
"""How parallel GPUs have a matrix: a part each; a part for each KV head, some the same; or all of it each."""

_SAFE_PATTERN: Final = re.compile(r"(?:[\w\-^$]|\\?\.|\\d\+|\.\*|\*|\([\w|]{1,200}\))*", re.ASCII)
_MAX_STARS: Final = 4
_MAX_NAMES: Final = 100_000
_MAX_PATTERNS: Final = 64
_FLOATS: Final = ("F32", "F16", "BF16", "F64")


@dataclass(frozen=True, slots=True)
class Matrix:
    """Weights ``[outputs, inputs]`` that each of some layers has ``count`` times. A token uses ``active`` of these.

    ``name``: the module, in a layer. ``layers``: the numbers of the layers; None for what a model has once.
    ``is_linear``: a quantisation may convert it.
    """

    name: str
    inputs: int
    outputs: int = 1
    layers: tuple[int, ...] | None = None
    count: int = 1
    active: int = 1
    is_linear: bool = False
    split: Split = "copied"

    @property
    def num_values(self) -> int:
        """Values of one of them."""
        return self.inputs * self.outputs

    @property
    def num_layers(self) -> int:
        """How many layers have it."""
        return 1 if self.layers is None else len(self.layers)

    def share(self, gpus: int, num_kv_heads: int) -> float:
        """Return the share of it that one of so many GPUs has."""
        if self.split == "copied":
            return 1.0
        return 1 / gpus if self.split == "split" else 1 / min(gpus, num_kv_heads)

    def modules(self) -> Iterator[str]:
        """Yield the name of the module in each layer."""
        if self.layers is None:
            yield self.name
        for layer in self.layers or ():
            yield f"model.layers.{layer}.{self.name}"


def parameters(matrices: Iterable[Matrix]) -> int:
    """Return the number of values."""
    return sum(each.num_layers * each.count * each.num_values for each in matrices)


def active_parameters(matrices: Iterable[Matrix]) -> int:
    """Return the number of values that one token uses: of experts those that are chosen."""
    return sum(each.num_layers * each.active * each.num_values for each in matrices)


def share_of_a_gpu(matrices: Sequence[Matrix], gpus: int, num_kv_heads: int) -> float:
    """Return the share of all values that one of so many tensor parallel GPUs has: more than 1 ÷ GPUs."""
    parts = (
        each.num_layers * each.count * each.num_values * each.share(gpus, num_kv_heads) for each in matrices
    )
    return sum(parts) / parameters(matrices)


# --- from the files


def bytes_of_tensors(tensors: Iterable[Tensor], num_layers: int, dtype: str) -> tuple[int, int]:
    """Return the bytes that an engine loads, and the bytes that it leaves out, in files of these tensors.

    Floating-point tensors are loaded in the model's dtype, quantised ones as they are. Layers beyond the model's own,
    and those of ``mtp``, predict several tokens: engines leave them out unless they are asked for.
    """
    loaded = left = 0
    for each in tensors:
        found = _LAYER.search(each.name)
        is_further = each.name.startswith("mtp.") or (found is not None and int(found[1]) >= num_layers)
        size = each.num_elements * PLAIN_BYTES[dtype] if each.dtype in _FLOATS else each.num_bytes
        loaded, left = (loaded, left + size) if is_further else (loaded + size, left)
    return loaded, left


_LAYER: Final = re.compile(
    r"^(?:language_)?(?:model\.)?(?:language_model\.)?(?:model\.)?layers\.([0-9]{1,6})\."
)


# --- quantised


class Quantisation:
    """What ``quantization_config`` makes of matrices. Raises ConfigError for what isn't known."""

    def __init__(self, fields: Fields) -> None:
        self._fields = fields
        self.method = fields.text("quant_method") or "missing"
        read = _METHODS.get(self.method)
        if read is None:
            known = (
                f"one of {', '.join(_METHODS)}; the files' headers, or --weights, have the bytes of others"
            )
            raise fields.refused("quant_method", known)
        self._rule = read(fields)
        self._skips = _Names(fields, _IGNORED[self.method])

    @property
    def name(self) -> str:
        """The method, and its bits."""
        return f"{self.method} ({self._rule.name})"

    def total_bytes(self, matrix: Matrix, dtype: str) -> int:
        """Return the bytes of a matrix in all its layers."""
        plain = matrix.count * matrix.num_values * PLAIN_BYTES[dtype]
        if not self.converts(matrix):
            return matrix.num_layers * plain
        packed = matrix.count * self._rule.bytes_of(matrix.inputs, matrix.outputs)
        return sum(plain if self._skips.has(module) else packed for module in matrix.modules())

    def converts(self, matrix: Matrix) -> bool:
        """Whether it converts this kind of matrix at all."""
        return matrix.is_linear and (self.method != "mxfp4" or ".experts." in matrix.name)


class _Names:
    """Names of modules that a quantisation leaves as they are."""

    def __init__(self, fields: Fields, names: tuple[str, ...]) -> None:
        given = [each for name in names for each in fields.texts(name, _MAX_NAMES) or ()]
        self._literal = {each for each in given if not each.startswith("re:") and "*" not in each}
        patterns = [each for each in given if each not in self._literal]
        if len(patterns) > _MAX_PATTERNS:
            raise fields.refused(names[0], f"at most {_MAX_PATTERNS} patterns. --weights sets the bytes")
        self._patterns = [_pattern(fields, names[0], each) for each in patterns]

    def has(self, module: str) -> bool:
        parts = module.split(".")
        runs = (
            ".".join(parts[at:stop]) for at in range(len(parts)) for stop in range(at + 1, len(parts) + 1)
        )
        return any(run in self._literal for run in runs) or any(each.match(module) for each in self._patterns)


def _pattern(fields: Fields, name: str, text: str) -> re.Pattern[str]:
    """Compile a pattern that can't take long: letters, dots, few stars and choices of words."""
    body = text.removeprefix("re:")
    simple = len(body) <= 200 and body.count("*") <= _MAX_STARS and _SAFE_PATTERN.fullmatch(body)
    try:
        if simple and text.startswith("re:"):
            return re.compile(body)
        if simple:
            return re.compile(".*".join(map(re.escape, body.split("*"))))
    except re.error:
        pass
    raise fields.refused(name, f"names and simple patterns; {text[:80]!r} is none. --weights sets the bytes")


@dataclass(frozen=True, slots=True)
class _Rule:
    """Bytes of a converted matrix: ``bits`` a value, and scales of ``scale_bytes`` for each group of inputs.

    ``group``: inputs of a group; 0: one scale for each output. ``rows``: outputs that share scales; 0: all.
    """

    name: str
    bits: int
    group: int
    rows: int = 1
    scale_bytes: float = 2.0
    input_bytes: int = 0
    matrix_bytes: int = 0

    def bytes_of(self, inputs: int, outputs: int) -> int:
        groups = math.ceil(inputs / self.group) if self.group else 1
        rows = math.ceil(outputs / self.rows) if self.rows else 1
        scales = math.ceil(groups * rows * self.scale_bytes)
        return (
            math.ceil(inputs * outputs * self.bits / 8)
            + scales
            + self.input_bytes * inputs
            + self.matrix_bytes
        )


def _fp8(fields: Fields) -> _Rule:
    block = fields.counts("weight_block_size", low=1, most=2)
    if block is None:
        return _Rule("8 bits", 8, 0, rows=0, scale_bytes=4)
    if len(block) != 2:
        raise fields.refused("weight_block_size", "two integers")
    return _Rule(f"8 bits, blocks of {block[0]} × {block[1]}", 8, block[1], rows=block[0], scale_bytes=4)


def _mxfp4(fields: Fields) -> _Rule:
    return _Rule("4 bits", 4, 32, scale_bytes=1)


def _packed(fields: Fields) -> _Rule:
    bits = fields.count("bits", "w_bit", low=2, high=8)
    size = fields.optional_count("group_size", "q_group_size", low=-1)
    if size is None or size == 0:
        raise fields.refused("group_size", "-1, or the inputs of a group")
    is_gptq = fields.text("quant_method") == "gptq"
    return _Rule(
        f"{bits} bits, groups of {size}" if size > 0 else f"{bits} bits",
        bits,
        max(size, 0),
        scale_bytes=2 + bits / 8,
        input_bytes=4 if is_gptq else 0,
    )


def _compressed(fields: Fields) -> _Rule:
    groups = fields.inner("config_groups")
    names = [] if groups is None else list(groups)
    group = None if groups is None or len(names) != 1 else groups.inner(names[0])
    weights = None if group is None else group.inner("weights")
    if group is None or weights is None or group.texts("targets") != ["Linear"]:
        raise fields.refused("config_groups", "one group with weights, whose targets are ['Linear']")
    bits, strategy = weights.count("num_bits", low=2, high=8), weights.text("strategy")
    kinds = {"tensor": (0, 0, 4.0), "channel": (0, 1, 2.0), "block": (0, 0, 4.0)}
    if strategy == "group":
        size = weights.count("group_size")
        zeros = 0.0 if weights.flag("symmetric", default=True) else bits / 8
        return _Rule(f"{bits} bits, groups of {size}", bits, size, scale_bytes=2 + zeros)
    if strategy == "block":
        block = weights.counts("block_structure", low=1, most=2)
        if block is None or len(block) != 2:
            raise weights.refused("block_structure", "two integers")
        return _Rule(f"{bits} bits, blocks of {block[0]} × {block[1]}", bits, block[1], block[0], 4)
    if strategy not in kinds:
        raise weights.refused("strategy", f"one of group, {', '.join(kinds)}")
    inputs, rows, scale = kinds[strategy]
    return _Rule(f"{bits} bits", bits, inputs, rows, scale)


def _modelopt(fields: Fields) -> _Rule:
    algorithm = fields.text("quant_algo")
    if algorithm == "FP8":
        return _Rule("FP8", 8, 0, rows=0, scale_bytes=4, matrix_bytes=4)
    if algorithm == "NVFP4":
        return _Rule("NVFP4", 4, 16, scale_bytes=1, matrix_bytes=8)
    raise fields.refused("quant_algo", "FP8 or NVFP4")


_METHODS: Final = {
    "fp8": _fp8,
    "mxfp4": _mxfp4,
    "awq": _packed,
    "gptq": _packed,
    "compressed-tensors": _compressed,
    "modelopt": _modelopt,
}
_IGNORED: Final[Mapping[str, tuple[str, ...]]] = {
    "fp8": ("modules_to_not_convert", "ignored_layers"),
    "mxfp4": ("modules_to_not_convert",),
    "awq": ("modules_to_not_convert",),
    "gptq": ("modules_to_not_convert",),
    "compressed-tensors": ("ignore",),
    "modelopt": ("ignore", "exclude_modules"),
}
"""The fields that name what a method leaves as it is."""


def total_bytes(matrices: Iterable[Matrix], dtype: str, quantisation: Quantisation | None) -> int:
    """Return the bytes of weights in a dtype, or quantised."""
    if quantisation is None:
        return parameters(matrices) * PLAIN_BYTES[dtype]
    return sum(quantisation.total_bytes(each, dtype) for each in matrices)
