"""Pieces of the study in `bench_proof.py` that could be wrong without anybody noticing."""

import gzip
import json
import time
from types import SimpleNamespace

import numpy as np
import pytest

from bench_proof import parts_in, sizes_of
from proof import intervals
from proof import study as proof_study
from proof.answers import CitationCounts, exact_match, f1, holds_reference, normalised
from proof.asker import completion_prompt
from proof.curves import largest_of_curve, sizes_of_curve
from proof.domains import COLLECTIONS, DOMAINS, STUDIED, WIKIPEDIA, Domains, take_tokens
from proof.forgetting import cited_places
from proof.harm import changes, piqa_figures, shared_beginning, solution
from proof.lora import Budget, batches, padded, windows
from proof.lora_rows import LoraRows
from proof.membership import MembershipTest
from proof.questions import AnswerFigures, DividedQuestions, judged
from proof.rag import PassageRetriever, Passages, RagSettings, beginnings, prompt_with_passages
from proof.study import Clock, Sizes, Study
from proof.tables import shown, table
from spalm.corpus import TokenStream
from spalm.errors import InputError


def stream(*lengths: int) -> TokenStream:
    ends = np.cumsum(lengths)
    names = [f"doc{number}" for number in range(len(lengths))]
    return TokenStream(np.arange(1, ends[-1] + 1), ends, lambda: names, start=0)


class Words:
    """A tokeniser of numbers, each of them a word."""

    def encode(self, pieces: list[bytes]) -> list[np.ndarray]:
        return [np.array([int(word[1:]) for word in piece.decode().split()] or [7], np.int64) for piece in pieces]

    def decode(self, ids) -> str:  # a blank line is token 7
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


def answered(text: str, cited: list[str], passages: list[str], paragraph: str = "A/0") -> dict:
    question = {"question": "?", "answers": ["308"], "paragraph": paragraph}
    named = [[f"xquad.jsonl/{name}" for name in names] for names in (cited, passages)]
    return judged(question, {"text": text, "cited": named[0], "passages": named[1]})


def test_precision_and_recall_of_citations_are_those_of_answered_questions():
    part = AnswerFigures(
        [
            answered("308", ["A/0", "A/1"], ["A/0", "A/1"]),
            answered("308", [], ["A/1", "A/0"]),
            answered("no idea", ["A/1", "A/1", "A/1"], []),
        ]
    )
    found = part.all()
    assert found["exact match"]["value"] == pytest.approx(2 / 3)
    assert found["words"]["value"] == pytest.approx(4 / 3)
    assert found["citation precision, answered questions"]["value"] == pytest.approx(1 / 2)
    assert found["citation recall, answered questions"]["value"] == pytest.approx(1 / 2)
    assert found["citation precision, all questions"]["value"] == pytest.approx(1 / 5)
    assert found["paragraph in the prompt"]["value"] == pytest.approx(2 / 3)
    assert found["first passage is right, all questions"]["value"] == pytest.approx(1 / 2)
    assert part.counts() == {"answered": 2, "citations, answered questions": 2, "citations, all questions": 5}


def test_intervals_of_questions_are_over_paragraphs_and_differences_are_paired():
    right, wrong = answered("308", [], []), answered("no", [], [])
    one = AnswerFigures([{**right, "paragraph": f"A/{number // 5}"} for number in range(20)])
    assert one.mean("exact match") == {"value": 1, "low": 1, "high": 1}
    half = [{**(right if number < 10 else wrong), "paragraph": f"A/{number // 5}"} for number in range(20)]
    apart = [{**each, "paragraph": str(number)} for number, each in enumerate(half)]
    wide, narrow = (AnswerFigures(each).mean("exact match") for each in (half, apart))
    assert wide["value"] == narrow["value"] == 0.5
    assert wide["high"] - wide["low"] > 1.3 * (narrow["high"] - narrow["low"])
    assert one.beyond(AnswerFigures(half))["exact match"]["value"] == pytest.approx(0.5)
    assert one.beyond(one)["F1"] == {"value": 0, "low": 0, "high": 0}
    assert intervals.sums_by_group([1, 2, 4], ["a", "b", "a"]) == [5, 2]


def test_questions_to_tune_on_and_to_report_on_are_of_different_articles():
    asked = [{"article": f"a{number % 7}", "question": str(number)} for number in range(97)]
    found = DividedQuestions.of(asked, tuning=20, reported=1000)
    articles = [{each["article"] for each in part} for part in (found.tuning, found.examples, found.reported)]
    assert articles[0].isdisjoint(articles[2])
    assert articles[1].isdisjoint(articles[2])
    assert not [each for each in found.examples if each in found.tuning]
    assert (len(found.examples), len(found.tuning), len(found.reported)) == (2, 20, 55)
    assert found == DividedQuestions.of(asked, tuning=20, reported=1000)


def test_a_completion_begins_with_its_examples():
    assert completion_prompt("C?", []) == "Question: C?\nAnswer:"
    prompt = completion_prompt("C?", [("A?", "b"), ("D?", "e")])
    assert prompt == "Question: A?\nAnswer: b\n\nQuestion: D?\nAnswer: e\n\nQuestion: C?\nAnswer:"


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
    changed = changes(rows)
    assert changed["on"]["adaptive"]["percent"]["value"] == pytest.approx(100 * (np.exp(-0.2) - 1))
    assert changed["off"]["value"] == pytest.approx(found["plain"]["perplexity"].value)


def test_the_median_change_is_that_of_the_median_domain():
    def domain(change: float, count: int) -> dict:
        tokens = [100.0] * count
        plain = [-250.0 - number for number in range(count)]
        return {"tokens": tokens, "plain": plain, "adaptive": [each - 100 * np.log1p(change) for each in plain]}

    found = intervals.of_median_change([domain(-0.1, 4), domain(-0.3, 9), domain(-0.2, 5)], "adaptive", seed=1)
    assert found.value == pytest.approx(-0.2)
    assert (found.low, found.high) == pytest.approx((-0.3, -0.1))
    alone = intervals.of_median_change([domain(-0.1, 4)], "adaptive", seed=1)
    assert (alone.low, alone.value, alone.high) == pytest.approx((-0.1, -0.1, -0.1))


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
    assert 2.0 <= clock.core_seconds < 2.5


def test_a_clock_is_recorded_while_it_runs_and_when_it_is_stopped(monkeypatch):
    monkeypatch.setattr(proof_study, "_RECORD_EVERY", 0.01)
    clock, records = Clock(), []

    def work() -> None:
        with clock.running(lambda: records.append(clock.seconds)):
            while len(records) < 3:
                time.sleep(0.005)
            raise SystemExit

    with pytest.raises(SystemExit):
        work()
    assert len(records) >= 4
    assert records == sorted(records)
    assert records[-1] == clock.seconds > 0


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
    found = prompt_with_passages(before, passages, 0, separator=[99], room=80)
    assert found == [0, *range(1, 6), 99, *range(6, 11), 99, *before]
    for room in (20, 33, 50, 61):
        found = prompt_with_passages(before, passages, 0, separator=[99], room=room)
        assert len(found) <= room
        assert found[0] == 0
        kept = [token for token in found if token >= 100]
        assert kept == before[-len(kept) :]
        assert len(kept) >= min(len(before), room // 2 - 1)
    assert prompt_with_passages([], [], 0, separator=[99], room=9) == [0]


def test_the_retriever_finds_the_passage_that_shares_words():
    pytest.importorskip("bm25s")
    passages = Passages.of(stream(300, 200, 40), Words())
    retriever = PassageRetriever(passages, Words(), RagSettings(query=3, passages=2))
    assert [len(piece) for piece in passages.pieces] == [256, 44, 200, 40]
    (best,) = retriever.best([900, 901, 510, 511, 512])
    assert best.tolist() == list(range(501, 541))
    assert retriever.prompt([511], 0, room=60) == [0, *range(501, 541), 7, 511]
    assert retriever.best([510, 900, 901, 902]) == [], "only the end of the text is the query"
    assert retriever.best([]) == []
    assert PassageRetriever(passages, Words(), RagSettings(passages=0)).best([510]) == []
    assert RagSettings.grid()[0].passages == 0
    assert [len(piece) for piece in passages.plus(passages).pieces] == 2 * [256, 44, 200, 40]


def test_beginnings_are_of_all_documents():
    text = beginnings(stream(3, 5, 2), 3)
    assert text.tokens.tolist() == [1, 2, 3, 4, 5, 6, 9, 10]
    assert text.ends.tolist() == [3, 6, 8]


def test_the_membership_test_is_the_area_under_the_curve():
    from sklearn.metrics import roc_auc_score

    random = np.random.default_rng(2)
    members = [random.integers(1, 30, count) for count in (5, 11, 7)]
    others = [random.integers(1, 50, count) for count in (13, 3)]
    ranks = np.concatenate([*members, *others])
    expected = roc_auc_score([1] * 23 + [0] * 16, -ranks)
    test = MembershipTest({"held": members, "worse": [each + 40 for each in members]}, others, seed=1)
    found = test.area("held")
    assert found.value == pytest.approx(expected)
    assert found.low < found.value < found.high
    assert test.difference("held", "held") == intervals.Interval(0, 0, 0)
    assert test.difference("held", "worse").low > 0
    same = MembershipTest({"same": others}, others, seed=1)
    assert same.area("same").value == pytest.approx(0.5)


def test_citations_are_the_same_whatever_the_rounding_of_their_weights():
    def answer(weight: float, offset: int) -> SimpleNamespace:
        source = SimpleNamespace(memory=f"m{weight}", document="d", offset=offset, weight=weight)
        return SimpleNamespace(citations=[SimpleNamespace(start=0, end=4, sources=[source])])

    assert cited_places(answer(0.5, 3)) == cited_places(answer(0.5000001, 3)) != cited_places(answer(0.5, 4))


def test_piqa_counts_answers_that_changed_and_the_margin():
    problems = [{"label": 0}, {"label": 1}, {"label": 0}]
    plain = [-1.0, -2.0, -1.0, -2.0, -5.0, -3.0]
    ours = [-1.0, -3.0, -2.0, -1.0, -5.0, -3.0]
    found = piqa_figures(problems, {"tokens": [1.0, 4.0, 1.0, 1.0, 5.0, 1.0], "plain": plain, "core": ours})
    whole = found["accuracy"]
    assert whole["off"]["value"] == pytest.approx(1 / 3)
    on = whole["on"]["core"]
    assert on["accuracy"]["value"] == pytest.approx(2 / 3)
    assert (on["to right"], on["to wrong"]) == (1, 0)
    assert on["points"]["value"] == pytest.approx(100 / 3)
    assert on["margin"]["value"] == pytest.approx((1 + 2 + 0) / 3)
    assert found["accuracy by token"]["off"]["value"] == pytest.approx(1 / 3)


def test_a_solution_has_no_annotations():
    assert solution("4 * 2 = $<<4*2=8>>8 a day.\n#### 8") == "4 * 2 = $8 a day.\n 8"


def test_a_continuation_begins_where_tokens_differ():
    assert shared_beginning(np.array([1, 2, 3]), np.array([1, 2, 3, 4])) == 3
    assert shared_beginning(np.array([1, 2, 3]), np.array([1, 2, 9, 4])) == 2


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


def test_unrelated_texts_are_of_no_memory(tmp_path):
    for folder in ("wikipedia", "sotu", *COLLECTIONS):
        (tmp_path / folder).mkdir()
    articles = [f"= {kind} =\na {kind} called {number}\n\n" for kind in ("footballer", "genus") for number in range(10)]
    with gzip.open(tmp_path / "wikipedia" / "train.txt.gz", "wt") as file:
        file.write("".join(articles))
    (tmp_path / "sotu" / "train.txt").write_text("Gentlemen.\n\nLadies.\n")
    (tmp_path / "wikitext-2" / "wiki.test.tokens").write_text(
        " \n = One = \n \n text \n = = Part = = \n more \n = Two = \n x \n"
    )
    pages = '<text xml:space="preserve">#REDIRECT [[A]]</text>\n<text xml:space="preserve">A &lt;b&gt; page</text>'
    (tmp_path / "enwik8-prefix" / "enwik8.head").write_text(pages)
    domains = Domains(tmp_path, tmp_path / "texts", seed=1)

    class Counter(Words):
        def encode(self, pieces):
            return [np.zeros(len(piece.split())) for piece in pieces]

    def unrelated(name: str) -> list[str]:
        return domains.unrelated(name, 1000, Counter())

    apart = unrelated("footballers")
    assert len(apart) == 2
    assert apart == unrelated("footballers")
    assert {each + "\n" for each in apart} < {*articles}
    core = domains.core("footballers", 10, Counter())
    library = domains.library("footballers", core, 10_000, tokeniser=Counter())
    held = [json.loads(line)["text"] for path in (core, library) for line in path.read_text().splitlines()]
    assert len(held) == len({*held}) == 16, "but for two of each domain"
    assert not {*held} & {*apart, *unrelated("species")}
    assert sorted(unrelated("sotu")) == ["Gentlemen.\n", "Ladies.\n"]
    assert sorted(unrelated("wikitext-2")) == ["text \n = = Part = = \n more\n", "x\n"]
    assert unrelated("enwik8-prefix") == ["A <b> page\n"]
    (tmp_path / "enwik8-prefix" / "enwik8.head").unlink()
    with pytest.raises(InputError, match="enwik8-prefix"):
        unrelated("enwik8-prefix")
    assert set(STUDIED) < set(DOMAINS)


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


def test_a_curve_varies_one_size_at_a_time_and_names_the_core(tmp_path):
    study = Study(tmp_path, tmp_path, Sizes(["footballers"], keys=[2, 3, 9], exact=[1, 5, 7], core=3))
    assert sizes_of_curve(study) == [(2, 7), (3, 7), (9, 7), (3, 0), (3, 5)]
    assert largest_of_curve(study) == (9, 7)


def test_results_of_another_version_are_not_reported(tmp_path):
    path = tmp_path / "proof.json"
    assert parts_in(path) == {}
    path.write_text(json.dumps({"parts": {"harm": {}}}))
    assert parts_in(path) == {}
    path.write_text(json.dumps({"version": proof_study.VERSION, "parts": {"harm": {}}}))
    assert parts_in(path) == {"harm": {}}


def test_the_backend_is_chosen_once(tmp_path, monkeypatch):
    monkeypatch.setattr(proof_study, "has_bf16", lambda: True)
    assert Study(tmp_path, tmp_path, Sizes([])).execution.hardware.precision == "bfloat16"
    monkeypatch.setattr(proof_study, "has_bf16", lambda: False)
    again = Study(tmp_path, tmp_path, Sizes([])).execution.hardware
    assert (again.backend, again.precision) == ("torch", "bfloat16")


@pytest.mark.parametrize(("losses", "longest", "stopped"), [([2.0, 1.9, 1.8], 3, False), ([2.0, 1.9, 1.9], 2, True)])
def test_lora_is_tuned_cheaply_and_trained_until_it_stops(tmp_path, monkeypatch, losses, longest, stopped):
    """`losses` are those of the best rate by the number of budgets, each twice the one before."""
    study = Study(tmp_path, tmp_path, Sizes([], ranks=[8], rates=[1e-3, 3e-3], doublings=2))
    runs = []

    def run(_, settings, budget):
        runs.append((settings.rate, budget))
        number = {100: 0, 200: 1, 400: 2}.get(budget)
        loss = 3.0 - settings.rate if number is None else losses[number] + (0.5 if settings.rate < 3e-3 else 0)
        return {"settings": {"rank": settings.rank, "rate": settings.rate}, "dev": loss, "budget": budget}

    monkeypatch.setattr(LoraRows, "_run", run)
    base = SimpleNamespace(folder=SimpleNamespace(path=tmp_path))
    found = LoraRows(study, SimpleNamespace(core=tmp_path), SimpleNamespace(base=base)).trained(100)
    assert runs[:2] == [(1e-3, 25), (3e-3, 25)]
    assert {*runs[2:4]} == {(1e-3, 100), (3e-3, 100)}
    assert runs[4:6] == [(3e-3, 200), (1e-3, 200)]
    assert runs[6:] == [(3e-3, 400)]
    assert (found["until it stops"]["budget"], found["stopped"]) == (100 * 2 ** (longest - 1), stopped)
    assert found["equal"]["budget"] == 100


def test_a_table_has_as_many_columns_everywhere():
    assert table(["a", "b"], [["1", "2"]]) == "| a | b |\n| --- | --- |\n| 1 | 2 |\n"
