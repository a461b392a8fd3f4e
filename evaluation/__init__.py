"""Evaluation: metrics, reports, plots and the evaluate command."""
