"""README and docs are true: every command that they show exists and parses, and what needs no GPU is run here, small.

A bash block that cannot run here has a comment before it: ``<!-- needs: gpu -->``, ``minutes`` or ``cluster``. Upper-case words
(CELL, SWEEP, OUT, TINY) stand for what a reader puts in.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"(?:<!-- needs: ([\w, ]+) -->\n)?```bash\n(.*?)```", re.DOTALL)
INLINE = re.compile(r"`((?:golinear(?!-)|prefect deployment run|make|python scripts/\S+)\b[^`\n]*)`")
NEEDS = {"gpu", "minutes", "cluster"}
SHELL = {"source", "cd", "export", "ssh"}  # taken as they are
SMALL = "--tokens 256 --sequence-length 64 --warmup-steps 1"
LAST = ("forget", "gc")  # run when nothing needs what they remove
SWEEP = "the-docs"


@dataclass(frozen=True)
class Command:
    """One command line of a page. ``needs``: why it cannot run here; ``inline``: it may leave out arguments."""

    page: str
    text: str
    needs: str = ""
    inline: bool = False

    @property
    def words(self) -> list[str]:
        return [word for word in shlex.split(self.text, comments=True) if word != "…"]


def commands() -> Iterator[Command]:
    for path in PAGES:
        page, text = str(path.relative_to(ROOT)), path.read_text()
        for needs, code in BLOCK.findall(text):
            assert set(needs.replace(",", " ").split()) <= NEEDS, f"{page}: needs {needs}; allowed: {NEEDS}"
            for line in code.replace("\\\n", " ").splitlines():
                for text in re.split(r"; (?=golinear)", line.strip()):
                    if text and not text.startswith("#"):
                        yield Command(page, text, needs)
        for found in INLINE.findall(BLOCK.sub("", text)):
            yield Command(page, found, inline=True)


COMMANDS = sorted(set(commands()), key=lambda command: (command.page, command.text))


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: f"{command.page}: {command.text}")
def test_it_is_a_command(command: Command) -> None:
    words = command.words
    check = {"golinear": is_golinear, "prefect": is_deployment, "make": is_target, "python": is_script}.get(words[0])
    if check is not None:
        check(words[1:], command)
    else:
        assert command.needs or words[0] in SHELL, f"{words[0]}: mark the block, or teach this test to check it"


def parse(words: list[str]) -> tuple[str, dict[str, Any]]:
    """(subcommand, its parameters), by the command line's own parser. Raises what it raises."""
    from typer.main import get_command

    from flows.cli import app

    group: Any = get_command(app)
    outer = group.make_context("golinear", [word for word in words if word not in ("-v", "--verbose")])
    name, command, rest = group.resolve_command(outer, outer._protected_args + outer.args)
    return name, command.make_context(name, rest, parent=outer).params


def is_golinear(words: list[str], command: Command) -> None:
    from sweeps.request import HELP, build

    try:
        name, given = parse(words)
    except Exception as error:
        mention = command.inline and type(error).__name__ in ("MissingParameter", "NoArgsIsHelpError")
        if mention or type(error).__name__ == "Exit":  # a sentence may leave out arguments; --help
            return
        raise AssertionError(f"{command.page}: {command.text}: {error}") from error
    if name in ("plan", "run"):
        stands_for = {"TINY": "smollm2-135m"}
        build(given["grid"], **{key: stands_for.get(given[key], given[key]) for key in HELP if key in given})


def is_deployment(words: list[str], command: Command) -> None:
    """``prefect deployment run FLOW/NAME -p …``: of prefect.yaml, with parameters that its flow takes."""
    from sweeps.request import HELP, build

    if words[:2] != ["deployment", "run"] or (command.inline and len(words) == 2):
        own = {"block", "config", "deploy", "deployment", "server", "work-pool", "worker"}
        assert next(word for word in words if not word.startswith("-")) in own, command.text  # Prefect's own
        return
    if words[:2] == ["deployment", "schedule"]:  # Prefect's own
        assert words[2] in ("ls", "resume", "pause"), command.text
        return
    flows = {}
    for made in yaml.safe_load((ROOT / "prefect.yaml").read_text())["deployments"]:
        module, _, function = made["entrypoint"].partition(".py:")
        flow = getattr(importlib.import_module(module.replace("/", ".")), function)
        flows[f"{flow.name}/{made['name']}"] = flow
    assert words[2] in flows, command.text
    flow = flows[words[2]]
    given = dict(word.split("=", 1) for flag, word in itertools.pairwise(words) if flag in ("-p", "--param"))
    assert set(given) <= set(inspect.signature(flow.fn).parameters), command.text
    if flow.name == "sweep":
        build(given.get("grid", "ablation"), **{name: value for name, value in given.items() if name in HELP})


def is_target(words: list[str], command: Command) -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {word for word in words if "=" not in word} <= set(targets), command.text


def is_script(words: list[str], command: Command) -> None:
    assert words[0] in ("-m", "-c") or (ROOT / words[0]).exists(), command.text


@pytest.fixture(scope="module")
def golinear(world: Any, services_up: Any, ray_here: Any) -> Callable[..., str]:
    """Runs ``golinear`` in this process; returns what went wrong, "" when nothing did."""
    import contextlib
    import io

    from flows.cli import main

    def call(*words: str) -> str:
        out, errors = io.StringIO(), io.StringIO()
        with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
            patch.setattr(sys, "argv", ["golinear", *words])
            try:
                main()
            except SystemExit as stop:
                if stop.code:
                    return f"golinear {shlex.join(words)}: {errors.getvalue()}{out.getvalue()[-500:]}"
        return ""

    return call


@pytest.fixture(scope="module")
def cell(golinear: Callable[..., str], world: Any) -> str:
    """A trained cell of a small sweep: what CELL stands for."""
    from sweeps import queries
    from sweeps.store import Store

    asked = f"run ablation --recipes 'gdn 56+8' --models {world.model} --tasks perplexity:256 --name {SWEEP} {SMALL}"
    assert not golinear(*shlex.split(asked))
    _, sweep = queries.load_sweep(Store(), SWEEP)
    return sweep.cells[1].train_key


def here(command: Command) -> bool:
    """Whether a command is run by this file."""
    words = command.words
    # up and down are run by test_services.py, orchestration by test_overhead.py; watch asks the hub, unless given a folder
    elsewhere = words[1:2] in (["up"], ["down"], ["watch"]) or "orchestration" in words
    if words[0] != "golinear" or command.needs or "…" in command.text or elsewhere:
        return False
    try:
        parse(words[1:])
    except Exception as error:  # noqa: BLE001 - typer has click's exceptions under its own name
        assert type(error).__name__ in ("Exit", "MissingParameter", "NoArgsIsHelpError")
        return False
    return True


@pytest.mark.timeout(300)
def test_what_needs_no_gpu_runs(golinear: Any, cell: str, world: Any, tmp_path: Path, monkeypatch: Any) -> None:
    from linear_core.mechanisms import MECHANISMS

    stands_for = {"CELL": cell, "A": cell, "B": cell, "SWEEP": SWEEP, "OUT": str(tmp_path / "out"), "TINY": world.model}
    todo = {tuple(command.words[1:]): command for command in COMMANDS if here(command)}
    assert len(todo) > 25
    export = ("export", "CELL", "-o", "OUT")
    order = sorted(todo, key=lambda words: (words[0] in LAST, "--from" in words, words != export, words))
    monkeypatch.chdir(tmp_path)  # results.json, report, figures
    guide = python_blocks("add-a-mechanism.md")[0]
    (tmp_path / "retention_of_the_guide.py").write_text(guide)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(MECHANISMS, "retention", "retention_of_the_guide:Retention")
    small = [made_small([stands_for.get(word, word) for word in words], world.model) for words in order]
    wrong = [said for words in small if (said := golinear(*words))]
    assert not wrong, "\n".join(wrong)


def made_small(words: list[str], model: str) -> list[str]:
    """The same command on a tiny model and few tokens: an option that is given again wins."""
    name = words[0]
    words = [model if word == "smollm2-135m" else word for word in words]
    if name == "run":
        return [*words, "--models", model, *shlex.split(SMALL), "--tasks", "perplexity:256", "--name", "small"]
    if name == "plan" and "--machine" not in words:
        return [*words, "--models", model]
    if name == "train":
        return [*words, *shlex.split(SMALL)]
    if name == "evaluate":
        return [*words, "--tasks", "perplexity:256"]
    if name == "bench" and "plan" not in words:
        return [*words, "--mechanisms", "gla", "--repeats", "1"]
    return words


def python_blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL)


def test_the_library_example(world: Any) -> None:
    names: dict[str, Any] = {}
    exec(python_blocks("index.md")[0].replace("smollm2-135m", world.model), names)
    assert names["text"].startswith("The sea") and names["model"].recipe.name == "gdn 56+8 conv"


def test_a_task_and_a_base_model_are_an_entry() -> None:
    from linear_core.evaluate.scores import TaskSpec
    from linear_core.evaluate.tasks import TASKS, check_task
    from linear_core.models import REGISTRY

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(TASKS, "openbookqa", None)
        patch.setitem(REGISTRY, "smollm2-360m", None)
        exec(python_blocks("add-a-task.md")[0], {})
        check_task(TaskSpec(name="openbookqa", limit=200))
        exec(python_blocks("add-a-base-model.md")[0], {})
        assert round(REGISTRY["smollm2-360m"].shape.num_parameters / 1e6, 1) == 361.8


def test_pages_link_to_what_is_there() -> None:
    for path in PAGES:
        for target in re.findall(r"\]\((?!https?:|#)([^)#\s]+)", path.read_text()):
            made_by_the_site = target.startswith(("../results/", "results/"))
            assert made_by_the_site or (path.parent / target).exists(), f"{path.name} links to {target}"


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    """Links between pages, cross-references of docstrings, and what the hook fills in."""
    pytest.importorskip("mkdocs", reason="no mkdocs here (pip install golinear[docs])")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    commands = (tmp_path / "site" / "reference" / "commands.html").read_text()
    assert "golinear export" in commands and "<!-- commands -->" not in commands
