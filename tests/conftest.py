"""Fixtures shared by all tests."""

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:
    # Before torch is imported. Otherwise every worker would use all cores.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# Stages that a test runs are not those of a DVC run that started the tests.
for name in ("DVC_STAGE", "DVC_ROOT"):
    os.environ.pop(name, None)

# A shell ignores Ctrl-C for what it runs in the background, and processes that tests start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).resolve().parents[1]
PUBLIC_DATA = ROOT.parent / "shared" / "data"


def pytest_collection() -> None:
    """Collect no garbage while tests are imported: nothing is garbage, and looking for it takes seconds."""
    gc.disable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest module, so that one worker runs it while another runs the rest."""
    items.sort(key=lambda item: "pipeline" not in item.path.parts)


def pytest_collection_finish() -> None:
    """Let few collections start by themselves: one at the end of each test is enough."""
    collect_and_freeze()
    gc.set_threshold(20_000, 20, 20)
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Iterator[None]:
    """Free a test's cycles when it ends, and let collections of later tests skip what stays."""
    try:
        return (yield)
    finally:
        collect_and_freeze()


def collect_and_freeze() -> None:
    """Let the garbage collector skip what exists: a collection takes up to 2 s otherwise, and tests make thousands."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def repo_root() -> Path:
    """The checkout under test."""
    return ROOT


@pytest.fixture(scope="session")
def tiny_dir() -> Path:
    """The shipped model directory."""
    return ROOT / "lean_finetune" / "tiny"


@pytest.fixture(scope="session")
def public_data() -> Path:
    """A directory with the demo data sets alpaca_en_demo.json and glaive_toolcall_en_demo.json."""
    if not PUBLIC_DATA.is_dir():
        pytest.skip(f"no public demo data at {PUBLIC_DATA}")
    return PUBLIC_DATA


@pytest.fixture(scope="session")
def small_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a random two-layer Llama."""
    from tests.small_model import save_small_llama

    return save_small_llama(tmp_path_factory.mktemp("small_llama"))
