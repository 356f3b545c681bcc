"""The topics that the records of outboxes choose themselves, by a row's column or by a message."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

from airflow_bottledwater.encoding import names
from airflow_bottledwater.encoding.mapping import TableMapping
from airflow_bottledwater.errors import CredentialsRefused, Outage
from airflow_bottledwater.model.relation import SourceTable
from airflow_bottledwater.publish.session import PublishSession

#: makes the topics of an outbox that are missing, with this pipeline as their owner; returns why some cannot be
MakeTopics = Callable[[Sequence[str], SourceTable], dict[str, str]]
#: topics of pipelines themselves, and of Kafka
_OURS = re.compile(r"(.*\.)?_bottledwater.*|__.*|\.|\.\.")


class ChosenTopics:
    """Takes the topics that records choose into a session, between two transactions.

    :param make: see :data:`MakeTopics`.
    """

    def __init__(self, session: PublishSession, make: MakeTopics) -> None:
        self.session, self._make = session, make
        self._named = frozenset(TableMapping.of(session.pipeline).named_topics)

    def problem(self, topic: str) -> str:
        """Why no record may choose a topic, whatever Kafka says of it; empty if one may."""
        others = topic in self.session.index and topic not in self.session.chosen
        if _OURS.fullmatch(topic) or topic in self._named or others:
            return f"it chooses topic {topic!r}, which is not for records of an outbox"
        if len(topic) > names.MAX_TOPIC_LENGTH:
            return f"it chooses a topic with more than {names.MAX_TOPIC_LENGTH} characters"
        return ""

    def take(self, topics: Iterable[str], table: SourceTable) -> dict[str, str]:
        """Make topics where they are missing, and take them into the session; returns why some cannot be.

        :param topics: those without a :meth:`problem`.
        :param table: the outbox.
        :raises Refused: Kafka denies it.
        """
        if not (wanted := sorted(set(topics) - self.session.chosen)):
            return {}
        refused = self._made(wanted, table)
        there = [name for name in wanted if name not in refused]
        if there:
            self.session.include(there)
        return refused

    def _made(self, wanted: Sequence[str], table: SourceTable) -> dict[str, str]:
        """Make topics, see :data:`MakeTopics`; outages are waited out."""
        while True:
            try:
                return self._make(wanted, table)
            except (Outage, CredentialsRefused) as error:
                self.session.backoff.wait(error)
