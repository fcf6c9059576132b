"""What LangChain and litellm show of radixkv's answers. Run with the Python of their environment.

contract.py CLIENT PART URL KEY MODEL: raises AssertionError if something is not as it should be. CLIENT is one
of CLIENTS. PART is ``answers`` for usage, cache fields, streams and errors, or ``calls`` if the service's answers call
the tool find_page.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
ASKED = "Which page explains pins?"
SCHEMA = {"type": "object", "properties": {"topic": {"type": "string"}}, "required": ["topic"]}
TOOL = {
    "type": "function",
    "function": {"name": "find_page", "description": "Find it.", "parameters": SCHEMA},
}
CALL = {"name": "find_page", "args": {"topic": "pins"}}


def rules(client: str) -> str:
    """A long text that no other client sends."""
    return f"These are the rules of {client}. " + "Rule 7: answer politely, and name the page. " * 40


def refused(act: Callable[[], object], *said: str) -> None:
    """The call must raise an error that says all of these."""
    try:
        act()
    except Exception as error:  # noqa: BLE001 each client has errors of its own
        shown = f"{type(error).__name__} {error}"
        assert all(each in shown for each in said), shown
    else:
        raise AssertionError(f"no error, instead of {said}")


class LangChain:
    """A chat model of LangChain. ``write``: what its usage calls written tokens; None: it knows none."""

    def __init__(self, client: str, make: Callable[..., Any], marked: dict[str, Any] | None = None) -> None:
        from langchain_core.messages import HumanMessage, SystemMessage

        self.make = make
        system = {"type": "text", "text": rules(client), **(marked or {})}
        self.chat = [SystemMessage([system] if marked else system["text"]), HumanMessage(ASKED)]
        self.is_marked = marked is not None

    def answers(self) -> None:
        model = self.make()
        first = model.invoke(self.chat).usage_metadata
        second = model.invoke(self.chat).usage_metadata
        details = first["input_token_details"]
        written = sum(details.get(f"ephemeral_{ttl}_input_tokens", 0) for ttl in ("5m", "1h"))
        assert (written > 0) == self.is_marked, first
        assert first["input_tokens"] == second["input_tokens"] > 200
        read = second["input_token_details"]["cache_read"]
        assert read > details["cache_read"] and 0 < second["input_tokens"] - read <= 32, second
        pieces = list(model.stream(self.chat))
        whole = pieces[0]
        for each in pieces[1:]:
            whole += each
        assert whole.usage_metadata["input_token_details"]["cache_read"] == read and whole.content
        assert whole.usage_metadata["output_tokens"] == second["output_tokens"] > 0
        refused(lambda: self.make(model="unknown").invoke(ASKED), "404", "no such model")
        refused(lambda: self.make(api_key="wrong").invoke(ASKED), "401", "key")
        refused(lambda: model.invoke("word " * 9_000), "400", "tokens")

    def calls(self) -> None:
        from langchain_core.messages import ToolMessage

        model = self.make(max_tokens=200).bind_tools([TOOL])
        answer = model.invoke(self.chat)
        (call,) = answer.tool_calls
        assert {name: call[name] for name in CALL} == CALL, call
        result = ToolMessage("12", tool_call_id=call["id"], name="find_page")
        (again,) = model.invoke([*self.chat, answer, result]).tool_calls
        assert {name: again[name] for name in CALL} == CALL, again
        pieces = list(model.stream(self.chat))
        whole = pieces[0]
        for each in pieces[1:]:
            whole += each
        (streamed,) = whole.tool_calls
        assert {name: streamed[name] for name in CALL} == CALL, streamed


def langchain_openai(url: str, key: str, model: str, **more: Any) -> LangChain:
    from langchain_openai import ChatOpenAI

    def make(**other: Any) -> Any:
        given = {"model": model, "api_key": key, "max_tokens": 16, "max_retries": 0, **more, **other}
        return ChatOpenAI(base_url=f"{url}/v1", stream_usage=True, **given)

    return LangChain(f"OpenAI {more}", make)


def langchain_responses(url: str, key: str, model: str) -> LangChain:
    return langchain_openai(url, key, model, use_responses_api=True)


def langchain_anthropic(url: str, key: str, model: str) -> LangChain:
    from langchain_anthropic import ChatAnthropic

    def make(**other: Any) -> Any:
        given = {"model": model, "api_key": key, "max_tokens": 16, "max_retries": 0, **other}
        return ChatAnthropic(base_url=url, **given)

    return LangChain("Anthropic", make, {"cache_control": {"type": "ephemeral", "ttl": "1h"}})


class LangChainGoogle(LangChain):
    """Gemini's shape: its cached contents have names."""

    def answers(self) -> None:
        from langchain_core.messages import HumanMessage, SystemMessage
        from langchain_google_genai import create_context_cache

        super().answers()
        model = self.make()
        kept = [SystemMessage(rules("Google's cached contents")), HumanMessage("Remember them.")]
        name = create_context_cache(model, kept, ttl="60s")
        usage = model.invoke([HumanMessage(ASKED)], cached_content=name).usage_metadata
        assert usage["input_token_details"]["cache_read"] >= 0.9 * usage["input_tokens"], usage


def langchain_google(url: str, key: str, model: str) -> LangChain:
    from langchain_google_genai import ChatGoogleGenerativeAI

    def make(**other: Any) -> Any:
        given = {"model": model, "api_key": key, "max_tokens": 16, "max_retries": 1, **other}
        return ChatGoogleGenerativeAI(base_url=url, **given)

    return LangChainGoogle("Google", make)


class LiteLLM:
    """One provider of litellm."""

    def __init__(self, provider: str, base: str, key: str, model: str) -> None:
        self.fixed: dict[str, Any] = {"api_base": base, "api_key": key, "model": f"{provider}/{model}"}
        self.provider = provider
        system: Any = {"type": "text", "text": rules(f"litellm {provider}")}
        if provider == "anthropic":
            system["cache_control"] = {"type": "ephemeral"}
        self.chat = [{"role": "system", "content": [system]}, {"role": "user", "content": ASKED}]

    def ask(self, **other: Any) -> Any:
        import litellm

        litellm.suppress_debug_info = True
        return litellm.completion(**{**self.fixed, "messages": self.chat, "max_tokens": 16, **other})

    def answers(self) -> None:
        first, second = self.ask().usage, self.ask().usage
        assert first.prompt_tokens == second.prompt_tokens > 200
        read = second.prompt_tokens_details.cached_tokens
        assert 0 < second.prompt_tokens - read <= 32, second
        if self.provider == "anthropic":
            assert first.cache_creation_input_tokens > 0, first
        *_, last = self.ask(stream=True, stream_options={"include_usage": True})
        assert last.usage.prompt_tokens == second.prompt_tokens
        assert last.usage.prompt_tokens_details.cached_tokens == read
        refused(lambda: self.ask(model=f"{self.provider}/unknown"), "NotFoundError", "no such model")
        refused(lambda: self.ask(api_key="wrong"), "AuthenticationError")
        refused(lambda: self.ask(messages=[{"role": "user", "content": "word " * 9_000}]), "tokens")

    def calls(self) -> None:
        answer = self.ask(tools=[TOOL], max_tokens=200).choices[0]
        (call,) = answer.message.tool_calls
        assert answer.finish_reason == "tool_calls" and call.function.name == "find_page"
        assert json.loads(call.function.arguments) == CALL["args"]
        result = {"role": "tool", "tool_call_id": call.id, "content": "12"}
        turns = [*self.chat, answer.message.model_dump(), result]
        again = self.ask(messages=turns, tools=[TOOL], max_tokens=200).choices[0]
        assert again.finish_reason == "tool_calls"
        chunks = [each.choices[0] for each in self.ask(tools=[TOOL], max_tokens=200, stream=True)]
        parts = [part.function for each in chunks for part in each.delta.tool_calls or ()]
        assert json.loads("".join(part.arguments or "" for part in parts)) == CALL["args"]
        assert chunks[-1].finish_reason == "tool_calls"


CLIENTS: dict[str, Callable[[str, str, str], Any]] = {
    "langchain-openai": langchain_openai,
    "langchain-responses": langchain_responses,
    "langchain-anthropic": langchain_anthropic,
    "langchain-google": langchain_google,
    "litellm-openai": lambda url, key, model: LiteLLM("openai", f"{url}/v1", key, model),
    "litellm-anthropic": lambda url, key, model: LiteLLM("anthropic", url, key, model),
    "litellm-gemini": lambda url, key, model: LiteLLM("gemini", f"{url}/v1beta", key, model),
}

if __name__ == "__main__":
    client, part, *address = sys.argv[1:]
    getattr(CLIENTS[client](*address), part)()
