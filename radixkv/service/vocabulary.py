"""The texts of a tokenizer's tokens, as the engine and log probabilities need them.

Only this module looks into a tokenizer.
"""

from __future__ import annotations

from typing import Any

from radixkv.engines.vocabulary import Pieces, Vocabulary
from radixkv.tokenizer import Tokenizer

_SPACE_MARK = "\u2581"


def vocabulary_of(tokenizer: Tokenizer) -> Vocabulary:
    """Return the vocabulary of a tokenizer. It is read when it is first needed."""
    return Vocabulary(lambda: _source(tokenizer))


def _source(tokenizer: Any) -> str | Pieces:
    """Return the JSON of a fast tokenizer, or the pieces of a SentencePiece model. Raises ValueError for others."""
    backend, processor = (getattr(tokenizer, name, None) for name in ("_backend", "_processor"))
    if backend is not None:
        return str(backend.to_str())
    if processor is None:
        raise ValueError(f"{type(tokenizer).__name__} is neither a fast tokenizer nor a SentencePiece model")
    tokens, special = [], []
    for token_id in range(processor.vocab_size()):
        piece = processor.id_to_piece(token_id)
        if processor.is_control(token_id) or processor.is_unknown(token_id) or processor.is_unused(token_id):
            special.append(token_id)
            tokens.append(piece.encode())
        elif processor.is_byte(token_id):
            tokens.append(bytes([int(piece[3:5], 16)]))
        else:
            tokens.append(piece.replace(_SPACE_MARK, " ").encode())
    return Pieces(tokens, special)
