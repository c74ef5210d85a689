"""Settings of earlier versions, for the error message of an unknown key.

``RENAMED`` maps the end of an old setting's dotted path, or with a dot in front the whole path, to what the message
says. Where several entries match, the longest one applies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

ENCODER_SETTINGS = (
    *("image_patch", "image_widths", "image_depths", "queries", "query_heads", "text_width", "text_depth", "width"),
    *("forecast_steps", "forecast_dims"),
)
EXPERT_SETTINGS = ("depth", "heads", "mlp_ratio", "time_width", "action_patch")


def renamed_to(name: str) -> str:
    return f"renamed to '{name}'"


RENAMED: Mapping[str, str] = {
    ".audit_tolerance": renamed_to("algorithm.update.audit_tolerance"),
    "look_every": renamed_to("observe_every"),
    "normalise_advantage": renamed_to("normalize_advantage"),
    "train_encoder": "replaced by 'frozen'; train_encoder: false is now frozen: [encoder]",
    "policy.vla.action_horizon": renamed_to("policy.action_horizon"),
    **{f"policy.vla.{name}": renamed_to(f"policy.encoder.{name}") for name in ENCODER_SETTINGS},
    **{f"policy.vla.{name}": renamed_to(f"policy.expert.{name}") for name in EXPERT_SETTINGS},
    "sim.start_each_row": renamed_to("reset_each_env"),
    "sim.variation": renamed_to("randomization"),
    "sim.randomization.colour": renamed_to("color"),
    "imagination.self_imitation": renamed_to("clone_successes"),
    "imagination.trust": renamed_to("thresholds"),
    "imagination.thresholds.useless_auc": renamed_to("stop_below_auc"),
    "imagination.model.world": renamed_to("dynamics"),
    "imagination.model.dynamics.words": renamed_to("action_tokens"),
    "imagination.model.dynamics.autoencoder.fit": renamed_to("imagination.model.autoencoder_fit"),
    "imagination.model.dynamics.autoencoder.motion_weight": renamed_to(
        "imagination.model.autoencoder_fit.motion_weight"
    ),
    "imagination.model.device": "the whole run has one device; set 'device' at the top level",
    "policy.precision": "the whole run has one precision; set 'precision' at the top level",
    "policy.compile": "set 'compile' at the top level",
    "imagination.model.outcome": renamed_to("reward_model"),
    "imagination.model.reward_model.vla": renamed_to("encoder"),
    "imagination.model.imagined": renamed_to("imagined_env"),
    "imagination.model.imagined_env.verdict_every": renamed_to("reward_every"),
    "imagination.model.keyframes.beginnings": renamed_to("episode_starts"),
    **{f"imagination.model.{fit}.go_on": renamed_to("roll_in") for fit in ("fit", "distill")},
    **{f"imagination.model.{fit}.moved": renamed_to("motion_threshold") for fit in ("fit", "distill")},
}


def find_hint(keys: Sequence[str]) -> str | None:
    """What ``RENAMED`` says about the setting at this path, or None."""
    for path in ("." + ".".join(keys), *(".".join(keys[first:]) for first in range(len(keys)))):
        if (hint := RENAMED.get(path)) is not None:
            return hint
    return None
