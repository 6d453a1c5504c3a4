"""Prepares English Wikipedia and BookCorpus as tokens in <root>/wikibooks/, for roberta."""

import argparse
from collections.abc import Iterator
from pathlib import Path

from tasks.prepare.documents import Documents, Words, add_arguments, load_rows, prepare, unreadable
from tasks.text.store import faults

ARTICLES = "wikimedia/wikipedia:20231101.en"
SENTENCES = "bookcorpus/bookcorpus"
WORDS = Words(
    "RoBERTa",
    "FacebookAI/roberta-base",
    "</s>",
    {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3, "<mask>": -1},
)
JOINED = 1000
"""Number of sentences that make a document, some tens of pages. Where a book ends is not known."""

HELP = f"""\
Wikipedia and BookCorpus for task=roberta roberta.corpus=wikibooks.

Downloads the documents, tokenizes them with RoBERTa's vocabulary (50265) and writes
  <root>/wikibooks/{{train.bin,val.bin,meta.json,tokenizer.json}}
About 6.4 million articles ({ARTICLES}; CC BY-SA) and 74 million sentences of
books ({SENTENCES}; see its card for the terms): some 6 billion tokens, 12 GB at the end,
60 GB on the way (the download included), hours on a few cores. Stop it whenever you like; the
same command goes on where it stopped.

Without the network:
  --source FOLDER --sentences FOLDER --tokenizer FILE, where a FOLDER holds parquet or JSON lines
  files with a column "text", or what datasets' save_to_disk wrote, and FILE is RoBERTa's
  tokenizer.json. Rows of --source are documents; rows of --sentences are sentences in their
  order, {JOINED} of which make a document. Both may be given more than once, and either alone."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """See `DataSet.arguments`."""
    what = "a folder or a data set of the hub (NAME or NAME:CONFIGURATION)"
    parser.add_argument(
        "--source", action="append", help=f"{what} whose rows are documents (default: {ARTICLES})"
    )
    parser.add_argument(
        "--sentences", action="append", help=f"{what} whose rows are sentences ({SENTENCES})"
    )
    add_arguments(parser, WORDS)


def run(options: argparse.Namespace) -> str:
    """See `DataSet.run`."""
    given = options.source or options.sentences
    articles = options.source or ([] if given else [ARTICLES])
    sentences = options.sentences or ([] if given else [SENTENCES])

    def load() -> Documents:
        sources = [(load_rows("--source", name), 1) for name in articles]
        sources += [(load_rows("--sentences", name), JOINED) for name in sentences]
        return Documents(sources, keep_blank=False)

    made = prepare(options, WORDS, {"source": articles, "sentences": sentences}, load)
    return f"{made}; train with: task=roberta roberta.corpus=wikibooks"


def check(path: Path, options: argparse.Namespace) -> Iterator[str]:
    """See `DataSet.check`. Reads every token."""
    return faults(path)


def verify(path: Path) -> Iterator[str]:
    """See `DataSet.verify`. Reads every token of a data set, and all texts of one's own."""
    return unreadable(path)
