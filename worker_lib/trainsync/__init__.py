"""trainsync: checkpoints, weight synchronisation and recovery for RL post-training."""
