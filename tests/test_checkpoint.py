"""Checkpoints: the same bits after the files, and always a whole one, whatever happens to disk and process."""

import errno
import json
import math
import os
import shutil
import subprocess
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from pipeback import checkpoint
from pipeback.checkpoint import folders, pipeline_state, save_and_load
from pipeback.checkpoint.save_and_load import CheckpointError
from pipeback.errors import RankError
from pipeback.streaming import sealed_file
from pipeback.tensors.layout import form_of
from tests.checkpoint_faults import LAYERS, METHODS, layered
from tests.laws.cases import data, everything, network, pipeline

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.filterwarnings("ignore:.*takes its statistics")


def process(name, folder, *before):
    command = [*before, sys.executable, "-m", "tests.checkpoint_faults", name, str(folder)]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stderr
    return found.stdout


def trained(count, method="cerebras", seed=0, **options):
    pipe = pipeline(network(seed=seed), method, **options)
    for x, y in data(count):
        pipe.push(x, y)
    return pipe


def same(a, b):
    """Equal tensors, bit for bit and lying alike."""
    return a.keys() == b.keys() and all(
        form_of(a[k]) == form_of(b[k]) and a[k].numpy().tobytes() == b[k].numpy().tobytes() for k in a
    )


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """A folder with two checkpoints of one run, at 7 and 9 micro-batches. Copy it before damaging it."""
    folder = tmp_path_factory.mktemp("two")
    pipe = trained(7)
    checkpoint.save(pipe, folder, facts={"epoch": 1})
    for x, y in data(9)[7:]:
        pipe.push(x, y)
    checkpoint.save(pipe, folder, facts={"epoch": 2})
    return folder


# -- the same bits -------------------------------------------------------------------------------------------------


def test_resume_in_a_new_process(tmp_path):
    """Every method with every layer, in flight; every other one goes on with two workers where there were none."""
    for n, (layer, method) in enumerate((layer, method) for layer in LAYERS for method in METHODS):
        pipe, batches = layered(layer, method, workers=None if n % 3 else 2)
        at = 9 + n % 5
        for x, y in batches[:at]:
            pipe.push(x, y)
        path = tmp_path / f"{layer}-{method}-{2 * (n % 2)}"
        checkpoint.save(pipe, tmp_path / "new", facts={"at": at}).rename(path)
        assert all(map(same, checkpoint.read(path)["stages"], pipe.state_dict()["stages"]))
        for x, y in batches[at:]:
            pipe.push(x, y)
        wanted = everything(pipe)
        pipe.drain()
        torch.save(torch.cat([wanted, everything(pipe)]), path / "wanted.pt")
        pipe.close()
    (tmp_path / "new").rmdir()
    rows = process("resume", tmp_path).splitlines()
    assert len(rows) == len(LAYERS) * len(METHODS) and [row for row in rows if not row.startswith("True")] == []


@pytest.mark.parametrize(("before", "after"), [(None, 2), (2, None), (3, 2)])
def test_another_number_of_workers(before, after, tmp_path):
    whole, first, second = trained(20), trained(11, workers=before), trained(0, seed=4, workers=after)
    checkpoint.save(first, tmp_path)
    checkpoint.load(second, tmp_path)
    for x, y in data(20)[11:]:
        second.push(x, y)
    assert torch.equal(everything(whole), everything(second))


def test_before_the_first_push_and_after_a_drain(tmp_path):
    for count in (0, 6):
        pipe, other = trained(count), trained(3, seed=4)
        pipe.drain()
        checkpoint.load(other, checkpoint.save(pipe, tmp_path))
        for x, y in data(9):
            pipe.push(x, y)
            other.push(x, y)
        assert torch.equal(everything(pipe), everything(other))


class Held:
    """As much of a pipeline as checkpoints need, holding given tensors."""

    def __init__(self, *stages, ranks=None, mine=None):
        self.stages, self.ranks, self.mine = stages, ranks or SimpleNamespace(**ALONE), mine
        self.loaded = None

    streamed = False

    @property
    def held(self):
        return [(s, 0) for s in (range(len(self.stages)) if self.mine is None else self.mine)]

    def wait(self):
        pass

    def share(self, take):
        for s, _ in self.held:
            take(SimpleNamespace(index=s, replica=0), self.stages[s])
        return pipeline_state.Share([pipeline_state.StageShare(s, 0, {}, {"seed": s}) for s, _ in self.held], {}, {})

    def plain(self):
        return {"arrived": 5, "groups": {}, "rate": math.nan, "bound": -math.inf}

    def would_hold(self, plain):
        return self.mine

    def load_state_dict(self, loaded):
        self.loaded = loaded


ALONE = dict(several=False, index=0, count=1, replica=0, gather=lambda value, what: [value])


def test_every_kind_of_tensor(tmp_path):
    base = torch.randn(9, 9)
    odd = torch.tensor([0x7FC00001, 0x7F800000, -0x7FFFFFFF], dtype=torch.int32).view(torch.float32)
    stage = {
        "weight/ünïcode.0": base[3:5], "column": base[:, 1], "transposed": base.t(), "expanded": base[2].expand(4, 9),
        "number": base[0, 0], "none of it": base[:0], "window": base[1:, 2:5], "nan with payload": odd,
        "images": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last), "one": torch.randn(1, 5)[:, ::2],
        "overlapping": torch.arange(12.0).unfold(0, 4, 2), "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
        "half": torch.randn(3).half(), "brain": torch.randn(5).bfloat16()[1:], "flags": torch.rand(7) > 0.5,
        "unsigned": torch.tensor([1, 65535], dtype=torch.uint16), "counter": torch.tensor(2**62),
        "double complex": torch.randn(3, dtype=torch.complex128)[1:],
        "complex number": torch.tensor(1 + 2j, dtype=torch.complex128),
    }  # fmt: skip
    path = checkpoint.save(Held(stage, {}), tmp_path)
    found = checkpoint.read(path)
    for name, tensor in stage.items():
        got = found["stages"][0][name]
        assert form_of(got) == form_of(tensor), name
        bits = [t.resolve_conj().contiguous().view(-1).view(torch.uint8) if t.dim() else t for t in (got, tensor)]
        assert torch.equal(*bits), name
    assert found["stages"][1] == {}
    assert math.isnan(found["plain"]["rate"]) and found["plain"]["bound"] == -math.inf
    sparse = torch.eye(3).to_sparse()
    with pytest.raises(CheckpointError, match="a is a torch.sparse_coo tensor"):
        checkpoint.save(Held({"a": sparse}), tmp_path)


def test_nan_in_the_weights_and_in_the_facts(tmp_path):
    pipe, other = trained(9), trained(2, seed=3)
    pipe.model[1][0].weight.data[0, 0] = math.nan
    facts = checkpoint.load(
        other, checkpoint.save(pipe, tmp_path, facts={"best": math.nan, "worst": math.inf, "n": [1, None]})
    )
    assert math.isnan(facts["best"]) and facts["worst"] == math.inf and facts["n"] == [1, None]
    assert torch.equal(everything(pipe).nan_to_num(7.0), everything(other).nan_to_num(7.0))


def test_only_some_stages(two):
    whole, some = (checkpoint.read(two / "step-00000009", stages) for stages in (None, [1, 3]))
    assert [bool(tensors) for tensors in some["stages"]] == [False, True, False, True, False]
    assert same(some["stages"][3], whole["stages"][3])


# -- damage --------------------------------------------------------------------------------------------------------

FILES = [*(f"stage-{s:03d}.safetensors" for s in range(5)), "state.json"]


def cut(at):
    return lambda file: os.truncate(file, int(at * file.stat().st_size) if at < 1 else file.stat().st_size - 1)


def flip(at):
    def damage(file):
        content = bytearray(file.read_bytes())
        content[int(at * (len(content) - 1))] ^= 4
        file.write_bytes(content)

    return damage


DAMAGE = {
    "empty": cut(0), "cut early": cut(0.01), "cut in the middle": cut(0.5), "cut late": cut(1),
    "first bit": flip(0), "a bit of the header": flip(0.02), "a bit": flip(0.7), "last bit": flip(1),
    "missing": Path.unlink, "longer": lambda file: file.write_bytes(file.read_bytes() + b" "),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_found_before_anything_changes(two, damage, tmp_path):
    pipe = trained(3, seed=6)
    before = everything(pipe)
    for file in FILES:
        shutil.copytree(two, folder := tmp_path / file)
        newest, good = folder / "step-00000009", folder / "step-00000007"
        DAMAGE[damage](newest / file)
        with pytest.raises(CheckpointError) as error:
            checkpoint.load(pipe, newest)
        assert str(newest / file) in str(error.value) and f"besides is {good}" in str(error.value)
        assert torch.equal(before, everything(pipe))
        cheap = file == "state.json" or "bit" not in damage  # a flipped bit is found when the content is read
        assert checkpoint.latest(folder) == (good if cheap else newest)
    with pytest.warns(UserWarning, match="passed over: .*step-00000009"):
        assert checkpoint.load(pipe, folder) == {"epoch": 1}
    assert torch.equal(everything(pipe), everything(trained(7)))


def test_an_edited_state(two, tmp_path):
    shutil.copytree(two, folder := tmp_path / "copy")
    file = folder / "step-00000009" / "state.json"
    document = json.loads(file.read_text())
    assert document["checkpoint"]["facts"] == {"epoch": 2}
    file.write_text(file.read_text().replace('"epoch": 2', '"epoch": 3'))
    with pytest.raises(CheckpointError, match="state.json: the content was altered"):
        checkpoint.read(folder / "step-00000009")
    file.write_text(json.dumps(document))
    with pytest.raises(CheckpointError, match="truncated or edited"):
        checkpoint.read(folder / "step-00000009")


def resealed(folder, change):
    """Edit state.json, its own checksum included."""
    document = sealed_file.unsealed(folder / "state.json")
    change(document)
    (folder / "state.json").write_bytes(sealed_file.sealed(document))


@pytest.mark.parametrize("outside", ["../{name}", "{folder}/{name}", "inner/../../{name}", ".."])
def test_names_that_lead_out_of_the_folder_are_not_followed(two, outside, tmp_path):
    shutil.copytree(two, folder := tmp_path / "copy")
    newest, pipe = folder / "step-00000009", trained(3, seed=6)
    before = everything(pipe)
    shutil.move(newest / "stage-000.safetensors", folder / "stage-000.safetensors")
    name = outside.format(folder=folder, name="stage-000.safetensors")

    def change(document):
        document["files"][name] = document["files"].pop("stage-000.safetensors")

    resealed(newest, change)
    with pytest.raises(CheckpointError, match="no file of this folder, and is not followed.*restore the folder"):
        checkpoint.load(pipe, newest)
    assert torch.equal(before, everything(pipe))
    with pytest.warns(UserWarning, match="passed over: .*is not followed"):
        checkpoint.load(pipe, folder)


@pytest.mark.parametrize(
    ("name", "value", "found"),
    [
        ("fetched", 10**15, "stage 1 that 1000000000000000 operations were taken from its schedule"),
        ("fetched", 1.5, "how far they are .fetched."),
        ("forwards", 10**15, "1000000000000000 have gone forward"),
        ("start", -1, "of 10 micro-batches"),
        ("arrived", 10**15, "of 1000000000000000 micro-batches"),
    ],
)
def test_a_place_that_cannot_be(two, name, value, found, tmp_path):
    """It would be looked for for ever."""
    shutil.copytree(two / "step-00000009", folder := tmp_path / "step-00000009")
    pipe = trained(3, seed=6)
    before = everything(pipe)

    def change(document):
        order = document["state"]["plain"]["loops"][0]["order"]
        if isinstance(order[name], list):
            order[name][1] = value
        else:
            order[name] = value

    resealed(folder, change)
    with pytest.raises(ValueError, match=f"the state .*{found}.*load another one"):
        checkpoint.load(pipe, folder)
    assert torch.equal(before, everything(pipe))


def test_nothing_to_load(two, tmp_path):
    pipe = trained(2)
    assert checkpoint.latest(tmp_path) is None and checkpoint.latest(tmp_path / "nowhere") is None
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(CheckpointError, match="there is no whole checkpoint"):
            checkpoint.load(pipe, folder)
    with pytest.raises(CheckpointError, match=f"besides is {two / 'step-00000009'}"):
        checkpoint.load(pipe, two / "step-00000008")
    with pytest.raises(CheckpointError, match="besides is"):
        checkpoint.read(two)
    with pytest.raises(ValueError, match="the state belongs to method"):
        checkpoint.load(trained(2, "pb"), two)


def test_another_format(two, tmp_path, monkeypatch):
    monkeypatch.setattr(folders, "FORMAT", 2)
    checkpoint.save(trained(2), tmp_path)
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="has format 2, this pipeback reads 1; update pipeback"):
        checkpoint.read(tmp_path / "step-00000002")


# -- the folder ----------------------------------------------------------------------------------------------------


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_how_many_remain(tmp_path):
    pipe = trained(1)
    for keep, left in [(3, [1]), (3, [1, 2]), (3, [1, 2, 3]), (3, [2, 3, 4]), (2, [4, 5]), (1, [6])]:
        checkpoint.save(pipe, tmp_path, keep=keep)
        assert names(tmp_path) == [f"step-{n:08d}" for n in left]
        pipe.push(*data(1)[0])
    with pytest.raises(ValueError, match="keep=0"):
        checkpoint.save(pipe, tmp_path, keep=0)


def test_a_damaged_one_does_not_count(tmp_path):
    pipe = trained(1)
    for n in range(4):
        checkpoint.save(pipe, tmp_path, keep=2)
        if n == 1:
            (tmp_path / "step-00000002" / "stage-001.safetensors").unlink()
        pipe.push(*data(1)[0])
        if n == 2:
            assert names(tmp_path) == ["step-00000001", "step-00000002", "step-00000003"]
    assert names(tmp_path) == ["step-00000003", "step-00000004"]


def test_the_newest_is_the_one_saved_last(tmp_path):
    """A run that goes back to an earlier checkpoint goes on from there, not from the line it has left."""
    pipe = trained(5)
    for _ in range(4):
        checkpoint.save(pipe, tmp_path, keep=4)
        pipe.push(*data(1)[0])
    checkpoint.load(pipe, tmp_path / "step-00000005")
    pipe.push(*data(1)[0])
    again = checkpoint.save(pipe, tmp_path, keep=3, facts="again")
    assert again.name == "step-00000006" and checkpoint.latest(tmp_path) == again
    assert names(tmp_path) == ["step-00000006", "step-00000007", "step-00000008"]
    assert checkpoint.load(pipe, tmp_path) == "again"


def test_the_same_step_again(tmp_path):
    pipe = trained(6)
    for n in range(3):
        path = checkpoint.save(pipe, tmp_path, keep=1, facts=n)
        assert names(tmp_path) == ["step-00000006"] and checkpoint.load(pipe, path) == n


def test_killed_between_two_renames(two, tmp_path):
    """What was to be replaced is found under its other name, and gets its name back."""
    shutil.copytree(two, folder := tmp_path / "copy")
    aside = (folder / "step-00000009").rename(folder / ".step-00000009.replaced")
    assert checkpoint.latest(folder) == aside
    pipe = trained(0)
    assert checkpoint.load(pipe, folder) == {"epoch": 2}
    pipe.push(*data(10)[9])
    checkpoint.save(pipe, folder)
    assert names(folder) == ["step-00000009", "step-00000010"]


def test_what_killed_runs_left_is_removed_but_not_what_a_live_one_writes(tmp_path):
    alive = folders.Draft(tmp_path, 3)
    alive.open()
    for name in (".step-00000002.partial", ".step-00000004.partial", ".step-00000001.removed", "notes"):
        (tmp_path / name).mkdir()
    pipe = trained(2)
    checkpoint.save(pipe, tmp_path)
    assert names(tmp_path) == [".step-00000003.partial", "notes", "step-00000002"]
    pipe.push(*data(1)[0])
    with pytest.raises(CheckpointError, match=".step-00000003.partial: FileExistsError"):
        checkpoint.save(pipe, tmp_path)
    assert alive.partial.exists()
    alive.close()
    checkpoint.save(pipe, tmp_path)
    assert names(tmp_path) == ["notes", "step-00000002", "step-00000003"]


def test_relative_paths_and_file_systems_that_cannot_sync_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sync, pipe = os.fsync, trained(4)

    def fsync(file):
        if Path(f"/proc/self/fd/{file}").is_dir():
            raise OSError(errno.EINVAL, "Invalid argument")
        sync(file)

    monkeypatch.setattr(os, "fsync", fsync)
    assert checkpoint.save(pipe, "runs/a") == Path("runs/a/step-00000004") == checkpoint.latest("runs/a")
    checkpoint.load(trained(0), "runs/a")
    monkeypatch.setattr(
        os, "fsync", lambda file: fsync(file) or (_ for _ in ()).throw(OSError(errno.EIO, "broken disk"))
    )
    pipe.push(*data(1)[0])
    with pytest.raises(CheckpointError, match="stage-00.*broken disk"):
        checkpoint.save(pipe, "runs/a")
    assert names(Path("runs/a")) == ["step-00000004"]


def test_bad_arguments(tmp_path, monkeypatch):
    pipe = trained(2)
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="rank 0 .*file"):
        checkpoint.save(pipe, tmp_path / "file")
    with pytest.raises(CheckpointError, match="checkpoint/facts/a: a set is no JSON value"):
        checkpoint.save(pipe, tmp_path, facts={"a": {1}})
    with pytest.raises(CheckpointError, match="the key 3 is no string"):
        checkpoint.save(pipe, tmp_path, facts={3: 1})
    assert names(tmp_path) == ["file"]
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    for call in (checkpoint.save, checkpoint.load):
        with pytest.raises(ImportError, match=r"pip install 'pipeback\[checkpoint\]'"):
            call(pipe, tmp_path)


# -- faults --------------------------------------------------------------------------------------------------------


def test_killed_at_any_moment(tmp_path):
    """25 times SIGKILL: what is newest is whole and right, and the end is that of a run without kills."""
    found = process("kills", tmp_path)
    assert "in the end []" in found and int(found.split()[1]) >= 15


def test_a_file_that_cannot_be_written(tmp_path):
    assert "trained on" in process("limit", tmp_path)


def test_a_full_disk(tmp_path):
    script = 'mount -t tmpfs -o size=256k tmpfs "$0" && mkdir "$0/runs" && exec "$@"'
    inside = ["unshare", "-rm", "sh", "-c", script, str(tmp_path)]
    if not shutil.which("unshare") or subprocess.run([*inside, "true"], capture_output=True).returncode:
        pytest.skip("a small file system needs user namespaces, which are not allowed here")
    assert "trained on" in process("full", tmp_path / "runs", *inside)


# -- several ranks -------------------------------------------------------------------------------------------------


class Table:
    """Ranks that are threads of this process."""

    several, replica, timeout = True, 0, 1.0

    def __init__(self, index, count, shared):
        self.index = self.rank = index
        self.count, self.shared = count, shared

    def gather(self, value, what):
        values, barrier = self.shared
        values[self.index] = value
        try:
            barrier.wait(10)
            found = list(values)
            barrier.wait(10)
        except threading.BrokenBarrierError:
            raise RankError("rank 1 (HOST, process 1): it has ended", 1) from None
        return found


def on_ranks(count, call):
    """What `call(ranks)` returns or raises on every rank."""
    shared, found = ([None] * count, threading.Barrier(count)), [None] * count

    def run(rank):
        try:
            found[rank] = call(Table(rank, count, shared))
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_each_rank_writes_its_own_stages(tmp_path, monkeypatch):
    stages = [{"a": torch.randn(3, 4)[:, 1:], "b": torch.randn(2)} for _ in range(5)]
    held, written, write = [[0, 1], [2], [3, 4]], [], save_and_load._write
    monkeypatch.setattr(save_and_load, "_write", lambda folder, part: written.append(part.stage) or write(folder, part))
    pipes = {}

    def both(ranks):
        pipe = pipes[ranks.index] = Held(*stages, ranks=ranks, mine=held[ranks.index])
        path = checkpoint.save(pipe, tmp_path, facts={"rank": ranks.index})
        return path, checkpoint.load(pipe, tmp_path)

    assert on_ranks(3, both) == [(tmp_path / "step-00000005", {"rank": 0})] * 3
    assert sorted(written) == [0, 1, 2, 3, 4]
    for pipe in pipes.values():
        for s, stage in enumerate(stages):
            assert same(pipe.loaded["stages"][s], stage if s in pipe.mine else {})
        assert [plain["seed"] for plain in pipe.loaded["plain"]["stages"]] == [0, 1, 2, 3, 4]
    held[:] = [range(5)] * 3  # before the first push
    assert on_ranks(3, both) == [(tmp_path / "step-00000005", {"rank": 0})] * 3
    assert sorted(written) == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_a_fault_of_one_rank_is_raised_by_all(bad, tmp_path, monkeypatch):
    stages, write = [{"a": torch.randn(3)} for _ in range(3)], save_and_load._write
    on_ranks(3, lambda ranks: checkpoint.save(Held(*stages, ranks=ranks, mine=[ranks.index]), tmp_path))

    def fail(folder, part):
        if part.stage == bad:
            with sealed_file.naming(folder / f"stage-{bad:03d}.safetensors"):
                raise OSError(errno.ENOSPC, "No space left on device")
        return write(folder, part)

    def save(ranks):
        try:
            checkpoint.save(Held(*stages, ranks=ranks, mine=[ranks.index]), tmp_path)
        except CheckpointError:
            assert names(tmp_path) == ["step-00000005"]
            raise

    monkeypatch.setattr(save_and_load, "_write", fail)
    found = on_ranks(3, save)
    assert [type(error) for error in found] == [CheckpointError] * 3 and len({str(error) for error in found}) == 1
    assert f"rank {bad} (" in str(found[0]) and f"stage-{bad:03d}.safetensors: OSError: [Errno 28]" in str(found[0])
    assert names(tmp_path) == ["step-00000005"] and checkpoint.latest(tmp_path)


def test_a_slow_disk_is_no_dead_rank(tmp_path, monkeypatch):
    """Writing may last longer than ranks wait for each other; they go on talking."""
    stages, write, calls = [{"a": torch.randn(3)} for _ in range(2)], save_and_load._write, []
    monkeypatch.setattr(
        save_and_load, "_write", lambda folder, part: time.sleep(1.5 * part.stage) or write(folder, part)
    )
    gather = Table.gather
    monkeypatch.setattr(Table, "gather", lambda *given: calls.append(time.monotonic()) or gather(*given))
    on_ranks(2, lambda ranks: checkpoint.save(Held(*stages, ranks=ranks, mine=[ranks.index]), tmp_path))
    calls.sort()
    assert checkpoint.latest(tmp_path) and max(b - a for a, b in pairwise(calls)) < Table.timeout


def test_a_rank_that_ends_in_the_middle(tmp_path, monkeypatch):
    stages = [{"a": torch.randn(3)} for _ in range(2)]
    on_ranks(2, lambda ranks: checkpoint.save(Held(*stages, ranks=ranks, mine=[ranks.index]), tmp_path))

    def die(folder, part):
        if part.stage == 1:
            dead.wait(10)
        return "", {}

    dead = threading.Event()
    gather = Table.gather

    def broken(self, value, what):
        if value is False:  # somebody still writes
            self.shared[1].abort()
            dead.set()
        return gather(self, value, what)

    monkeypatch.setattr(save_and_load, "_write", die)
    monkeypatch.setattr(Table, "gather", broken)
    found = on_ranks(2, lambda ranks: checkpoint.save(Held(*stages, ranks=ranks, mine=[ranks.index]), tmp_path))
    assert [type(error) for error in found] == [RankError] * 2
    assert names(tmp_path) == ["step-00000005"] and checkpoint.latest(tmp_path)
