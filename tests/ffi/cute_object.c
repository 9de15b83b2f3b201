/* An object of the form that CuTe-DSL exports, with functions that work on the host: what the "cute" step
   hands to the runtime library, and what the stand-in for that library runs.

   scale computes y[i] = a * x[i] of (x, y, n, a, stream, status), and ends with the status that it finds at
   the stream's address, or 0 on the default stream. */
#include <stdint.h>

#define FUNCTION(name, interface_version)                                            \
  const char name##_version[] = interface_version;                                   \
  const char name##_function_name[] = "_mlir_" #name "__mlir_ciface_cutlass_" #name; \
  const char name##_args_spec[] = "";                                                \
  const char name##_kernel_info[] = "{}";                                            \
  void _mlir_##name##__mlir_ciface_cutlass_##name(void** args, int32_t count)

FUNCTION(scale, "1.1") {
  (void)count;
  const float *x = *(float**)args[0], a = *(float*)args[3];
  float* y = *(float**)args[1];
  const int32_t n = *(int32_t*)args[2], *stream = *(int32_t**)args[4];
  for (int32_t i = 0; i < n; ++i) y[i] = a * x[i];
  *(int32_t*)args[5] = stream ? *stream : 0;
}

FUNCTION(old, "9.9") { (void)args, (void)count; }
