"""Log probabilities of tokens, in the forms of the providers."""

from __future__ import annotations

from collections.abc import Sequence

from radixkv.engines.protocol import TokenLogprobs
from radixkv.engines.vocabulary import Vocabulary
from radixkv.service.schemas.structured import CompletionLogprobs, TokenLogprob, TopLogprob


def text_of(vocabulary: Vocabulary, token_id: int) -> str:
    """Return the text of a token; � for a part of a character."""
    return vocabulary.bytes_of(token_id).decode("utf-8", errors="replace")


def shown_tokens(vocabulary: Vocabulary, found: Sequence[TokenLogprobs]) -> list[TokenLogprob]:
    """Return tokens in the form of OpenAI's chats and responses."""
    return [
        TokenLogprob(
            **_shown(vocabulary, each.token_id, each.logprob).model_dump(),
            top_logprobs=[_shown(vocabulary, *top) for top in each.top],
        )
        for each in found
    ]


def _shown(vocabulary: Vocabulary, token_id: int, logprob: float) -> TopLogprob:
    content = vocabulary.bytes_of(token_id)
    return TopLogprob(token=content.decode("utf-8", errors="replace"), logprob=logprob, bytes=list(content))


def shown_completion(
    vocabulary: Vocabulary, found: Sequence[TokenLogprobs], offset: int
) -> CompletionLogprobs:
    """Return tokens in the form of OpenAI's completions. ``offset``: where the first of them begins in the text."""
    tokens = [text_of(vocabulary, each.token_id) for each in found]
    offsets = [offset + sum(map(len, tokens[:number])) for number in range(len(tokens))]
    tops = [
        {text_of(vocabulary, token_id): logprob for token_id, logprob in reversed(each.top)} for each in found
    ]
    return CompletionLogprobs(
        tokens=tokens,
        token_logprobs=[each.logprob for each in found],
        top_logprobs=tops,
        text_offset=offsets,
    )
