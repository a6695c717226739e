"""The plan and the programs of compiled models: placement, stages, overlap, freezing, variants."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trlow.errors import ModelError
from trlow.nn import (
    Variant,
    bn,
    cnn,
    compile_model,
    conv,
    fc,
    flatten,
    gap,
    maxpool,
    mlp,
    relu,
    seq,
)
from trlow.program import Stream
from trlow.range_op import Collective, Launch
from trlow.region import CNN_TABLE, READINESS_TABLE, RegionTable, bucket_table

TABLES = pytest.mark.parametrize("table", [CNN_TABLE, READINESS_TABLE], ids=lambda t: t.name)
DIGITS = (8, 8, 1)
FIXED = (Variant("short", 5, 8, 8),)


def build(model=None, **overrides):
    arguments = {"input_shape": DIGITS, "local_batch": 32, "world_size": 4} | overrides
    return compile_model(model or cnn(), **arguments)


def stage_names(program, phase=0):
    return [stage.name for stage in program.phases[phase]]


def place(program, name, phase=0):
    return stage_names(program, phase).index(name)


def stage(program, name, phase=0):
    return program.phases[phase][place(program, name, phase)]


def region_names(plan, region):
    return [tensor.name for tensor in plan.tensors_in(region)]


def test_every_tensor_of_the_cnn_stands_in_its_region():
    plan = build().plan
    assert region_names(plan, "W_FIRST_CONV") == ["conv0.weight"]
    assert region_names(plan, "W_DEEP_CONV") == ["conv3.weight", "conv7.weight"]
    assert region_names(plan, "W_FC_WEIGHT") == ["fc11.weight"]
    assert region_names(plan, "W_FC_BIAS") == ["fc11.bias"]
    assert region_names(plan, "W_BN_WEIGHT") == ["bn1.weight", "bn4.weight", "bn8.weight"]
    assert region_names(plan, "W_EQ_SCALE") == ["eq.bn1.scale", "eq.bn4.scale", "eq.bn8.scale"]
    assert region_names(plan, "G_DEEP_CONV") == ["grad.conv3.weight", "grad.conv7.weight"]
    assert region_names(plan, "M_FIRST_CONV") == ["moment.conv0.weight"]
    assert region_names(plan, "B_PREV_MEAN") == ["prev.bn1.mean", "prev.bn4.mean", "prev.bn8.mean"]
    assert region_names(plan, "R_RESULT") == ["result"]
    assert plan["conv3.weight"].shape == (3, 3, 16, 32)
    assert plan["fc11.weight"].shape == (64, 10)
    assert plan["a.data"].shape == (32, 8, 8, 1)


def test_regions_without_a_use_yet_stay_empty():
    plan = build().plan
    for region in plan.table:
        if region.kind in {"E", "A", "G_LOW", "V", "N"} or region.name.endswith("_LOW"):
            assert not plan.tensors_in(region.name), region.name


def test_without_momentum_there_are_no_moments():
    plan = build(optimizer="sgd").plan
    assert not any(plan.tensors_in(r.name) for r in plan.table if r.kind == "M")


def test_the_parameters_are_counted_once():
    compiled = build()
    convs = 9 * (1 * 16 + 16 * 32 + 32 * 64)
    assert compiled.n_parameters == convs + 2 * (16 + 32 + 64) + 64 * 10 + 10


def test_readiness_puts_later_fully_connected_layers_behind_the_deep_gradients():
    plan = build(mlp(), table=READINESS_TABLE).plan
    assert region_names(plan, "G_FC_WEIGHT") == ["grad.fc1.weight"]
    assert region_names(plan, "G_DEEP_FC_WEIGHT") == ["grad.fc3.weight", "grad.fc5.weight"]
    deep, first = plan.buckets()
    assert deep.stage == "DEEP_COMM"
    assert deep.range.contains(plan.range("grad.fc3.bias"))
    assert deep.range.contains(plan.range("result"))
    assert first.range.contains(plan.range("grad.fc1.weight"))


def test_readiness_sends_all_of_a_cnns_classifier_early():
    plan = build(table=READINESS_TABLE).plan
    deep, _ = plan.buckets()
    assert deep.range.contains(plan.range("grad.fc11.weight"))


@TABLES
@pytest.mark.parametrize("model", [cnn(), mlp()], ids=["cnn", "mlp"])
def test_weights_gradients_and_moments_lie_alike(table, model):
    plan = build(model, table=table).plan
    for region in plan.table:
        if region.kind == "W" and region.parameter is not None:
            family = plan.table.family(region.parameter)
            sizes = {plan.region_range(family[kind].name).nbytes for kind in "WGM"}
            assert len(sizes) == 1, region.name


def test_a_training_step_has_the_stages_of_the_design():
    program = build().programs["train"]
    after = [
        "ZERO_GRAD",
        "FIRST_FWD",
        "DEEP_FWD_BWD",
        "FIRST_BWD",
        "DEEP_COMM",
        "FIRST_COMM",
        "NAN_CHECK",
        "ACCUM_METRICS",
        "STATS_COMM",
        "UPDATE_STATS",
        "WEIGHT_UPDATE",
    ]
    assert stage_names(program, 0) == ["XFER_B", *after]
    assert stage_names(program, 1) == ["XFER_A", *after]
    streams = {s.name: s.stream for s in program.phases[0]}
    assert streams["XFER_B"] == Stream.TRANS
    assert {streams[n] for n in ("FIRST_FWD", "DEEP_FWD_BWD", "FIRST_BWD")} == {Stream.COMP_1}
    assert streams["DEEP_COMM"] == streams["WEIGHT_UPDATE"] == Stream.UPDATE


def test_validation_and_the_programs_between_steps():
    programs = build().programs
    assert stage_names(programs["validate"], 0) == ["XFER_B", "VAL_FWD_A"]
    assert stage_names(programs["validate"], 1) == ["XFER_A", "VAL_FWD_B"]
    assert stage_names(programs["validate_result"]) == ["VAL_RESULT_COMM"]
    assert stage_names(programs["bn_inference"]) == ["UPDATE_BN_INF"]
    assert stage_names(programs["broadcast"]) == ["BROADCAST"]


def test_one_rank_communicates_nothing():
    compiled = build(world_size=1)
    assert {"broadcast", "validate_result"}.isdisjoint(compiled.programs)
    for program in compiled.programs.values():
        for stages in program.phases:
            for one in stages:
                assert not any(isinstance(action, Collective) for action in one.actions)


def test_without_batch_norm_there_are_no_statistics():
    compiled = build(mlp())
    assert {"STATS_COMM", "UPDATE_STATS"}.isdisjoint(stage_names(compiled.programs["train"]))
    assert "bn_inference" not in compiled.programs
    assert compiled.plan.region_range("B_NEXT_MEAN").nbytes == 0


@TABLES
@pytest.mark.parametrize("model", [cnn(), mlp()], ids=["cnn", "mlp"])
@pytest.mark.parametrize("phase", [0, 1])
def test_the_deep_all_reduce_runs_beside_the_first_layers_backward(table, model, phase):
    """Invariant 15."""
    program = build(model, table=table).programs["train"]
    assert program.concurrent(
        phase, place(program, "DEEP_COMM", phase), place(program, "FIRST_BWD", phase)
    )


def test_what_else_runs_side_by_side_and_what_does_not():
    program = build().programs["train"]

    def beside(one, other):
        return program.concurrent(0, place(program, one), place(program, other))

    assert beside("XFER_B", "DEEP_FWD_BWD")
    assert beside("XFER_B", "WEIGHT_UPDATE")
    assert beside("ZERO_GRAD", "FIRST_FWD")
    assert beside("STATS_COMM", "FIRST_BWD") is False  # behind FIRST_COMM on one stream
    assert not beside("ZERO_GRAD", "DEEP_FWD_BWD")
    assert not beside("DEEP_FWD_BWD", "DEEP_COMM")
    assert not beside("FIRST_BWD", "FIRST_COMM")
    assert not beside("FIRST_BWD", "WEIGHT_UPDATE")


def test_a_step_cannot_overtake_the_one_before():
    program = build().programs["train"]
    across = {
        (program.phases[h.src[0]][h.src[1]].name, program.phases[h.dst[0]][h.dst[1]].name)
        for h in program.hazards()
        if h.distance == 1
    }
    assert ("WEIGHT_UPDATE", "FIRST_FWD") in across
    assert ("UPDATE_STATS", "DEEP_FWD_BWD") in across
    assert ("XFER_B", "FIRST_FWD") in across  # what was loaded is read
    assert ("WEIGHT_UPDATE", "XFER_A") in across  # its learning rate lies in the slot
    assert ("DEEP_FWD_BWD", "XFER_A") in across  # its labels too


@TABLES
@pytest.mark.parametrize("model", [cnn(), mlp()], ids=["cnn", "mlp"])
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("frozen", [set(), {0}, {1}], ids=str)
def test_every_program_orders_all_its_conflicts(table, model, world_size, frozen):
    """`edges` raises for two stages that conflict over more than a step and are not ordered."""
    if frozen == {0} and model == mlp():
        frozen = {3}
    compiled = build(model, table=table, world_size=world_size, frozen=frozen, variants=FIXED)
    for program in compiled.programs.values():
        program.edges()


@TABLES
def test_every_trained_gradient_is_in_exactly_one_bucket(table):
    """Invariant 10, for compiled models."""
    for model in (cnn(), mlp()):
        compiled = build(model, table=table)
        buckets = compiled.plan.buckets()
        for parameter in compiled.parameters:
            gradient = compiled.plan.range(parameter.gradient)
            assert sum(bucket.range.contains(gradient) for bucket in buckets) == 1


PARAMETRIC = {
    "cnn": (cnn(), (0, 1, 3, 4, 7, 8, 11)),
    "mlp": (mlp(), (1, 3, 5)),
}


@given(which=st.sampled_from(sorted(PARAMETRIC)), data=st.data(), readiness=st.booleans())
def test_freezing_moves_nothing_and_leaves_no_trace_in_the_update(which, data, readiness):
    """Invariants 7, 10 and 16 for any set of frozen layers."""
    model, layers = PARAMETRIC[which]
    frozen = data.draw(st.sets(st.sampled_from(layers)))
    table = READINESS_TABLE if readiness else CNN_TABLE
    compiled = build(model, table=table, frozen=frozen)
    plan = compiled.plan
    assert plan.fingerprint() == build(model, table=table).plan.fingerprint()

    program = compiled.programs["train"]
    written = [r for one in program.phases[0] if one.name == "WEIGHT_UPDATE" for r in one.writes]
    reduced = [
        action.range
        for one in program.phases[0]
        if one.name in {"DEEP_COMM", "FIRST_COMM"}
        for action in one.actions
    ]
    added = {
        action.args[0].first
        for one in program.phases[0]
        for action in one.actions
        if isinstance(action, Launch) and action.kernel in {"conv2d_bwd_weight", "fc_bwd_weight"}
    }
    for parameter in compiled.parameters:
        weight, gradient = plan.range(parameter.name), plan.range(parameter.gradient)
        trained = parameter.layer not in frozen
        assert any(r.contains(weight) for r in written) == trained
        if trained:
            assert sum(r.contains(gradient) for r in reduced) == 1
        if parameter.kind in {"conv", "fc_weight"}:
            assert (parameter.gradient in added) == trained
    assert any(r.contains(plan.range("result")) for r in reduced)


@TABLES
def test_every_bucket_is_cleared_first_and_checked_before_it_is_used(table):
    compiled = build(table=table)
    program = compiled.programs["train"]
    for bucket in compiled.plan.buckets():
        assert bucket.range in stage(program, "ZERO_GRAD").writes
        assert bucket.range in stage(program, "NAN_CHECK").reads
    skip = compiled.plan.range("skip")
    assert skip in stage(program, "ZERO_GRAD").writes
    for name in ("ACCUM_METRICS", "UPDATE_STATS", "WEIGHT_UPDATE"):
        for op in stage(program, name).ops:
            assert skip in op.reads, name


def test_frozen_gradients_are_cleared_all_the_same():
    """A frozen batch norm still adds to its gradient; nothing may grow without bound."""
    compiled = build(frozen={0, 1, 4, 8, 11})
    cleared = stage(compiled.programs["train"], "ZERO_GRAD").writes
    for parameter in compiled.parameters:
        gradient = compiled.plan.range(parameter.gradient)
        assert any(r.contains(gradient) for r in cleared), parameter.name


def test_a_frozen_first_layer_loses_its_backward_and_keeps_the_second_bucket():
    """Invariant 16."""
    program = build(frozen={0}).programs["train"]
    names = stage_names(program)
    assert "FIRST_BWD" not in names
    (action,) = stage(program, "FIRST_COMM").actions
    assert (action.range.first, action.range.last) == ("G_BN_BIAS", "G_FC_WEIGHT")


def test_a_second_bucket_with_nothing_left_has_no_stage():
    frozen = {0, 1, 4, 8, 11}
    compiled = build(frozen=frozen)
    assert "FIRST_COMM" not in stage_names(compiled.programs["train"])
    assert [b.stage for b in compiled.plan.buckets(compiled.network.frozen_gradients)] == [
        "DEEP_COMM"
    ]


def test_no_gradient_flows_below_the_lowest_trained_layer():
    program = build(frozen={0, 1, 3, 4}).programs["train"]
    kernels = [a.kernel for a in stage(program, "DEEP_FWD_BWD").actions if isinstance(a, Launch)]
    assert kernels.count("conv2d_bwd_weight") == 1
    assert "conv2d_bwd_data" not in kernels
    assert "maxpool_bwd" not in kernels


def test_a_frozen_middle_layer_passes_the_gradient_on():
    program = build(frozen={3, 4}).programs["train"]
    launches = [a for a in stage(program, "DEEP_FWD_BWD").actions if isinstance(a, Launch)]
    assert [a.args[0].first for a in launches if a.kernel == "conv2d_bwd_data"] == [
        "grad.out.maxpool6",
        "grad.out.relu2",
    ]
    assert [a.args[0].first for a in launches if a.kernel == "conv2d_bwd_weight"] == [
        "grad.conv7.weight"
    ]


def test_one_update_a_region_when_nothing_is_frozen():
    program = build().programs["train"]
    launches = stage(program, "WEIGHT_UPDATE").actions
    assert [(a.kernel, a.args[0].first, a.args[0].last) for a in launches] == [
        ("momentum_bias", "bn1.bias", "bn8.bias"),
        ("momentum_bias", "bn1.weight", "bn8.weight"),
        ("momentum_bias", "fc11.bias", "fc11.bias"),
        ("momentum_weight", "fc11.weight", "fc11.weight"),
        ("momentum_weight", "conv0.weight", "conv0.weight"),
        ("momentum_weight", "conv3.weight", "conv7.weight"),
    ]


VARIANTS = (Variant("small", 8, 8, 8), Variant("large", 32, 12, 10), Variant("tail", 5, 4, 4))


def test_variants_share_offsets_and_slots_hold_the_largest():
    """Invariant 6."""
    compiled = build(variants=VARIANTS)
    plan = compiled.plan
    assert plan["a.data"].slot_nbytes >= 32 * 12 * 10 * 4
    for name in ("a.data", "out.conv0", "grad.out.conv7", "a.label", "predicted"):
        offsets = {plan.tensor(name, variant).offset for variant in (None, *plan.variants)}
        assert len(offsets) == 1
    assert plan.tensor("out.conv7", "large").shape == (32, 6, 5, 64)
    assert plan.tensor("a.label", "tail").shape == (5,)
    assert set(compiled.programs) >= {"train", "train:small", "train:large", "train:tail"}


def test_variants_communicate_in_equal_stages():
    compiled = build(variants=VARIANTS)
    for name in ("ZERO_GRAD", "DEEP_COMM", "FIRST_COMM", "STATS_COMM"):
        made = {stage(compiled.programs[p], name) for p in ("train", "train:small", "train:large")}
        assert len(made) == 1, name


def test_a_variant_computes_on_its_own_sizes():
    program = build(variants=VARIANTS).programs["train:large"]
    (launch,) = stage(program, "FIRST_FWD").actions
    assert launch.args[3:] == (32, 12, 10, 1, 12, 10, 16, 3, 3, 1, 1)
    assert launch.work == 32 * 12 * 10 * 16


@TABLES
@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "nesterov"])
def test_collectives_come_in_one_order_on_all_phases(table, optimizer):
    program = build(table=table, optimizer=optimizer).programs["train"]
    assert program.collectives(0) == program.collectives(1)
    assert len(program.collectives(0)) == 3


def test_the_broadcast_covers_every_persistent_tensor():
    compiled = build()
    ranges = stage(compiled.programs["broadcast"], "BROADCAST").writes
    for tensor in compiled.plan.tensors:
        persistent = compiled.plan.table[tensor.region].persistent
        covered = any(r.contains(compiled.plan.range(tensor.name)) for r in ranges)
        assert covered == persistent, tensor.name


def test_scratch_of_one_stream_is_used_on_that_stream_alone():
    program = build().programs["train"]
    plan = build().plan
    scratch = plan.region_range("T_COMP_1")
    for one in program.phases[0]:
        if any(r.overlaps(scratch) for r in (*one.reads, *one.writes)):
            assert one.stream == Stream.COMP_1


def test_a_launch_lists_outputs_inputs_and_sizes():
    """What a kernel is given equals what the op says it reads and writes."""
    for program in build().programs.values():
        for stages in program.phases:
            for one in stages:
                for op in one.ops:
                    given_ranges = {
                        item
                        for action in op.actions
                        if isinstance(action, Launch)
                        for item in action.args
                        if not isinstance(item, int)
                    }
                    assert given_ranges <= {*op.reads, *op.writes}


def test_a_model_may_begin_with_a_norm_or_a_pool():
    model = seq(bn(), maxpool(2), conv(4, 3), relu(), gap(), fc(3))
    program = build(model).programs["train"]
    kernels = [a.kernel for a in stage(program, "FIRST_FWD").actions]
    assert kernels == ["bn_stats", "bn_apply", "maxpool_fwd", "conv2d_fwd"]
    kernels = [a.kernel for a in stage(program, "FIRST_BWD").actions]
    assert kernels == ["conv2d_bwd_weight", "conv2d_bwd_data", "maxpool_bwd", "bn_bwd_reduce"]


def test_a_single_layer_is_a_model():
    program = build(seq(flatten(), fc(10))).programs["train"]
    assert [a.kernel for a in stage(program, "DEEP_FWD_BWD").actions] == ["softmax_xent"]
    assert [a.kernel for a in stage(program, "FIRST_BWD").actions] == [
        "fc_bwd_weight",
        "fc_bwd_bias",
    ]


def test_buckets_lie_one_behind_the_other():
    plan = build().plan
    ordered = sorted(plan.buckets(), key=lambda b: b.range.offset)
    assert all(a.range.end <= b.range.offset for a, b in pairwise(ordered))


def without(table, *names):
    regions = tuple(r for r in table.regions if r.name not in names)
    buckets = tuple(b for b in table.buckets if not {b.first, b.last} & set(names))
    return RegionTable("mine", regions, buckets)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"optimizer": "adam"}, "optimizer 'adam'"),
        ({"world_size": 0}, "world_size=0"),
        ({"world_size": True}, "world_size=True"),
        ({"local_batch": 0}, "local_batch=0"),
        ({"local_batch": 2.0}, "local_batch=2.0"),
        ({"frozen": {12}}, "frozen layer 12: the model has the layers 0 to 11"),
        ({"frozen": {-1}}, "frozen layer -1"),
        ({"frozen": {2}}, "frozen layer 2 is relu, which has no parameters"),
        ({"variants": [Variant("a", 0, 8, 8)]}, "variant a: local_batch=0"),
        ({"variants": [Variant("a", 4, 8, -8)]}, "variant a: width=-8"),
        ({"variants": [Variant("a", 4, 8, 8), Variant("a", 5, 8, 8)]}, "must be distinct"),
        ({"variants": [Variant("a", 4, 1, 1)]}, "layer 6 maxpool: input shape"),
        ({"table": without(CNN_TABLE, "W_FIRST_CONV")}, "no W_ region of family FIRST_CONV"),
        ({"table": bucket_table("mine", 2)}, "no W_ region of family FIRST_CONV"),
        (
            {"table": without(CNN_TABLE, "G_BN_BIAS")},
            "no G_ region of family BN_BIAS",
        ),
    ],
)
def test_what_does_not_fit_is_refused(arguments, message):
    with pytest.raises(ModelError) as caught:
        build(**arguments)
    assert message in str(caught.value)


def test_a_gradient_outside_every_bucket_is_refused():
    table = RegionTable("mine", CNN_TABLE.regions, CNN_TABLE.buckets[:1])
    with pytest.raises(ModelError, match=r"grad\.conv0\.weight of layer 0 is in the buckets"):
        build(table=table)


def test_a_variant_that_changes_a_fully_connected_layer_is_refused():
    with pytest.raises(ModelError) as caught:
        build(mlp(), variants=[Variant("large", 32, 9, 8)])
    for part in ("layer 1 fc", "variant large", "(72,)", "(64,)"):
        assert part in str(caught.value)


def test_norms_of_one_model_share_their_numbers():
    with pytest.raises(ModelError, match="layers 1 and 3"):
        build(seq(conv(4, 3), bn(), conv(4, 3), bn(momentum=0.2), gap(), fc(10)))


def test_a_model_without_weights_is_refused():
    with pytest.raises(ModelError, match=r"add a conv\(\) or an fc\(\)"):
        build(seq(flatten(), relu()))
