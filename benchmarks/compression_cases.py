"""The runs of benchmarks.compression: their rows, plans and predictions, and the processes that train them in turns."""

import json
import multiprocessing
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.processes import ROOT, SCRATCH, run_stage
from benchmarks.train_cases import generated_rows
from lean_finetune.config.load import load_params, with_flags
from lean_finetune.config.schema import Params
from lean_finetune.core.atomic_files import read_json
from lean_finetune.memory.predict.peak import predict
from lean_finetune.memory.predict.traced_step import TracedModel, traced_steps
from lean_finetune.memory.trace.setting import Setting
from lean_finetune.model.model_config import read_config
from lean_finetune.plan.batch_plan import Plan, worst_steps
from lean_finetune.plan.optimizer_steps import read_index
from lean_finetune.plan.planner import PlanSettings
from lean_finetune.step.batch_stream import load
from lean_finetune.step.loss import summed_loss
from lean_finetune.step.step_loss import TokenLoss
from lean_finetune.step.token_rows import TokenRows, read_lengths
from lean_finetune.train.heldout_loss import heldout_batches
from lean_finetune.train.monitor.measured_peak import LOAD, make_meter
from tests.kit.estimate_cpu import CPU, CPU_TARGET
from tests.kit.loaded import load_model
from tests.kit.specs import Trainer
from tests.kit.write_params import write_params

MODEL = ROOT / "lean_finetune/tiny"
REAL_ROWS = ROOT.parent / "shared/data/alpaca_en_demo.json"
"""A sample of Alpaca beside the checkout; no part of it."""
MAX_LENGTH = 128
"""Short, so that micro-batches of any size are nearly full."""
LR = 3e-3
"""What train.lr: auto is for adapters of a model of this size."""
THREADS = 1
HELDOUT_TOKENS = 4096
"""Of a batch of held-out rows: the same for all runs."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run: the overrides that make it."""

    name: str
    flags: Sequence[str] = ()
    max_tokens: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Planned:
    """A run before its training."""

    case: Case
    setting: Setting
    plan: Plan
    predicted_bytes: int


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What a run's process found."""

    counted_bytes: int
    heldout_loss: float


@dataclass(frozen=True, kw_only=True, eq=False)
class Rows:
    """The directory with the rows' tokens, and the parameters of all runs."""

    directory: Path
    params: Params
    source: str
    """What the rows are."""

    @classmethod
    def prepared(cls, count: int, tokens_per_step: int) -> "Rows":
        """Write the rows, pin and tokenize them: real ones where they are, else generated ones."""
        directory = (SCRATCH / "runs/compression").resolve()
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        if REAL_ROWS.exists():
            name, source = "rows.json", f"first {count} of {REAL_ROWS.name}"
            shutil.copy(REAL_ROWS, directory / name)
        else:
            name, source = "rows.jsonl", f"{count} generated ({REAL_ROWS} is missing)"
            text = "".join(json.dumps(row) + "\n" for row in generated_rows(count))
            (directory / name).write_text(text, encoding="utf-8")
        changes = {
            "model.name": "tiny",
            "data.source": name,
            "data.max_rows": count,
            "data.max_length": MAX_LENGTH,
            "data.heldout_fraction": 0.2,
            "train.method": "lora",
            "train.precision": "fp32",
            "train.epochs": 1,
            "train.tokens_per_step": tokens_per_step,
            "run.progress": False,
        }
        write_params(directory, changes)
        for stage in ("pin data", "pin model", "tokenize"):
            run_stage(stage, directory)
        return cls(directory=directory, params=load_params(directory / "params.yaml"), source=source)

    def planned(self, case: Case) -> Planned:
        """Plan and predict a run, as stages bucket and estimate do."""
        p = with_flags(self.params, [*case.flags, f"bucket.max_tokens={case.max_tokens}"])
        path = self.directory / "data/tokens/train-index.arrow"
        settings = PlanSettings.from_params(p)
        plan, lengths = settings.plan(read_index(path, settings.weights)), read_lengths(path)
        setting = Setting(train=p.train)
        steps = traced_steps(plan, lengths, tiled=False, windowed=False, chunk=0)
        peak = predict(TracedModel(read_config(MODEL), setting, CPU_TARGET), steps).peak
        return Planned(case=case, setting=setting, plan=plan, predicted_bytes=peak.bytes)

    def tokens_of_steps(self, plan: Plan) -> list[int]:
        """Tokens of each step without padding."""
        lengths = read_lengths(self.directory / "data/tokens/train-index.arrow")
        return [sum(int(lengths[batch.rows].sum()) for batch in step) for step in plan.steps]


class TrainingProcess:
    """A process that trains a run, one step when asked."""

    def __init__(self, rows: Rows, planned: Planned):
        """Start it; it loads the model in its first step."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])  # Imported once for all of them.
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(rows.directory, planned, other), daemon=True)
        self._process.start()
        other.close()  # So that reading from a process that failed raises EOFError.

    def step(self) -> float | None:
        """Train one step; its CPU seconds, or None where memory is measured, which takes time itself."""
        self._pipe.send("step")
        seconds: float | None = self._pipe.recv()
        return seconds

    def finish(self) -> Trained:
        """Compute the held-out loss, and end the process."""
        self._pipe.send("finish")
        trained: Trained = self._pipe.recv()
        self._process.join()
        return trained


def _serve(directory: Path, planned: Planned, pipe: Connection) -> None:
    """Do what the pipe asks for, in the run's process."""
    torch.set_num_threads(THREADS)
    run = _Run(directory, planned)
    while pipe.recv() == "step":
        pipe.send(run.step())
    pipe.send(run.finish())


class _Run:
    """A run in its process."""

    def __init__(self, directory: Path, planned: Planned):
        self._planned, self._directory = planned, directory
        self._rows = TokenRows(directory / "data/tokens", "train")
        self._pad_id = read_json(directory / "data/tokens/meta.json")["pad_id"]
        self._batches = load(self._rows, planned.plan, pad_id=self._pad_id)
        self._meter = make_meter(CPU)
        self._measured = {*worst_steps(planned.plan, self._rows.lengths)}
        self._trainer: Trainer | None = None
        self._step = 0

    def step(self) -> float | None:
        """Train the next step."""
        micro_batches, number = self._planned.plan.steps[self._step], self._step
        self._step += 1
        batches = [next(self._batches) for _ in micro_batches]
        trained = sum(batch.supervised for batch in micro_batches)
        if number not in self._measured:
            start = time.process_time()
            self._trained().step(batches, trained, self._meter.phase)
            return time.process_time() - start
        with self._meter.window(f"step {number}"):
            self._trained().step(iter(batches), trained, self._meter.phase)
        return None

    def _trained(self) -> Trainer:
        """The model and its optimizer, loaded at the first call."""
        if self._trainer is None:
            setting = self._planned.setting
            with self._meter.phase(LOAD):
                model = load_model(MODEL, setting.train, CPU)
                self._trainer = Trainer.of(model, setting, CPU, scratch=self._directory, lr=LR)
        return self._trainer

    @torch.no_grad()
    def finish(self) -> Trained:
        """The peak, and the loss of held-out rows."""
        model = self._trained().model.eval()
        heldout = TokenRows(self._directory / "data/tokens", "heldout")
        batches = list(heldout_batches(heldout, len(heldout.lengths), HELDOUT_TOKENS, self._pad_id))
        losses: list[Any] = [
            summed_loss(model, batch, TokenLoss(self._planned.setting.train.loss_chunk)).double() for batch in batches
        ]
        counted = self._meter.result().step_peak_bytes
        assert counted is not None
        tokens = np.sum([len(batch.supervised_index_N) for batch in batches])
        return Trained(counted_bytes=counted, heldout_loss=float(sum(losses) / tokens))
