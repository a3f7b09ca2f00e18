"""Commands run in this process."""

from nnpiper import cli


def run(capsys, *arguments):
    """Exit code, stdout, stderr."""
    code = cli.main(list(map(str, arguments)))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def refused(capsys, *arguments):
    """The one line that a refusal prints."""
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, ""), err
    assert err.count("\n") == 1 and "Traceback" not in err and err.startswith("nnpiper: ")
    return err
