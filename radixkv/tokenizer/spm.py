"""A SentencePiece model as a ``Tokenizer``: the shipped one, or any ``.model`` file of type BPE or unigram.

**Lossless models.** Some models, such as the shipped one, normalise, add and remove nothing, and encode unknown
characters as bytes. With them ``decode(encode(text)) == text`` for every text. One character needs special
treatment: SentencePiece writes a space as ``▁`` (U+2581), so that character itself would come back as a space. It
is therefore encoded as its three bytes. Other models may lose parts of a text.

**Stable boundaries** are those that no piece of the vocabulary spans. BPE merges two neighbours only into a piece,
and unigram's best path goes through every such boundary. So a continuation can't change the ids before it. The
pairs of neighbouring characters inside pieces are collected once, when the model is loaded (10 ms for 8,000
pieces). A boundary is stable if the two characters around it are no such pair. The end of a text is stable if its
last character begins no pair. (Without byte fallback, a run of characters without pieces is one unknown token of
any length. Its ids don't change either.)

In the shipped model, the boundaries before every run of spaces, around every newline and around every character
without a piece are stable. If a model normalises text (NFKC) or removes spaces, only the boundary before a space
that follows a printable ASCII character is stable. With other normalisers, spaces marked at the end of a piece, or
other model types, none is.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import sentencepiece

from radixkv.errors import ConfigError
from radixkv.tokenizer.base import BaseTokenizer
from radixkv.tokenizer.chat import Chat
from radixkv.tokenizer.protocol import END_PIECE, ROLE_PIECES

SPACE_MARK = "\u2581"
_UNIGRAM, _BPE = 1, 2
_NORMALIZERS = frozenset({"identity", "nfkc", "nmt_nfkc"})


class ModelSpec(NamedTuple):
    """The settings in a model file that stable boundaries depend on."""

    model_type: int
    byte_fallback: bool
    space_is_suffix: bool
    normalizer: str
    adds_prefix: bool
    removes_spaces: bool

    @property
    def is_identity(self) -> bool:
        """Whether the pieces are those of the unchanged text, apart from a space in front."""
        return self.normalizer == "identity" and not self.removes_spaces

    @property
    def is_lossless(self) -> bool:
        return self.is_identity and self.byte_fallback and not self.adds_prefix and not self.space_is_suffix

    @property
    def has_stable_boundaries(self) -> bool:
        known = self.model_type in (_UNIGRAM, _BPE) and self.normalizer in _NORMALIZERS
        return known and not self.space_is_suffix


class SentencePieceTokenizer(BaseTokenizer):
    """Implements ``Tokenizer``."""

    def __init__(
        self,
        processor: sentencepiece.SentencePieceProcessor,
        spec: ModelSpec,
        digest: str,
        chat: Chat,
    ) -> None:
        self._processor, self._spec = processor, spec
        self._pairs = _pairs(processor)
        self._starts = frozenset(pair[0] for pair in self._pairs)
        bos, eos = processor.bos_id(), processor.eos_id()
        super().__init__(
            digest=digest,
            vocab_size=processor.vocab_size(),
            bos_token_id=bos if bos >= 0 else None,
            eos_token_id=eos if eos >= 0 else None,
            leading=[],
            chat=chat,
        )
        self._mark_ids = [processor.piece_to_id(f"<0x{byte:02X}>") for byte in SPACE_MARK.encode()]

    def _ids(self, text: str) -> list[int]:
        if not self._spec.is_lossless or SPACE_MARK not in text:
            return list(self._processor.encode(text))
        first, *others = text.split(SPACE_MARK)
        ids = list(self._processor.encode(first))
        for part in others:
            ids += self._mark_ids + list(self._processor.encode(part))
        return ids

    def _text(self, ids: list[int]) -> str:
        return str(self._processor.decode(ids))

    def stable_cut(self, text: str) -> int:
        if not self._spec.has_stable_boundaries or not text:
            return 0
        if not self._spec.is_lossless:
            text = text.replace(SPACE_MARK, " ")
        if self._is_stable_end(text[-1]):
            return len(text)
        cuts = range(len(text) - 1, 0, -1)
        return next((cut for cut in cuts if self._is_stable(text[cut - 1], text[cut])), 0)

    def _is_stable_end(self, last: str) -> bool:
        return self._spec.is_identity and last not in self._starts

    def _is_stable(self, last: str, following: str) -> bool:
        if last + following in self._pairs:
            return False
        return self._spec.is_identity or ("!" <= last <= "~" and following == " ")


def load_processor(model: bytes, name: str) -> sentencepiece.SentencePieceProcessor:
    """Load the model with the library. Raises ConfigError if it is invalid."""
    allowed = "a SentencePiece model file"
    try:
        processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    except RuntimeError as error:
        raise ConfigError("tokenizer", name, f"{allowed}: {error}") from error
    if not model or processor.vocab_size() == 0:
        raise ConfigError("tokenizer", name, f"{allowed}; this one has no pieces")
    return processor


def control_ids(processor: sentencepiece.SentencePieceProcessor) -> dict[str, int]:
    """Control symbol -> id."""
    ids = list(range(processor.vocab_size()))
    return {processor.id_to_piece(token_id): token_id for token_id in ids if processor.is_control(token_id)}


def marker_ids(processor: sentencepiece.SentencePieceProcessor) -> tuple[dict[str, int], int] | None:
    """``(role -> id, id of the end)`` if the model has all of radixkv's markers as control symbols."""
    controls = control_ids(processor)
    if END_PIECE not in controls or not set(ROLE_PIECES.values()) <= controls.keys():
        return None
    return {role: controls[piece] for role, piece in ROLE_PIECES.items()}, controls[END_PIECE]


def read_spec(model: bytes) -> ModelSpec:
    """Return the training and normalisation settings of a serialized model (fields of ``sentencepiece_model.proto``).

    The library's own reader needs the package protobuf; six values don't justify that dependency.
    """
    sections = dict(_fields(model))
    trainer = dict(_fields(_as_bytes(sections.get(2, b""))))
    normalizer = dict(_fields(_as_bytes(sections.get(3, b""))))
    return ModelSpec(
        model_type=_as_int(trainer.get(3, _UNIGRAM)),
        byte_fallback=bool(trainer.get(35, 0)),
        space_is_suffix=bool(trainer.get(24, 0)),
        normalizer=_as_bytes(normalizer.get(1, b"")).decode(),
        adds_prefix=bool(normalizer.get(3, 1)),
        removes_spaces=bool(normalizer.get(4, 1)),
    )


def _pairs(processor: sentencepiece.SentencePieceProcessor) -> frozenset[str]:
    """Return the pairs of neighbouring characters inside pieces. ``▁`` counts as a space."""
    pairs: set[str] = set()
    for token_id in range(processor.vocab_size()):
        if processor.is_control(token_id) or processor.is_unknown(token_id) or processor.is_byte(token_id):
            continue
        piece = processor.id_to_piece(token_id).replace(SPACE_MARK, " ")
        pairs.update(left + right for left, right in pairwise(piece))
    return frozenset(pairs)


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The fields of a serialized protocol buffer message, as ``(number, value)``."""
    position = 0
    while position < len(message):
        key, position = _varint(message, position)
        number, wire_type = key >> 3, key & 7
        if wire_type == 0:
            value, position = _varint(message, position)
            yield number, value
            continue
        size = {1: 8, 5: 4}.get(wire_type)
        if size is None:
            size, position = _varint(message, position)
        yield number, message[position : position + size]
        position += size


def _varint(message: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7


def _as_bytes(value: int | bytes) -> bytes:
    return value if isinstance(value, bytes) else b""


def _as_int(value: int | bytes) -> int:
    return value if isinstance(value, int) else 0
