"""The network: memory, carried state, any memory length at test, one token at a time."""

import pytest
import torch

from spalm.lm import NetworkSettings, Transformer, next_memory

BATCH, VOCABULARY = 2, 13


def network(norm: str = "pre", cutoffs: list[int] | None = None) -> Transformer:
    settings = NetworkSettings(
        layers=3, width=14, heads=2, head_width=5, feed_forward=11, norm=norm, cutoffs=cutoffs or []
    )
    model = Transformer(settings, VOCABULARY).initialise(3).double()
    for layer in model.layers:  # biases that are not zero, so that a mix-up of the two would show
        torch.nn.init.normal_(layer.attention.content_bias)
        torch.nn.init.normal_(layer.attention.position_bias)
    return model


def tokens(time: int) -> torch.Tensor:
    return torch.randint(VOCABULARY, (BATCH, time))


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("cut", [1, 4, 6])
def test_two_segments_equal_one_pass_with_the_same_reach(norm, cut):
    model, text = network(norm).eval(), tokens(7)
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
