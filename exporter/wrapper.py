"""The module that is traced: graph inputs in, one forward of the grafted model, graph outputs out.

One trace serves both phases, whose tables are equal.
"""

from typing import Any

import torch
from torch import nn

from trtllm_lite.exporter.graft import AttentionFacts, Emit, GraphPass, Lengths, running
from trtllm_lite.models.longrope import set_context_lens

Tensor = torch.Tensor


class SelectRows(nn.Module):
    """Stands before the output embedding and keeps only the positions whose logits are wanted.

    `indices` [batch, num_logits] is set for each forward; without, every position is kept.
    """

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head
        self.indices: Tensor | None = None

    def forward(self, hidden: Tensor) -> Any:
        if self.indices is not None:
            index = self.indices[:, :, None].expand(-1, -1, hidden.shape[-1])
            hidden = torch.gather(hidden, 1, index)
        return self.head(hidden)


class GraphModule(nn.Module):
    """`forward` takes the table's inputs by name and the caches as one list, K and V in turn."""

    def __init__(self, model: Any, facts: list[AttentionFacts], emit: Emit) -> None:
        super().__init__()
        self.model = model
        self._facts = facts
        self._emit = emit

    def forward(
        self,
        input_ids: Tensor,
        past_lens: Tensor,
        query_lens: Tensor,
        context_lens: Tensor | None,
        logits_indices: Tensor,
        past: list[Tensor],
    ) -> tuple[Tensor, ...]:
        pairs = list(zip(past[::2], past[1::2], strict=True))
        total = past_lens + query_lens
        lengths = Lengths(past_lens, query_lens, total, total.max())
        current = GraphPass(self._facts, self._emit, pairs, lengths)
        self.model.get_output_embeddings().indices = logits_indices
        set_context_lens(self.model, context_lens)
        with running(current):
            out = self.model(
                input_ids=input_ids,
                position_ids=_positions(input_ids, past_lens, query_lens),
                use_cache=False,
            )
        return (out.logits.to(torch.float32), *current.present)


def _positions(input_ids: Tensor, past_lens: Tensor, query_lens: Tensor) -> Tensor:
    """[batch, seq] int64. Padding repeats the last valid position, so that a learned position
    table is never read past its end."""
    past = past_lens.to(torch.int64)[:, None]
    steps = torch.arange(input_ids.shape[1], dtype=torch.int64)[None]
    last = past + query_lens.to(torch.int64)[:, None] - 1
    return torch.minimum(past + steps, last)
