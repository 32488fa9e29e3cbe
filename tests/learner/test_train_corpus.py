"""The corpus: sources, tokenizers, writing once, opening with verification."""

from __future__ import annotations

import errno
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from decoupled_diloco.errors import DilocoError, Reason, UsageError
from learner_client.train.corpus import CorpusInfo, open_corpus, write_corpus
from learner_client.train.python_docs import python_docs
from learner_client.train.sources import find_files, read_pieces
from learner_client.train.tokenizer import ByteTokenizer, HFTokenizer, build_tokenizer

TEXT = "The quick brown fox jumps over the lazy dog.\n" * 100


def write(sources: list[str], destination: Path, **changes: Any) -> CorpusInfo:
    arguments: dict[str, Any] = {"sequence_length": 16, **changes}
    return write_corpus(sources, destination, ByteTokenizer(), **arguments)


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    path = tmp_path / "fox.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


def refused(reason: Reason, sources: list[str], destination: Path, **changes: Any) -> str:
    """Expects a refusal that leaves nothing behind; returns its message."""
    before = sorted(destination.parent.iterdir())
    with pytest.raises(UsageError) as caught:
        write(sources, destination, **changes)
    assert caught.value.reason == reason
    assert sorted(destination.parent.iterdir()) == before
    return caught.value.message


def test_every_token_is_either_trained_on_or_held_out(tmp_path: Path, text_file: Path) -> None:
    info = write([str(text_file)], tmp_path / "corpus", held_out_fraction=0.1)
    corpus = open_corpus(tmp_path / "corpus", info.hash)
    whole = np.frombuffer((TEXT + "\n\n").encode(), dtype=np.uint8)
    assert corpus.info == info
    assert info.num_held_out_tokens == round(0.1 * len(whole))
    assert np.array_equal(np.concatenate([corpus.train, corpus.held_out]), whole)
    assert corpus.tokenizer().decode(corpus.train[:9]) == "The quick"


def test_held_out_pieces_are_spread_over_a_long_text(tmp_path: Path) -> None:
    path = tmp_path / "long.txt"
    path.write_bytes(bytes(65 + index // 40_000 for index in range(400_000)))
    info = write([str(path)], tmp_path / "corpus", held_out_fraction=0.1)
    corpus = open_corpus(tmp_path / "corpus")
    assert len(np.unique(corpus.held_out)) >= 9
    assert info.num_tokens + info.num_held_out_tokens == 400_002


def test_hash_depends_on_the_text_and_not_on_its_path(tmp_path: Path, text_file: Path) -> None:
    copy = tmp_path / "elsewhere" / "other.txt"
    copy.parent.mkdir()
    copy.write_text(TEXT, encoding="utf-8")
    first = write([str(text_file)], tmp_path / "a")
    assert write([str(copy)], tmp_path / "b").hash == first.hash
    copy.write_text(TEXT.replace("lazy", "hazy", 1), encoding="utf-8")
    assert write([str(copy)], tmp_path / "c").hash != first.hash
    assert write([str(text_file)], tmp_path / "d", held_out_fraction=0.1).hash != first.hash


def test_default_corpus_is_deterministic_english_of_this_python(tmp_path: Path) -> None:
    root = tmp_path / "lib"
    (root / "pydoc_data").mkdir(parents=True)
    (root / "test").mkdir()
    (root / "pydoc_data" / "topics.py").write_text(
        'topics = {"assert": "The assert statement inserts debugging assertions."}\n'
    )
    docstring = '"""Documentation that is long enough to be of use to a model, \\d."""\n'
    (root / "module.py").write_text(f"raise SystemExit\n\n\ndef f():\n    {docstring}")
    (root / "again.py").write_text(docstring)
    (root / "broken.py").write_text("def f(:\n")
    (root / "test" / "test_module.py").write_text(docstring.replace("model", "test"))
    assert list(python_docs(root)) == [
        "The assert statement inserts debugging assertions.",
        "Documentation that is long enough to be of use to a model, \\d.",
    ]
    with pytest.raises(UsageError, match="--data") as caught:
        next(python_docs(tmp_path / "no-such-library"))
    assert caught.value.reason == Reason.DATA_MISSING


def test_this_python_carries_a_default_corpus(tmp_path: Path) -> None:
    info = write([], tmp_path / "corpus")
    assert 1_000_000 < info.num_tokens < 5_000_000
    assert info.sources[0].startswith("python-docs")
    corpus = open_corpus(tmp_path / "corpus")
    text = corpus.tokenizer().decode(corpus.train[:200_000])
    assert "\ufffd" not in text[:-4]
    assert text.count("the ") > 1000


def test_sources_are_found_once_and_in_order(tmp_path: Path) -> None:
    for name in ["b.txt", "a.md", "sub/c.rst", "picture.png", ".hidden.txt", ".git/d.txt"]:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("x")
    folder = [path.relative_to(tmp_path).as_posix() for path in find_files([str(tmp_path)])]
    assert folder == ["a.md", "b.txt", "sub/c.rst"]
    pattern = [path.name for path in find_files([f"{tmp_path}/**/*.rst", str(tmp_path / "b.txt")])]
    assert pattern == ["c.rst", "b.txt"]
    twice = find_files([str(tmp_path / "b.txt"), str(tmp_path)])
    assert [path.name for path in twice] == ["b.txt", "a.md", "c.rst"]
    assert find_files([str(tmp_path / "picture.png")]) == [tmp_path / "picture.png"]


def test_jsonl_gives_the_texts_of_its_records(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text('{"text": "one", "id": 1}\n\n{"text": "zwei é"}\n', encoding="utf-8")
    assert "".join(read_pieces(path)) == "one\n\nzwei é\n\n"
    path.write_text('{"body": "one"}\n')
    assert list(read_pieces(path, text_field="body")) == ["one\n\n"]


@pytest.mark.parametrize(
    ("line", "reason", "says"),
    [
        ('{"body": "x"}', Reason.DATA_EMPTY, r"line 2 .* no text in field 'text' \(fields: body\)"),
        ('{"text": 3}', Reason.DATA_EMPTY, "line 2"),
        ('{"text": ', Reason.DATA_BINARY, "line 2 .* is not JSON"),
        ('["text"]', Reason.DATA_BINARY, "is not a JSON object"),
        ('{"text": "\\ud800"}', Reason.DATA_BINARY, "half a surrogate pair"),
        ('{"text": "a\\u0000b"}', Reason.DATA_BINARY, "NUL"),
        ("[" * 100_000, Reason.DATA_BINARY, "line 2"),
    ],
)
def test_a_bad_jsonl_record_is_refused_by_line(
    tmp_path: Path, line: str, reason: Reason, says: str
) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text(f'{{"text": "fine"}}\n{line}\n')
    with pytest.raises(UsageError, match=says) as caught:
        list(read_pieces(path))
    assert caught.value.reason == reason


def test_byte_order_mark_and_line_ends_are_normalised(tmp_path: Path) -> None:
    path = tmp_path / "windows.txt"
    path.write_bytes(b"\xef\xbb\xbfone\r\ntwo\r\n")
    assert "".join(read_pieces(path)) == "one\ntwo\n"


def test_bad_sources_are_refused_each_with_its_reason(tmp_path: Path, text_file: Path) -> None:
    binary, latin, empty = (tmp_path / name for name in ("nul.txt", "latin.txt", "empty.txt"))
    binary.write_bytes(b"GIF\0\0\0" + b"x" * 5000)
    latin.write_bytes("naïve ".encode("latin-1") * 1000)
    empty.write_text(" \n\n")
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "song.mp3").write_bytes(b"\0")
    out = tmp_path / "corpus"
    assert "no/such" in refused(Reason.DATA_MISSING, ["no/such/file.txt"], out)
    assert "empty" in refused(Reason.DATA_MISSING, [""], out)
    assert "cannot be read" in refused(Reason.DATA_MISSING, ["x" * 5000], out)
    assert "*.nope" in refused(Reason.DATA_MISSING, [f"{tmp_path}/*.nope"], out)
    assert "neither" in refused(Reason.DATA_MISSING, ["/dev/null"], out)
    assert "bare" in refused(Reason.DATA_EMPTY, [str(bare)], out)
    assert "no text" in refused(Reason.DATA_EMPTY, [str(empty)], out)
    assert "nul.txt" in refused(Reason.DATA_BINARY, [str(text_file), str(binary)], out)
    assert "0xef" in refused(Reason.DATA_BINARY, [str(latin)], out)
    message = refused(Reason.DATA_EMPTY, [str(text_file)], out, sequence_length=5000)
    assert "4502 tokens" in message
    assert "5001" in message
    refused(Reason.CONFIG_INVALID, [str(text_file)], out, held_out_fraction=1.0)


def test_a_corpus_is_written_once(tmp_path: Path, text_file: Path) -> None:
    info = write([str(text_file)], tmp_path / "corpus")
    assert "already exists" in refused(
        Reason.CONFIG_CONFLICT, [str(text_file)], tmp_path / "corpus"
    )
    assert open_corpus(tmp_path / "corpus").info == info


def test_a_full_disk_is_said_and_leaves_nothing(
    tmp_path: Path, text_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr("learner_client.train.corpus.fsync_path", full)
    with pytest.raises(DilocoError, match="no space left") as caught:
        write([str(text_file)], tmp_path / "corpus")
    assert caught.value.reason == Reason.DISK_FULL
    assert list(tmp_path.iterdir()) == [text_file]


def test_another_corpus_than_the_run_has_is_refused(tmp_path: Path, text_file: Path) -> None:
    info = write([str(text_file)], tmp_path / "corpus")
    with pytest.raises(UsageError, match=info.hash[:12]) as caught:
        open_corpus(tmp_path / "corpus", "0" * 64)
    assert caught.value.reason == Reason.DATA_MISMATCH


def _flip(folder: Path) -> None:
    content = bytearray((folder / "train.bin").read_bytes())
    content[7] ^= 1
    (folder / "train.bin").write_bytes(content)


def _cut(folder: Path) -> None:
    (folder / "held_out.bin").write_bytes((folder / "held_out.bin").read_bytes()[:-1])


def _edit(folder: Path, **changes: object) -> None:
    values = json.loads((folder / "corpus.json").read_text())
    (folder / "corpus.json").write_text(json.dumps({**values, **changes}))


@pytest.mark.parametrize(
    "damage",
    [
        _flip,
        _cut,
        lambda folder: (folder / "corpus.json").write_text("{}"),
        lambda folder: (folder / "corpus.json").write_text("not json"),
        lambda folder: (folder / "corpus.json").write_bytes(b"\xff\xfe"),
        lambda folder: _edit(folder, dtype="float64"),
        lambda folder: _edit(folder, num_tokens=-1),
        lambda folder: _edit(folder, format_version=99),
        lambda folder: _edit(folder, surprise=1),
        lambda folder: _edit(folder, vocab_size=257),
    ],
)
def test_a_damaged_corpus_is_refused(tmp_path: Path, text_file: Path, damage: Any) -> None:
    folder = tmp_path / "corpus"
    write([str(text_file)], folder)
    damage(folder)
    with pytest.raises(UsageError) as caught:
        open_corpus(folder)
    assert caught.value.reason == Reason.DATA_MISMATCH


@pytest.mark.parametrize("name", ["train.bin", "held_out.bin", "corpus.json"])
def test_a_folder_without_a_file_is_no_corpus(tmp_path: Path, text_file: Path, name: str) -> None:
    write([str(text_file)], tmp_path / "corpus")
    (tmp_path / "corpus" / name).unlink()
    with pytest.raises(UsageError, match=name) as caught:
        open_corpus(tmp_path / "corpus")
    assert caught.value.reason == Reason.DATA_MISSING


def test_bytes_round_trip_and_bad_bytes_become_replacements() -> None:
    tokenizer = build_tokenizer("bytes")
    assert isinstance(tokenizer, ByteTokenizer)
    assert tokenizer.decode(tokenizer.encode("naïve 🦊")) == "naïve 🦊"
    assert tokenizer.decode([0x66, 0xFF, 0x6F]) == "f\ufffdo"


@pytest.fixture
def tokenizer_file(tmp_path: Path) -> Path:
    tokenizers = pytest.importorskip("tokenizers")
    words = {"[UNK]": 0, "the": 1, "fox": 2, "dog": 400}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def test_hugging_face_tokens_make_a_corpus_that_needs_the_file_no_more(
    tmp_path: Path, tokenizer_file: Path
) -> None:
    text = tmp_path / "fox.txt"
    text.write_text("the fox the dog " * 200)
    tokenizer = build_tokenizer(str(tokenizer_file))
    assert tokenizer.vocab_size == 401
    info = write_corpus([str(text)], tmp_path / "corpus", tokenizer, sequence_length=8)
    tokenizer_file.unlink()
    corpus = open_corpus(tmp_path / "corpus", info.hash)
    assert (info.dtype, info.vocab_size) == ("uint16", 401)
    assert corpus.train[:4].tolist() == [1, 2, 1, 400]
    assert corpus.tokenizer().decode(corpus.train[:4]) == "the fox the dog"


def test_a_corpus_with_another_tokenizer_file_is_refused(
    tmp_path: Path, tokenizer_file: Path
) -> None:
    text = tmp_path / "fox.txt"
    text.write_text("the fox the dog " * 200)
    write_corpus([str(text)], tmp_path / "corpus", HFTokenizer(tokenizer_file), sequence_length=8)
    kept = tmp_path / "corpus" / "tokenizer.json"
    kept.write_text(kept.read_text().replace("fox", "cat"))
    with pytest.raises(UsageError) as caught:
        open_corpus(tmp_path / "corpus").tokenizer()
    assert caught.value.reason == Reason.DATA_MISMATCH


def test_a_bad_tokenizer_setting_says_what_to_do(
    tmp_path: Path, tokenizer_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    foreign = tmp_path / "foreign.json"
    foreign.write_text('{"hello": 1}')
    for setting, says in [("byte", "'bytes'"), (str(foreign), "not a Hugging Face")]:
        with pytest.raises(UsageError, match=says) as caught:
            build_tokenizer(setting)
        assert caught.value.reason == Reason.CONFIG_INVALID
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(UsageError, match=r"decoupled-diloco\[tokenizers\]") as caught:
        build_tokenizer(str(tokenizer_file))
    assert caught.value.reason == Reason.CONFIG_INVALID
