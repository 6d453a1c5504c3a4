"""A loop of your own that `accelerate launch` starts: accelerate places model and data, and the
method keeps the replicas in step.

    accelerate launch --num_processes 2 --multi_gpu examples/accelerate_loop.py
    torchrun --nproc-per-node 2 examples/accelerate_loop.py

On CPUs use torchrun: `accelerate launch --cpu` starts a single process.
"""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import co2

accelerator = Accelerator(cpu=not torch.cuda.is_available())
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
data = DataLoader(TensorDataset(torch.randn(6400, 8)), batch_size=64, shuffle=True)

data = accelerator.prepare(data)  # each process gets samples of its own
model = accelerator.prepare_model(model, evaluation_mode=True)  # without DistributedDataParallel
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

sync = co2.CO2(tau=4)
mesh = co2.Mesh.world(device=accelerator.device)
model = sync.prepare(model, optimizer, mesh)
accelerator.print(f"replicas: {mesh.num_replicas}")
if mesh.num_replicas == 1:
    print("warning: there is nothing to synchronize; start several replicas with torchrun")

for _epoch in range(4):
    for (x,) in data:
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        accelerator.backward(loss)
        sync.step()
        optimizer.zero_grad()

sync.finish()  # on every replica: all models hold the replicas' mean
accelerator.print(f"last loss {loss.item():.3f}")
accelerator.end_training()
