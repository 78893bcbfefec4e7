"""What several tests share: tiny checkpoints, scripted executors, a fake engine."""
