"""What a conversion refuses, and what it says then."""

import itertools
import json
import math
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from megalite.checkpoint.convert.convert import Conversion
from megalite.checkpoint.convert.formats import whole_folder
from megalite.checkpoint.convert.hf_folder import _model_of
from megalite.checkpoint.convert.model_settings import Settings
from megalite.checkpoint.manifest import CONFIG
from megalite.cli.checkpoints import convert as main
from megalite.utils.errors import UserError
from tests.checkpoint_folder import reseal
from tests.unit.checkpoint.convert.foreign_models import build, save, tensors_of


@pytest.fixture
def gpt2(tmp_path):
    return save(build("gpt2"), tmp_path / "hf")


def change_config(folder, **changes):
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def change_weights(folder, **changes):
    weights = {
        name: tensor for name, tensor in tensors_of(folder).items() if changes.get(name, 0) is not None
    }
    weights |= {name: tensor for name, tensor in changes.items() if tensor is not None}
    save_file(weights, folder / "model.safetensors")


def write_index(folder, weight_map):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


MISTAKES = {
    "model_type 'opt' cannot be converted": lambda f: change_config(f, model_type="opt"),
    "config.json is damaged: KeyError": lambda f: (f / "config.json").write_text('{"model_type": "llama"}'),
    'config.json is damaged: it has "n_embd" twice': lambda f: (f / "config.json").write_text(
        '{"n_embd": 8, "n_embd": 9}'
    ),
    "has untie_embeddings_and_output_weights|tie_word_embeddings 'no', which is not true": lambda f: (
        change_config(f, tie_word_embeddings="no")
    ),
    "--num-attention-heads 0 is out of range": lambda f: change_config(f, n_head=0),
    "has num_layers 'two', which is not a number": lambda f: change_config(f, n_layer="two"),
    "has hidden_size 2.5, which is not a number": lambda f: change_config(f, n_embd=2.5),
    "and config.json says 20000 layers": lambda f: change_config(f, n_layer=20000),
    "config.json is damaged: it is not JSON": lambda f: (f / "config.json").write_text("{"),
    "holds quantized weights": lambda f: change_config(f, quantization_config={"bits": 4}),
    r"embedding.word.weight is \[300, 24\], but the config says \[300, 28\]": lambda f: change_config(
        f, n_embd=28
    ),
    r"lacks transformer.h.3.attn.c_attn.bias, .* and 9 more": lambda f: change_config(f, n_layer=4),
    "lacks transformer.wpe.weight": lambda f: change_weights(f, **{"transformer.wpe.weight": None}),
    "does not have: transformer.h.9.strange": lambda f: change_weights(
        f, **{"transformer.h.9.strange": torch.zeros(1)}
    ),
    "holds none of model.safetensors, pytorch_model.bin": lambda f: (f / "model.safetensors").unlink(),
    "model.safetensors cannot be read": lambda f: (f / "model.safetensors").write_bytes(b"1234567890"),
    "lacks two.safetensors, which model.safetensors.index.json names": lambda f: write_index(
        f, {"transformer.wte.weight": "two.safetensors"}
    ),
    "its weight_map must name files of the folder": lambda f: write_index(f, {"a": "../model.safetensors"}),
}


WRONG = ([], {}, None, "x", "false", True, 10**400, -1, 0, 0.5, math.nan, math.inf, [["x"]])


@pytest.mark.parametrize("name", ["gpt2", "bloom", "llama", "bert"])
def test_any_value_in_a_config_is_converted_or_refused_in_one_line(name):
    config = json.loads(AutoConfig.for_model(name).to_json_string(use_diff=False))
    for key, value in itertools.product(config, WRONG):
        try:
            _model_of(Path("folder"), {**config, key: value})
        except UserError as error:
            message = str(error)
        else:
            message = ""
        assert "\n" not in message
        if value == 10**400 and key in ("vocab_size", "n_layer", "num_hidden_layers"):
            assert "out of range: it must be at most 2**63 - 1" in message


@pytest.mark.parametrize("message", MISTAKES)
def test_a_folder_that_cannot_be_converted(message, gpt2, tmp_path):
    MISTAKES[message](gpt2)
    with pytest.raises(UserError, match=message):
        Conversion(gpt2, tmp_path / "ours").run()
    assert not (tmp_path / "ours").exists()


def test_masks_of_old_versions_are_no_weights(gpt2, tmp_path):
    change_weights(gpt2, **{"transformer.h.0.attn.bias": torch.ones(1, 1, 4, 4)})
    Conversion(gpt2, tmp_path / "ours").run()


def test_no_folder_and_no_known_one(tmp_path):
    for path, message in (
        ("nothing", "does not exist"),
        ("file", "is not a folder"),
        ("empty", "is not a checkpoint of"),
    ):
        (tmp_path / "file").write_text("")
        (tmp_path / "empty").mkdir(exist_ok=True)
        with pytest.raises(UserError, match=message):
            Conversion(tmp_path / path, tmp_path / "new").run()


def test_flags_without_use_and_wrong_models(gpt2, tmp_path):
    def run(*flags):
        main(["--load", str(gpt2), "--save", str(tmp_path / "ours"), *flags])

    with pytest.raises(UserError, match="--lr: a conversion does not use it, remove it"):
        run("--lr", "0.1")
    with pytest.raises(UserError, match="unknown flag --hiden-size; nearest is --hidden-size"):
        run("--hiden-size", "3")
    with pytest.raises(UserError, match=r"--hidden-size 24 .*--num-attention-heads 5"):
        run("--num-attention-heads", "5")
    with pytest.raises(UserError, match=r"weight is \[300, 24\], but the config says \[400, 24\]"):
        run("--vocab-size", "400")
    with pytest.raises(UserError, match="'5 apples' is not a size"):
        run("--max-shard-size", "5 apples")
    with pytest.raises(UserError, match="holds one model, not iterations"):
        run("--load-iteration", "3")
    assert not (tmp_path / "ours").exists()


def test_fewer_tokens_and_another_precision(gpt2, tmp_path, caplog):
    main(
        ["--load", str(gpt2), "--save", str(tmp_path / "new"), "--to", "hf", "--vocab-size", "290", "--bf16"]
    )
    weights = tensors_of(tmp_path / "new")
    assert weights["transformer.wte.weight"].shape == (290, 24)
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_rows_above_the_vocabulary_are_kept_or_dropped_by_the_user(kind, tmp_path):
    """They are padding, or tokens that were added later. transformers does not load such a folder."""
    folder = save(build(kind, layers=1), tmp_path / "hf")
    change_config(folder, vocab_size=290)
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        AutoModelForCausalLM.from_pretrained(folder)
    advice = (
        r"has 300 rows, .* vocab_size 290: pass --vocab-size 300 to keep them, or --vocab-size 290 to drop"
    )
    for target in ("hf", "megalite"):
        with pytest.raises(UserError, match=advice):
            Conversion(folder, tmp_path / "refused", target=target).run()
    for rows in (300, 290):
        new = tmp_path / str(rows)
        main(["--load", str(folder), "--save", str(new), "--to", "hf", "--vocab-size", str(rows)])
        model = AutoModelForCausalLM.from_pretrained(new)
        assert model.get_input_embeddings().num_embeddings == model.config.vocab_size == rows


def test_numbers_too_large_for_the_precision(gpt2, tmp_path):
    change_weights(gpt2, **{"transformer.wpe.weight": torch.full((40, 24), 1e5)})
    with pytest.raises(UserError, match=r"embedding.position.weight has numbers too large for torch.float16"):
        Conversion(gpt2, tmp_path / "ours", settings=Settings(("--fp16",))).run()


def test_a_model_that_transformers_does_not_have(tmp_path):
    save(build("llama"), tmp_path / "hf")
    Conversion(tmp_path / "hf", tmp_path / "ours").run()
    flags = ("--activation", "quick_geglu")
    with pytest.raises(UserError, match="cannot be this model: activation quick_geglu"):
        Conversion(tmp_path / "ours", tmp_path / "back", settings=Settings(flags)).run()


def test_a_missing_tokenizer_is_reported_and_skipped(tmp_path, caplog):
    folder = save(build("gpt2"), tmp_path / "hf")
    Conversion(folder, tmp_path / "ours", settings=Settings(("--tokenizer-model", "/nowhere/t.json"))).run()
    assert "the tokenizer is not copied: /nowhere/t.json is missing" in caplog.text
    assert not (tmp_path / "ours" / "tokenizer").exists()


@pytest.mark.parametrize(
    ("num_layers", "message"), [(1, "num_layers 1, has no layers.1."), (9, "lacks model.layers.")]
)
def test_a_config_of_another_number_of_layers(num_layers, message, tmp_path):
    save(build("bloom"), tmp_path / "hf")
    Conversion(tmp_path / "hf", tmp_path / "ours").run()
    checkpoint = tmp_path / "ours" / "iter_0000000"
    config = checkpoint / CONFIG
    config.write_text(re.sub(r"\bnum_layers: .*", f"num_layers: {num_layers}", config.read_text()))
    reseal(checkpoint, CONFIG)
    with pytest.raises(UserError, match=re.escape(message)):
        Conversion(tmp_path / "ours", tmp_path / "back").run()
    assert not (tmp_path / "back").exists()


def test_a_second_conversion_leaves_the_first_alone(gpt2, tmp_path):
    with whole_folder(tmp_path / "ours", 0) as aside:
        (aside / "file").write_text("of the first")
        with pytest.raises(UserError, match=rf"by another conversion, or one was killed: delete {aside} "):
            Conversion(gpt2, tmp_path / "ours").run()
        assert (aside / "file").read_text() == "of the first"
    assert (tmp_path / "ours" / "file").read_text() == "of the first"


def test_damage_is_found_before_anything_is_written(tmp_path):
    save(build("bloom"), tmp_path / "hf")
    Conversion(tmp_path / "hf", tmp_path / "ours").run()
    file = next((tmp_path / "ours" / "iter_0000000").glob("*layer1*"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(UserError, match=rf"{file.name} has other contents"):
        Conversion(tmp_path / "ours", tmp_path / "back").run()
    assert not (tmp_path / "back").exists()


def test_a_typo_does_not_demand_data_and_a_length(gpt2, tmp_path):
    with pytest.raises(UserError) as caught:
        main(["--load", str(gpt2), "--save", str(tmp_path / "ours"), "--preset", "gpt-tinyy"])
    assert len(str(caught.value).splitlines()) == 1


def tokenizer_files(folder):
    """Write every file of a tokenizer that is copied along, and return what each holds."""
    contents = {
        "tokenizer.json": '{"model": {"vocab": {"a": 0}}}',
        "tokenizer.model": "YQ== 0\nYg== 1\n",
        "tokenizer_config.json": "{}",
        "chat_template.jinja": "{{ messages }}",
    }
    for name, text in contents.items():
        (folder / name).write_text(text)
    return contents


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "tokenizer.model", "tokenizer_config.json", "chat_template.jinja"]
)
def test_a_link_out_of_the_folder_is_not_copied(gpt2, tmp_path, name):
    tokenizer_files(gpt2)
    secret = tmp_path / "secret"
    (gpt2 / name).rename(secret)
    (gpt2 / name).symlink_to(secret)
    message = f"the tokenizer's file {gpt2 / name} is a symbolic link to {secret}, out of its folder"
    for target in ("hf", "megalite"):
        with pytest.raises(UserError, match=message):
            Conversion(gpt2, tmp_path / "new", target=target).run()
    assert not (tmp_path / "new").exists()


def test_links_in_the_folder_and_in_the_cache_of_hugging_face_are_copied(gpt2, tmp_path):
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0123"
    snapshot.parent.mkdir(parents=True)
    gpt2.rename(snapshot)
    contents = tokenizer_files(snapshot)
    (snapshot.parents[1] / "blobs").mkdir()
    (snapshot / "tokenizer.json").rename(snapshot.parents[1] / "blobs" / "4567")
    (snapshot / "tokenizer.json").symlink_to("../../blobs/4567")
    (snapshot / "tokenizer_config.json").rename(snapshot / "v2.json")
    (snapshot / "tokenizer_config.json").symlink_to("v2.json")
    (tmp_path / "link").symlink_to(snapshot)
    Conversion(tmp_path / "link", tmp_path / "new").run()
    for name, text in contents.items():
        assert (tmp_path / "new" / "tokenizer" / name).read_text() == text
        assert not (tmp_path / "new" / "tokenizer" / name).is_symlink()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", b"root:x:0:0:root:/root:/bin/bash\n"),
        ("tokenizer.json", b"[1, 2]"),
        ("tokenizer.json", b'{"model": []}'),
        ("tokenizer.model", b"root:x:0:0:root:/root:/bin/bash\n"),
        ("tokenizer.model", b""),
        ("tokenizer.model", b"\n\x0e\n\x05hello\x15"),
        ("tokenizer_config.json", b"{"),
        ("chat_template.jinja", b"\xff\xfe"),
    ],
)
def test_a_file_that_is_no_tokenizers_is_not_copied(gpt2, tmp_path, name, content):
    tokenizer_files(gpt2)
    (gpt2 / name).write_bytes(content)
    for target in ("hf", "megalite"):
        with pytest.raises(
            UserError, match=f"{gpt2 / name} is not a tokenizer's {name}, so it is not copied"
        ):
            Conversion(gpt2, tmp_path / "new", target=target).run()
    assert not (tmp_path / "new").exists()


def test_a_model_of_sentencepiece_is_copied(gpt2, tmp_path):
    sentencepiece = pytest.importorskip("sentencepiece")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["hello world"] * 20),
        model_prefix=str(gpt2 / "tokenizer"),
        vocab_size=12,
        minloglevel=2,
    )
    Conversion(gpt2, tmp_path / "new").run()
    copy, file = tmp_path / "new" / "tokenizer" / "tokenizer.model", gpt2 / "tokenizer.model"
    assert copy.read_bytes() == file.read_bytes()
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(UserError, match=r"is not a tokenizer's tokenizer\.model"):
        Conversion(gpt2, tmp_path / "cut").run()
