"""The parts of the report: reading and grouping runs, numbers, tables, pictures."""
