"""SAPO's gate (arXiv 2511.20347, eq. 6) and other kernels in its place.

With x = tau * (r - 1) and a kernel w(x) that is 1 at 0 and falls to 0 on both sides, the gate is

    f(r) = (2 + integral of w from 0 to x) / tau, so that f(1) = 2 / tau and f'(r) = w(x), with slope 1 at r = 1

for every kernel and tau. The policy gradient of a token is w * r * A * grad log pi_theta (SAPO, section 3).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..validation import require_choice, require_number


@dataclass(frozen=True)
class _Kernel:
    weight: Callable[[torch.Tensor], torch.Tensor]
    integral: Callable[[torch.Tensor], torch.Tensor]  # from 0 to x
    reach: Callable[[float], float]  # the x >= 0 where the weight has fallen to a given one


# The smooth ones agree to second order, 1 - x^2 / 4; the exponential has a corner there and the sigmoid's total.
_KERNELS = {
    "sigmoid": _Kernel(
        weight=lambda x: _slope(x.sigmoid()),
        integral=lambda x: 2 * (x / 2).tanh(),
        reach=lambda weight: 2 * math.acosh(weight**-0.5),
    ),
    "gaussian": _Kernel(
        weight=lambda x: (-(x / 2).square()).exp(),
        integral=lambda x: math.sqrt(math.pi) * (x / 2).erf(),
        reach=lambda weight: 2 * math.sqrt(-math.log(weight)),
    ),
    "exponential": _Kernel(
        weight=lambda x: (-x.abs() / 2).exp(),
        integral=lambda x: -2 * x.sign() * (-x.abs() / 2).expm1(),
        reach=lambda weight: -2 * math.log(weight),
    ),
    # three degrees of freedom
    "student_t": _Kernel(
        weight=lambda x: (1 + x.square() / 8).pow(-2),
        integral=lambda x: x / (2 + x.square() / 4) + math.sqrt(2) * (x / math.sqrt(8)).atan(),
        reach=lambda weight: math.sqrt(8 * (weight**-0.5 - 1)),
    ),
}
GATE_KERNELS = tuple(_KERNELS)


@dataclass(frozen=True)
class Gate:
    """How SAPO's objective weighs a token by its ratio.

    Attributes:
        tau_pos, tau_neg: temperature where the advantage is positive, and elsewhere; finite, > 0.
        kernel: one of `GATE_KERNELS`; the paper's is `"sigmoid"`.
        hard_stop: a ratio R > 1: tokens outside [1/R, R] weigh nothing. None: off.

    Raises:
        ValueError: an attribute is out of range.
    """

    tau_pos: float
    tau_neg: float
    kernel: str = "sigmoid"
    hard_stop: float | None = None

    def __post_init__(self) -> None:
        require_number("tau_pos", self.tau_pos, above=0)
        require_number("tau_neg", self.tau_neg, above=0)
        require_choice("kernel", self.kernel, GATE_KERNELS)
        if self.hard_stop is not None:
            require_number("hard_stop", self.hard_stop, above=1)

    def tau(self, positive: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """The temperature at each cell of the bool `positive`, of the dtype of `like`."""
        # of the dtype from the start: where() of two floats is float32
        return torch.where(positive, like.new_full((), self.tau_pos, requires_grad=False), self.tau_neg)

    def __call__(self, ratio: torch.Tensor, positive: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """f(r), with gradient, and its weight w(r), detached; both of the shape of `ratio`, which is finite."""
        tau = self.tau(positive, ratio)
        inside = ratio if self.hard_stop is None else ratio.clamp(1 / self.hard_stop, self.hard_stop)
        value, weight = _gate(inside, tau, self.kernel)
        if self.hard_stop is not None:
            weight = torch.where(inside == ratio, weight, 0.0)
        return value, weight


def soft_gate(ratio: torch.Tensor, tau: float | torch.Tensor, kernel: str = "sigmoid") -> torch.Tensor:
    """SAPO's gate f(r) = 4 / tau * sigmoid(tau * (r - 1)) (arXiv 2511.20347, eq. 6): any shape, slope 1 at r = 1.

    `kernel`: another of `GATE_KERNELS` in place of the sigmoid, with the same value and slope at r = 1.
    """
    return _gate(ratio, tau, kernel)[0]


def soft_gate_weight(ratio: torch.Tensor, tau: float | torch.Tensor, kernel: str = "sigmoid") -> torch.Tensor:
    """Derivative of the gate; the sigmoid's is w(r) = 4 p (1 - p), p = sigmoid(tau * (r - 1)).

    In [0, 1], 1 at r = 1 for every tau and kernel.
    """
    return _KERNELS[kernel].weight(tau * (ratio - 1))


def ratio_distance(weight: float, kernel: str = "sigmoid") -> float:
    """tau * |r - 1| where the weight has fallen to `weight`, in (0, 1]."""
    return _KERNELS[kernel].reach(weight)


def _gate(ratio: torch.Tensor, tau: float | torch.Tensor, kernel: str) -> tuple[torch.Tensor, torch.Tensor]:
    if kernel == "sigmoid":
        p = (tau * (ratio - 1)).sigmoid_()  # in place where autograd does not need what is there
        return p * (4 / tau), _slope(p.detach())
    with torch.no_grad():
        x = tau * (ratio - 1)
        weight = _KERNELS[kernel].weight(x)
        value = (2 + _KERNELS[kernel].integral(x)) / tau
    # autograd of the integral would lose the weight's digits far out
    return value + weight * (ratio - ratio.detach()), weight


def _slope(p: torch.Tensor) -> torch.Tensor:
    return (1 - p).mul_(p).mul_(4)
