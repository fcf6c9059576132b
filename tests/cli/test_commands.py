"""The commands that talk to a service, audit or measure, and their error messages."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from click import ClickException
from click.testing import CliRunner
from click.testing import Result as ClickResult

import radixkv
from radixkv.audit import inprocess, remote
from radixkv.audit.timing import TimingPlan
from radixkv.audit.verdict import EXIT_CODES, AuditReport, Check, Verdict, worst
from radixkv.cli import audit as audit_command
from radixkv.cli.main import commands, main
from radixkv.clock import ManualClock
from radixkv.service.api_client import ServiceError
from tests import forked
from tests.audit.openai_server import Behaviour, openai_server
from tests.service.running import Running, service_in_thread
from tests.waiting import LIMIT_S, is_set

# Most commands run in a process of their own that imports torch.
pytestmark = [pytest.mark.slow]
Result = subprocess.CompletedProcess[str]


@pytest.fixture(scope="module")
def live() -> Iterator[Running]:
    with service_in_thread() as running:
        yield running


def run(*arguments: str, **environment: str) -> Result:
    """Run ``radixkv`` in a process of its own, forked from one that has done the imports."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RADIXKV_")}
    with TemporaryDirectory() as folder:
        return forked.run(["radixkv", *arguments], {**clean, **environment}, Path(folder), timeout=LIMIT_S)


def run_anew(*arguments: str, **environment: str) -> Result:
    """Run ``radixkv`` in a fresh process, as a user does."""
    command = [sys.executable, "-m", "radixkv", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=LIMIT_S, env={**os.environ, **environment}
    )


def complaint(result: Result, code: int = 2) -> str:
    """Return the one line of error that a command ended with."""
    assert result.returncode == code, (result.stdout, result.stderr)
    (line,) = result.stderr.splitlines()
    assert line.startswith("radixkv: ") and not result.stdout
    return line


def test_help_and_version_load_nothing_heavy() -> None:
    code = (
        "import sys, radixkv.cli.main\n"
        "try: radixkv.cli.main.main(sys.argv[1:])\n"
        "finally: print(sorted(set(sys.modules) & set(HEAVY)))"
    ).replace(
        "HEAVY", repr(["torch", "transformers", "starlette", "pydantic", "redis", "hypothesis", "httpx"])
    )
    for arguments in (
        ["--help"],
        ["serve", "--help"],
        ["warm", "--help"],
        ["config", "--help"],
        ["--version"],
    ):
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=LIMIT_S
        )
        loaded = ["pydantic"] if arguments[0] == "serve" else []  # its options are made of the settings
        assert done.returncode == 0 and done.stdout.splitlines()[-1] == str(loaded), done


def test_version() -> None:
    assert (
        run_anew("--version", RADIXKV_PURE="1").stdout
        == f"radixkv {radixkv.__version__} (pure Python index)\n"
    )
    if radixkv.COMPILED:
        assert run_anew("--version").stdout == f"radixkv {radixkv.__version__} (compiled index)\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["serve", "--port", "http"], ["--port", "'http'", "0 to 65535"]),
        (["serve", "--policy", "mru"], ["--policy", "'mru'", "lru"]),
        (["serve", "--host", "0.0.0.0"], ["--keys", "not set", "0.0.0.0"]),
        (["serve", "--redis", "redis://127.0.0.1:1"], ["--fleet-secret", "not set"]),
        (["serve", "--model", "/nowhere"], ["--model", "'/nowhere'", "directory"]),
        (["serve", "--num-blocks", "2000000000"], ["--num-blocks", "2000000000", "memory"]),
        (["serve", "--colour", "red"], ["--colour"]),
        (["server"], ["server"]),
        (["warm"], ["FILE"]),
        (["warm", "/nowhere.txt"], ["/nowhere.txt"]),
        (["stats", "--url", "localhost"], ["--url", "'localhost'"]),
        (["stats", "--url", "http://192.0.2.1"], ["--key"]),
        (["audit", "run", "--examples", "none"], ["--examples", "none"]),
        (["audit", "run", "--cache", "nowhere:Cache"], ["--cache", "nowhere:Cache", "MODULE:FACTORY"]),
        (["audit", "run", "--cache", "radixkv"], ["--cache", "'radixkv'", "MODULE:FACTORY"]),
        (["audit", "run", "--key", "a"], ["--key", "--url"]),
        (["audit", "run", "--url", "http://127.0.0.1:9", "--key", "a"], ["--key", "two tenants"]),
        (
            ["audit", "run", "--url", "http://127.0.0.1:9", "--key", "a", "--key", "a"],
            ["--key", "two tenants"],
        ),
        (["audit", "run", "--salt", "a"], ["--salt", "--url"]),
        (["audit", "run", "--url", "http://127.0.0.1:9", "--salt", "a"], ["--salt", "two different salts"]),
        (["audit", "run", "--url", "http://x", "--salt", "a", "--salt", "a"], ["--salt", "two different"]),
        (
            ["audit", "run", "--url", "http://x", "--salt", "a", "--salt", "b", "--key", "a", "--key", "b"],
            ["--key", "at most one"],
        ),
        (["audit", "run", "--url", "localhost", "--key", "a", "--key", "b"], ["--url", "'localhost'"]),
        (["audit", "run", "--url", "http://x", "--cache", "radixkv:PrefixCache"], ["--cache", "--url"]),
        (["audit", "run", "--samples", "3"], ["--samples", "3"]),
        (["bench", "index", "--policy", "mru"], ["policy", "'mru'"]),
        (["bench", "tier-dtype", "--steps", "3"], ["'tier-dtype'", "python -m benchmarks.tier_dtype"]),
    ],
)
def test_a_usage_error_is_one_line_and_exit_code_2(
    arguments: list[str], words: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    said = capfd.readouterr()
    (line,) = said.err.splitlines()
    assert ended.value.code == 2 and line.startswith("radixkv: ") and not said.out
    assert all(word in line for word in words), line


def test_a_setting_from_the_environment_is_called_by_its_name() -> None:
    assert complaint(run("serve", RADIXKV_NUM_BLOCKS="few")).startswith(
        "radixkv: RADIXKV_NUM_BLOCKS='few' is not allowed"
    )
    assert "--num-blocks" in complaint(run("serve", "--num-blocks", "1", RADIXKV_NUM_BLOCKS="few"))


def test_an_invalid_keys_file_is_named(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    keys.write_text('{"tenants": {"acme": "secret", "globex": "secret"}}')
    keys.chmod(0o600)
    line = complaint(run("serve", "--keys", str(keys)))
    assert f"{keys}: tenants.globex" in line and "secret" not in line


def test_a_model_directory_without_a_model_is_named(tmp_path: Path) -> None:
    assert str(tmp_path) in complaint(run("serve", "--model", str(tmp_path)))


def test_a_failed_audit_has_an_exit_code_of_its_own() -> None:
    assert 5 not in EXIT_CODES.values()
    arguments = ("audit", "run", "--url", "http://127.0.0.1:9", "--key", "a", "--key", "b")
    assert "http://127.0.0.1:9" in complaint(run(*arguments), 5)


@pytest.mark.parametrize("factory", ["os:getcwd", "radixkv:CacheConfig"])
def test_a_factory_that_makes_no_cache_is_refused_by_name(factory: str) -> None:
    said = complaint(run("audit", "run", "--cache", factory, "--examples", "1"))
    assert factory in said and "a factory of caches" in said


def test_an_unreachable_service_is_exit_code_1() -> None:
    assert "http://127.0.0.1:9" in complaint(run("stats", "--url", "http://127.0.0.1:9"), 1)


def test_a_wrong_key_is_exit_code_1(live: Running) -> None:
    assert "401" in complaint(run("stats", "--url", live.url, "--key", "wrong"), 1)


def test_warm_files(live: Running, tmp_path: Path, text_file: Path) -> None:
    lines = tmp_path / "prompts.jsonl"
    more = [json.dumps("A prompt in a line.\n" * 9), "", json.dumps({"token_ids": list(range(40)), "salt": "own"}),
            json.dumps({"messages": [{"role": "user", "content": "Hello there! " * 9}]})]  # fmt: skip
    lines.write_text("\n".join(more))
    done = run("warm", str(text_file), str(lines), "--url", live.url, "--salt", "cli", "--json")
    assert done.returncode == 0 and not done.stderr
    rows = json.loads(done.stdout)
    assert [row["source"] for row in rows] == [str(text_file), f"{lines}:1", f"{lines}:3", f"{lines}:4"]
    assert [row["computed"] == row["tokens"] > 0 for row in rows] == [True] * 4
    fields = {"prompt": text_file.read_text(), "salt": "cli"}
    assert live.acme.post("/v1/lookup", json=fields).json()["matched_tokens"] == rows[0]["tokens"]
    own = {"token_ids": list(range(40)), "salt": "own"}
    assert live.acme.post("/v1/lookup", json=own).json()["matched_tokens"] == rows[2]["tokens"] == 32
    table = run("warm", str(text_file), "--url", live.url, "--salt", "cli", "--replicas", "all")
    head, row, outcome = table.stdout.splitlines()
    assert head.split() == ["source", "tokens", "cached_before", "computed", "left_out", "seconds"]
    assert row.split()[1:4] == [str(rows[0]["tokens"]), str(rows[0]["tokens"]), "0"]
    assert outcome.endswith(f"done, {rows[0]['tokens']} tokens, 0 computed")


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    path = tmp_path / "prompt.txt"
    path.write_text("The first rule of the manual is to read the manual.\n" * 12)
    return path


@pytest.mark.parametrize("line", ["{", "5", '{"prompt": "x", "wait": true}', "[1, 2]"])
def test_a_line_that_is_no_prompt_is_refused_by_number(tmp_path: Path, line: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('"fine"\n' + line)
    assert f"{path}:2" in complaint(run("warm", str(path)))


def test_a_refusal_of_the_service_is_printed(live: Running, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"token_ids": [1, 2, 9999]}')
    line = complaint(run("warm", str(path), "--url", live.url), 1)
    assert "token_ids[2]" in line and "0 to 7999" in line


def invoke(*arguments: str) -> ClickResult:
    """Run a command in this process: a tenth of the time."""
    return CliRunner().invoke(commands, list(arguments))


def refused(*arguments: str) -> str:
    """Return the error message of a command that the service refuses."""
    result = invoke(*arguments)
    assert isinstance(result.exception, ServiceError | ClickException | SystemExit), result.output
    return f"{result.exception} {result.output}"


def test_keys_are_made_listed_rotated_and_revoked(live: Running) -> None:
    made = invoke("keys", "create", "initech east", "--url", live.url)
    key, key_id = made.stdout.strip(), made.stderr.split()[1]
    assert made.exit_code == 0 and key.startswith("rk_") and "initech east" in made.stderr
    stats = json.loads(invoke("stats", "--url", live.url, "--key", key, "--json").stdout)
    assert stats["tenant"] == "initech east"
    listed = json.loads(invoke("keys", "list", "--url", live.url, "--json").stdout)
    assert {each["id"]: each["tenant"] for each in listed}[key_id] == "initech east"
    assert key_id in invoke("keys", "list", "--url", live.url).stdout
    new = json.loads(invoke("keys", "rotate", key_id, "--url", live.url, "--json").stdout)
    assert "401" in refused("stats", "--url", live.url, "--key", key)
    assert invoke("keys", "revoke", new["id"], "--url", live.url).exit_code == 0
    assert "401" in refused("stats", "--url", live.url, "--key", new["key"])
    assert "404" in refused("keys", "revoke", new["id"], "--url", live.url)
    assert "403" in refused("keys", "list", "--url", live.url, "--key", "demo-acme")


def test_purge(live: Running, text_file: Path) -> None:
    fields = {"prompt": text_file.read_text(), "salt": "to be purged"}
    assert live.globex.post("/v1/warm", json=fields).json()["tokens"] > 0
    done = json.loads(invoke("purge", "globex", "--url", live.url, "--json").stdout)
    assert done["complete"] and done["blocks"] > 0 and len(done["confirmed"]) == 1
    assert live.globex.post("/v1/lookup", json=fields).json()["matched_tokens"] == 0
    head, row = invoke("purge", "globex", "--url", live.url).stdout.splitlines()
    assert head.split() == ["tenant", "generation", "confirmed", "pending", "unconfirmed"]
    assert row.split()[:2] == ["globex", str(done["generation"] + 1)] and row.split()[3:] == ["-", "-"]
    assert "404" in refused("purge", "nobody", "--url", live.url)


def test_warm_on_chosen_replicas(live: Running, text_file: Path) -> None:
    two = invoke("warm", str(text_file), "--url", live.url, "--replicas", "2")
    assert two.exit_code == 1 and "1 warms on replicas failed" in two.stderr, "there is only one replica"
    assert invoke("warm", str(text_file), "--url", live.url, "--replicas", "1").exit_code == 0
    pinned = invoke("warm", str(text_file), "--url", live.url, "--replicas", "all", "--pin", "60")
    assert pinned.exit_code == 0 and "failed" not in pinned.stderr, "the demo's tenants may pin"
    assert "no such live replica" in refused(
        "warm", str(text_file), "--url", live.url, "--replicas", "one,two"
    )


def test_stats(live: Running) -> None:
    mine = json.loads(run("stats", "--url", live.url, "--json").stdout)
    assert mine == live.acme.get("/v1/stats").json()
    table = run("stats", "--url", live.url, RADIXKV_KEY="demo-operator").stdout
    assert "acme" in table and "globex" in table and "num_blocks" in table


def shows_progress_alone(stderr: str) -> bool:
    """Whether stderr has no line but those that say how far an audit is."""
    return all(line.startswith("audit: ") for line in stderr.splitlines())


def test_audit_of_the_library(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    done = invoke("audit", "run", "--examples", "5", "--steps", "10", "--json", "--html", str(page))
    document = json.loads(done.stdout)
    assert document["target"] == "radixkv:PrefixCache" and shows_progress_alone(done.stderr)
    assert "That is little" in document["tried"]
    assert done.exit_code == {"isolated": 0, "leaks": 1, "inconclusive": 3}[document["verdict"]]
    checks = {each["name"]: each for each in document["checks"]}
    assert {each["check"] for each in checks.values()} == {1, 2, 3, 4, 5, 6, 7, 8, 11, 12}
    for name in ("laws and contents", "cross-tenant probe", "token boundaries"):
        assert checks[name]["verdict"] == "isolated" and checks[name]["detail"]
    text = page.read_text("utf-8")
    assert document["verdict"] in text and "laws and contents" in text


def test_audit_of_a_custom_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "leaky_cache.py").write_text(
        "from radixkv import PrefixCache\n"
        "class Leaky(PrefixCache):\n"
        "    def open(self, namespace, ids, **named):\n"
        "        return super().open(namespace._replace(tenant='one'), ids, **named)\n"
        "    def match(self, namespace, ids):\n"
        "        return super().match(namespace._replace(tenant='one'), ids)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    done = invoke("audit", "run", "--cache", "leaky_cache:Leaky", "--examples", "5")
    assert done.exit_code == 1, done.output
    assert done.stdout.splitlines()[-1] == "leaky_cache:Leaky: leaks"
    (row,) = (line for line in done.stdout.splitlines() if line.startswith("cross-tenant probe"))
    assert row.split()[2:4] == ["3", "leaks"]


def test_audit_of_a_server(tmp_path: Path) -> None:
    """The verdict is the worst of the checks' verdicts, and the output says so.

    So few samples say nothing about time. The positive control may be blind; then no cross-tenant samples are taken.
    tests/audit audits radixkv's own service.
    """
    page = tmp_path / "report.html"
    few = ["--probes", "2", "--samples", "20", "--control", "40", "--html", str(page)]
    with openai_server(Behaviour()) as url:
        done = run("audit", "run", "--url", url, "--key", "a-key", "--key", "b-key", *few, "--json")
    document = json.loads(done.stdout)
    checks = {each["check"]: each for each in document["checks"]}
    verdict = worst(Verdict(each["verdict"]) for each in checks.values() if each["verdict"] is not None)
    assert document["verdict"] == verdict and done.returncode == EXIT_CODES[verdict]
    assert shows_progress_alone(done.stderr)
    assert set(checks) == {3, 7, 8, 9, 10, 12} and checks[3]["verdict"] == "isolated"
    taken = 0 if checks[9]["verdict"] == Verdict.BLIND else 20
    assert {arm: len(times) for arm, times in document["samples"].items()} == {
        "hit": 40, "own_miss": 40, "cross": taken, "miss": taken,
    }  # fmt: skip
    assert document["settings"]["timing"]["samples"] == 20 and "<svg" in page.read_text("utf-8")


def test_an_audit_lists_the_checks_it_left_out() -> None:
    with openai_server(Behaviour()) as url:
        table = run(
            "audit", "run", "--url", url, "--key", "a-key", "--key", "b-key", "--probes", "1", "--no-timing"
        )
    assert table.returncode == 6, table
    *_, control, margin, bits, last = table.stdout.splitlines()
    assert last == f"{url}: isolated in what was checked"
    for line, number in ((control, 9), (margin, 10), (bits, 12)):
        assert line.startswith(f"not checked: {number} ") and line.endswith("left out (--no-timing)")
    lines = table.stdout.splitlines()
    first = next(at for at, line in enumerate(lines) if line.startswith("not checked: "))
    assert not [line for line in lines[first:-1] if not line.startswith("not checked: ")]
    assert lines[first:-1] == list(dict.fromkeys(lines[first:-1])), "each reason once"
    assert not [line for line in lines[:first] if "left out (--no-timing)" in line]
    assert "tried: " in lines[first - 2] and lines[0].split() == ["name", "check", "verdict", "seconds"]
    said = table.stderr.splitlines()
    assert f"audit: {remote.EVERY_WAY}" in said and shows_progress_alone(table.stderr)


@pytest.mark.parametrize(("sent", "named"), [(signal.SIGINT, "Ctrl-C"), (signal.SIGTERM, "SIGTERM")])
def test_a_signal_ends_an_audit_with_what_it_knows(sent: signal.Signals, named: str, tmp_path: Path) -> None:
    """It is sent while a stream hangs, after the first check has found a leak."""
    behaviour, page = Behaviour(shares=True, at_streams="hangs"), tmp_path / "report.html"
    with openai_server(behaviour) as url:
        command = [sys.executable, "-m", "radixkv", "audit", "run", "--url", url, "--key", "a", "--key", "b"]
        with subprocess.Popen(
            [*command, "--probes", "2", "--html", str(page)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:  # fmt: skip
            is_set(behaviour.hung, "a stream")
            process.send_signal(sent)
            stdout, stderr = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 1, stderr
    lines = stdout.splitlines()
    assert lines[-1] == f"{url}: leaks" and lines[1].split()[:4] == ["cross-tenant", "probe", "3", "leaks"]
    assert "3 cross-tenant probe: 2 of 2 prompts of B were cached for A" in lines
    assert f"not checked: 8 handles, pins: stopped by {named}" in lines
    assert "2 of 2 prompts" in page.read_text("utf-8") and shows_progress_alone(stderr)


def test_an_audit_takes_three_minutes_unless_it_is_thorough(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []

    def run(*_: Any, **named: Any) -> AuditReport:
        seen.append(named)
        return AuditReport("x", "0", {}, (Check(1, "one", Verdict.ISOLATED, "no"),))

    def run_remote(url: str, sides: Any, plan: TimingPlan, **named: Any) -> AuditReport:
        return run(**named, plan=plan)

    monkeypatch.setattr(inprocess, "run", run)
    monkeypatch.setattr(remote, "run", run_remote)
    server = ["--url", "http://127.0.0.1:9", "--key", "a", "--key", "b"]
    for arguments in ([], ["--thorough"], server, [*server, "--thorough"], [*server, "--samples", "50"]):
        assert invoke("audit", "run", *arguments).exit_code == 0
    limits = [each["limit"].seconds for each in seen]
    assert limits == [audit_command.LIMIT_S, None, audit_command.LIMIT_S, None, audit_command.LIMIT_S]
    assert audit_command.LIMIT_S < 180
    assert [each["examples"] for each in seen[:2]] == [200, 2_000]
    assert [(each["plan"].samples, each["plan"].margin) for each in seen[2:]] == [
        (1_200, 0.05), (7_200, 0.02), (50, 0.05),
    ]  # fmt: skip


@pytest.mark.parametrize("as_json", [False, True])
def test_progress_without_a_terminal(as_json: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line when a check begins and every ten seconds. With --json only after half a minute."""
    clock = ManualClock()
    monkeypatch.setattr(audit_command, "monotonic", clock)
    told: list[str] = []
    monkeypatch.setattr(audit_command.click, "echo", lambda text, err: told.append(text))
    with audit_command._phases(audit_command.JSON_QUIET_S if as_json else 0.0) as progress:
        progress("pins", 0, 1)
        for done in range(1, 46):
            clock.advance(1.0)
            progress("lives", done, 45)
    late = [f"audit: lives: {done} of 45" for done in (30, 40)]
    early = ["audit: pins", *(f"audit: lives: {done} of 45" for done in (1, 11, 21, 31, 41))]
    assert told == (late if as_json else early)


def test_audit_refuses_an_unknown_key(live: Running) -> None:
    line = complaint(run("audit", "run", "--url", live.url, "--key", "wrong", "--key", "demo-globex"), 5)
    assert "401" in line


def test_bench_ttft_measures_a_service(live: Running) -> None:
    before = live.acme.get("/v1/stats").json()["resident_blocks"]
    done = run("bench", "ttft", "--url", live.url, "--tokens", "300", "--pairs", "2", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["pairs"] == 2 and result["prompt_tokens"] >= 300 and result["same_text"]
    assert result["prompt_tokens"] - 32 <= result["cached_tokens"] < result["prompt_tokens"]
    assert live.acme.get("/v1/stats").json()["resident_blocks"] <= before


def test_bench_ttft_starts_a_service_itself() -> None:
    done = run("bench", "ttft", "--tokens", "200", "--pairs", "1", RADIXKV_THREADS="1")
    assert done.returncode == 0 and "median" in done.stdout, done.stderr


def test_bench_index_and_fork() -> None:
    index = run(
        "bench", "index", "--workload", "unique", "--limit", "20", "--num-blocks", "20000", "--no-figures", "--json"
    )  # fmt: skip
    assert json.loads(index.stdout)["benchmark"] == "index", index.stderr
    fork = run("bench", "fork", "--num-layers", "1", "--num-pairs", "1", "--repeats", "1")
    assert "fork_blocks" in fork.stdout, fork.stderr
    kernels = run("bench", "kernels")
    assert "fork_blocks" in kernels.stdout, kernels.stderr
