"""The plan: what training will hold, move and wait for, before it begins.

Floor 7. It may import distributed, streaming, runtime, stages, methods, schedules and tensors.
"""

from pipeback.plan.training_plan import Plan, Row, beside, plan, rows, table, title

__all__ = ["Plan", "Row", "beside", "plan", "rows", "table", "title"]
