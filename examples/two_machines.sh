#!/bin/bash
# One's own loop on two machines over a slow link. On the first, whose address is 10.0.0.1, and then
# on the second:
#
#     bash examples/two_machines.sh 0 10.0.0.1
#     bash examples/two_machines.sh 1 10.0.0.1
#
# Where a machine has several networks, name the one to use: export GLOO_SOCKET_IFNAME=eth1, and
# NCCL_SOCKET_IFNAME for GPUs. A third argument is the port (default: 29500).
set -euo pipefail
rank=${1:?the number of this machine, 0 or 1} first=${2:?the address of machine 0}

exec torchrun --nnodes 2 --node-rank "$rank" --nproc-per-node 1 \
    --master-addr "$first" --master-port "${3:-29500}" \
    "$(dirname "$0")/own_loop.py"
