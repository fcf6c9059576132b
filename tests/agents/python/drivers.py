"""Each client of PyPI has one conversation with tools, as its documentation shows it. Run with the Python in which the
clients are installed:

drivers.py CLIENT URL KEY MODEL QUESTION QUESTION

The conversation goes on as the server answers: where it calls a tool, the tool is run. Then some clients also ask for
an answer that fits a schema, count tokens and list models.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
os.environ["LANGSMITH_TRACING"] = "false"

from pydantic import BaseModel

RULES = (
    "You answer questions about a manual. Name the page of each answer. Look it up before you answer. " * 4
)
MOST = 512


class Page(BaseModel):
    """A page of the manual."""

    number: int
    topic: str


def find_page(topic: str) -> str:
    """Find the page of the manual that explains a topic.

    Args:
        topic: What the page explains.
    """
    return f"{topic}: page {12 if topic == 'pins' else 40}"


def read_page(page: int) -> str:
    """Read a page of the manual.

    Args:
        page: The number of the page.
    """
    return f"Page {page} explains {'pins' if page == 12 else 'forks'}."


TOOLS: Mapping[str, Callable[..., str]] = {"find_page": find_page, "read_page": read_page}


class FindPage(BaseModel):
    """Find the page of the manual that explains a topic."""

    topic: str


class ReadPage(BaseModel):
    """Read a page of the manual."""

    page: int


def run_tool(name: str, arguments: str) -> str:
    """Return what a tool answers to a call."""
    return TOOLS[name](**json.loads(arguments))


# --- the providers' own SDKs


def openai_chat(url: str, key: str, model: str, *questions: str) -> None:
    import openai

    tools = [
        openai.pydantic_function_tool(FindPage, name="find_page"),
        openai.pydantic_function_tool(ReadPage, name="read_page"),
    ]
    with openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client:
        client.models.list()
        messages: list[Any] = [{"role": "developer", "content": RULES}]
        for number, question in enumerate(questions):
            messages.append({"role": "user", "content": question})
            while True:
                asked: dict[str, Any] = {"model": model, "messages": messages, "tools": tools}
                asked |= {"prompt_cache_key": "manual", "max_completion_tokens": MOST}
                if number:
                    with client.chat.completions.stream(
                        **asked, stream_options={"include_usage": True}
                    ) as stream:
                        message = stream.get_final_completion().choices[0].message
                else:
                    message = client.chat.completions.create(**asked).choices[0].message
                messages.append(message)
                if not message.tool_calls:
                    break
                messages += [
                    {
                        "role": "tool",
                        "tool_call_id": call.id,
                        "content": run_tool(call.function.name, call.function.arguments),
                    }
                    for call in message.tool_calls
                ]
        asking = [{"role": "user", "content": questions[0]}]
        client.chat.completions.parse(model=model, messages=asking, response_format=Page)


def openai_responses(url: str, key: str, model: str, *questions: str) -> None:
    import openai

    tools = [
        openai.pydantic_function_tool(FindPage, name="find_page"),
        openai.pydantic_function_tool(ReadPage, name="read_page"),
    ]
    flat = [{"type": "function", **each["function"]} for each in tools]
    with openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client:
        items: list[Any] = []
        for number, question in enumerate(questions):
            items.append({"role": "user", "content": question})
            while True:
                asked: dict[str, Any] = {"model": model, "instructions": RULES, "input": items, "tools": flat}
                asked |= {"prompt_cache_key": "manual", "store": False}
                if number:
                    with client.responses.stream(**asked) as stream:
                        for _ in stream:
                            pass
                        response: Any = stream.get_final_response()
                else:
                    response = client.responses.create(**asked)
                items += response.output
                calls = [each for each in response.output if each.type == "function_call"]
                if not calls:
                    break
                items += [
                    {
                        "type": "function_call_output",
                        "call_id": call.call_id,
                        "output": run_tool(call.name, call.arguments),
                    }
                    for call in calls
                ]
        client.responses.input_tokens.count(model=model, instructions=RULES, input=questions[0])
        client.responses.parse(model=model, input=questions[0], text_format=Page)


def anthropic(url: str, key: str, model: str, *questions: str) -> None:
    import anthropic

    tools = [anthropic.beta_tool(find_page), anthropic.beta_tool(read_page)]
    system = [{"type": "text", "text": RULES, "cache_control": {"type": "ephemeral"}}]
    with anthropic.Anthropic(base_url=url, api_key=key, max_retries=0) as client:
        client.models.list()
        messages: list[Any] = [{"role": "user", "content": questions[0]}]
        runner = client.beta.messages.tool_runner(
            model=model, max_tokens=MOST, system=system, messages=messages, tools=tools
        )
        for message in runner:
            messages.append({"role": "assistant", "content": message.content})
            results = runner.generate_tool_call_response()
            if results is not None:
                messages.append(results)
        specs = [each.to_dict() for each in tools]
        messages.append({"role": "user", "content": questions[1]})
        while True:
            with client.messages.stream(
                model=model, max_tokens=MOST, system=system, messages=messages, tools=specs
            ) as stream:
                final = stream.get_final_message()
            messages.append({"role": "assistant", "content": final.content})
            calls = [each for each in final.content if each.type == "tool_use"]
            if not calls:
                break
            results = [
                {"type": "tool_result", "tool_use_id": call.id, "content": TOOLS[call.name](**call.input)}
                for call in calls
            ]
            messages.append({"role": "user", "content": results})
        asked = [{"role": "user", "content": questions[0]}]
        client.messages.count_tokens(model=model, system=system, messages=asked, tools=specs)
        client.messages.parse(model=model, max_tokens=MOST, messages=asked, output_format=Page)


def google_genai(url: str, key: str, model: str, *questions: str) -> None:
    from google import genai

    client = genai.Client(api_key=key, http_options={"base_url": url})
    list(client.models.list())
    config: Any = {"system_instruction": RULES, "tools": [find_page, read_page], "max_output_tokens": MOST}
    chat = client.chats.create(model=model, config=config)
    chat.send_message(questions[0])
    for _ in chat.send_message_stream(questions[1]):
        pass
    client.models.count_tokens(model=model, contents=questions[0])
    schema: Any = {"response_mime_type": "application/json", "response_schema": Page}
    client.models.generate_content(model=model, contents=questions[0], config=schema)


# --- LangChain


def _langchain(model: Any, *questions: str, middleware: Any = ()) -> None:
    from langchain.agents import create_agent

    agent = create_agent(model, [find_page, read_page], system_prompt=RULES, middleware=middleware)
    messages: list[Any] = [{"role": "user", "content": questions[0]}]
    messages = agent.invoke({"messages": messages})["messages"]
    messages.append({"role": "user", "content": questions[1]})
    for _ in agent.stream({"messages": messages}, stream_mode="messages"):
        pass
    model.with_structured_output(Page).invoke(questions[0])


def langchain_openai(url: str, key: str, model: str, *questions: str, **more: Any) -> None:
    from langchain_openai import ChatOpenAI

    _langchain(
        ChatOpenAI(model=model, base_url=f"{url}/v1", api_key=key, max_retries=0, stream_usage=True, **more),
        *questions,
    )


def langchain_responses(url: str, key: str, model: str, *questions: str) -> None:
    langchain_openai(url, key, model, *questions, use_responses_api=True)


def langchain_anthropic(url: str, key: str, model: str, *questions: str) -> None:
    from langchain_anthropic import ChatAnthropic
    from langchain_anthropic.middleware import AnthropicPromptCachingMiddleware

    chat = ChatAnthropic(model=model, base_url=url, api_key=key, max_retries=0, max_tokens=MOST)
    _langchain(chat, *questions, middleware=[AnthropicPromptCachingMiddleware()])


def langchain_google(url: str, key: str, model: str, *questions: str) -> None:
    from langchain_google_genai import ChatGoogleGenerativeAI

    _langchain(ChatGoogleGenerativeAI(model=model, base_url=url, api_key=key, max_retries=1), *questions)


# --- LlamaIndex


def _llamaindex(llm: Any, *questions: str) -> None:
    from llama_index.core.agent.workflow import FunctionAgent
    from llama_index.core.memory import Memory

    async def converse() -> None:
        agent = FunctionAgent(tools=[find_page, read_page], llm=llm, system_prompt=RULES)
        memory = Memory.from_defaults(session_id="manual")
        for question in questions:
            await agent.run(user_msg=question, memory=memory)

    asyncio.run(converse())


def llamaindex_openai(url: str, key: str, model: str, *questions: str) -> None:
    from llama_index.llms.openai_like import OpenAILike

    llm = OpenAILike(
        model=model, api_base=f"{url}/v1", api_key=key, is_chat_model=True, is_function_calling_model=True,
        max_retries=0, context_window=32_768,
    )  # fmt: skip
    _llamaindex(llm, *questions)


def llamaindex_anthropic(url: str, key: str, model: str, *questions: str) -> None:
    from llama_index.llms.anthropic import Anthropic

    _llamaindex(Anthropic(model=model, base_url=url, api_key=key, max_retries=0, max_tokens=MOST), *questions)


def llamaindex_google(url: str, key: str, model: str, *questions: str) -> None:
    from llama_index.llms.google_genai import GoogleGenAI

    _llamaindex(GoogleGenAI(model=model, api_key=key, http_options={"base_url": url}), *questions)


# --- LiteLLM


def _litellm(provider: str, base: str, key: str, model: str, *questions: str) -> None:
    import litellm

    litellm.suppress_debug_info = True
    litellm.telemetry = False
    described = {
        "find_page": ({"topic": {"type": "string"}}, "Find the page of the manual that explains a topic."),
        "read_page": ({"page": {"type": "integer"}}, "Read a page of the manual."),
    }
    tools = [
        {
            "type": "function",
            "function": {
                "name": name,
                "description": text,
                "parameters": {"type": "object", "properties": properties, "required": list(properties)},
            },
        }
        for name, (properties, text) in described.items()
    ]
    fixed: dict[str, Any] = {
        "model": f"{provider}/{model}",
        "api_base": base,
        "api_key": key,
        "max_tokens": MOST,
    }
    system: Any = {"role": "system", "content": RULES}
    if provider == "anthropic":
        block = {"type": "text", "text": RULES, "cache_control": {"type": "ephemeral"}}
        system = {"role": "system", "content": [block]}
    messages: list[Any] = [system]
    for number, question in enumerate(questions):
        messages.append({"role": "user", "content": question})
        while True:
            if number:
                options = {"include_usage": True}
                chunks = list(
                    litellm.completion(
                        **fixed, messages=messages, tools=tools, stream=True, stream_options=options
                    )
                )
                answer: Any = litellm.stream_chunk_builder(chunks, messages=messages)
            else:
                answer = litellm.completion(**fixed, messages=messages, tools=tools)
            message = answer.choices[0].message
            messages.append(message.model_dump())
            if not message.tool_calls:
                break
            messages += [
                {
                    "role": "tool",
                    "tool_call_id": call.id,
                    "content": run_tool(call.function.name, call.function.arguments),
                }
                for call in message.tool_calls
            ]
    asked = [{"role": "user", "content": questions[0]}]
    litellm.completion(**fixed, messages=asked, response_format=Page)


def litellm_openai(url: str, *rest: str) -> None:
    _litellm("openai", f"{url}/v1", *rest)


def litellm_anthropic(url: str, *rest: str) -> None:
    _litellm("anthropic", url, *rest)


def litellm_gemini(url: str, *rest: str) -> None:
    _litellm("gemini", f"{url}/v1beta", *rest)


# --- goose: how the agent speaks to a provider, without the agent


def _goose(provider: Any, model: str, *questions: str) -> None:
    import goose

    config = goose.ProviderModelConfig(model_name=model, max_tokens=MOST)
    schemas = {"find_page": {"topic": {"type": "string"}}, "read_page": {"page": {"type": "integer"}}}
    tools = [
        goose.ProviderTool(
            name=name,
            description=(TOOLS[name].__doc__ or "").partition("\n")[0],
            input_schema_json=json.dumps({"type": "object", "properties": fields, "required": list(fields)}),
        )
        for name, fields in schemas.items()
    ]

    async def answer(messages: list[Any], *, is_stream: bool) -> list[Any]:
        """Return the contents of the next answer."""
        if not is_stream:
            return list((await provider.complete(config, RULES, messages, tools)).content)
        stream, text, calls = await provider.stream(config, RULES, messages, tools), "", []
        while (chunk := await stream.next_chunk()) is not None:
            if chunk.is_error_chunk():
                raise RuntimeError(str(chunk.error))
            if chunk.is_text_chunk():
                text += chunk.text
            elif chunk.is_tool_chunk():
                calls.append(goose.MessageContent.TOOL_REQUEST(chunk.id, chunk.name, chunk.arguments_json))
        return [*([goose.MessageContent.TEXT(text)] if text else []), *calls]

    async def converse() -> None:
        messages: list[Any] = []
        for number, question in enumerate(questions):
            asked = [goose.MessageContent.TEXT(question)]
            messages.append(goose.ProviderMessage(role=goose.MessageRole.USER, content=asked))
            while True:
                content = await answer(messages, is_stream=bool(number))
                messages.append(goose.ProviderMessage(role=goose.MessageRole.ASSISTANT, content=content))
                calls = [each for each in content if each.is_tool_request()]
                if not calls:
                    break
                results = [
                    goose.MessageContent.TOOL_RESULT(
                        call.id,
                        True,
                        json.dumps([{"type": "text", "text": run_tool(call.name, call.arguments_json)}]),
                    )
                    for call in calls
                ]
                messages.append(goose.ProviderMessage(role=goose.MessageRole.TOOL, content=results))

    asyncio.run(converse())
    os._exit(0)  # the library's threads crash the interpreter's end


def goose_openai(url: str, key: str, model: str, *questions: str) -> None:
    import goose

    os.environ["RADIXKV_KEY"] = key
    declared = {
        "name": "radixkv",
        "engine": "openai",
        "display_name": "radixkv",
        "api_key_env": "RADIXKV_KEY",
        "base_url": f"{url}/v1/chat/completions",
        "models": [{"name": model, "context_limit": 32_768}],
        "supports_streaming": True,
    }
    _goose(goose.declarative_provider_from_json(json.dumps(declared)), model, *questions)


def goose_anthropic(url: str, key: str, model: str, *questions: str) -> None:
    import goose

    _goose(goose.anthropic_provider(key, url, []), model, *questions)


if __name__ == "__main__":
    globals()[sys.argv[1].replace("-", "_")](*sys.argv[2:])
