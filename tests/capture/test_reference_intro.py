# ruff: noqa: RET504 - the samples as the page has them
"""The code samples of torch's "Introduction to torch.compile" and of the reference page of ``torch.compile``, with this
project's names in place of torch's: one test a sample, which checks what the page says of it.

Samples that the page runs on a GPU run here on the CPU, and on the GPU under the marker ``gpu``. Its densenet121 is a
small dense convolutional network written here. Speedups are not checked: machines that run tests are shared.
"""

from __future__ import annotations

import re
import time
import traceback
import warnings

import pytest
import scipy
import torch

import gradsplit

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(autouse=True)
def nothing_compiled():
    gradsplit.reset()


class MyModule(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = torch.nn.Linear(100, 10)

    def forward(self, x):
        return torch.nn.functional.relu(self.lin(x))


class DenseLayer(torch.nn.Module):
    def __init__(self, channels, growth):
        super().__init__()
        self.norm = torch.nn.BatchNorm2d(channels)
        self.conv = torch.nn.Conv2d(channels, growth, 3, padding=1, bias=False)

    def forward(self, features):
        return self.conv(torch.relu(self.norm(torch.cat(features, 1))))


class DenseNet(torch.nn.Module):
    """Every layer sees the results of all layers before it."""

    def __init__(self, growth=4, layers=3, classes=10):
        super().__init__()
        self.stem = torch.nn.Conv2d(3, growth, 3, stride=2, padding=1, bias=False)
        self.layers = torch.nn.ModuleList([DenseLayer(growth * (k + 1), growth) for k in range(layers)])
        self.classifier = torch.nn.Linear(growth * (layers + 1), classes)

    def forward(self, x):
        features = [self.stem(x)]
        for layer in self.layers:
            features.append(layer(features))
        pooled = torch.nn.functional.adaptive_avg_pool2d(torch.relu(torch.cat(features, 1)), (1, 1))
        return self.classifier(torch.flatten(pooled, 1))


def generate_data(b, device):
    return (
        torch.randn(b, 3, 16, 16).to(torch.float32).to(device),
        torch.randint(10, (b,)).to(device),
    )


def init_model(device):
    torch.manual_seed(1)
    return DenseNet().to(torch.float32).to(device)


def timed(fn):
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    result = fn()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return result, time.perf_counter() - start


def test_a_function_is_compiled():
    def foo(x, y):
        a = torch.sin(x)
        b = torch.cos(y)
        return a + b

    opt_foo1 = gradsplit.compile(foo)
    x, y = torch.randn(10, 10), torch.randn(10, 10)
    assert torch.allclose(opt_foo1(x, y), foo(x, y), atol=1e-6)


def test_a_function_is_decorated():
    t1, t2 = torch.randn(10, 10), torch.randn(10, 10)

    @gradsplit.compile
    def opt_foo2(x, y):
        a = torch.sin(x)
        b = torch.cos(y)
        return a + b

    assert torch.allclose(opt_foo2(t1, t2), t1.sin() + t2.cos(), atol=1e-6)


def test_a_module_is_compiled():
    t = torch.randn(10, 100)
    mod = MyModule()
    opt_mod = gradsplit.compile(mod)
    result = opt_mod(t)
    assert torch.allclose(result, mod(t), atol=1e-6)
    assert result.grad_fn is not None


def test_nested_functions_are_compiled_too():
    t1, t2 = torch.randn(10, 10), torch.randn(10, 10)

    def nested_function(x):
        return torch.sin(x)

    @gradsplit.compile(fullgraph=True)
    def outer_function(x, y):
        a = nested_function(x)
        b = torch.cos(y)
        return a + b

    assert torch.allclose(outer_function(t1, t2), t1.sin() + t2.cos(), atol=1e-6)


def test_sub_modules_are_compiled_too():
    class OuterModule(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner_module = MyModule()
            self.outer_lin = torch.nn.Linear(10, 2)

        def forward(self, x):
            x = self.inner_module(x)
            return torch.nn.functional.relu(self.outer_lin(x))

    t = torch.randn(10, 100)
    outer_mod = OuterModule()
    opt_outer_mod = gradsplit.compile(outer_mod, fullgraph=True)
    assert torch.allclose(opt_outer_mod(t), outer_mod(t), atol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
def test_a_model_is_evaluated(device):
    model = init_model(device)
    gradsplit.reset()
    model_opt = gradsplit.compile(model)
    for _ in range(3):
        inp = generate_data(4, device)[0]
        with torch.no_grad():
            expected, eager_time = timed(lambda data=inp: model(data))
            found, compile_time = timed(lambda data=inp: model_opt(data))
        assert torch.allclose(expected, found, atol=1e-4)
        assert eager_time > 0 and compile_time > 0


def train(mod, data, opt):
    opt.zero_grad(True)
    pred = mod(data[0])
    loss = torch.nn.CrossEntropyLoss()(pred, data[1])
    loss.backward()
    opt.step()


@pytest.mark.parametrize("device", DEVICES)
def test_a_model_is_trained(device):
    model, model_opt = init_model(device), init_model(device)
    opt = torch.optim.Adam(model.parameters())
    opt_opt = torch.optim.Adam(model_opt.parameters())
    train_opt = gradsplit.compile(train)
    times = []
    for _ in range(4):
        inp = generate_data(4, device)
        train(model, inp, opt)
        _, compile_time = timed(lambda data=inp: train_opt(model_opt, data, opt_opt))
        times.append(compile_time)
    assert times[-1] < times[0]  # the first one compiles
    for (name, one), other in zip(model.named_parameters(), model_opt.parameters(), strict=True):
        assert torch.allclose(one, other, atol=2e-3), name
    for one, other in zip(model.buffers(), model_opt.buffers(), strict=True):
        assert torch.allclose(one, other, atol=1e-3)


def f1(x, y):
    if x.sum() < 0:
        return -y
    return y


def test_fns(fn1, fn2, args):
    out1 = fn1(*args)
    out2 = fn2(*args)
    return torch.allclose(out1, out2)


test_fns.__test__ = False  # the page's helper has a test's name


def positive_and_any():
    return torch.randn(5, 5).abs(), torch.randn(5, 5)


@pytest.mark.filterwarnings(
    "ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"
)
def test_torchscript_tracing_takes_one_path_only():
    inp1, inp2 = positive_and_any()
    traced_f1 = torch.jit.trace(f1, (inp1, inp2))
    assert test_fns(f1, traced_f1, (inp1, inp2))
    assert not test_fns(f1, traced_f1, (-inp1, inp2))


def test_fx_tracing_fails_on_the_branch():
    with pytest.raises(torch.fx.proxy.TraceError):
        torch.fx.symbolic_trace(f1)


def test_fx_tracing_with_a_value_takes_one_path_only():
    inp1, inp2 = positive_and_any()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fx_f1 = torch.fx.symbolic_trace(f1, concrete_args={"x": inp1})
    assert test_fns(f1, fx_f1, (inp1, inp2))
    assert not test_fns(f1, fx_f1, (-inp1, inp2))


def test_compile_takes_both_paths():
    inp1, inp2 = positive_and_any()
    gradsplit.reset()
    compile_f1 = gradsplit.compile(f1)
    assert test_fns(f1, compile_f1, (inp1, inp2))
    assert test_fns(f1, compile_f1, (-inp1, inp2))


def f2(x, y):
    return x + y


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_torchscript_needs_annotations():
    script_f2 = torch.jit.script(f2)
    with pytest.raises(RuntimeError, match="Expected a value of type 'Tensor"):
        script_f2(torch.randn(5, 5), 3)


def test_compile_needs_no_annotations():
    compile_f2 = gradsplit.compile(f2)
    assert test_fns(f2, compile_f2, (torch.randn(5, 5), 3))


def f3(x):
    x = x * 2
    x = scipy.fft.dct(x.numpy())
    x = torch.from_numpy(x)
    x = x * 2
    return x


@pytest.mark.filterwarnings(
    "ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"
)
def test_torchscript_tracing_keeps_what_other_functions_returned():
    inp1, inp2 = torch.randn(5, 5), torch.randn(5, 5)
    traced_f3 = torch.jit.trace(f3, (inp1,))
    assert not test_fns(f3, traced_f3, (inp2,))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_scripting_and_fx_refuse_other_functions():
    with pytest.raises(Exception):  # noqa: B017 - the page prints whatever it is
        torch.jit.script(f3)
    with pytest.raises(Exception):  # noqa: B017
        torch.fx.symbolic_trace(f3)


def test_compile_calls_other_functions():
    inp2 = torch.randn(5, 5)
    compile_f3 = gradsplit.compile(f3)
    assert test_fns(f3, compile_f3, (inp2,))
    assert test_fns(f3, compile_f3, (inp2 + 1,))


def custom_backend(gm, example_inputs):
    print("custom backend called with FX graph:")
    gm.graph.print_tabular()
    return gm.forward


@pytest.mark.parametrize("device", DEVICES)
def test_a_custom_backend_sees_the_graph_of_a_model(device, capsys):
    gradsplit.reset()
    model = init_model(device)
    opt_model = gradsplit.compile(model, backend=custom_backend)
    inp = generate_data(4, device)[0]
    model.eval()
    assert torch.allclose(opt_model(inp), model(inp), atol=1e-5)
    printed = capsys.readouterr().out
    assert printed.count("custom backend called with FX graph:") == 1
    assert len(re.findall("^call_function", printed, re.MULTILINE)) > 10


def bar(a, b):
    x = a / (torch.abs(a) + 1)
    if b.sum() < 0:
        b = b * -1
    return x * b


def test_the_graphs_of_bar(capsys):
    opt_bar = gradsplit.compile(bar, backend=custom_backend)
    inp1 = torch.randn(10)
    inp2 = torch.randn(10)
    assert torch.allclose(opt_bar(inp1, inp2), bar(inp1, inp2))
    assert torch.allclose(opt_bar(inp1, -inp2), bar(inp1, -inp2))
    first, *others = capsys.readouterr().out.split("custom backend called with FX graph:\n")[1:]
    assert len(others) == 2
    rows = [re.split(r"  +", line.strip()) for line in first.splitlines()[2:-1]]
    assert [(op, name) for op, name, *_ in rows] == [
        ("placeholder", "l_a_"),
        ("placeholder", "l_b_"),
        ("call_function", "abs_1"),
        ("call_function", "add"),
        ("call_function", "x"),
        ("call_method", "sum_1"),
        ("call_function", "lt"),
    ]
    assert [row[2] for row in rows[:2]] == ["L_a_", "L_b_"]
    assert [row[3] for row in rows[2:]] == ["(l_a_,)", "(abs_1, 1)", "(l_a_, add)", "(l_b_,)", "(sum_1, 0)"]
    multiplications = sorted(table.count("<built-in function mul>") for table in others)
    assert multiplications == [1, 2]  # `return x * b`, and `b = b * -1; return x * b`


def test_explain_shows_the_break_of_bar():
    gradsplit.reset()
    explain_output = gradsplit.explain(bar)(torch.randn(10), -torch.ones(10))
    assert explain_output.graph_count == 2
    assert explain_output.graph_break_count == 1
    assert explain_output.op_count == 6
    text = str(explain_output)
    assert text.startswith("Graph Count: 2\nGraph Break Count: 1\nOp Count: 6\nBreak Reasons:\n")
    assert re.search(r"User Stack:\n      <FrameSummary file .*, line \d+ in bar>", text)
    assert "  Ops 1:\n    <built-in method abs of type object" in text
    assert (
        "    <built-in function truediv>\n    <built-in function lt>\n  Ops 2:\n    <built-in function mul>"
        in text
    )


def test_fullgraph_raises_at_the_break_of_bar():
    opt_bar = gradsplit.compile(bar, fullgraph=True)
    try:
        opt_bar(torch.randn(10), torch.randn(10))
    except gradsplit.CompileError:
        shown = traceback.format_exc()
    assert "if b.sum() < 0:" in shown and "test_reference_intro.py" in shown and "Hint: " in shown


@pytest.mark.parametrize("device", DEVICES)
def test_the_model_has_no_break(device):
    model = init_model(device)
    opt_model = gradsplit.compile(model, fullgraph=True)
    assert opt_model(generate_data(4, device)[0]).shape == (4, 10)


def test_options_in_a_decorator():
    @gradsplit.compile(options={"verify": True}, fullgraph=True)
    def foo(x):
        return torch.sin(x) + torch.cos(x)

    x = torch.randn(4)
    assert torch.allclose(foo(x), x.sin() + x.cos(), atol=1e-6)


def test_disable_as_an_argument_changes_nothing():
    assert gradsplit.compile(f2, disable=True) is f2


def test_the_cache_limit_is_64_and_then_plain_python(caplog):
    counter = gradsplit.testing.CompileCounter()
    # An integer that differs would become symbolic, and one entry would serve all.
    opt_f2 = gradsplit.compile(f2, backend=counter, dynamic=False)
    assert gradsplit.config.cache_size_limit == 64
    for n in range(66):
        assert torch.equal(opt_f2(torch.ones(1), n), torch.ones(1) + n)
    assert counter.frame_count == 64
    warned = [record for record in caplog.records if "the limit" in record.message]
    assert len(warned) == 1 and "y == 63" in warned[0].message
