"""What the reference implementations compute, as small files for the tests.

    python -m tests.policies.pretrained.make_goldens --lerobot FOLDER [NAME ...]

FOLDER holds the unpacked ``lerobot`` 0.6.1 wheel; run it in an environment with torch 2.13, transformers 5.5.4 and
LeRobot's dependencies (docs/pretrained.md). The weights are those of weights.py, so a file holds inputs, outputs and
the shapes of the reference's parameters.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from tests.policies.pretrained.weights import random_weights

FOLDER = Path(__file__).parents[2] / "data" / "pretrained"
VOCABULARY, SIDE, CHUNK = 512, 28, 10
PALIGEMMA = "paligemma_with_expert.paligemma."
TIED = {f"{PALIGEMMA}lm_head.weight": f"{PALIGEMMA}model.language_model.embed_tokens.weight"}
GEMMA = {"depth": 4, "mlp_dim": 128, "num_heads": 8, "num_kv_heads": 1, "head_dim": 16}


def save(name: str, model: Any, inputs: dict[str, torch.Tensor], outputs: dict[str, torch.Tensor]) -> None:
    arrays = {f"in_{key}": value.numpy() for key, value in inputs.items()}
    arrays |= {f"out_{key}": value.numpy() for key, value in outputs.items()}
    FOLDER.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(FOLDER / f"{name}.npz", shapes=np.array(json.dumps(shapes_of(model))), **arrays)
    print(name, {key: f"mean |.| {value.abs().mean():.3f}" for key, value in outputs.items()})


def shapes_of(model: Any) -> dict[str, list[int]]:
    return {key: list(value.shape) for key, value in model.state_dict().items() if key not in TIED}


def set_weights(model: Any, *, norms_around: float) -> None:
    own = model.state_dict()
    weights = random_weights(shapes_of(model), norms_around=norms_around)
    weights |= {tied: weights[name] for tied, name in TIED.items() if tied in own}
    model.load_state_dict(weights)


def observations(side: int, cameras: int, prompt: int) -> dict[str, torch.Tensor]:
    """Two observations; the first prompt is shorter and padded."""
    random = np.random.RandomState(0)
    valid = torch.ones(2, prompt, dtype=torch.bool)
    valid[0, prompt // 2 :] = False
    return {
        "images": torch.from_numpy(random.rand(2, cameras, 3, side, side) * 2 - 1).float(),
        "tokens": torch.from_numpy(random.randint(1, VOCABULARY - 12, (2, prompt))),
        "valid": valid,
        "state": torch.from_numpy(random.standard_normal((2, 32))).float(),
        "noise": torch.from_numpy(random.standard_normal((2, CHUNK, 32))).float(),
    }


# -- pi0 and pi0.5 --------------------------------------------------------------------------------------------------


def shrink_paligemma(*modules: Any) -> None:
    """LeRobot writes PaliGemma's sizes into its code."""
    import lerobot.policies.pi_gemma as pi_gemma

    original = pi_gemma.PaliGemmaForConditionalGenerationWithPiGemma.__init__

    def init(self: Any, config: Any) -> None:
        vision, text = config.vision_config, config.text_config
        vision.hidden_size, vision.intermediate_size, vision.num_hidden_layers = 32, 64, 2
        vision.num_attention_heads, vision.image_size, vision.patch_size = 2, SIDE, 14
        vision.projection_dim = config.projection_dim = text.hidden_size
        text.vocab_size, config.image_token_index, text.pad_token_id = VOCABULARY, VOCABULARY - 1, 0
        original(self, config)

    pi_gemma.PaliGemmaForConditionalGenerationWithPiGemma.__init__ = init

    class Small(dict[str, Any]):
        def __init__(self, real: Any) -> None:
            super().__init__()
            self.real = real

        def __getitem__(self, key: str) -> Any:
            cls = self.real[key]
            return cls if key == "paligemma" else lambda **kw: cls(**(kw | {"vocab_size": VOCABULARY}))

    for module in modules:
        module.get_gemma_config = lambda variant, m=module: m.GemmaConfig(
            width=128 if variant == "gemma_2b" else 64, **GEMMA
        )
        module.CONFIG_MAPPING = Small(module.CONFIG_MAPPING)


def make_pi0() -> None:
    import lerobot.policies.pi0.modeling_pi0 as pi0
    import lerobot.policies.pi05.modeling_pi05 as pi05
    from lerobot.policies.pi0.configuration_pi0 import PI0Config
    from lerobot.policies.pi05.configuration_pi05 import PI05Config

    shrink_paligemma(pi0, pi05)
    size = {"dtype": "float32", "device": "cpu", "image_resolution": (SIDE, SIDE), "chunk_size": CHUNK}
    size |= {"n_action_steps": CHUNK, "num_inference_steps": 10}
    inputs = observations(SIDE, 2, 12)
    images = [*inputs["images"].unbind(1), -torch.ones(2, 3, SIDE, SIDE)]
    exists = [torch.ones(2, dtype=torch.bool)] * 2 + [torch.zeros(2, dtype=torch.bool)]
    for name, model in (("pi0", pi0.PI0Pytorch(PI0Config(**size))), ("pi05", pi05.PI05Pytorch(PI05Config(**size)))):
        set_weights(model.eval(), norms_around=0.0)
        state = [inputs["state"]] if name == "pi0" else []
        sample = model.sample_actions(
            images, exists, inputs["tokens"], inputs["valid"], *state, noise=inputs["noise"].clone()
        )
        save(name, model, inputs, {"action": sample})


# -- SmolVLA --------------------------------------------------------------------------------------------------------


def make_smolvla() -> None:
    import lerobot.policies.smolvla.modeling_smolvla as smolvla
    import lerobot.policies.smolvla.smolvlm_with_expert as smolvlm
    from lerobot.policies.smolvla.configuration_smolvla import SmolVLAConfig
    from transformers import SmolVLMConfig

    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {"model_type": "llama", "hidden_size": 96, "intermediate_size": 128, "num_hidden_layers": 6}
    text |= {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": VOCABULARY}
    config = SmolVLMConfig(
        vision_config=vision | {"image_size": 64, "patch_size": 16},
        text_config=text | {"rms_norm_eps": 1e-5},
        scale_factor=2,
        image_token_id=VOCABULARY - 2,
    )
    tokenizer = SimpleNamespace(fake_image_token_id=VOCABULARY - 4, global_image_token_id=VOCABULARY - 3)
    smolvlm.AutoConfig = SimpleNamespace(from_pretrained=lambda *_, **__: config)
    smolvlm.AutoProcessor = SimpleNamespace(from_pretrained=lambda *_, **__: SimpleNamespace(tokenizer=tokenizer))
    settings = SmolVLAConfig(
        device="cpu", num_vlm_layers=4, chunk_size=CHUNK, n_action_steps=CHUNK, num_steps=10, load_vlm_weights=False
    )
    model = smolvla.VLAFlowMatching(settings).eval()
    set_weights(model, norms_around=1.0)
    inputs = observations(64, 2, 9)
    exists = [torch.ones(2, dtype=torch.bool)] * 2
    images = list(inputs["images"].unbind(1))
    arguments = (images, exists, inputs["tokens"], inputs["valid"], inputs["state"])
    save("smolvla", model, inputs, {"action": model.sample_actions(*arguments, noise=inputs["noise"].clone())})


# -- OpenVLA ----------------------------------------------------------------------------------------------------------


class OpenVLA(torch.nn.Module):
    """timm's vision models, transformers' Llama and OpenVLA's projector, under the names of its checkpoints."""

    def __init__(self) -> None:
        import timm
        from transformers import LlamaConfig, LlamaForCausalLM

        super().__init__()
        size = {"pretrained": False, "img_size": SIDE, "embed_dim": 32, "depth": 4, "num_heads": 2, "num_classes": 0}
        self.vision_backbone = torch.nn.Module()
        self.vision_backbone.featurizer = timm.create_model("vit_large_patch14_reg4_dinov2.lvd142m", **size)
        self.vision_backbone.fused_featurizer = timm.create_model("vit_so400m_patch14_siglip_224", **size)
        for block in self.vision_backbone.featurizer.blocks:
            for scale in (block.ls1, block.ls2):  # OpenVLA renames it
                scale.scale_factor = torch.nn.Parameter(scale.gamma.clone())
                scale.forward = lambda x, module=scale: x * module.scale_factor
                del scale.gamma
        self.projector = torch.nn.Module()
        for name, (inputs, outputs) in {"fc1": (64, 256), "fc2": (256, 64), "fc3": (64, 64)}.items():
            setattr(self.projector, name, torch.nn.Linear(inputs, outputs))
        llama = LlamaConfig(
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            vocab_size=VOCABULARY,
            rms_norm_eps=1e-6,
        )
        self.language_model = LlamaForCausalLM(llama)

    def embed(self, image: torch.Tensor, prompt: torch.Tensor) -> torch.Tensor:
        """image [3, side, side] in [0, 1]; prompt [n] begins with BOS."""
        seen = []
        colors = (((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)), ((0.5,) * 3, (0.5,) * 3))
        models = (self.vision_backbone.featurizer, self.vision_backbone.fused_featurizer)
        for model, (mean, std) in zip(models, colors, strict=True):
            x = (image - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]
            seen.append(model.get_intermediate_layers(x[None], n={len(model.blocks) - 2})[0])
        x = torch.nn.functional.gelu(self.projector.fc1(torch.cat(seen, dim=-1)))
        patches = self.projector.fc3(torch.nn.functional.gelu(self.projector.fc2(x)))
        tokens = self.language_model.model.embed_tokens(prompt[None])
        return torch.cat([tokens[:, :1], patches, tokens[:, 1:]], dim=1)

    def causal(self, embedded: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        """Logits of each element of ``action`` [n], given those before it."""
        follow = self.language_model.model.embed_tokens(action[None, :-1])
        return self.language_model(inputs_embeds=torch.cat([embedded, follow], dim=1)).logits[0, -len(action) :]

    def parallel(self, embedded: torch.Tensor, count: int) -> torch.Tensor:
        """Logits of ``count`` elements; every token sees every other."""
        stop = self.language_model.model.embed_tokens(torch.tensor([[2]]))
        whole = torch.cat([embedded, torch.zeros(1, count, 64), stop], dim=1)
        everything = torch.zeros(1, 1, whole.shape[1], whole.shape[1])
        logits = self.language_model(inputs_embeds=whole, attention_mask=everything).logits[0]
        return logits[embedded.shape[1] - 1 : embedded.shape[1] - 1 + count]


def make_openvla() -> None:
    """Prompts of different lengths one after the other, so nothing is padded."""
    model = OpenVLA().eval()
    set_weights(model, norms_around=1.0)
    inputs = observations(SIDE, 1, 12)
    inputs = {name: inputs[name] for name in ("images", "tokens", "valid")}
    inputs["images"] = (inputs["images"] + 1) / 2
    inputs["action"] = torch.from_numpy(np.random.RandomState(1).randint(VOCABULARY - 300, VOCABULARY - 44, (2, 7)))
    causal, parallel = [], []
    for i in range(2):
        embedded = model.embed(inputs["images"][i, 0], inputs["tokens"][i][inputs["valid"][i]])
        causal.append(model.causal(embedded, inputs["action"][i]))
        parallel.append(model.parallel(embedded, 14))
    save("openvla", model, inputs, {"causal": torch.stack(causal), "parallel": torch.stack(parallel)})


# -- Diffusion Policy -------------------------------------------------------------------------------------------------


def make_diffusion_policy() -> None:
    """The means of DDPM's steps, without their noise; two cameras, two observations."""
    import diffusers.schedulers.scheduling_ddpm as scheduling
    from lerobot.configs import FeatureType, PolicyFeature
    from lerobot.policies.diffusion.configuration_diffusion import DiffusionConfig
    from lerobot.policies.diffusion.modeling_diffusion import DiffusionPolicy

    image = PolicyFeature(FeatureType.VISUAL, (3, 64, 64))
    config = DiffusionConfig(
        input_features={
            "observation.images.a": image,
            "observation.images.b": image,
            "observation.state": PolicyFeature(FeatureType.STATE, (8,)),
        },
        output_features={"action": PolicyFeature(FeatureType.ACTION, (7,))},
        horizon=16,
        n_action_steps=8,
        down_dims=(32, 64),
        diffusion_step_embed_dim=32,
        crop_shape=(56, 56),
        crop_is_random=False,
        use_group_norm=True,
        pretrained_backbone_weights=None,
        spatial_softmax_num_keypoints=8,
        num_train_timesteps=20,
        noise_scheduler_type="DDPM",
        use_separate_rgb_encoder_per_camera=False,
        device="cpu",
    )
    scheduling.randn_tensor = lambda shape, **_: torch.zeros(shape)
    model = DiffusionPolicy(config).eval()
    set_weights(model, norms_around=1.0)
    model.diffusion.rgb_encoder.pool.pos_grid.copy_(type(model.diffusion.rgb_encoder.pool)((512, 2, 2), 8).pos_grid)
    random = np.random.RandomState(0)
    inputs = {
        "images": torch.from_numpy(random.randint(0, 256, (2, 2, 2, 64, 64, 3)).astype(np.uint8)),
        "state": torch.from_numpy(random.standard_normal((2, 2, 8))).float(),
        "noise": torch.from_numpy(random.standard_normal((2, 16, 7))).float(),
    }
    batch = {"observation.images": inputs["images"].movedim(-1, -3) / 255, "observation.state": inputs["state"]}
    batch["observation.images"] = (batch["observation.images"] - 0.5) / 0.5
    action = model.diffusion.generate_actions(batch, noise=inputs["noise"].clone())
    save("diffusion_policy", model, inputs, {"action": action})


MAKERS = {
    "pi0": make_pi0,
    "smolvla": make_smolvla,
    "openvla": make_openvla,
    "diffusion_policy": make_diffusion_policy,
}


def declare_torchvision_ops() -> None:
    """PyPI's torchvision is built for CUDA; beside torch for CPUs it imports once its operators are declared."""
    folder = Path(sys.prefix) / "lib/python3.11/site-packages/torchvision"
    names = re.findall(r'register_meta\("([a-z_0-9]+)"', (folder / "_meta_registrations.py").read_text())
    library = torch.library.Library("torchvision", "DEF")
    for name in sorted({*names, "nms", "qnms"}):
        library.define(f"{name}(Tensor a) -> Tensor")
    globals()["_library"] = library  # the declarations end with the object


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(MAKERS), choices=list(MAKERS))
    parser.add_argument("--lerobot", type=Path, required=True)
    arguments = parser.parse_args()
    sys.path.insert(0, str(arguments.lerobot))
    declare_torchvision_ops()
    with torch.no_grad():
        for name in arguments.names:
            MAKERS[name]()


if __name__ == "__main__":
    main()
