"""What campaigns over seeds have in common: their command line, and lines that go to the terminal and to a file."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path


def campaign(about: str | None, seeds: int) -> argparse.ArgumentParser:
    """Which seeds, and where their lines go."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=seeds)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--out", default="", help="a file for what is printed")
    return parser


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
