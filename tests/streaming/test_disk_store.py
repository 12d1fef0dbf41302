"""The store on disk: whatever ends a process, the last committed version is found whole; damage is named."""

import gc
import os
import random
import time
import warnings

import pytest
import torch

from pipeback.errors import StoreError
from pipeback.streaming import sealed_file
from pipeback.streaming.disk_store import DiskStore
from pipeback.streaming.pages import Pages
from tests.helpers.choice import rare
from tests.helpers.store_runs import batch, build, digest, start, train
from tests.laws.cases import CASES, STAGES, data, network, pipeline

pytestmark = pytest.mark.filterwarnings("ignore:.*takes its statistics")


def killed_and_resumed(folder, method, pushes, kills, seed):
    """Train in processes that are killed at random moments; the lines of the last one, which ends by itself."""
    draw = random.Random(seed)
    seen = set()
    for _ in range(kills):
        run, lines = start(folder, method, pushes)
        pushed = 0
        for line in lines:  # from the third push on, when something is committed, wherever it is then
            if line.startswith("resumed"):
                seen.add(int(line.split()[-1]))
            pushed += line.startswith("pushed")
            if pushed == 3:
                break
        time.sleep(draw.uniform(0.0, 0.25))
        run.kill()
        run.join()
    last, lines = start(folder, method, pushes)
    told = list(lines)
    last.join()
    assert last.exitcode == 0, told
    return told, seen


def uninterrupted(folder, method, pushes):
    pipe = train(folder, method, pushes)
    found = digest(pipe)
    pipe.close()
    return found


@pytest.mark.parametrize(("method", "kills"), [("gpipe", 3), rare("pipedream", 2)])
def test_killed_at_random_moments(method, kills, tmp_path):
    pushes = 40
    lines, _ = killed_and_resumed(tmp_path / "killed", method, pushes, kills, seed=3)
    assert any(line.startswith("resumed at") for line in lines)
    assert lines[-1] == f"digest {uninterrupted(tmp_path / 'whole', method, pushes)}"


@pytest.mark.soak
@pytest.mark.parametrize("method", ["gpipe", "pb", "pipedream", "cerebras"])
def test_killed_a_hundred_times(method, tmp_path):
    pushes = 400
    lines, seen = killed_and_resumed(tmp_path / "killed", method, pushes, 25, seed=7)
    assert len(seen) > 5, "the kills came all at one place"
    assert lines[-1] == f"digest {uninterrupted(tmp_path / 'whole', method, pushes)}"


# -- what is wrong with a folder -----------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    """A store with a committed version, and where its training had got to."""
    pipe = train(tmp_path / "store", "pb", 3)
    pipe.commit()
    pipe.close()
    return tmp_path / "store"


@pytest.mark.parametrize(
    ("method", "options", "commits"),
    [
        ("gpipe", {}, list(range(1, 15))),  # flushes at each push
        ("gpipe-4", {}, [4, 8, 10, 14]),  # what is drained is a flush, and the schedule begins anew
        ("gpipe-4", {"commit_every": 6}, [6, 12]),
        ("pb", {"commit_every": 5}, [5, 10]),
    ],
)
def test_when_a_version_is_due(method, options, commits, tmp_path):
    """Micro-batches that have arrived when one is committed; the pipeline is drained after ten."""
    store = DiskStore(tmp_path, **options)
    pipe = pipeline(network(), CASES[method](STAGES), store=store)
    found, number = [], store.versions.number
    for n, (x, y) in enumerate(data(14), start=1):
        pipe.push(x, y)
        if n == 10:
            pipe.drain()
        if store.versions.number != number:
            found.append(pipe.arrived)
        number = store.versions.number
    assert found == commits
    pipe.close()


def test_it_goes_on_where_it_stood(folder, tmp_path):
    pipe = train(folder, "pb", 6)
    assert pipe.arrived == 24
    assert digest(pipe) == uninterrupted(tmp_path / "whole", "pb", 6)


def test_a_store_that_is_in_use(folder):
    pipe = build(folder, "pb")
    with pytest.raises(StoreError, match=rf"process {os.getpid()} uses this store; wait for it, or give another"):
        build(folder, "pb")
    pipe.close()
    build(folder, "pb").close()


def test_another_model_method_or_optimizer(folder):
    with pytest.raises(StoreError, match="belongs to method PipelinedBackpropagation.*another folder"):
        build(folder, "pipedream")
    with pytest.raises(StoreError, match="the model lacks weight '1.bias'; this state belongs to another model"):
        pipeline(
            torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout()) for _ in range(5)]),
            "pb", "adamw", store=DiskStore(folder),
        )  # fmt: skip
    build(folder, "pb").close()  # nothing was lost


def rewritten(folder, change):
    """Change the JSON of the committed version, its own checksum included."""
    (file,) = folder.glob("version-*.json")
    document = sealed_file.unsealed(file)
    change(document)
    file.write_bytes(sealed_file.sealed(document))


def test_a_newer_format(folder):
    rewritten(folder, lambda document: document.update(format=2))
    with pytest.raises(StoreError, match="has format 2, this pipeback reads 1; use the version that wrote it"):
        build(folder, "pb")


def test_an_edited_version(folder):
    (file,) = folder.glob("version-*.json")
    file.write_bytes(file.read_bytes().replace(b"AdamW", b"AdamX"))
    with pytest.raises(StoreError, match="content was altered"):
        build(folder, "pb")


def test_a_version_that_is_missing(folder):
    (file,) = folder.glob("version-*.json")
    content = file.read_bytes()
    file.unlink()
    with pytest.raises(StoreError, match=r"version-\*.json is missing.*restore the folder from a copy, or give"):
        build(folder, "pb")
    file.write_bytes(content)
    assert train(folder, "pb", 3).arrived == 12


def test_pages_without_a_version(tmp_path):
    build(tmp_path, "pb").close()  # ended before the first commit
    with pytest.warns(UserWarning, match="pages of stages but no version: .* begins anew"):
        pipe = build(tmp_path, "pb")
    assert pipe.arrived == 0
    pipe.close()


def test_truncated_pages(folder):
    file = folder / "stage-001.pages"
    os.truncate(file, 4096)
    with pytest.raises(StoreError, match=r"stage-001.pages: 4096 bytes were found, \d+ were committed.*truncated"):
        build(folder, "pb")


def test_a_flipped_bit(folder):
    (version,) = folder.glob("version-*.json")
    at, size, _ = sealed_file.unsealed(version)["stages"]["2/0"]["regions"]["home"]
    with open(folder / "stage-002.pages", "r+b") as file:
        file.seek(at + size // 2)
        byte = file.read(1)[0]
        file.seek(at + size // 2)
        file.write(bytes([byte ^ 4]))
    with pytest.raises(StoreError, match=r"stage-002.pages: 'home' has other content than was written \(CRC-32\)"):
        build(folder, "pb")


def test_a_bit_that_flips_while_training(tmp_path):
    pipe = build(tmp_path, "pb")
    pipe.push(*batch(0))
    pipe.wait()
    pages = next(iter(pipe._engine.holding.store._pages.values()))
    region = pages.newest["home"]
    with open(pages.path, "r+b") as file:
        file.seek(region.at)
        file.write(b"\xff\xff")
    with pytest.raises(RuntimeError, match="stage-000.pages: 'home' has other content"):
        pipe.push(*batch(1))
    with pytest.raises(RuntimeError, match="closed"):
        pipe.push(*batch(1))


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="file: .*; give a folder that can be written"):
        build(tmp_path / "file", "pb")
    with pytest.raises(ValueError, match="store='disk:' is unknown; give None, 'host', 'disk:FOLDER'"):
        pipeline(network(), "pb", store="disk:")


def test_a_full_disk(tmp_path, monkeypatch):
    whole = train(tmp_path / "whole", "gpipe", 8)
    pipe = train(tmp_path / "store", "gpipe", 4)

    def full(*args):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(RuntimeError, match=r"\.pages: No space left on device; what was committed last is whole"):
            pipe.push(*batch(4))
            pipe.wait()
    pipe.close()
    again = train(tmp_path / "store", "gpipe", 8)  # goes on from the last version, with what it needs
    assert digest(again) == digest(whole)


def test_a_failed_commit_leaves_the_one_before(tmp_path, monkeypatch):
    pipe = train(tmp_path / "store", "pb", 3)
    pipe.commit()
    at = pipe.arrived
    pipe.push(*batch(3))
    with monkeypatch.context() as patch:
        patch.setattr(sealed_file, "sync", lambda path: (_ for _ in ()).throw(OSError(5, "Input/output error")))
        with pytest.raises(StoreError, match="Input/output error"):
            pipe.commit()
    pipe.close()
    again = build(tmp_path / "store", "pb")
    assert again.arrived == at


# -- pages ---------------------------------------------------------------------------------------------------------


def test_what_is_committed_is_not_overwritten(tmp_path):
    pages = Pages(tmp_path / "pages", {})
    tensors = {n: torch.full((3000,), n, dtype=torch.uint8) for n in range(4)}
    for n in range(3):
        pages.write(f"{n}", tensors[n])
    pages.commit()
    committed = dict(pages.committed)
    for turn in range(5):
        for n in range(3):
            pages.write(f"{n}", torch.full((3000,), 10 * turn + n, dtype=torch.uint8))
    pages.drop("2")
    again = Pages(tmp_path / "pages", committed)  # as a process does that comes after a kill
    for n in range(3):
        found = torch.empty(3000, dtype=torch.uint8)
        again.read(f"{n}", found)
        assert torch.equal(found, tensors[n])
    pages.commit()
    assert pages.path.stat().st_size <= 2 * 3 * 4096, "the file grows with the number of writes"


def test_of_a_view_no_more_is_written_than_it_shows(tmp_path):
    store = DiskStore(tmp_path)
    pipe = pipeline(network(), "pb", store=store)
    written = store.begin(pipe._engine.stages[0], {"row": torch.arange(1000.0)[10:20]})
    assert written["tensors"]["row"] == ["state/row", "float32", [10], [1], 0]
    assert written["regions"]["state/row"][1] == 40
    pipe.close()


def test_room_is_used_again(tmp_path):
    pages = Pages(tmp_path / "pages", {})
    draw = random.Random(1)
    sizes = {}
    for turn in range(200):
        name = str(draw.randrange(6))
        size = draw.choice([100, 5000, 20000])
        pages.write(name, torch.full((size,), turn % 251, dtype=torch.uint8))
        sizes[name] = (size, turn % 251)
        if turn % 7 == 0:
            pages.commit()
    for name, (size, value) in sizes.items():
        found = torch.empty(size, dtype=torch.uint8)
        pages.read(name, found)
        assert bool((found == value).all())
    assert pages.path.stat().st_size < 6 * 20480 * 4


def test_going_on_is_said(tmp_path):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        train(tmp_path / "store", "gpipe", 4).close()
    assert not [str(w.message) for w in told if "earlier training" in str(w.message)]
    message = r"holds a version of an earlier training.*after \d+ micro-batches in \d push(es)?; give the store"
    with pytest.warns(UserWarning, match=message):
        train(tmp_path / "store", "gpipe", 0).close()


# -- one folder, one pipeline --------------------------------------------------------------------------------------


def test_a_folder_stays_where_it_is(tmp_path, monkeypatch):
    """A process may go to another folder, where another run may have a store of the same name."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "b")
    train("weights", "gpipe", 3).close()
    theirs = sorted(path.name for path in (tmp_path / "b" / "weights").iterdir())
    monkeypatch.chdir(tmp_path / "a")
    pipe = build("weights", "gpipe")
    monkeypatch.chdir(tmp_path / "b")
    pipe.push(*batch(0))
    pipe.commit()
    pipe.close()
    assert sorted(path.name for path in (tmp_path / "b" / "weights").iterdir()) == theirs
    again = build(tmp_path / "a" / "weights", "gpipe")
    assert again.pushes == 1
    again.close()


def test_a_store_serves_one_pipeline_at_a_time(tmp_path):
    store = DiskStore(tmp_path)
    first = pipeline(network(), "gpipe", store=store)
    first.push(*data(1)[0])
    with pytest.raises(StoreError, match="this store serves a pipeline already; close that one, or give the other"):
        pipeline(network(), "gpipe", store=store)
    with pytest.raises(ValueError, match="unknown"):
        pipeline(network(), "no_method", store=store)
    first.push(*data(1)[0])
    first.close()
    second = pipeline(network(), "gpipe", store=store)
    del first
    gc.collect()
    second.push(*data(1)[0])  # the first has nothing left to close
    second.close()
    pipeline(network(), "gpipe", store=DiskStore(tmp_path)).close()  # nobody holds the folder


def test_a_pipeline_that_is_not_built_leaves_its_folder(folder):
    with pytest.raises(ValueError, match="unknown"):
        build(folder, "no_method")
    with pytest.raises(StoreError, match="give the store another folder"):
        build(folder, "gpipe")
    build(folder, "pb").close()
