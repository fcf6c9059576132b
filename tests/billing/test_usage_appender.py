"""``usage_appender``: private files, rotation by hour and size, and writes that fail half-way."""

from __future__ import annotations

import errno
import stat
from pathlib import Path

import pytest

from radixkv.billing.mac_chain import parsed
from radixkv.errors import ConfigError
from tests.billing.support import HOUR, KEY, appending, checked, found, log_files, record, written
from tests.tiers.support import FaultyFiles, failing


def test_folder_and_files_are_private(tmp_path: Path) -> None:
    written(tmp_path / "log", [1], key=None)
    assert stat.S_IMODE((tmp_path / "log").stat().st_mode) == 0o700
    names = {path.name for path in (tmp_path / "log").iterdir()}
    assert names == {"lock", "head", "key", "usage-00000001-2026013109.jsonl"}
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "log").iterdir()} == {0o600}


def test_a_folder_that_is_not_ours_is_refused(tmp_path: Path) -> None:
    for name, mode in (("open", 0o755), ("foreign", 0o700)):
        (tmp_path / name).mkdir(mode=mode)
    (tmp_path / "foreign" / "thesis.tex").touch()
    (tmp_path / "link").symlink_to(tmp_path / "foreign")
    for name, problem in (("open", "0700"), ("foreign", "usage log"), ("link", "symbolic link")):
        with pytest.raises(ConfigError, match=problem), appending(tmp_path / name):
            pass
    with (
        appending(tmp_path / "log"),
        pytest.raises(ConfigError, match="no other process"),
        appending(tmp_path / "log"),
    ):
        pass


def test_a_file_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    with appending(tmp_path / "log") as appender:
        (tmp_path / "log" / "usage-00000001-2026013109.jsonl").symlink_to(victim)
        with pytest.raises(OSError) as error:
            appender.append([record()], HOUR)
    assert error.value.errno == errno.ELOOP and victim.read_text() == "precious"


def test_a_new_hour_and_a_full_file_begin_a_new_file(tmp_path: Path) -> None:
    with appending(tmp_path / "log", max_bytes=700) as appender:
        for number, time_s in enumerate([HOUR, HOUR + 1, HOUR + 3_599, HOUR + 3_600, HOUR + 7_300]):
            appender.append([record(number)], time_s)
    names = [path.name for path in log_files(tmp_path / "log")]
    assert [name[6:25] for name in names][-2:] == ["00000003-2026013110", "00000004-2026013111"]
    assert names[0] == "usage-00000001-2026013109.jsonl" and names[1].endswith("09.jsonl")
    ends = [
        parsed(path.read_bytes().splitlines(keepends=True)[-1]).fields["end"]
        for path in log_files(tmp_path / "log")
    ]
    assert ends == ["rotated", "rotated", "rotated", "closed"]
    assert checked(tmp_path / "log").verdict == "intact"
    assert [each.counts.read for each in found(tmp_path / "log")] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("most", [1, 7, 100])
@pytest.mark.parametrize("calls", ["write", "open", "write open truncate"])
@pytest.mark.parametrize("after", range(6))
def test_a_write_that_fails_at_any_place_is_repeated_in_the_same_place(
    tmp_path: Path, calls: str, after: int, most: int
) -> None:
    files = FaultyFiles(most=most)
    refused = 0
    with appending(tmp_path / "log", max_bytes=600, files=files) as appender:
        for number in range(6):
            files.before = failing(
                calls, errno.ENOSPC, times=2, after=after * 40 // most if most > 1 else after
            )
            for _ in range(4):
                try:
                    appender.append([record(number)], HOUR + 1_800 * number)
                    break
                except OSError as error:
                    assert error.errno == errno.ENOSPC
                    refused += 1
            files.before = lambda call: None
    assert [each.counts.read for each in found(tmp_path / "log")] == list(range(6))
    check = checked(tmp_path / "log")
    assert check.verdict == "intact" and check.is_ended, check.problems


def test_only_what_was_waited_for_is_in_the_head(tmp_path: Path) -> None:
    with appending(tmp_path / "log") as appender:
        appender.append([record(1)], HOUR)
        positions = appender.positions()
        assert appender.positions() == []
        assert parsed((tmp_path / "log" / "head").read_bytes()).n == 1, "the next line is the first"
        appender.append([record(2)], HOUR)
        appender.synced(positions)
        head = parsed((tmp_path / "log" / "head").read_bytes())
        assert head.n == 3, "behind the header and the first record"
    assert parsed((tmp_path / "log" / "head").read_bytes()).n == 6, "behind the sum and the end too"
    assert checked(tmp_path / "log", KEY).verdict == "intact"
