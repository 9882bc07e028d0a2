"""README and docs: links resolve, commands exist, examples run, numbers and drawings are the code's."""

import ast
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from tests import test_imports

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FIGURES = ROOT / "docs" / "figures"
OPTIONS = {"--plot", "--json", "--sweep", "--world-size", "--help"}  # of the planner, beside keys of the run
INSTALLED_WHEN_NEEDED = {"build"}

by_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def load(name):
    spec = importlib.util.spec_from_file_location(name, FIGURES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def blocks(page, language):
    return re.findall(rf"^ *```{language}\n(.*?)^ *```", page.read_text(), re.DOTALL | re.MULTILINE)


def anchors(page):
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def commands(page):
    """Every `python -m` and torchrun line of a page, as words."""
    text = page.read_text()
    lines = [line for block in blocks(page, "bash") for line in block.replace("\\\n", " ").splitlines()]
    lines += re.findall(r"`([^`\n]*python [^`\n]*)`", text)
    parts = [part for line in lines for part in line.split("#")[0].split("&&")]
    return [shlex.split(part) for part in parts if "python" in part or "torchrun" in part]


def test_readme_is_at_most_250_lines_and_has_the_two_commands_of_ci():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 250
    install, check = [line for line in lines if line.startswith("pip install")]
    assert install.startswith("pip install -e . && torchrun --nproc-per-node 2 -m titan_gdn.train")
    assert check.startswith("pip install -e '.[test]' && ruff check . && ruff format --check . && ")
    assert check.endswith("python -m pytest")


@by_page
def test_links_resolve(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page.name} links to {target}"
        if anchor:
            assert anchor in anchors(file), f"{page.name} links to {target}, a heading that is not there"


def test_the_index_lists_every_page():
    index = (ROOT / "docs" / "README.md").read_text()
    for page in sorted((ROOT / "docs").glob("*.md")):
        assert page.name == "README.md" or f"]({page.name})" in index


@by_page
def test_modules_files_and_keys_of_commands_exist(page):
    from titan_gdn.config.load import load_config

    for words in commands(page):
        for module in (after for word, after in zip(words, words[1:], strict=False) if word == "-m"):
            assert module in INSTALLED_WHEN_NEEDED or importlib.util.find_spec(module), (
                f"{page.name}: {module}"
            )
        for word in words:
            if word.endswith((".py", ".toml")) and word != "FILE.toml" and "::" not in word:
                assert (ROOT / word).exists(), f"{page.name}: {word}"
        if "--job.config_file" not in words or "FILE.toml" in words:
            continue
        at = words.index("--job.config_file")
        run, skip = [], False
        for word, after in zip(words[at:], [*words[at + 1 :], ""], strict=True):
            if skip or word in OPTIONS:  # an option of the planner and its value
                skip = not skip and not after.startswith("--")
                continue
            run.append(word)
        ranks = int(words[words.index("--world-size") + 1]) if "--world-size" in words else None
        ranks = ranks or next((int(w.removeprefix("NGPU=")) for w in words if w.startswith("NGPU=")), None)
        nodes = int(words[words.index("--nnodes") + 1]) if "--nnodes" in words else 1
        ranks = ranks or nodes * int(words[words.index("--nproc-per-node") + 1])
        environment = dict(os.environ)
        os.environ["NGPU"] = str(ranks)
        try:
            load_config(run, ranks, here=False)
        finally:
            os.environ.clear()
            os.environ.update(environment)


def strings():
    """Every string of the package; values that an f-string fills in are "0"."""
    for file in (ROOT / "titan_gdn").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.JoinedStr):
                yield "".join(part.value if isinstance(part, ast.Constant) else "0" for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def test_troubleshooting_quotes_messages_that_exist():
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    messages = re.findall(r"^\| `(.*?)` \|", page, re.MULTILINE)
    assert len(messages) > 10
    known = list(strings())
    for message in messages:
        for part in re.split(r"\.\.\.|\d+", message):  # a message may be put together from several strings
            assert any(part.strip() in text for text in known), f"no such message: {message}"


def test_the_diagrams_are_what_their_script_draws(tmp_path):
    draw = load("draw")
    draw.HERE = tmp_path
    draw.main()
    for drawn in tmp_path.glob("*.svg"):
        assert drawn.read_text() == (FIGURES / drawn.name).read_text(), "run python docs/figures/draw.py"


def test_the_layout_shows_the_floors_that_imports_are_held_to():
    from titan_gdn.models import MODELS

    families = {f"models/{name}" for name in MODELS}
    drawn = [{x.removesuffix("/").removesuffix(".py") for x in rooms} for _, rooms, _ in load("draw").FLOORS]
    floors = [set(floor) for floor in reversed(test_imports.FLOORS)]
    assert drawn == [families if "models/*" in floor else floor for floor in floors]


def test_the_numbers_of_the_planner_are_those_of_the_table_and_the_chart():
    draw = load("draw_planner")
    table = (ROOT / "docs" / "context_parallelism.md").read_text()
    for model in draw.MODELS:
        swept = {tp: draw.points(model, tp) for tp in draw.TP}
        for row in draw.table(model, swept):
            assert row in table, "run python docs/figures/draw_planner.py and copy its rows"
        if model == "Qwen3-Next":
            chart = json.loads(re.search(r"<!-- (.*) -->\n\Z", (FIGURES / "planner.svg").read_text())[1])
            assert chart == {str(tp): draw.rounded(points) for tp, points in swept.items()}


def changed(code, diff):
    """Code after a diff: the lines with "-" are replaced by those with "+", hunk by hunk."""
    for hunk in diff.split("...\n"):
        before, after = (
            "".join(line[1:] for line in hunk.splitlines(True) if line[0] == sign) for sign in "-+"
        )
        assert code.count(before) == 1, f"the code has no such lines, or twice:\n{before}"
        code = code.replace(before, after)
    return code


def layers():
    """The source of each layer of docs/new_layer.md, by its rule."""
    page = ROOT / "docs" / "new_layer.md"
    code, (diff,) = blocks(page, "python")[0], blocks(page, "diff")
    return {"per head": code, "per channel": changed(code, diff)}


def model_files():
    """The source of each file of the family of docs/new_model.md, by its path."""
    code = [x for x in blocks(ROOT / "docs" / "new_model.md", "python") if x.startswith("# titan_gdn/")]
    return {x.splitlines()[0].removeprefix("# "): x for x in code}


def sources():
    """The complete sources of the documentation, by the path at which a reader would save each."""
    yield from (("titan_gdn/layers/two_gate_delta_net.py", code) for code in layers().values())
    yield "tests/test_two_gate_delta_net.py", blocks(ROOT / "docs" / "new_layer.md", "python")[1]
    yield (
        "titan_gdn/parallel/exchange/gather_projections.py",
        blocks(ROOT / "docs" / "new_exchange.md", "python")[0],
    )
    yield from model_files().items()


# Ruff looks for files to tell which modules are our own, and those of the documentation are not there.
FIRST_PARTY = 'lint.isort.known-first-party = ["titan_gdn", "tests"]'


def test_the_code_of_the_documentation_passes_ruff():
    found = list(sources())
    assert len(found) == 8
    for path, code in found:
        for command in (["check", "--config", FIRST_PARTY], ["format", "--diff"]):
            ruff = subprocess.run(
                [sys.executable, "-m", "ruff", *command, "--stdin-filename", path, "-"],
                cwd=ROOT,
                input=code,
                capture_output=True,
                text=True,
            )
            assert ruff.returncode == 0, ruff.stdout + ruff.stderr


@pytest.mark.parametrize("decay", ["per head", "per channel"])
def test_the_layer_of_the_documentation_runs_and_learns(decay, monkeypatch):
    from titan_gdn.layers.linear_attention import Widths
    from titan_gdn.parallel.sequence import SequenceLayout

    module = types.ModuleType("two_gate_delta_net")
    monkeypatch.setitem(sys.modules, module.__name__, module)  # dataclasses look their module up
    exec(compile(layers()[decay], module.__name__, "exec"), module.__dict__)
    widths = Widths(dim=64, key_heads=4, value_heads=8, key_dim=16, value_dim=16)
    layer = module.TwoGateDeltaNet.configure(widths).build()
    assert layer.rule.per_channel == (decay == "per channel")
    layer.init_states()
    sequence = SequenceLayout.from_positions(torch.arange(32)[None])
    out = layer(torch.randn(1, 32, 64), *layer.decay(), sequence=sequence)
    out.square().mean().backward()
    assert out.shape == (1, 32, 64)
    assert all(parameter.grad.norm() > 0 for parameter in layer.parameters())


def test_the_exchange_of_the_documentation_is_planned(monkeypatch):
    from titan_gdn.config.load import load_config
    from titan_gdn.parallel.exchange import registry
    from titan_gdn.plan.plan import plan_exchanges

    namespace = {"__name__": "gather_projections"}
    code, *_ = blocks(ROOT / "docs" / "new_exchange.md", "python")
    exec(compile(code, "gather_projections", "exec"), namespace)
    monkeypatch.setitem(registry.EXCHANGES, "gather_projections", namespace["GatherProjections"])
    argv = ["--job.config_file", str(ROOT / "train_configs" / "qwen3_next_1M.toml")]
    config = load_config(argv + ["--linear_attention.exchange", "gather_projections"], 64, here=False)
    (kind,) = plan_exchanges(config, 64)
    sent = {name: traffic.forward.cp_bytes for name, traffic in kind.traffic.items()}
    assert kind.taken == "gather_projections"
    assert sent["gather_projections"] > sent["all_to_all"]


def test_the_model_of_the_documentation_trains_from_a_file(tmp_path, monkeypatch):
    from titan_gdn import models
    from titan_gdn.config.load import load_config

    for name, code in model_files().items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(code)
    # A second folder of the package, so that the files are imported by their own names.
    monkeypatch.setattr(models, "__path__", [*models.__path__, str(tmp_path / "titan_gdn" / "models")])
    monkeypatch.setitem(models.MODELS, "my_model", "titan_gdn.models.my_model")
    file = tmp_path / "run.toml"
    file.write_text(
        '[model]\nname = "my_model"\nflavor = "debug"\n[parallelism]\ncontext_parallel_degree = 2\n'
    )
    spec = load_config(["--job.config_file", str(file)], 2).model_spec
    model = spec.model.build()
    model.init_states()
    assert model(torch.zeros(1, 16, dtype=torch.long)).shape == (1, 16, 264)
    adapter = spec.state_dict_adapter(spec.model, None)
    state = model.state_dict()
    back = adapter.from_hf(adapter.to_hf(state))
    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], state[name]) for name in state)


def test_the_lines_without_the_trainer_are_those_of_their_test():
    code, *_ = blocks(ROOT / "docs" / "without_the_trainer.md", "python")
    tested = (ROOT / "tests" / "outside_trainer.py").read_text()
    for name in re.findall(r"\b(\w+)\(", code):
        assert name in tested or name in {"sum", "backward"}, f"{name} is not in tests/outside_trainer.py"
