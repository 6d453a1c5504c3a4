"""Text from a run of gpt2, moe or transnormer.

python -m co2 sample RUN "def " --tokens 200 --temperature 0.8 --top-k 50

Prints the prompt and what the model writes after it, as it is made, until it ends its document or
has written that many tokens. The same seed writes the same text.
"""

import argparse
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from co2.app.finished import Open
from co2.arguments import Parser
from co2.errors import ConfigError, is_utf8, require, require_count, require_number
from co2.task import Placed, Writing


def main(open_run: Open, argv: Sequence[str]) -> int:
    """The command line. Returns the exit status. Raises `ConfigError`."""
    parser = Parser(prog="python -m co2 sample", description=__doc__)
    add = parser.add_argument
    add("run", metavar="RUN", help="the folder of a finished run")
    add("prompt", metavar="PROMPT", nargs="?", default="", help="default: a new document")
    add("--tokens", type=int, default=100, help="at most so many (default: 100)")
    text = "0 takes the likeliest (default: 0.8)"
    add("--temperature", type=float, default=0.8, help=text)
    add("--top-k", type=int, default=50, help="only the likeliest; 0: all (default: 50)")
    add("--seed", type=int, default=0, help="of what is drawn (default: 0)")
    options = parser.parse_args(argv)
    require_count("--tokens", options.tokens)
    hint = "must be a finite number, 0 or more"
    require_number("--temperature", options.temperature, 0.0, hint)
    require(options.top_k >= 0, "--top-k", options.top_k, "must be a whole number, 0 or more")
    hint = "must be a whole number from 0 to 2⁶³ - 1"
    require(0 <= options.seed < 2**63, "--seed", options.seed, hint)
    require(is_utf8(options.prompt), "PROMPT", options.prompt, "must be UTF-8")
    try:
        for piece in _written(open_run, options):
            print(shown(piece), end="", flush=True)
    except KeyboardInterrupt:
        pass
    print()
    return 0


def _written(open_run: Open, options: argparse.Namespace) -> Iterator[str]:
    """The prompt, and then pieces of text as the model writes them. Raises `ConfigError`."""
    from tokenizers import Tokenizer
    from tokenizers.decoders import DecodeStream

    found = open_run(options.run)
    task, name = found.task, found.config.task
    hint = f"is a run of task={name}, which writes no text; give one of gpt2, moe or transnormer"
    if name in ("roberta", "glue"):
        hint = f"is a run of task={name}, which fills masks or classifies, and writes no text"
    if not isinstance(task, Writing):
        raise ConfigError("RUN", options.run, hint)
    text = task.tokenizer()
    if text is None:
        hint = "its data have no tokenizer.json, so that its tokens cannot be spelt"
        raise ConfigError("RUN", options.run, hint)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = found.model().to(device)
    if isinstance(task, Placed):
        task.check_place(device, found.config.mesh.strategy)
    tokenizer = Tokenizer.from_str(text)
    # As in training: a separator in the text is text.
    tokenizer.encode_special_tokens = True
    prompt = tokenizer.encode(options.prompt, add_special_tokens=False).ids
    yield options.prompt
    stream = DecodeStream(ids=prompt, skip_special_tokens=True)
    draws = torch.Generator().manual_seed(options.seed)
    size, tokens = tokenizer.get_vocab_size(), prompt or [task.separator]
    for _ in range(options.tokens):
        with torch.no_grad():
            seen = torch.tensor([tokens[-task.config.context :]], device=device)
            logits = task.logits(model, seen)[0, -1, :size].float().cpu()
        token = drawn(logits, options.temperature, options.top_k or size, draws)
        if token == task.separator:
            return
        tokens.append(token)
        yield stream.step(tokenizer, token) or ""


def drawn(logits: Tensor, temperature: float, top_k: int, draws: torch.Generator) -> int:
    """The id of a token, drawn among the `top_k` largest logits; at temperature 0 the largest.
    `logits` are of every token, fp32 [vocabulary]."""
    values, ids = logits.topk(min(top_k, len(logits)))
    if temperature == 0:
        return int(ids[0])
    shares = torch.softmax((values - values[0]) / temperature, 0)
    return int(ids[torch.multinomial(shares, 1, generator=draws)])


def shown(text: str) -> str:
    """The text, in which what a terminal would act upon is spelt out."""
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)
