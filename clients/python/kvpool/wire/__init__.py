"""How domain values travel: protos, statuses, page frames and descriptor frames."""
