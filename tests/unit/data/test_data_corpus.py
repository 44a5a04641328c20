from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpcml.data.corpus import Corpus, DataError, find_corpus


def texts(corpus: Corpus) -> list[str]:
    return [document.text for document in corpus.documents()]


def test_files_are_read_in_the_order_of_their_paths(tmp_path: Path) -> None:
    for name in ("b.txt", "a.md", "c.py"):
        (tmp_path / name).write_text(f"text of {name}\n")
    corpus = find_corpus(None, [str(tmp_path / "*.py"), str(tmp_path / "*")])
    assert texts(corpus) == ["text of a.md\n", "text of b.txt\n", "text of c.py\n"]


def test_jsonl_and_parquet_give_their_text(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    lines = [json.dumps({"text": "one", "other": 1}), "", json.dumps({"text": "zwei ü"})]
    (tmp_path / "a.jsonl").write_text("\n".join(lines), encoding="utf-8")
    pq.write_table(
        pa.table({"text": ["three", None, "four"], "n": [1, 2, 3]}), tmp_path / "b.parquet"
    )
    corpus = find_corpus(None, [str(tmp_path / "*")])
    assert texts(corpus) == ["one", "zwei ü", "three", "four"]


def test_a_line_without_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"txt": "two"}\n')
    with pytest.raises(DataError, match=r"a\.jsonl, line 2"):
        texts(find_corpus(None, [str(tmp_path / "a.jsonl")]))


def test_a_parquet_file_without_text_is_named(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"content": ["x"]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="no column `text`"):
        texts(find_corpus(None, [str(tmp_path / "a.parquet")]))


def test_a_few_large_files_become_many_documents_and_nothing_is_lost(tmp_path: Path) -> None:
    text = "".join(f"line {number} of a long text\n" for number in range(40_000))
    (tmp_path / "a.txt").write_text(text)
    documents = list(find_corpus(None, [str(tmp_path / "a.txt")]).documents())
    assert len(documents) > 100
    assert "".join(document.text for document in documents) == text
    assert [document.complete for document in documents] == [False] * (len(documents) - 1) + [True]
    assert all(document.text.endswith("\n") for document in documents)


def test_a_single_endless_line_is_cut(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x" * 3_000_000)
    documents = list(find_corpus(None, [str(tmp_path / "a.txt")]).documents())
    assert sum(len(document.text) for document in documents) == 3_000_000
    assert max(len(document.text) for document in documents) <= 1 << 20
    assert [document.complete for document in documents].count(True) == 1


def test_the_digest_is_of_the_content_not_of_the_place(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.txt").write_text("same")
    one, two = (find_corpus(None, [str(tmp_path / name / "a.txt")]) for name in ("one", "two"))
    assert one.digest() == two.digest()
    (tmp_path / "two" / "a.txt").write_text("else")
    assert one.digest() != two.digest()


def test_the_standard_library_is_source_without_tests() -> None:
    files = find_corpus("python-stdlib", []).files
    names = [str(file) for file in files]
    assert any(name.endswith("/argparse.py") for name in names)
    assert not any("/test/" in name or "site-packages" in name for name in names)
    assert 3e6 < sum(file.stat().st_size for file in files) < 20e6


@pytest.mark.parametrize(
    ("source", "patterns", "says"),
    [
        (None, [], "no data"),
        (None, ["/nowhere/*.txt"], "no file matches '/nowhere"),
        ("wikipedia", [], "no corpus is called 'wikipedia'"),
    ],
)
def test_what_is_missing_is_told(source: str | None, patterns: list[str], says: str) -> None:
    with pytest.raises(DataError, match=says):
        find_corpus(source, patterns)
