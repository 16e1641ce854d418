"""Options that several verbs share."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from paceline.watch.folder import DEFAULT_RUNS

F = TypeVar("F", bound=Callable[..., Any])


def runs_option(function: F) -> F:
    return click.option(
        "--runs",
        type=click.Path(path_type=Path),
        default=lambda: os.environ.get("PACELINE_RUNS", DEFAULT_RUNS),
        show_default=DEFAULT_RUNS,
        help="Where run folders are kept.",
    )(function)
