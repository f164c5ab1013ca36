"""Training: resumed is the same as never stopped, micro-batches are the same as whole ones, golden losses."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from spalm.compute import Execution, Hardware, using_threads
from spalm.corpus import TrainingBatches
from spalm.errors import InputError
from spalm.lm import ModelSettings, TrainedModel, Transformer, segment_loss, train_model
from spalm.lm.training import dev_loss
from spalm.training import checkpoint, loop
from spalm.training.gradients import GradientAccumulator
from spalm.training.replica import Replica


def settings(**training) -> ModelSettings:
    network = {"layers": 2, "width": 16, "heads": 2, "head_width": 8, "feed_forward": 32, "dropout": 0.1}
    default = {
        "steps": 24,
        "batch_size": 4,
        "segment_length": 8,
        "memory_length": 8,
        "optimiser": {"learning_rate": 0.01, "warm_up": 4},
        "evaluate_every": 6,
        "dev_tokens": 256,
        "seed": 3,
    }
    return ModelSettings.parse({"network": network, "training": {**default, **training}}, "test")


def losses(directory) -> list[tuple]:
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line.get("loss"), line.get("dev_loss")) for line in lines]


MUON = {"kind": "muon", "learning_rate": 0.01, "warm_up": 4}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("threads", "changes"),
    [
        (1, {"memory_length": 0}),
        (2, {}),
        (2, {"micro_batch": 3}),
        (1, {"micro_batch": 3, "memory_length": 0}),
        (2, {"optimiser": MUON, "dropout_from": 10}),
    ],
)
def test_resumed_equals_uninterrupted_bit_for_bit(corpus, tmp_path, monkeypatch, threads, changes):
    execution = Execution(hardware=Hardware(threads=threads))
    wanted = settings(**changes)
    whole = train_model(wanted, corpus, tmp_path / "whole", execution=execution)
    monkeypatch.setattr(loop, "CHECKPOINT_SECONDS", -1.0)  # after every step
    real_batch = TrainingBatches.batch
    for stop in (5, 6, 17):  # in the middle of nothing, just after an evaluation, and again

        def crash(self, step, stop=stop):
            if step == stop:
                raise KeyboardInterrupt
            return real_batch(self, step)

        monkeypatch.setattr(TrainingBatches, "batch", crash)
        with pytest.raises(KeyboardInterrupt):
            train_model(wanted, corpus, tmp_path / "stopped", execution=execution)
        torch.manual_seed(99)
        assert not (tmp_path / "stopped" / "manifest.json").exists()
    monkeypatch.setattr(TrainingBatches, "batch", real_batch)
    resumed = train_model(wanted, corpus, tmp_path / "stopped", execution=execution)
    assert losses(resumed.directory) == losses(whole.directory)
    assert resumed.manifest == whole.manifest
    assert not (resumed.directory / "checkpoint").exists()


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("micro_batch", [None, 1, 3])
def test_micro_batches_and_threads_change_nothing_but_time_and_memory(corpus, threads, micro_batch):
    batch = TrainingBatches(corpus.split("train"), 4, 8, seed=1).batch(0)

    def first_gradients(threads: int, micro_batch: int | None) -> tuple:
        model = Transformer(settings().network, corpus.vocabulary).initialise(0).eval()
        hardware = Hardware(threads=threads)
        with using_threads(threads):
            replica = Replica(
                model,
                lambda model, batch, memory: segment_loss(model, 8, batch, memory=memory),
                hardware.prepare(),
                hardware=hardware,
            )
            accumulator = GradientAccumulator(replica, 4, micro_batch)
            mean, memories = accumulator.add(batch, accumulator.split_memory([]))
        gradients = [parameter.grad for parameter in model.parameters()]
        return mean, gradients, [torch.cat(layer) for layer in zip(*memories)]

    torch.testing.assert_close(first_gradients(threads, micro_batch), first_gradients(1, None))


@pytest.mark.parametrize("threads", [1, 2])
def test_dropout_begins_with_its_step(corpus, tmp_path, threads):
    execution = Execution(hardware=Hardware(threads=threads))
    folders = {}
    for name, network, training in (
        ("late", {"dropout": 0.5}, {"dropout_from": 6}),
        ("none", {"dropout": 0.0}, {}),
        ("all", {"dropout": 0.5}, {}),
    ):
        wanted = settings(steps=12, **training)
        wanted = wanted.model_copy(update={"network": wanted.network.model_copy(update=network)})
        folders[name] = train_model(wanted, corpus, tmp_path / name, execution=execution).directory
    late, none, all_ = ({s: d for s, _, d in losses(folders[n]) if d} for n in ("late", "none", "all"))
    assert late[6] == none[6] != all_[6]
    assert late[12] != none[12]


def test_it_learns_and_the_best_on_dev_is_kept(corpus, tmp_path):
    trained = train_model(settings(steps=60), corpus, tmp_path / "m", execution=Execution())
    dev = [loss for _, _, loss in losses(trained.directory) if loss is not None]
    assert trained.facts["best_dev_loss"] == min(dev) < dev[0]
    # 15 words, nearly without order: about log(15) is all that there is to learn.
    assert min(dev) < 2.75
    model = trained.load(torch.device("cpu"))
    assert dev_loss(model, corpus, settings()) == pytest.approx(min(dev), abs=1e-6)


def test_golden_losses(corpus, tmp_path):
    """A change that is to change nothing must give these again (to float tolerance between machines)."""
    execution = Execution(hardware=Hardware(threads=1))  # several threads draw other masks of dropout
    trained = train_model(settings(), corpus, tmp_path / "m", execution=execution)
    found = [(step, loss or dev) for step, loss, dev in losses(trained.directory)]
    golden = json.loads(GOLDEN)
    assert [step for step, _ in found] == [step for step, _ in golden]
    assert [loss for _, loss in found] == pytest.approx([loss for _, loss in golden], abs=2e-3)


GOLDEN = "[[6, 2.8371], [10, 2.6345], [12, 2.6381], [18, 2.5765], [20, 2.5701], [24, 2.7211], [24, 2.5473]]"


def test_a_checkpoint_of_another_configuration_is_refused(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(TrainingBatches, "batch", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        train_model(settings(), corpus, tmp_path / "m", execution=Execution())
    other = settings(optimiser={"learning_rate": 0.02})
    with pytest.raises(InputError, match=r"training.optimiser.learning_rate: 0.01 -> 0.02.*--restart"):
        train_model(other, corpus, tmp_path / "m", execution=Execution())


def test_weights_of_another_network_are_refused(corpus, tmp_path):
    trained = train_model(settings(steps=1, evaluate_every=1), corpus, tmp_path / "m", execution=Execution())
    path = trained.directory / "model.safetensors"
    tensors = load_file(path)
    tensors["vocabulary.table"] = torch.zeros(3, 16)
    save_file(tensors, path)
    manifest = json.loads((trained.directory / "manifest.json").read_text())
    manifest["files"]["model.safetensors"]["bytes"] = path.stat().st_size
    (trained.directory / "manifest.json").write_text(json.dumps(manifest))
    (trained.directory / "SHA256SUMS").unlink()
    with pytest.raises(InputError, match=r"other settings: vocabulary.table is \[3, 16\] there and \[\d+, 16\] here"):
        TrainedModel(tmp_path / "m").load(torch.device("cpu"))


def test_a_damaged_checkpoint_is_refused(corpus, tmp_path):
    model = Transformer(settings().network, corpus.vocabulary).initialise(0)
    optimiser = torch.optim.AdamW(model.parameters())
    checkpoint.save_checkpoint(tmp_path, checkpoint.Progress(step=3), model, optimiser=optimiser, memories=[])
    path = tmp_path / "checkpoint" / "000000003" / "tensors.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(InputError, match="damaged"):
        checkpoint.load_checkpoint(tmp_path, model, optimiser, device=torch.device("cpu"))


def test_a_half_written_checkpoint_does_not_count(corpus, tmp_path):
    model = Transformer(settings().network, corpus.vocabulary).initialise(0)
    optimiser = torch.optim.AdamW(model.parameters())
    checkpoint.save_checkpoint(tmp_path, checkpoint.Progress(step=3), model, optimiser=optimiser, memories=[])
    shutil.copytree(tmp_path / "checkpoint" / "000000003", tmp_path / "checkpoint" / "000000007")
    (tmp_path / "checkpoint" / "000000007" / "progress.json").unlink()
    progress, _ = checkpoint.load_checkpoint(tmp_path, model, optimiser, device=torch.device("cpu"))
    assert progress.step == 3


def test_a_loss_that_is_no_number_stops_with_a_line(corpus, tmp_path):
    wild = settings(optimiser={"learning_rate": 1e30, "clip": 1e30, "decay": "none"})
    with pytest.raises(InputError, match=r"no longer a number.*learning_rate"):
        train_model(wild, corpus, tmp_path / "m", execution=Execution())


def test_too_few_tokens_for_a_segment(corpus, tmp_path):
    with pytest.raises(InputError, match=r"training.batch_size or training.segment_length"):
        train_model(settings(segment_length=4000), corpus, tmp_path / "m", execution=Execution())


@pytest.mark.parametrize(
    ("hardware", "message"), [(Hardware("tpu"), "--device tpu"), (Hardware(threads=0), "--threads 0")]
)
def test_impossible_hardware(hardware, message):
    with pytest.raises(InputError, match=message):
        hardware.prepare()


@pytest.mark.parametrize("there", [True, False])
def test_bf16_trains_and_says_where_it_is_slow(corpus, tmp_path, monkeypatch, capsys, there):
    monkeypatch.setattr("spalm.training.loop.has_bf16", lambda: there)
    trained = train_model(settings(steps=12, bf16=True), corpus, tmp_path / "m", execution=Execution())
    assert trained.facts["best_dev_loss"] < 4
    assert ("emulates bfloat16" in capsys.readouterr().err) != there


@pytest.mark.parametrize("there", [True, False])
def test_bf16_auto_is_bfloat16_where_the_cpu_has_it(corpus, tmp_path, monkeypatch, there):
    monkeypatch.setattr("spalm.training.loop.has_bf16", lambda: there)
    losses = {}
    for bf16 in ("auto", there, not there):
        trained = train_model(settings(steps=3, bf16=bf16), corpus, tmp_path / str(bf16), execution=Execution())
        losses[bf16] = trained.facts["best_dev_loss"]
    assert losses["auto"] == losses[there] != losses[not there]


def test_tensorboard_is_an_extra(corpus, tmp_path):
    try:
        import tensorboard  # noqa: F401
    except ImportError:
        with pytest.raises(InputError, match=r"spalm\[tensorboard\]"):
            train_model(settings(), corpus, tmp_path / "m", execution=Execution(tensorboard=True))
    else:
        train_model(settings(steps=10), corpus, tmp_path / "m", execution=Execution(tensorboard=True))
        assert list((tmp_path / "m" / "tensorboard").iterdir())
