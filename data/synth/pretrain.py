"""Pretrain the tiny model on seen families: `python -m data.synth.pretrain --seed 3 --tokens 3600000 --threads 1`.

A small Llama learns the seen families from a stream of fresh rows; no prompt of data/raw/sample.jsonl and no row of an
unseen family is ever in the stream. The same arguments give the same bytes on the same CPU, for a fixed thread count.
"""

import argparse
import itertools
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import torch
from transformers import (
    AutoTokenizer,
    BatchEncoding,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
)

from data.synth.rows import SEEN, prompts_of, stream_rows
from data.synth.tokenizer import MAX_LENGTH_TOKENS, TINY

SAMPLE = Path("data/raw/sample.jsonl")
# Most families build on copying words out of the prompt, so that is practised first, on short rows.
COPYING_NAMES = (
    "repeat",
    "next_item",
    "join_with",
    "wrap_each",
    "prefix_each",
    "bullet_list",
    "key_value",
    "replace_word",
)
COPYING_ROWS = 8_000
COPYING_CHARACTERS = 120
# Rows are padded to the next of these; longer rows are left out.
BUCKET_LENGTHS = (32, 40, 48, 56, 64, 72, 80, 96, 112, 128, 160, 192, 256, 384, 512)
MICRO_BATCH_TOKENS = 1024
MICRO_BATCHES_PER_STEP = 1
REPORT_STEPS = 100
# Prompts are mostly random words: learning them a little gives the words their meaning, more would be wasted.
PROMPT_WEIGHT = 0.1
# Lowers the base's confidence on unseen text, so that a fine-tune starts from a lower loss on unseen families.
LABEL_SMOOTHING = 0.05
PEAK_LEARNING_RATE = 5e-3
WARMUP_SHARE = 0.03
WEIGHT_DECAY = 0.05
MAX_GRADIENT_NORM = 1.0

Row = tuple[list[int], list[int]]  # token ids and, for each, 1 where the assistant says it


def build_model(vocabulary_size: int, end_id: int, pad_id: int) -> LlamaForCausalLM:
    """Build the untrained model: 1.0 M parameters, every linear layer's sides a multiple of 64 (an NF4 block)."""
    config = LlamaConfig(
        vocab_size=vocabulary_size,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=MAX_LENGTH_TOKENS,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=end_id,
        pad_token_id=pad_id,
    )
    model = LlamaForCausalLM(config)
    # Ten times the usual start: embeddings are also the output layer. In a trial on copying alone, 0.3 brought the
    # loss to 1.7 nats in 220 steps instead of 350.
    torch.nn.init.normal_(model.model.embed_tokens.weight, std=0.2)
    model.generation_config = GenerationConfig(eos_token_id=end_id, pad_token_id=pad_id, do_sample=False)
    return model


def read_prompts(path: Path) -> set[str]:
    """Read every user message of a JSONL file of chat rows."""
    with open(path, encoding="utf-8") as lines:
        return {prompt for line in lines for prompt in prompts_of(json.loads(line))}


def count_characters(row: dict) -> int:
    """Count the characters of a row's messages."""
    return sum(len(message["content"]) for message in row["messages"])


def pretraining_rows(seed: int, sample: Path) -> Iterator[dict]:
    """Yield rows of seen families, none with a prompt of the sample; the first COPYING_ROWS are short and only copy."""
    used_prompts = read_prompts(sample)
    copying = stream_rows(seed, {name: SEEN[name] for name in COPYING_NAMES}, used_prompts)
    short = (row for row in copying if count_characters(row) <= COPYING_CHARACTERS)
    yield from itertools.islice(short, COPYING_ROWS)
    yield from stream_rows(seed + 1, SEEN, used_prompts)


def encode_rows(rows: Iterator[dict], tokenizer: PreTrainedTokenizerBase) -> Iterator[Row]:
    """Render rows with the chat template and tokenize them; rows over the longest bucket are left out."""
    while block := [row["messages"] for row in itertools.islice(rows, 256)]:
        rendered = tokenizer.apply_chat_template(
            block, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        encoded = cast(BatchEncoding, rendered)
        for ids, mask in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True):
            if len(ids) <= BUCKET_LENGTHS[-1]:
                yield ids, mask


def bucket_rows(rows: Iterator[Row]) -> Iterator[tuple[int, list[Row]]]:
    """Collect rows by length; yield `(padded length, rows)` as soon as a bucket holds MICRO_BATCH_TOKENS.

    Few distinct shapes and little padding: on a CPU every new shape costs the matrix library a compilation.
    """
    buckets: dict[int, list[Row]] = {length: [] for length in BUCKET_LENGTHS}
    for row in rows:
        length = next(length for length in BUCKET_LENGTHS if length >= len(row[0]))
        buckets[length].append(row)
        if len(buckets[length]) == MICRO_BATCH_TOKENS // length:
            yield length, buckets[length]
            buckets[length] = []


def collate(rows: list[Row], length: int, pad_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Right-pad rows to (batch, length) token ids and fp32 loss weights, 0 on padding."""
    ids_BT = torch.full((len(rows), length), pad_id)
    weights_BT = torch.zeros(len(rows), length)
    for number, (ids, mask) in enumerate(rows):
        ids_BT[number, : len(ids)] = torch.tensor(ids)
        weights_BT[number, : len(ids)] = torch.tensor(mask).float().clamp(min=PROMPT_WEIGHT)
    return ids_BT, weights_BT


def summed_losses(
    model: LlamaForCausalLM, ids_BT: torch.Tensor, weights_BT: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weighted sum of smoothed next-token losses in nats, and the plain sum over assistant tokens without gradient.

    Padding is on the right and attention causal, so no mask is needed.
    """
    logits_BTV = model(input_ids=ids_BT, use_cache=False).logits[:, :-1]
    log_probabilities_BTV = logits_BTV.float().log_softmax(-1)
    losses_BT = -log_probabilities_BTV.gather(-1, ids_BT[:, 1:, None]).squeeze(-1)
    smoothed_BT = (1 - LABEL_SMOOTHING) * losses_BT - LABEL_SMOOTHING * log_probabilities_BTV.mean(-1)
    assistant_BT = weights_BT[:, 1:] == 1
    return (smoothed_BT * weights_BT[:, 1:]).sum(), losses_BT.detach()[assistant_BT].sum()


def learning_rate(progress: float) -> float:
    """Linear warm-up, then a cosine to zero; `progress` runs from 0 to 1."""
    if progress < WARMUP_SHARE:
        return PEAK_LEARNING_RATE * progress / WARMUP_SHARE
    return PEAK_LEARNING_RATE * 0.5 * (1 + math.cos(math.pi * (progress - WARMUP_SHARE) / (1 - WARMUP_SHARE)))


def build_optimizers(model: LlamaForCausalLM) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices (it learns these tasks from fewer tokens), AdamW for embeddings and norms."""
    matrices = [parameter for name, parameter in model.named_parameters() if name.endswith("_proj.weight")]
    others = [parameter for name, parameter in model.named_parameters() if not name.endswith("_proj.weight")]
    return [
        torch.optim.Muon(matrices, weight_decay=WEIGHT_DECAY, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def train_step(
    model: LlamaForCausalLM, optimizers: list[torch.optim.Optimizer], batches: list[tuple[torch.Tensor, torch.Tensor]]
) -> tuple[float, int]:
    """Take one optimizer step; return the summed loss of assistant tokens in nats and their number."""
    weight = sum(weights_BT[:, 1:].sum() for _, weights_BT in batches)
    loss_sum, assistant_tokens = 0.0, 0
    for ids_BT, weights_BT in batches:
        with torch.autocast("cpu", torch.bfloat16):
            loss, assistant_loss = summed_losses(model, ids_BT, weights_BT)
        (loss / weight).backward()
        loss_sum += float(assistant_loss)
        assistant_tokens += int((weights_BT[:, 1:] == 1).sum())
    torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRADIENT_NORM)
    for optimizer in optimizers:
        optimizer.step()
    model.zero_grad()
    return loss_sum, assistant_tokens


def train(model: LlamaForCausalLM, rows: Iterator[Row], tokens: int, pad_id: int) -> None:
    """Train on `tokens` tokens of `rows`, printing the mean loss of assistant tokens every REPORT_STEPS steps."""
    optimizers, buckets = build_optimizers(model), bucket_rows(rows)
    done_tokens, loss_sum, assistant_tokens, start = 0, 0.0, 0, time.monotonic()
    for number in itertools.count(1):
        if done_tokens >= tokens:
            return
        for group in itertools.chain.from_iterable(optimizer.param_groups for optimizer in optimizers):
            group["lr"] = learning_rate(done_tokens / tokens)
        drawn = [next(buckets) for _ in range(MICRO_BATCHES_PER_STEP)]
        done_tokens += sum(len(ids) for _, part in drawn for ids, _ in part)
        step_loss, step_tokens = train_step(
            model, optimizers, [collate(part, length, pad_id) for length, part in drawn]
        )
        loss_sum, assistant_tokens = loss_sum + step_loss, assistant_tokens + step_tokens
        if number % REPORT_STEPS == 0:
            mean, seconds = loss_sum / assistant_tokens, time.monotonic() - start
            print(f"step {number}  tokens {done_tokens}  loss {mean:.4f}  {seconds:.0f} s", flush=True)
            loss_sum, assistant_tokens = 0.0, 0


def main() -> None:
    """Parse the command line, train, save the weights in bf16."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--tokens", type=int, required=True, help="training tokens, prompts included")
    parser.add_argument("--threads", type=int, required=True, help="CPU threads; another count may round differently")
    parser.add_argument("--tokenizer", type=Path, default=TINY)
    parser.add_argument("--out", type=Path, default=TINY)
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    torch.set_num_threads(arguments.threads)
    tokenizer = AutoTokenizer.from_pretrained(arguments.tokenizer)
    model = build_model(len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id)
    rows = encode_rows(pretraining_rows(arguments.seed, SAMPLE), tokenizer)
    train(model, rows, arguments.tokens, tokenizer.pad_token_id)
    model.bfloat16().save_pretrained(arguments.out)


if __name__ == "__main__":
    main()
