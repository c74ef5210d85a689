from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from vla_rl.runs.checkpoint import CheckpointError, latest_checkpoint, load_tree, save_checkpoint, save_tree

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool]


def identical(a: Any, b: Any) -> bool:
    """Same types, same structure, same order of keys, same bits."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(identical(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(identical, a, b))
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and raw(a) == raw(b)
    if isinstance(a, (np.ndarray, np.generic)):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    return repr(a) == repr(b)


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (values * 3).to(dtype)


shapes = st.lists(st.integers(0, 3), max_size=3).map(tuple)
arrays = hnp.arrays(
    st.sampled_from(["f4", "f8", "f2", "i8", "i2", "u2", "u4", "u8", "?", "c8"]),
    hnp.array_shapes(min_dims=0, max_side=3),
)
scalars = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=True) | st.text(max_size=5) | st.binary(max_size=5)
)
numpy_scalars = st.floats(width=32).map(np.float32) | st.integers(0, 200).map(np.uint8) | st.booleans().map(np.bool_)
keys = st.integers() | st.text(max_size=4)
trees = st.recursive(
    scalars | numpy_scalars | arrays | st.builds(tensor, st.sampled_from(DTYPES), shapes, st.integers(0, 99)),
    lambda node: (
        st.lists(node, max_size=3) | st.lists(node, max_size=3).map(tuple) | st.dictionaries(keys, node, max_size=3)
    ),
    max_leaves=12,
)


@given(trees)
@settings(max_examples=150, deadline=None)
def test_any_tree_comes_back_bit_for_bit(tmp_path_factory, tree: Any):
    path = tmp_path_factory.getbasetemp() / "tree.safetensors"
    save_tree(path, tree)
    assert identical(load_tree(path), tree)


def learner(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    policy = torch.nn.Linear(4, 4)
    return {
        "policy": policy,
        "optimizer": torch.optim.AdamW(policy.parameters()),
        "noise": torch.Generator().manual_seed(seed),
        "shuffle": np.random.default_rng(seed),
    }


def state(parts: dict[str, Any]) -> dict[str, Any]:
    return {
        "policy": parts["policy"].state_dict(),
        "optimizer": parts["optimizer"].state_dict(),
        "noise": parts["noise"].get_state(),
        "shuffle": parts["shuffle"].bit_generator.state,
    }


def train(parts: dict[str, Any], steps: int) -> None:
    for _ in range(steps):
        batch = torch.randn(8, 4, generator=parts["noise"])[parts["shuffle"].permutation(8)[:4]]
        parts["optimizer"].zero_grad()
        parts["policy"](batch).square().mean().backward()
        parts["optimizer"].step()


def test_n_plus_m_steps_equal_n_then_a_new_process_then_m(tmp_path: Path):
    whole = learner(0)
    train(whole, 5)
    path = save_checkpoint(tmp_path, 5, state(whole))
    train(whole, 5)
    resumed, saved = learner(1), load_tree(path)
    resumed["policy"].load_state_dict(saved["policy"])
    resumed["optimizer"].load_state_dict(saved["optimizer"])
    resumed["noise"].set_state(saved["noise"])
    resumed["shuffle"].bit_generator.state = saved["shuffle"]
    train(resumed, 5)
    assert identical(dict(state(resumed)["policy"]), dict(state(whole)["policy"]))
    assert identical(state(resumed)["optimizer"], state(whole)["optimizer"])


def test_only_the_last_checkpoints_are_kept(tmp_path: Path):
    assert latest_checkpoint(tmp_path) is None
    for iteration in range(5):
        save_checkpoint(tmp_path, iteration, {"iteration": iteration}, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "iteration_000003.safetensors",
        "iteration_000004.safetensors",
    ]
    assert load_tree(latest_checkpoint(tmp_path)) == {"iteration": 4}


def test_what_killed_writers_left_is_deleted_by_the_next_checkpoint(tmp_path: Path):
    (tmp_path / "iteration_000001.safetensors.tmp").write_bytes(b"half a checkpoint")
    save_checkpoint(tmp_path, 2, {"iteration": 2})
    assert [path.name for path in tmp_path.iterdir()] == ["iteration_000002.safetensors"]


@pytest.mark.parametrize("damage", ["half", "header", "empty", "bit", "tree"])
def test_a_damaged_file_is_refused_and_the_earlier_one_suggested(tmp_path: Path, damage: str):
    save_checkpoint(tmp_path, 1, {"weights": torch.ones(100)})
    path = save_checkpoint(tmp_path, 2, {"weights": torch.ones(100), "note": "careful"})
    data = path.read_bytes()
    flipped = data[:-7] + bytes([data[-7] ^ 1]) + data[-6:]
    path.write_bytes(
        {
            "half": data[: len(data) // 2],
            "header": data[:20],
            "empty": b"",
            "bit": flipped,
            "tree": data.replace(b"careful", b"carefux"),
        }[damage]
    )
    with pytest.raises(CheckpointError, match="Delete it to resume from iteration_000001") as caught:
        load_tree(path)
    assert "\n" not in str(caught.value)


def test_other_safetensors_files_are_refused(tmp_path: Path):
    from safetensors.torch import save_file

    save_file({"a": torch.ones(1)}, tmp_path / "weights.safetensors")
    with pytest.raises(CheckpointError, match="not a training state"):
        load_tree(tmp_path / "weights.safetensors")
    with pytest.raises(CheckpointError, match="no such checkpoint"):
        load_tree(tmp_path / "nothing.safetensors")


@pytest.mark.parametrize("value", [object(), {1.5: 0}, {"a": [{3}]}, np.array(["text"]), lambda: 0])
def test_an_unsupported_type_is_refused_with_its_path(tmp_path: Path, value: Any):
    with pytest.raises(TypeError, match="at 'here"):
        save_tree(tmp_path / "a.safetensors", {"here": value})
    assert list(tmp_path.iterdir()) == []


FULL_DISK = """
import sys, torch; from pathlib import Path; from vla_rl.runs.checkpoint import *
folder = Path(sys.argv[1])
save_checkpoint(folder, 1, {"weights": torch.ones(1000)})
try:
    save_checkpoint(folder, 2, {"weights": torch.ones(1_000_000)})
except DiskFull as error:
    print(error)
print(sorted(p.name for p in folder.iterdir()), load_tree(latest_checkpoint(folder))["weights"].sum().item())
"""


def test_a_full_disk_is_a_one_line_error_and_keeps_the_earlier_checkpoint(tmp_path: Path):
    """On a real file system of one megabyte, mounted where only the test process sees it."""
    mount = f"mount -t tmpfs -o size=1m none {tmp_path} && "
    enter = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--user", "--map-root-user"]), "sh", "-c"]
    if shutil.which("unshare") is None or subprocess.run([*enter, mount + "true"], capture_output=True).returncode:
        pytest.skip("this machine does not let the test mount a small file system")
    done = subprocess.run(
        [*enter, mount + 'exec "$0" -c "$1" "$2"', sys.executable, FULL_DISK, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
    )
    message, rest = done.stdout.splitlines()
    assert message == (
        f"{tmp_path}: disk full, no room for a checkpoint of 4.0 MB; earlier checkpoints are intact. "
        "Free some space, then resume"
    )
    assert rest == "['iteration_000001.safetensors'] 1000.0"


WRITER = """
import sys, torch; from pathlib import Path; from vla_rl.runs.checkpoint import save_checkpoint
for i in range(10**9):
    save_checkpoint(Path(sys.argv[1]), i, {"weights": torch.full((200_000,), float(i))})
    print(i, flush=True)
"""


def test_kill_9_at_any_moment_leaves_a_complete_checkpoint(tmp_path: Path):
    for attempt in range(3):
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            written = [int(process.stdout.readline()) for _ in range(3)]
            time.sleep(0.004 * attempt)
            os.kill(process.pid, signal.SIGKILL)
        latest = latest_checkpoint(tmp_path)
        assert latest is not None
        weights = load_tree(latest)["weights"]
        assert (weights == weights[0]).all()
        assert weights[0] >= written[-1]
        shutil.rmtree(tmp_path)
        tmp_path.mkdir()
