"""Expert-parallel load balancing: statistics in, a frozen ``ExpertPlan`` out, and the report that says whether to
use it."""
