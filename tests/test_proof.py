"""Pieces of the study in `bench_proof.py` that could be wrong without anybody noticing."""

import json
import time

import numpy as np
import pytest
import torch

from bench_proof import sizes_of
from proof import intervals
from proof.answers import CitationCounts, exact_match, f1, holds_reference, normalised
from proof.curves import sizes_of_curve
from proof.domains import WIKIPEDIA, Domains, take_tokens
from proof.forgetting import membership
from proof.harm import changes
from proof.lora import Budget, batches, padded, windows
from proof.questions import divided, figures, judged
from proof.rag import PassageRetriever, RagSettings, prompt_with_passages
from proof.report import shown, table
from proof.scores import sums_of_tails
from proof.study import Clock, Sizes, Study
from spalm.corpus import TokenStream
from spalm.errors import InputError


def stream(*lengths: int) -> TokenStream:
    ends = np.cumsum(lengths)
    names = [f"doc{number}" for number in range(len(lengths))]
    return TokenStream(np.arange(1, ends[-1] + 1), ends, lambda: names, start=0)


class Words:
    """A tokeniser of numbers, each of them a word."""

    def encode(self, pieces: list[bytes]) -> list[np.ndarray]:
        return [np.array([int(word[1:]) for word in piece.decode().split()], np.int64) for piece in pieces]

    def decode(self, ids) -> str:
        return " ".join(f"w{id}" for id in ids)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The Denver Broncos.", "denver broncos"),
        ("  an   apple, a day! ", "apple day"),
        ("theatre of another", "theatre of another"),
        ("$1.5 million", "15 million"),
        ("", ""),
    ],
)
def test_answers_are_normalised_as_squad_does(text, expected):
    assert normalised(text) == expected


def test_exact_match_takes_the_best_reference():
    assert exact_match("the 308", ["309", "308"]) == 1
    assert exact_match("308 points", ["308"]) == 0


def test_f1_counts_shared_words_as_often_as_both_have_them():
    assert f1("Denver Denver Broncos", ["Broncos of Denver"]) == pytest.approx(2 * 2 / (3 + 3))
    assert f1("in the city of Denver", ["Denver", "city of Denver"]) == pytest.approx(2 * 3 / (4 + 3))
    assert f1("Paris", ["Denver"]) == 0
    assert f1("the", ["Denver"]) == 0


def test_a_reference_is_held_by_whole_words():
    assert holds_reference("They gave up 308 points.", ["308"])
    assert not holds_reference("They gave up 1308 points.", ["308"])
    assert not holds_reference("anything", ["the"])


def test_citations_are_counted_against_the_right_paragraph():
    assert CitationCounts.of(["a", "b", "a"], "a") == CitationCounts(3, 2)
    assert not CitationCounts.of([], "a").found
    assert not CitationCounts.of(["b"], "a").found


def test_precision_and_recall_of_citations_are_those_of_answered_questions():
    def answered(text: str, cited: list[str], passages: list[str]) -> dict:
        question = {"question": "?", "answers": ["308"], "paragraph": "A/0"}
        return judged(
            question, {"text": text, "cited": [f"xquad.jsonl/{name}" for name in cited], "passages": passages}
        )

    found = figures(
        [
            answered("308", ["A/0", "A/1"], ["xquad.jsonl/A/0"]),
            answered("308", [], []),
            answered("no idea", ["A/1", "A/1", "A/1"], []),
        ]
    )
    assert found["exact match"]["value"] == pytest.approx(2 / 3)
    assert found["citation precision, answered questions"]["value"] == pytest.approx(1 / 2)
    assert found["citation recall, answered questions"]["value"] == pytest.approx(1 / 2)
    assert found["citation precision, all questions"]["value"] == pytest.approx(1 / 5)
    assert found["right paragraph in the prompt"]["value"] == pytest.approx(1 / 3)


def test_questions_to_tune_on_and_to_report_on_are_of_different_articles():
    asked = [{"article": f"a{number % 7}", "question": str(number)} for number in range(97)]
    tuning, reported = divided(asked, 40)
    assert {each["article"] for each in tuning}.isdisjoint({each["article"] for each in reported})
    assert len(tuning) == len(reported) == 20
    assert (tuning, reported) == divided(asked, 40)


def test_the_bootstrap_agrees_with_theory_and_is_seeded():
    values = np.random.default_rng(3).normal(5.0, 2.0, 400)
    found = intervals.of_means(values.tolist(), seed=1)
    error = values.std() / np.sqrt(len(values))
    assert found.value == pytest.approx(values.mean())
    assert found.low == pytest.approx(values.mean() - 1.96 * error, abs=0.2 * error)
    assert found.high == pytest.approx(values.mean() + 1.96 * error, abs=0.2 * error)
    assert found == intervals.of_means(values.tolist(), seed=1) != intervals.of_means(values.tolist(), seed=2)


def test_perplexities_are_of_all_tokens_and_changes_are_paired():
    random = np.random.default_rng(0)
    tokens = random.integers(5, 400, 31)
    plain = -3.0 * tokens + random.normal(0, 40, 31)  # documents differ much, the gain of each hardly
    ours = plain + 0.2 * tokens
    rows = {"tokens": tokens.tolist(), "plain": plain.tolist(), "adaptive": ours.tolist()}
    found = intervals.of_perplexities(rows, seed=1)
    assert found["plain"]["perplexity"].value == pytest.approx(np.exp(-plain.sum() / tokens.sum()))
    change = found["adaptive"]["change"]
    assert (change.low, change.value, change.high) == pytest.approx((np.exp(-0.2) - 1,) * 3)
    spread = found["plain"]["perplexity"]
    assert spread.high - spread.low > 0.1
    assert changes(rows)["percent"]["value"] == pytest.approx(100 * (np.exp(-0.2) - 1))


def test_a_ratio_without_a_whole_is_none():
    assert np.isnan(intervals.of_ratio([0.0, 0.0], [0.0, 0.0], seed=1).value)
    assert shown({"value": float("nan"), "low": 0, "high": 0}) == "-"
    assert intervals.of_ratio([1, 0, 2], [2, 0, 2], seed=1).value == pytest.approx(3 / 4)


def test_a_budget_counts_only_while_its_clock_runs_and_the_rate_ends_at_zero():
    budget = Budget(0.2)
    sum(number * number for number in range(300_000))
    assert budget.spent == 0
    rates = [budget.rate]
    while budget.spent < 1:
        begun = time.process_time()
        budget.start()
        while time.process_time() - begun < 0.01:
            pass
        budget.stop()
        rates.append(budget.rate)
    assert 0.2 <= budget.core_seconds < 0.3
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) <= 1
    assert rates[-1] == 0
    after = rates[rates.index(max(rates)) :]
    assert after == sorted(after, reverse=True)


def test_a_clock_adds_up_what_ran_within():
    clock = Clock(1.0, 2.0)
    with clock.running():
        time.sleep(0.02)
    assert 1.02 <= clock.seconds < 2
    assert 2.0 <= clock.core_seconds < 2.02


def test_every_token_of_a_pass_is_a_target_once():
    text = stream(5, 700, 64, 1)
    texts = windows(text, 128)
    assert [int(each[0]) for each in texts] == [0] * len(texts)
    found = []
    for inputs, targets in batches(texts, np.random.default_rng(0)):
        there = targets != -100
        found += targets[there].tolist()
        assert inputs.shape == targets.shape
        assert (inputs[:, 1:][there[:, 1:]] == targets[:, :-1][there[:, 1:]]).all()
    assert sorted(found) == text.tokens.tolist()
    assert padded([np.array([0, 3, 4]), np.array([0, 5])])[1].tolist() == [[3, 4], [5, -100]]


def test_a_prompt_with_passages_keeps_the_end_of_the_text_and_at_least_half_of_the_room_for_it():
    before = list(range(100, 150))
    passages = [np.arange(1, 6), np.arange(6, 11)]
    assert prompt_with_passages(before, passages, 0, room=80) == [0, *range(1, 11), *before]
    for room in (20, 33, 50, 61):
        found = prompt_with_passages(before, passages, 0, room=room)
        assert len(found) <= room
        assert found[0] == 0
        kept = [token for token in found if token >= 100]
        assert kept == before[-len(kept) :]
        assert len(kept) >= min(len(before), room // 2 - 1)
    assert prompt_with_passages([], [], 0, room=9) == [0]


def test_the_retriever_finds_the_passage_that_shares_words():
    pytest.importorskip("bm25s")
    text = stream(300, 200, 40)
    retriever = PassageRetriever(text, Words(), RagSettings(query=3, passages=2))
    assert [len(passage) for passage in retriever.passages] == [256, 44, 200, 40]
    (best,) = retriever.best([900, 901, 510, 511, 512])
    assert best.tolist() == list(range(501, 541))
    assert retriever.best([510, 900, 901, 902]) == [], "only the end of the text is the query"
    assert retriever.best([]) == []


def test_scores_are_summed_from_a_place_in_each_document_on():
    text = stream(3, 5, 2)
    scores = torch.arange(10).float()
    assert sums_of_tails(scores, text, [0, 2, 1]) == [0 + 1 + 2, 5 + 6 + 7, 9]


def test_membership_is_the_area_under_the_curve():
    from sklearn.metrics import roc_auc_score

    random = np.random.default_rng(2)
    members, others = random.integers(1, 30, 53), random.integers(1, 50, 37)
    labels = [1] * len(members) + [0] * len(others)
    expected = roc_auc_score(labels, -np.concatenate([members, others]))
    assert membership(members, others) == pytest.approx(expected)
    assert membership(members, members) == pytest.approx(0.5)


def test_texts_are_taken_until_they_have_enough_tokens():
    texts = ["w1 w2 w3", "w4 w5", "w6", "w7 w8"]
    assert take_tokens(texts, 4, Words()) == texts[:2]
    assert take_tokens(texts, 5, Words()) == texts[:2]
    assert take_tokens(texts, 100, Words()) == texts
    assert take_tokens(texts, 0, Words()) == []


def test_a_library_holds_nothing_of_the_core(tmp_path, monkeypatch):
    """Of a domain first what is left of it, then what is not of it."""
    for folder in ("wikipedia", "sotu"):
        (tmp_path / "data" / folder).mkdir(parents=True)
    domains = Domains(tmp_path / "data", tmp_path / "texts", seed=1)
    own = [f"w1 footballer w{number}" for number in range(10, 16)]
    others = [f"w2 painter w{number}" for number in range(20, 26)]
    monkeypatch.setattr(Domains, "_articles", [each for pair in zip(own, others) for each in pair])

    class Counter(Words):
        def encode(self, pieces):
            return [np.zeros(len(piece.split())) for piece in pieces]

    core = domains.core("footballers", 7, Counter())
    library = domains.library("footballers", core, 15, tokeniser=Counter())
    texts = [[json.loads(line)["text"] for line in path.read_text().splitlines()] for path in (core, library)]
    assert texts[0] == own[:3]
    assert texts[1][:3] == own[3:]
    assert set(texts[1][3:]) < set(others)
    assert len(texts[1]) == 5
    assert domains.library("footballers", core, 0, tokeniser=Counter()) is None
    with pytest.raises(InputError, match="no domain 'painters'"):
        domains.documents("painters")


def test_domains_are_told_by_the_beginning_of_an_article():
    assert WIKIPEDIA["species"].search("Aus bus is a species of moth")
    assert not WIKIPEDIA["films"].search("directed by")


def test_a_part_is_made_once_and_again_only_if_what_it_is_made_of_changed(tmp_path):
    study, made = Study(tmp_path, tmp_path, Sizes(["footballers"])), []

    def make() -> dict:
        made.append(1)
        return {"times": len(made)}

    assert study.made("part", ["a", 1], make) == {"times": 1}
    assert study.made("part", ["a", 1], make) == {"times": 1}
    assert study.made("part", ["a", 2], make) == {"times": 2}


def test_sizes_are_those_that_were_given():
    given = sizes_of(["keys=7,11", "domains=sotu", "core=13", "rates=1e-3"], quick=False)
    assert (given.keys, given.domains, given.core, given.rates) == ([7, 11], ["sotu"], 13, [1e-3])
    assert sizes_of([], quick=True).core < sizes_of([], quick=False).core
    for wrong, message in (("keyes=1", "no 'keyes'"), ("keys=many", "'many' is no int"), ("core=1,2", "one number")):
        with pytest.raises(InputError, match=message):
            sizes_of([wrong], quick=True)


def test_a_curve_varies_one_size_at_a_time(tmp_path):
    sizes = Sizes(["footballers"], keys=[2, 3], exact=[5, 7], beside=3)
    assert sizes_of_curve(Study(tmp_path, tmp_path, sizes)) == [(2, 7), (3, 7), (3, 5)]


def test_a_table_has_as_many_columns_everywhere():
    assert table(["a", "b"], [["1", "2"]]) == "| a | b |\n| --- | --- |\n| 1 | 2 |\n"
