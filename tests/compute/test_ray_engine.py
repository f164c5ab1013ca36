"""Keys and neighbours on a real cluster of two nodes: the bytes of the local engine, whatever happens to workers."""

import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from spalm.compute import LOCAL, Execution, JobPart, LocalEngine, split_rows
from spalm.compute import ray_engine as on_ray
from spalm.errors import InputError
from spalm.files import write_atomically
from spalm.lm import NetworkSettings, Reading, Transformer
from spalm.memory import Encoder, Memory, MemorySettings, open_memory, remember, shards, source_of_split
from spalm.memory.exact import index
from spalm.memory.remember import _ShardWriter
from spalm.neighbours import IndexSettings, NeighbourSettings, RamBudget, find_neighbours, make_searcher
from spalm.neighbours.index import on_disk
from spalm.neighbours.join import bulk_join
from spalm.neighbours.join.jobs import JoinJob
from support.ray_clusters import contents, table_bytes, two_nodes

pytestmark = pytest.mark.slow

pytest.importorskip("ray")

WIDTH = 14
SETTINGS = NeighbourSettings(count=3, held_out=5, recall=0.9)


@pytest.fixture(scope="module")
def cluster():
    with two_nodes() as made:
        yield made


@pytest.fixture(scope="module")
def engine(cluster):
    opened = on_ray.RayEngine(cluster.address)
    assert (opened.machines, opened.cores, opened.total_cores, opened.threads) == (2, 1, 2, 1)
    yield opened
    opened.close()


@pytest.fixture(autouse=True)
def _small_shards(monkeypatch):
    monkeypatch.setattr(shards, "SHARD_BYTES", 2 * WIDTH * 300)
    monkeypatch.setattr(index, "SHARD_TOKENS", 700)


def encoder(corpus) -> Encoder:
    settings = NetworkSettings(layers=1, width=WIDTH, heads=2, head_width=5, feed_forward=11)
    model = Transformer(settings, corpus.vocabulary).initialise(1).eval()
    reading = Reading.of(1, segment=8, memory=0, lanes=4, stride=4)
    return Encoder("d", WIDTH, corpus.vocabulary, reading, lambda: model, lambda: torch.device("cpu"))


def remembered(corpus, folder: Path, engine) -> Memory:
    own, train = encoder(corpus), corpus.split("train")
    memory = open_memory(folder, own, MemorySettings(), stream=train)
    remember(memory, own, train, source=source_of_split(corpus, "train"), execution=Execution(cluster=engine))
    return memory


def searched(corpus, memory: Memory, folder: Path, engine) -> dict[str, bytes]:
    find_neighbours(
        memory,
        encoder(corpus),
        corpus,
        settings=SETTINGS,
        directory=folder,
        execution=Execution(cluster=engine, ram=2 << 30),
    )
    return table_bytes(folder)


class Stopped(BaseException):
    pass


class Stopping:
    """An engine that is stopped after some parts."""

    def __init__(self, engine, after: int):
        self._engine, self._after = engine, after

    def __getattr__(self, name: str):
        return getattr(self._engine, name)

    def run_parts(self, *arguments, **options):
        for done in self._engine.run_parts(*arguments, **options):
            yield done
            self._after -= 1
            if not self._after:
                raise Stopped


class DyingWriting(_ShardWriter):
    """Its process is killed in the middle of the third shard, the first time: keys are there, tokens are not."""

    def __call__(self, part: JobPart, progress):
        def dying(path: Path, *arguments, **options) -> None:
            if path.suffix == ".tokens":
                die_once(self.memory.directory.parent / "killed-writing", part)
            write_atomically(path, *arguments, **options)

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(shards, "write_atomically", dying)
            return super().__call__(part, progress)


class DyingJoinJob(JoinJob):
    def __call__(self, part: JobPart, progress):
        die_once(self.inputs.work.parent.parent / "killed-answering", part)
        return super().__call__(part, progress)


def die_once(marker: Path, part: JobPart) -> None:
    if part.number == 2 and not marker.exists():
        marker.write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGKILL)


def test_keys_and_neighbours_have_the_bytes_of_the_local_engine(corpus, engine, tmp_path):
    here, there = remembered(corpus, tmp_path / "here", LOCAL), remembered(corpus, tmp_path / "there", engine)
    assert len(list(here.shards.folder.glob("*.keys"))) > 4
    assert contents(here) == contents(there)
    there.verify()
    local = searched(corpus, here, tmp_path / "local", LOCAL)
    assert searched(corpus, there, tmp_path / "ray", engine) == local
    assert set(local) == {
        "SHA256SUMS",
        "manifest.json",
        *(f"{s}.{w}" for s in ("train", "dev", "test") for w in ("ids", "distances")),
    }


def test_a_killed_worker_only_repeats_its_part(corpus, engine, tmp_path, monkeypatch):
    here = remembered(corpus, tmp_path / "here", LOCAL)
    local = searched(corpus, here, tmp_path / "local", LOCAL)
    monkeypatch.setattr(sys.modules[_ShardWriter.__module__], "_ShardWriter", DyingWriting)
    monkeypatch.setattr(bulk_join, "JoinJob", DyingJoinJob)
    there = remembered(corpus, tmp_path / "there", engine)
    assert (tmp_path / "killed-writing").exists()
    assert contents(here) == contents(there)
    assert searched(corpus, there, tmp_path / "ray", engine) == local
    assert (tmp_path / "killed-answering").exists()


def test_stopped_on_one_engine_it_goes_on_with_the_other(corpus, engine, tmp_path):
    here = remembered(corpus, tmp_path / "here", LOCAL)
    local = searched(corpus, here, tmp_path / "local", LOCAL)
    for name, first, second in (("there", engine, LOCAL), ("back", LOCAL, engine)):
        with pytest.raises(Stopped):
            remembered(corpus, tmp_path / name, Stopping(first, 3))
        assert contents(remembered(corpus, tmp_path / name, second)) == contents(here)
        folder = tmp_path / f"{name}-neighbours"
        with pytest.raises(Stopped):
            searched(corpus, here, folder, Stopping(first, 3))
        assert (folder / "work" / "train.done.json").exists()
        assert searched(corpus, here, folder, second) == local


def test_an_index_on_disk_has_the_bytes_of_the_local_engine(corpus, engine, tmp_path, monkeypatch):
    monkeypatch.setattr(on_disk, "_PART", 700)
    memory = remembered(corpus, tmp_path / "memory", LOCAL)
    settings = IndexSettings(kind="disk", recall=0.9, neighbours=3)
    make_searcher(memory, tmp_path / "here", settings, engine=LOCAL)
    make_searcher(memory, tmp_path / "there", settings, engine=engine)
    assert table_bytes(tmp_path / "there") == table_bytes(tmp_path / "here")
    with pytest.raises(InputError, match="--kind faiss: it is made here, in memory; leave out --engine"):
        make_searcher(memory, tmp_path / "other", IndexSettings(kind="faiss", recall=0.9, neighbours=3), engine=engine)


def test_a_lost_machine_only_repeats_its_parts(corpus, cluster, engine, tmp_path):
    """A third one joins, and goes in the middle of the work."""
    here = remembered(corpus, tmp_path / "here", LOCAL)
    third = cluster.add_node(num_cpus=1, object_store_memory=80 << 20, resources={"third": 1})
    cluster.wait_for_nodes()
    gone = Losing(engine, lambda: cluster.remove_node(third, allow_graceful=False))
    assert contents(remembered(corpus, tmp_path / "there", gone)) == contents(here)
    assert gone.lost


class Losing:
    """An engine that loses something after the first part."""

    def __init__(self, engine, lose):
        self._engine, self._lose, self.lost = engine, lose, False

    def __getattr__(self, name: str):
        return getattr(self._engine, name)

    def run_parts(self, *arguments, **options):
        for done in self._engine.run_parts(*arguments, **options):
            if not self.lost:
                self._lose()
                self.lost = True
            yield done


class Complaining:
    """A job that fails as a user can mend it."""

    def __call__(self, part: JobPart, progress):  # noqa: ARG002
        raise InputError(f"part {part.number} is bad")


def test_what_a_part_complains_of_is_told_as_it_is(engine):
    with pytest.raises(InputError, match=r"^part \d is bad$"):
        list(engine.run_parts(Complaining(), split_rows(0, 3, 1), lambda _: None, threads=1))


@dataclass(frozen=True)
class Waiting:
    """A job whose first part waits for others to be done, and then some."""

    folder: Path

    def __call__(self, part: JobPart, progress):  # noqa: ARG002
        (self.folder / part.file_name).touch()
        while not part.number and len(list(self.folder.iterdir())) < 10:
            time.sleep(0.1)
        time.sleep(0 if part.number else 1)


def test_no_part_is_far_ahead_of_the_slowest(engine, tmp_path):
    results = engine.run_parts(Waiting(tmp_path), split_rows(0, 200, 1), lambda _: None, threads=1)
    done = [part.number for part, _ in results]
    assert sorted(done) == list(range(200))
    assert 9 <= done.index(0) <= on_ray._LEAD * on_ray._AHEAD * engine.total_cores


def test_a_part_for_which_no_machine_has_cores_is_told(engine, tmp_path, monkeypatch):
    monkeypatch.setattr(on_ray, "_CHECK_SECONDS", 1)
    with pytest.raises(InputError, match=r"no machine of the Ray cluster is left that has 2 core\(s\); run the same"):
        list(engine.run_parts(Waiting(tmp_path), split_rows(0, 3, 1), lambda _: None, threads=2))


@pytest.mark.parametrize(
    ("threads", "per_machine", "reserved"), [(60, None, 60), (1, 64, 1), (1, 40, 2), (24, None, 24), (4, 8, 8)]
)
def test_a_part_reserves_what_it_computes_with(threads, per_machine, reserved):
    """On machines of 64 cores and fewer: no more than its threads, unless memory is only enough for some at a time."""
    asked = []

    class Ray:
        put = staticmethod(lambda job: job)
        wait = staticmethod(lambda waiting, **_: (waiting, []))

        def remote(self, _):
            task = SimpleNamespace(remote=lambda *_: object())
            return SimpleNamespace(options=lambda **how: asked.append(how) or task)

    engine = object.__new__(on_ray.RayEngine)
    engine._ray, engine.cores, engine.total_cores = Ray(), 64, 124
    engine._result = lambda _: None
    parts = split_rows(0, 5, 1)
    done = engine.run_parts(None, parts, lambda _: None, threads=threads, per_machine=per_machine)
    assert len(list(done)) == 5
    assert [how["num_cpus"] for how in asked] == [reserved]


def test_a_model_that_only_this_machine_has_is_told(engine, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    engine.refuse_unless_visible(tmp_path / "config.json")
    with pytest.raises(
        InputError, match=r"^/proc/self/cwd is not shared: the machine [\d.]+ does not see what is there"
    ):
        engine.refuse_unless_visible(Path("/proc/self/cwd/config.json"))


def test_storage_that_is_not_shared_is_told(corpus, engine, tmp_path, monkeypatch):
    """A folder of /proc/self is another one for every process."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=r"/proc/self/cwd/memory is not shared: the machine [\d.]+ does not see"):
        remembered(corpus, Path("/proc/self/cwd/memory"), engine)
    assert not [path for path in (tmp_path / "memory").iterdir() if path.name.startswith(".shared")]
    remembered(corpus, tmp_path / "memory", engine)


def test_a_budget_is_of_one_machine(engine):
    assert RamBudget.of(4 << 30, engine).workers == 1
    assert RamBudget.of(4 << 30, LocalEngine(3)).workers == 3
    assert RamBudget(4 << 30, 3, processes=True).room * 3 <= RamBudget(4 << 30, 3).room
    with pytest.raises(InputError, match="too little for 3"):
        RamBudget.of(1 << 30, LocalEngine(3))
