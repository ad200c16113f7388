"""Configurations of other tools."""

LLAMA_FACTORY = """
model_name_or_path: org/model
stage: sft
do_train: true
finetuning_type: lora
quantization_bit: 4
lora_rank: 16
lora_target: q_proj,v_proj
dataset: org/rows
template: qwen3
cutoff_len: 1000
per_device_train_batch_size: 2
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
output_dir: saves
some_new_key: 1
"""
AXOLOTL = """
base_model: org/model
load_in_8bit: true
adapter: lora
lora_r: 32
lora_alpha: 16
lora_dropout: 0.05
lora_target_linear: true
datasets:
  - path: org/rows
    type: alpaca
val_set_size: 0.0
sequence_len: 4096
sample_packing: true
micro_batch_size: 2
gradient_accumulation_steps: 4
num_epochs: 1
optimizer: adamw_bnb_8bit
lr_scheduler: linear
learning_rate: 2e-4
bf16: auto
gradient_checkpointing: true
warmup_steps: 10
deepspeed: deepspeed_configs/zero1.json
"""
TRL = """
model_name_or_path: org/model
dataset_name: org/rows
torch_dtype: bfloat16
attn_implementation: flash_attention_2
per_device_train_batch_size: 4
gradient_accumulation_steps: 2
gradient_checkpointing: false
max_length: 2048
max_grad_norm: 0.2
optim: paged_adamw_32bit
"""
TORCHTUNE = """
model:
  _component_: torchtune.models.llama3_1.llama3_1_8b
checkpointer:
  _component_: torchtune.training.FullModelHFCheckpointer
  checkpoint_dir: /models/llama/
tokenizer:
  path: /models/llama/tokenizer.model
  max_seq_len: 512
dataset:
  packed: true
batch_size: 2
epochs: 1
optimizer:
  _component_: bitsandbytes.optim.PagedAdamW8bit
  lr: 2e-5
loss:
  _component_: torchtune.modules.loss.LinearCrossEntropyLoss
optimizer_in_bwd: true
gradient_accumulation_steps: 1
enable_activation_checkpointing: true
enable_activation_offloading: true
dtype: bf16
"""
LLAMA_FACTORY_V1 = """
model: org/model
model_class: llm
peft_config:
  name: lora
  r: 16
  lora_alpha: 32
  target_modules: all
quant_config:
  name: bnb
  quantization_bit: 4
dist_config:
  name: fsdp2
train_dataset: org/rows
micro_batch_size: 2
global_batch_size: 8
batching_strategy: padding_free
cutoff_len: 2000
learning_rate: 1.0e-4
output_dir: out
"""
SWIFT_YAML = """
model: org/model
torch_dtype: bfloat16
tuner_type: lora
dataset: org/rows#500
max_length: 2048
attn_impl: flash_attn
per_device_train_batch_size: 2
save_steps: 50
"""
SWIFT_SHELL = """
# swift sft in a comment
NPROC_PER_NODE=4 \\
swift sft \\
    --model org/model \\
    --tuner_type full \\
    --dataset 'org/rows:en#1000' org/others \\
    --torch_dtype bfloat16 \\
    --packing true \\
    --gradient_accumulation_steps 2 \\
    --max_length 8192 \\
    --deepspeed zero3 2>&1 | tee log
"""
UNSLOTH = """
model: org/model
data:
  dataset: org/rows
training:
  training_type: lora
  max_seq_length: 1024
  load_in_4bit: true
  batch_size: 1
  gradient_checkpointing: "unsloth"
lora:
  lora_r: 32
  target_modules: "q_proj,v_proj"
"""
