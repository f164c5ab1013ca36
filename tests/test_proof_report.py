"""Every table and picture of the study's report, of results of the form that the parts give."""

import pytest

from proof.report import TITLES, write_report
from proof.tables import in_percent, perplexities

ROWS = {"tokens": [100.0, 140.0, 90.0], "plain": [-300.0, -450.0, -260.0], "adaptive": [-250.0, -400.0, -230.0]}
INTERVAL = {"value": 0.51, "low": 0.4, "high": 0.62}


def curve(scale: float) -> dict:
    def point(keys: int, exact: int) -> dict:
        ablations = dict.fromkeys(("knn-lm", "adaptive, nearest only", "adaptive, exact only"), ROWS["adaptive"])
        return {
            "wanted": {"keys": keys, "exact": exact},
            "keys": keys,
            "exact": exact or 80_000,
            "learned_from": 12_000,
            "documents": {**ROWS, **ablations, "adaptive": [scale * each for each in ROWS["adaptive"]]},
            "dev": {},
            "overlap": {"8": 0.2, "16": 0.101, "32": 0.05, "64": 0.012},
            "clock": {"seconds": 50.0, "core_seconds": 98.0},
        }

    return {"domain": "any", "points": [point(10_000, 3_000_000), point(100_000, 3_000_000), point(100_000, 0)]}


def lora_run(rate: float) -> dict:
    return {
        "settings": {"rank": 8, "rate": rate},
        "core_seconds": 612.0,
        "tokens": 60_000,
        "dev_before": 3.1,
        "dev": 2.9,
    }


def compared(*, control: bool) -> dict:
    rows = ["LoRA, equal cost", "RAG", *(["LoRA of another domain, equal cost"] if control else [])]
    times = ("add", "index_added", "forget", "index_forgot", "rag_index")
    rag = {"query": 64, "passages": 1, "k1": 1.5, "b": 0.75}
    return {
        "documents": {**ROWS, **dict.fromkeys(rows, ROWS["adaptive"])},
        "tokens_in_memory": 28_000,
        "attaching": {"seconds": 300.0, "core_seconds": 590.0},
        "lora": {"equal": lora_run(1e-3), "until it stops": lora_run(3e-3), "stopped": True},
        "rag": {"tried": [{"settings": rag, "mean_log_p": -2.9}], "index_core_seconds": 0.4},
        "seconds_of_a_document": {name: {"median": 0.5, "least": 0.25, "most": 0.75} for name in times},
        "tokens_per_second": {"plain": 20.0, "ours": 15.0} | ({"ours, llama.cpp": 30.0} if control else {}),
    }


def asked() -> dict:
    figures = {"exact match": INTERVAL, "F1": INTERVAL, "citation precision": {**INTERVAL, "value": float("nan")}}
    settings = {"form": "completion", "passages": 1, "memory": False}
    way = {"settings": settings, "figures": figures, "counts": {"answered": 17}, "some answers": []}
    return {
        "reported_on": 365,
        "paragraphs": 60,
        "tuned_on": 100,
        "tried": [{"settings": settings, "F1": 0.4}, {"settings": {**settings, "memory": True}, "F1": 0.1}],
        "ways": {"closed book": way, "token memory": way},
        "differences": {"token memory - closed book": {"F1": {"value": 0.01, "low": -0.02, "high": 0.03}}},
    }


def harmed() -> dict:
    def change(percent: float) -> dict:
        on = {"perplexity": INTERVAL, "percent": {"value": percent, "low": percent - 0.5, "high": percent + 0.5}}
        return {"documents": 21, "tokens": 8000.0, "off": INTERVAL, "on": {"core": on, "with a library": on}}

    on = {"accuracy": INTERVAL, "points": INTERVAL, "to right": 3, "to wrong": 4, "margin": INTERVAL}
    measure = {"off": INTERVAL, "on": {"core": on, "with a library": on}}
    return {
        "memory": "footballers",
        "memories": {"core": {"keys": 1, "exact": 2}, "with a library": {"keys": 1, "exact": 20}},
        "own": change(-30.0),
        "texts": {"sotu": change(0.7), "wikitext-2": change(0.1)},
        "piqa": {"problems": 919, "accuracy": measure, "accuracy by token": measure},
        "gsm8k": change(0.2),
    }


def forgot() -> dict:
    state = {"first": 0.3, "geometric mean": 5.0, "membership": INTERVAL, "beyond never held": INTERVAL}
    differences = {
        "equal_to_the_bit": True,
        "largest_difference_of_a_probability": 1e-7,
        "same_answers": 1.0,
        "same_citations": 0.875,
    }
    part = {"differences": differences, "states": {"held": state, "forgotten": state}}
    kinds = {kind: {"added": part, "trained": part} for kind in ("exact", "faiss")}
    return {"memory": "footballers", "documents": 32, "trained": 31, "kinds": kinds}


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("report")
    results = {
        "curves": {"footballers": curve(1.0), "sotu": curve(1.05)},
        "beside": {"footballers": compared(control=True), "sotu": compared(control=False)},
        "questions": asked(),
        "harm": harmed(),
        "forgetting": forgot(),
    }
    write_report(folder, results)
    assert {path.stem for path in folder.glob("*.svg")} == set(results) == set(TITLES)
    return (folder / "report.md").read_text()


def test_every_table_has_as_many_columns_everywhere(report):
    tables = [part.splitlines() for part in report.split("\n\n") if part.startswith("| ")]
    assert len(tables) == 1 + 4 + 3 + 2 + 2
    for lines in tables:
        assert len({line.count(" | ") for line in lines}) == 1, lines[0]


@pytest.mark.parametrize(
    "shown",
    [
        "| footballers | 100,000 | 80,000 (core) | 12,000 | 3 | 10.1% | 1.2% |",
        "Median domain, each with its largest memory: -",
        "| LoRA of another domain, equal cost |",
        "footballers (3 documents)",
        "| footballers | our index of passages | - | 0.500 (0.250 to 0.750) |",
        "rank 8, rate 0.003; 2.1 passes; 3.100 to 2.900",
        "| ours, llama.cpp | 30.0 | - |",
        "| citation precision | - | - |",
        "| number: answered | 17 | 17 |",
        "| token memory - closed book | +0.010 [-0.020, +0.030] |",
        "| GSM8K, solutions | 21 | 8,000 |",
        "| PIQA, accuracy by token | with a library | 919 |",
        "with a library: 1 keys, 20 exact",
        "| faiss | training documents, forgotten | 31 | yes | 1.0e-07 | 100% | 88% |",
    ],
)
def test_what_was_measured_is_shown(report, shown):
    assert shown in report


def test_the_change_of_a_curve_is_that_of_its_documents(report):
    assert in_percent(perplexities(ROWS)["adaptive"]["change"]) in report


def test_a_report_of_one_part_is_written_while_others_are_missing(tmp_path):
    write_report(tmp_path, {"beside": {"sotu": compared(control=False)}})
    assert (tmp_path / "beside.svg").exists()
    assert "## Questions" not in (tmp_path / "report.md").read_text()
