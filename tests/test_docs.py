"""The documents are true where that can be checked: links lead somewhere, examples run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.alone import Alone

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCKS = [
    pytest.param(block, id=f"{page.name}-{number}")
    for page in PAGES
    for number, block in enumerate(re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE))
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    targets = [target for target in re.findall(r"\]\(([^)#\s]+)", text) if "://" not in target]
    missing = [target for target in targets if not (page.parent / target).exists()]
    assert not missing


def headings(page: Path) -> set[str]:
    """As a link names them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    found = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_to_a_heading_lead_to_one(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    links = [link for link in re.findall(r"\]\(([^)\s]*)#([^)\s]+)\)", text) if "://" not in link[0]]
    missing = [
        (target, name) for target, name in links if name not in headings(page.parent / target if target else page)
    ]
    assert not missing


@pytest.mark.parametrize("block", BLOCKS)
def test_examples_run(tmp_path: Path, block: str, alone: Alone) -> None:
    done = alone(tmp_path, block)
    assert done.code == 0, done.err
