"""Tied vocabularies: normalised, and the same loss and gradients as a full softmax built from them."""

import pytest
import torch

from spalm.lm import AdaptiveVocabulary, Vocabulary

SIZE, WIDTH, ROWS = 23, 8, 19


@pytest.fixture(params=["plain", "adaptive", "adaptive, narrower tails"])
def vocabulary(request):
    made = {
        "plain": lambda: Vocabulary(SIZE, WIDTH),
        "adaptive": lambda: AdaptiveVocabulary(SIZE, WIDTH, [5, 11]),
        "adaptive, narrower tails": lambda: AdaptiveVocabulary(SIZE, WIDTH, [5, 11], shrink=2),
    }[request.param]()
    made.initialise()
    return made


def full_log_probabilities(vocabulary: AdaptiveVocabulary, hidden):
    """A full softmax built from an adaptive one, a token at a time: log p(cluster) + log p(token in cluster)."""
    head = torch.cat([vocabulary.tables[0], vocabulary.tails])
    shortlist = len(vocabulary.tables[0])
    head_scores = hidden @ head.T
    columns = [head_scores[:, i] - head_scores.logsumexp(1) for i in range(shortlist)]
    narrow = iter(vocabulary.projections)
    for tail, table in enumerate(vocabulary.tables[1:]):
        inside = hidden @ (next(narrow).T if table.shape[1] != WIDTH else torch.eye(WIDTH))
        scores = inside @ table.T
        chosen = head_scores[:, shortlist + tail] - head_scores.logsumexp(1)
        columns += [chosen + scores[:, i] - scores.logsumexp(1) for i in range(len(table))]
    return torch.stack(columns, 1)


def test_probabilities_sum_to_one(vocabulary):
    total = vocabulary.log_probabilities(torch.randn(ROWS, WIDTH)).exp().sum(-1)
    torch.testing.assert_close(total, torch.ones(ROWS))


def test_loss_and_targets_agree_with_the_whole_distribution(vocabulary):
    hidden, targets = torch.randn(ROWS, WIDTH), torch.randint(SIZE, (ROWS,))
    expected = vocabulary.log_probabilities(hidden).gather(1, targets[:, None])[:, 0]
    torch.testing.assert_close(vocabulary.target_log_probabilities(hidden, targets), expected)
    torch.testing.assert_close(vocabulary.loss(hidden, targets), -expected.sum())


@pytest.mark.parametrize("shrink", [1, 2])
def test_gradients_agree_with_a_full_softmax_built_from_it(shrink):
    vocabulary = AdaptiveVocabulary(SIZE, WIDTH, [5, 11], shrink=shrink)
    vocabulary.initialise()
    hidden = torch.randn(ROWS, WIDTH, requires_grad=True)
    targets = torch.arange(ROWS) % SIZE
    given = [hidden, *vocabulary.parameters()]
    full = -full_log_probabilities(vocabulary, hidden).gather(1, targets[:, None]).sum()
    ours = vocabulary.loss(hidden, targets)
    torch.testing.assert_close(ours, full)
    for mine, theirs in zip(torch.autograd.grad(ours, given), torch.autograd.grad(full, given)):
        torch.testing.assert_close(mine, theirs)


def test_probabilities_are_in_single_precision_under_autocast(vocabulary):
    hidden, targets = torch.randn(ROWS, WIDTH), torch.randint(SIZE, (ROWS,))
    expected = vocabulary.log_probabilities(hidden), vocabulary.target_log_probabilities(hidden, targets)
    with torch.autocast("cpu", torch.bfloat16):
        found = vocabulary.log_probabilities(hidden), vocabulary.target_log_probabilities(hidden, targets)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("reduction", ["sum", "none"])
@pytest.mark.parametrize("rows_at_a_time", [7, 64])
def test_the_loss_in_bfloat16_is_nearly_the_same(vocabulary, rows_at_a_time, reduction, monkeypatch):
    monkeypatch.setattr("spalm.lm.cross_entropy._low_rows_at_a_time", lambda _: rows_at_a_time)
    hidden, targets = torch.randn(ROWS, WIDTH, requires_grad=True), torch.randint(SIZE, (ROWS,))
    given = [hidden, *vocabulary.parameters()]
    weights = 3.0 if reduction == "sum" else torch.linspace(-1, 3, ROWS)
    expected = vocabulary.loss(hidden, targets, reduction)
    with torch.autocast("cpu", torch.bfloat16):
        found = vocabulary.loss(hidden, targets, reduction)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)
    assert found.sum().item() != expected.sum().item()
    ours, theirs = ((weights * each).sum() for each in (found, expected))
    for mine, full in zip(torch.autograd.grad(ours, given), torch.autograd.grad(theirs, given)):
        assert (mine - full).norm() < 0.03 * full.norm()


def test_embeddings_are_the_output_vectors(vocabulary):
    """The score of a token, up to its cluster's normaliser, is the product with its embedding."""
    hidden = torch.randn(ROWS, WIDTH)
    scores = hidden @ vocabulary.embed(torch.arange(SIZE)).T
    difference = vocabulary.log_probabilities(hidden) - scores
    for first, last in [(0, 5), (5, 11), (11, 23)]:
        spread = difference[:, first:last] - difference[:, first : first + 1]
        torch.testing.assert_close(spread, torch.zeros_like(spread), atol=1e-5, rtol=0)


def test_chunks_do_not_change_the_loss(monkeypatch):
    vocabulary = Vocabulary(SIZE, WIDTH)
    vocabulary.initialise()
    hidden, targets = torch.randn(200, WIDTH), torch.randint(SIZE, (200,))
    whole = vocabulary.loss(hidden, targets)
    monkeypatch.setattr("spalm.lm.cross_entropy._CHUNK_FLOATS", 1)
    torch.testing.assert_close(vocabulary.loss(hidden, targets), whole)
