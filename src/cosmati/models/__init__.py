"""Small models to train on any machine: transformer, mixture of experts, state space, diffusion U-Net, ResNet, MLP."""
