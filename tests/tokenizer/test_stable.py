"""The ids of a stable prefix are the first ids of every continuation, for every kind of tokenizer."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.tokenizer import Tokenizer, load_tokenizer
from tests.tokenizer.kinds import (
    KINDS,
    ODDITIES,
    real_text,
    sentencepiece_of,
    tokenizer_of,
    train_sentencepiece,
)

NUM_CUTS = 500

# Characters that tokenizers treat specially, and enough plain ones to make words.
ALPHABET = st.sampled_from(sorted(set("aeist10.,'(_-\"#\n\r\t  \u00a0\u3000" + ODDITIES)))
TEXTS = st.text(ALPHABET, max_size=40) | st.text(st.characters(exclude_categories=["Cs"]), max_size=20)

# How often a kind may leave out ids of real text. Kinds without boundaries leave out everything.
WITHOUT_BOUNDARIES = {"sentencepiece, space as suffix", "sentencepiece, case folded"}
WITH_FEW_BOUNDARIES = {"sentencepiece, pieces over spaces", "byte-level, tokens over spaces"}


def check(tokenizer: Tokenizer, text: str, continuation: str) -> tuple[list[int], int]:
    ids, left_out = tokenizer.stable_prefix(text)
    assert len(ids) + left_out == len(tokenizer.encode(text))
    assert tokenizer.encode(text + continuation)[: len(ids)] == ids, (text, continuation)
    return ids, left_out


def random_cuts(seed: int) -> list[tuple[str, str]]:
    """Return (prefix, continuation) pairs of real text cut anywhere. Every other continuation is from another place."""
    rng, text = random.Random(seed), real_text()
    cuts = []
    for number in range(NUM_CUTS):
        start = rng.randrange(len(text) - 200)
        cut = start + rng.randrange(1, 120)
        place = cut if number % 2 else rng.randrange(len(text) - 50)
        cuts.append((text[start:cut], text[place : place + rng.randrange(1, 40)]))
    return cuts


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_real_text_cut_anywhere(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    found = [check(tokenizer, *cut) for cut in random_cuts(seed=7)]
    num_empty = sum(not ids for ids, _ in found)
    if kind in WITHOUT_BOUNDARIES:
        assert num_empty == len(found)
    elif kind not in WITH_FEW_BOUNDARIES:
        assert num_empty < 0.25 * len(found)
        assert sum(left_out for ids, left_out in found if ids) < (1.5 if kind == "shipped" else 3) * len(
            found
        )


@pytest.mark.parametrize("kind", KINDS)
@given(text=TEXTS, continuation=TEXTS)
def test_any_text_and_any_continuation(kind: str, text: str, continuation: str) -> None:
    check(tokenizer_of(kind), text, continuation)


@pytest.mark.parametrize("kind", KINDS)
def test_the_ids_grow_with_the_text(kind: str) -> None:
    """The ids warmed for a text are the first ids of a longer text's warm."""
    tokenizer, text = tokenizer_of(kind), real_text()[5000:6000]
    shorter: list[int] = []
    for stop in range(1, len(text), 13):
        ids, _ = tokenizer.stable_prefix(text[:stop])
        assert ids[: len(shorter)] == shorter
        shorter = ids


def test_characters_that_a_normaliser_composes_are_not_cut() -> None:
    """``e`` and a combining accent become ``é``. The model has a piece for ``é`` with the letter before it."""
    tokenizer = sentencepiece_of(train_sentencepiece(*["a qéqé"] * 300))
    assert len(tokenizer.encode("qé")) < len(tokenizer.encode("qe"))
    check(tokenizer, "a qe", "\u0301 and more")
    assert tokenizer.decode(check(tokenizer, "a qe", "x")[0]) == "a"


def test_unstable_cuts_would_be_detected() -> None:
    """Just after a space, and anywhere, most prefixes of this text don't keep their ids."""
    tokenizer, text, rng = load_tokenizer(), real_text()[:100_000], random.Random(3)
    after_spaces = [n for n in range(1, len(text)) if text[n - 1] == " " and text[n].isalpha()]

    def broken(cuts: list[int]) -> float:
        changed = 0
        for cut in cuts:
            start = max(0, cut - 100)
            ids = tokenizer.encode(text[start:cut])
            changed += tokenizer.encode(text[start : cut + 30])[: len(ids)] != ids
        return changed / len(cuts)

    assert broken(rng.sample(after_spaces, 500)) > 0.8
    assert broken([rng.randrange(200, 99_000) for _ in range(500)]) > 0.4


@pytest.mark.parametrize(
    ("text", "stable"),
    [
        ("Hello world", "Hello"),
        ("Hello world ", "Hello world"),
        ("Hello world   ", "Hello world"),
        ("Hello wor", "Hello"),
        ("Hello\n", "Hello\n"),
        ("Hello\n\n", "Hello\n\n"),
        ("Hello\n  ", "Hello\n"),
        ("日本語", "日本語"),
        ("word", ""),
        ("  ", ""),
        ("", ""),
    ],
)
def test_the_boundaries_of_the_shipped_model(text: str, stable: str) -> None:
    tokenizer = load_tokenizer()
    ids, left_out = tokenizer.stable_prefix(text)
    assert tokenizer.decode(ids) == stable
    assert left_out == len(tokenizer.encode(text)) - len(ids)


@pytest.mark.parametrize(
    ("text", "stable"),
    [
        ("Hello world", "Hello"),
        ("Hello world ", "Hello world"),
        ("Hello\nworld", "Hello\n"),
        ("Hello\n", ""),
        ("a b\n\nHello", "a"),
        ("word", ""),
    ],
)
@pytest.mark.parametrize("kind", ["byte-level, as GPT-2", "byte-level, as Llama 3"])
def test_the_boundaries_of_byte_level_tokenizers(kind: str, text: str, stable: str) -> None:
    tokenizer = tokenizer_of(kind)
    assert tokenizer.decode(tokenizer.stable_prefix(text)[0]) == stable
