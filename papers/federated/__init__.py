"""Federated MNIST with unlike users: small and large clipping norms, privacy for whole users."""
