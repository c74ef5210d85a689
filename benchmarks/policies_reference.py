"""Published architectures beside their references, and a rollout's log-probs beside their recomputation.

    OMP_NUM_THREADS=1 python -m benchmarks.policies_reference

The figures that the tests of tests/policies/pretrained bound, in float32 on a CPU, with small random weights; seconds,
without downloads. Adds rows to benchmarks/results/policies.json:

* ``max difference to reference, NAME``: the largest absolute difference of an element of a sampled chunk, of OpenVLA of
  a logit of an action's bin, with the same weights, inputs and noise. Golden files hold what the references computed
  (make_goldens.py); transformers' pi0 is computed here.
* ``log-prob difference, NAME`` [nat]: the largest absolute difference of the log-prob of one element of a chunk in one
  denoising step (of OpenVLA: of one token), as sampled in a batch and as recomputed in a minibatch of it, with
  the prefix kept and encoded again; of pi0, pi0.5 and SmolVLA with each of four exploration kernels.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import version

import torch

from policies.policy import Policy
from tests.policies.pretrained import test_diffusion_policy as diffusion_policy
from tests.policies.pretrained import test_flow_policy as flow_policy
from tests.policies.pretrained import test_openvla as openvla
from tests.policies.pretrained import test_pi0 as pi0
from tests.policies.pretrained import test_smolvla as smolvla
from tests.policies.pretrained.log_probs import FROZEN, log_prob_difference
from tests.policies.pretrained.toy import DIFFUSION_POLICY, DIFFUSION_TRANSFORMER, FLOW_POLICIES, OPENVLA, OPENVLA_OFT
from vla_rl.bench.record import Row, add_to_record, row

LEROBOT = "LeRobot 0.6.1"
OPENVLA_PARTS = "timm 1.0's vision models, transformers 5.5.4's Llama, OpenVLA's projector"


def differences_to_references() -> list[Row]:
    live = max_of(pi0.difference_to_transformers(cameras) for cameras in pi0.CAMERAS)
    found = {
        "pi0": (pi0.difference_to_lerobot("pi0"), LEROBOT),
        "pi0, transformers": (live, f"transformers {version('transformers')}'s PI0, one to three cameras"),
        "pi05": (pi0.difference_to_lerobot("pi05"), LEROBOT),
        "smolvla": (smolvla.difference_to_lerobot(smolvla.loaded()), LEROBOT),
        "openvla": (openvla.difference_one_by_one(), f"{OPENVLA_PARTS}, one token after the other"),
        "openvla_oft": (openvla.difference_in_parallel(), f"{OPENVLA_PARTS}, all tokens at once"),
        "diffusion_policy": (diffusion_policy.difference_to_lerobot(), f"{LEROBOT}, the means of DDPM's steps"),
    }
    return [
        row(f"max difference to reference, {name}", value, "1", against=reference)
        for name, (value, reference) in found.items()
    ]


def log_prob_differences() -> list[Row]:
    policies: dict[str, list[Policy]] = {
        name: [flow_policy.exploring(name, kernel) for kernel in flow_policy.KERNELS] for name in FLOW_POLICIES
    }
    policies |= {
        "openvla": [openvla.exploring(OPENVLA)],
        "openvla_oft": [openvla.exploring(OPENVLA_OFT)],
        "diffusion_policy": [diffusion_policy.exploring(DIFFUSION_POLICY)],
        "diffusion_transformer": [diffusion_policy.exploring(DIFFUSION_TRANSFORMER)],
    }
    return [
        row(
            f"log-prob difference, {name}",
            max_of(log_prob_difference(policy, frozen) for policy in made for frozen in FROZEN.values()),
            "nat",
            against="its recomputation",
        )
        for name, made in policies.items()
    ]


def max_of(values: Iterable[float]) -> float:
    """NaN if one of them is."""
    return torch.tensor(list(values), dtype=torch.float64).max().item()


def main() -> None:
    torch.set_num_threads(1)
    rows = differences_to_references() + log_prob_differences()
    for one in rows:
        print(f"{one['name']:46} {one['value']:.1e} {one['unit']:4} {one['against']}")
    command = "OMP_NUM_THREADS=1 python -m benchmarks.policies_reference"
    print(add_to_record("policies", rows, command=command))


if __name__ == "__main__":
    main()
