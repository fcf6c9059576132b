"""Ids to text a piece at a time: characters and stop strings that span pieces."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.service.textstream import TextStream
from radixkv.tokenizer import load_tokenizer

TOKENIZER = load_tokenizer()


def pieces(prompt: str, answer_ids: list[int], stops: tuple[str, ...] = ()) -> tuple[list[str], TextStream]:
    stream = TextStream(TOKENIZER, TOKENIZER.encode(prompt), stops)
    taken = []
    for token_id in answer_ids:
        stream.push([token_id])
        taken.append(stream.take())
    stream.close()
    return [*taken, stream.take(final=True)], stream


@pytest.mark.parametrize("text", ["plain words, and more", "日本語 🙂🙂 naïve", "a  b\n\n c\t", "🏳️‍🌈"])
def test_pieces_join_to_the_text(text: str) -> None:
    whole = TOKENIZER.encode("Prompt: " + text)
    prompt = TOKENIZER.encode("Prompt:")
    assert whole[: len(prompt)] == prompt
    taken, stream = pieces("Prompt:", whole[len(prompt) :])
    assert "".join(taken) == stream.text == " " + text
    assert not any("\ufffd" in piece for piece in taken)


@given(st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=30))
def test_any_ids_give_the_text_that_decoding_gives(ids: list[int]) -> None:
    prompt = "Say:"
    taken, stream = pieces(prompt, ids)
    assert "".join(taken) == stream.text
    assert stream.text == TOKENIZER.decode([*TOKENIZER.encode(prompt), *ids]).removeprefix(prompt)


def test_ids_that_the_tokenizer_lacks_have_no_text() -> None:
    stream = TextStream(TOKENIZER, TOKENIZER.encode("Say:"), ())
    words = TOKENIZER.encode("Say: x y")[len(TOKENIZER.encode("Say:")) :]
    stream.push([TOKENIZER.vocab_size, *words, TOKENIZER.vocab_size + 7])
    stream.close()
    assert stream.text == " x y" and stream.num_tokens == len(words) + 2


@given(
    st.text("ab ", min_size=1, max_size=30),
    st.lists(st.text("ab ", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_a_stop_string_is_never_shown_nor_anything_behind_it(text: str, stops: list[str]) -> None:
    ids = TOKENIZER.encode("x" + text)[len(TOKENIZER.encode("x")) :]
    free, _ = pieces("x", ids)
    taken, stream = pieces("x", ids, tuple(stops))
    whole = "".join(free)
    ends = [whole.index(stop) + len(stop) for stop in stops if stop in whole]
    if not ends:
        assert "".join(taken) == whole and not stream.stopped
        return
    assert stream.stopped and "".join(taken) == stream.text
    assert not any(stop in stream.text for stop in stops)
    assert whole.startswith(stream.text) and any(whole[len(stream.text) :].startswith(stop) for stop in stops)
