/* A libcuda with two devices and no GPU, which writes down what it was asked. For the C++ tests and for
   Python's.

   Contexts: 0xd0 and 0xd1 are the primary contexts of devices 0 and 1. A stream names the context that stands
   at its address. Device memory is the host's, so that results can be checked, and so that a sanitizer checks
   ranges.

   An image is text with its last zero: "IMAGE 90 name:parameters ...", the architecture and the kernels with
   their parameters, one letter each: p a pointer, i an int32, l an int64, f a float32, d a float64. The
   kernel "axpy:ppplf" computes out[j] = a * x[j] + y[j] of (x, y, out, n, a); any other kernel does nothing.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static char journal[8192];
static int quiet; /* with threads: no journal */
static __thread void* current;

__attribute__((format(printf, 1, 2))) static void note(const char* format, ...) {
  char line[512];
  __builtin_va_list values;
  if (quiet) return;
  __builtin_va_start(values, format);
  vsnprintf(line, sizeof line, format, values);
  __builtin_va_end(values);
  strncat(journal, line, sizeof journal - strlen(journal) - 1);
}

void be_quiet(void) { quiet = 1; }

/* What happened since the last call. */
const char* take_journal(void) {
  static char taken[sizeof journal];
  strcpy(taken, journal);
  journal[0] = 0;
  return taken;
}

static const struct {
  int status;
  const char *name, *text;
} errors[] = {
    {1, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {3, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {101, "CUDA_ERROR_INVALID_DEVICE", "invalid device"},
    {200, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
    {209, "CUDA_ERROR_NO_BINARY_FOR_GPU", "no kernel image is available"},
    {500, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {719, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
};

static int error_at(int status) {
  for (unsigned i = 0; i < sizeof errors / sizeof *errors; ++i)
    if (errors[i].status == status) return (int)i;
  return -1;
}

int cuGetErrorName(int status, const char** text) {
  const int at = error_at(status);
  return at < 0 ? 1 : (*text = errors[at].name, 0);
}
int cuGetErrorString(int status, const char** text) {
  const int at = error_at(status);
  return at < 0 ? 1 : (*text = errors[at].text, 0);
}

static int broken;

void break_driver(int status) { broken = status; }
int cuInit(unsigned flags) { return flags != 0 ? 1 : broken; }
int cuDriverGetVersion(int* version) { return *version = 13000, 0; }
int cuDeviceGet(int* device, int ordinal) { return *device = ordinal, ordinal < 2 ? 0 : 101; }
static int arch_of(int device) { return device == 0 ? 90 : 80; }
int cuDeviceGetAttribute(int* value, int attribute, int device) {
  if (attribute == 75) return *value = arch_of(device) / 10, 0;
  if (attribute == 76) return *value = arch_of(device) % 10, 0;
  if (attribute == 8) return *value = 48 << 10, 0;
  if (attribute == 16) return *value = 132 - device, 0;
  if (attribute == 38) return *value = 50 << 20, 0;
  if (attribute == 97) return *value = 227 << 10, 0;
  return 1;
}
int cuDeviceGetCount(int* count) { return *count = 2, 0; }
int cuDeviceGetName(char* name, int size, int device) {
  note("name of %d; ", device);
  return snprintf(name, (size_t)size, "Recorded %d", arch_of(device)), 0;
}
int cuDeviceTotalMem_v2(size_t* bytes, int device) { return *bytes = (size_t)(device + 1) << 34, 0; }
int cuDeviceGetPCIBusId(char* id, int size, int device) {
  return snprintf(id, (size_t)size, "0000:0%d:00.0", device), 0;
}
int cuDevicePrimaryCtxRetain(void** context, int device) {
  *context = (void*)(0xd0ul + (unsigned long)device);
  note("retain %lx; ", (unsigned long)*context);
  return 0;
}
int cuCtxGetCurrent(void** context) { return *context = current, 0; }
int cuCtxSetCurrent(void* context) {
  current = context;
  note("bind %lx; ", (unsigned long)context);
  return 0;
}
int cuCtxGetDevice(int* device) {
  note("ask device; ");
  return *device = (int)((unsigned long)current & 0xf), current == NULL;
}
int cuStreamGetCtx(void* stream, void** context) { return *context = *(void**)stream, 0; }

/* The stream at address 1 fails. */
static int outcome(void* stream) { return stream == (void*)1 ? 719 : 0; }

int cuMemsetD8Async(uint64_t dest, unsigned char byte, size_t bytes, void* stream) {
  memset((void*)dest, byte, bytes);
  note("fill %zx with %x in %lx; ", bytes, byte, (unsigned long)current);
  return outcome(stream);
}
int cuMemsetD32Async(uint64_t dest, unsigned int word, size_t words, void* stream) {
  for (size_t i = 0; i < words; ++i) ((unsigned int*)dest)[i] = word;
  note("fill %zx words with %x in %lx; ", words, word, (unsigned long)current);
  return outcome(stream);
}

int cuThreadExchangeStreamCaptureMode(int* mode) {
  static __thread int current_mode;
  const int previous = current_mode;
  note("capture mode %d; ", *mode);
  current_mode = *mode;
  *mode = previous;
  return 0;
}

int cuMemcpyHtoDAsync_v2(uint64_t dest, const void* source, size_t bytes, void* stream) {
  (void)stream;
  memcpy((void*)dest, source, bytes);
  note("upload %zx; ", bytes);
  return 0;
}

/* Images */

typedef struct {
  char name[64];
  char parameters[64];
  int arch;
} Kernel;

typedef struct {
  int count;
  Kernel kernels[8];
} Library;

int cuLibraryLoadData(void** library, const void* code, void* jit_options, void** jit_values,
                      unsigned jit_count, void* options, void** values, unsigned count) {
  int arch, used;
  const char* at = code;
  (void)jit_options, (void)jit_values, (void)options, (void)values;
  if (jit_count || count) return 1;
  if (sscanf(at, "IMAGE %d%n", &arch, &used) != 1) return note("refuse image; "), 200;
  Library* made = calloc(1, sizeof *made);
  for (at += used; made->count < 8; at += used, ++made->count) {
    Kernel* kernel = &made->kernels[made->count];
    if (sscanf(at, " %63[^: ]:%63[a-z]%n", kernel->name, kernel->parameters, &used) != 2) break;
    kernel->arch = arch;
  }
  note("load image of %d kernels; ", made->count);
  *library = made;
  return 0;
}
int cuLibraryUnload(void* library) { return note("unload image; "), free(library), 0; }
int cuLibraryGetKernel(void** kernel, void* library, const char* name) {
  Library* from = library;
  for (int i = 0; i < from->count; ++i)
    if (!strcmp(from->kernels[i].name, name)) return *kernel = &from->kernels[i], 0;
  return 500;
}
int cuKernelGetFunction(void** function, void* kernel) {
  const Kernel* of = kernel;
  *function = kernel;
  if (current == NULL) return 1;
  if (((unsigned long)current & 0xf0) == 0xd0 && of->arch != arch_of((int)((unsigned long)current & 0xf)))
    return 209;
  note("load %s in %lx; ", of->name, (unsigned long)current);
  return 0;
}
static size_t size_of(char parameter) { return parameter == 'i' || parameter == 'f' ? 4 : 8; }
int cuKernelGetParamInfo(void* kernel, size_t index, size_t* offset, size_t* size) {
  const char* parameters = ((const Kernel*)kernel)->parameters;
  if (index >= strlen(parameters)) return 1;
  *offset = 8 * index;
  *size = size_of(parameters[index]);
  return 0;
}

typedef struct {
  unsigned grid[3], block[3], shared_bytes;
  void *stream, *attributes;
  unsigned attribute_count;
} LaunchConfig;

static void axpy(void** params) {
  const float *x = *(float**)params[0], *y = *(float**)params[1], a = *(float*)params[4];
  float* out = *(float**)params[2];
  const int64_t n = *(int64_t*)params[3];
  for (int64_t i = 0; i < n; ++i) out[i] = a * x[i] + y[i];
}

int cuLaunchKernelEx(const LaunchConfig* config, void* function, void** params, void** extra) {
  const Kernel* kernel = function;
  /* A launch goes to the stream's context; the default stream's is the current one. */
  void* context = (unsigned long)config->stream > 2 ? *(void**)config->stream : current;
  if (extra || config->attributes || config->attribute_count || config->shared_bytes) return 1;
  if (config->block[0] != 1 || config->block[1] != 1 || config->block[2] != 1) return 1;
  note("launch %s on %u,%u,%u in %lx bound %lx", kernel->name, config->grid[0], config->grid[1],
       config->grid[2], (unsigned long)context, (unsigned long)current);
  for (const char* at = kernel->parameters; *at; ++at) {
    void* value = params[at - kernel->parameters];
    if (*at == 'i') note(" %d", *(int32_t*)value);
    if (*at == 'l') note(" %ld", *(int64_t*)value);
    if (*at == 'f') note(" %g", *(float*)value);
    if (*at == 'd') note(" %g", *(double*)value);
    if (*at == 'p') note(" p");
  }
  note("; ");
  if (!strcmp(kernel->name, "axpy") && !strcmp(kernel->parameters, "ppplf")) axpy(params);
  return outcome(config->stream);
}

/* Events, and whose memory an address is */

int cuEventCreate(void** event, unsigned flags) { return *event = malloc(1), flags != 2; }
int cuEventRecord(void* event, void* stream) {
  (void)event;
  note("record on %lx; ", (unsigned long)stream);
  return outcome(stream);
}
int cuStreamWaitEvent(void* stream, void* event, unsigned flags) {
  (void)event;
  note("wait on %lx; ", (unsigned long)stream);
  return flags != 0;
}
int cuEventDestroy_v2(void* event) { return free(event), 0; }

static struct {
  uint64_t address;
  int device;
} owned;

void own_address(uint64_t address, int device) { owned.address = address, owned.device = device; }
int cuPointerGetAttribute(void* value, int attribute, uint64_t address) {
  if (attribute != 9 || address != owned.address) return 1;
  return *(int*)value = owned.device, 0;
}
