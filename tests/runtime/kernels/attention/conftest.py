"""Calls of the attention operators, and the float64 loop that they are held against."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime
import pytest

Array = npt.NDArray[Any]
POSITIONS = 1700
OPERATORS = {np.float32: "Attention", np.float16: "AttentionFloat16", np.int8: "AttentionInt8"}


# Scores are at most about 10 here. Their relative error in float32 is some 1e-6, so is the absolute
# one of the exponents, and that of the weights, which the values, about 4 at most, are mixed with.
CLOSE = 3e-5


@dataclass(frozen=True)
class Case:
    """One call: row b brings `tokens[b]` tokens behind `past[b]` that the cache holds, padded to
    `seq`. rotary: rotated elements of a head. `room`: what the cache holds beyond the longest row.
    """

    past: tuple[int, ...]
    tokens: tuple[int, ...]
    heads: int = 4
    kv_heads: int = 2
    dim: int = 32
    window: int = -1
    softcap: float = 0.0
    sinks: bool = False
    rotary: int = 0
    interleaved: bool = False
    packed: bool = True
    padding: int = 0
    room: int = 3
    seed: int = 0

    @property
    def scale(self) -> float:
        return 1.3 / float(np.sqrt(self.dim))

    @property
    def batch(self) -> int:
        return len(self.past)

    @property
    def seq(self) -> int:
        return max(self.tokens) + self.padding

    @property
    def capacity(self) -> int:
        return max(p + t for p, t in zip(self.past, self.tokens, strict=True)) + self.room


@dataclass(frozen=True)
class Data:
    """Float32 inputs of a case: q [batch, seq, heads, dim]; k, v [batch, seq, kv_heads, dim];
    caches [batch, kv_heads, capacity, dim], NaN where no token is; cos, sin [positions, rotary/2].
    """

    q: Array
    k: Array
    v: Array
    k_cache: Array
    v_cache: Array
    cos: Array
    sin: Array
    sinks: Array


def make_data(case: Case) -> Data:
    rng = np.random.default_rng(case.seed)
    shape = (case.batch, case.seq, case.kv_heads, case.dim)
    caches = []
    for _ in range(2):
        cache = rng.standard_normal(
            (case.batch, case.kv_heads, case.capacity, case.dim), np.float32
        )
        for b, past in enumerate(case.past):
            cache[b, :, past:] = np.nan
        caches.append(cache)
    positions = np.arange(POSITIONS)[:, None]
    angle = positions / 100.0 ** (np.arange(case.rotary // 2) / max(1, case.rotary // 2))
    q, k, v = (
        rng.standard_normal(s, np.float32)
        for s in ((case.batch, case.seq, case.heads, case.dim), shape, shape)
    )
    sinks = rng.standard_normal(case.heads, np.float32) * 2
    cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
    return Data(q, k, v, caches[0], caches[1], cos, sin, sinks)


def quantized(cache: Array, scale: Array) -> Array:
    """[batch, kv_heads, capacity, dim] in units of the channel's scale, as int8."""
    steps = scale.reshape(1, cache.shape[1], 1, cache.shape[3])
    codes: Array = np.clip(np.rint(cache / steps), -127, 127)
    return np.nan_to_num(codes, nan=99)


def kv_scales(case: Case, data: Data) -> tuple[Array, Array]:
    """Int8 steps of each channel of K and of V, [kv_heads, 1, dim], large enough that nothing is
    cut off: a rotation makes an element at most sqrt(2) times the largest."""
    rng = np.random.default_rng(1)
    largest = max(float(np.nanmax(np.abs(x))) for x in (data.k, data.k_cache, data.v, data.v_cache))
    shape = (case.kv_heads, 1, case.dim)
    k_scale, v_scale = (largest / 127 * rng.uniform(1.5, 2, shape) for _ in range(2))
    return k_scale.astype(np.float32), v_scale.astype(np.float32)


def rotated(case: Case, data: Data, x: Array, position: int) -> Array:
    """One head of one token, float64."""
    x, half = x.astype(np.float64), case.rotary // 2
    out: Array = x.copy()
    cos, sin = data.cos[position].astype(np.float64), data.sin[position].astype(np.float64)
    for i in range(half):
        a, b = (2 * i, 2 * i + 1) if case.interleaved else (i, i + half)
        out[a] = x[a] * cos[i] - x[b] * sin[i]
        out[b] = x[b] * cos[i] + x[a] * sin[i]
    return out


@dataclass(frozen=True)
class Result:
    out: Array
    k_cache: Array
    v_cache: Array


def reference(case: Case, data: Data, stored: tuple[Array, Array] | None = None) -> Result:
    """Token by token: append, then attend to what the token sees. With `stored`, caches that hold
    the new tokens already, nothing is appended."""
    k_cache, v_cache = (c.astype(np.float64) for c in stored or (data.k_cache, data.v_cache))
    out = np.zeros((case.batch, case.seq, case.heads, case.dim))
    group = case.heads // case.kv_heads
    for b in range(case.batch):
        for s in range(case.tokens[b]):
            at = case.past[b] + s
            first = max(0, at - case.window + 1) if case.window > 0 else 0
            for g in range(case.kv_heads if stored is None else 0):
                k_cache[b, g, at] = rotated(case, data, data.k[b, s, g], at)
                v_cache[b, g, at] = data.v[b, s, g]
            for h in range(case.heads):
                q = rotated(case, data, data.q[b, s, h], at)
                scores = k_cache[b, h // group, first : at + 1] @ q * case.scale
                if case.softcap:
                    scores = case.softcap * np.tanh(scores / case.softcap)
                weights = np.exp(scores - scores.max())
                total = weights.sum()
                if case.sinks:
                    total += np.exp(data.sinks[h] - scores.max())
                out[b, s, h] = weights @ v_cache[b, h // group, first : at + 1] / total
    return Result(out.reshape(case.batch, case.seq, -1), k_cache, v_cache)


@dataclass(frozen=True)
class Calls:
    """Makes cases, and runs them as single operators."""

    make_node: Callable[..., Any]
    open_node: Callable[..., Any]

    close = CLOSE

    def case(self, *args: Any, **values: Any) -> Case:
        return Case(*args, **values)

    def data(self, case: Case) -> Data:
        return make_data(case)

    def reference(
        self, case: Case, data: Data, stored: tuple[Array, Array] | None = None
    ) -> Result:
        return reference(case, data, stored)

    def kv_scales(self, case: Case, data: Data) -> tuple[Array, Array]:
        return kv_scales(case, data)

    def quantized(self, cache: Array, scale: Array) -> Array:
        return quantized(cache, scale)

    def node(
        self,
        case: Case,
        data: Data,
        kind: Any = np.float32,
        scales: tuple[Array, Array] | None = None,
        domain: str = "trtllm_lite",
        bfloat16: int | None = None,
    ) -> Any:
        """The node over caches of `kind`; scales: of each channel, for int8. bfloat16: the
        attribute, None leaves it out."""
        flat = [x.reshape(case.batch, case.seq, -1) for x in (data.q, data.k, data.v)]
        query, key, value = (np.concatenate(flat, -1), None, None) if case.packed else flat
        last = np.array([p + t - 1 for p, t in zip(case.past, case.tokens, strict=True)], np.int32)
        k_scale, v_scale = scales if scales is not None else (None, None)
        k_cache, v_cache = data.k_cache, data.v_cache
        if scales is not None:
            with np.errstate(invalid="ignore"):
                k_cache = quantized(k_cache, scales[0])
                v_cache = quantized(v_cache, scales[1])
        inputs = [
            ("query", query),
            ("key", key),
            ("value", value),
            ("past_key", k_cache.astype(kind)),
            ("past_value", v_cache.astype(kind)),
            ("seqlens_k", last),
            ("total", np.array(last.max() + 1, np.int32)),
            ("cos", data.cos if case.rotary else None),
            ("sin", data.sin if case.rotary else None),
            ("position_ids", None),
            ("attention_bias", None),
            ("head_sink", data.sinks if case.sinks else None),
            ("k_scale", k_scale),
            ("v_scale", v_scale),
            ("q_norm_weight", None),
            ("k_norm_weight", None),
            ("query_seqlens", np.array(case.tokens, np.int32)),
        ]
        attributes = {
            "num_heads": case.heads,
            "kv_num_heads": case.kv_heads,
            "scale": case.scale,
            "softcap": case.softcap,
            "local_window_size": case.window,
            "do_rotary": int(case.rotary > 0),
            "rotary_interleaved": int(case.interleaved),
        }
        if bfloat16 is not None:
            attributes["bfloat16"] = bfloat16
        outputs = {"out": np.float32, "present_key": kind, "present_value": kind}
        op = OPERATORS[kind] if domain == "trtllm_lite" else "GroupQueryAttention"
        constants = frozenset({"cos", "sin", "head_sink", "k_scale", "v_scale"})
        return self.make_node(op, inputs, constants, attributes, outputs, domain)

    def run(self, node: Any, threads: int = 1) -> Result:
        """With caches that the session is to copy."""
        return Result(*self.open_node(node, threads).run(None, node.feeds))

    def run_in_place(self, session: Any, node: Any, k_cache: Array, v_cache: Array) -> Array:
        """With one buffer bound as past and as present, which the run appends to."""
        value = onnxruntime.OrtValue.ortvalue_from_numpy
        kept = {n: value(a) for n, a in node.feeds.items()}
        binding = session.io_binding()
        binding.bind_output("out", "cpu")
        for part, cache in (("key", k_cache), ("value", v_cache)):
            kept[f"past_{part}"] = value(cache)
            binding.bind_ortvalue_output(f"present_{part}", kept[f"past_{part}"])
        for name, given in kept.items():
            binding.bind_ortvalue_input(name, given)
        session.run_with_iobinding(binding)
        out: Array = binding.get_outputs()[0].numpy().copy()
        return out

    def check(self, case: Case, data: Data, made: Result) -> None:
        """Against the reference."""
        wanted = reference(case, data)
        np.testing.assert_allclose(made.out, wanted.out, rtol=0, atol=CLOSE)
        for b, tokens in enumerate(case.tokens):
            assert not made.out[b, tokens:].any(), "padding must come out as zeros"
        np.testing.assert_allclose(made.k_cache, wanted.k_cache, rtol=0, atol=2e-6)
        np.testing.assert_array_equal(made.v_cache, wanted.v_cache.astype(np.float32))


@pytest.fixture(scope="session")
def calls(make_node: Callable[..., Any], open_node: Callable[..., Any]) -> Calls:
    return Calls(make_node, open_node)
