"""The checks between a table and a loaded graph; no graph is loaded here."""

from dataclasses import replace

import pytest

from trtllm_lite.runtime.backends.graph_io import ActualTensor, check_actual
from trtllm_lite.runtime.errors import BundleError
from trtllm_lite.runtime.manifest import TensorSpec

TABLE = (
    TensorSpec("ids", "input_ids", "int64", ("batch", "seq")),
    TensorSpec("cache", "past_key", "float32", ("batch", 2, "capacity", 16), 0),
)
IDS = ActualTensor("ids", "int64", ("n", None))
CACHE = ActualTensor("cache", "float32", (None, 2, "c", 16))


def test_a_graph_with_the_tables_tensors_in_any_order_passes() -> None:
    check_actual("graphs[0].inputs", TABLE, [CACHE, IDS])


@pytest.mark.parametrize(
    "actual",
    [
        [IDS],
        [IDS, CACHE, ActualTensor("more", "int64", ())],
        [IDS, replace(CACHE, name="kache")],
        [IDS, replace(CACHE, dtype="float16")],
        [IDS, replace(CACHE, shape=(None, 2, "c"))],
        [IDS, replace(CACHE, shape=(None, 3, "c", 16))],
        [IDS, replace(CACHE, shape=(None, "heads", "c", 16))],
        [replace(IDS, shape=(1, None)), CACHE],
    ],
)
def test_any_difference_is_refused_by_field(actual: list[ActualTensor]) -> None:
    with pytest.raises(BundleError) as caught:
        check_actual("graphs[0].inputs", TABLE, actual)
    assert caught.value.field == "graphs[0].inputs"
