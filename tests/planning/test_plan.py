"""Plans: sizes are those of what is really made, times those that the stages announce, limits where they are said."""

import json
from dataclasses import replace

import pytest

from spalm.neighbours import IndexSettings, make_searcher
from spalm.neighbours.join.cost import GFLOPS, JoinEstimate, JoinWorkload
from spalm.planning import Cluster, PlannedMemory, format_bytes, format_count, parse_count, plan_memory
from spalm.planning.limits import scale_limits
from spalm.planning.stages import planned_stages, query_cost
from spalm.runs import read_recipe
from support.commands import refused, spalm

CLUSTER = Cluster(machines=3, cores=5, ram=64e9, storage=1e9)


@pytest.fixture
def planned():
    return PlannedMemory.of(read_recipe("wikitext103", []), 103e6)


@pytest.mark.slow
def test_bytes_are_those_of_what_is_made(facts_run, tmp_path):
    memory, table = facts_run.memory, facts_run.neighbours
    entries = len(memory.entries())
    keys, neighbours, index = planned_stages(PlannedMemory.of(facts_run.recipe, entries), CLUSTER)
    assert keys.kept == sum(path.stat().st_size for path in memory.shards.folder.iterdir())
    made = sum((table.directory / f"train.{name}").stat().st_size for name in ("ids", "distances"))
    assert neighbours.kept == made
    searcher, _ = make_searcher(memory, tmp_path, IndexSettings(kind="disk", recall=0.9, neighbours=2))
    scanned = searcher.index._partitions.space.width  # these keys are compared whole, plans assume half
    assert index.kept == (tmp_path / "lists").stat().st_size - entries * (scanned - memory.width // 2)


def test_the_time_of_the_join_is_what_it_announces(planned, monkeypatch):
    monkeypatch.setattr("spalm.neighbours.join.cost.gflops_of_a_core", lambda: GFLOPS)
    for tokens in (1_000_000, 4_000_000):  # as far as it was measured
        load = JoinWorkload(keys=tokens, own=tokens, others=0, width=512, table_bytes=0)
        announced = JoinEstimate.of(load, 0.95, workers=7)
        join = planned_stages(replace(planned, tokens=tokens), CLUSTER)[1]
        assert join.core_hours == pytest.approx(7 * announced.seconds / 3600)


def test_carrying_a_memory_costs_more_for_a_token_and_reads_each_once(planned):
    carrying = PlannedMemory.of(read_recipe("wikitext103", ["memory.carried=512"]), 103e6)
    assert (planned.stride, carrying.stride) == (256, 512)
    assert planned.flops / 2 < carrying.flops < planned.flops


def test_more_machines_take_less_time_but_for_what_one_of_them_does(planned):
    few, many = (planned_stages(planned, replace(CLUSTER, machines=count)) for count in (1, 10_000))
    for one, other in zip(few, many):
        assert one.core_hours == other.core_hours
        assert one.hours(CLUSTER) > other.hours(replace(CLUSTER, machines=10_000)) >= other.alone / 1e9 / 3600


def test_limits_lie_where_they_are_said_to(planned):
    found = scale_limits(planned, CLUSTER)
    assert [limit.tokens for limit in found] == sorted(limit.tokens for limit in found)
    moving = next(limit for limit in found if "moves" in limit.what)
    below, above = (
        planned_stages(replace(planned, tokens=share * moving.tokens), CLUSTER)[1].alone for share in (0.99, 1.02)
    )
    assert below / CLUSTER.storage < 86400 < above / CLUSTER.storage
    # Twice the RAM holds more partitions, twice the storage moves more.
    larger = {limit.what: limit.tokens for limit in scale_limits(planned, replace(CLUSTER, ram=2 * CLUSTER.ram))}
    assert sum(larger[limit.what] > 1.5 * limit.tokens for limit in found) == 3


def test_a_query_of_a_larger_memory_reads_more_and_less_than_in_proportion(planned):
    small, large = (query_cost(replace(planned, tokens=tokens), CLUSTER)["bytes_read"] for tokens in (1e8, 1e10))
    assert small < large < 10 * small


def test_counts_and_sizes_as_people_write_them():
    assert [parse_count(text) for text in ("5", "12k", "103M", "1.5G", "2B", "1T")] == [
        5,
        12e3,
        103e6,
        1.5e9,
        2e9,
        1e12,
    ]
    assert [format_count(number) for number in (5, 103e6, 1e12)] == ["5", "103M", "1T"]
    assert [format_bytes(number) for number in (0, 999, 1.5e3, 999.9e9, 2e21)] == [
        "0 B",
        "999 B",
        "1.5 kB",
        "1 TB",
        "2e+03 EB",
    ]


@pytest.mark.slow
def test_the_command(tmp_path):
    said = spalm("plan", "wmt19", "--tokens", "1T", "--machines", "100", "--cores", "64", "--ram", "512G", cwd=tmp_path)
    assert said.returncode == 0, said.stderr
    assert "1T tokens, 100 machine(s) of 64 cores" in said.stdout
    assert "broken  one machine moves the keys into order within a day\n" in said.stdout
    assert max(map(len, said.stdout.splitlines())) > 80  # lines are left whole
    printed = json.loads(spalm("plan", "wmt19", "--tokens", "852M", "--cores", "8", "--ram", "32G", "--json").stdout)
    settings = PlannedMemory.of(read_recipe("wmt19", []), 852e6)
    assert printed == json.loads(json.dumps(plan_memory(settings, Cluster(1, 8, 32 << 30, 1 << 30))))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (["--tokens", "many"], "--tokens many: not a number of tokens; give something like 200k, 103M or 1T"),
        (["--tokens", "0"], "--tokens 0: not a number of tokens; give something like 200k, 103M or 1T"),
        (["--tokens", "1M", "--storage", "fast"], "--storage fast: not a size; give something like 4G or 800M"),
        (["--tokens", "1M", "--storage", "0"], "--storage 0: not a size; give something like 4G or 800M"),
        (
            ["--tokens", "1M", "memory.stride=4000"],
            "wmt19.yaml: memory.stride = 4000: windows have 512 tokens; give at most that",
        ),
    ],
)
def test_wrong_wishes_are_one_line(wrong, told):
    assert refused("plan", "wmt19", *wrong) == f"spalm: {told}"
