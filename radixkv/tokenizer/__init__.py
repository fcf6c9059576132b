"""Text to token ids: the shipped SentencePiece model, and the tokenizers that come with models.

The only package that imports ``sentencepiece`` and ``tokenizers``, each in a module of its own and only
once a tokenizer is loaded that needs it. Importing this package costs nothing.

Beside this file lie the shipped model ``radixkv-8k.model``, ``LICENSE-TEXT``, the licence of the text that it
was trained on, and ``train.py``, which trains it.
"""

from __future__ import annotations

from radixkv.tokenizer.load import load_tokenizer
from radixkv.tokenizer.protocol import Message, Tokenizer

__all__ = ["Message", "Tokenizer", "load_tokenizer"]
