"""A model's folder, loaded by transformers: its ``AutoTokenizer`` decides which files count, and what they mean.

Most tokenizers have a backend of the library ``tokenizers``, which is used directly: it is fast, and threads may
share it. That it gives the same ids as transformers' ``encode`` is tried when the folder is loaded. For all others
transformers' ``encode`` is called, one call at a time.

Code in a folder never runs, and nothing is downloaded.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import tokenizers
from transformers import AutoTokenizer

from radixkv.errors import ConfigError
from radixkv.tokenizer import templates
from radixkv.tokenizer.base import BaseTokenizer
from radixkv.tokenizer.chat import Chat, PlainChat, TemplateChat
from radixkv.tokenizer.control import Control, control_ids
from radixkv.tokenizer.fast import FastTokenizer, check_backend
from radixkv.tokenizer.protocol import check_text
from radixkv.tokenizer.templates import NO_GUARD, Rendered, Strings, Template

_OF_PROCESSOR = "chat_template.json"
_PROBES = (
    "",
    " ",
    "a",
    "Hello, world! ",
    "  two  spaces\n\n\tand a tab",
    "naïve Grüße 日本語 😀 e\u0301",
    "x = f(1)  # don't\r\n",
    "12345 and 3.14",
    "UPPER lower ΑΒΓ",
)
_NOWHERE = "\u0378"
"""A code point that stands for no character, so that no vocabulary has it."""
_ASKS = ({"role": "user", "content": "Qx7 asks"},)
_TALKS = (*_ASKS, {"role": "assistant", "content": "Zk4 answers"}, {"role": "user", "content": "Vj9 asks"})
_RULES = {"role": "system", "content": "Wn2 rules"}


class OneAtATime(BaseTokenizer):
    """A tokenizer that only transformers' own methods can use."""

    def __init__(self, theirs: Any, digest: str, chat: Chat, control: Control, lock: threading.Lock) -> None:
        self._theirs, self._control, self._lock = theirs, control, lock
        plain, whole = self._encoded("a", special=False), self._encoded("a", special=True)
        starts = range(len(whole) - len(plain) + 1)
        start = next((at for at in starts if whole[at : at + len(plain)] == plain), 0)
        num_ids = 1 + max(theirs.get_vocab().values())
        super().__init__(digest, num_ids, theirs.bos_token_id, theirs.eos_token_id, whole[:start], chat)

    @property
    def num_plain_ids(self) -> int:
        """See ``Tokenizer.num_plain_ids``."""
        return int(self._theirs.vocab_size)

    def encode(self, text: str) -> list[int]:
        """See ``Tokenizer.encode``."""
        return self._encoded(check_text(text), special=True)

    def rendered_ids(self, rendered: Rendered) -> list[int]:
        """Return the ids of a conversation. A control token that a caller typed is cut in two texts."""
        text, typed = rendered.text, set(rendered.typed)
        ids: list[int] = []
        done = 0
        for found in self._control.find.finditer(text):
            if typed.isdisjoint(range(found.start(), found.end())):
                continue
            if found.start() > done:
                ids += self._ids(text[done : found.start()])
            ids += self._control.as_text(found[0])
            done = found.end()
        return ids + self._ids(text[done:]) if done < len(text) or not done else ids

    def stable_cut(self, text: str) -> int:
        """See ``BaseTokenizer``. Nothing is known of such a tokenizer's boundaries."""
        return 0

    def _ids(self, text: str) -> list[int]:
        return self._encoded(text, special=False)

    def _text(self, ids: list[int]) -> str:
        with self._lock:
            return str(self._theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def _encoded(self, text: str, *, special: bool) -> list[int]:
        with self._lock:
            return list(self._theirs.encode(text, add_special_tokens=special, verbose=False))


def load_folder(place: Path, digest: str) -> BaseTokenizer:
    """Load a folder. Raises ConfigError with what transformers says if it can't be loaded."""
    name = str(place)
    try:
        theirs = AutoTokenizer.from_pretrained(name, local_files_only=True, trust_remote_code=False)
        if not theirs.get_vocab():
            raise ValueError("it has no vocabulary")
        return _loaded(theirs, place, digest)
    except ConfigError:
        raise
    except Exception as error:
        said = f"{type(error).__name__}: {error}".strip()[:1000]
        raise ConfigError(
            "tokenizer", name, f"a folder that transformers can load; it says {said}"
        ) from error


def _loaded(theirs: Any, place: Path, digest: str) -> BaseTokenizer:
    template = _template(theirs, place)
    strings = Strings((), ()) if template is None else templates.analysed(template)
    at_first = [list(theirs.encode(text)) for text in _PROBES]
    backend, lock = _backend(theirs, str(place)), threading.Lock()

    def encode(text: str) -> list[int]:
        if backend is not None:
            return list(backend.encode(text, add_special_tokens=False).ids)
        with lock:
            return list(theirs.encode(text, add_special_tokens=False))

    control = _control(theirs, template, strings, encode)
    chat: Chat = PlainChat() if template is None else TemplateChat(template, control)
    found: BaseTokenizer
    if backend is None:
        found = OneAtATime(theirs, digest, chat, control, lock)
    else:
        found = FastTokenizer(backend, digest, chat, control, theirs.bos_token_id, theirs.eos_token_id)
    for text in () if template is None else _rendered(template):
        if theirs(text, add_special_tokens=False)["input_ids"] != found.rendered_ids(Rendered(text, ())):
            raise ValueError(f"its chats have other ids than its texts, as in {text!r}")
    if [found.encode(text) for text in _PROBES] != at_first:
        raise ValueError("its ids depend on what was encoded before")
    return found


def _template(theirs: Any, place: Path) -> Template | None:
    """Return the tokenizer's template, or that of a processor, which stands in a file of its own."""
    source = theirs.chat_template
    if source is None and (place / _OF_PROCESSOR).is_file():
        source = json.loads((place / _OF_PROCESSOR).read_bytes())["chat_template"]
    if source is None:
        return None
    if not isinstance(source, str) and not (
        isinstance(source, Mapping) and all(isinstance(each, str) for each in source.values())
    ):
        raise TypeError(f"the chat template is {type(source).__name__}, not a string or several by name")
    variables = {
        name: each for name, each in theirs.special_tokens_map.items() if isinstance(each, str | list)
    }
    return Template(source, variables)


def _backend(theirs: Any, name: str) -> tokenizers.Tokenizer | None:
    """Return the tokenizer behind transformers', unless there is none or it gives other ids."""
    backend = getattr(theirs, "backend_tokenizer", None)
    if not isinstance(backend, tokenizers.Tokenizer):
        return None
    expected = [
        theirs.encode(text, add_special_tokens=special) for text in _PROBES for special in (True, False)
    ]
    check_backend(backend, name)
    backend.encode_special_tokens = bool(theirs.split_special_tokens)
    found = [
        backend.encode(text, add_special_tokens=special).ids for text in _PROBES for special in (True, False)
    ]
    return backend if found == expected else None


def _control(
    theirs: Any, template: Template | None, strings: Strings, encode: Callable[[str], list[int]]
) -> Control:
    special: dict[str, int] = {}
    others: dict[str, int] = {}
    for token_id, token in theirs.added_tokens_decoder.items():
        (special if token.special else others)[token.content] = token_id
    for token in theirs.all_special_tokens:
        special[token] = theirs.convert_tokens_to_ids(token)

    def one_token(text: str) -> int | None:
        ids = encode(text)
        spelt = [theirs.convert_ids_to_tokens(token_id).lstrip("\u2581") for token_id in ids]
        return ids[-1] if [each for each in spelt if each] == [text] else None

    rendered = [] if template is None else list(_rendered(template))
    unknown = set(encode(_NOWHERE))
    return Control(control_ids(special, others, strings, rendered, one_token), strings, encode, unknown)


def _rendered(template: Template) -> list[str]:
    """Return some conversations as a template renders them."""
    found = []
    for turns in (_ASKS, _TALKS, (_RULES, *_TALKS)):
        with suppress(templates.Refused, templates.Failed, templates.TooLong):
            found.append(templates.render(template, NO_GUARD, turns, (), True).text)
    return found
