"""Token arrays: right counts, right widths, resumed to the same bytes, bounded memory."""

import gzip
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from spalm.corpus import Corpus, CorpusSettings, TrainingBatches, build, build_corpus, tokenise_files
from spalm.corpus.tokens import token_dtype
from spalm.errors import InputError
from support.commands import script
from support.small_texts import word_corpus


def settings(path, tokeniser="bpe", size=300, **more):
    source = {"kind": "text", "path": str(path), **more}
    return CorpusSettings.parse({"source": source, "tokeniser": {"kind": tokeniser, "size": size}}, "test")


def test_tokens_documents_and_counts(text_folder, tmp_path):
    corpus = build_corpus(settings(text_folder), tmp_path / "c")
    for name in ("train", "dev", "test"):
        split = corpus.split(name)
        texts = {}
        for index, document in enumerate(split.names):
            begin = split.ends[index - 1] if index else 0
            ids = split.tokens[begin : split.ends[index]].tolist()
            assert ids[-1] == corpus.tokeniser.end_of_document
            texts[document] = corpus.tokeniser.decode(ids[:-1])
            assert split.document_of(int(begin)) == (document, 0)
            assert split.document_of(int(split.ends[index]) - 1) == (document, len(ids) - 1)
        assert texts == {document: (text_folder / document).read_text() for document in texts}
        whole = "".join(texts.values())
        assert split.words == len(whole.split()) + whole.count("\n")
        assert split.characters == len(whole)


def test_inputs_are_targets_moved_by_one(corpus):
    split = corpus.split("train")
    positions = np.array([[0, 1, 2], [5, 6, 7]])
    assert split.inputs(positions)[0].tolist() == [split.start, *split.tokens[:2]]
    assert split.inputs(positions)[1].tolist() == split.tokens[4:7].tolist()
    assert split.targets(positions)[0].tolist() == split.tokens[:3].tolist()


@pytest.mark.parametrize(("size", "dtype"), [(256, "u1"), (257, "<u2"), (65536, "<u2"), (65537, "<u4")])
def test_smallest_safe_width(size, dtype):
    assert token_dtype(size) == np.dtype(dtype)
    assert np.iinfo(token_dtype(size)).max >= size - 1


def test_changed_text_is_noticed(text_folder, tmp_path):
    first = build_corpus(settings(text_folder), tmp_path / "c").digest
    assert build_corpus(settings(text_folder), tmp_path / "c").digest == first
    (text_folder / "story-3.txt").write_text("Something else.\n" * 20)
    assert build_corpus(settings(text_folder), tmp_path / "c").digest != first


def test_renamed_text_is_noticed(text_folder, tmp_path):
    first = build_corpus(settings(text_folder), tmp_path / "c").digest
    text_folder.rename(tmp_path / "moved")
    moved = settings(tmp_path / "moved")
    assert build_corpus(moved, tmp_path / "d").manifest["parents"] == Corpus(tmp_path / "c").manifest["parents"]
    (tmp_path / "moved" / "story-3.txt").rename(tmp_path / "moved" / "tale-3.txt")
    assert build_corpus(moved, tmp_path / "d").digest != first


@pytest.mark.slow
def test_names_and_lines_of_any_kind(text_folder, tmp_path):
    with open(os.fsencode(text_folder) + b"/caf\xe9.txt", "wb") as file:  # noqa: PTH123
        file.write(b"une ligne\n" * 20)
    (text_folder / "endless.txt").write_bytes("w\u00f6rter ohne ende ".encode() * 100_000)
    corpus = build_corpus(settings(text_folder), tmp_path / "c")
    names = [name for split in ("train", "dev", "test") for name in corpus.split(split).names]
    assert len(names) == 14
    assert "caf?.txt" in names
    assert sum(corpus.split(split).words for split in ("train", "dev", "test")) > 300_000


def test_words_are_counted_as_the_word_tokeniser_counts(tmp_path):
    for name in ("train", "valid", "test"):
        (tmp_path / f"{name}.txt").write_text("a\u00a0b c\u3000d e\n")
    split = build_corpus(settings(tmp_path, "words", None), tmp_path / "c").split("test")
    assert split.words == len(split) == 6


def test_not_utf8_names_the_document(text_folder, tmp_path):
    (text_folder / "latin.txt").write_bytes("Gr\xfc\xdfe\n".encode("latin-1") * 30)
    with pytest.raises(InputError, match=r"latin.txt is not UTF-8 \(byte 0xfc\).*kind=bytes"):
        word_corpus(text_folder, tmp_path / "c")
    assert not (tmp_path / "c" / "manifest.json").exists()
    build_corpus(settings(text_folder, "bytes", None), tmp_path / "bytes")


def test_a_single_file_is_said_to_be_cut(tmp_path, capsys):
    (tmp_path / "book.txt").write_text("".join(f"line {i:03d} of the book\n" for i in range(300)))
    corpus = build_corpus(settings(tmp_path / "book.txt"), tmp_path / "c")
    said = [line for line in capsys.readouterr().err.splitlines() if "cut by position" in line]
    assert len(said) == 1
    assert corpus.split("dev").names == ["book.txt (dev)"]
    assert corpus.split("train").words == 270 * 6


@pytest.mark.slow
@pytest.mark.parametrize("files", [60, 1])
def test_killed_at_random_moments_it_resumes_to_the_same_bytes(tmp_path, files):
    folder = tmp_path / "text"
    folder.mkdir()
    random = np.random.default_rng(0)
    for index in range(60):
        with (folder / f"{index % files:02d}.txt").open("a") as file:
            file.write(" ".join(map(str, random.integers(0, 5000, 5_000))) + "\n")
    expected = build_corpus(settings(folder), tmp_path / "whole")
    (tmp_path / "build.py").write_text(
        "import sys; from pathlib import Path; from spalm.corpus import build, CorpusSettings\n"
        "build._SAVE_SECONDS = 0.0; build._BATCH_BYTES = 1\n"
        "build.build_corpus(CorpusSettings.model_validate_json(sys.argv[1]), Path(sys.argv[2]))"
    )
    kills = 0
    while True:
        process = script(tmp_path / "build.py", settings(folder).model_dump_json(), tmp_path / "killed")
        journal = tmp_path / "killed" / "journal.json"
        before = journal.read_bytes() if journal.exists() else None
        if kills < 3:  # let it get somewhere first, then stop it in the middle of something
            while process.poll() is None and (not journal.exists() or journal.read_bytes() == before):
                time.sleep(0.01)
            time.sleep(random.uniform(0, 0.2))
            if process.poll() is None:
                process.kill()
                kills += 1
        if process.wait() == 0:
            break
    assert kills > 0
    assert Corpus(tmp_path / "killed").manifest == expected.manifest
    Corpus(tmp_path / "killed").verify()


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the peak memory from /proc")
def test_a_large_text_passes_through_bounded_memory(tmp_path):
    """The peak does not grow with the text: 10 MB more of it add less than 6 MB.

    In a new Python: a fork would begin with free memory that the text could use.
    """
    code = (
        "import sys; from pathlib import Path; from spalm.corpus import CorpusSettings, build_corpus\n"
        "build_corpus(CorpusSettings.model_validate_json(sys.argv[1]), Path(sys.argv[2]))\n"
        "print(int(Path('/proc/self/status').read_text().split('VmHWM:')[1].split()[0]) / 1024)"
    )
    peaks = []
    for megabytes in (4, 14):
        folder = tmp_path / str(megabytes)
        folder.mkdir()
        for name, size in (("train", megabytes), ("valid", 1), ("test", 1)):
            line = b"all work and no play makes jack a dull boy , said the old man by the sea again and again\n"
            (folder / f"{name}.txt").write_bytes(line * (size * 1_000_000 // len(line)))
        command = [sys.executable, "-c", code, settings(folder, "words", None).model_dump_json(), str(folder / "out")]
        peaks.append(float(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
    assert peaks[1] - peaks[0] < 6


@pytest.mark.slow
def test_real_wikitext_2_has_its_published_counts(real_data, tmp_path):
    source = {"kind": "wikitext", "path": str(real_data / "wikitext-2")}
    corpus = build_corpus(CorpusSettings.parse({"source": source, "tokeniser": {"kind": "words"}}, "x"), tmp_path / "c")
    assert corpus.vocabulary == 33_278
    assert [len(corpus.split(split)) for split in ("train", "dev", "test")] == [2_088_628, 217_646, 245_569]
    assert [corpus.split(split).words for split in ("train", "dev", "test")] == [2_088_628, 217_646, 245_569]


class TestStreams:
    def test_lanes_are_contiguous(self, corpus):
        split = corpus.split("train")
        streams = TrainingBatches(split, lanes=3, segment=7, seed=1)
        batches = [streams.batch(step) for step in range(streams.segments_per_epoch)]
        for lane in range(3):
            positions = np.concatenate([batch.positions[lane] for batch in batches])
            assert (np.diff(positions) == 1).all()
            ids = np.concatenate([batch.targets[lane] for batch in batches])
            assert ids.tolist() == split.tokens[positions].tolist()
        seen = np.concatenate([batch.positions.ravel() for batch in batches])
        assert len(set(seen.tolist())) == len(seen) > len(split) - 3 * 7 - 3
        np.testing.assert_array_equal(batches[0].inputs[:, 1:], batches[0].targets[:, :-1])

    def test_epochs_begin_elsewhere_and_depend_only_on_the_seed(self, corpus):
        split = corpus.split("train")
        one, two, other = (TrainingBatches(split, 3, 7, seed=seed) for seed in (1, 1, 2))
        epoch = one.segments_per_epoch
        assert one.starts_epoch(0)
        assert one.starts_epoch(epoch)
        assert not one.starts_epoch(1)
        first, second = one.batch(0).positions, one.batch(epoch).positions
        assert (first[0, 0] - second[0, 0]) % 7 or first[0, 0] != second[0, 0]
        np.testing.assert_array_equal(one.batch(epoch + 2).positions, two.batch(epoch + 2).positions)
        assert (one.batch(epoch).positions != other.batch(epoch).positions).any()

    def test_too_little_text(self, corpus):
        with pytest.raises(InputError, match=r"lanes of one segment of 5000 need 20,000"):
            TrainingBatches(corpus.split("train"), 4, 5000, seed=0)


def test_files_without_text_make_no_document(corpus, tmp_path, capsys):
    folder = tmp_path / "more"
    folder.mkdir()
    for name, text in (("a.txt", ""), ("b.txt", "the cat sat .\n"), ("c.txt", "")):
        (folder / name).write_text(text)
    found = tokenise_files([folder], corpus.tokeniser)
    assert found.names == ["b.txt"]
    assert found.ends.tolist() == [len(found)]
    assert "a.txt is empty and makes no document" in capsys.readouterr().err
    with pytest.raises(InputError, match=r"a\.txt: there is no text in it"):
        tokenise_files([folder / "a.txt"], corpus.tokeniser)


@pytest.mark.parametrize(("tokeniser", "size"), [("words", None), ("bpe", 300)])
def test_documents_without_a_token_are_left_out(text_folder, tmp_path, capsys, tokeniser, size):
    without = build_corpus(settings(text_folder, tokeniser, size, split_seed=3), tmp_path / "without")
    empty = ["a.txt.gz", "story-5b.txt.gz", "z.txt.gz"]
    for name in empty:
        (text_folder / name).write_bytes(gzip.compress(b"   " if tokeniser == "words" else b""))
    corpus = build_corpus(settings(text_folder, tokeniser, size, split_seed=3), tmp_path / "c")
    said = capsys.readouterr().err
    assert all(f"{name} is empty and makes no document" in said for name in empty)
    assert {*_names(corpus)} == {*_names(without)}
    for split in ("train", "dev", "test"):
        assert (np.diff(corpus.split(split).ends, prepend=0) > 0).all()


def test_what_is_left_out_is_counted_when_a_killed_build_goes_on(text_folder, tmp_path, monkeypatch):
    for name in ("a.txt.gz", "story-5b.txt.gz", "story-7b.txt.gz", "z.txt.gz"):
        (text_folder / name).write_bytes(gzip.compress(b""))
    wanted = build_corpus(settings(text_folder), tmp_path / "whole").manifest
    monkeypatch.setattr(build, "_SAVE_SECONDS", -1.0)
    monkeypatch.setattr(build, "_BATCH_BYTES", 1)
    save, kills = build._Journal.save, 0

    def killed(journal):
        save(journal)
        raise KeyboardInterrupt

    while True:
        try:
            with monkeypatch.context() as patched:
                if kills < 14:
                    patched.setattr(build._Journal, "save", killed)
                found = build_corpus(settings(text_folder), tmp_path / "killed")
            break
        except KeyboardInterrupt:
            kills += 1
    assert kills == 14
    assert found.manifest == wanted


def _names(corpus: Corpus) -> list[str]:
    return [name for split in ("train", "dev", "test") for name in corpus.split(split).names]


def test_links_that_lead_in_a_circle_are_refused(corpus, tmp_path):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(InputError, match="its links lead in a circle"):
        tokenise_files([tmp_path / "loop"], corpus.tokeniser)
    with pytest.raises(InputError, match="home directory"):
        tokenise_files([Path("~nobody-of-that-name/x")], corpus.tokeniser)
