"""Formulas of model families: from transformers' configuration to the shape of the model, parameter by parameter.

One function per kind of model builds the tree of modules that transformers' class builds, with its names and classes
(those of transformers 5.24); `spec_of` makes a ModelSpec of it. Needs neither torch nor transformers.
"""
