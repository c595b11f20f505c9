"""Search options and compositions of providers with optuna: the space, the trials, the runs, the report."""
