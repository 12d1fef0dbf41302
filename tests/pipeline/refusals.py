"""Pipelines that should be refused, and that nothing was trained then."""

from tests.laws.cases import pipeline


def build(model, method="pb", optimizer="momentum", **options):
    return pipeline(model, method, optimizer, **options)
