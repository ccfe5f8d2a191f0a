"""CIFAR-10 with a network that was trained on public images, section 5.2 of the paper: `clipwise reproduce cifar10`."""
