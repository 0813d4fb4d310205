"""Checkpoints of Megatron-LM and Megatron-DeepSpeed become the models that they are."""

import enum
import os
import sys
import types

import pytest
import torch

from megalite.checkpoint.convert.convert import Conversion
from megalite.checkpoint.convert.formats import kind_of
from megalite.checkpoint.convert.megatron_folder import TRACKER
from megalite.checkpoint.convert.megatron_model import model_of
from megalite.checkpoint.convert.model_settings import Settings
from megalite.checkpoint.manifest import read_manifest
from megalite.config import ModelConfig
from megalite.utils.errors import UserError
from tests.checkpoint_folder import make_pipe
from tests.unit.checkpoint.convert import megatron_fixtures as megatron
from tests.unit.checkpoint.convert.foreign_models import VOCABULARY, build, logits_of, same_bits, tensors_of

VOCAB = ("--vocab-size", str(VOCABULARY))
BLOOM = (
    *("--num-layers", "3", "--hidden-size", "32", "--num-attention-heads", "4", "--seq-length", "40"),
    *("--embed-layernorm", "--position-embedding-type", "alibi", *VOCAB),
)


def to_hf(load, save, *flags):
    Conversion(load, save, target="hf", settings=Settings(flags)).run()
    return save


def weights_of(model):
    return dict(model.named_parameters())


def check(folder, model):
    """The same tensors as the model's, under the same names, and the same logits."""
    found = tensors_of(folder)
    expected = weights_of(model)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert same_bits(found[name], tensor.data), name
    model.set_attn_implementation("eager")
    ids = torch.randint(VOCABULARY, (2, 11))
    torch.testing.assert_close(logits_of(folder, ids), logits_of(model, ids), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("tp", "pp", "version"), [(1, 1, 3.0), (2, 2, 3.0), (2, 1, 0), (2, 1, 1.0), (4, 2, 2.0)]
)
def test_old_names(tp, pp, version, tmp_path):
    model = build("gpt2")
    with torch.no_grad():
        megatron.save_old(tmp_path / "megatron", weights_of(model), 4, tp, pp, version)
    assert kind_of(tmp_path / "megatron") == "megatron"
    check(to_hf(tmp_path / "megatron", tmp_path / "hf", *VOCAB), model)


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("tp", [1, 2])
def test_core_names_on_an_interleaved_pipeline(tp, inside, tmp_path):
    model = build("llama", layers=4)
    with torch.no_grad():
        megatron.save_core(tmp_path / "megatron", weights_of(model), tp, inside)
    check(to_hf(tmp_path / "megatron", tmp_path / "hf", *VOCAB), model)


@pytest.mark.parametrize(("tp", "form"), [(1, "pt"), (2, "pt"), (2, "safetensors")])
def test_deepspeed(tp, form, tmp_path):
    model = build("bloom")
    with torch.no_grad():
        megatron.save_deepspeed(tmp_path / "bloom", weights_of(model), tp, form=form)
    assert kind_of(tmp_path / "bloom") == "megatron-deepspeed"
    with pytest.raises(UserError, match="pass the model's flags"):
        to_hf(tmp_path / "bloom", tmp_path / "hf")
    check(to_hf(tmp_path / "bloom", tmp_path / "hf", *BLOOM), model)


def test_objects_of_megatron_are_not_needed(tmp_path, monkeypatch):
    """BLOOM's arguments hold an enum of a module that is not here, and arrays of numpy stand beside."""
    module = types.ModuleType("megatron.enums")
    members = {"rotary": 1, "absolute": 2, "alibi": 3}
    module.PositionEmbeddingType = enum.Enum("PositionEmbeddingType", members, module="megatron.enums")
    monkeypatch.setitem(sys.modules, "megatron", types.ModuleType("megatron"))
    monkeypatch.setitem(sys.modules, "megatron.enums", module)
    args = megatron.arguments(
        hidden_size=32,
        num_attention_heads=4,
        position_embedding_type=module.PositionEmbeddingType.alibi,
        embed_layernorm=True,
        state=__import__("numpy").arange(3),
    )
    model = build("bloom")
    with torch.no_grad():
        megatron.save_deepspeed(tmp_path / "bloom", weights_of(model), 2, args)
    monkeypatch.undo()
    check(to_hf(tmp_path / "bloom", tmp_path / "hf", *VOCAB), model)


def test_drifted_norms_are_averaged(tmp_path, caplog):
    model = build("bloom")
    with torch.no_grad():
        megatron.save_deepspeed(tmp_path / "bloom", weights_of(model), 2, drift=0.25)
    found = tensors_of(to_hf(tmp_path / "bloom", tmp_path / "hf", *BLOOM))
    for name, tensor in weights_of(model).items():
        torch.testing.assert_close(found[name], tensor.data)
    assert "layers.2.attention_norm.weight differs by up to 5.0e-01 between" in caplog.text


def test_switches_of_a_model():
    arguments = {"num_attention_heads": 2, "hidden_size": 8, "squared_relu": True, "apply_layernorm_1p": True}
    fields = model_of(arguments, ModelConfig())
    assert (fields["activation"], fields["zero_centered_norms"]) == ("squared_relu", True)
    arguments |= {"squared_relu": False, "quick_geglu": True, "activation_func_clamp_value": 7.0}
    fields = model_of({**arguments, "glu_linear_offset": 1.0}, ModelConfig())
    names = ("activation", "activation_func_clamp_value", "glu_linear_offset")
    assert [fields[name] for name in names] == ["quick_geglu", 7.0, 1.0]


@pytest.mark.parametrize("tp", [1, 2])
def test_sinks_and_gates_come_with_the_layers(tp, tmp_path):
    """No family of transformers that we read has them, so the target is a checkpoint of ours."""
    model = build("llama", layers=4)
    sinks, gates = torch.randn(4, 4), torch.randn(4, 32, 32)
    with torch.no_grad():
        megatron.save_core(tmp_path / "megatron", weights_of(model), tp, True, sinks, gates)
    Conversion(tmp_path / "megatron", tmp_path / "ours", settings=Settings(VOCAB)).run()
    folder = tmp_path / "ours" / "iter_0000001"
    found = tensors_of(folder)
    fields = read_manifest(folder).description["model"]
    assert (fields["softmax_type"], fields["attention_output_gate"]) == ("learnable", True)
    for layer in range(4):
        assert same_bits(found[f"model.layers.{layer}.attention.sinks"], sinks[layer])
        rows = found[f"model.layers.{layer}.attention.qkv.weight"].unflatten(0, (2, 6, 8))
        assert same_bits(rows[:, 2:4].flatten(0, 2), gates[layer])  # 2 queries, 2 gates, a key, a value


def test_a_bert_is_refused(tmp_path):
    with torch.no_grad():
        megatron.save_old(tmp_path / "megatron", weights_of(build("gpt2")), 4, 1, 1)
    with pytest.raises(UserError, match="a bert of Megatron cannot be converted, only a gpt"):
        to_hf(tmp_path / "megatron", tmp_path / "hf", *VOCAB, "--architecture", "bert")


@pytest.mark.parametrize(
    ("name", "default", "other"),
    [
        ("rotary_seq_len_interpolation_factor", 1, 2),
        ("qk_l2_norm", False, True),
    ],
)
def test_an_option_that_changes_the_model_is_refused(name, default, other):
    arguments = {"hidden_size": 8, "num_attention_heads": 2}
    assert model_of({**arguments, name: default}, ModelConfig()) == model_of(arguments, ModelConfig())
    with pytest.raises(UserError, match=f"megalite has no model with {name} {other}: it cannot be converted"):
        model_of({**arguments, name: other}, ModelConfig())


def test_a_run_of_megatron_goes_on_from_its_samples(tmp_path):
    with torch.no_grad():
        megatron.save_old(tmp_path / "megatron", weights_of(build("gpt2")), 4, 2, 1)
    Conversion(tmp_path / "megatron", tmp_path / "ours", settings=Settings(VOCAB)).run()
    description = read_manifest(tmp_path / "ours" / "iter_0000012").description
    assert description["progress"]["consumed_samples"] == 96
    assert description["run"] == {"seed": 5, "global_batch_size": 8, "rampup_batch_size": None}
    assert description["model"]["vocab_size"] == VOCABULARY


class Hostile:
    def __reduce__(self):
        return os.system, ("touch planted",)


@pytest.mark.parametrize("place", ["beside the weights", "in place of them"])
def test_a_pickle_that_would_run_code_is_refused(place, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if place == "beside the weights":
        with torch.no_grad():
            megatron.save_old(tmp_path / "load", weights_of(build("gpt2")), 4, 1, 1, extra={"rng": Hostile()})
    else:
        (tmp_path / "load").mkdir()
        (tmp_path / "load" / "config.json").write_text(build("gpt2").config.to_json_string())
        torch.save({"transformer.wte.weight": Hostile()}, tmp_path / "load" / "pytorch_model.bin")
    with pytest.raises(
        UserError, match=r"is refused, because reading it could run code of its author \(posix.system\)"
    ):
        to_hf(tmp_path / "load", tmp_path / "hf")
    assert not (tmp_path / "planted").exists()
    assert not (tmp_path / "hf").exists()


def lose_a_rank(folder):
    (folder / "iter_0000012" / "mp_rank_01" / "model_optim_rng.pt").unlink()


def lose_an_iteration(folder):
    (folder / "latest_checkpointed_iteration.txt").write_text("99")


def cut_short(folder):
    file = folder / "iter_0000012" / "mp_rank_00" / "model_optim_rng.pt"
    file.write_bytes(file.read_bytes()[:5000])


def make_distributed(folder):
    (folder / "iter_0000012" / ".metadata").write_bytes(b"")


def change_arguments(folder, **changes):
    for file in folder.rglob("model_optim_rng.pt"):
        with torch.serialization.safe_globals([megatron.argparse.Namespace]):
            state = torch.load(file)
        vars(state["args"]).update(changes)
        torch.save(state, file)


def drop_a_tensor(folder):
    for file in folder.rglob("model_optim_rng.pt"):
        with torch.serialization.safe_globals([megatron.argparse.Namespace]):
            state = torch.load(file)
        del state["model"]["language_model"]["encoder"]["layers.1.mlp.dense_h_to_4h.bias"]
        torch.save(state, file)


def write_tracker(folder, text):
    (folder / TRACKER).write_text(text)


DAMAGE = {
    "mp_rank_01 has none of": lose_a_rank,
    "iter_0000099 does not exist: the folder has the iterations iter_0000012": lose_an_iteration,
    "model_optim_rng.pt cannot be read": cut_short,
    "model_optim_rng.pt cannot be read: it is not a regular file": lambda folder: make_pipe(
        folder / "iter_0000012" / "mp_rank_00" / "model_optim_rng.pt"
    ),
    "iteration.txt cannot be read: it has more than": lambda folder: write_tracker(folder, "1" * 5000),
    "distributed format.*--ckpt-format torch": make_distributed,
    "no model with num_experts 8": lambda folder: change_arguments(folder, num_experts=8),
    "experimental_attention_variant gated_delta_net": lambda folder: change_arguments(
        folder, experimental_attention_variant="gated_delta_net"
    ),
    "qk_l2_norm True": lambda folder: change_arguments(folder, qk_l2_norm=True),
    "has parameters that the config's model does not have: embedding.position": lambda folder: (
        change_arguments(folder, position_embedding_type="rope")
    ),
    r"layers.0.attention.qkv.weight is \[36, 24\] on 2": lambda folder: change_arguments(
        folder, kv_channels=3
    ),
    "lacks layers.1.mlp.up.bias": drop_a_tensor,
}


@pytest.mark.parametrize("message", DAMAGE)
def test_what_cannot_be_converted_is_named(message, tmp_path):
    with torch.no_grad():
        megatron.save_old(tmp_path / "megatron", weights_of(build("gpt2")), 4, 2, 1)
    DAMAGE[message](tmp_path / "megatron")
    with pytest.raises(UserError, match=message):
        Conversion(tmp_path / "megatron", tmp_path / "ours").run()
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("hf", "check: the models before and after agree"),
        ("megalite", "Megatron-LM to megalite leaves no model of another program to compare with"),
    ],
)
def test_the_models_are_compared_if_one_is_of_hugging_face(target, message, tmp_path, caplog):
    with torch.no_grad():
        megatron.save_old(tmp_path / "megatron", weights_of(build("gpt2")), 4, 2, 2, 3.0)
    with caplog.at_level("INFO", "megalite"):
        Conversion(tmp_path / "megatron", tmp_path / "new", target=target, settings=Settings(VOCAB)).run()
    assert message in caplog.text
