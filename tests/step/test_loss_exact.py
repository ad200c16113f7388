"""The chunked loss against arithmetic in fp64, and the logits that exist while held-out losses are computed."""

import pytest
import torch
from torch.nn import functional as F

from lean_finetune.step.loss import causal_lm, decoder_hidden, summed_loss
from lean_finetune.step.parallel_model import ParallelModel
from lean_finetune.step.step_loss import TokenLoss
from lean_finetune.train.heldout_loss import heldout_batches, heldout_loss
from lean_finetune.train.monitor.measured_peak import MEMORY_EVENT, memory_profile
from tests.kit.loaded import load_model
from tests.small_model import CPU, VOCABULARY, spec_of
from tests.step.common import slow, split
from tests.token_files import heldout


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}


def error(found: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> float:
    """Norm of the difference of all gradients, as a share of their norm."""
    assert found.keys() == exact.keys()
    apart = torch.stack([(found[name] - exact[name]).norm() for name in exact]).norm()
    return (apart / torch.stack([value.norm() for value in exact.values()]).norm()).item()


@pytest.mark.parametrize(
    ("precision", "bound", "chunk"),
    [
        ("fp32", 1e-6, 1),
        ("fp32", 1e-6, 16),
        ("bf16", 2e-2, 16),
        *(slow(*case) for case in (("fp32", 1e-6, 10_000), ("bf16", 2e-2, 1), ("bf16", 2e-2, 10_000))),
    ],
)
def test_gradients_of_the_chunked_loss_are_those_of_fp64(small_llama, precision, bound, chunk):
    """A chunk counted twice, or sums rounded to 16 bits: a loss that looks right and gradients that are not."""
    batch = split([8])[0]
    model = load_model(small_llama, spec_of(method="full", precision=precision), CPU)
    exact_model = load_model(small_llama, spec_of(method="full"), CPU).double()
    lm = causal_lm(exact_model)
    logits = lm.get_output_embeddings()(decoder_hidden(lm, batch.input_ids_BT)).flatten(0, 1)
    exact = F.cross_entropy(logits, batch.targets_BT.flatten(), reduction="sum", ignore_index=-100)
    exact.backward()
    losses, errors = {}, {}
    for name, size in (("all logits", None), ("chunked", chunk)):
        model.zero_grad()
        loss = summed_loss(model, batch, TokenLoss(size))
        loss.backward()
        losses[name], errors[name] = loss.item(), error(gradients(model), gradients(exact_model))
    assert losses["chunked"] == pytest.approx(exact.item(), rel=bound)
    # In bf16 the head's gradient is rounded after every chunk: at worst, one token each, that shows.
    assert errors["chunked"] < bound and errors["chunked"] < (1.5 if chunk == 1 else 1.2) * errors["all logits"]


def test_held_out_losses_never_have_the_logits_of_a_batch(small_llama, tmp_path):
    """All logits of an evaluation batch at once, the most common way to run out of memory at its end."""
    rows = heldout(tmp_path, [(list(range(3, 123)), [0, 120], None)] * 8)
    spec = spec_of(method="full")
    model = load_model(small_llama, spec, CPU)

    def largest_allocation(chunk: int | None) -> int:
        """Bytes of the largest block that PyTorch's allocator returned."""
        with memory_profile() as profiler:
            batches = heldout_batches(rows, 8, 8 * 120, 0)
            heldout_loss(ParallelModel(model), batches, iter(()), TokenLoss(chunk), 0, spec, CPU)
        events = profiler.profiler.kineto_results.events()
        return max(event.nbytes() for event in events if event.name() == MEMORY_EVENT)

    assert largest_allocation(32) < 8 * 120 * VOCABULARY * 4 <= largest_allocation(None)
