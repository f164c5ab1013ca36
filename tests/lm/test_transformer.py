"""The network: memory, carried state, any memory length at test, one token at a time."""

import pytest
import torch
import torch.nn.functional as F

from spalm.lm import NetworkSettings, Transformer, next_memory
from spalm.lm.relative_attention import sinusoids

BATCH, VOCABULARY = 2, 13


def network(norm: str = "pre", cutoffs: list[int] | None = None, **more) -> Transformer:
    settings = NetworkSettings(
        layers=3, width=14, heads=2, head_width=5, feed_forward=11, norm=norm, cutoffs=cutoffs or [], **more
    )
    model = Transformer(settings, VOCABULARY).initialise(3).double()
    for layer in model.layers:  # biases that are not zero, so that a mix-up of the two would show
        torch.nn.init.normal_(layer.attention.content_bias)
        torch.nn.init.normal_(layer.attention.position_bias)
    return model


def tokens(time: int) -> torch.Tensor:
    return torch.randint(VOCABULARY, (BATCH, time))


@pytest.mark.parametrize("more", [{}, {"norm": "post"}, {"normalised_keys": True, "activation": "squared-relu"}])
@pytest.mark.parametrize("cut", [1, 4, 6])
def test_two_segments_equal_one_pass_with_the_same_reach(more, cut):
    model, text = network(**more).eval(), tokens(7)
    whole, _ = model(text)
    first, inputs = model(text[:, :cut])
    memory = next_memory(None, inputs, 7)
    second, _ = model(text[:, cut:], memory)
    torch.testing.assert_close(torch.cat([first, second], 1), whole)
    state = model.empty_state(7, 7)
    parts = [model.hidden(text[:, :cut], state), model.hidden(text[:, cut:], state)]
    torch.testing.assert_close(torch.cat(parts, 1), whole)


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("memory_length", [1, 2, 5, 50])
def test_the_state_of_test_time_is_the_memory_of_training(norm, memory_length):
    """Keys and values that are kept give what hidden states that are kept give, at every memory length."""
    model, text = network(norm).eval(), tokens(23)
    memory, state = None, model.empty_state(memory_length, 4)
    for first in range(0, 23, 4):
        segment = text[:, first : first + 4]
        by_memory, inputs = model(segment, memory)
        memory = next_memory(memory, inputs, memory_length)
        torch.testing.assert_close(model.hidden(segment, state), by_memory)


def test_one_token_at_a_time_equals_one_pass():
    model, text = network().eval(), tokens(17)
    whole, _ = model(text)
    state = model.empty_state(17, 1)
    for index in range(17):
        torch.testing.assert_close(model.hidden(text[:, index : index + 1], state)[:, 0], whole[:, index])


def test_a_longer_memory_at_test_reaches_further():
    model, text = network().eval(), tokens(16)
    changed = text.clone()
    changed[:, 0] = (changed[:, 0] + 1) % VOCABULARY

    def last(text, memory_length):
        state = model.empty_state(memory_length, 4)
        return [model.hidden(text[:, i : i + 4], state) for i in range(0, 16, 4)][-1]

    assert not torch.allclose(last(text, 8), last(changed, 8))
    # Each of three layers looks one token into the segment before: from the fourth segment, token 3 at most.
    torch.testing.assert_close(last(text, 1), last(changed, 1), rtol=0, atol=0)


def test_normalised_keys_are_those_of_a_formula():
    """Scaling the projections of queries and keys changes nothing, and one token attends as the formula says."""
    model, text = network(normalised_keys=True), tokens(5)
    attention = model.layers[0].attention
    before = model(text)[0]
    seen = {}
    attention.register_forward_pre_hook(lambda _, given: seen.update(x=given[0]))
    attention.register_forward_hook(lambda *given: seen.update(y=given[-1]))
    with torch.no_grad():
        attention.queries.weight.mul_(7)
        attention.keys_values.weight[:10].mul_(0.3)  # the keys of both heads
    torch.testing.assert_close(model(text)[0], before)
    x, encodings = seen["x"][0], sinusoids(5, 14, seen["x"])
    outputs = []
    for head in range(2):
        rows = slice(5 * head, 5 * head + 5)
        query, key = (
            F.normalize(x @ weight[rows].T, dim=-1) * 5**0.5
            for weight in (attention.queries.weight, attention.keys_values.weight)
        )
        value = x @ attention.keys_values.weight[10:][rows].T
        distances = (encodings @ attention.distances.weight[rows].T).flip(0)
        scores = (
            torch.stack(
                [
                    (query[4] + attention.content_bias[head]) @ key[j]
                    + (query[4] + attention.position_bias[head]) @ distances[4 - j]
                    for j in range(5)
                ]
            )
            / 5**0.5
        )
        outputs.append(scores.softmax(0) @ value)
    torch.testing.assert_close(seen["y"][0, 4], torch.cat(outputs) @ attention.output.weight.T)


def test_the_activation():
    plain, squared = network(), network(activation="squared-relu")
    layers = [plain.layers[0], squared.layers[0]]
    x = torch.randn(3, 14, dtype=torch.float64)
    for layer, power in zip(layers, (1, 2)):
        expected = layer.narrow(layer.widen(x).clamp_min(0) ** power)
        torch.testing.assert_close(layer._feed_forward(x), expected)


def test_the_memory_has_no_gradient():
    model, text = network("post"), tokens(8)
    _, inputs = model(text[:, :4])
    memory = next_memory(None, inputs, 4)
    assert all(not each.requires_grad for each in memory)
    model(text[:, 4:], memory)[0].sum().backward()


def test_the_tables_are_tied():
    model = network()
    model(tokens(3))[0].sum().backward()
    assert [name for name, _ in model.named_parameters() if "table" in name] == ["vocabulary.table"]
    hidden = torch.randn(4, 14, dtype=torch.float64)
    torch.testing.assert_close(
        model.log_probabilities(hidden).double(),
        torch.log_softmax(hidden @ model.embed(torch.arange(VOCABULARY)).T, -1),
        rtol=1e-5,
        atol=1e-5,
    )
