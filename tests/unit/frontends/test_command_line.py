"""Parsing of flags: names, values, errors."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.config import Config, ModelConfig, OptimizerConfig, check_config
from megalite.config.arguments import SYNONYMS, WITHOUT_COUNTERPART
from megalite.config.fields import config_fields, field_docs, fields_by_flag
from megalite.config.model.transformer import Architecture
from megalite.config.presets import PRESETS
from megalite.frontends.command_line import known_flags, parse
from megalite.frontends.megatron.rules import megatron_rules
from megalite.utils import commands
from megalite.utils.commands import run_main
from megalite.utils.errors import ConfigError, UserError

ENOUGH = ["--train-iters", "1", "--data-path", "p", "--tokenizer-type", "byte"]
ENOUGH_FOR_BERT = [*ENOUGH[:-1], "BertWordPieceLowerCase", "--vocab-file", "vocab.txt"]


def value(name: str, *argv: str) -> object:
    config, _ = parse(argv)
    field = next(field for field in config_fields() if field.name == name)
    return getattr(getattr(config, field.group), name)


def test_nothing_given_is_every_default() -> None:
    assert parse([]) == (Config(), [])


def test_every_field_has_a_docstring_a_flag_and_a_name_of_its_own() -> None:
    names = [field.name for field in config_fields()]
    assert len(set(names)) == len(names)
    for field in config_fields():
        doc = field_docs(field.group)[field.name]
        assert doc.endswith(".") and len(doc) < 170, field.name
        assert fields_by_flag()[f"--{field.name.replace('_', '-')}"] is field


def test_no_flag_is_both_a_field_and_refused() -> None:
    assert not set(fields_by_flag()) & set(megatron_rules())


@pytest.mark.parametrize("flag", ["--tp", "--tensor-model-parallel-size", "--tensor_model_parallel_size"])
@pytest.mark.parametrize("join", [False, True])
def test_one_field_has_several_names(flag: str, join: bool) -> None:
    assert value("tensor_model_parallel_size", *([f"{flag}=2"] if join else [flag, "2"])) == 2


@pytest.mark.parametrize(
    ("name", "argv", "expected"),
    [
        ("lr", ["--lr", "6e-5"], 6e-5),
        ("train_iters", ["--train-iters", "220_000_000"], 220_000_000),
        ("pipeline_layers", ["--pipeline-layers", "3", "5"], (3, 5)),
        ("pipeline_layers", ["--pipeline-layers", "3,5"], (3, 5)),
        ("pipeline_layers", ["--pipeline-layers", "(3,)"], (3,)),
        ("pipeline_layers", ["--pipeline-layers", "([2]*2+[1])*2"], (2, 2, 1, 2, 2, 1)),
        ("data_path", ["--data-path", ".3", "a", "0.7", "b"], (".3", "a", "0.7", "b")),
        ("data_path", ["--data-path=--odd"], ("--odd",)),
        ("cp_comm_type", ["--cp-comm-type", "p2p"], "p2p"),
        ("cp_comm_type", ["--cp-comm-type", "p2p", "a2a+p2p"], ("p2p", "a2a+p2p")),
        ("clip_grad", ["--clip-grad", "-1"], -1.0),
        ("profile_execution", ["--profile-execution", "True"], True),
        ("profile_execution", ["--profile-execution"], True),
        ("profile_execution", ["--profile-execution", "false"], False),
        ("embed_layernorm", ["--no-embed-layernorm"], False),
        ("add_bias_linear", ["--no-add-bias-linear"], False),
        ("add_bias_linear", ["--disable-bias-linear"], False),
        ("activation", ["--swiglu"], "swiglu"),
        ("position_embedding_type", ["--use-rotary-position-embeddings"], "rope"),
        ("deterministic", ["--deterministic-mode"], True),
        ("norm_epsilon", ["--layernorm-epsilon", "1e-6"], 1e-6),
    ],
)
def test_values(name: str, argv: list[str], expected: object) -> None:
    found = value(name, *argv)
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--num-layers x", "--num-layers takes a whole number, not 'x'"),
        ("--num-layers 1.5", "--num-layers takes a whole number, not '1.5'"),
        ("--num-layers", "--num-layers takes one value, a whole number, but got none"),
        ("--lr 1 2", "--lr takes one value, a number, but got 2: 1 2"),
        ("--data-path", "--data-path needs at least one value"),
        ("--embed-layernorm maybe", "--embed-layernorm takes True or False, not 'maybe'"),
        ("--swiglu yes", "--swiglu takes no value, but got yes"),
        ("--normalization LayrNorm", "choose one of LayerNorm, RMSNorm; nearest is LayerNorm"),
        ("--preset gtp-tiny", "--preset gtp-tiny is not known"),
        ("--preset", "--preset takes one value, but got none"),
        ("--config a b", "--config takes one value, but got a b"),
        ("--config missing.yaml", "--config missing.yaml cannot be read: No such file"),
        ("stray --tp 1", "'stray' does not follow a flag"),
        ("--hybrid-override-pattern -M*", "but got none: write --hybrid-override-pattern=-M*"),
        ("--data-path -corpus", "at least one value, a string: write --data-path=-corpus"),
        ("-lr 3", "unknown flag -lr; nearest is --lr"),
        ("--hiden-size 3", "unknown flag --hiden-size; nearest is --hidden-size"),
        ("--num-layer 3", "unknown flag --num-layer; nearest is --num-layers"),
        ("--tensor-model-parallel 3", "nearest is --tensor-model-parallel-size"),
        ("--pad 3", "nearest is --pad-vocab-size-to"),
        ("--bf61", "nearest is --bf16"),
    ],
)
def test_mistakes(line: str, message: str, problems) -> None:
    assert message in problems(line)[0]


@pytest.mark.parametrize(
    "name", [f.name for f in config_fields() if f.kind.item is str and not f.kind.choices]
)
def test_the_home_folder_is_expanded_where_no_shell_does_it(name: str, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "run.yaml").write_text(f"{name}: ~/x\n")
    for argv in ([f"--{name}=~/x"], ["--config", str(tmp_path / "run.yaml")]):
        found = value(name, *argv)
        assert (found if isinstance(found, str) else found[0]) == f"{tmp_path}/x"


def test_abbreviations_are_unknown(problems) -> None:
    assert "unknown flag --hidden-s; nearest is --hidden-size" in problems("--hidden-s 64")[0]


def test_all_mistakes_come_at_once_and_none_that_rests_on_another(problems) -> None:
    found = problems(
        "--hiden-size 60 --num-attention-heads 7 --lr x --foo --qk-l2-norm --split a --train-itrs 3"
    )
    assert [problem.split(":")[0].split(";")[0] for problem in found[:5]] == [
        "unknown flag --hiden-size",
        "--lr takes a number, not 'x'",
        "unknown flag --foo (--help-all lists all)",
        "unknown flag --train-itrs",
        "--qk-l2-norm (this model option) is not supported in this version",
    ]
    # No word of hidden size 768 and 7 heads: 768 is not what the user wanted. Nor of --train-iters.
    assert [problem.split()[0] for problem in found[5:]] == ["--split", "--data-path", "the"]


def test_two_names_that_disagree_are_a_mistake_that_names_both(problems) -> None:
    message = problems("--tp 2 --tensor_model_parallel_size 4")[0]
    assert "--tp 2 and --tensor_model_parallel_size 4 set the same option" in message
    assert "--swiglu" in problems("--activation relu --swiglu")[0]
    assert value("tensor_model_parallel_size", "--tp", "2", "--tensor-model-parallel-size", "2") == 2


def test_one_name_twice_is_told_and_the_last_counts() -> None:
    config, notices = parse(["--lr", "1", "--lr", "2"])
    assert config.optimizer.lr == 2
    assert notices == ["--lr 1.0 and --lr 2.0 are both passed: the last one is used"]


def test_flags_behind_override_flags_replace_those_before() -> None:
    script = ["--lr", "1", "--tensor-model-parallel-size", "2", "--fp16", "--preset", "gpt-tiny"]
    own = ["--lr", "2", "--tp", "4", "--bf16", "--preset", "gpt2-124m"]
    config, notices = parse([*script, "--override-flags", *own])
    assert (config, notices) == parse(own)
    assert parse([*script, "--override-flags"]) == parse(script)
    assert parse([*script, "--override-flags", "--lr", "3", "--override-flags", *own])[0] == config


def test_values_behind_override_flags_belong_to_no_flag(problems) -> None:
    assert (
        problems("--lr 1 --override-flags 2")[0] == "'2' does not follow a flag: put its flag in front of it"
    )


@pytest.mark.parametrize(
    ("argv", "flag"),
    [
        (["--rotary-base", "500000"], "--rotary-base"),
        (["--lr-wsd-decay-iters", "5"], "--lr-wsd-decay-iters"),
        (["--lr-decay-style", "constant", "--min-lr", "1e-5"], "--min-lr"),
        (["--save-interval", "5"], "--save-interval"),
        (["--log-timers-to-tensorboard"], "--log-timers-to-tensorboard"),
        (["--profile-name", "x"], "--profile-name"),
        (["--fim-spm-rate", "1"], "--fim-spm-rate"),
        (["--pipeline-schedule", "gpipe"], "--pipeline-schedule"),
        (
            ["--pad-vocab-size-to", "512", "--make-vocab-size-divisible-by", "2"],
            "--make-vocab-size-divisible-by",
        ),
    ],
)
def test_an_option_without_effect_is_told(argv: list[str], flag: str) -> None:
    (notice,) = parse(argv)[1]
    assert notice.startswith(f"{flag} ")
    assert " has no effect: " in notice


def test_flags_go_over_the_preset() -> None:
    config, _ = parse(["--preset", "llama-tiny", "--num-layers", "2"])
    assert config.model.num_layers == 2
    assert (config.model.num_query_groups, config.model.activation) == (2, "swiglu")


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_sound(name: str) -> None:
    enough = {"gpt": ENOUGH, "bert": ENOUGH_FOR_BERT}[PRESETS[name].architecture]
    config, notices = parse(["--preset", name, *enough])
    check_config(config, world_size=1)
    assert notices == []


PUBLISHED = {  # parameters, size of a head
    "gpt2-124m": (124.4e6, 64),
    "gpt-1.3b": (1.3e9, 128),
    "gpt3-175b": (175e9, 128),
    "bloom-560m": (559e6, 64),
    "bloom-176b": (176e9, 128),
    "llama2-7b": (6.74e9, 128),
    "llama3-8b": (8.03e9, 128),
    "llama3-70b": (70.6e9, 128),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_presets_have_the_published_sizes(name: str) -> None:
    model = PRESETS[name]
    h, heads = model.hidden_size, model.num_attention_heads + 2 * model.num_kv_heads
    matrices = 3 if model.is_gated else 2
    layer = h * model.head_dim * (heads + model.num_attention_heads) + matrices * h * model.ffn_size
    rows = (model.pad_vocab_size_to or model.vocab_size or 0) * (
        1 + model.untie_embeddings_and_output_weights
    )
    rows += model.num_positions * (model.position_embedding_type == "learned_absolute")
    assert (model.num_layers * layer + rows * h, model.head_dim) == pytest.approx(PUBLISHED[name], rel=0.013)


@pytest.mark.parametrize("architecture", ["gpt", "bert"])
def test_help_is_short_and_its_example_is_a_command_line(
    architecture: Architecture, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(["--help", "--nonsense"], architecture=architecture)
    assert caught.value.code == 0
    text = capsys.readouterr().out
    names = {word for word in text.replace(",", " ").split() if word.startswith("--")}
    fields = {fields_by_flag()[name].name for name in names & fields_by_flag().keys()}
    assert 20 <= len(fields) <= 26
    (example,) = re.findall(r"(--tp 2 (?:.*\\\n)*.*)", text)
    config, notices = parse(example.replace("\\\n", " ").split(), architecture=architecture)
    assert config.model.architecture == architecture
    assert config.training.train_iters == 10000
    assert notices == []


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("--learning-rate", "--lr"),
        ("--learning_rate", "--lr"),
        ("--epochs", "--train-iters"),
        ("--max-steps", "--train-iters"),
        ("--output-dir", "--save"),
        ("--resume", "--load"),
        ("--tensor-model-paralel-size", "--tensor-model-parallel-size"),
        ("--foo", None),
        ("--cpu-optimiser", "--cpu-optimizer"),
        ("--offload-optimiser-states", None),  # --offload-optimizer-states is near, and refused
    ],
)
def test_the_flag_that_is_meant(written: str, meant: str | None, problems) -> None:
    (problem,) = (found for found in problems(f"{written} 3") if "unknown flag" in found)
    hint = "" if meant is None else f"; nearest is {meant}"
    assert problem == f"unknown flag {written}{hint} (--help-all lists all)"


def test_synonyms_are_of_fields() -> None:
    names = {field.name for field in config_fields()}
    assert set(SYNONYMS.values()) <= names
    assert not (SYNONYMS.keys() | WITHOUT_COUNTERPART) & names
    assert not SYNONYMS.keys() & WITHOUT_COUNTERPART


NANO_GPT = """
    out_dir eval_interval log_interval eval_iters eval_only always_save_checkpoint init_from wandb_log
    wandb_project wandb_run_name dataset gradient_accumulation_steps batch_size block_size n_layer
    n_head n_embd dropout bias learning_rate max_iters weight_decay beta1 beta2 grad_clip decay_lr
    warmup_iters lr_decay_iters min_lr backend device dtype compile
"""


def test_each_name_of_nano_gpt_and_of_training_arguments_is_known() -> None:
    transformers = pytest.importorskip("transformers")
    theirs = {field.name for field in fields(transformers.TrainingArguments) if field.init}
    known = {flag.lstrip("-").replace("-", "_") for flag in known_flags()} | SYNONYMS.keys()
    assert set(NANO_GPT.split()) <= known
    assert not {name for name in theirs - known - WITHOUT_COUNTERPART if not name.startswith("_")}
    assert not theirs & known & WITHOUT_COUNTERPART


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--max_iters 9", "unknown flag --max_iters; nearest is --train-iters"),
        ("--grad_clip 1", "nearest is --clip-grad"),
        ("--gradient_accumulation_steps 4", "nearest is --global-batch-size"),
        ("--device cpu", "nearest is --distributed-backend"),
        ("--wandb_log True", "nearest is --wandb-project"),
        ("--hub_strategy end", "unknown flag --hub_strategy (--help-all lists all)"),
        ("--preset gpt2", "; nearest is gpt2-124m"),
        ("--preset llama3", "; nearest is llama3-8b"),
        ("--preset meta-llama/Llama-3.1-8B", "; nearest is llama3.1-8b"),
    ],
)
def test_names_of_other_programs_get_ours(line: str, message: str, problems) -> None:
    assert message in problems(line)[0]


def test_help_has_each_field_once_with_all_its_names(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(["--help-all", "--nonsense"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    lines = text.splitlines()
    for field in config_fields():
        heads = [
            i
            for i, line in enumerate(lines)
            if line.startswith("  --") and line.split()[0].strip(",") == field.flags[0]
        ]
        entry = " ".join(lines[heads[0] : heads[0] + 4])
        assert len(heads) == 1
        assert all(flag in entry for flag in (*field.flags, *field.sets)), entry
    sentence = "Tensor-parallel size: number of ranks that the matrices of each layer are split over."
    assert f"{sentence} (default: 1)" in " ".join(text.split())
    assert all(flag in text for flag in megatron_rules())
    assert max(map(len, lines)) <= 110


def test_only_the_first_rank_prints(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(arguments: object) -> None:
        raise ConfigError(["one thing", "another"])

    waits: list[float] = []
    monkeypatch.setattr(commands.time, "sleep", waits.append)
    for rank, printed in (("0", "error: one thing\nerror: another\n"), ("1", "")):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit) as caught:
            run_main(fails, [])
        assert caught.value.code == 1
        assert capsys.readouterr().err == printed
        assert len(waits) == int(rank)  # the others let the first one speak before a launcher ends it


def test_an_interruption_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    def is_interrupted(arguments: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as caught:
        run_main(is_interrupted, [])
    assert caught.value.code == 130
    assert capsys.readouterr().err == "error: interrupted\n"


def test_other_errors_keep_their_traceback() -> None:
    def fails(arguments: object) -> None:
        raise ValueError("a defect")

    with pytest.raises(ValueError, match="a defect"):
        run_main(fails, [])
    assert issubclass(UserError, ValueError)


def test_reading_a_command_line_imports_neither_torch_nor_yaml() -> None:
    code = "import sys; from megalite.frontends.command_line import parse; parse(['--tp', '2'])"
    code += "; print({'torch', 'yaml'} & set(sys.modules))"
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root)
    assert done.stdout.strip() == "set()"


flag_words = st.one_of(
    st.sampled_from([*fields_by_flag(), *megatron_rules(), "--config", "--preset"]),
    st.sampled_from(
        ["1", "0", "-3", "2.5", "nan", "inf", "True", "adam", "alibi", "rope", "WSD", "a,b", "llama-tiny"]
    ),
    st.text(max_size=6),
)


@settings(max_examples=80, deadline=None)
@given(st.lists(flag_words, max_size=12), st.sampled_from([None, 1, 8]))
def test_any_words_end_in_a_config_or_in_lines_of_mistakes(argv: list[str], world_size: int | None) -> None:
    argv = [word for word in argv if word not in ("-h", "--help", "--print-config")]
    mistakes: tuple[str, ...] = ()
    try:
        check_config(parse(argv)[0], world_size)
    except ConfigError as error:
        mistakes = error.problems
    # A whole config is not to be had from these words: --train-iters and a corpus are seldom among them.
    assert mistakes or {"--train-iters", "--data-path"} <= set(argv)
    assert all(problem and problem.splitlines() == [problem] for problem in mistakes)


@settings(max_examples=30, deadline=None)
@given(st.floats(min_value=0, allow_nan=False, allow_infinity=False), st.integers(1, 10**12))
def test_numbers_come_through_exactly(lr: float, num_layers: int) -> None:
    config, _ = parse(["--lr", repr(lr), "--num-layers", str(num_layers)])
    assert config.optimizer == OptimizerConfig(lr=lr)
    assert config.model == ModelConfig(num_layers=num_layers)


def test_a_mistake_does_not_demand_what_the_caller_can_do_without() -> None:
    with pytest.raises(ConfigError) as caught:
        parse(["--preset", "gpt-tinyy"], unneeded=("train_iters", "mock_data"))
    (problem,) = caught.value.problems
    assert "nearest is gpt-tiny" in problem
    with pytest.raises(ConfigError) as caught:
        parse(["--preset", "gpt-tinyy"])
    assert len(caught.value.problems) == 3
