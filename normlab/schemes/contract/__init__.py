"""The interface of a scheme: `Scheme`, `BoundScheme`, blocks, the parts to build them from, and theoretical laws."""
