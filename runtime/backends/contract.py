"""The batch contract of `backends/base.py` as checks: what every session may rely on."""

import numpy as np

from trtllm_lite.runtime.backends.base import Batch, SessionOptions
from trtllm_lite.runtime.errors import StepError

_DTYPES = {
    "token_ids": np.dtype(np.int64),
    "past_lens": np.dtype(np.int32),
    "query_lens": np.dtype(np.int32),
    "context_lens": np.dtype(np.int32),
    "logits_indices": np.dtype(np.int64),
}

_RANKS = {name: 1 if name.endswith("_lens") else 2 for name in _DTYPES}


def check_batch(
    batch: Batch, options: SessionOptions, vocab_size: int, *, multi_token_decode: bool
) -> None:
    """Raise StepError that names what breaks the contract.

    It runs in every step, on caches that hold the weights: numbers of Python are several times
    cheaper there than numpy's reductions of a few rows.
    """
    _check_arrays(batch)
    rows, seq = batch.token_ids.shape
    tokens, past = batch.token_ids.ravel().tolist(), batch.past_lens.tolist()
    query, context = batch.query_lens.tolist(), batch.context_lens.tolist()
    indices = batch.logits_indices.tolist()
    _check("first_slot", batch.first_slot >= 0 and batch.first_slot + rows <= options.num_slots)
    _check("token_ids", min(tokens) >= 0 and max(tokens) < vocab_size)
    _check("past_lens", min(past) >= 0 and max(past) + seq <= options.capacity)
    _check("query_lens", min(query) >= 1 and max(query) <= seq)
    lengths = zip(context, past, query, strict=True)
    _check("context_lens", all(whole >= old + new for whole, old, new in lengths))
    wanted = zip(indices, query, strict=True)
    _check("logits_indices", all(min(row) >= 0 and max(row) < new for row, new in wanted))
    if batch.phase == "decode" and not multi_token_decode:
        _check("decode", seq == 1 and len(indices[0]) == 1)


def _check_arrays(batch: Batch) -> None:
    rows = batch.rows
    _check("token_ids", batch.token_ids.ndim == 2 and batch.token_ids.size > 0)
    _check("logits_indices", batch.logits_indices.ndim == 2 and batch.logits_indices.size > 0)
    for name, dtype in _DTYPES.items():
        array = getattr(batch, name)
        if array.dtype != dtype:
            _check(f"{name} dtype", ok=False)
        if array.shape[0] != rows or array.ndim != _RANKS[name]:
            _check(f"{name} shape", ok=False)


def _check(what: str, ok: bool) -> None:
    if not ok:
        raise StepError(f"the batch breaks the contract: {what}")
