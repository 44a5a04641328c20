"""A corpus as token files: built once, by whoever comes first, then memory-mapped by everyone.

``<data root>/<fingerprint>/`` holds ``train.arrow`` and ``eval.arrow`` (Arrow IPC; one row per
document, a list of token ids), ``tokenizer/`` and ``dataset.json``, which describes them. It is
complete or absent: it is built under another name and renamed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hpcml.data.corpus import Corpus, DataError, Document
from hpcml.data.sampler import Indices
from hpcml.data.tokenizer import load_tokenizer, train_tokenizer
from hpcml.worker.flush import flush_folder, flush_tree

SPLITS = ("train", "eval")
IGNORE = -100
"""The label of a position whose prediction doesn't count, as torch's cross entropy has it."""

_FORMAT = 1  # part of the fingerprint: raised when the same corpus would give other files
_ENCODED_AT_ONCE = 1 << 21  # characters
_TOKENS_PER_BATCH = 1 << 21  # of a record batch of the token files
_TOKENIZER_TEXT = 1 << 26  # bytes of text that a tokenizer is trained on, at most


@dataclass(frozen=True)
class DatasetSettings:
    """What determines the tokenized files, besides the corpus.

    Attributes:
        tokenizer: folder of a tokenizer, or None to train one.
        vocab_size: entries of the tokenizer to be trained.
        add_eos_token: whether each document ends with the end-of-text token.
        eval_fraction: part of the documents that is held out.
    """

    tokenizer: Path | None
    vocab_size: int
    add_eos_token: bool
    eval_fraction: float


class TokenFile:
    """One split, memory-mapped: nothing is read before it is asked for.

    Attributes:
        documents, tokens: how many there are.
    """

    def __init__(self, path: Path) -> None:
        import pyarrow as pa

        self._map = pa.memory_map(str(path))
        reader = pa.ipc.open_file(self._map)
        self._offsets: list[npt.NDArray[np.int64]] = []
        self._values: list[npt.NDArray[Any]] = []
        for number in range(reader.num_record_batches):
            column = reader.get_batch(number).column(0)
            self._offsets.append(column.offsets.to_numpy())
            self._values.append(column.values.to_numpy())
        self._first_token = np.cumsum([0, *(len(values) for values in self._values)])
        self._first_row = np.cumsum([0, *(len(offsets) - 1 for offsets in self._offsets)])
        self.tokens = int(self._first_token[-1])
        self.documents = int(self._first_row[-1])

    def slice(self, start: int, stop: int) -> npt.NDArray[Any]:
        """The tokens [start, stop) of all documents in a row; a view wherever that can be."""
        number = int(np.searchsorted(self._first_token, start, side="right")) - 1
        parts = []
        while start < stop:
            first = int(self._first_token[number])
            part = self._values[number][start - first : stop - first]
            parts.append(part)
            start += len(part)
            number += 1
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def document(self, index: int) -> npt.NDArray[Any]:
        """The tokens of one document; a view."""
        number = int(np.searchsorted(self._first_row, index, side="right")) - 1
        row = index - int(self._first_row[number])
        offsets = self._offsets[number]
        return self._values[number][offsets[row] : offsets[row + 1]]

    def lengths(self, indices: Indices) -> npt.NDArray[np.int64]:
        """Tokens of each of these documents. Shape as ``indices``."""
        numbers = np.searchsorted(self._first_row, indices, side="right") - 1
        lengths = np.empty(len(indices), dtype=np.int64)
        for number in np.unique(numbers):
            chosen = numbers == number
            rows = indices[chosen] - self._first_row[number]
            offsets = self._offsets[number]
            lengths[chosen] = offsets[rows + 1] - offsets[rows]
        return lengths


class PackedSamples:
    """Sequences of ``max_length`` tokens cut from all documents in a row, none left out.

    The target of each token is the token after it, also across the end of a sequence, so each
    sequence has exactly ``max_length`` targets.
    """

    def __init__(self, file: TokenFile, max_length: int) -> None:
        self._file = file
        self._length = max_length

    def __len__(self) -> int:
        return max(self._file.tokens - 1, 0) // self._length

    def batch(self, indices: Indices) -> tuple[Indices, Indices]:
        """Inputs and targets of these sequences. Shapes (len(indices), max_length)."""
        length = self._length
        rows = np.empty((len(indices), length + 1), dtype=np.int64)
        for row, index in zip(rows, indices.tolist(), strict=True):
            row[:] = self._file.slice(index * length, index * length + length + 1)
        return rows[:, :-1], rows[:, 1:]


class DocumentSamples:
    """One document per sample: cut after ``max_length`` tokens, or padded.

    Samples of a batch are padded to the longest of them; padding comes last, where causal
    attention never sees it, and its targets are :data:`IGNORE`.
    """

    def __init__(self, file: TokenFile, max_length: int, padding: int) -> None:
        self._file = file
        self._length = max_length
        self._padding = padding

    def __len__(self) -> int:
        return self._file.documents

    def lengths(self, indices: Indices) -> npt.NDArray[np.int64]:
        """Tokens of each sample. Shape as ``indices``."""
        return np.minimum(self._file.lengths(indices), self._length)

    def batch(self, indices: Indices) -> tuple[Indices, Indices]:
        """Inputs and targets. Shapes (len(indices), tokens of the longest one)."""
        documents = [self._file.document(index)[: self._length + 1] for index in indices.tolist()]
        width = max(max(len(document) for document in documents) - 1, 1)
        inputs = np.full((len(documents), width), self._padding, dtype=np.int64)
        targets = np.full((len(documents), width), IGNORE, dtype=np.int64)
        for row, document in enumerate(documents):
            inputs[row, : len(document) - 1] = document[:-1]
            targets[row, : len(document) - 1] = document[1:]
        return inputs, targets


Samples = PackedSamples | DocumentSamples


@dataclass(frozen=True)
class Dataset:
    """A published dataset.

    Attributes:
        folder: where it lies.
        vocab_size: number of tokens of its tokenizer.
        special_tokens: ``bos_token_id``, ``eos_token_id`` and ``pad_token_id`` of its tokenizer.
        unigram_entropy: nats per token of the training split if each token came by itself: what a
            model reaches that has learned nothing but how frequent the tokens are.
    """

    folder: Path
    vocab_size: int
    special_tokens: dict[str, int | None]
    unigram_entropy: float

    @property
    def tokenizer(self) -> Path:
        """Folder of the tokenizer, for ``AutoTokenizer``."""
        return self.folder / "tokenizer"

    def split(self, name: str) -> TokenFile:
        """The split ``train`` or ``eval``."""
        return TokenFile(self.folder / f"{name}.arrow")


def open_dataset(root: Path, corpus: Corpus, settings: DatasetSettings) -> Dataset:
    """The tokenized corpus, built first if nobody has yet.

    Args:
        root: folder of all datasets, shared by every process that trains.

    Raises:
        DataError: the corpus is empty, the tokenizer can't be used, or the files that are there
            are not what was published.
    """
    root.mkdir(parents=True, exist_ok=True)
    fingerprint = _fingerprint(root, corpus, settings)
    folder = root / fingerprint
    if not folder.is_dir():
        with _lock(root / f".{fingerprint}.lock") as alone:
            if alone:
                # Whoever left these behind held the lock, so it is dead.
                for left in root.glob(f".building-{fingerprint}-*"):
                    shutil.rmtree(left, ignore_errors=True)
            if not folder.is_dir():
                _build_and_publish(folder, corpus, settings)
    return _open(folder)


def _open(folder: Path) -> Dataset:
    try:
        manifest = json.loads((folder / "dataset.json").read_text())
        for name, size in manifest["files"].items():
            actual = (folder / name).stat().st_size
            if actual != size:
                raise DataError(
                    f"{folder / name} has {actual} bytes instead of {size}: remove {folder}, it "
                    "will be made again"
                )
        special = manifest.get("special_tokens")
        if special is None:  # from before it was written down
            special = load_tokenizer(folder / "tokenizer").special
        return Dataset(folder, manifest["vocab_size"], special, manifest["unigram_entropy"])
    except (OSError, ValueError, KeyError) as error:
        raise DataError(
            f"{folder} is damaged ({error}): remove it, it will be made again"
        ) from error


def _fingerprint(root: Path, corpus: Corpus, settings: DatasetSettings) -> str:
    content = {
        "format": _FORMAT,
        "corpus": _corpus_digest(root, corpus),
        "tokenizer": (
            settings.vocab_size
            if settings.tokenizer is None
            else _tokenizer_digest(settings.tokenizer)
        ),
        "add_eos_token": settings.add_eos_token,
        "eval_fraction": settings.eval_fraction,
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def _corpus_digest(root: Path, corpus: Corpus) -> str:
    """The digest of the corpus, kept by sizes and times so that a large one is read only once."""
    stats = [(str(file.resolve()), file.stat()) for file in corpus.files]
    key = json.dumps([(path, stat.st_size, stat.st_mtime_ns) for path, stat in stats])
    kept = root / ".digests" / hashlib.sha256(key.encode()).hexdigest()[:32]
    with contextlib.suppress(OSError):
        digest = kept.read_text()
        if len(digest) == 64:
            return digest
    digest = corpus.digest()
    # A file that changed within the resolution of its time would be taken for the old one.
    if all(time.time_ns() - stat.st_mtime_ns > 2_000_000_000 for _, stat in stats):
        kept.parent.mkdir(exist_ok=True)
        temporary = kept.with_name(f"{kept.name}.{os.getpid()}")
        temporary.write_text(digest)
        temporary.replace(kept)
    return digest


def _tokenizer_digest(folder: Path) -> str:
    if not folder.is_dir():
        raise DataError(f"no tokenizer folder at {folder}")
    digest = hashlib.sha256()
    for file in sorted(folder.iterdir()):
        # A model's folder often holds its tokenizer; the weights don't matter here.
        if file.is_file() and file.name.startswith(
            ("tokenizer", "special_tokens", "added_tokens", "vocab", "merges")
        ):
            digest.update(json.dumps([file.name, file.stat().st_size]).encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[bool]:
    """Hold a lock that dies with the process; False where the filesystem has none.

    The lock only saves double work. What makes the result right is the rename.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            alone = True
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                raise
            alone = False
        yield alone
    finally:
        os.close(descriptor)


def _build_and_publish(folder: Path, corpus: Corpus, settings: DatasetSettings) -> None:
    building = folder.with_name(f".building-{folder.name}-{os.getpid()}")
    building.mkdir()
    try:
        _build(building, corpus, settings)
        flush_tree(building)
        try:
            building.rename(folder)
        except OSError:
            # Without a lock another process may have been faster; its files are the same.
            if not folder.is_dir():
                raise
        flush_folder(folder.parent)
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _build(folder: Path, corpus: Corpus, settings: DatasetSettings) -> None:
    if settings.tokenizer is None:
        train_tokenizer(
            _tokenizer_texts(corpus, settings), settings.vocab_size, folder / "tokenizer"
        )
    else:
        shutil.copytree(settings.tokenizer, folder / "tokenizer", ignore=_only_tokenizer_files)
    tokenizer = load_tokenizer(folder / "tokenizer")
    end = tokenizer.special["eos_token_id"]
    if settings.add_eos_token and end is None:
        raise DataError(
            f"{settings.tokenizer} has no end-of-text token; set add_eos_token to false"
        )
    writers = {name: _Writer(folder / f"{name}.arrow", tokenizer.size) for name in SPLITS}
    for documents in _chunks(corpus.documents()):
        encoded = tokenizer.encode([document.text for document in documents])
        for document, ids in zip(documents, encoded, strict=True):
            if settings.add_eos_token and document.complete and end is not None:
                ids.append(end)
            writers[_split_of(document, settings)].add(ids)
    for writer in writers.values():
        writer.close()
    _check_splits(writers["train"], writers["eval"], settings)
    counts = writers["train"].counts
    manifest = {
        "vocab_size": tokenizer.size,
        "special_tokens": tokenizer.special,
        "unigram_entropy": unigram_entropy(counts),
        "splits": {
            name: {"documents": writer.documents, "tokens": int(writer.counts.sum())}
            for name, writer in writers.items()
        },
        "files": {
            str(path.relative_to(folder)): path.stat().st_size
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        },
    }
    (folder / "dataset.json").write_text(json.dumps(manifest, indent=1))


def _check_splits(train: _Writer, held_out: _Writer, settings: DatasetSettings) -> None:
    if not train.documents + held_out.documents:
        raise DataError("the corpus is empty: its files hold no text")
    if not train.documents or (settings.eval_fraction and not held_out.documents):
        raise DataError(
            f"of {train.documents + held_out.documents} documents {held_out.documents} are held "
            f"out with eval_fraction {settings.eval_fraction}: give more data, or change it (0 "
            "holds nothing out)"
        )


def unigram_entropy(counts: npt.NDArray[np.int64]) -> float:
    """Nats per token of a source that draws tokens independently, as often as ``counts``."""
    used = counts[counts > 0] / counts.sum()
    return float(-(used * np.log(used)).sum())


def _split_of(document: Document, settings: DatasetSettings) -> str:
    return "eval" if document.hash < settings.eval_fraction else "train"


def _tokenizer_texts(corpus: Corpus, settings: DatasetSettings) -> Iterator[str]:
    """Text to train a tokenizer on: not held out, and of a large corpus an even part."""
    share = min(_TOKENIZER_TEXT / max(corpus.size, 1), 1.0) * (1 - settings.eval_fraction)
    for document in corpus.documents():
        if settings.eval_fraction <= document.hash <= settings.eval_fraction + share:
            yield document.text


def _only_tokenizer_files(folder: str, names: list[str]) -> list[str]:
    """For ``copytree``: leave out weights and folders beside a tokenizer."""
    kept = (".json", ".txt", ".model", ".jinja")
    return [
        name
        for name in names
        if not name.endswith(kept)
        or ".index." in name
        or name in ("config.json", "generation_config.json")
        or os.path.isdir(os.path.join(folder, name))
    ]


def _chunks(documents: Iterator[Document]) -> Iterator[Sequence[Document]]:
    chunk: list[Document] = []
    size = 0
    for document in documents:
        chunk.append(document)
        size += len(document.text)
        if size >= _ENCODED_AT_ONCE:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


class _Writer:
    """Writes documents to a token file, a record batch at a time."""

    def __init__(self, path: Path, vocab_size: int) -> None:
        import pyarrow as pa

        self._pa = pa
        self._dtype = np.uint16 if vocab_size <= 1 << 16 else np.uint32
        schema = pa.schema([("tokens", pa.large_list(pa.from_numpy_dtype(self._dtype)))])
        self._writer = pa.ipc.new_file(str(path), schema)
        self._vocab_size = vocab_size
        self._pending: list[npt.NDArray[Any]] = []
        self._size = 0
        self.documents = 0
        self.counts = np.zeros(vocab_size, dtype=np.int64)

    def add(self, ids: list[int]) -> None:
        if not ids:
            return
        tokens = np.array(ids, dtype=self._dtype)
        self._pending.append(tokens)
        self._size += len(tokens)
        self.documents += 1
        if self._size >= _TOKENS_PER_BATCH:
            self._write()

    def close(self) -> None:
        if self._pending:
            self._write()
        self._writer.close()

    def _write(self) -> None:
        values = np.concatenate(self._pending)
        offsets = np.cumsum([0, *(len(tokens) for tokens in self._pending)], dtype=np.int64)
        rows = self._pa.LargeListArray.from_arrays(offsets, values)
        self._writer.write_batch(self._pa.record_batch([rows], names=["tokens"]))
        self.counts += np.bincount(values, minlength=self._vocab_size)
        self._pending, self._size = [], 0
