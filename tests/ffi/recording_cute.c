/* A libcute_dsl_runtime that knows the functions of cute_object.c, over the driver of recording_driver.c. */
#include "cute_object.c"
#include "recording_driver.c"

typedef struct {
  int unused;
} Module;

typedef struct {
  const char *name, *version;
  void (*run)(void** args, int32_t count);
} Function;

static const Function functions[] = {
    {"scale", scale_version, _mlir_scale__mlir_ciface_cutlass_scale},
    {"old", old_version, _mlir_old__mlir_ciface_cutlass_old},
};

const char* CuteDSLRT_GetErrorName(int error) {
  if (error == 1) return "CuteDSLRT_Error_CudaError";
  return error == 2 ? "CuteDSLRT_Error_InvalidBinary" : "CuteDSLRT_Error_InvalidVersion";
}
const char* CuteDSLRT_GetErrorString(int error) { return error == 2 ? "Invalid binary bytes" : "no"; }

int CuteDSLRT_Module_Create_From_Bytes(Module** made, const unsigned char* bytes, size_t size,
                                       const char** libraries, size_t count) {
  /* As the real one: a file that is cut off has no table of sections. */
  uint64_t sections;
  uint16_t sections_count;
  if (libraries || count || size < 64) return 2;
  memcpy(&sections, bytes + 40, sizeof sections);
  memcpy(&sections_count, bytes + 60, sizeof sections_count);
  if (sections + 64ul * sections_count > size) return 2;
  note("load object; ");
  *made = calloc(1, sizeof(Module));
  return 0;
}
int CuteDSLRT_Module_Destroy(Module* module) { return note("unload object; "), free(module), 0; }

int CuteDSLRT_Module_Get_Function(const Function** found, Module* module, const char* prefix) {
  (void)module;
  for (unsigned i = 0; i < sizeof functions / sizeof *functions; ++i) {
    if (strcmp(functions[i].name, prefix)) continue;
    if (strcmp(functions[i].version, "1.1")) return 4;
    *found = &functions[i];
    return note("get %s in %lx; ", prefix, (unsigned long)current), 0;
  }
  abort(); /* as the real one */
}

int CuteDSLRT_Function_Run(void* function, void** args, size_t count) {
  const Function* of = function;
  note("run %s bound %lx; ", of->name, (unsigned long)current);
  of->run(args, (int32_t)count);
  return *(int32_t*)args[count - 1] != 0;
}
