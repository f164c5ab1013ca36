"""Pretrained models behind the interface of our own: their logits exactly, and a plain word for what is none."""

import ast
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import spalm
from spalm.corpus.pretrained_tokeniser import PretrainedTokeniser
from spalm.digests import read_sums
from spalm.errors import InputError
from spalm.lm import BatchReader, IncrementalReader, Reading
from spalm.lm.pretrained import PretrainedFolder, PretrainedModel, locate_pretrained
from spalm.lm.pretrained.convert import convert_gguf
from spalm.lm.pretrained.import_transformers import open_pretrained
from spalm.lm.pretrained.sequences import SequenceState
from support.tiny_models import ARCHITECTURES, with_window

transformers = pytest.importorskip("transformers")
CPU = torch.device("cpu")
BY_DOCUMENT = Reading(128, 0, 96, 1, warm_up=0, by_document=True)
TOKENS = torch.tensor([[3, 17, 301, 2, 5, 88, 41], [9, 9, 1, 320, 44, 6, 200]])


def load(folder: Path) -> tuple[PretrainedModel, transformers.PreTrainedModel]:
    return PretrainedFolder(folder).load(CPU), transformers.AutoModelForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@torch.no_grad()
def test_logits_are_the_models_own(tiny, architecture):
    ours, theirs = load(tiny(architecture))
    hidden = ours.hidden(TOKENS)
    expected = theirs(TOKENS).logits
    torch.testing.assert_close(ours.logits(hidden), expected, rtol=1e-4, atol=1e-4)
    found = ours.log_probabilities(hidden)
    torch.testing.assert_close(found, expected.log_softmax(-1), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.exp().sum(-1), torch.ones(2, 7))
    targets = TOKENS.roll(-1, 1).flatten()
    of_targets = ours.target_log_probabilities(hidden.flatten(0, 1), targets)
    torch.testing.assert_close(of_targets, found.flatten(0, 1)[torch.arange(14), targets], rtol=1e-4, atol=1e-4)
    assert (ours.width, ours.vocabulary, ours.context_length) == (24, 328, 128)
    assert ours.embed(TOKENS).shape == (2, 7, 24)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_read_in_pieces_it_is_the_same(tiny, architecture):
    model = PretrainedFolder(tiny(architecture)).load(CPU)
    state = model.empty_state()
    text = TOKENS[:1]
    pieces = [model.hidden(part, state) for part in text.split([2, 1, 4], 1)]
    torch.testing.assert_close(torch.cat(pieces, 1), model.hidden(text), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_several_texts_are_read_in_one_pass_as_each_would_be_alone(tiny, architecture):
    """Texts that begin and end at any step, are shortened and copied, and are longer than the first room for them."""
    model = PretrainedFolder(tiny(architecture)).load(CPU)
    assert isinstance(model, BatchReader)
    random = np.random.default_rng(3)
    texts: list[tuple[SequenceState, list[int]]] = []
    for step in range(24):
        if step % 5 == 0:
            texts.append((model.empty_state(), []))
        elif step % 5 == 3:
            state, read = texts[0]
            model.shorten(state, len(read) - 1)
            read.pop()
            texts.append((model.copy_state(state), list(read)))
        elif step % 7 == 6:
            del texts[1]
        pieces = [random.integers(0, 328, random.integers(1, 6 if step % 4 else 30)).tolist() for _ in texts]
        needed = [int(random.integers(0, len(piece) + 1)) for piece in pieces]
        outputs = model.read([(state, piece) for (state, _), piece in zip(texts, pieces)], needed)
        for (state, read), piece, count, found in zip(texts, pieces, needed, outputs, strict=True):
            read += piece
            assert (len(found.hidden), state.tokens) == (count, len(read))
            expected = model.hidden(torch.tensor([read]))[0, len(read) - count :]
            torch.testing.assert_close(found.hidden, expected, rtol=1e-3, atol=1e-3)
        texts = [(state, read) for state, read in texts if len(read) < 90]
    assert len(model.read([(model.empty_state(), [1])])[0].hidden) == 1


def test_a_model_that_sees_a_window_reads_one_text_after_another(tiny, tmp_path):
    model = PretrainedFolder(with_window(tiny("gemma2"), tmp_path / "model", 5)).load(CPU)
    assert not isinstance(model, BatchReader)
    readers = [IncrementalReader(model, BY_DOCUMENT, CPU) for _ in range(2)]
    found = IncrementalReader.read_together(readers, [TOKENS[0].tolist(), TOKENS[1, :4].tolist()], [7, 2])
    torch.testing.assert_close(found[0].hidden, model.hidden(TOKENS)[0], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(found[1].hidden, model.hidden(TOKENS)[1, 2:4], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("window", "shortened"), [(9, False), (128, False), (129, True)])
def test_only_a_text_of_which_every_token_is_kept_can_be_shortened(tiny, tmp_path, window, shortened):
    model = PretrainedFolder(with_window(tiny("gemma2"), tmp_path / "model", window)).load(CPU)
    assert PretrainedModel(model.model, "x").can_shorten == shortened
    reader = IncrementalReader(model, BY_DOCUMENT, CPU)
    assert reader.can_shorten == (window >= 128)  # the cache of texts that are read together keeps all tokens
    reader.feed(list(range(100)))
    if reader.can_shorten:
        reader.shorten(40)
        expected = model.hidden(torch.arange(50)[None])[0, 40:]
        torch.testing.assert_close(reader.feed(list(range(40, 50))), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_models_that_keep_every_token_can_be_shortened(tiny, architecture):
    _, theirs = load(tiny(architecture))
    model = PretrainedModel(theirs, "x")
    assert model.can_shorten == (architecture != "gemma2" or theirs.config.sliding_window > 128)
    state = model.empty_state()
    model.hidden(TOKENS[:1], state)
    model.shorten(state, 3)
    found = model.hidden(TOKENS[:1, 3:], state)
    torch.testing.assert_close(found, model.hidden(TOKENS[:1])[:, 3:], rtol=1e-3, atol=1e-3)


def test_a_model_whose_logits_do_not_follow_is_refused(tiny):
    _, theirs = load(tiny("llama"))

    class Sharpened(type(theirs)):
        def forward(self, *args, **more):
            said = super().forward(*args, **more)
            said.logits = said.logits * 1.5
            return said

    theirs.__class__ = Sharpened
    with pytest.raises(InputError, match="the logits of Sharpened do not follow from its last hidden state"):
        PretrainedModel(theirs, "x")


def made(folder: Path, model: transformers.PreTrainedModel) -> Path:
    model.save_pretrained(folder)
    return folder


def test_a_model_that_looks_ahead_is_refused(tmp_path):
    config = transformers.BertConfig(
        vocab_size=97, hidden_size=24, num_hidden_layers=1, num_attention_heads=2, intermediate_size=48
    )
    folder = made(tmp_path, transformers.BertForMaskedLM(config))
    with pytest.raises(InputError, match=r"\(BertLMHeadModel\) looks ahead: .*; give a causal language model$"):
        PretrainedFolder(folder).load(CPU)


def test_a_model_without_attention_is_refused(tmp_path):
    config = transformers.MambaConfig(vocab_size=97, hidden_size=24, num_hidden_layers=1, state_size=4)
    folder = made(tmp_path, transformers.MambaForCausalLM(config))
    with pytest.raises(InputError, match="does not go on from keys and values of what it has read"):
        PretrainedFolder(folder).load(CPU)


@pytest.mark.slow
def test_a_model_with_an_encoder_is_refused(tmp_path):
    config = transformers.T5Config(vocab_size=97, d_model=24, d_kv=12, d_ff=48, num_layers=1, num_heads=2)
    folder = made(tmp_path, transformers.T5ForConditionalGeneration(config))
    with pytest.raises(InputError, match=r"^[^\n]* is no causal language model: [^\n]*$"):
        PretrainedFolder(folder).load(CPU)


@pytest.fixture
def copy(tiny, tmp_path) -> Path:
    return shutil.copytree(tiny("llama"), tmp_path / "llama")


def reconfigure(folder: Path, **changes) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


DAMAGES = {
    "cut weights": (lambda folder: cut(folder / "model.safetensors"), "is no causal language model: .*deserializ"),
    "no JSON": (lambda folder: (folder / "config.json").write_text("{"), r"config.json is damaged \(no JSON"),
    "lists": (lambda folder: reconfigure(folder, num_key_value_heads=[[[]]]), "is no causal language model: "),
    "no type": (lambda folder: (folder / "config.json").write_text("{}"), "is no causal language model: "),
    "other sizes": (lambda folder: reconfigure(folder, hidden_size=48), r"the weights are not as config.json says"),
    "more layers": (lambda folder: reconfigure(folder, num_hidden_layers=3), r"no weights of .*layers.2\..* 8 more"),
}


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:5000])


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_model_is_told_so_in_a_line(copy, damage):
    harm, message = DAMAGES[damage]
    harm(copy)
    with pytest.raises(InputError, match=message) as raised:
        PretrainedFolder(copy).load(CPU)
    assert "\n" not in str(raised.value)
    assert raised.value.__suppress_context__ or raised.value.__context__ is None


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("config.json", r"holds no model \(no config.json\); give the folder of one, a GGUF file or a hub name"),
        ("tokenizer.json", "has no tokenizer.json; save its tokeniser there in the fast format"),
        ("model.safetensors", "has no weights as safetensors; save the model there with `save_pretrained`"),
    ],
)
def test_a_folder_without_a_part_is_told_so(copy, missing, message):
    (copy / missing).unlink()
    with pytest.raises(InputError, match=message):
        locate_pretrained(str(copy), copy / "converted")


def test_what_is_no_model_is_told_so(tmp_path):
    (tmp_path / "text.txt").write_text("hello")
    (tmp_path / "no.gguf").write_bytes(b"GGUFabc")
    (tmp_path / "text.gguf").write_text("hello")
    for name, message in (
        ("text.txt", "is no folder of a model, nor a .gguf file"),
        ("absent.gguf", "does not exist; give the path of a GGUF file"),
        ("no.gguf", r"cannot be converted: [^\n]*$"),
        ("text.gguf", r"cannot be converted: [^\n]*$"),
    ):
        with pytest.raises(InputError, match=message):
            locate_pretrained(str(tmp_path / name), tmp_path / "converted")


@pytest.fixture
def hub(monkeypatch, tmp_path) -> Path:
    """The hub, as it is without a network: what was fetched before."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("name", ["nobody/nothing", "no such name at all"])
def test_a_name_that_is_nowhere_is_told_so(hub, name):
    with pytest.raises(InputError, match=rf"^there is no model '{name}', neither here nor on the hub \([^\n]*\)$"):
        locate_pretrained(name, hub / "converted")


def test_a_model_of_the_hub_is_found_by_its_name(hub, tiny):
    repository = hub / "models--some--one"
    shutil.copytree(tiny("llama"), repository / "snapshots" / "abc")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    found = locate_pretrained("some/one", hub / "converted")
    assert found.digest() == PretrainedFolder(tiny("llama")).digest()


def test_the_digest_tells_weights_and_tokenisers_apart(tiny, copy):
    same = PretrainedFolder(copy).digest()
    assert same == PretrainedFolder(tiny("llama")).digest() != PretrainedFolder(tiny("qwen2")).digest()
    (copy / "tokenizer.json").write_text((copy / "tokenizer.json").read_text() + "\n")
    assert PretrainedFolder(copy).digest() != same


def commit(repository: Path, name: str, model: Path) -> None:
    """Puts a model into the cache of the hub as a commit, which becomes the newest one."""
    shutil.copytree(model, repository / "snapshots" / name)
    (repository / "refs").mkdir(exist_ok=True)
    (repository / "refs" / "main").write_text(name)


def test_the_commit_of_a_model_of_the_hub_is_known_and_can_be_asked_for(hub, tiny):
    repository, old, new = hub / "models--some--one", "a1" * 20, "b2" * 20
    commit(repository, old, tiny("llama"))
    assert locate_pretrained("some/one", hub / "converted").revision == old
    commit(repository, new, tiny("qwen2"))
    assert locate_pretrained("some/one", hub / "converted").revision == new
    for again in (
        locate_pretrained("some/one", hub / "converted", old),
        locate_pretrained(f"some/one@{old}", hub / "converted"),
    ):
        assert again.revision == old
        assert again.digest() == PretrainedFolder(tiny("llama")).digest()


def test_code_of_a_model_is_not_run_and_nobody_is_asked(copy, tmp_path, monkeypatch):
    ran = tmp_path / "ran"
    (copy / "modeling_own.py").write_text(f"import pathlib\npathlib.Path({str(ran)!r}).touch()\nOwn = OwnConfig = None")
    own = {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.Own"}
    reconfigure(copy, model_type="own", auto_map=own)
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    with pytest.raises(InputError, match=r"^[^\n]*is no causal language model: [^\n]*$"):
        PretrainedFolder(copy).load(CPU)
    open_pretrained("AutoTokenizer", copy)
    assert not ran.exists()


def test_code_of_other_repositories_is_not_fetched(copy):
    reconfigure(copy, _attn_implementation="somebody/kernels")
    with pytest.raises(InputError, match="asks for the code 'somebody/kernels', which is not run"):
        PretrainedFolder(copy).load(CPU)
    reconfigure(copy, _attn_implementation=None)
    (copy / "adapter_config.json").write_text('{"base_model_name_or_path": "somebody/else"}')
    with pytest.raises(InputError, match="holds an adapter"):
        PretrainedFolder(copy).load(CPU)


def split_weights(folder: Path) -> Path:
    """Saves a model's weights in two files, and returns the file that lists them."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="20KB")
    return folder / "model.safetensors.index.json"


@pytest.mark.parametrize("name", ["../model-00001-of-00002.safetensors", "sub/x.safetensors", "/etc/hostname", ""])
def test_weights_elsewhere_are_not_read(copy, name):
    listed = split_weights(copy)
    PretrainedFolder(copy).load(CPU)
    about = json.loads(listed.read_text())
    about["weight_map"]["model.norm.weight"] = name
    listed.write_text(json.dumps(about))
    with pytest.raises(InputError, match="is not the name of a file in the folder"):
        PretrainedFolder(copy).load(CPU)


def test_the_list_of_weights_is_in_the_digest_and_earlier_digests_are_known(copy):
    listed = split_weights(copy)
    digest, earlier = PretrainedFolder(copy).digests()
    assert PretrainedFolder(copy).digest() == digest != earlier
    listed.write_text(listed.read_text() + "\n")
    assert PretrainedFolder(copy).digests()[0] != digest
    assert PretrainedFolder(copy).digests()[1] == earlier
    listed.unlink()
    assert PretrainedFolder(copy).digests() == [earlier]


def test_a_gguf_file_is_not_converted_into_what_somebody_else_made(tmp_path, monkeypatch):
    def convert(_: Path, folder: Path) -> None:
        for name in ("config.json", "tokenizer.json", "model.safetensors"):
            (folder / name).write_text("made")

    monkeypatch.setattr("spalm.lm.pretrained.convert._convert", convert)
    gguf, folder, victim = tmp_path / "x.gguf", tmp_path / "out" / "model", tmp_path / "victim"
    gguf.write_text("one")
    victim.write_text("mine")
    convert_gguf(gguf, folder)
    assert {path.name for path in folder.parent.iterdir()} == {"model"}
    (folder / "old").write_text("of another file")
    gguf.write_text("two")
    convert_gguf(gguf, folder)
    assert not (folder / "old").exists()
    assert read_sums(folder)
    for name in ("config.json", "tokenizer.json", "known-digests.json"):
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(victim)
        for content in ("two", "three"):
            gguf.write_text(content)
            with pytest.raises(InputError, match=rf"{name} is a symbolic link that leads out of"):
                convert_gguf(gguf, folder)
        (folder / name).unlink()
    (folder / "converted.json").unlink()
    with pytest.raises(InputError, match="holds files that were not made from a GGUF file"):
        convert_gguf(gguf, folder)
    assert victim.read_text() == "mine"


def test_pickled_weights_are_not_read(copy):
    weights = copy / "model.safetensors"
    torch.save({"x": torch.zeros(1)}, copy / "pytorch_model.bin")
    weights.unlink()
    with pytest.raises(InputError, match="is no causal language model"):
        PretrainedFolder(copy).load(CPU)


def test_transformers_opens_models_in_one_place():
    """Everywhere else it would ask on the terminal whether it may run their code."""
    package = Path(spalm.__file__).parent
    calls = {
        path.name
        for path in package.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "from_pretrained"
        if ast.unparse(node.func) != "SpalmConfig.from_pretrained"  # a class of ours
    }
    assert calls == {"import_transformers.py"}


@pytest.mark.slow
def test_a_gguf_file_is_converted_exactly_and_once(smollm2):
    from gguf import GGUFReader
    from gguf.quants import dequantize

    gguf, folder = smollm2
    before = (folder / "model.safetensors").stat().st_mtime_ns
    model = locate_pretrained(str(gguf), folder).load(CPU)
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
    names = {
        "token_embd.weight": "model.embed_tokens.weight",
        "blk.7.ffn_up.weight": "model.layers.7.mlp.up_proj.weight",
        "output_norm.weight": "model.norm.weight",
    }
    parameters = dict(model.model.named_parameters())
    stored = {tensor.name: tensor for tensor in GGUFReader(gguf).tensors if tensor.name in names}
    for name, ours in names.items():
        expected = dequantize(stored[name].data, stored[name].tensor_type)
        np.testing.assert_array_equal(parameters[ours].numpy(), expected)
    tokens = torch.tensor([PretrainedTokeniser.of_model(folder).prompt("The capital of France is")])
    likeliest = model.logits(model.hidden(tokens))[0, -1].argmax()
    assert PretrainedTokeniser.of_model(folder).spell(int(likeliest)) == " Paris"
