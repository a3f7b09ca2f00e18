"""Hostile inputs made from numbers: files, folders and command lines that break what can break.

`make(seed, number, folder)` writes the files of a case into a folder and returns the case, the same each time. What an
answer to it must be, `answers` says.

Symbols: L layers, K devices, S stages, M micro-batches.
"""

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from instances import random_problem
from plans import odd_problem, random_strategy
from spoil import TEXTS, chance, log_uniform, pick, spoiled, write

from nnpiper import cli, importers, planning, plan_file, profiles
from nnpiper.cluster import DEVICES, LINKS, Cluster
from nnpiper.export import TARGETS
from nnpiper.problem import Problem
from nnpiper.workload import MODELS, Model, chain


class Case(NamedTuple):
    """Either a command line or, for what has no command, a call."""

    kind: str
    command: list[str] | None = None
    call: Callable | None = None


# Clusters and what is asked of them


def cluster_document(rng) -> dict:
    """A cluster file of few devices that is right, though its figures may be of any size that is allowed."""
    named, extreme = chance(rng, 0.5), chance(rng, 0.4)
    entries = []
    for i in range(int(rng.integers(1, 4))):
        entry = {"device": pick(rng, (*DEVICES, "RTX 3090", "NVIDIA GeForce RTX 2080 Ti"))}
        if chance(rng, 0.5):
            entry = {"device": pick(rng, ("own", "名前 ñ 🚀", "שלום", "x" * 60, "<b>&$x_{$")),
                     "memory_GB": log_uniform(rng, 1e-3, 1e6) if extreme else log_uniform(rng, 4, 80)}
            if chance(rng, 0.5):
                entry["achieved_TFLOPS"] = log_uniform(rng, 1e-6, 1e6) if extreme else log_uniform(rng, 1, 300)
            else:
                entry |= {"peak_TFLOPS": log_uniform(rng, 1e-6 if extreme else 1, 1e6), "efficiency": log_uniform(
                    rng, 1e-3, 1)}
        if chance(rng, 0.4):
            entry["count"] = int(rng.integers(1, 4))
        if chance(rng, 0.2):
            entry["name"] = pick(rng, (f"card{i}", f"карта{i}", f"a.b-c+d/e{i}"))
        if named:
            entry["node"] = pick(rng, ("box-a", "box-b", "机"))
        entries.append(entry)
    links = {name: _link(rng, extreme) for name in ("inside", "between")}
    out = {"devices": entries, "links": links}
    if chance(rng, 0.3):
        out["reserve"] = pick(rng, (0, 0.1, 0.5, 0.999))
    return out


def _link(rng, extreme):
    if chance(rng, 0.4):
        return pick(rng, tuple(LINKS))
    low, high = (1e-6, 1e6) if extreme else (0.1, 100.0)
    return {pick(rng, ("GB/s", "Gb/s")): log_uniform(rng, low, high),
            "us": pick(rng, (0, 5.0, 50, 1e9)) if extreme else log_uniform(rng, 1, 1e5)}


PLAN_OPTIONS = {  # option: values that are right, values that may be wrong
    "--stages": (("auto", "1", "2"), ("0", "-1", "3", "99", "²", "1_0", "", "9" * 30, "1.5", "AUTO")),
    "--schedule": (("1f1b", "gpipe", "auto"), ("zb", "1F1B", "", "\x1b[31m")),
    "--micro-batch-size": (("1", "2", "8"), ("0", "-1", "65536", "65537", "1e3", "1_0", "٣", "45360")),
    "--sequence-length": (("1", "128", "512"), ("0", "-5", "1048576", "1048577", "99999999999999999999")),
    "--transfers": (("blocking", "overlapped"), ("both", "")),
    "--pin": (("0=0",), ("head=gpu0", "=", "==", "0=0=0", "block 3=gpu1", "99=0", "0=99", "-1=0", "٣=0", "head", "a=b",
                         "\ud800=0", f"{'9' * 5000}=0")),
    "--max-devices": (("1",), ("0", "2", "3", "-1", "1025", "two")),
    "--objective": (("throughput", "latency"), ("money", "")),
    "--seed": (("0", "4294967295"), ("-1", "4294967296", "1.0", "x", "1_0")),
    "--model": (("gpt2", "gpt2-medium", "bert-large"),
                ("t5-large", "gpt3-175b", "GPT2", "gpt5", "", "\ud800", "llama3-8b")),
    "--micro-batches": (("1", "2", "7", "16"), ("0", "-3", "65536", "65537", "1_000", "٣", "8.0", "1e1", "nan", "")),
}
FLAGS = ("--recompute", "--json")


def options(rng, wrong: float) -> list[str]:
    """Options of `plan`: what it cannot do without, some others, and with probability `wrong` each a value that may be
    wrong; some options twice."""
    out = []
    for name, (right, doubtful) in PLAN_OPTIONS.items():
        if name in ("--model", "--micro-batches"):
            value = right[0] if name == "--model" and chance(rng, 0.7) else pick(rng, right)
        elif chance(rng, 0.2):
            value = pick(rng, right)
        else:
            value = None
        if chance(rng, wrong):
            value = pick(rng, doubtful)
        if value is not None:
            out += [name, value] if chance(rng, 0.9) else [f"{name}={value}"]
            if chance(rng, 0.05):
                out += [name, pick(rng, right)]
    out += [flag for flag in FLAGS if chance(rng, 0.3)]
    return out


def garbled(rng, command: list[str]) -> list[str]:
    """A command line with a few of its words dropped, repeated, moved or replaced."""
    command = list(command)
    for _ in range(int(rng.integers(1, 4))):
        i, action = int(rng.integers(len(command) + 1)), int(rng.integers(5))
        if action == 0:
            del command[i:i + 1]
        elif action == 1:
            command[i:i] = command[i:i + 2]
        elif action == 2:
            command.insert(i, pick(rng, (*TEXTS, "--", "-", "--help", "-h", "--version", "--json", "--jso", "--out")))
        elif action == 3 and len(command) > 2:
            j = int(rng.integers(len(command)))
            command[i:i + 1], command[j] = [command[j]], command[min(i, len(command) - 1)]
        else:
            command[i:i + 1] = [pick(rng, TEXTS)]
    words = [word.replace("\x00", "") for word in command]  # no command line can hold it
    # never what starts long work or writes elsewhere
    return [word for word in words if word not in ("reproduce", "train", "profile")]


def plan_on_a_cluster(rng, folder):
    toml = chance(rng, 0.6)
    path = folder / pick(rng, (f"cluster.{'toml' if toml else 'json'}", f"名\u202e.{'toml' if toml else 'json'}"))
    good = write(rng, path, cluster_document(rng), toml, share=0.65)
    command = ["plan", str(path), *options(rng, 0.0 if good else 0.02)]
    if chance(rng, 0.25):
        command += ["--out", str(folder / pick(rng, ("plan.json", "new/plan.json", "rtl\u202e.json")))]
    if chance(rng, 0.04):
        command += ["--report", str(folder / "plan.html")]
    return command


def plan_with_options(rng, folder):
    path = folder / "cluster.toml"
    write(rng, path, cluster_document(rng), True, share=0.0)
    command = ["plan", str(path), *options(rng, 0.12)]
    if chance(rng, 0.2):
        occupied = folder / "occupied"
        occupied.mkdir()
        target = pick(rng, (str(occupied), str(path / "below.json"), "", ".", "/dev/null", str(folder / ("n" * 300)),
                            str(folder / "pipe"), str(folder / "\x1b[31m.json"), str(folder / "\udce9.json")))
        os.mkfifo(folder / "pipe")
        command += [pick(rng, ("--out", "--report")), target]
    return command


def words(rng, folder):
    """Command lines that are mostly not understood."""
    path = folder / "cluster.toml"
    write(rng, path, cluster_document(rng), True, share=0.0)
    name = pick(rng, ("plan", "compare", "export", "solve", "simulate", "plann", ""))
    return garbled(rng, [name, str(path), *options(rng, 0.1)])


def plan_with_a_profile(rng, folder):
    model = Model("tiny", "gpt", 2, 32, 4, 4, 128, 61, 16, 16, True, "made up")
    low, high = (1e-9, 1e6) if chance(rng, 0.2) else (1e-6, 1e-3)
    kinds = {kind: profiles.KindTimes(*(log_uniform(rng, low, high) if chance(rng, 0.9) else 0.0 for _ in range(4)))
             for kind in ("embedding", "block", "head")}
    profile = profiles.Profile("GPU", pick(rng, (None, 24e9)), model, 1, 16, False, "bfloat16", kinds, 20, "GPU", "2.9",
                               "2026-01-01")
    good = write(rng, folder / "gpu.json", json.loads(profile.to_json()), share=0.7)
    cluster = {"devices": [{"profile": "gpu.json", "memory_GB": 24}, {"device": "RTX 3090"}],
               "links": {"inside": "pcie3"}}
    write(rng, folder / "cluster.json", cluster, share=0.1)
    return ["plan", str(folder / "cluster.json"), *options(rng, 0.0 if good else 0.02)]


# Problems, strategies, plan files


def problem(rng) -> Problem:
    """A small problem; sometimes long, sometimes without memory, links or devices far out of the ordinary."""
    L = int(pick(rng, (1, 1, 2, 6, 20)))
    made = random_problem(rng, K=int(rng.integers(1, 6)), L=L, memory=pick(rng, (None, None, 1.0, 0.5, 2.0)))
    made = odd_problem(rng, made) if chance(rng, 0.4) else made
    if chance(rng, 0.15):
        scale = pick(rng, (0.0, 1e-300, 1e-30, 1e15, 1e26))
        field = pick(rng, ("forward_s", "backward_s", "output_bytes", "stash_bytes", "static_bytes", "memory_bytes",
                           "gradient_bytes", "latency_s"))
        made = made.replace(**{field: np.minimum(getattr(made, field) * scale, 1e30)})
    if chance(rng, 0.05):
        made = made.replace(micro_batches=int(pick(rng, (1, 4096, 65536))))
    return made


def solve_problems(rng, folder):
    files = [folder / f"problem{i}.json" for i in range(pick(rng, (1, 1, 1, 2)))]
    for path in files:
        write(rng, path, json.loads(problem(rng).to_json()), share=0.65)
    planner = pick(rng, ("nnpiper", "nnpiper", *cli.PLANNERS, "", "NNPIPER"))
    command = ["solve", *map(str, files), "--planner", planner]
    command += ["--json"] if chance(rng, 0.7) else []
    if planner in (*cli.LEARNED, "anneal") or chance(rng, 0.1):
        command += ["--budget-ms", pick(rng, ("1", "5", "20", "0.001", "1e-300", "5") if chance(rng, 0.9) else (
            "0", "-1", "nan", "inf", "1e300", "٣", "1_0"))]
    return command


def long_problems(rng, folder):
    """5,000 layers."""
    made = random_problem(rng, K=int(rng.integers(1, 4)), L=5000, M=4)
    path = folder / "long.json"
    path.write_text(made.to_json(), encoding="utf-8")
    return ["solve", str(path), "--json", "--budget-ms", "20", "--planner", pick(rng, ("nnpiper", "even", "network"))]


def simulate_strategies(rng, folder):
    made, path, strategy_path = problem(rng), folder / "problem.json", folder / "strategy.json"
    write(rng, path, json.loads(made.to_json()), share=0.2)
    strategy = random_strategy(rng, made)
    write(rng, strategy_path, {"cuts": [int(cut) for cut in strategy.cuts],
                               "groups": [[int(k) for k in group] for group in strategy.groups]}, share=0.6)
    command = ["simulate", str(path), str(strategy_path), *(["--json"] if chance(rng, 0.7) else [])]
    if chance(rng, 0.05):
        command += ["--timeline", str(folder / pick(rng, ("t.png", "t.svg", "t.gif", "none/t.png", "t", "/dev/null")))]
    return command


def compare_planners(rng, folder):
    """A few that run every planner, many that are refused before that."""
    path = folder / "problem.json"
    if chance(rng, 0.1):
        write(rng, path, json.loads(random_problem(rng, memory=1.5).to_json()), share=0.0)
        return ["compare", str(path), "--time-limit", "5", *(["--json"] if chance(rng, 0.7) else [])]
    write(rng, path, json.loads(problem(rng).to_json()), share=0.0)
    option = pick(rng, ("--time-limit", "--seed", "--stages", "--model", "--pin", "--recompute"))
    return ["compare", str(path), option, pick(rng, ("0", "-1", "nan", "inf", "1e300", "", "\ud800", "٣ "))]


def plan_document(rng) -> dict:
    """A right plan file of few stages."""
    K, blocks = int(rng.integers(1, 6)), int(rng.integers(1, 20))
    kinds = list(chain(MODELS["gpt2"]).kinds)
    kinds = [kinds[0], *["block"] * blocks, kinds[-1]]
    S = int(rng.integers(1, min(K, len(kinds)) + 1))
    devices = [{"name": pick(rng, (f"gpu{k}", f"卡{k}", f"a'{k}")), "node": pick(rng, ("box-a", "box-b", "10.0.0.7")),
                "title": pick(rng, ("RTX 3090", "'; rm -rf", "\u202e")), "index": k} for k in range(K)]
    made = plan_file.PlanFile(
        model=pick(rng, ("gpt2", "名前", "a\nb")), layer_kinds=kinds, micro_batches=int(rng.integers(1, 65)),
        micro_batch_size=int(rng.integers(1, 9)), sequence_length=1024, schedule=pick(rng, ("1f1b", "gpipe")),
        transfers="blocking", recompute=chance(rng, 0.5), devices=devices,
        cuts=sorted(rng.choice(np.arange(1, len(kinds)), S - 1, replace=False).tolist()),
        groups=[[int(k)] for k in rng.permutation(K)[:S]], step_s=pick(rng, (0.0, 0.5, 1e300)))
    return json.loads(made.model_dump_json())


def export_plans(rng, folder):
    path = folder / "plan.json"
    write(rng, path, plan_document(rng), share=0.6)
    target = pick(rng, TARGETS) if chance(rng, 0.95) else pick(rng, TEXTS).replace("\0", "")
    command = ["export", str(path), "--to", target]
    if chance(rng, 0.25):
        command += ["--out", str(folder / pick(rng, ("out.txt", ".", "none/out.txt", "plan.json/below")))]
    return command


# Calls


def import_files(rng, folder):
    """A file of each format, mostly changed."""
    parameters = {"parameters_per_layer_bytes": [10, 20], "activation_parameters_bytes": [1, 2]}
    metis = {"model": {"parameters": parameters}, "execution_time": {"layer_compute_total_ms": [1.0, 2.5]},
             "execution_memory": {"layer_memory_total_mb": [100.0, 200.5]}}
    piper = {"maxMemoryPerDevice": 1e9, "maxDevices": 2, "bandwidth": 1e9, "nodes": [
        {"id": i, "name": "n", "TMPCs": {"1": [{"id": "vanilla", "timePerSample": 1.0, "parameterSize": 4,
                                                "memoryUsageA": 1, "memoryUsageB": 8}]}} for i in range(3)],
        "edges": [{"sourceId": i, "destId": i + 1, "communicationCost": 5.0} for i in range(2)]}
    info = {"M": {"1": {str(i): {"params_bytes": 4, "act_output_bytes": 1, "act_mem_bytes": 2} for i in range(2)}}}
    times = {"2": {"1": {str(i): [0.1, 0.2, 0.3] for i in range(2)}}}
    hosts = {"10.0.0.1": {"instance_type": "A", "inter_bandwidth": 10, "intra_bandwidth": 1e10, "memory": 16}}
    graph = "".join(f"node{i} -- Conv({i}) -- forward_compute_time=1.0, backward_compute_time=2.0, "
                    f"activation_size={pick(rng, ('4.0', '[1.0; 2.0]'))}, parameter_size=8.0\n" for i in range(3))
    graph += "node0 -- node1\n\tnode1 -- node2\n"
    a, b = folder / "DeviceType.A_tp1_bs2.json", folder / "b.json"
    form = pick(rng, ("metis", "piper", "sailor", "pipedream", "metis_devices"))
    if form == "pipedream":
        a.write_bytes(spoiled(rng, graph.encode()) if chance(rng, 0.7) else graph.encode())
        return partial(importers.pipedream, {"A": a})
    if form == "metis_devices":
        a.write_bytes(spoiled(rng, b"10.0.0.1 slots=2\n") if chance(rng, 0.5) else b"10.0.0.1 2\n")
        write(rng, b, hosts, share=0.6)
        return partial(importers.metis_devices, a, b)
    write(rng, a, {"metis": metis, "piper": piper, "sailor": times}[form], share=0.8)
    if form == "sailor":
        write(rng, b, info, share=0.2)
    return {"metis": partial(importers.metis, folder, 2), "piper": partial(importers.piper, {"A": a}),
            "sailor": partial(importers.sailor, {"A": a}, b, "M", 2)}[form]


def plan_from_python(rng, folder):
    """Clusters that no cluster file can hold, models of any length, requests of any type."""
    K = int(rng.integers(1, 4))
    odd = (0.0, -1.0, np.nan, np.inf, 1e300, 1e-300)
    flops, memory = 10.0 ** rng.uniform(12, 14, K), 10.0 ** rng.uniform(9, 11, K)
    rate, latency = 10.0 ** rng.uniform(8, 11, (K, K)), 10.0 ** rng.uniform(-6, -3, (K, K))
    for array in (flops, memory, rate, latency):
        if chance(rng, 0.25):
            array[(-1,) * array.ndim if array.ndim == 1 else (0, -1)] = pick(rng, odd)
    cluster = Cluster(tuple(f"d{k}" for k in range(K)), flops, memory, rate, latency, np.zeros(K))
    layers = int(pick(rng, (1, 2, 12, 12, 5000)))
    family = pick(rng, ("gpt", "bert", "llama", "t5"))
    model = Model("made up", family, layers, 32, 4, 4, 64, 101, 0, 16, True, "made up")
    asked = {"model": model, "micro_batches": 4, "stages": int(rng.integers(1, K + 1)) if chance(rng, 0.7) else None}
    if chance(rng, 0.3):
        field = pick(rng, ("micro_batches", "stages", "schedule", "micro_batch_size", "sequence_length", "transfers",
                           "pins", "max_devices", "objective"))
        asked[field] = pick(rng, (0, -1, 1.5, "x", 10**30, np.nan, True, {"a": 0}, {0: 0}, {0: 99}, [], 2**70))
    return lambda: planning.plan(cluster, planning.Request(**asked))


KINDS = {  # and how often each is taken
    plan_on_a_cluster: 25, plan_with_options: 15, plan_with_a_profile: 8, words: 10, solve_problems: 12,
    long_problems: 0.4, simulate_strategies: 10, compare_planners: 2, export_plans: 9, import_files: 6, plan_from_python: 4,
}


def make(seed: int, number: int, folder: Path) -> Case:
    """Case `number` of a seed; its files are written into `folder`, which is empty."""
    rng = np.random.default_rng([seed, number])
    weights = np.array(list(KINDS.values()))
    maker = list(KINDS)[int(rng.choice(len(KINDS), p=weights / weights.sum()))]
    made = maker(rng, folder)
    return Case(maker.__name__, made) if isinstance(made, list) else Case(maker.__name__, call=made)
