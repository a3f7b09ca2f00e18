"""Planning: what users of unequal devices run into (the reports are named repository#number), brute force on tiny
cases, and that nothing over memory is called feasible or advised untried.
"""

import doctest
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nnpiper import cluster_file, cost, export, plan_advice, plan_file, plan_pins, planning, simulator
from nnpiper.baselines import exact
from nnpiper.cluster import Cluster
from nnpiper.plan_advice import count, device_list, layer_range, size
from nnpiper.paths import ROOT
from nnpiper.plan_search import Task, latency, problem_of
from nnpiper.planning import Request, plan
from nnpiper.problem import InputError, Strategy
from nnpiper.solver import NNPiper, keeps_pins
from nnpiper.workload import Model, Workload, chain

GB = 1e9


@pytest.fixture(scope="module")
def piper():
    return NNPiper.from_pretrained()


def cluster(tflops, memory_gb, gigabytes_per_s=10.0, latency_us=10.0, **names) -> Cluster:
    """Devices of these speeds and usable memories, all joined alike, each in a node of its own."""
    K = len(tflops)
    memory = np.broadcast_to(np.asarray(memory_gb, float), K) * GB
    return Cluster(tuple(f"device {k}" for k in range(K)), np.array(tflops) * 1e12, memory,
                   np.full((K, K), gigabytes_per_s * 1e9), np.full((K, K), latency_us * 1e-6), np.arange(K), **names)


def workload(work, static_gb=0.1, stash_gb=0.01, output_mb=1.0, kinds=None) -> Workload:
    """Layers whose forward takes `work` s at 1 TFLOP/s, the backward twice that."""
    L = len(work)
    flops = np.asarray(work, float) * 1e12
    static, stash = (np.broadcast_to(np.asarray(a, float), L) * GB for a in (static_gb, stash_gb))
    return Workload("own", tuple(f"layer {i}" for i in range(L)), kinds or ("block",) * L, flops, 2 * flops,
                    static / 16, np.full(L, output_mb * 1e6), stash, static, static / 8)


def layer_counts(found):
    bounds = found.strategy.bounds(found.problem.layers)
    return [right - left for left, right in zip(bounds, bounds[1:])]


# Splitting


@pytest.mark.parametrize("L, S, report", [
    (30, 4, "Megatron-LM#1304"), (7, 2, "Megatron-LM#381"), (40, 16, "Megatron-LM#1303"), (10, 3, "mlx-lm#1688"),
    (5, 4, "DeepSpeed#4312"), (42, 16, "DeepSpeed#5078")])
def test_equal_layers_on_equal_devices_leave_no_stage_empty_and_none_too_large(L, S, report, piper):
    found = plan(cluster([100] * S, 10), Request(workload([1.0] * L), 32, stages=S), piper)
    assert sum(layer_counts(found)) == L and min(layer_counts(found)) >= 1
    assert max(layer_counts(found)) == -(-L // S), report


def test_thirty_blocks_with_embedding_and_head(piper):
    """Megatron-LM#1304 with a whole model: 30 blocks on four GPUs, where the builder took 28."""
    model = Model("thirty", "llama", 30, 1024, 16, 16, 2816, 1000, 0, 512, False, "test")
    found = plan(cluster([100] * 4, 80), Request(model, 32, stages=4), piper)
    kinds = found.workload.kinds
    blocks = [kinds[stage.first_layer:stage.last_layer + 1].count("block") for stage in found.stages]
    assert sum(blocks) == 30 and max(blocks) == 8


def test_a_vocabulary_worth_two_layers(piper):
    """Megatron-DeepSpeed#186: weights 0 2 0 1 1 1 1 0 0 2 0 on four stages, largest stage 2."""
    weights = [0, 2, 0, 1, 1, 1, 1, 0, 0, 2, 0]
    found = plan(cluster([100] * 4, 10), Request(workload(weights, output_mb=1e-3), 64, stages=4), piper)
    bounds = found.strategy.bounds(11)
    assert max(sum(weights[a:b]) for a, b in zip(bounds, bounds[1:])) == 2


def test_a_large_vocabulary_does_not_run_out_of_memory_at_the_ends(piper):
    """Megatron-DeepSpeed#186, DeepSpeed#1378: 250,000 tokens; split evenly the first stage overflows."""
    model = Model("wide", "gpt", 24, 1024, 16, 16, 4096, 250_000, 512, 512, True, "test")
    even = problem_of(chain(model), cluster([50] * 4, 1), Request(model, 8), 4, "1f1b")
    need = cost.memory_used(even, planning.Strategy((7, 14, 20), ((0,), (1,), (2,), (3,)))).max()
    found = plan(cluster([50] * 4, 0.95 * need / GB), Request(model, 8, stages=4, schedule="1f1b"), piper)
    assert found.feasible and found.even_s is None and found.speedup is None
    blocks = [stage.last_layer - stage.first_layer + 1 for stage in found.stages]
    assert min(blocks[0], blocks[-1]) < min(blocks[1:-1])


def test_the_first_of_many_identical_layers_needs_the_most_memory(piper):
    """DeepSpeed#4477: 2,048 layers on 8 stages; under 1F1B stage s keeps min(M, S - s) micro-batches."""
    found = plan(cluster([100] * 8, 1000), Request(workload([1.0] * 2048), 16, stages=8, schedule="1f1b"), piper)
    assert sum(layer_counts(found)) == 2048 and max(layer_counts(found)) < 1.02 * 256
    for s, (stage, layers) in enumerate(zip(found.stages, layer_counts(found))):
        assert stage.used_bytes == pytest.approx(layers * (0.1 + 0.01 * min(16, 8 - s)) * GB)
    assert found.stages[0].used_bytes > 1.3 * found.stages[-1].used_bytes


def test_peak_memory_and_the_number_of_micro_batches(piper):
    """Hetu-Galvatron#36: 1F1B's peak does not grow with M once M >= S, GPipe's does."""
    def peak(schedule, M):
        found = plan(cluster([100] * 4, 1000), Request(workload([1.0] * 16), M, stages=4, schedule=schedule), piper)
        return found.stages[0].used_bytes / layer_counts(found)[0]

    assert peak("1f1b", 4) == pytest.approx(peak("1f1b", 64))
    assert peak("gpipe", 64) - peak("gpipe", 4) == pytest.approx(60 * 0.01 * GB)


# Unequal devices


def test_a_small_and_a_large_memory(piper):
    """diffusion-pipe#160: 16 + 24 GB; a split by parameters overflows the 16."""
    found = plan(cluster([80, 80], [16, 24]), Request(workload([1.0] * 37, 1.0, 0.0), 16, stages=2), piper)
    assert found.feasible and found.even_s is None
    (small,), (large,) = ([s for s in found.stages if s.available_bytes == m * GB] for m in (16, 24))
    assert small.used_bytes <= 16 * GB and large.used_bytes <= 24 * GB
    assert small.used_bytes + large.used_bytes == pytest.approx(37 * GB)


def test_a_tight_pair_of_memories_is_filled(piper):
    """vllm#6824: 30 + 50 GB. 80 layers of a gigabyte fit in one way only."""
    found = plan(cluster([80, 80], [30.5, 50.5]), Request(workload([1.0] * 80, 1.0, 0.0), 8, stages=2), piper)
    assert found.feasible
    assert {s.available_bytes / GB: round(s.used_bytes / GB) for s in found.stages} == {30.5: 30, 50.5: 50}


def test_what_does_not_fit_is_told_with_the_missing_gigabytes(piper):
    """vllm#6824: 9 + 22 GB and 36 GB of weights: 5 GB short, and no schedule or number of stages helps."""
    found = plan(cluster([80, 80], [9, 22], labels=("left", "right"), titles=("A", "B")),
                 Request(workload([1.0] * 36, 1.0, 0.0), 8), piper)
    assert not found.feasible and sum(missing for *_, missing in found.shortages) >= 5 * GB * (1 - 1e-9)
    assert re.fullmatch(r"stage \d on (left \(A\)|right \(B\)) is short by [\d.]+ GB", found.shortage_lines[0])
    assert found.advice[-1].endswith("2 devices together have 31 GB: 5 GB short")
    with pytest.raises(InputError, match="short by .* GB; allowed: a plan that fits into memory"):
        found.to_file()


def test_fast_devices_get_the_layers_where_memory_lets_them(piper):
    """exo#957, #2229: a split by memory overloads slow devices."""
    request = Request(workload([1.0] * 60, 0.1, 0.0), 64, stages=2)
    found = plan(cluster([200, 20], [30, 120]), request, piper)
    fast = found.strategy.groups.index((0,))
    assert layer_counts(found)[fast] == pytest.approx(60 * 200 / 220, abs=1.5)
    tight = plan(cluster([200, 20], [2.05, 120]), request, piper)
    assert tight.feasible and layer_counts(tight)[tight.strategy.groups.index((0,))] == 20


def test_a_device_without_speed_is_refused_by_name(piper):
    """exo#336: an unknown device reports 0 FLOPS."""
    with pytest.raises(InputError, match=r"device gpu1 \(device 1\): 0\.0 FLOP/s; allowed: over 0"):
        plan(cluster([80, 0], 10), Request("gpt2", 8), piper)


def test_two_small_devices_as_replicas_ahead_of_a_large_one(piper):
    """vllm#27778: two V100-32 hold one stage together, one A100-80 the next, which alone can hold the last layer."""
    three = Cluster.from_nodes([("v100-32", 2), ("a100-80", 1)], "100gbe")
    request = Request(workload([1.0] * 12, [0.1] * 11 + [40.0]), 32, stages=2, schedule="1f1b", micro_batch_size=4)
    found = plan(three, request, piper)
    best = exact.solve(found.problem)
    assert best.groups == ((0, 1), (2,)) == found.strategy.groups
    assert found.step_s <= simulator.step_time(found.problem, best) * (1 + 1e-9)
    assert found.stages[0].devices == ("gpu0 (V100 SXM2 32 GB)", "gpu1 (V100 SXM2 32 GB)")
    assert found.stages[0].shares == pytest.approx((0.5, 0.5))


def test_the_plan_says_the_order_of_the_devices(piper):
    """vllm#21061: a mixed plan worked with CUDA_VISIBLE_DEVICES=7,6,5,4,0,1,2,3 only. Here the last device alone can
    hold the large first layer, so the order of the file cannot be the order of the stages."""
    own = Cluster(("A", "B", "A", "B"), np.full(4, 1e13), np.array([5, 5, 5, 40]) * GB, np.full((4, 4), 1e10),
                  np.zeros((4, 4)), [0, 1, 0, 1], node_names=("box-a", "box-b"))
    found = plan(own, Request(workload([1.0] * 8, [30] + [1] * 7, 0.0), 8, 4, sequence_length=128), piper)
    written = found.to_file()
    assert found.feasible and written.groups[0] == [3] and sorted(k for (k,) in written.groups) == [0, 1, 2, 3]
    assert [(d.name, d.node, d.index) for d in written.devices] == [
        ("gpu0", "box-a", 0), ("gpu1", "box-b", 0), ("gpu2", "box-a", 1), ("gpu3", "box-b", 1)]


def test_a_reserve_is_kept(piper):
    """accelerate#473: filled to the brim, then out of memory. What fits without the usual 10 % does not with it."""
    def found(reserve):
        return plan(Cluster.from_nodes([("rtx3090", 2)], "10gbe", reserve), request, piper)

    request = Request(workload([1.0] * 46, 1.0, 0.0), 8, stages=2)
    assert found(0.0).feasible and not found(0.1).feasible
    assert found(0.1).stages[0].available_bytes == pytest.approx(21.6 * GB)


# Links and objective


def test_fewer_devices_may_be_faster_than_all(piper):
    """nnscaler#30, petals#428: three slow devices behind slow links only hold the fast one up."""
    four = cluster([300, 5, 5, 5], 80, gigabytes_per_s=0.01, latency_us=5000)
    forced = plan(four, Request("gpt2", 8, stages=4), piper)
    assert forced.unused == () and forced.advice[0].startswith("1 stage (1f1b) on 1 device would be faster, step ")
    free = plan(four, Request("gpt2", 8), piper)
    assert free.strategy.groups == ((0,),) and free.unused == tuple(f"gpu{k} (device {k})" for k in (1, 2, 3))
    assert free.step_s < forced.step_s and f"{free.step_s:.4g} s" in forced.advice[0]


def test_fewer_devices_may_be_just_as_fast(piper):
    """Replicas that the slowest stage does not need: naming them saves their rent. Compute is free here."""
    request = Request(workload([0.0] * 6), 4, stages=2)
    found = plan(cluster([10] * 6, 80, gigabytes_per_s=1e9, latency_us=0.0), request, piper)
    assert len([k for group in found.strategy.groups for k in group]) == 2 or "just as fast" in " ".join(found.advice)


def test_latency_counts_beside_the_rate(piper):
    """vllm#6610: 400 -> 800 Gb/s changed nothing, since the messages are small."""
    def step(gigabytes_per_s):
        request = Request(workload([1.0] * 8, output_mb=0.01), 8, stages=4, max_devices=4)
        return plan(cluster([100] * 4, 10, gigabytes_per_s, latency_us=500), request, piper).step_s

    assert step(100) == pytest.approx(step(50), rel=1e-3)


def test_more_micro_batches_shrink_the_bubble_until_they_no_longer_do(piper):
    """marin#6532; Huang et al. 2019: bubble (S - 1) / (M + S - 1) of equal stages without transfers."""
    rates = []
    for M in (1, 4, 16, 64):
        found = plan(cluster([100] * 4, 100, 1e6, 0.0), Request(workload([1.0] * 8), M, stages=4, max_devices=4), piper)
        assert found.bubble == pytest.approx(3 / (M + 3), abs=1e-6)
        rates.append(found.samples_per_s)
    assert rates == sorted(rates) and rates[3] / rates[2] < rates[1] / rates[0]


# The best plan, and what is said of it


@pytest.mark.parametrize("objective", ["throughput", "latency"])
@pytest.mark.parametrize("seed", range(3))
def test_auto_is_the_best_of_all_stages_and_schedules(seed, objective, piper):
    """Against brute force over S, schedule, cuts and groups."""
    rng = np.random.default_rng(seed)
    own = workload(rng.uniform(0.5, 2.0, 6), output_mb=rng.uniform(1, 50))
    four = cluster(rng.uniform(20, 200, 4), 100)
    found = plan(four, Request(own, 6, micro_batch_size=4, objective=objective), piper)
    best = np.inf
    for S in range(1, 5):
        for schedule in ("1f1b", "gpipe"):
            problem = problem_of(own, four, Request(own, 1 if objective == "latency" else 6), S, schedule)
            best = min(best, simulator.step_time(problem, exact.solve(problem)))
    assert found.objective_s == pytest.approx(best, rel=1e-9)
    assert found.bound_s <= best * (1 + 1e-9)


@pytest.mark.parametrize("b", [1, 2])
def test_no_stage_has_more_replicas_than_a_micro_batch_has_sequences(b, piper):
    """A replica works on whole sequences: a fraction of one fits nowhere. So with one sequence, each stage has one
    device, and every format that knows stages takes the plan."""
    gpus = cluster_file.load(ROOT / "data/clusters/dgx.toml")
    for stages in (None, 2):
        found = plan(gpus, Request("gpt2-xl", 16, stages, micro_batch_size=b), piper)
        assert found.feasible and max(map(len, found.strategy.groups)) <= b
        if b == 1:
            assert "--pipeline-model-parallel-layout" in export.export(found.to_file(), "megatron")


def test_devices_without_a_whole_sequence_do_not_make_a_model_fit(piper):
    """35 GB on one device of 32.4 GB usable: a second device is of no use to one sequence on one stage."""
    found = plan(cluster([100, 100], 32.4), Request("gpt2-xl", 1, 1), piper)
    assert not found.feasible and all(len(group) == 1 for group in found.strategy.groups)
    assert not any("devices would make it fit: 1 stage" in line for line in found.advice)


def test_latency_finds_the_plan_that_only_one_waiting_micro_batch_allows(piper):
    """The search for latency keeps to what all waiting micro-batches need and to what one needs, and takes the better."""
    gpus = cluster_file.load(ROOT / "data/clusters/wan.toml")
    request = Request("gpt2-xl", 8, 2, pins={0: "gpu7", 49: "gpu0"}, objective="latency")
    found = plan(gpus, request, piper)
    first = cost.overflow_bytes(found.problem, Strategy((1,), ((7,), (0,))))
    assert found.feasible and first == 0
    assert found.objective_s <= latency(found.problem, Strategy((1,), ((7,), (0,)))) * (1 + 1e-9)


def test_the_figures_are_those_of_simulator_and_cost_model(piper):
    three = cluster([50, 80, 120], 60, gigabytes_per_s=2.0)
    found = plan(three, Request("gpt2", 12, stages=2, micro_batch_size=2), piper)
    p, strategy = found.problem, found.strategy
    arrays, used = cost.stage_arrays(p, strategy), cost.memory_used(p, strategy)
    assert found.step_s == simulator.step_time(p, strategy)
    assert found.latency_s == simulator.step_time(p.replace(micro_batches=1), strategy)
    assert found.samples_per_s == pytest.approx(24 / found.step_s)
    assert found.tokens_per_s == pytest.approx(24 * 1024 / found.step_s)
    idle = simulator.timeline(p, strategy).idle_share
    assert found.bubble == pytest.approx(idle.mean())
    for s, stage in enumerate(found.stages):
        group = strategy.groups[s]
        assert (stage.forward_s, stage.backward_s) == (arrays.forward_s[s], arrays.backward_s[s])
        assert stage.idle_share == pytest.approx(idle[s]) and sum(stage.shares) == pytest.approx(1.0)
        assert min(three.memory_bytes[k] - used[k] for k in group) == stage.available_bytes - stage.used_bytes
    assert found.stages[0].send_s == arrays.send_forward_s[0] and found.stages[1].send_s == arrays.send_backward_s[0]
    assert found.speedup == pytest.approx(found.even_s / found.step_s) and found.speedup >= 1.0


@pytest.mark.parametrize("transfers", ["blocking", "overlapped"])
def test_the_bottleneck_is_named(transfers, piper):
    pair = cluster([100, 100], 100, labels=("a", "b"), titles=("X", "X"))
    bound = plan(pair, Request(workload([1, 1, 1, 50]), 8, 2, transfers=transfers, max_devices=2), piper).bottleneck
    assert re.match(r"stage 1: compute on [ab] \(X\) \(\d+% of the step\)", bound)
    pair = cluster([100, 100], [2.5, 2.5], 0.1, labels=("a", "b"), titles=("X", "X"))
    bound = plan(pair, Request(workload([1] * 4, 1.0, output_mb=100), 8, 2, transfers=transfers), piper).bottleneck
    link = r"stage [01]: link [ab] \(X\) -> [ab] \(X\), (activations|gradients) to stage [01] \(\d+% of the step\)"
    assert re.fullmatch(link, bound)


def test_the_same_seed_gives_the_same_plan(piper):
    eight = Cluster.from_nodes([("a100-40", 4), ("t4", 4)], "25gbe")
    first, second = (plan(eight, Request("gpt2-medium", 16), piper, seed=3) for _ in range(2))
    assert first.strategy == second.strategy and first.advice == second.advice


def test_a_plan_file_holds_the_plan(piper, tmp_path):
    found = plan(Cluster.from_nodes([("a100-40", 2), ("t4", 2)], "25gbe"), Request("gpt2", 8, recompute=True), piper)
    path = tmp_path / "plan.json"
    path.write_text(found.to_file().model_dump_json())
    written = plan_file.read(path)
    assert written.strategy == found.strategy and written.step_s == found.step_s and written.recompute
    assert written.layer_kinds == list(chain("gpt2").kinds) and written.sequence_length == 1024
    assert written.figures.bubble == found.bubble and written.figures.advice == list(found.advice)


def test_a_workload_without_its_sequence_length_has_no_plan_file(piper):
    found = plan(cluster([80], 10), Request(workload([1.0]), 4), piper)
    assert found.tokens_per_s is None and found.samples_per_s > 0
    with pytest.raises(InputError, match="sequence_length"):
        found.to_file()


def test_micro_batches_left_out_of_the_search_change_no_memory(piper):
    """Beyond plan_search.SEARCH_OPS the search sees fewer micro-batches; the plan is judged with all of them."""
    own = workload([1.0] * 8, 0.1, 0.01)
    found = plan(cluster([100] * 2, 1000), Request(own, 20_000, stages=2, schedule="gpipe"), piper)
    assert found.feasible and found.stages[0].used_bytes / layer_counts(found)[0] > 20_000 * 0.01 * GB / 2
    assert not plan(cluster([100] * 2, 20), Request(own, 20_000, stages=2, schedule="gpipe"), piper).feasible


# Memory first


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10_000))
def test_no_plan_over_memory_is_feasible_and_the_shortages_are_the_overflow(seed):
    rng = np.random.default_rng(seed)
    K, L = int(rng.integers(1, 5)), int(rng.integers(1, 9))
    own = workload(rng.uniform(0.1, 2, L), rng.uniform(0.5, 2, L), rng.uniform(0.1, 1, L))
    few = cluster(rng.uniform(20, 200, K), rng.uniform(0.4, 2.0, K) * 2.5 * L / K)
    found = plan(few, Request(own, int(rng.integers(1, 9))), PIPER)
    over = np.maximum(cost.memory_used(found.problem, found.strategy) - few.memory_bytes, 0.0)
    assert found.feasible == (over.sum() == 0.0)
    assert sum(missing for *_, missing in found.shortages) == over.sum()
    for stage, device, missing in found.shortages:
        k = [few.title(k) for k in range(K)].index(device)
        assert k in found.strategy.groups[stage] and missing == over[k]


PIPER = NNPiper.from_pretrained()


def test_every_remedy_that_is_advised_works(piper):
    pair, request = Cluster.from_nodes([("rtx3090", 2), ("rtx2080ti", 2)], "10gbe"), Request(
        "gpt2-xl", 16, stages=2, schedule="gpipe", micro_batch_size=2, max_devices=3)
    found = plan(pair, request, piper)
    assert not found.feasible and found.advice
    for line in found.advice:
        assert "would make it fit: " in line
        fields = {}
        if "1f1b schedule" in line:
            fields["schedule"] = "1f1b"
        if "all 4 devices" in line:
            fields["max_devices"] = None
        if "recomputation" in line:
            fields["recompute"] = True
        if "number of stages" in line:
            fields["stages"] = None
        if smaller := re.search(r"micro-batches of (\d+) \((\d+) of them\)", line):
            fields |= {"micro_batch_size": int(smaller[1]), "micro_batches": int(smaller[2])}
            assert int(smaller[1]) * int(smaller[2]) == 32
        assert fields and plan(pair, planning.Request(**vars(request) | fields), piper).feasible, line


@pytest.mark.parametrize("change, memory_gb, word", [
    ({"schedule": "gpipe", "recompute": True}, 8.0, "the 1f1b schedule would make it fit"),
    ({"max_devices": 2, "recompute": True, "schedule": "1f1b"}, 8.0, "all 4 devices would make it fit"),
    ({"stages": 1, "recompute": True}, 14.0, "another number of stages would make it fit: "),
    ({"schedule": "1f1b"}, 10.0, "recomputation would make it fit"),
    ({"micro_batch_size": 4, "schedule": "1f1b"}, 24.0, "micro-batches of 2 (128 of them) would make it fit"),
    ({"pins": {"embedding": 0, "block 47": 0}}, 20.0, "no pins would make it fit"),
])
def test_each_remedy_has_its_case(change, memory_gb, word, piper):
    """GPT-2 XL: 26 GB of weights and optimizer state; activations of a step of 64 micro-batches come on top."""
    found = plan(cluster([100] * 4, memory_gb), Request("gpt2-xl", 64, **change), piper)
    assert not found.feasible and any(word in line for line in found.advice), found.advice


def test_nothing_helps_is_said_too(piper):
    found = plan(cluster([100] * 2, 10), Request("gpt3-13b", 8, recompute=True), piper)
    assert found.advice[0] == "there is nothing left to try"
    short = r"the model needs at least \d+ GB, 2 devices together have 20 GB: \d+ GB short"
    assert re.fullmatch(short, found.advice[1])
    found = plan(cluster([100] * 2, 10), Request("gpt3-13b", 8, micro_batch_size=2), piper)
    assert found.advice[0] == "tried in vain: recomputation, micro-batches of 1 (16 of them) and all together"


# Pins, limits, input


@pytest.mark.parametrize("pins, S", [
    ({"embedding": "gpu3"}, None), ({"head": 0, "block 3": "GPU2"}, 3), ({0: 5, 13: 4}, 2),
    ({f"block {2 * s}": f"gpu{5 - s}" for s in range(6)}, 6), ({"2": "1", "3": "1", "4": "0"}, 4)])
def test_pins_are_kept(pins, S, piper):
    six = Cluster.from_nodes([("a100-40", 2), ("v100-16", 2), ("t4", 2)], "25gbe")
    found = plan(six, Request("gpt2", 8, stages=S, pins=pins), piper)
    numbers = plan_pins.numbered(pins, found.workload.layer_names, six.labels)
    assert found.feasible and keeps_pins(found.strategy, 14, numbers)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000))
def test_pins_that_can_be_kept_are_kept(seed):
    """On random problems, by the plain start and by planning."""
    rng = np.random.default_rng(seed)
    K, L = int(rng.integers(1, 7)), int(rng.integers(1, 16))
    devices = rng.permutation(K)[:int(rng.integers(0, min(K, L) + 1))]
    where = np.sort(rng.choice(L, len(devices), replace=False))
    pins = {}
    for layer, device, end in zip(where, devices, [*where[1:], L]):
        pins |= {int(layer): int(device), int(rng.integers(layer, end)): int(device)}
    least, greatest = plan_pins.stages_allowed(pins, L)
    S, some = int(rng.integers(least, min(greatest, K) + 1)), cluster(rng.uniform(20, 200, K), 100)
    request = Request(workload(rng.uniform(0.5, 2, L)), 4, stages=S, pins=pins)
    found = plan(some, request, PIPER)
    start = plan_pins.start(found.problem, pins)
    start.check(found.problem)
    assert keeps_pins(start, L, pins) and keeps_pins(found.strategy, L, pins)
    assert found.step_s <= simulator.step_time(found.problem, start) * (1 + 1e-9)


@pytest.mark.parametrize("N", [1, 3, 4])
def test_no_more_devices_are_used_than_allowed(N, piper):
    found = plan(cluster([100, 90, 80, 70], 40), Request("gpt2", 8, max_devices=N), piper)
    assert len([k for group in found.strategy.groups for k in group]) <= N
    alone = plan(cluster([100, 90, 80, 70], 40), Request("gpt2", 8, stages=N, max_devices=N), piper)
    assert [len(group) for group in alone.strategy.groups] == [1] * N


@pytest.mark.parametrize("fields, message", [
    ({"model": "gpt2xl"}, "model: 'gpt2xl' (did you mean 'gpt2-xl'?); allowed: gpt2, "),
    ({"micro_batches": 0}, "micro_batches: 0; allowed: an integer from 1 to 65536"),
    ({"micro_batches": 2.5}, "micro_batches: 2.5"),
    ({"micro_batches": True}, "micro_batches: True"),
    ({"micro_batch_size": 10**9}, "micro_batch_size: 1000000000"),
    ({"sequence_length": 4096}, "sequence_length: 4096; allowed: an integer from 1 to 1024"),
    ({"stages": 5}, "stages: 5; allowed: an integer from 1 to 4, with 14 layers and 4 devices"),
    ({"stages": 0}, "stages: 0"),
    ({"stages": "4"}, "stages: '4'"),
    ({"stages": 3, "max_devices": 2}, "stages: 3; allowed: an integer from 1 to 2"),
    ({"stages": 2, "pins": {0: 0, 5: 1, 9: 2}}, "stages: 2; allowed: an integer from 3 to 4, with 14 layers and 4 de"),
    ({"max_devices": 0}, "max_devices: 0; allowed: an integer from 1 to 4"),
    ({"max_devices": 5}, "max_devices: 5"),
    ({"schedule": "chimera"}, "schedule: 'chimera'; allowed: 1f1b, gpipe"),
    ({"transfers": "fast"}, "transfers: 'fast'"),
    ({"objective": "price"}, "objective: 'price'; allowed: throughput, latency"),
    ({"pins": [1]}, "pins: [1]; allowed: {layer: device}"),
    ({"pins": {"block3": "gpu0"}}, "pins: layer 'block3' (did you mean 'block 3'?); allowed: 0 to 13, or a name: embe"),
    ({"pins": {"head": "gpu9"}}, "pins: device 'gpu9' (did you mean 'gpu"),
    ({"pins": {14: 0}}, "pins: layer 14; allowed: 0 to 13"),
    ({"pins": {-1: 0}}, "pins: layer -1"),
    ({"pins": {0: 0, "embedding": 1}}, "pins: layer 'embedding' twice"),
    ({"pins": {0: 0, 3: 1, 5: 0}}, "pins: device 'gpu0' for layers on both sides of another pin"),
    ({"pins": {0: 0, 3: 1}, "max_devices": 1}, "pins: 2 devices; allowed: at most max_devices = 1"),
])
def test_bad_requests_are_refused_in_one_line(fields, message, piper):
    with pytest.raises(InputError) as error:
        plan(cluster([100] * 4, 40), Request(**{"model": "gpt2", "micro_batches": 8} | fields), piper)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("change", [{"tflops": [1e300, 1.0]}, {"memory_gb": 1e300}, {"gigabytes_per_s": 1e-300},
                                    {"latency_us": 1e300}, {"tflops": [1e-300, 1.0]}])
def test_numbers_out_of_this_world_are_refused_or_planned(change, piper):
    with np.errstate(over="ignore"):
        odd = cluster(**{"tflops": [50.0, 50.0], "memory_gb": 50} | change)
    try:
        found = plan(odd, Request("gpt2", 4), piper)
    except InputError as error:
        assert re.match(r"(forward_s|backward_s|memory_bytes|bandwidth_bytes_per_s|latency_s)\[", str(error))
    else:
        assert found.feasible and np.isfinite(found.step_s)


def test_the_smallest_and_largest_cases(piper):
    one = plan(cluster([80], 10), Request(workload([1.0]), 1), piper)
    assert one.strategy.groups == ((0,),) and one.speedup == 1.0 and one.advice == () and one.bubble == 0.0
    long = plan(cluster([80, 40, 20], 1000), Request(workload([1.0] * 5000), 4, stages=3), piper)
    assert sum(layer_counts(long)) == 5000
    nothing = plan(cluster([80, 80], 10), Request(workload([0.0] * 3, output_mb=0.0), 4, stages=1), piper)
    assert nothing.step_s == 0.0 and nothing.samples_per_s is None and nothing.speedup is None
    with pytest.raises(InputError, match="stages: 65 with 65536 micro-batches; allowed: a product of at most 4194304"):
        plan(cluster([80] * 65, 10), Request(workload([1.0] * 65), 65536, stages=65), piper)


def test_the_numbers_of_stages_that_are_tried(piper):
    def sizes(K, L, M=4, **fields):
        request = Request(workload([1.0] * L), M, **fields)
        return Task.of(cluster([80] * K, 10), request, piper, 0).all_sizes()

    assert sizes(16, 40) == list(range(1, 17)) and sizes(16, 5) == [1, 2, 3, 4, 5]
    assert sizes(16, 40, max_devices=3) == [1, 2, 3]
    assert sizes(8, 20, pins={0: 0, 4: 0, 7: 1}) == list(range(2, 9))
    assert sizes(8, 6, pins={0: 0, 4: 0, 5: 1}) == [2]
    large = sizes(200, 300)
    assert large[:32] == list(range(1, 33)) and large[-1] == 200 and len(large) <= 40
    assert max(sizes(200, 300, M=65536)) <= 64


def test_words():
    assert layer_range(("embedding", "block 0", "block 1", "block 2", "head")) == "embedding, block 0-2, head"
    assert layer_range(("block 7",)) == "block 7" and layer_range(("a 1", "a 3", "b 4")) == "a 1, a 3, b 4"
    many = layer_range(tuple(f"conv{i}.x" for i in range(9)))
    assert many == "conv0.x, conv1.x, conv2.x, conv3.x, ... 9 layers in all"
    assert doctest.testmod(plan_advice).attempted and doctest.testmod(plan_advice).failed == 0
    assert device_list(["a", "b"]) == "a, b" and device_list(list("abcdef")) == "a, b, c, d, ... 6 devices in all"
    assert [size(n) for n in (4.1e9, 2.5e12, 3e6, 25e3, 8.0)] == ["4.1 GB", "2500 GB", "3 MB", "25 kB", "8 bytes"]
    assert (count(1, "stage"), count(2, "micro-batch")) == ("1 stage", "2 micro-batches")
