"""The run's secret on disk: for its user alone."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from paceline.errors import UsageError
from paceline.wires import secret


@pytest.mark.parametrize("umask", [0, 0o022, 0o077, 0o777])
def test_it_is_for_its_user_alone_whatever_the_umask(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        made = secret.make(tmp_path / "secret")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "secret").stat().st_mode) == 0o600
    assert len(made) == 32 and secret.read(tmp_path / "secret") == made


def test_each_is_another_and_none_is_overwritten(tmp_path: Path) -> None:
    assert secret.make(tmp_path / "one") != secret.make(tmp_path / "two")
    with pytest.raises(FileExistsError):
        secret.make(tmp_path / "one")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileExistsError):
        secret.make(tmp_path / "link")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
def test_one_that_others_can_read_is_none(tmp_path: Path, mode: int) -> None:
    secret.make(tmp_path / "secret")
    (tmp_path / "secret").chmod(mode)
    with pytest.raises(UsageError, match="open to others: chmod 600"):
        secret.read(tmp_path / "secret")


@pytest.mark.parametrize("text", ["", "zz", "00" * 31, "00" * 33])
def test_what_is_no_secret_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "secret"
    path.touch(0o600)
    path.write_text(text)
    with pytest.raises(UsageError, match="holds no secret"):
        secret.read(path)


def test_none_at_all(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot read the run's secret .*: No such file"):
        secret.read(tmp_path / "none")
