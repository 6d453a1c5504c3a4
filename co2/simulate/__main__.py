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
    from co2.simulate import paper
    from co2.simulate.failures import LLAMA_MTBF_HOURS
    from co2.simulate.goodput import goodput_report
    from co2.simulate.methods import SIMULATED, WITH_MOMENTS
    from co2.simulate.models import MODELS
    from co2.simulate.network import COLLECTIVES
    from co2.simulate.options import check
    from co2.simulate.report import Report
    from co2.simulate.scaling import scaling_report


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
    return (goodput_report if args.goodput else scaling_report)(check(args))


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m co2.simulate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    lists = parser.add_argument_group("what is compared; lists are separated by commas")
    lists.add_argument("--gpus", default="8..1024", help="8..1024: powers of two from 8; 8,24,100")
    lists.add_argument(
        "--link", default="80gbps-tcp", help="of a server: a profile, or 20mbit@50us"
    )
    lists.add_argument("--method", default="allreduce,co2", help=", ".join(SIMULATED))
    lists.add_argument("--tau", default="12", help="steps of a round")
    lists.add_argument(
        "--average-moments",
        action="store_true",
        help=f"Adam's moments travel too: {', '.join(WITH_MOMENTS)}",
    )
    model = parser.add_argument_group("the model, and what a step costs to compute")
    model.add_argument("--model", default="gpt2-small", help=", ".join(MODELS))
    model.add_argument("--units", help="tokens or images per GPU and step")
    model.add_argument("--gpu", default="a100-80g", help=", ".join(GPUS))
    model.add_argument("--mfu", default="0.4", help="share of the GPU's peak that training reaches")
    model.add_argument("--step-time", help="seconds of a step's computation, instead of the above")
    wire = parser.add_argument_group("the network")
    wire.add_argument("--wire", default="fp32", help="fp32 or bf16")
    wire.add_argument("--collective", default="auto", help=", ".join(COLLECTIVES))
    wire.add_argument("--bucket-mb", default="25", help="MiB that one collective carries at most")
    wire.add_argument("--server-size", default="8", help="GPUs that share a link to the others")
    wire.add_argument("--inside", default="nvswitch", help="link of a GPU inside its server")
    wire.add_argument("--efficiency", default="1", help="share of the rate left for payload")
    wire.add_argument(
        "--backward-share", default="0.6667", help="share of a step in which gradients get ready"
    )
    noise = parser.add_argument_group("replicas that differ")
    noise.add_argument("--jitter", default="0", help="coefficient of variation of a step's time")
    noise.add_argument("--stragglers", default="0", help="slow replicas: a number, or 1%% of all")
    noise.add_argument("--slowdown", default="1.5", help="factor on a slow replica's step time")
    noise.add_argument("--seed", default="0", help="of all that is drawn")
    noise.add_argument("--rounds", default="50", help="rounds measured, after as many to settle")
    faults = parser.add_argument_group("nodes that fail; seconds are assumed")
    faults.add_argument("--goodput", action="store_true", help="of nodes that fail, as a table")
    faults.add_argument(
        "--mtbf-hours",
        default=f"{LLAMA_MTBF_HOURS:.0f}",
        help="until a node fails, on average; default: Llama 3's",
    )
    faults.add_argument("--repair-s", default="300", help="until another node stands in")
    faults.add_argument("--restart-s", default="180", help="until its processes can train")
    faults.add_argument("--detect-s", default="10", help="until the others know of a failure")
    faults.add_argument("--regroup-s", default="10", help="to make process groups anew")
    faults.add_argument("--checkpoint-s", default="10", help="to save, while all stand still")
    faults.add_argument(
        "--checkpoint-every-s", help="training between two; default: Daly's optimum"
    )
    faults.add_argument("--failures", default="1000", help="drawn for each line, from --seed")
    out = parser.add_argument_group("output")
    out.add_argument("--base-gpus", help="T(base) of the scaling ratio; default: two servers")
    out.add_argument("--csv", metavar="FILE")
    out.add_argument("--markdown", metavar="FILE")
    out.add_argument("--figure", metavar="FILE", help="the same drawn against GPUs")
    out.add_argument(
        "--paper", action="store_true", help="the paper's figures beside simulated ones"
    )
    return parser


if __name__ == "__main__":
    program.run(main)
