"""For every test: nothing may leak, no run may stay current, and random numbers can be drawn again."""

from __future__ import annotations

import atexit
import os
import random
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from paceline.cluster.store import runtime_folder
from tests.alone import Alone
from tests.end_to_end import launching
from tests.etcd import Etcd
from tests.forked import Template
from tests.leaks import GRACE_S, Held, end_processes_of, leaked
from tests.warm import Warm

_ON_CI = os.environ.get("CI", "").lower() in ("1", "true", "yes")
settings.register_profile(
    "paceline",
    deadline=None,
    derandomize=_ON_CI,
    max_examples=60,
    database=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("paceline")
_SEED = pytest.StashKey[int]()
_BARRED = pytest.StashKey[int]()
# A run is four processes, and each would compile Paceline anew: a tenth of a launch (measured).
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell's background jobs have it, and hand down
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """One seed for the session, chosen here unless --hypothesis-seed gives it; hypothesis uses it too."""
    given = getattr(config.option, "hypothesis_seed", None)
    chosen = given if given is not None else "0" if _ON_CI else str(random.SystemRandom().randrange(1 << 31))
    if given is None and not _ON_CI:
        config.option.hypothesis_seed = chosen
    config.stash[_SEED] = int(chosen) if chosen.isdigit() else 0


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A user without root has all other tests; CI must have all."""
    barred = [item for item in items if item.get_closest_marker("needs_root")] if os.geteuid() and not _ON_CI else []
    config.stash[_BARRED] = len(barred)
    if barred:
        items[:] = [item for item in items if item not in barred]
        config.hook.pytest_deselected(items=barred)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.stash.get(_BARRED, 0):
        terminalreporter.write_line(
            f"LEFT OUT: {config.stash[_BARRED]} tests of several machines, which need root for network namespaces "
            "(as root: python -m pytest -m needs_root)",
            yellow=True,
        )
    terminalreporter.write_line(_seed_words(config))


def _seed_words(config: pytest.Config) -> str:
    return f"seed {config.stash[_SEED]} (again with --hypothesis-seed={config.stash[_SEED]})"


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """The session's seed, printed where the test fails."""
    print(_seed_words(request.config))
    return request.config.stash[_SEED]


@pytest.fixture(scope="session")
def etcd() -> Iterator[Etcd]:
    """One server for all tests that leave it alone; each run has keys of its own."""
    with Etcd() as server:
        yield server


@pytest.fixture(scope="session")
def alone() -> Iterator[Alone]:
    """Runs a script as plain `python` would, in a moment."""
    host = Alone()
    yield host
    host.close()


@pytest.fixture(scope="session")
def warm(own_runtime_folder: None) -> Iterator[None]:
    """Runs start in a moment: their nurseries are forks of a process that has imported torch, and their commands and
    agents of one that has imported them."""
    if os.environ.get("BARE"):
        yield
        return
    host = Warm(launching.environment())
    launching.warm_variables.update(host.variables)
    template = Template(launching.environment())
    yield
    template.close()
    launching.warm_variables.clear()
    host.close()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may keep a server waiting for longer than a leader can: for tests that are not about that."""
    monkeypatch.setattr("paceline.cluster.gateway.TRY_S", 20.0)
    monkeypatch.setattr("paceline.cluster.gateway.TOTAL_S", 60.0)


def forget_run() -> None:
    """A run that a test entered in this process: the next test must be able to enter its own."""
    module = sys.modules.get("paceline.run")
    run = getattr(module, "current", None)
    if module is None or run is None:
        return
    atexit.unregister(run.finish)
    module.current = None


@pytest.fixture(autouse=True, scope="session")
def own_runtime_folder() -> Iterator[None]:
    """Runs of this test process keep their stores where no other test process looks for what is left."""
    before = os.environ.get("XDG_RUNTIME_DIR")
    own = tempfile.mkdtemp(prefix=f"tests-of-paceline-{os.getpid()}-", dir=runtime_folder())
    os.environ["XDG_RUNTIME_DIR"] = own
    yield
    shutil.rmtree(own)
    del os.environ["XDG_RUNTIME_DIR"]
    if before is not None:
        os.environ["XDG_RUNTIME_DIR"] = before


@pytest.fixture(autouse=True)
def nothing_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails the test that leaves a process, a socket, a memfd, a thread or a file in memory behind."""
    before, hook = Held.now(), sys.excepthook
    yield
    forget_run()
    sys.excepthook = hook
    folder = request.node.funcargs.get("tmp_path")
    found = end_processes_of(folder, GRACE_S) if folder is not None else []
    found += leaked(before)
    if found:
        pytest.fail("the test left behind:\n  " + "\n  ".join(found), pytrace=False)
