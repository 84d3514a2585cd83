"""Ways for weights to reach the ranks, for `RolloutGroup.pull_update` and `update_weights(transport=...)`."""
