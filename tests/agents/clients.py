"""The clients that are recorded: how each is run against a server on the loopback, and what the model answers it.

Each client is asked two questions. For the first the model calls a tool, then two tools at once, and answers; for the
second it calls a tool again. So a conversation has at least five requests that show tools to the model. Agents are then
asked a third question in a conversation of its own: what they send before it should be what they sent before.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.agents.answers import Answer, Call
from tests.agents.recordings import MODEL

KEY = "sk-recorded-0000000000000000"
"""The key that clients send: it opens nothing."""
QUESTIONS = ("Which page of notes.txt explains pins?", "And which page explains forks?")
APART = "How many lines has notes.txt?"
"""What agents are asked in a second conversation: the model answers at once."""
NOTES = "Page 12 explains pins.\nPage 40 explains forks.\n"
"""The one file in the folder where agents work."""


@dataclass(frozen=True)
class Folders:
    """Folders of one run: the agent's home, where it works, and in which the clients are installed."""

    home: Path
    work: Path
    installed: Path

    def of_npm(self, program: str) -> str:
        """Return the path of a program that npm has installed."""
        return str(self.installed / "npm/node_modules/.bin" / program)


@dataclass(frozen=True)
class Process:
    """One process of a client: its arguments, and what it finds in its environment beside the usual variables."""

    arguments: Sequence[str]
    environment: Mapping[str, str]


@dataclass(frozen=True)
class Client:
    """A client.

    - ``shown``: its name for people.
    - ``package``: what it is in ``versions.toml``.
    - ``processes``: returns the processes of a conversation, in order, from the server's URL and the folders. May write
      the client's settings there.
    - ``look``, ``both``: calls for the tools that the client has; ``both`` are two at once.
    - ``model``: another name of the model, for a client that takes only names it knows.
    """

    shown: str
    package: str
    processes: Callable[[str, Folders], list[Process]]
    look: Sequence[Call]
    both: Sequence[Call]
    model: str = MODEL

    def answers(self) -> list[Answer]:
        """Return what the model says, answer by answer."""
        (look,) = self.look
        return [
            Answer("I look for it.", (look,)),
            Answer("", tuple(self.both)),
            Answer("Page 12 explains pins."),
            Answer("I look again.", (look,)),
            Answer("Page 40 explains forks."),
        ]


# --- agents of npm


def _claude_code(url: str, folders: Folders) -> list[Process]:
    environment = {
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": KEY,
        "ANTHROPIC_MODEL": MODEL,
        "ANTHROPIC_SMALL_FAST_MODEL": MODEL,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": MODEL,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CONFIG_DIR": str(folders.home / ".claude"),
        "DISABLE_TELEMETRY": "1",
        "DISABLE_ERROR_REPORTING": "1",
        "DISABLE_AUTOUPDATER": "1",
    }
    program = folders.of_npm("claude")
    options = ("--allowedTools", "Read,Bash", "--output-format", "stream-json", "--verbose")
    return [
        Process((program, "-p", QUESTIONS[0], *options), environment),
        Process((program, "-p", QUESTIONS[1], "--continue", *options), environment),
        Process((program, "-p", APART, *options), environment),
    ]


def _codex(url: str, folders: Folders) -> list[Process]:
    """Return the processes of Codex with the settings of a provider of one's own, and nothing else changed."""
    return _codex_with("", url, folders)


def _codex_functions(url: str, folders: Folders) -> list[Process]:
    """Return the same without tools that only OpenAI's server has: every tool is a function."""
    return _codex_with('web_search = "disabled"\n[features]\nmulti_agent = false\n', url, folders)


def _codex_with(more: str, url: str, folders: Folders) -> list[Process]:
    home = folders.home / ".codex"
    home.mkdir(parents=True)
    (home / "config.toml").write_text(
        f"""model = "{MODEL}"
model_provider = "radixkv"
check_for_update_on_startup = false
{more}[analytics]
enabled = false
[history]
persistence = "none"
[model_providers.radixkv]
name = "radixkv"
base_url = "{url}/v1"
env_key = "RADIXKV_KEY"
wire_api = "responses"
""",
        "utf-8",
    )
    environment = {"CODEX_HOME": str(home), "RADIXKV_KEY": KEY}
    program = folders.of_npm("codex")
    options = ("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
    return [
        Process((program, "exec", *options, QUESTIONS[0]), environment),
        Process((program, "exec", *options, "resume", "--last", QUESTIONS[1]), environment),
        Process((program, "exec", *options, APART), environment),
    ]


def _gemini_cli(url: str, folders: Folders) -> list[Process]:
    settings = {
        "security": {"auth": {"selectedType": "gemini-api-key"}, "folderTrust": {"enabled": False}},
        "privacy": {"usageStatisticsEnabled": False},
        "telemetry": {"enabled": False},
        "general": {"disableAutoUpdate": True, "enableAutoUpdate": False, "disableUpdateNag": True},
    }
    (folders.home / ".gemini").mkdir()
    (folders.home / ".gemini/settings.json").write_text(json.dumps(settings), "utf-8")
    environment = {
        "GEMINI_API_KEY": KEY,
        "GOOGLE_GEMINI_BASE_URL": url,
        "GEMINI_CLI_NO_RELAUNCH": "true",
        "GEMINI_TELEMETRY_ENABLED": "false",
    }
    program = folders.of_npm("gemini")
    options = ("--model", MODEL, "--approval-mode", "yolo", "--output-format", "json")
    return [
        Process((program, "--prompt", QUESTIONS[0], *options), environment),
        Process((program, "--resume", "latest", "--prompt", QUESTIONS[1], *options), environment),
        Process((program, "--prompt", APART, *options), environment),
    ]


def _opencode(url: str, folders: Folders) -> list[Process]:
    model = {"name": MODEL, "tool_call": True, "limit": {"context": 200_000, "output": 8_192}}
    settings = {
        "autoupdate": False,
        "share": "disabled",
        "permission": {"*": "allow"},
        "provider": {
            "radixkv": {
                "npm": "@ai-sdk/openai-compatible",
                "name": "radixkv",
                "options": {"baseURL": f"{url}/v1", "apiKey": KEY},
                "models": {MODEL: model},
            }
        },
    }
    environment = {
        "OPENCODE_CONFIG_CONTENT": json.dumps(settings),
        "OPENCODE_DISABLE_AUTOUPDATE": "1",
        "OPENCODE_DISABLE_MODELS_FETCH": "1",
        "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
        "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
    }
    program = folders.of_npm("opencode")
    options = ("run", "--model", f"radixkv/{MODEL}")
    return [
        Process((program, *options, QUESTIONS[0]), environment),
        Process((program, *options, "--continue", QUESTIONS[1]), environment),
        Process((program, *options, APART), environment),
    ]


# --- libraries: a script of ours calls each


def _node_script(provider: str) -> Callable[[str, Folders], list[Process]]:
    def processes(url: str, folders: Folders) -> list[Process]:
        script = str(folders.installed / "npm/ai_sdk.mjs")
        return [Process(("node", script, provider, url, KEY, MODEL, *QUESTIONS), {})]

    return processes


def _python_script(client: str, model: str) -> Callable[[str, Folders], list[Process]]:
    def processes(url: str, folders: Folders) -> list[Process]:
        script = str(Path(__file__).parent / "python" / "drivers.py")
        environment = "pypi-llamaindex" if client.startswith("llamaindex") else "pypi-sdks"
        python = str(folders.installed / environment / "bin/python")
        return [Process((python, "-W", "ignore", script, client, url, KEY, model, *QUESTIONS), {})]

    return processes


_FIND = (Call("find_page", {"topic": "pins"}),)
_READ = (Call("read_page", {"page": 12}), Call("read_page", {"page": 40}))


def _library(
    shown: str, package: str, processes: Callable[[str, Folders], list[Process]], model: str = MODEL
) -> Client:
    return Client(shown, package, processes, _FIND, _READ, model)


_KNOWN = {"llamaindex-anthropic": "claude-sonnet-4-5"}
"""Models of clients that take only names of their provider's models."""


_SHELL = "cat notes.txt"

CLIENTS: Mapping[str, Client] = {
    "claude-code": Client(
        "Claude Code",
        "@anthropic-ai/claude-code",
        _claude_code,
        (Call("Bash", {"command": _SHELL, "description": "Show the notes"}),),
        (
            Call("Read", {"file_path": "WORK/notes.txt"}),
            Call("Bash", {"command": "ls", "description": "List the files"}),
        ),
    ),
    "codex": Client(
        "Codex CLI",
        "@openai/codex",
        _codex,
        (Call("exec_command", {"cmd": _SHELL}),),
        (Call("exec_command", {"cmd": _SHELL}), Call("exec_command", {"cmd": "ls"})),
    ),
    "codex-functions": Client(
        "Codex CLI, only functions",
        "@openai/codex",
        _codex_functions,
        (Call("exec_command", {"cmd": _SHELL}),),
        (Call("exec_command", {"cmd": _SHELL}), Call("exec_command", {"cmd": "ls"})),
    ),
    "gemini-cli": Client(
        "Gemini CLI",
        "@google/gemini-cli",
        _gemini_cli,
        (Call("list_directory", {"dir_path": "."}),),
        (
            Call("read_file", {"file_path": "notes.txt"}),
            Call("run_shell_command", {"command": "ls", "description": "List the files"}),
        ),
    ),
    "opencode": Client(
        "opencode",
        "opencode-ai",
        _opencode,
        (Call("bash", {"command": _SHELL, "description": "Show the notes"}),),
        (
            Call("read", {"filePath": "WORK/notes.txt"}),
            Call("bash", {"command": "ls", "description": "List the files"}),
        ),
    ),
    **{
        f"ai-sdk-{provider}": _library(f"AI SDK, {name}", "ai", _node_script(provider))
        for provider, name in (
            ("openai", "OpenAI's responses"),
            ("openai-stateless", "OpenAI's responses with store: false"),
            ("openai-chat", "OpenAI's chat"),
            ("anthropic", "Anthropic"),
            ("google", "Google"),
        )
    },
    **{
        name: _library(shown, package, _python_script(name, model := _KNOWN.get(name, MODEL)), model)
        for name, shown, package in (
            ("openai-chat", "OpenAI's SDK, chat", "openai"),
            ("openai-responses", "OpenAI's SDK, responses", "openai"),
            ("anthropic", "Anthropic's SDK", "anthropic"),
            ("google-genai", "Google's SDK", "google-genai"),
            ("langchain-openai", "LangChain, OpenAI's chat", "langchain-openai"),
            ("langchain-responses", "LangChain, OpenAI's responses", "langchain-openai"),
            ("langchain-anthropic", "LangChain, Anthropic", "langchain-anthropic"),
            ("langchain-google", "LangChain, Google", "langchain-google-genai"),
            ("llamaindex-openai", "LlamaIndex, OpenAI's chat", "llama-index-llms-openai-like"),
            ("llamaindex-anthropic", "LlamaIndex, Anthropic", "llama-index-llms-anthropic"),
            ("llamaindex-google", "LlamaIndex, Google", "llama-index-llms-google-genai"),
            ("goose-openai", "goose's SDK, OpenAI", "goose-sdk"),
            ("goose-anthropic", "goose's SDK, Anthropic", "goose-sdk"),
            ("litellm-openai", "LiteLLM, OpenAI's chat", "litellm"),
            ("litellm-anthropic", "LiteLLM, Anthropic", "litellm"),
            ("litellm-gemini", "LiteLLM, Google", "litellm"),
        )
    },
}
"""All clients, by the names of their recordings."""
