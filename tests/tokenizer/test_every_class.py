"""Each class of tokenizer that the installed transformers knows, with all kinds of files that one may look for."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest

from radixkv.errors import ConfigError
from radixkv.tokenizer import load_tokenizer
from tests.tokenizer import test_equal
from tests.tokenizer.folders import CHATML, backend_of, spm_model, write

pytestmark = [
    pytest.mark.release,
    # Classes of transformers leave files open when they refuse them.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

KINDS = {"Unigram": "unigram", "WordPiece": "wordpiece", "WordLevel": "wordlevel", "BPE": "gpt2"}
_MODELS = ("spiece.model", "sentencepiece.bpe.model", "tokenizer.model", "sentencepiece.model")


def names() -> list[str]:
    """Return the names of the classes."""
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

    return sorted({each for each in TOKENIZER_MAPPING_NAMES.values() if each is not None})


def folder_of(place: Path, name: str, *, has_json: bool) -> Path:
    """Make a folder for a class, with a ``tokenizer.json`` or with vocabularies in other files."""
    from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

    model = getattr(tokenizer_class_from_name(name), "model", None)
    kind = KINDS.get(getattr(model, "__name__", ""), "gpt2")
    place.mkdir()
    write(place, kind, CHATML, config={"tokenizer_class": name})
    if not has_json:
        (place / "tokenizer.json").unlink()
        backend_of("gpt2").model.save(str(place))
        words = sorted(backend_of("wordpiece").get_vocab().items(), key=lambda each: each[1])
        (place / "vocab.txt").write_text("".join(f"{word}\n" for word, _ in words))
        for file in _MODELS:
            (place / file).write_bytes(spm_model("unigram" if kind == "unigram" else "bpe"))
    return place


@pytest.mark.parametrize("has_json", [True, False])
def test_a_class_gives_the_ids_of_transformers_or_is_refused(tmp_path: Path, has_json: bool) -> None:
    found, num_equal = names(), 0
    assert len(found) > 60
    for at, name in enumerate(found):
        folder = folder_of(tmp_path / str(at), name, has_json=has_json)
        theirs = test_equal.theirs_of(str(folder))
        try:
            ours = load_tokenizer(str(folder))
        except ConfigError as error:
            assert isinstance(theirs, Exception) or "it says" in str(error), name
            continue
        assert not isinstance(theirs, Exception), name
        num_equal += 1
        for text in test_equal.TEXTS:
            assert ours.encode(text) == theirs.encode(text), (name, text)
        drawn = Random(name)
        for _ in range(8):
            messages, tools = test_equal.conversation_of(drawn)
            expected = test_equal.expected(theirs, messages, tools, True)
            assert test_equal.ids_or_refusal(ours.encode_chat, messages, tools) == expected, (name, messages)
    assert num_equal > len(found) // 3, json.dumps(num_equal)
