"""The paper's equations, written as loops, beside the module."""

import math

import pytest
import torch

from spalm.lm import NetworkSettings, Transformer
from spalm.semiparametric import Gate, GateSettings, Retrieved, Spalm

B, T, K, D, V = 2, 5, 3, 8, 13
NETWORK = NetworkSettings(layers=2, width=D, heads=2, head_width=3, feed_forward=11)


def some_model() -> Transformer:
    return Transformer(NETWORK, V).initialise(3).eval()


def some_neighbours(*shape: int) -> Retrieved:
    return Retrieved(torch.randint(V, shape), torch.rand(shape) * 5, torch.randint(99, shape))


def some_gate(**settings) -> Gate:
    gate = Gate(GateSettings(neighbours=K, **settings), D).initialise().eval()
    for parameter in gate.parameters():
        parameter.data.add_(torch.randn_like(parameter))
    return gate


@torch.no_grad()
@pytest.mark.parametrize("kind", ["vector", "scalar"])
@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("more", [{}, {"project_query": True}, {"distance_bias": True}, {"bias": None}])
def test_it_is_the_equations(kind, scaled, more):
    model, gate = some_model(), some_gate(kind=kind, scaled=scaled, **more)
    hidden, retrieved = torch.randn(B, T, D), some_neighbours(B, T, K)
    found = gate(hidden, retrieved, model)
    table = model.vocabulary.table
    for b in range(B):
        for t in range(T):
            h = hidden[b, t]
            query = gate.query(h) if gate.query is not None else h
            y = [table[token] for token in retrieved.tokens[b, t]]
            scores = []
            for k in range(K):
                score = sum(float(y[k][d]) * float(query[d]) for d in range(D))
                if gate.distance_weight is not None:
                    score -= float(gate.distance_weight * retrieved.distances[b, t, k])
                scores.append(score)
            total = sum(math.exp(score) for score in scores)
            m = sum(math.exp(scores[k]) / total * y[k] for k in range(K)) * (D**0.5 if scaled else 1.0)
            bias = 0.0 if gate.gate.bias is None else gate.gate.bias
            g = torch.sigmoid(gate.gate.weight @ h + bias)
            torch.testing.assert_close(found.gate[b, t], g, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(found.vectors[b, t], (1 - g) * m + g * h, rtol=1e-4, atol=1e-5)
            weights = torch.tensor([math.exp(score) / total for score in scores])
            torch.testing.assert_close(found.attention[b, t], weights, rtol=1e-4, atol=1e-5)
    assert found.gate.shape[-1] == (D if kind == "vector" else 1)


def test_neighbours_that_are_not_there_count_for_nothing():
    model, gate = some_model(), some_gate()
    hidden, retrieved = torch.randn(B, T, D), some_neighbours(B, T, K)
    distances = retrieved.distances.clone()
    distances[:, :, 2] = torch.inf
    distances[0, 1] = torch.inf
    found = gate(hidden, Retrieved(retrieved.tokens, distances, retrieved.ids), model)
    fewer = gate(hidden, retrieved.nearest(2), model)
    torch.testing.assert_close(found.vectors[1], fewer.vectors[1])
    torch.testing.assert_close(found.vectors[0, 1], hidden[0, 1], rtol=0, atol=0)
    assert (found.gate[0, 1] == 1).all()
    assert (found.attention[0, 1] == 0).all()
    assert (found.attention[:, :, 2] == 0).all()


def test_without_neighbours_or_with_an_open_gate_it_is_transformer_xl_exactly():
    model = Spalm(some_model(), GateSettings(neighbours=K)).eval()
    model.gate.initialise()
    tokens = torch.randint(V, (B, T))
    plain, _ = model.base(tokens)
    none, _ = model(tokens, None, some_neighbours(B, T, 0))
    assert torch.equal(none.vectors, plain)
    model.gate.gate.bias.data.fill_(1e4)  # a sigmoid of this is 1
    held, _ = model(tokens, None, some_neighbours(B, T, K))
    torch.testing.assert_close(held.vectors, plain, rtol=0, atol=0)
    model.gate.gate.bias.data.fill_(0.0)
    mixed, _ = model(tokens, None, some_neighbours(B, T, K))
    assert not torch.allclose(mixed.vectors, plain)


def test_neighbour_dropout_hides_them_in_training_only():
    model, gate = some_model(), some_gate(dropout=0.999)
    hidden, retrieved = torch.randn(B, T, D), some_neighbours(B, T, K)
    seen = gate(hidden, retrieved, model).vectors
    gate.train()
    hidden_from = gate(hidden, retrieved, model).vectors
    torch.testing.assert_close(hidden_from, hidden)
    assert not torch.allclose(seen, hidden)


def test_it_learns_through_the_retrieved_tokens_too():
    """y_k is the embedding, trained like the rest: a token that is only retrieved gets a gradient."""
    model = Spalm(some_model(), GateSettings(neighbours=1)).train()
    model.gate.initialise()
    tokens = torch.zeros(1, T, dtype=torch.long)
    retrieved = Retrieved(torch.full((1, T, 1), 7), torch.ones(1, T, 1), torch.ones(1, T, 1).long())
    mixed, _ = model(tokens, None, retrieved)
    mixed.vectors[..., 0].sum().backward()
    gradient = model.base.vocabulary.table.grad
    assert gradient[7].abs().sum() > 0
    assert gradient[9].abs().sum() == 0
