"""Trains the tokenizer that ships with radixkv: ``python -m radixkv.tokenizer.train --out FILE``.

For maintainers: this is the recipe of the shipped model, so the model can be reproduced.

The text comes with every CPython installation. It is the language reference inside ``pydoc``, the docstrings and
comments of the standard library (ordinary English), and the whole source of every fifth module (code). Its licence,
that of CPython, is in ``LICENSE-TEXT``. Nothing is downloaded.

The same text gives the same model, byte for byte: files are read in sorted order, lines keep their order, and the
trainer has no randomness. Another version of CPython has another text. So the command prints the digests of the
text and of the model.

Reasons for the options:

- BPE with 8,000 pieces: a unigram model of this size takes twenty times longer to train and is no better here.
- Nothing is normalised, no space is added or removed, and characters without a piece are encoded as UTF-8 bytes. So
  every text comes back from its ids unchanged.
- A newline is a piece of its own, and part of no other. So a text can be cut after any newline: the ids of the two
  halves are the ids of the whole.
- No piece has a space after something that isn't one (SentencePiece's own rule). So a cut before a space is as
  safe.
- The markers of a conversation are control symbols: typed as text they stay text, and only ids produce them.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import io
import sys
import sysconfig
import tokenize
import warnings
from collections.abc import Iterator
from pathlib import Path

from radixkv.tokenizer.protocol import END_PIECE, ROLE_PIECES

VOCAB_SIZE = 8000
CODE_EVERY = 5
"""Every fifth module is used as a whole; of the others, only docstrings and comments."""

LEFT_OUT = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}
)
"""Folders that aren't part of the text: third-party packages, test data, tables of characters."""

_Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def module_paths(root: Path) -> list[Path]:
    """Return the modules under ``root`` that belong to the text, sorted by their relative path."""
    found = (path for path in root.rglob("*.py") if not LEFT_OUT & set(path.relative_to(root).parts))
    machine_independent = (path for path in found if not path.name.startswith("_sysconfigdata"))
    return sorted(machine_independent, key=lambda path: path.relative_to(root).as_posix())


def prose(source: str) -> Iterator[str]:
    """The docstrings of a module, then its comments."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some modules have escapes that the compiler warns about
        tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, _Documented) and (text := ast.get_docstring(node)):
            yield text
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.string.lstrip("#").removeprefix(" ")


def texts(root: Path) -> Iterator[str]:
    """The whole training text, piece by piece."""
    from pydoc_data.topics import topics

    yield from (topics[name] for name in sorted(topics))
    for number, path in enumerate(module_paths(root)):
        source = path.read_text(encoding="utf-8", errors="replace")
        try:
            yield from [source] if number % CODE_EVERY == 0 else list(prose(source))
        except SyntaxError:
            continue  # deliberately broken or templated files


def lines(root: Path) -> list[str]:
    """Return the text as input of the trainer: lines with their indentation, without empty ones."""
    return [line for text in texts(root) for line in text.splitlines() if line.strip()]


def train(training_lines: list[str], vocab_size: int = VOCAB_SIZE) -> bytes:
    """Return a serialized SentencePiece model of ``vocab_size`` pieces; about 5 s for 6 MB of text."""
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(training_lines),
        model_writer=model,
        model_type="bpe",
        vocab_size=vocab_size,
        character_coverage=0.9998,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=False,
        allow_whitespace_only_pieces=True,
        split_digits=True,
        unk_id=0,
        bos_id=1,
        eos_id=2,
        pad_id=3,
        control_symbols=[*ROLE_PIECES.values(), END_PIECE],
        user_defined_symbols=["\n"],
        max_sentence_length=1 << 16,
        num_threads=1,
        minloglevel=2,
    )
    return model.getvalue()


def main(arguments: list[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m radixkv.tokenizer.train", description="Trains the tokenizer."
    )
    parser.add_argument("--out", type=Path, required=True, help="where to write the model")
    options = parser.parse_args(arguments)
    training_lines = lines(Path(sysconfig.get_path("stdlib")))
    text = "\n".join(training_lines).encode()
    model = train(training_lines)
    options.out.write_bytes(model)
    python = ".".join(map(str, sys.version_info[:3]))
    print(f"text:  {len(text):,} bytes of CPython {python}, sha256 {hashlib.sha256(text).hexdigest()}")
    print(f"model: {len(model):,} bytes, sha256 {hashlib.sha256(model).hexdigest()}")


if __name__ == "__main__":
    main()
