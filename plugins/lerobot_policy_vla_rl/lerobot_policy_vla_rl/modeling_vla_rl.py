"""A bundle behind LeRobot's interface of policies. The bundle's normalizer and memory are the bundle's own."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import torch
from lerobot.configs.policies import PreTrainedConfig
from lerobot.policies.pretrained import PreTrainedPolicy
from lerobot.utils.constants import OBS_IMAGES, OBS_STATE
from torch import Tensor

from episodes.formats.images import fit_image
from lerobot_policy_vla_rl.arm_values import ArmValues
from lerobot_policy_vla_rl.configuration_vla_rl import VlaRlConfig
from policies.bundle import BundleError, load_bundle
from policies.device import make_generator, select_device
from policies.policy import Policy
from sims.tensor_dataclass import TensorDataclass
from sims.vector_env import Observation, encode_instructions


class VlaRlPolicy(PreTrainedPolicy):
    """Acts as ``vla-rl eval`` does: without exploration noise, ``n_action_steps`` of every chunk.

    Batches have ``observation.state`` [B, n], ``observation.images.CAMERA`` [B, 3, height, width] in [0, 1] of any size
    and ``task``. With a robot file B is 1.
    """

    config_class = VlaRlConfig
    name = "vla_rl"

    def __init__(self, config: VlaRlConfig, policy: Policy | None = None, **data_set: Any) -> None:
        """``data_set``: LeRobot's ``dataset_meta`` (for the order of joints and the rate) and ``dataset_stats``."""
        super().__init__(config)
        if policy is None:
            raise BundleError("bundles are trained by vla-rl; give LeRobot a trained one: --policy.path=BUNDLE")
        config.validate_features()
        self.policy = policy
        meta, hz = data_set.get("dataset_meta"), policy.spec.robot.control_hz
        if meta is not None and meta.fps != hz:
            raise BundleError(f"the bundle acts at {hz:g} Hz, LeRobot's data set has {meta.fps}; set --dataset.fps")
        self._arm = None
        if config.robot_file:
            self._arm = ArmValues(Path(config.robot_file), policy.spec, meta.features if meta is not None else None)
        horizon, remembers = policy.spec.action_horizon, policy.remembers_decisions
        executed = config.n_action_steps or (self._arm.execute_steps if self._arm and not remembers else 0)
        self._executed = min(executed or horizon, horizon)
        if remembers and self._executed != horizon:
            raise BundleError(
                f"the policy remembers its decisions, which were {horizon} control steps apart in its training: set "
                f"--policy.n_action_steps=0 or {horizon}, not {executed}"
            )
        self._delay = policy.spec.robot.action_delay  # so many actions come before a chunk, as in training
        self._generator = make_generator(policy.device, config.seed)
        self.reset()

    @classmethod
    def from_pretrained(
        cls, pretrained_name_or_path: str | Path, *, config: PreTrainedConfig | None = None, **data_set: Any
    ) -> VlaRlPolicy:
        """The bundle in this folder. BundleError, RobotError if it cannot be used."""
        path = Path(pretrained_name_or_path)
        config = config or PreTrainedConfig.from_pretrained(path)
        assert isinstance(config, VlaRlConfig) and config.device is not None  # PreTrainedConfig chooses a device
        return cls(config, load_bundle(path, device=select_device(config.device)), **data_set).eval()

    def reset(self) -> None:
        """An episode begins."""
        self._queue: deque[Tensor] = deque()
        self._memory: TensorDataclass | None = None
        if self._arm is not None:
            self._arm.begin_episode()

    @torch.no_grad()
    def select_action(self, batch: dict[str, Any], **kwargs: Any) -> Tensor:
        """The next action [B, n]."""
        if len(self._queue) <= self._delay:
            self._queue.extend(self._act(batch)[:, : self._executed].unbind(1))
        action = self._queue.popleft()
        if self._arm is None:
            return action
        return self._arm.action(action[0], batch[OBS_STATE][0])[None].to(action.device)

    @torch.no_grad()
    def predict_action_chunk(self, batch: dict[str, Any], **kwargs: Any) -> Tensor:
        """A whole chunk [B, H, n]."""
        actions = self._act(batch)
        if self._arm is None:
            return actions
        return self._arm.chunk(actions[0], batch[OBS_STATE][0])[None].to(actions.device)

    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, dict | None]:
        raise NotImplementedError("bundles are trained by vla-rl; LeRobot only executes them")

    def get_optim_params(self) -> dict:
        raise NotImplementedError("bundles are trained by vla-rl; LeRobot only executes them")

    def _act(self, batch: dict[str, Any]) -> Tensor:
        """[B, H, A], the policy's own actions."""
        obs = self._observation(batch)
        memory = self._memory if self._memory is not None else self.policy.initial_state(len(obs.state))
        context, self._memory = self.policy.encode(obs, memory)
        return self.policy.act(context, self._generator).float()

    def _observation(self, batch: dict[str, Any]) -> Observation:
        robot, state = self.policy.spec.robot, batch[OBS_STATE].float()
        if self._arm is not None:
            if len(state) != 1:
                raise ValueError(f"a batch of {len(state)} arms; with a robot file there is one")
            state = self._arm.state(state[0])[None]
        if state.shape[1] != robot.state_dim:
            raise ValueError(f"{OBS_STATE} has {state.shape[1]} values, the bundle's states have {robot.state_dim}")
        names = {camera: self._arm.cameras[camera] if self._arm else camera for camera in robot.cameras}
        images = [[fit_image(image, robot.image_size) for image in _pixels(batch, names[c])] for c in robot.cameras]
        task = batch.get("task", "")
        tasks = [task] * len(state) if isinstance(task, str) else list(task)
        empty = torch.zeros(len(state), 0, *robot.image_size, 3, dtype=torch.uint8)
        return Observation(
            images=torch.stack([torch.stack(rows) for rows in images], dim=1) if images else empty,
            state=state,
            instruction=encode_instructions(tasks),
        ).to(self.policy.device)


def _pixels(batch: dict[str, Any], camera: str) -> list[Any]:
    """B images [height, width, 3], uint8."""
    key = f"{OBS_IMAGES}.{camera}"
    if key not in batch:
        raise ValueError(f"the bundle needs {key}; there are {sorted(k for k in batch if k.startswith(OBS_IMAGES))}")
    scaled = (255.0 * batch[key]).round().clamp(0, 255).to(torch.uint8)
    return list(scaled.permute(0, 2, 3, 1).cpu().numpy())
