"""Benchmarks: ``make bench`` runs all, ``make bench BENCH=name`` one; docs/performance.md says what the figures
mean."""
