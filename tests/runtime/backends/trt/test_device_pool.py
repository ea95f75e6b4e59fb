"""The pool on a device holds what the pool in host memory holds after the same calls."""

import random
from itertools import pairwise

import numpy as np
import pytest

from trtllm_lite.runtime.backends import device_pool
from trtllm_lite.runtime.backends.base import Array, KVBlock
from trtllm_lite.runtime.backends.device_pool import DevicePool
from trtllm_lite.runtime.backends.fake_device import FakeDevice
from trtllm_lite.runtime.backends.kv_pool import KVPool
from trtllm_lite.runtime.manifest import KVLayer, KVSpec

SLOTS, CAPACITY = 3, 64
LAYERS = (KVLayer(2, 8), KVLayer(1, 16, sliding_window=4), KVLayer(4, 4))


def arrays(block: KVBlock) -> list[Array]:
    return [*block.keys, *block.values]


def random_block(rng: random.Random, kv: KVSpec, tokens: int) -> KVBlock:
    pool = KVPool(kv, 1, CAPACITY)
    dtype = pool.keys[0].dtype

    def fill(layer: KVLayer) -> Array:
        data = rng.randbytes(layer.num_kv_heads * tokens * layer.head_dim * dtype.itemsize)
        return np.frombuffer(data, dtype).reshape(layer.num_kv_heads, tokens, layer.head_dim)

    return KVBlock(tuple(map(fill, kv.layers)), tuple(map(fill, kv.layers)))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("staging_tokens", [1, 9, 1000])
def test_it_holds_what_the_pool_of_the_host_holds(
    monkeypatch: pytest.MonkeyPatch, dtype: str, staging_tokens: int
) -> None:
    rng, kv = random.Random(staging_tokens), KVSpec(dtype, LAYERS)
    monkeypatch.setattr(device_pool, "STAGING_BYTES", staging_tokens * kv.bytes_per_token)
    device = FakeDevice()
    ours, theirs = DevicePool(device, kv, SLOTS, CAPACITY), KVPool(kv, SLOTS, CAPACITY)
    for _ in range(30):
        a, b = rng.randrange(SLOTS), rng.randrange(SLOTS)
        length = rng.randint(0, CAPACITY)
        match rng.randrange(3):
            case 0:
                ours.move(a, b, length)
                theirs.move(a, b, length)
            case 1:
                ours.swap(a, b, length)
                theirs.swap(a, b, length)
            case 2:
                blocks = [random_block(rng, kv, rng.randint(0, 12)) for _ in range(4)]
                start = rng.randint(0, CAPACITY - sum(x.num_tokens for x in blocks))
                ours.write(a, start, blocks)
                theirs.write(a, start, blocks)
    ends = sorted(rng.sample(range(CAPACITY), 6))
    spans = [*pairwise([0, *ends, CAPACITY]), (3, 3), (5, 20), (10, 30)]
    for slot in range(SLOTS):
        pairs = zip(ours.read(slot, spans), theirs.read(slot, spans), strict=True)
        for mine, other in pairs:
            for x, y in zip(arrays(mine), arrays(other), strict=True):
                assert x.tobytes() == y.tobytes()
                assert (x.dtype, x.shape) == (y.dtype, y.shape)
                assert x.base is None
    ours.close()
    assert device.addresses == ()


def test_addresses_are_those_of_slots_layer_by_layer() -> None:
    device = FakeDevice()
    kv = KVSpec("float32", LAYERS)
    pool = DevicePool(device, kv, SLOTS, CAPACITY)
    block = random_block(random.Random(1), kv, CAPACITY)
    pool.write(1, 0, [block])
    for addresses, held in ((pool.keys(1), block.keys), (pool.values(1), block.values)):
        for address, array in zip(addresses, held, strict=True):
            assert address % 256 == 0
            assert device.bytes_at(address, array.nbytes).tobytes() == array.tobytes()
    assert pool.nbytes == SLOTS * CAPACITY * kv.bytes_per_token
