"""The file of a team, what its schedule deletes, its unit of systemd, and the role that CI writes with."""

from __future__ import annotations

import configparser
import re
import socket
import time
import tomllib
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import conninfo

from fairtrial import Dataset, EvalSuite, exact_match, open_store
from fairtrial.cli.app import invoke
from fairtrial.errors import ConfigurationError, FairtrialError
from fairtrial.store.notes import write_notes
from fairtrial.viewer.team.config import OidcSettings, TeamSettings, read_settings
from fairtrial.viewer.team.database import TeamDatabase
from fairtrial.viewer.team.serve import TeamServer
from tests.servers import PostgresServer
from tests.viewer.conftest import record

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "how-to" / "team.md").read_text(encoding="utf-8")
GIVEN = """
url = "https://evals.example.org"
{}
[identity]
kind = "oidc"
issuer = "https://login.example.org"
client_id = "fairtrial"
{}
[projects.support]
store = "support.db"
{}
"""


def file_with(folder: Path, top: str = "", identity: str = "", project: str = "") -> Path:
    made = folder / "team.toml"
    made.write_text(GIVEN.format(top, identity, project))
    return made


def test_the_file_of_the_page_says_what_the_page_says(tmp_path: Path) -> None:
    text = re.search(r"<!-- file: team.toml -->\n```toml\n(.*?)```", PAGE, re.S)
    assert text is not None
    (tmp_path / "team.toml").write_text(text[1])
    found = read_settings(tmp_path / "team.toml")
    assert isinstance(found.identity, OidcSettings)
    assert found.projects["support"].store == f"sqlite:///{tmp_path}/support.db"
    assert found.database == f"sqlite:///{tmp_path}/team.db"
    assert found.projects["support"].permissions(["all-staff", "support"]) == {"read", "review"}
    assert found.projects["support"].permissions(["ml-platform"]) == {"read", "review", "edit", "delete"}
    assert found.projects["search"].permissions(["all-staff"]) == frozenset()


@pytest.mark.parametrize(
    ("top", "identity", "project", "said"),
    [
        ('lsten = "x"', "", "", "lsten: there is no such setting"),
        ("", 'groups = "x"', "", "identity.oidc.groups: there is no such setting"),
        ("", "", 'viewers = ["x"]', "projects.support.viewers: there is no such setting"),
        ("", "idle_minutes = 0", "", "greater than 0"),
        ("", "", "keep_days = -1", "greater than 0"),
        ("", 'client_secret_env = "NOT_THERE"', "", "the environment has no NOT_THERE"),
        ("", "", 'store = "x"', "is no TOML"),
        ("", "", '[projects."../x"]\nstore = "a.db"', "a project needs a name of lower-case letters"),
    ],
)
def test_a_mistake_in_the_file_is_named(tmp_path: Path, top: str, identity: str, project: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(said)):
        read_settings(file_with(tmp_path, top, identity, project))


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('url = "https://evals.example.org"', 'url = "http://evals.example.org"', "url must be an https address"),
        ('url = "https://evals.example.org"', 'url = "https://evals.example.org/x"', "without a path"),
        ('url = "https://evals.example.org"', 'url = "https://a@evals.example.org"', "url must be an https address"),
        ('issuer = "https://login', 'issuer = "http://login', "issuer must be an https address"),
        ('issuer = "https://login.example.org"', 'issuer = "http://127.0.0.1.evil.example"', "issuer must be an https"),
        ('kind = "oidc"', 'kind = "ldap"', "identity"),
        ("[projects.support]", "[project.support]", "projects: Field required"),
    ],
)
def test_addresses_must_be_safe(tmp_path: Path, old: str, new: str, said: str) -> None:
    file = file_with(tmp_path)
    file.write_text(file.read_text().replace(old, new))
    with pytest.raises(ConfigurationError, match=re.escape(said)):
        read_settings(file)


def test_a_header_is_believed_over_a_socket_only(tmp_path: Path) -> None:
    text = 'url = "https://e.example"\n{}[identity]\nkind = "proxy-header"\n[projects.a]\nstore = "a.db"\n'
    file = tmp_path / "team.toml"
    file.write_text(text.format(""))
    with pytest.raises(ConfigurationError, match="a header alone proves nothing over TCP"):
        read_settings(file)
    file.write_text(text.format('listen = "unix:serve.sock"\n'))
    assert read_settings(file).socket_path == tmp_path / "serve.sock"


def test_serve_says_what_it_needs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["serve"]) == 2
    assert "name it with --config" in capsys.readouterr().err
    assert invoke(["serve", "--config", str(tmp_path / "none.toml")]) == 2
    assert "cannot read" in capsys.readouterr().err
    assert invoke(["serve", "audit", "--config", str(file_with(tmp_path)), "--since", "yesterday"]) == 2
    assert "--since must be a day" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('listen = "127.0.0.1:1"', 'listen = "127.0.0.1:99999"', 'listen must be "HOST:PORT" or "unix:FILE"'),
        ('store = "support.db"', 'store = "memory:"', "projects.support: a store in memory cannot be viewed"),
        ('listen = "127.0.0.1:1"', 'database = "memory:"', "database must be a file of SQLite or in PostgreSQL"),
    ],
)
def test_a_port_or_a_store_that_cannot_be_is_a_mistake_in_the_file(
    tmp_path: Path, old: str, new: str, said: str
) -> None:
    file = file_with(tmp_path, 'listen = "127.0.0.1:1"')
    file.write_text(file.read_text().replace(old, new))
    with pytest.raises(ConfigurationError, match=re.escape(said)):
        TeamServer(read_settings(file))
    assert not (tmp_path / "memory:").exists()


@pytest.mark.parametrize("listen", ["unix:none/serve.sock", "127.0.0.1:{}"])
def test_where_serve_cannot_listen_it_names_the_setting_and_no_option_of_view(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], listen: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        file = file_with(tmp_path, f'listen = "{listen.format(taken.getsockname()[1])}"')
        assert invoke(["serve", "--config", str(file)]) == 2
    said = capsys.readouterr().err
    assert "cannot listen on" in said
    assert "change listen in the file of the team" in said
    assert "--port" not in said
    assert "--socket" not in said


def team(folder: Path, project: str) -> TeamServer:
    return TeamServer(read_settings(file_with(folder, project=project)))


def close(server: TeamServer) -> None:
    for viewer in server.viewers.values():
        viewer.store.close()


def test_a_store_that_is_not_there_is_named_and_not_made(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    server = team(tmp_path, "")
    assert (server.app.away, (tmp_path / "support.db").exists()) == (["support"], False)
    assert f"project support is away, and is tried again every 10 s: there is no store at {tmp_path}" in caplog.text
    open_store(str(tmp_path / "support.db")).close()
    server._open("support")
    assert (server.app.away, list(server.viewers)) == ([], ["support"])
    close(server)


def test_the_schedule_deletes_old_runs_but_not_those_that_are_kept(tmp_path: Path) -> None:
    now = time.time()
    store = open_store(str(tmp_path / "support.db"))
    for number, days in ((1, 40), (2, 40), (3, 20)):
        at = now - days * 86_400
        store.create_run(record(f"r{number}", number=number, created_at=at))
        store.update_run(f"r{number}", status="finished", finished_at=at)
    store.update_run("r2", notes=write_notes(kept=True))
    server = team(tmp_path, "keep_days = 30")
    assert server.delete_old() == 1
    assert server.delete_old() == 0
    assert sorted(run.run_id for run in store.runs()) == ["r2", "r3"]
    close(server)
    [entry] = TeamDatabase(f"sqlite:///{tmp_path}/team.db").audit()
    assert (entry.action, entry.name, entry.project) == ("deleted", "the schedule", "support")
    assert "(r1)" in entry.object
    store.close()


def test_store_keep_excepts_a_run_from_prune(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = str(tmp_path / "support.db")
    store = open_store(url)
    for number in (1, 2):
        store.create_run(record(f"r{number}", number=number, created_at=1.0))
        store.update_run(f"r{number}", status="finished", finished_at=2.0)
    name = store.get_run("r1").name
    assert invoke(["store", "keep", name, "--store", url]) == 0
    assert f"{name}: kept when old runs are deleted" in capsys.readouterr().err
    assert invoke(["store", "prune", "--older-than", "1d", "--yes", "--store", url]) == 0
    assert [run.run_id for run in store.runs()] == ["r1"]
    assert invoke(["store", "keep", name, "--undo", "--store", url]) == 0
    assert invoke(["store", "prune", "--older-than", "1d", "--yes", "--store", url]) == 0
    assert store.runs() == []
    store.close()


def test_the_unit_serves_the_file_that_it_describes() -> None:
    text = (ROOT / "deploy" / "fairtrial-serve.service").read_text(encoding="utf-8")
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read_string(text)
    command = unit["Service"]["ExecStart"].split()
    assert command[1:] == ["serve", "--config=/etc/fairtrial/team.toml"]
    assert "/etc/fairtrial/team.toml" in text.partition("[Unit]")[0]
    assert unit["Service"]["WorkingDirectory"] == f"/var/lib/{unit['Service']['StateDirectory']}"


def statements() -> list[str]:
    block = re.search(r"```sql\n(.*?)```", PAGE, re.S)
    assert block is not None
    return [one.strip() for one in block[1].split(";") if one.strip()]


@pytest.mark.timeout(120)
def test_ci_writes_with_a_role_of_its_own_and_reaches_no_other_project(pg_url: str, pg_server: PostgresServer) -> None:
    other_pg_url = pg_server.new_database()
    for url in (pg_url, other_pg_url):
        open_store(url).close()
    facts: dict[str, Any] = conninfo.conninfo_to_dict(pg_url)
    made = f"postgresql://support_ci:PASSWORD@{facts['host']}:{facts['port']}/"
    suite = EvalSuite("ci", Dataset.of({"a": "A", "b": "B"}), str.upper, exact_match)
    with psycopg.connect(pg_url, autocommit=True) as connection:
        for statement in statements():
            connection.execute(statement)
        try:
            report = suite.run_sync(store=open_store(f"{made}{facts['dbname']}"))
            assert report.run.status == "finished"
            other = conninfo.conninfo_to_dict(other_pg_url)["dbname"]
            with pytest.raises(FairtrialError, match="permission denied"):
                suite.run_sync(store=open_store(f"{made}{other}"))
        finally:
            connection.execute("DROP OWNED BY support_ci")
            connection.execute("DROP ROLE support_ci")
            pg_server.drop_database(other_pg_url)


def test_settings_of_the_page_are_those_of_the_file() -> None:
    """Every setting that the page's tables name exists."""
    named = set(re.findall(r"`([a-z]+_[a-z]+)`", PAGE)) - {"auth_request"}
    known = set(TeamSettings.model_fields) | {
        name
        for section in (one.annotation for one in TeamSettings.model_fields.values())
        for name in getattr(section, "model_fields", ())
    }
    text = (ROOT / "src" / "fairtrial" / "viewer" / "team" / "config.py").read_text(encoding="utf-8")
    assert {name for name in named if name not in known and f"    {name}:" not in text} == set()
    assert tomllib.loads(GIVEN.format("", "", ""))["identity"]["kind"] == "oidc"
