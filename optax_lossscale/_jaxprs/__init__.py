"""Version-independent access to jaxprs, the programs that JAX traces.

A jaxpr is a list of equations (eqns). An equation is a primitive with
parameters, and a parameter may contain further jaxprs. JAX renames parameters
without notice, so the modules derive a fact from types where that is possible,
and have a fallback for each parameter that they read by name. Parsers return
``None`` for an equation that they don't recognize, and callers treat it as
opaque: they neither enter nor change it.

The exception is ``_primitives.get_aval_varying_axes``: it raises an error,
since a guess would let the devices of a mesh diverge.
``tests/package/test_jax.py`` checks the facts that the modules rely on, and
fails first with a new JAX.

The README of this package describes the data types, and how to add support for
a higher-order primitive.
"""
