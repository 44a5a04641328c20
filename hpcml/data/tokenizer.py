"""Text to tokens: a byte-level BPE trained on the corpus, or the tokenizer of a folder."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from hpcml.data.corpus import DataError

if TYPE_CHECKING:
    import tokenizers

BOS, EOS, PAD = "<|bos|>", "<|eos|>", "<|pad|>"
SMALLEST_VOCABULARY = 256 + 3
"""Every byte has a token, so that any text can be written; then come the special ones."""


class Tokenizer:
    """What the dataset needs of a tokenizer.

    Attributes:
        size: number of tokens; all ids are below it.
        special: ``bos_token_id``, ``eos_token_id`` and ``pad_token_id``, None where there is none.
    """

    def __init__(self, backend: tokenizers.Tokenizer, special: dict[str, int | None]) -> None:
        self._backend = backend
        self.size: int = 1 + max(backend.get_vocab(with_added_tokens=True).values())
        self.special = special

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Token ids of each text, without special tokens around them."""
        encodings = self._backend.encode_batch_fast(texts, add_special_tokens=False)
        return [encoding.ids for encoding in encodings]


def train_tokenizer(texts: Iterator[str], vocab_size: int, folder: Path) -> None:
    """Train a byte-level BPE and save it so that ``AutoTokenizer`` loads ``folder``.

    Args:
        texts: what to train on. The same texts give the same tokenizer.
        vocab_size: entries of the vocabulary, the 256 bytes and three special tokens included.
            A small corpus may give fewer.
        folder: made if it is not there.

    Raises:
        DataError: ``vocab_size`` has no room for the bytes and the special tokens.
    """
    if vocab_size < SMALLEST_VOCABULARY:
        raise DataError(
            f"vocab_size {vocab_size} is too small: a byte-level vocabulary needs at least "
            f"{SMALLEST_VOCABULARY} (256 bytes and the special tokens)"
        )
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers, trainers

    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, BOS, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a folder.

    Raises:
        DataError: there is none, or it is of a kind without a ``tokenizers`` backend.
    """
    if not folder.is_dir():
        raise DataError(f"no tokenizer folder at {folder}")
    # Heavy, and needed only for what is not yet tokenized.
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        backend = tokenizer.backend_tokenizer
    except (OSError, ValueError, AttributeError, KeyError) as error:
        first = str(error).strip().partition("\n")[0]
        raise DataError(f"{folder} holds no usable tokenizer: {first}") from error
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    return Tokenizer(backend, {name: getattr(tokenizer, name) for name in names})
