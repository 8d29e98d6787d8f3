"""MLIR sources for IREE's compiler, one dispatch each: matmul, scaled matmul, softmax, convolution."""

MATMUL = """
func.func @f(%a: tensor<{M}x{K}x{T}>, %b: tensor<{N}x{K}x{T}>) -> tensor<{M}x{N}xf32> {{
  %z = arith.constant 0.0 : f32
  %e = tensor.empty() : tensor<{M}x{N}xf32>
  %i = linalg.fill ins(%z : f32) outs(%e : tensor<{M}x{N}xf32>) -> tensor<{M}x{N}xf32>
  %c = linalg.matmul
    indexing_maps = [affine_map<(m, n, k) -> (m, k)>, affine_map<(m, n, k) -> (n, k)>, affine_map<(m, n, k) -> (m, n)>]
    ins(%a, %b : tensor<{M}x{K}x{T}>, tensor<{N}x{K}x{T}>) outs(%i : tensor<{M}x{N}xf32>) -> tensor<{M}x{N}xf32>
  return %c : tensor<{M}x{N}xf32>
}}
"""

SCALED = """
#x = affine_map<(m, n, k, l) -> (m, k, l)>
#y = affine_map<(m, n, k, l) -> (n, k, l)>
#s = affine_map<(m, n, k, l) -> (m, k)>
#t = affine_map<(m, n, k, l) -> (n, k)>
#o = affine_map<(m, n, k, l) -> (m, n)>
func.func @f(%ab: tensor<{M}x{G}x16xi8>, %bb: tensor<{N}x{G}x16xi8>,
             %sab: tensor<{M}x{G}xi8>, %sbb: tensor<{N}x{G}xi8>) -> tensor<{M}x{N}xf32> {{
  %a = iree_tensor_ext.bitcast %ab : tensor<{M}x{G}x16xi8> -> tensor<{M}x{G}x32xf4E2M1FN>
  %b = iree_tensor_ext.bitcast %bb : tensor<{N}x{G}x16xi8> -> tensor<{N}x{G}x32xf4E2M1FN>
  %sa = iree_tensor_ext.bitcast %sab : tensor<{M}x{G}xi8> -> tensor<{M}x{G}xf8E8M0FNU>
  %sb = iree_tensor_ext.bitcast %sbb : tensor<{N}x{G}xi8> -> tensor<{N}x{G}xf8E8M0FNU>
  %z = arith.constant 0.0 : f32
  %e = tensor.empty() : tensor<{M}x{N}xf32>
  %i = linalg.fill ins(%z : f32) outs(%e : tensor<{M}x{N}xf32>) -> tensor<{M}x{N}xf32>
  %c = linalg.generic {{indexing_maps = [#x, #y, #s, #t, #o],
      iterator_types = ["parallel", "parallel", "reduction", "reduction"]}}
      ins(%a, %b, %sa, %sb : tensor<{M}x{G}x32xf4E2M1FN>, tensor<{N}x{G}x32xf4E2M1FN>, tensor<{M}x{G}xf8E8M0FNU>,
          tensor<{N}x{G}xf8E8M0FNU>) outs(%i : tensor<{M}x{N}xf32>) {{
    ^bb0(%p: f4E2M1FN, %q: f4E2M1FN, %u: f8E8M0FNU, %v: f8E8M0FNU, %acc: f32):
      %1 = arith.scaling_extf %p, %u : f4E2M1FN, f8E8M0FNU to f32
      %2 = arith.scaling_extf %q, %v : f4E2M1FN, f8E8M0FNU to f32
      %3 = arith.mulf %1, %2 : f32
      %4 = arith.addf %acc, %3 : f32
      linalg.yield %4 : f32
  }} -> tensor<{M}x{N}xf32>
  return %c : tensor<{M}x{N}xf32>
}}
"""

SOFTMAX = """
func.func @f(%x: tensor<{M}x{N}xf32>) -> tensor<{M}x{N}xf32> {{
  %e = tensor.empty() : tensor<{M}x{N}xf32>
  %y = linalg.softmax dimension(1) ins(%x : tensor<{M}x{N}xf32>) outs(%e : tensor<{M}x{N}xf32>) -> tensor<{M}x{N}xf32>
  return %y : tensor<{M}x{N}xf32>
}}
"""

CONV = """
func.func @f(%x: tensor<1x{H}x{W}x{C}xf16>, %w: tensor<3x3x{C}x{F}xf16>) -> tensor<1x{P}x{Q}x{F}xf32> {{
  %z = arith.constant 0.0 : f32
  %e = tensor.empty() : tensor<1x{P}x{Q}x{F}xf32>
  %i = linalg.fill ins(%z : f32) outs(%e : tensor<1x{P}x{Q}x{F}xf32>) -> tensor<1x{P}x{Q}x{F}xf32>
  %y = linalg.conv_2d_nhwc_hwcf {{dilations = dense<1> : tensor<2xi64>, strides = dense<1> : tensor<2xi64>}}
    ins(%x, %w : tensor<1x{H}x{W}x{C}xf16>, tensor<3x3x{C}x{F}xf16>)
    outs(%i : tensor<1x{P}x{Q}x{F}xf32>) -> tensor<1x{P}x{Q}x{F}xf32>
  return %y : tensor<1x{P}x{Q}x{F}xf32>
}}
"""
