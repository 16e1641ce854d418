"""Notebooks: `%load_ext paceline`, then `%%paceline -n 4` runs a cell as a script with four workers."""

from __future__ import annotations

import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from paceline.errors import UsageError


def run_cell(line: str, cell: str) -> int:
    """Write the cell to a file and train it like any script; its output streams into the notebook."""
    try:
        flags = shlex.split(line)
    except ValueError as error:
        raise UsageError(f"%%paceline {line}: {error}") from None
    with tempfile.TemporaryDirectory(prefix="paceline-cell-") as folder:
        script = Path(folder) / "cell.py"
        script.write_text(cell)
        command = [sys.executable, "-P", "-m", "paceline", "run", *flags, str(script)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert process.stdout is not None
        with process.stdout:
            try:
                for text in process.stdout:
                    sys.stdout.write(text)
                    sys.stdout.flush()
            except KeyboardInterrupt:
                process.send_signal(2)
        return process.wait()


def register(shell: Any) -> None:
    def paceline(line: str, cell: str) -> None:
        """%%paceline [flags of `paceline run`]: run this cell as a script."""
        code = run_cell(line, cell)
        if code:
            sys.stderr.write(f"paceline: the cell ended with exit code {code}\n")

    shell.register_magic_function(paceline, magic_kind="cell")
