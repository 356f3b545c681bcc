"""The snapshot: its driver, its plan, and the lanes that read and publish ranges of tables."""
