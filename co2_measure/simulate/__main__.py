"""What a cluster would do: step time, exposed communication, throughput and scaling, on paper.

python -m co2.simulate --model gpt2-small --gpus 8..131072 --method allreduce,co2 --tau 12,48
python -m co2.simulate --model transnormer-7b --link 80gbps-tcp,1gbit@50us --jitter 0.1
python -m co2.simulate --goodput --gpus 8..131072       what is left of that where nodes fail
python -m co2.simulate --paper          the CO2 paper's scaling figures, beside simulated ones

The arithmetic is in network.py (links, collectives), schedule.py (rounds) and failures.py.
"""

import argparse
import shlex
import sys
from collections.abc import Sequence

from co2 import program

with program.starting(__name__, slow=False):
    from co2.arguments import Parser
    from co2.errors import REFUSED, ConfigError, require
    from co2.gpus import GPUS
    from co2_measure.simulate import paper
    from co2_measure.simulate.failures import LLAMA_MTBF_HOURS
    from co2_measure.simulate.goodput import goodput_report
    from co2_measure.simulate.methods import SIMULATED, WITH_FRAGMENTS, WITH_MOMENTS
    from co2_measure.simulate.models import MODELS
    from co2_measure.simulate.network import COLLECTIVES
    from co2_measure.simulate.options import Options
    from co2_measure.simulate.report import Report
    from co2_measure.simulate.scaling import scaling_report


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit status: 0, or 2 for a value that is refused."""
    args = _parser().parse_args(argv)
    words = sys.argv[1:] if argv is None else argv
    command = shlex.join(["python", "-m", "co2.simulate", *words])
    try:
        report = _simulated(args)
        report.save(command, args.csv, args.markdown, args.figure)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return REFUSED
    report.show()
    return 0


def _simulated(args: argparse.Namespace) -> Report:
    """What the command line asks for."""
    if args.paper:
        require(args.figure is None, "--figure", args.figure, "is not drawn with --paper")
        require(not args.goodput, "--goodput", "true", "is not simulated with --paper")
        return paper.report()
    return (goodput_report if args.goodput else scaling_report)(Options(args))


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m co2.simulate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument_group("what is compared; lists are separated by commas").add_argument
    add("--gpus", default="8..1024", help="8..1024: powers of two from 8; 8,24,100")
    add("--link", default="80gbps-tcp", help="of a server: a profile, or 20mbit@50us")
    add("--method", default="allreduce,co2", help=", ".join(SIMULATED))
    add("--tau", default="12", help="steps of a round")
    moments = f"Adam's moments travel too: {', '.join(WITH_MOMENTS)}"
    add("--average-moments", action="store_true", help=moments)
    parts = f"parts of the model, sent one after the other: {', '.join(WITH_FRAGMENTS)}"
    add("--fragments", default="1", help=parts)
    add("--delay", help="steps that a fragment's mean has; default: until the next one is sent")
    add = parser.add_argument_group("the model, and what a step costs to compute").add_argument
    add("--model", default="gpt2-small", help=", ".join(MODELS))
    add("--units", help="tokens or images per GPU and step")
    add("--gpu", default="a100-80g", help=", ".join(GPUS))
    add("--mfu", default="0.4", help="share of the GPU's peak that training reaches")
    add("--step-time", help="seconds of a step's computation, instead of the above")
    add = parser.add_argument_group("the network").add_argument
    add("--wire", default="fp32", help="fp32 or bf16")
    add("--collective", default="auto", help=", ".join(COLLECTIVES))
    add("--bucket-mb", default="25", help="MiB that one collective carries at most")
    add("--server-size", default="8", help="GPUs that share a link to the others")
    add("--inside", default="nvswitch", help="link of a GPU inside its server")
    add("--efficiency", default="1", help="share of the rate left for payload")
    add("--backward-share", default="0.6667", help="share of a step in which gradients get ready")
    add = parser.add_argument_group("replicas that differ").add_argument
    add("--jitter", default="0", help="coefficient of variation of a step's time")
    add("--stragglers", default="0", help="slow replicas: a number, or 1%% of all")
    add("--slowdown", default="1.5", help="factor on a slow replica's step time")
    add("--seed", default="0", help="of all that is drawn")
    add("--rounds", default="50", help="rounds measured, after as many to settle")
    add = parser.add_argument_group("nodes that fail; seconds are assumed").add_argument
    add("--goodput", action="store_true", help="of nodes that fail, as a table")
    llama_3 = f"{LLAMA_MTBF_HOURS:.0f}"
    add("--mtbf-hours", default=llama_3, help="until a node fails, on average; default: Llama 3's")
    add("--repair-s", default="300", help="until another node stands in")
    add("--restart-s", default="180", help="until its processes can train")
    add("--detect-s", default="10", help="until the others know of a failure")
    add("--regroup-s", default="10", help="to make process groups anew")
    add("--checkpoint-s", default="10", help="to save, while all stand still")
    add("--checkpoint-every-s", help="training between two; default: Daly's optimum")
    add("--failures", default="1000", help="drawn for each line, from --seed")
    add = parser.add_argument_group("output").add_argument
    add("--base-gpus", help="T(base) of the scaling ratio; default: two servers")
    add("--csv", metavar="FILE")
    add("--markdown", metavar="FILE")
    add("--figure", metavar="FILE", help="the same drawn against GPUs")
    add("--paper", action="store_true", help="the paper's figures beside simulated ones")
    return parser


if __name__ == "__main__":
    program.run(main)
