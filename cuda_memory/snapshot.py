"""The command that explains a recording: what filled a GPU's memory in a recording of PyTorch's allocator."""

import os
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cuda_memory.errors import OneLineCommand, UsageFault, UserError
from cuda_memory.gpus import Device, gpu_names, named_gpu
from cuda_memory.terminal import echo_json, echo_text, visible_line
from cuda_memory.user_paths import PATH

if TYPE_CHECKING:
    from cuda_memory.what_if import Outcome, WhatIf


@click.command(cls=OneLineCommand)
@click.argument("file", type=PATH)
@click.option("--gpu", shell_complete=gpu_names, help="Also say which request would have failed on this GPU or size.")
@click.option(
    "--device", type=click.IntRange(min=0), help="Number of the GPU. Default: one that failed, else the fullest."
)
@click.option("--html", type=PATH, help="Also write a page with pictures, which needs no network.")
@click.option("--picture", type=PATH, help="Also write the timeline as an SVG picture.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON with sizes in bytes.")
def snapshot(
    file: Path, gpu: str | None, device: int | None, html: Path | None, picture: Path | None, as_json: bool
) -> None:
    """Explain what fills a GPU's memory, from a recording of PyTorch's allocator.

    FILE is what torch.cuda.memory._dump_snapshot writes (any tool, PyTorch 2.1 or newer), or a table of events. Nothing
    in it is executed. Without a GPU.

    To record, before the model is loaded:

    \b
        torch.cuda.memory._record_memory_history(max_entries=100_000)
        try:
            trainer.train()
        except torch.OutOfMemoryError:
            torch.cuda.memory._dump_snapshot("snapshot.pickle")
            raise

    With several GPUs give each process another file name.

    Prints what failed, what filled memory at that instant or at the peak, what grew from step to step, what other
    settings of the allocator would have reserved, and what would help: the parameter here and in other tools.
    """  # noqa: D301 -- \b is click's mark of lines that it must not join
    from cuda_memory.diagnosis import analyse
    from cuda_memory.page.snapshot_page import write_page, write_picture
    from cuda_memory.recorded_state import contradiction, expands
    from cuda_memory.recording import read_table
    from cuda_memory.snapshot_file import read_snapshot
    from cuda_memory.snapshot_text import snapshot_lines
    from cuda_memory.what_if import first_failure, what_if

    _check_outputs(file, html, picture)
    card = None if gpu is None else _card(gpu)
    is_table = file.name.endswith((".csv", ".csv.gz"))
    found = {each.device: each for each in ((read_table(file),) if is_table else read_snapshot(file))}
    if device is not None and device not in found:
        raise UsageFault(f"--device: {file} has no device {device}; it has {', '.join(map(str, found))}")
    analyses = [
        analyse(replace(each, name=visible_line(each.name))) for each in found.values() if device in (None, each.device)
    ]
    analysis = max(analyses, key=lambda each: (bool(each.failures), each.peak.allocated_bytes))
    recording = analysis.recording
    impossible = contradiction(recording)
    replays = what_if(recording) if impossible is None else None
    if replays is not None:
        analysis = analysis.checked_by(replays)
    on_card = None
    if card is not None and impossible is None:
        on_card = first_failure(recording, card.usable_bytes(0), expandable=expands(recording))
    if picture is not None:
        write_picture(picture, analysis)
    if html is not None:
        write_page(html, analysis, replays or impossible or "", card, on_card)
    if as_json:
        answer = {**analysis.as_json(), "devices": sorted(found), "contradiction": impossible}
        answer |= _replays_as_json(replays, card, on_card or impossible or "")
        echo_json(answer)
        return
    echo_text("\n".join(snapshot_lines(analysis, replays or impossible or "", sorted(found), card, on_card)))


def _replays_as_json(replays: "WhatIf | None", card: Device | None, on_card: "Outcome | str") -> dict[str, Any]:
    """What other settings, and a GPU of another size, would have reserved; `on_card` is the reason if it is unknown."""
    found: dict[str, Any] = {"what_if": None}
    if replays is not None:
        found["what_if"] = asdict(replays)
        found["what_if"]["outcomes"][0]["name"] = "replayed as recorded"
    if card is not None:
        outcome = {"not_replayed": on_card} if isinstance(on_card, str) else asdict(on_card)
        found["on_gpu"] = {"gpu": card.name, "usable_bytes": card.usable_bytes(0), **outcome}
    return found


def _card(gpu: str) -> Device:
    """The GPU of a name, or of a size, which is in GiB without a unit.

    Raises:
        UsageFault: it is unknown, or the size is out of range.
    """
    in_lean_finetune = click.get_current_context().parent is not None
    more = "; all: lean-finetune fit --list-gpus" if in_lean_finetune else ""
    try:
        return named_gpu(f"{gpu}GiB" if re.fullmatch("[0-9.]+", gpu) else gpu, more=more)[0]
    except UserError as error:
        raise UsageFault(str(error)) from None


def _check_outputs(file: Path, html: Path | None, picture: Path | None) -> None:
    """Refuse names that cannot be written, or whose file should not be replaced.

    Raises:
        UsageFault: of the first such name.
    """
    if picture is not None and picture.suffix != ".svg":
        raise UsageFault(f"--picture: must be an .svg file, which every browser opens; got {picture}")
    for option, path in (("--html", html), ("--picture", picture)):
        if path is None:
            continue
        if not path.name:
            raise UsageFault(f"{option}: must be the name of a file; got {path}")
        if not os.path.isdir(path.parent):
            raise UsageFault(f"{option}: the directory {path.parent} does not exist; make it first")
        if os.path.islink(path) or (os.path.exists(path) and not os.path.isfile(path)):
            raise UsageFault(f"{option}: {path} exists and is no regular file; give another name")
        if os.path.exists(path) and os.path.exists(file) and os.path.samefile(path, file):
            raise UsageFault(f"{option}: {path} is the recording itself; give another name")
    if html is not None and picture is not None and html.resolve() == picture.resolve():
        raise UsageFault(f"--picture: must have another name than --html; both are {picture}")
