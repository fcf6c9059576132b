"""Text to token ids: the shipped SentencePiece model, and the tokenizers that come with models.

Only this package imports ``sentencepiece`` and ``tokenizers``. Each has its own module, which is imported when a
tokenizer that needs it is loaded. Importing this package imports neither.

The folder also holds the shipped model ``radixkv-8k.model``, the licence of its training text ``LICENSE-TEXT``, and
``train.py``, which trains the model.
"""

from __future__ import annotations

from radixkv.tokenizer.load import load_tokenizer
from radixkv.tokenizer.protocol import Message, Tokenizer

__all__ = ["Message", "Tokenizer", "load_tokenizer"]
