"""Which columns have other names than at another moment. They are known by their numbers in PostgreSQL's catalog, which
messages do not have, and else by their order: it stays as it is, and new columns come last."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

#: by the name of a column, the names that it has, or may have, at the other moment; none of a column that has one name
Names = Mapping[str, Sequence[str]]
#: columns' numbers and names
Numbered = Sequence[tuple[int, str]]


def by_number(columns: Numbered, others: Numbered) -> Names:
    """The columns that have other names, with these.

    :param columns: numbers and names; ``others`` are those of the other moment.
    """
    named = dict(others)
    return {name: [named[number]] for number, name in columns if named.get(number, name) != name}


def by_order(columns: Sequence[str], others: Sequence[str]) -> Names:
    """The columns that may have had other names, with all that these may be.

    A name that both have is taken for the same column as long as nothing speaks against it.

    :param columns: the names of all columns; ``others`` are those of an earlier moment.
    """
    both, any_of_them = {*columns} & {*others}, dict.fromkeys(columns, others)
    if [name for name in columns if name in both] != [name for name in others if name in both]:
        return any_of_them  # names were exchanged
    found: dict[str, list[str]] = {}
    here, there = _between(columns, both), _between(others, both)
    for place, (some, theirs) in enumerate(zip(here, there, strict=True)):
        if len(some) > len(theirs) and place < len(here) - 1:
            return any_of_them  # no column comes there
        found |= {name: [*theirs, name] for name in some if theirs}
    return found


def by_later_order(columns: Sequence[str], others: Sequence[str]) -> Names:
    """The same for names that the columns may have got since.

    :param columns: the names of all columns; ``others`` are those of a later moment.
    """
    found: dict[str, list[str]] = {}
    for later, names in by_order(others, columns).items():
        for name in names:
            found.setdefault(name, [name]).append(later)
    return found


def _between(columns: Sequence[str], ends: set[str]) -> list[list[str]]:
    """The names before the first one of ``ends``, between each two of them, and behind the last."""
    found: list[list[str]] = [[]]
    for name in columns:
        if name in ends:
            found.append([])
        else:
            found[-1].append(name)
    return found
