"""Every source on small files of its official format, and on the real ones where they are at hand."""

import base64
import gzip
import json

import pytest

from spalm.corpus import CorpusSettings
from spalm.errors import InputError


def source(**settings):
    return CorpusSettings.parse({"source": settings, "tokeniser": {"kind": "bytes"}}, "test").source


def read(source, split) -> dict[str, bytes]:
    return {document.name: b"".join(document.pieces) for document in source.documents(split)}


WIKI = (
    " \n = First = \n \n Text = with = signs \n = not a title = \n = = Section = = \n More . \n \n"
    " = Second @-@ one = \n \n End . \n"
)


def test_wikitext_articles(tmp_path):
    for name in ("train", "valid", "test"):
        (tmp_path / f"wiki.{name}.tokens").write_text(WIKI)
    found = source(kind="wikitext", path=str(tmp_path))
    documents = read(found, "dev")
    assert list(documents) == ["First", "Second @-@ one"]
    assert b"".join(documents.values()).decode() == WIKI
    (tmp_path / "wiki.test.tokens").unlink()
    with pytest.raises(InputError, match=r"there is no .*wiki.test.tokens"):
        found.files()


def test_enwik8_prefix_is_cut_90_5_5_at_bytes(tmp_path):
    page = "  <page>\n    <title>Page %d</title>\n    <text>ä%s</text>\n  </page>\n"
    content = ("<mediawiki>\n" + "".join(page % (i, "x" * i) for i in range(50))).encode()
    (tmp_path / "head").write_bytes(content)
    found = source(kind="enwik8", path=str(tmp_path / "head"))
    parts = {split: b"".join(read(found, split).values()) for split in ("train", "dev", "test")}
    assert b"".join(parts.values()) == content
    assert len(parts["dev"]) == len(parts["test"]) == len(content) // 20
    assert list(read(found, "train"))[:3] == ["train: before the first page", "Page 0", "Page 1"]


def test_enwik8_whole_has_the_standard_split(tmp_path):
    with (tmp_path / "enwik8").open("wb") as file:
        file.truncate(100_000_000)
    bounds = source(kind="enwik8", path=str(tmp_path / "enwik8")).bounds()
    assert bounds == {"train": (0, 90_000_000), "dev": (90_000_000, 95_000_000), "test": (95_000_000, 100_000_000)}


def news(path, dates):
    lines = [
        b"\t".join([date.encode(), base64.b64encode(f"Article {i} of {date} .\nTwo .".encode()), b"dW5zcGxpdA=="])
        for i, date in enumerate(dates)
    ]
    path.write_bytes(gzip.compress(b"\n".join(lines) + b"\n"))


def test_wmt_news_is_split_by_month_and_sampled_in_date_order(tmp_path):
    dates = [f"2019{month:02d}{day:02d}" for month in range(1, 13) for day in (3, 2, 1)] + ["20191130"] * 100
    news(tmp_path / "news-docs.2019.en.filtered.gz", dates)
    found = source(kind="wmt-news", path=str(tmp_path), sample_tokens=100)
    train, dev, test = (read(found, split) for split in ("train", "dev", "test"))
    assert len(train) == 30
    assert all(int(name[5:7]) <= 10 for name in train)
    assert train["2019-01-03/1"] == b"Article 0 of 20190103 .\nTwo .\n"
    # 103 articles of seven words in November, 80 words wanted.
    assert 9 <= len(dev) <= 13
    assert [name[:10] for name in dev] == sorted(name[:10] for name in dev)
    assert [name[:10] for name in test] == ["2019-12-01", "2019-12-02", "2019-12-03"]


@pytest.mark.parametrize("line", ["hello\tdGV4dA==", "20191301\tdGV4dA==", "20190101", "20190101\t***"])
def test_wmt_news_of_another_format(tmp_path, line):
    (tmp_path / "news.txt").write_text("20190101\tdGV4dA==\n" + line + "\n")
    with pytest.raises(InputError, match=r"news.txt, line 2"):
        read(source(kind="wmt-news", path=str(tmp_path)), "train")


def test_text_files_are_split_by_document(text_folder):
    (text_folder / "more").mkdir()
    (text_folder / "more" / "notes.md").write_text("# Notes\n")
    (text_folder / "code.py").write_text("x = 1\n")
    (text_folder / "picture.png").write_bytes(b"\x89PNG")
    (text_folder / "packed.txt.gz").write_bytes(gzip.compress(b"packed\n"))
    records = [{"text": f"record {i}\n", "title": f"t{i}"} for i in range(3)]
    (text_folder / "many.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    found = source(kind="text", path=str(text_folder))
    splits = [read(found, split) for split in ("train", "dev", "test")]
    names = [name for split in splits for name in split]
    assert len(names) == len(set(names)) == 12 + 3 + 3
    assert {"more/notes.md", "code.py", "packed.txt.gz", "many.jsonl/t0"} <= set(names)
    assert all(splits)
    everything = {name: text for split in splits for name, text in split.items()}
    assert everything["packed.txt.gz"] == b"packed\n"
    assert everything["many.jsonl/t2"] == b"record 2\n"
    other = read(source(kind="text", path=str(text_folder), split_seed=5), "test")
    assert set(other) != set(splits[2])


def test_a_documents_split_does_not_depend_on_the_others_order(text_folder):
    before = {split: set(read(source(kind="text", path=str(text_folder)), split)) for split in ("dev", "test")}
    (text_folder / "aaa-first.txt").write_text("x\n")
    after = {split: set(read(source(kind="text", path=str(text_folder)), split)) for split in ("dev", "test")}
    assert all(len(before[split] & after[split]) >= len(before[split]) - 1 for split in before)


def test_files_named_after_splits_are_the_splits(tmp_path):
    for name in ("train", "valid", "test"):
        (tmp_path / f"{name}.txt").write_text(f"{name}\n")
    found = source(kind="text", path=str(tmp_path))
    assert read(found, "dev") == {"valid.txt": b"valid\n"}
    assert read(found, "train") == {"train.txt": b"train\n"}


@pytest.mark.parametrize("packed", [False, True])
def test_a_single_file_is_cut_by_position_at_line_ends(tmp_path, packed):
    text = "".join(f"{'word ' * (i % 7)}line {i}\n" for i in range(500)).encode()
    name = "book.txt.gz" if packed else "book.txt"
    (tmp_path / name).write_bytes(gzip.compress(text) if packed else text)
    found = source(kind="text", path=str(tmp_path / name), dev_share=0.1, test_share=0.2)
    splits = {split: read(found, split) for split in ("train", "dev", "test")}
    assert [list(documents) for documents in splits.values()] == [
        [f"{name} ({split})"] for split in ("train", "dev", "test")
    ]
    parts = [b"".join(documents.values()) for documents in splits.values()]
    assert b"".join(parts) == text
    assert all(part.endswith(b"\n") for part in parts)
    for part, share in zip(parts, (0.7, 0.1, 0.2)):
        assert abs(len(part) - share * len(text)) < 50
    assert "1 document(s) are too few" in found.split_notice()
    assert "70% train, 10% dev, 20% test" in found.split_notice()


def test_two_files_are_cut_each_and_one_of_a_few_lines_is_for_training(tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text("".join(f"{name} {i}\n" for i in range(100)))
    found = source(kind="text", path=str(tmp_path))
    assert list(read(found, "dev")) == ["a.txt (dev)", "b.txt (dev)"]
    (tmp_path / "b.txt").write_text("two\nlines\n")
    assert list(read(found, "train")) == ["a.txt (train)", "b.txt"]
    assert list(read(found, "test")) == ["a.txt (test)"]
    (tmp_path / "c.txt").write_text("three\n")
    assert found.split_notice() is None
    assert sorted(name for split in ("train", "dev", "test") for name in read(found, split)) == [
        "a.txt",
        "b.txt",
        "c.txt",
    ]


def test_one_endless_line_is_cut_at_spaces(tmp_path):
    text = "wörter ohne ende ".encode() * 200_000
    (tmp_path / "line.txt").write_bytes(text)
    found = source(kind="text", path=str(tmp_path))
    parts = [b"".join(read(found, split).values()) for split in ("train", "dev", "test")]
    assert b"".join(parts) == text
    assert all(part.endswith(b" ") for part in parts)
    assert abs(len(parts[1]) - len(text) / 20) < 50


def test_document_start_cuts_files(tmp_path):
    (tmp_path / "wiki.txt").write_text("".join(f"= Title {i} =\nText {i}.\n\n" for i in range(5)))
    found = source(kind="text", path=str(tmp_path), document_start="^= (.*) =$")
    names = {name for split in ("train", "dev", "test") for name in read(found, split)}
    assert names == {f"Title {i}" for i in range(5)}


@pytest.mark.slow
def test_python_stdlib_is_there_and_whole():
    found = source(kind="python-stdlib")
    splits = {split: read(found, split) for split in ("train", "dev", "test")}
    names = [name for split in splits.values() for name in split]
    assert "json/decoder.py" in names
    assert not any("site-packages" in name or "/test" in name for name in names)
    total = sum(len(text) for split in splits.values() for text in split.values())
    assert total > 5_000_000
    for split in ("dev", "test"):
        assert 0.03 < sum(len(text) for text in splits[split].values()) / total < 0.12


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "text", "path": "nowhere"}, r"there is no nowhere.*SPALM_DATA"),
        ({"kind": "wikitext", "path": "nowhere"}, r"there is no nowhere"),
        ({"kind": "text", "path": "{tmp}"}, r"holds no .txt"),
    ],
)
def test_missing_text(tmp_path, monkeypatch, settings, message):
    monkeypatch.delenv("SPALM_DATA", raising=False)
    settings = {**settings, "path": settings["path"].replace("{tmp}", str(tmp_path))}
    with pytest.raises(InputError, match=message):
        source(**settings).files()


def test_bad_text(tmp_path):
    (tmp_path / "empty.txt").touch()
    with pytest.raises(InputError, match=r"empty.txt is empty"):
        source(kind="text", path=str(tmp_path)).files()
    (tmp_path / "empty.txt").unlink()
    (tmp_path / "cut.txt.gz").write_bytes(gzip.compress(b"text" * 1000)[:-20])
    with pytest.raises(InputError, match="not a whole gzip file"):
        list(source(kind="text", path=str(tmp_path)).documents("train"))
    (tmp_path / "cut.txt.gz").unlink()
    (tmp_path / "one.txt").write_text("one\n")
    with pytest.raises(InputError, match=r"one.txt cannot be split.*too few lines.*train.txt"):
        source(kind="text", path=str(tmp_path)).documents("train")
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"no": 1}\n')
    with pytest.raises(InputError, match=r"bad.jsonl, line 2"):
        source(kind="text", path=str(tmp_path)).documents("train")


def test_spalm_data_is_searched(tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "a.txt").write_text("a\n")
    monkeypatch.setenv("SPALM_DATA", str(tmp_path))
    assert source(kind="text", path="mine").files() == [("a.txt", tmp_path / "mine" / "a.txt")]


def test_real_wikitext_2(real_data):
    found = source(kind="wikitext", path=str(real_data / "wikitext-2"))
    assert [sum(1 for _ in found.documents(split)) for split in ("dev", "test")] == [60, 60]
    assert sum(1 for _ in found.documents("train")) == 600


def test_real_enwik8_prefix(real_data):
    path = real_data / "enwik8-prefix" / "enwik8.head"
    found = source(kind="enwik8", path=str(path))
    joined = b"".join(b"".join(read(found, split).values()) for split in ("dev", "test"))
    assert path.read_bytes().endswith(joined)
