"""A small transformer learns to sort digits by GRPO: trainsync's example, trained for real."""
