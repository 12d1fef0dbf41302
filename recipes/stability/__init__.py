"""Stability: up to which rate a method is stable at a delay, by theory and as observed."""
