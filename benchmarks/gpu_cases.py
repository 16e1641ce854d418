"""What the GPU benchmark trains: the cases, their models and their data."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from benchmarks.models import images, lenet

CASES = ("lenet-tensors", "lenet-rows", "lenet-items", "gpt")


@dataclass(frozen=True)
class Shape:
    """A GPT's size; the default is GPT-2 small, 124 M parameters."""

    layers: int = 12
    width: int = 768
    heads: int = 12
    vocabulary: int = 50304
    block: int = 1024


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.heads = shape.heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width)
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, block, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, block, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(batch, block, width))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.places = nn.Embedding(shape.block, shape.width)
        self.layers = nn.Sequential(*(Layer(shape) for _ in range(shape.layers)))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
        self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)
        return self.head(self.norm(self.layers(self.tokens(ids) + self.places(places))))


class Rows(Dataset):
    """Tensors that give a whole batch in one call: the same fetch through anybody's DataLoader."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        self.tensors = tensors

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, index: int) -> Any:
        return [tensor[index] for tensor in self.tensors]

    def __getitems__(self, indices: list[int]) -> Any:
        rows = torch.tensor(indices)
        return [tensor.index_select(0, rows) for tensor in self.tensors]


class Items(Dataset):
    """The same data, sample by sample."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        self.tensors = tensors

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, index: int) -> Any:
        return tuple(tensor[index] for tensor in self.tensors)


def as_it_is(batch: Any) -> Any:
    return batch


@dataclass(frozen=True)
class Case:
    """What all sides share; every call of a method builds afresh, except the data."""

    name: str
    device: str
    small: bool
    images: int = 1024
    """Batch of the LeNet cases."""

    @property
    def batch(self) -> int:
        if self.name == "gpt":
            return 2 if self.small else 8
        return 32 if self.small else self.images

    @property
    def steps(self) -> int:
        """Steps of an epoch."""
        return 4 if self.small else 20 if self.name == "gpt" else 58 * 1024 // self.images

    @property
    def epochs(self) -> int:
        """Epochs of a burst: short, so that there are many, and what else the machine does meets all sides alike."""
        return 1 if self.small or self.name == "gpt" else max(1, self.images // 1024)

    @property
    def shape(self) -> Shape:
        return Shape(2, 32, 2, 128, 16) if self.small else Shape()

    @property
    def unit(self) -> tuple[str, int]:
        """What a step goes through, and how much of it."""
        return ("tokens", self.batch * self.shape.block) if self.name == "gpt" else ("samples", self.batch)

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return (GPT(self.shape) if self.name == "gpt" else lenet()).to(self.device)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        if self.name == "gpt":
            return torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1, fused=True)
        return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def loader(self) -> DataLoader:
        data, collate = _data(self), None
        if self.name == "lenet-rows":
            data, collate = Rows(*data.tensors), as_it_is
        elif self.name == "lenet-items":
            data = Items(*data.tensors)
        pin = self.device == "cuda"
        return DataLoader(
            data, batch_size=self.batch, shuffle=True, drop_last=True, num_workers=0, pin_memory=pin, collate_fn=collate
        )


@functools.cache
def _data(case: Case) -> Any:
    """The same memory for all sides: how its pages lie is nobody's merit."""
    count = case.batch * case.steps
    if case.name != "gpt":
        return images(count, flat=False)
    generator = torch.Generator().manual_seed(1)
    text = torch.randint(case.shape.vocabulary, (count, case.shape.block + 1), generator=generator)
    return TensorDataset(text[:, :-1].contiguous(), text[:, 1:].contiguous())


def loss_of(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, -2), y.flatten())
