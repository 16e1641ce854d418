"""The terminal of a run: main's output, progress, notices, the failure last, the final table."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from paceline.wires.board import Phase, Seen

_PLAIN_EVERY_S = 10.0


class Terminal:
    """Everything the user sees while it runs. Output of the script goes to stdout, the rest to stderr."""

    def __init__(self, workers: int) -> None:
        self._out = Console(highlight=False, soft_wrap=True)
        self._err = Console(stderr=True, highlight=False, soft_wrap=True)
        self._host = socket.gethostname().split(".")[0]
        self._workers = workers
        self._live: Live | None = None
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
            console=self._err,
        )
        self._task = self._progress.add_task("starting", total=None, rate="")
        self._own_bar = False
        """The script draws a bar of its own (it uses \\r): ours keeps out of its way."""
        self._last_plain = time.monotonic()
        self._seen: tuple[float, int, int] | None = None
        """When samples were counted last, and how many; from the first step on, so that no start-up is in it."""
        self._in_rounds = False
        """Samples count where replicas that train apart meet: while they are on their way there, or exchange, the speed stands."""
        self._rate = ""

    def output(self, who: str, line: str) -> None:
        """A line of the script's own."""
        if line.endswith("\r"):
            self._hide_bar()
            self._own_bar = True
            if self._out.is_terminal:
                self._out.file.write(line)
                self._out.file.flush()
            return
        text = line.rstrip("\n")
        prefix = f"{self._host}:{who} │ " if self._workers > 1 else ""
        self._console_for_output().print(f"[dim]{prefix}[/dim]{escape(text)}")

    def _console_for_output(self) -> Console:
        return self._live.console if self._live is not None and self._out.is_terminal else self._out

    def notice(self, text: str) -> None:
        self._err.print(f"[bold]paceline[/bold] {escape(text)}")

    def progress(self, rows: Sequence[Seen]) -> None:
        main = rows[0]
        if main.phase in (Phase.STARTING, Phase.FINISHED) or not main.step:
            return
        now = time.monotonic()
        then, before, step = self._seen = self._seen or (now, main.samples, main.step)
        self._in_rounds |= main.samples == before and main.step > step + 1  # by one: it is just telling
        if now - then >= 1.0 and (main.samples != before or not self._in_rounds):
            self._rate = f"{(main.samples - before) / (now - then):,.0f} samples/s"
            self._seen = (now, main.samples, main.step)
        words = f"epoch {main.epoch + 1}" + (f"  loss {main.metric:.4f}" if main.metric else "")
        if self._err.is_terminal:
            if not self._own_bar:
                self._show_bar()
            total = main.total_steps or None
            self._progress.update(self._task, description=words, completed=main.step, total=total, rate=self._rate)
        elif now - self._last_plain >= _PLAIN_EVERY_S:
            self._last_plain = now
            of = f"/{main.total_steps}" if main.total_steps else ""
            self.notice(f"step {main.step}{of}  {words}  {self._rate}")

    def _show_bar(self) -> None:
        if self._live is None:
            self._live = Live(self._progress, console=self._err, transient=True, refresh_per_second=4)
            self._live.start()

    def _hide_bar(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def failure(self, who: str, text: str, trace: str, log: str) -> None:
        """The cause, and nothing after it."""
        self._hide_bar()
        if trace:
            self._err.print(escape(trace))
        self._err.print(
            f"[bold red]paceline: {escape(who)} {escape(text)}[/bold red]" + (f"  (log: {log})" if log else "")
        )

    def table(self, summary: dict[str, Any], path: str) -> None:
        self._hide_bar()
        table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
        for name, value in summary_rows(summary, path):
            table.add_row(f"[bold]{name}[/bold]", escape(value))
        self._err.print(table)

    def close(self) -> None:
        self._hide_bar()


def summary_rows(summary: dict[str, Any], path: str) -> list[tuple[str, str]]:
    """The final table, as pairs of words. What a run that failed early does not know is left out."""
    split = summary.get("time_split") or {}
    total = sum(split.values()) or 1.0
    rows = [("exit", str(summary.get("exit", "?"))), ("steps", _steps_words(summary))]
    rows += [
        (name, f"{value:.4f}" if isinstance(value, float) else str(value))
        for name, value in (summary.get("metrics") or {}).items()
    ]
    rows += [
        ("speed", _speed_words(summary)),
        ("time", "  ".join(f"{name} {seconds / total:.0%}" for name, seconds in split.items())),
        ("workers", _workers_words(summary)),
        ("recovered", _recovered_words(summary)),
        ("rounds", _rounds_words(summary)),
        ("sent", _sent_words(summary)),
        ("weights", str(summary.get("weights_sha256", ""))),
        ("folder", path),
    ]
    return [(name, value) for name, value in rows if value]


def _steps_words(summary: dict[str, Any]) -> str:
    if "steps" not in summary:
        return ""
    inside = [
        counted(summary[key], word) for key, word in (("epochs", "epoch"), ("samples", "sample")) if key in summary
    ]
    if summary.get("steps_redone"):
        inside.append(f"{counted(summary['steps_redone'], 'step')} trained again")
    return f"{summary['steps']:,}" + (f" ({', '.join(inside)})" if inside else "")


def _speed_words(summary: dict[str, Any]) -> str:
    known = [f"{summary['samples_per_s']:,.0f} samples/s"] if "samples_per_s" in summary else []
    return ", ".join(known + ([f"{summary['wall_s']:.1f} s in all"] if "wall_s" in summary else []))


def _workers_words(summary: dict[str, Any]) -> str:
    known = [counted(summary[f"{word}s"], word) for word in ("worker", "server", "slot") if summary.get(f"{word}s")]
    known += [f"{counted(summary['threads'], 'thread')} each"] if "threads" in summary else []
    known += [str(summary["strategy"])] if "strategy" in summary else []
    known += [f"{counted(len(summary['dropped']), 'replica')} dropped"] if summary.get("dropped") else []
    return ", ".join(known)


def _recovered_words(summary: dict[str, Any]) -> str:
    """
    >>> _recovered_words({"recoveries": 1, "longest_gap_s": 0.5637, "median_step_s": 0.0844})
    'from 1 lost worker; longest gap between steps 0.564 s, a step 0.0844 s'
    """
    lost = [counted(summary[key], f"lost {word}") for key, word in _LOST.items() if summary.get(key)]
    if not lost:
        return ""
    gaps = (("longest_gap_s", "longest gap between steps"), ("median_step_s", "a step"))
    known = [f"{words} {summary[key]:.3g} s" for key, words in gaps if summary.get(key)]
    return f"from {', '.join(lost)}" + (f"; {', '.join(known)}" if known else "")


_LOST = {"recoveries": "worker", "servers_lost": "server", "coordinators_lost": "coordinator"}


def _rounds_words(summary: dict[str, Any]) -> str:
    """
    >>> _rounds_words({"rounds": 3, "participants": {"1": 1, "2": 2}, "drift": {"last": 0.01, "mean": 0.02, "most": 0.03}})
    '3, of 1 to 2 participants; drift at last 0.01, mean 0.02, at most 0.03'
    """
    taken, drift = summary.get("participants") or {}, summary.get("drift") or {}
    if not summary.get("rounds"):
        return ""
    words = [f"{summary['rounds']:,}"]
    if taken:
        few, many = min(map(int, taken)), max(map(int, taken))
        words[0] += f", of {few} to {many} participants" if few < many else f", of {counted(many, 'participant')}"
    if drift:
        words.append("drift " + ", ".join(f"{name} {drift[key]:.3g}" for key, name in _DRIFTS.items()))
    return "; ".join(words)


_DRIFTS = {"last": "at last", "mean": "mean", "most": "at most"}


def _sent_words(summary: dict[str, Any]) -> str:
    """
    >>> _sent_words({"wire_bytes": 1_490_000, "compression": 0.2541, "copied_bytes": 18_120_000})
    '1.5 MB, 0.254 of what fp32 would be; copies of states 18.1 MB'
    """
    sent, copied, coded = summary.get("wire_bytes"), summary.get("copied_bytes"), summary.get("compression")
    # What a worker has sent is gone with it; and a resumed run begins to count anew.
    others = summary.get("terms", 1) > 1 or summary.get("resumed")
    who = " by the workers there at the end" + ", since the resume" * bool(summary.get("resumed")) if others else ""
    words = f"{sent / 1e6:,.1f} MB{who}" if sent else ""
    words += f", {coded:.3g} of what fp32 would be" if words and coded is not None else ""
    return "; ".join(part for part in (words, f"copies of states {copied / 1e6:,.1f} MB" if copied else "") if part)


def counted(number: int, word: str) -> str:
    return f"{number:,} {word}" + ("" if number == 1 else "s")
