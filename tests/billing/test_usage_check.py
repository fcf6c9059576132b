"""``usage_check``: what a crash leaves is told apart from what somebody changed, removed or cut off."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.billing.mac_chain import MAX_LINE_BYTES, START, Link, parsed, sealed
from radixkv.billing.usage_check import MOST_PROBLEMS, sums, verify
from radixkv.billing.usage_folder import head_of
from radixkv.billing.usage_record import Counts
from radixkv.billing.usage_sums import UsageSums
from radixkv.errors import ConfigError
from radixkv.signing import key_id
from tests.billing.support import HOUR, KEY, appending, checked, found, log_files, record, written

OTHER = b"another key of 32 bytes, for you"


def test_a_whole_log_is_intact(tmp_path: Path) -> None:
    written(tmp_path / "log", range(5))
    written(tmp_path / "log", range(5, 8))
    check = checked(tmp_path / "log")
    assert check.verdict == "intact" and check.is_ended and check.problems == []
    assert (check.num_files, check.num_records) == (2, 8)
    assert [each.counts.read for each in found(tmp_path / "log")] == list(range(8))


def test_a_log_that_is_being_written_is_intact_and_not_ended(tmp_path: Path) -> None:
    with appending(tmp_path / "log") as appender:
        appender.append([record()], HOUR)
        check = checked(tmp_path / "log")
    assert check.verdict == "intact" and not check.is_ended and check.num_records == 1


def test_a_cut_line_is_torn_and_the_next_process_goes_on(tmp_path: Path) -> None:
    with appending(tmp_path / "log") as appender:
        appender.append([record(1)], HOUR)
        appender.synced(appender.positions())
        appender.append([record(2)], HOUR)
        (path,) = log_files(tmp_path / "log")
        content = path.read_bytes()
    path.write_bytes(content[:-7])
    (tmp_path / "log" / "head").write_bytes(_head_before(tmp_path / "log", content))
    assert checked(tmp_path / "log").verdict == "torn"
    written(tmp_path / "log", [3])
    check = checked(tmp_path / "log")
    assert check.verdict == "torn" and check.num_records == 2 and check.is_ended


def _head_before(folder: Path, content: bytes) -> bytes:
    """The head as it was when the first record had been waited for."""
    line = parsed(content.splitlines(keepends=True)[1])
    return head_of(KEY, key_id(KEY).hex(), Link(line.n, line.mac))


@pytest.mark.parametrize("at", range(7))
def test_each_changed_line_is_found(tmp_path: Path, at: int) -> None:
    written(tmp_path / "log", range(4))
    (path,) = log_files(tmp_path / "log")
    lines = path.read_bytes().splitlines(keepends=True)
    assert len(lines) == 7, "a header, four records, their sum and an end"
    lines[at] = lines[at].replace(b'"n":', b'"n": ')
    path.write_bytes(b"".join(lines))
    check = checked(tmp_path / "log")
    assert check.verdict == "tampered" and check.num_tampered == 1, check.problems
    assert check.problems[0].startswith(f"{path.name}:{at + 1}: ")


@pytest.mark.parametrize(
    "change",
    [
        lambda lines: [*lines[:2], *lines[3:]],
        lambda lines: [*lines[:2], lines[3], lines[2], *lines[4:]],
        lambda lines: [*lines[:3], lines[2], *lines[3:]],
        lambda lines: lines[1:],
        lambda lines: [lines[0], *lines],
        lambda lines: [*lines, b"{}\n"],
        lambda lines: [*lines, b"\xff" * (MAX_LINE_BYTES + 5)],
        lambda lines: [*lines, b"[" * 10_000 + b"\n"],
        lambda lines: [*lines, b'{"n":' + b"[" * 5_000 + b',"mac":"' + b"0" * 64 + b'"}\n'],
        lambda lines: [*lines, b'{"n":' + b"9" * 5_000 + b',"mac":"' + b"0" * 64 + b'"}\n'],
        lambda lines: [*lines, b'{"n":true,"mac":"' + b"0" * 64 + b'"}\n'],
    ],
    ids=[
        "removed",
        "moved",
        "repeated",
        "headless",
        "two-headed",
        "foreign",
        "long",
        "deep",
        "deep-mac",
        "huge-number",
        "bool",
    ],
)
def test_lines_that_are_removed_moved_repeated_or_foreign_are_found(
    tmp_path: Path, change: Callable[[list[bytes]], list[bytes]]
) -> None:
    written(tmp_path / "log", range(4))
    (path,) = log_files(tmp_path / "log")
    path.write_bytes(b"".join(change(path.read_bytes().splitlines(keepends=True))))
    assert checked(tmp_path / "log").verdict == "tampered"


@pytest.mark.parametrize("kept", range(7))
def test_a_cut_off_end_is_truncation_not_tampering(tmp_path: Path, kept: int) -> None:
    written(tmp_path / "log", range(4))
    (path,) = log_files(tmp_path / "log")
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:kept]))
    check = checked(tmp_path / "log")
    assert check.verdict == "truncated" and check.num_missing == 7 - kept, check.problems
    written(tmp_path / "log", [9])
    check = checked(tmp_path / "log")
    assert check.verdict == "truncated" and check.num_missing == 7 - kept, "the next process writes it down"


@pytest.mark.parametrize("knows_previous", [True, False])
def test_lines_that_are_missing_at_a_rotation_are_written_down(tmp_path: Path, knows_previous: bool) -> None:
    written(tmp_path / "log", range(4))
    (path,) = log_files(tmp_path / "log")
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:3]))
    written(tmp_path / "log", [9], key=OTHER, previous=[KEY] if knows_previous else [])
    check = verify(tmp_path / "log", [OTHER, KEY])
    assert check.verdict == "truncated" and check.num_missing == 4


@pytest.mark.parametrize("claimed", ["fewer", "as many", "more", "absurdly many"])
@pytest.mark.parametrize("key", [None, KEY])
def test_a_forged_head_hides_no_cut_off_end_from_the_next_process(
    tmp_path: Path, key: bytes | None, claimed: str
) -> None:
    """Who has no key cuts off the end, and writes a head of the same form for what is left."""
    folder = tmp_path / "log"
    written(folder, range(4), key=key)
    (path,) = log_files(folder)
    kept = path.read_bytes().splitlines(keepends=True)[:3]
    path.write_bytes(b"".join(kept))
    last, wrong_key = parsed(kept[-1]), b"a key of 32 bytes of an attacker"
    n = {"fewer": 1, "as many": last.n, "more": last.n + 2, "absurdly many": 10**3_000}[claimed]
    name = key_id((folder / "key").read_bytes() if key is None else key).hex()
    (folder / "head").write_bytes(head_of(wrong_key, name, Link(n, last.mac)))
    keys = [] if key is None else [key]
    assert verify(folder, keys).verdict == "truncated"
    for number in (8, 9):
        written(folder, [number], key=key)
        check = verify(folder, keys)
        assert check.verdict == "truncated" and check.num_missing == max(n - last.n, 1), check.problems
    assert check.num_tampered == 0


def test_a_new_key_without_the_previous_one_counts_the_end_as_cut_off(tmp_path: Path) -> None:
    """A head of an attacker's key looks the same to the process that goes on."""
    written(tmp_path / "log", [1])
    written(tmp_path / "log", [2], key=OTHER)
    written(tmp_path / "log", [3], key=OTHER)
    check = verify(tmp_path / "log", [KEY, OTHER])
    assert check.verdict == "truncated" and check.num_missing == 1 and check.num_records == 3


def test_a_log_with_a_key_of_its_own_goes_on_under_a_secret_and_back(tmp_path: Path) -> None:
    folder = tmp_path / "log"
    written(folder, [1], key=None)
    written(folder, [2], key=KEY)
    check = checked(folder)
    assert check.verdict == "unproven" and check.num_by_folder_key == 4 and not check.problems
    assert verify(folder, [KEY], trusts_folder_key=True).verdict == "intact"
    written(folder, [3], key=None, previous=[KEY])
    assert checked(folder).verdict == "unproven"
    check = verify(folder, [KEY], trusts_folder_key=True)
    assert check.verdict == "truncated" and check.num_records == 3 and check.num_by_folder_key == 8
    (problem,) = check.problems
    place = f"{log_files(folder)[2].name}:1"
    assert problem.startswith(f"{place}: only the folder's key proves it, and a secret the line before it")


def forge(folder: Path, kept: int, *, has_line: bool = False, is_old: bool = False) -> None:
    """What somebody without the secret can do: cut off the end, plant a key, and write under it.

    ``has_line``: a file of records too. ``is_old``: ``head`` says what was true before.
    """
    (path,) = log_files(folder)
    lines = path.read_bytes().splitlines(keepends=True)[:kept]
    path.write_bytes(b"".join(lines))
    (folder / "key").write_text(OTHER.hex())
    last = parsed(lines[1 if is_old else -1])
    link, name = Link(last.n, last.mac), key_id(OTHER).hex()
    if has_line:
        header = {"file": 2, "previous": link.mac.hex(), "key": name}
        fields = {**record(9).fields(), "id": "f" * 24}
        first, link = sealed(OTHER, link, header)
        second, link = sealed(OTHER, link, fields)
        (folder / path.name.replace("-00000001-", "-00000002-")).write_bytes(first + second)
    (folder / "head").write_bytes(head_of(OTHER, name, link))


@pytest.mark.parametrize("is_old", [False, True])
@pytest.mark.parametrize("trusts", [False, True])
def test_a_planted_key_hides_no_cut_off_end(tmp_path: Path, is_old: bool, trusts: bool) -> None:
    """Nor from the next process, which would write a head of its own."""
    folder = tmp_path / "log"
    written(folder, range(4))
    forge(folder, 3, is_old=is_old)
    for number in (8, 9):
        check = verify(folder, [KEY], trusts_folder_key=trusts)
        assert check.verdict == "truncated" and check.num_missing == 1, check.problems
        written(folder, [number])
    assert check.num_by_folder_key == check.num_tampered == 0


def test_lines_under_a_planted_key_are_told_apart(tmp_path: Path) -> None:
    folder = tmp_path / "log"
    written(folder, range(4))
    forge(folder, 3, has_line=True)
    for number in (8, 9):
        check = checked(folder)
        assert check.verdict == "unproven" and check.num_by_folder_key == 2
        assert "only the folder's key" in check.problems[0]
        trusting = verify(folder, [KEY], trusts_folder_key=True)
        assert trusting.verdict == "truncated" and trusting.num_missing, (
            "that key proves no end of the secret's lines"
        )
        written(folder, [number])
    assert verify(folder, []).verdict == "tampered", "the folder's key alone doesn't prove the others"


@pytest.mark.parametrize("is_old", [False, True])
def test_a_planted_file_that_is_removed_again_hides_no_cut_off_end(tmp_path: Path, is_old: bool) -> None:
    """A process that begins between writes nothing under the secret that would prove an earlier end."""
    folder = tmp_path / "log"
    written(folder, range(4))
    forge(folder, 3, has_line=True)
    if is_old:
        (path, _) = log_files(folder)
        line = parsed(path.read_bytes().splitlines(keepends=True)[1])
        (folder / "head").write_bytes(head_of(OTHER, key_id(OTHER).hex(), Link(line.n, line.mac)))
    written(folder, [])
    log_files(folder)[1].unlink()
    for trusts in (False, True):
        assert verify(folder, [KEY], trusts_folder_key=trusts).verdict == "truncated"


def test_a_crash_after_the_change_to_a_secret_counts_nothing_as_missing(tmp_path: Path) -> None:
    """The head is under the secret before the first line is."""
    folder = tmp_path / "log"
    written(folder, [1], key=None)
    with appending(folder) as appender:
        appender.append([record(2)], HOUR)
        files = {path.name: path.read_bytes() for path in folder.iterdir()}
    for name, content in files.items():
        (folder / name).write_bytes(content)
    assert verify(folder, [KEY], trusts_folder_key=True).verdict == "intact"
    written(folder, [3])
    assert verify(folder, [KEY], trusts_folder_key=True).verdict == "intact"


@pytest.mark.parametrize("kind", ["text", "fifo", "link", "folder"])
def test_a_bad_key_file_keeps_no_process_with_a_secret_from_going_on(tmp_path: Path, kind: str) -> None:
    written(tmp_path / "log", [1])
    key = tmp_path / "log" / "key"
    make: dict[str, Callable[[], object]] = {
        "text": lambda: key.write_text("no key"),
        "fifo": lambda: os.mkfifo(key),
        "link": lambda: key.symlink_to("/dev/null"),
        "folder": key.mkdir,
    }
    make[kind]()
    written(tmp_path / "log", [2])
    key.rmdir() if kind == "folder" else key.unlink()
    assert checked(tmp_path / "log").verdict == "intact"


def test_removed_files_are_found_except_the_oldest(tmp_path: Path) -> None:
    for number in range(4):
        written(tmp_path / "log", [number])
    first, second, third, last = log_files(tmp_path / "log")
    first.unlink()
    assert checked(tmp_path / "log").verdict == "intact", "old files may be removed"
    content = third.read_bytes()
    third.unlink()
    assert checked(tmp_path / "log").verdict == "tampered"
    third.write_bytes(content)
    last.unlink()
    assert checked(tmp_path / "log").verdict == "truncated"
    (tmp_path / "log" / "head").unlink()
    assert checked(tmp_path / "log").verdict == "truncated", "the head is gone too"
    assert second.exists()


def test_another_key_and_an_old_head_prove_nothing(tmp_path: Path) -> None:
    written(tmp_path / "log", range(3))
    assert checked(tmp_path / "log", OTHER).verdict == "tampered"
    head = tmp_path / "log" / "head"
    document = json.loads(head.read_bytes())
    head.write_bytes(head.read_bytes().replace(b'"n":%d' % document["n"], b'"n":%d' % (document["n"] + 9)))
    assert checked(tmp_path / "log").verdict == "truncated", "a forged head counts as none"


def test_a_log_goes_on_under_a_new_key(tmp_path: Path) -> None:
    written(tmp_path / "log", [1])
    written(tmp_path / "log", [2], key=OTHER, previous=[KEY])
    assert checked(tmp_path / "log", KEY, OTHER).verdict == "intact"
    assert checked(tmp_path / "log", OTHER).verdict == "tampered", "nobody knows the first file's key"


def test_the_folder_has_a_key_if_no_secret_was_given(tmp_path: Path) -> None:
    written(tmp_path / "log", [1, 2], key=None)
    check = verify(tmp_path / "log", [])
    assert check.verdict == "intact" and check.num_records == 2
    (tmp_path / "log" / "key").write_text("no key")
    with pytest.raises(ConfigError, match="64 hex digits"):
        verify(tmp_path / "log", [])
    (tmp_path / "log" / "key").unlink()
    with pytest.raises(ConfigError, match="no key"):
        verify(tmp_path / "log", [])


def test_links_and_pipes_are_refused(tmp_path: Path) -> None:
    written(tmp_path / "log", [1])
    (tmp_path / "link").symlink_to(tmp_path / "log")
    with pytest.raises(ConfigError, match="symbolic link"):
        checked(tmp_path / "link")
    (path,) = log_files(tmp_path / "log")
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError):
        checked(tmp_path / "log")
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(OSError, match="regular"):
        checked(tmp_path / "log")


def test_few_problems_are_told_of_many(tmp_path: Path) -> None:
    written(tmp_path / "log", range(2))
    (path,) = log_files(tmp_path / "log")
    with path.open("ab") as file:
        file.write(b"x\n" * 500)
    check = checked(tmp_path / "log")
    assert check.num_tampered == 500 and len(check.problems) == MOST_PROBLEMS


def test_ended_files_are_read_by_their_sums_alone(tmp_path: Path) -> None:
    with appending(tmp_path / "log", max_bytes=100_000) as appender:
        for number in range(1_000):
            appender.append([record(number, "acme" if number % 3 else "globex")], HOUR + number)
    with appending(tmp_path / "log") as appender:
        appender.append([record(1_000)], HOUR + 1_000)
        whole, told = UsageSums(10**12), UsageSums(10**12)
        read = list(sums(tmp_path / "log", 0, pytest.fail))
        for each in read:
            told.add(each)
        for each in found(tmp_path / "log"):
            whole.add(each)
    assert told.all(None, 0, 10**12) == whole.all(None, 0, 10**12) and len(whole.all(None, 0, 10**12)) == 2
    assert len(read) == 2 * (len(log_files(tmp_path / "log")) - 1) + 1 < 20
    assert list(sums(tmp_path / "log", HOUR + 3_600, pytest.fail)) == []


def test_sums_that_are_not_those_of_the_records_are_found(tmp_path: Path) -> None:
    with appending(tmp_path / "log") as appender:
        appender.append([record(5)], HOUR)
        (row,) = appender._sums
        appender._sums[row] = Counts(requests=1)
    check = checked(tmp_path / "log")
    assert check.verdict == "tampered" and "sums" in check.problems[0]


@pytest.mark.parametrize(
    "line", [b"", b"\n", b"{}\n", b'{"n":1,"end":"closed","sums_at":%s,"mac":"' + b"0" * 64 + b'"}\n']
)
@pytest.mark.parametrize("at", [b"-1", b"9" * 30, b'"x"', b"null", b"true", b"3"])
def test_a_foreign_end_does_no_harm(tmp_path: Path, line: bytes, at: bytes) -> None:
    written(tmp_path / "log", range(2))
    (path,) = log_files(tmp_path / "log")
    with path.open("ab") as file:
        file.write(line.replace(b"%s", at))
    problems: list[str] = []
    assert len(list(sums(tmp_path / "log", 0, problems.append))) <= 3


def _is_proven(content: bytes) -> bool:
    try:
        return parsed(content).follows(START.mac, KEY)
    except ValueError:
        return False


@given(st.binary(max_size=200), st.integers(0, 200))
def test_no_other_bytes_are_taken_for_a_line(content: bytes, at: int) -> None:
    line, _ = sealed(KEY, START, {"end": "closed"})
    assert _is_proven(line)
    for each in (content, content + b"\n", line[:at] + content + line[at:], line[:at] + content):
        assert _is_proven(each) == (each == line)


def test_a_head_is_no_line_of_the_chain(tmp_path: Path) -> None:
    written(tmp_path / "log", range(2))
    (path,) = log_files(tmp_path / "log")
    with path.open("ab") as file:
        file.write((tmp_path / "log" / "head").read_bytes())
    assert checked(tmp_path / "log").verdict == "tampered"
