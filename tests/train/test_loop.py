"""The loop over a real plan: neither the layout of rows nor the place of updates changes a loss."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lean_finetune.core.atomic_files import sha256_file
from lean_finetune.core.errors import UserError
from lean_finetune.distributed.sharding_modes import load_parallel
from lean_finetune.pinning.locate import verify_files
from lean_finetune.pinning.model_files import WEIGHTS
from lean_finetune.plan.batch_plan import Plan
from lean_finetune.plan.row_checks import refuse_other_ranks
from lean_finetune.train import loop
from lean_finetune.train.callbacks.callback import EXPERT_COLUMNS
from lean_finetune.train.loop import train
from lean_finetune.train.monitor.measured_peak import make_meter
from tests.kit.estimate_cpu import save_small
from tests.small_model import CPU, spec_of
from tests.train.jobs import Tokens, make_job, plan_of, random_lengths, random_tokens

STEPS, ROWS_A_BATCH = 3, 4


@pytest.fixture(scope="module")
def tokens(tmp_path_factory) -> Tokens:
    return random_tokens(tmp_path_factory.mktemp("tokens"), random_lengths(6, 40, STEPS * 2 * ROWS_A_BATCH), 5)


def two_micro_batches(tokens: Tokens, *, flat: bool) -> Plan:
    """Every row once, two micro-batches a step."""
    return plan_of(tokens[0], np.arange(len(tokens[0])).reshape(STEPS, 2, ROWS_A_BATCH).tolist(), flat=flat)


def losses(directory: Path, tokens: Tokens, plan: Plan, **changes: Any) -> list[Any]:
    """Losses, held-out losses and gradient norms of a run."""
    job = make_job(directory, tokens, plan, loader_threads=0, heldout_rows=5, **changes)
    curves = train(job, make_meter(CPU)).curves
    return [value for row in curves for value in (row["loss"], row.get("heldout_loss"), row["grad_norm"])]


def test_place_and_time_of_updates_do_not_change_results(small_llama: Path, tokens):
    """A learning rate or held-out pass that updates in backward or on the host ignore."""
    two = two_micro_batches(tokens, flat=False)
    plan = Plan.of([replace(two.micro_batch(number), step=number) for number in range(STEPS)])
    full: dict[str, Any] = {"train": spec_of(method="full"), "measured_steps": frozenset({0})}
    found = []
    for in_backward, place in ((False, "none"), (True, "none"), (True, "optimizer")):
        decaying: dict[str, Any] = {"weight_decay": 0.1, "schedule": "cosine", "warmup_fraction": 0.5}
        updates: dict[str, Any] = {"max_grad_norm": None, "optimizer_in_backward": in_backward, "offload": place}
        found.append(losses(small_llama, tokens, plan, **decaying, **updates, **full))
    assert found[0] == found[1] == found[2] and found[0][0] > 1


def test_a_base_that_changes_while_it_is_loaded_is_refused(small_llama: Path, tokens, monkeypatch):
    """It had its pinned hashes before loading, which takes minutes for a large model."""
    weights = small_llama / WEIGHTS
    files = verify_files(small_llama, {WEIGHTS: sha256_file(weights)})
    job = make_job(small_llama, tokens, two_micro_batches(tokens, flat=False), base_files=files)

    def load(*given: Any, **options: Any) -> Any:
        os.utime(weights)
        return load_parallel(*given, **options)

    monkeypatch.setattr(loop, "load_parallel", load)
    with pytest.raises(UserError, match=f"{WEIGHTS} changed while it was read; run `dvc repro` again"):
        train(job, make_meter(CPU))


def test_a_packed_run_has_the_losses_of_the_padded_run(small_llama: Path, tokens):
    """Packing changes speed and memory, never what is learnt."""
    padded, packed = (losses(small_llama, tokens, two_micro_batches(tokens, flat=flat)) for flat in (False, True))
    compared = [(a, b) for a, b in zip(padded, packed, strict=True) if a is not None]
    assert len(compared) == 2 * STEPS + 2
    for a, b in compared:
        assert a == pytest.approx(b, rel=1e-5)


def test_a_plan_for_another_number_of_gpus_is_refused(tokens):
    """One process would train its share of every step only."""
    one = two_micro_batches(tokens, flat=False)
    refuse_other_ranks(one, 1)
    two = Plan.of([one.micro_batch(number) for number in range(len(one))], ranks=2)
    refuse_other_ranks(two, 2)
    with pytest.raises(UserError, match=r"plan\.arrow: .* got a plan for 2 where there are 1; run"):
        refuse_other_ranks(two, 1)


def test_the_curves_of_a_mixture_have_the_load_of_its_experts(tmp_path, small_llama: Path, tokens):
    """Columns without values in the curves of other models, or a load that recomputing layers changes."""
    save_small("Qwen3-MoE", tmp_path)
    loads = []
    for directory, grad_ckpt in ((tmp_path, False), (tmp_path, True), (small_llama, False)):
        job = make_job(directory, tokens, two_micro_batches(tokens, flat=False), train=spec_of(grad_ckpt=grad_ckpt))
        result = train(job, make_meter(CPU))
        loads.append([[row[name] for name in EXPERT_COLUMNS if name in row] for row in result.curves])
    plain, recomputed, none = loads
    assert plain == recomputed and none == [[]] * STEPS
    assert all(1 < busiest <= 4 and 0 <= idle < 0.5 for busiest, idle in plain)
