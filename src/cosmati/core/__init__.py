"""What everything else is made of: batch, lineage, clock, plan, method, state, randomness."""
