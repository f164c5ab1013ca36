"""The extended gate and the copy term, written as loops, beside the modules."""

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from spalm.lm import NetworkSettings, Transformer
from spalm.semiparametric import CopyTerm, Gate, GateCombiner, GateSettings, PlainCombiner, Retrieved, Spalm

N, K, D, V = 7, 3, 8, 13
EVERYTHING = {
    "learned_temperature": True,
    "scaled_distances": True,
    "allow_none": True,
    "sees_neighbours": True,
    "copy_width": 5,
}
VARIANTS = [
    {"copying": "shared"},
    {"copying": "own"},
    {"copying": "shared", "allow_none": True, "kind": "scalar", "bias": None},
    {"copying": "none", "sees_neighbours": True, "project_memory": True, "scaled": False},
    {"copying": "shared", "project_query": True, **EVERYTHING},
    {"copying": "own", "distance_bias": True, **EVERYTHING},
]


def some_model(*, adaptive: bool = False) -> Transformer:
    cutoffs = {"cutoffs": [5, 9], "shrink": 2} if adaptive else {}
    network = NetworkSettings(layers=1, width=D, heads=2, head_width=3, feed_forward=11, **cutoffs)
    return Transformer(network, V).initialise(3).eval().double()


def some_gate(**settings) -> Gate:
    """A gate whose parameters are random numbers, so that each of them counts."""
    torch.manual_seed(5)
    gate = Gate(GateSettings(neighbours=K, **settings), D).initialise().eval().double()
    for parameter in gate.parameters():
        parameter.data.add_(0.3 * torch.randn_like(parameter))
    gate.fit_usual_distance(torch.full((2, K), 1.7).double())
    return gate


def some_neighbours() -> Retrieved:
    """Neighbours of which some are missing and some have the same token; the last position has none."""
    torch.manual_seed(7)
    tokens, distances = torch.randint(V, (N, K)), torch.rand(N, K).double().sort(-1).values * 5
    tokens[1, 2] = tokens[1, 0]
    tokens[2] = 4
    distances[3, 2] = torch.inf
    distances[4, 1:] = torch.inf
    distances[N - 1] = torch.inf
    return Retrieved(tokens, distances, torch.randint(99, (N, K)))


def softmax(scores: list[float]) -> list[float]:
    highest = max(scores)
    total = sum(math.exp(score - highest) for score in scores)
    return [math.exp(score - highest) / total for score in scores]


def number(parameter: Tensor | None) -> float:
    return 1.0 if parameter is None else math.exp(float(parameter))


def sigmoid(values: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-values))


def probabilities_at(gate: Gate, model: Transformer, h: Tensor, found: list[tuple[int, float]]) -> Tensor:
    """The equations at one position whose neighbours have these tokens and distances: p of every token."""
    settings = gate.settings
    if not found:
        return model.log_probabilities(h).exp()
    y = [model.embed(torch.tensor(token)) for token, _ in found]
    d = [distance / (1.7 if settings.uses_usual_distance else 1.0) for _, distance in found]
    q = h if gate.query is None else gate.query.weight @ h
    logits = [float(each @ q) for each in y]
    scores = [number(gate.log_temperature) * logit for logit in logits]
    if gate.distance_weight is not None:
        scores = [score - float(gate.distance_weight) * distance for score, (_, distance) in zip(scores, found)]
    if gate.log_scale is not None:
        scores = [score - number(gate.log_scale) * distance for score, distance in zip(scores, d)]
    if gate.none is not None:
        scores = [*scores, float(gate.none.weight[0] @ h + gate.none.bias[0])]
    a = softmax(scores)
    m = sum((a[k] * y[k] for k in range(len(y))), torch.zeros(D).double()) * (D**0.5 if settings.scaled else 1.0)
    if gate.memory is not None:
        m = gate.memory.weight @ m
    a_none = a[len(y)] if gate.none is not None else 0.0
    m = m + a_none * h
    inputs, before_sigmoid = h, gate.gate.weight @ h + (0 if gate.gate.bias is None else gate.gate.bias)
    if gate.seen is not None:
        same = [[float(one == other) for other, _ in found] for one, _ in found]
        pairs = [(j, k) for j in range(len(y)) for k in range(len(y))]
        nearest = min(min(distance, 4.0) for distance in d)
        features = [
            nearest,
            math.log(nearest + 0.01),
            sum(a[k] * min(d[k], 4.0) for k in range(len(y))),
            -sum(a[k] * math.log(max(a[k], 1e-9)) for k in range(len(y))),
            sum(a[j] * a[k] * same[j][k] for j, k in pairs),
            sum(same[j][k] for j, k in pairs) / len(y) ** 2,
            sum(a[k] * logits[k] for k in range(len(y))) / D**0.5,
            len(y) / K,
        ]
        seen = torch.cat([m, torch.tensor(features).double()])
        before_sigmoid = before_sigmoid + gate.seen.weight @ seen
        inputs = torch.cat([h, seen])
    g = sigmoid(before_sigmoid)
    p = model.log_probabilities((1 - g) * m + g * h).exp()
    if gate.copier is None:
        return p
    c = float(sigmoid(gate.copier(inputs))[0])
    if settings.copying == "own":
        t, s = number(gate.copy_log_temperature), number(gate.copy_log_scale)
        a, a_none = softmax([t * logit - s * distance for logit, distance in zip(logits, d)]), 0.0
    mixed = (1 - c + c * a_none) * p
    for k, (token, _) in enumerate(found):
        mixed[token] += c * a[k]
    return mixed


@torch.no_grad()
@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("settings", VARIANTS)
def test_it_is_the_equations_and_a_distribution(settings, adaptive):
    model, gate, retrieved = some_model(adaptive=adaptive), some_gate(**settings), some_neighbours()
    hidden = torch.randn(N, D).double()
    output = gate(hidden, retrieved, model)
    found = output.log_probabilities(model)
    for row in range(N):
        there = [
            (token, distance)
            for token, distance in zip(retrieved.tokens[row].tolist(), retrieved.distances[row].tolist())
            if distance < math.inf
        ]
        torch.testing.assert_close(
            found[row].exp(), probabilities_at(gate, model, hidden[row], there), rtol=1e-6, atol=1e-9
        )
    torch.testing.assert_close(found.exp().sum(-1), torch.ones(N).double(), rtol=1e-9, atol=1e-9)
    for token in range(V):
        alone = output.target_log_probabilities(model, torch.full((N,), token))
        torch.testing.assert_close(alone, found[:, token], rtol=1e-6, atol=1e-9)


@torch.no_grad()
@pytest.mark.parametrize("settings", VARIANTS)
def test_without_neighbours_it_is_the_network_exactly(settings):
    model, gate, retrieved = some_model(), some_gate(**settings), some_neighbours()
    hidden = torch.randn(N, D).double()
    plain = PlainCombiner().combine(model, hidden, retrieved)
    for nothing in (retrieved.nearest(0), retrieved.without_neighbours()):
        combined = GateCombiner(gate).combine(model, hidden, nothing)
        assert torch.equal(combined.log_probabilities, plain.log_probabilities)
        assert (combined.network_share == 1).all()
        assert not combined.neighbour_weights.any()
        output = gate(hidden, nothing, model)
        targets = torch.arange(N)
        assert torch.equal(
            output.target_log_probabilities(model, targets), model.target_log_probabilities(hidden, targets)
        )


@torch.no_grad()
@pytest.mark.parametrize("settings", VARIANTS)
def test_the_shares_of_network_and_neighbours_are_one_together(settings):
    model, gate, retrieved = some_model(), some_gate(**settings), some_neighbours()
    hidden = torch.randn(N, D).double()
    output, combined = gate(hidden, retrieved, model), GateCombiner(gate).combine(model, hidden, retrieved)
    has = retrieved.present.any(-1)
    torch.testing.assert_close(combined.neighbour_weights.sum(-1), has.double())
    assert not combined.neighbour_weights[~retrieved.present].any()
    for row in range(N - 1):
        g, a = float(output.gate[row].mean()), output.attention[row].tolist()
        c = [0.0] * K if output.copied is None else output.copied.shares[row].tolist()
        of_each = [(1 - sum(c)) * (1 - g) * a[k] + c[k] for k in range(K)]
        assert float(combined.network_share[row]) == pytest.approx(1 - sum(of_each))
        expected = [share / sum(of_each) for share in of_each]
        assert combined.neighbour_weights[row].tolist() == pytest.approx(expected)


@torch.no_grad()
def test_columns_beyond_the_neighbours_change_nothing_but_their_number():
    """Every switch is a function of what was retrieved, so K may differ at test."""
    model, retrieved = some_model(), some_neighbours().nearest(2)
    hidden = torch.randn(N, D).double()
    for settings in VARIANTS:
        gate = some_gate(**settings)
        if gate.seen is not None:
            gate.seen.weight[:, -1] = 0  # the share of columns with a neighbour is the one feature that may differ
            if gate.copier is not None:
                next(gate.copier.parameters())[:, -1] = 0
        fewer = gate(hidden, retrieved, model)
        padded = gate(hidden, retrieved.padded(K + 2), model)
        torch.testing.assert_close(padded.log_probabilities(model), fewer.log_probabilities(model))


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("settings", VARIANTS)
def test_every_parameter_learns_and_the_gradient_is_that_of_the_loss(settings, adaptive):
    torch.manual_seed(11)
    model = Spalm(some_model(adaptive=adaptive), GateSettings(neighbours=K, **settings)).double().train()
    model.gate = some_gate(**settings).train()
    for parameter in model.gate.parameters():
        parameter.requires_grad_()
    tokens, targets = torch.randint(V, (2, 5)), torch.randint(V, (2, 5))
    near = some_neighbours()
    rows = torch.arange(10).view(2, 5) % N
    retrieved = Retrieved(near.tokens[rows], near.distances[rows], near.ids[rows])
    targets[:, ::2] = retrieved.tokens[:, ::2, 1]  # some are retrieved, and others not

    def loss() -> Tensor:
        output, _ = model(tokens, None, retrieved)
        return model.loss(output, targets)

    loss().backward()
    for name, parameter in model.gate.named_parameters():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name
        assert parameter.grad.any(), name
    with torch.no_grad():
        learned = [*model.gate.named_parameters(), *model.base.vocabulary.named_parameters()]
        for name, parameter in learned:
            gradient = parameter.grad
            assert gradient is not None, name
            where = gradient.abs().argmax()
            flat, step = parameter.view(-1), 1e-5
            flat[where] += step
            above = loss()
            flat[where] -= 2 * step
            below = loss()
            flat[where] += step
            slope = float((above - below) / (2 * step))
            assert slope == pytest.approx(float(gradient.reshape(-1)[where]), rel=1e-4, abs=1e-6), name


def test_a_token_that_is_certain_or_impossible_has_finite_gradients():
    """c_t at its limits: all probability is copied, or none; the target was retrieved, or was not."""
    tokens, present = torch.tensor([[1, 2], [1, 2]]), torch.ones(2, 2, dtype=torch.bool)
    for value in (-100.0, 0.0, 100.0):
        logit = torch.full((2,), value, requires_grad=True)
        scores = torch.tensor([[0.0, -50.0]] * 2, requires_grad=True)
        term = CopyTerm.of(tokens, scores.log_softmax(-1), logit, present=present)
        log_network = torch.tensor([-3.0, -4.0], requires_grad=True)
        found = term.target_log_probabilities(log_network, torch.tensor([1, 5]))
        found.sum().backward()
        for each in (logit, scores, log_network):
            assert each.grad is not None
            assert torch.isfinite(each.grad).all()
        assert torch.isfinite(found).all()
        assert (found <= 1e-6).all()


def test_the_first_step_begins_at_the_documented_values():
    gate = Gate(GateSettings(neighbours=K, copying="own", **EVERYTHING), D).initialise().double()
    output = gate(torch.randn(N, D).double(), some_neighbours(), some_model())
    assert output.copied is not None
    expected = torch.full((N,), 1 / (1 + math.exp(2))).double() * some_neighbours().present.any(-1)
    torch.testing.assert_close(output.copied.share, expected)
    assert output.gate[0, 0].item() == pytest.approx(1 / (1 + math.exp(-2)))
    assert gate.log_scale is not None
    assert gate.log_scale.exp().item() == pytest.approx(4)


def test_an_inner_layer_is_the_same_for_the_same_seed():
    gate = GateSettings(neighbours=K, copying="own", copy_width=5)
    drawn = [Spalm(some_model().float(), gate).initialise(seed) for seed in (1, 1, 2)]
    weights = [model.state_dict()["gate.copier.0.weight"] for model in drawn]
    assert [torch.equal(one, other) for one, other in pairwise(weights)] == [True, False]
    assert weights[0].any()


@pytest.mark.parametrize("settings", [{}, {"distance_bias": True}, {"copying": "shared"}])
def test_what_is_off_leaves_no_trace_in_the_files(settings):
    gate = Gate(GateSettings(neighbours=K, **settings), D)
    names = {"gate.weight", "gate.bias"}
    names |= {"distance_weight"} if "distance_bias" in settings else set()
    names |= {"copier.0.weight", "copier.0.bias"} if "copying" in settings else set()
    assert gate.state_dict().keys() == names
    beyond = {"learned_temperature", "scaled_distances", "allow_none", "sees_neighbours", "copying", "copy_width"}
    assert GateSettings(**settings).as_json().keys() & beyond == settings.keys() & beyond
