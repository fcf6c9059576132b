"""Small folders of models, made here: each has another tokenizer, layout or chat template."""

# ruff: noqa: E501 templates and names of folders

from __future__ import annotations

import functools
import json
import shutil
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from tests.tokenizer.kinds import GPT2, LLAMA3, real_text, train_byte_level, train_sentencepiece

SPECIAL = ("<s>", "</s>", "<unk>", "<pad>")
MARKS = ("<|im_start|>", "<|im_end|>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<|tool|>")
THINK = ("<think>", "</think>", "<tool_call>", "</tool_call>")

CHATML = """{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

THINKS = """{%- if tools %}<|im_start|>system
# Tools
<tools>{% for t in tools %}
{{ t | tojson }}{% endfor %}
</tools><|im_end|>
{% endif %}{% for m in messages %}
{%- set content = m.content if m.content is string else '' %}
{%- if m.role == 'assistant' %}
  {%- set thought = '' %}
  {%- if m.reasoning_content is defined and m.reasoning_content is not none %}
    {%- set thought = m.reasoning_content %}
  {%- elif '</think>' in content %}
    {%- set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
    {%- set content = content.split('</think>')[-1].lstrip('\n') %}
  {%- endif %}
  {%- if loop.last or thought %}{{- '<|im_start|>assistant\n<think>\n' + thought.strip('\n') + '\n</think>\n\n' + content }}
  {%- else %}{{- '<|im_start|>assistant\n' + content }}{%- endif %}
  {%- for call in m.tool_calls or [] %}{{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
    {%- if call.function.arguments is string %}{{- call.function.arguments }}{%- else %}{{- call.function.arguments | tojson }}{%- endif %}
    {{- '}\n</tool_call>' }}{%- endfor %}
  {{- '<|im_end|>\n' }}
{%- elif m.role == 'tool' %}
  {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
  {{- '\n<tool_response>\n' + content + '\n</tool_response>' }}
  {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}
{%- else %}{{- '<|im_start|>' + m.role + '\n' + content + '<|im_end|>\n' }}{%- endif %}
{%- endfor %}{% if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}"""

CUTS = """{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% elif m.role == 'user' %}
{{- '<|user|>' + m.content }}{% elif m.role == 'assistant' %}{% set c = m.content or '' %}{% if '</think>' in c %}
{%- set c = c.split('</think>')[-1] %}{% endif %}{{- '<|assistant|>' + c + eos_token }}{% else %}{{- '<|tool|>' + m.content + '<|end|>' }}
{%- endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""

COMPOSED = """{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% else %}{{ eos_token }}{% endif %}"""

GENERATION = """{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant
{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}
{% else %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

JSON_OPTIONS = (
    """{% for t in tools or [] %}{{ t | tojson(ensure_ascii=True, sort_keys=true) }}|{{ t | tojson(separators=(',', ':')) }}|
{{- t.function.parameters | tojson(indent=2) }}<|end|>{% endfor %}"""
    + CHATML
)

PARTS = """{% for m in messages %}<|im_start|>{{ m.role }}:{% if m.content is string %}{{ m.content | trim }}{% else %}
{%- for p in m.content %}{% if p.type == 'text' %}{{ p.text | trim }}
{% endif %}{% endfor %}{% endif %}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant:{% endif %}"""

ONLY_PARTS = """{% for m in messages %}<|im_start|>{{ m.role }}:{% for p in m.content %}{{ p['text'] }}{% endfor %}<|im_end|>{% endfor %}"""

MACROS = """{%- macro turn(role, text) %}<|im_start|>{{ role | upper }}
{{ text }}<|im_end|>
{%- endmacro %}{% set ns = namespace(n=0, kept=[]) %}{% for m in messages %}{% if m.role == 'system' and not loop.first %}{% continue %}{% endif %}
{%- set ns.n = ns.n + 1 %}{{ turn(m.role, m.content) }}{% if ns.n > 6 %}{% break %}{% endif %}{% endfor %}{{ dict(a=ns.n) | tojson }}
{%- if add_generation_prompt %}{{ turn('assistant', '') }}{% endif %}"""

NAMES = """{% for m in messages %}<|im_start|>{{ m.role }}{% if m.name %} name={{ m.name }}{% endif %}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

INST = """{{ bos_token }}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate.') }}{% endif %}
{%- if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}{% else %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"""

DATED = (
    """<|im_start|>system
Today is {{ strftime_now('%d %B %Y') }}.<|im_end|>
"""
    + CHATML
)

NAMED = {"default": CHATML, "tool_use": "{{ tools | tojson }}<|end|>" + CHATML}
TOOL_ONLY = {"default": CHATML, "rag": "{{ documents }}"}


def metaspace(scheme: str, *, byte_fallback: bool = True, special: tuple[str, ...] = SPECIAL) -> Tokenizer:
    """Return a BPE tokenizer in the style of SentencePiece."""
    backend = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=byte_fallback, fuse_unk=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=True)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    codes = [f"<0x{each:02X}>" for each in range(256)] if byte_fallback else []
    trainer = trainers.BpeTrainer(
        vocab_size=1200, show_progress=False, special_tokens=[*special, *codes], limit_alphabet=120
    )
    backend.train_from_iterator(real_text().splitlines(keepends=True), trainer)
    saved = json.loads(backend.to_str())
    saved["added_tokens"] = [each for each in saved["added_tokens"] if each["content"] not in codes]
    return Tokenizer.from_str(json.dumps(saved))


def _unigram() -> Tokenizer:
    backend = Tokenizer(models.Unigram())
    backend.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(" {2,}", " ")])
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    backend.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=600,
        show_progress=False,
        special_tokens=["<pad>", "</s>", "<unk>", "<s>"],
        unk_token="<unk>",
    )
    backend.train_from_iterator(real_text()[:60_000].splitlines(), trainer)
    return backend


def _word_piece(*, lower: bool) -> Tokenizer:
    backend = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=lower)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(vocab_size=1200, show_progress=False, special_tokens=names)
    backend.train_from_iterator(real_text().splitlines(), trainer)
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return backend


def _word_level() -> Tokenizer:
    backend = Tokenizer(models.WordLevel(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.train_from_iterator(
        real_text().splitlines(),
        trainers.WordLevelTrainer(vocab_size=800, show_progress=False, special_tokens=list(SPECIAL)),
    )
    return backend


BACKENDS: dict[str, Callable[[], Tokenizer]] = {
    "gpt2": lambda: train_byte_level(GPT2, SPECIAL),
    "llama3": lambda: train_byte_level(LLAMA3, SPECIAL),
    "first": lambda: metaspace("first"),
    "always": lambda: metaspace("always"),
    "never": lambda: metaspace("never"),
    "unknown": lambda: metaspace("always", byte_fallback=False),
    "unigram": _unigram,
    "wordpiece": lambda: _word_piece(lower=False),
    "uncased": lambda: _word_piece(lower=True),
    "wordlevel": _word_level,
}


@functools.cache
def _trained(kind: str) -> str:
    return BACKENDS[kind]().to_str()


def backend_of(kind: str) -> Tokenizer:
    """Return a fresh copy of a trained tokenizer."""
    return Tokenizer.from_str(_trained(kind))


@functools.cache
def spm_model(kind: str) -> bytes:
    """Return a SentencePiece model."""
    options: dict[str, Any] = {
        "bpe": {},
        "identity": {"normalization_rule_name": "identity", "remove_extra_whitespaces": False},
        "unigram": {"model_type": "unigram", "vocab_size": 900},
        "symbols": {"user_defined_symbols": ["<start_of_turn>", "<end_of_turn>"]},
        "no_prefix": {
            "add_dummy_prefix": False,
            "normalization_rule_name": "identity",
            "remove_extra_whitespaces": False,
        },
    }[kind]
    return train_sentencepiece(**options)


def _flags(content: str, flag: str | None = None, *, special: bool = True) -> AddedToken:
    named = {} if flag is None else {flag: True}
    return AddedToken(content, special=special, normalized=named.pop("normalized", False), **named)


def write(
    place: Path,
    kind: str,
    template: Any,
    *,
    special: tuple[AddedToken | str, ...] = MARKS,
    added: tuple[AddedToken | str, ...] = (),
    config: Mapping[str, Any] | None = None,
    bos: bool = False,
    layout: str = "config",
) -> None:
    """Write a folder with a ``tokenizer.json``. ``layout``: where the template stands."""
    backend = backend_of(kind)
    backend.add_special_tokens(list(special))
    if added:
        backend.add_tokens(list(added))
    if bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
        )
    backend.save(str(place / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"} if "word" not in kind else {}
    written: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **names, **(config or {})}
    if layout == "map":  # names of special tokens only in a file of their own
        (place / "special_tokens_map.json").write_text(json.dumps(names))
        written = {name: each for name, each in written.items() if name not in names}
    if layout == "jinja":
        (place / "chat_template.jinja").write_text(template)
    elif layout == "several":
        (place / "chat_template.jinja").write_text(template["default"])
        (place / "additional_chat_templates").mkdir()
        (place / "additional_chat_templates" / "tool_use.jinja").write_text(template["tool_use"])
    elif layout == "json":
        (place / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    elif isinstance(template, Mapping):
        written["chat_template"] = [{"name": name, "template": each} for name, each in template.items()]
    else:
        written["chat_template"] = template
    (place / "tokenizer_config.json").write_text(json.dumps(written))


def write_spm(place: Path, kind: str, template: str, *, name: str = "tokenizer.model", **config: Any) -> None:
    """Write a folder with a SentencePiece model and no ``tokenizer.json``."""
    (place / name).write_bytes(spm_model(kind))
    written = {"tokenizer_class": "LlamaTokenizer", "chat_template": template, **config}
    (place / "tokenizer_config.json").write_text(json.dumps(written))


_ROLES_NOT_SPECIAL = tuple(_flags(each, special=False) for each in MARKS)
_THINKING = tuple(_flags(each, special=False) for each in THINK)
_DECODER = {
    str(1500 + at): {
        "content": each,
        "special": True,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "single_word": False,
    }
    for at, each in enumerate(MARKS)
}


def _folders() -> Iterator[tuple[str, Callable[[Path], None]]]:
    templates: dict[str, Any] = {
        "chatml": CHATML, "thinks": THINKS, "cuts": CUTS, "composed": COMPOSED, "generation": GENERATION,
        "json options": JSON_OPTIONS, "parts": PARTS, "only parts": ONLY_PARTS, "macros": MACROS, "names": NAMES,
        "inst": INST, "dated": DATED, "named": NAMED, "named without tools": TOOL_ONLY,
    }  # fmt: skip
    for name, template in templates.items():
        yield f"gpt2, {name}", functools.partial(write, kind="gpt2", template=template, added=_THINKING)
    for kind in BACKENDS:
        if kind != "gpt2":
            yield (
                f"{kind}, cuts",
                functools.partial(
                    write, kind=kind, template=CUTS if "word" not in kind and kind != "uncased" else CHATML
                ),
            )
    for kind in ("first", "always", "llama3", "unigram"):
        yield f"{kind}, thinks", functools.partial(write, kind=kind, template=THINKS, added=_THINKING)
        yield (
            f"{kind}, roles that aren't special",
            functools.partial(write, kind=kind, template=CUTS, special=(), added=_ROLES_NOT_SPECIAL),
        )
    for flag in ("lstrip", "rstrip", "single_word", "normalized"):
        marks = tuple(_flags(each, flag) for each in MARKS)
        for kind in ("gpt2", "first", "uncased" if flag == "normalized" else "always"):
            yield f"{kind}, {flag}", functools.partial(write, kind=kind, template=CHATML, special=marks)
    for layout in ("map", "jinja", "json"):
        yield f"llama3, {layout}", functools.partial(write, kind="llama3", template=CUTS, layout=layout)
    yield "llama3, several", functools.partial(write, kind="llama3", template=NAMED, layout="several")
    yield "llama3, bos", functools.partial(write, kind="llama3", template=CHATML, bos=True)
    yield "first, bos", functools.partial(write, kind="first", template=INST, bos=True)
    for option in (
        {"add_bos_token": True}, {"add_eos_token": True}, {"add_prefix_space": True}, {"split_special_tokens": True},
        {"clean_up_tokenization_spaces": True}, {"legacy": False}, {"model_max_length": 16}, {"truncation_side": "left"},
        {"padding_side": "left", "pad_token": "<pad>"}, {"extra_special_tokens": {"image_token": "<|user|>"}},
        {"additional_special_tokens": ["<|user|>", "<new>"]},
        {"bos_token": {"__type": "AddedToken", "content": "<s>", "lstrip": False, "rstrip": True, "normalized": False, "single_word": False}},
    ):  # fmt: skip
        yield (
            f"gpt2, {next(iter(option))}={next(iter(option.values()))!s:.20}",
            functools.partial(write, kind="gpt2", template=CUTS, config=option),
        )
    for name in (
        "LlamaTokenizer",
        "GemmaTokenizer",
        "Qwen2Tokenizer",
        "CohereTokenizer",
        "GPTNeoXTokenizer",
        "CodeLlamaTokenizer",
        "T5Tokenizer",
        "GPT2Tokenizer",
        "BertTokenizer",
    ):
        kind = {
            "T5Tokenizer": "unigram",
            "BertTokenizer": "wordpiece",
            "LlamaTokenizer": "first",
            "GemmaTokenizer": "never",
            "CodeLlamaTokenizer": "first",
        }.get(name, "gpt2")
        yield (
            f"{name}",
            functools.partial(write, kind=kind, template=CHATML, config={"tokenizer_class": name}),
        )
    for kind in ("bpe", "identity", "unigram", "no_prefix"):
        yield f"model {kind}", functools.partial(write_spm, kind=kind, template=INST)
    yield "model symbols", functools.partial(
        write_spm, kind="symbols",
        template="{% for m in messages %}<start_of_turn>{{ m.role }}\n{{ m.content }}<end_of_turn>\n{% endfor %}",
    )  # fmt: skip
    yield (
        "model with added tokens",
        functools.partial(write_spm, kind="bpe", template=CHATML, added_tokens_decoder=_DECODER),
    )
    yield "model beside a tokenizer.json", _both
    for name, kind in _CLASSES.items():
        template = (
            CHATML
            if kind in ("gpt2", "llama3", "first", "always", "never")
            else CUTS.replace("bos_token", "''")
        )
        yield name, functools.partial(write, kind=kind, template=template, config={"tokenizer_class": name})
    for name in ("ByT5Tokenizer", "CanineTokenizer", "PerceiverTokenizer"):
        yield f"{name}, no vocabulary", functools.partial(write_config, template=CHATML, tokenizer_class=name)
    for name, kind in (
        ("SiglipTokenizer", "unigram"),
        ("BertGenerationTokenizer", "bpe"),
        ("GPTSw3Tokenizer", "bpe"),
    ):
        yield (
            f"{name}, spiece.model",
            functools.partial(
                write_spm,
                kind=kind,
                template=CUTS,
                name="spiece.model",
                tokenizer_class=name,
                eos_token="</s>",
                bos_token="<s>",
            ),
        )
    for name in (
        "T5Tokenizer",
        "GemmaTokenizer",
        "XLMRobertaTokenizer",
        "AlbertTokenizer",
        "CamembertTokenizer",
        "MBartTokenizer",
        "TokenizersBackend",
    ):
        yield f"{name}, a model", functools.partial(
            write_spm, kind="unigram", template=CHATML, tokenizer_class=name,
            name={"XLMRobertaTokenizer": "sentencepiece.bpe.model", "MBartTokenizer": "sentencepiece.bpe.model", "CamembertTokenizer": "sentencepiece.bpe.model"}.get(name, "spiece.model"),
        )  # fmt: skip
    for name in ("GPT2Tokenizer", "Qwen2Tokenizer", "RobertaTokenizer", "CodeGenTokenizer"):
        yield (
            f"{name}, vocab.json",
            functools.partial(write_parts, kind="gpt2", template=CHATML, tokenizer_class=name),
        )
    yield (
        "BertTokenizer, vocab.txt",
        functools.partial(write_parts, kind="wordpiece", template=CHATML, tokenizer_class="BertTokenizer"),
    )
    yield "tiktoken", _tiktoken
    yield "llama's config", functools.partial(_with_model, model_type="llama")
    yield "qwen2's config", functools.partial(_with_model, model_type="qwen2")
    yield "gemma's config", functools.partial(_with_model, model_type="gemma")
    yield (
        "code of its own",
        functools.partial(
            write, kind="gpt2", template=CHATML, config={"auto_map": {"AutoTokenizer": ["code.Mine", None]}}
        ),
    )


_CLASSES = {
    "XLMRobertaTokenizer": "unigram", "AlbertTokenizer": "unigram", "CamembertTokenizer": "unigram", "MBartTokenizer": "unigram",
    "NllbTokenizer": "first", "DebertaV2Tokenizer": "unigram", "XLNetTokenizer": "unigram", "RobertaTokenizer": "gpt2",
    "WhisperTokenizer": "gpt2", "CLIPTokenizer": "gpt2", "DebertaTokenizer": "gpt2", "CodeGenTokenizer": "gpt2", "BigBirdTokenizer": "unigram",
    "PegasusTokenizer": "unigram", "FunnelTokenizer": "wordpiece", "MPNetTokenizer": "wordpiece", "DistilBertTokenizer": "wordpiece",
    "OpenAIGPTTokenizer": "gpt2", "Qwen3_5Tokenizer": "gpt2", "BlenderbotTokenizer": "gpt2", "HerbertTokenizer": "gpt2", "LasrTokenizer": "unigram",
    "XGLMTokenizer": "unigram", "ReformerTokenizer": "always", "RemBertTokenizer": "unigram",
}  # fmt: skip
"""Classes of transformers, and what their ``tokenizer.json`` is made of here."""


def write_config(place: Path, template: str, **config: Any) -> None:
    """Write a folder with nothing but a configuration."""
    (place / "tokenizer_config.json").write_text(json.dumps({"chat_template": template, **config}))


def write_parts(place: Path, kind: str, template: str, **config: Any) -> None:
    """Write a folder with a vocabulary in files of its own."""
    backend = backend_of(kind)
    if kind == "wordpiece":
        vocab = sorted(backend.get_vocab().items(), key=lambda each: each[1])
        (place / "vocab.txt").write_text("".join(f"{token}\n" for token, _ in vocab))
    else:
        backend.model.save(str(place))
    write_config(place, template, additional_special_tokens=list(MARKS), **config)


def _tiktoken(place: Path) -> None:
    ranks = [bytes([each]) for each in range(256)] + [b"he", b"ll", b"hell", b"hello", b" w", b"or", b" wor"]
    lines = [f"{b64encode(each).decode()} {rank}\n" for rank, each in enumerate(ranks)]
    (place / "tiktoken.model").write_text("".join(lines))
    write_config(place, CHATML, tokenizer_class="TokenizersBackend", vocab_file="tiktoken.model")


def _with_model(place: Path, model_type: str) -> None:
    write(place, "first", CUTS)
    config = json.loads((place / "tokenizer_config.json").read_text())
    del config["tokenizer_class"]
    (place / "tokenizer_config.json").write_text(json.dumps(config))
    (place / "config.json").write_text(json.dumps({"model_type": model_type, "vocab_size": 2000}))


def _both(place: Path) -> None:
    write(place, "first", CHATML, config={"tokenizer_class": "LlamaTokenizer"})
    (place / "tokenizer.model").write_bytes(spm_model("bpe"))


FOLDERS: dict[str, Callable[[Path], None]] = dict(_folders())


def made(place: Path, name: str) -> Path:
    """Make a folder of FOLDERS in ``place``, unless it is there, and return it."""
    folder = place / str(list(FOLDERS).index(name))
    if not folder.exists():
        folder.mkdir(parents=True)
        try:
            FOLDERS[name](folder)
        except BaseException:
            shutil.rmtree(folder)
            raise
    return folder
