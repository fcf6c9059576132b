"""Ids become text piece by piece. Characters and stop strings may span pieces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.service.textstream import Stop, TextStream
from radixkv.tokenizer import Tokenizer, load_tokenizer

TOKENIZER = load_tokenizer()


def pieces(prompt: str, answer_ids: list[int], stops: tuple[str, ...] = ()) -> tuple[list[str], TextStream]:
    stream = TextStream(TOKENIZER, TOKENIZER.encode(prompt), [Stop(each) for each in stops])
    taken = []
    for token_id in answer_ids:
        stream.push([token_id])
        taken.append(stream.take())
    stream.close()
    return [*taken, stream.take()], stream


@pytest.mark.parametrize("text", ["plain words, and more", "日本語 🙂🙂 naïve", "a  b\n\n c\t", "🏳️‍🌈"])
def test_pieces_join_to_the_text(text: str) -> None:
    whole = TOKENIZER.encode("Prompt: " + text)
    prompt = TOKENIZER.encode("Prompt:")
    assert whole[: len(prompt)] == prompt
    taken, _ = pieces("Prompt:", whole[len(prompt) :])
    assert "".join(taken) == " " + text
    assert not any("\ufffd" in piece for piece in taken)


@given(st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=30))
def test_any_ids_give_the_text_that_decoding_gives(ids: list[int]) -> None:
    prompt = "Say:"
    taken, _ = pieces(prompt, ids)
    assert "".join(taken) == TOKENIZER.decode([*TOKENIZER.encode(prompt), *ids]).removeprefix(prompt)


def test_ids_that_the_tokenizer_lacks_have_no_text() -> None:
    stream = TextStream(TOKENIZER, TOKENIZER.encode("Say:"), ())
    words = TOKENIZER.encode("Say: x y")[len(TOKENIZER.encode("Say:")) :]
    stream.push([TOKENIZER.vocab_size, *words, TOKENIZER.vocab_size + 7])
    stream.close()
    assert stream.take() == " x y" and stream.num_tokens == len(words) + 2


@given(
    st.text("ab ", min_size=1, max_size=30),
    st.lists(st.text("ab ", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_a_stop_string_and_the_text_after_it_are_never_shown(text: str, stops: list[str]) -> None:
    ids = TOKENIZER.encode("x" + text)[len(TOKENIZER.encode("x")) :]
    free, _ = pieces("x", ids)
    taken, stream = pieces("x", ids, tuple(stops))
    whole = "".join(free)
    ends = [whole.index(stop) + len(stop) for stop in stops if stop in whole]
    if not ends:
        assert "".join(taken) == whole and not stream.stopped
        return
    shown = "".join(taken)
    assert stream.stopped and not any(stop in shown for stop in stops)
    assert whole.startswith(shown) and any(whole[len(shown) :].startswith(stop) for stop in stops)


class Counting:
    """A tokenizer with one id for each byte. It counts the ids that it decodes."""

    vocab_size = 256

    def __init__(self) -> None:
        self.num_decoded = 0

    def decode(self, ids: Sequence[int]) -> str:
        self.num_decoded += len(ids)
        return bytes(ids).decode("utf-8", "replace")


@pytest.mark.parametrize("broken", [b"\x80", b"\xf0\x9f", b"\xff", b"a\x80\xe2\x82"])
def test_text_that_never_becomes_whole_is_decoded_in_linear_time(broken: bytes) -> None:
    tokenizer, ids = Counting(), list(broken * 2000)
    stream = TextStream(cast("Tokenizer", tokenizer), [])
    for token_id in ids:
        stream.push([token_id])
    stream.close()
    assert stream.take() == (broken * 2000).decode("utf-8", "replace")
    assert tokenizer.num_decoded < 300 * len(ids)


def test_long_stop_strings_cost_no_more_than_the_text() -> None:
    """Each character moves each automaton forward by one state.

    It falls back by at most as many states as it went forward.
    """
    steps = 0

    class Fallback(list[int]):
        def __getitem__(self, place: Any) -> Any:
            nonlocal steps
            steps += 1
            return super().__getitem__(place)

    stops = [Stop("a" * 200 + end) for end in "bcde"]
    for each in stops:
        each.fallback = Fallback(each.fallback)
    text = ("a" * 199 + "x") * 20
    stream = TextStream(cast("Tokenizer", Counting()), [], stops)
    stream.push(text.encode())
    assert steps <= len(stops) * len(text)
    assert len(stream.take()) > len(text) - 201
    stream.push(b"a" * 200 + b"dx")
    assert stream.stopped and stream.take().count("x") <= 1


@given(
    st.lists(st.text("ab", min_size=1, max_size=9), max_size=9),
    st.lists(st.text("ab", min_size=1, max_size=7)),
)
def test_stops_are_found_where_a_search_of_all_the_text_finds_them(
    texts: list[str], stops: list[str]
) -> None:
    stream = TextStream(cast("Tokenizer", Counting()), [], [Stop(each) for each in stops])
    shown = seen = ""
    for number, character in enumerate("".join(texts)):
        stream.push(character.encode())
        seen += character
        shown += stream.take()
        assert stream.stopped == any(stop in seen for stop in stops), number
        if stream.stopped:
            assert shown == seen[: min(seen.index(stop) for stop in stops if stop in seen)]
            return
        held = seen.removeprefix(shown)
        assert shown + held == seen and (not held or any(stop.startswith(held) for stop in stops))
