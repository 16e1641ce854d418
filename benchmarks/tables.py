"""Lines that go to the terminal and to a file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path


def teller(path: str) -> Callable[[str], None]:
    """Prints lines, each at once; into this file as well, if it has a name."""
    if path:
        Path(path).write_text("")

    def tell(line: str) -> None:
        print(line, flush=True)
        if path:
            with open(path, "a") as file:
                file.write(f"{line}\n")

    return tell
