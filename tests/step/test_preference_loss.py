"""Objectives of preference pairs: their losses and gradients against plain arithmetic, in any micro-batches."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from lean_finetune.config.load import load_params, with_flags
from lean_finetune.config.schema import Train
from lean_finetune.core.errors import UserError
from lean_finetune.islands.objectives.registry import OBJECTIVES
from lean_finetune.objectives.objective import StepTotals
from lean_finetune.preferences.objectives.pair_objectives import Ipo, PairObjective, PairSums
from lean_finetune.rows.answers import Answers, answers_of
from lean_finetune.step.batches import Batch, collate
from lean_finetune.step.loss import causal_lm, decoder_hidden, summed_loss
from lean_finetune.step.parallel_model import ParallelModel
from lean_finetune.step.step_loss import FIGURES, StepGoal, known_figures
from tests.conftest import ROOT
from tests.kit.loaded import load_model
from tests.kit.specs import changed
from tests.small_model import CPU, spec_of

PAIRS = [one for one in OBJECTIVES.values() if isinstance(one, PairObjective) and not one.scored]
LENGTHS = ((9, 12), (16, 7), (11, 11))
"""Tokens of the chosen and of the rejected row of each pair; a prompt of 4 tokens."""


def pair_rows() -> list[tuple[np.ndarray, np.ndarray]]:
    random = np.random.default_rng(1)
    rows = []
    for pair in LENGTHS:
        prompt = random.integers(3, 100, 4)
        for length in pair:
            rows.append((np.concatenate([prompt, random.integers(3, 100, length - 4)]), np.array([[4, length]])))
    return rows


REFERENCE = np.random.default_rng(2).normal(-30, 3, 2 * len(LENGTHS)).astype(np.float32)


def batch_of(pairs: list[int], *, flat: bool = False) -> Batch:
    """A micro-batch of some pairs, padded or joined."""
    numbers = [row for pair in pairs for row in (2 * pair, 2 * pair + 1)]
    rows = [pair_rows()[number] for number in numbers]
    lengths = [len(ids) for ids, _ in rows]
    counts = tuple(length - 4 for length in lengths)
    answers = Answers(
        counts=counts, tokens_R=torch.tensor(counts).float(), reference_R=torch.from_numpy(REFERENCE[numbers])
    )
    return replace(collate(rows, sum(lengths) if flat else max(lengths), 0, flat=flat), parts=(answers,))


def step_of(train: Train) -> StepGoal:
    pairs, chosen = len(LENGTHS), sum(length - 4 for length, _ in LENGTHS)
    totals = StepTotals(count=pairs, better=pairs, worse=pairs, better_tokens=chosen)
    return StepGoal(objective=train.goal, values=train.preference_values, totals=totals)


def gradients(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.double().flatten() for p in model.parameters() if p.grad is not None])


def plain_loss(name: str, logps: list[torch.Tensor], counts: list[int]) -> torch.Tensor:
    """The loss as papers write it, pair by pair, of summed log-probabilities of rows."""
    reference, losses, sft = torch.from_numpy(REFERENCE).double(), [], []
    for n in range(0, len(logps), 2):
        (c, r), (nc, nr), (rc, rr) = logps[n : n + 2], counts[n : n + 2], reference[n : n + 2]
        if name == "dpo":
            losses.append(torch.log1p(torch.exp(-0.1 * ((c - rc) - (r - rr)))))
        elif name == "ipo":
            losses.append(((c - rc) / nc - (r - rr) / nr - 1 / 0.2) ** 2)
        elif name == "simpo":
            losses.append(torch.log1p(torch.exp(-(2.0 * (c / nc - r / nr) - 1.0))))
        elif name == "cpo":
            losses.append(torch.log1p(torch.exp(-0.1 * (c - r))))
        else:
            odds = [torch.exp(one / count) / (1 - torch.exp(one / count)) for one, count in ((c, nc), (r, nr))]
            losses.append(-0.1 * torch.log(torch.sigmoid(torch.log(odds[0] / odds[1]))))
        sft.append(-c)
    weight = 1.0 if name in ("cpo", "orpo") else 0.0
    return torch.stack(losses).mean() + weight * torch.stack(sft).sum() / sum(counts[::2])


@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize("name", [one.name for one in PAIRS])
def test_losses_and_gradients_are_those_of_the_papers(small_llama, name, method):
    """A frozen head scales gradients afterwards, a trained one computes its logits twice: both as autograd does."""
    spec = changed(spec_of(method=method), objective=name)
    model, exact = (load_model(small_llama, spec, CPU) for _ in range(2))
    exact = exact.double()
    batch, lm = batch_of([0, 1, 2]), causal_lm(exact)
    logits = lm.get_output_embeddings()(decoder_hidden(lm, batch.input_ids_BT))
    losses = F.cross_entropy(logits.flatten(0, 1), batch.targets_BT.flatten(), reduction="none", ignore_index=-100)
    logps = list(-losses.view(batch.targets_BT.shape).sum(1))
    expected = plain_loss(name, logps, list(answers_of(batch.parts).counts))
    expected.backward()
    for chunk in (None, 5, 1000):
        model.zero_grad()
        loss = summed_loss(model, batch, step_of(spec).begin(chunk))
        loss.backward()
        assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
        difference = (gradients(model) - gradients(exact)).norm() / gradients(exact).norm()
        assert difference < 1e-5, (chunk, difference)


@pytest.mark.parametrize("name", [one.name for one in PAIRS])
def test_any_division_of_a_step_gives_the_same_loss_gradients_and_figures(small_llama, name):
    spec = changed(spec_of(method="lora"), objective=name)
    model = load_model(small_llama, spec, CPU)
    found: list[tuple[float, torch.Tensor, dict[str, float]]] = []
    for batches in ([batch_of([0, 1, 2])], [batch_of([1]), batch_of([0, 2])], [batch_of([2, 0, 1], flat=True)]):
        model.zero_grad()
        objective, total = step_of(spec).begin(6), 0.0
        for batch in batches:
            loss = summed_loss(model, batch, objective)
            loss.backward()
            total += loss.item()
        found.append((total, gradients(model), known_figures(objective.figures(ParallelModel(model)))))
    for total, gradient, figures in found[1:]:
        assert total == pytest.approx(found[0][0], rel=1e-5)
        assert (gradient - found[0][1]).norm() <= 1e-5 * found[0][1].norm()
        assert figures == pytest.approx(found[0][2], rel=1e-4, abs=1e-5)
    assert set(found[0][2]) == set(FIGURES) - {"kl"}


def sums(**changes: Any) -> PairSums:
    values = {"chosen": -20.0, "rejected": -20.0, "chosen_tokens": 5.0, "rejected_tokens": 5.0}
    values |= {"chosen_reference": -20.0, "rejected_reference": -20.0, **changes}
    return PairSums(**{name: torch.tensor([value]) for name, value in values.items()})


def test_dpo_starts_at_ln_2_and_swapped_answers_flip_the_margin():
    dpo = OBJECTIVES["dpo"]
    assert isinstance(dpo, PairObjective)
    values = dpo.defaults
    assert dpo.losses(sums(), values).item() == pytest.approx(math.log(2))
    (chosen, rejected), (swapped, other) = (dpo.rewards(sums(**{key: -10.0}), values) for key in ("chosen", "rejected"))
    assert (chosen - rejected).item() == pytest.approx(1.0) and (swapped - other).item() == pytest.approx(-1.0)


def test_an_objective_is_one_class_in_one_registry(monkeypatch):
    """CONTRIBUTING.md promises that a new objective is one class and one entry."""

    class SumIpo(Ipo):
        """IPO with sums of log-probabilities instead of means."""

        name = "sum_ipo"

        def losses(self, pairs: PairSums, values: Any) -> torch.Tensor:
            return (pairs.chosen_ratio - pairs.rejected_ratio - 1 / (2 * values["beta"])).square()

    monkeypatch.setitem(OBJECTIVES, "sum_ipo", SumIpo())
    params = with_flags(load_params(ROOT / "params.yaml"), ["train.objective=sum_ipo", "train.preference.beta=0.5"])
    assert params.train.preference_values == {"beta": 0.5}
    with pytest.raises(UserError, match="^train.preference: train.objective=sum_ipo does not read gamma; got 1.0"):
        with_flags(params, ["train.preference.gamma=1.0"])


@pytest.mark.parametrize(
    "flags, message",
    [
        (["train.preference.beta=0.1"], "train.preference: train.objective=sft does not read beta"),
        (["train.objective=dpo", "train.lora.dropout=0.1"], "train.lora.dropout: dropout would change"),
        (
            ["train.objective=dpo", "train.lora.init=loftq"],
            "train.lora.init: starts from another model than",
        ),
        (["train.objective=orpo", "data.over_length=split"], "data.over_length: the parts of an answer are no answer"),
        (["train.objective=dpo", "data.train_on=all"], "data.train_on: preferences are of answers"),
        (["train.objective=grpo"], "train.objective: must be 'sft'"),
    ],
)
def test_settings_that_pairs_exclude_are_refused(flags, message):
    with pytest.raises(UserError, match=f"^{message}"):
        with_flags(load_params(ROOT / "params.yaml"), flags)
