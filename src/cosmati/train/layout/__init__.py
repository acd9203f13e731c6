"""Where a model's parameters lie, and how a step's gradients are summed: nothing else in `train` knows."""
