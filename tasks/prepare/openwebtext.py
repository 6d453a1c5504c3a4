"""Prepares OpenWebText as tokens in <root>/openwebtext/, for gpt2, moe and transnormer."""

import argparse
from collections.abc import Iterator
from pathlib import Path

from tasks.prepare.documents import Documents, Words, add_arguments, load_rows, prepare, unreadable
from tasks.text.store import SEPARATOR, faults

HUB_NAME = "Skylion007/openwebtext"
WORDS = Words("GPT-2", "openai-community/gpt2", SEPARATOR)

HELP = """\
OpenWebText for task=gpt2 gpt2.corpus=openwebtext.

Downloads the documents, tokenizes them with GPT-2's vocabulary (50257) and writes
  <root>/openwebtext/{train.bin,val.bin,meta.json,tokenizer.json}
About 8 million documents and 9 billion tokens: 18 GB at the end, some 90 GB on the way (the
download included), hours on a few cores. Stop it whenever you like; the same command goes on
where it stopped.

Without the network:
  --source FOLDER --tokenizer FILE, where FOLDER holds parquet or JSON lines files with a column
  "text", or what datasets' save_to_disk wrote, and FILE is GPT-2's tokenizer.json"""


def arguments(parser: argparse.ArgumentParser) -> None:
    """See `DataSet.arguments`."""
    parser.add_argument(
        "--source",
        default=HUB_NAME,
        help=f'a folder or a data set of the hub, with a column "text" (default: {HUB_NAME})',
    )
    add_arguments(parser, WORDS)


def run(options: argparse.Namespace) -> str:
    """See `DataSet.run`."""

    def load() -> Documents:
        return Documents([(load_rows("--source", options.source), 1)], keep_blank=True)

    made = prepare(options, WORDS, {"source": options.source}, load)
    return f"{made}; train with: task=gpt2 gpt2.corpus=openwebtext"


def check(path: Path, options: argparse.Namespace) -> Iterator[str]:
    """See `DataSet.check`. Reads every token."""
    return faults(path)


def verify(path: Path) -> Iterator[str]:
    """See `DataSet.verify`. Reads every token of a data set, and all texts of one's own."""
    return unreadable(path)
