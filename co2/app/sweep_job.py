"""One job of a sweep, by its number: what slurm/sweep.sbatch trains in one task of an array.

python -m co2.app.sweep_job 2 task=gpt2 co2.tau=1,3,6,12

prints the third combination's overrides, one a line.
"""

import sys

from co2.app.compose import jobs
from co2.errors import ConfigError
from co2.train.launch import refuse


def sweep_job(index: str, overrides: list[str]) -> list[str]:
    """The overrides of the combination with this index, in the order of `train.py -m`.

    Raises:
        ConfigError: for overrides that cannot be read, or an index that no combination has.
    """
    all_jobs = list(jobs(overrides))
    if not index.isdigit() or int(index) >= len(all_jobs):
        last = len(all_jobs) - 1
        hint = f"the sweep has the jobs 0 to {last}: sbatch --array=0-{last} …"
        raise ConfigError("SLURM_ARRAY_TASK_ID", index, hint)
    return all_jobs[int(index)]


if __name__ == "__main__":
    try:
        index, *overrides = sys.argv[1:]
        print("\n".join(sweep_job(index, overrides)))
    except ConfigError as error:
        sys.exit(refuse(error))
