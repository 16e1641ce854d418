"""What `make` shows of pip: errors, and no warnings."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

MAKEFILE = Path(__file__).resolve().parents[1] / "Makefile"


def test_pip_is_quiet_about_folders_that_are_not_there_and_not_about_errors() -> None:
    flags = set(re.findall(r"-m pip install (-\S+) (--disable-pip-version-check)", MAKEFILE.read_text()))
    (quiet,) = flags
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", *quiet, "--no-index", "there-is-no-such-package"],
        env={**os.environ, "PIP_FIND_LINKS": "/nowhere/to/be/found"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1 and "No matching distribution" in done.stderr
    assert "WARNING" not in done.stderr + done.stdout
