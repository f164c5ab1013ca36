"""The speed of training, evaluation and generation of a transformer-XL, relative to this machine's matrix products.

The size is fixed: 6 layers, width 256, 8 heads, feed-forward 1,024, vocabulary 8,192, segment 128, memory 128.
FLOPs are counted, not estimated: those of the matrix products that forward and backward really execute, once each
(`count_flops`). Peak and steps are measured in turn, so that load on the machine slows both; the medians are compared.
"One core taken" is the speed of training while another process keeps a core busy, as a share of the quiet speed of the
same run: with threads that soon sleep when they wait, as the package sets them, and with spinning ones for comparison.
"""

import spalm  # noqa: F401  # isort: skip  # before torch is loaded, so that its threads soon sleep

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch

from spalm.compute import Hardware, has_bf16
from spalm.corpus import Batch
from spalm.lm import NetworkSettings, Transformer, count_flops, parameter_count, segment_loss
from spalm.lm.lane_threads import with_lane_threads
from spalm.openmp import POLICY, WAITING
from spalm.training import OptimiserSettings
from training_steps import TrainingSteps

SEGMENT = MEMORY = 128
VOCABULARY = 8192
SPINNING = {"GOMP_SPINCOUNT": "300000", "KMP_BLOCKTIME": "200"}
"""Variables that let threads spin as long as by default in the OpenMP runtimes."""
NETWORK = NetworkSettings(layers=6, width=256, heads=8, head_width=32, feed_forward=1024)


def peak_gflops() -> float:
    """Returns the machine's current rate of fp32 matrix products: the best of a few of 1,536 x 1,536."""
    size = 1536
    a, b, c = (torch.randn(size, size) for _ in range(3))
    best = float("inf")
    for _ in range(4):
        began = time.perf_counter()
        torch.mm(a, b, out=c)
        best = min(best, time.perf_counter() - began)
    return 2 * size**3 / best / 1e9


class Training:
    """A model, and random text that it is trained on."""

    def __init__(self, lanes: int, *, dropout: float = 0.0, bf16: bool = False):
        model = Transformer(NETWORK.model_copy(update={"dropout": dropout}), VOCABULARY).initialise(0)
        optimiser = OptimiserSettings(learning_rate=1e-4, clip=0.25)
        self._steps = TrainingSteps(
            model,
            lambda model, batch, memory: segment_loss(model, MEMORY, batch, memory=memory),
            optimiser,
            lanes=lanes,
            bf16=bf16,
        )
        text = torch.randint(VOCABULARY, (lanes, SEGMENT + 1))
        positions = np.arange(lanes * SEGMENT).reshape(lanes, SEGMENT)
        self._batch = Batch(positions, text[:, :-1], text[:, 1:])
        self.tokens, self.parameters = lanes * SEGMENT, parameter_count(model)

    def step(self) -> float:
        """Makes a training step and returns its seconds."""
        return self._steps.step(self._batch)


def measure_training(rounds: int, lanes: int) -> dict[str, float]:
    """Returns the speed of training steps, also with dropout and in bfloat16, and the peak of the machine beside it."""
    subjects = {"plain": Training(lanes), "dropout 0.1": Training(lanes, dropout=0.1)}
    if has_bf16():
        subjects["bfloat16"] = Training(lanes, bf16=True)
    for subject in subjects.values():
        subject.step(), subject.step()
    peaks, seconds = [], {name: [] for name in subjects}
    for _ in range(rounds):
        peaks.append(peak_gflops())
        for name, subject in subjects.items():
            seconds[name].append(subject.step())
    peak = statistics.median(peaks)
    flops = count_flops(NETWORK, VOCABULARY, segment=SEGMENT, memory=MEMORY, lanes=lanes).step
    speed = {name: lanes * SEGMENT / statistics.median(taken) for name, taken in seconds.items()}
    return {
        "tokens_per_second": speed["plain"],
        "peak_gflops": peak,
        "fraction_of_peak": speed["plain"] * flops / peak / 1e9,
        "mflops_per_token": flops / 1e6,
        "best_fraction_of_peak": lanes * SEGMENT / min(seconds["plain"]) * flops / max(peaks) / 1e9,
        "tokens_per_second_with_dropout": speed["dropout 0.1"],
        **({"tokens_per_second_in_bfloat16": speed["bfloat16"]} if "bfloat16" in speed else {}),
        "lanes": lanes,
        "parameters": subjects["plain"].parameters,
    }


def share_of_quiet_speed(rounds: int, lanes: int) -> dict[str, float]:
    """Trains in turn alone and beside a process that keeps one core busy; returns both speeds and their ratio."""
    training = Training(lanes)
    training.step(), training.step()
    quiet, taken = [], []
    busy = subprocess.Popen([sys.executable, "-c", f"import os\nwhile os.getppid() == {os.getpid()}: pass"])
    try:
        for _ in range(rounds):
            busy.send_signal(signal.SIGSTOP)
            quiet += [training.step(), training.step()]
            busy.send_signal(signal.SIGCONT)
            taken += [training.step(), training.step()]
    finally:
        busy.kill()
        busy.wait()
    speeds = [training.tokens / statistics.median(seconds) for seconds in (quiet, taken)]
    return {"quiet": speeds[0], "taken": speeds[1], "share": speeds[1] / speeds[0]}


def measure_taken_core(rounds: int, lanes: int, threads: int | None) -> dict[str, float]:
    """Returns the speeds with one core taken, by threads that soon sleep and by spinning ones, in a process each."""
    found = {}
    own = {name: value for name, value in os.environ.items() if name not in {POLICY, *WAITING}}
    for name, environment in (("one_core_taken", own), ("one_core_taken_spinning", {**own, **SPINNING})):
        command = [sys.executable, __file__, "--taken-core", "--rounds", str(rounds), "--lanes", str(lanes)]
        command += [] if threads is None else ["--threads", str(threads)]
        printed = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
        measured = json.loads(printed)
        found[f"{name}_share_of_quiet_speed"] = measured["share"]
        found[f"{name}_tokens_per_second"], found[f"{name}_quiet_tokens_per_second"] = (
            measured["taken"],
            measured["quiet"],
        )
    return found


@torch.inference_mode()
def measure_reading(rounds: int) -> dict[str, float]:
    """Returns the speeds of evaluation (16 lanes, memories of 128 and 1,024) and generation (one lane, memory 512)."""
    model = Transformer(NETWORK, VOCABULARY).initialise(0).eval()
    reader, found = with_lane_threads(model), {}
    for memory in (128, 1024):
        state, text = reader.empty_state(memory, SEGMENT), torch.randint(VOCABULARY, (16, SEGMENT))
        seconds = []
        for _ in range(memory // SEGMENT + rounds):
            began = time.perf_counter()
            hidden = reader.hidden(text, state)
            reader.target_log_probabilities(hidden.flatten(0, 1), text.flatten())
            seconds.append(time.perf_counter() - began)
        found[f"evaluation_tokens_per_second_memory_{memory}"] = text.numel() / statistics.median(seconds[-rounds:])
    state, token = model.empty_state(512, SEGMENT), torch.zeros(1, 1, dtype=torch.int64)
    for _ in range(4):
        model.hidden(torch.randint(VOCABULARY, (1, SEGMENT)), state)
    seconds = []
    for _ in range(20 * rounds):
        began = time.perf_counter()
        token = model.log_probabilities(model.hidden(token, state)[:, -1]).argmax(-1, keepdim=True)
        seconds.append(time.perf_counter() - began)
    found["generation_tokens_per_second_memory_512"] = 1 / statistics.median(seconds)
    return found


def output_layer_memory(*, chunked: bool) -> None:
    """Prints the peak memory in MiB that a 50k output layer adds to a process, forward and backward."""
    from spalm.lm import Vocabulary

    vocabulary = Vocabulary(50_259, 512)
    vocabulary.initialise()
    hidden, targets = torch.randn(4096, 512, requires_grad=True), torch.randint(50_259, (4096,))
    before = process_memory("VmRSS")
    if chunked:
        vocabulary.loss(hidden, targets).backward()
    else:
        torch.nn.functional.cross_entropy(hidden @ vocabulary.table.T, targets).backward()
    print(process_memory("VmHWM") - before)


def process_memory(kind: str) -> float:
    """Returns the MiB that this process holds now (VmRSS) or held at its peak (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(kind)) / 1024


def measure_memory() -> dict[str, float]:
    """Returns the peak memory of an output layer for 4,096 positions and 50,259 tokens.

    It is measured for our chunked layer and for all logits at once, each in a process of its own.
    """
    found = {}
    for name in ("chunked", "whole"):
        command = [sys.executable, __file__, "--output-layer", name]
        printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        found[f"output_layer_50k_{name}_mib"] = float(printed)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/bench/training.json"))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--lanes", type=int, default=16)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--taken-core", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--output-layer", choices=["chunked", "whole"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.output_layer:
        output_layer_memory(chunked=options.output_layer == "chunked")
        return
    Hardware("cpu", options.threads).prepare()
    if options.taken_core:
        print(json.dumps(share_of_quiet_speed(options.rounds, options.lanes)))
        return
    found = {
        **measure_training(options.rounds, options.lanes),
        **measure_reading(options.rounds),
        **measure_memory(),
        **measure_taken_core(max(1, options.rounds // 3), options.lanes, options.threads),
        "command": " ".join(["python", *sys.argv]),
        "seed": 0,
        "hardware": f"{os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}",
        "threads": torch.get_num_threads(),
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(found, indent=2) + "\n")
    for name, value in found.items():
        print(f"{name:45} {value:,.2f}" if isinstance(value, float) else f"{name:45} {value}")


if __name__ == "__main__":
    main()
