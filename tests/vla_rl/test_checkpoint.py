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

from policies.device import restore_optimizer
from vla_rl.runs.checkpoint import (
    CheckpointError,
    latest_checkpoint,
    load_checkpoint,
    load_tree,
    save_checkpoint,
    save_tree,
)
from vla_rl.runs.parts import SavedTensor, TensorFiles, part_file, write_part

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


def learner(seed: int, *, fused: bool = False) -> dict[str, Any]:
    torch.manual_seed(seed)
    policy = torch.nn.Conv2d(4, 4, 3).to(memory_format=torch.channels_last)
    return {
        "policy": policy,
        "optimizer": torch.optim.AdamW(policy.parameters(), fused=fused),
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
        batch = torch.randn(8, 4, 5, 5, generator=parts["noise"])[parts["shuffle"].permutation(8)[:4]]
        parts["optimizer"].zero_grad()
        parts["policy"](batch).square().mean().backward()
        parts["optimizer"].step()


@pytest.mark.parametrize("fused", [False, True])
def test_n_plus_m_steps_equal_n_then_a_new_process_then_m(tmp_path: Path, fused: bool):
    whole = learner(0, fused=fused)
    train(whole, 5)
    path = save_checkpoint(tmp_path, 5, state(whole))
    train(whole, 5)
    resumed, saved = learner(1, fused=fused), load_tree(path)
    resumed["policy"].load_state_dict(saved["policy"])
    restore_optimizer(resumed["optimizer"], saved["optimizer"])
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


def test_checkpoints_of_a_million_updates_and_more_are_in_order(tmp_path: Path):
    for iteration in (999_800, 1_000_000, 1_000_200):
        latest = save_checkpoint(tmp_path, iteration, {"iteration": iteration}, keep=2)
        assert latest_checkpoint(tmp_path) == latest
    assert sorted(path.stem for path in tmp_path.iterdir()) == ["iteration_1000000", "iteration_1000200"]
    save_checkpoint(tmp_path, 999_800, {"iteration": 999_800}, keep=3)
    earlier = tmp_path / "iteration_1000000.safetensors"
    earlier.write_bytes(b"damaged")
    with pytest.raises(CheckpointError, match=r"Delete iteration_1000000\.safetensors to resume from iteration_999800"):
        load_tree(earlier)


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
    with pytest.raises(
        CheckpointError, match=r"Delete iteration_000002.safetensors to resume from iteration_000001"
    ) as caught:
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
import sys, torch; from pathlib import Path
from sims.errors import DiskFull; from tests.vla_rl.test_checkpoint import *
folder = Path(sys.argv[1])
save_checkpoint(folder, 1, {"weights": torch.ones(1000)})
for large in (torch.ones(1_000_000), Divided(torch.ones(1_000_000), 1)):
    try:
        save_checkpoint(folder, 2, {"weights": large})
    except DiskFull as error:
        print(error)
print(sorted(p.name for p in folder.iterdir()), load_tree(latest_checkpoint(folder))["weights"].sum().item())
"""


def test_a_full_disk_is_a_one_line_error_and_keeps_the_earlier_checkpoint(tmp_path: Path):
    """On a real file system of one megabyte, mounted where only the test process sees it; whole, then in parts."""
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
    message, of_parts, rest = done.stdout.splitlines()
    assert of_parts == message
    assert message == (
        f"{tmp_path}: disk full, no room for a checkpoint of 4.0 MB; earlier checkpoints are intact. "
        "Free some space, then resume"
    )
    assert rest == "['iteration_000001.safetensors'] 1000.0"


WRITER = """
import sys, torch; from pathlib import Path; from tests.vla_rl.test_checkpoint import *
for i in range(10**9):
    weights = torch.full((200_000,), float(i))
    state = Divided(weights, 3) if sys.argv[2] == "parts" else {"weights": weights}
    save_checkpoint(Path(sys.argv[1]), i, {"update": state})
    print(i, flush=True)
"""


@pytest.mark.parametrize("form", ["whole", "parts"])
def test_kill_9_at_any_moment_leaves_a_complete_checkpoint(tmp_path: Path, form: str):
    for attempt in range(3):
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path), form], stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            written = [int(process.stdout.readline()) for _ in range(3)]
            time.sleep(0.004 * attempt)
            os.kill(process.pid, signal.SIGKILL)
        latest = latest_checkpoint(tmp_path)
        assert latest is not None
        weights = load_tree(latest)["update"]["weights"]
        assert (weights == weights[0]).all()
        assert weights[0] >= written[-1]
        shutil.rmtree(tmp_path)
        tmp_path.mkdir()


class Divided:
    """A DividedState of one tensor, of which each of ``count`` processes has rows."""

    def __init__(self, tensor: torch.Tensor, count: int) -> None:
        self.tensor, self.count = tensor, count

    def check_finite(self, where: str) -> None:
        """It is."""

    def write(self, folder: Path) -> tuple[Any, list[str]]:
        files = tuple(part_file(folder, number) for number in range(self.count))
        parts = [*self.tensor.chunk(self.count), *[self.tensor[:0]] * self.count][: self.count]
        digests = [write_part(file, {"w": part.clone()}) for file, part in zip(files, parts, strict=True)]
        return {"weights": SavedTensor(name="w", shape=tuple(self.tensor.shape), files=files), "step": 3}, digests


@given(st.integers(1, 7), st.integers(1, 4), st.data())
@settings(max_examples=40, deadline=None)
def test_any_rows_of_a_divided_tensor_are_read(tmp_path_factory, rows: int, count: int, data: st.DataObject):
    expected = tensor(torch.float32, (rows, 2), rows)
    path = save_checkpoint(tmp_path_factory.mktemp("run"), 1, {"update": Divided(expected, count), "other": 1.5})
    assert identical(load_tree(path), {"update": {"weights": expected, "step": 3}, "other": 1.5})
    first = data.draw(st.integers(0, rows))
    last = data.draw(st.integers(first, rows))
    saved = load_checkpoint(path, unread=["update"])["update"]["weights"]
    with TensorFiles() as files:
        assert identical(files.read(saved, first, last).clone(), expected[first:last])


@pytest.mark.parametrize("damage", ["missing", "bit", "half", "another checkpoint's"])
def test_a_damaged_part_is_refused_and_the_earlier_checkpoint_suggested(tmp_path: Path, damage: str):
    earlier, path = (save_checkpoint(tmp_path, i, {"update": Divided(torch.full((8, 8), i), 2)}) for i in (1, 2))
    part, other = (part_file(next(tmp_path.glob(f"{one.name}.*.parts")), 1) for one in (path, earlier))
    data = part.read_bytes()
    part.write_bytes(
        {
            "missing": b"",
            "bit": data[:-7] + bytes([data[-7] ^ 1]) + data[-6:],
            "half": data[: len(data) // 2],
            "another checkpoint's": other.read_bytes(),
        }[damage]
    )
    if damage == "missing":
        part.unlink()
    with pytest.raises(CheckpointError, match=r"part_1.*Delete iteration_000002.safetensors to resume from iter\S+1\."):
        load_checkpoint(path)
    path.unlink()
    latest = latest_checkpoint(tmp_path)
    assert latest == earlier
    assert (load_checkpoint(latest)["update"]["weights"] == 1).all()


def test_parts_without_their_checkpoint_are_never_resumed_and_deleted_by_the_next(tmp_path: Path):
    save_checkpoint(tmp_path, 1, {"update": Divided(torch.ones(4, 2), 2)})
    torn = tmp_path / "iteration_000002.safetensors.0a1b2c3d.parts"
    torn.mkdir()
    write_part(part_file(torn, 0), {"w": torch.ones(2, 2)})
    latest = latest_checkpoint(tmp_path)
    assert latest is not None and latest.name == "iteration_000001.safetensors"
    save_checkpoint(tmp_path, 1, {"update": Divided(torch.zeros(4, 2), 2)})  # that iteration again, after SIGTERM
    assert not torn.exists()
    assert len(list(tmp_path.glob("*.parts"))) == 1
    assert (load_tree(latest)["update"]["weights"] == 0).all()
    for iteration in (2, 3, 4):
        save_checkpoint(tmp_path, iteration, {"update": Divided(torch.ones(4, 2), 2)}, keep=2)
    assert sorted({one.name.split(".")[0] for one in tmp_path.iterdir()}) == ["iteration_000003", "iteration_000004"]
    assert len(list(tmp_path.iterdir())) == 4
