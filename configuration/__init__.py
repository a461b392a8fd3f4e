"""Configurations, one per method."""
