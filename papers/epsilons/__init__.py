"""The five epsilons that the paper reports, checked by every accountant."""
