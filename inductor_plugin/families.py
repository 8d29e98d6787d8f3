"""Operations that are not plain dense products, each with a module of its own.

Such a module has OP (ATen's name), PROBLEM (the class of its problems), TEMPLATE (the folder of its kernels) and
RUN_TIME_SIZE (what a cache key calls the size that only the run knows), and the functions
    request_from(ATen's candidate) -> Request        build(problem, config, target name) -> CodeObject
    sane(problem, tensors, variant) -> tensors       products(problem, tensors, out) -> (Spec, operands, out) ...
    variants(problem) -> how many kinds of inputs are measured
    errors(Spec) -> what sums with fewer bits than f32 may add, see measure.check
    aten(problem) -> callable                        bind(code object, Spec) -> callable
    only_ours(request) -> whether ATen has no kernel of the operation where it is asked for
"""

from __future__ import annotations

from . import grouped, scaled, scaled_grouped

OWN = {module.OP: module for module in (scaled, grouped, scaled_grouped)}
