"""What runs a pretrained model: torch in float32 or bfloat16, or llama.cpp."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from spalm.attachment import PretrainedBase
from spalm.compute import Hardware, has_bf16
from spalm.errors import InputError
from spalm.lm.pretrained import Backend, LlamaModel, PretrainedFolder, backend, usable_backends, usable_for
from support.tiny_models import write_model

CPU = Hardware("cpu", 1)
FLOAT32, BFLOAT16, LLAMA = Backend("torch", "float32"), Backend("torch", "bfloat16"), Backend("llama")
TOKENS = torch.tensor([[5, 17, 3, 99, 42, 7, 11], [8, 1, 3, 200, 5, 5, 2]])


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> PretrainedFolder:
    pytest.importorskip("transformers")
    return PretrainedFolder(write_model(tmp_path_factory.mktemp("tiny") / "llama", "llama", "ka1 lo2 mi3 .\n" * 9))


@pytest.fixture
def everything_here(monkeypatch) -> None:
    """A machine with arithmetic in bfloat16 and llama.cpp, to which every model is large."""
    monkeypatch.setattr(backend, "has_bf16", lambda: True)
    monkeypatch.setattr(backend, "_has_llama", lambda _: True)
    monkeypatch.setattr(backend, "_LARGE", 1)


def test_a_model_in_bfloat16_predicts_nearly_the_same_in_single_precision(folder):
    exact, rounded = folder.load(torch.device("cpu")), folder.load(torch.device("cpu"), "bfloat16")
    assert {parameter.dtype for parameter in rounded.model.base_model.parameters()} == {torch.bfloat16}
    expected, found = exact.hidden(TOKENS), rounded.hidden(TOKENS)
    assert found.dtype == torch.float32
    assert 0 < (found - expected).norm() < 0.03 * expected.norm()
    assert torch.equal(rounded.log_probabilities(expected), exact.log_probabilities(expected)), "the layer is exact"
    assert torch.equal(rounded.embed(TOKENS), exact.embed(TOKENS))
    state = rounded.empty_state()
    pieces = torch.cat([rounded.hidden(TOKENS[:1, :3], state), rounded.hidden(TOKENS[:1, 3:], state)], 1)
    assert (pieces - expected[:1]).norm() < 0.03 * expected[:1].norm()


def test_a_small_model_and_one_on_a_plain_cpu_are_in_float32(folder, monkeypatch):
    assert usable_backends(folder, CPU) == [FLOAT32]
    monkeypatch.setattr(backend, "_LARGE", 1)
    for there, expected in ((False, [FLOAT32]), (True, [FLOAT32, BFLOAT16])):
        monkeypatch.setattr(backend, "has_bf16", lambda there=there: there)
        assert usable_backends(folder, CPU) == expected
    assert isinstance(has_bf16(), bool)


@pytest.mark.usefixtures("everything_here")
def test_what_the_user_names_is_taken(folder):
    def usable(**options) -> list[Backend]:
        return usable_backends(folder, replace(CPU, **options))

    assert usable() == [FLOAT32, BFLOAT16, LLAMA]
    assert usable(backend="torch") == [FLOAT32, BFLOAT16]
    assert usable(precision="float32") == [FLOAT32]
    assert usable(backend="torch", precision="bfloat16") == [BFLOAT16]
    assert usable(backend="llama") == [LLAMA]
    with pytest.raises(InputError, match="--precision is torch's"):
        usable(backend="llama", precision="float32")


@pytest.mark.usefixtures("everything_here")
def test_text_is_generated_by_torch_where_llama_cpp_does_not_work(folder, capsys):
    """There is no GGUF file, though there seems to be one."""
    base = PretrainedBase(folder, "digest", CPU, 64, 48)
    assert base.generator.model.dtype == torch.bfloat16
    assert "the model is run in another way" in capsys.readouterr().err
    assert base.model is not base.generator, "keys of a folder that says nothing are in float32"
    assert base.query_encoder.model is base.generator
    wanted = PretrainedBase(folder, "digest", replace(CPU, backend="llama"), 64, 48)
    with pytest.raises(InputError, match="did not come as a GGUF file"):
        wanted.generator  # noqa: B018


@pytest.mark.usefixtures("everything_here")
def test_what_was_begun_goes_on_in_the_same_way_or_in_float32(folder, monkeypatch, capsys):
    for begun in (FLOAT32, BFLOAT16, LLAMA):
        assert usable_for(begun, folder, CPU) == begun
    assert usable_for(Backend(), folder, CPU) == FLOAT32
    assert not capsys.readouterr().err
    monkeypatch.setattr(backend, "has_bf16", lambda: False)
    monkeypatch.setattr(backend, "_has_llama", lambda _: False)
    for begun in (BFLOAT16, LLAMA):
        assert usable_for(begun, folder, CPU) == FLOAT32
        assert "further ones are made by torch in float32" in capsys.readouterr().err
    assert usable_for(BFLOAT16, folder, replace(CPU, precision="bfloat16")) == BFLOAT16, "emulated, as was asked for"


def test_it_is_known_what_the_user_asked_for():
    assert BFLOAT16.is_as_wanted(CPU)
    assert LLAMA.is_as_wanted(replace(CPU, backend="llama"))
    assert not LLAMA.is_as_wanted(replace(CPU, backend="torch"))
    assert not BFLOAT16.is_as_wanted(replace(CPU, precision="float32"))
    assert Backend().is_as_wanted(replace(CPU, precision="float32"))


@pytest.mark.slow
def test_a_gguf_file_is_run_by_llama_cpp(smollm2: tuple[Path, Path]):
    pytest.importorskip("llama_cpp", reason="llama.cpp is not installed: pip install 'spalm[llama]'")
    base = PretrainedBase(PretrainedFolder(smollm2[1]), "digest", Hardware("cpu"), 64, 48)
    assert isinstance(base.generator, LlamaModel)
    made = replace(base, keys_by=LLAMA)
    assert made.model is made.generator, "a model is opened once"
