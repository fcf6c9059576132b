"""Finds and loads a tokenizer: the shipped one, a file, or a model's folder."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path

from radixkv.errors import ConfigError, needs
from radixkv.tokenizer.chat import Chat, MarkerChat, PlainChat
from radixkv.tokenizer.protocol import Tokenizer, digest_of

SHIPPED = "radixkv-8k.model"
MAX_FILE_BYTES = 256 * 2**20
"""A longer file of a folder isn't read."""
_KINDS = frozenset({".json", ".jinja", ".model", ".txt", ".tiktoken", ".vocab", ".bpe", ".codes"})
_NAMES = ("tokenizer.json", "tokenizer_config.json", "config.json")
"""A folder with one of these is loaded by transformers."""


def load_tokenizer(path: str | None = None) -> Tokenizer:
    """Load the tokenizer at a path; ``None`` means the one that ships with radixkv.

    A model's folder is loaded by transformers (``folder``), with the ids that it gives. A folder that only has a
    SentencePiece model, ``tokenizer.model`` or the only ``*.model``, is loaded as that file. A ``.model`` file and a
    ``tokenizer.json`` are loaded by themselves, without a chat template. The digest covers all files of a folder that
    could matter.

    Raises ConfigError if the path has no tokenizer, if a file is malformed or transformers refuses the folder, and if
    the library that reads it isn't installed.
    """
    if path is None:
        return _load_sentencepiece((resources.files(__package__) / SHIPPED).read_bytes(), SHIPPED)
    place = Path(path)
    if place.is_dir():
        if any((place / name).is_file() for name in _NAMES):
            return _load_folder(place)
        place = _model_in(place)
    if place.suffix == ".model":
        return _load_sentencepiece(_read(place), place.name, str(place))
    if place.suffix == ".json":
        return _load_json(_read(place), place.name, str(place))
    raise ConfigError("tokenizer", path, "a directory, a .model file or a tokenizer.json")


def _model_in(place: Path) -> Path:
    models = sorted(place.glob("*.model"))
    preferred = [file for file in models if file.name == "tokenizer.model"] or models
    if len(preferred) > 1:
        names = ", ".join(file.name for file in preferred)
        raise ConfigError("tokenizer", str(place), f"a directory with one model of a tokenizer, not {names}")
    if not preferred:
        raise ConfigError("tokenizer", str(place), "a directory with a tokenizer.model or a tokenizer.json")
    return preferred[0]


def _read(file: Path) -> bytes:
    try:
        if file.stat().st_size > MAX_FILE_BYTES:
            allowed = f"a file of at most {MAX_FILE_BYTES >> 20} MiB"
            raise ConfigError("tokenizer", str(file), allowed)
        return file.read_bytes()
    except OSError as error:
        raise ConfigError("tokenizer", str(file), f"a file that can be read: {error.strerror}") from error


def _load_folder(place: Path) -> Tokenizer:
    beside = [file for folder in (place, place / "additional_chat_templates") for file in folder.glob("*")]
    files = sorted(file for file in beside if file.suffix in _KINDS and file.is_file())
    content = {
        str(file.relative_to(place)): _read(file) for file in files if not file.name.endswith(".index.json")
    }
    for name in _NAMES:
        if name in content:
            _check_object(content[name], name)
    try:
        from radixkv.tokenizer.folder import load_folder
    except ImportError as error:
        raise ConfigError("tokenizer", str(place), "None", problem=f"{place} {needs('tokenizer')}") from error
    return load_folder(place, digest_of(content.items()))


def _check_object(content: bytes, name: str) -> None:
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ConfigError("tokenizer", name, f"JSON: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError("tokenizer", name, "a JSON object")


def _load_sentencepiece(content: bytes, name: str, path: str | None = None) -> Tokenizer:
    try:
        from radixkv.tokenizer import spm
    except ImportError as error:
        raise ConfigError(
            "tokenizer", path or name, "None", problem=f"{name} {needs('tokenizer')}"
        ) from error
    processor = spm.load_processor(content, path or name)
    markers = spm.marker_ids(processor)
    chat: Chat = PlainChat() if markers is None else MarkerChat(processor.bos_id(), *markers)
    return spm.SentencePieceTokenizer(processor, spm.read_spec(content), digest_of([(name, content)]), chat)


def _load_json(content: bytes, name: str, path: str) -> Tokenizer:
    try:
        from radixkv.tokenizer import fast
    except ImportError as error:
        raise ConfigError("tokenizer", path, "None", problem=f"{path} {needs('tokenizer')}") from error
    return fast.load_file(content, name, path)
