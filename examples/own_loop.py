"""CO2 in a loop of your own: three lines, marked. Alone, with many workers, or with a folder from
which the same command goes on after an interruption:

python examples/own_loop.py
torchrun --nproc-per-node 2 examples/own_loop.py
torchrun --nproc-per-node 2 examples/own_loop.py checkpoints
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn

import co2

if "RANK" in os.environ:
    dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

sync = co2.CO2(tau=4)  # 1
mesh = co2.Mesh.world()
model = sync.prepare(model, optimizer, mesh)  # 2
if mesh.replica == 0:
    print(f"replicas: {mesh.num_replicas}")
if mesh.num_replicas == 1:
    print("warning: there is nothing to synchronize; start several replicas with torchrun")

torch.manual_seed(1 + mesh.replica)  # every replica sees data of its own
folder = sys.argv[1] if len(sys.argv) > 1 else None
if folder is not None:
    sync.resume(folder)  # does nothing where nothing is saved
loss = torch.tensor(torch.nan)
for step in range(sync.steps, 200):
    x = torch.randn(64, 8)
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    loss.backward()
    sync.step()  # 3: the optimizer's step, and the synchronization that is due
    optimizer.zero_grad()
    if folder is not None and (step + 1) % 50 == 0:
        sync.save(folder)  # on every replica

sync.finish()  # on every replica: all models hold the replicas' mean
if mesh.replica == 0:
    print(f"last loss {loss.item():.3f}")
if dist.is_initialized():
    dist.destroy_process_group()
