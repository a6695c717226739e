import re

import pytest

from trlow.errors import ModelError
from trlow.nn import bn, cnn, conv, fc, flatten, gap, maxpool, mlp, relu, seq


def test_shapes_follow_the_layers():
    model = seq(conv(4, 3), maxpool(2), conv(8, 3, stride=2), flatten(), fc(5))
    assert model.shapes((9, 8, 1)) == (
        (9, 8, 1),
        (9, 8, 4),
        (4, 4, 4),
        (2, 2, 8),
        (32,),
        (5,),
    )


@pytest.mark.parametrize("size", range(1, 12))
@pytest.mark.parametrize(("k", "pad"), [(1, 0), (2, 0), (2, 1), (3, 0), (3, 1), (5, 2)])
@pytest.mark.parametrize("stride", [1, 2, 3])
def test_a_convolution_counts_the_windows_that_fit(size, k, stride, pad):
    fitting = len([s for s in range(0, size + 2 * pad, stride) if s + k <= size + 2 * pad])
    model = seq(conv(1, k, stride, pad))
    if fitting:
        assert model.shapes((size, size, 2))[1] == (fitting, fitting, 1)
    else:
        with pytest.raises(ModelError, match="larger than the padded input"):
            model.shapes((size, size, 2))


@pytest.mark.parametrize("k", [1, 3, 5, 7])
def test_a_convolution_keeps_height_and_width_by_default(k):
    assert seq(conv(6, k)).shapes((8, 9, 1))[1] == (8, 9, 6)


def test_a_pool_steps_by_its_window_unless_told():
    assert seq(maxpool(3)).shapes((9, 9, 2))[1] == (3, 3, 2)
    assert seq(maxpool(3, 2)).shapes((9, 9, 2))[1] == (4, 4, 2)


def test_seq_takes_models_apart():
    inner = seq(conv(4, 3), relu())
    assert seq(inner, gap(), fc(2)) == seq(conv(4, 3), relu(), gap(), fc(2))


def test_both_models_end_in_their_classes():
    assert cnn(7).classes((8, 8, 1)) == 7
    assert mlp(3).classes((28, 28, 1)) == 3


@pytest.mark.parametrize(
    ("model", "shape", "index", "shapes"),
    [
        (seq(flatten(), conv(4, 3), fc(2)), (8, 8, 1), 1, ["(64,)", "(height, width, channels)"]),
        (seq(conv(4, 3), fc(2)), (8, 8, 1), 1, ["(8, 8, 4)", "(features,)"]),
        (seq(maxpool(2), maxpool(5), fc(2)), (8, 8, 1), 1, ["(4, 4, 1)", "(0, 0, 1)"]),
        (seq(relu(), gap(), gap()), (8, 8, 3), 2, ["(3,)", "(height, width, channels)"]),
    ],
)
def test_a_misfit_names_the_layer_and_both_shapes(model, shape, index, shapes):
    with pytest.raises(ModelError) as caught:
        model.shapes(shape)
    assert f"layer {index} " in str(caught.value)
    for wanted in shapes:
        assert wanted in str(caught.value)


@pytest.mark.parametrize("what", ["conv", None, 3, object(), conv])
def test_an_unknown_layer_is_refused_with_its_index(what):
    with pytest.raises(ModelError, match=r"layer 1: .* is not a layer"):
        seq(relu(), what)


def test_an_empty_model_is_refused():
    with pytest.raises(ModelError, match="at least one layer"):
        seq()


@pytest.mark.parametrize(
    ("make", "value"),
    [
        (lambda: conv(0, 3), "cout=0"),
        (lambda: conv(-1, 3), "cout=-1"),
        (lambda: conv(1.5, 3), "cout=1.5"),
        (lambda: conv(True, 3), "cout=True"),
        (lambda: conv(4, 0), "k=0"),
        (lambda: conv(4, 2), "k=2"),
        (lambda: conv(4, 3, stride=0), "stride=0"),
        (lambda: conv(4, 3, pad=3), "pad=3"),
        (lambda: conv(4, 3, pad=-1), "pad=-1"),
        (lambda: maxpool(0), "k=0"),
        (lambda: maxpool(2, -2), "stride=-2"),
        (lambda: fc(0), "cout=0"),
        (lambda: bn(momentum=1.5), "momentum=1.5"),
        (lambda: bn(momentum=float("nan")), "momentum=nan"),
        (lambda: bn(eps=0.0), "eps=0.0"),
        (lambda: bn(eps=float("inf")), "eps=inf"),
    ],
)
def test_a_layer_refuses_what_has_no_meaning(make, value):
    with pytest.raises(ModelError, match=re.escape(value)):
        make()


@pytest.mark.parametrize(
    "model", [seq(conv(4, 3)), seq(gap(), fc(1)), seq(flatten(), relu(), fc(1))]
)
def test_a_model_must_end_in_two_classes_or_more(model):
    with pytest.raises(ModelError, match=r"end with fc\(classes\)"):
        model.classes((8, 8, 1))


@pytest.mark.parametrize("shape", [(), (0, 8, 1), (8, -1, 1), (8.0, 8, 1), (True, 8, 1)])
def test_an_input_shape_must_be_positive_integers(shape):
    with pytest.raises(ModelError, match="positive integers"):
        cnn().shapes(shape)
