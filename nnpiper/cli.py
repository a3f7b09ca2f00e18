"""The command line: solve, simulate, train, ablate, reproduce; from `cli_plan` plan, compare, export, profile; from
`cli_engine` engine.

Exit codes: 0 done; 2 bad input, with one line to stderr; 3 the strategy does not fit into memory. Whatever takes
long to import is imported where it is used, so that `nnpiper --help` answers at once.
"""

import functools
import io
import json
import os
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from . import cli_engine, cli_plan
from .paths import ROOT

PLANNERS = ("nnpiper", "network", "even", "pipedream", "piper", "alpa", "alpa-hetero", "amp", "pipeedge", "metis",
            "anneal", "subset", "exact")
LEARNED = ("nnpiper", "network")
DEFAULT_BUDGET_MS, LONGEST_BUDGET_MS = 20.0, 3_600_000.0
FIELDS = ("file", "planner", "cuts", "groups", "step_s", "feasible", "overflow_bytes", "lower_bound_s", "solve_ms")
PICTURES = (".png", ".pdf", ".svg")
LONGEST_LINE = 2000  # characters of an error message

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False,
                  help="Pipeline-parallel strategies for unequal devices: NNPiper, the planners it is measured "
                       "against, a simulator.")


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns its exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # names of files and devices may not exist in the terminal's encoding
            stream.reconfigure(errors="backslashreplace")
    try:
        return typer.main.get_command(app)(arguments, prog_name="nnpiper", standalone_mode=False) or 0
    except OSError as error:
        return _bad_input(f"{error.filename or 'output'}: {error.strerror or error}")
    except Exception as error:
        # typer carries its own click, whose errors (unknown option, missing argument) have no public common class
        if hasattr(error, "format_message"):
            return _bad_input(error.format_message())
        from .problem import InputError
        if isinstance(error, InputError):
            return _bad_input(str(error))
        raise


@app.command()
def solve(
    problems: Annotated[list[Path], typer.Argument(metavar="PROBLEM.json", help="Problem files.")],
    planner: Annotated[str, typer.Option(help=f"One of {', '.join(PLANNERS)}; network is the best sample of "
                                              "nnpiper's network, without polish.", metavar="NAME")] = "nnpiper",
    budget_ms: Annotated[float | None, typer.Option(
        help=f"Time to solve a problem in, for nnpiper and network (default {DEFAULT_BUDGET_MS:g}) and anneal "
             "(default: as long as it takes); the others take the time they need.", metavar="B")] = None,
    seed: Annotated[int, typer.Option(help="Seed of nnpiper, network and anneal.", metavar="N")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")] = False,
) -> int:
    """Find a strategy for each problem. All files are checked before the first is solved."""
    from .bound import lower_bound
    from .problem import InputError, Problem

    if planner not in PLANNERS:
        raise InputError(f"--planner: {planner!r}; allowed: {', '.join(PLANNERS)}")
    if budget_ms is not None and not 0.0 < budget_ms <= LONGEST_BUDGET_MS:
        raise InputError(f"--budget-ms: {budget_ms}; allowed: over 0, at most {LONGEST_BUDGET_MS:g}")
    _check_range("--seed", seed, 0, 2**32 - 1)
    loaded = [(path, Problem.from_file(path)) for path in problems]
    prepare, run = _planner(planner, budget_ms, seed)
    code = 0
    for path, problem in loaded:
        strategy, solve_ms = _timed(prepare, run, path, problem)
        answer = _judged(path, problem, strategy) | {"planner": planner, "solve_ms": solve_ms}
        answer["lower_bound_s"] = lower_bound(problem, answer["step_s"] if answer["feasible"] else None)
        if as_json:
            print(json.dumps({name: answer[name] for name in FIELDS}), flush=True)
        else:
            _print_answer(answer)
        code = code if answer["feasible"] else 3
    return code


@app.command()
def simulate(
    problem_file: Annotated[Path, typer.Argument(metavar="PROBLEM.json")],
    strategy_file: Annotated[Path, typer.Argument(metavar="STRATEGY.json", help="JSON with cuts and groups.")],
    picture: Annotated[Path | None, typer.Option("--timeline", metavar="OUT.png",
                                                 help="Draw the timeline into this file (png, pdf or svg).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> int:
    """Run one training step of a strategy on the exact simulator."""
    from . import cost, simulator
    from .problem import InputError, Problem, Strategy

    if picture is not None and (picture.suffix.lower() not in PICTURES or not picture.parent.is_dir()
                                or picture.exists() and not picture.is_file()):
        raise InputError(f"--timeline: {picture}; allowed: a {', '.join(PICTURES)} file in a folder that exists")
    problem, strategy = Problem.from_file(problem_file), Strategy.from_file(strategy_file)
    try:
        timeline = simulator.timeline(problem, strategy)
    except InputError as error:
        raise InputError(f"{strategy_file}: {error}") from None
    answer = _judged(problem_file, problem, strategy)
    stages, idle = cost.stage_arrays(problem, strategy), timeline.idle_share
    answer |= {"strategy_bound_s": simulator.lower_bound(problem, strategy),
               "stages": [{"forward_s": float(stages.forward_s[s]), "backward_s": float(stages.backward_s[s]),
                           "idle_share": float(idle[s])} for s in range(problem.stages)]}
    if picture is not None:
        from . import plots
        bounds = strategy.bounds(problem.layers)
        labels = [f"{bounds[s]}-{bounds[s + 1] - 1}@{','.join(map(str, group))}"
                  for s, group in enumerate(strategy.groups)]
        plots.save(plots.timeline_figure(timeline, problem.transfers, labels), picture)
    if as_json:
        print(json.dumps({name: value for name, value in answer.items() if name != "text"}))
    else:
        _print_simulation(answer)
    return 0 if answer["feasible"] else 3


@app.command()
def train(
    steps: Annotated[int, typer.Option(help="Training steps.", metavar="N")] = 26000,
    seed: Annotated[int, typer.Option(help="Seed of weights and virtual instances.", metavar="N")] = 0,
    out: Annotated[Path, typer.Option(help="Folder of the checkpoint, its card and log; a run that was killed goes on "
                                           "from here.", metavar="FOLDER")] = Path("runs/nnpiper"),
    start: Annotated[str, typer.Option(help="Checkpoint to go on from, in place of random weights.",
                                       metavar="CHECKPOINT.pt")] = "",
    learning_rate: Annotated[float, typer.Option(help="Highest learning rate.", metavar="R")] = 1e-3,
    groupings: Annotated[int, typer.Option(help="Groupings drawn for each virtual instance.", metavar="N")] = 16,
    grows: Annotated[bool, typer.Option(help="Twice as many groupings from half of the steps on, four times as many in "
                                             "the last fifth.")] = True,
    loss: Annotated[str, typer.Option(help="What is learned from the drawn strategies: best-against-spread, "
                                           "pairwise, self-labelling or policy-gradient.",
                                      metavar="NAME")] = "best-against-spread",
) -> int:
    """Train the network by VCTA. Data parallel under torchrun: torchrun --nproc-per-node 2 -m nnpiper.cli train ..."""
    from .problem import InputError, check_choice, check_folder

    _check_range("--steps", steps, 1, 10**7)
    _check_range("--seed", seed, 0, 2**32 - 1)
    if not 0.0 < learning_rate <= 1.0:
        raise InputError(f"--learning-rate: {learning_rate}; allowed: over 0, at most 1")
    _check_range("--groupings", groupings, 2, 1024)
    check_folder("--out", out)
    from . import vcta
    # imitation needs plans to learn from, which only the ablations make
    check_choice("--loss", loss, [name for name in vcta.LOSSES if name != "imitation"])
    recipe = vcta.Recipe(steps=steps, seed=seed, start=start, learning_rate=learning_rate, groupings=groupings,
                         grows=grows, loss=loss)
    checkpoint = vcta.train(out, recipe)
    if os.environ.get("RANK", "0") == "0":
        print(f"wrote {checkpoint}")
    return 0


@app.command()
def ablate(
    seconds: Annotated[float, typer.Option(help="CPU time of each training.", metavar="N")] = 60.0,
    seeds: Annotated[int, typer.Option(help="Trainings of each kind.", metavar="N")] = 3,
    only: Annotated[list[str] | None, typer.Option(help="One of the kinds, instead of all; may be given several times. "
                                                        "ablations.csv is of these alone.", metavar="NAME")] = None,
    out: Annotated[Path, typer.Option(help="Folder of the trainings and of ablations.csv; a study that was killed goes "
                                           "on from here.", metavar="FOLDER")] = Path("runs/ablations"),
) -> int:
    """Train with one thing changed at a time and judge the networks, for notebook 08. Three quarters of an hour on two
    cores."""
    from .problem import check_choice, check_folder

    _check_range("--seconds", seconds, 1, 10**6)
    _check_range("--seeds", seeds, 1, 100)
    check_folder("--out", out)
    from . import ablations
    names = tuple(dict.fromkeys(only or ablations.CHANGES))
    for name in names:
        check_choice("--only", name, ablations.CHANGES)
    ablations.study(out, seconds, seeds, names)
    print(f"wrote {out / 'ablations.csv'}")
    return 0


@app.command(add_help_option=False, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def reproduce(context: typer.Context) -> int:
    """Regenerate every table and figure: ./reproduce.sh, with its options (see reproduce --help)."""
    from .problem import InputError

    script = ROOT / "reproduce.sh"
    if not script.is_file():
        raise InputError(f"{script}: no such file; allowed: a checkout of the repository, installed with pip -e")
    sys.stdout.flush()
    os.execvp("bash", ["bash", str(script), *context.args])


cli_plan.register(app)
cli_engine.register(app)


def _bad_input(message):
    """One line, whatever names of files and values hold."""
    line = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in " ".join(message.split()))
    line = line if len(line) <= LONGEST_LINE else f"{line[:LONGEST_LINE // 2]} ... {line[-LONGEST_LINE // 4:]}"
    print(f"nnpiper: {line}", file=sys.stderr)
    return 2


def _check_range(name, value, low, high):
    from .problem import InputError

    if not low <= value <= high:
        raise InputError(f"{name}: {value}; allowed: an integer from {low} to {high}")


def _planner(name, budget_ms, seed):
    """(prepare, run), both functions of a problem. After prepare the model is loaded and every kernel compiled that
    this problem needs: it solves the problem without a deadline (which compiling would overrun), or, where that takes
    long and one kernel serves all problems, a small part of it."""
    budget_s = None if budget_ms is None else budget_ms / 1e3
    if name in LEARNED:
        from .solver import NNPiper
        prepare = functools.partial(NNPiper.from_pretrained().solve, seed=seed, polish=name == "nnpiper")
        return prepare, functools.partial(prepare, budget_s=budget_s or DEFAULT_BUDGET_MS / 1e3)
    from .baselines import PLANNERS as baselines
    from .comparison import small
    if name == "anneal":
        prepare = functools.partial(baselines[name], seed=seed, moves=1, budget_s=budget_s and 1e-3)
        return prepare, functools.partial(baselines[name], seed=seed, budget_s=budget_s)
    if name == "exact":
        return lambda problem: baselines[name](small(problem)), baselines[name]
    return baselines[name], baselines[name]


def _timed(prepare, run, path, problem):
    """(strategy, ms to find it)."""
    from .baselines import PlannerLimit
    from .problem import InputError

    try:
        prepare(problem)
        begin = time.perf_counter()
        strategy = run(problem)
        return strategy, 1e3 * (time.perf_counter() - begin)
    except PlannerLimit as error:
        raise InputError(f"{path}: planner {error}") from None


def _judged(path, problem, strategy):
    """What the exact simulator and the memory check say of a strategy."""
    from . import cost, simulator

    overflow = cost.overflow_bytes(problem, strategy)
    return {"file": str(path), "cuts": list(strategy.cuts), "groups": [list(group) for group in strategy.groups],
            "step_s": simulator.step_time(problem, strategy), "feasible": overflow == 0.0, "overflow_bytes": overflow,
            "text": strategy.text(problem.layers)}


def _print_answer(answer):
    fits = "fits in memory" if answer["feasible"] else f"{answer['overflow_bytes'] / 1e9:.4g} GB over memory"
    print(f"{answer['file']}: {answer['text']}")
    print(f"    step {answer['step_s']:.4g} s (no plan takes less than {answer['lower_bound_s']:.4g} s), {fits}, "
          f"{answer['planner']} took {answer['solve_ms']:.3g} ms", flush=True)


def _print_simulation(answer):
    from rich import box
    from rich.console import Console
    from rich.table import Table

    print(f"step {answer['step_s']:.4g} s, at least {answer['strategy_bound_s']:.4g} s with this strategy")
    if not answer["feasible"]:
        print(f"does not fit: {answer['overflow_bytes'] / 1e9:.4g} GB over memory")
    table = Table("stage", "layers@devices", box=box.SIMPLE_HEAD)
    for name in ("forward [s]", "backward [s]", "idle [%]"):
        table.add_column(name, justify="right")
    for s, (part, stage) in enumerate(zip(answer["text"].split(" | "), answer["stages"])):
        table.add_row(str(s), part, f"{stage['forward_s']:.4g}", f"{stage['backward_s']:.4g}",
                      f"{100 * stage['idle_share']:.1f}")
    Console(highlight=False, markup=False).print(table)


if __name__ == "__main__":
    sys.exit(main())
