"""Plans that TensorRT-RTX builds without a GPU, from graphs in the form of the exporter.

What a plan computes is seen on a GPU only. What is seen here: that graphs parse, that what the
parser drops is put back, what memory the builder says, and that what is wrong is refused.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper

from trtllm_lite.runtime.bundle import Bundle
from trtllm_lite.runtime.engines.attention_patch import AttentionForm, AttentionPatch, BuildError
from trtllm_lite.runtime.engines.onnx_edit import AttentionNode, attention_nodes, with_fixed_dim
from trtllm_lite.runtime.engines.plan_builder import (
    BuiltPlan,
    PlanRequest,
    build_plan,
    check_network,
)
from trtllm_lite.runtime.engines.profiles import EngineLimits, profiles
from trtllm_lite.runtime.engines.trt_log import shared_logger
from trtllm_lite.runtime.engines.trt_module import TensorRT
from trtllm_lite.runtime.manifest import Phase
from trtllm_lite.runtime.progress import NoProgress

PHASES: tuple[Phase, ...] = ("prefill", "decode", "extend")
LIMITS = EngineLimits(4, 64, 64)
COUNTS = {"prefill": (2, 0, 0), "decode": (2, 2, 0), "extend": (2, 2, 2)}


def request_of(
    bundle: Bundle,
    phase: Phase,
    *,
    limits: EngineLimits = LIMITS,
    gpus: tuple[str, ...] = ("sm86",),
    form: AttentionForm = "lengths",
) -> PlanRequest:
    graph = bundle.manifest.graph(phase)
    path, boxes = bundle.graph_path(phase), profiles(graph, limits)
    return PlanRequest(graph, path, boxes, limits.capacity, gpus, exact=False, form=form)


def built(rtx: TensorRT, request: PlanRequest) -> BuiltPlan:
    return build_plan(rtx, request, NoProgress())


@pytest.mark.parametrize("form", ["lengths", "mask"])
@pytest.mark.parametrize("phase", PHASES)
def test_a_graph_builds_for_three_gpus(
    rtx: TensorRT, engine_bundle: Bundle, phase: Phase, form: AttentionForm
) -> None:
    gpus = ("sm86", "sm89", "sm120")
    plan = built(rtx, request_of(engine_bundle, phase, gpus=gpus, form=form))
    patched = plan.patched
    assert (patched.layers, patched.lengths_set, patched.lower_right) == COUNTS[phase]
    assert not plan.decomposed
    weights = sum((engine_bundle.folder / f).stat().st_size for f in ["weights.bin"])
    assert plan.weights_bytes is not None
    assert weights <= plan.weights_bytes < 1.1 * weights
    assert plan.scratch_bytes is not None
    assert plan.activation_bytes is not None
    assert 0 < plan.scratch_bytes <= plan.activation_bytes


@pytest.mark.parametrize(
    ("kind", "bits", "gpu"), [("int4", 4, "sm86"), ("int8", 8, "sm86"), ("fp8", 8, "sm89")]
)
def test_quantized_weights_stay_small(
    rtx: TensorRT,
    engine_bundle: Bundle,
    engine_graph: Callable[..., onnx.ModelProto],
    kind: str,
    bits: int,
    gpu: str,
) -> None:
    """Blocks of 32 numbers with a float16 scale each; the embedding is float16."""
    request = request_of(engine_bundle, "decode", gpus=(gpu, "sm120"))
    model = engine_graph("decode", kind)
    request.path.write_bytes(model.SerializeToString())
    plan = built(rtx, request)
    embedding = 128 * 64 * 2
    matrices = sum(
        onnx.numpy_helper.to_array(t).size
        for t in model.graph.initializer
        if t.name.endswith("_codes")
    )
    exact = embedding + matrices * bits // 8 + matrices // 32 * 2
    assert plan.weights_bytes is not None
    assert exact <= plan.weights_bytes < 1.1 * exact


def test_scratch_of_decode_does_not_grow_with_the_capacity(
    rtx: TensorRT, engine_bundle: Bundle
) -> None:
    """A plan that copied the cache would take its size more."""
    sizes = [
        built(rtx, request_of(engine_bundle, "decode", limits=limits)).scratch_bytes
        for limits in (EngineLimits(4, 448, 64), EngineLimits(4, 16320, 64))
    ]
    assert sizes[0] == sizes[1]


def test_an_interrupt_ends_a_build(rtx: TensorRT, engine_bundle: Bundle) -> None:
    class Interrupted(NoProgress):
        def advance(self, done: int, total: int, unit: str) -> None:
            raise KeyboardInterrupt

    request = request_of(engine_bundle, "extend", gpus=("sm86", "sm89", "sm120"))
    with pytest.raises(KeyboardInterrupt):
        build_plan(rtx, request, Interrupted())
    assert built(rtx, request_of(engine_bundle, "decode")).data.nbytes > 0


def test_row_lengths_are_read_by_the_attentions(rtx: TensorRT, engine_bundle: Bundle) -> None:
    """Every attention over the cache has an input that comes from the number of past tokens."""
    network, nodes, keep = parsed(rtx, engine_bundle, "extend")
    before = [attention.num_inputs for attention in attentions(rtx, network)]
    patch = AttentionPatch(rtx, network, 128, "lengths", decomposable=False)
    patch.apply(nodes)
    layers = attentions(rtx, network)
    assert before == [3, 3]
    assert [layer.num_inputs for layer in layers] == [7, 7]
    kinds = rtx.module.CausalMaskKind
    assert [layer.attention.causal_kind for layer in layers] == [kinds.LOWER_RIGHT] * 2
    (source,) = {layer.attention.key_value_lengths.name for layer in layers}
    casts = [network.get_layer(i) for i in range(network.num_layers)]
    (cast,) = [layer for layer in casts if layer.get_output(0).name == source]
    assert cast.get_input(0).name == "visible_lens"
    assert keep


def test_a_node_without_a_layer_is_an_error(rtx: TensorRT, engine_bundle: Bundle) -> None:
    network, nodes, _keep = parsed(rtx, engine_bundle, "decode")
    patch = AttentionPatch(rtx, network, 128, "lengths", decomposable=False)
    with pytest.raises(BuildError, match="the graph has 1 attentions, the parsed network 2 others"):
        patch.apply(nodes[:1])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"is_causal": True}, "was parsed with causal False"),
        ({"lengths": "nowhere"}, "the parsed network lacks 'nowhere'"),
    ],
)
def test_a_layer_that_is_not_as_its_node_is_an_error(
    rtx: TensorRT, engine_bundle: Bundle, change: dict[str, Any], said: str
) -> None:
    network, nodes, _keep = parsed(rtx, engine_bundle, "decode")
    patch = AttentionPatch(rtx, network, 128, "lengths", decomposable=False)
    with pytest.raises(BuildError, match=said):
        patch.apply((nodes[0], replace(nodes[1], **change)))


def test_an_input_that_nothing_reads_is_an_error(
    rtx: TensorRT, engine_bundle: Bundle, engine_graph: Callable[[Phase], onnx.ModelProto]
) -> None:
    model = engine_graph("decode")
    model.graph.input.append(
        helper.make_tensor_value_info("query_lens", TensorProto.INT32, ["batch"])
    )
    spec = engine_bundle.manifest.graph("decode")
    extra = replace(spec.inputs[1], name="query_lens", role="query_lens")
    request = request_of(engine_bundle, "decode")
    request.path.write_bytes(model.SerializeToString())
    request = replace(request, graph=replace(spec, inputs=(*spec.inputs, extra)))
    with pytest.raises(BuildError, match=r"reads decode\.onnx without its input 'query_lens'"):
        built(rtx, request)


@pytest.mark.parametrize(
    ("role", "change", "said"),
    [
        ("input_ids", {"name": "tokens"}, "differ in input_ids, tokens"),
        ("past_lens", {"dtype": "int64"}, r"'past_lens' is INT32 \[-1\] in the parsed network"),
        ("past_key", {"shape": ("batch", 3, "capacity", 32)}, r"HALF \[-1, 3, 128, 32\]"),
    ],
)
def test_a_network_that_is_not_the_table_is_an_error(
    rtx: TensorRT, engine_bundle: Bundle, role: str, change: dict[str, Any], said: str
) -> None:
    network, _nodes, _keep = parsed(rtx, engine_bundle, "decode")
    spec = engine_bundle.manifest.graph("decode")
    inputs = tuple(replace(t, **change) if t.role == role else t for t in spec.inputs)
    check_network(network, spec, 128)
    with pytest.raises(BuildError, match=said):
        check_network(network, replace(spec, inputs=inputs), 128)


def test_what_does_not_parse_is_said_with_its_node(
    rtx: TensorRT, engine_bundle: Bundle, engine_graph: Callable[[Phase], onnx.ModelProto]
) -> None:
    model = engine_graph("decode")
    attention = next(n for n in model.graph.node if n.op_type == "Attention")
    attention.attribute.append(helper.make_attribute("softcap", 30.0))
    request = request_of(engine_bundle, "decode")
    request.path.write_bytes(model.SerializeToString())
    with pytest.raises(BuildError, match=r"does not parse decode.onnx: .*softcap.*Attention"):
        built(rtx, request)


def test_what_has_no_kernel_is_built_in_steps_and_said(
    rtx: TensorRT, engine_bundle: Bundle
) -> None:
    """Attention over more than 20,480 keys has none in TensorRT-RTX 1.7."""

    class Notes(NoProgress):
        said = ""

        def note(self, text: str) -> None:
            self.said += text

    notes = Notes()
    request = request_of(engine_bundle, "decode", limits=EngineLimits(4, 32704, 64))
    plan = build_plan(rtx, request, notes)
    assert plan.decomposed
    assert "decode: TensorRT has no kernel for some attention" in notes.said


def attentions(rtx: TensorRT, network: Any) -> list[Any]:
    layers = [network.get_layer(i) for i in range(network.num_layers)]
    return [layer for layer in layers if rtx.attention_of(layer) is not None]


def parsed(
    rtx: TensorRT, bundle: Bundle, phase: Phase
) -> tuple[Any, tuple[AttentionNode, ...], Any]:
    """The network of a graph as it was parsed, its attention nodes, and what the network depends
    on."""
    data = with_fixed_dim(bundle.graph_path(phase).read_bytes(), "capacity", 128)
    logger = shared_logger(rtx.module).for_tensorrt
    builder = rtx.module.Builder(logger)
    network = builder.create_network(rtx.network_flags)
    parser = rtx.module.OnnxParser(network, logger)
    assert parser.parse(data, str(bundle.graph_path(phase)))
    return network, attention_nodes(data), (builder, parser)
