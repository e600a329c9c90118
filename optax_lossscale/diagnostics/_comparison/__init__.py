"""Says by running which product loses the precision of the results."""
