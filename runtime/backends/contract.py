"""The batch contract of `backends/base.py` as checks: what every session may rely on."""

import numpy as np

from trtllm_lite.runtime.backends.base import Batch, SessionOptions
from trtllm_lite.runtime.errors import StepError

_DTYPES = {
    "token_ids": np.int64,
    "past_lens": np.int32,
    "query_lens": np.int32,
    "context_lens": np.int32,
    "logits_indices": np.int64,
}


def check_batch(batch: Batch, options: SessionOptions, vocab_size: int) -> None:
    """Raise StepError that names what breaks the contract."""
    _check_arrays(batch)
    rows, seq = batch.token_ids.shape
    past, query = batch.past_lens, batch.query_lens
    _check("first_slot", batch.first_slot >= 0 and batch.first_slot + rows <= options.num_slots)
    _check("token_ids", batch.token_ids.min() >= 0 and batch.token_ids.max() < vocab_size)
    _check("past_lens", past.min() >= 0 and past.max() + seq <= options.capacity)
    _check("query_lens", query.min() >= 1 and query.max() <= seq)
    _check("context_lens", bool((batch.context_lens >= past + query).all()))
    indices = batch.logits_indices
    _check("logits_indices", indices.min() >= 0 and bool((indices < query[:, None]).all()))
    if batch.phase == "decode":
        _check("decode", seq == 1 and indices.shape[1] == 1)


def _check_arrays(batch: Batch) -> None:
    rows = batch.rows
    _check("token_ids", batch.token_ids.ndim == 2 and batch.token_ids.size > 0)
    _check("logits_indices", batch.logits_indices.ndim == 2 and batch.logits_indices.size > 0)
    for name, dtype in _DTYPES.items():
        array = getattr(batch, name)
        _check(f"{name} dtype", array.dtype == dtype)
        _check(f"{name} shape", array.shape[0] == rows)
    for name in ("past_lens", "query_lens", "context_lens"):
        _check(f"{name} shape", getattr(batch, name).shape == (rows,))


def _check(what: str, ok: bool | np.bool_) -> None:
    if not ok:
        raise StepError(f"the batch breaks the contract: {what}")
