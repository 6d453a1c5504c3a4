"""torchtitan's Trainer under CO2: replicas of two GPUs each, which share a replica by FSDP2.

    torchrun --nproc-per-node 4 examples/torchtitan_llama.py TORCHTITAN

TORCHTITAN is a copy of torchtitan's repository, whose tests have the tokenizer and the text of its
debug model. torchtitan 0.3 needs GPUs, so nobody has run this file here; the tests train the same
model on CPUs, in tests/integrations/test_torchtitan.py.
"""

import sys

from torchtitan.models.llama3.config_registry import llama3_debugmodel

import co2
from co2.integrations.torchtitan import SyncTrainer

config = llama3_debugmodel()
config.hf_assets_path = f"{sys.argv[1]}/tests/assets/tokenizer"
config.dataloader.dataset_path = f"{sys.argv[1]}/tests/assets/c4_test"
config.training.steps = 120
config.parallelism.data_parallel_replicate_degree = 2
config.checkpoint.enable = True
trainer = SyncTrainer(config, sync=co2.CO2(tau=12))
trainer.train()
trainer.close()
