"""What a user reads when something is wrong: eager's error alone, and reasons that name function and line."""

import functools
import logging
from pathlib import Path

import pytest
import torch

import gradsplit
from tests.forked_ranks import run_forked


def misfit(x, y):
    z = x + 1
    return z @ y


@pytest.mark.parametrize("dynamic", [None, True])
def test_an_error_of_the_program_is_eager_s_alone(dynamic, capfd, caplog):
    x = torch.ones(3, 4)
    with pytest.raises(RuntimeError) as plain:
        misfit(x, x)
    with pytest.raises(RuntimeError) as compiled, caplog.at_level(logging.WARNING):
        gradsplit.compile(misfit, dynamic=dynamic)(x, x)
    assert str(compiled.value) == str(plain.value)
    assert compiled.traceback[-1].lineno == plain.traceback[-1].lineno
    assert not caplog.records and not capfd.readouterr().err


SHOWS_INFO = """
import logging, torch, gradsplit
{configured}
gradsplit.config.log_level = logging.INFO
run = gradsplit.compile(lambda x: x + 1, backend="eager")
run(torch.ones(2)), run(torch.ones(3))
"""


@pytest.mark.parametrize("configured", ["", "logging.basicConfig(level=logging.DEBUG)"])
def test_the_level_info_is_shown(configured):
    program = SHOWS_INFO.format(configured=configured)
    done = run_forked(["-c", program], Path.cwd())
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("recompiled because") == 1
    assert done.stderr.count("captured\n") == 2


class Prints(torch.nn.Module):
    def forward(self, x):
        return x


def with_replaced_forward():
    module = Prints()
    module.forward = functools.partial(print, "", end="")
    return module


@pytest.mark.parametrize(
    ("made", "name"),
    [
        (lambda: functools.partial(print, "", end=""), "print"),
        (lambda: print, "print"),
        (with_replaced_forward, "Prints.forward"),
    ],
)
def test_a_reason_names_function_and_line(made, name, caplog, capsys):
    compiled = gradsplit.compile(made(), backend="eager")
    with caplog.at_level(logging.WARNING):
        compiled(torch.ones(2))  # the line
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith(f"{name} is not captured in full")
    assert "call_object" not in message and "call_targets" not in message
    assert "# the line" in message
