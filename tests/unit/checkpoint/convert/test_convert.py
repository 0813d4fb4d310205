"""Models go to Hugging Face's form and back bit by bit, and compute the same there."""

import dataclasses
import json
import os
import subprocess
import sys
import textwrap

import pytest
import torch
from safetensors.torch import save_file
from transformers import (
    AutoConfig,
    BertForMaskedLM,
    BertForPreTraining,
    GenerationConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from megalite.checkpoint.convert.convert import Conversion
from megalite.checkpoint.convert.model_settings import Settings, parameters_of
from megalite.checkpoint.full_tensors import FullReader
from megalite.checkpoint.manifest import damage_of, read_manifest
from megalite.checkpoint.parameter_range import ParameterRange
from megalite.checkpoint.progress import TrainingProgress
from megalite.config.presets import PRESETS
from megalite.data.microbatch import Microbatch
from megalite.frontends.command_line import parse
from megalite.frontends.huggingface.families import config_of
from megalite.tensor_parallel.parameter_spec import spec_of
from megalite.utils.errors import UserError
from tests.checkpoint_folder import MemorySource
from tests.live_bytes import LiveBytes
from tests.stages import build_stage
from tests.unit.checkpoint.convert.foreign_models import (
    VOCABULARY,
    build,
    logits_of,
    same_bits,
    save,
    tensors_of,
)
from tests.unit.model.test_against_transformers import CONFIGS, build_theirs

KINDS = ("gpt2", "bloom", "llama")
TINY = {"gpt2": "gpt-tiny", "bloom": "bloom-tiny", "llama": "llama-tiny"}


def convert(load, save, *flags, **fields):
    Conversion(load, save, settings=Settings(flags), **fields).run()
    return save


def stage_of(kind, topology, dtype="fp32"):
    config = dataclasses.replace(
        PRESETS[TINY[kind]], num_layers=2, vocab_size=VOCABULARY, hidden_dropout=0.0, params_dtype=dtype
    )
    stage = build_stage(config, topology, range(2), seed=3)
    for parameter in stage.parameters():
        parameter.data.add_(torch.randn(parameter.shape) * 0.1)  # biases and norms matter too
    return stage.eval()


def save_stage(stage, folder, data=None, progress=None):
    """A checkpoint of the stage's weights."""
    return MemorySource.of(stage, data, progress or TrainingProgress(7, 70)).save(folder)


@pytest.mark.parametrize(
    ("kind", "form", "shards"),
    [
        *(("gpt2", "safetensors", 1), ("gpt2", "bin", 3), ("bloom", "safetensors", 3), ("bloom", "bin", 1)),
        *(("llama", "safetensors", 3), ("llama", "bin", 1), ("bert", "safetensors", 1), ("bert", "bin", 3)),
    ],
)
def test_there_and_back_is_byte_equal(kind, form, shards, tmp_path):
    dtype = torch.float32 if form == "bin" else torch.bfloat16
    original = save(build(kind, dtype=dtype), tmp_path / "hf", form, shards)
    expected = tensors_of(save(build(kind, dtype=dtype), tmp_path / "expected"))
    convert(original, tmp_path / "ours")
    returned = tensors_of(convert(tmp_path / "ours", tmp_path / "back", max_bytes=40_000))
    assert returned.keys() == expected.keys()
    assert all(same_bits(returned[name], tensor) for name, tensor in expected.items())
    index = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == expected.keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in expected.values())


@pytest.mark.parametrize(
    "kind",
    [
        *("qwen2", "qwen3", "olmo2", "olmo3", "smollm3", "ministral3", "gemma2", "gemma3", "gemma4"),
        *("gpt_neox", "gptj", "qwen3_next", "qwen3_5", "nemotron_h", "deepseek_v2", "deepseek_v3"),
        *("qwen2_moe", "qwen3_next_experts", "qwen3_5_moe", "glm4_moe", "minimax_m2", "gpt_oss"),
        *("arcee", "seed_oss", "phi3", "glm", "glm4", "ernie4_5", "helium", "ministral", "exaone4", "gemma"),
        *("starcoder2", "stablelm", "phi", "nemotron", "flex_olmo", "dots1", "solar_open", "exaone_moe"),
        *("hy_v3", "afmoe", "granite", "granitemoe", "granitemoehybrid", "bamba", "cohere", "cohere2"),
        *(
            "hunyuan_v1_dense",
            "hunyuan_v1_moe",
            "ernie4_5_moe",
            "apertus",
            "granite_swa",
            "lfm2",
            "falcon_h1",
            "olmo_hybrid",
            "kimi_linear",
        ),
    ],
)
def test_a_family_comes_back(kind, tmp_path):
    """The conversions also compare what both models compute."""
    theirs = build_theirs(kind, CONFIGS[kind](lambda values: values[-1]), seed=0)
    original = save(theirs, tmp_path / "hf")
    returned = convert(convert(original, tmp_path / "ours"), tmp_path / "back")
    expected, found = tensors_of(original), tensors_of(returned)
    assert found.keys() == expected.keys()
    assert all(same_bits(found[name], tensor) for name, tensor in expected.items())
    configs = [config_of(json.loads((folder / "config.json").read_text())) for folder in (original, returned)]
    assert configs[0] == configs[1]


def test_kimi_k2_comes_back_as_the_deepseek_v3_that_it_is(tmp_path):
    """transformers knows this name with remote code only."""
    theirs = build_theirs("deepseek_v3", CONFIGS["deepseek_v3"](lambda values: values[1]), seed=0)
    original = save(theirs, tmp_path / "hf")
    settings = json.loads((original / "config.json").read_text())
    settings |= {"model_type": "kimi_k2", "eos_token_id": 7}
    (original / "config.json").write_text(json.dumps(settings))
    returned = convert(convert(original, tmp_path / "ours"), tmp_path / "back")
    expected, found = tensors_of(original), tensors_of(returned)
    assert found.keys() == expected.keys()
    assert all(same_bits(found[name], tensor) for name, tensor in expected.items())
    settings = json.loads((returned / "config.json").read_text())
    assert (settings["model_type"], settings["eos_token_id"]) == ("deepseek_v3", 7)


YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32, "rope_theta": 1e4}


def test_a_shorter_training_keeps_the_longest_context(tmp_path, one_rank):
    """transformers 4 computes YaRN's factor as the longest context divided by the original one."""
    torch.manual_seed(1)
    small = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "head_dim": 8}
    theirs = Qwen3Config(
        **small,
        num_hidden_layers=1,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        max_position_embeddings=256,
        rope_parameters=YARN,
    )
    original = save(Qwen3ForCausalLM(theirs).eval(), tmp_path / "hf")
    convert(original, tmp_path / "ours")
    flags = ("--use-checkpoint-args", "--seq-length", "64", "--mock-data", "--train-iters", "1")
    config, _ = parse(["--load", str(tmp_path / "ours"), *flags])
    assert (config.model.seq_length, config.model.num_positions) == (64, 256)
    back = convert(tmp_path / "ours", tmp_path / "back", "--seq-length", "64")
    written = AutoConfig.from_pretrained(back)
    assert written.max_position_embeddings == 256
    ids = torch.arange(200)[None]
    assert torch.equal(logits_of(back, ids), logits_of(original, ids))
    longer = convert(tmp_path / "ours", tmp_path / "longer", "--max-position-embeddings", "512")
    assert AutoConfig.from_pretrained(longer).max_position_embeddings == 512
    with pytest.raises(UserError, match="--seq-length 512 is above --max-position-embeddings 256"):
        convert(tmp_path / "ours", tmp_path / "refused", "--seq-length", "512")


@pytest.mark.parametrize("scaling", ["yarn", "llama3"])
def test_the_longest_context_of_scaled_positions(scaling):
    model = dataclasses.replace(
        PRESETS["llama-tiny"],
        **{"rope_scaling": scaling, "rope_scaling_factor": 8.0, "original_max_position_embeddings": 32},
        seq_length=64,
    )
    assert model.num_positions == 256
    assert dataclasses.replace(model, seq_length=300).num_positions == 300
    assert dataclasses.replace(model, rope_scaling="linear").num_positions == 64


def test_a_longest_context_without_effect_is_said(tmp_path, caplog):
    save(build("bloom", layers=1), tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "ours", "--max-position-embeddings", "512")
    assert "--max-position-embeddings has no effect: --position-embedding-type is alibi" in caplog.text


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_computes_the_same(kind, tmp_path, one_rank):
    stage = stage_of(kind, one_rank)
    folder = convert(save_stage(stage, tmp_path / "ours"), tmp_path / "hf")
    ids = torch.randint(VOCABULARY, (2, 17))
    with torch.no_grad():
        ours = stage.logits(stage.hidden_states(Microbatch(ids, ids, torch.arange(2)), None)).transpose(0, 1)
    theirs = logits_of(folder, ids)
    ours = ours[..., :VOCABULARY]
    assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()


@pytest.mark.parametrize("has_order", [True, False])
def test_transformers_computes_the_same_bert(has_order, tmp_path, one_rank):
    config = dataclasses.replace(
        PRESETS["bert-tiny"], num_layers=2, vocab_size=VOCABULARY, bert_binary_head=has_order
    )
    stage = build_stage(config, one_rank, range(2), seed=3, has_documents=True).eval()
    for parameter in stage.parameters():
        parameter.data.add_(torch.randn(parameter.shape) * 0.1)
    folder = convert(save_stage(stage, tmp_path / "ours"), tmp_path / "hf")
    theirs = (BertForPreTraining if has_order else BertForMaskedLM).from_pretrained(folder).eval()
    ids, types = torch.randint(VOCABULARY, (2, 17)), torch.randint(2, (2, 17))
    batch = Microbatch(ids, ids, torch.arange(2), document_ids=torch.zeros_like(ids), token_types=types)
    with torch.no_grad():
        result = theirs(input_ids=ids, token_type_ids=types)
        normed = stage.final_norm(stage.hidden_states(batch, None))
        ours = stage.logits_of(normed).transpose(0, 1)[..., :VOCABULARY]
        logits = result.prediction_logits if has_order else result.logits
        assert (ours - logits).abs().max() <= 1e-5 * logits.abs().max()
        if has_order:
            scores = result.seq_relationship_logits
            assert (stage.order_scores(normed) - scores).abs().max() <= 1e-5 * scores.abs().max()
    again = FullReader(read_manifest(convert(folder, tmp_path / "back") / "iter_0000000"))
    for name, parameter in stage.named_parameters():
        assert torch.equal(again.tensor(f"model.{name}"), parameter[: spec_of(parameter).used_shape[0]])


def test_the_published_bert_has_old_names(tmp_path):
    """gamma and beta, a second name of the word embedding, a config that does not name the second head."""
    folder = save(build("bert"), tmp_path / "hf")
    expected = tensors_of(folder)
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        ): tensor
        for name, tensor in expected.items()
    }
    assert len(old.keys() - expected.keys()) == 2 * (2 * 3 + 2)
    word = expected["bert.embeddings.word_embeddings.weight"]
    save_file({**old, "cls.predictions.decoder.weight": word.clone()}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["BertForMaskedLM"]}))
    returned = tensors_of(convert(convert(folder, tmp_path / "ours"), tmp_path / "back"))
    assert returned.keys() == expected.keys()
    assert all(same_bits(returned[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_tied_or_not(kind, tied, tmp_path):
    convert(save(build(kind, tied=tied), tmp_path / "hf"), tmp_path / "ours")
    folder = convert(tmp_path / "ours", tmp_path / "back")
    ids = torch.randint(VOCABULARY, (1, 9))
    assert torch.equal(logits_of(folder, ids), logits_of(tmp_path / "hf", ids))


def test_loads_of_experts_are_of_training(tmp_path):
    original = save(build("qwen2_moe"), tmp_path / "hf")
    convert(original, tmp_path / "ours", "--moe-router-load-balancing-type", "global_aux_loss")
    expected, returned = tensors_of(original), tensors_of(convert(tmp_path / "ours", tmp_path / "back"))
    assert returned.keys() == expected.keys()
    assert all(same_bits(returned[name], tensor) for name, tensor in expected.items())


def test_what_a_checkpoint_of_weights_holds(tmp_path):
    save(build("llama"), tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "ours", "--params-dtype", "bf16")
    assert (tmp_path / "ours" / "latest").read_text() == "iter_0000000\n"
    manifest = read_manifest(tmp_path / "ours" / "iter_0000000")
    assert damage_of(manifest, manifest.files) == []
    assert manifest.description["run"] == {}
    reader = FullReader(manifest)
    specs = parameters_of(dataclasses.replace(PRESETS["llama-tiny"], vocab_size=VOCABULARY, num_layers=3))
    assert [*reader.names()] == sorted(f"model.{name}" for name in specs)
    assert {reader.dtype(name) for name in reader.names()} == {torch.bfloat16}
    for name in specs:
        (piece,) = manifest.tensors[f"model.{name}"]
        assert piece.range == ParameterRange.whole(piece.range.full_shape)


def test_main_weights_are_taken_where_they_are_finer(tmp_path, one_rank):
    stage = stage_of("gpt2", one_rank, "bf16")
    save_stage(stage, tmp_path / "ours")
    checkpoint = tmp_path / "ours" / "iter_0000007"
    main = {name: torch.randn(spec.used_shape) for name, spec in parameters_of(stage.config).items()}
    add_main_weights(checkpoint, main)
    fine = tensors_of(convert(tmp_path / "ours", tmp_path / "fine", "--params-dtype", "fp32"))
    rough = tensors_of(convert(tmp_path / "ours", tmp_path / "rough"))
    name = "transformer.h.1.ln_1.weight"
    assert torch.equal(fine[name], main["layers.1.attention_norm.weight"])
    assert torch.equal(rough[name], stage.get_parameter("layers.1.attention_norm.weight"))


def add_main_weights(checkpoint, main):
    from megalite.checkpoint.manifest import FileRecord, seal
    from megalite.checkpoint.tensor_files import FilePiece, write_file

    manifest = read_manifest(checkpoint)
    pieces = {
        f"optimizer.{name}.main": FilePiece(tensor, ParameterRange.whole(tuple(tensor.shape)))
        for name, tensor in main.items()
    }
    files = [write_file(checkpoint / "main.safetensors", pieces)]
    for file in manifest.files:
        held = {
            name: record
            for name, records in manifest.tensors.items()
            for record in records
            if record.file == file
        }
        files.append(FileRecord(file, manifest.digests[file], held))
    description = {key: value for key, value in manifest.description.items() if key != "format"}
    seal(checkpoint, description, manifest.config_text, files)


def test_the_tokenizer_goes_along(tmp_path):
    folder = save(build("gpt2"), tmp_path / "hf")
    make_tokenizer(folder)
    convert(folder, tmp_path / "ours")
    manifest = read_manifest(tmp_path / "ours" / "iter_0000000")
    assert f'tokenizer_name_or_path: "{tmp_path}/ours/tokenizer"' in manifest.config_text
    assert manifest.description["tokenizer"]
    (tmp_path / "ours").rename(tmp_path / "moved")
    back = convert(tmp_path / "moved", tmp_path / "back")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (back / name).read_bytes() == (folder / name).read_bytes()
    assert json.loads((back / "config.json").read_text())["eos_token_id"] == 0


def make_tokenizer(folder):
    import tokenizers

    words = {"<|endoftext|>": 0, "a": 1, "b": 2}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="a")).save(
        str(folder / "tokenizer.json")
    )
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')


class PeakBytes(LiveBytes):
    """Also records the most bytes of CPU tensors after an operator; shapes are computed on device meta."""

    peak = 0

    def __torch_dispatch__(self, *args, **kwargs):
        out = super().__torch_dispatch__(*args, **kwargs)
        alive = (reference() for reference in self.storages.values())
        held = [storage for storage in alive if storage is not None and storage.device.type == "cpu"]
        self.peak = max(self.peak, sum(storage.nbytes() for storage in held))
        return out


def test_tensors_of_one_layer_are_held(tmp_path):
    layer = write_llama(tmp_path / "hf", layers=4, hidden=64)
    for source, target in (("hf", "ours"), ("ours", "back")):
        with PeakBytes() as held:
            convert(tmp_path / source, tmp_path / target, check=False)
        assert held.peak < layer, target


@pytest.mark.slow
def test_memory_is_that_of_about_a_layer(tmp_path):
    """A process that converts a model of 12 layers both ways, and checks it, never holds three of them more.

    A layer has 4 MB. A first conversion of one such layer loads modules, and allocates the buffers that the
    matrix library keeps for each thread. With a low threshold, malloc returns freed tensors at once.
    """
    program = textwrap.dedent(
        """
        import sys
        from pathlib import Path
        from megalite.checkpoint.convert.convert import Conversion
        from megalite.utils.log import configure_logging
        from megalite.utils.torch_private import TorchDispatchMode

        def anonymous():
            lines = Path("/proc/self/status").read_text().splitlines()
            return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024

        class Peak(TorchDispatchMode):
            bytes = 0

            def __torch_dispatch__(self, function, types, args=(), kwargs=None):
                out = function(*args, **(kwargs or {}))
                self.bytes = max(self.bytes, anonymous())
                return out

        def convert(name):
            Conversion(source / name, ours / name).run()
            Conversion(ours / name, back / name).run()

        source, ours, back = map(Path, sys.argv[1:])
        configure_logging(0)
        convert("small")
        before = anonymous()
        with Peak() as peak:
            convert("large")
        print(peak.bytes - before)
        """
    )
    write_llama(tmp_path / "hf" / "small", layers=1, hidden=288)
    layer = write_llama(tmp_path / "hf" / "large", layers=12, hidden=288)
    command = [sys.executable, "-c", program, tmp_path / "hf", tmp_path / "ours", tmp_path / "back"]
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 16)}
    result = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert int(result.stdout.splitlines()[-1]) < 3 * layer


def write_llama(folder, layers, hidden):
    """A folder of zeros; returns the bytes of a layer."""
    folder.mkdir(parents=True)
    ffn = 3 * hidden
    config = {
        **{
            "model_type": "llama",
            "num_hidden_layers": layers,
            "hidden_size": hidden,
            "intermediate_size": ffn,
        },
        **{"num_attention_heads": 4, "vocab_size": 100, "tie_word_embeddings": True},
    }
    (folder / "config.json").write_text(json.dumps(config))
    square, wide = (hidden, hidden), (ffn, hidden)
    shapes = {f"self_attn.{part}_proj": square for part in "qkvo"}
    shapes |= {"mlp.gate_proj": wide, "mlp.up_proj": wide, "mlp.down_proj": (hidden, ffn)}
    shapes |= {"input_layernorm": (hidden,), "post_attention_layernorm": (hidden,)}
    weights = {
        f"model.layers.{i}.{name}.weight": torch.zeros(shape)
        for i in range(layers)
        for name, shape in shapes.items()
    }
    weights |= {
        "model.embed_tokens.weight": torch.zeros(100, hidden),
        "model.norm.weight": torch.zeros(hidden),
    }
    save_file(weights, folder / "model.safetensors")
    return 4 * sum(torch.Size(shape).numel() for shape in shapes.values())


def test_a_target_that_is_there_is_left_alone(tmp_path):
    save(build("gpt2"), tmp_path / "hf")
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours" / "mine").write_text("")
    with pytest.raises(UserError, match="ours exists and is not empty"):
        convert(tmp_path / "hf", tmp_path / "ours")
    assert [path.name for path in (tmp_path / "ours").iterdir()] == ["mine"]
    convert(tmp_path / "hf", tmp_path / "new")  # and an empty one is taken
    with pytest.raises(UserError, match="not empty"):
        convert(tmp_path / "hf", tmp_path / "hf")


def test_nothing_is_left_of_a_conversion_that_fails(tmp_path):
    folder = save(build("gpt2"), tmp_path / "hf")
    weights = tensors_of(folder)
    weights["transformer.h.2.mlp.c_proj.weight"] = torch.zeros(3, 3)  # in the last layer
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(UserError, match=r"layers.2.mlp.down.weight is \[3, 3\]"):
        convert(folder, tmp_path / "ours")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def change(folder, **values):
    """Changes settings of a folder's config.json; those that are ... are taken out."""
    file = folder / "config.json"
    config = {**json.loads(file.read_text()), **values}
    file.write_text(json.dumps({name: value for name, value in config.items() if value is not ...}))


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("gpt2", {"bos_token_id": 7, "eos_token_id": 11, "activation_function": "gelu_fast"}),
        ("gpt2", {"bos_token_id": ..., "eos_token_id": ..., "activation_function": "gelu_pytorch_tanh"}),
        ("gpt2", {"bos_token_id": None, "eos_token_id": 3, "activation_function": "gelu_new"}),
        ("bloom", {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3, "pretraining_tp": 4}),
        ("llama", {"bos_token_id": 5, "eos_token_id": [8, 9]}),
    ],
)
def test_what_our_config_has_no_field_for_comes_back(kind, values, tmp_path):
    change(save(build(kind), tmp_path / "hf"), **values)
    convert(tmp_path / "hf", tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "back")
    convert(tmp_path / "hf", tmp_path / "direct", target="hf")
    for folder in ("back", "direct"):
        config = json.loads((tmp_path / folder / "config.json").read_text())
        assert {name: config.get(name, ...) for name in values} == values


def test_another_activation_or_tokenizer_is_not_covered_by_what_was_recorded(tmp_path):
    change(save(build("gpt2"), tmp_path / "hf"), activation_function="gelu_fast", eos_token_id=11)
    convert(tmp_path / "hf", tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "relu", "--activation", "relu")
    config = json.loads((tmp_path / "relu" / "config.json").read_text())
    assert (config["activation_function"], config["eos_token_id"]) == ("relu", 11)
    convert(tmp_path / "ours", tmp_path / "bytes", "--tokenizer-type", "byte")
    config = json.loads((tmp_path / "bytes" / "config.json").read_text())
    assert config["eos_token_id"] == 256


@pytest.mark.parametrize("target", ["hf", "megalite"])
def test_another_tokenizer_is_not_another_family(target, tmp_path):
    """Qwen3.5's tensors have other names than those of Qwen3-Next, which computes the same."""
    theirs = build_theirs("qwen3_5_moe", CONFIGS["qwen3_5_moe"](lambda values: values[-1]), seed=0)
    original = save(theirs, tmp_path / "hf")
    back = convert(original, tmp_path / "back", "--tokenizer-type", "byte", target=target)
    if target == "megalite":
        back = convert(back, tmp_path / "again")
    assert tensors_of(back).keys() == tensors_of(original).keys()
    config = AutoConfig.from_pretrained(back)
    assert (config.model_type, config.eos_token_id) == (theirs.config.model_type, 256)


def test_settings_of_generation_are_copied(tmp_path):
    """Nemotron 3 has its end tokens only there."""
    folder = save(build("llama"), tmp_path / "hf")
    make_tokenizer(folder)
    change(folder, bos_token_id=1, eos_token_id=0, pad_token_id=None)
    settings = {"eos_token_id": [0, 2], "do_sample": True, "temperature": 0.5}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    back = convert(convert(folder, tmp_path / "ours"), tmp_path / "back")
    direct = convert(folder, tmp_path / "direct", target="hf")
    expected = GenerationConfig.from_pretrained(folder).to_dict()
    assert expected["eos_token_id"] == [0, 2]
    assert GenerationConfig.from_pretrained(back).to_dict() == expected
    assert GenerationConfig.from_pretrained(direct).to_dict() == expected


@pytest.mark.parametrize("name", ["gelu_new", "gelu_fast", "gelu_pytorch_tanh", "gelu", "relu", "relu2"])
def test_an_activation_computes_what_transformers_computes(name):
    from transformers.activations import ACT2FN

    from megalite.frontends.huggingface.settings import HF_ACTIVATIONS
    from megalite.model.mlp import ACTIVATION_FUNCTIONS

    x = torch.linspace(-8, 8, 1001, dtype=torch.float64)
    function, adds_bias, _ = ACTIVATION_FUNCTIONS[HF_ACTIVATIONS[name]]
    torch.testing.assert_close(
        function(x, None) if adds_bias else function(x), ACT2FN[name](x), rtol=0, atol=1e-11
    )


@pytest.mark.parametrize(
    ("values", "is_said"),
    [
        ({"slow_but_exact": True, "pretraining_tp": 4}, True),
        ({"slow_but_exact": True, "pretraining_tp": 1}, False),
        ({"slow_but_exact": False, "pretraining_tp": 4}, False),
    ],
)
def test_another_order_of_sums_is_said(values, is_said, tmp_path, caplog):
    change(save(build("bloom"), tmp_path / "hf"), **values)
    convert(tmp_path / "hf", tmp_path / "ours")
    said = [record.message for record in caplog.records if "pretraining_tp 4" in record.message]
    assert len(said) == is_said
    assert not said or "slow_but_exact with pretraining_tp 4: transformers adds up 4 slices" in said[0]
    assert not said or "leaves out their biases" in said[0]
    config = json.loads((convert(tmp_path / "ours", tmp_path / "back") / "config.json").read_text())
    assert {name: config.get(name) for name in values} == values
