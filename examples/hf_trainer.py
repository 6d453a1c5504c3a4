"""transformers' Trainer under CO2: one argument more than Trainer has.

    torchrun --nproc-per-node 2 examples/hf_trainer.py
    torchrun --nproc-per-node 2 examples/hf_trainer.py MODEL TEXT

MODEL is a folder that AutoModelForCausalLM reads, such as `co2 export` makes, and TEXT a file to
fine-tune it on. Without them a small new model learns to write Python, byte by byte.
"""

import sys
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    TrainingArguments,
)

import co2
from co2.integrations.transformers import SyncTrainer

if len(sys.argv) == 3:
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
    tokens = AutoTokenizer.from_pretrained(sys.argv[1]).encode(Path(sys.argv[2]).read_text())
else:
    torch.manual_seed(0)
    shape = {"vocab_size": 256, "n_positions": 64, "n_embd": 64, "n_layer": 2, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=0, eos_token_id=0))
    tokens = list(Path(co2.__file__).with_name("config.py").read_bytes())

length = min(64, model.config.max_position_embeddings)
pieces = torch.tensor(tokens[: len(tokens) // length * length]).view(-1, length)
data = [{"input_ids": piece, "labels": piece} for piece in pieces]
trainer = SyncTrainer(
    model,
    TrainingArguments(
        "results/runs/examples/hf_trainer",
        max_steps=120,
        per_device_train_batch_size=8,
        learning_rate=3e-3,
        logging_steps=20,
        save_strategy="no",
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
    ),
    train_dataset=data[8:],
    eval_dataset=data[:8],
    sync=co2.CO2(tau=12),
)
if trainer.is_world_process_zero():
    print(f"replicas: {trainer.args.world_size}")
if trainer.args.world_size == 1:
    print("warning: there is nothing to synchronize; start several replicas with torchrun")
trainer.train()
loss = trainer.evaluate()["eval_loss"]  # of the consensus, on every replica
trainer.save_model()
if trainer.is_world_process_zero():
    print(f"last loss {loss:.3f}")
