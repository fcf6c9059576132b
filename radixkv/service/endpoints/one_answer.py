"""What the shapes with one answer a request share: Anthropic's messages, OpenAI's responses, Gemini's contents.

``OneAnswer`` is a generation with one row, whose text is split into texts and calls of tools. ``computed_ahead`` serves
a request that wants its prompt computed and nothing generated.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.responses import Response

from radixkv.metering.records import Counts
from radixkv.service.endpoint import Call, until_disconnect
from radixkv.service.endpoints.completions import Run
from radixkv.service.problems import Json, LongJson
from radixkv.service.prompts import Prompt
from radixkv.service.schemas.base import ReplyBody
from radixkv.service.schemas.completions import CompletionRequest
from radixkv.service.tool_calls import ToolCall, ToolCallReader
from radixkv.service.usage import usage_of

if TYPE_CHECKING:
    from radixkv.config import Namespace
    from radixkv.engines import Generation
    from radixkv.service.core import Service
    from radixkv.service.promises import Kept


class OneAnswer(Run):
    """One chat being answered once. ``has_calls``: whether its answer calls a tool, as far as it was read."""

    def __init__(self, call: Call[Service], body: CompletionRequest, prompt: Prompt) -> None:
        super().__init__(call, body, [prompt])
        self._reader = ToolCallReader() if prompt.has_tools else None
        self.has_calls = False

    def _shown_logprobs(self, row: int) -> None:
        """A choice has none: events and answers have them in the provider's form."""

    def _look(self, namespace: Namespace) -> None:
        if self.progress is not None:
            self.num_found = self.service.cache.match(namespace, self.prompts[0].key).num_tokens

    def _first_usage(self) -> Counts:
        """Return the usage at the beginning of a stream. What was read is known for sure at the end."""
        granted = () if self.kept is None else self.kept.granted
        return usage_of(self.prompts[0].num_tokens, self.num_found, granted)

    def _read(self, text: str, *, is_last: bool) -> list[str | ToolCall]:
        """Return the texts and calls of the next text. After the last, the eviction policy hears of the calls."""
        if self._reader is None:
            return [text] if text else []
        found = [*self._reader.push(text), *(self._reader.close() if is_last else ())]
        self.has_calls = self.has_calls or any(isinstance(each, ToolCall) for each in found)
        if is_last and self.has_calls:
            self.note_calls()
        return found

    def _read_all(self) -> tuple[str | None, list[ToolCall]]:
        """Return the text of the whole answer, None if there are only calls, and the calls."""
        found = self._read(self.texts[0].take(), is_last=True)
        text = "".join(each for each in found if isinstance(each, str))
        calls = [each for each in found if isinstance(each, ToolCall)]
        return (text if text.strip() or not calls else None), calls

    def _was_cut(self, generation: Generation) -> bool:
        """Whether the answer has as many tokens as it may have, and didn't end by itself."""
        return self._reason(generation, 0) == "length"

    def _sent(self, answer: ReplyBody) -> Response:
        shown = answer.model_dump(by_alias=True)
        return LongJson(shown) if self._is_long else Json(shown)


async def computed_ahead(
    call: Call[Service], salt: str, adapter: str | None, prompt: Prompt
) -> tuple[Counts, Kept]:
    """Compute a prompt's whole blocks, and promise what its breakpoints ask for. Raises ApiError."""
    service = call.host
    service.require("prefill")
    namespace, keep = service.namespace(call.tenant, salt, adapter), service.promises.keep
    key = service.rules.whole_blocks(prompt.key, 0).key
    service.require_fit(namespace, [key], "prompt")
    with service.warmer.join(namespace, key, call.owner) as share:
        await until_disconnect(call.request, share.result())
        kept = await service.threads.ask_cache(
            call.tenant,
            keep,
            namespace,
            prompt.key,
            prompt.asked,
            call.owner.as_of,
            prompt.date,
            num_shared=prompt.num_shared,
        )
        usage = await share.settled(kept.granted, num_tokens=prompt.num_tokens)
    call.owner.require(namespace)
    return usage, kept
