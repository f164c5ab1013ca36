"""Every analysis against numbers counted one by one, the pictures against the tables, and the files against both."""

import csv
import json
import math
import shutil

import numpy as np
import pytest
from rich.console import Console
from scipy import stats

from spalm.compute import Execution, Hardware
from spalm.corpus import visible_token
from spalm.errors import InputError
from spalm.runs import NETWORKS, ROWS, FinishedRun, passage_of
from spalm.study import (
    ANALYSES,
    AnalysisRequest,
    available_analyses,
    make_request,
    run_analyses,
    vary_neighbours,
    write_report,
)
from spalm.study.analyses.by_neighbours import NeighbourVariant, by_neighbours
from spalm.study.drawing import draw_figure, inline_svg, write_text
from support.facts import SCRIPT


def times_in_training(finished) -> dict[int, int]:
    counts: dict[int, int] = {}
    for token in finished.corpus.split("train").tokens.tolist():
        counts[token] = counts.get(token, 0) + 1
    return counts


def bin_of(count: int) -> str:
    if count == 0:
        return "never"
    low = 10 ** (len(str(count)) - 1)
    return f"{low:,} to {10 * low - 1:,}"


def test_gains_and_losses_are_those_counted_one_by_one(on_test, finished, text, log_probabilities):
    expected: dict[str, list[int]] = {}
    counts = times_in_training(finished)
    for position, token in enumerate(text.tokens.tolist()):
        plain, short, long = (
            math.exp(log_probabilities[model][position]) for model in ("transformer", "transformer-xl", "spalm")
        )
        kinds = [
            short - plain >= 0.1,
            plain - short >= 0.1,
            long - short >= 0.1,
            short - long >= 0.1,
            short - plain >= 0.1 and long - plain >= 0.1,
        ]
        for name in (bin_of(counts.get(token, 0)), "all"):
            row = expected.setdefault(name, [0] * 6)
            for number, value in enumerate([True, *kinds]):
                row[number] += value
    found = ANALYSES["outputs"](on_test)
    rows = {row[0]: row[1:] for row in found.tables["counts"].rows if row[1]}
    assert rows == expected
    assert rows["all"][3] > rows["all"][4] > 0  # more tokens gain from the memory than lose, and some do lose
    # Bars: short-term gains, short-term losses, long-term gains, long-term losses, each by frequency.
    heights = [bar.get_height() for bar in found.picture().axes[0].patches]
    bins = [row for row in found.tables["counts"].rows[:-1] if row[1]]
    assert heights == pytest.approx(
        [sign * 100 * row[2 + kind] / row[1] for kind, sign in enumerate((1, -1, 1, -1)) for row in bins]
    )


def test_tokens_that_gain_are_listed_with_their_counts(on_test, finished, text, log_probabilities):
    found = ANALYSES["outputs"](on_test).tables["gainers"].rows
    tokeniser = finished.corpus.tokeniser
    token, positions, gains, losses, nats = found[0]
    here = [i for i, each in enumerate(text.tokens.tolist()) if visible_token(tokeniser, each) == token]
    raised = [math.exp(log_probabilities["spalm"][i]) - math.exp(log_probabilities["transformer-xl"][i]) for i in here]
    assert positions == len(here)
    assert gains == sum(each >= 0.1 for each in raised)
    assert losses == sum(each <= -0.1 for each in raised)
    assert nats == pytest.approx(
        sum(log_probabilities["spalm"][i] - log_probabilities["transformer-xl"][i] for i in here), rel=1e-4
    )


@pytest.mark.parametrize("name", ["position", "frequency"])
def test_perplexity_by_part_is_that_of_the_tokens_in_it(name, on_test, finished, text, log_probabilities):
    counts = times_in_training(finished)
    parts: dict[str, list[int]] = {}
    before = 0
    for position, token in enumerate(text.tokens.tolist()):
        before = 0 if position in text.ends.tolist() else before
        if name == "frequency":
            part = bin_of(counts.get(token, 0))
        else:
            low = 0 if before < 64 else 2 ** (before.bit_length() - 1)
            part = f"{low:,} to {max(63, 2 * low - 1):,}"
        parts.setdefault(part, []).append(position)
        before += 1
    found = ANALYSES[name](on_test)
    models = found.tables["parts"].columns[2:]
    assert {row[0]: row[1] for row in found.tables["parts"].rows} == {part: len(rows) for part, rows in parts.items()}
    for part, _, *values in found.tables["parts"].rows:
        for model, value in zip(models, values):
            mean = sum(log_probabilities[model][i] for i in parts[part]) / len(parts[part])
            assert value == pytest.approx(math.exp(-mean), rel=1e-5)
    lines = found.picture().axes[0].get_lines()
    assert [list(line.get_ydata()) for line in lines] == [
        [row[2 + number] for row in found.tables["parts"].rows] for number in range(len(models))
    ]


def test_the_gates_histogram_and_heatmap_are_the_gates(on_test, finished):
    gates = finished.records("spalm").of("test", "gate").astype(np.float32)
    assert gates.shape == (len(finished.corpus.split("test")), 32)
    histogram = ANALYSES["gates"](on_test)
    counts = [0] * 40
    for value in gates.reshape(-1).tolist():
        counts[min(39, int(np.searchsorted(np.linspace(0, 1, 41), value, side="right")) - 1)] += 1
    assert [row[2] for row in histogram.tables["histogram"].rows] == counts
    assert histogram.data["mean"] == pytest.approx(gates.mean(), abs=1e-5)
    bars = [bar.get_height() for bar in histogram.picture().axes[0].patches]
    assert bars == pytest.approx([100 * count / gates.size for count in counts])
    heatmap = ANALYSES["heatmap"](AnalysisRequest(finished, "test", passage=np.arange(7, 18)))
    np.testing.assert_allclose(heatmap.data["gates"], gates[7:18][:, heatmap.data["dimensions"]], atol=1e-4)
    assert [row[1] for row in heatmap.tables["tokens"].rows] == pytest.approx(gates[7:18].mean(1).tolist(), abs=1e-4)
    drawn = heatmap.picture().axes[0].images[0].get_array()
    np.testing.assert_allclose(drawn, heatmap.data["gates"], atol=1e-4)


def test_matches_by_rank_are_those_of_the_table(on_test, finished):
    entries, rows = finished.memory.entries(), ANALYSES["matches"](on_test).tables["ranks"].rows
    for column, split in enumerate(("train", "dev", "test"), start=1):
        stream, ids = finished.corpus.split(split), finished.neighbours.array(f"{split}.ids")
        values = entries.tokens(0, len(entries))
        for rank in range(ids.shape[1]):
            hits = [values[id] == target for id, target in zip(ids[:, rank], stream.tokens) if id >= 0]
            assert rows[rank][column] == pytest.approx(sum(hits) / len(hits))
    assert rows[4][1] is None  # four neighbours of training positions, sixteen of the others
    assert rows[0][2] == pytest.approx(finished.neighbours.facts["splits"]["dev"]["first_match"])


def test_every_pair_of_models_is_tested(on_test, finished, log_probabilities):
    rows = ANALYSES["significance"](on_test).tables["pairs"].rows
    assert len(rows) == math.comb(len(ROWS), 2)
    for one, other, gain, p in rows:
        a, b = np.array(log_probabilities[one], np.float64), np.array(log_probabilities[other], np.float64)
        assert gain == pytest.approx((b - a).mean())
        assert p == pytest.approx(stats.wilcoxon(a, b, method="asymptotic").pvalue)
    own = {row[1]: row[3] for row in rows if row[0] == "transformer-xl"}
    assert own["spalm"] == pytest.approx(finished.result("spalm")["p_against_transformer_xl"])


def test_strips_show_what_the_records_hold(finished, text):
    rows = np.arange(5, 45)
    found = ANALYSES["strips"](AnalysisRequest(finished, "test", passage=rows))
    tokeniser, entries = finished.corpus.tokeniser, finished.memory.entries()
    ids = finished.records("spalm").of("test", "neighbours")
    for row, line, hits in zip(rows, found.tables["tokens"].rows, found.data["hits"]):
        tokens = [int(entries.tokens(int(id), int(id) + 1)[0]) for id in ids[row]]  # ids are rows: nothing is forgotten
        assert line == [visible_token(tokeniser, int(token)) for token in (text.tokens[row], *tokens)]
        assert hits == [token == text.tokens[row] for token in tokens]
    drawn = [text.get_text() for text in found.picture().axes[0].texts]
    assert sorted(drawn) == sorted(cell for line in found.tables["tokens"].rows for cell in line)


def test_ablation_is_what_the_results_say(on_test, finished):
    rows = {row[0]: row for row in ANALYSES["ablation"](on_test).tables["models"].rows}
    for model, row in rows.items():
        assert row[1] == pytest.approx(finished.result(model)["test"])
    assert rows["transformer"][2] is None
    assert rows["knn-lm"][2] == pytest.approx(finished.result("transformer-xl")["test"])
    alone = finished.records("spalm").of("test", "without_memory")
    assert rows["spalm"][2] == pytest.approx(math.exp(-float(np.mean(alone, dtype=np.float64))))


@pytest.mark.slow
def test_neighbours_are_varied_at_test_and_by_training_anew(finished):
    assert "neighbours" not in available_analyses(finished)
    one_thread = Execution(Hardware("cpu", 1))
    vary_neighbours(finished, (0, 2, 17), one_thread, retrain=False)  # 17: more than the run's table holds
    vary_neighbours(finished, (5,), one_thread, retrain=True)  # more than the run's table holds for training positions
    assert "neighbours" in available_analyses(finished)
    rows = {row[0]: row[1:3] for row in by_neighbours(AnalysisRequest(finished, "test")).tables["counts"].rows}
    own = finished.result("spalm")["test"]
    assert rows[4] == [pytest.approx(own), pytest.approx(own)]
    assert rows[0] == [None, pytest.approx(finished.result("spalm")["without_long_term_memory"]["test"], rel=1e-4)]
    assert rows[2][0] is None
    assert own < rows[2][1] < rows[0][1]
    assert rows[5][1] is None
    assert rows[5][0] == pytest.approx(own, rel=0.2)
    retrained = json.loads((finished.directory / "by-neighbours" / "retrained-5" / "manifest.json").read_text())
    assert retrained["settings"]["spalm"]["gate"]["neighbours"] == 5
    assert NeighbourVariant(5, retrained=True).records(finished).exists()
    assert rows[17][1] == pytest.approx(own, rel=0.5)
    assert rows[17][1] not in (rows[4][1], rows[2][1])
    ticks = by_neighbours(AnalysisRequest(finished, "test")).picture().axes[0].get_xticks().tolist()
    assert ticks == list(range(len(rows)))


def test_files_hold_what_the_tables_show_and_are_the_same_again(on_test, tmp_path):
    for name in ("outputs", "gates"):
        found = ANALYSES[name](on_test)
        for folder in ("a", "b"):
            found.write(tmp_path / folder)
        whole = json.loads((tmp_path / "a" / f"{name}.json").read_text())
        for table, content in found.tables.items():
            assert whole["tables"][table]["rows"] == content.rows
            file = f"{name}.csv" if len(found.tables) == 1 else f"{name}-{table}.csv"
            columns, *rows = csv.reader((tmp_path / "a" / file).open(newline=""))
            assert columns == content.columns
            assert rows == [[str(cell) for cell in row] for row in content.rows]
        assert (tmp_path / "a" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes(), path.name


@pytest.mark.slow
def test_the_report_is_one_page_in_which_text_stays_text(finished, tmp_path):
    page = write_report(finished, tmp_path).read_text()
    assert SCRIPT not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "<img" not in page
    assert "<title>facts &lt;b&gt;" in page
    for outside in (' src="http', ' href="http', "@import", "<script", "url(http"):
        assert outside not in page
    for row in finished.results:
        assert f"{row['test']:.2f}" in page
    for name in available_analyses(finished):
        assert f'id="{name}"' in page
        assert (tmp_path / f"{name}.svg").exists()
    assert finished.network("spalm").digest in page
    identifiers = [part.split('"')[0] for part in page.split(' id="')[1:]]
    assert len(identifiers) == len(set(identifiers))


def test_pictures_in_a_page_take_its_colour(on_test):
    svg = inline_svg(ANALYSES["gates"](on_test).picture(), 'a "label" <&>', "gates")
    assert "currentColor" in svg
    assert "#1a2b3c" not in svg
    assert 'aria-label="a &quot;label&quot; &lt;&amp;&gt;"' in svg


def test_what_cannot_be_shown_is_refused(finished, tmp_path):
    with pytest.raises(InputError, match="no analysis 'gate'; take of strips, outputs"):
        run_analyses(AnalysisRequest(finished), ["gates", "gate"], tmp_path, console=Console(quiet=True))
    assert not list(tmp_path.iterdir())
    with pytest.raises(InputError, match="test has 2,250 tokens"):
        make_request(finished, "test", "spalm", first=2250, length=10)
    with pytest.raises(InputError, match="--model transformer-xl: it has no long-term memory; take one of knn-lm"):
        make_request(finished, "test", "transformer-xl")


def test_a_passage_ends_with_its_document(finished):
    assert make_request(finished, "dev", "spalm", first=745, length=10).passage.tolist() == list(range(745, 750))
    for length in (10, 300, 10_000):
        rows = passage_of(finished, "test", length)
        documents = finished.corpus.split("test").documents_of(rows)
        assert len(rows) <= min(length, 750)
        assert len(set(documents.tolist())) == 1


def test_curves_are_the_logs(on_test, finished):
    found = ANALYSES["curves"](on_test)
    for model in NETWORKS:
        lines = map(json.loads, (finished.directory / model / "metrics.jsonl").read_text().splitlines())
        dev = [[line["step"], line["dev_loss"]] for line in lines if "dev_loss" in line]
        assert [row[1:] for row in found.tables["dev"].rows if row[0] == model] == dev
    drawn = {tuple(map(tuple, line.get_xydata().tolist())) for line in found.picture().axes[0].get_lines()}
    for series in found.data["points"].values():
        assert {tuple(map(tuple, series["train"])), tuple(map(tuple, series["dev"]))} <= drawn


@pytest.mark.parametrize("name", ["matches", "significance", "ablation"])
def test_pictures_show_the_numbers_of_their_tables(on_test, name):
    found = ANALYSES[name](on_test)
    (table,) = found.tables.values()
    drawn = found.picture().axes[0]
    if name == "matches":
        lines = {line.get_label(): line.get_ydata().tolist() for line in drawn.get_lines()}
        for column, split in enumerate(("train", "dev", "test"), start=1):
            assert lines[split] == pytest.approx([100 * row[column] for row in table.rows if row[column] is not None])
    elif name == "significance":
        models = on_test.run.rows
        gains = drawn.images[0].get_array()
        for one, other, gain, _ in table.rows:
            assert gains[models.index(one), models.index(other)] == pytest.approx(gain)
    else:
        heights = [bar.get_height() for bar in drawn.patches]
        assert heights[: len(table.rows)] == pytest.approx([row[1] for row in table.rows])
        without = [math.nan if row[2] is None else row[2] for row in table.rows]
        assert heights[len(table.rows) :] == pytest.approx(without, nan_ok=True)


def test_text_in_a_picture_stays_as_it_is():
    """What looks like the picture's own names and colours, or like mathematics, in a token."""
    odd = 'id="x" href="#top" #1a2b3c url(#a) $b_1$ \x07'

    def draw(axes):
        write_text(axes, 0, 0, text=odd)

    svg = inline_svg(draw_figure(draw, 7, 4), "odd", "odd")
    assert 'id="x" href="#top" #1a2b3c url(#a) $b_1$ \ufffd' in svg


@pytest.mark.slow
def test_forgotten_documents_are_not_shown(finished, tmp_path):
    """After the run everything is forgotten: strips are empty, nothing matches, and everything can be drawn."""
    copy = shutil.copytree(finished.directory, tmp_path / "run")
    run = FinishedRun(copy)
    run.memory.forget(sorted(set(run.memory.entries().live_documents.names)))
    assert len(run.memory.entries()) == 0
    strips = ANALYSES["strips"](AnalysisRequest(run, "test"))
    assert all(cell is None for line in strips.tables["tokens"].rows for cell in line[1:])
    assert ANALYSES["matches"](AnalysisRequest(run, "test")).tables["ranks"].rows[0][1:] == [None, None, None]
    for name in available_analyses(run):
        assert ANALYSES[name](AnalysisRequest(run, "test")).picture().axes


def test_a_run_that_has_changed_is_refused(finished, tmp_path):
    copy = shutil.copytree(finished.directory, tmp_path / "run")
    rows = json.loads((copy / "results.json").read_text())
    (copy / "results.json").write_text(json.dumps([{**row, "records": 64 * "0"} for row in rows]))
    (copy / "SHA256SUMS").unlink()
    with pytest.raises(InputError, match=r"has changed since results.json was written; run the same `spalm run` again"):
        FinishedRun(copy).records("spalm")
    (copy / "results.json").write_text("[]")
    with pytest.raises(InputError, match=r"is damaged \(no row transformer-xl\); run the same `spalm run` again"):
        FinishedRun(copy)
    with pytest.raises(InputError, match=r"holds no finished run \(no results.json\)"):
        FinishedRun(tmp_path)
