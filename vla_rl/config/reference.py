"""``python -m vla_rl.config.reference``: writes docs/configuration.md, the page of every setting, from the dataclasses.

What a setting means is the sentence of its class's docstring that names it in double backticks.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

from vla_rl.config.allowed import allowed
from vla_rl.config.corrections import CorrectionsConfig
from vla_rl.config.experiment import Experiment
from vla_rl.config.schema import default, hints, settings_other_than_its_class, variants
from vla_rl.rewards.classifier import SuccessClassifierConfig
from vla_rl.rewards.preferences.model import PreferenceConfig
from vla_rl.rewards.progress.model import ProgressConfig

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"
MARK = "<!-- Below this line the page is written by: python -m vla_rl.config.reference -->"

# Settings that mean the same in every section that has them.
EVERYWHERE: Mapping[str, str] = {
    "seed": "determines all random numbers",
    "num_envs": "environments that run side by side",
    "tasks": "names of the simulator's tasks; start states take them in turn",
    "task": "the simulator's name of its task",
    "suite": "the benchmark's suite of tasks",
    "split": "which part of the variations episodes are drawn from",
    "image_size": "height and width of the observed images in pixels",
    "cameras": "cameras whose images are observed, in this order",
    "instruction": "instead of the task's own",
    "reward": "sparse: 1 at success; shaped: progress as well",
    "dense_reward": "the simulator's own shaped reward instead of 1 for success",
    "fast_rendering": "without shadows, reflections and multisampling",
    "detail": "low: images without what is smaller than a pixel at 30 cm, in less time and memory",
    "control_mode": "the simulator's name of its controller",
    "control_hz": "control steps per second",
    "max_steps": "control steps after which an episode is cut off",
    "arguments": "further arguments of the environment's constructor",
    "start_timeout_s": "seconds for the start of a worker",
    "reset_timeout_s": "seconds for one reset",
    "step_timeout_s": "seconds for one control step",
    "device": "where it is computed",
    "path": "the folder of the bundle",
    "action_horizon": "actions per chunk",
    "heads": "attention heads; they divide the width",
    "depth": "layers of the transformer",
    "width": "of its tokens",
    "text_width": "of the tokens of the instruction",
    "text_depth": "layers of the instruction's transformer",
    "text_heads": "attention heads over the instruction; they divide text_width",
    "checkpointing": "activations are computed again in the backward pass, which saves memory",
    "mlp_width": "of each layer's MLP",
    "head_dim": "width of each attention head",
    "norm_eps": "added to the mean square in RMSNorm",
    "vocabulary": "tokens of the published tokenizer",
    "mlp_ratio": "width of each layer's MLP, as a multiple of the width",
    "time_width": "of the embedding of flow time",
    "min_std": "smallest standard deviation of a step's noise, in normalized action units",
    "max_std": "largest standard deviation of a step's noise, in normalized action units",
    "train_last": "the last steps, which are trained",
    "clip_action": "bound of the predicted action, in normalized units",
    "noise_clip": "bound of the drawn noise, in standard deviations",
    "episodes": "successful demonstrations to record",
    "iterations": "of reinforcement learning; 0: none",
    "steps": "updates of the fit; of a kernel: denoising steps",
    "batch_size": "samples per update",
    "learning_rate": "of AdamW",
    "weight_decay": "of AdamW",
    "betas": "of AdamW",
    "warmup": "updates in which the learning rate rises",
    "max_grad_norm": "gradients with a larger norm are scaled down to it",
    "motion_weight": "added weight of pixels that move",
    "gamma": "discount per control step",
    "gae_lambda": "of generalized advantage estimation (Schulman et al. 2016)",
    "huber_delta": "error of the value from which its loss is linear",
    "initial_value": "of every state, before training",
    "epochs": "passes over a batch",
    "reduction": "how the log-ratios of an action chunk are joined: sum or mean, over the chunk or per denoising step",
    "dual_clip": "bound of the ratio where the advantage is negative (Ye et al. 2020); null: none",
    "entropy_weight": "of the entropy bonus; refused where the policy's spread is fixed (`flow_sde`, `ddpm`, ...)",
    "normalize_advantage": "to mean 0 and standard deviation 1 in every minibatch",
    "min_success": "a group with a smaller share of successes teaches nothing",
    "max_success": "a group with a larger share of successes teaches nothing",
    "scale_by_std": "advantages are divided by their group's standard deviation",
    "rounds": "of recording, cloning successes, fitting and training in the world model",
    "min_success_auc": "area under the curve of predicted success",
    "max_hallucinated": "share of episodes whose success is only imagined",
    "max_delta_success": "difference between imagined and real success",
    "videos_per_task": "videos of the final evaluation",
    "checkpoint_every": "iterations between checkpoints",
}


def write_page() -> None:
    """Replace what is below the mark; the prose above is written by hand."""
    prose = PAGE.read_text(encoding="utf-8").partition(MARK)[0]
    PAGE.write_text(prose + reference(), encoding="utf-8")


def reference() -> str:
    """Every section: its variants, their settings with type, range, default and meaning."""
    parts = {
        "The run as a whole": Experiment,
        "Corrections: a file of `configs/corrections`": CorrectionsConfig,
        "Success classifiers: a file of `configs/rewards`": SuccessClassifierConfig,
        "Progress models: a file of `configs/rewards`": ProgressConfig,
        "Rewards from preferences: a file of `configs/rewards`": PreferenceConfig,
    }
    return (
        "\n\n".join([MARK, *(text for whole, cls in parts.items() for text in _sections(cls, "", whole, {}, None))])
        + "\n"
    )


def meaning(cls: type, name: str) -> str:
    """From the docstring, or an inherited one, or what the name means everywhere; "" where none says it."""
    for owner in cls.__mro__:
        if dataclasses.is_dataclass(owner) and (found := _described(owner, name)):
            return found
    return EVERYWHERE.get(name, "")


def _sections(cls: type, path: str, name: str | None, known: dict[type, str], made: Any) -> Iterator[str]:
    """The table of ``cls``, then those of the sections inside it; ``known``: where a class has its table already.

    ``name``: of the variant, or, where there is no path, of the whole. ``made``: the default of the section around it.
    """
    made = made if type(made) is cls else None
    if cls in known:
        if known[cls] != path:
            yield f"## `{path.removesuffix('.')}`"
            other = {} if made is None else settings_other_than_its_class(made)
            differing = ", ".join(f"`{key}` {_yaml(value)}" for key, value in other.items() if not is_dataclass(value))
            differing = f" Other defaults: {differing}." if differing else ""
            yield f"The settings of `{known[cls].removesuffix('.')}`, above.{differing}"
        return
    known[cls] = path
    rows, inside = [], []
    for field in dataclasses.fields(cls):
        annotation, own = hints(cls)[field.name], f"{path}{field.name}"
        members = variants(annotation)
        if members:
            section = default(field) if made is None else getattr(made, field.name)
            inside += [(member, own, kind if len(members) > 1 else None, section) for kind, member in members.items()]
        elif field.name != "name":
            cells = (f"`{field.name}`", allowed(annotation), _default(field, made), meaning(cls, field.name))
            rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    kind = f", name: {name}" if name else ""
    title = f"`{path.removesuffix('.')}`{kind}" if path else str(name)
    if rows:
        yield f"## {title}"
        yield "\n".join(["| Setting | Allowed | Default | Meaning |", "|---|---|---|---|", *rows])
    for member, own, chosen, section in inside:
        yield from _sections(member, f"{own}.", chosen, known, section)


def _described(cls: type, name: str) -> str:
    """The sentences from the one that begins with the setting up to the next setting; else those that name it."""
    text = " ".join(inspect.cleandoc(cls.__doc__ or "").split())
    paragraphs = re.split(r"(?<=\.)(?<!e\.g\.) (?=``\w+``)", text)
    own = [one for one in paragraphs if f"``{name}``" in re.match(r"(``\w+``(, | and )?)*", one)[0]]  # type: ignore[index]
    if own:
        return " ".join(own).replace("``", "`")
    sentences = re.split(r"(?<=\.)(?<!e\.g\.) ", text)
    return " ".join(sentence for sentence in sentences if f"``{name}``" in sentence).replace("``", "`")


def _default(field: dataclasses.Field[Any], made: Any) -> str:
    """Of the section ``made``, if there is one, else of the class."""
    if made is not None:
        return _yaml(getattr(made, field.name))
    required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    return "required" if required else _yaml(default(field))


def _yaml(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case str():
            return value or '""'
        case tuple():
            return f"[{', '.join(_yaml(item) for item in value)}]"
        case Mapping():
            return "{" + ", ".join(f"{key}: {_yaml(item)}" for key, item in value.items()) + "}"
    return str(value)


if __name__ == "__main__":
    write_page()
