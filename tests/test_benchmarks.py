"""What the benchmarks claim to count."""

from torch.utils.flop_counter import FlopCounterMode

import training
from spalm.lm import segment_loss


def test_flops_are_those_that_torch_counts():
    """Torch's counter does not see inside the output layer's loss, nor products that are added in place."""
    lanes = 2
    subject = training.Training(lanes)
    subject.step()  # fills the memory
    with FlopCounterMode(display=False) as counter:
        loss, _ = segment_loss(subject.model, training.MEMORY, subject.batch, subject.memory)
        loss.backward()
    network = training.NETWORK
    output_layer = 3 * 2 * network.width * training.VOCABULARY
    added_in_place = network.layers * 2 * (training.SEGMENT + training.MEMORY) * network.heads * network.head_width
    seen = counter.get_total_flops() / subject.tokens
    claimed = training.count_flops(network, training.VOCABULARY, training.SEGMENT, training.MEMORY, lanes)
    assert claimed["step"] == seen + output_layer + added_in_place
