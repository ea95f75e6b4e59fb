"""GPTQ: rounding that lets each column make up for the errors of the columns before it.

Frantar, Ashkboos, Hoefler, Alistarh, "GPTQ: Accurate Post-Training Quantization for Generative
Pre-trained Transformers", arXiv 2210.17323. Columns go by falling importance; the grids are fixed
beforehand, so the order costs nothing at run time.
"""

from dataclasses import dataclass

import torch

from trtllm_lite.exporter.calibration.grid import expand

# Added to the diagonal, as a share of its mean: keeps directions that the text hardly used from
# taking any error. The larger ones are for a moment that is still not positive definite.
DAMPING = 0.01
LARGER = (0.1, 1.0, 10.0)
# Columns whose errors reach the columns after them in one matrix product.
LAZY = 64

Tensor = torch.Tensor


@dataclass(frozen=True, eq=False)
class Factor:
    """Of a damped second moment H of K features: the order of columns, and the upper triangular U
    with U^T U = H^-1 in that order.

    Rounding column j by e costs (e / U[j, j])^2 when all later columns make up for it as well as
    they can.
    """

    order: Tensor
    upper: Tensor


def factorize(moment: Tensor) -> Factor:
    """moment: float32 [K, K], symmetric, positive semidefinite. Raises ValueError for one that is
    not, or holds NaN or infinity."""
    power = moment.diagonal()
    order = torch.argsort(power, descending=True, stable=True)
    base = float(power.mean()) or 1.0
    for damping in (DAMPING, *LARGER):
        damped = moment[order][:, order]
        damped.diagonal().add_(damping * base)
        # Backwards, the lower factor becomes an upper one: H = R R^T, so U = R^-1.
        lower, failed = torch.linalg.cholesky_ex(damped.flip(0, 1))
        if not failed:
            upper = lower.flip(0, 1)
            eye = torch.eye(len(upper))
            return Factor(order, torch.linalg.solve_triangular(upper, eye, upper=True))
    raise ValueError("the second moment is not positive semidefinite")


def round_with_feedback(
    rows: Tensor, factor: Factor, scale: Tensor, zero: Tensor, bits: int, block: int
) -> Tensor:
    """Integers for rows [n, K] on the grids [n, blocks], as float32 [n, K]. Rows are independent of
    each other."""
    n, k = rows.shape
    order, upper = factor.order, factor.upper
    # One column at a time: contiguous as rows of the transpose.
    left = rows[:, order].t().contiguous()
    steps, zeros = (expand(x, block, k)[:, order].t().contiguous() for x in (scale, zero))
    inverse = torch.where(steps > 0, 1 / steps, 0)
    q = torch.empty_like(left)
    for start in range(0, k, LAZY):
        stop = min(start + LAZY, k)
        errors = torch.empty(stop - start, n)
        for j in range(start, stop):
            torch.addcmul(zeros[j], left[j], inverse[j], out=q[j]).round_().clamp_(0, 2**bits - 1)
            error = torch.addcmul(
                left[j], q[j] - zeros[j], steps[j], value=-1, out=errors[j - start]
            )
            error /= upper[j, j]
            left[j + 1 : stop].addr_(upper[j, j + 1 : stop], error, alpha=-1)
        left[stop:].addmm_(upper[start:stop, stop:].t(), errors, alpha=-1)
    natural = torch.empty_like(q)
    natural[order] = q
    return natural.t().contiguous()


def expected_error(factor: Factor, scale: Tensor, block: int) -> Tensor:
    """What rounding with feedback is expected to cost each row, [n]: every column is off by an
    evenly spread error of one step of its grid."""
    k = len(factor.order)
    cost = torch.empty(k)
    cost[factor.order] = factor.upper.diagonal().square().reciprocal()
    per_block = torch.zeros(scale.shape[1]).index_add_(0, torch.arange(k) // block, cost)
    return scale.square() @ per_block / 12
