"""What models of text have in transformers' form: config.json and tokenizer.json, written and read.

Files are written as text and read as JSON: nothing of them is run, and nothing is fetched.
"""

import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from co2.program import python
from tasks.text.masking import Vocabulary
from tasks.text.store import Store

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_SAME = {"gelu_new": "gelu_pytorch_tanh"}
"""Names of functions that have another name, too."""
ROBERTAS = {
    "<s>": Vocabulary.START,
    "<pad>": Vocabulary.PAD,
    "</s>": Vocabulary.END,
    "<unk>": Vocabulary.FIRST_WORD - 1,
}
"""RoBERTa's special tokens; <mask> is the last of the vocabulary."""


def config_json(config: "PreTrainedConfig", architecture: str, **more: object) -> str:
    """The text of config.json for a class of transformers, with `more` entries."""
    made = {**json.loads(config.to_json_string()), "architectures": [architecture], **more}
    return json.dumps(made, indent=2, sort_keys=True) + "\n"


def unlike(there: Mapping[str, Any], here: "PreTrainedConfig", keys: Iterable[str]) -> str | None:
    """Why two models are not the same function of weights of the same shapes; None if they are.

    Args:
        there: a config.json, in which defaults may be left out.
        here: of this run's model.
        keys: that the shapes do not tell.
    """
    kind = there.get("model_type")
    if kind != here.model_type:
        return f"its config.json has model_type={kind}; give a folder of {here.model_type}"
    defaults = type(here)().to_dict()
    for key in keys:
        theirs, ours = there.get(key, defaults.get(key)), getattr(here, key)
        if _SAME.get(theirs, theirs) != _SAME.get(ours, ours):
            return f"its config.json has {key}={theirs}, this run's model {ours}"
    return None


def tokenizer_of(store: Store) -> str | None:
    """The text of tokenizer.json of a store; None where it has none."""
    path = store.folder / "tokenizer.json"
    return path.read_text(encoding="utf-8") if path.exists() else None


def tokenizer_files(tokenizer: str | None, length: int, **special: object) -> dict[str, str]:
    """The files from which transformers makes a tokenizer; none where there is none.

    Args:
        tokenizer: the text of tokenizer.json.
        length: tokens that the model reads at once.
        special: which tokens have a part to play, such as eos_token.
    """
    if tokenizer is None:
        return {}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": length,
        "clean_up_tokenization_spaces": False,
        **special,
    }
    text = json.dumps(settings, indent=2) + "\n"
    return {"tokenizer.json": tokenizer, "tokenizer_config.json": text}


def robertas_files(tokenizer: str | None, length: int) -> dict[str, str]:
    """`tokenizer_files` for a tokenizer with RoBERTa's special tokens."""
    mask = _special("<mask>", lstrip=True)
    return tokenizer_files(
        tokenizer,
        length,
        bos_token="<s>",
        cls_token="<s>",
        eos_token="</s>",
        sep_token="</s>",
        unk_token="<unk>",
        pad_token="<pad>",
        mask_token={"__type": "AddedToken", **mask},
    )


def as_robertas(learned: str, ids: np.ndarray, separator: int, mask: int) -> str:
    """A learned tokenizer with RoBERTa's special tokens and their places.

    Args:
        learned: the text of tokenizer.json.
        ids: RoBERTa's id of each of its tokens, int64 [vocabulary].
        separator: its token that ends a document, which has become </s>.
        mask: the id of <mask>.
    """
    made = json.loads(learned)
    words = {word: n for word, n in made["model"]["vocab"].items() if n != separator}
    special = {**ROBERTAS, "<mask>": mask}
    assert not words.keys() & special.keys(), "a learned token has no brackets around letters"
    made["model"]["vocab"] = special | {word: int(ids[n]) for word, n in words.items()}
    made["added_tokens"] = [
        {"id": number, **_special(word, lstrip=word == "<mask>")}
        for word, number in special.items()
    ]
    made["post_processor"] = {
        "type": "RobertaProcessing",
        "sep": ["</s>", Vocabulary.END],
        "cls": ["<s>", Vocabulary.START],
        "trim_offsets": True,
        "add_prefix_space": False,
    }
    return json.dumps(made, indent=2, ensure_ascii=False) + "\n"


def other_vocabulary(there: str | None, here: str | None, data: object, public: str) -> str | None:
    """Why a model's vocabulary is not that of this run's data; None if it is.

    Args:
        there, here: tokenizer.json of the model and of the data.
        data: name of the data.
        public: the data set that `tasks.prepare` makes with any tokenizer.
    """
    if there is None:
        return "holds no tokenizer.json, so that its vocabulary is not known; put it there"
    if here is None:
        return f"the vocabulary of {data} is not known; prepare these data again"
    if _tokens(there) == _tokens(here):
        return None
    return (
        f"its tokenizer.json is not that of {data}; give this run the data that the model has "
        f"seen, or make some with its tokenizer: {python()} -m tasks.prepare {public} "
        "--tokenizer FOLDER/tokenizer.json"
    )


def _special(word: str, lstrip: bool = False) -> dict[str, object]:
    flags = {"single_word": False, "rstrip": False, "normalized": False, "special": True}
    return {"content": word, "lstrip": lstrip, **flags}


def _tokens(tokenizer: str) -> tuple[dict[str, int], list[list[str]]]:
    """The id of every token, and the merges, which older files have as "a b"."""
    known = json.loads(tokenizer)
    added = {token["content"]: token["id"] for token in known["added_tokens"]}
    merges = [
        merge.split(" ") if isinstance(merge, str) else merge for merge in known["model"]["merges"]
    ]
    return known["model"]["vocab"] | added, merges
