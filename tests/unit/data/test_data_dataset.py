from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from hpcml.data import dataset as module
from hpcml.data.corpus import Corpus, DataError, find_corpus
from hpcml.data.dataset import (
    IGNORE,
    Dataset,
    DatasetSettings,
    DocumentSamples,
    PackedSamples,
    TokenFile,
    open_dataset,
    unigram_entropy,
)

pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")

SETTINGS = DatasetSettings(tokenizer=None, vocab_size=300, add_eos_token=True, eval_fraction=0.2)


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    folder = tmp_path / "corpus"
    folder.mkdir()
    texts = [f"sentence {n} says {n * n} and nothing else\n" * (n % 5 + 1) for n in range(120)]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (folder / "all.jsonl").write_text(lines)
    return find_corpus(None, [str(folder / "*.jsonl")])


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "data"


def all_tokens(file: TokenFile) -> list[int]:
    return file.slice(0, file.tokens).tolist()


def test_every_text_can_be_read_back(corpus: Corpus, root: Path) -> None:
    dataset = open_dataset(root, corpus, SETTINGS)
    tokenizer = transformers.AutoTokenizer.from_pretrained(dataset.tokenizer)
    found = []
    for split in ("train", "eval"):
        file = dataset.split(split)
        for index in range(file.documents):
            tokens = file.document(index).tolist()
            assert tokens[-1] == tokenizer.eos_token_id
            found.append(tokenizer.decode(tokens[:-1]))
    assert sorted(found) == sorted(document.text for document in corpus.documents())
    assert dataset.split("eval").documents == pytest.approx(24, abs=10)
    assert len(tokenizer) == dataset.vocab_size == 300


def test_the_special_tokens_are_known(corpus: Corpus, root: Path) -> None:
    """Also those of a data set that an older version made, which did not write them down."""
    dataset = open_dataset(root, corpus, SETTINGS)
    tokenizer = transformers.AutoTokenizer.from_pretrained(dataset.tokenizer)
    expected = {name: getattr(tokenizer, name) for name in dataset.special_tokens}
    assert set(expected) == {"bos_token_id", "eos_token_id", "pad_token_id"}
    assert dataset.special_tokens == expected
    file = dataset.folder / "dataset.json"
    manifest = json.loads(file.read_text())
    del manifest["special_tokens"]
    file.write_text(json.dumps(manifest))
    assert open_dataset(root, corpus, SETTINGS) == dataset


def test_any_bytes_survive_the_tokenizer(root: Path, tmp_path: Path) -> None:
    texts = ["ünïcödé 漢字 🎉\t\x00 \n\n  spaces", "plain " * 50]
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    settings = DatasetSettings(None, 280, False, 0.0)
    dataset = open_dataset(root, find_corpus(None, [str(file)]), settings)
    tokenizer = transformers.AutoTokenizer.from_pretrained(dataset.tokenizer)
    train = dataset.split("train")
    assert [tokenizer.decode(train.document(n).tolist()) for n in range(2)] == texts


def test_the_same_content_gives_the_same_files(corpus: Corpus, tmp_path: Path) -> None:
    one = open_dataset(tmp_path / "one", corpus, SETTINGS)
    other = open_dataset(tmp_path / "other", corpus, SETTINGS)
    assert one.folder.name == other.folder.name
    for name in ("train.arrow", "eval.arrow", "dataset.json", "tokenizer/tokenizer.json"):
        assert (one.folder / name).read_bytes() == (other.folder / name).read_bytes()


@pytest.mark.parametrize(
    "changed",
    [
        DatasetSettings(None, 290, True, 0.2),
        DatasetSettings(None, 300, False, 0.2),
        DatasetSettings(None, 300, True, 0.3),
    ],
)
def test_other_settings_are_another_dataset(
    corpus: Corpus, root: Path, changed: DatasetSettings
) -> None:
    one = open_dataset(root, corpus, SETTINGS)
    assert open_dataset(root, corpus, SETTINGS).folder == one.folder
    assert open_dataset(root, corpus, changed).folder != one.folder


def test_a_changed_file_is_noticed(corpus: Corpus, root: Path) -> None:
    one = open_dataset(root, corpus, SETTINGS)
    os.utime(corpus.files[0], ns=(0, 0))
    assert open_dataset(root, corpus, SETTINGS).folder == one.folder
    text = corpus.files[0].read_text().replace("nothing", "nothinX")
    corpus.files[0].write_text(text)
    os.utime(corpus.files[0], ns=(10**18, 10**18))
    assert open_dataset(root, corpus, SETTINGS).folder != one.folder


def test_record_batches_make_no_difference(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = open_dataset(tmp_path / "one", corpus, SETTINGS).split("train")
    monkeypatch.setattr(module, "_TOKENS_PER_BATCH", 64)
    monkeypatch.setattr(module, "_ENCODED_AT_ONCE", 100)
    other = open_dataset(tmp_path / "other", corpus, SETTINGS).split("train")
    assert len(other._values) > 10 > len(one._values)
    assert all_tokens(one) == all_tokens(other)
    indices = np.array([5, 0, 60, 59, 33])
    assert one.lengths(indices).tolist() == other.lengths(indices).tolist()
    assert [one.document(n).tolist() for n in indices] == [
        other.document(n).tolist() for n in indices
    ]
    packed = [PackedSamples(file, 100).batch(np.array([3, 0])) for file in (one, other)]
    assert np.array_equal(packed[0], packed[1])


def test_tokens_are_views_of_the_file(corpus: Corpus, root: Path) -> None:
    file = open_dataset(root, corpus, SETTINGS).split("train")
    assert file.slice(3, 50).base is not None
    assert file.document(2).dtype == np.uint16
    assert not file.slice(0, 10).flags.writeable


def test_packed_targets_are_the_next_tokens(corpus: Corpus, root: Path) -> None:
    file = open_dataset(root, corpus, SETTINGS).split("train")
    tokens = all_tokens(file)
    samples = PackedSamples(file, 10)
    assert len(samples) == (len(tokens) - 1) // 10
    inputs, targets = samples.batch(np.array([7, len(samples) - 1]))
    assert inputs.shape == targets.shape == (2, 10)
    assert inputs[0].tolist() == tokens[70:80]
    assert targets[0].tolist() == tokens[71:81]


def test_documents_are_cut_or_padded(corpus: Corpus, root: Path) -> None:
    file = open_dataset(root, corpus, SETTINGS).split("train")
    samples = DocumentSamples(file, max_length=40, padding=0)
    lengths = file.lengths(np.arange(file.documents))
    short, long = int(lengths.argmin()), int(lengths.argmax())
    assert lengths[short] < 40 < lengths[long]
    inputs, targets = samples.batch(np.array([short, long]))
    assert inputs.shape == (2, 40)
    used = int(lengths[short]) - 1
    assert inputs[0, :used].tolist() == file.document(short)[:-1].tolist()
    assert targets[0, :used].tolist() == file.document(short)[1:].tolist()
    assert set(targets[0, used:].tolist()) == {IGNORE}
    assert targets[1].tolist() == file.document(long)[1:41].tolist()


def test_the_unigram_entropy_is_in_nats() -> None:
    assert unigram_entropy(np.array([5, 5, 0, 5, 5])) == pytest.approx(np.log(4))


def build(root: Path, corpus: Corpus) -> None:
    open_dataset(root, corpus, SETTINGS)


def test_many_builders_make_one_dataset(corpus: Corpus, root: Path) -> None:
    context = multiprocessing.get_context("spawn")
    builders = [context.Process(target=build, args=(root, corpus)) for _ in range(3)]
    for builder in builders:
        builder.start()
    for builder in builders:
        builder.join(60)
        assert builder.exitcode == 0
    assert len([path for path in root.iterdir() if not path.name.startswith(".")]) == 1
    assert not list(root.glob(".building-*"))


def test_a_kill_leaves_nothing_half_made(root: Path, corpus: Corpus, tmp_path: Path) -> None:
    program = (
        "import sys, time\nfrom pathlib import Path\nfrom hpcml.data import dataset\n"
        "from hpcml.data.corpus import find_corpus\n"
        "dataset.load_tokenizer = lambda folder: time.sleep(60)\n"
        "dataset.open_dataset(Path(sys.argv[1]), find_corpus(None, [sys.argv[2]]),"
        " dataset.DatasetSettings(None, 300, True, 0.2))\n"
    )
    arguments = [sys.executable, "-c", program, str(root), str(corpus.files[0])]
    process = subprocess.Popen(arguments, env={**os.environ, "PYTHONPATH": os.getcwd()})
    end = time.monotonic() + 30
    while not list(root.glob(".building-*/tokenizer/tokenizer_config.json")):
        assert time.monotonic() < end
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not [path for path in root.iterdir() if not path.name.startswith(".")]
    dataset = open_dataset(root, corpus, SETTINGS)
    assert dataset.split("train").documents
    assert not list(root.glob(".building-*"))


def damage(dataset: Dataset) -> None:
    with open(dataset.folder / "train.arrow", "r+b") as file:
        file.truncate(100)


def test_a_damaged_dataset_is_told(corpus: Corpus, root: Path) -> None:
    damage(open_dataset(root, corpus, SETTINGS))
    with pytest.raises(DataError, match="it will be made again"):
        open_dataset(root, corpus, SETTINGS)


def test_a_given_tokenizer_is_used(corpus: Corpus, root: Path) -> None:
    trained = open_dataset(root, corpus, SETTINGS)
    given = DatasetSettings(trained.tokenizer, 2000, True, 0.2)
    dataset = open_dataset(root, corpus, given)
    assert dataset.vocab_size == 300
    assert all_tokens(dataset.split("eval")) == all_tokens(trained.split("eval"))


@pytest.mark.parametrize(
    ("text", "settings", "says"),
    [
        ("", SETTINGS, "the corpus is empty"),
        ('{"text": "only one"}', SETTINGS, "documents 0 are held out"),
        ('{"text": "x"}', DatasetSettings(None, 200, True, 0.0), "vocab_size 200 is too small"),
        ('{"text": "x"}', DatasetSettings(Path("/nowhere"), 300, True, 0.0), "no tokenizer folder"),
    ],
)
def test_mistakes_are_told(
    tmp_path: Path, root: Path, text: str, settings: DatasetSettings, says: str
) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(text)
    with pytest.raises(DataError, match=says):
        open_dataset(root, find_corpus(None, [str(file)]), settings)
    assert not list(root.glob(".building-*"))
