"""PostgreSQL: connections, catalog, publications, slots, snapshots, COPY and the replication protocol."""
