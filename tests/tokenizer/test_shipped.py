"""The tokenizer model in the package: its properties, and the script that trains it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import sentencepiece
from hypothesis import example, given
from hypothesis import strategies as st

import radixkv.tokenizer
from radixkv.errors import ArgumentError
from radixkv.tokenizer import load_tokenizer
from radixkv.tokenizer.protocol import END_PIECE, ROLE_PIECES
from radixkv.tokenizer.train import train
from tests.tokenizer.kinds import ODDITIES, real_text, tokenizer_of
from tests.waiting import LIMIT_S

PACKAGE = Path(radixkv.tokenizer.__file__).parent
TEXTS = st.text(st.characters(exclude_categories=["Cs"]))


@given(text=TEXTS)
@example("")
@example(" ")
@example("  two  \n\n\t and \r\n more  ")
@example("\u2581")
@example("a\u2581\u2581 \u2581b")
@example("\x00\ufffd\ufeff\U0010ffff")
@example("<s></s><unk><pad><0x41><|user|>")
@example(ODDITIES)
def test_every_text_is_decoded_unchanged(text: str) -> None:
    tokenizer = tokenizer_of("shipped")
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(0 <= token_id < tokenizer.vocab_size for token_id in ids)


@given(st.lists(TEXTS, max_size=4))
def test_texts_encoded_line_by_line_are_the_text_encoded_whole(texts: list[str]) -> None:
    tokenizer = tokenizer_of("shipped")
    by_line = [token_id for text in texts for token_id in tokenizer.encode(text + "\n")]
    assert by_line == tokenizer.encode("".join(text + "\n" for text in texts))


@given(TEXTS)
def test_no_text_makes_a_control_symbol(text: str) -> None:
    tokenizer = tokenizer_of("shipped")
    controls = set(range(8))
    for spelled in ("", "<s>", "</s>", "<|user|>", "<|assistant|>", "<|end|>", "<pad>", "<unk>"):
        assert not controls & set(tokenizer.encode(text + spelled + text))


def test_size_and_special_ids() -> None:
    tokenizer = tokenizer_of("shipped")
    model = sentencepiece.SentencePieceProcessor(model_file=str(PACKAGE / "radixkv-8k.model"))
    assert tokenizer.vocab_size == model.vocab_size() == 8000
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert all(model.is_control(model.piece_to_id(piece)) for piece in (*ROLE_PIECES.values(), END_PIECE))
    assert not model.is_control(model.piece_to_id("\n"))


def test_english_and_code_take_few_tokens() -> None:
    tokenizer = tokenizer_of("shipped")
    licence = Path(__file__).parents[2].joinpath("LICENSE").read_text(encoding="utf-8")
    assert len(licence) / len(tokenizer.encode(licence)) > 2.8
    assert len(real_text()) / len(tokenizer.encode(real_text())) > 3.2


def test_the_licence_of_the_training_text_is_included() -> None:
    assert "PYTHON SOFTWARE FOUNDATION LICENSE VERSION 2" in (PACKAGE / "LICENSE-TEXT").read_text(
        encoding="utf-8"
    )


def test_a_text_that_is_not_unicode_is_refused() -> None:
    tokenizer = tokenizer_of("shipped")
    for call in (tokenizer.encode, tokenizer.stable_prefix):
        with pytest.raises(ArgumentError, match=r"text=.*lone surrogate at index 2"):
            call("ab\ud800")


@pytest.mark.parametrize("token_id", [-1, 8000, 2**40])
def test_ids_out_of_the_vocabulary_are_refused(token_id: int) -> None:
    with pytest.raises(ArgumentError, match=r"ids\[1\]=.* 0 to 7999"):
        tokenizer_of("shipped").decode([300, token_id])


def test_special_ids_and_broken_bytes_decode() -> None:
    tokenizer = tokenizer_of("shipped")
    word = tokenizer.encode("word")
    assert tokenizer.decode([1, *word, 2, 3, 4, 7]) == "word"
    assert tokenizer.decode(tokenizer.encode("é")[:1]) == "\ufffd"


def test_training_the_same_text_gives_the_same_bytes() -> None:
    sentences = [line for line in real_text().replace("\x00", "").splitlines() if line.strip()]
    assert train(sentences, vocab_size=1000) == train(list(sentences), vocab_size=1000)


@pytest.mark.release
def test_the_script_trains_a_model_like_the_shipped_one(tmp_path: Path) -> None:
    """The script reads the documentation of this Python, which may differ from the text of the shipped model."""
    made = tmp_path / "made.model"
    command = [sys.executable, "-W", "error", "-m", "radixkv.tokenizer.train", "--out", str(made)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=LIMIT_S)
    assert printed.stderr == "" and "sha256" in printed.stdout
    tokenizer, shipped = load_tokenizer(str(made)), load_tokenizer()
    assert tokenizer.vocab_size == shipped.vocab_size
    assert tokenizer.decode(tokenizer.encode(real_text())) == real_text()
    messages = [{"role": "user", "content": "<|end|>"}]
    assert (
        tokenizer.encode_messages(messages, True)[:2] == shipped.encode_messages(messages, True)[:2] == [1, 5]
    )
