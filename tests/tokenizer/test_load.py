"""Loading tokenizers: where they are found, which are refused, and which files a digest covers."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import radixkv.tokenizer
from radixkv.errors import ConfigError
from radixkv.tokenizer import load_tokenizer
from tests.tokenizer.kinds import real_text, train_byte_level
from tests.waiting import LIMIT_S

SHIPPED = Path(radixkv.tokenizer.__file__).with_name("radixkv-8k.model")
TEXT = real_text()[:2000]


@pytest.fixture
def fast_file(tmp_path: Path) -> Path:
    """A tokenizer.json that puts a BOS in front and an EOS behind, in a directory of its own."""
    from tokenizers.processors import TemplateProcessing

    backend = train_byte_level(special_tokens=("<s>", "</s>"))
    ids = [("<s>", 0), ("</s>", 1)]
    backend.post_processor = TemplateProcessing(single="<s> $A </s>", special_tokens=ids)
    backend.enable_truncation(8)
    backend.enable_padding(length=8)
    place = tmp_path / "fast"
    place.mkdir()
    backend.save(str(place / "tokenizer.json"))
    return place / "tokenizer.json"


def configure(place: Path, **config: object) -> None:
    (place / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


def run_python(code: str) -> str:
    command = [sys.executable, "-W", "error", "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=LIMIT_S).stdout


def test_importing_the_package_imports_no_library() -> None:
    code = """
import sys, radixkv.tokenizer
libraries = {"sentencepiece", "tokenizers", "jinja2", "torch", "transformers"}
print(sorted(libraries & sys.modules.keys()))
radixkv.tokenizer.load_tokenizer()
print(sorted(libraries & sys.modules.keys()))
"""
    assert run_python(code) == "[]\n['sentencepiece']\n"


def test_a_missing_library_is_named() -> None:
    code = """
import sys
sys.modules["sentencepiece"] = None
from radixkv.errors import ConfigError
from radixkv.tokenizer import load_tokenizer
try:
    load_tokenizer()
except ConfigError as error:
    print(error)
"""
    assert "needs the extra 'tokenizer': pip install 'radixkv[tokenizer]'" in run_python(code)


@pytest.mark.parametrize("name", ["tokenizer.model", "spiece.model"])
def test_a_directory_with_a_model(tmp_path: Path, name: str) -> None:
    shutil.copy(SHIPPED, tmp_path / name)
    (tmp_path / "vocab.txt").write_text("is not looked at", encoding="utf-8")
    assert load_tokenizer(str(tmp_path)).encode(TEXT) == load_tokenizer().encode(TEXT)
    assert load_tokenizer(str(tmp_path / name)).encode(TEXT) == load_tokenizer().encode(TEXT)


def test_of_several_models_tokenizer_model_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "another.model").write_bytes(b"is not looked at")
    shutil.copy(SHIPPED, tmp_path / "tokenizer.model")
    assert load_tokenizer(str(tmp_path)).vocab_size == 8000


def test_a_tokenizer_json_by_directory_and_by_file(fast_file: Path) -> None:
    for path in (fast_file, fast_file.parent):
        tokenizer = load_tokenizer(str(path))
        ids = tokenizer.encode(TEXT)
        assert ids[0] == 0 and ids[-1] == 1 and len(ids) > 100  # a BOS, an EOS, nothing cut off
        assert 1 not in tokenizer.stable_prefix(TEXT)[0], "a prefix has no end"
        assert tokenizer.decode(ids) == TEXT
        size = tokenizer.vocab_size
        assert size >= 2000  # transformers adds a token for what is unknown
        with pytest.raises(ValueError, match=rf"ids\[0\]={size}"):
            tokenizer.decode([size])


def test_special_tokens_in_a_text_are_special_and_in_a_message_they_are_text(fast_file: Path) -> None:
    tokenizer = load_tokenizer(str(fast_file))
    ids = tokenizer.encode("a</s><s>b")
    assert [each for each in ids if each < 2] == [0, 1, 0, 1]
    spoken = tokenizer.encode_messages([{"role": "user", "content": "a</s><s>b"}], False)
    assert not {0, 1} & set(spoken[1:])
    assert tokenizer.decode(spoken) == "user: a</s><s>b\n"


def test_a_stable_prefix_begins_as_a_text_does(fast_file: Path) -> None:
    place = fast_file.parent
    configure(place, bos_token="<s>", eos_token="</s>")
    tokenizer = load_tokenizer(str(place))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1)
    assert tokenizer.stable_prefix("one word")[0][0] == tokenizer.encode("word")[0] == 0
    assert tokenizer.stable_prefix("word") == ([], len(tokenizer.encode("word")))


def test_the_digest_covers_every_file(fast_file: Path) -> None:
    place, digests = fast_file.parent, [load_tokenizer(str(fast_file.parent)).digest]
    configure(place, bos_token="<s>")
    digests.append(load_tokenizer(str(place)).digest)
    (place / "chat_template.jinja").write_text("{{ messages }}", encoding="utf-8")
    digests.append(load_tokenizer(str(place)).digest)
    fast_file.write_bytes(fast_file.read_bytes() + b"\n")
    digests.append(load_tokenizer(str(place)).digest)
    fast_file.write_bytes(fast_file.read_bytes()[:-1] + b" ")
    digests.append(load_tokenizer(str(place)).digest)
    digests.append(load_tokenizer().digest)
    assert len(set(digests)) == 6
    assert all(len(digest) == 64 and int(digest, 16) for digest in digests)
    assert load_tokenizer(str(place)).digest == digests[4]


@pytest.mark.parametrize("content", [b"", b"no model", b"{}", b'{"model": {"type": "BPE"}}', b"\xff\xfe"])
@pytest.mark.parametrize("name", ["tokenizer.model", "tokenizer.json"])
def test_a_malformed_file_is_refused(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    for path in (tmp_path, tmp_path / name):
        with pytest.raises(ConfigError, match="tokenizer="):
            load_tokenizer(str(path))


def test_a_cut_off_model_is_refused(tmp_path: Path) -> None:
    cut = tmp_path / "tokenizer.model"
    cut.write_bytes(SHIPPED.read_bytes()[:50_001])
    with pytest.raises(ConfigError, match="a SentencePiece model file"):
        load_tokenizer(str(cut))


@pytest.mark.parametrize(
    ("make", "allowed"),
    [
        (lambda place: place / "missing", "a directory, a .model file or a tokenizer.json"),
        (lambda place: place / "missing.model", "No such file"),
        (lambda place: place / "missing.json", "No such file"),
        (lambda place: place, "a directory with a tokenizer.model or a tokenizer.json"),
        (
            lambda place: [(place / f"{n}.model").touch() for n in "ab"] and place,
            "one model of a tokenizer, not a.model, b.model",
        ),
    ],
)
def test_a_path_without_a_tokenizer_is_refused(tmp_path: Path, make, allowed: str) -> None:
    with pytest.raises(ConfigError, match=allowed):
        load_tokenizer(str(make(tmp_path)))


@pytest.mark.parametrize(
    ("config", "allowed"),
    [
        ("{", "JSON"),
        ("[]", "a JSON object"),
        ('{"chat_template": 5}', "a string"),
        ('{"chat_template": "{% if %}"}', "a Jinja template"),
    ],
)
def test_a_malformed_configuration_is_refused(fast_file: Path, config: str, allowed: str) -> None:
    (fast_file.parent / "tokenizer_config.json").write_text(config, encoding="utf-8")
    with pytest.raises(ConfigError, match=allowed):
        load_tokenizer(str(fast_file.parent))
