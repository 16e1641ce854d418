"""Mixed precision without a line in the script: the models' forward passes run under autocast.

Outputs come back as fp32, so losses are computed in full. With fp16 the gradients entering a model
from its outputs are scaled up by a power of two and the reduced gradient is scaled down again (both
exact; a loss term that reaches weights past every model's output, such as an L2 penalty by hand, is not
scaled up and needs the script's own GradScaler instead); if it overflowed, the gradients of that step are dropped, so that the optimizer skips it, and
the scale is halved. The decision is taken on the reduced gradient, so every worker takes the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from paceline.strategies.hooks import Hook

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_GROW_AFTER = 2000


class _ScaleGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.scale = scale
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad * ctx.scale, None


class Precision:
    def __init__(self, kind: str, device: torch.device) -> None:
        self.kind, self._device = kind, device
        self.scales = kind == "fp16"
        self.scale = 65536.0 if self.scales else 1.0
        self.skipped = 0
        self._good = 0
        self._open: list[Any] = []

    def capture(self) -> list[float]:
        return [self.scale, self.skipped, self._good]

    def restore(self, state: list[Any]) -> None:
        self.scale, self.skipped, self._good = state

    def attach(self, model: nn.Module) -> None:
        if self.kind == "fp32":
            return
        model.register_forward_pre_hook(Hook(self._enter, shared=True))
        model.register_forward_hook(Hook(self._leave, shared=True), always_call=True)

    def _enter(self, module: nn.Module, args: Any) -> Any:
        context = torch.autocast(self._device.type, _DTYPES[self.kind])
        context.__enter__()
        self._open.append(context)
        if not self.scales:
            return None
        # What goes back to an earlier model is scaled by that one: undo it here, or it is scaled twice.
        return tuple(
            _ScaleGrad.apply(item, 1.0 / self.scale)  # type: ignore[no-untyped-call]
            if isinstance(item, torch.Tensor) and item.requires_grad
            else item
            for item in args
        )

    def _leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        if self._open:
            self._open.pop().__exit__(None, None, None)
        return self._outward(output)

    def _outward(self, output: Any) -> Any:
        if isinstance(output, torch.Tensor):
            if output.is_floating_point():
                output = output.float()
                if self.scales and output.requires_grad:
                    output = _ScaleGrad.apply(output, self.scale)  # type: ignore[no-untyped-call]
            return output
        if isinstance(output, tuple) and hasattr(output, "_fields"):
            return type(output)(*(self._outward(item) for item in output))
        if isinstance(output, (list, tuple)):
            return type(output)(self._outward(item) for item in output)
        if isinstance(output, dict):
            return type(output)((key, self._outward(item)) for key, item in output.items())
        return output

    def after_commit(self, params: list[nn.Parameter]) -> bool:
        """Drop a step that overflowed; whether it did."""
        if not self.scales:
            return False
        grads = [param.grad for param in params if param.grad is not None]
        fine = all(bool(torch.isfinite(_values(grad)).all()) for grad in grads)
        if fine:
            self._good += 1
            if self._good >= _GROW_AFTER:
                self.scale, self._good = self.scale * 2, 0
            return False
        for param in params:
            param.grad = None
        self.scale, self._good, self.skipped = max(1.0, self.scale / 2), 0, self.skipped + 1
        return True


def _values(grad: torch.Tensor) -> torch.Tensor:
    return grad.coalesce().values() if grad.is_sparse else grad
