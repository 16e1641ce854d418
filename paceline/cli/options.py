"""Options that several verbs share."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from paceline.folder import DEFAULT_RUNS

F = TypeVar("F", bound=Callable[..., Any])
GIVEN = "paceline.given"
"""Where the context has the verb and what follows it, as they were typed."""


def given() -> list[str]:
    known: list[str] = click.get_current_context().meta.get(GIVEN, [])
    return known


def runs_option(function: F) -> F:
    return click.option(
        "--runs",
        type=click.Path(path_type=Path),
        default=lambda: os.environ.get("PACELINE_RUNS", DEFAULT_RUNS),
        show_default=DEFAULT_RUNS,
        help="Where run folders are kept.",
    )(function)
