"""The tasks of a contributor: `nox -l` lists them. Each is one of the project's own scripts, in an environment of nox.

`nox -s unit` needs nothing but Python. Everything else is easier in the environment that `scripts/setup` makes.
"""

import sys

import nox

nox.options.default_venv_backend = "venv"
nox.options.sessions = ["unit", "lint"]
PYTHONS = ["3.12", "3.13", "3.14"]
PROGRAMS = "redis or sqs or postgres or browser or tmux or node or slurm or bwrap"
WITHOUT_PROGRAMS = f"not ({PROGRAMS} or long or measured or soak)"
UNITS = ("base", "data", "reports", "scoring", "stats", "trials")
POSIX_ONLY = ("base/test_isolated_runner.py", "data/test_hostile_parquet.py", "stats/test_speed.py")


def install(session: nox.Session, group: str = "dev") -> None:
    """Install the project with everything that a dependency group of pyproject.toml needs."""
    session.install("pip>=25.1")  # Older ones do not know groups, and new environments of Python 3.12 have one.
    session.install("--constraint", "constraints.txt", "--editable", ".[all]", "--group", group)


@nox.session(python="3.12")
def unit(session: nox.Session) -> None:
    """The tests that need nothing but Python, in less than two minutes."""
    install(session, "test")
    folders = [f"tests/{name}" for name in UNITS]
    if sys.platform == "win32":
        folders += [f"--ignore=tests/{name}" for name in POSIX_ONLY]
    session.run("pytest", "-q", "-n", "auto", "-m", WITHOUT_PROGRAMS, *(session.posargs or folders))


@nox.session(python="3.12")
def tutorial(session: nox.Session) -> None:
    """The first minutes of the tutorial, on any system."""
    session.install("--constraint", "constraints.txt", ".")
    session.chdir(session.create_tmp())
    session.run("fairtrial", "init", "demo")
    session.chdir("demo")
    session.run("fairtrial", "run")
    session.run("fairtrial", "trials", "support", "--failed")
    session.run("fairtrial", "show", "support:baseline", "--sample", "q20")
    session.run("fairtrial", "compare", "support:baseline", "support:careful", "--by", "kind")
    session.run("fairtrial", "gate", "support:careful", "--floor", "passed=0.7")
    session.run("fairtrial", "export", "support", "--format", "html", "--output", "report.html")
    session.run("fairtrial", "doctor", success_codes=[0, 1])


@nox.session(python="3.12")
def lint(session: nox.Session) -> None:
    """Format, lint and import layers."""
    session.install("--constraint", "constraints.txt", "ruff", "import-linter")
    session.run("ruff", "format", "--check", ".")
    session.run("ruff", "check", ".")
    session.run("lint-imports", env={"PYTHONPATH": "src"})


@nox.session(python="3.12")
def types(session: nox.Session) -> None:
    """The types of the project, and of code that uses it."""
    install(session)
    session.run("mypy")
    session.run("python", "scripts/types")


@nox.session(python=PYTHONS)
def tests(session: nox.Session) -> None:
    """Every test that is neither long nor measured; needs the programs that `scripts/setup` installs."""
    install(session)
    session.run("pytest", "-n", "auto", "-m", "not measured and not long and not soak", *session.posargs)


@nox.session(python="3.12")
def docs(session: nox.Session) -> None:
    """The documentation site, with warnings as errors."""
    install(session)
    session.run("python", "scripts/site", *session.posargs)


@nox.session(python="3.12")
def release(session: nox.Session) -> None:
    """What a release is made of, checked; see docs/reference/releases.md."""
    session.install("pip>=25.1")
    session.install("--group", "release", "--group", "tasks")
    session.run("python", "scripts/release", "--check")
    session.run("zizmor", "--offline", ".github/workflows", "action.yml")
