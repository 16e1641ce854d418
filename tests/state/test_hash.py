"""The weights hash: equal exactly when names, dtypes, shapes and bits are; and files are read, never run."""

from __future__ import annotations

import hashlib
import os
import pickle
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from paceline.errors import UsageError
from paceline.state.hash import load_state, weights_sha256


def state(**tensors: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"w": torch.arange(6.0).view(2, 3), "b": torch.zeros(2), **tensors}


BASE = weights_sha256(state())


def test_the_hash_is_known() -> None:
    """A change of the recipe would make every hash ever written down worthless."""
    by_hand = hashlib.sha256(b"b\0torch.int16\0[]\0\x02\x01" + b"w\0torch.float32\0[2, 1]\0" + bytes(8))
    weights = {"w": torch.zeros(2, 1), "b": torch.tensor(0x0102, dtype=torch.int16)}
    assert weights_sha256(weights) == by_hand.hexdigest()


def test_order_device_strides_and_gradients_do_not_matter() -> None:
    assert weights_sha256(dict(reversed(state().items()))) == BASE
    assert weights_sha256(state(w=torch.arange(6.0).view(2, 3).t().contiguous().t())) == BASE
    assert weights_sha256(state(w=torch.arange(6.0).view(2, 3).requires_grad_())) == BASE
    assert weights_sha256(state(w=torch.arange(-1.0, 8.0)[1:7].view(2, 3))) == BASE


@pytest.mark.parametrize(
    "other",
    [
        {"w": torch.arange(6.0).view(3, 2)},
        {"w": torch.arange(6.0).view(6)},
        {"w": torch.arange(6.0).view(1, 2, 3)},
        {"w": torch.arange(6.0).view(2, 3).double()},
        {"w": torch.arange(6).view(2, 3)},
        {"w": torch.arange(6.0).view(2, 3).nextafter(torch.tensor(9.0))},
        {"b": torch.tensor([0.0, -0.0])},
        {"extra": torch.empty(0)},
    ],
    ids=["shape", "flat", "leading 1", "double", "int", "one bit", "-0.0", "one more"],
)
def test_shape_dtype_bits_and_company_matter(other: dict[str, torch.Tensor]) -> None:
    assert weights_sha256(state(**other)) != BASE


def test_names_matter() -> None:
    renamed = {"v" if name == "w" else name: tensor for name, tensor in state().items()}
    swapped = {"w": state()["b"], "b": state()["w"]}
    assert len({BASE, weights_sha256(renamed), weights_sha256(swapped)}) == 3


def test_halves_of_the_same_bits_differ() -> None:
    raw = torch.tensor([16256], dtype=torch.int16)
    hashes = {weights_sha256({"w": raw.view(dtype)}) for dtype in (torch.int16, torch.float16, torch.bfloat16)}
    assert len(hashes) == 3


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.bfloat16, torch.complex64, torch.float64])
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (5,)])
def test_every_kind_of_tensor_has_a_hash(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    one = weights_sha256({"w": torch.ones(shape, dtype=dtype)})
    assert one == weights_sha256({"w": torch.ones(shape, dtype=dtype)})
    if torch.ones(shape).numel():
        assert one != weights_sha256({"w": torch.zeros(shape, dtype=dtype)})


# files


def test_safetensors_and_torch_files_of_the_same_weights_hash_alike(tmp_path: Path) -> None:
    weights = state(h=torch.randn(4).bfloat16(), n=torch.tensor(3))
    save_file(weights, tmp_path / "model.safetensors")
    torch.save(weights, tmp_path / "model.pt")
    want = weights_sha256(weights)
    assert weights_sha256(load_state(tmp_path / "model.safetensors")) == want
    assert weights_sha256(load_state(tmp_path / "model.pt")) == want


@pytest.mark.parametrize("key", ["state_dict", "model", "weights"])
def test_a_state_dict_is_found_inside_a_checkpoint(tmp_path: Path, key: str) -> None:
    torch.save({key: state(), "epoch": 3, "optimizer": {"lr": 0.1}}, tmp_path / "last.ckpt")
    assert weights_sha256(load_state(tmp_path / "last.ckpt")) == BASE
    torch.save({"state_dict": {"model": state()}}, tmp_path / "deep.pt")
    assert weights_sha256(load_state(tmp_path / "deep.pt")) == BASE


def test_a_tensor_beside_the_state_dict_does_not_hide_it(tmp_path: Path) -> None:
    """Two different models that happen to have the same best accuracy must not hash alike."""
    torch.save({"model": state(), "best_accuracy": torch.tensor(0.9)}, tmp_path / "best.pt")
    loaded = load_state(tmp_path / "best.pt")
    assert {"w", "b"} <= set(loaded)


class Malicious:
    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.proof),)


@pytest.mark.parametrize("wrap", [lambda it: it, lambda it: {"model": state(), "extra": it}], ids=["bare", "hidden"])
@pytest.mark.parametrize("zipped", [True, False])
def test_code_in_a_file_is_refused_not_run(tmp_path: Path, wrap: Any, zipped: bool) -> None:
    proof = tmp_path / "it ran"
    path = tmp_path / "model.pt"
    torch.save(wrap(Malicious(proof)), path, _use_new_zipfile_serialization=zipped)
    with pytest.raises(UsageError, match="is not a file of plain tensors"):
        load_state(path)
    assert not proof.exists()
    with open(path, "rb") as file:
        torch.load(file, weights_only=False)
    assert proof.exists(), "else this test could not fail"


def test_a_plain_pickle_is_refused_not_run(tmp_path: Path) -> None:
    path = tmp_path / "model.pkl"
    path.write_bytes(pickle.dumps(Malicious(tmp_path / "it ran")))
    with pytest.raises(UsageError):
        load_state(path)
    assert not (tmp_path / "it ran").exists()


def test_a_file_that_is_not_there_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such file"):
        load_state(tmp_path / "nothing.pt")
    with pytest.raises(UsageError, match="no such file"):
        load_state(tmp_path)


@pytest.mark.parametrize("value", [{"epoch": 3}, [torch.zeros(1)], torch.zeros(2), {}, 5])
def test_a_file_without_weights_is_a_usage_error(tmp_path: Path, value: Any) -> None:
    torch.save(value, tmp_path / "other.pt")
    with pytest.raises(UsageError, match="holds no state dict"):
        load_state(tmp_path / "other.pt")


@given(st.binary(max_size=80))
def test_a_torch_file_of_garbage_is_a_usage_error(raw: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.pt")
        path.write_bytes(raw)
        with pytest.raises(UsageError):
            load_state(path)


@pytest.mark.parametrize("raw", [b"", b"garbage", b"\xff" * 100, b"\x08\0\0\0\0\0\0\0{notjson"], ids=range(4))
def test_a_safetensors_file_of_garbage_is_a_usage_error(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(raw)
    with pytest.raises(UsageError):
        load_state(path)


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_a_file_cut_short_is_a_usage_error(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"model.{suffix}"
    save_file(state(), path) if suffix == "safetensors" else torch.save(state(), path)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(UsageError):
        load_state(path)


@pytest.mark.timeout(3)
def test_a_checkpoint_inside_itself_does_not_hang(tmp_path: Path) -> None:
    loop: dict[str, Any] = {}
    loop["model"] = loop
    torch.save(loop, tmp_path / "loop.pt")
    with pytest.raises(UsageError):
        load_state(tmp_path / "loop.pt")
