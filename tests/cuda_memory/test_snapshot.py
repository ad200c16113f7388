"""`lean-finetune snapshot`: the verdict first, in plain words; wrong files in one line."""

import json
import os
import pickle
import signal

import pytest
from click.testing import CliRunner

from cuda_memory import snapshot_file
from cuda_memory.snapshot import snapshot
from cuda_memory.terminal import visible
from cuda_memory.units import GIB, MIB, readable_size
from lean_finetune.cli import main
from tests.cuda_memory.snapshots import Snapshot, frame
from tests.cuda_memory.test_diagnosis import MODEL, training


def run(*words: object) -> str:
    """The output of a command that succeeds."""
    result = CliRunner().invoke(main, ["snapshot", *map(str, words)])
    assert result.exit_code == 0, result.output
    return result.output


def refused(*words: object, exit_code: int = 2) -> str:
    result = CliRunner().invoke(main, ["snapshot", *map(str, words)])
    assert result.exit_code == exit_code and result.output.startswith("error: ") and result.output.count("\n") == 1
    return result.output


def test_explains_a_run(tmp_path):
    """The peak by category and line, growth, other settings, and the switch in the words of four tools."""
    path = training(24, leak=MIB).write(tmp_path / "run.pickle")
    text = run(path)
    assert text.startswith("verdict              tensors need")
    assert all(len(line) <= 100 for line in text.splitlines())
    for expected in (
        "16 MiB 1 x me/model.py:30 forward",
        "a leak: memory between steps grows steadily, by 1 MiB a step",
        "22 MiB more in 22 more blocks: me/metrics.py:4 log",
        "expandable_segments:True",
        "largest steps first",
        "smallest known GPU",
        "in lean-finetune: train.loss_chunk=512",
        "Trainer and TRL: use_liger_kernel: true",
    ):
        assert expected in " ".join(text.split()), expected


def test_what_segments_that_expand_save_is_replayed_and_ranked(tmp_path):
    """The cheapest remedy, 6.7 of 58.5 GiB, was not printed. Each request here is larger than what is cached."""
    snapshot = Snapshot()
    for number in range(8):
        snapshot.reserve(200 * number * MIB, (22 + 2 * number) * MIB)
        snapshot.alloc(200 * number * MIB, (21 + 2 * number) * MIB, MODEL)
        snapshot.free(200 * number * MIB)
    words = " ".join(run(snapshot.write(tmp_path / "pieces.pickle")).split())
    # 8 segments of 22 to 36 MiB: 232 MiB. One that expands has two pages of 20 MiB for 35 MiB.
    help_ = words.partition("what would help, the largest saving first ")[2]
    assert help_.startswith("0.1875 GiB less reserved, by replay: reserved but unused"), help_
    assert "up to 35 MiB less: activations" in help_


def test_explains_a_failure(tmp_path):
    snapshot = Snapshot()
    snapshot.reserve(0, 40 * MIB)
    snapshot.alloc(0, 30 * MIB, MODEL)
    snapshot.fail(2 * GIB, 300 * MIB, frame("/home/me/model.py", 21, "forward"))
    text = run(snapshot.write(tmp_path / "oom.pickle"))
    words = " ".join(text.split())
    assert "out of memory: 2 GiB requested in me/model.py:21 forward, 0.293 GiB free; tensors had 30 MiB" in words
    assert "1.707 GiB more free memory would have been enough" in words and "train.grad_ckpt=true" in words
    assert "'as recorded' had a memory limit and lacks the request that failed" in words


def test_a_failure_with_free_memory_is_a_limit_of_the_process(tmp_path):
    """The answer was that 0 B more would have been enough."""
    snapshot = Snapshot()
    snapshot.reserve(0, 20 * GIB)
    snapshot.alloc(0, 20 * GIB, MODEL)
    snapshot.fail(2 * GIB, 50 * GIB, MODEL)
    words = " ".join(run(snapshot.write(tmp_path / "oom.pickle")).split())
    assert "The driver had enough free memory: a limit of the process" in words and "0 B more" not in words


@pytest.mark.parametrize(
    ("request_bytes", "free_bytes", "why"),
    [(0, 0, "a request of 0 B failed"), (512, 2**60, "more memory is free than any GPU has")],
)
def test_impossible_sizes_of_a_failure_are_called_so(request_bytes, free_bytes, why, tmp_path):
    """A failure of 0 B was called fragmentation."""
    snapshot = Snapshot()
    snapshot.reserve(0, 20 * MIB)
    snapshot.fail(request_bytes, free_bytes, MODEL)
    words = " ".join(run(snapshot.write(tmp_path / "oom.pickle", keep=1)).split())
    assert "device 0, 1 event " in words
    assert f"unknown: {why}" in words and "fragmentation" not in words and "e+" not in words


def test_the_recorded_peak_is_the_files(tmp_path):
    """Memory that was reserved and never used is not in a replay: "as recorded" was the replay's figure."""
    snapshot = Snapshot()
    snapshot.reserve(0, 40 * MIB)
    snapshot.reserve(GIB, 10 * GIB)
    snapshot.alloc(0, 30 * MIB, MODEL)
    path = snapshot.write(tmp_path / "s.pickle")
    text = run(path)
    reserved = "10.04 GiB"
    assert any(line.split() == ["as", "recorded", *reserved.split()] for line in text.splitlines()), text
    replayed = json.loads(run(path, "--json"))["what_if"]["outcomes"][0]["peak_reserved_bytes"]
    assert ("the replay differs" in text) == (readable_size(replayed) != reserved)


def test_names_the_request_that_a_smaller_card_fails(tmp_path):
    snapshot = Snapshot()
    for number in range(4):
        snapshot.reserve(number * GIB, GIB)
        snapshot.alloc(number * GIB, GIB, frame("/home/me/model.py", number, "forward"))
    path = snapshot.write(tmp_path / "s.pickle")
    assert "on 3GiB" in run(path, "--gpu", "3") and "me/model.py:2 forward" in run(path, "--gpu", "3GiB")
    assert "fits: 4 GiB reserved" in run(path, "--gpu", "RTX-4090")
    for wrong in ("RTX-9999", "", "auto", "1.2.3", "0"):
        assert refused(path, "--gpu", wrong).startswith("error: --gpu: ")


def test_advises_expandable_segments_only_where_they_reserve_less(tmp_path):
    """Half of the reserved memory is unused; with pages of 20 MiB it would be as much."""
    wasteful, equal = Snapshot(), Snapshot()
    for number in range(4):
        wasteful.reserve(number * GIB, (100 + number) * MIB)
        wasteful.alloc(number * GIB, (100 + number) * MIB, MODEL)
        wasteful.free(number * GIB)
    equal.reserve(0, 20 * MIB)
    equal.alloc(0, 9 * MIB, MODEL)
    assert "train.expandable_segments=true" in run(wasteful.write(tmp_path / "s.pickle"))
    wasteful.fail(500 * MIB, MIB)  # Replays include this request, what was recorded does not.
    assert "train.expandable_segments=true" in run(wasteful.write(tmp_path / "s.pickle"))
    assert "train.expandable_segments=true" not in run(equal.write(tmp_path / "s.pickle"))


def test_json_has_all_in_bytes(tmp_path):
    answer = json.loads(run(training(3).write(tmp_path / "s.pickle"), "--json", "--gpu", "24"))
    assert answer["peak"]["by_category"]["logits"] == 32 * MIB and answer["reserved_peak_bytes"] == 200 * MIB
    assert answer["what_if"]["outcomes"][0]["name"] == "replayed as recorded" and answer["on_gpu"]["why"] is None
    assert len(answer["steps"]["rows"]) == 2 and answer["contradiction"] is None


def test_a_recording_that_contradicts_itself_is_not_replayed(tmp_path):
    content = training(3).content()
    content["device_traces"][0].insert(1, dict(content["device_traces"][0][0]))
    (tmp_path / "s.pickle").write_bytes(pickle.dumps(content))
    options = ("--gpu", "24", "--html", tmp_path / "page.html")
    words = " ".join(run(tmp_path / "s.pickle", *options).split())
    assert "contradicts itself, and sizes can be wrong: event 1 allocates memory that is not free" in words
    assert "on 24GiB not replayed" in words and "On 24GiB: not replayed" in (tmp_path / "page.html").read_text()
    on_gpu = json.loads(run(tmp_path / "s.pickle", "--json", *options))["on_gpu"]
    assert on_gpu["gpu"] == "24GiB" and "event 1" in on_gpu["not_replayed"]


def test_selects_a_device(tmp_path):
    first, second = training(3).content(), Snapshot()
    second.reserve(0, GIB)
    second.alloc(0, GIB, MODEL)
    both = second.content(device=1)
    both["segments"] += first["segments"]
    both["device_traces"][0] = first["device_traces"][0]
    (tmp_path / "s.pickle").write_bytes(pickle.dumps(both))
    assert "device 1, 2 events; --device selects another of 0, 1" in " ".join(run(tmp_path / "s.pickle").split())
    assert "device 0" in run(tmp_path / "s.pickle", "--device", "0")
    assert "has no device 7" in refused(tmp_path / "s.pickle", "--device", "7")


@pytest.mark.parametrize("content", [b"", b"\x80\x04cos\nsystem\n.", b"event,address\n"])
def test_refuses_other_files_in_one_line(content, tmp_path):
    (tmp_path / "s.pickle").write_bytes(content)
    assert "s.pickle" in refused(tmp_path / "s.pickle", exit_code=1)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("--html", "s.pickle"), "is the recording itself"),
        (("--html", "directory"), "is no regular file"),
        (("--html", "fifo"), "is no regular file"),
        (("--html", "link.html"), "is no regular file"),
        (("--html", ""), "must be the name of a file"),
        (("--html", "."), "must be the name of a file"),
        (("--html", "missing/page.html"), "the directory missing does not exist"),
        (("--picture", "timeline.png"), "must be an .svg file, which every browser opens; got timeline.png"),
        (("--html", "a.svg", "--picture", "./directory/../a.svg"), "must have another name than --html"),
        (("--html", "page.html", "--picture", "a.png"), "must be an .svg file"),
    ],
)
def test_output_that_would_replace_something_else_is_refused_first(options, why, tmp_path, monkeypatch):
    """The snapshot of a crash that took hours, replaced by a page about it; one file written, the other refused."""
    monkeypatch.chdir(tmp_path)
    path = training(3).write(tmp_path / "s.pickle")
    before = path.read_bytes()
    (tmp_path / "directory").mkdir()
    os.mkfifo("fifo")
    (tmp_path / "link.html").symlink_to("elsewhere")
    names = sorted(tmp_path.iterdir())
    assert why in refused("s.pickle", *options)
    assert path.read_bytes() == before and sorted(tmp_path.iterdir()) == names


@pytest.mark.parametrize("name", [b"\xff\xfe.pickle", b"\x1b[31m.pickle", "\u202egpj.pickle".encode()])
def test_names_of_files_are_escaped(name, tmp_path):
    """A name that is not UTF-8 ended in a traceback; an escape sequence in one colours or rewrites the terminal."""
    path = training(3).write(tmp_path / os.fsdecode(name))
    text = run(path, "--html", tmp_path / "page.html", "--picture", tmp_path / "timeline.svg")
    shown = visible(os.fsdecode(name))
    assert shown.isascii() and f"{shown}, device 0" in text and text.replace("\n", "").isprintable()
    assert f"<title>GPU memory: {shown}</title>" in (tmp_path / "page.html").read_text()
    assert shown in (tmp_path / "timeline.svg").read_text()
    assert shown in refused(tmp_path / os.fsdecode(name + b"x"), exit_code=1)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_in_one_line(number, tmp_path, monkeypatch):
    """Its class knows nothing of lean_finetune's signals: Ctrl-C said "Aborted!" and gave another exit code."""
    monkeypatch.setattr(snapshot_file, "read_snapshot", lambda _: os.kill(os.getpid(), number))
    result = CliRunner().invoke(main, ["snapshot", str(tmp_path / "s.pickle")])
    assert result.exit_code == 128 + number and result.output.startswith(f"stopped by {number.name}: ")


def test_alone_it_names_no_command_of_lean_finetune():
    """`all: lean-finetune fit --list-gpus`, for somebody who does not have it."""
    words = ["s.pickle", "--gpu", "RTX"]
    with_it, alone = refused(*words), CliRunner().invoke(snapshot, words)
    assert alone.exit_code == 2 and "lean-finetune" not in alone.output
    assert with_it == alone.output.replace("\n", "; all: lean-finetune fit --list-gpus\n")
