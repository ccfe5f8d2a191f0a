"""Programs that once broke a promise; each must stay refused."""
