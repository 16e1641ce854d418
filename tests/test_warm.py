"""A run whose nursery is a fork of a warm process is the run that it is on a bare machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.launching import BODY, HEAD, launch
from tests.warm import alike

pytestmark = pytest.mark.usefixtures("warm")

TELLS = """
import json, os, sys
nursery = os.getppid()
said = lambda name, pid="self": open(f"/proc/{pid}/{name}", "rb").read().strip(b"\\0").split(b"\\0")
made_by = int(open(f"/proc/{nursery}/stat").read().rsplit(")", 1)[1].split()[1])
world = dict(
    environment={name: value for name, value in os.environ.items()},
    seen=sorted(said("environ", nursery)),
    command=[word for word in said("cmdline") if not word.isdigit()],
    path=sys.path, folder=os.getcwd(), executable=sys.executable, flags=sys.flags, python=sys.orig_argv,
    descriptors=[os.readlink(fd).split(":")[0] for fd in map("/proc/self/fd/{}".format, range(64)) if os.path.islink(fd)],
    signals=[line for line in open("/proc/self/status") if line.startswith(("SigB", "SigI", "SigC"))],
    limits=open("/proc/self/limits").read(),
    umask=os.umask(0o22), session=os.getsid(nursery) == nursery, network=os.stat("/proc/self/ns/net").st_ino,
)
"""
ENDS = """
if run.is_main:
    (run.dir / "world.json").write_text(json.dumps(world, default=str))
    (run.dir / "made_by").write_bytes(b" ".join(said("cmdline", made_by)))
"""


def world_of(folder: Path, name: str) -> tuple[str, dict[str, Any], str]:
    done = launch(folder, TELLS + HEAD + BODY + ENDS, "-n", "2", name=name)
    weights = done.weights
    world = (done.folder / "world.json").read_text().replace(f"runs/{name}", "runs/NAME")
    return weights, json.loads(world), (done.folder / "made_by").read_text()


def test_the_fork_is_as_a_nursery_that_was_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights, world, made_by = world_of(tmp_path, "warm")
    assert "tests.warm" in made_by, made_by
    monkeypatch.setenv("BARE", "this test's")
    bare_weights, bare_world, made_by = world_of(tmp_path, "bare")
    assert "paceline.cluster.agent" in made_by, made_by
    assert weights == bare_weights
    for each in (world, bare_world):
        each["environment"].pop("BARE", None)
        each["environment"].pop("PACELINE_TICKET")
        each["seen"] = [word for word in each["seen"] if "BARE=" not in word and "PACELINE_NURSERY=" not in word]
    assert world == bare_world


def test_it_stands_in_only_where_imports_would_have_come_to_the_same() -> None:
    own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": "a", "TESTS_WARM_ROOM": " "}
    assert alike(own, {"OMP_NUM_THREADS": "1", "PYTHONPATH": "a", "PACELINE_NURSERY": "secret"})
    for other in ({"OMP_NUM_THREADS": "2", "PYTHONPATH": "a"}, {"OMP_NUM_THREADS": "1"}, {**own, "LD_PRELOAD": "x"}):
        assert not alike(own, other)
