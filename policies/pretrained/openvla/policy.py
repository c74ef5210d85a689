"""OpenVLA and OpenVLA-OFT as policies (Kim et al. 2024, arXiv:2406.09246; 2025, arXiv:2502.19645)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.distributions import Categorical

from episodes.sampler import Targets
from policies.normalizer import STATE_RANGE
from policies.policy import ActionSample, PolicySpec, RobotSpec, keep_committed, masked_mean
from policies.pretrained.context import PrefixCache
from policies.pretrained.images import resize_bicubic
from policies.pretrained.kept_prefix import KeptPrefix, cached_numbers, numbers_bytes
from policies.pretrained.lora import add_lora, lora_parameters
from policies.pretrained.openvla.config import BINS, OpenVLAConfig
from policies.pretrained.openvla.layout import layout_of
from policies.pretrained.openvla.network import OpenVLANetwork
from policies.pretrained.tokenizer import PromptTokenizer, read_prompts
from sims.errors import UserError
from sims.tensor_dataclass import TensorDataclass
from sims.vector_env import Observation

EMPTY = 29_871  # Llama's token of a lone space, which OpenVLA puts behind "Out:"


@dataclass(frozen=True, kw_only=True)
class TokenContext(TensorDataclass):
    """``hidden``: the outputs that predict the chunk's elements; autoregressive: that of the first, and ``cache``."""

    hidden: Float[Tensor, "*B n width"]
    cache: PrefixCache | None
    state: Float[Tensor, "*B state_dim"]
    obs: Observation | None


@dataclass(frozen=True, kw_only=True)
class TokenTrace(TensorDataclass):
    """The drawn bin of every action element, 0 the lowest."""

    bins: Int[Tensor, "*B H A"]


class OpenVLAPolicy(KeptPrefix[TokenContext, TokenTrace]):
    config: OpenVLAConfig
    network: OpenVLANetwork

    def __init__(self, config: OpenVLAConfig, robot: RobotSpec) -> None:
        super().__init__()
        config.convention.check_robot(robot)
        self.config = config
        self.spec = PolicySpec(
            robot=robot, action_horizon=config.action_horizon, value_dim=config.language.width + robot.state_dim
        )
        self.network = OpenVLANetwork(config, action_dim=robot.action_dim, state_dim=robot.state_dim)
        add_lora((self.network.vision_backbone, self.network.projector, self.network.language), config.lora)
        self.tokenizer = PromptTokenizer(needs_bos=True, vocabulary=config.vocabulary)
        self.normalizer = config.convention.normalizer(robot)
        self.layout = layout_of(config)
        if config.proprio:
            self.state_quantiles = STATE_RANGE  # before the network reads it, it is cut off at -1 and 1 (``encode``)

    def parameter_groups(self) -> Mapping[str, Sequence[nn.Parameter]]:
        added = lora_parameters(self.network)
        known = {id(parameter) for parameter in (*self._head(), *added)}
        encoder = [parameter for parameter in self.network.parameters() if id(parameter) not in known]
        return {"head": self._head(), "encoder": encoder} | ({"lora": added} if added else {})

    def _head(self) -> list[nn.Parameter]:
        modules = (self.network.lm_head, self.network.l1_head)
        return [parameter for module in modules if module is not None for parameter in module.parameters()]

    # -- the prefix ------------------------------------------------------------------------------------------------

    def encode(self, obs: Observation, state: TensorDataclass) -> tuple[TokenContext, TensorDataclass]:
        seen = self.config.convention.observe(obs, self.spec.robot.cameras)
        tokens, valid = read_prompts(obs, self._prompts, self.config.prompt_tokens, self.device)
        clipped = self.normalizer.normalize_state(obs.state).clamp(-1, 1)  # openvla-oft, normalize_proprio
        with self.autocast():
            cache, hidden = self._prefix(self._images(seen), tokens, valid, clipped)
        return TokenContext(hidden=hidden, cache=cache, state=obs.state, obs=obs), state

    def _prefix(
        self, images: Tensor, tokens: Tensor, valid: Tensor, state: Tensor
    ) -> tuple[PrefixCache | None, Tensor]:
        embedded = self.network.embed(images, tokens, state)
        extra = embedded.shape[1] - tokens.shape[1]
        valid = torch.cat([valid[:, :1], valid.new_ones(len(valid), extra), valid[:, 1:]], dim=1)
        if self.config.decoding == "parallel":
            return None, self.network.decode_parallel(embedded, valid)
        cache, hidden = self.network.prefill(embedded, valid)
        return cache.padded(self.config.prompt_tokens - tokens.shape[1]), hidden

    @property
    def record_bytes(self) -> int:
        """Outputs that predict the chunk's elements; autoregressive: that of the first, and keys and values."""
        config, robot = self.config, self.spec.robot
        if config.decoding == "parallel":
            numbers = config.action_horizon * robot.action_dim * config.language.width
        else:
            cameras = len(config.convention.cameras or robot.cameras)
            patches = (config.dino.image_size // config.dino.patch_size) ** 2
            tokens = cameras * patches + config.prompt_tokens + config.proprio
            numbers = config.language.width + cached_numbers(config.language, tokens)
        return numbers_bytes(numbers, self.computes_in)

    def value_features(self, context: TokenContext) -> Float[Tensor, "B value_dim"]:
        """The output at the prompt's last token, as RLinf's critic has it, and the robot's state."""
        state = self.normalizer.normalize_state(context.state)
        return torch.cat([context.hidden[:, 0].float().detach(), state], dim=1)

    def _prompts(self, texts: list[str]) -> list[list[int]]:
        bos, empty = [self.tokenizer.bos], [EMPTY] if self.config.vocabulary > EMPTY else []
        return [
            bos + self.tokenizer.ids(f"In: What action should the robot take to {text.lower()}?\nOut:") + empty
            for text in texts
        ]

    def _images(self, obs: Observation) -> Float[Tensor, "B cameras 3 side side"]:
        images = resize_bicubic(obs.images.flatten(0, 1), self.config.dino.image_size)
        return images.unflatten(0, obs.images.shape[:2])

    # -- acting ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def sample(self, context: TokenContext, generator: torch.Generator) -> ActionSample:
        """Raises UserError with an l1 head, which has no density."""

        def draw(logits: Tensor) -> Tensor:
            probability = (logits / self.config.temperature).softmax(-1)
            return torch.multinomial(probability.flatten(0, 1), 1, generator=generator).view(logits.shape[:2])

        self._require_tokens()
        trace = TokenTrace(bins=self._decode(context, draw))
        action = self._to_action(self._centers(trace.bins), context.state)
        return ActionSample(action=action, trace=trace, log_prob=self.log_prob(context, trace))

    def act_from_noise(
        self,
        context: TokenContext,
        noise: Float[Tensor, "B H A"],
        committed: Float[Tensor, "B H A"] | None = None,
        known: Bool[Tensor, " H"] | None = None,
    ) -> Float[Tensor, "B H A"]:
        if self.network.l1_head is not None:
            normalized = self.network.l1_head(self._chunk(context.hidden.float()))
        else:
            normalized = self._centers(self._decode(context, lambda logits: logits.argmax(-1)))
        return keep_committed(self._to_action(normalized, context.state), committed, known)

    def _decode(self, context: TokenContext, choose: Callable[[Tensor], Tensor]) -> Int[Tensor, "B H A"]:
        if context.cache is None:
            return self._chunk(choose(self.network.action_logits(context.hidden)))
        bins = choose(self.network.action_logits(context.hidden))
        for _ in range(1, self.spec.robot.action_dim):
            with self.autocast():
                hidden = self.network.decode(context.cache, context.hidden, self._tokens(bins))
            bins = torch.cat([bins, choose(self.network.action_logits(hidden[:, -1:]))], dim=1)
        return self._chunk(bins)

    # -- learning ------------------------------------------------------------------------------------------------------

    @property
    def log_prob_steps(self) -> int:
        return 1 if self.network.l1_head is None else 0

    def log_prob(self, context: TokenContext, trace: TokenTrace) -> Float[Tensor, "B 1 H A"]:
        return self._distribution(context, trace.bins).log_prob(trace.bins).unsqueeze(1)

    def entropy(self, context: TokenContext, trace: TokenTrace) -> Float[Tensor, "B 1 H A"]:
        return self._distribution(context, trace.bins).entropy().unsqueeze(1)

    def bc_loss(self, context: TokenContext, targets: Targets, generator: torch.Generator) -> Float[Tensor, ""]:
        """Cross-entropy of the actions' tokens, or the mean absolute error of an l1 head; over valid actions."""
        action = self.normalizer.normalize_action(self.config.convention.from_robot(targets.action, context.state))
        if self.network.l1_head is not None:
            error = (self.network.l1_head(self._chunk(context.hidden.float())) - action).abs()
        else:
            bins = bins_of(action)
            error = F.cross_entropy(self._logits(context, bins).movedim(-1, 1), bins, reduction="none")
        return masked_mean(error, targets.mask)

    def _distribution(self, context: TokenContext, bins: Int[Tensor, "B H A"]) -> Categorical:
        self._require_tokens()
        return Categorical(logits=self._logits(context, bins) / self.config.temperature, validate_args=False)

    def _logits(self, context: TokenContext, bins: Int[Tensor, "B H A"]) -> Float[Tensor, "B H A bins"]:
        """Of each element, given those before it where they are decoded one by one."""
        hidden = context.hidden
        if context.cache is not None:
            with self.autocast():
                hidden = self.network.decode(context.cache, hidden, self._tokens(bins.flatten(1)[:, :-1]))
        return self._chunk(self.network.action_logits(hidden))

    def _chunk(self, flat: Tensor) -> Tensor:
        """[B, H * A, ...] -> [B, H, A, ...]."""
        return flat.unflatten(1, (self.config.action_horizon, -1))

    def _tokens(self, bins: Int[Tensor, "B n"]) -> Int[Tensor, "B n"]:
        return self.config.action_vocabulary - 1 - bins

    def _centers(self, bins: Int[Tensor, "B H A"]) -> Float[Tensor, "B H A"]:
        return bin_centers(bins.device)[bins]

    def _to_action(self, normalized: Tensor, state: Tensor) -> Float[Tensor, "B H A"]:
        return self.config.convention.to_robot(self.normalizer.unnormalize_action(normalized), state)

    def _require_tokens(self) -> None:
        if self.network.lm_head is None:
            raise UserError(
                "policy.head l1 has no density, which reinforcement learning needs: use head tokens; "
                "an l1 head can be cloned, evaluated and served"
            )


def bins_of(action: Float[Tensor, "*B"]) -> Int[Tensor, "*B"]:
    """Normalized actions in 256 bins, 0 the lowest: ``digitize(clip(x, -1, 1), linspace(-1, 1, 256)) - 1``."""
    return torch.bucketize(action.double().clamp(-1, 1), _edges(action.device), right=True) - 1


def bin_centers(device: torch.device) -> Float[Tensor, " bins"]:
    """256 values; there are 255 centers between the edges, and the last bin, which only 1 falls into, has the last."""
    edges = _edges(device)
    centers = (edges[:-1] + edges[1:]) / 2
    return torch.cat([centers, centers[-1:]]).float()


def _edges(device: torch.device) -> Float[Tensor, " bins"]:
    """As numpy's ``linspace`` computes them, which torch's differs from in the last bit."""
    edges = torch.arange(BINS, dtype=torch.float64, device=device) * (2 / (BINS - 1)) - 1
    edges[-1:].fill_(1)  # an assigned number would be copied from the host
    return edges
