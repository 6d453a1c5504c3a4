"""A laboratory of slow networks: `python -m co2.lab --workers 2 --mbit 20,100,unlimited`.

Every worker is a process of train.py in a network namespace of its own, on a link whose rate the
kernel enforces: real collectives over real TCP, on one machine. The method `none` is the same
training without any communication, the limit that every method is compared with. Finished trials
are kept, so the same command continues an interrupted table where it stopped.

All words after the options are overrides of train.py: `python -m co2.lab --mbit 20 task=vit`.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from co2 import program

with program.starting(__name__):
    from co2.arguments import Parser
    from co2.errors import REFUSED, ConfigError, require
    from co2_measure.lab import report
    from co2_measure.lab.measurement import measure
    from co2_measure.lab.plan import plan
    from co2_measure.lab.slow_network import check_root, remove_leftovers
    from co2_measure.lab.training import TrialFailed
    from co2_measure.lab.trial import LIMIT
    from co2_measure.peers import PEERS, known_methods


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns the exit status: 0, 1 for a failed trial, 2 for a wrong value, 130 after Ctrl-C.
    """
    options, overrides = _parser().parse_known_args(argv)
    try:
        trials, conditions = plan(options)
        unknown = [word for word in overrides if word.startswith("--") or "=" not in word]
        require(not unknown, "option", " ".join(unknown), "unknown; see --help")
        check_root()
        for name in remove_leftovers():
            print(f"removed what a killed run had left behind: {name}", file=sys.stderr)
        runs, target = Path(options.runs), options.target_loss
        found = list(measure(trials, conditions, runs, overrides, target))
    except (ConfigError, TrialFailed) as error:
        print(f"error: {error}", file=sys.stderr)
        return REFUSED if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        print("stopped; the same command goes on with the next trial", file=sys.stderr)
        return program.INTERRUPTED
    report.write(found, options.out, target)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m co2.lab",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    methods = ",".join([*(name for name in known_methods() if name not in PEERS), LIMIT])
    add("--workers", default="2", help="numbers of workers, as in 2,4")
    add("--mbit", default="20,100,500,unlimited", help="rates of all links, in Mbit/s")
    add("--methods", default=methods, help="methods, peers, and the limit, none")
    add("--repeats", default="1", help="repeats of every trial; methods take turns")
    schedule = "from 10 s on, links of 100 Mbit/s have 20; can be repeated"
    add("--schedule", action="append", default=[], metavar="100:20@10s", help=schedule)
    add("--slow-link", action="append", default=[], metavar="1:10", help="worker 1: 10 Mbit/s")
    add("--slow-cpu", action="append", default=[], metavar="1:0.5", help="worker 1: half a core")
    pin = "let all workers run on all cores; by default each keeps to its own, if there are enough"
    add("--no-pin", dest="pin", action="store_false", help=pin)
    add("--target-loss", type=float, help="measure the time until this validation loss")
    add("--runs", default="results/runs/lab", help="folder in which the trials are kept")
    add("--out", type=Path, default=Path("results/lab"), help="folder of the table and the figure")
    return parser


if __name__ == "__main__":
    program.run(main)
