"""Finds and loads a tokenizer: the shipped one, a file, or a model's directory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from types import ModuleType
from typing import Any

from radixkv.errors import ConfigError, needs
from radixkv.tokenizer.chat import Chat, MarkerChat, PlainChat, TemplateChat
from radixkv.tokenizer.protocol import Tokenizer, digest_of

SHIPPED = "radixkv-8k.model"
_CONFIG, _TEMPLATE = "tokenizer_config.json", "chat_template.jinja"


def load_tokenizer(path: str | None = None) -> Tokenizer:
    """Load the tokenizer at a path; ``None`` means the one that ships with radixkv.

    In a directory, it takes ``tokenizer.model``, else another ``*.model`` (there must be only one), else
    ``tokenizer.json``. The directory's ``tokenizer_config.json`` says whether a text begins with a BOS, and names
    the special tokens. Its ``chat_template.jinja``, or the template in that configuration, renders the
    conversations. A file is loaded by itself. The digest covers all files that were read.

    Raises ConfigError if the path has no tokenizer, if a file is malformed, and if the library that reads it isn't
    installed.
    """
    if path is None:
        shipped = resources.files(__package__) / SHIPPED
        return _load({SHIPPED: shipped.read_bytes()}, SHIPPED)
    place = Path(path)
    if place.is_dir():
        main = _main_file(place)
        beside = [file for name in (_CONFIG, _TEMPLATE) if (file := place / name).is_file()]
        return _load({file.name: _read(file) for file in (main, *beside)}, str(main))
    if place.suffix not in (".model", ".json"):
        raise ConfigError("tokenizer", path, "a directory, a .model file or a tokenizer.json")
    return _load({place.name: _read(place)}, path)


def _main_file(place: Path) -> Path:
    models = sorted(place.glob("*.model"))
    preferred = [file for file in models if file.name == "tokenizer.model"] or models
    if len(preferred) > 1:
        names = ", ".join(file.name for file in preferred)
        raise ConfigError("tokenizer", str(place), f"a directory with one model of a tokenizer, not {names}")
    found = [*preferred, place / "tokenizer.json"][0]
    if not found.is_file():
        raise ConfigError("tokenizer", str(place), "a directory with a tokenizer.model or a tokenizer.json")
    return found


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise ConfigError("tokenizer", str(file), f"a file that can be read: {error.strerror}") from error


def _load(files: Mapping[str, bytes], name: str) -> Tokenizer:
    """Return the tokenizer of some files. The first is the main one; errors call it ``name``."""
    main, content = next(iter(files.items()))
    config = _config(files)
    digest = digest_of(files.items())
    template = _template(files, config)
    if main.endswith(".model"):
        return _load_sentencepiece(content, name, digest, config, template)
    return _load_json(content, name, digest, config, template)


def _load_sentencepiece(
    content: bytes, name: str, digest: str, config: Mapping[str, Any], template: str | None
) -> Tokenizer:
    spm = _door("spm", name)
    processor = spm.load_processor(content, name)
    markers = spm.marker_ids(processor)
    chat: Chat = PlainChat()
    if template is not None:
        chat = TemplateChat(template, spm.control_ids(processor), _variables(config))
    elif markers is not None:
        chat = MarkerChat(processor.bos_id(), *markers)
    tokenizer: Tokenizer = spm.SentencePieceTokenizer(
        processor, spm.read_spec(content), digest, chat, adds_bos=config.get("add_bos_token") is True
    )
    return tokenizer


def _load_json(
    content: bytes, name: str, digest: str, config: Mapping[str, Any], template: str | None
) -> Tokenizer:
    fast = _door("fast", name)
    backend = fast.load_backend(content, name)
    special = fast.special_ids(backend)
    variables = _variables(config)
    chat: Chat = PlainChat() if template is None else TemplateChat(template, special, variables)
    adds_bos = config.get("add_bos_token")
    tokenizer: Tokenizer = fast.FastTokenizer(
        backend,
        digest,
        chat,
        bos_token_id=special.get(variables.get("bos_token", "")),
        eos_token_id=special.get(variables.get("eos_token", "")),
        adds_bos=adds_bos if isinstance(adds_bos, bool) else None,
    )
    return tokenizer


def _door(module: str, name: str) -> ModuleType:
    """Import, only now, the module that imports the library of a tokenizer."""
    try:
        if module == "spm":
            from radixkv.tokenizer import spm

            return spm
        from radixkv.tokenizer import fast

        return fast
    except ImportError as error:
        raise ConfigError("tokenizer", name, "None", problem=f"{name} {needs('tokenizer')}") from error


def _config(files: Mapping[str, bytes]) -> dict[str, Any]:
    if _CONFIG not in files:
        return {}
    try:
        config = json.loads(files[_CONFIG])
    except ValueError as error:
        raise ConfigError("tokenizer", _CONFIG, f"JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError("tokenizer", _CONFIG, "a JSON object")
    return config


def _template(files: Mapping[str, bytes], config: Mapping[str, Any]) -> str | None:
    """Return the chat template: its own file, or else the configuration's default one."""
    if _TEMPLATE in files:
        return files[_TEMPLATE].decode("utf-8", errors="replace")
    found = config.get("chat_template")
    if isinstance(found, list):
        named = {entry["name"]: entry["template"] for entry in found if isinstance(entry, dict)}
        found = named.get("default")
    if found is not None and not isinstance(found, str):
        raise ConfigError("tokenizer", "chat_template", "a string, or a list of templates with names")
    return found


def _variables(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens that a configuration names, for templates: ``{"bos_token": "<s>", …}``."""
    found = {}
    for name, value in config.items():
        content = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(content, str):
            found[name] = content
    return found
