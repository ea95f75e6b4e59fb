"""Quality figures against plain float64 loops."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from trtllm_lite.tools.compare_peers.quality import SKIP, log_softmax, score

Array = npt.NDArray[Any]
LENGTH, VOCAB = 150, 11


def slow(windows: list[list[int]], logits: Array, reference: Array) -> tuple[float, ...]:
    nll, expected_nll, same, kl = [], [], [], []
    for window, ours, theirs in zip(windows, logits, reference, strict=True):
        for i in range(SKIP, len(window) - 1):
            p = [math.exp(float(x)) for x in theirs[i]]
            q = [math.exp(float(x)) for x in ours[i]]
            p, q = [x / sum(p) for x in p], [x / sum(q) for x in q]
            nll.append(-math.log(q[window[i + 1]]))
            expected_nll.append(-math.log(p[window[i + 1]]))
            same.append(p.index(max(p)) == q.index(max(q)))
            kl.append(sum(a * math.log(a / b) for a, b in zip(p, q, strict=True)))
    means = [sum(values) / len(values) for values in (nll, expected_nll, same, kl)]
    return math.exp(means[0]), math.exp(means[1]), means[2], means[3], len(nll)


@pytest.fixture
def case(tmp_path: Path) -> tuple[list[list[int]], Array, Array, str]:
    rng = np.random.default_rng(1)
    windows = rng.integers(0, VOCAB, (2, LENGTH)).tolist()
    reference = rng.normal(0, 2, (2, LENGTH, VOCAB)).astype(np.float16)
    logits = (reference + rng.normal(0, 0.5, reference.shape)).astype(np.float32)
    path = tmp_path / "reference.npy"
    np.save(path, reference)
    return windows, logits, reference, str(path)


def test_figures_are_those_of_plain_loops(
    case: tuple[list[list[int]], Array, Array, str],
) -> None:
    windows, logits, reference, path = case
    answers = iter(logits)
    found = score(lambda _: next(answers), windows, path)
    expected = slow(windows, logits, reference)
    got = (found.perplexity, found.reference_perplexity, found.top1, found.kl, found.tokens)
    assert got == pytest.approx(expected, rel=1e-4)
    assert 0.3 < found.top1 < 1


def test_other_shapes_are_refused(case: tuple[list[list[int]], Array, Array, str]) -> None:
    windows, logits, _, path = case
    with pytest.raises(ValueError, match="149"):
        score(lambda _: logits[0][1:], windows, path)


def test_nan_is_refused(case: tuple[list[list[int]], Array, Array, str]) -> None:
    windows, logits, _, path = case
    logits[0, 20, 3] = np.nan
    with pytest.raises(ValueError, match="finite"):
        score(lambda _: logits[0], windows, path)


def test_log_softmax_takes_large_logits() -> None:
    found = log_softmax(np.array([[1e4, 1e4, -1e4]], np.float32))
    assert found[0, :2] == pytest.approx([-math.log(2)] * 2, rel=1e-6)
    assert found[0, 2] == pytest.approx(-2e4 - math.log(2))
