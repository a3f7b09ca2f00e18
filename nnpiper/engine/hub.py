"""First process inside the namespaces: starts the stages, joins them by a bridge, passes lines on.

python -m nnpiper.engine.hub RANKS: answers once when the network is up; then every line of JSON on stdin goes to all
stages, and their answers come back as one line, a list by rank. Where something fails, the last line is
{"failed": what, in one line} and the exit code 1. Ends with its stdin, and everything inside with it.
"""

import json
import subprocess
import sys
from contextlib import suppress

from . import links


class Failure(RuntimeError):
    """A stage failed or died."""


def main() -> None:
    try:
        _serve(int(sys.argv[1]))
    except (Failure, OSError) as error:
        print(json.dumps({"failed": str(error)}), flush=True)
        sys.exit(1)


def _serve(ranks):
    command = ["unshare", "--net", sys.executable, "-m", "nnpiper.engine.stage"]
    stages = [subprocess.Popen([*command, str(rank), str(ranks)], text=True, stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE) for rank in range(ranks)]
    links.configure("ip", links.bridge_text())
    _answers(stages)  # each is in its own namespace
    for rank, stage in enumerate(stages):
        links.configure("ip", links.cable_text(rank, stage.pid))
    _tell(stages, "connect\n")
    print(json.dumps(_answers(stages)), flush=True)
    for line in sys.stdin:
        _tell(stages, line)
        print(json.dumps(_answers(stages)), flush=True)


def _tell(stages, line):
    for stage in stages:
        with suppress(BrokenPipeError):  # it died: `_answers` says so
            stage.stdin.write(line)
            stage.stdin.flush()


def _answers(stages):
    """One answer from each stage. Raises Failure that names the stage that failed first: the others lose their
    connections to it. One that died cannot say when, so it counts as first."""
    answers = []
    for stage in stages:
        line = stage.stdout.readline()
        answers.append(json.loads(line) if line else {"failed": f"ended with exit code {stage.wait()}", "at_s": 0.0})
    failed = [(answer["at_s"], rank, answer["failed"]) for rank, answer in enumerate(answers)
              if answer and "failed" in answer]
    if failed:
        _, rank, why = min(failed)
        raise Failure(f"stage {rank}: {why}")
    return answers


if __name__ == "__main__":
    main()
