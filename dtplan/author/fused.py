from __future__ import annotations


def fused_layers(model, layers, blocks, rules):
    return {}
