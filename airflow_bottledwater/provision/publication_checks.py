"""Preflight's checks of the publications: those that exist, and the right to create those that do not."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from airflow_bottledwater.model.relation import SourceTable
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.postgres import catalog, publication
from airflow_bottledwater.postgres.connect import Connection
from airflow_bottledwater.provision.findings import Findings
from airflow_bottledwater.state import row_filters


def check_publications(
    connection: Connection,
    pipeline: Settings,
    found: Findings,
    there: Sequence[publication.Published] | None = None,
) -> list[str]:
    """Check the publications that exist, and the right to create those that do not; returns the problems.

    :param found: receives warnings.
    :param there: those that exist; None to read them.
    """
    if there is None:
        there = publication.existing(connection, pipeline.publication_name)
    problems: list[str] = []
    covered: set[int] = set()
    missing, existing = [], []
    for name in publication.names(pipeline.publication_name):
        present = next((each for each in there if each.name == name), None)
        if present is None:
            missing.append(name)
        else:
            existing.append(present)
            covered |= set(present.tables)
            if other := publication.mode_problems(connection, present, found.tables, via_root=found.via_root):
                return other  # every other check would be about the wrong tables
            problems += _existing(connection, pipeline, present, found)
    lacking = {
        name: [table for table in tables if name in missing or table.oid not in covered]
        for name, tables in zip(
            publication.names(pipeline.publication_name), publication.split(found.tables), strict=True
        )
    }
    found.warnings += _left_out(connection, pipeline, existing, found)
    if pipeline.create_publication:
        return problems + _rights_to_create(connection, pipeline, found, missing, lacking)
    if missing:
        run = _by_owner(connection, _tables(lacking)) + _statements(connection, pipeline, found, missing, lacking)
        problems.append(
            f"Publication {missing[0]!r} does not exist and create_publication is off. Both publications are needed, "
            f"the second may be empty. {run[0].upper()}{run[1:]}"
        )
        return problems
    excepting = {each.name for each in existing if each.all_tables}
    return problems + [
        f"Table {table.qualified} is not in publication {name!r}. "
        + (
            "Take it out of those that the publication excepts (EXCEPT)"
            if name in excepting
            else f"As the owner of both, run: {publication.addition(name, [table]).as_string(connection)}"
        )
        + "; or leave it out of the pipeline's tables."
        for name, tables in lacking.items()
        for table in tables
    ]


def _existing(connection: Connection, pipeline: Settings, present: publication.Published, found: Findings) -> list[str]:
    """The problems of a publication that exists: whether this pipeline created it, and whether it makes the
    application's writes fail."""
    intent = found.state.intent
    mine = {*(t.oid for t in found.tables), *found.left, *found.state.tables, *found.state.stopped}
    problems = publication.problems(present, found.tables)
    found.warnings += publication.listed(present, found.tables)
    if not pipeline.create_publication:
        problems += row_filters.foreign(connection, present, found.tables)
    problems += publication.uncovered(connection, present, found.tables).values()
    made = intent is not None and intent.create_publication and intent.publication == pipeline.publication_name
    if pipeline.create_publication and not made:
        problems.append(
            f"Publication {present.name!r} exists, but was not created by this pipeline. Choose another name (setting "
            "publication), or set create_publication to false to use it."
        )
    if found.adding:
        # what it does to other tables, it does already, and that is no reason to leave these out
        return problems
    besides = catalog.load(connection, [oid for oid in present.tables if oid not in mine])
    if present.all_tables:
        keyless = [t for t in catalog.load(connection, list(present.tables)) if not t.identifiable]
        if keyless and (present.updates or present.deletes):
            problems.append(
                f"Publication {present.name!r} is FOR ALL TABLES, and {', '.join(t.qualified for t in keyless[:5])} "
                "have no key: UPDATE and DELETE on them fail for the application. Publish a list of tables."
            )
        else:
            found.warnings.append(
                f"Publication {present.name!r} is FOR ALL TABLES: UPDATE and DELETE would fail on a table that is made "
                "without a key."
            )
    if present.whole and besides:
        found.warnings.append(
            f"Publication {present.name!r} also publishes "
            f"{', '.join(t.qualified for t in besides[:5])}{' …' if len(besides) > 5 else ''}, which the settings do "
            "not name: their changes are sent, and left out."
        )
    return problems + publication.others_problems(present, besides)


def _rights_to_create(
    connection: Connection,
    pipeline: Settings,
    found: Findings,
    missing: Sequence[str],
    lacking: Mapping[str, Sequence[SourceTable]],
) -> list[str]:
    """The problems with the right to create publications, or to add tables to them.

    :param missing: the publications that do not exist.
    :param lacking: the tables that each publication lacks.
    """
    row = connection.execute(
        "SELECT has_database_privilege(current_database(), 'CREATE'), quote_ident(current_user), "
        "quote_ident(current_database())"
    ).fetchone()
    allowed, role, database = row or (True, "", "")
    needed = [f"GRANT CREATE ON DATABASE {database} TO {role}"] if missing and not allowed else []
    wanted = _tables(lacking)
    owners = connection.execute(
        "SELECT c.oid, quote_ident(pg_get_userbyid(c.relowner)) FROM pg_class c WHERE c.oid = ANY (%s::oid[]) "
        "AND NOT pg_has_role(c.relowner, 'USAGE')",
        (list(wanted),),
    ).fetchall()
    others: dict[int, str] = dict(owners)
    if not others and needed:
        return [
            f"Role {role} may not create publications (it has no CREATE privilege on database {database}). Either run: "
            f"{needed[0]}; or set create_publication to false and let a DBA run: "
            + _statements(connection, pipeline, found, missing, lacking)
        ]
    if not others:
        return []
    problem = f"Only its owner may publish a table, and role {role} does not own " + ", ".join(
        table.qualified for oid, table in wanted.items() if oid in others
    )
    if lacking.keys() <= set(missing):
        made = _statements(connection, pipeline, found, missing, lacking)
        return [f"{problem}. Set create_publication to false and, {_by_owner(connection, wanted)}{made}"]
    grant = "; ".join([f"GRANT {', '.join(sorted(set(others.values())))} TO {role}", *needed])
    if any(wanted[oid].where for oid in others):
        return [f"{problem}. Run: {grant}"]  # only an owner can see whether a row filter is that of the settings
    # what the role may do itself, it does
    foreign = {
        name: tables
        for name, tables in lacking.items()
        if (needed and name in missing) or any(table.oid in others for table in tables)
    }
    made = _statements(connection, pipeline, found, missing, foreign)
    return [f"{problem}. Either run: {grant}; or, as a superuser: {made}"]


def _tables(lacking: Mapping[str, Sequence[SourceTable]]) -> dict[int, SourceTable]:
    """By oid, the tables that publications lack."""
    return {table.oid: table for tables in lacking.values() for table in tables}


def _by_owner(connection: Connection, tables: Collection[int]) -> str:
    """Who has the rights to publish tables, in front of the statements: their owner, who also needs CREATE on the
    database, which by default only the database's owner has.

    :param tables: their oids.
    """
    owners = connection.execute(
        "SELECT DISTINCT quote_ident(pg_get_userbyid(c.relowner)), "
        "has_database_privilege(c.relowner, current_database(), 'CREATE'), quote_ident(current_database()) "
        "FROM pg_class c WHERE c.oid = ANY (%s::oid[])",
        (list(tables),),
    ).fetchall()
    if len(owners) > 1:
        return "as a superuser (the tables have several owners), run: "
    if owners and not owners[0][1]:
        owner, _, database = owners[0]
        return (
            f"as the owner of the database, run: GRANT CREATE ON DATABASE {database} TO {owner}; then as the owner of "
            "the tables, run: "
        )
    return "as the owner of the tables, run: "


def _statements(
    connection: Connection,
    pipeline: Settings,
    found: Findings,
    missing: Sequence[str],
    lacking: Mapping[str, Sequence[SourceTable]],
) -> str:
    """The statements that create the publications that do not exist, and add tables to those that do, as text for a
    message.

    :param lacking: the tables that each lacks.
    """
    create = publication.statements(pipeline.publication_name, found.tables, via_root=found.via_root)
    creating = dict(zip(publication.names(pipeline.publication_name), create, strict=True))
    made = [
        creating[name] if name in missing else publication.addition(name, tables)
        for name, tables in lacking.items()
        if name in missing or tables
    ]
    return "; ".join(statement.as_string(connection) for statement in made)


def _left_out(
    connection: Connection, pipeline: Settings, existing: Sequence[publication.Published], found: Findings
) -> list[str]:
    """Warnings about operations on a table that no publication sends; pgoutput sends an operation if one of the
    publications does."""
    first, second = publication.names(pipeline.publication_name)
    warnings = []
    for table in found.tables:
        of = [p for p in existing if table.oid in p.tables]
        # the records of a table that was taken in without a key have none, also if it has a key now
        pinned = found.state.tables.get(table.oid)
        unkeyed = not table.keyed or (pinned is not None and not pinned.table.keyed)
        sent = {
            "insert": any(p.inserts for p in of),
            "update": any(p.updates for p in of) or (unkeyed and table.identity != "f") or not table.identifiable,
            "delete": any(p.deletes for p in of) or unkeyed,
            "truncate": any(p.truncates for p in of),
        }
        if of and not all(sent.values()):
            remedy = "ALTER PUBLICATION … SET (publish = …)."
            if table.identifiable and all(p.name == second for p in of):
                # it was taken in when it had neither a key nor REPLICA IDENTITY FULL
                remedy = f"As the owner of both, run: {publication.addition(first, [table]).as_string(connection)};"
            warnings.append(
                f"Publication {of[0].name!r} does not send {', '.join(k for k, v in sent.items() if not v)} of "
                f"{table.qualified}: its topic will differ from the table. {remedy}"
            )
    return warnings
