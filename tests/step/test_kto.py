"""KTO: its loss and gradients against plain arithmetic, with one divergence for the whole step."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from lean_finetune.config.schema import Train
from lean_finetune.islands.objectives.registry import OBJECTIVES
from lean_finetune.objectives.objective import StepTotals
from lean_finetune.preferences.objectives.kto import Kto
from lean_finetune.rows.answers import Answers
from lean_finetune.step.batches import Batch, collate
from lean_finetune.step.loss import causal_lm, decoder_hidden
from lean_finetune.step.offload.activation_offload import KEPT
from lean_finetune.step.parallel_model import ParallelModel
from lean_finetune.step.step_loss import AnswerLoss, StepGoal, known_figures
from lean_finetune.step.training_step import training_step
from lean_finetune.step.update.loss_scaler import LossScaler
from tests.kit.loaded import load_model
from tests.kit.specs import changed
from tests.small_model import CPU, spec_of

LENGTHS = (9, 16, 11, 7)
"""Tokens of each row; a prompt of 4 tokens."""
DESIRABLE = np.array([True, False, False, True])
RANDOM = np.random.default_rng(1)
PROMPTS = [RANDOM.integers(3, 100, 4) for _ in LENGTHS]
ANSWERS = [RANDOM.integers(3, 100, length - 4) for length in LENGTHS]
OWN = [np.concatenate(both) for both in zip(PROMPTS, ANSWERS, strict=True)]
MISMATCHED = [np.concatenate(both) for both in zip(PROMPTS, ANSWERS[-1:] + ANSWERS[:-1], strict=True)]
REFERENCE = RANDOM.normal(-30, 3, len(LENGTHS)).astype(np.float32)


def batch_of(rows: list[np.ndarray], numbers: list[int], reference: np.ndarray, *, flat: bool = False) -> Batch:
    """A micro-batch of some rows, padded or joined."""
    chosen = [(rows[number], np.array([[4, len(rows[number])]])) for number in numbers]
    lengths = [len(ids) for ids, _ in chosen]
    counts = tuple(length - 4 for length in lengths)
    answers = Answers(
        counts=counts,
        tokens_R=torch.tensor(counts).float(),
        reference_R=torch.from_numpy(reference[numbers]),
        better_R=torch.from_numpy(DESIRABLE[numbers]),
    )
    return replace(collate(chosen, sum(lengths) if flat else max(lengths), 0, flat=flat), parts=(answers,))


def step_of(train: Train) -> StepGoal:
    totals = StepTotals(count=4, better=2, worse=2, better_tokens=1)
    return StepGoal(objective=train.goal, values=train.preference_values, totals=totals)


def spec(method: str, **preference: float) -> Train:
    found = changed(spec_of(method=method, max_grad_norm=None, loss_chunk=5), objective="kto")
    return found.model_copy(update={"preference": found.preference.model_copy(update=preference)})


def exact_logps(model: torch.nn.Module, rows: list[np.ndarray]) -> torch.Tensor:
    lm, batch = causal_lm(model), batch_of(rows, [0, 1, 2, 3], REFERENCE)
    logits = lm.get_output_embeddings()(decoder_hidden(lm, batch.input_ids_BT))
    losses = F.cross_entropy(logits.flatten(0, 1), batch.targets_BT.flatten(), reduction="none", ignore_index=-100)
    return -losses.view(batch.targets_BT.shape).sum(1)


def gradients_of_step(model: torch.nn.Module, train: Train, groups: list[list[int]], references, flat=False):
    """The loss, the gradients and the figures of a training step in these micro-batches."""
    found: list[torch.Tensor] = []
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]

    class Kept(torch.optim.SGD):
        def step(self, closure=None):
            found.extend(parameter.grad.double().flatten() for parameter in trained if parameter.grad is not None)

    own, mismatched = references
    result = training_step(
        ParallelModel(model),
        Kept(trained, lr=0.0),
        (batch_of(OWN, numbers, own, flat=flat) for numbers in groups),
        before=(batch_of(MISMATCHED, numbers, mismatched, flat=flat) for numbers in groups),
        micro_batches=len(groups),
        goal=step_of(train),
        train=train,
        foreach=False,
        phase=lambda name: torch.enable_grad(),
        guard=lambda losses, norm: None,
        scaler=LossScaler(),
        offload=KEPT,
    )
    return result.loss.item(), torch.cat(found), known_figures(result.figures)


@pytest.mark.parametrize("above", [3.0, -3.0], ids=["divergence", "clamped"])
@pytest.mark.parametrize("method", ["lora", "full"])
def test_loss_and_gradients_are_the_paper_s_in_any_micro_batches(small_llama, method, above):
    """The divergence is of the whole step, at least 0, and has no gradient; each label has its weight."""
    train = spec(method, beta=0.2, desirable_weight=1.5, undesirable_weight=0.5)
    model, exact = (load_model(small_llama, train, CPU) for _ in range(2))
    exact = exact.double()
    with torch.no_grad():
        mismatched = exact_logps(exact, MISMATCHED) - above + torch.tensor([1.0, -2.0, 0.5, 0.5])
    own_reference = (exact_logps(exact, OWN).detach() + torch.tensor([2.0, -1.0, 3.0, -4.0])).float().numpy()
    references = own_reference, mismatched.float().numpy()
    kl = max(0.0, above)
    ratios, losses = exact_logps(exact, OWN) - torch.from_numpy(own_reference).double(), []
    for ratio, desirable in zip(ratios, DESIRABLE, strict=True):
        losses.append(
            1.5 / (1 + torch.exp(0.2 * (ratio - kl))) if desirable else 0.5 / (1 + torch.exp(0.2 * (kl - ratio)))
        )
    expected = torch.stack(losses).mean()
    expected.backward()
    exact_gradients = torch.cat([p.grad.flatten() for p in exact.parameters() if p.grad is not None])
    for groups, flat in (([[0, 1, 2, 3]], False), ([[0], [1], [2], [3]], False), ([[3, 1], [0, 2]], True)):
        loss, gradients, figures = gradients_of_step(model, train, groups, references, flat)
        assert loss == pytest.approx(expected.item(), rel=1e-5)
        assert (gradients - exact_gradients).norm() < 1e-5 * exact_gradients.norm()
        assert figures["kl"] == pytest.approx(kl, abs=1e-4)
        better = 0.2 * ratios[DESIRABLE].mean().item()
        worse = 0.2 * ratios[~DESIRABLE].mean().item()
        assert figures["reward_chosen"] == pytest.approx(better, rel=1e-3)
        assert figures["reward_margin"] == pytest.approx(better - worse, rel=1e-3)
        right = [(ratio > kl) == desirable for ratio, desirable in zip(ratios.tolist(), DESIRABLE, strict=True)]
        assert figures["reward_accuracy"] == np.mean(right)


def test_a_step_of_one_label_has_no_figures_of_the_other():
    kto = OBJECTIVES["kto"]
    assert isinstance(kto, Kto)
    totals = StepTotals(count=2, better=2, worse=0, better_tokens=4)
    loss = StepGoal(objective=kto, values=kto.defaults, totals=totals).begin(None)
    assert isinstance(loss, AnswerLoss)
    loss.untrained.append(torch.tensor(-3.0))
    parallel = ParallelModel(torch.nn.Linear(1, 1))
    loss.before((), lambda batch, compute: None, parallel)
    answers = Answers(
        counts=(1, 1), tokens_R=torch.ones(2), reference_R=torch.zeros(2), better_R=torch.ones(2, dtype=torch.bool)
    )
    assert loss.of_rows(torch.zeros(2), answers).item() == 0.5
    assert known_figures(loss.figures(parallel)) == {"reward_chosen": 0.0, "reward_accuracy": 0.5, "kl": 0.0}
