"""What is said of each cause: what happened, what to do, and how the providers name it.

``{place}`` is the field of the new body, ``{earlier}`` that of the earlier one, ``{num}`` a number of tools or
messages.
Nothing here quotes a body.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from radixkv.service.explanations.differences import Cause
from radixkv.service.explanations.lines import VolatileKind


@dataclass(frozen=True, slots=True)
class Words:
    """The words for a cause.

    - ``anthropic``: the ``cache_miss_reason`` of Anthropic's diagnostics that fits; None: none does.
    - ``openai``: the ``reason`` of OpenAI's.
    - ``said``: what happened, as the end of a sentence. ``change``: what to do.
    """

    anthropic: str | None
    openai: str | None
    said: str
    change: str


KINDS: Final[Mapping[VolatileKind, str]] = {
    "date": "a date",
    "time": "a time",
    "id": "an id",
    "checksum": "a checksum",
    "number": "a number",
    "text": "other words each time",
}
_KEEP_MESSAGES: Final = "Send earlier messages as they were sent before, and add new ones behind them."

WORDS: Final[Mapping[Cause, Words]] = {
    "first_request": Words(
        "previous_message_not_found",
        None,
        "no request came before it",
        "Warm what all requests begin with before the first one comes: radixkv warm.",
    ),
    "shorter_than_block": Words(
        None,
        None,
        "a prompt has fewer tokens than a block, and only whole blocks are found",
        "Serve with a smaller --block-size, or leave it: there is little to save.",
    ),
    "model_changed": Words(
        "model_changed",
        "model_changed",
        "the requests are for different models, and each has its own cache",
        "Send the requests of a conversation to one model.",
    ),
    "adapter_changed": Words(
        None,
        None,
        "the requests are for different adapters, and each has its own cache",
        "Send the requests of a conversation with one adapter.",
    ),
    "salt_changed": Words(
        None,
        None,
        "the requests have different salts, and each has its own cache",
        "Send the same salt with all requests that may share a prefix.",
    ),
    "cache_not_used": Words(
        None,
        None,
        "{place} asks for explicit breakpoints and has none, so the cache isn't used",
        "Set a breakpoint at the end of {earlier}, or leave {place}.mode at implicit.",
    ),
    "tokenizer_changed": Words(
        None,
        None,
        "the models' tokenizers give other ids to the same text",
        "Serve both requests with the same model folder. After an update, warm your prompts again.",
    ),
    "template_changed": Words(
        None,
        None,
        "the models' chat templates write the same conversation differently",
        "Serve both requests with the same chat template. After an update, warm your prompts again.",
    ),
    "form_changed": Words(
        "messages_changed",
        "input_changed",
        "one request is a conversation, the other a plain prompt",
        "Send both in the same form: a template writes what a plain prompt lacks.",
    ),
    "tools_reordered": Words(
        "tools_changed",
        "tools_changed",
        "the tools have another order, from {place} on",
        "Send the tools in one order, such as by name.",
    ),
    "tool_keys_reordered": Words(
        "tools_changed",
        "tools_changed",
        "the keys of {place} have another order",
        "Write the keys of each tool in one order: sort them, or keep the JSON as text.",
    ),
    "tools_added": Words(
        "tools_changed",
        "tools_changed",
        "{place} was added to the tools ({num} in all)",
        "Send all tools with the first request of a conversation, and the same ones with every later one.",
    ),
    "tools_removed": Words(
        "tools_changed",
        "tools_changed",
        "{earlier} of the earlier request is missing ({num} in all)",
        "Send the same tools with every request of a conversation, also those that it no longer needs.",
    ),
    "tools_hidden": Words(
        "tools_changed",
        "tools_changed",
        "{place} hides the tools, so the prompt lacks them",
        "Leave {place} at auto, and say in the last message that no tool may be called.",
    ),
    "tools_changed": Words(
        "tools_changed",
        "tools_changed",
        "{place} says something else",
        "Keep the definition of a tool the same in all requests of a conversation.",
    ),
    "system_changed": Words(
        "system_changed",
        "input_changed",
        "{place} was changed",
        "Keep the system's text the same in all requests. Put what is new into the last message.",
    ),
    "volatile_line": Words(
        None,
        "input_changed",
        "{place} has a line that changes: {kind}",
        "Move the line to the end of the last message, behind all that stays the same.",
    ),
    "message_changed": Words("messages_changed", "input_changed", "{place} was changed", _KEEP_MESSAGES),
    "argument_keys_reordered": Words(
        "messages_changed",
        "input_changed",
        "the keys in {place} have another order",
        "Send a call back as the model wrote it: keep its arguments as text, or keep the order of their keys.",
    ),
    "reasoning_stripped": Words(
        "messages_changed",
        "input_changed",
        "the reasoning in {place} was removed from the history",
        "Send answers back with their reasoning, or never send it.",
    ),
    "message_inserted": Words(
        "messages_changed", "input_changed", "{place} was put between earlier messages", _KEEP_MESSAGES
    ),
    "messages_truncated": Words(
        "messages_changed",
        "context_compacted",
        "{num} messages were cut out, from {earlier} of the earlier request on",
        "Cut seldom and much: half of the messages at once, rather than the oldest with each request.",
    ),
    "messages_compacted": Words(
        "messages_changed",
        "context_compacted",
        "{num} messages, from {earlier} of the earlier request on, were replaced by {num_new}",
        "Compact seldom and much: each time all that follows is computed again.",
    ),
    "prompt_changed": Words(
        "messages_changed",
        "input_changed",
        "{place} was changed",
        "Put what is the same in all prompts first, and what differs at the end.",
    ),
    "retokenised": Words(
        "messages_changed",
        "input_changed",
        "the text goes on, and its last tokens become others where it does",
        "End a prefix where a token ends: behind a whole word, at a newline.",
    ),
    "template_rewrites": Words(
        "messages_changed",
        "input_changed",
        "the chat template writes {place} differently once other messages follow",
        "Nothing in the requests: ask for a template that writes a message always alike.",
    ),
    "other_conversation": Words(
        "previous_message_not_found",
        "input_changed",
        "no earlier message is in this request: it is another conversation, from {place} on",
        "Nothing: only the system's text and the tools are common to both.",
    ),
}
