"""Tokenizers of many kinds, trained here on real text, and texts to test them with."""

from __future__ import annotations

import argparse
import functools
import io
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics

import sentencepiece
import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers

from radixkv.tokenizer import Tokenizer, load_tokenizer
from radixkv.tokenizer.chat import PlainChat
from radixkv.tokenizer.fast import load_file
from radixkv.tokenizer.spm import SentencePieceTokenizer, load_processor, read_spec

ODDITIES = (
    "日本語 のテキスト。改行\n\n\nGrüße, naïve café — “quoted”…\t\ttabs\r\nЯ здесь 😀👍🏽 \n  "
    "e\u0301 u\u0308 \u3000x\u00a0y ﬁ ① ▁▁ a▁b \x00 <s> </s> <|user|> <tag>x</tag> return  re turn\n \n\n"
)


@functools.cache
def real_text() -> str:
    """Return about 200,000 characters of English, code and unusual characters."""
    english = "\n".join(topics[name] for name in sorted(topics)[:25])
    return english + Path(argparse.__file__).read_text(encoding="utf-8") + ODDITIES * 60


def _lines() -> list[str]:
    return real_text().splitlines(keepends=True)


def train_sentencepiece(*more: str, **options: object) -> bytes:
    """Return a small serialized model of this text and ``more``.

    The settings are the library's defaults except for ``options`` and a fallback to bytes.
    """
    model = io.BytesIO()
    settings = {"model_type": "bpe", "vocab_size": 1500, "byte_fallback": True, **options}
    sentences = (
        stripped for line in [*_lines(), *more] if (stripped := line.replace("\x00", "").strip("\n"))
    )
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=sentences, model_writer=model, minloglevel=2, num_threads=1, **settings
    )
    return model.getvalue()


def sentencepiece_of(model: bytes) -> Tokenizer:
    return SentencePieceTokenizer(load_processor(model, "test"), read_spec(model), "", PlainChat())


def _sentencepiece(**options: object) -> Tokenizer:
    return sentencepiece_of(train_sentencepiece(**options))


_AS_IS = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}

GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
NO_WORDS = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
LLAMA3 = pre_tokenizers.Sequence(
    [
        pre_tokenizers.Split(
            Regex(
                r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
                r"|\s*[\r\n]+|\s+(?!\S)|\s+"
            ),
            "isolated",
        ),
        NO_WORDS,
    ]
)


def train_byte_level(
    pre_tokenizer: object = GPT2, special_tokens: tuple[str, ...] = ()
) -> tokenizers.Tokenizer:
    """Return a small byte-level BPE tokenizer."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer, backend.decoder = pre_tokenizer, decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        _lines(),
        trainers.BpeTrainer(
            vocab_size=2000,
            show_progress=False,
            special_tokens=list(special_tokens),
            initial_alphabet=alphabet,
        ),
    )
    return backend


def fast_of(backend: tokenizers.Tokenizer) -> Tokenizer:
    return load_file(backend.to_str().encode(), "tokenizer.json", "test")


def _byte_level(pre_tokenizer: object) -> Tokenizer:
    return fast_of(train_byte_level(pre_tokenizer))


def _word_piece() -> Tokenizer:
    backend = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer, backend.pre_tokenizer = (
        normalizers.BertNormalizer(),
        pre_tokenizers.BertPreTokenizer(),
    )
    backend.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=1500, show_progress=False, special_tokens=["[UNK]"])
    backend.train_from_iterator(_lines(), trainer)
    return fast_of(backend)


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "shipped": load_tokenizer,
    "sentencepiece, library defaults": _sentencepiece,
    "sentencepiece, identity": lambda: _sentencepiece(**_AS_IS),
    "sentencepiece, unknown characters": lambda: _sentencepiece(**_AS_IS, byte_fallback=False),
    "sentencepiece, unigram": lambda: _sentencepiece(**_AS_IS, model_type="unigram", vocab_size=1000),
    "sentencepiece, own symbols": lambda: _sentencepiece(
        **_AS_IS, user_defined_symbols=["<tag>", "re turn", "\n\n"]
    ),
    "sentencepiece, pieces over spaces": lambda: _sentencepiece(**_AS_IS, split_by_whitespace=False),
    "sentencepiece, space as suffix": lambda: _sentencepiece(**_AS_IS, treat_whitespace_as_suffix=True),
    "sentencepiece, case folded": lambda: _sentencepiece(normalization_rule_name="nmt_nfkc_cf"),
    "byte-level, as GPT-2": lambda: _byte_level(GPT2),
    "byte-level, as Llama 3": lambda: _byte_level(LLAMA3),
    "byte-level, tokens over spaces": lambda: _byte_level(NO_WORDS),
    "word pieces": _word_piece,
}


@functools.cache
def tokenizer_of(kind: str) -> Tokenizer:
    return KINDS[kind]()
