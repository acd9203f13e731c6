"""Train PyTorch models faster by composing training methods, and govern what they learn while they do."""
