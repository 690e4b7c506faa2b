"""Presets, precedence, digests, and values that are refused."""

from __future__ import annotations

import json

import pytest

from protofl import options, protocol, registry, suites
from protofl.errors import UserError
from protofl.experiment import Settings, cells
from protofl.protocol import Protocol, digest


def settings(**given: object) -> Settings:
    s = Settings()
    for name, value in given.items():
        s.take(name, value, "test")
    return s


def test_every_preset_makes_a_protocol_and_knows_its_methods() -> None:
    for name in protocol.preset_names():
        fields = protocol.preset(name)
        fields.pop("seeds")
        made = Protocol(**protocol.coerce(fields))
        for method in registry.ORDER:
            registry.Spec(method, (), name).build(made)


def test_values_of_the_settings() -> None:
    nh = protocol.preset("fednh.cifar10")
    assert (nh["clients"], nh["participation"], nh["grad_clip_norm"], nh["model"]) == (
        100,
        0.1,
        10.0,
        "cnn_fednh",
    )
    assert nh["beta"] == 0.3 and protocol.preset("fednh.tinyimagenet")["weight_decay"] == 1e-3
    assert protocol.preset("fednh.cifar10_r03")["participation"] == 0.3
    n100 = protocol.preset("moon.cifar100_n100")
    assert (n100["model"], n100["clients"], n100["beta"], n100["rounds"]) == ("resnet50_bn", 100, 0.5, 500)
    assert protocol.preset("fedproc.cifar10")["z_normalize"] is True
    assert protocol.method_setting("moon.cifar10", "moon") == {"mu": 5.0}
    assert protocol.method_setting("moon.cifar100_n100", "moon") == {"mu": 1.0}  # over its base's table
    assert protocol.method_setting("moon.cifar100_n100", "fedprox") == {"mu": 0.001}  # from its base
    assert protocol.method_setting("fedcspc.cifar100", "moon") == {"mu": 1.0}
    assert protocol.method_setting("digits.digits", "fedcspc") == {"calib_epochs": 10}
    assert protocol.method_setting("digits.quick", "fedcspc") == {"calib_epochs": 5}
    quick, full = protocol.preset("digits.quick"), protocol.preset("digits.digits")
    assert {k for k in full if quick[k] != full[k]} == {"rounds", "local_epochs", "client_lr", "lr_decay_per_round"}


def test_the_data_set_chooses_the_preset() -> None:
    def first(**given: object) -> Protocol:
        return cells(settings(**given))[0].protocol

    assert first().model == "mlp" and first().clients == 10
    assert (first(dataset="cifar10").model, first(dataset="cifar10").augment[0]) == (
        "simple_cnn",
        "reflect_pad4",
    )
    assert first(dataset="tiny-imagenet").model == "resnet18_gn2"
    assert first(dataset="vireo172").stem == "k7s2"
    other = first(dataset="./mine.npz")
    assert (other.model, other.augment, other.mean, other.std, other.projection_dim) == (
        "simple_cnn",
        (),
        (0.0,),
        (1.0,),
        256,
    )


def test_precedence() -> None:
    """Command line > method preset > the setting's table > the method's default."""
    s = settings(dataset="cifar10", methods="moon,fedproc", lr="0.5", rounds="7", preset="moon.cifar10")
    s.take_text("moon.temperature=0.1")
    s.take_text("momentum=0.5")
    moon, fedproc = cells(s)[:2]
    assert (moon.protocol.client_lr, moon.protocol.rounds, moon.protocol.momentum) == (0.5, 7, 0.5)
    built = moon.method.build(moon.protocol)
    assert (built.mu, built.temperature) == (5.0, 0.1)
    s.take_text("moon.mu=2")
    assert cells(s)[0].method.build(moon.protocol).mu == 2.0
    experiment = fedproc.protocol.replace(z_normalize=True, client_lr=0.1, drop_last=True)
    code = registry.Spec("fedproc", (("preset", "official_code"), ("proto_weighting", "uniform"))).build(experiment)
    assert (code.alpha_schedule, code.proto_weighting) == ("linear_100", "uniform")


def test_protocol_fields_of_a_method_must_be_the_tables() -> None:
    with pytest.raises(UserError, match="--set client_lr=0.1"):
        registry.Spec("fedproc", (("preset", "official_code"),)).build(Protocol(z_normalize=True, drop_last=True))
    with pytest.raises(UserError, match="--set bn_buffers=local"):
        registry.Spec("moon", (("bn_buffers", "local"),)).build(Protocol())
    registry.Spec("moon", (("bn_buffers", "average"),)).build(Protocol())


def test_suite_file(tmp_path: object) -> None:
    path = tmp_path / "s.toml"  # type: ignore[operator]
    path.write_text('methods = ["fedavg", "moon"]\nbeta = [0.1, 0.5]\nseeds = [3]\nrounds = 2\n[method.moon]\nmu = 4\n')
    s = suites.read(str(path)).parts[0]
    made = cells(s)
    assert [(c.method.name, c.protocol.beta, c.protocol.seed) for c in made] == [
        ("fedavg", 0.1, 3), ("moon", 0.1, 3), ("fedavg", 0.5, 3), ("moon", 0.5, 3),
    ]  # fmt: skip
    s.take("rounds", "9", "--rounds")
    assert cells(s)[1].protocol.rounds == 9 and cells(s)[1].method.build(made[1].protocol).mu == 4.0


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"methods": "fedprocc"}, "did you mean 'fedproc'"),
        ({"methods": "fedavg,moonn,fedproc"}, "did you mean 'moon'"),
        ({"methods": "fedavg,fedavg"}, "twice"),
        ({"beta": "0"}, "> 0"),
        ({"beta": "-1"}, "> 0"),
        ({"beta": "nan"}, "not a number"),
        ({"beta": "inf"}, "not a number"),
        ({"beta": "abc"}, "not a number"),
        ({"participation": "1.5"}, "<= 1"),
        ({"participation": "0"}, "> 0"),
        ({"partition": "noiid"}, "is not one of"),
        ({"rounds": "2.5"}, "not a whole number"),
        ({"rounds": "0"}, ">= 1"),
        ({"seeds": "a"}, "not a whole number"),
        ({"preset": "moon.cifar"}, "did you mean 'moon.cifar1"),
        ({"metrics": "gm,pmv"}, "did you mean 'pm_v'"),
        ({"lrr": "1"}, "did you mean 'lr'"),
        ({"drop_last": "maybe"}, "true | false"),
        ({"partition": "file"}, "--partition-file"),
        ({"partition": "iid", "partition_file": "s.npz"}, "no other scheme"),
        ({"seed": "3"}, "set seeds"),
        ({"preset": ""}, "is empty"),
        ({"beta": ""}, "is empty"),
    ],
)
def test_refused(given: dict[str, str], said: str) -> None:
    with pytest.raises(UserError) as caught:
        cells(settings(**given))
    assert said in str(caught.value).replace("false | true", "true | false") and "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["lrr=0.1", "novalue", "=3", "moonn.mu=1", "moon.mu.x=1"])
def test_set_is_refused(text: str) -> None:
    with pytest.raises(UserError):
        s = settings()
        s.take_text(text)
        cells(s)


@pytest.mark.parametrize(
    "text", ["methods = 3", "method = 3", "[method]\nmoon = 1", "seeds = [[1]]", "beta = true", "rounds = [1, 2]",
             "rounds = {a = 1}", "preset = 3", "beta = [[0.5]]", "beta = {a = 1}", "dataset = ['digits']", "mean = [1, [2]]",
             "partition_seed = [1]", "methods = [[1]]", "methods = []", "seeds = []", "participation = 'half'"]
)  # fmt: skip
def test_suite_files_of_wrong_types_are_refused(text: str, tmp_path: object) -> None:
    path = tmp_path / "s.toml"  # type: ignore[operator]
    path.write_text(text + "\n")
    with pytest.raises(UserError) as caught:
        cells(suites.read(str(path)).parts[0])
    assert "\n" not in str(caught.value)


def test_unknown_options_of_methods_are_refused() -> None:
    with pytest.raises(UserError, match="did you mean 'mu'"):
        registry.Spec("fedprox", (("muu", "1"),)).build(Protocol())
    s = settings(methods="fedavg")
    s.take_text("moon.mu=1")
    with pytest.raises(UserError, match="add it to --methods"):
        cells(s)


def test_every_field_that_can_change_a_number_changes_the_digest() -> None:
    plain = Protocol(dataset="d")
    other = {
        bool: lambda v: not v,
        int: lambda v: v + 1,
        float: lambda v: v * 0.5 + 0.1,
        tuple: lambda v: (*v, "gm"),
    }
    for name, field in options.fields(Protocol).items():
        o = options.option(field)
        if name in ("partition", "partition_file", "metrics", "std_over"):
            continue
        value = next(r for r in o.readings if r != field.default) if o.closed else (
            5 if o.words else (1.0, 2.0) if name in ("mean", "std")
            else other.get(type(field.default), lambda v: v + "x")(field.default)
        )  # fmt: skip
        changed = plain.replace(**{name: value})
        same = digest(changed.document()) == digest(plain.document())
        assert same == (name in ("features", "report", "std_ddof")), name


def test_beta_moves_no_digest_where_nothing_is_dirichlet() -> None:
    plain = Protocol(partition="iid")
    assert digest(plain.document()) == digest(plain.replace(beta=3.0).document())
    with pytest.raises(UserError, match="beta means nothing"):
        cells(settings(partition="iid", beta="0.1,0.5"))


@pytest.mark.parametrize("name", ["augment", "mean", "std"])
def test_none_is_an_empty_list(name: str) -> None:
    assert protocol.coerce({name: "none"}) == {name: ()} == protocol.coerce({name: []})
    assert options.text(()) == "none"


def test_learning_rate_is_a_function_of_the_round() -> None:
    p = Protocol(client_lr=0.1, lr_decay_per_round=0.9)
    assert [p.learning_rate(t) for t in range(3)] == pytest.approx([0.1, 0.09, 0.081])
    assert p.replace(lr_decay_offset=1).learning_rate(0) == pytest.approx(0.09)
    assert Protocol(client_lr=0.1, lr_decay_offset=1).learning_rate(0) == 0.1


def test_documents_are_strict_json() -> None:
    json.dumps(Protocol().document(), allow_nan=False)


def test_every_option_says_why_and_where_from() -> None:
    for name in registry.ORDER:
        for option, field in options.fields(registry.load(name)).items():
            o = options.option(field)
            assert o.why and o.source, f"{name}.{option}"
    for field_name, field in options.fields(Protocol).items():
        assert options.option(field).why and options.option(field).source, field_name
