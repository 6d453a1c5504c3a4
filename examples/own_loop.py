"""CO2 in a loop of your own: three lines, marked. Alone or with many workers:

python examples/own_loop.py
torchrun --nproc-per-node 2 examples/own_loop.py
"""

import os

import torch
import torch.distributed as dist
from torch import nn

import co2

if "RANK" in os.environ:
    dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

sync = co2.CO2(co2.CO2.Config(tau=4))  # 1
mesh = co2.Mesh.world()
model = sync.prepare(model, optimizer, mesh)  # 2
if mesh.replica == 0:
    print(f"replicas: {mesh.num_replicas}")
if mesh.num_replicas == 1:
    print("warning: there is nothing to synchronize; start several replicas with torchrun")

torch.manual_seed(1 + mesh.replica)  # every replica sees data of its own
for _step in range(200):
    x = torch.randn(64, 8)
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    loss.backward()
    sync.step()  # 3: the optimizer's step, and the synchronization that is due
    optimizer.zero_grad()

with sync.consensus():  # the replicas' mean: evaluate it, save it
    if mesh.replica == 0:
        print(f"last loss {loss.item():.3f}")
sync.flush()
if dist.is_initialized():
    dist.destroy_process_group()
