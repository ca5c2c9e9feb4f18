import importlib
import inspect
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import jaxir
from jaxir import __main__ as front
from jaxir import expand
from jaxir.core import installation
from tests.documentation import EXAMPLES

ROOT = Path(__file__).resolve().parent.parent.parent
NAMES = [name for group in front.COMMANDS.values() for name in group]


def run(*arguments: str, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess:
    """Runs Python without the tests' variables that change a command's options or whether it restarts."""
    unset = ("GLIBC_TUNABLES", "PYTHONDONTWRITEBYTECODE")
    env = {k: v for k, v in os.environ.items() if k not in unset} | environment
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=60)


def test_list_has_the_first_line_of_every_commands_help():
    assert {name.split(":")[0].split(".")[1] for name in EXAMPLES} == set(NAMES)
    for name in NAMES:
        others = {"sidecar": ("sidecar.install", "install"), "expand": ("expand", "main")}
        module, function = others.get(name, (name, name))
        doc = inspect.getdoc(getattr(importlib.import_module(f"jaxir.{module}"), function))
        assert front.summary(name) == doc.splitlines()[0]
        assert re.fullmatch(r"[A-Z][a-z-]+s[ ,].*\.", front.summary(name)), name


@pytest.mark.parametrize("arguments", [(), ("help", "help"), ("--help",)])
def test_list_of_commands_imports_neither_jax_nor_gin(arguments, tmp_path):
    code = (
        "import atexit, runpy, sys\n"
        "atexit.register(lambda: print('jax' in sys.modules, 'gin' in sys.modules))\n"
        "runpy.run_module('jaxir', run_name='__main__', alter_sys=True)"
    )
    done = run("-c", code, *arguments, cwd=tmp_path, COLUMNS="200")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == "False False"
    for name in NAMES:
        assert re.search(rf"^  {name} +\S.*\.$", done.stdout, re.MULTILINE), name


@pytest.mark.parametrize(
    "command", ["grid:grid", "rounds:rounds", "plan:plan", "expand:generate", "serve:serve"]
)
def test_help_of_a_command_imports_no_jax(command):
    code = f"import sys\nfrom jaxir import cli\ntry:\n    cli.main('jaxir.{command}', ['--help'])\nfinally:\n"
    done = run("-c", f"{code}    print(*({{'jax', 'fastapi', 'uvicorn'}} & set(sys.modules)), 'imported')")
    assert done.stdout.endswith("\nimported\n") and "usage: " in done.stdout


def test_all_places_of_the_version_agree():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "jaxir.version.__version__"}
    assert run("-m", "jaxir", "--version").stdout == f"jaxir {jaxir.__version__}\n"
    citation = (ROOT / "CITATION.cff").read_text()
    assert re.search(r"^version: (.*)$", citation, re.MULTILINE)[1] == jaxir.__version__
    assert jaxir.__version__ in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("trian",), "there is no command 'trian'; did you mean 'train'?"),
        (("help", "serch"), "there is no command 'serch'; did you mean 'search'?"),
        (("data",), "there is no command 'data' (`python -m jaxir help` lists them)"),
    ],
)
def test_mistyped_command_is_refused_with_a_suggestion(arguments, message):
    done = run("-m", "jaxir", *arguments)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"error: {message}\n")


def test_expand_lists_its_actions(capsys):
    assert expand.main(["--help"]) == 0
    listed = capsys.readouterr().out
    for action in expand.EXAMPLES:
        assert re.search(rf"^  {action} +[A-Z].*\.$", listed, re.MULTILINE), action
        assert expand.main([action, "--qqqqq"]) == 2
        assert capsys.readouterr().err.endswith(f"(see python -m jaxir.expand {action} --help)\n")
    assert expand.main(["retreive"]) == expand.main([]) == 2
    assert "there is no action 'retreive'; did you mean 'retrieve'?" in capsys.readouterr().err


def test_jaxir_train_behaves_like_python_m_jaxir_train(tmp_path):
    """Both keep interpreter options, the working directory on the path, huge pages and the exit status."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, pathlib, sys\n"
        "with pathlib.Path(__file__).with_name('seen').open('a') as file:\n"
        "    print(sys.orig_argv[1:], os.environ.get('GLIBC_TUNABLES'), os.getpid(), file=file)\n"
    )
    both = {}
    for start in (["-m", "jaxir", "train"], ["-m", "jaxir.train"]):
        (tmp_path / "seen").unlink(missing_ok=True)
        ours = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "PYTHONWARNINGS": ""}
        done = run("-X", "utf8", *start, "--steps=3", cwd=tmp_path, **ours)
        seen = [line.rsplit(" ", 1) for line in (tmp_path / "seen").read_text().splitlines()]
        assert len({number for _, number in seen}) == 1  # all starts are in one process
        both[start[1]] = (done.returncode, done.stdout, done.stderr, seen[-1][0])
    assert both["jaxir"] == both["jaxir.train"]
    assert both["jaxir"][0] == 1 and both["jaxir"][2].startswith("error: --output_dir, --batch_size must be")
    assert "'utf8'" in both["jaxir"][3] or "'-Xutf8'" in both["jaxir"][3]


def test_extra_is_installed_from_the_place_that_jaxir_came_from(tmp_path, monkeypatch):
    pip = f"{sys.executable} -m pip install"
    assert installation.how_to_install("serve") == f"{pip} -e '{ROOT}[serve]'"
    monkeypatch.setattr(installation, "PACKAGE", tmp_path / "site-packages" / "jaxir")
    notes = tmp_path / f"jaxir-{jaxir.__version__}.dist-info"
    notes.mkdir()
    (notes / "METADATA").write_text(f"Metadata-Version: 2.1\nName: jaxir\nVersion: {jaxir.__version__}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    wheel = f"jaxir-{jaxir.__version__}-py3-none-any.whl"
    assert installation.how_to_install("serve") == f"{pip} '{wheel}[serve]'"
    for url, what in (
        (f'"file:///a%20b/{wheel}", "archive_info": {{}}', f"/a b/{wheel}[serve]"),
        (f'"https://a.b/{wheel}", "archive_info": {{}}', f"jaxir[serve] @ https://a.b/{wheel}"),
        ('"https://a.b/c", "vcs_info": {"vcs": "git"}', "jaxir[serve] @ git+https://a.b/c"),
    ):
        (notes / "direct_url.json").write_text(f'{{"url": {url}}}')
        assert installation.how_to_install("serve") == f"{pip} '{what}'"
