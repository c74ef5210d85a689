"""``vla-rl convert``: a small checkpoint in the published layout becomes a bundle; what is wrong stops."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from policies.bundle import load_bundle
from policies.pretrained.checkpoint import INDEX, CheckpointError, read_checkpoint
from policies.pretrained.scales import ScaleConfig, read_statistics, scale_of
from policies.pretrained.tokenizer import PromptTokenizer
from sims.errors import UserError
from tests.policies.pretrained.golden import read_golden
from vla_rl.cli.main import main
from vla_rl.config.experiment import Experiment
from vla_rl.config.loader import load_config
from vla_rl.config.published import Published
from vla_rl.runners.convert import read_published

sentencepiece = pytest.importorskip("sentencepiece")
CONFIGS = Path(__file__).parents[2] / "configs" / "published"
TINY_RUN = Path(__file__).parents[1] / "data" / "tiny.yaml"
TINY = [
    *("--policy.vocabulary", "512", "--policy.vision.width", "32", "--policy.vision.mlp_width", "64"),
    *("--policy.vision.depth", "2", "--policy.vision.heads", "2", "--policy.vision.image_size", "28"),
    *("--policy.language", "{width: 128, mlp_width: 128, depth: 4, heads: 8, kv_heads: 1, head_dim: 16}"),
    *("--policy.expert", "{width: 64, mlp_width: 128, depth: 4, heads: 8, kv_heads: 1, head_dim: 16}"),
]
RANDOM = np.random.RandomState(0)
STATISTICS = {
    "mean": 0.3 * RANDOM.standard_normal(8),
    "std": 0.5 * RANDOM.rand(8),
    "q01": -0.5 - 0.5 * RANDOM.rand(8),
    "q99": 0.5 + 0.5 * RANDOM.rand(8),
}


def write_checkpoint(folder: Path, golden: str = "pi0") -> None:
    folder.mkdir()
    weights = read_golden(golden, norms_around=0.0).weights
    save_file({f"model.{name}": tensor for name, tensor in weights.items()}, folder / "model.safetensors")
    statistics = {key: value.tolist() for key, value in STATISTICS.items()}
    (folder / "norm_stats.json").write_text(json.dumps({"norm_stats": {"state": statistics, "actions": statistics}}))
    (folder / "paligemma_tokenizer.model").write_bytes(train_tokenizer())


def train_tokenizer() -> bytes:
    """A SentencePiece model of a few hundred pieces, in the place of PaliGemma's, which is not ours to ship."""
    file = io.BytesIO()
    sentences = [
        "put the bowl on the plate",
        "open the top drawer",
        "Task: pick, State: 1 2 3 4 5 6 7 8 9 0;\nAction: ",
    ]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences * 3), model_writer=file, vocab_size=296, byte_fallback=True, minloglevel=2
    )
    return file.getvalue()


def convert(config: str, folder: Path, out: Path, *changes: str) -> None:
    main(["convert", str(CONFIGS / config), str(folder), "--out", str(out), *TINY, *changes])


def test_a_published_checkpoint_becomes_a_bundle(tmp_path: Path, capsys: Any) -> None:
    write_checkpoint(tmp_path / "checkpoint")
    convert("pi0_libero.yaml", tmp_path / "checkpoint", tmp_path / "bundle")
    assert "not used: model.paligemma_with_expert.gemma_expert.lm_head.weight" in capsys.readouterr().out
    policy: Any = load_bundle(tmp_path / "bundle")
    processor = sentencepiece.SentencePieceProcessor(model_proto=train_tokenizer())
    assert policy.tokenizer.bos == 1 and policy.tokenizer.ids("open the drawer") == processor.encode("open the drawer")
    torch.testing.assert_close(policy.normalizer.action_scale, torch.tensor(STATISTICS["std"][:7] + 1e-6).float())


@pytest.mark.parametrize("name", ["pi_rl_libero_pi0", "pi_rl_libero_pi05", "reinflow_libero_pi0"])
def test_the_conversion_that_a_recipe_asks_for(name: str, tmp_path: Path, monkeypatch: Any) -> None:
    """Its first lines say the command, as a shell reads it."""
    recipe = CONFIGS.parent / "recipes" / f"{name}.yaml"
    comment = "".join(line[1:] for line in recipe.read_text().splitlines(keepends=True) if line.startswith("#"))
    command = comment[comment.index("vla-rl convert") :].replace("\\\n", " ").splitlines()[0].split()
    write_checkpoint(tmp_path / "CHECKPOINT", "pi05" if "pi05" in name else "pi0")
    (tmp_path / "configs").symlink_to(CONFIGS.parent)
    monkeypatch.chdir(tmp_path)
    main([*command[1:], *TINY])
    bundle = command[command.index("--out") + 1]
    policy: Any = load_bundle(tmp_path / bundle)
    assert policy.config.explore.name == ("flow_noise" if name.startswith("reinflow") else "flow_sde")
    start: Any = load_config(Experiment, recipe).start
    assert start.path.resolve() == CONFIGS.parents[1] / bundle  # where the command wrote it, run in the checkout


def test_read_clone_and_reinforce(tmp_path: Path) -> None:
    """A checkpoint, whose actions are relative to the state, from its files to a trained policy, in a simulator."""
    robot = ["--robot.cameras", "[agent, wrist]", "--robot.image_size", "[64, 64]"]
    cameras = ["--policy.convention.cameras", "[agent, wrist]", "--policy.explore.steps", "2"]
    write_checkpoint(tmp_path / "checkpoint")
    config, checkpoint, bundle = CONFIGS / "pi0_libero.yaml", tmp_path / "checkpoint", tmp_path / "bundle"
    main(["convert", str(config), str(checkpoint), "--out", str(bundle), *TINY, *robot, *cameras])
    main(["collect", str(TINY_RUN), "--episodes", "2", "--out", str(tmp_path / "demos")])
    recipe, cloned = str(CONFIGS.parent / "recipes" / "pi_rl_libero_pi0.yaml"), tmp_path / "cloned"
    clone = ["--start.bc.steps", "2", "--start.bc.batch_size", "4", "--start.bc.frozen", "[encoder]"]
    start = ["--start.path", str(bundle), "--store", str(tmp_path / "demos")]
    main(["imitate", recipe, *start, *clone, "--out", str(cloned)])
    sim = ["--sim", "{name: tabletop, tasks: [reach], num_envs: 2, max_steps: 16}"]
    update = ["--algorithm.chunks", "2", "--algorithm.update.minibatch", "4", "--algorithm.update.micro_batch", "2"]
    short = ["--algorithm.iterations", "1", "--algorithm.critic_warmup", "0", *update]
    evaluation = ["--evaluation", "{episodes: 2, validation_episodes: 0, videos_per_task: 0}"]
    start = ["--start.path", str(cloned / "bundle")]
    main(["train", recipe, *sim, *start, *short, *evaluation, "--run-dir", str(tmp_path / "run")])
    policies: list[Any] = [load_bundle(path / "bundle") for path in (tmp_path, cloned, tmp_path / "run")]
    weights = [policy.network.action_out_proj.weight for policy in policies]
    assert not torch.equal(weights[0], weights[1]) and not torch.equal(weights[1], weights[2])
    for policy in policies:
        assert policy.config.convention.relative_actions == 6
        assert torch.equal(policy.normalizer.action_scale, policies[0].normalizer.action_scale)
        assert torch.equal(policy.network.embed_tokens.weight, policies[0].network.embed_tokens.weight)


@pytest.mark.parametrize("adds_bos", [True, False])
def test_the_first_token_of_a_tokenizer_json(tmp_path: Path, capsys: Any, adds_bos: bool) -> None:
    """It is what the file says, and a file that does not say it is an input error of a policy that needs it."""
    write_checkpoint(tmp_path / "checkpoint")
    tokenizer = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1, "<bos>": 2, "pick": 3, "?": 4}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    added = {"single": "<bos> $A", "special_tokens": [("<bos>", 2)]}
    added = added if adds_bos else {"single": "$A <eos>", "special_tokens": [("<eos>", 1)]}
    tokenizer.post_processor = processors.TemplateProcessing(**added)
    (tmp_path / "checkpoint" / "paligemma_tokenizer.model").write_text(tokenizer.to_str())
    if adds_bos:
        convert("pi0_libero.yaml", tmp_path / "checkpoint", tmp_path / "bundle")
        policy: Any = load_bundle(tmp_path / "bundle")
        assert policy.tokenizer.bos == 2 and policy.tokenizer.ids("pick") == [3]
        return
    with pytest.raises(SystemExit) as stopped:
        convert("pi0_libero.yaml", tmp_path / "checkpoint", tmp_path / "bundle")
    assert stopped.value.code == 2 and "begins a sequence (BOS)" in capsys.readouterr().err
    assert not (tmp_path / "bundle").exists()


def test_a_tokenizer_with_more_tokens_than_the_weights_is_refused(tmp_path: Path, capsys: Any) -> None:
    """Added tokens, as PaliGemma's <image>, are beyond the vocabulary of pi0's own weights and in no prompt."""
    write_checkpoint(tmp_path / "checkpoint")
    for tokens in (600, 512):
        names = {"<bos>": 0, "?": 1} | {f"w{i}": i for i in range(2, tokens)}
        tokenizer = Tokenizer(models.WordLevel(names, unk_token="?"))
        tokenizer.add_special_tokens(["<image>"])
        first = {"single": "<bos> $A", "special_tokens": [("<bos>", 0)]}
        tokenizer.post_processor = processors.TemplateProcessing(**first)
        (tmp_path / "checkpoint" / "paligemma_tokenizer.model").write_text(tokenizer.to_str())
        if tokens == 600:
            with pytest.raises(SystemExit) as stopped:
                convert("pi0_libero.yaml", tmp_path / "checkpoint", tmp_path / "bundle")
            assert stopped.value.code == 2 and "ids up to 599, and the policy's vocabulary" in capsys.readouterr().err
            assert not (tmp_path / "bundle").exists()
    convert("pi0_libero.yaml", tmp_path / "checkpoint", tmp_path / "bundle")


def test_padding_and_truncation_that_a_tokenizer_json_was_saved_with_are_left_out() -> None:
    saved = Tokenizer(models.WordLevel({"<pad>": 0, "pick": 3, "up": 4, "cube": 5, "?": 6}, unk_token="?"))
    saved.pre_tokenizer = pre_tokenizers.Whitespace()
    saved.enable_padding(length=8, pad_id=0, pad_token="<pad>")
    saved.enable_truncation(2)
    tokenizer = PromptTokenizer()
    tokenizer.load(saved.to_str().encode())
    assert tokenizer.ids("pick up cube") == [3, 4, 5]


BUFFERS = (
    "normalize_inputs.buffer_observation_state",
    "normalize_targets.buffer_action",
    "unnormalize_outputs.buffer_action",
)


def test_scales_that_lerobot_saved_among_the_weights(tmp_path: Path, capsys: Any) -> None:
    """Before 0.4, as buffers. Those of the statistics' file count, which may be the weights' file itself."""
    write_checkpoint(tmp_path / "checkpoint")
    path = tmp_path / "checkpoint" / "model.safetensors"
    buffers = {f"{name}.mean": torch.full((8,), 0.1) for name in BUFFERS}
    buffers |= {f"{name}.std": torch.full((8,), 0.2 + i / 10) for i, name in enumerate(BUFFERS)}
    save_file(load_file(path) | buffers, path)
    convert("pi0_libero.yaml", tmp_path / "checkpoint", tmp_path / "bundle")
    assert "not used: " in (out := capsys.readouterr().out) and f"{BUFFERS[0]}.mean" in out
    policy: Any = load_bundle(tmp_path / "bundle")
    torch.testing.assert_close(policy.normalizer.action_scale, torch.tensor(STATISTICS["std"][:7] + 1e-6).float())
    convert("pi0_libero.yaml", tmp_path / "checkpoint", tmp_path / "other", "--statistics", path.name)
    policy = load_bundle(tmp_path / "other")
    torch.testing.assert_close(policy.normalizer.state_std, torch.full((8,), 0.2 + 1e-6))
    torch.testing.assert_close(policy.normalizer.action_scale, torch.full((7,), 0.4 + 1e-6))
    torch.testing.assert_close(policy.normalizer.action_center, torch.full((7,), 0.1))


def test_a_partial_checkpoint_is_an_input_error(tmp_path: Path, capsys: Any) -> None:
    write_checkpoint(tmp_path / "checkpoint", "pi05")
    with pytest.raises(SystemExit) as stopped:
        convert("pi0_libero.yaml", tmp_path / "checkpoint", tmp_path / "bundle")
    assert stopped.value.code == 2
    assert "missing: " in capsys.readouterr().err
    assert not (tmp_path / "bundle").exists()


PROJECTION = "model.action_out_proj.weight"


def split_in_two(folder: Path, *, again: str = "") -> None:
    """Shards and their index; ``again``: a tensor that is, with zeros, in the other shard too."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = [{name: tensors[name] for name in half} for half in (names[::2], names[1::2])]
    files = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    (folder / INDEX).write_text(json.dumps({"weight_map": {name: files[i % 2] for i, name in enumerate(names)}}))
    for shard, file in zip(shards, files, strict=True):
        if again and again not in shard:
            shard[again] = torch.zeros_like(tensors[again])
        save_file(shard, folder / file)


def test_shards_are_read_as_one_file(tmp_path: Path) -> None:
    for name in ("single", "shards"):
        write_checkpoint(tmp_path / name)
    split_in_two(tmp_path / "shards")
    single, shards = (read_checkpoint(tmp_path / name) for name in ("single", "shards"))
    assert single.keys() == shards.keys() and all(torch.equal(single[name], shards[name]) for name in single)


def keep_the_index(folder: Path) -> None:
    tensors = (folder / "model.safetensors").read_bytes()
    split_in_two(folder)
    (folder / "model.safetensors").write_bytes(tensors)


def quantize(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors[PROJECTION] = (tensors[PROJECTION] * 100).round().to(torch.int8)
    save_file(tensors, folder / "model.safetensors")


MIXED: dict[str, tuple[Callable[[Path], None], str]] = {
    "index and file": (keep_the_index, "both model.safetensors and model.safetensors.index.json"),
    "tensor twice": (lambda folder: split_in_two(folder, again=PROJECTION), f"has {PROJECTION} in both model-00001"),
    "quantized": (quantize, f"1 of another type: {PROJECTION} torch.int8, expected torch.float32"),
}


@pytest.mark.parametrize(("change", "message"), MIXED.values(), ids=MIXED)
def test_a_checkpoint_of_mixed_files_is_an_input_error(
    tmp_path: Path, capsys: Any, change: Callable[[Path], None], message: str
) -> None:
    write_checkpoint(tmp_path / "checkpoint")
    change(tmp_path / "checkpoint")
    with pytest.raises(SystemExit) as stopped:
        convert("pi0_libero.yaml", tmp_path / "checkpoint", tmp_path / "bundle")
    assert stopped.value.code == 2 and message in capsys.readouterr().err
    assert not (tmp_path / "bundle").exists()


@pytest.mark.parametrize("content", [[], {}, {"weight_map": []}, {"weight_map": {"a": 1}}])
def test_an_index_of_another_form_is_refused(tmp_path: Path, content: Any) -> None:
    (tmp_path / INDEX).write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="must have weight_map, an object of names"):
        read_checkpoint(tmp_path)


def test_what_a_checkpoint_lacks_is_named(tmp_path: Path, capsys: Any) -> None:
    write_checkpoint(tmp_path / "checkpoint")
    (tmp_path / "checkpoint" / "norm_stats.json").unlink()
    for checkpoint, message in (
        ("none", "none: no such checkpoint, a folder or the file of its weights"),
        (
            "checkpoint",
            "checkpoint has no norm_stats.json, the statistics of its data: copy it there, or name the file",
        ),
    ):
        with pytest.raises(SystemExit) as end:
            convert("pi0_libero.yaml", tmp_path / checkpoint, tmp_path / "bundle")
        assert end.value.code == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("named", ["checkpoint", "checkpoint/policy-model.safetensors"])
def test_the_checkpoints_own_folder_is_not_written_to(tmp_path: Path, capsys: Any, named: str) -> None:
    folder = tmp_path / "checkpoint"
    write_checkpoint(folder)
    if named != "checkpoint":
        (folder / "model.safetensors").rename(tmp_path / named)
    before = {path: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(SystemExit) as stopped:
        convert("pi0_libero.yaml", tmp_path / named, tmp_path / "other" / ".." / "checkpoint")
    assert stopped.value.code == 2 and "give the bundle a folder of its own" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_published_configuration_is_valid(path: Path) -> None:
    published = load_config(Published, path)
    assert published.policy.convention.cameras == published.robot.cameras


# -- scales: what the references' own formulas give ----------------------------------------------------------------

X = torch.from_numpy(RANDOM.standard_normal((5, 8))).float()
MEAN, STD, LOW, HIGH = (torch.from_numpy(STATISTICS[name]).float() for name in ("mean", "std", "q01", "q99"))
REFERENCES = {
    "openpi mean": (ScaleConfig(method="mean_std", epsilon=1e-6), (X - MEAN) / (STD + 1e-6)),
    "openpi quantiles": (ScaleConfig(method="quantiles", epsilon=1e-6), (X - LOW) / (HIGH - LOW + 1e-6) * 2 - 1),
    "lerobot mean": (ScaleConfig(method="mean_std", epsilon=1e-8), (X - MEAN) / (STD + 1e-8)),
    "lerobot quantiles": (
        ScaleConfig(method="quantiles", epsilon=1e-8, add_epsilon="constant"),
        2 * (X - LOW) / (HIGH - LOW) - 1,
    ),
    "openvla": (ScaleConfig(method="quantiles", epsilon=0.0), 2 * (X - LOW) / (HIGH - LOW) - 1),
}


@pytest.mark.parametrize("name", REFERENCES)
def test_scales_are_those_of_their_source(name: str) -> None:
    config, expected = REFERENCES[name]
    scale = scale_of({key: value.tolist() for key, value in STATISTICS.items()}, config, 8, source="file")
    torch.testing.assert_close((X - scale.center) / scale.scale, expected, atol=2e-6, rtol=1e-6)
    torch.testing.assert_close(expected * scale.scale + scale.center, X, atol=2e-6, rtol=1e-6)


def test_a_constant_dimension_and_a_masked_one() -> None:
    constant = scale_of(
        {"q01": [2.0], "q99": [2.0]},
        ScaleConfig(method="quantiles", epsilon=1e-8, add_epsilon="constant"),
        1,
        source="",
    )
    assert constant.scale.item() == pytest.approx(5e-9)
    shifted = scale_of({"q01": [2.0], "q99": [2.0]}, ScaleConfig(method="quantiles", epsilon=0.0), 1, source="")
    assert (shifted.center.item(), shifted.scale.item()) == (2.0, 1.0)  # to 0, as in OpenVLA's training data
    masked = {"q01": [-2.0, 0.0], "q99": [2.0, 1.0], "mask": [True, False]}
    scale = scale_of(masked, ScaleConfig(method="quantiles", epsilon=0.0), 2, source="")
    assert scale.scale.tolist() == [2.0, 1.0] and scale.center.tolist() == [0.0, 0.0]


def test_statistics_that_are_missing_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no 'q01'; it has mean, std"):
        scale_of({"mean": [0.0], "std": [1.0]}, ScaleConfig(method="quantiles"), 1, source="file")
    with pytest.raises(CheckpointError, match="at least 8 numbers"):
        scale_of({"mean": [0.0], "std": [1.0]}, ScaleConfig(), 8, source="file")
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"norm_stats": {"bridge": {"action": {"q01": [0.0]}}}}))
    assert read_statistics(path, "bridge")[1] == {"q01": [0.0]}
    with pytest.raises(CheckpointError, match="no statistics of 'libero'; it has bridge"):
        read_statistics(path, "libero")
    with pytest.raises(CheckpointError, match="data sets, name one"):
        read_statistics(path)


FINE = {"min": [0, 0], "max": [1, 1]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([], "must be an object of names, got a list"),
        ({"observation.state": [1, 2], "action": FINE}, "observation.state: statistics must be an object"),
        ({"observation.state": {"min": ["a", 0], "max": [1, 1]}, "action": FINE}, "'min' must be a list of numbers"),
        ({"observation.state": FINE, "action": FINE | {"max": [1, None]}}, "'max' must be a list of numbers"),
        ({"observation.state": FINE, "action": FINE | {"max": [1, float("nan")]}}, "'max' has NaN"),
        ({"observation.state": FINE, "action": FINE | {"mask": [True]}}, "'mask' must have at least 2"),
    ],
)
def test_statistics_of_another_form_are_an_input_error(tmp_path: Path, capsys: Any, content: Any, message: str) -> None:
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    (tmp_path / "stats.json").write_text(json.dumps(content))
    with pytest.raises(SystemExit) as stopped:
        main(["convert", "diffusion_pusht", str(tmp_path), "--out", str(tmp_path / "bundle")])
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and message in error and str(tmp_path / "stats.json") in error
    assert not (tmp_path / "bundle").exists()


UNITS = {
    "diffusion_pusht": {
        "observation.state": {"min": [13.5, 32.9], "max": [496.1, 510.9]},
        "action": {"min": [12.0, 25.0], "max": [511.0, 511.0]},
    },
    "smolvla_base": {
        "observation.state": {"mean": [0, 50, 60, 55, -5, 12], "std": [30, 40, 35, 25, 40, 15]},
        "action": {"mean": [0, 50, 60, 55, -5, 12], "std": [30, 40, 35, 25, 40, 15]},
    },
}


def action_scale(name: str, folder: Path, *changes: str) -> Any:
    """Of the configuration ``name`` with the data set's statistics."""
    (folder / "stats.json").write_text(json.dumps(UNITS[name]))
    save_file({"none": torch.zeros(1)}, folder / "model.safetensors")
    (folder / "tokenizer.json").write_bytes(b"{}")
    published = load_config(Published, CONFIGS / f"{name}.yaml", changes)
    return read_published(published, folder, published.robot.spec()).action


def test_actions_in_pixels_and_degrees_become_those_of_a_robot(tmp_path: Path) -> None:
    pixels = action_scale("diffusion_pusht", tmp_path)
    assert pixels.center.tolist() == pytest.approx([261.5 / 256 - 1, 268 / 256 - 1])
    assert pixels.scale.tolist() == pytest.approx([249.5 / 256, 243 / 256])
    degrees = action_scale("smolvla_base", tmp_path)
    assert degrees.center.tolist() == pytest.approx([0, 50 / 180, 60 / 180, 55 / 180, -5 / 180, 12 / 180])


def test_actions_that_would_be_clipped_are_refused(tmp_path: Path) -> None:
    unscaled = ("--robot.action_low", "[-1.0]", "--robot.action_high", "[1.0]")
    for name, reach in (("diffusion_pusht", "511"), ("smolvla_base", "95")):
        with pytest.raises(UserError, match=rf"stats.json, actions: .* reach {reach}, .* give robot.action_low"):
            action_scale(name, tmp_path, *unscaled)
    with pytest.raises(UserError, match=r"must be -1 and 1 where policy.convention has relative_actions"):
        action_scale("smolvla_base", tmp_path, "--policy.convention.relative_actions", "2")
    with pytest.raises(UserError, match=r"robot.action_low has 2 numbers for 6 action dimensions: give one, or 6"):
        action_scale("smolvla_base", tmp_path, "--robot.action_low", "[0.0, 1.0]")
    with pytest.raises(UserError, match=r"must be above action_low"):
        action_scale("smolvla_base", tmp_path, "--robot.action_low", "[180.0]")


@pytest.mark.parametrize("proprio", [{name: [0.0] * 7 for name in ("mean", "std", "min", "max", "q01", "q99")}, None])
def test_statistics_of_a_state_that_openvla_does_not_read_may_be_short_or_missing(
    tmp_path: Path, proprio: dict[str, list[float]] | None
) -> None:
    """OpenVLA, trained without the state, writes as many zeros for it as actions have; LIBERO's state has eight."""
    statistics: dict[str, Any] = {"action": {"q01": [-0.8] * 7, "q99": [0.8] * 7, "mask": [True] * 6 + [False]}}
    if proprio is not None:
        statistics["proprio"] = proprio
    (tmp_path / "config.json").write_text(json.dumps({"norm_stats": {"libero_spatial": statistics}}))
    save_file({"none": torch.zeros(1)}, tmp_path / "model.safetensors")
    (tmp_path / "tokenizer.model").write_bytes(b"")

    def state(*changes: str) -> Any:
        published = load_config(Published, CONFIGS / "openvla_7b.yaml", changes)
        return read_published(published, tmp_path, published.robot.spec()).state

    assert (state().center.tolist(), state().scale.tolist()) == ([0.0] * 8, [1.0] * 8)
    short = state("--robot.state_dim", "7", "--scale.epsilon", "1e-8")
    assert (short.center.tolist(), short.scale.tolist()) == ([0.0] * 7, [1.0] * 7)
    with pytest.raises(CheckpointError, match="at least 8 numbers" if proprio else "has no 'q01'"):
        state("--policy.proprio", "true")
