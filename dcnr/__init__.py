"""DCNR: neural networks written in YAML, trained as graphs of small agents over a message bus."""

__version__ = "0.1.0"
