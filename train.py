"""Train one task under one way of keeping the replicas in step.

python train.py task=gpt2 method=co2 co2.tau=12
python train.py -m task=gpt2 method=co2 co2.tau=1,3,6,12
torchrun --nproc-per-node 2 train.py task=gpt2 method=allreduce
"""

import sys
from functools import partial
from pathlib import Path

from co2 import program

with program.starting(__name__):
    from co2.app.application import App
    from co2_measure.peers import known_methods
    from tasks import TASKS

APP = App(conf=Path(__file__).parent / "conf", tasks=TASKS, methods=known_methods())

if __name__ == "__main__":
    program.run(partial(APP.main, sys.argv[1:]))
