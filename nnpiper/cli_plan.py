"""The commands that plan a user's own cluster: plan, compare, export, profile. Exit codes are those of `cli`."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

MODEL = typer.Option(metavar="NAME", help="Model of the catalogue, such as gpt2-xl or llama3-8b.")
MICRO_BATCHES = typer.Option(metavar="M", help="Micro-batches of one training step.")
STAGES = typer.Option(metavar="S|auto", help="Number of stages; auto tries all.")
SCHEDULE = typer.Option(metavar="1f1b|gpipe|auto", help="Order of the operations; auto tries both.")
MICRO_BATCH_SIZE = typer.Option(metavar="B", help="Sequences of a micro-batch.")
SEQUENCE_LENGTH = typer.Option(metavar="N", help="Tokens of a sequence (default: the model's own).")
TRANSFERS = typer.Option(metavar="blocking|overlapped", help="Whether a stage waits for its sends, as most frameworks "
                                                             "do, or computes beside them.")
RECOMPUTE = typer.Option("--recompute", help="Blocks keep their input alone and run forward twice.")
SEED = typer.Option(metavar="N", help="Seed of the search; the same seed gives the same plan.")
AS_JSON = typer.Option("--json", help="Print JSON.")
AUTO = "auto"


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    for command in (plan, compare, export, profile):
        app.command()(command)


def plan(
    cluster: Annotated[Path, typer.Argument(metavar="CLUSTER", help="Cluster file (toml or json).")],
    model: Annotated[str, MODEL],
    micro_batches: Annotated[int, MICRO_BATCHES],
    stages: Annotated[str, STAGES] = AUTO,
    schedule: Annotated[str, SCHEDULE] = AUTO,
    micro_batch_size: Annotated[int, MICRO_BATCH_SIZE] = 1,
    sequence_length: Annotated[int | None, SEQUENCE_LENGTH] = None,
    transfers: Annotated[str, TRANSFERS] = "blocking",
    recompute: Annotated[bool, RECOMPUTE] = False,
    pin: Annotated[list[str] | None, typer.Option(
        metavar="LAYER=DEVICE", help="The layer's stage runs on this device alone; layer by number or name "
                                     "('block 3'), device by label. May be repeated.")] = None,
    max_devices: Annotated[int | None, typer.Option(
        metavar="N", help="Use at most N devices; as many as stages: one device a stage.")] = None,
    objective: Annotated[str, typer.Option(metavar="throughput|latency",
                                           help="The shortest step, or the shortest way of one micro-batch.")
                         ] = "throughput",
    seed: Annotated[int, SEED] = 0,
    report: Annotated[Path | None, typer.Option(metavar="OUT.html", help="Write a page with timeline and memory "
                                                                         "picture.")] = None,
    out: Annotated[Path | None, typer.Option(metavar="PLAN.json", help="Write the plan file, which nnpiper export "
                                                                       "reads.")] = None,
    as_json: Annotated[bool, AS_JSON] = False,
) -> int:
    """Plan a model on a cluster: stages, devices, step time, memory; or what is short, and what would help."""
    _check_seed(seed)
    _check_outputs(report=report, out=out)
    from . import cluster_file, plan_report, planning
    from .problem import write_text

    request = planning.Request(
        model, micro_batches, _stages(stages), None if schedule == AUTO else schedule, micro_batch_size,
        sequence_length, transfers, recompute, _pins(pin or []), max_devices, objective)
    found = planning.plan(cluster_file.load(cluster), request, seed=seed)
    text = found.to_file().model_dump_json(indent=1) + "\n" if found.feasible else None
    page = plan_report.page(found) if found.feasible and report is not None else None
    if found.feasible and out is not None:
        write_text(out, text)
    if page is not None:
        write_text(report, page)
    if not as_json:
        plan_report.print_plan(found)
    elif found.feasible:
        print(text, end="")
    else:
        short = [{"stage": s, "device": device, "bytes": missing} for s, device, missing in found.shortages]
        print(json.dumps({"feasible": False, "short": short, "advice": found.advice}))
    for path in (out, report) if not found.feasible else ():
        if path is not None:
            print(f"nnpiper: {path}: not written, the plan does not fit", file=sys.stderr)
    return 0 if found.feasible else 3


def compare(
    source: Annotated[Path, typer.Argument(metavar="CLUSTER", help="Cluster file, or without --model a problem file.")],
    model: Annotated[str | None, MODEL] = None,
    micro_batches: Annotated[int | None, MICRO_BATCHES] = None,
    stages: Annotated[str, STAGES] = AUTO,
    schedule: Annotated[str, SCHEDULE] = AUTO,
    micro_batch_size: Annotated[int, MICRO_BATCH_SIZE] = 1,
    sequence_length: Annotated[int | None, SEQUENCE_LENGTH] = None,
    transfers: Annotated[str, TRANSFERS] = "blocking",
    recompute: Annotated[bool, RECOMPUTE] = False,
    time_limit: Annotated[float, typer.Option(metavar="S", help="Seconds that each planner may take.")] = 20.0,
    seed: Annotated[int, SEED] = 0,
    as_json: Annotated[bool, AS_JSON] = False,
) -> int:
    """Every planner on one problem: step, gap to the best, time, and whether the plan fits. With S or the schedule left
    open, those of the best plan are taken for all."""
    _check_seed(seed)
    from . import comparison
    from .problem import InputError

    if model is None:
        given = [name for name, value, default in (
            ("--micro-batches", micro_batches, None), ("--stages", stages, AUTO), ("--schedule", schedule, AUTO),
            ("--micro-batch-size", micro_batch_size, 1), ("--sequence-length", sequence_length, None),
            ("--transfers", transfers, "blocking"), ("--recompute", recompute, False)) if value != default]
        if given or source.suffix.lower() == ".toml":
            raise InputError(f"--model is missing{f' beside {given[0]}' if given else ''}; allowed: a model for a "
                             "cluster file, or a problem file and none of these options")
        from .problem import Problem
        title, problem = str(source), Problem.from_file(source)
    elif micro_batches is None:
        raise InputError("--micro-batches is missing; allowed: an integer from 1")
    else:
        title = f"{model} on {source}"
        problem = _problem(source, model, micro_batches, stages, schedule, micro_batch_size, sequence_length, transfers,
                           recompute, seed)
    rows = comparison.compare(problem, time_limit, seed=seed)
    for row in rows if as_json else ():
        strategy = row.strategy
        print(json.dumps({
            "planner": row.planner, "cuts": strategy and strategy.cuts, "groups": strategy and strategy.groups,
            "step_s": row.step_s, "gap": row.gap, "solve_s": row.solve_s, "feasible": row.feasible,
            "overflow_bytes": row.overflow_bytes, "note": row.note}))
    if not as_json:
        from .plan_advice import count, size
        from .plan_report import print_table, printable

        print(printable(f"{title}: {count(problem.stages, 'stage')}, {count(problem.micro_batches, 'micro-batch')}, "
                        f"{problem.schedule}, {problem.transfers} transfers"))
        print_table(["planner", "memory", "step [s]", "gap [%]", "time [ms]"], [
            [row.planner, row.note or ("fits" if row.feasible else f"{size(row.overflow_bytes)} over"),
             "" if row.step_s is None else f"{row.step_s:.4g}", "" if row.gap is None else f"{100 * row.gap:.1f}",
             "" if row.solve_s is None else f"{1e3 * row.solve_s:.3g}"] for row in rows], words=2)
    return 0 if any(row.feasible for row in rows) else 3


def export(
    plan_file: Annotated[Path, typer.Argument(metavar="PLAN.json", help="Plan file of nnpiper plan.")],
    to: Annotated[str, typer.Option(metavar="NAME", help="megatron, deepspeed, torch, torchtitan, vllm, sglang, "
                                                         "llama.cpp, accelerate or json.")],
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write this file instead of printing.")] = None,
) -> int:
    """Print a plan as text that another framework takes, device order included."""
    _check_outputs(out=out)
    from . import export as exports
    from . import plan_file as plan_files
    from .problem import write_text

    text = exports.export(plan_files.read(plan_file), to)
    if out is None:
        print(text, end="" if text.endswith("\n") else "\n")
    else:
        write_text(out, text)
    return 0


def profile(
    model: Annotated[str, MODEL],
    out: Annotated[Path, typer.Option(metavar="FILE.json", help="Profile file, which a cluster file names.")],
    micro_batch_size: Annotated[int, MICRO_BATCH_SIZE] = 1,
    sequence_length: Annotated[int | None, SEQUENCE_LENGTH] = None,
    recompute: Annotated[bool, RECOMPUTE] = False,
    device: Annotated[str, typer.Option(metavar="cpu|cuda|cuda:N", help="Where to measure.")] = "cpu",
) -> int:
    """Measure forward and backward of every kind of layer on a device of this machine."""
    _check_outputs(out=out)
    from . import profiling
    from .problem import write_text

    measured = profiling.measure(model, micro_batch_size, sequence_length, recompute, device,
                                 progress=lambda kind: print(f"measuring {kind}", file=sys.stderr))
    write_text(out, measured.to_json())
    print(f"wrote {out}")
    return 0


def _problem(cluster, model, micro_batches, stages, schedule, micro_batch_size, sequence_length, transfers, recompute,
             seed):
    """The problem that all planners get; what is left open is that of the best plan."""
    from . import cluster_file
    from .plan_search import Request, Task
    from .solver import NNPiper

    request = Request(model, micro_batches, _stages(stages), None if schedule == AUTO else schedule, micro_batch_size,
                      sequence_length, transfers, recompute)
    task = Task.of(cluster_file.load(cluster), request, NNPiper.from_pretrained(), seed)
    if AUTO in (stages, schedule):
        return task.search(task.sizes())[0].problem
    return task.base.replace(stages=request.stages, schedule=request.schedule)


def _stages(text):
    from .problem import InputError

    if text == AUTO:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise InputError(f"--stages: {text!r}; allowed: an integer from 1, or {AUTO}")
    return int(text)


def _pins(texts):
    from .problem import InputError

    pins = {}
    for text in texts:
        layer, sign, device = (part.strip() for part in text.partition("="))
        if not (sign and layer and device) or layer in pins:
            raise InputError(f"--pin: {text!r}; allowed: LAYER=DEVICE, each layer once")
        pins[layer] = device
    return pins


def _check_seed(seed):
    from .problem import InputError

    if not 0 <= seed < 2**32:
        raise InputError(f"--seed: {seed}; allowed: an integer from 0 to {2**32 - 1}")


def _check_outputs(**paths):
    """Refuse what cannot become a file before anything is computed."""
    from .problem import InputError

    given = [path for path in paths.values() if path is not None]
    for name, path in paths.items():
        if path is None:
            continue
        if given.count(path) > 1:
            raise InputError(f"--{name}: {path}; allowed: a file of its own")
        # renaming a file to a FIFO's or a device's name would replace it
        if path.exists() and not path.is_file() or any(folder.is_file() for folder in path.parents):
            raise InputError(f"--{name}: {path}; allowed: a file")
