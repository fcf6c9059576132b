"""Answers bound to a form: they follow the schema, also in a batch; hostile schemas are refused; what is kept."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import cache
from typing import Annotated, Any, Literal

import pytest
import tokenizers
import torch
from pydantic import BaseModel, Field
from transformers import FalconConfig, FalconForCausalLM, PreTrainedModel

from radixkv import audit
from radixkv.config import CacheConfig
from radixkv.engines import grammars
from radixkv.engines.grammars import MAX_TENANT_GRAMMARS, Grammars
from radixkv.engines.hf import HFEngine, demo_model, layout_of
from radixkv.engines.hf.forms import FormRows, fill_masks
from radixkv.engines.protocol import AnswerForm, Logprobs, Part, Penalties
from radixkv.engines.vocabulary import Vocabulary
from radixkv.errors import ArgumentError
from radixkv.index.cache import PrefixCache
from radixkv.service.tool_calls import ToolCall, ToolCallReader
from radixkv.service.vocabulary import vocabulary_of
from radixkv.tokenizer import Tokenizer, load_tokenizer
from tests.engines.hf.test_batch import Call, together
from tests.engines.support import engine_over, model_of
from tests.tokenizer.kinds import GPT2, fast_of, tokenizer_of, train_byte_level

pytestmark = pytest.mark.slow

PROMPT = "Which page explains pins? Answer as JSON."
FIELD = "response_format.json_schema.schema"


class Verdict(BaseModel, extra="forbid"):
    """What a model without sense can still fill in, though with much whitespace."""

    page: Annotated[int, Field(ge=1, le=99)]
    tone: Literal["polite", "short"]
    notes: Annotated[list[Annotated[str, Field(max_length=4)]], Field(max_length=1)]


VERDICT = AnswerForm([Part("", Verdict.model_json_schema())])
PAGE = {
    "type": "object",
    "properties": {"page": {"$ref": "#/$defs/page"}},
    "required": ["page"],
    "additionalProperties": False,
    "$defs": {"page": {"enum": [1, 2]}},
}
TONE = {**PAGE, "$defs": {"page": {"enum": ["polite", "short"]}}}
"""It has the same reference to another definition."""


def calls(*schemas: tuple[str, Any], separator: str | None = None) -> AnswerForm:
    """Calls of tools, in the form that the service reads."""
    parts = [
        Part(f'<tool_call>\n{{"name": "{name}", "arguments": ', schema, "}\n</tool_call>")
        for name, schema in schemas
    ]
    return AnswerForm(parts, separator)


def text_of(*forms: AnswerForm) -> str:
    return json.dumps([asdict(form) for form in forms])


@cache
def tokenizer() -> Tokenizer:
    return load_tokenizer()


@cache
def model() -> PreTrainedModel:
    return demo_model(3, tokenizer().vocab_size, num_layers=2, hidden_size=32, intermediate_size=48)


@pytest.fixture
def engine() -> Iterator[HFEngine]:
    cache_ = PrefixCache(CacheConfig(512, 4, layout_of(model()), "cpu"))
    yield HFEngine(model(), cache_, vocabulary=vocabulary_of(tokenizer()))
    assert cache_.stats().num_sequences == 0
    audit.check(cache_)


def answers(engine: HFEngine, form: str, num: int = 400, prompt: str = PROMPT, **mode: Any) -> list[str]:
    """The texts of an answer of a form, which all ended by themselves."""
    ids, tenant = tokenizer().encode(prompt), mode.pop("tenant", "acme")
    made = engine.generate(engine.namespace(tenant), ids, num, form=engine.form(tenant, form, FIELD), **mode)
    assert set(made.finish_reasons) == {"stop"}
    assert all(row[-1] in engine.eos_token_ids for row in made.token_ids)
    return [tokenizer().decode(row) for row in made.token_ids]


MODES: list[dict[str, Any]] = [
    {},
    {"do_sample": True, "seed": 1},
    {"do_sample": True, "seed": 2, "num_return_sequences": 4},
    {"do_sample": True, "seed": 3, "temperature": 1.7, "top_k": 50, "top_p": 0.9},
]


@pytest.mark.parametrize("mode", MODES)
def test_an_answer_follows_its_schema(engine: HFEngine, mode: dict[str, Any]) -> None:
    found = answers(engine, text_of(VERDICT), **mode)
    assert len(found) == mode.get("num_return_sequences", 1)
    for each in found:
        Verdict.model_validate_json(each, strict=True)
    assert found == answers(engine, text_of(VERDICT), **mode), "the same seed draws the same answer"


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"type": "object", "properties": {}, "additionalProperties": False},
        {"enum": ["a", 1, None, {"b": []}]},
        {"anyOf": [{"type": "null"}, {"type": "integer", "minimum": 3, "maximum": 5}]},
        {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 2},
        {"type": "string", "pattern": "^[a-c]{2,4}$"},
        {"$ref": "#/$defs/list", "$defs": {"list": {"type": "array", "items": {"const": 1}, "maxItems": 2}}},
    ],
)
def test_other_schemas(engine: HFEngine, schema: dict[str, Any]) -> None:
    """Any JSON may be long, so the longest answer is cut off there."""
    form = engine.form("acme", text_of(AnswerForm([Part("", schema)])), FIELD)
    ids = tokenizer().encode(PROMPT)
    made = engine.generate(engine.namespace("acme"), ids, 60, do_sample=True, seed=5, form=form)
    (row,), (reason,) = made.token_ids, made.finish_reasons
    if reason == "stop":
        json.loads(tokenizer().decode(row))
    assert reason == "stop" or not schema


def test_calls_of_tools_are_those_that_the_service_reads(engine: HFEngine) -> None:
    """Each tool has its own definitions, though all have the same references."""
    form = calls(("find_page", PAGE), ("set_tone", TONE))
    found = set()
    for seed in range(8):
        (text,) = answers(engine, text_of(form), do_sample=True, seed=seed)
        reader = ToolCallReader()
        (call,) = [*reader.push(text), *reader.close()]
        assert isinstance(call, ToolCall)
        page = json.loads(call.arguments)["page"]
        assert page in ((1, 2) if call.name == "find_page" else ("polite", "short"))
        found.add(call.name)
    assert found == {"find_page", "set_tone"}


def test_several_calls_and_a_text_of_a_schema_instead(engine: HFEngine) -> None:
    forms = text_of(calls(("find_page", PAGE), separator="\n"), AnswerForm([Part("", PAGE)]))
    form, ids, nums = engine.form("acme", forms, FIELD), tokenizer().encode(PROMPT), set()
    for seed in range(12):
        made = engine.generate(engine.namespace("acme"), ids, 250, form=form, do_sample=True, seed=seed)
        if made.finish_reasons == ["length"]:  # it went on with calls
            continue
        reader, text = ToolCallReader(), tokenizer().decode(made.token_ids[0])
        found = [each for each in [*reader.push(text), *reader.close()] if each != "\n"]
        is_text = [isinstance(each, str) for each in found]
        assert is_text == [True] or not any(is_text)
        nums.add(0 if is_text == [True] else len(found))
    assert 0 in nums and max(nums) > 0


def test_a_batch_changes_no_answer(engine: HFEngine) -> None:
    """Requests with and without a form, of several tenants, at the same time."""
    ids = tokenizer().encode(PROMPT)
    form = text_of(VERDICT)
    expected = [answers(engine, form, **mode) for mode in MODES]
    free = [engine.generate(engine.namespace("acme"), ids, 40, eos_token_id=-1, **mode) for mode in MODES]

    def bound(n: int) -> list[str]:
        return answers(engine, form, tenant=f"t{n}", **MODES[n % 4])

    def unbound(n: int) -> list[list[int]]:
        ns = engine.namespace(f"t{n}")
        return engine.generate(ns, ids, 40, eos_token_id=-1, **MODES[n % 4]).token_ids

    with ThreadPoolExecutor(16) as pool:
        one, other = pool.map(bound, range(8)), pool.map(unbound, range(8))
        assert [*one] == [*expected, *expected]
        assert [*other] == [each.token_ids for each in [*free, *free]]


def test_an_answer_that_was_preempted_goes_on(engine: HFEngine) -> None:
    """Several that grow together in a small pool: one gives its room up, and follows its schema all the same."""
    form, penalties = text_of(VERDICT), Penalties(presence=0.3, repetition=1.1)
    modes = [{"do_sample": True, "seed": seed, "penalties": penalties} for seed in range(6)]
    expected = [answers(engine, form, 100, **mode) for mode in modes]
    small = PrefixCache(CacheConfig(60, 4, layout_of(model()), "cpu"))
    crowded, ids = HFEngine(model(), small, vocabulary=vocabulary_of(tokenizer())), tokenizer().encode(PROMPT)
    together(crowded, [Call("acme", [5, 6, n], 2) for n in range(4)])  # learned: 2 tokens
    bound = {"form": crowded.form("acme", form, FIELD), "eos_token_id": None}
    found = together(crowded, [Call("acme", ids, 100, **bound, **mode) for mode in modes])
    assert [[tokenizer().decode(row) for row in one.token_ids] for one in found] == expected
    assert sum(crowded.preemptions().values()) > 0
    audit.check(small)


def test_the_kv_of_an_answer_is_that_of_a_prefill(engine: HFEngine) -> None:
    """What follows an answer that was bound to a form is the same as without a cache."""
    ids = tokenizer().encode(PROMPT)
    form = engine.form("acme", text_of(VERDICT), FIELD)
    made = engine.generate(engine.namespace("acme"), ids, 200, form=form)
    whole = [*ids, *made.token_ids[0], *tokenizer().encode(" And then?")]
    again, cold = (
        engine.generate(engine.namespace(tenant), whole, 20, eos_token_id=-1) for tenant in ("acme", "globex")
    )
    assert again.num_cached_tokens[0] > len(ids) > cold.num_cached_tokens[0] == 0
    assert again.token_ids == cold.token_ids


def test_an_answer_that_is_too_long_is_cut_off(engine: HFEngine) -> None:
    form = engine.form("acme", text_of(VERDICT), FIELD)
    made = engine.generate(engine.namespace("acme"), tokenizer().encode(PROMPT), 5, form=form)
    assert made.finish_reasons == ["length"] and len(made.token_ids[0]) == 5
    assert tokenizer().decode(made.token_ids[0]).startswith("{")


def test_any_end_of_sequence_token_ends_an_answer(engine: HFEngine) -> None:
    """Also those that a call names, and none else."""
    other = 7
    form = engine.form("acme", text_of(AnswerForm([Part("", {"const": 1})])), FIELD)
    made = engine.generate(engine.namespace("acme"), [5, 6], 9, form=form, eos_token_id=other)
    assert made.token_ids[0][-1] == other and made.finish_reasons == ["stop"]


def test_what_does_not_go_together_is_refused(engine: HFEngine) -> None:
    form = engine.form("acme", text_of(VERDICT), FIELD)
    for fields, named in (
        ({"num_beams": 2}, "form"),
        ({"eos_token_id": -1}, "eos_token_id"),
        ({"penalties": Penalties(min_new_tokens=3)}, "penalties.min_new_tokens"),
    ):
        with pytest.raises(ArgumentError) as caught:
            engine.generate(engine.namespace("acme"), [5, 6], 9, form=form, **fields)
        assert caught.value.argument == named
    with pytest.raises(ArgumentError, match="form"):
        engine.generate(engine.namespace("acme"), [5, 6], 9, form="json")  # type: ignore[arg-type]


def test_an_engine_without_a_vocabulary_has_no_forms() -> None:
    with engine_over(model_of()) as engine:
        assert "forms" not in engine.abilities and "penalties" in engine.abilities
        with pytest.raises(ArgumentError, match=FIELD):
            engine.form("acme", text_of(VERDICT), FIELD)


def test_a_model_with_an_attention_of_its_own_follows_forms() -> None:
    """In transformers' own loop, for one row and several, of which some end before others."""
    small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = FalconConfig(
        vocab_size=tokenizer().vocab_size, bos_token_id=1, eos_token_id=2, pad_token_id=0, **small
    )
    with torch.random.fork_rng(devices=[]):
        falcon = FalconForCausalLM(config).eval()
    own = PrefixCache(CacheConfig(512, 4, layout_of(falcon), "cpu"))
    engine = HFEngine(falcon, own, vocabulary=vocabulary_of(tokenizer()))
    assert "forms" in engine.abilities and "logprobs" not in engine.abilities
    for mode in MODES:
        found = answers(engine, text_of(VERDICT), **mode)
        for each in found:
            Verdict.model_validate_json(each, strict=True)
        assert found == answers(engine, text_of(VERDICT), **mode)
    assert own.stats().num_sequences == 0
    with pytest.raises(ArgumentError, match="logprobs"):
        engine.generate(engine.namespace("acme"), [5, 6], 3, logprobs=Logprobs())
    audit.check(own)


# --- hostile schemas


def nested(depth: int, wrap: str = "items") -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(depth):
        schema = {"type": "array", wrap: schema} if wrap == "items" else {wrap: [schema]}
    return schema


def chained(num: int, keyword: str) -> dict[str, Any]:
    """Definitions of which each refers to the next one."""
    defs: dict[str, Any] = {
        f"d{n}": {keyword: [{"$ref": f"#/$defs/d{n + 1}"}, {"type": "string", "pattern": f"^.*{n}.*$"}]}
        for n in range(num)
    }
    return {"$ref": "#/$defs/d0", "$defs": {**defs, f"d{num}": {"type": "string"}}}


def crossed(num: int, width: int) -> dict[str, Any]:
    """An intersection of unions: every union multiplies the alternatives."""
    union = [
        {"type": "object", "properties": {f"p{n}_{m}": {"type": "string"} for m in range(3)}}
        for n in range(width)
    ]
    return {"allOf": [{"anyOf": union} for _ in range(num)]}


HOSTILE: dict[str, dict[str, Any]] = {
    "deep": nested(100),
    "deep unions": nested(100, "anyOf"),
    "a chain of references": chained(2_000, "anyOf"),
    "a chain of intersections": chained(2_000, "allOf"),
    "a product of unions": crossed(12, 12),
    "a reference to itself": {"$ref": "#"},
    "references in a circle": {
        "$ref": "#/$defs/a",
        "$defs": {"a": {"allOf": [{"$ref": "#/$defs/b"}]}, "b": {"allOf": [{"$ref": "#/$defs/a"}]}},
    },
    "a great repetition": {"type": "string", "pattern": "^((((a{1,100}){1,100}){1,100}){1,100})$"},
    "a pattern that looks ahead far": {"type": "string", "pattern": "^.*a.{900}$"},
    "nested groups": {"type": "string", "pattern": "^" + "(" * 2_000 + "a" + ")" * 2_000 + "$"},
    "great counts": {"type": "array", "items": {"type": "array", "minItems": 10**6}, "minItems": 10**6},
    "long strings": {"type": "string", "minLength": 10**9, "maxLength": 10**18},
    "great numbers": {"type": "integer", "minimum": -(10**300), "maximum": 10**300, "multipleOf": 7},
    "many alternatives": {"enum": [f"value {n}" for n in range(12_000)]},
    "many properties": {
        "type": "object", "properties": {f"p{n}": {"type": ["string", "null"]} for n in range(3_000)}
    },
    "no schema": {"type": "nonsense"},
    "another server's schema": {"$ref": "http://127.0.0.1:1/schema"},
    "a file": {"$ref": "file:///etc/passwd"},
    "lone surrogates": {"const": "\ud800"},
}  # fmt: skip


_DEAR = ("deep unions", "a product of unions", "many alternatives", "many properties", "nested groups")


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=pytest.mark.release if each in _DEAR else ()) for each in HOSTILE]
)
def test_a_hostile_schema_is_refused_or_followed(engine: HFEngine, name: str) -> None:
    """It neither ends the process nor holds it up, and the next request is served."""
    try:
        form = engine.form("acme", text_of(AnswerForm([Part("", HOSTILE[name])])), FIELD)
        engine.generate(engine.namespace("acme"), [5, 6], 12, form=form, do_sample=True, seed=1)
    except ArgumentError as error:
        assert error.argument == FIELD and len(str(error)) < 2_000
    Verdict.model_validate_json(answers(engine, text_of(VERDICT))[0])


def test_a_grammar_that_never_compiles_is_given_up(engine: HFEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that tries it is ended by the kernel; the next one is another process."""
    monkeypatch.setattr(grammars, "TRIAL_S", 0.000_001)
    with pytest.raises(ArgumentError, match="needs more than"):
        engine.form("acme", text_of(VERDICT), FIELD)
    monkeypatch.undo()
    assert engine.form("acme", text_of(VERDICT), FIELD)


def test_a_schema_cannot_change_the_options(engine: HFEngine) -> None:
    schema = {"type": "object", "not": {}, "x-guidance": {"lenient": True}}
    with pytest.raises(ArgumentError, match="not"):
        engine.form("acme", text_of(AnswerForm([Part("", schema)])), FIELD)


# --- what is kept


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> tuple[Grammars, list[str]]:
    """Grammars of the shipped vocabulary, and the grammars that were tried."""
    tried: list[str] = []
    monkeypatch.setattr(grammars, "tried", lambda grammar: tried.append(grammar) or "")
    return Grammars(vocabulary_of(tokenizer()), 2, tokenizer().vocab_size), tried


def const(number: int) -> str:
    return text_of(AnswerForm([Part("", {"const": number})]))


def test_a_tenants_grammars_are_kept_for_itself(kept: tuple[Grammars, list[str]]) -> None:
    found, tried = kept
    for _ in range(3):
        found.grammar("acme", 0, const(1), FIELD)
    assert len(tried) == 1
    found.grammar("globex", 0, const(1), FIELD)
    assert len(tried) == 2, "another tenant's grammar is compiled again"
    found.grammar("acme", 1, const(1), FIELD)
    assert len(tried) == 3, "nothing from before a purge is used"
    found.grammar("acme", 0, const(1), FIELD)
    assert len(tried) == 4, "nor kept"
    found.grammar("globex", 0, const(1), FIELD)
    assert len(tried) == 4


def test_the_oldest_grammars_of_a_tenant_go(kept: tuple[Grammars, list[str]]) -> None:
    found, tried = kept
    found.grammar("globex", 0, const(0), FIELD)
    for number in range(MAX_TENANT_GRAMMARS + 1):
        found.grammar("acme", 0, const(number), FIELD)
    begun = len(tried)
    found.grammar("acme", 0, const(1), FIELD)
    found.grammar("globex", 0, const(0), FIELD)
    assert len(tried) == begun, "another tenant's stay"
    found.grammar("acme", 0, const(0), FIELD)
    assert len(tried) == begun + 1


def test_a_grammar_that_reached_its_limits_is_compiled_anew(kept: tuple[Grammars, list[str]]) -> None:
    """Its matchers share the states of a lexer, so that the next one would fail too."""
    found, tried = kept
    schema = {"type": "string", "pattern": "^.*a.{900}$"}
    form = text_of(AnswerForm([Part("", schema)]))
    grammar = found.grammar("acme", 0, form, FIELD)
    matcher = grammar.matcher()
    letters = tokenizer().encode("abababab" * 40)
    with pytest.raises(ArgumentError, match="too many"):
        matcher.consume_tokens(tokenizer().encode('"'))
        for _ in range(4_000):
            for token_id in letters:
                matcher.compute_bitmask()
                grammar.require_sound(matcher)
                matcher.consume_token(token_id)
    found.grammar("acme", 0, form, FIELD)
    assert len(tried) == 2


def test_a_request_leaves_nothing_in_a_kept_grammar(engine: HFEngine) -> None:
    """Each row begins at the beginning."""
    form = engine.form("acme", text_of(VERDICT), FIELD)
    for _ in range(2):
        made = engine.generate(engine.namespace("acme"), tokenizer().encode(PROMPT), 200, form=form)
        Verdict.model_validate_json(tokenizer().decode(made.token_ids[0]))


# --- vocabularies


def walked(vocabulary: Vocabulary, tokenizer: Tokenizer, form: str, seed: int) -> list[int]:
    """Tokens of an answer that follows a form, each drawn from those that may follow."""
    grammars_ = Grammars(vocabulary, 0, tokenizer.vocab_size)
    rows = FormRows(grammars_.grammar("acme", 0, form, FIELD), 1, [0])
    generator, answer = torch.Generator().manual_seed(seed), list[int]()
    for _ in range(600):
        fill_masks([(rows, {0: answer})])
        scores = rows(None, torch.zeros(1, tokenizer.vocab_size))
        token_id = int(torch.multinomial(scores.softmax(-1), 1, generator=generator))
        if token_id == 0:
            return answer
        answer.append(token_id)
    raise AssertionError("the answer doesn't end")


@pytest.mark.parametrize(
    "kind",
    [
        "shipped",
        "sentencepiece, library defaults",
        "sentencepiece, identity",
        "sentencepiece, unigram",
        "byte-level, as GPT-2",
        "byte-level, as Llama 3",
    ],
)
def test_answers_of_tokenizers_of_many_kinds(kind: str) -> None:
    """The text of the tokens follows the schema, and its bytes are told."""
    found, form = tokenizer_of(kind), text_of(VERDICT)
    vocabulary = vocabulary_of(found)
    for seed in range(3):
        answer = walked(vocabulary, found, form, seed)
        Verdict.model_validate_json(found.decode(answer))
        content = b"".join(map(vocabulary.bytes_of, answer))
        assert Verdict.model_validate_json(content) == Verdict.model_validate_json(found.decode(answer))


def test_a_call_begins_with_the_token_that_stands_for_its_tag() -> None:
    """Models have learned it there. Its name inside a text stays text."""
    backend = train_byte_level(GPT2, ("<|end|>",))
    tags = [
        tokenizers.AddedToken(tag, special=False, normalized=False) for tag in ("<tool_call>", "</tool_call>")
    ]
    backend.add_tokens(tags)
    found = fast_of(backend)
    begin, end = (backend.token_to_id(tag.content) for tag in tags)
    schema = {**PAGE, "$defs": {"page": {"enum": ["<tool_call>", "</tool_call>"]}}}
    for seed in range(3):
        answer = walked(vocabulary_of(found), found, text_of(calls(("find_page", schema))), seed)
        assert (answer[0], answer[-1]) == (begin, end)
        assert answer.count(begin) == answer.count(end) == 1
        assert found.decode(answer).startswith('<tool_call>\n{"name": "find_page", "arguments": {')


def test_a_tokenizer_whose_tokens_are_unknown_is_refused_by_name() -> None:
    found = Grammars(vocabulary_of(tokenizer_of("word pieces")), 0, 1_500)
    with pytest.raises(ArgumentError, match="the tokens of this model aren't known") as caught:
        found.grammar("acme", 0, text_of(VERDICT), FIELD)
    assert caught.value.argument == FIELD


def test_a_vocabulary_tells_the_bytes_of_tokens() -> None:
    vocabulary = vocabulary_of(tokenizer())
    text = 'Größe 日本 😀, {"a": 1}\n'
    assert b"".join(map(vocabulary.bytes_of, tokenizer().encode(text))) == text.encode()
    assert vocabulary.bytes_of(2) == b"</s>", "special tokens have names"
