"""Statistics of a ladder: gaps, intervals, trends, forecasts and verdicts, from rows alone and without torch."""
