"""The catalogue: devices, models and methods by name, with their sources; and files of the user's own."""

import numpy as np
import pytest

from pipeback import methods
from pipeback.planner import Cluster, Device, Link, Model, catalogue, devices
from pipeback.planner.constants import NUMBERS, best_for, constants
from pipeback.planner.hardware import device
from pipeback.planner.techniques import names, technique


@pytest.mark.parametrize("name", catalogue.table("devices"))
def test_every_device_says_where_its_numbers_are_from(name):
    found = device(name)
    assert found.source and found.title and found.flops > 1e14
    known = {"tflops", "memory", "memory_speed", "host", "scale_up", "scale_out", "host_memory", "host_speed"}
    assert found.unconfirmed <= known | {"disk_read", "disk_write"}


def test_units():
    a100 = device("a100_80")
    assert (a100.name, a100.flops, a100.memory, a100.memory_speed) == ("A100", 312e12, 80e9, 2039e9)
    assert (a100.scale_up.speed, a100.scale_out.speed, a100.host.speed) == (300e9, 25e9, 32e9)
    assert a100.intensity == 9750
    assert device("WSE-2").intensity == 50_000 and device("CS-2-75PF").intensity == 500_000


def own(scale_out=5e10, **options):
    return Device("mine", 1e15, 1e11, 2e12, Link(5e10), Link(4e11), Link(scale_out), **options)


def test_clusters():
    cluster = devices("64xA100", link="400 Gb/s", host="8 TB")
    assert (cluster.count, cluster.nodes, str(cluster)) == (64, 8, "64xA100")
    assert cluster.device.scale_out == Link(50e9, "network") and cluster.device.host_memory == 125e9
    assert "host_memory" not in cluster.device.unconfirmed
    mine = own()
    assert devices(mine) == Cluster(mine, 1) and devices("H100").count == 1


MODELS = {  # parameters as their sources have them, to the digits given there
    "gpt:125m": (125e6, 0.02), "gpt:13b": (13.0e9, 0.02), "gpt:175b": (174.6e9, 0.001), "gpt:530b": (529.6e9, 0.001),
    "llama:7b": (6.738e9, 0.001), "llama:8b": (8.03e9, 0.001), "llama:70b": (68.98e9, 0.001),
    "llama:405b": (405e9, 0.005),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_parameters_of_models(name):
    parameters, tolerance = MODELS[name]
    assert Model.named(name).parameters == pytest.approx(parameters, rel=tolerance)


def test_a_model_by_numbers():
    by_text = Model.named("gpt:layers=48,width=8192,heads=64,context=2048")
    assert by_text.layers == Model.gpt(48, 8192, 64, context=2048).layers
    assert by_text.shape == Model.gpt(*map(np.int64, (48, 8192, 64)), context=np.int32(2048)).shape
    longer = Model.named("llama:70b,context=8192")
    assert longer.context == 8192 and longer.parameters == Model.named("llama:70b").parameters
    assert "context=8192 given by you" in longer.source


@pytest.mark.parametrize("call, says", [
    (lambda: device("A10"), "there is no device 'A10'; did you mean 'A100'?"),
    (lambda: devices("64 A100"), "devices='64 A100' cannot be read; write for example devices=64xA100"),
    (lambda: devices("0xA100"), "devices must be a whole number of at least 1, but is '0'"),
    (lambda: devices("8xA100", link="fast"), "link='fast' is no speed above 0; write bytes a second"),
    (lambda: devices("8xA100", link="0GB/s"), "link='0GB/s' is no speed above 0"),
    (lambda: devices("8xA100", link=-1), "link=-1 is no speed above 0"),
    (lambda: own(host_memory=-1.0), "device mine: host_memory must be at least 0, but is -1.0"),
    (lambda: own(scale_out=0.0), "device mine: scale_out must be above 0 B/s, but is 0.0"),
    (lambda: technique("piperdream"), "there is no method 'piperdream'; did you mean 'pipedream'?"),
    (lambda: Model.named("gtp:13b"), "there is no family of models 'gtp'; did you mean 'gpt'?"),
    (lambda: Model.named("gpt:14b"), "there is no gpt: '14b'; did you mean"),
    (lambda: Model.named("gpt:layers=4,width=64"), "heads is missing; give heads=..., or one of gpt:125m"),
    (lambda: Model.named("gpt:13b,contxt=3"), "did you mean 'context'?"),
    (lambda: Model.named("gpt:layers=4,width=10,heads=3"), "heads=3 do not divide width=10; give heads=2"),
    (lambda: Model.gpt(4, 64, 8, kv_heads=3), "kv_heads=3 do not divide heads=8; give kv_heads=8"),
    (lambda: Model.gpt(0, 64, 8), "layers must be a whole number of at least 1, but is 0"),
    (lambda: constants("mine"), "there is no set of constants 'mine'"),
])  # fmt: skip
def test_mistakes_are_named(call, says):
    with pytest.raises(ValueError) as found:
        call()
    assert says in str(found.value)


OWN = """
[devices.mine]
tflops = 100
memory = 24
memory_speed = 1000
host = 20
scale_up = 20
per_node = 2

[models.gpt.tiny]
layers = 2
width = 64
heads = 4

[methods.late]
routine = "flowing"
slack = 3
copies = "stash"
"""


def test_a_file_of_ones_own(tmp_path, monkeypatch):
    file = tmp_path / "own.toml"
    file.write_text(OWN)
    monkeypatch.setenv(catalogue.OWN, str(file))
    mine = device("mine")
    assert (mine.memory, mine.per_node, mine.scale_out.speed, mine.source) == (24e9, 2, 20e9, "a file of your own")
    assert Model.named("gpt:tiny").blocks == 2 and Model.named("gpt:13b").blocks == 40
    assert technique("late").delays(3) == [6, 3, 0] and technique("late").held(0, 3) == 7


@pytest.mark.parametrize("content, read, says", [
    ("[devices", device, "cannot be read"),
    ("devices = 3", device, "devices needs one table per name; write for example"),
    ("[devices.mine]\ntflops = 1", device, "[devices.mine] has no memory; give it in the unit that devices.toml names"),
    ("[methods.mine]\nslack = 1", technique, "[methods.mine] has no routine; give one of those that methods.toml"),
    ("[constants.mine]\nstep = 1", constants, "[constants.mine] has no efficiency; write the entry as"),
])  # fmt: skip
def test_a_file_with_mistakes(content, read, says, tmp_path, monkeypatch):
    file = tmp_path / "own.toml"
    file.write_text(content)
    monkeypatch.setenv(catalogue.OWN, str(file))
    with pytest.raises(ValueError) as found:
        read("mine")
    assert says in str(found.value)


def test_a_file_that_is_not_there(monkeypatch):
    monkeypatch.setenv(catalogue.OWN, "none.toml")
    with pytest.raises(ValueError, match="none.toml cannot be read"):
        device("A100")


@pytest.mark.parametrize("name", names())
def test_methods_are_those_of_pipeback(name):
    """The catalogue's delays, copies and state are what the methods themselves say."""
    if name == "interleaved" and name not in methods.available():
        pytest.skip("a schedule that the planner alone has")
    options = {"pipemare": {"anneal": 10}, "pipedream_2bw": {"micro_batches": 8}}.get(name, {})
    real, mine = methods.create(name, **options), technique(name)
    for stages in (1, 2, 5, 8):
        assert mine.delays(stages) == real.delays(stages)
        wanted = [real.held(s, stages) for s in range(stages)]
        if name != "pipedream_2bw" or stages > 1:
            assert [mine.held(s, stages) for s in range(stages)] == wanted
    assert mine.state == real.state_copies


def test_every_method_of_pipeback_is_in_the_catalogue():
    missing = set(methods.available()) - set(names())
    assert not missing, f"write an entry in pipeback/planner/catalogue/methods.toml for {sorted(missing)}"


def test_constants_say_how_they_were_fitted():
    for name in catalogue.table("constants"):
        found = constants(name)
        assert "by pipeback plan fit" in found.fitted_on and found.valid
        assert all(getattr(found, number) > 0 for number in NUMBERS)
    assert "vTrain" in constants().fitted_on
    assert best_for("A100", "none").name == best_for("TPUv5p", "all").name == "default"
    assert (best_for("A100", "all").name, best_for("H200", "all").name) == ("fsdp_a100", "fsdp_h100")
