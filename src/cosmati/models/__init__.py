"""Small models to train on any machine: a byte-level GPT, a ResNet and an MLP."""
